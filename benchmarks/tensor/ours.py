"""Ranvier's three schemes on a row x col mesh, over Gloo or MPI: the layers alone, without engine and optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.pipeline.contender import Place
from benchmarks.tensor.autograd_stack import saved_bytes
from benchmarks.tensor.contender import Contender
from benchmarks.tensor.stem import Layers, Stem
from ranvier.comm.mpi_backend import MPIBackend
from ranvier.comm.protocol import Backend, Group
from ranvier.comm.torch_backend import TorchBackend
from ranvier.config.run import TensorParallel as Settings
from ranvier.layout import Split, box_size
from ranvier.mesh import Mesh
from ranvier.tensor.layers import block_splits
from ranvier.tensor.mesh import TensorMesh
from ranvier.tensor.overlapped_transfers import WeightUse
from ranvier.tensor.split.layers import split_layers
from ranvier.tensor.split.linear import SplitLinear


@contextmanager
def open_ours(stem: Stem, contender: Contender, place: Place) -> Iterator[OurStack]:
    """Settings: those of `ranvier.config.run.TensorParallel`."""
    device = torch.device("cpu")
    if contender.transport == "mpi":
        backend: Backend = MPIBackend(device)
    else:
        backend = TorchBackend(place.rank, place.size, place.store, device, 300.0)
    try:
        row, col = contender.mesh
        yield OurStack(stem, Mesh(row=row, col=col), Settings(**contender.settings), backend)
    finally:
        backend.close()


class _ImmediateWeightGradients:
    """Adds weight gradients to those of the parameters during the backward, as in a stage with one microbatch."""

    defers, forward_bytes = False, 0

    def in_pass(self) -> bool:
        """Every pass is the stage's own."""
        return True


class OurStack:
    """A `Stack` of split layers."""

    def __init__(self, stem: Stem, mesh: Mesh, settings: Settings, backend: Backend) -> None:
        self._mesh, self._backend = mesh, backend
        over_rows, over_cols = (backend.group(axis, mesh.groups(axis)) for axis in ("row", "col"))
        self._all: Group = backend.group("all", [range(mesh.size)])
        self.tensor_mesh = TensorMesh(over_rows, over_cols, settings)
        whole = stem.network()
        self._splits = block_splits("stem", whole, settings)
        self._shapes = {name: tuple(parameter.shape) for name, parameter in whole.named_parameters()}
        self.network: nn.Module | Layers = whole
        if mesh.size > 1:
            self.network = split_layers(whole, self.tensor_mesh, "stem")
        self._parameters = dict(self.network.named_parameters())
        for layer in self.network.modules():
            if isinstance(layer, SplitLinear):
                layer.weight_gradients, layer.has_own_weights = _ImmediateWeightGradients(), True
        for parameter in self._parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        self._summed = {axis: [parameter for name, parameter in self._parameters.items()
                               if axis in self._splits[name].summed] for axis in ("row", "col")}
        self._x: Any = None
        self._y: Any = None
        self._uses: dict[str, list[WeightUse]] = {"forward": [], "backward": []}

    def share(self, whole: Tensor) -> Tensor:
        at = self._mesh.coordinates(self._backend.rank)
        mine = whole.chunk(self._mesh.row)[at.row]
        for dim in self.tensor_mesh.activations.cut_dims:
            mine = mine.chunk(self._mesh.col, dim + 1)[at.col]
        return mine.clone()

    def forward(self, x_local: Tensor) -> Tensor:
        self._x = x_local.detach().requires_grad_()
        with self.tensor_mesh.one_pass(self._uses["forward"]):
            self._y = self.network(self._x)
        return self._y.detach()

    def backward(self, dy_local: Tensor) -> Tensor:
        x, y, self._x, self._y = self._x, self._y, None, None
        with self.tensor_mesh.one_pass(self._uses["backward"]):
            y.backward(dy_local)
        return x.grad

    def finish(self) -> None:
        """Sum gradients of all replicated parameters in one collective, as the engine does once a step."""
        groups = {"row": self.tensor_mesh.over_rows, "col": self.tensor_mesh.over_cols}
        for axis, parameters in self._summed.items():
            if parameters and len(groups[axis].ranks) > 1:
                flat = torch.cat([parameter.grad.flatten() for parameter in parameters])
                groups[axis].all_reduce(flat).wait()
                for parameter, total in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
                    parameter.grad.copy_(total.view_as(parameter))

    def clear(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad.zero_()

    def wait(self) -> None:
        self._all.barrier()

    def saved_bytes(self, x_local: Tensor) -> int:
        return saved_bytes(self, x_local, self._parameters.values())

    def assemble(self, local: Tensor) -> Tensor:
        cut = self.tensor_mesh.activations.cut_dims
        parts = self._gathered(local).unflatten(0, (self._mesh.row, self._mesh.col))
        rows = [torch.cat(list(row), cut[0] + 1) if cut else row[0] for row in parts]
        return torch.cat(rows)

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._parameters.items():
            split: Split = self._splits[name]
            whole = parameter.new_empty(self._shapes[name])
            boxes = [split.box(whole.shape, (self._mesh.row, self._mesh.col), (at.row, at.col))
                     for at in map(self._mesh.coordinates, range(self._mesh.size))]
            assert len(set(map(box_size, boxes))) == 1
            for box, part in zip(boxes, self._gathered(parameter.grad), strict=True):
                whole[tuple(slice(start, stop) for start, stop in box)] = part
            yield name, whole

    def _gathered(self, local: Tensor) -> Tensor:
        """[ranks, *local.shape]."""
        parts = local.new_empty(self._mesh.size, *local.shape)
        self._all.all_gather(parts, local.contiguous()).wait()
        return parts
