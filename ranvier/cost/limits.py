"""What `pipeline.in-flight` and `pipeline.defer-bytes` stand for where they are auto, from counted blocks. Pure.

The engine, `check`, `plan` and a run's prediction of its memory all ask here, so they agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ranvier.config.resolve import ResolvedRun
from ranvier.cost.blocks import BlockCost
from ranvier.cost.memory import PROCESS_BYTES, operand_bytes
from ranvier.mesh import StagePlacement
from ranvier.schedule.computed_limits import MAX_SIMULATED_STAGES, StageLoad, computed_limits, predicted_bubble
from ranvier.schedule.limits import Limits, rule_limits
from ranvier.schedule.policies import policy_named
from ranvier.schedule.schedule import Policy

_ELEMENT_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
_MEMORIES = (1.0, 1.1, 1.25, 1.5, 2.0)
_STATE_BYTES = 8  # of a parameter that trains: two moments, as of AdamW


def pipeline_limits(stages: Sequence[Sequence[BlockCost]], policy: Policy, *, in_flight: int | Literal["auto"],
                    memory: float | None, device: str, element_bytes: int,
                    deferred: tuple[int, ...] | None = None,
                    placement: StagePlacement | None = None) -> Limits:
    """The limits of a pipeline.

    Args:
        stages: of each stage the costs of its blocks for one microbatch.
        in_flight, deferred: as in `Pipeline`.
        memory: as `pipeline.memory`; None follows `rule_limits`.
        device: the type of device. element_bytes: of a parameter. placement: by default one stage on each rank.
    """
    placement = placement or StagePlacement(pipe=len(stages))
    given = None if in_flight == "auto" else in_flight
    if memory is not None:
        found = computed_limits(_loads(stages, device, element_bytes, placement.per_rank), policy, memory=memory,
                                in_flight=given, placement=placement)
        return found.given("auto", deferred)
    rule = rule_limits([any(block.num_trainable for block in blocks) for blocks in stages], placement)
    return rule.given(in_flight, deferred)


def run_limits(run: ResolvedRun, stages: Sequence[Sequence[BlockCost]]) -> Limits:
    """The limits of a run with these blocks on each stage."""
    return pipeline_limits(stages, policy_named(run.pipeline.policy), in_flight=run.pipeline.in_flight,
                           deferred=run.pipeline.deferred,
                           memory=run.schedule_memory, device="cuda" if run.launch.device == "cuda" else "cpu",
                           element_bytes=_ELEMENT_BYTES[run.precision], placement=run.placement)


@dataclass(frozen=True, kw_only=True)
class MemoryChoice:
    """The limits for one value of `pipeline.memory`, and the share of a step's time in which stages wait with them."""

    memory: float
    limits: Limits
    bubble_fraction: float


def memory_choices(run: ResolvedRun, stages: Sequence[Sequence[BlockCost]]) -> tuple[MemoryChoice, ...]:
    """Memory against speed: for the run's own value first, then for others. Empty where it has no effect."""
    policy, memory = policy_named(run.pipeline.policy), run.schedule_memory
    if memory is None or not policy.defers or not 1 < run.mesh.pipe <= MAX_SIMULATED_STAGES:
        return ()
    device = "cuda" if run.launch.device == "cuda" else "cpu"
    loads, found = _loads(stages, device, _ELEMENT_BYTES[run.precision], run.placement.per_rank), []
    for value in (memory, *_MEMORIES):
        limits = run_limits(replace(run, pipeline=replace(run.pipeline, memory=value)), stages)
        found.append(MemoryChoice(memory=value, limits=limits, bubble_fraction=predicted_bubble(
            loads, policy, limits, run.placement)))
    return tuple(found)


def defers_by_limits(run: ResolvedRun) -> bool:
    """Whether weight gradients may wait, as many as numbers of microbatches for each rank say, which were simulated."""
    return (run.schedule_memory is not None and run.mesh.pipe > 1 and run.pipeline.defer_bytes == "auto"
            and policy_named(run.pipeline.policy).defers and not run.optim.update_in_backward)


@dataclass(frozen=True, kw_only=True)
class MeasuredChoice:
    """The limits that measured times lead to. bubble_fraction: predicted with these times; counted_fraction: likewise,
    with the limits that counted times have led to."""

    limits: Limits
    bubble_fraction: float
    counted_fraction: float


_WORTH = 0.01
"""Of a step, what other limits must save by the prediction: measurements have noise."""


def measured_choice(run: ResolvedRun, stages: Sequence[Sequence[BlockCost]], present: Limits,
                    seconds: Sequence[tuple[float, float]]) -> MeasuredChoice | None:
    """The limits by the times of these ranks; those of now where no others are worth a change. None where nothing is
    chosen by simulation, and where a rank has no times.

    Args:
        run: with `auto` as it was asked for. stages: as for `run_limits`. present: the limits of now.
        seconds: of each rank of the pipeline, what forwards and what backwards (with all weight gradients) have taken,
            in any unit. A rank's stages and actions share them in proportion to the counted times.
    """
    policy, memory, pipeline = policy_named(run.pipeline.policy), run.schedule_memory, run.pipeline
    if (memory is None or not defers_by_limits(run) or pipeline.deferred is not None or run.memory_report
            or run.mesh.pipe > MAX_SIMULATED_STAGES):
        return None
    device = "cuda" if run.launch.device == "cuda" else "cpu"
    loads = _loads(stages, device, _ELEMENT_BYTES[run.precision], run.placement.per_rank)
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
                             in_flight=None if pipeline.in_flight == "auto" else pipeline.in_flight)
    before, after = (predicted_bubble(timed, policy, each, run.placement) for each in (present, limits))
    if (1.0 - before) / (1.0 - after) > 1.0 - _WORTH:
        limits, after = present, before
    return MeasuredChoice(limits=limits, bubble_fraction=after, counted_fraction=before)


def _loads(stages: Sequence[Sequence[BlockCost]], device: str, element_bytes: int, per_rank: int) -> list[StageLoad]:
    """Times in units of `BlockCost.weight`. A weight gradient takes as long as the forward of its products."""
    loads, trains = [], False
    for place, blocks in enumerate(stages):
        is_last = place == len(stages) - 1
        backward = [block for block in blocks if (trains := trains or block.num_trainable > 0)]
        trained = [block for block in backward if block.num_trainable and block.flops]
        loss_bytes = blocks[-1].output_bytes if is_last else 0  # about what it keeps of the outputs
        loads.append(StageLoad(
            forward=sum(block.weight(device) for block in blocks),
            backward=sum(block.weight(device) for block in backward)
            + sum(block.of_weights.flops for block in trained if not block.defers),
            weight=sum(block.of_weights.flops for block in trained if block.defers),
            trains=any(block.num_trainable for block in blocks),
            fixed=sum(block.num_parameters * element_bytes + block.num_trainable * (element_bytes + _STATE_BYTES)
                      for block in blocks) + (PROCESS_BYTES / per_rank if device == "cpu" else 0),
            graph=sum(block.kept_bytes for block in backward) + loss_bytes,
            operands=operand_bytes(trained, ends_model=is_last)))
    return loads

