"""Simulation of an entire cluster: the pipeline of one replica exactly, many replicas by sampling, and failures.

Without random times all replicas are the same, so one stands for all. With random times each is different and the step
lasts as long as the slowest: some replicas are simulated, and the largest of all is estimated as that of as many draws
from a fitted log-normal distribution (Blom, 1958). A stage of several ranks is as slow as its slowest rank: its factor
is drawn from the distribution of the largest of that many draws (exactly, by the inverse of the distribution function).
Only the first part of a long batch with random times is simulated: each later microbatch takes as long as in the second
half of that part, and differences between replicas grow as the square root of the number of microbatches.
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
from ranvier.schedule.simulator import DIRECT, EdgeTimes, Simulated, StageTimes, simulate

_NORMAL = NormalDist()
SAMPLED = 48
"""Number of replicas that are simulated if times are random."""
_LONG = 256
"""Most microbatches of a batch that are simulated if times are random, or eight times the stages if that is more."""


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
    rank, else the first; for a long batch it has only a part of the microbatches. busy_seconds: compute seconds of a
    rank, on average over all ranks."""

    seconds: float
    shown: Simulated
    replicas: int
    sampled: int
    replica_seconds: tuple[float, ...]
    busy_seconds: float

    @property
    def bubble_fraction(self) -> float:
        """Share of all ranks' time in which they are idle, until the last replica is done."""
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
    """Seconds of the entire step: the pipeline, and what follows it."""
    memory: tuple[RankMemory, ...]
    """Predicted memory of each stage."""
    excess: str
    """Description of what does not fit; empty if everything fits."""


def simulate_step(stages: Sequence[StageTimes], num_microbatches: int, policy: Policy, in_flight: int, *,
                  replicas: int = 1, stage_size: int = 1, edges: EdgeTimes = DIRECT,
                  defer_bytes: int | Sequence[int] | Literal["auto"] = "auto", noise: Noise = STEADY,
                  sampled: int = SAMPLED, cores: int | None = None, placement: StagePlacement | None = None,
                  defer_last: int | None = None, max_stored: int | None = None, alternating: bool = False
                  ) -> StepSimulation:
    """Simulate one batch on all replicas. stage_size: ranks of a stage. sampled: number of replicas simulated if each
    is different; those with a slow rank are always simulated, separately from the estimate for the others. cores: ranks
    of a pipeline that may compute at the same time. placement: which stages each rank has; by default one. defer_last,
    max_stored, alternating: as for `simulate`."""
    count = num_microbatches if noise.is_none else min(num_microbatches, max(_LONG, 8 * len(stages)))

    def run(replica: int, count: int = count) -> Simulated:
        return simulate(stages, count, policy, in_flight, hop=edges.hop, transfer=edges.busy,
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
        """Seconds of the entire batch, on replicas with the same distribution."""
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
    """Failures of a run. mtbf_seconds: mean time between failures of one rank. restart_seconds: from a failure to the
    next step. checkpoint_steps: steps between checkpoints; stall_seconds: how long a checkpoint delays the run;
    write_seconds: from its copy until it is on the disk and the next one can begin, while the run continues."""

    mtbf_seconds: float
    restart_seconds: float = 300.0
    checkpoint_steps: int = 100
    stall_seconds: float = 0.0
    write_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Goodput of a run. share: share of time spent on steps that count. best_steps: steps between checkpoints by Daly's
    formula, at least until the previous checkpoint is written."""

    share: float
    failures_per_day: float
    best_steps: int


_LARGEST_EXPONENT = 700.0
"""Above this a run makes no progress, and exp overflows."""


def goodput(step_seconds: float, ranks: int, failures: Failures) -> Goodput:
    """Expected goodput of a run whose ranks fail at random: each failure loses the steps since the last checkpoint that
    is on the disk, and a restart (Daly, 2006, equation 13)."""
    rate = ranks / failures.mtbf_seconds
    work = failures.checkpoint_steps * step_seconds
    interval = failures.stall_seconds + max(work, failures.write_seconds)
    lost = failures.restart_seconds + failures.write_seconds  # until one is written, the previous one counts
    exponent = rate * interval
    share = work / ((1 / rate + lost) * math.expm1(exponent)) if exponent < _LARGEST_EXPONENT else 0.0
    best = best_interval(max(failures.stall_seconds, 1e-3), 1 / rate) / step_seconds
    return Goodput(share=min(1.0, share), failures_per_day=rate * 86400,
                   best_steps=max(1, round(best), math.ceil(failures.write_seconds / step_seconds)))


def best_interval(stall_seconds: float, mtbf_seconds: float) -> float:
    """Seconds of work between two checkpoints that lose the least time, by Daly (2006), equation 37."""
    if stall_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    ratio = stall_seconds / (2 * mtbf_seconds)
    return math.sqrt(2 * stall_seconds * mtbf_seconds) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall_seconds
