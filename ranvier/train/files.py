"""The text files in a run's folder, as they are written: metrics.jsonl and events.jsonl line by line, JSON documents in
one go. `ranvier.train.logs` reads them.

A line is in the file as soon as its event is over, so that a run that dies keeps what it has said. JSON has no NaN or
infinity: such a number is written as null.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ranvier.errors import RanvierError
from ranvier.mesh import AXES, Mesh
from ranvier.plain_file import write_whole
from ranvier.train.events import EndEvent, EvalEvent, Event, NoteEvent, StartEvent, StepEvent, TransitionEvent


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the system says about writing `path` into a RanvierError with a remedy."""
    try:
        yield
    except OSError as error:
        raise RanvierError(f"cannot be written: {error.strerror or error}", where=str(path),
                           remedy="Free space on that disk, or choose another folder with --run-dir.") from error


def open_folder(path: Path) -> None:
    """Make the run's folder and its parents. RanvierError when that cannot be."""
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)


def plain(value):
    """`value` with every number that JSON lacks replaced by None, through mappings and lists."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def write_json(path: Path, document: Mapping[str, object], *, indent: int | None = 2) -> None:
    """Write one JSON document, whole or not at all. RanvierError when it cannot be written."""
    with writing(path):
        write_whole(path, json.dumps(plain(document), indent=indent) + "\n")


class LineFile:
    """A file of JSON objects, one a line, flushed line by line. RanvierError when it cannot be written.

    kept: the objects of an earlier file that stay at its beginning; the others go.
    """

    def __init__(self, path: Path, kept: Sequence[Mapping[str, object]] = ()) -> None:
        self.path = path
        with writing(path):  # never into the file that is there: a former owner of the folder may have it open
            write_whole(path, "".join(json.dumps(line) + "\n" for line in kept))
            self._file = path.open("a", encoding="utf-8")

    def write(self, fields: Mapping[str, object]) -> None:
        with writing(self.path):
            self._file.write(json.dumps(plain(fields)) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Idempotent. What could not be flushed has been reported already."""
        with suppress(OSError):
            self._file.close()


def step_fields(event: StepEvent) -> dict[str, object]:
    """One line of metrics.jsonl."""
    fields: dict[str, object] = {
        "step": event.step, "loss": event.loss, "tokens": int(event.tokens),
        "tokens_per_second": event.tokens_per_second, "step_seconds": event.step_seconds,
        "bubble_fraction": event.bubble_fraction, "wait_seconds": event.wait_seconds, "grad_norm": event.grad_norm,
        "learning_rate": event.learning_rate, "flops_per_second": event.flops_per_second,
        "model_flops_utilisation": event.model_flops_utilisation}
    for name in ("eval_loss", "loss_scale", "skipped_steps", "checkpoint_stall_seconds"):
        if getattr(event, name) is not None:
            fields[name] = getattr(event, name)
    if event.frozen_layers is not None:
        fields |= {"frozen_layers": event.frozen_layers, "data": event.mesh.data, "pipe": event.mesh.pipe}
    return fields | event.eval_scores


def mesh_fields(mesh: Mesh) -> dict[str, int]:
    return {axis: getattr(mesh, axis) for axis in AXES}


def mesh_text(mesh: Mesh) -> str:
    """The mesh for headings: row and col only where they are used."""
    return str(mesh) if mesh.stage_size > 1 else f"data {mesh.data} x pipe {mesh.pipe}"


class MetricsFile:
    """metrics.jsonl: one object a step, in order; the first one after a transition says what that took. kept: steps of
    the same run before it went on."""

    def __init__(self, run_dir: Path, kept: Sequence[Mapping[str, object]] = ()) -> None:
        self._lines = LineFile(run_dir / "metrics.jsonl", kept)
        self._transition: dict[str, object] = {}

    def event(self, event: Event) -> None:
        match event:
            case TransitionEvent():
                self._transition = {"transition_seconds": event.seconds, "transition_bytes": event.bytes_moved}
            case StepEvent():
                self._lines.write(step_fields(event) | self._transition)
                self._transition = {}

    def close(self) -> None:
        self._lines.close()


class EventsFile:
    """events.jsonl: whatever happens beside the steps; every object has `step` and `event`. kept: events of the same
    run before it went on."""

    def __init__(self, run_dir: Path, kept: Sequence[Mapping[str, object]] = ()) -> None:
        self._lines = LineFile(run_dir / "events.jsonl", kept)

    def event(self, event: Event) -> None:
        fields = _event_fields(event)
        if fields is not None:
            self._lines.write(fields)

    def close(self) -> None:
        self._lines.close()


def _event_fields(event: Event) -> dict[str, object] | None:
    match event:
        case StartEvent():
            return {"step": 0, "event": "start", "recipe": event.recipe, "mesh": mesh_fields(event.mesh),
                    "steps": event.steps, **event.settings}
        case EvalEvent():
            return {"step": event.step, "event": "eval", "loss": event.loss, "tokens": int(event.tokens),
                    "seconds": event.seconds, **event.scores}
        case TransitionEvent():
            return {"step": event.step, "event": "transition", "text": str(event), "frozen_layers": event.frozen_layers,
                    "mesh": mesh_fields(event.mesh), "old_mesh": mesh_fields(event.old_mesh),
                    "bytes_moved": event.bytes_moved, "seconds": event.seconds, "cache": event.cache,
                    "reason": event.reason, "global_size": event.global_size,
                    "microbatch_size": event.microbatch_size, **({} if event.wish is None else {"wish": event.wish})}
        case NoteEvent():
            return {"step": event.step, "event": event.event, "text": event.text, **event.fields}
        case EndEvent():
            return {"step": event.step, "event": "end", "final_loss": event.summary.get("final_loss"),
                    "seconds": event.summary.get("seconds"), "sample": event.sample}
        case _:
            return None
