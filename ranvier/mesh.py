"""Meshes: ranks on named axes. The roles of an axis say what its ranks split, and what they hold copies of.

    rank = ((data * P + pipe) * R + row) * C + col

`col` varies fastest, so that the ranks that exchange most (one stage's tensor mesh) are neighbours, and replicas,
which exchange least, are farthest apart. With a tile, the ranks of a stage are numbered tile by tile instead, so that
those of one node form a tile (Xu et al., 2021 (Optimus), Figure 8):

    row by row     0  1  2  3        tile 2,2     0  1 |  4  5
                   4  5  6  7                     2  3 |  6  7
                   8  9 10 11                     -----+------
                  12 13 14 15                     8  9 | 12 13
                                                 10 11 | 14 15

Along any one axis ranks increase with the index, whatever the tile. Roles divide the axes into three:

    replicates_parameters                     the replica        data
    orders_stages                             the stages         pipe
    shards_parameters, splits_features        the position in the stage, that is, the part of each layer      row, col

Callers ask for roles (`num_replicas`, `microbatch_parts`, `over(splits_samples=True)`), not for names of axes.
Pure: no process group, no clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import isqrt, prod
from typing import Annotated, Any, Literal

from annotated_types import Ge

from ranvier.errors import ConfigError

Size = Annotated[int, Ge(1)]
Position = tuple[int, ...]
"""Indices along the axes of a stage: (row, col)."""


@dataclass(frozen=True)
class Axis:
    """A named axis of a mesh, and its roles.

    plural: the plural noun for its indices.
    splits_samples: ranks along it have different samples.
    splits_sequence: they have different parts of each sequence.
    replicates_parameters: they hold the same parameters, and sum their gradients.
    orders_stages: they hold different blocks, in the order of the model.
    shards_parameters: they hold different parts of each parameter, which they gather.
    splits_features: they compute different parts of each layer's hidden dimension.
    """

    name: str
    plural: str
    splits_samples: bool = False
    splits_sequence: bool = False
    replicates_parameters: bool = False
    orders_stages: bool = False
    shards_parameters: bool = False
    splits_features: bool = False

    @property
    def divides_stages(self) -> bool:
        """Whether the ranks along it share a stage."""
        return self.shards_parameters or self.splits_features


STANDARD_AXES = (
    Axis("data", "replicas", splits_samples=True, replicates_parameters=True),
    Axis("pipe", "stages", orders_stages=True),
    Axis("row", "rows", splits_samples=True, shards_parameters=True),
    Axis("col", "columns", splits_features=True))
"""The axes that the engine runs on; ranks along any other one are refused (`Mesh.require_known_axes`)."""
AXES = tuple(axis.name for axis in STANDARD_AXES)
REQUIRED_AXES = tuple(axis.name for axis in STANDARD_AXES if not axis.divides_stages)
"""Axes that a run's files and requests always name; others are named only if they are used."""


class _NumberPerAxis(Mapping[str, int]):
    """An immutable mapping from axis to number, whose entries are also attributes."""

    axes: tuple[Axis, ...]
    data: int
    pipe: int
    row: int
    col: int

    def __init__(self, axes: Sequence[Axis], numbers: Mapping[str, int], default: int) -> None:
        names = [axis.name for axis in axes]
        for name in numbers:
            if name not in names:
                raise TypeError(f"{name} is not an axis: {', '.join(names)}")
        self._numbers = {name: numbers.get(name, default) for name in names}
        self.__dict__.update(self._numbers, axes=tuple(axes))

    def __getitem__(self, axis: str) -> int:
        try:
            return self._numbers[axis]
        except KeyError:
            raise KeyError(f"{axis} is not an axis: {', '.join(self)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def __setattr__(self, name: str, value: object) -> None:
        if name in self.__dict__:
            raise AttributeError(f"{name} of a {type(self).__name__} cannot be changed")
        super().__setattr__(name, value)

    def over(self, **roles: bool) -> tuple[str, ...]:
        """Names of the axes with these roles: `over(splits_samples=True, shards_parameters=True)`."""
        return tuple(axis.name for axis in self.axes
                     if all(getattr(axis, role) == has_it for role, has_it in roles.items()))


class Coordinates(_NumberPerAxis):
    """A rank's index along each axis of `mesh`."""

    mesh: Mesh

    def __init__(self, mesh: Mesh, indices: Mapping[str, int]) -> None:
        super().__init__(mesh.axes, indices, 0)
        self.mesh = mesh

    def __str__(self) -> str:
        return ", ".join(f"{axis} {index}" for axis, index in self.items())

    def __repr__(self) -> str:
        return f"Coordinates({self})"

    def __hash__(self) -> int:
        return hash(tuple(self.values()))

    def __lt__(self, other: Coordinates) -> bool:
        return tuple(self.values()) < tuple(other.values())

    def replace(self, axis: str, index: int) -> Coordinates:
        """The coordinates with another index along one axis."""
        return Coordinates(self.mesh, {**self, axis: index})

    def index(self, axes: Sequence[str]) -> int:
        """The index among the ranks that differ only along `axes`, the last varying fastest."""
        found = 0
        for axis in axes:
            found = found * self.mesh[axis] + self[axis]
        return found

    @property
    def replica(self) -> int:
        """Index of the replica, the copy of the model of which the rank has a part."""
        return self.index(self.mesh.replica_axes)

    @property
    def pipeline_rank(self) -> int:
        """Index of this rank in the pipeline, below `Mesh.pipeline_size`; it determines the stages."""
        return self.index(self.mesh.pipeline_axes)

    @property
    def position(self) -> Position:
        """Position in the stage."""
        return tuple(self[axis] for axis in self.mesh.stage_axes)

    @property
    def batch_share(self) -> int:
        """Index of its share of each global batch, below `Mesh.batch_shares`."""
        return self.index(self.mesh.over(splits_samples=True, replicates_parameters=True))

    @property
    def microbatch_part(self) -> int:
        """Index of its part of each microbatch, below `Mesh.microbatch_parts`."""
        return self.index(self.mesh.over(splits_samples=True, shards_parameters=True))

    @property
    def position_text(self) -> str:
        """The position in words: row 1, col 0."""
        return ", ".join(f"{axis} {self[axis]}" for axis in self.mesh.stage_axes)

    @property
    def is_first_in_stage(self) -> bool:
        """Whether it is the leader of its stage."""
        return not any(self.position)

    @property
    def is_first_on_pipeline_rank(self) -> bool:
        """Whether it is the first of all ranks with its stages."""
        return not self.replica and self.is_first_in_stage

    @cached_property
    def is_first_with_samples(self) -> bool:
        """Whether it is the first rank of its stage that has these samples, so that each counts once."""
        return not any(self[axis] for axis in self.mesh.stage_axes if axis not in self.mesh.over(splits_samples=True))


class Mesh(_NumberPerAxis):
    """All ranks: an ordered mapping from named axes to sizes, by default data x pipe x row x col.

    A *replica* is one copy of the model, pipe x row x col ranks; a *stage* is row x col ranks.

    Args:
        axes: in the order in which ranks are numbered: the first varies slowest; those of a stage vary fastest.
        tile: rows and columns of the tensor mesh on one node, or None to number ranks row by row.
        sizes: by name of the axis, 1 by default. data: data parallel size. pipe: pipeline parallel size. row,
            col: tensor parallel sizes. Whole numbers; only `ranvier.config.run.MeshSettings` may have `auto`.

    Raises ConfigError for a size below 1, and for a tile that does not divide rows and columns; TypeError for an
    unknown axis.
    """

    tile: tuple[int, int] | None

    def __init__(self, *, axes: Sequence[Axis] = STANDARD_AXES, tile: tuple[int, int] | None = None, **sizes: int
                 ) -> None:
        super().__init__(axes, sizes, 1)
        self.tile = tile
        for axis, size in self.items():
            if hasattr(Mesh, axis) or hasattr(Coordinates, axis):
                raise TypeError(f"{axis} is a name that every mesh has, and no axis can have")
            if not _is_size(size):
                raise ConfigError("must be a whole number of at least 1", code="mesh-axis-size", where=f"mesh.{axis}",
                                  value=size, remedy=f"Set `--mesh.{axis} 1` to leave this axis unused.")
        if tile is None:
            return
        if not isinstance(tile, tuple) or len(tile) != 2 or not all(map(_is_size, tile)):
            raise ConfigError("must be two whole numbers of at least 1, or none", code="mesh-tile-form",
                              where="mesh.tile", value=tile,
                              remedy="Set `--mesh.tile none` to leave the choice to the run.")
        if self.row % self._tile[0] or self.col % self._tile[1]:
            raise ConfigError(f"does not divide the {self.row} rows and {self.col} columns",
                              code="mesh-tile-does-not-divide", where="mesh.tile", value=tile,
                              remedy="Set `--mesh.tile none` to leave the choice to the run.")

    @classmethod
    def of_replicas(cls, count: int) -> Mesh:
        """A mesh of `count` replicas, each on one rank."""
        return cls(data=count)

    def __str__(self) -> str:
        return " x ".join(f"{axis} {size}" for axis, size in self.items())

    def __repr__(self) -> str:
        return f"Mesh({self}{f', tile {self.tile}' if self.tile else ''})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mesh) and (self.axes, self.tile, self.sizes) == (other.axes, other.tile, other.sizes)

    def __hash__(self) -> int:
        return hash((self.axes, self.tile, self.shape))

    def document(self) -> dict[str, object]:
        """The sizes and the tile, for JSON."""
        return {**self, "tile": self.tile}

    @property
    def sizes(self) -> dict[str, int]:
        """Number of ranks along each axis."""
        return dict(self)

    @cached_property
    def _tile(self) -> tuple[int, int]:
        """Rows and columns of a tile; without one, and on stages of one rank, the entire stage is a tile."""
        return (self.row, self.col) if self.tile is None or self.stage_size == 1 else self.tile

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The sizes alone."""
        return tuple(self.values())

    @cached_property
    def size(self) -> int:
        """Number of ranks."""
        return prod(self.values())

    def count(self, axes: Sequence[str]) -> int:
        """Number of ranks that differ only along `axes`."""
        return prod(self[axis] for axis in axes)

    # ------------------------------------------------------------------ questions about roles

    @cached_property
    def replica_axes(self) -> tuple[str, ...]:
        """Axes along which ranks hold the same parameters, and over which their gradients are summed."""
        return self.over(replicates_parameters=True)

    @cached_property
    def pipeline_axes(self) -> tuple[str, ...]:
        """Axes along which ranks hold different stages."""
        return self.over(orders_stages=True)

    @cached_property
    def stage_axes(self) -> tuple[str, ...]:
        """Axes along which the ranks of a stage differ."""
        return self.over(divides_stages=True)

    @cached_property
    def num_replicas(self) -> int:
        """Copies of the model."""
        return self.count(self.replica_axes)

    @cached_property
    def pipeline_size(self) -> int:
        """Ranks over which the blocks of a model are divided."""
        return self.count(self.pipeline_axes)

    @cached_property
    def stage_size(self) -> int:
        """Ranks that hold one stage of one replica together: row x col."""
        return self.count(self.stage_axes)

    @cached_property
    def batch_shares(self) -> int:
        """Parts of a global batch, each of which is cut into its own microbatches."""
        return self.count(self.over(splits_samples=True, replicates_parameters=True))

    @cached_property
    def microbatch_parts(self) -> int:
        """Parts of a microbatch, one for each rank of a stage that has different samples."""
        return self.count(self.over(splits_samples=True, shards_parameters=True))

    @cached_property
    def feature_parts(self) -> int:
        """Parts of each layer's hidden dimension."""
        return self.count(self.over(splits_features=True))

    @cached_property
    def positions(self) -> tuple[Position, ...]:
        """All places in a stage."""
        return tuple(product(*(range(self[axis]) for axis in self.stage_axes)))

    def require_known_axes(self, who: str) -> None:
        """Raise ConfigError if there are several ranks along an axis that is not in `STANDARD_AXES`. who: what does not
        handle it."""
        for axis in self.axes:
            if self[axis.name] > 1 and axis not in STANDARD_AXES:
                raise ConfigError(f"is an axis that {who} does not handle", code="mesh-axis-unknown",
                                  where=f"mesh.{axis.name}", value=self[axis.name], remedy="Give it one rank.")

    # ------------------------------------------------------------------ other meshes

    def resized(self, **sizes: int) -> Mesh:
        """The mesh with other sizes along these axes. The tile is kept only if rows and columns stay the same."""
        same = all(sizes.get(axis, self[axis]) == self[axis] for axis in self.stage_axes)
        return Mesh(axes=self.axes, tile=self.tile if same else None, **{**self, **sizes})

    def shaped(self, *, num_replicas: int, pipeline_size: int | None = None) -> Mesh:
        """The mesh with other numbers of replicas and, if given, of ranks of a pipeline. If several axes have the role,
        the first is resized, and the others get one rank."""
        sizes = dict[str, int]()
        for axes, size in ((self.replica_axes, num_replicas), (self.pipeline_axes, pipeline_size)):
            if size is not None:
                sizes |= {**dict.fromkeys(axes, 1), axes[0]: size}
        return self.resized(**sizes)

    def with_tile(self, tile: tuple[int, int] | None) -> Mesh:
        """The mesh with another tile."""
        return Mesh(axes=self.axes, tile=tile, **self)

    def changed_axes(self, other: Mesh) -> tuple[str, ...]:
        """The axes along which `other` has another size."""
        return tuple(axis for axis in {**self, **other} if self.get(axis, 1) != other.get(axis, 1))

    # ------------------------------------------------------------------ ranks

    def coordinates(self, rank: int) -> Coordinates:
        """Coordinates of `rank`; raises IndexError if it is not on the mesh."""
        self._require_rank(rank)
        rest, inside = divmod(rank, self.stage_size)
        found = {}
        for axis in reversed(self._outer):
            rest, found[axis] = divmod(rest, self[axis])
        return Coordinates(self, found | dict(zip(self.stage_axes, self._stage_positions[inside], strict=True)))

    def _require_rank(self, rank: int) -> None:
        if rank not in range(self.size):
            raise IndexError(f"rank {rank!r} is not on a mesh of {self.size} ranks")

    @cached_property
    def _outer(self) -> tuple[str, ...]:
        return self.over(divides_stages=False)

    @cached_property
    def _stage_positions(self) -> tuple[Position, ...]:
        """The positions in the order of their ranks: tile by tile."""
        rows, cols = self._tile
        return tuple(sorted(self.positions, key=lambda at: (*at[:-2], at[-2] // rows, at[-1] // cols, at)))

    @cached_property
    def _number_in_stage(self) -> dict[Position, int]:
        return {position: number for number, position in enumerate(self._stage_positions)}

    def rank(self, at: Coordinates) -> int:
        """The rank at these coordinates; raises IndexError if they are not on the mesh."""
        for axis, index in at.items():
            if index not in range(self[axis]):
                raise IndexError(f"{axis} {index!r} is not on a mesh of {self}")
        return at.index(self._outer) * self.stage_size + self._number_in_stage[at.position]

    def at(self, **indices: int) -> Coordinates:
        """The coordinates with these indices along axes by name, and 0 along the others."""
        return Coordinates(self, indices)

    def place(self, *, replica: int = 0, pipeline_rank: int = 0, position: Position | None = None) -> Coordinates:
        """The coordinates of a place by role; `position` is by default the stage's leader."""
        found = dict(zip(self.stage_axes, position, strict=True)) if position is not None else {}
        for axes, number in ((self.replica_axes, replica), (self.pipeline_axes, pipeline_rank)):
            for axis in reversed(axes[1:]):
                number, found[axis] = divmod(number, self[axis])
            found |= {axis: number for axis in axes[:1]}
        return Coordinates(self, found)

    def group(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The ranks that differ from `rank` only along `axes`, including itself, in ascending order, which along one
        axis is that of the index."""
        at = self.coordinates(rank)
        indices = product(*(range(self[axis]) for axis in axes))
        return tuple(sorted(self.rank(Coordinates(self, {**at, **dict(zip(axes, each, strict=True))}))
                            for each in indices))

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """All sets of ranks that differ only along `axes`, each in ascending order: a partition of the ranks.

        Along `row` and `col` together, ascending order is row by row without a tile, and tile by tile with one.
        """
        found: dict[tuple[int, ...], list[int]] = {}
        self.count(axes)  # raises KeyError for an unknown axis
        others = [axis for axis in self if axis not in axes]
        for rank in range(self.size):
            at = self.coordinates(rank)
            found.setdefault(tuple(at[axis] for axis in others), []).append(rank)
        return tuple(sorted(map(tuple, found.values())))

    def stage_ranks(self, rank: int) -> tuple[int, ...]:
        """The row x col ranks of the stage of `rank`, in ascending order; the first, its leader, is row 0, col 0."""
        self._require_rank(rank)
        first = rank - rank % self.stage_size
        return tuple(range(first, first + self.stage_size))


def mesh_text(mesh: Mesh) -> str:
    """The mesh in words: axes of a stage only if they are used."""
    left_out = mesh.stage_axes if mesh.stage_size == 1 else ()
    return " x ".join(f"{axis} {size}" for axis, size in mesh.items() if axis not in left_out)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


PlacementName = Literal["v-shape", "interleaved"]


@dataclass(frozen=True, kw_only=True)
class StagePlacement:
    """Assignment of stages to the `num_ranks` ranks of a pipeline, `per_rank` on each (virtual stages).

    one each          rank 0: 0      rank 1: 1      rank 2: 2      rank 3: 3
    v-shape           rank 0: 0 7    rank 1: 1 6    rank 2: 2 5    rank 3: 3 4       (Qi et al., 2024, ZB-V)
    interleaved       rank 0: 0 4    rank 1: 1 5    rank 2: 2 6    rank 3: 3 7       (Narayanan et al., 2021)

    With more than two stages per rank, the v-shape continues as a zigzag. Its messages stay between neighbours, and
    turns need none; with an even number of stages per rank the first rank also has the last stage, and so embedding and
    head.
    """

    num_ranks: int
    per_rank: int = 1
    how: PlacementName = "v-shape"

    @property
    def num_stages(self) -> int:
        """Number of stages of the full pipeline."""
        return self.num_ranks * self.per_rank

    def rank_of(self, stage: int) -> int:
        """The rank that has `stage`."""
        turn, place = divmod(stage, self.num_ranks)
        return self.num_ranks - 1 - place if self.how == "v-shape" and turn % 2 else place

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of `rank`, in ascending order."""
        back = self.num_ranks - 1 - rank
        return tuple(turn * self.num_ranks + (back if self.how == "v-shape" and turn % 2 else rank)
                     for turn in range(self.per_rank))

    def local(self, stage: int) -> int:
        """The place of `stage` among those of its rank."""
        return stage // self.num_ranks


def divisors(number: int) -> list[int]:
    """All divisors of `number`, in ascending order."""
    small = [size for size in range(1, isqrt(number) + 1) if number % size == 0]
    return small + [number // size for size in reversed(small) if size * size != number]


def mesh_of(mesh: Mesh | None, where: str, **sizes: Any) -> Mesh:
    """Return `mesh`, or a mesh of `sizes`, by axis. Raises ConfigError if both are given to the function `where`."""
    if mesh is not None and (axis := next((axis for axis, size in sizes.items() if size != 1), None)):
        raise ConfigError("is given together with a mesh, which has its own sizes", code="size-beside-mesh",
                          where=f"{where}({axis}=...)", value=sizes[axis], remedy=f"Give either mesh= or {axis}=.")
    if mesh is not None and not isinstance(mesh, Mesh):
        raise ConfigError("is not a mesh", code="mesh-of-other-type", where=f"{where}(mesh=...)",
                          value=type(mesh).__name__,
                          remedy="Give ranvier.Mesh(data=2, pipe=2), or the sizes themselves: data=2, pipe=2.")
    return mesh or Mesh(**sizes)
