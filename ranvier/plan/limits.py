"""Values of `pipeline.in-flight` and `pipeline.defer-bytes` if they are auto, from counted blocks. Pure.

The engine, `check`, `plan` and a run's prediction of its memory all use these functions, so they agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from ranvier.config.resolve import ResolvedRun
from ranvier.config.run import Optim, Pipeline
from ranvier.cost.blocks import Stages
from ranvier.cost.memory import PROCESS_BYTES, operand_bytes, segment_bytes
from ranvier.mesh import StagePlacement
from ranvier.schedule.computed_limits import (
    UNKNOWN,
    StageLoad,
    are_searched,
    computed_limits,
    predict,
    simulated_microbatches,
)
from ranvier.schedule.limits import Conditions, Limits, rule_limits
from ranvier.schedule.policies import policy_named
from ranvier.schedule.schedule import Policy

Segments = Sequence[Sequence[range]]
"""Per stage, the runs of its blocks (places on the stage) that are recomputed; empty if none are."""
_ELEMENT_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
_MEMORIES = (1.0, 1.1, 1.25, 1.5, 2.0)
_DEFERRED_FACTOR = 1.1
"""Factor by which a deferred weight gradient takes longer on a CPU: 1.0 to 1.2 were measured, more on faster cores
(docs/experiments.md). On CUDA devices caches hold little of it either way."""


def pipeline_limits(stages: Stages, segments: Segments, pipeline: Pipeline, policy: Policy, optim: Optim | None, *,
                    device: str, element_bytes: int, placement: StagePlacement, num_microbatches: int | None,
                    conditions: Conditions) -> Limits:
    """The limits of a pipeline.

    Args:
        stages: for each stage the costs of its blocks for one microbatch. segments: what is recomputed.
        optim: None for an optimizer of the user's.
        device: the type of device. element_bytes: of a parameter.
        num_microbatches: of a batch on one replica, if that is known.
        conditions: as for `computed_limits`.
    """
    if pipeline.memory is None:
        rule = rule_limits([any(block.num_trainable for block in blocks) for blocks in stages], placement)
        return rule.with_user_limits(pipeline.in_flight, pipeline.deferred, pipeline.defer_last)
    loads = _loads(stages, segments, pipeline, optim, device, element_bytes, placement.per_rank)
    found = computed_limits(loads, policy, memory=pipeline.memory, placement=placement,
                            in_flight=None if pipeline.in_flight == "auto" else pipeline.in_flight,
                            num_microbatches=num_microbatches, conditions=conditions)
    return found.with_user_limits("auto", pipeline.deferred, pipeline.defer_last)


def run_limits(run: ResolvedRun, stages: Stages, segments: Segments = (), conditions: Conditions = UNKNOWN) -> Limits:
    """The limits of a run with these blocks on each stage. conditions: as for `computed_limits`."""
    return pipeline_limits(stages, segments, run.pipeline, policy_named(run.pipeline.policy), run.optim,
                           device=run.device_type, element_bytes=_ELEMENT_BYTES[run.precision],
                           placement=run.placement, num_microbatches=run.num_microbatches, conditions=conditions)


def may_defer(pipeline: Pipeline, optim: Optim | None) -> bool:
    """Whether weight gradients may wait at all, under a policy that defers: if not, limits are those of a schedule
    without deferral."""
    return pipeline.defer_bytes != 0 and (optim is None or not optim.update_in_backward)


def queues_products(pipeline: Pipeline, num_ranks: int) -> bool:
    """Whether layers of torch itself queue products for their weights' gradients, so that these may wait; on all ranks
    of the pipeline alike, and under any policy, so that sums have one order."""
    return num_ranks > 1 or pipeline.defer_bytes not in ("auto", 0) or any(pipeline.deferred or ())


def stages_at_peak(run: ResolvedRun, stages: Stages, limits: Limits, segments: Segments, conditions: Conditions
                   ) -> tuple[tuple[int, float], ...] | None:
    """`Prediction.at_peak`, if a rank's stages share the memory of the microbatches (`Limits.max_stored`, or the bound
    of interleaved 1F1B); else None."""
    if limits.max_stored is None and not (limits.alternating and run.placement.per_rank > 1):
        return None
    return predict(_loads_of(run, stages, segments), policy_named(run.pipeline.policy), limits, run.placement,
                   run.num_microbatches, conditions).at_peak


@dataclass(frozen=True, kw_only=True)
class MemoryChoice:
    """The limits for one value of `pipeline.memory`, and their `Prediction`. num_microbatches: simulated ones.
    step_microbatches: those of a step on one replica."""

    memory: float
    limits: Limits
    step: float
    bubble_fraction: float
    peak_memory: float
    num_microbatches: int
    step_microbatches: int

    @property
    def in_flight(self) -> int:
        """Maximum number of microbatches that a step has in flight."""
        return min(self.limits.in_flight, self.step_microbatches)


def memory_choices(run: ResolvedRun, stages: Stages, segments: Segments = (), conditions: Conditions = UNKNOWN
                   ) -> tuple[MemoryChoice, ...]:
    """Trade-off between memory and speed: for the run's own value first, then for others. Empty if it has no effect."""
    policy, memory = policy_named(run.pipeline.policy), run.pipeline.memory
    if memory is None or not policy.defers or run.mesh.pipeline_size == 1 or not are_searched(run.placement):
        return ()
    loads, found = _loads_of(run, stages, segments), list[MemoryChoice]()
    for value in (memory, *_MEMORIES):
        limits = run_limits(replace(run, pipeline=replace(run.pipeline, memory=value)), stages, segments, conditions)
        result = predict(loads, policy, limits, run.placement, run.num_microbatches, conditions)
        found.append(MemoryChoice(
            memory=value, limits=limits,
            num_microbatches=simulated_microbatches(run.mesh.pipeline_size, run.num_microbatches),
            step_microbatches=run.num_microbatches, step=result.step, bubble_fraction=result.bubble_fraction,
            peak_memory=result.memory))
    return tuple(found)


def defers_by_limits(run: ResolvedRun) -> bool:
    """Whether weight gradients wait up to simulated numbers of microbatches for each rank."""
    return (run.pipeline.memory is not None and run.mesh.pipeline_size > 1 and run.pipeline.defer_bytes == "auto"
            and policy_named(run.pipeline.policy).defers and not run.optim.update_in_backward)


@dataclass(frozen=True, kw_only=True)
class MeasuredChoice:
    """The limits from measured times. bubble_fraction: predicted with these times; counted_fraction: the same for the
    limits from counted times."""

    limits: Limits
    bubble_fraction: float
    counted_fraction: float


_WORTH = 0.01
"""Share of a step that new limits must save according to the prediction, since measurements have noise."""


Factors = tuple[tuple[float, float], ...]
"""Per block, measured divided by counted time of its forward and of its backward, in an arbitrary unit."""


def measured_factors(run: ResolvedRun, stages: Stages, seconds: Sequence[tuple[float, float]], segments: Segments = (),
                     cached: int = 0) -> Factors | None:
    """Measured divided by counted times of the blocks on these ranks; None if a pass has no times.

    Args:
        stages, segments: as for `run_limits`.
        seconds: for each rank of the pipeline, the time of forwards and of backwards (with all weight gradients), in
            any unit. A rank's blocks share them in proportion to the counted times; blocks of a rank without times get
            the mean factor of all ranks.
        cached: number of blocks whose outputs came from the cache, so that they were not computed.
    """
    counted = expected_seconds(run, stages, None, segments, cached)
    means = [sum(measured) / sum(times) if sum(times) else 0.0 for measured, times in zip(
        zip(*seconds, strict=True), zip(*counted, strict=True), strict=True)]
    if not all(means):
        return None
    of_rank = [(_ratio(*forward, means[0]), _ratio(*backward, means[1])) for forward, backward in (
        zip(*each, strict=True) for each in zip(seconds, counted, strict=True))]
    return tuple(of_rank[run.placement.rank_of(stage)] for stage, blocks in enumerate(stages) for _ in blocks)


def _ratio(measured: float, counted: float, mean: float) -> float:
    return measured / counted if measured and counted else mean


def measured_choice(run: ResolvedRun, stages: Stages, present: Limits, seconds: Sequence[tuple[float, float]],
                    segments: Segments = (), conditions: Conditions = UNKNOWN) -> MeasuredChoice | None:
    """The limits by the times of these ranks; the present ones if no others are worth a change. None if nothing is
    chosen by simulation, or if a rank has no times.

    Args:
        run: with `auto` as it was set. stages, segments: as for `run_limits`. present: the present limits.
        seconds: as for `measured_factors`. conditions: as for `computed_limits`.
    """
    policy, memory, pipeline = policy_named(run.pipeline.policy), run.pipeline.memory, run.pipeline
    if (memory is None or not defers_by_limits(run) or pipeline.deferred is not None or run.memory_report
            or not are_searched(run.placement)):
        return None
    loads = _loads_of(run, stages, segments)
    timed: list[StageLoad] = []
    for place, load in enumerate(loads):
        rank = run.placement.rank_of(place)
        held = [loads[stage] for stage in run.placement.stages_of(rank)]
        forward, backward = (measured / counted if counted else 0.0 for measured, counted in zip(seconds[rank], (
            sum(each.forward for each in held), sum(each.backward + each.weight for each in held)), strict=True))
        if not forward or (not backward and load.backward + load.weight):
            return None
        timed.append(replace(load, forward=load.forward * forward, backward=load.backward * backward,
                             weight=load.weight * backward))
    limits = computed_limits(timed, policy, memory=memory, placement=run.placement,
                             in_flight=None if pipeline.in_flight == "auto" else pipeline.in_flight,
                             num_microbatches=run.num_microbatches, conditions=conditions)
    before, after = (predict(timed, policy, each, run.placement, run.num_microbatches, conditions)
                     for each in (present, limits))
    if after.step > (1.0 - _WORTH) * before.step:
        limits, after = present, before
    return MeasuredChoice(limits=limits, bubble_fraction=after.bubble_fraction, counted_fraction=before.bubble_fraction)


class _BlockTimes(NamedTuple):
    """Times of one microbatch in a block, in units of `BlockCost.weight`; 0 for what the block does not do. A weight
    gradient takes as long as the forward of its products. weight: time of those that may wait."""

    forward: float
    backward: float
    weight: float


def _block_times(stages: Stages, device: str, segments: Segments, defers: bool = True) -> list[list[_BlockTimes]]:
    """Times of each stage's blocks. A recomputed block runs again in its backward (the last one of its segment without
    its last product), and none of its products wait."""
    found, trains = [], False
    for stage, blocks in enumerate(stages):
        found.append(list[_BlockTimes]())
        again = {place: place == segment.stop - 1 for segment in segments[stage] for place in segment
                 } if segments else {}
        for place, block in enumerate(blocks):
            trains = trains or block.num_trainable > 0
            own = block.weight_flops if block.num_trainable else 0
            waits = defers and block.defers and place not in again
            forward = block.weight(device)
            found[-1].append(_BlockTimes(
                forward=forward, weight=own if waits else 0,
                backward=(forward + (block.repeated_weight(device, ends=again[place]) if place in again else 0)
                          if trains else 0)
                + (0 if waits else own)))
    return found


def expected_seconds(run: ResolvedRun, stages: Stages, factors: Factors | None, segments: Segments = (), cached: int = 0
                     ) -> list[tuple[float, float]]:
    """Forward and backward time of one microbatch on each rank with these blocks, scaled by factors measured with
    another cut; None: counted times."""
    found, block = [(0.0, 0.0)] * run.mesh.pipeline_size, 0
    for stage, times in enumerate(_block_times(stages, run.device_type, segments)):
        rank = run.placement.rank_of(stage)
        for each in times:
            forward, backward = (1.0, 1.0) if factors is None else factors[block]
            found[rank] = (found[rank][0] + (each.forward * forward if block >= cached else 0.0),
                           found[rank][1] + (each.backward + each.weight) * backward)
            block += 1
    return found


def _loads_of(run: ResolvedRun, stages: Stages, segments: Segments) -> list[StageLoad]:
    return _loads(stages, segments, run.pipeline, run.optim, run.device_type, _ELEMENT_BYTES[run.precision],
                  run.placement.per_rank)


def _loads(stages: Stages, segments: Segments, pipeline: Pipeline, optim: Optim | None, device: str, element_bytes: int,
           per_rank: int) -> list[StageLoad]:
    trained_bytes, defers = _trained_bytes(optim, device, element_bytes), may_defer(pipeline, optim)
    loads = []
    for stage, times in enumerate(_block_times(stages, device, segments, defers)):
        blocks, is_last = stages[stage], stage == len(stages) - 1
        behind = [place for place, each in enumerate(times) if each.backward or each.weight]
        runs = [[place for place in segment if place in behind] for segment in segments[stage]] if segments else []
        inside = {place for places in runs for place in places}
        trained = [blocks[place] for place in behind if place not in inside and blocks[place].num_trainable]
        loss_bytes = blocks[-1].output_bytes if is_last else 0  # about what it keeps of the outputs
        loads.append(StageLoad(
            forward=sum(each.forward for each in times), backward=sum(each.backward for each in times),
            weight=sum(each.weight for each in times), trains=any(block.num_trainable for block in blocks),
            fixed=sum(block.num_parameters * element_bytes + block.num_trainable * trained_bytes
                      for block in blocks) + (PROCESS_BYTES / per_rank if device == "cpu" else 0)
            + max((sum(blocks[place].inside_bytes for place in places) for places in runs), default=0),
            graph=sum(blocks[place].kept_bytes for place in behind if place not in inside)
            + sum(segment_bytes(blocks, places) for places in runs if places) + loss_bytes,
            operands=operand_bytes(trained, ends_model=is_last) if defers else 0,
            deferred_factor=_DEFERRED_FACTOR if device == "cpu" else 1.0))
    return loads


def _trained_bytes(optim: Optim | None, device: str, element_bytes: int) -> float:
    """Bytes on a device for a trainable parameter, in addition to its value: its gradient, and what the optimizer keeps
    there, two moments as in AdamW and a master copy of half-precision parameters. optim: None for a user's
    optimizer."""
    wide = max(4, element_bytes)
    if optim is None:
        return element_bytes + 2 * wide
    states = wide * (2 + (element_bytes < wide))
    share = {"none": 1.0, "auto": 1.0, "stream": 0.0, "host": 0.0}.get(
        optim.offload, 1.0 - (0.5 if optim.offload_share == "auto" else optim.offload_share))
    gradient = wide if optim.accumulate == "fp32" else element_bytes
    return gradient + states * (share if device == "cuda" else 1.0)  # a CPU's device memory is the host's


# --- limits that fit --------------------------------------------------------------------------------------------------

# The schedule of a run within the available memory: if its limits are auto, limits that need less are tried before
# anything is refused. Pure.


_Found = TypeVar("_Found")


def schedules(run: ResolvedRun) -> tuple[ResolvedRun, ...]:
    """The run, and if the limits of its schedule are auto, the same within 1F1B's memory and, last, with the plainest
    schedule: 1F1B, or with several stages on each rank, which have none, one that defers nothing."""
    pipeline = run.pipeline
    if run.mesh.pipeline_size == 1 or not policy_named(pipeline.policy).defers or (
            pipeline.in_flight, pipeline.deferred, pipeline.defer_last, pipeline.defer_bytes) != (
            "auto", None, None, "auto"):
        return (run,)
    within = replace(pipeline, memory=1.0)
    plainest = replace(within, policy="1f1b") if run.placement.per_rank == 1 else replace(within, defer_bytes=0)
    return run, *(replace(run, pipeline=each) for each in (within, plainest) if each != pipeline)


def schedule_settings(run: ResolvedRun) -> dict[str, Any]:
    """The settings of the pipeline in which the `schedules` of a run differ, as values for JSON."""
    pipeline = run.pipeline
    return {"policy": pipeline.policy, "memory": pipeline.memory, "defer_bytes": pipeline.defer_bytes}


def first_that_fits(run: ResolvedRun, look: Callable[[ResolvedRun], _Found], fits: Callable[[ResolvedRun, _Found], bool]
                    ) -> tuple[ResolvedRun, _Found]:
    """The first of the run's `schedules` that fits, and the result of `look` for it; the run itself if none fits."""
    own: tuple[ResolvedRun, _Found] | None = None
    for each in schedules(run):
        found = each, look(each)
        own = own or found
        if fits(*found):
            return found
    assert own is not None  # the run is the first of them
    return own


def schedule_note(asked: ResolvedRun, run: ResolvedRun) -> str:
    """A note on how the available memory has changed the run's schedule; empty if it has not."""
    before, after = asked.pipeline, run.pipeline
    if after == before:
        return ""
    limit = "none" if before.memory is None else f"{before.memory:g}"
    instead = (f"pipeline.policy is {after.policy}" if after.policy != before.policy else
               "pipeline.defer-bytes is 0" if after.defer_bytes != before.defer_bytes else "pipeline.memory is 1")
    return f"{instead}: the limits of the schedule within pipeline.memory {limit} do not fit the available memory"
