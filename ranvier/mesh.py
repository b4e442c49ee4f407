"""Who is where: ranks on four named axes.

    rank = ((data * P + pipe) * R + row) * C + col

`col` varies fastest, so that the ranks that exchange most (one stage's tensor mesh) are neighbours, and replicas,
which exchange least, are farthest apart. Pure: no process group, no clock, no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Annotated, Literal

from annotated_types import Ge

from ranvier.errors import ConfigError

Axis = Literal["data", "pipe", "row", "col"]
AXES: tuple[Axis, ...] = ("data", "pipe", "row", "col")
Size = Annotated[int, Ge(1)]


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Coordinates:
    """A rank's index along each axis."""

    data: int = 0
    pipe: int = 0
    row: int = 0
    col: int = 0

    def __str__(self) -> str:
        return f"data {self.data}, pipe {self.pipe}, row {self.row}, col {self.col}"

    def replace(self, axis: Axis, index: int) -> Coordinates:
        return Coordinates(**{**{name: getattr(self, name) for name in AXES}, axis: index})


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """All ranks, as data x pipe x row x col. A *replica* is pipe x row x col ranks; a *stage* is row x col ranks."""

    data: Size = 1
    """Replicas: full copies of the model that share each global batch."""
    pipe: Size = 1
    """Stages of the pipeline: runs of consecutive blocks."""
    row: Size = 1
    """Rows of the tensor mesh: they share the microbatch."""
    col: Size = 1
    """Columns of the tensor mesh: they share the hidden dimension."""

    def __post_init__(self) -> None:
        for axis in AXES:
            size = getattr(self, axis)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ConfigError("must be a whole number of at least 1", where=f"mesh.{axis}", value=size,
                                  remedy=f"Set --mesh.{axis} 1 to leave this axis unused.")

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.data, self.pipe, self.row, self.col

    @property
    def size(self) -> int:
        """Number of ranks."""
        return prod(self.shape)

    @property
    def stage_size(self) -> int:
        """Ranks that hold one stage of one replica together: row x col."""
        return self.row * self.col

    def __str__(self) -> str:
        return f"data {self.data} x pipe {self.pipe} x row {self.row} x col {self.col}"

    def coordinates(self, rank: int) -> Coordinates:
        """Coordinates of `rank`; IndexError when it is not on the mesh."""
        if not 0 <= rank < self.size:
            raise IndexError(f"rank {rank} is not on a mesh of {self.size} ranks")
        rest, col = divmod(rank, self.col)
        rest, row = divmod(rest, self.row)
        data, pipe = divmod(rest, self.pipe)
        return Coordinates(data=data, pipe=pipe, row=row, col=col)

    def rank(self, at: Coordinates) -> int:
        """The rank at these coordinates."""
        for axis in AXES:
            if not 0 <= getattr(at, axis) < getattr(self, axis):
                raise IndexError(f"{axis} {getattr(at, axis)} is not on a mesh of {self}")
        return ((at.data * self.pipe + at.pipe) * self.row + at.row) * self.col + at.col

    def group(self, rank: int, axis: Axis) -> tuple[int, ...]:
        """The ranks that differ from `rank` along `axis` only, in order; `rank` among them."""
        at = self.coordinates(rank)
        return tuple(self.rank(at.replace(axis, index)) for index in range(getattr(self, axis)))

    def groups(self, *axes: Axis) -> tuple[tuple[int, ...], ...]:
        """All sets of ranks that differ along `axes` only, each rising: a partition of the ranks."""
        found: dict[Coordinates, list[int]] = {}
        for rank in range(self.size):
            first = self.coordinates(rank)
            for axis in axes:
                first = first.replace(axis, 0)
            found.setdefault(first, []).append(rank)
        return tuple(sorted(map(tuple, found.values())))

    def stage_ranks(self, rank: int) -> tuple[int, ...]:
        """The row x col ranks of the stage that `rank` belongs to; the first is the stage's leader."""
        at = self.coordinates(rank)
        return tuple(self.rank(Coordinates(data=at.data, pipe=at.pipe, row=row, col=col))
                     for row in range(self.row) for col in range(self.col))

    def neighbour(self, rank: int, step: int) -> int | None:
        """The counterpart of `rank` `step` stages further down the pipeline, or None beyond its ends."""
        at = self.coordinates(rank)
        pipe = at.pipe + step
        return self.rank(at.replace("pipe", pipe)) if 0 <= pipe < self.pipe else None
