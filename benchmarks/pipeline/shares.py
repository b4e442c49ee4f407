"""Cost of the rules of a two-stage pipeline, by simulation: in-flight limit, deferred weight gradients, the cut.

    python -m benchmarks.pipeline.shares [--microbatches 8] [--times FILE]

The engine's own schedule runs on a simulated clock (`ranvier.schedule.simulator`) with block times that
`benchmarks.pipeline.pipeline` measured on two cores: shares.json next to this file, the mean of five rounds, of a GPT
of 8 layers. Layers are the same, so the times of their blocks are averaged. --times takes a result of that benchmark
instead.

    share        time of two stages that divide all work equally and never wait, over the simulated time of a step: 1 is
                 what two independent loops reach. The simulation knows nothing of caches and memory traffic
    queued MiB   the most that deferred weight-gradient products keep alive, on each rank

The first table changes one rule at a time, from what `auto` does to no bounds at all:

    in flight         microbatches between the first stage's forward and their return
    deferred         how many microbatches' products may wait on rank 0 and on rank 1, as `pipeline.defer_bytes` bounds
    head              whether the product of the head, the largest, may wait too; today it is computed in its backward

The second compares policies and cuts: `forward first` is message-driven, except that rank 0 runs a forward before a
backward. A cut of 12 puts the last 6 of 18 blocks on rank 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.memory.program import MIB, table
from benchmarks.pipeline.block_times import BlockTimes, mean_times
from ranvier.schedule.policies import MessageDriven, policy_named
from ranvier.schedule.schedule import Action, Ready
from ranvier.schedule.simulator import StageTimes, simulate

TIMES = Path(__file__).with_suffix(".json")
ALL = 1 << 20
"""More microbatches than a batch has."""
_BUDGET = 1 << 60
_HOP_SECONDS = 0.5e-3


@dataclass(frozen=True)
class ForwardFirst(MessageDriven):
    """Message-driven, but the first stage prefers a forward to a backward."""

    name: str = "forward first"

    def choose(self, ready: Ready) -> Action | None:
        if ready.stage == 0:
            return ready.forward or ready.backward or ready.weight
        return super().choose(ready)


FORWARD_FIRST: Any = ForwardFirst()


@dataclass(frozen=True, kw_only=True)
class Rules:
    """deferred: microbatches whose products may wait, on each rank."""

    name: str
    in_flight: int = 2
    deferred: tuple[int, int] = (0, 2)
    head: bool = False
    cut: int = 12
    policy: str = "message-driven"


STEPS = (Rules(name="auto"),
         Rules(name="the head's product may wait, within the same bytes", deferred=(0, 1), head=True),
         Rules(name="... and 3 in flight", in_flight=3, deferred=(0, 1), head=True),
         Rules(name="... and 2 microbatches on rank 1", in_flight=3, deferred=(0, 2), head=True),
         Rules(name="... and 1 on rank 0, 3 on rank 1", in_flight=3, deferred=(1, 3), head=True),
         Rules(name="no bounds", in_flight=3, deferred=(ALL, ALL), head=True))
POLICIES = (Rules(name="1f1b", deferred=(0, 0), policy="1f1b"), Rules(name="auto"),
            Rules(name="nothing deferred", deferred=(0, 0)), Rules(name="3 in flight", in_flight=3),
            Rules(name="3 in flight, 2 on both ranks", in_flight=3, deferred=(2, 2)),
            Rules(name="3 in flight, no bounds but the head", in_flight=3, deferred=(ALL, ALL)),
            Rules(name="3 in flight, head, rank 1 alone", in_flight=3, deferred=(0, ALL), head=True),
            Rules(name="2 in flight, head, no bounds", deferred=(ALL, ALL), head=True),
            Rules(name="forward first, 3 in flight", in_flight=3, policy=FORWARD_FIRST.name),
            Rules(name="forward first, 3 in flight, head, 2 on both", in_flight=3, deferred=(2, 2), head=True,
                  policy=FORWARD_FIRST.name))


def measured(path: Path = TIMES) -> BlockTimes:
    """Block times of a file, averaged over layers: embedding, then attention and MLP in turn, and the head."""
    found = json.loads(path.read_text())
    rounds = [found["block_times"]] if "block_times" in found else found["cases"][0]["block_times"]
    times = mean_times(rounds)

    def alike(values: Sequence[float]) -> tuple[float, ...]:
        attention, mlp = values[1:-1:2], values[2:-1:2]
        return (values[0], *(sum(attention) / len(attention), sum(mlp) / len(mlp)) * len(mlp), values[-1])

    return replace(times, forward=alike(times.forward), backward=alike(times.backward), weight=alike(times.weight))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome of one step; most_queued_bytes and ends_seconds are per rank."""

    share: float
    seconds: float
    ends_seconds: tuple[float, ...]
    most_queued_bytes: tuple[int, ...]


def step(times: BlockTimes, rules: Rules, microbatches: int) -> Outcome:
    """One simulated step on two ranks."""
    blocks = len(times.forward)
    stages, alive = [], []
    for rank, held in enumerate((range(rules.cut), range(rules.cut, blocks))):
        waits = [block for block in held if rules.head or block != blocks - 1]
        at_once = sum(times.weight[block] for block in held if block not in waits)
        alive.append(sum(times.alive_bytes[block] for block in waits))
        # One budget holds for all stages of a simulation. So that each has its own number of microbatches, what a
        # microbatch keeps alive is counted in shares of the budget.
        share = _BUDGET // rules.deferred[rank] if rules.deferred[rank] else _BUDGET + 1
        stages.append(StageTimes(
            forward=sum(times.forward[block] for block in held),
            backward=sum(times.backward[block] for block in held) + at_once,
            weight=sum(times.weight[block] for block in waits),
            products=max(1, sum(times.products[block] for block in waits)), alive_bytes=share))
    policy = FORWARD_FIRST if rules.policy == FORWARD_FIRST.name else policy_named(rules.policy)
    ran = simulate(stages, microbatches, policy, rules.in_flight, hop=_HOP_SECONDS, defer_bytes=_BUDGET)
    return Outcome(share=microbatches * times.seconds(range(blocks)) / 2 / ran.seconds, seconds=ran.seconds,
                   ends_seconds=tuple(actions[-1][2] for actions in ran.actions),
                   most_queued_bytes=tuple(round(queued / stage.alive_bytes * size) for queued, stage, size in zip(
                       ran.most_queued_bytes, stages, alive, strict=True)))


def rows(times: BlockTimes, several: Sequence[Rules], microbatches: int) -> list[list[str]]:
    found = []
    for rules in several:
        outcome = step(times, rules, microbatches)
        found.append([rules.name, f"{outcome.share:.3f}", f"{outcome.seconds * 1e3:.0f}",
                      " / ".join(f"{end * 1e3:.0f}" for end in outcome.ends_seconds),
                      " / ".join(f"{queued / MIB:.0f}" for queued in outcome.most_queued_bytes)])
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microbatches", type=int, default=8, help="microbatches of a step")
    parser.add_argument("--times", type=Path, default=TIMES, help="a result of benchmarks.pipeline.pipeline")
    options = parser.parse_args(arguments)
    times, head = measured(options.times), ["share", "ms/step", "ends", "queued MiB"]
    print(table([f"one rule at a time, {options.microbatches} microbatches", *head],
                rows(times, STEPS, options.microbatches)))
    for cut in (11, 12):
        print("\n" + table([f"policies, cut at block {cut}", *head], rows(
            times, [replace(rules, cut=cut) for rules in POLICIES], options.microbatches)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
