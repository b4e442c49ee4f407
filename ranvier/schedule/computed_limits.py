"""Choice of the in-flight limit and of deferred weight gradients, if both are auto. Pure.

More microbatches in flight hide messages and uneven stages; more deferred products fill the bubble at the end of a
batch. Both cost memory. The choice simulates the schedule, with messages and with times that vary, and takes the
fastest limits within a multiple of the memory that 1F1B needs for the same stages; 1F1B itself is a candidate, so no
limits are chosen that are predicted to be slower:

    in flight    1F1B's limit p, or up to 2 p
    order        what is due first, or with p in flight 1F1B's fixed order (alternating); with several stages on each
                 rank, placed interleaved, interleaved 1F1B's, with 2 p in flight
    deferred     per rank, as many microbatches as the rest of the memory holds, and the fastest step uses
    last         if a deferred product takes longer: those of all microbatches, or only of a step's last ones, which
                 fill the bubble at its end
    max_stored   with several stages on each rank: what these may hold, which decides what may run early

Reported predictions come from the simulation that chooses, in which more memory never makes a step longer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import ceil, floor, inf, log10, sqrt
from statistics import fmean
from typing import TypeVar

from ranvier.mesh import StagePlacement
from ranvier.schedule.limits import Conditions, Deferral, Limits, rule_limits
from ranvier.schedule.policies import MessageDriven
from ranvier.schedule.schedule import Action, Policy, forwards_before_returns, stored_in_even_flow
from ranvier.schedule.simulator import PRODUCTS, StageTimes, simulate

MAX_SIMULATED_STAGES = 32
"""Deeper pipelines (with several stages on each rank, twice as deep) follow `rule_limits`; their simulation would take
many seconds."""
_MAX_FINE_STAGES = 16
"""Up to this number of stages, or twice as many if each rank has several, all numbers in flight are tried; with more
stages, only the largest that the memory holds, with whatever else fits."""
UNKNOWN = Conditions()
_DRAWS = 2
"""Number of simulations with different random times; their mean counts."""
_LONG = 256
"""Microbatches times ranks from which on one simulation is enough: the variation averages out over its many actions."""
_GAIN = 0.002  # of a step; a smaller gain is not worth any memory
_DIGITS = 3  # to which loads are rounded, so that nearly equal loads are simulated once
_BUDGETS = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0)
"""Memory budgets for which limits are searched, relative to 1F1B's memory: up to the first above a rank's allowance."""
_TRIES = 8
"""Maximum number of simulations in the search for limits within a budget."""
_ROOMS = 6
"""Approximate number of values of `max_stored` that are tried."""
_MAX_WINDOWS = 4
"""Largest number of ranks for which it is tried whether only a step's last products should wait. Deeper pipelines also
wait so long at a step's start that all products wait in the fastest simulation, even with a factor of 1.1."""
_SMALL = 0.005
"""Share of a microbatch's time on the slowest stage: if deferral costs less, it is not tried whether fewer products
should wait."""
_SURELY = 3.0
"""Deferral is not tried if it costs more than this many times what it can save."""
_Number = TypeVar("_Number", int, float)
_UNIT = 1_000_000
"""The simulation's bytes for a relative load of 1."""


@dataclass(frozen=True, kw_only=True)
class StageLoad:
    """One stage, with one microbatch's times in any unit, and bytes in any other.

    fixed: bytes that do not depend on the schedule: parameters, gradients, optimizer states, the process. graph: what a
    microbatch keeps between forward and backward. operands: what its deferred products keep. deferred_factor: factor on
    the time of a weight gradient if it was deferred, since its operands are no longer in a cache. longer_backward: time
    by which a backward that defers takes longer.
    """

    forward: float
    backward: float
    weight: float
    trains: bool
    fixed: float
    graph: float
    operands: float
    deferred_factor: float = 1.0
    longer_backward: float = 0.0


def computed_limits(stages: Sequence[StageLoad], policy: Policy, *, memory: float,
                    in_flight: int | None = None, placement: StagePlacement | None = None,
                    num_microbatches: int | None = None, conditions: Conditions = UNKNOWN) -> Limits:
    """Find the fastest limits for these stages; with one stage on each rank, never limits that are predicted to be
    slower than 1F1B. With more memory, the simulated step never takes longer.

    Args:
        memory: bytes that a rank may need, relative to the largest rank's under 1F1B (`_Case.bytes_under_1f1b`).
        in_flight: the limit, if it is given.
        placement: which stages each rank has; by default one each.
        num_microbatches: of a batch on one replica; None: not known (`simulated_microbatches`).
        conditions: time of messages, variation of times, and cost of deferral.
    """
    placement = placement or StagePlacement(num_ranks=len(stages))
    rule = rule_limits([stage.trains for stage in stages], placement)
    if in_flight is not None:
        rule = replace(rule, in_flight=in_flight)
    if not policy.defers or not placement.num_ranks > 1 or not any(stage.trains for stage in stages):
        return rule
    case = _case(stages, policy, placement, num_microbatches, conditions)
    if not are_searched(placement) and placement.per_rank == 1:
        return _within_memory(_where_it_pays(rule, case), stages, memory)
    return _best(case, memory, rule, in_flight)


def are_searched(placement: StagePlacement) -> bool:
    """Whether the limits of this number of stages are found by simulations."""
    return placement.num_stages <= MAX_SIMULATED_STAGES * min(2, placement.per_rank)


def _where_it_pays(rule: Limits, case: _Case) -> Limits:
    """Return the rule, with nothing deferred if deferral costs more than it can save."""
    longer, saved = case.deferral
    return rule if case.count * longer <= saved else replace(rule, deferred=(0,) * len(case.stages))


def _within_memory(rule: Limits, stages: Sequence[StageLoad], memory: float) -> Limits:
    """Return the rule with no more deferred than the memory holds in addition to what stages store, without a
    simulation."""
    depth = len(stages)
    most = memory * max(stage.fixed + (depth - place) * stage.graph for place, stage in enumerate(stages))
    deferred = []
    for place, (stage, waiting) in enumerate(zip(stages, rule.deferred, strict=True)):
        stored = stored_in_even_flow(stage=place, num_stages=depth, in_flight=rule.in_flight)
        left = most - stage.fixed - stored * stage.graph
        deferred.append(max(0, min(waiting, floor(left / stage.operands))) if stage.operands else waiting)
    return replace(rule, deferred=tuple(deferred))


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Results of the simulation that chooses limits. step: its time, relative to one in which no rank waits and nothing
    is deferred. bubble_fraction: share of all ranks' time in which they wait. memory: the peak of the rank that needs
    most, relative to that of 1F1B. at_peak: for each stage, the microbatches that it stores at its rank's peak, and the
    number of others whose weight gradients wait."""

    step: float
    bubble_fraction: float
    memory: float
    at_peak: tuple[tuple[int, float], ...]


def predict(stages: Sequence[StageLoad], policy: Policy, limits: Limits, placement: StagePlacement | None = None,
            num_microbatches: int | None = None, conditions: Conditions = UNKNOWN) -> Prediction:
    """Simulate these limits with `simulated_microbatches`; other arguments as for `computed_limits`."""
    case = _case(stages, policy, placement or StagePlacement(num_ranks=len(stages)), num_microbatches, conditions)
    made = _outcome(case, limits)
    return Prediction(step=made.step, bubble_fraction=made.bubble_fraction, at_peak=made.at_peak,
                      memory=max(made.peak) / (case.bytes_under_1f1b() or 1.0))


def simulated_microbatches(pipe: int, num_microbatches: int | None = None) -> int:
    """Number of microbatches that are simulated for `pipe` ranks: those of a batch, but at most a few times the ranks.
    With more, the time grows, and the schedule only repeats its steady state. If a batch's number is not known
    beforehand, fewer are simulated, so start and end count more."""
    return 2 * pipe + 6 if num_microbatches is None else min(num_microbatches, 4 * pipe + 16)


def _round_loads(stages: Sequence[StageLoad]) -> tuple[StageLoad, ...]:
    """Return loads relative to the largest, with so few digits that many cases share one simulation."""
    seconds = max(stage.forward + stage.backward + stage.weight for stage in stages) or 1.0
    largest = max(stage.fixed + (len(stages) - place) * stage.graph for place, stage in enumerate(stages)) or 1.0
    return tuple(StageLoad(
        forward=_round(stage.forward / seconds), backward=_round(stage.backward / seconds),
        weight=_round(stage.weight / seconds), trains=stage.trains, fixed=_round(stage.fixed / largest),
        graph=_round(stage.graph / largest), operands=_round(stage.operands / largest),
        deferred_factor=stage.deferred_factor) for stage in stages)


def _add_deferral_cost(stages: Sequence[StageLoad], deferral: Sequence[Deferral]) -> tuple[StageLoad, ...]:
    """Return the stages with the cost of deferral added."""
    return tuple(replace(stage, longer_backward=price.backward * stage.weight,
                         deferred_factor=stage.deferred_factor + price.weight)
                 for stage, price in zip(stages, deferral, strict=True)) if deferral else tuple(stages)


def _round(value: float) -> float:
    return round(value, _DIGITS - 1 - floor(log10(value))) if value > 0 else 0.0


def _case(stages: Sequence[StageLoad], policy: Policy, placement: StagePlacement, num_microbatches: int | None,
          conditions: Conditions) -> _Case:
    rounded = Conditions(messages=round(conditions.messages, 2), variation=round(conditions.variation, 2))
    return _Case(stages=_add_deferral_cost(_round_loads(stages), conditions.deferral), policy=policy,
                 placement=placement, conditions=rounded,
                 count=simulated_microbatches(placement.num_ranks, num_microbatches))


@dataclass(frozen=True, kw_only=True)
class _Case:
    """Input of the simulations. count: microbatches."""

    stages: tuple[StageLoad, ...]
    policy: Policy
    placement: StagePlacement
    count: int
    conditions: Conditions = UNKNOWN

    @property
    def draws(self) -> int:
        """Number of simulations that are averaged."""
        return _DRAWS if self.conditions.variation and self.count * self.placement.num_ranks < _LONG else 1

    def stages_of(self, rank: int) -> list[StageLoad]:
        """The stages of a rank."""
        return [self.stages[stage] for stage in self.placement.stages_of(rank)]

    @property
    def deferral(self) -> tuple[float, float]:
        """Time by which a microbatch takes longer on the slowest stage if its weight gradients wait, and about the most
        that a step can save: the time of these gradients on the way back to the first stage."""
        slowest = max(self.stages, key=lambda stage: stage.forward + stage.backward + stage.weight)
        return (slowest.longer_backward + (slowest.deferred_factor - 1.0) * slowest.weight,
                sum(stage.weight for stage in self.stages) - slowest.weight)

    def deferral_candidates(self, most: int) -> tuple[list[tuple[int, None]], list[tuple[int, int]]]:
        """Candidate values for (the microbatches of a rank whose products may wait, the number of last microbatches to
        which these belong, None for all). The second list is tried for only one number in flight. Candidates that would
        cost far more than they can save are left out."""
        (longer, saved), pipe = self.deferral, self.placement.num_ranks
        if longer < _SMALL:
            return [(most, None)], []
        all_wait = self.count * longer <= _SURELY * saved
        tried = (pipe, pipe + ceil(pipe / 2), 2 * pipe) if pipe <= _MAX_WINDOWS or not all_wait else ()
        return [(most, None)] * all_wait + [(0, None)], [
            (min(most, last), last) for last in tried if last < self.count and last * longer <= _SURELY * saved]

    def stored_within(self, memory: float) -> int:
        """Microbatches that each rank can store on its stages in this many bytes, counted per stage."""
        stored = []
        for held in map(self.stages_of, range(self.placement.num_ranks)):
            if graph := sum(stage.graph for stage in held):
                stored.append((memory - sum(stage.fixed for stage in held)) * len(held) / graph)
        return floor(min(stored, default=0.0) + 1e-6)  # for an integer that is not represented exactly

    def bytes_under_1f1b(self) -> float:
        """Memory of the rank that needs most under 1F1B, with its stages as one; if they are interleaved, under
        interleaved 1F1B, which stores more."""
        return max(sum(stage.fixed for stage in self.stages_of(rank)) + min(self._stored_under_1f1b(rank), self.count)
                   * sum(stage.graph for stage in self.stages_of(rank)) for rank in range(self.placement.num_ranks))

    def _stored_under_1f1b(self, rank: int) -> float:
        """Microbatches of all stages of a rank."""
        placement = self.placement
        if placement.per_rank == 1 or placement.how != "interleaved":
            return placement.num_ranks - rank
        return (1 + forwards_before_returns(stage=rank, num_stages=placement.num_stages, per_rank=placement.per_rank)
                ) / placement.per_rank


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    """Results of a simulation, with each rank's peaks.

    step, at_peak: as in `Prediction`.
    kept: bytes, including what microbatches store. peak: the same, plus the deferred products at that time.
    operands: bytes of the deferred products of one microbatch. used: microbatches whose products wait.
    """

    seconds: float
    step: float
    bubble_fraction: float
    kept: tuple[float, ...]
    peak: tuple[float, ...]
    at_peak: tuple[tuple[int, float], ...]
    operands: tuple[float, ...]
    used: tuple[int, ...]

    def rank_bytes(self, case: _Case, limits: Limits) -> tuple[float, ...]:
        """Bytes of each rank. With one stage, all that it stores and all that may wait, which it reaches in the steady
        state; of the last products, those of microbatches that it does not store, as `check` counts them. With several
        stages, the simulated maximum of both together: a batch stores most at its start and defers most at its end."""
        if case.placement.per_rank > 1:
            return self.peak
        stored = [round((kept - stage.fixed) / stage.graph) if stage.graph else 0
                  for kept, stage in zip(self.kept, case.stages, strict=True)]
        waiting = limits.deferred if limits.last is None else [
            min(most, max(0, limits.last - count)) for most, count in zip(limits.deferred, stored, strict=True)]
        return tuple(kept + count * operands
                     for kept, count, operands in zip(self.kept, waiting, self.operands, strict=True))


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    """Limits, and their simulated result. needs: bytes of the rank that needs most."""

    limits: Limits
    seconds: float
    needs: float


def _best(case: _Case, memory: float, rule: Limits, given: int | None) -> Limits:
    """Return the limits that need least memory among those that are nearly fastest within the budget and no slower than
    1F1B; if none are within it, those that need least. If too many stages would have to be simulated, return the first
    of the plain ones within it.

    More memory is never slower: every candidate with less memory is also one with more; new candidates count as needing
    more than all others, so that only a faster one, which lowers the bound, replaces the earlier choice.
    """
    whole, searches, found = case.bytes_under_1f1b(), are_searched(case.placement), list[_Candidate]()
    cap = memory * whole * (1 + 1e-9)  # for needs that are not exactly equal
    for limits in _plain_limits(case, rule, given):
        found.append(_candidate(case, limits, _outcome(case, limits)))
        if found[-1].needs <= cap and not searches:
            break
    for less, budget in pairwise((0.0, *_BUDGETS[:bisect_left(_BUDGETS, memory) + 1]) if searches else ()):
        found += [replace(each, needs=max(each.needs, less * whole)) for each in _candidates(case, budget, given)]
    within = [each for each in found if each.needs <= cap]
    fastest = min((each.seconds for each in within), default=inf)
    bound = min((1 + _GAIN) * fastest, max(fastest, found[0].seconds))
    return min((each for each in within if each.seconds <= bound), key=lambda each: (each.needs, each.seconds),
               default=min(found, key=lambda each: each.needs)).limits


def _plain_limits(case: _Case, rule: Limits, given: int | None) -> list[Limits]:
    """1F1B's order, if there is one; with several stages on each rank also the rule, with fewer in flight, and with
    nothing deferred."""
    found = _alternating_limits(case, given)
    if case.placement.per_rank > 1:
        fewer = range(rule.in_flight, 0, -max(1, rule.in_flight // 8)) if given is None else [given]
        found += [replace(rule, in_flight=each, deferred=deferred) for each in fewer
                  for deferred in (rule.deferred, (0,) * len(rule.deferred))]
    return found


def _alternating_limits(case: _Case, given: int | None) -> list[Limits]:
    """1F1B's order, if there is one: as it is, and with weight gradients that fill its waits."""
    pipe = case.placement.num_ranks
    in_flight = min(pipe, case.count) if given is None else given
    if case.placement.per_rank > 1:
        in_flight = 2 * pipe if given is None else given
        if case.placement.how != "interleaved" or in_flight < 2 * pipe or not isinstance(case.policy, MessageDriven):
            return []
    return [Limits(in_flight=in_flight, deferred=(waiting,) * pipe, alternating=True) for waiting in (0, in_flight)]


def _candidates(case: _Case, budget: float, given: int | None) -> list[_Candidate]:
    """Limits within the budget, for each number in flight; the fastest is also tried with only the last products
    waiting."""
    pipe, cap = case.placement.num_ranks, budget * case.bytes_under_1f1b()
    several = min(2, case.placement.per_rank)
    is_fine = case.placement.num_stages <= several * _MAX_FINE_STAGES
    flights = [given] if given is not None else range(
        pipe, 2 * pipe + 1, max(1, pipe // 4)) if is_fine else range(several * pipe, pipe - 1, -max(1, pipe // 2))
    tries_limits = case.placement.per_rank > 1 and isinstance(case.policy, MessageDriven)
    found, plain, (waits, last_waits) = list[_Candidate](), list[_Candidate](), case.deferral_candidates(2 * pipe)
    for in_flight in flights:
        if not is_fine and any(each.needs <= cap for each in found):
            break
        for max_stored in _max_stored_candidates(case, in_flight,
                                                 cap)[:None if is_fine else 1] if tries_limits else [None]:
            if max_stored is not None:
                waits, last_waits = case.deferral_candidates(max_stored)
            for waiting, last in waits:
                limits = Limits(in_flight=in_flight, deferred=(waiting,) * pipe, last=last, max_stored=max_stored)
                found += _candidates_down_to_cap(case, limits, cap)
                plain.append(found[-1])
    fastest = min([each for each in plain if each.needs <= cap] or plain, key=lambda each: each.seconds).limits
    if fastest.max_stored is not None:
        _, last_waits = case.deferral_candidates(fastest.max_stored)
    for waiting, last in last_waits:
        found += _candidates_down_to_cap(case, replace(fastest, deferred=(waiting,) * pipe, last=last), cap)
    return found


def _candidates_down_to_cap(case: _Case, limits: Limits, cap: float) -> list[_Candidate]:
    """Candidates from these limits down to `cap` bytes, with fewer and fewer products that wait; for several stages
    with bounded memory, only these limits."""
    found = list[_Candidate]()
    share = 1.0 if case.placement.per_rank == 1 else 0.5  # of the excess; with several stages it depends on all ranks
    for _ in range(_TRIES):
        made = _outcome(case, limits)
        found.append(_candidate(case, limits, made))
        limits = found[-1].limits
        if found[-1].needs <= cap or limits.max_stored is not None:
            break
        fewer = tuple(max(0, waiting - ceil(share * max(0.0, needs - cap) / operands)) if operands else waiting
                      for waiting, needs, operands in zip(limits.deferred, made.rank_bytes(case, limits), made.operands,
                                                          strict=True))
        if fewer == limits.deferred:
            break
        limits = replace(limits, deferred=fewer)
    return found


def _max_stored_candidates(case: _Case, in_flight: int, cap: float) -> range:
    """Values of `max_stored`, from what the budget's memory holds (at most 2 microbatches per stage of the pipeline)
    down to what an even flow needs, with which nothing could run early. Up to 2 p in flight of few microbatches, too:
    the flow's intervals are theirs."""
    flow = ceil(in_flight * case.placement.per_rank / 2)
    most = min(2 * case.placement.num_stages, case.stored_within(cap))
    return range(max(flow, most), flow - 1, -max(1, ceil((most - flow) / _ROOMS)))


def _candidate(case: _Case, limits: Limits, made: _Outcome) -> _Candidate:
    """A candidate with deferral limited to one more than is used: real times differ slightly from the simulation, which
    stays the same."""
    most = limits.deferred if limits.last is None else [min(each, limits.last) for each in limits.deferred]
    limits = replace(limits, deferred=tuple(map(min, most, (used + 1 for used in made.used))))
    return _Candidate(limits=limits, seconds=made.seconds, needs=max(made.rank_bytes(case, limits)))


def _outcome(case: _Case, limits: Limits) -> _Outcome:
    return (_cached_simulation if isinstance(case.policy, Hashable) else _simulation)(case, limits)


def _simulation(case: _Case, limits: Limits) -> _Outcome:
    """The mean of several draws, with the maximum memory of any of them."""
    draws = [_simulate_draw(case, limits, draw) for draw in range(case.draws)]
    largest = max(draws, key=lambda each: max(each.peak))
    return _Outcome(seconds=fmean(each.seconds for each in draws), step=fmean(each.step for each in draws),
                    bubble_fraction=fmean(each.bubble_fraction for each in draws), at_peak=largest.at_peak,
                    operands=largest.operands, kept=_elementwise_max(each.kept for each in draws),
                    peak=_elementwise_max(each.peak for each in draws),
                    used=_elementwise_max(each.used for each in draws))


def _elementwise_max(draws: Iterable[tuple[_Number, ...]]) -> tuple[_Number, ...]:
    return tuple(map(max, zip(*draws, strict=True)))


def _simulate_draw(case: _Case, limits: Limits, draw: int) -> _Outcome:
    """Run one simulation."""
    held, count = [case.placement.stages_of(rank) for rank in range(case.placement.num_ranks)], case.count
    times = [StageTimes(forward=stage.forward, backward=stage.backward, weight=stage.weight, trains=stage.trains,
                        products=PRODUCTS, alive_bytes=round(_UNIT * stage.operands), kept_bytes=_UNIT * stage.graph,
                        longer_backward=stage.longer_backward, deferred_factor=stage.deferred_factor)
             for stage in case.stages]
    units = [sum(times[stage].alive_bytes for stage in stages) for stages in held]
    slowest = case.placement.per_rank * max(stage.forward for stage in times)
    made = simulate(times, count, case.policy, limits.in_flight, placement=case.placement,
                    jitter=_time_factor(case.conditions.variation, draw), hop=case.conditions.messages * slowest,
                    max_stored=limits.max_stored, defer_last=limits.last, alternating=limits.alternating,
                    defer_bytes=[waiting * unit for unit, waiting in zip(units, limits.deferred, strict=True)])
    # Stages before the first one that trains have no backward.
    first = next((place for place, stage in enumerate(times) if stage.trains), len(times))
    work = count * sum(each.microbatch_seconds if place >= first else each.forward
                       for place, each in enumerate(times)) / len(held)
    longer = sum(times[stages[action.turn]].longer_by_deferral(action)
                 for stages, actions in zip(held, made.actions, strict=True)
                 for action, _, _ in actions if action.kind == "W" or action.defer) / len(held) if any(
        stage.longer_backward or stage.deferred_factor != 1.0 for stage in times) else 0.0
    fixed = [sum(stage.fixed for stage in case.stages_of(rank)) for rank in range(len(held))]
    at_peak = {stage: (stored, queued / PRODUCTS) for stages, one in zip(held, made.held, strict=True)
               for stage, (stored, queued) in zip(stages, one.at_most_alive, strict=True)}
    return _Outcome(seconds=made.seconds, step=made.seconds / work if work else 1.0,
                    bubble_fraction=max(0.0, 1.0 - (work + longer) / made.seconds) if made.seconds else 0.0,
                    kept=tuple(own + one.kept / _UNIT for own, one in zip(fixed, made.held, strict=True)),
                    peak=tuple(own + one.alive / _UNIT for own, one in zip(fixed, made.held, strict=True)),
                    at_peak=tuple(at_peak[stage] for stage in range(len(times))),
                    operands=tuple(unit / _UNIT for unit in units),
                    used=tuple(-(-one.queued // unit) if unit else 0
                               for one, unit in zip(made.held, units, strict=True)))


@lru_cache(maxsize=64)
def _time_factor(variation: float, draw: int) -> Callable[[int, Action], float] | None:
    """The factor on the time of an action of a rank: uniformly distributed with mean 1, and the same in every call;
    None if times do not vary."""
    if not variation:
        return None
    known: dict[tuple[int, Action], float] = {}

    def factor(rank: int, action: Action) -> float:
        key = rank, action
        if key not in known:
            mixed = (7919 * rank + 104729 * action.microbatch + 1299709 * action.product
                     + 15485863 * "FBWC".index(action.kind) + 32452843 * action.turn + 49979687 * draw
                     ) * 2654435761 % (1 << 32)
            mixed = (mixed ^ mixed >> 15) * 2246822519 % (1 << 32)
            known[key] = max(0.05, 1.0 + variation * sqrt(3.0) * ((mixed ^ mixed >> 13) / (1 << 31) - 1.0))
        return known[key]

    return factor


_cached_simulation = lru_cache(maxsize=4096)(_simulation)
