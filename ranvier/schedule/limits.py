"""Limits of a pipeline's schedule, a rule for them that needs no times, and the conditions from which, with the stages'
mean times, `computed_limits` computes better ones: message delays, variation, cost of deferral. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, pstdev
from typing import Literal, NamedTuple

from ranvier.mesh import StagePlacement


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds on what a pipeline has in flight and defers.

    in_flight: microbatches of a replica between the first stage's forward and their return. deferred: per rank of a
    replica's pipeline, the microbatches whose weight-gradient products (of all its stages) may wait. last: products
    wait only in this many last microbatches of a batch. max_stored: for a rank with several stages, the microbatches
    that these may store or have products of, counted per stage; the action that is due first then runs
    (`RankSchedule`). None for no bound.
    alternating: forwards and backwards run in 1F1B's fixed order, which is fastest if times vary much and nothing may
    wait; with several stages on each rank, placed interleaved, in the order of interleaved 1F1B, and in_flight is then
    at least twice the ranks.
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

    def with_user_limits(self, in_flight: int | Literal["auto"], deferred: tuple[int, ...] | None,
                         last: int | None) -> Limits:
        """Return these limits with the user's settings instead. `deferred` is given together with `last`."""
        return replace(self, in_flight=self.in_flight if in_flight == "auto" else in_flight,
                       deferred=self.deferred if deferred is None else deferred,
                       last=self.last if deferred is None and last is None else last)


def rule_limits(trains: Sequence[bool], placement: StagePlacement | None = None) -> Limits:
    """Limits from nothing but whether each stage trains. placement: by default one stage on each rank.

    In flight: as many microbatches as stages, plus one more for each stage that trains nothing. Such stages store no
    activations, and a credit waits while one of them is busy: with 3 stages, 2 of them frozen, the simulator gives 0.70
    of what the work allows at 3 in flight, and 0.89 at 5.

    Deferred: stage i of p stores p - i graphs in its steady state, so with the products of i microbatches every stage
    keeps as much alive as the first one; the last stores one graph, and has room for one more. Nothing waits if no
    earlier stage waits for a gradient. With several stages per rank all ranks keep the same amount, and one microbatch
    waits on each.
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


# --- conditions -------------------------------------------------------------------------------------------------------


class Deferral(NamedTuple):
    """Time by which messages of the tensor mesh delay one stage longer if its weight gradients wait, relative to the
    time of these gradients: in the backward, below 0 if it is shorter, and in the gradients."""

    backward: float = 0.0
    weight: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """messages: seconds of a message, relative to the slowest stage's forward. variation: standard deviation of an
    action's time, relative to its mean. deferral: of each stage; empty if it costs nothing, or is not known. The
    defaults are for pipelines without measurements."""

    messages: float = 0.05
    variation: float = 0.05
    deferral: tuple[Deferral, ...] = ()


_MOST_VARIATION = 0.3
"""Largest variation that is used. Steps of a few milliseconds on shared cores vary much more, and then no order is
better than any other."""
Actions = Mapping[tuple[int, str], tuple[float, float]]
"""Start and stop of each action of a rank, by step and text (F3), on the rank's clock, in any unit."""


def measured_conditions(ranks: Sequence[Actions]) -> Conditions | None:
    """Conditions measured from the actions of one pipeline's ranks, with one stage on each; None if there are too few.

    Clocks of ranks may differ. The time of a message is the least time from the end of an action to the start of the
    action that it leads to, which then has not waited for anything else: the mean of both ways between two neighbours,
    in which the difference of their clocks cancels.
    """
    forwards = [[stop - start for (_, text), (start, stop) in actions.items() if text.startswith("F")]
                for actions in ranks]
    if not all(len(times) > 1 and fmean(times) > 0 for times in forwards):
        return None
    ways = [(_least_gap(one, other, "F"), _least_gap(other, one, "B")) for one, other in pairwise(ranks)]
    messages = [(forth + back) / 2 for forth, back in ways if forth is not None and back is not None]
    return Conditions(variation=min(_MOST_VARIATION, fmean(pstdev(times) / fmean(times) for times in forwards)),
                      messages=max(0.0, *messages, 0.0) / max(map(fmean, forwards)))


def _least_gap(source: Actions, destination: Actions, kind: str) -> float | None:
    """Least time from the end of an action on `source` to the start of the same microbatch's on `destination`."""
    return min((destination[key][0] - stop for key, (_, stop) in source.items()
                if key in destination and key[1].startswith(kind)), default=None)
