"""The schedule of a run within the memory that there is: where its limits are auto, those that need less are tried
before anything is refused. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from ranvier.config.resolve import ResolvedRun
from ranvier.schedule.policies import policy_named

_Found = TypeVar("_Found")


def schedules(run: ResolvedRun) -> tuple[ResolvedRun, ...]:
    """The run, and where the limits of its schedule are auto the same within 1F1B's memory and, last, with the plainest
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
    """The settings of the pipeline in which the `schedules` of a run differ, as JSON can hold them."""
    pipeline = run.pipeline
    return {"policy": pipeline.policy, "memory": pipeline.memory, "defer_bytes": pipeline.defer_bytes}


def first_that_fits(run: ResolvedRun, look: Callable[[ResolvedRun], _Found], fits: Callable[[ResolvedRun, _Found], bool]
                    ) -> tuple[ResolvedRun, _Found]:
    """The first of the run's `schedules` that fits, and what `look` finds of it; the run itself where none does."""
    own: tuple[ResolvedRun, _Found] | None = None
    for each in schedules(run):
        found = each, look(each)
        own = own or found
        if fits(*found):
            return found
    assert own is not None  # the run is the first of them
    return own


def schedule_note(asked: ResolvedRun, found: ResolvedRun) -> str:
    """A note on how the available memory has changed the run's schedule; empty if it has not."""
    before, after = asked.pipeline, found.pipeline
    if after == before:
        return ""
    limit = "none" if before.memory is None else f"{before.memory:g}"
    instead = (f"pipeline.policy is {after.policy}" if after.policy != before.policy else
               "pipeline.defer-bytes is 0" if after.defer_bytes != before.defer_bytes else "pipeline.memory is 1")
    return f"{instead}: the limits of the schedule within pipeline.memory {limit} do not fit the memory that there is"
