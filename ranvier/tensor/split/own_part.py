"""The shard of a layer's parameters that one rank holds."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import nn

from ranvier.layout import Split
from ranvier.tensor.layer_order import Pass
from ranvier.tensor.mesh import TensorMesh
from ranvier.tensor.splittable import Layer

_L = TypeVar("_L", bound=Layer)


def own_part(parameter: nn.Parameter, split: Split, mesh: TensorMesh) -> nn.Parameter:
    """This rank's shard of a whole parameter; an empty one on the default device where that is on the meta device."""
    box = split.on(mesh.num_cols).box(parameter.shape, (mesh.num_rows, mesh.num_cols), (mesh.row, mesh.col))
    if parameter.is_meta:
        values = torch.empty([stop - start for start, stop in box], dtype=parameter.dtype)
    else:
        values = parameter.detach()[tuple(slice(start, stop) for start, stop in box)].clone()
    return nn.Parameter(values, requires_grad=parameter.requires_grad)


def _own_parts(layer: Layer, mesh: TensorMesh) -> dict[str, nn.Parameter | None]:
    splits = layer.splits(mesh.settings)
    return {name: None if parameter is None else own_part(parameter, splits[name], mesh)
            for name, parameter in layer._parameters.items()}


class SplitLayer(nn.Module):
    """Base of tensor-parallel layers: this rank's shards of a layer's parameters, and its place on the mesh."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, layer: Layer, mesh: TensorMesh) -> None:
        super().__init__()
        self.mesh = mesh
        for name, parameter in _own_parts(layer, mesh).items():
            self.register_parameter(name, parameter)

    def begins(self, what: Pass) -> None:
        """This layer communicates over the mesh, which all ranks must do in the same order. Its forward is recorded by
        `GuardedForward`."""
        if self.mesh.num_rows > 1 or self.mesh.num_cols > 1:
            self.mesh.order.record(self.__dict__.get("_split_name", type(self).__name__), what)


def with_own_parts(layer: _L, mesh: TensorMesh) -> _L:
    """A copy of a layer that computes on the mesh what it computes unsplit, with parameters of its own."""
    copied = copy.copy(layer)
    copied._parameters = _own_parts(layer, mesh)
    return copied
