"""Sharding of a parameter over the row x col mesh of a stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ranvier.layout.boxes import Box, part
from ranvier.mesh import Mesh, Position

TensorAxis = str
"""The name of an axis of a stage."""


@dataclass(frozen=True)
class Split:
    """Sharding of a parameter over the row x col mesh.

    dims: for each dim the axes that cut it, the outer first; () does not cut it.
    summed: axes along which ranks hold the same elements, and each only a part of their gradient, such as that from its
        sequences. Along axes that are in neither, ranks hold the same elements with the same gradient.
    units: pieces of the first dim, such as heads, that columns divide evenly or do not cut at all: see `for_cols`.
    """

    dims: tuple[tuple[TensorAxis, ...], ...]
    summed: tuple[TensorAxis, ...] = ()
    units: int | None = None

    def for_cols(self, num_cols: int) -> Split:
        """The split on `num_cols` columns. If they do not divide `units` (grouped-query attention: fewer heads of keys
        and values than columns), every column holds all units, and computes with those that its queries need; the sum
        over the columns is the units' gradient."""
        if self.units is None or self.units % num_cols == 0:
            return replace(self, units=None)
        first, *rest = self.dims
        return Split((tuple(axis for axis in first if axis != "col"), *rest), (*self.summed, "col"))

    def box(self, shape: Sequence[int], sizes: Position, at: Position) -> Box:
        """The box of a parameter of `shape` that position `at` (row, col) of a mesh of `sizes` (rows, columns)
        holds."""
        places, found = dict(zip(("row", "col"), zip(sizes, at, strict=True), strict=True)), []
        for size, axes in zip(shape, self.dims, strict=True):
            start, stop = 0, size
            for axis in axes:
                first, last = part(stop - start, *places[axis])
                start, stop = start + first, start + last
            found.append((start, stop))
        return tuple(found)

    def boxes(self, shape: Sequence[int], mesh: Mesh) -> dict[Position, Box]:
        """Position -> the box that it holds."""
        return {position: self.box(shape, (mesh.row, mesh.col), position) for position in mesh.positions}
