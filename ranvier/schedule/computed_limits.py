"""How many microbatches are in flight, and whose weight gradients may wait, where both are auto. Pure.

More microbatches in flight hide messages and uneven stages; more deferred products fill the bubble at the end of a
batch. Both cost memory. The choice simulates the schedule and takes what is fastest within a multiple of the memory
that 1F1B needs for the same stages:

    in flight    1F1B's limit p, or up to 2 p
    deferred     per rank, as many microbatches as the rest of the memory holds, and the fastest step uses
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import floor, log10

from ranvier.mesh import StagePlacement
from ranvier.schedule.limits import Limits, rule_limits
from ranvier.schedule.schedule import Policy
from ranvier.schedule.simulator import Simulated, StageTimes, simulate

MAX_SIMULATED_STAGES = 16
"""Deeper pipelines follow `rule_limits`; their simulation would take seconds."""
_HOP = 0.01  # of the slowest stage's forward; without messages equal alternatives would be ties
_GAIN = 0.005  # of a step; a smaller one is worth no memory
_DIGITS = 2  # to which loads are rounded, so that counts that differ in details give one choice


@dataclass(frozen=True, kw_only=True)
class StageLoad:
    """One stage, with one microbatch's times in any unit, and bytes in any other.

    fixed: bytes that do not depend on the schedule: parameters, gradients, optimizer states, the process. graph: what a
    microbatch keeps between forward and backward. operands: what its deferred products keep.
    """

    forward: float
    backward: float
    weight: float
    trains: bool
    fixed: float
    graph: float
    operands: float


def computed_limits(stages: Sequence[StageLoad], policy: Policy, *, memory: float,
                    in_flight: int | None = None, placement: StagePlacement | None = None,
                    num_microbatches: int | None = None) -> Limits:
    """The fastest limits for these stages.

    Args:
        memory: bytes that a rank may need, relative to those of the largest under 1F1B with one stage on each.
        in_flight: the limit, where it is given.
        placement: which stages each rank has; by default one each.
        num_microbatches: of a batch on one replica; None: not known (`simulated_microbatches`).
    """
    placement = placement or StagePlacement(pipe=len(stages))
    rule = rule_limits([stage.trains for stage in stages], placement)
    if in_flight is not None:
        rule = replace(rule, in_flight=in_flight)
    if (not policy.defers or not placement.pipe > 1 or len(stages) > MAX_SIMULATED_STAGES * min(2, placement.per_rank)
            or not any(stage.trains for stage in stages)):
        return rule
    best: Callable[..., Limits] = _best if isinstance(policy, Hashable) else _best.__wrapped__
    return best(_rounded(stages), policy, memory, rule, in_flight, placement,
                simulated_microbatches(placement.pipe, num_microbatches))


def _rounded(stages: Sequence[StageLoad]) -> tuple[StageLoad, ...]:
    """Loads relative to the largest, to so few digits that one choice is made of many."""
    seconds = max(stage.forward + stage.backward + stage.weight for stage in stages)
    largest = max(stage.fixed + (len(stages) - place) * stage.graph for place, stage in enumerate(stages))
    return tuple(StageLoad(
        forward=_round(stage.forward / seconds), backward=_round(stage.backward / seconds),
        weight=_round(stage.weight / seconds), trains=stage.trains, fixed=_round(stage.fixed / largest),
        graph=_round(stage.graph / largest), operands=_round(stage.operands / largest)) for stage in stages)


def _round(value: float) -> float:
    return round(value, _DIGITS - 1 - floor(log10(value))) if value > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class _RankBytes:
    """What the stages of one rank need together."""

    fixed: float
    graph: float
    operands: float


def _of_ranks(stages: Sequence[StageLoad], placement: StagePlacement) -> list[_RankBytes]:
    held = [[stages[stage] for stage in placement.stages_of(rank)] for rank in range(placement.pipe)]
    return [_RankBytes(fixed=sum(stage.fixed for stage in own), graph=sum(stage.graph for stage in own),
                       operands=sum(stage.operands for stage in own)) for own in held]


@lru_cache(maxsize=1024)
def _best(stages: tuple[StageLoad, ...], policy: Policy, memory: float, rule: Limits, given: int | None,
          placement: StagePlacement, count: int) -> Limits:
    pipe, ranks = placement.pipe, _of_ranks(stages, placement)
    largest = max(rank.fixed + min(pipe - place, count) * rank.graph for place, rank in enumerate(ranks))
    most = max(pipe, min(2 * pipe, count))
    in_flights = range(pipe, most + 1, max(1, pipe // 4)) if given is None else [given]
    made = _simulated(stages, policy, rule, placement, count)
    found = [(made.seconds, _needs(ranks, made, rule), rule)]
    for share, in_flight in product((1.0, (1.0 + memory) / 2, memory), in_flights):
        cap = share * largest
        limits = Limits(in_flight=in_flight, deferred=tuple(
            _affordable(rank, cap, stored, 2 * pipe) for rank, stored in zip(
                ranks, _stored(stages, policy, in_flight, placement, count), strict=True)))
        made = _simulated(stages, policy, limits, placement, count)
        # What is used, and one more where there is room: times are not exactly those of the simulation.
        limits = replace(limits, deferred=tuple(min(most, -(-used // _UNIT) + 1) for most, used in zip(
            limits.deferred, made.most_queued_bytes, strict=True)))
        needs = _needs(ranks, made, limits)
        if needs <= cap:
            found.append((made.seconds, needs, limits))
    fastest = min(seconds for seconds, _, _ in found)
    return min((each for each in found if each[0] <= (1 + _GAIN) * fastest), key=lambda each: each[1])[2]


def _stored(stages: Sequence[StageLoad], policy: Policy, in_flight: int, placement: StagePlacement,
            count: int) -> list[float]:
    """Bytes that microbatches keep on each rank. Several stages of a rank do not store most at the same time, which the
    schedule knows; how many products wait changes little of it."""
    if placement.per_rank == 1:
        return [min(count, max(1, in_flight - place)) * stage.graph for place, stage in enumerate(stages)]
    waiting = Limits(in_flight=in_flight, deferred=(1,) * placement.pipe)
    return list(_simulated(stages, policy, waiting, placement, count).most_kept_bytes)


def _needs(ranks: Sequence[_RankBytes], made: Simulated, limits: Limits) -> float:
    """Bytes of the rank that needs most."""
    return max(rank.fixed + kept + waiting * rank.operands for rank, kept, waiting in zip(
        ranks, made.most_kept_bytes, limits.deferred, strict=True))


_UNIT = 1000
"""Bytes that the simulation takes a microbatch's deferred products to keep."""


def simulated_microbatches(pipe: int, num_microbatches: int | None = None) -> int:
    """How many microbatches a simulation of so many ranks has: those of a batch, but no more than a few times the
    ranks. With more, what it takes grows with them, and the schedule only repeats its steady state. Where a batch's
    number is not known before it comes, less is simulated, in which start and end count more."""
    return 2 * pipe + 6 if num_microbatches is None else min(num_microbatches, 4 * pipe + 16)


def predicted_bubble(stages: Sequence[StageLoad], policy: Policy, limits: Limits,
                     placement: StagePlacement | None = None, num_microbatches: int | None = None) -> float:
    """Share of all ranks' time in which they wait, with `simulated_microbatches`."""
    placement = placement or StagePlacement(pipe=len(stages))
    count = simulated_microbatches(placement.pipe, num_microbatches)
    return _simulated(stages, policy, limits, placement, count).bubble_fraction


def _simulated(stages: Sequence[StageLoad], policy: Policy, limits: Limits, placement: StagePlacement,
               count: int) -> Simulated:
    ranks = _of_ranks(stages, placement)
    times = []
    for place, stage in enumerate(stages):
        whole = ranks[placement.rank_of(place)].operands
        times.append(StageTimes(
            forward=stage.forward, backward=stage.backward, weight=stage.weight, products=4, kept_bytes=stage.graph,
            alive_bytes=round(_UNIT * stage.operands / whole) if whole else _UNIT, trains=stage.trains))
    return simulate(times, count, policy, limits.in_flight,
                    hop=_HOP * placement.per_rank * max(stage.forward for stage in stages), placement=placement,
                    defer_bytes=[_UNIT * waiting for waiting in limits.deferred])


def _affordable(rank: _RankBytes, cap: float, stored: float, most: int) -> int:
    """Microbatches whose products have room beside so many stored bytes."""
    if not rank.operands:
        return 0
    return max(0, min(most, int((cap - rank.fixed - stored) / rank.operands)))
