"""Connections of one rank of an engine to the others: groups, the transport of messages, the order of a stage.

All ranks open the same connections in the same order, which is that of the calls here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor, nn
from torch.autograd.graph import increment_version

from ranvier.comm.board import Board
from ranvier.comm.message import Message, MessageKind
from ranvier.comm.protocol import Group, Transport
from ranvier.config.run import TensorParallel
from ranvier.cost.stage_messages import SMALLEST_IN_PARTS, sends_parts
from ranvier.errors import ConfigError, TransportError
from ranvier.layout import Layout, TensorAxis
from ranvier.mesh import Mesh
from ranvier.pipeline.inbox import Inbox
from ranvier.pipeline.replica_comparison import ReplicaComparison
from ranvier.pipeline.same_on_ranks import check_same
from ranvier.pipeline.sequencer import Sequencer
from ranvier.schedule.spans import Timeline
from ranvier.tensor.boundaries import is_replicated_name
from ranvier.tensor.mesh import TensorMesh
from ranvier.tensor.quantized_weight import stored_tensors
from ranvier.world import World


class Connections:
    """The connections of one rank, opened in two steps: the blocks that are built in between determine the peers."""

    data: Group
    """The ranks that hold the same part of the same stage."""
    all: Group
    board: Board
    sequencer: Sequencer
    transport: Transport
    inbox: Inbox

    def __init__(self, world: World, layout: Layout, tensor: TensorParallel, *, check_order: bool) -> None:
        self._world, self._mesh, self._check_order = world, layout.mesh, check_order
        self._placement, self.rank, self.device = layout.stages, world.rank, world.device
        at, mesh, stages = layout.mesh.coordinates(world.rank), layout.mesh, layout.stages
        self._ranks = [mesh.rank(mesh.place(replica=at.replica, pipeline_rank=stages.rank_of(stage),
                                            position=at.position)) for stage in range(stages.num_stages)]
        self._groups: list[Group] = []
        self.replicas: ReplicaComparison | None = None
        """Set once replicas have been compared."""
        self.sums: dict[tuple[TensorAxis, ...], Group] = {}
        """Axes of the tensor mesh -> the ranks that sum gradients whose parts are spread along these axes."""
        self.splits: dict[tuple[TensorAxis, ...], Group] = {}
        """Axes of the tensor mesh -> the ranks that share a parameter which is split along these, once opened."""
        self.tensor_mesh = self._open_tensor_mesh(layout, tensor)
        """The groups of this rank's row and column; None if a stage is one rank."""
        self.column_parts = ColumnParts(self.tensor_mesh, layout.mesh, world)

    def _open_tensor_mesh(self, layout: Layout, tensor: TensorParallel) -> TensorMesh | None:
        mesh, backend = self._mesh, self._world.backend
        if mesh.stage_size == 1:
            return None
        over_rows, over_cols = (backend.group(" and ".join(axes), mesh.groups(*axes)) for axes in (
            mesh.over(shards_parameters=True), mesh.over(splits_features=True)))
        self._groups += [over_rows, over_cols]
        for axes in sorted({parameter.summed for parameter in layout.parameters} - {()}):
            over = *mesh.replica_axes, *axes
            self.sums[axes] = backend.group(" and ".join(over), mesh.groups(*over))
        self._groups += self.sums.values()
        return TensorMesh(over_rows, over_cols, tensor, device=self._world.device.type, check_order=self._check_order)

    has_peers = False
    """Whether messages of other ranks may arrive."""

    @property
    def needs_progress(self) -> bool:
        """Whether messages or collectives of a step move only when this rank lets them."""
        return self.tensor_mesh is not None or len(self.data.ranks) > 1 or (
            self.has_peers and self.transport.needs_progress)

    def open(self, peers: Iterable[int], *, capacity_bytes: int, timeline: Timeline, timeout_seconds: float,
             other: Callable[[Message], None], settings: Mapping[str, str]) -> None:
        """Open everything but the tensor mesh. Raises ConfigError for settings that differ between ranks.

        peers: ranks of other stages with which this rank exchanges messages, besides its neighbours. capacity_bytes:
        size of the largest message. other: takes messages that are not part of the pipeline's flow. settings: this
        rank's, as for `same_on_ranks.check_same`.
        """
        world, mesh, rank = self._world, self._mesh, self._world.rank
        self.board = Board(world.store, rank, mesh, hang=world.hang and world.hang())
        if self.tensor_mesh is not None:
            order = self.tensor_mesh.order
            self.board.place = lambda: order.place
        self.all = world.backend.group("all", [range(mesh.size)])
        of_ranks = self.all.gather_objects({"": os.urandom(4).hex(), **settings})
        self.board.engine = of_ranks[0][""]
        try:
            check_same([{name: found[name] for name in settings} for found in of_ranks], rank)
        except ConfigError:
            self.board.close()
            raise
        self.data = self.group(" and ".join(mesh.replica_axes), mesh.replica_axes)
        self._timeout_seconds = timeout_seconds
        self.sequencer = Sequencer(mesh, rank, world.backend, self.board, timeout_seconds, self._check_order)
        self.transport = world.backend.transport("pipeline")
        ranks = sorted({*self._neighbours(), *peers} - {rank})
        self.has_peers = bool(ranks)
        self.transport.connect(ranks, ranks, capacity_bytes)
        self.inbox = Inbox(self.transport, self.board, timeline, timeout_seconds, other)

    def group(self, purpose: str, axes: Sequence[str]) -> Group:
        """Another group over these axes, which is closed with the others."""
        self._groups.append(self._world.backend.group(purpose, self._mesh.groups(*axes)))
        return self._groups[-1]

    def open_splits(self, layout: Layout) -> None:
        """Open the groups in which updates gather full parameters (`Chunking.whole`), if any are needed."""
        names = layout.chunking.whole if layout.chunking is not None else frozenset()
        for axes in sorted({layout.split_axes(name) for name in names} - {()}):
            self.splits[axes] = self._world.backend.group(f"update over {' and '.join(axes)}",
                                                          self._mesh.groups(*axes))
        self._groups += self.splits.values()

    def rank_of(self, stage: int) -> int:
        """The counterpart of this rank that has `stage`; it may be this rank."""
        return self._ranks[stage]

    def _neighbours(self) -> set[int]:
        """The ranks with the stages before and after those of this one."""
        own = self._placement.stages_of(self._mesh.coordinates(self._world.rank).pipeline_rank)
        return {self.rank_of(other) for stage in own for other in (stage - 1, stage + 1)
                if 0 <= other < self._placement.num_stages}

    def send(self, destination: int, message: Message) -> None:
        """Start sending, and return immediately. A message to another stage of this rank is delivered immediately."""
        if destination == self.rank:
            self.inbox.deliver(replace(message, source=destination))
        else:
            self.transport.send(destination, message if self.tensor_mesh is None
                                else self.column_parts.cut(message, destination))

    def bytes_received_by_axis(self) -> dict[str, int]:
        """Payload bytes that this rank has received so far. Sums over several axes count for the first."""
        counts = {self._mesh.over(orders_stages=True): self.inbox.bytes_received,
                  self._mesh.replica_axes: sum(group.bytes_received for group in (self.data, *self.sums.values()))}
        if self.tensor_mesh is not None:
            counts |= {self._mesh.over(shards_parameters=True): self.tensor_mesh.over_rows.bytes_received,
                       self._mesh.over(splits_features=True): self.tensor_mesh.over_cols.bytes_received}
        return {axes[0]: count for axes, count in counts.items()}

    def abandon(self) -> None:
        """Stop what runs on this rank, after other ranks are lost."""
        self.transport.close()
        self.board.close()

    def close(self, *, calls: int, steps: int) -> None:
        """Release everything once all messages have left. Collective. calls: number of the engine's calls on this rank
        so far; steps: its training batches. Raises TransportError if another rank makes more calls."""
        self.transport.flush()
        other = self.board.await_closing(calls, progress=self.transport.progress, seconds=self._timeout_seconds)
        if other is not None:
            raise TransportError(f"ended its loop after {steps} batches, while rank {other} continues",
                                 code="ranks-differ-in-steps", where=f"rank {self.rank}",
                                 value=self.board.name(self.rank),
                                 remedy="Give all ranks the same number of batches, and close the engine on all of "
                                        "them after the last one.")
        self.all.barrier()
        self.board.forget_closing()
        self.transport.close()
        self.sequencer.close()
        for group in self._groups:
            group.close()
        if self.replicas is not None:
            self.replicas.close()
        self.all.close()
        self.board.close()


# --- initial values ---------------------------------------------------------------------------------------------------

# Ranks that hold the same elements start from the same values, whatever their builders have made.


def share_start_values(layout: Layout, blocks: Sequence[tuple[int, str, nn.Module]],
                       parameters: Mapping[str, nn.Parameter], connections: Connections) -> None:
    """Copy weights and buffers from replica 0 to the other replicas, and from the first position of the tensor mesh to
    others that hold the same elements. Collective.

    blocks: those of this rank. parameters: theirs, by key. Ends of ties are exchanged elsewhere.
    """
    groups: dict[Tensor, Group] = {stored: connections.data for _, _, module in blocks
                                   for tensor in (*module.parameters(), *module.buffers())
                                   for stored in stored_tensors(tensor)}
    groups |= {stored: connections.sums[layout[name].summed] for name, parameter in parameters.items()
               if layout[name].summed for stored in stored_tensors(parameter)}
    tensors = {tensor: tensor.data.contiguous() for tensor in groups}  # itself, unless transposed or the like
    for work in [group.broadcast(tensors[tensor]) for tensor, group in groups.items() if len(group.ranks) > 1]:
        work.wait()
    for tensor, value in tensors.items():
        if any(size > 1 and not step for size, step in zip(tensor.shape, tensor.stride(), strict=True)):
            tensor.data = value  # an expanded buffer, whose elements cannot be written
        else:
            tensor.data.copy_(value)
        if groups[tensor].index:
            increment_version(tensor)  # so that `trained_elsewhere` sees new values here
    if connections.tensor_mesh is not None:
        columns = {*layout.mesh.over(splits_features=True)}
        copies = [stored for name, parameter in parameters.items() if columns & {*layout.copy_axes(name)}
                  for stored in stored_tensors(parameter)]
        for work in [connections.tensor_mesh.over_cols.broadcast(tensor.data) for tensor in copies]:
            work.wait()


# --- parts of messages ------------------------------------------------------------------------------------------------

# Messages between nodes of stages whose columns all hold the same activations: each column sends its part, and the
# receivers gather the parts over links within their node.
#
#     column 0   x ------------------------------> x          within a node, and of small tensors
#     column 1   x ------------------------------> x
#
#     column 0   x[: n / 2] --> x[: n / 2] -- gather --> x     between nodes
#     column 1   x[n / 2 :] --> x[n / 2 :] -- gather --> x
#
# (Narayanan et al., 2021, section 4.1.) A part is marked in its name, so receivers decide nothing.


_PART = "|part of "


class ColumnParts:
    """Cuts and gathers messages on one rank. tensor_mesh: None on stages of one rank."""

    def __init__(self, tensor_mesh: TensorMesh | None, mesh: Mesh, world: World) -> None:
        self._tensor_mesh, self._mesh, self._world = tensor_mesh, mesh, world
        self._to: dict[int, bool] = {}
        """Rank -> whether parts are sent there."""

    def _is_worthwhile(self, destination: int) -> bool:
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
            self._to[destination] = self._is_worthwhile(destination)
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

    def gather(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Gather the full tensors of a message that has arrived; all columns call this for the same messages in the
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
    """These names, with those of parts replaced by the names of their tensors."""
    return frozenset(name.partition(_PART)[0] for name in names)
