"""Outcomes in a file, one per line, written as soon as they exist: an interrupted series continues, and programs that
need the same run share it."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.elastic.contender import Contender
from benchmarks.elastic.outcome import Outcome
from benchmarks.elastic.rounds import Stand
from benchmarks.record import circumstances, machine
from ranvier.config import read
from ranvier.config.run import Run

_TUPLES = ("losses", "step_seconds", "course", "cache")


class Kept:
    """The outcomes in a file that come from a machine like this one and have curves; without a path there are none, and
    nothing is kept."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: dict[str, Outcome] = {}
        for line in path.read_text().splitlines() if path is not None and path.exists() else ():
            entry = json.loads(line)
            if entry["machine"]["cpu"] != machine()["cpu"] or "curve" not in entry["outcome"]:
                continue
            fields = entry["outcome"]
            tuples = {name: tuple(fields[name]) for name in _TUPLES}
            self._known[entry["key"]] = Outcome(**fields | tuples | {"curve": tuple(map(tuple, fields["curve"]))})

    def get(self, contender: Contender, base: Run, stand: Stand) -> Outcome | None:
        """The outcome of the same run with the same seed on as many cores, under any name."""
        found = self._known.get(_key(contender, base, stand))
        return None if found is None else replace(found, name=contender.name)

    def add(self, contender: Contender, base: Run, stand: Stand, outcome: Outcome) -> None:
        if self._path is not None:
            entry = {"key": _key(contender, base, stand), **circumstances(), "outcome": asdict(outcome)}
            with self._path.open("a") as file:
                file.write(json.dumps(entry) + "\n")


def _key(contender: Contender, base: Run, stand: Stand) -> str:
    what = [read.document(contender.applied(base)), contender.peer, stand.pin, stand.threads,
            len(os.sched_getaffinity(0)), *_contents(base)]
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


def _contents(run: Run) -> list[str]:
    """Hashes of the files that the run names, since their contents may change."""
    named = [run.data.train, run.data.eval, run.data.corpus, run.model.pretrained]
    files = [path / "model.safetensors" if path.is_dir() else path for path in map(Path, filter(None, named))]
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file.is_file()]
