"""Processes of this machine, read from /proc: parents, descendants, and which of them still run.

A process id alone does not identify a process, since ids are reused; with the start time it does. That time is in clock
ticks since boot, so it does not change when the wall clock is set.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

_PROC = Path("/proc")
_STATE, _PARENT, _STARTED = 0, 1, 19  # indices of fields in /proc/PID/stat after the command's name


@dataclass(frozen=True)
class Process:
    """A process that runs or has run. started: clock ticks since boot; 0 on a system without /proc."""

    pid: int
    started: int = 0

    @classmethod
    def find(cls, pid: int) -> Process | None:
        """The running process with this id; None if there is none."""
        if not _PROC.joinpath("self").exists():
            return cls(pid) if psutil.pid_exists(pid) else None
        found = _stat(pid)
        return None if found is None or found[_STATE] in "ZX" else cls(pid, int(found[_STARTED]))

    @property
    def runs(self) -> bool:
        """Whether it still runs. A zombie, which has ended but was not reaped yet, does not."""
        return Process.find(self.pid) == self

    @property
    def is_stopped(self) -> bool:
        """Whether a signal (SIGSTOP) has stopped it. A process halted by a debugger (state t) does not count."""
        found = _stat(self.pid)
        return found is not None and found[_STATE] == "T" and int(found[_STARTED]) == self.started

    @property
    def parent(self) -> Process | None:
        """Its current parent; None if it has none or that is unknown."""
        if self.pid == os.getpid():
            return Process.find(os.getppid())
        found = _stat(self.pid)
        return None if found is None or found[_PARENT] == "0" else Process.find(int(found[_PARENT]))

    @property
    def num_threads(self) -> int | None:
        """Its number of threads; None if that is unknown."""
        try:
            return len(os.listdir(_PROC / str(self.pid) / "task"))
        except OSError:
            return None

    def variable(self, name: str) -> str | None:
        """The environment variable with which it was started; None without it, or if its environment may not be read.
        """
        try:
            environ = (_PROC / str(self.pid) / "environ").read_bytes()
        except OSError:
            return None
        start = name.encode() + b"="
        return next((entry.removeprefix(start).decode(errors="replace") for entry in environ.split(b"\0")
                     if entry.startswith(start)), None)

    def has_variable(self, name: str) -> bool:
        """Whether it was started with this environment variable; False if its environment may not be read."""
        return self.variable(name) is not None


def process_state(pid: int) -> tuple[str, str] | None:
    """State letter and start time (clock ticks, as text) of the process with this id, zombies included; None if there
    is none."""
    found = _stat(pid)
    return None if found is None else (found[_STATE], found[_STARTED])


def ancestors_with(variable: str) -> list[Process]:
    """This process's parent, its parent, and so on, up to and including the first that was started without the
    environment variable `variable`."""
    found, at = [], Process(os.getpid()).parent
    while at is not None and at.pid > 1:
        found.append(at)
        if not at.has_variable(variable):
            break
        at = at.parent
    return found


def descendants(pid: int) -> list[Process]:
    """Children of process `pid`, their children, and so on, parents first. Empty on a system without /proc."""
    children: dict[int, list[Process]] = {}
    for process, parent in _all():
        children.setdefault(parent, []).append(process)
    found = list(children.get(pid, ()))
    for process in found:  # the list grows while it is iterated
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
