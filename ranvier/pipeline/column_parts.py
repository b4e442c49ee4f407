"""Messages between nodes of stages whose columns all hold the same activations: each column sends its part, and the
receivers gather the parts over links within their node.

    column 0   x ------------------------------> x          within a node, and of small tensors
    column 1   x ------------------------------> x

    column 0   x[: n / 2] --> x[: n / 2] -- gather --> x     between nodes
    column 1   x[n / 2 :] --> x[n / 2 :] -- gather --> x

(Narayanan et al., 2021, section 4.1.) What is cut says so by its name, so receivers decide nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import Tensor

from ranvier.comm.message import Message, MessageKind
from ranvier.cost.stage_messages import SMALLEST_IN_PARTS, sends_parts
from ranvier.mesh import Mesh
from ranvier.tensor.boundaries import is_replicated_name
from ranvier.tensor.mesh import TensorMesh
from ranvier.world import World

_PART = "|part of "


class ColumnParts:
    """Cuts and gathers on one rank. mesh: None on stages of one rank."""

    def __init__(self, tensor_mesh: TensorMesh | None, mesh: Mesh, world: World) -> None:
        self._tensor_mesh, self._mesh, self._world = tensor_mesh, mesh, world
        self._to: dict[int, bool] = {}
        """Rank -> whether parts are sent there."""

    def _pays(self, destination: int) -> bool:
        columns, others = (self._mesh.group(rank, *self._mesh.over(splits_features=True))
                           for rank in (self._world.rank, destination))
        return self._world.device.type == "cuda" and sends_parts(columns, others, self._world.local_ranks)

    def cut(self, message: Message, destination: int) -> Message:
        """The part of a message that this column sends."""
        mesh = self._tensor_mesh
        if (mesh is None or mesh.num_cols == 1 or mesh.activations.name != "whole"
                or message.kind not in (MessageKind.FORWARD, MessageKind.BACKWARD)):
            return message
        if destination not in self._to:
            self._to[destination] = self._pays(destination)
        if not self._to[destination]:
            return message
        tensors, names = {}, dict[str, str]()
        for name, tensor in message.tensors.items():
            if (tensor.is_floating_point() and tensor.nbytes >= SMALLEST_IN_PARTS and is_replicated_name(name)
                    and tensor.numel() % mesh.num_cols == 0):
                names[name] = f"{name}{_PART}{' '.join(map(str, tensor.shape))}"
                tensor = tensor.reshape(mesh.num_cols, -1)[mesh.over_cols.index]
            tensors[names.get(name, name)] = tensor
        return replace(message, tensors=tensors,
                       requires_grad=frozenset(names.get(name, name) for name in message.requires_grad))

    def gathered(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Gather the whole tensors of a message that has arrived; all columns call this for the same messages in the
        same order."""
        if self._tensor_mesh is None:
            return tensors
        found, under_way = {}, []
        for full, tensor in tensors.items():
            name, is_part, shape = full.partition(_PART)
            if is_part:
                whole = tensor.new_empty([int(size) for size in shape.split()])
                under_way.append(self._tensor_mesh.over_cols.all_gather(whole, tensor.contiguous()))
                tensor = whole
            found[name] = tensor
        for work in under_way:
            work.wait()
        return found


def whole_names(names: Iterable[str]) -> frozenset[str]:
    """The names of tensors that some of these are parts of, and the others."""
    return frozenset(name.partition(_PART)[0] for name in names)
