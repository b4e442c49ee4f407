"""Boxes of a tensor, slices of a parameter, the cut of a size into equal parts, and moves of boxes between ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ranvier.errors import ModelError

Box = tuple[tuple[int, int], ...]
"""(start, stop) of each dim; a scalar parameter's box is ()."""


def box_size(box: Box) -> int:
    """Number of elements."""
    return prod(stop - start for start, stop in box)


def whole_box(shape: Sequence[int]) -> Box:
    """The box of an entire tensor of `shape`."""
    return tuple((0, size) for size in shape)


def intersection(first: Box, second: Box) -> Box | None:
    """The box common to both, or None if it is empty."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(first, second, strict=True))
    return None if any(start >= stop for start, stop in common) else common


def without(box: Box, hole: Box) -> list[Box]:
    """`box` minus `hole`, which lies inside it, as disjoint boxes."""
    rest, core = [], list(box)
    for dim, ((start, stop), (low, high)) in enumerate(zip(box, hole, strict=True)):
        if start < low:
            rest.append((*core[:dim], (start, low), *core[dim + 1:]))
        if high < stop:
            rest.append((*core[:dim], (high, stop), *core[dim + 1:]))
        core[dim] = (low, high)
    return rest


def index_of(box: Box, held: Box) -> tuple[slice, ...]:
    """The index of `box` in a tensor that holds the box `held`, which contains it."""
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(box, held, strict=True))


@dataclass(frozen=True, order=True)
class Slice:
    """A part of one parameter: `box`, or its elements in row-major order from `flat[0]` up to `flat[1]`.

    Raises ValueError for a box that runs backwards and for an interval that leaves its box.
    """

    parameter: str
    box: Box
    flat: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if any(not 0 <= start <= stop for start, stop in self.box):
            raise ValueError(f"box {self.box} of {self.parameter} runs backwards")
        if self.flat is not None and not 0 <= self.flat[0] <= self.flat[1] <= box_size(self.box):
            raise ValueError(f"interval {self.flat} of {self.parameter} leaves its box of {box_size(self.box)}")

    @property
    def interval(self) -> tuple[int, int]:
        """The elements of the box in row-major order, as (start, stop)."""
        return (0, box_size(self.box)) if self.flat is None else self.flat

    @property
    def size(self) -> int:
        """Number of elements."""
        start, stop = self.interval
        return stop - start

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
    """Part `index` of `size` elements cut into `parts`, as equal as possible: the first ones have one more."""
    least, more = divmod(size, parts)
    return index * least + min(index, more), (index + 1) * least + min(index + 1, more)


# --- moves ------------------------------------------------------------------------------------------------------------

# Transfers between ranks after which every rank has the elements that it needs.


@dataclass(frozen=True)
class Move:
    """Elements that `destination` needs and `source` has. Equal ranks: a local copy."""

    parameter: str
    box: Box
    source: int
    destination: int


Places = Mapping[str, Sequence[tuple[int, Box]]]
"""Name of a tensor -> (rank, box) of its parts, none of them empty."""


def plan_moves(have: Places, need: Places) -> list[Move]:
    """The transfers after which every rank has what it needs, each element once. The source is the destination itself
    if it has the elements, else the lowest rank that has them. Raises ModelError if no rank has them."""
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
                        left += without(piece, common)
                missing = left
                if not missing:
                    break
            if missing:
                raise ModelError("is needed but held by no rank of the old layout", code="element-held-nowhere",
                                 where=f"parameter {name}", value=missing[0],
                                 remedy="Move between layouts of the same model.")
    return result
