"""The schedule's limits by measured times: once on each mesh, after its first steps, where counted times chose before.

Results are the same to the bit whatever the limits, so that times decide how fast a run is, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import median
from typing import cast

from ranvier.config.resolve import ResolvedRun
from ranvier.cost.limits import measured_choice
from ranvier.schedule.limits import Limits
from ranvier.train.events import NoteEvent
from ranvier.train.runtime import RankRuntime

MEASURED_STEPS = 8
"""Steps on a mesh after which its ranks compare times; of the first one nothing is counted."""


class MeasuredLimits:
    """Of one run on one rank. asked: the run before `auto` was resolved."""

    def __init__(self, asked: ResolvedRun) -> None:
        self._asked, self._steps = asked, 0
        self.chosen: dict[str, object] = {}
        """What was chosen, with its prediction, for the summary; empty before."""

    def after_step(self, now: RankRuntime, step: int, busy: Mapping[str, float]) -> NoteEvent | None:
        """One more step has been taken; what has changed with it. busy: seconds in each category of span on this rank.
        Collective after MEASURED_STEPS."""
        self._steps += 1
        return self._choose(now, step, busy) if self._steps == MEASURED_STEPS and now.run.mesh.pipe > 1 else None

    def _choose(self, now: RankRuntime, step: int, busy: Mapping[str, float]) -> NoteEvent | None:
        engine, mesh = now.engine, now.run.mesh
        mine = busy.get("forward", 0.0), busy.get("backward", 0.0) + busy.get("weight", 0.0)
        seconds = [(0.0, 0.0)] * mesh.pipe
        for rank, (forward, backward) in enumerate(now.ranks.gather_objects(mine)):
            pipe = mesh.coordinates(rank).pipe
            seconds[pipe] = seconds[pipe][0] + forward, seconds[pipe][1] + backward
        found = measured_choice(self._asked, engine.stages.stage_costs(), engine.limits, seconds)
        if found is None:
            return None
        old, new = engine.limits, found.limits
        self.chosen = {"step": step, "in_flight": new.in_flight, "deferred": list(new.deferred),
                        "predicted_bubble_fraction": found.bubble_fraction}
        if new == old:
            return None
        engine.use_limits(new)
        return NoteEvent(step=step, event="limits", text=f"by the measured times {limits_text(new)}, for a predicted "
                         f"bubble of {found.bubble_fraction:.1%} instead of {found.counted_fraction:.1%} (before: "
                         f"{limits_text(old)})", fields=self.chosen)


def outcome(chosen: Mapping[str, object], bubbles: Mapping[int, float]) -> dict[str, object]:
    """The choice with what has come of it. bubbles: by step, what was measured."""
    after = [bubble for step, bubble in bubbles.items() if step > cast(int, chosen["step"])]
    return {**chosen, **({"bubble_fraction": median(after)} if after else {})}


def with_limits(run: ResolvedRun, limits: Limits) -> ResolvedRun:
    """`run` with its limits in the place of `auto`, for its file."""
    return replace(run, pipeline=replace(run.pipeline, in_flight=limits.in_flight, deferred=limits.deferred))


def limits_text(limits: Limits) -> str:
    """The limits in words."""
    return (f"{limits.in_flight} microbatches may be in flight, and by rank the weight gradients of "
            f"{', '.join(map(str, limits.deferred))} deferred")
