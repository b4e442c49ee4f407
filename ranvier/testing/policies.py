"""Conformance test of your own schedule policy, in a second.

    class BackwardOnly:                                 # a `ranvier.schedule.schedule.Policy`
        name, defers = "lifo", False
        def choose(self, ready): return ready.backward or ready.forward
        def in_flight(self, in_flight, num_microbatches): return in_flight
        def stored(self, in_flight, stage, num_stages): return in_flight

    check_policy(BackwardOnly())
"""

from __future__ import annotations

import random
from functools import partial
from itertools import pairwise
from typing import TypedDict

from ranvier.arguments import check_arguments
from ranvier.config.run import Positive
from ranvier.mesh import StagePlacement
from ranvier.schedule.schedule import Action, Policy, Ready, actions_text, check_policy_object
from ranvier.schedule.simulator import Simulated, StageTimes, simulate


class _Settings(TypedDict):
    """Bounds of one simulated batch."""

    in_flight: int
    defer_bytes: int
    training: bool


def _draw_time(factors: random.Random, stage: int, action: Action) -> float:
    return factors.uniform(0.1, 3.0)


class _Watched:
    """A policy whose choices are checked: each must be ready, and the same when asked again."""

    def __init__(self, policy: Policy) -> None:
        self._policy, self.name, self.defers = policy, policy.name, policy.defers
        self.in_flight, self.stored = policy.in_flight, policy.stored

    def choose(self, ready: Ready) -> Action | None:
        chosen = self._policy.choose(ready)
        offered = [action for action in (ready.forward, ready.backward, ready.weight) if action is not None]
        assert chosen is None or chosen in offered, f"{self.name} chose {chosen}, but ready are {offered}"
        again = self._policy.choose(ready)
        assert again == chosen, f"{self.name} chose {chosen} and then {again} of the same {offered}"
        return chosen


def check_policy(policy: Policy, *, cases: Positive = 200, seed: int = 0) -> None:
    """Run `policy` through simulated pipelines with random depths, limits, times, delays and frozen stages.

    AssertionError, with the settings and every stage's actions, if a batch does not end, an action runs twice or out of
    order, a bound is exceeded, or the policy chooses an action that is not ready or chooses differently when asked
    again.
    ConfigError for an object that lacks a part of `Policy`.
    """
    check_arguments(check_policy, locals())
    check_policy_object(policy)
    for case in range(cases):
        choose = random.Random(f"{seed} {case}")
        depth, microbatches = choose.randint(1, 6), choose.randint(0, 14)
        alive = choose.choice([0, 3, 8])
        stages = [StageTimes(forward=choose.random(), backward=choose.random(), weight=choose.random(),
                             products=choose.randint(1, 3), alive_bytes=alive, trains=choose.random() < 0.8)
                  for _ in range(depth)]
        settings = _Settings(in_flight=choose.randint(1, 2 * depth + 1),
                             defer_bytes=choose.choice([0, 8, 20, 1 << 40]), training=choose.random() < 0.8)
        hop, factors = choose.choice([0.0, 0.3, 3.0]), random.Random(case)
        try:
            check_run(simulate(stages, microbatches, _Watched(policy), hop=hop, **settings,
                               jitter=partial(_draw_time, factors)), stages, microbatches, policy, **settings)
        except AssertionError as error:
            error.add_note(f"policy {policy.name}, case {case}: {depth} stages, {microbatches} microbatches, "
                           f"hop {hop}, {settings}")
            raise


def check_run(run: Simulated, stages: list[StageTimes], num_microbatches: int, policy: Policy, *, in_flight: int,
              defer_bytes: int, training: bool, placement: StagePlacement | None = None) -> None:
    """AssertionError unless `run` did every action once, in microbatch order, after its dependencies and within bounds.
    If a rank has several stages, the stages have no bounds of their own."""
    limit = policy.in_flight(in_flight, num_microbatches)
    everything = list(range(num_microbatches))
    placement = placement or StagePlacement(num_ranks=len(stages))
    for stage in range(len(stages)):
        rank = placement.rank_of(stage)
        spans = _spans_of(run, stage, placement)
        actions = [action for action, _, _ in spans]
        text = f"stage {stage}: {actions_text(actions)}"
        trains = training and any(times.trains for times in stages[:stage + 1])
        assert _numbers(actions, "F") == everything, f"not every forward once and in order; {text}"
        assert _numbers(actions, "B" if trains else "C") == everything, f"not every return once and in order; {text}"
        assert _numbers(actions, "C" if trains else "B") == [], f"backwards where nothing trains; {text}"
        queued = {(action.microbatch, product) for action in actions if action.kind == "B" and action.defer
                  for product in range(stages[stage].products)}
        ran = [(action.microbatch, action.product) for action in actions if action.kind == "W"]
        assert len(ran) == len(queued) and set(ran) == queued, f"deferred products got lost or ran twice; {text}"
        for product in range(stages[stage].products):
            order = [microbatch for microbatch, which in ran if which == product]
            assert order == sorted(order), f"products of one weight ran out of microbatch order; {text}"
        assert policy.defers or not queued, f"deferred although the policy does not; {text}"
        allowed = policy.stored(limit, stage, len(stages)) if trains and placement.per_rank == 1 else limit
        assert run.most_stored[stage] <= allowed, f"{run.most_stored[stage]} stored, at most {allowed} allowed; {text}"
        assert run.most_queued_bytes[rank] <= defer_bytes, \
            f"{run.most_queued_bytes[rank]} bytes queued, at most {defer_bytes} allowed; {text}"
        assert all(first[2] <= second[1] for first, second in pairwise(run.actions[rank])), \
            f"two actions at once; {text}"
    _check_dependencies(run, placement)


def _spans_of(run: Simulated, stage: int, placement: StagePlacement) -> list[tuple[Action, float, float]]:
    """Actions of `stage` with their start and stop."""
    return [span for span in run.actions[placement.rank_of(stage)] if span[0].turn == placement.local(stage)]


def _check_dependencies(run: Simulated, placement: StagePlacement) -> None:
    """Check that a forward starts after that of the previous stage has ended, and a return after that of the next
    stage."""
    stages = [_spans_of(run, stage, placement) for stage in range(placement.num_stages)]
    ends = [{(action.kind in "BC", action.microbatch): stop for action, _, stop in spans if action.kind != "W"}
            for spans in stages]
    for stage, spans in enumerate(stages):
        for action, start, _ in spans:
            if action.kind == "F" and stage > 0:
                assert ends[stage - 1][False, action.microbatch] <= start, f"{action} of stage {stage} is too early"
            if action.kind in "BC":
                before = ends[stage][False, action.microbatch] if stage == len(ends) - 1 \
                    else ends[stage + 1][True, action.microbatch]
                assert before <= start, f"{action} of stage {stage} is too early"


def _numbers(actions: list[Action], kind: str) -> list[int]:
    return [action.microbatch for action in actions if action.kind == kind]
