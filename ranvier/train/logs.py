"""metrics.jsonl and events.jsonl as they are read again: each line as if a stranger had written it.

No run depends on them. They tell what a run that goes on has done before, for its pictures and its summary; a line that
is damaged is left out, and one note says so.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from ranvier.plain_file import open_plain

MOST_BYTES = 1 << 20
"""A line that is longer is none of ours."""
_MOST_STEPS = 1 << 62
_MOST_DEPTH = 16
_MOST_RANKS = 1 << 40

Line = dict[str, object]


@dataclass(frozen=True, kw_only=True)
class Log:
    """The lines of a log that can be used, and what was wrong with the others."""

    name: str
    lines: list[Line] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def text(self) -> str | None:
        """What was left out, for people; None where nothing was."""
        if not self.problems:
            return None
        count = f"{len(self.problems)} damaged line{'s' if len(self.problems) > 1 else ''} of {self.name}"
        return f"left out {count}: {'; '.join(self.problems[:3])}{'; ...' if len(self.problems) > 3 else ''}"


def read_metrics(run_dir: Path, step: int | None = None) -> Log:
    """The steps that metrics.jsonl has, up to `step`, each once and in order."""
    log = _read(run_dir / "metrics.jsonl", _metrics_problem)
    lines = {line["step"]: line for line in log.lines if step is None or line["step"] <= step}
    return Log(name=log.name, lines=[lines[number] for number in sorted(lines)], problems=log.problems)


def read_events(run_dir: Path) -> Log:
    """What events.jsonl has."""
    return _read(run_dir / "events.jsonl", _event_problem)


def _read(path: Path, problem_of: Callable[[Line], str | None]) -> Log:
    log = Log(name=path.name)
    try:
        with open_plain(path) as file:
            for number, content in _lines_of(file):
                try:
                    log.lines.append(_parsed(content, problem_of))
                except (ValueError, RecursionError, OverflowError) as error:
                    log.problems.append(f"line {number} {_short(error)}")
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


def _parsed(content: bytes | None, problem_of: Callable[[Line], str | None]) -> Line:
    """The object in a line. ValueError, RecursionError or OverflowError where there is none that can be used."""
    if content is None:
        raise ValueError(f"is longer than {MOST_BYTES:,} bytes")
    try:
        value = json.loads(content.decode(), parse_constant=_no_number)
    except UnicodeDecodeError:
        raise ValueError("is no UTF-8") from None
    except json.JSONDecodeError:
        raise ValueError("is no JSON") from None
    if not isinstance(value, dict):
        raise ValueError("is no object")
    if _depth(value) > _MOST_DEPTH:
        raise ValueError("is nested too deeply")
    json.dumps(value, ensure_ascii=False).encode()  # a half of a surrogate pair cannot be printed
    step = value.get("step")
    if type(step) is not int or not 0 <= step < _MOST_STEPS:
        raise ValueError("has no step")
    problem = problem_of(value)
    if problem is not None:
        raise ValueError(problem)
    return value


def _no_number(text: str) -> None:
    raise ValueError(f"has {text} for a number")


def _depth(value: object) -> int:
    """How many objects and lists are in one another."""
    level, depth = [value], 0
    while level and depth <= _MOST_DEPTH:
        level = [inner for outer in level if isinstance(outer, (dict, list))
                 for inner in (outer.values() if isinstance(outer, dict) else outer)]
        depth += 1
    return depth


def _metrics_problem(line: Line) -> str | None:
    """Every field of a step is a number, or null where it was none."""
    if "loss" not in line or line["step"] == 0:
        return "is no step"
    return next((f"has {name} that is no number" for name, value in line.items() if not _is_number(value)), None)


def _is_number(value: object) -> bool:
    if value is None:
        return True
    return not isinstance(value, bool) and isinstance(value, (int, float)) and math.isfinite(float(value))


def _event_problem(line: Line) -> str | None:
    """An event has a name; where one tells a new mesh, it is one."""
    if not isinstance(line.get("event"), str):
        return "has no event"
    if line["event"] in ("start", "transition") and "mesh" in line:
        mesh, frozen = line["mesh"], line.get("frozen_layers", 0)
        if not isinstance(mesh, Mapping) or not all(_is_count(mesh.get(axis), 1) for axis in ("data", "pipe")):
            return "has no mesh"
        if not _is_count(frozen, 0):
            return "has no number of frozen layers"
    return None


def _is_count(value: object, least: int) -> bool:
    return type(value) is int and least <= value < _MOST_RANKS


def _short(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "is nested too deeply"
    if isinstance(error, (UnicodeEncodeError, OverflowError)):
        return "has what cannot be written"
    return str(error).partition("\n")[0][:200]
