"""Results that a run, ours or the peer's, has left in its folder: samples, seconds, accuracy, and its transitions."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

from ranvier.train.events import EvalEvent, Event, StepEvent

CLOCK = "clock.json"


class Clock:
    """A tracker that times the entire run on rank 0: from the start of its first step to the end of its last one,
    including evaluations, transitions and decisions.

    A step's event comes when the next step is over, so the first step began two steps before its event. Evaluations are
    recorded with their end times.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / CLOCK
        self._told: list[tuple[float, float]] = []
        self._evaluated: list[tuple[float, EvalEvent]] = []

    def event(self, event: Event) -> None:
        if isinstance(event, StepEvent):
            self._told.append((time.monotonic(), event.step_seconds))
        if isinstance(event, EvalEvent) and not event.name:
            self._evaluated.append((time.monotonic(), event))

    def close(self) -> None:
        if len(self._told) > 1:
            (first, before), (_, second), (last, _) = self._told[0], self._told[1], self._told[-1]
            began = first - before - second
            points = [{"seconds": at - began, "eval_seconds": event.seconds, **event.metrics()}
                      for at, event in self._evaluated]
            self._path.write_text(json.dumps({"seconds": last - began, "evaluations": points}) + "\n")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Results of one run.

    wall_seconds: from the start of the first step to the end of the last. counted_seconds: of steps and transitions
    only, without the stall of a checkpoint at the end. course: one entry for the start and for each transition,
    {"step", "frozen", "data", "pipe", "cache"}. process_seconds: of the complete case: initial weights, and all
    processes from start to end. samples: targets that were trained on, which are tokens for a decoder.
    """

    name: str
    seed: int
    samples: int
    losses: tuple[float, ...]
    step_seconds: tuple[float, ...]
    transition_seconds: float
    eval_seconds: float
    wall_seconds: float
    counted_seconds: float
    accuracy: float | None
    count: int
    course: tuple[dict, ...]
    cache: tuple[dict, ...] = ()
    transport: str = "gloo"
    process_seconds: float = 0.0
    curve: tuple[tuple[float, float], ...] = ()
    """For each evaluation: (seconds from the start of the first step, without evaluations; accuracy, or minus the
    held-out loss if there is no accuracy)."""

    @property
    def seconds(self) -> float:
        """Seconds of training, without evaluations."""
        return self.wall_seconds - self.eval_seconds

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds


def read(folder: Path, name: str, seed: int, process_seconds: float = 0.0) -> Outcome:
    """The outcome of the run in `folder`."""
    steps, events = (_lines(folder / file) for file in ("metrics.jsonl", "events.jsonl"))
    moves = [event for event in events if event["event"] == "transition"]
    evaluations = [event for event in events if event["event"] == "eval"]
    start = next(event for event in events if event["event"] == "start")
    last = evaluations[-1] if evaluations else {}
    course = [{"step": 0, "frozen": 0, "data": start["mesh"]["data"], "pipe": start["mesh"]["pipe"], "cache": False}]
    course += [{"step": move["step"], "frozen": move["frozen_layers"], "data": move["mesh"]["data"],
                "pipe": move["mesh"]["pipe"], "cache": bool(move["cache"])} for move in moves]
    transition_seconds = sum(move["seconds"] for move in moves)
    seconds = [step["step_seconds"] for step in steps]
    stalls = sum(step.get("checkpoint_stall_seconds", 0.0) for step in steps)
    clock = json.loads((folder / CLOCK).read_text())
    summary = folder / "summary.json"
    facts = json.loads(summary.read_text()) if summary.exists() else {}
    return Outcome(
        name=name, seed=seed, samples=sum(step["tokens"] for step in steps),
        losses=tuple(step["loss"] for step in steps), step_seconds=tuple(seconds),
        transition_seconds=transition_seconds, eval_seconds=sum(event["seconds"] for event in evaluations),
        wall_seconds=clock["seconds"], curve=curve_of(clock["evaluations"]),
        counted_seconds=sum(seconds) + transition_seconds - stalls, accuracy=last.get("eval_accuracy"),
        count=last.get("eval_count", 0), course=tuple(course),
        cache=tuple(counts for counts in facts.get("cache", ()) if counts),
        transport=facts.get("transport", "gloo"), process_seconds=process_seconds)


def curve_of(evaluations: list[dict]) -> tuple[tuple[float, float], ...]:
    """See `Outcome.curve`."""
    found, spent = [], 0.0
    for one in evaluations:
        spent += one["eval_seconds"]
        found.append((one["seconds"] - spent, one["eval_accuracy"] if "eval_accuracy" in one else -one["eval_loss"]))
    return tuple(found)


def _lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]
