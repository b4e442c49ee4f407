"""Cut of a model into stages when some of its layers are frozen, and the predicted time of a step.

There are two modes. The paper's mode (PipeTransformer, He et al., 2021, sections 3.2 and 3.3) assigns blocks greedily
by size, and halves the pipeline while its largest stage is no larger than the largest stage at the start. The exact
mode finds for each mesh (`ranvier.elastic.mesh_candidates`) the fastest cut that fits the memory, and predicts its time
with the engine's own schedule. We deviate because sizes are not times, because the paper's criterion ignores
activations, and because an exact cut costs only milliseconds. The greedy mode is the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf
from statistics import pvariance

from ranvier.cost.collectives import ring_seconds
from ranvier.elastic.inputs import BlockFacts
from ranvier.mesh import StagePlacement
from ranvier.plan.partition import partition_for
from ranvier.schedule.limits import rule_limits
from ranvier.schedule.partition import cut
from ranvier.schedule.schedule import Policy
from ranvier.schedule.simulator import StageTimes, simulate

FROZEN_FACTOR = 1 / 6
"""The paper's lambda: the weight of a frozen block, relative to one that trains."""
_MOST_SIMULATED = 50_000
"""Simulated microbatches times stages after which a cut is improved no further: about a second."""


# ---------------------------------------------------------------------- the paper's mode

def greedy(sizes: Sequence[float], devices: int, frozen: int = 0, factor: float = FROZEN_FACTOR) -> tuple[int, ...]:
    """Blocks per device by the paper's rule (Algorithm 1, load balancing).

    sizes: each block's parameters, in millions (the rule adds a size to a variance, so it depends on the unit). The
    first `frozen` blocks weigh `factor` of their size and stay on device 0. Device k of K then takes blocks while

        load + size < remaining / (K - k) + variance / (K - k)

    with the sum and the population variance of the sizes that were left when its turn came; the last device takes the
    rest. The paper does not say what happens if that leaves a device without blocks; here each gets at least one.
    """
    assert 1 <= devices <= len(sizes) and 0 <= frozen <= len(sizes)
    weights = _weights(sizes, frozen, factor)
    counts: list[int] = []
    start = 0
    for device in range(devices - 1):
        left = devices - device
        most = (sum(weights[start:]) + pvariance(weights[start:])) / left
        last = len(weights) - left + 1  # one block is left for each later device
        stop = min(max(frozen if device == 0 else 0, start + 1), last)
        load = sum(weights[start:stop])
        while stop < last and load + weights[stop] < most:
            load += weights[stop]
            stop += 1
        counts.append(stop - start)
        start = stop
    return (*counts, len(weights) - start)


def stage_sizes(sizes: Sequence[float], counts: Sequence[int], frozen: int = 0) -> tuple[float, ...]:
    """Total weight of each device's blocks, with `counts` blocks per device."""
    weights, edges = _weights(sizes, frozen, FROZEN_FACTOR), accumulate(counts, initial=0)
    return tuple(sum(weights[start:stop]) for start, stop in pairwise(edges))


def compress(sizes: Sequence[float], devices: int, frozen: int, first_largest: float) -> int:
    """The paper's pipeline length: `devices`, halved repeatedly while the largest stage after halving is no larger than
    `first_largest`, the largest stage when training began."""
    while devices % 2 == 0 and max(stage_sizes(sizes, greedy(sizes, devices // 2, frozen), frozen)) <= first_largest:
        devices //= 2
    return devices


def _weights(sizes: Sequence[float], frozen: int, factor: float) -> list[float]:
    return [size * factor if block < frozen else size for block, size in enumerate(sizes)]


# ---------------------------------------------------------------------- the exact mode

StageBytes = Callable[[int, int, int], int]
"""(stage, start, stop) -> bytes that a rank of that stage needs with blocks start .. stop - 1."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """Facts that decide the cut of one mesh."""

    facts: BlockFacts
    """Times and sizes of the blocks; seconds of the optimizer's step on a rank that has its share of their states."""
    num_replicas: int
    placement: StagePlacement
    """Stages of each rank of a pipeline. With several, memory is not considered here: a rank's stages share it."""
    samples: int
    """Samples of one step, over all replicas."""
    microbatches: int
    """Microbatches per replica; fewer if it has fewer samples."""
    policy: Policy
    """The value of `pipeline.policy`."""
    in_flight: int | None = None
    """The value of `pipeline.in-flight`; None is auto."""
    weight_share: float = 0.5
    """The part of a backward that the schedule may defer: the weights' gradients."""
    frozen: int = 0
    """Blocks that do not train: a prefix, which has no backward."""
    cached: int = 0
    """Blocks whose output is read from the cache, which is counted as free: a part of the frozen prefix, on the first
    stage."""
    memory_bytes: StageBytes | None = None
    """Memory of stages; None ignores memory."""
    limit_bytes: int | None = None
    """Most bytes that a rank may need."""

    def __post_init__(self) -> None:
        assert 0 <= self.cached <= self.frozen <= self.num_blocks
        assert self.memory_bytes is None or self.placement.per_rank == 1

    @property
    def num_blocks(self) -> int:
        """Blocks of the model."""
        return len(self.facts.forward_seconds)


@dataclass(frozen=True, kw_only=True)
class Cut:
    """The best cut of one mesh, with its predicted time, or why there is none."""

    boundaries: tuple[int, ...] = ()
    """First block of each stage after the first."""
    seconds: float | None = None
    """Predicted seconds of a step; None if there is no cut."""
    reason: str
    """The bottleneck that determines the time, or why there is no cut."""
    too_large: bool = False
    """Whether there is no cut because none fits the memory."""


def best_cut(situation: Situation) -> Cut:
    """The best cut of the mesh.

    A simulation takes about 20 us for each stage and microbatch: for all meshes of 8 ranks and 27 blocks 0.2 s, of 16
    ranks 1 s, and of 64 ranks with 98 blocks 17 s.
    """
    data, samples, num_stages = situation.num_replicas, situation.samples, situation.placement.num_stages
    if data > samples:
        return Cut(reason=f"{data} replicas are more than the {samples} samples of a step")
    if num_stages > situation.num_blocks - max(situation.cached, 1) + 1:
        behind = f", {situation.cached} of them cached on the first stage" if situation.cached > 1 else ""
        return Cut(reason=f"{num_stages} stages are more than {situation.num_blocks} blocks can make{behind}")
    candidate = _Candidate(situation)
    best = candidate.cut()
    return candidate.improve(best) if best.seconds is not None else best


class _Candidate:
    """The cuts of one mesh, and the facts that they share."""

    def __init__(self, situation: Situation) -> None:
        self.situation, self.facts, placement = situation, situation.facts, situation.placement
        self.num_ranks, self.num_stages = placement.num_ranks, placement.num_stages
        self.held = [placement.stages_of(rank) for rank in range(self.num_ranks)]
        share = -(-situation.samples // situation.num_replicas)
        self.size = -(-share // min(situation.microbatches, share))
        self.count = -(-share // self.size)  # the last microbatch may be smaller, and there may be fewer than requested
        self.last_size = share - (self.count - 1) * self.size
        self.times = self._block_times(self.size)
        self.sums = list(accumulate((sum(times) for times in self.times), initial=0.0))

    def time(self, cut: Cut) -> float:
        """Seconds per sample, to nine digits, so that the order of additions does not matter; infinite without a
        cut."""
        return inf if cut.seconds is None else float(f"{cut.seconds / self.situation.samples:.9g}")

    def cut(self) -> Cut:
        """The cut whose slowest rank is fastest among those that fit, and its time."""
        if self.num_stages > self.num_ranks:
            return self._predict(self._even())
        boundaries = cut(self.situation.num_blocks, self.num_ranks, self._cost)
        too_much = self._memory_problem(boundaries)
        if too_much is not None:
            lean = cut(self.situation.num_blocks, self.num_ranks, lambda *stage: inf if self._excess(*stage) > 0
                       else self._cost(*stage))
            if self._memory_problem(lean) is not None:
                return Cut(boundaries=boundaries, reason=too_much, too_large=True)
            boundaries = lean
        return self._predict(boundaries)

    def _even(self) -> tuple[int, ...]:
        """The cut with the most even work found, for ranks with several stages. Cached blocks stay together, as one."""
        together = max(self.situation.cached, 1)
        costs = [self.sums[together], *(sum(times) for times in self.times[together:])]
        return tuple(edge + together - 1 for edge in partition_for(costs, self.situation.placement))

    def improve(self, best: Cut) -> Cut:
        """`best`, with boundaries moved by one block as long as that shortens the predicted step.

        With many microbatches the slowest stage determines the time. With few microbatches, with message times, or with
        stages that have no backward, another cut may be better: over 60 random chains of 6 to 10 blocks on 2 to 4
        stages by up to 13 % (1f1b 5 %, gpipe 25 %); the result was within 1 % (1f1b 0 %, gpipe 19 %) of the best of all
        cuts.
        """
        left = _MOST_SIMULATED
        while left > 0:
            edges = best.boundaries
            near = [(*edges[:index], edges[index] + by, *edges[index + 1:])
                    for index in range(self.num_stages - 1) for by in (-1, 1)]
            found = [self._predict(boundaries) for boundaries in near
                     if all(start < stop for _, start, stop in self._stages(boundaries))
                     and boundaries[0] >= self.situation.cached and self._memory_problem(boundaries) is None]
            left -= len(near) * self.num_stages * self.count
            other = min(found, key=lambda cut: (cut.seconds or inf) / self.situation.samples, default=best)
            if self.time(other) >= self.time(best):
                return best
            best = other
        return best

    def _block_times(self, size: int) -> list[tuple[float, float]]:
        """(forward, backward) of each block for a microbatch of `size` samples."""
        given = self.situation
        return [(0.0 if block < given.cached else self.facts.forward_seconds[block] * size,
                 0.0 if block < given.frozen else self.facts.backward_seconds[block] * size)
                for block in range(given.num_blocks)]

    def _cost(self, stage: int, start: int, stop: int) -> float:
        return inf if stage == 0 and stop < self.situation.cached else self.sums[stop] - self.sums[start]

    def _stages(self, boundaries: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
        """(stage, start, stop) of each stage."""
        for stage, (start, stop) in enumerate(pairwise((0, *boundaries, self.situation.num_blocks))):
            yield stage, start, stop

    def _excess(self, stage: int, start: int, stop: int) -> int:
        """Bytes by which a stage is above the limit, negative below it."""
        if self.situation.memory_bytes is None or self.situation.limit_bytes is None:
            return 0
        return self.situation.memory_bytes(stage, start, stop) - self.situation.limit_bytes

    def _memory_problem(self, boundaries: tuple[int, ...]) -> str | None:
        """The message about the stage that exceeds the memory limit most; None if all stages fit."""
        excess, place = max((self._excess(*place), place) for place in self._stages(boundaries))
        if excess <= 0:
            return None
        (stage, start, stop), limit = place, self.situation.limit_bytes or 0
        return (f"no cut fits the memory: with microbatches of {self.size} stage {stage} with blocks {start} to "
                f"{stop - 1} needs {(limit + excess) / 2**20:,.1f} MiB of {limit / 2**20:,.1f} MiB")

    def _predict(self, boundaries: tuple[int, ...]) -> Cut:
        """The cut at these boundaries, with the predicted seconds of a step and the bottleneck."""
        given, places = self.situation, list(self._stages(boundaries))
        whole = [self._stage_times(self.times, start, stop) for _, start, stop in places]
        last = [self._stage_times(self._block_times(self.last_size), start, stop) for _, start, stop in places]
        shares = [small.microbatch_seconds / large.microbatch_seconds if large.microbatch_seconds else 1.0
                  for small, large in zip(last, whole, strict=True)]
        hops = self._hops(boundaries)
        simulated = simulate(whole, self.count, given.policy, given.in_flight or rule_limits(
            [stage.trains for stage in whole], given.placement).in_flight,
            hop=lambda source, destination: hops[source, destination], defer_bytes="auto", placement=given.placement,
            jitter=lambda rank, action:
            shares[self.held[rank][action.turn]] if action.microbatch == self.count - 1 else 1.0)
        stops = [actions[-1][2] for actions in simulated.actions]
        trained = [[block for stage in held for block in range(*places[stage][1:]) if block >= given.frozen]
                   for held in self.held]
        after = [self._averaging(blocks) + self._update(blocks) for blocks in trained]
        seconds = max(stop + rest for stop, rest in zip(stops, after, strict=True))
        times = [sum(whole[stage].microbatch_seconds for stage in held) for held in self.held]
        what = "stage" if self.num_stages == self.num_ranks else "rank"
        reason = (f"{what} {times.index(max(times))} is the slowest with {max(times):.3g} s a microbatch, stages wait "
                  f"{simulated.bubble_fraction:.0%} of the time, {max(after):.3g} s follow the last backward")
        bound = self._work() / self.facts.cores if self.facts.cores else 0.0
        if bound > seconds:
            seconds, reason = bound, f"the work of all ranks keeps {self.facts.cores:g} cores busy"
        return Cut(boundaries=boundaries, seconds=seconds, reason=reason)

    def _stage_times(self, times: Sequence[tuple[float, float]], start: int, stop: int) -> StageTimes:
        backward, share = sum(backward for _, backward in times[start:stop]), self.situation.weight_share
        return StageTimes(forward=sum(forward for forward, _ in times[start:stop]), backward=backward * (1.0 - share),
                          weight=backward * share, trains=stop > self.situation.frozen)

    def _hops(self, boundaries: tuple[int, ...]) -> dict[tuple[int, int], float]:
        """Seconds of a message between two ranks: of the slowest kind. A return is a credit without tensors if nothing
        trains on its destination stage or before."""
        given, facts, found = self.situation, self.facts, dict[tuple[int, int], float]()
        for stage, edge in enumerate(boundaries):
            here, there = given.placement.rank_of(stage), given.placement.rank_of(stage + 1)
            carried = facts.latency_seconds + facts.output_bytes[edge - 1] * self.size / facts.bandwidth
            returned = facts.latency_seconds if edge <= given.frozen else carried
            found[here, there] = max(carried, found.get((here, there), 0.0))
            found[there, here] = max(returned, found.get((there, here), 0.0))
        return found

    def _averaging(self, blocks: Sequence[int]) -> float:
        """Seconds of a ring all-reduce of these blocks' gradients, without overlap."""
        size = sum(self.facts.parameter_bytes[block] for block in blocks)
        if self.situation.num_replicas == 1 or not size:
            return 0.0
        return ring_seconds(size, self.situation.num_replicas, lambda piece: self.facts.latency_seconds + piece
                            / self.facts.bandwidth)

    def _update(self, blocks: Sequence[int]) -> float:
        return sum(self.facts.update_seconds[block] for block in blocks)

    def _work(self) -> float:
        """Compute seconds of a step on one rank alone."""
        last = sum(map(sum, self._block_times(self.last_size)))
        return self.situation.num_replicas * ((self.count - 1) * self.sums[-1] + last + self._update(
            range(self.situation.frozen, self.situation.num_blocks)))
