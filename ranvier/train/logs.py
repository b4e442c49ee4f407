"""The text files in a run's folder: metrics.jsonl and events.jsonl, written line by line, and JSON documents.

A line is in the file as soon as its event is over, so that a run that dies keeps what it has reported. JSON has no NaN
or infinity: such a number is written as null.

When a run resumes, it reads the logs for its pictures and its summary, and trusts no line of them. No run depends on
the logs; damaged lines are skipped, and one note reports them.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from ranvier.errors import RanvierError
from ranvier.mesh import REQUIRED_AXES
from ranvier.system.atomic_file import write_atomically
from ranvier.system.untrusted_file import append_file, open_regular_file, parse_json
from ranvier.train.events import EndEvent, EvalEvent, Event, NoteEvent, StartEvent, StepEvent, TransitionEvent


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Convert an OSError about writing `path` into a RanvierError with a remedy."""
    try:
        yield
    except OSError as error:
        raise RanvierError(f"cannot be written: {error.strerror or error}", code="log-not-writable", where=str(path),
                           remedy="Free space on that disk, or choose another folder with `--run-dir`.") from error


def to_json_values(value: object) -> Any:
    """`value` with every number that JSON lacks replaced by None, through mappings and lists."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(name): to_json_values(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json_values(item) for item in value]
    return value


def write_json(path: Path, document: Mapping[str, object], *, indent: int | None = 2) -> None:
    """Write one JSON document atomically. RanvierError if it cannot be written."""
    with writing(path):
        write_atomically(path, json.dumps(to_json_values(document), indent=indent) + "\n")


class LineFile:
    """A file of JSON objects, one per line, flushed after each line. RanvierError if it cannot be written.

    kept: the objects of an earlier file that stay at the beginning; its other objects are dropped.
    """

    def __init__(self, path: Path, kept: Sequence[Mapping[str, object]] = ()) -> None:
        self.path = path
        with writing(path):  # replaces an existing file: a former owner of the folder may still have it open
            write_atomically(path, "".join(json.dumps(line) + "\n" for line in kept))
            self._file = append_file(path)

    def write(self, fields: Mapping[str, object]) -> None:
        """Append one line, with `time`, when it was written, in seconds since 1970."""
        with writing(self.path):
            self._file.write(json.dumps({**to_json_values(fields), "time": round(time.time(), 3)}) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file; idempotent. A failure to flush has already been reported."""
        with suppress(OSError):
            self._file.close()


_NOT_OF_A_LINE = frozenset({"against_published_peak", "num_ranks", "stepped", "eval_scores", "mesh"})


def step_fields(event: StepEvent) -> dict[str, object]:
    """One line of metrics.jsonl: the known fields of a step, with one field for each score and each size of the
    mesh."""
    found = {name: value for name, value in vars(event).items() if name not in _NOT_OF_A_LINE and value is not None}
    found |= {"tokens": int(event.tokens), "tokens_per_second": event.tokens_per_second}
    if event.mesh is not None:
        found |= {axis: event.mesh[axis] for axis in event.mesh.over(divides_stages=False)}
    return found | dict(event.eval_scores)


class MetricsFile(LineFile):
    """metrics.jsonl: one object per step, in order; the first after a transition has the transition's cost. kept: steps
    from before the run resumed."""

    def __init__(self, run_dir: Path, kept: Sequence[Mapping[str, object]] = ()) -> None:
        super().__init__(run_dir / "metrics.jsonl", kept)
        self._transition: dict[str, object] = {}

    def event(self, event: Event) -> None:
        """Write the line of a step; keep a transition for the next one."""
        match event:
            case TransitionEvent():
                self._transition = {"transition_seconds": event.seconds, "transition_bytes": event.bytes_moved}
            case StepEvent():
                self.write(step_fields(event) | self._transition)
                self._transition = {}


class EventsFile(LineFile):
    """events.jsonl: all events other than steps; every object has `step` and `event`. kept: events from before the run
    resumed."""

    def __init__(self, run_dir: Path, kept: Sequence[Mapping[str, object]] = ()) -> None:
        super().__init__(run_dir / "events.jsonl", kept)

    def event(self, event: Event) -> None:
        """Write the line of an event, unless it is a step."""
        fields = _event_fields(event)
        if fields is not None:
            self.write(fields)


def _event_fields(event: Event) -> dict[str, object] | None:
    match event:
        case StartEvent():
            return {"step": 0, "event": "start", "recipe": event.recipe, "mesh": event.mesh.sizes,
                    "steps": event.steps, **event.settings}
        case EvalEvent():
            return {"step": event.step, "event": "eval", "loss": event.loss, "tokens": int(event.tokens),
                    "seconds": event.seconds, **event.scores, **({"name": event.name} if event.name else {})}
        case TransitionEvent():
            return {"step": event.step, "event": "transition", "text": str(event), "frozen_layers": len(event.frozen),
                    "mesh": event.mesh.sizes, "old_mesh": event.old_mesh.sizes,
                    "bytes_moved": event.bytes_moved, "seconds": event.seconds, "cache": event.cache,
                    "reason": event.reason, "global_size": event.global_size,
                    "microbatch_size": event.microbatch_size,
                    **({} if event.request_id is None else {"request_id": event.request_id})}
        case NoteEvent():
            return {"step": event.step, "event": event.event, "text": event.text, **event.fields}
        case EndEvent():
            return {"step": event.step, "event": "end", "final_loss": event.summary.get("final_loss"),
                    "seconds": event.summary.get("seconds"), "sample": event.sample}
        case _:
            return None


MOST_BYTES = 1 << 20
"""Ranvier writes no longer lines."""
_MOST_COUNT = 1 << 40
_MOST_NUMBER = 1e300

Line = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Log:
    """The usable lines of a log, and the problems of the others."""

    name: str
    lines: list[Line] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def text(self) -> str | None:
        """Description of the lines that were skipped; None if none were."""
        if not self.problems:
            return None
        count = f"{len(self.problems)} damaged line{'s' if len(self.problems) > 1 else ''} of {self.name}"
        return f"left out {count}: {'; '.join(self.problems[:3])}{'; ...' if len(self.problems) > 3 else ''}"


def read_metrics(run_dir: Path, step: int | None = None) -> Log:
    """Read the steps in metrics.jsonl up to `step`, each once and in order."""
    log = _read(run_dir / "metrics.jsonl", _metrics_problem)
    lines = {line["step"]: line for line in log.lines if step is None or line["step"] <= step}
    return Log(name=log.name, lines=[lines[number] for number in sorted(lines)], problems=log.problems)


def read_events(run_dir: Path) -> Log:
    """Read events.jsonl."""
    return _read(run_dir / "events.jsonl", _event_problem)


def _read(path: Path, problem_of: Callable[[Line], str | None]) -> Log:
    log = Log(name=path.name)
    try:
        with open_regular_file(path) as file:
            for number, content in _lines_of(file):
                try:
                    log.lines.append(_parse(content, problem_of))
                except ValueError as error:
                    log.problems.append(f"line {number}: {str(error).partition(chr(10))[0][:200]}")
    except FileNotFoundError:
        pass
    except OSError as error:
        log.problems.append(f"the rest: {error.strerror or error}")
    return log


def _lines_of(file: BinaryIO) -> Iterable[tuple[int, bytes | None]]:
    """Lines with their numbers, from 1; None for one that is too long."""
    number = 0
    while content := file.readline(MOST_BYTES):
        number += 1
        if len(content) == MOST_BYTES and not content.endswith(b"\n"):
            while (rest := file.readline(MOST_BYTES)) and not rest.endswith(b"\n"):
                pass
            yield number, None
        elif content.strip():
            yield number, content


def _parse(content: bytes | None, problem_of: Callable[[Line], str | None]) -> Line:
    """The object in a line. ValueError if the line has no usable object."""
    if content is None:
        raise ValueError(f"longer than {MOST_BYTES:,} bytes")
    value = parse_json(content)
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # as the run's page will encode it
    if not isinstance(value, dict):
        raise ValueError("not an object")
    if not _is_count(value.get("step"), 0):
        raise ValueError("no number of a step")
    if (problem := problem_of(value)) is not None:
        raise ValueError(problem)
    return value


def _metrics_problem(line: Line) -> str | None:
    """The problem of a line of metrics.jsonl, in which every field is a number, or null for NaN or infinity."""
    if "loss" not in line or line["step"] == 0:
        return "not a step"
    return next((f"{name} is not a number" for name, value in line.items() if value is not None
                 and not (type(value) in (int, float) and abs(value) < _MOST_NUMBER)), None)


def _event_problem(line: Line) -> str | None:
    """The problem of a line of events.jsonl: an event has a name, and a new mesh in it is a valid mesh."""
    if not isinstance(line.get("event"), str):
        return "no event"
    if line["event"] in ("start", "transition") and "mesh" in line:
        mesh = line["mesh"]
        if not isinstance(mesh, Mapping) or not all(_is_count(mesh.get(axis), 1) for axis in REQUIRED_AXES):
            return "no mesh"
        if not _is_count(line.get("frozen_layers", 0), 0):
            return "no number of frozen layers"
    return None


def _is_count(value: object, least: int) -> bool:
    return type(value) is int and least <= value < _MOST_COUNT
