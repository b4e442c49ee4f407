"""Blocks on stages and parameters on ranks: which ranks hold, update and own each element."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import prod

from ranvier.errors import ConfigError, ModelError
from ranvier.layout.boxes import Box, Slice, box_size, intersection, whole_box
from ranvier.layout.chunks import FlatGradient, FlatOrder, flat_order
from ranvier.layout.split import TensorAxis
from ranvier.mesh import Coordinates, Mesh, Position, StagePlacement


def frozen_blocks(layers: Sequence[Sequence[str]], blocks: Sequence[str], frozen: int) -> int:
    """Number of the model's `blocks` that are frozen with the first `frozen` of its `layers` (names of blocks, in
    order).

    They are a prefix: all blocks up to the last one of the last frozen layer, and so the embedding with layer 0.
    """
    if not frozen:
        return 0
    last = set(layers[frozen - 1])
    return 1 + max(number for number, name in enumerate(blocks) if name in last)


@dataclass(frozen=True)
class Parameter:
    """One parameter of the full model. `owner` is its own name, or for a tied parameter the name of the group's first.

    summed: as in `Split`. in_layer: whether its block belongs to a layer, and is not an embedding or head. origin: the
    owner of a tie that it has left (`Model.untied`); None for most. quantized: the number format in which it is stored,
    if that is not the run's (`Model.quantized`).
    """

    name: str
    shape: tuple[int, ...]
    block: int
    owner: str
    trainable: bool = True
    summed: tuple[TensorAxis, ...] = ()
    in_layer: bool = True
    origin: str | None = None
    quantized: str | None = None

    @property
    def settings_name(self) -> str:
        """The name by which settings refer to it."""
        return self.origin or self.name

    @property
    def is_owner(self) -> bool:
        """Whether it is untied, or the end of its tie whose values count."""
        return self.owner == self.name

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Chunking:
    """Chunks in which the gradients of each rank are reduced, and the ranks that update from them.

    chunk_size: elements that are reduced in one piece.
    runs: stage -> blocks (their numbers) whose gradients use the same memory in turn.
    shard: each member of a group updates its share of every chunk, and has only the optimizer states of that share.
        Otherwise each updates all that it holds of the parameters that its stage owns.
    whole: names of the parameters (for tied ones the owner's) whose update needs full tensors.
    """

    chunk_size: int
    runs: Mapping[int, tuple[range, ...]] = field(default_factory=dict)
    shard: bool = False
    whole: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Blocks on stages and parameters on ranks.

        held      what a rank computes with
        updated   what its optimizer updates, and has states of; ranks that hold copies may update the same elements
        owned     what it writes to checkpoints: over all ranks every element once, whether it is trained or not

    boundaries: first block of each stage after the first.
    shards: parameter name -> position in the stage -> its box there; parameters that are left out are held in full
    everywhere.
    chunking: how gradients are reduced and optimizer states sharded; None if nothing is updated from them yet.
    placement: which stages the ranks of a pipeline have; None for one each.

    Raises ConfigError for invalid boundaries and for unknown axes, ModelError for two parameters of the same name.
    """

    mesh: Mesh
    num_blocks: int
    boundaries: tuple[int, ...]
    parameters: tuple[Parameter, ...]
    shards: Mapping[str, Mapping[Position, Box]] | None = None
    chunking: Chunking | None = None
    placement: StagePlacement | None = None

    def __post_init__(self) -> None:
        self.mesh.require_known_axes("a layout")
        edges = self._edges
        if len(edges) != self.stages.num_stages + 1 or any(a >= b for a, b in pairwise(edges)):
            raise ConfigError(f"does not cut {self.num_blocks} blocks into {self.stages.num_stages} stages",
                              code="boundaries-do-not-cut", where="pipeline.boundaries", value=self.boundaries,
                              remedy="Give the first block of each stage after the first, in ascending order.")
        names = [parameter.name for parameter in self.parameters]
        if len(set(names)) != len(names):
            raise ModelError("two parameters have the same name", code="parameter-names-repeat", where="model",
                             value=sorted({name for name in names if names.count(name) > 1})[0],
                             remedy="Give each block its own name.")

    @cached_property
    def _parameters_by_name(self) -> dict[str, Parameter]:
        return {parameter.name: parameter for parameter in self.parameters}

    def __getitem__(self, name: str) -> Parameter:
        return self._parameters_by_name[name]

    @cached_property
    def _edges(self) -> tuple[int, ...]:
        return (0, *self.boundaries, self.num_blocks)

    @cached_property
    def stages(self) -> StagePlacement:
        """Stages of each rank of a pipeline."""
        return self.placement or StagePlacement(num_ranks=self.mesh.pipeline_size)

    def blocks(self, stage: int) -> range:
        """Numbers of the blocks on `stage`."""
        return range(self._edges[stage], self._edges[stage + 1])

    def stage_of(self, block: int) -> int:
        """The stage that holds `block`."""
        return bisect_right(self.boundaries, block)

    def pipe_of(self, block: int) -> int:
        """The place in the pipeline of the ranks that hold `block`."""
        return self.stages.rank_of(self.stage_of(block))

    def blocks_on(self, pipe: int) -> list[int]:
        """Numbers of the blocks on the ranks at that place in the pipeline, in ascending order."""
        return [block for stage in self.stages.stages_of(pipe) for block in self.blocks(stage)]

    def parameters_of(self, pipe: int) -> tuple[Parameter, ...]:
        """Parameters of the blocks of `blocks_on`, in model order."""
        return self._parameters_by_pipe.get(pipe, ())

    @cached_property
    def _parameters_by_pipe(self) -> dict[int, tuple[Parameter, ...]]:
        found: dict[int, list[Parameter]] = {}
        for parameter in sorted(self.parameters, key=lambda parameter: parameter.block):
            found.setdefault(self.pipe_of(parameter.block), []).append(parameter)
        return {pipe: tuple(held) for pipe, held in found.items()}

    def is_tied(self, parameter: Parameter) -> bool:
        """Whether it is one of several ends."""
        return self._group_sizes[parameter.owner] > 1

    @cached_property
    def _group_sizes(self) -> Counter[str]:
        return Counter(parameter.owner for parameter in self.parameters)

    def key(self, parameter: Parameter) -> str:
        """The name under which its rank keeps it: the owner's, unless another end there has that name and is cut
        differently or is on another of the rank's stages; then the name of the first end with this cut. Ends of one key
        are one parameter."""
        return self._keys[parameter.name]

    @cached_property
    def _keys(self) -> dict[str, str]:
        """Parameter -> its key."""
        ranks: dict[tuple[str, int], dict[object, str]] = {}
        found = {}
        for parameter in sorted(self.parameters, key=lambda parameter: not parameter.is_owner):
            if not self.is_tied(parameter):
                found[parameter.name] = parameter.owner
                continue
            cuts = ranks.setdefault((parameter.owner, self.pipe_of(parameter.block)), {})
            # each of several stages sums gradients in its own order, and sums in one buffer would depend on it
            boxes = tuple(self.box(parameter, position) for position in self.mesh.positions)
            cut = (self.stage_of(parameter.block), boxes,
                   frozenset(axis for axis in parameter.summed if self.mesh[axis] > 1))
            found[parameter.name] = cuts.setdefault(cut, parameter.name if cuts else parameter.owner)
        return found

    @cached_property
    def tie_ends(self) -> dict[str, dict[tuple[int, str], Parameter]]:
        """Owner -> (place in the pipeline, key) -> the first parameter of that end, in model order."""
        found: dict[str, dict[tuple[int, str], Parameter]] = {}
        for parameter in self.parameters:
            place = self.pipe_of(parameter.block), self.key(parameter)
            found.setdefault(parameter.owner, {}).setdefault(place, parameter)
        return found

    def ends_on(self, pipe: int) -> dict[str, Parameter]:
        """Key -> an end on the ranks at that place in the pipeline. Ends of one key have the same cut; the owner, whose
        name the key may be, may be on other ranks and cut differently."""
        return self._ends_on.get(pipe, {})

    @cached_property
    def _ends_on(self) -> dict[int, dict[str, Parameter]]:
        found: dict[int, dict[str, Parameter]] = {}
        for ends in self.tie_ends.values():
            for (pipe, key), parameter in ends.items():
                found.setdefault(pipe, {})[key] = parameter
        return found

    def box(self, parameter: Parameter, position: Position) -> Box:
        """The box of `parameter` that a position in a stage holds."""
        shards = (self.shards or {}).get(parameter.name)
        return whole_box(parameter.shape) if shards is None else shards[position]

    def copy_axes(self, name: str) -> tuple[TensorAxis, ...]:
        """Axes of the tensor mesh along which ranks hold the same elements, with the same gradient."""
        return tuple(axis for axis in self.mesh.stage_axes if self.mesh[axis] > 1
                     and axis not in self[name].summed and not self._is_split(name, axis))

    def split_axes(self, name: str) -> tuple[TensorAxis, ...]:
        """Axes of the tensor mesh along which ranks hold different elements."""
        return tuple(axis for axis in self.mesh.stage_axes if self._is_split(name, axis))

    def _is_split(self, name: str, axis: TensorAxis) -> bool:
        """Whether the last rank along `axis` holds other elements than the first."""
        shards = (self.shards or {}).get(name)
        return shards is not None and shards[self._last_along[axis]] != shards[self.mesh.positions[0]]

    @cached_property
    def _last_along(self) -> dict[TensorAxis, Position]:
        """Axis of the tensor mesh -> the position of the last rank along it."""
        return {axis: self.mesh.place().replace(axis, self.mesh[axis] - 1).position for axis in self.mesh.stage_axes}

    def is_first_copy(self, name: str, at: Coordinates) -> bool:
        """Whether `at` is the first of the positions that hold the same elements with the same gradient."""
        return all(at[axis] == 0 for axis in self.copy_axes(name))

    # ------------------------------------------------------------------ ranks and their elements

    def held_slices(self, rank: int) -> list[Slice]:
        """The slices of parameters (for compute) on `rank`, in model order."""
        at = self.mesh.coordinates(rank)
        position = at.position
        return [Slice(parameter.name, self.box(parameter, position))
                for parameter in self.parameters_of(at.pipeline_rank)]

    def gradients(self, rank: int) -> list[FlatGradient]:
        """One gradient for each trained key of `rank`, in the order of the owning parameters."""
        at = self.mesh.coordinates(rank)
        position, pipeline_rank = at.position, at.pipeline_rank
        blocks: dict[str, set[int]] = {}
        for parameter in self.parameters_of(pipeline_rank):
            blocks.setdefault(self.key(parameter), set()).add(parameter.block)
        found = []
        for name, end in self.ends_on(pipeline_rank).items():
            if not end.trainable:
                continue
            parts = self.mesh.count(self.split_axes(name))
            owns = self[name].is_owner and self.pipe_of(self[name].block) == pipeline_rank
            found.append(FlatGradient(
                name=name, numel=box_size(self.box(end, position)), blocks=frozenset(blocks[name]), shape=end.shape,
                in_layer=end.in_layer, settings_name=self[name].settings_name, weight=-(-end.numel // parts),
                whole=self.chunking is not None and name in self.chunking.whole,
                remote_ends=len(self.tie_ends[name]) - 1 if owns else 0, sent_to_owner=not owns,
                group=self.summed_axes(name) or None if owns else None, copied=owns and bool(self.copy_axes(name)),
                counts=not owns or self.is_first_copy(name, at)))
        return found

    def summed_axes(self, name: str) -> tuple[TensorAxis, ...]:
        """Axes of the tensor mesh over which a gradient is summed, in addition to those of replicas."""
        return self[name].summed if self.mesh.stage_size > 1 else ()

    def flat_order(self, rank: int) -> FlatOrder:
        """Offsets of the `gradients` of `rank` in its flat buffer, with the chunks and shares. Needs `chunking`."""
        assert self.chunking is not None, "a layout without chunking has no order of gradients"
        gradients, members, runs = self.gradients(rank), {}, self.chunking.runs
        for summed in {(), *(self.summed_axes(each.name) for each in gradients if not each.sent_to_owner)}:
            ranks = self.mesh.group(rank, *self.mesh.replica_axes, *summed)
            members[summed or None] = len(ranks), ranks.index(rank)
        return flat_order(gradients, members, self.chunking.chunk_size,
                          runs.get(self.mesh.coordinates(rank).pipeline_rank, ()), shard=self.chunking.shard)

    def updated_slices(self, rank: int) -> list[Slice]:
        """The slices that the optimizer of `rank` updates and has states of: with `chunking.shard` in the order of its
        chunks, else in model order."""
        at, gradients = self.mesh.coordinates(rank), self.gradients(rank)
        boxes = {each.name: self.box(self[each.name], at.position) for each in gradients if not each.sent_to_owner}
        if self.chunking is None or not self.chunking.shard:
            return [Slice(name, box) for name, box in boxes.items()]
        order, found = self.flat_order(rank), []
        for chunk in order.chunks:
            for number in chunk.gradients:
                name, (first, last) = gradients[number].name, order.places[number]
                start, stop = max(first, chunk.share[0]), min(last, chunk.share[1])
                if start < stop and name in boxes:
                    found.append(Slice(name, boxes[name], (start - first, stop - first)))
        return found

    def owned_slices(self, rank: int) -> list[Slice]:
        """The slices that `rank` owns, in model order: every element has one owner, which writes it to checkpoints.

        If optimizer states are sharded, the rank that updates an element owns it. Otherwise replicas own equal shares
        of what all of them update, or of what is not trained. In a tied group the first member is owned; among
        positions that hold the same elements the first one owns.
        """
        at = self.mesh.coordinates(rank)
        position, replica = at.position, at.replica
        shared: dict[str, list[Slice]] = {}
        if self.chunking is not None and self.chunking.shard:
            for piece in self.updated_slices(rank):
                shared.setdefault(piece.parameter, []).append(piece)
        owned = []
        for piece in self.held_slices(rank):
            parameter, size = self[piece.parameter], box_size(piece.box)
            if not parameter.is_owner:
                continue
            if self.chunking is not None and self.chunking.shard and parameter.trainable and size:
                owned += shared.get(parameter.name, []) if self.is_first_copy(parameter.name, at) else []
            elif self.is_first_holder(parameter, position):
                share = -(-size // self.mesh.num_replicas)
                start, stop = min(replica * share, size), min((replica + 1) * share, size)
                if start < stop or (size == 0 and replica == 0):
                    owned.append(Slice(parameter.name, piece.box, (start, stop)))
        return owned

    def is_first_holder(self, parameter: Parameter, position: Position) -> bool:
        """Whether it is the first position that holds its box of `parameter`."""
        box = self.box(parameter, position)
        return next(other for other in self.mesh.positions if self.box(parameter, other) == box) == position

    def check(self) -> None:
        """Raise ModelError unless the positions of the tensor mesh hold every element of every parameter, without
        overlap.

        Parameters of identical layers have the same boxes, which are checked once."""
        sound = set[object]()
        for parameter in self.parameters:
            if not parameter.is_owner or parameter.name not in (self.shards or {}):
                continue  # each position holds all of it
            shape = parameter.shape
            boxes = frozenset(self.box(parameter, position) for position in self.mesh.positions)
            if (shape, boxes) in sound:
                continue
            found = [box for box in boxes if box_size(box)]
            inside = all(intersection(box, whole_box(shape)) == box for box in found)
            apart = all(intersection(a, b) is None for i, a in enumerate(found) for b in found[:i])
            if not inside or not apart or sum(map(box_size, found)) != prod(shape):
                raise ModelError("is not owned exactly once", code="parameter-not-owned-once",
                                 where=f"parameter {parameter.name}", value=sorted(found),
                                 remedy="Check that the tensor shards of this parameter cover it without overlap.")
            sound.add((shape, boxes))
