"""Processes of this machine as the kernel tells of them (/proc): who started whom, and which of them still run.

A process id alone names nobody for long, since ids are used again; with the time of its start it does. That time is in
clock ticks since the machine's start: it does not move when somebody sets the clock.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_STATE, _PARENT, _STARTED = 0, 1, 19  # fields of /proc/PID/stat behind the command's name


@dataclass(frozen=True)
class Process:
    """A process that runs, or did. started: clock ticks since the machine's start; 0 on a system without /proc."""

    pid: int
    started: int = 0

    @classmethod
    def find(cls, pid: int) -> Process | None:
        """The process that has this id now, None where none has."""
        if not _PROC.joinpath("self").exists():
            return cls(pid) if _answers(pid) else None
        found = _stat(pid)
        return None if found is None or found[_STATE] in "ZX" else cls(pid, int(found[_STARTED]))

    @property
    def runs(self) -> bool:
        """Whether it has not ended. One that has ended and is still in the list of processes (a zombie) does not."""
        return Process.find(self.pid) == self

    @property
    def is_stopped(self) -> bool:
        """Whether a signal (SIGSTOP) holds it. One that a debugger holds is not counted."""
        found = _stat(self.pid)
        return found is not None and found[_STATE] == "T" and int(found[_STARTED]) == self.started

    @property
    def parent(self) -> Process | None:
        """Its parent as of now; None where it has none or cannot be told."""
        if self.pid == os.getpid():
            return Process.find(os.getppid())
        found = _stat(self.pid)
        return None if found is None or found[_PARENT] == "0" else Process.find(int(found[_PARENT]))

    @property
    def num_threads(self) -> int | None:
        """How many threads it has; None where that cannot be told."""
        try:
            return len(os.listdir(_PROC / str(self.pid) / "task"))
        except OSError:
            return None

    def has_variable(self, name: str) -> bool:
        """Whether it was started with this environment variable; False where that may not be read."""
        try:
            environ = (_PROC / str(self.pid) / "environ").read_bytes()
        except OSError:
            return False
        return any(entry.startswith(name.encode() + b"=") for entry in environ.split(b"\0"))


def ancestors_with(variable: str) -> list[Process]:
    """This process's parent, its parent, and so on, up to the first that was started without the environment variable
    `variable` (which is among them)."""
    found, at = [], Process(os.getpid()).parent
    while at is not None and at.pid > 1:
        found.append(at)
        if not at.has_variable(variable):
            break
        at = at.parent
    return found


def descendants(pid: int) -> list[Process]:
    """Children of process `pid`, their children, and so on; parents before children. Empty without /proc."""
    children: dict[int, list[Process]] = {}
    for process, parent in _all():
        children.setdefault(parent, []).append(process)
    found = list(children.get(pid, ()))
    for process in found:  # grows while it is walked
        found += children.get(process.pid, ())
    return found


def _all() -> Iterator[tuple[Process, int]]:
    """Every process that runs, and the id of its parent."""
    for name in filter(str.isdigit, os.listdir(_PROC) if _PROC.exists() else ()):
        found = _stat(int(name))
        if found is not None and found[_STATE] not in "ZX":
            yield Process(int(name), int(found[_STARTED])), int(found[_PARENT])


def _stat(pid: int) -> list[str] | None:
    try:
        return (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
