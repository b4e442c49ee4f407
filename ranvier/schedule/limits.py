"""Limits of a pipeline's schedule, and a rule for them that needs no times (`computed_limits` uses times). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ranvier.mesh import StagePlacement


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds on what a pipeline has in flight and defers.

    in_flight: microbatches of a replica between the first stage's forward and their return. deferred: per rank of a
    replica's pipeline, the microbatches whose weight-gradient products (of all its stages) may wait. last: only those
    of a batch's last so many microbatches. max_stored: of a rank with several stages, the microbatches that these may
    store or have products of, each stage's counted; what runs is then what is due first (`RankSchedule`). None for no
    bound.
    alternating: forwards and backwards run in 1F1B's fixed order, which is fastest where times vary much and nothing
    may wait: of several stages on each rank, placed interleaved, interleaved 1F1B's. in_flight is then at least twice
    the ranks.
    """

    in_flight: int
    deferred: tuple[int, ...]
    last: int | None = None
    max_stored: int | None = None
    alternating: bool = False

    @property
    def deferred_text(self) -> str:
        """Numbers of microbatches whose weight gradients may wait, rank by rank, as text."""
        counts = ", ".join(map(str, self.deferred))
        return counts if self.last is None else f"{counts} (only in the last {self.last} microbatches of a step)"

    def given(self, in_flight: int | Literal["auto"], deferred: tuple[int, ...] | None, last: int | None) -> Limits:
        """With what a user has set in their place. `deferred` is given together with `last`."""
        return replace(self, in_flight=self.in_flight if in_flight == "auto" else in_flight,
                       deferred=self.deferred if deferred is None else deferred,
                       last=self.last if deferred is None and last is None else last)


def rule_limits(trains: Sequence[bool], placement: StagePlacement | None = None) -> Limits:
    """Without knowledge of the stages but whether each trains anything. placement: by default one stage on each rank.

    In flight: as many microbatches as stages, and once more those that train nothing. These store no activations, and a
    credit waits while one of them is busy: with 3 stages, 2 of them frozen, the simulator gives 0.70 of what the work
    allows at 3 in flight, and 0.89 at 5.

    Deferred: stage i of p stores p - i graphs in its steady state, so with the products of i microbatches every stage
    keeps as much alive as the first one; the last stores one graph, and has room for one more. Nothing waits where no
    earlier stage does for a gradient. With several stages a rank keeps as much as any other, and one waits on each.
    """
    if placement is not None and placement.per_rank > 1:
        held = [placement.stages_of(rank) for rank in range(placement.num_ranks)]
        frozen = sum(not any(trains[stage] for stage in stages) for stages in held)
        return Limits(in_flight=placement.num_ranks + frozen,
                      deferred=tuple(int(any(trains[:max(stages)])) for stages in held))
    depth = len(trains)
    first = next((stage for stage, each in enumerate(trains) if each), depth)
    return Limits(in_flight=depth + sum(not each for each in trains), deferred=tuple(
        stage + (stage == depth - 1) if stage > first else 0 for stage in range(depth)))
