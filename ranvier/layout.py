"""Who holds what: for every parameter, which ranks hold which slice of it, and which of them owns it.

A slice is a box of the parameter ((start, stop) per dim), of which optionally only a flat interval of the box's
row-major order is meant: shards of optimizer state cut through parameters. A flat interval of a box is itself a few
boxes, so that everything here is arithmetic on boxes. From two layouts follow the moves between them; checkpoints,
transitions and sharded states are users of that one list. Pure: no process group, no clock, no I/O.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from math import prod
from typing import Literal

from ranvier.errors import ConfigError, ModelError
from ranvier.mesh import Coordinates, Mesh

Box = tuple[tuple[int, int], ...]
"""(start, stop) of each dim; a scalar parameter's box is ()."""


def box_size(box: Box) -> int:
    return prod(stop - start for start, stop in box)


def whole(shape: Sequence[int]) -> Box:
    """The box that is all of a tensor of `shape`."""
    return tuple((0, size) for size in shape)


def intersection(first: Box, second: Box) -> Box | None:
    """The box common to both, or None when it is empty."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(first, second, strict=True))
    return None if any(start >= stop for start, stop in common) else common


@dataclass(frozen=True, order=True)
class Slice:
    """A part of one parameter: `box`, or of its elements in row-major order those from `flat[0]` up to `flat[1]`."""

    parameter: str
    box: Box
    flat: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if any(not 0 <= start <= stop for start, stop in self.box):
            raise ValueError(f"box {self.box} of {self.parameter} runs backwards")
        if self.flat is not None and not 0 <= self.flat[0] <= self.flat[1] <= box_size(self.box):
            raise ValueError(f"interval {self.flat} of {self.parameter} leaves its box of {box_size(self.box)}")

    @property
    def size(self) -> int:
        """Number of elements."""
        return box_size(self.box) if self.flat is None else self.flat[1] - self.flat[0]

    def boxes(self) -> list[Box]:
        """The same elements as disjoint, non-empty boxes in row-major order: at most 2 dims - 1 of them."""
        if self.size == 0:
            return []
        if self.flat is None:
            return [self.box]
        return list(_interval_boxes(self.box, *self.flat))


def _interval_boxes(box: Box, start: int, stop: int) -> Iterator[Box]:
    """Boxes that make up elements start..stop of `box` in row-major order."""
    if start >= stop:
        return
    if start == 0 and stop == box_size(box):
        yield box
        return
    (low, _), rest = box[0], box[1:]
    row = box_size(rest)
    first, last = start // row, stop // row  # the rows that start and stop are in
    if first == last:
        for inner in _interval_boxes(rest, start - first * row, stop - first * row):
            yield ((low + first, low + first + 1), *inner)
        return
    if start % row:
        for inner in _interval_boxes(rest, start % row, row):
            yield ((low + first, low + first + 1), *inner)
        first += 1
    if first < last:
        yield ((low + first, low + last), *rest)
    if stop % row:
        for inner in _interval_boxes(rest, 0, stop % row):
            yield ((low + last, low + last + 1), *inner)


def part(size: int, parts: int, index: int) -> tuple[int, int]:
    """Piece `index` of `size` elements cut into `parts`, as equal as can be: the first ones have one more."""
    least, more = divmod(size, parts)
    return index * least + min(index, more), (index + 1) * least + min(index + 1, more)


def frozen_blocks(layers: Sequence[Sequence[str]], blocks: Sequence[str], frozen: int) -> int:
    """How many of the model's `blocks` are frozen with the first `frozen` of its `layers` (names of blocks, in order).

    They are a prefix: all blocks up to the last one of the last frozen layer, and so the embedding with layer 0.
    """
    if not frozen:
        return 0
    last = set(layers[frozen - 1])
    return 1 + max(number for number, name in enumerate(blocks) if name in last)


TensorAxis = Literal["row", "col"]


@dataclass(frozen=True)
class Split:
    """How a parameter lies on the row x col mesh.

    dims: for each dim the axes that cut it, the outer first; () leaves it whole.
    summed: axes along which ranks hold the same elements, and each only a part of their gradient, such as that of its
        sequences. Along axes that are in neither, ranks hold the same elements with the same gradient.
    """

    dims: tuple[tuple[TensorAxis, ...], ...]
    summed: tuple[TensorAxis, ...] = ()

    def box(self, shape: Sequence[int], sizes: tuple[int, int], at: tuple[int, int]) -> Box:
        """What position `at` (row, col) of a mesh of `sizes` (rows, columns) holds of a parameter of `shape`."""
        places, found = dict(zip(("row", "col"), zip(sizes, at, strict=True), strict=True)), []
        for size, axes in zip(shape, self.dims, strict=True):
            start, stop = 0, size
            for axis in axes:
                first, last = part(stop - start, *places[axis])
                start, stop = start + first, start + last
            found.append((start, stop))
        return tuple(found)

    def boxes(self, shape: Sequence[int], mesh: Mesh) -> dict[tuple[int, int], Box]:
        """(row, col) -> what that position holds."""
        return {(row, col): self.box(shape, (mesh.row, mesh.col), (row, col))
                for row in range(mesh.row) for col in range(mesh.col)}


@dataclass(frozen=True)
class Parameter:
    """One parameter of the whole model. `owner` is its own name, or for a tied one that of the group's first.

    summed: as in `Split`.
    """

    name: str
    shape: tuple[int, ...]
    block: int
    owner: str
    trainable: bool = True
    summed: tuple[TensorAxis, ...] = ()

    @property
    def is_owner(self) -> bool:
        return self.owner == self.name

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class Move:
    """Elements that `destination` needs and `source` has. Equal ranks: a copy on the spot."""

    parameter: str
    box: Box
    source: int
    destination: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Blocks on stages and parameters on ranks.

    boundaries: first block of each stage after the first.
    shards: parameter name -> (row, col) -> its box on the tensor mesh; those left out are whole everywhere.
    state_shards: shares into which each position's optimizer state is cut over `data`; 1 keeps it whole.
    """

    mesh: Mesh
    num_blocks: int
    boundaries: tuple[int, ...]
    parameters: tuple[Parameter, ...]
    shards: Mapping[str, Mapping[tuple[int, int], Box]] | None = None
    state_shards: int = 1

    def __post_init__(self) -> None:
        edges = self._edges
        if len(edges) != self.mesh.pipe + 1 or any(a >= b for a, b in pairwise(edges)):
            raise ConfigError(f"does not cut {self.num_blocks} blocks into {self.mesh.pipe} stages",
                              where="pipeline.boundaries", value=self.boundaries,
                              remedy="Give the first block of each stage after the first, rising.")
        if self.state_shards not in (1, self.mesh.data):
            raise ConfigError("is neither 1 nor the number of replicas", where="optimizer state shares",
                              value=self.state_shards, remedy=f"Use 1 or {self.mesh.data}.")
        names = [parameter.name for parameter in self.parameters]
        if len(set(names)) != len(names):
            raise ModelError("two parameters have one name", where="model",
                             value=sorted({name for name in names if names.count(name) > 1})[0],
                             remedy="Give each block its own name.")

    @cached_property
    def _by_name(self) -> dict[str, Parameter]:
        return {parameter.name: parameter for parameter in self.parameters}

    def __getitem__(self, name: str) -> Parameter:
        return self._by_name[name]

    @cached_property
    def _edges(self) -> tuple[int, ...]:
        return (0, *self.boundaries, self.num_blocks)

    def blocks(self, stage: int) -> range:
        """Numbers of the blocks on `stage`."""
        return range(self._edges[stage], self._edges[stage + 1])

    def stage_of(self, block: int) -> int:
        """The stage that holds `block`."""
        return bisect_right(self.boundaries, block)

    def parameters_of(self, stage: int) -> tuple[Parameter, ...]:
        """Those of a stage's blocks, in model order."""
        return self._by_stage.get(stage, ())

    @cached_property
    def _by_stage(self) -> dict[int, tuple[Parameter, ...]]:
        stages = sorted(self.parameters, key=lambda parameter: parameter.block)
        return {stage: tuple(held) for stage, held in groupby(stages, lambda held: self.stage_of(held.block))}

    def is_tied(self, parameter: Parameter) -> bool:
        """Whether it is one of several ends."""
        return self._ends[parameter.owner] > 1

    @cached_property
    def _ends(self) -> Counter[str]:
        return Counter(parameter.owner for parameter in self.parameters)

    def key(self, parameter: Parameter) -> str:
        """The name under which its stage keeps it: the owner's, unless another end there has that and is cut otherwise;
        then that of the first end there that is cut alike. Ends of one key are one parameter."""
        return self._keys[parameter.name]

    @cached_property
    def _keys(self) -> dict[str, str]:
        """Parameter -> its key."""
        stages: dict[tuple[str, int], dict[object, str]] = {}
        found = {}
        for parameter in sorted(self.parameters, key=lambda parameter: not parameter.is_owner):
            if not self.is_tied(parameter):
                found[parameter.name] = parameter.owner
                continue
            cuts = stages.setdefault((parameter.owner, self.stage_of(parameter.block)), {})
            cut = (tuple(self.box(parameter, row, col) for row in range(self.mesh.row) for col in range(self.mesh.col)),
                   frozenset(axis for axis in parameter.summed if getattr(self.mesh, axis) > 1))
            found[parameter.name] = cuts.setdefault(cut, parameter.name if cuts else parameter.owner)
        return found

    def box(self, parameter: Parameter, row: int, col: int) -> Box:
        """What position (row, col) holds of `parameter`."""
        shards = (self.shards or {}).get(parameter.name)
        return whole(parameter.shape) if shards is None else shards[row, col]

    def copy_axes(self, name: str) -> tuple[TensorAxis, ...]:
        """Axes of the tensor mesh along which ranks hold the same elements, with the same gradient."""
        parameter, mesh = self[name], self.mesh
        first = self.box(parameter, 0, 0)
        same = {"row": mesh.row > 1 and self.box(parameter, mesh.row - 1, 0) == first,
                "col": mesh.col > 1 and self.box(parameter, 0, mesh.col - 1) == first}
        return tuple(axis for axis, is_same in same.items() if is_same and axis not in parameter.summed)

    def is_first_copy(self, name: str, at: Coordinates) -> bool:
        """Whether `at` is the first of the positions that hold the same elements with the same gradient."""
        return all(getattr(at, axis) == 0 for axis in self.copy_axes(name))

    def held(self, rank: int) -> list[Slice]:
        """The slices of parameters (for compute) on `rank`, in model order."""
        at = self.mesh.coordinates(rank)
        return [Slice(parameter.name, self.box(parameter, at.row, at.col))
                for parameter in self.parameters_of(at.pipe)]

    def owned(self, rank: int) -> list[Slice]:
        """The slices whose master copy and optimizer state live on `rank`: every element is owned by one rank.

        Of the replicas the first owns (or each its share, with state_shards); of a tied group the first member; of
        positions (row, col) that hold the same box, the first.
        """
        at = self.mesh.coordinates(rank)
        owned = []
        for piece in self.held(rank):
            parameter = self[piece.parameter]
            position = next((row, col) for row in range(self.mesh.row) for col in range(self.mesh.col)
                            if self.box(parameter, row, col) == piece.box)
            if not parameter.is_owner or position != (at.row, at.col):
                continue
            if self.state_shards == 1:
                if at.data == 0:
                    owned.append(piece)
                continue
            size = box_size(piece.box)
            share = -(-size // self.state_shards)
            start, stop = min(at.data * share, size), min((at.data + 1) * share, size)
            if start < stop or (size == 0 and at.data == 0):
                owned.append(Slice(piece.parameter, piece.box, (start, stop)))
        return owned

    def check(self) -> None:
        """ModelError unless every element of every parameter has exactly one owner."""
        boxes: dict[str, list[Box]] = {parameter.name: [] for parameter in self.parameters if parameter.is_owner}
        for rank in range(self.mesh.size):
            for piece in self.owned(rank):
                boxes[piece.parameter] += piece.boxes()
        for name, found in boxes.items():
            shape = self[name].shape
            inside = all(intersection(box, whole(shape)) == box for box in found)
            apart = all(intersection(a, b) is None for i, a in enumerate(found) for b in found[:i])
            if not inside or not apart or sum(map(box_size, found)) != prod(shape):
                raise ModelError("is not owned exactly once", where=f"parameter {name}", value=sorted(found),
                                 remedy="Check that the tensor shards of this parameter cover it without overlap.")


def moves(old: Layout, new: Layout, *, state: bool = False) -> list[Move]:
    """What must travel so that every rank of `new` has its slices, given that ranks hold those of `old`.

    state: move what ranks own (master copies, optimizer state) instead of what they hold for compute. The source is the
    destination itself where it has the elements, else the lowest rank that has them.
    """
    have = _boxes_by_parameter(old, old.owned if state else old.held)
    need = _boxes_by_parameter(new, new.owned if state else new.held)
    for name in need:
        if name in old._by_name and old[name].shape != new[name].shape:
            raise ModelError(f"has the shape {old[name].shape} in the old layout", where=f"parameter {name}",
                             value=new[name].shape, remedy="Move between layouts of the same model.")
    return moves_between(have, need)


Places = Mapping[str, Sequence[tuple[int, Box]]]
"""Name of a tensor -> (rank, box) of its parts, none of them empty."""


def moves_between(have: Places, need: Places) -> list[Move]:
    """What must travel so that everyone has what it needs. The source is the destination itself where it has the
    elements, else the lowest rank that has them. ModelError where nobody has."""
    result = []
    for name, wanted in need.items():
        for destination, box in wanted:
            missing = [box]
            for source, present in sorted(have.get(name, []), key=lambda item: (item[0] != destination, item[0])):
                left = []
                for piece in missing:
                    common = intersection(piece, present)
                    if common is None:
                        left.append(piece)
                    else:
                        result.append(Move(name, common, source, destination))
                        left += _without(piece, common)
                missing = left
                if not missing:
                    break
            if missing:
                raise ModelError("is needed but held by no rank of the old layout", where=f"parameter {name}",
                                 value=missing[0], remedy="Move between layouts of the same model.")
    return result


def _boxes_by_parameter(layout: Layout, of) -> dict[str, list[tuple[int, Box]]]:
    """Parameter -> (rank, box) of every non-empty box."""
    boxes: dict[str, list[tuple[int, Box]]] = {}
    for rank in range(layout.mesh.size):
        for piece in of(rank):
            boxes.setdefault(piece.parameter, []).extend((rank, box) for box in piece.boxes())
    return boxes


def _without(box: Box, hole: Box) -> list[Box]:
    """`box` minus `hole`, which lies inside it, as disjoint boxes."""
    rest, core = [], list(box)
    for dim, ((start, stop), (low, high)) in enumerate(zip(box, hole, strict=True)):
        if start < low:
            rest.append((*core[:dim], (start, low), *core[dim + 1:]))
        if high < stop:
            rest.append((*core[:dim], (high, stop), *core[dim + 1:]))
        core[dim] = (low, high)
    return rest
