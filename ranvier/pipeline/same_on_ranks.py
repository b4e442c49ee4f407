"""Checks that ranks were given the same: the ranks of a replica the same targets, all ranks the same learning rates and
settings; and that replicas were not given the same samples.

The first stage takes the inputs that its rank was given, the last one the targets that its own was given. If each rank
has drawn its samples with its own random numbers, the two belong to different samples. So each of these ranks adds
checksums of its targets to the sums of the batch (`pipeline/statistics`), with factors whose sum is zero over ranks
that must agree: integers bit by bit, real numbers up to the rounding of ranks that compute their own. In an evaluation
only ranks that read its loss notice.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ranvier.comm.protocol import Group
from ranvier.config.run import Guard
from ranvier.errors import ConfigError, ModelError
from ranvier.mesh import Coordinates, StagePlacement
from ranvier.pipeline.microbatch import Microbatch
from ranvier.plan.plan import Plan

SAME_TARGETS = 5
"""Number of values that each rank contributes to the sums."""
_MAX_ELEMENTS = 2048
"""Maximum number of elements of a tensor that are compared."""
_INTEGERS = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
NUMBER_BITS = 20
"""Bits of each rank's checksum: few enough that sums over thousands of ranks are exact in fp64."""
ODD = 0x9E3779B97F4A7C15 - (1 << 64)
"""Its products with 1, 2, ... differ in all of their 64 lowest bits, which int64 keeps."""
_TOLERANCE = 0.05
"""Tolerance for real numbers: far above what a rank's own rounding adds to a projection, as of a teacher's outputs in
bf16. Differences between other samples are below it in 3 % of batches."""
_LEAST_SPREAD = 1e-3
"""Real numbers that deviate less from their mean, relative to it, are equal."""


class SameTargets:
    """The comparison on one rank. at: its place. placement: which ranks have the first and the last stage."""

    def __init__(self, at: Coordinates, placement: StagePlacement) -> None:
        mesh, first, last = at.mesh, placement.rank_of(0), placement.rank_of(placement.num_stages - 1)
        size = len({first, last}) * mesh.feature_parts
        axes = mesh.over(splits_samples=True)
        leads = at.pipeline_rank == first and at.is_first_with_samples
        self._all = size * mesh.count(axes)
        self._takes_part = size > 1 and at.pipeline_rank in (first, last)
        self._factor = (1 + at.index(axes)) * (size - 1 if leads else -1)

    def numbers(self, batch: Sequence[Microbatch]) -> Tensor:
        """[5] fp64, what this rank adds, on the targets' device: for integers (checksum, 1), for real numbers
        (projection, its square's scale, 1), zeros if it cannot compare.

        A leaf whose elements are all equal in the full batch, or nearly equal real numbers, may be a placeholder on a
        rank without targets: such a rank cannot compare.
        """
        leaves = [(place, leaf) for microbatch in batch for place, leaf in enumerate(tree_leaves(microbatch.targets))
                  if isinstance(leaf, Tensor) and leaf.numel()
                  and _is_comparable(leaf.dtype)] if self._takes_part else []
        if not leaves or any(
                type(leaf) is not Tensor or leaf.layout is not torch.strided or leaf.device != leaves[0][1].device
                for _, leaf in leaves):
            return torch.zeros(SAME_TARGETS, dtype=torch.float64)
        integers: dict[int, list[Tensor]] = {}
        reals: dict[int, list[Tensor]] = {}
        for place, leaf in leaves:
            (reals if leaf.is_floating_point() else integers).setdefault(place, []).append(_sample_elements(leaf))
        nothing = torch.zeros(SAME_TARGETS, dtype=torch.float64, device=leaves[0][1].device)  # a copy would wait for it
        return torch.cat([
            self._sum_integers([torch.cat(parts).to(torch.int64) for parts in integers.values()])
            if integers else nothing[:2],
            self._sum_reals([torch.cat(parts).detach() for parts in reals.values()]) if reals else nothing[2:]])

    def _sum_integers(self, columns: list[Tensor]) -> Tensor:
        says = torch.stack([(column != column[:1]).any() for column in columns]).all()  # stays on the device
        values = torch.cat(columns)
        number = (values * _mix(values)).sum() >> 64 - NUMBER_BITS  # the highest bits, which depend on all others
        return (torch.stack([number * self._factor, torch.ones_like(number)]) * says).to(torch.float64)

    def _sum_reals(self, columns: list[Tensor]) -> Tensor:
        """Sum deviations from the mean with random signs: those of other samples do not cancel."""
        deviations, says = [], []
        for column in columns:
            values = column.to(torch.float64)
            deviations.append(values - values.mean())
            says.append(deviations[-1].norm() > max(_LEAST_SPREAD, 16 * torch.finfo(column.dtype).eps) * values.norm())
        values = torch.cat(deviations)
        signs = torch.where(_mix(values) < 0, -1.0, 1.0).to(torch.float64)
        found = torch.stack([(values * signs).sum() * self._factor, values.square().sum() * self._factor ** 2,
                             torch.ones_like(values[0])])
        return torch.where(torch.stack(says).all(), found, torch.zeros_like(found))

    def check(self, sums: Sequence[float]) -> None:
        """Raise ModelError if `sums` over all ranks show different targets; do nothing if some rank could not
        compare."""
        difference, count, projection, scale, real_count = sums
        differ = count == self._all and difference
        if differ or (real_count == self._all and abs(projection) > _TOLERANCE * scale ** 0.5):
            raise ModelError("are of other samples on the last stage than on the first one, whose inputs they belong "
                             "to; nothing was updated", code="targets-differ", where="targets of the batch",
                             remedy="Draw the same batch on all ranks of a replica, from a torch.Generator seeded "
                                    "with the step and engine.coordinates.data, or with ranvier.shard_loader: what "
                                    "torch draws without one differs from rank to rank. If only the targets are "
                                    "random, as noisy labels or a teacher's with dropout, give None for them on the "
                                    "first stage.")


def _is_comparable(dtype: torch.dtype) -> bool:
    return dtype in _INTEGERS or dtype.is_floating_point


def _mix(values: Tensor) -> Tensor:
    """[n] int64 for [n] values: a number for each place."""
    return torch.arange(1, len(values) + 1, device=values.device) * ODD


def _sample_elements(leaf: Tensor) -> Tensor:
    """[n]: at most about `_MAX_ELEMENTS` of the elements."""
    flat, apart = leaf.reshape(-1), leaf.numel() // _MAX_ELEMENTS
    return flat[::apart] if apart > 1 else flat


# --- samples ----------------------------------------------------------------------------------------------------------

# Whether each share of the first batch has its own samples: replicas or rows that read the same samples compute the
# same gradients, and train no faster than one of them.


class OwnSamples:
    """The comparison on one rank. at: its place. placement: which ranks have the first stage, and so inputs."""

    def __init__(self, at: Coordinates, placement: StagePlacement) -> None:
        axes = at.mesh.over(splits_samples=True)
        self._axes = [axis for axis in axes if at.mesh[axis] > 1]
        self._factors = [(1 + at.index([other for other in axes if other != axis])) * (
            -1 if at[axis] else at.mesh[axis] - 1) for axis in self._axes]
        self._all = at.mesh.count(axes)
        self._looks = at.pipeline_rank == placement.rank_of(0) and at.is_first_with_samples and bool(self._axes)
        self._tells = not any(at.values())

    def numbers(self, batch: Sequence[Microbatch]) -> list[int]:
        """What this rank adds to the sums of a training batch: 1 if it can compare, and for each axis a checksum of the
        inputs; zeros after the first batch, and for inputs all of whose elements are equal. On a GPU it waits for them.
        """
        nothing = [0] * (1 + len(self._axes))
        if not (self._looks and batch):
            return nothing
        self._looks = False
        leaves = [_sample_elements(leaf.detach()).cpu() for microbatch in batch
                  for leaf in tree_leaves(microbatch.inputs)
                  if type(leaf) is Tensor and leaf.layout is torch.strided and leaf.numel() and not leaf.is_meta]
        if all(bool((leaf == leaf[0]).all()) for leaf in leaves):
            return nothing
        number = 0
        for leaf in leaves:
            number = crc32(leaf.contiguous().view(torch.uint8).numpy().data, number)
        return [1, *((number >> 32 - NUMBER_BITS) * factor for factor in self._factors)]

    def check(self, count: float, *differences: float) -> None:
        """Warn, on the first rank, of the axes along which all ranks have the same numbers."""
        if self._tells and count == self._all and not all(differences):
            axes = [axis for axis, difference in zip(self._axes, differences, strict=True) if not difference]
            warnings.warn(f"all ranks along {' and '.join(axes)} were given the same samples in the first batch, and "
                          "train no faster than one: give each its own, according to engine.coordinates, or use "
                          "ranvier.shard_loader", stacklevel=2)


# --- learning rates ---------------------------------------------------------------------------------------------------

# Whether all replicas update by the same learning rates and other settings, such as a weight decay.
#
# A setting that depends on a rank's own values, such as its own loss, lets the parameters of replicas drift apart. So
# each rank adds a checksum of its settings to the sums of the batch (`pipeline/statistics`), with factors whose sum is
# zero over ranks that must agree: all ranks for Ranvier's optimizer, and the replicas of a stage for a user's
# optimizer, whose groups may differ between stages.


_NO_SETTINGS = ("params", "param_names")
"""Entries of a group that are not settings."""


class SameRates:
    """The comparison on one rank. at: its place. own: whether Ranvier's optimizer updates, with one learning rate."""

    def __init__(self, at: Coordinates, *, own: bool) -> None:
        mesh = at.mesh
        axes = tuple(mesh) if own else mesh.replica_axes
        others = () if own else tuple(axis for axis in mesh if axis not in axes)
        self._place = at.index(others)
        self._factor = (1 + self._place) * (-1 if at.index(axes) else mesh.count(axes) - 1)
        self._groups: list[list[tuple[str, str]]] = []
        """Names and values of the settings of each group."""

    def begin(self, own: float | None, users: torch.optim.Optimizer | None) -> None:
        """Begin a training batch. own: the rate of Ranvier's optimizer. Settings of a user's optimizer are in its
        groups, which may be in any order."""
        groups = [{"lr": own}] if own is not None else getattr(users, "param_groups", ())
        self._groups = sorted([(name, _text(value)) for name, value in sorted(group.items())
                               if name not in _NO_SETTINGS] for group in groups)

    def number(self) -> float:
        """The checksum that this rank adds to the sums."""
        return float(self._factor * (crc32(repr(self._groups).encode()) >> 32 - NUMBER_BITS))

    def check(self, total: float, ranks: Group) -> None:
        """Raise ConfigError, with the first difference, if the sum over all `ranks` shows different settings."""
        if total:
            of_ranks = ranks.gather_objects([self._place, self._groups])
            found = (_difference(of_ranks, rank) for rank in range(len(of_ranks)))
            raise ConfigError("are not the same on all ranks that update the same parameters; nothing was updated",
                              code="learning-rates-differ", where="learning rate and settings of the optimizer",
                              value=next(filter(None, found), None),
                              remedy="Compute them from what is the same on every rank, such as the step or "
                                     "BatchResult.loss (of the global batch), or send one rank's value to all with "
                                     "world.broadcast.")


def _difference(of_ranks: Sequence[tuple[int, list[list[list[str]]]]], rank: int) -> str | None:
    """The first difference of a rank's groups from those of the first rank that must agree. of_ranks: (number of the
    set of ranks that must agree, settings of each group) of each rank."""
    place, groups = of_ranks[rank]
    first = next(number for number, (other, _) in enumerate(of_ranks) if other == place)
    theirs = of_ranks[first][1]
    if len(theirs) != len(groups):
        return f"{len(theirs)} groups of parameters on rank {first}, {len(groups)} on rank {rank}"
    before, after = (Counter(tuple((name, text) for name, text in group) for group in of_one)
                     for of_one in (theirs, groups))
    left, right = sorted((before - after).elements()), sorted((after - before).elements())
    if not left:
        return None
    was, now = dict(left[0]), dict(right[0])
    name = next(name for name in (*was, *now) if was.get(name) != now.get(name))
    where = f", in {len(left)} of {len(groups)} groups of parameters" if len(groups) > 1 else ""
    return f"{name} {was.get(name)} on rank {first}, {now.get(name)} on rank {rank}{where}"


def _text(value: object) -> str:
    """Text of a setting: numbers to six digits, since the last bits of a cosine differ between machines. A number on a
    device is not waited for; for other objects the class counts."""
    if isinstance(value, Tensor) and value.device.type == "cpu" and value.numel() == 1:
        value = value.item()
    if isinstance(value, (int, float)):
        return f"{value:.6g}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_text, value))})"
    return value if isinstance(value, str) else type(value).__name__


# --- settings ---------------------------------------------------------------------------------------------------------

# Whether all ranks were given the same settings, if differences would go unnoticed: replicas whose optimizers differ
# drift apart, and so do ranks that clip, freeze or judge differently.


_OF_THE_RANK = frozenset({"offload", "offload_share", "buckets_in_flight"})
"""Settings of where a rank keeps its states, which change no result."""


def settings_of(plan: Plan, guard: Guard | None, **others: object) -> dict[str, str]:
    """Setting -> value, as texts. others: further arguments of the engine."""
    sections: dict[str, Any] = {"optim": plan.optim, "guard": guard or Guard(bad_step="none"), "tensor": plan.tensor}
    placement, blocks = plan.stages.placement, [row.blocks for row in plan.stages.rows]
    model = repr((sum(blocks, ()), plan.layout.parameters)).encode()
    found = {"Engine(model=...)": f"blocks and parameters with the checksum {crc32(model):x}", "mesh": str(plan.mesh),
             "pipeline.stages-per-rank": str(placement.per_rank), "pipeline.placement": placement.how,
             "pipeline.boundaries": str(plan.stages.boundaries)}
    found |= {f"{section}.{field.name.replace('_', '-')}": repr(getattr(values, field.name))
              for section, values in sections.items() for field in fields(values) if field.name not in _OF_THE_RANK}
    return found | {f"Engine({name}=...)": repr(value) for name, value in others.items()}


def check_same(of_ranks: Sequence[Mapping[str, str]], rank: int) -> None:
    """Raise ConfigError, on every rank, for the first setting that differs between ranks."""
    for name, first in of_ranks[0].items():
        others = [number for number, found in enumerate(of_ranks) if found.get(name) != first]
        if others:
            raise ConfigError(f"is not the same on all ranks: {first} on rank 0, and {of_ranks[others[0]].get(name)} "
                              f"on rank {others[0]}", code="settings-differ", where=name,
                              value=of_ranks[rank].get(name),
                              remedy="Use the same value on all ranks; world.broadcast sends one rank's value to all.")
