"""The cut of the stages, and the time of a step if only the blocks' own time counted.

Computed from measured block times: messages, Python, the graph's bookkeeping and the loss of speed by shared caches are
all free. A contender's distance from its bound is the cost of its implementation; its bound's distance from the ceiling
is the cost of its schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, pairwise

from benchmarks.pipeline.block_times import BlockTimes
from benchmarks.pipeline.contender import Contender
from benchmarks.pipeline.slowed import simulated_slowness, slowness
from benchmarks.pipeline.workload import Workload
from ranvier.schedule.policies import policy_named
from ranvier.schedule.simulator import StageTimes, simulate

_NO_LIMIT = 1 << 60  # bytes
_TORCH_POLICIES = {"Schedule1F1B": "1f1b", "ScheduleGPipe": "gpipe"}

Order = Sequence[Sequence[tuple[int, str, int]]]
"""Per rank, (stage, F or B or I or W, microbatch) in the order of execution; I and W are B in two parts."""


def stage_ranges(boundaries: Sequence[int], num_blocks: int) -> list[range]:
    return [range(first, stop) for first, stop in pairwise((0, *boundaries, num_blocks))]


def best_cut(times: BlockTimes, workload: Workload, ranks: int, per_rank: int = 1) -> tuple[int, ...]:
    """First block of each stage after the first, for the cut whose slowest rank is fastest; among equal cuts, the one
    whose slowest stage is fastest. Rank r holds stages r, r + ranks, ..."""
    num_blocks = workload.num_blocks
    cost = [workload.microbatches * times.seconds(range(block, block + 1))
            + times.optimizer_seconds_per_parameter * times.num_parameters[block] for block in range(num_blocks)]
    sums = [0.0]
    for one in cost:
        sums.append(sums[-1] + one)

    def dearest(cut: tuple[int, ...]) -> tuple[float, float]:
        stages = [sums[stop] - sums[first] for first, stop in pairwise((0, *cut, num_blocks))]
        return max(sum(stages[rank::ranks]) for rank in range(ranks)), max(stages)

    return min(combinations(range(1, num_blocks), ranks * per_rank - 1), key=dearest)


def bound_seconds(contender: Contender, workload: Workload, times: BlockTimes, cores: int,
                  order: Order | None = None) -> float | None:
    """Seconds of a step of `contender`, or None if its schedule is not known. With more ranks than cores a step takes
    at least all work divided by the cores."""
    blocks = range(workload.num_blocks)
    once = workload.microbatches * times.seconds(blocks)
    update = times.optimizer_seconds_per_parameter * _num_parameters(workload, times, [blocks], 0, shared=True)
    match contender.kind:
        case "plain":
            return (once + update) / contender.ranks
        case "ddp":
            return max(once / contender.ranks + update, (once + contender.ranks * update) / cores)
        case "torch":
            schedule = contender.settings["schedule"]
            if schedule in _TORCH_POLICIES:
                ends = _simulated(contender, workload, times, policy=_TORCH_POLICIES[schedule], defer_bytes=0)
            elif order is not None:
                ends = _in_order(contender, workload, times, order)
            else:
                return None
        case "ours":
            if contender.settings.get("stages_per_rank", 1) > 1:
                return None  # the engine cuts
            ends = _simulated(contender, workload, times, policy=contender.settings["policy"],
                              defer_bytes=contender.settings.get("defer_bytes", _NO_LIMIT))
        case _:
            return None
    return max(*ends, (once + update) / cores)


def _num_parameters(workload: Workload, times: BlockTimes, stages: Sequence[range], stage: int, *,
                    shared: bool) -> int:
    """Parameters that the holder of `stage` updates. `shared`: a tied weight is updated once, by the first stage."""
    count = sum(times.num_parameters[block] for block in stages[stage])
    holds_head = stages[stage].stop == workload.num_blocks
    return count - (workload.vocab * workload.hidden if workload.tied and shared and holds_head else 0)


def _simulated(contender: Contender, workload: Workload, times: BlockTimes, *, policy: str,
               defer_bytes: int) -> list[float]:
    """When each stage has updated its parameters, by the engine's own schedule. Without limits in the settings, all
    microbatches may be in flight, and all weight gradients may be deferred: no choice of limits is faster, except by
    chance of another order."""
    settings = contender.settings
    ranges = stage_ranges(settings["boundaries"], workload.num_blocks)
    stages = [StageTimes(
        forward=sum(times.forward[b] for b in blocks), backward=sum(times.backward[b] for b in blocks),
        weight=sum(times.weight[b] for b in blocks), products=max(1, sum(times.products[b] for b in blocks)),
        alive_bytes=max(1, sum(times.alive_bytes[b] for b in blocks))) for blocks in ranges]
    in_flight = settings.get("in_flight", workload.microbatches)
    slow = {"jitter": simulated_slowness(slowness(settings["slowness"]))} if "slowness" in settings else {}
    simulated = simulate(
        stages, workload.microbatches, policy_named(policy), in_flight, hop=settings.get("latency_seconds", 0.0),
        defer_bytes=defer_bytes, **slow)
    return [actions[-1][2] + times.optimizer_seconds_per_parameter * _num_parameters(
        workload, times, ranges, index, shared=contender.kind == "ours")
        for index, actions in enumerate(simulated.actions)]


def _in_order(contender: Contender, workload: Workload, times: BlockTimes, order: Order) -> list[float]:
    """When each rank has updated its parameters, if each runs its list in order as soon as it can."""
    ranges = stage_ranges(contender.settings["boundaries"], workload.num_blocks)
    parts = {"F": times.forward, "I": times.backward, "W": times.weight,
             "B": tuple(a + b for a, b in zip(times.backward, times.weight, strict=True))}
    ends = run_in_order(order, lambda stage, kind: sum(parts[kind][block] for block in ranges[stage]), len(ranges))
    return [end + times.optimizer_seconds_per_parameter * sum(
        _num_parameters(workload, times, ranges, stage, shared=False) for stage in range(rank, len(ranges), len(ends)))
        for rank, end in enumerate(ends)]


def run_in_order(order: Order, seconds: Callable[[int, str], float], num_stages: int, hop: float = 0.0) -> list[float]:
    """When each rank is done. hop: seconds of a message between ranks. ValueError if the order has a deadlock."""
    own = [{stage for stage, _, _ in actions} for actions in order]
    done: dict[tuple[str, int, int], float] = {}
    clocks, places = [0.0] * len(order), [0] * len(order)
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(order):
            while places[rank] < len(actions):
                stage, kind, microbatch = actions[places[rank]]
                needs = _needs(stage, kind, microbatch, num_stages)
                if any(need not in done for need in needs):
                    break
                clocks[rank] = seconds(stage, kind) + max([clocks[rank], *(
                    done[need] + (0.0 if need[1] in own[rank] else hop) for need in needs)])
                done["B" if kind == "I" else kind, stage, microbatch] = clocks[rank]
                places[rank] += 1
                moved = True
    if places != [len(actions) for actions in order]:
        raise ValueError(f"the order waits for itself after {places} actions")
    return clocks


def _needs(stage: int, kind: str, microbatch: int, num_stages: int) -> list[tuple[str, int, int]]:
    if kind == "F":
        return [("F", stage - 1, microbatch)] if stage else []
    if kind == "W":
        return [("B", stage, microbatch)]
    return [("F", stage, microbatch)] + ([("B", stage + 1, microbatch)] if stage < num_stages - 1 else [])
