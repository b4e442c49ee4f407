"""How many microbatches are in flight, and whose weight gradients may wait, where both are auto. Pure.

More microbatches in flight hide messages and uneven stages; more deferred products fill the bubble at the end of a
batch. Both cost memory. The choice simulates the schedule and takes what is fastest within a multiple of the memory
that 1F1B needs for the same stages:

    in flight    1F1B's limit p, or up to 2 p
    deferred    per stage, as many microbatches as the rest of the memory holds, and the fastest step uses
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import floor, log10

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
                    in_flight: int | None = None) -> Limits:
    """The fastest limits for these stages.

    Args:
        memory: bytes that a stage may need, relative to those of the largest stage under 1F1B.
        in_flight: the limit, where it is given.
    """
    rule = rule_limits([stage.trains for stage in stages])
    if in_flight is not None:
        rule = replace(rule, in_flight=in_flight)
    if not policy.defers or not 1 < len(stages) <= MAX_SIMULATED_STAGES or not any(stage.trains for stage in stages):
        return rule
    seconds = max(stage.forward + stage.backward + stage.weight for stage in stages)
    largest = max(stage.fixed + (len(stages) - place) * stage.graph for place, stage in enumerate(stages))
    rounded = tuple(StageLoad(
        forward=_round(stage.forward / seconds), backward=_round(stage.backward / seconds),
        weight=_round(stage.weight / seconds), trains=stage.trains, fixed=_round(stage.fixed / largest),
        graph=_round(stage.graph / largest), operands=_round(stage.operands / largest)) for stage in stages)
    best: Callable[..., Limits] = _best if isinstance(policy, Hashable) else _best.__wrapped__
    return best(rounded, policy, memory, rule, in_flight)


def _round(value: float) -> float:
    return round(value, _DIGITS - 1 - floor(log10(value))) if value > 0 else 0.0


@lru_cache(maxsize=1024)
def _best(stages: tuple[StageLoad, ...], policy: Policy, memory: float, rule: Limits, given: int | None) -> Limits:
    depth = len(stages)
    largest = max(stage.fixed + (depth - place) * stage.graph for place, stage in enumerate(stages))
    in_flights = range(depth, 2 * depth + 1, max(1, depth // 4)) if given is None else [given]
    made = _simulated(stages, policy, rule)
    found = [(made.seconds, _needs(stages, made, rule), rule)]
    for share, in_flight in product((1.0, (1.0 + memory) / 2, memory), in_flights):
        cap = share * largest
        limits = Limits(in_flight=in_flight, deferred=tuple(
            _affordable(stage, cap, max(1, in_flight - place), 2 * depth) for place, stage in enumerate(stages)))
        made = _simulated(stages, policy, limits)
        limits = replace(limits, deferred=tuple(-(-most // _UNIT) for most in made.most_queued_bytes))  # what is used
        needs = _needs(stages, made, limits)
        if needs <= cap:
            found.append((made.seconds, needs, limits))
    fastest = min(seconds for seconds, _, _ in found)
    return min((each for each in found if each[0] <= (1 + _GAIN) * fastest), key=lambda each: each[1])[2]


def _needs(stages: Sequence[StageLoad], made: Simulated, limits: Limits) -> float:
    """Bytes of the stage that needs most."""
    return max(stage.fixed + stored * stage.graph + waiting * stage.operands for stage, stored, waiting in zip(
        stages, made.most_stored, limits.deferred, strict=True))


_UNIT = 1000
"""Bytes that the simulation takes a microbatch's deferred products to keep."""


def simulated_microbatches(num_stages: int) -> int:
    """How many microbatches a simulation has: limits must be known before the first batch."""
    return 2 * num_stages + 6


def predicted_bubble(stages: Sequence[StageLoad], policy: Policy, limits: Limits) -> float:
    """Share of all stages' time in which they wait, with `simulated_microbatches`."""
    return _simulated(stages, policy, limits).bubble_fraction


def _simulated(stages: Sequence[StageLoad], policy: Policy, limits: Limits) -> Simulated:
    times = [StageTimes(forward=stage.forward, backward=stage.backward, weight=stage.weight, products=4,
                        alive_bytes=_UNIT, trains=stage.trains) for stage in stages]
    return simulate(times, simulated_microbatches(len(stages)), policy, limits.in_flight,
                    hop=_HOP * max(stage.forward for stage in stages),
                    defer_bytes=[_UNIT * waiting for waiting in limits.deferred])


def _affordable(stage: StageLoad, cap: float, stored: int, most: int) -> int:
    """Microbatches whose products have room beside so many stored ones."""
    if not stage.operands:
        return 0
    return max(0, min(most, int((cap - stage.fixed - stored * stage.graph) / stage.operands)))

