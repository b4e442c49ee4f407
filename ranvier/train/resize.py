"""A user's wish for another mesh, from `ranvier resize` to the run that it is meant for, through the run's folder.

    resize.json      the wish; the run takes it away when it has read it
    events.jsonl     the run's answer: a transition, or a refusal, each with the wish's number

The run looks between two steps.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from contextlib import suppress
from pathlib import Path

from ranvier.errors import RanvierError
from ranvier.train.files import read_lines

NAME = "resize.json"
_POLL_SECONDS = 0.1


class ResizeRequests:
    """Those of one run's folder; used on rank 0."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / NAME
        with suppress(OSError):
            self._path.unlink()  # it was meant for a run that has ended

    def asked(self) -> bool:
        """Whether somebody wants another mesh. Cheap: asked after every step."""
        return os.path.exists(self._path)

    def take(self) -> dict[str, object]:
        """The wish, which is then no more: {"data", "pipe", "wish"}, of whatever type its author has given them."""
        found: object = None
        with suppress(OSError, ValueError, RecursionError):
            found = json.loads(self._path.read_text(encoding="utf-8"))
        with suppress(OSError):
            self._path.unlink()
        told = found if isinstance(found, dict) else {}
        return {name: told.get(name) for name in ("data", "pipe", "wish")}


def ask_and_wait(run_dir: Path, *, data: int, pipe: int, seconds: float) -> str:
    """Leave a wish in the folder of a run, and wait for the answer. RanvierError when the run refuses, or says nothing
    for so long."""
    wish = ask(run_dir, data=data, pipe=pipe)
    if not seconds:
        return f"asked {run_dir} for data {data} x pipe {pipe}; its events.jsonl will say what came of it"
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for line in read_lines(run_dir / "events.jsonl"):
            if line.get("wish") == wish and line.get("event") == "transition":
                return f"step {line['step']}: {line.get('text')}"
            if line.get("wish") == wish:
                raise RanvierError(f"refuses: {line.get('text')}", where=f"run {run_dir}",
                                   remedy="Ask for another mesh.")
        time.sleep(_POLL_SECONDS)
    with suppress(OSError):
        (run_dir / NAME).unlink()
    raise RanvierError(f"has not answered within {seconds:g} s", where=f"run {run_dir}",
                       remedy="Is it under way? Wait longer with --wait, for runs with long steps.")


def ask(run_dir: Path, *, data: int, pipe: int) -> str:
    """Leave a wish in the folder of a run; returns its number. RanvierError where there is no such run, or it has
    ended."""
    if not (run_dir / "run.toml").is_file():
        raise RanvierError("is no run's folder: it has no run.toml", where="RUN", value=str(run_dir),
                           remedy="Name the folder that the run has printed as its own (--run-dir).")
    if (run_dir / "summary.json").exists():
        raise RanvierError("has ended", where=f"run {run_dir}", remedy="Resize runs that are under way.")
    wish, fresh = secrets.token_hex(8), run_dir / f".{NAME}.{os.getpid()}"
    try:
        fresh.write_text(json.dumps({"data": data, "pipe": pipe, "wish": wish}), encoding="utf-8")
        fresh.replace(run_dir / NAME)
    except OSError as error:
        raise RanvierError(f"cannot be written: {error.strerror or error}", where=str(fresh),
                           remedy="Ask as a user who may write into the run's folder.") from error
    return wish
