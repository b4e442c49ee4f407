"""A host that runs ahead of its device: loss or gain when launches decide the order of actions.

    python -m benchmarks.gpu.models.run_ahead [--seeds 5]

On a CPU a stage chooses its next action when the last one has finished. On CUDA an action returns once its kernels are
launched (CUDA programming guide, "Asynchronous Concurrent Execution"), so the host chooses the next ones before it
knows what will have arrived by the time that the device gets there. This simulates the engine's own `Schedule` and
policies with both clocks, the host's and the device's:

    completion    the host waits for the device after each action, as on a CPU
    launch        the host launches and continues, without a bound: what the engine does on CUDA
    launch, 1     at most one launched action is unfinished when the host chooses the next

A message arrives one hop after the device has finished the action that sends it. The device runs actions in the
order of their launches. Times are in units of a forward: a backward takes one, the weight gradients of a microbatch one
(as one product), a launch 0.03. Jitter makes each action longer by a random share of up to the jitter.

The table gives the efficiency, the mean of several seeds: the time of a stage that never waits and has no jitter, over
the time of the batch. 1 is the best without jitter; with jitter compare within a line.
"""

from __future__ import annotations

import argparse
import heapq
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from benchmarks.memory.program import table
from ranvier.schedule.limits import rule_limits
from ranvier.schedule.policies import policy_named
from ranvier.schedule.schedule import Action, Done, Product, Schedule, Wait, actions_text


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Stages that take equally long, and how far their hosts run ahead of their devices.

    ahead: launched actions that may be unfinished when the host chooses the next; None: any number. 0 is completion.
    hop, launch: in forward times. jitter: the largest random share by which an action takes longer.
    """

    stages: int
    microbatches: int
    policy: str = "message-driven"
    ahead: int | None = 0
    hop: float = 0.05
    launch: float = 0.03
    jitter: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Ran:
    """efficiency: the time of a stage that never waits and has no jitter, over `seconds`. actions: of each stage."""

    efficiency: float
    seconds: float
    actions: tuple[tuple[Action, ...], ...]

    def text(self, stage: int) -> str:
        return actions_text(self.actions[stage])


class _Stage:
    """One stage: its schedule, the host's clock, and when the device ends each launched action."""

    def __init__(self, index: int, pipeline: Pipeline) -> None:
        policy, limits = policy_named(pipeline.policy), rule_limits([True] * pipeline.stages)
        self.schedule = Schedule(
            stage=index, num_stages=pipeline.stages, num_microbatches=pipeline.microbatches, policy=policy,
            in_flight=limits.in_flight,
            defer_bytes=limits.deferred[index] if policy.defers else 0)
        self.index, self.host, self.ends = index, 0.0, [0.0]
        self.arriving: list[tuple[float, Literal["forward", "return"], int]] = []
        self.waiting = self.done = False

    def receive(self, when: float, kind: Literal["forward", "return"], microbatch: int) -> None:
        heapq.heappush(self.arriving, (when, kind, microbatch))
        if self.waiting:
            self.waiting, self.host = False, max(self.host, self.arriving[0][0])

    def choose(self) -> Action | None:
        """The next action at the host's time, or None if the schedule waits or ends."""
        while self.arriving and self.arriving[0][0] <= self.host + 1e-12:
            _, kind, microbatch = heapq.heappop(self.arriving)
            self.schedule.on_message(kind, microbatch)
        action = self.schedule.next_action()
        if isinstance(action, Action):
            return action
        self.done = isinstance(action, Done)
        if isinstance(action, Wait):
            self.waiting = not self.arriving
            if self.arriving:
                self.host = max(self.host, self.arriving[0][0])
        return None

    def launch(self, action: Action, seconds: float, pipeline: Pipeline) -> float:
        """Launch the action; returns when the device ends it."""
        self.host += pipeline.launch
        self.ends.append(max(self.ends[-1], self.host) + seconds)
        if pipeline.ahead is not None and len(self.ends) > pipeline.ahead:
            self.host = max(self.host, self.ends[-1 - pipeline.ahead])
        if action.kind == "F":
            self.schedule.on_done(action, expects_backward=True, deferrable_bytes=1)
        else:
            self.schedule.on_done(action, products=[Product(1, 0)] if action.defer else ())
        return self.ends[-1]


def run(pipeline: Pipeline, seed: int = 0) -> Ran:
    """Simulate one batch."""
    generator = random.Random(seed)
    stages = [_Stage(index, pipeline) for index in range(pipeline.stages)]
    while not all(stage.done for stage in stages):
        able = [stage for stage in stages if not stage.done and not stage.waiting]
        assert able, "the schedule ends with unfinished stages:\n" + "\n".join(
            f"stage {stage.index}: {stage.schedule.text()}" for stage in stages)
        stage = min(able, key=lambda one: one.host)
        action = stage.choose()
        if action is None:
            continue
        seconds = {"F": 1.0, "B": 1.0 if action.defer else 2.0, "W": 1.0, "C": 0.0}[action.kind]
        seconds *= 1 + pipeline.jitter * generator.random()
        end = stage.launch(action, seconds, pipeline)
        if action.kind == "F" and stage.index + 1 < pipeline.stages:
            stages[stage.index + 1].receive(end + pipeline.hop, "forward", action.microbatch)
        elif action.kind in "BC" and stage.index:
            stages[stage.index - 1].receive(end + pipeline.hop, "return", action.microbatch)
    seconds = max(stage.ends[-1] for stage in stages)
    return Ran(efficiency=3 * pipeline.microbatches / seconds, seconds=seconds,
               actions=tuple(tuple(stage.schedule.history) for stage in stages))


WAYS: dict[str, tuple[str, int | None]] = {
    "1f1b, completion": ("1f1b", 0), "completion": ("message-driven", 0), "launch": ("message-driven", None),
    "launch, 1": ("message-driven", 1)}
"""Name -> policy, ahead."""


def by(way: str, pipeline: Pipeline) -> Pipeline:
    """`pipeline` with the policy and the look-ahead of one of WAYS."""
    policy, ahead = WAYS[way]
    return replace(pipeline, policy=policy, ahead=ahead)


def efficiencies(pipeline: Pipeline, seeds: Sequence[int]) -> dict[str, float]:
    """`Ran.efficiency` of each of WAYS, the mean over the seeds."""
    return {way: sum(run(by(way, pipeline), seed).efficiency for seed in seeds) / len(seeds) for way in WAYS}


def main(arguments: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seeds", type=int, default=5, help="runs of each line, with other random times")
    seeds = range(options.parse_args(arguments).seeds)
    rows = []
    for stages, microbatches in ((4, 16), (8, 32), (8, 16)):
        for hop, jitter in ((0.05, 0.0), (0.3, 0.0), (0.05, 0.5)):
            pipeline = Pipeline(stages=stages, microbatches=microbatches, hop=hop, jitter=jitter)
            rows.append([f"{stages} stages, {microbatches} microbatches, hop {hop}, jitter {jitter}",
                         *(f"{one:.3f}" for one in efficiencies(pipeline, seeds).values())])
    print(table(["efficiency", *WAYS], rows))
    print("\nstage 2 of 4, 8 microbatches:")
    for name in ("completion", "launch"):
        print(f"  {name:10s} {run(by(name, Pipeline(stages=4, microbatches=8))).text(2)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
