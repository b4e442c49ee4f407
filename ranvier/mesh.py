"""Who is where: ranks on four named axes.

    rank = ((data * P + pipe) * R + row) * C + col

`col` varies fastest, so that the ranks that exchange most (one stage's tensor mesh) are neighbours, and replicas,
which exchange least, are farthest apart. With a tile the ranks of a stage go tile by tile instead, so that those of one
node form a tile (Xu et al., 2021 (Optimus), Figure 8):

    row by row     0  1  2  3        tile 2,2     0  1 |  4  5
                   4  5  6  7                     2  3 |  6  7
                   8  9 10 11                     -----+------
                  12 13 14 15                     8  9 | 12 13
                                                 10 11 | 14 15

Along any one axis ranks rise with the index, whatever the tile. Pure: no process group, no clock, no I/O.
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
        return ", ".join(f"{axis} {getattr(self, axis)}" for axis in AXES)

    def replace(self, axis: Axis, index: int) -> Coordinates:
        """The coordinates with another index along one axis."""
        return Coordinates(**{**{name: getattr(self, name) for name in AXES}, axis: index})


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """All ranks, as data x pipe x row x col. A *replica* is pipe x row x col ranks; a *stage* is row x col ranks.

    Every size is a whole number; what a person may leave open is `ranvier.config.run.MeshSettings`. ConfigError for a
    size below 1, and for a tile that does not divide rows and columns.

    data: data parallel size. pipe: pipeline parallel size. row, col: tensor parallel sizes. tile: rows and columns of
    the tensor mesh on one node, or None to number ranks row by row.
    """

    data: Size = 1
    pipe: Size = 1
    row: Size = 1
    col: Size = 1
    tile: tuple[Size, Size] | None = None

    def __post_init__(self) -> None:
        for axis, size in self.sizes.items():
            if not _is_size(size):
                raise ConfigError("must be a whole number of at least 1", code="mesh-axis-size", where=f"mesh.{axis}",
                                  value=size, remedy=f"Set `--mesh.{axis} 1` to leave this axis unused.")
        if self.tile is None:
            return
        if not isinstance(self.tile, tuple) or len(self.tile) != 2 or not all(map(_is_size, self.tile)):
            raise ConfigError("must be two whole numbers of at least 1, or none", code="mesh-tile-form",
                              where="mesh.tile", value=self.tile,
                              remedy="Set `--mesh.tile none` to leave the choice to the run.")
        if self.row % self._tile[0] or self.col % self._tile[1]:
            raise ConfigError(f"does not divide the {self.row} rows and {self.col} columns",
                              code="mesh-tile-does-not-divide", where="mesh.tile", value=self.tile,
                              remedy="Set `--mesh.tile none` to leave the choice to the run.")

    @property
    def sizes(self) -> dict[Axis, int]:
        """Number of ranks along each axis, in the order of `AXES`."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def _tile(self) -> tuple[int, int]:
        """Rows and columns of a tile; without one, and on stages of one rank, the whole stage is a tile."""
        return (self.row, self.col) if self.tile is None or self.stage_size == 1 else self.tile

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes alone, in the order of `AXES`."""
        return tuple(self.sizes.values())

    @property
    def size(self) -> int:
        """Number of ranks."""
        return prod(self.sizes.values())

    @property
    def stage_size(self) -> int:
        """Ranks that hold one stage of one replica together: row x col."""
        return self.row * self.col

    def __str__(self) -> str:
        return " x ".join(f"{axis} {size}" for axis, size in self.sizes.items())

    def changed_axes(self, other: Mesh) -> tuple[Axis, ...]:
        """The axes along which `other` has another size."""
        return tuple(axis for axis, size in self.sizes.items() if size != getattr(other, axis))

    def coordinates(self, rank: int) -> Coordinates:
        """Coordinates of `rank`; IndexError when it is not on the mesh."""
        if not 0 <= rank < self.size:
            raise IndexError(f"rank {rank} is not on a mesh of {self.size} ranks")
        rows, cols = self._tile
        rest, col = divmod(rank, cols)
        rest, row = divmod(rest, rows)
        rest, tile_col = divmod(rest, self.col // cols)
        rest, tile_row = divmod(rest, self.row // rows)
        data, pipe = divmod(rest, self.pipe)
        return Coordinates(data=data, pipe=pipe, row=tile_row * rows + row, col=tile_col * cols + col)

    def rank(self, at: Coordinates) -> int:
        """The rank at these coordinates."""
        for axis in AXES:
            if not 0 <= getattr(at, axis) < getattr(self, axis):
                raise IndexError(f"{axis} {getattr(at, axis)} is not on a mesh of {self}")
        rows, cols = self._tile
        (tile_row, row), (tile_col, col) = divmod(at.row, rows), divmod(at.col, cols)
        stage = at.data * self.pipe + at.pipe
        tile = (stage * (self.row // rows) + tile_row) * (self.col // cols) + tile_col
        return (tile * rows + row) * cols + col

    def group(self, rank: int, axis: Axis) -> tuple[int, ...]:
        """The ranks that differ from `rank` along `axis` only, itself among them, by index along it; so they rise."""
        at = self.coordinates(rank)
        return tuple(self.rank(at.replace(axis, index)) for index in range(getattr(self, axis)))

    def groups(self, *axes: Axis) -> tuple[tuple[int, ...], ...]:
        """All sets of ranks that differ along `axes` only, each rising: a partition of the ranks.

        Along `row` and `col` together, rising is row by row without a tile, and tile by tile with one.
        """
        found: dict[Coordinates, list[int]] = {}
        for rank in range(self.size):
            first = self.coordinates(rank)
            for axis in axes:
                first = first.replace(axis, 0)
            found.setdefault(first, []).append(rank)
        return tuple(sorted(map(tuple, found.values())))

    def stage_ranks(self, rank: int) -> tuple[int, ...]:
        """The row x col ranks of the stage that `rank` belongs to, rising; the first, its leader, is row 0, col 0."""
        at = self.coordinates(rank)
        first = self.rank(Coordinates(data=at.data, pipe=at.pipe))
        return tuple(range(first, first + self.stage_size))


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


PlacementName = Literal["v-shape", "interleaved"]


@dataclass(frozen=True, kw_only=True)
class StagePlacement:
    """Which stages the ranks along the axis `pipe` have, `per_rank` on each (virtual stages).

    one each          rank 0: 0      rank 1: 1      rank 2: 2      rank 3: 3
    v-shape           rank 0: 0 7    rank 1: 1 6    rank 2: 2 5    rank 3: 3 4       (Qi et al., 2024, ZB-V)
    interleaved       rank 0: 0 4    rank 1: 1 5    rank 2: 2 6    rank 3: 3 7       (Narayanan et al., 2021)

    With more than two stages a rank, the v-shape goes on as a zigzag. Its messages stay between neighbours, and every
    turn needs none; of an even number of stages the first rank also has the last, and so embedding and head.
    """

    pipe: int
    per_rank: int = 1
    how: PlacementName = "v-shape"

    @property
    def num_stages(self) -> int:
        """Of the whole pipeline."""
        return self.pipe * self.per_rank

    def rank_of(self, stage: int) -> int:
        """The rank that has `stage`."""
        turn, place = divmod(stage, self.pipe)
        return self.pipe - 1 - place if self.how == "v-shape" and turn % 2 else place

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of `rank`, rising."""
        return tuple(stage for stage in range(self.num_stages) if self.rank_of(stage) == rank)

    def local(self, stage: int) -> int:
        """The place of `stage` among those of its rank."""
        return stage // self.pipe
