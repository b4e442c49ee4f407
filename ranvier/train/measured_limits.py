"""The schedule's limits by measured times, which replace those by counted times: once after the first steps on each
mesh, and immediately after a transition, by the times of the blocks on the previous mesh.

Results are bit-identical whatever the limits, so measured times affect only the speed of a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import cast

from ranvier.config.resolve import ResolvedRun
from ranvier.plan.limits import Factors, expected_seconds, measured_choice, measured_factors
from ranvier.planner.conditions import conditions_of
from ranvier.planner.count import recomputed_runs
from ranvier.schedule.computed_limits import UNKNOWN
from ranvier.schedule.limits import Conditions, Limits, measured_conditions
from ranvier.schedule.spans import StepWindow
from ranvier.train.events import NoteEvent
from ranvier.train.runtime import RankRuntime

MEASURED_STEPS = 8
"""Steps on a mesh after which its ranks compare times; the first step is not counted."""


class MeasuredLimits:
    """Limits by measured times, for one run on one rank and one mesh. asked: the run before `auto` was resolved.
    before: result of `block_times` on the previous mesh, which may have passed through JSON."""

    def __init__(self, asked: ResolvedRun, before: Sequence[Sequence[float]] | None = None) -> None:
        self._asked, self._steps = asked, 0
        self._before: Factors | None = None if before is None else tuple((one, two) for one, two in before)
        self._chosen: dict[str, object] = {}  # the last choice with its prediction; empty before the first

    def before_steps(self, runtime: RankRuntime, step: int) -> NoteEvent | None:
        """Choose limits by the previous mesh's times, after a transition after `step`; returns a note about them.
        Collective."""
        if self._before is None or runtime.run.mesh.pipeline_size == 1:
            return None
        costs = runtime.engine.stages.stage_costs()
        return self._choose(runtime, step, "before the transition", expected_seconds(
            self._asked, costs, self._before, recomputed_runs(self._asked, costs), _cached_blocks(runtime)))

    def after_step(self, runtime: RankRuntime, step: int, busy: Mapping[str, float], latest: Sequence[StepWindow]
                   ) -> NoteEvent | None:
        """Count a step, and choose limits after MEASURED_STEPS, when this is collective; returns a note about them.
        busy: seconds in each category of span on this rank. latest: spans of its last steps."""
        self._steps += 1
        if self._steps != MEASURED_STEPS or runtime.run.mesh.pipeline_size == 1:
            return None
        return self._choose(runtime, step, f"of {MEASURED_STEPS} steps", _seconds_of_ranks(runtime, busy),
                            _conditions_of_ranks(runtime, latest))

    def block_times(self, runtime: RankRuntime, busy: Mapping[str, float]) -> Factors | None:
        """Ratios of measured to counted times of the blocks on this mesh so far, or on the last mesh with enough steps,
        for JSON. Collective."""
        if self._steps < MEASURED_STEPS:
            return self._before
        costs = runtime.engine.stages.stage_costs()
        return measured_factors(self._asked, costs, _seconds_of_ranks(runtime, busy),
                                recomputed_runs(self._asked, costs),
                                _cached_blocks(runtime)) or self._before

    def summary(self, bubbles: Mapping[int, float]) -> dict[str, object]:
        """The last choice and its outcome, for the run's summary. bubbles: measured bubble by step."""
        if not self._chosen:
            return {}
        after = [bubble for step, bubble in bubbles.items() if step > cast(int, self._chosen["step"])]
        return {"limits": {**self._chosen, **({"bubble_fraction": median(after)} if after else {})}}

    def _choose(self, runtime: RankRuntime, step: int, when: str, seconds: Sequence[tuple[float, float]],
                conditions: Conditions = UNKNOWN) -> NoteEvent | None:
        engine, costs = runtime.engine, runtime.engine.stages.stage_costs()
        segments = recomputed_runs(self._asked, costs)
        conditions = replace(conditions, deferral=conditions_of(self._asked, costs, segments).deferral)
        found = measured_choice(self._asked, costs, engine.limits, seconds, segments, conditions)
        if found is None:
            return None
        old, new = engine.limits, found.limits
        self._chosen = {"step": step, "in_flight": new.in_flight, "deferred": list(new.deferred),
                        "defer_last": new.last, "alternating": new.alternating,
                        "predicted_bubble_fraction": found.bubble_fraction,
                        "messages": conditions.messages, "variation": conditions.variation}
        if new == old:
            return NoteEvent(step=step, event="limits", fields=self._chosen, verbose=True,
                             text=f"by the times {when}, the schedule's limits stay: {limits_text(new)}; predicted "
                                  f"bubble {found.bubble_fraction:.1%}")
        engine.use_limits(new)
        return NoteEvent(step=step, event="limits", fields=self._chosen, verbose=True,
                         text=f"by the times {when}, {limits_text(new)}, for a predicted bubble of "
                              f"{found.bubble_fraction:.1%} instead of {found.counted_fraction:.1%} (before: "
                              f"{limits_text(old)})")


def _seconds_of_ranks(runtime: RankRuntime, busy: Mapping[str, float]) -> list[tuple[float, float]]:
    """Forwards and backwards of each rank of the pipeline, over all replicas, rows and columns. Collective."""
    own_seconds, mesh = (busy.get("forward", 0.0),
                         busy.get("backward", 0.0) + busy.get("weight", 0.0)), runtime.run.mesh
    seconds = [(0.0, 0.0)] * mesh.pipeline_size
    for rank, (forward, backward) in enumerate(runtime.ranks.gather_objects(own_seconds)):
        pipe = mesh.coordinates(rank).pipeline_rank
        seconds[pipe] = seconds[pipe][0] + forward, seconds[pipe][1] + backward
    return seconds


_MEASURED_SPANS = 3  # steps


def _conditions_of_ranks(runtime: RankRuntime, latest: Sequence[StepWindow]) -> Conditions:
    """Message delays and variation of times in the first replica's pipeline. Collective."""
    own_actions = [(spans.step, span.label, span.start_ns, span.stop_ns)
                   for spans in latest[-_MEASURED_SPANS:]
                   for span in spans.spans if span.category in ("forward", "backward")]
    mesh, of_ranks = runtime.run.mesh, runtime.ranks.gather_objects(own_actions)
    firsts = [mesh.rank(mesh.place(pipeline_rank=number)) for number in range(mesh.pipeline_size)]
    pipeline = [{(step, text): (start, stop) for step, text, start, stop in of_ranks[rank]} for rank in firsts]
    return (measured_conditions(pipeline) if runtime.run.placement.per_rank == 1 else None) or UNKNOWN


def _cached_blocks(runtime: RankRuntime) -> int:
    """Number of blocks of the first stage that are read from the cache, which only its ranks know. Collective."""
    found: list[int] = runtime.ranks.gather_objects(runtime.engine.cached_blocks)
    return max(found)


def with_limits(run: ResolvedRun, limits: Limits) -> ResolvedRun:
    """`run` with the limits instead of `auto`, for the run's file."""
    return replace(run, pipeline=replace(run.pipeline, in_flight=limits.in_flight, deferred=limits.deferred,
                                         defer_last=limits.last))


def limits_text(limits: Limits) -> str:
    """The limits in words."""
    return (f"{limits.in_flight} microbatches may be in flight, deferred weight gradients by rank: "
            f"{limits.deferred_text}"
            + ("" if limits.max_stored is None else f", {limits.max_stored} held by the stages of a rank")
            + (", in 1F1B's order" if limits.alternating else ""))
