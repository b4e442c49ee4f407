"""A user's wish for another mesh, from `ranvier resize` to the run that it is meant for, through the run's folder.

    resize.json      the wish; the run takes it away when it has read it

The run looks between two steps. What it has done stands in events.jsonl: a transition, or a refusal.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

NAME = "resize.json"


class ResizeRequests:
    """Those of one run's folder; used on rank 0."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / NAME
        with suppress(OSError):
            self._path.unlink()  # it was meant for a run that has ended

    def asked(self) -> bool:
        """Whether somebody wants another mesh. Cheap: asked after every step."""
        return os.path.exists(self._path)

    def take(self) -> dict[str, object] | None:
        """The wish, which is then no more; None where it cannot be read."""
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
            self._path.unlink()
        except (OSError, ValueError):
            with suppress(OSError):
                self._path.unlink()
            return {"data": None, "pipe": None}
        return {name: found.get(name) for name in ("data", "pipe")} if isinstance(found, dict) else {
            "data": None, "pipe": None}


def ask(run_dir: Path, *, data: int, pipe: int) -> None:
    """Leave a wish in the folder of a run."""
    fresh = run_dir / f".{NAME}.{os.getpid()}"
    fresh.write_text(json.dumps({"data": data, "pipe": pipe}), encoding="utf-8")
    fresh.replace(run_dir / NAME)
