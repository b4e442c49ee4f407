"""What every split layer begins with: its own part of a whole layer's parameters, and its place on the mesh."""

from __future__ import annotations

import torch
from torch import nn

from ranvier.layout import Split
from ranvier.tensor.layers import Layer
from ranvier.tensor.mesh import TensorMesh


def own_part(parameter: nn.Parameter, split: Split, mesh: TensorMesh) -> nn.Parameter:
    """This rank's part of a whole parameter."""
    box = split.box(parameter.shape, (mesh.num_rows, mesh.num_cols), (mesh.row, mesh.col))
    if parameter.is_meta:
        values = torch.empty([stop - start for start, stop in box], dtype=parameter.dtype)
    else:
        values = parameter.detach()[tuple(slice(start, stop) for start, stop in box)].clone()
    return nn.Parameter(values, requires_grad=parameter.requires_grad)


class SplitLayer(nn.Module):
    """A layer's own part of its parameters, and its place."""

    def __init__(self, layer: Layer, mesh: TensorMesh) -> None:
        super().__init__()
        self.mesh = mesh
        splits = layer.splits(mesh.settings)
        for name, parameter in layer._parameters.items():
            self.register_parameter(name, None if parameter is None else own_part(parameter, splits[name], mesh))
