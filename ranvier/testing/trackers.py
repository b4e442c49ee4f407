"""Conformance test of trackers: the events of a successful run, of a run that fails, and of a run that never starts.

    check_tracker(lambda: MyTracker(folder))
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ranvier.arguments import check_arguments
from ranvier.mesh import Mesh
from ranvier.train.events import EndEvent, EvalEvent, Event, NoteEvent, StartEvent, StepEvent, Tracker


def example_step(step: int, **changed: Any) -> StepEvent:
    """An example of a step's event."""
    return replace(StepEvent(step=step, loss=8 - 0.1 * step, tokens=4096.0, step_seconds=0.5, wait_seconds=0.05,
                             bubble_fraction=0.1, grad_norm=1.5, learning_rate=1e-3, flops_per_second=2e10,
                             model_flops_utilisation=0.4), **changed)


def example_run(run_dir: Path, steps: int = 4) -> list[Event]:
    """The events of a run with one of each kind: a skipped step, an evaluation, a note, an end."""
    skipped = example_step(2, loss=math.nan, tokens=0.0, grad_norm=math.nan, stepped=False)
    events: list[Event] = [StartEvent(recipe="example", run_dir=run_dir, mesh=Mesh(data=2, pipe=2), steps=steps,
                                      settings={"policy": "message-driven"}, stages="stage 0: embedding, head")]
    for step in range(1, steps + 1):
        if step == 2:
            events += [NoteEvent(step=2, event="skipped", text="no valid target", fields={"tokens": 0}), skipped]
        elif step == steps:
            events += [EvalEvent(step=step, loss=7.5, tokens=1024.0, seconds=0.2), 
                       EvalEvent(step=step, loss=6.5, tokens=1024.0, seconds=0.2, name="code"),
                       example_step(step, eval_loss=7.5, eval_scores={"eval_code_loss": 6.5})]
        else:
            events.append(example_step(step))
    summary = {"final_loss": 7.6, "eval_loss": 7.5, "tokens_per_second": 8192.0, "bubble_fraction": 0.1,
               "seconds": 3.0}
    return [*events, EndEvent(step=steps, summary=summary, sample="once upon a [time]",
                              pictures=(run_dir / "loss.png",))]


def check_tracker(make: Callable[[], Tracker], run_dir: Path = Path("run")) -> None:
    """Feed fresh trackers from `make` with complete and failed runs.

    AssertionError, or the tracker's own error, if a tracker fails.
    """
    check_arguments(check_tracker, locals())
    for events in (example_run(run_dir), example_run(run_dir)[:3], example_run(run_dir, steps=1), []):
        tracker = make()
        for event in events:
            returned: object = tracker.event(event)  # type: ignore[func-returns-value]  # which is what is checked
            assert returned is None, f"event({type(event).__name__}) returned {returned!r}; a tracker only listens"
        tracker.close()
