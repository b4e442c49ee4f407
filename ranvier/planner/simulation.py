"""A whole cluster, simulated: the pipeline of one replica exactly, of many replicas by sampling, and runs that fail.

Replicas do the same at the same times, so that one stands for all of them. With random times each is different and the
step lasts as long as the slowest: some are simulated, and the largest of all is that of as many draws from a log-normal
law that fits them (Blom, 1958). A stage of several ranks is as slow as its slowest: its factor
is drawn from the law of the largest of so many (exactly, by the inverse of its distribution). Of a long batch with
random times the first part is simulated: what is left takes as long for each microbatch as the second half of that
part, and what replicas differ by grows as the square root of the number of microbatches.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist, mean, stdev
from typing import Literal

from ranvier.config.resolve import ResolvedRun
from ranvier.cost.hardware import Cluster
from ranvier.cost.memory import RankMemory
from ranvier.cost.step import Cost
from ranvier.mesh import StagePlacement
from ranvier.schedule.schedule import Action, Policy
from ranvier.schedule.simulator import DIRECT, Simulated, StageTimes, Way, simulate

_NORMAL = NormalDist()
SAMPLED = 48
"""Replicas that are simulated where times are random."""
_LONG = 256
"""Microbatches of a batch, or eight times the stages if that is more, of which no further ones are simulated where
times are random."""


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Random times. jitter: coefficient of variation of an action's time on one rank, log-normal with mean 1.
    slow: (replica, stage) -> factor on all its actions."""

    jitter: float = 0.0
    slow: Mapping[tuple[int, int], float] = field(default_factory=dict)
    seed: int = 0

    @property
    def is_none(self) -> bool:
        """Whether every action takes exactly its time."""
        return not self.jitter and not self.slow


STEADY = Noise()


@dataclass(frozen=True, kw_only=True)
class StepSimulation:
    """One step of all replicas' pipelines. shown: the replica whose actions are kept, the slowest of those with a slow
    rank, else the first one; of a long batch it has a part of the microbatches. busy_seconds: in which a rank computes,
    on average over all."""

    seconds: float
    shown: Simulated
    replicas: int
    sampled: int
    replica_seconds: tuple[float, ...]
    busy_seconds: float

    @property
    def bubble_fraction(self) -> float:
        """Share of all ranks' time in which they do nothing, until the last replica is done."""
        return 1.0 - self.busy_seconds / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """Result of `ranvier simulate`."""

    run: ResolvedRun
    cluster: Cluster
    cost: Cost
    step: StepSimulation
    pipeline_seconds: float
    """Simulated seconds of the pipeline, with a partial last microbatch and shared cores considered."""
    seconds: float
    """Seconds of the whole step: the pipeline, and what follows it."""
    memory: tuple[RankMemory, ...]
    """Predicted memory of each stage."""
    excess: str
    """Description of what does not fit; empty if all does."""


def simulate_step(stages: Sequence[StageTimes], num_microbatches: int, policy: Policy, in_flight: int, *,
                  replicas: int = 1, stage_size: int = 1, way: Way = DIRECT,
                  defer_bytes: int | Sequence[int] | Literal["auto"] = "auto", noise: Noise = STEADY,
                  sampled: int = SAMPLED, cores: int | None = None, placement: StagePlacement | None = None,
                  defer_last: int | None = None, max_stored: int | None = None, alternating: bool = False
                  ) -> StepSimulation:
    """One batch through all replicas. stage_size: ranks of a stage. sampled: replicas simulated where each is
    different; those with a slow rank always are, and count beside the others' largest. cores: ranks of a pipeline that
    may compute at once. placement: which stages each has; by default one. defer_last, max_stored, alternating: as
    of `simulate`."""
    count = num_microbatches if noise.is_none else min(num_microbatches, max(_LONG, 8 * len(stages)))

    def run(replica: int, count: int = count) -> Simulated:
        return simulate(stages, count, policy, in_flight, hop=way.hop, transfer=way.busy,
                        defer_bytes=defer_bytes, cores=cores, placement=placement, defer_last=defer_last,
                        max_stored=max_stored, alternating=alternating, jitter=_factor(noise, replica, stage_size))

    slow = sorted({replica for replica, _ in noise.slow if replica < replicas})
    others = [replica for replica in range(replicas) if replica not in slow]
    usual = others[:sampled if noise.jitter else 1]
    seconds: dict[int, float] = {}
    busy: dict[int, float] = {}
    shown, slowest = None, 0.0
    for replica in (*usual, *slow):
        part = run(replica)
        seconds[replica] = part.seconds
        busy[replica] = sum(stop - start for stage in part.actions for _, start, stop in stage) / len(part.actions)
        rank = part.seconds if replica in slow else 0.0
        if shown is None or rank > slowest:
            shown, slowest = part, rank

    assert shown is not None, "there is at least one replica"

    def whole(alike: Sequence[int]) -> list[float]:
        """Seconds of the whole batch, on replicas that are alike."""
        if count == num_microbatches or not alike:
            return [seconds[replica] for replica in alike]
        times, middle = num_microbatches / count, mean(seconds[replica] for replica in alike)
        steady = 2 * (middle - mean(run(replica, count // 2).seconds for replica in alike))
        return [middle + (times - 1.0) * steady + math.sqrt(times) * (seconds[replica] - middle) for replica in alike]

    alike, alone = whole(usual), [each for replica in slow for each in whole([replica])]
    computed = sum(busy[replica] for replica in slow) + (
        mean(busy[replica] for replica in usual) * len(others) if usual else 0.0)
    return StepSimulation(seconds=max([largest_of(alike, len(others)) if alike else 0.0, *alone]), shown=shown,
                          replicas=replicas, sampled=len(alike) + len(alone), replica_seconds=(*alike, *alone),
                          busy_seconds=computed / replicas * num_microbatches / count)


def largest_of(values: Sequence[float], count: int) -> float:
    """The mean of the largest of `count` draws, of which `values` are some."""
    if count <= len(values) or len(values) < 2:
        return max(values)
    score = _NORMAL.inv_cdf((count - 0.375) / (count + 0.25))
    logarithms = [math.log(value) for value in values]
    return max(math.exp(mean(logarithms) + stdev(logarithms) * score), max(values))


def _factor(noise: Noise, replica: int, stage_size: int) -> Callable[[int, Action], float]:
    if noise.is_none:
        return lambda stage, action: 1.0
    generator = random.Random(f"{noise.seed} {replica}")
    sigma = math.sqrt(math.log1p(noise.jitter ** 2))

    def factor(stage: int, action: Action) -> float:
        slow = noise.slow.get((replica, stage), 1.0)
        if not sigma:
            return slow
        drawn = generator.random() ** (1.0 / stage_size)
        return slow * math.exp(sigma * _NORMAL.inv_cdf(min(max(drawn, 1e-12), 1.0 - 1e-12)) - sigma * sigma / 2)

    return factor


# --- runs that fail --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Failures:
    """mtbf_seconds: mean time between two failures of one rank. restart_seconds: from a failure to the next step.
    checkpoint_steps: steps between checkpoints; stall_seconds: what one holds the run up; write_seconds: from its copy
    until it is on the disk, and the next one can begin, while the run goes on."""

    mtbf_seconds: float
    restart_seconds: float = 300.0
    checkpoint_steps: int = 100
    stall_seconds: float = 0.0
    write_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """share: of the time in which steps were made that count. best_steps: between checkpoints, by Daly's formula, and
    not before the one before is written."""

    share: float
    failures_per_day: float
    best_steps: int


_LARGEST_EXPONENT = 700.0
"""Beyond it a run makes no progress, and exp overflows."""


def goodput(step_seconds: float, ranks: int, failures: Failures) -> Goodput:
    """Expected goodput of a run whose ranks fail at random: each failure loses the steps since the last checkpoint that
    is on the disk, and a restart (Daly, 2006, equation 13)."""
    rate = ranks / failures.mtbf_seconds
    work = failures.checkpoint_steps * step_seconds
    interval = failures.stall_seconds + max(work, failures.write_seconds)
    lost = failures.restart_seconds + failures.write_seconds  # while one is written the one before is the last
    exponent = rate * interval
    share = work / ((1 / rate + lost) * math.expm1(exponent)) if exponent < _LARGEST_EXPONENT else 0.0
    best = best_interval(max(failures.stall_seconds, 1e-3), 1 / rate) / step_seconds
    return Goodput(share=min(1.0, share), failures_per_day=rate * 86400,
                   best_steps=max(1, round(best), math.ceil(failures.write_seconds / step_seconds)))


def best_interval(stall_seconds: float, mtbf_seconds: float) -> float:
    """Seconds of work between two checkpoints that lose least, by Daly (2006), equation 37."""
    if stall_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    ratio = stall_seconds / (2 * mtbf_seconds)
    return math.sqrt(2 * stall_seconds * mtbf_seconds) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall_seconds
