"""Processes of this machine: parents, descendants, and which of them still run."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil


@dataclass(frozen=True)
class Process:
    """A process that runs or has run. handle: psutil's, which differs from that of a later process with the same id."""

    handle: Any

    @classmethod
    def find(cls, pid: int) -> Process | None:
        """The running process with this id; None if there is none."""
        try:
            process = cls(psutil.Process(pid))
        except psutil.NoSuchProcess:
            return None
        return process if process.is_running else None

    @property
    def pid(self) -> int:
        """Its process id."""
        return int(self.handle.pid)

    @property
    def is_running(self) -> bool:
        """Whether it still runs. A zombie, which has ended but was not reaped yet, does not."""
        return self._status not in (None, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)

    @property
    def is_stopped(self) -> bool:
        """Whether a signal (SIGSTOP) has stopped it. A process halted by a debugger does not count."""
        return self._status == str(psutil.STATUS_STOPPED)

    @property
    def _status(self) -> str | None:
        """Status of the process; None if it has ended. A process that cannot be inspected now, for example for lack of
        file handles, has not."""
        try:
            return str(self.handle.status()) if self.handle.is_running() else None
        except psutil.NoSuchProcess:
            return None
        except (psutil.Error, OSError):
            return "unknown"

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        with suppress(psutil.Error):
            self.handle.kill()

    @property
    def num_threads(self) -> int | None:
        """Its number of threads; None if that is unknown."""
        with suppress(psutil.Error):
            return int(self.handle.num_threads())
        return None

    def variable(self, name: str) -> str | None:
        """The environment variable with which it was started; None without it, or if its environment may not be read.
        """
        with suppress(psutil.Error, OSError):
            found: str | None = self.handle.environ().get(name)
            return found
        return None


def process_state(pid: int) -> tuple[str, str] | None:
    """State letter and start time of the process with this id, zombies included; None if there is none, or no /proc.

    The start time is text, in clock ticks since boot, which setting the wall clock does not change.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], fields[19]


def mapped_files(start: str) -> set[str]:
    """Paths of files that this process has mapped, removed ones included, with this `start`; none without /proc."""
    try:
        return set(re.findall(rf"{re.escape(start)}\S*", Path("/proc/self/maps").read_text(errors="replace")))
    except OSError:
        return set()


def ancestors_with(variable: str) -> list[Process]:
    """This process's parent, its parent, and so on, up to and including the first that was started without the
    environment variable `variable`."""
    found: list[Process] = []
    with suppress(psutil.Error):  # of other users, whose processes may be hidden
        at = psutil.Process().parent()
        while at is not None and at.pid > 1:
            found.append(Process(at))
            if found[-1].variable(variable) is None:
                break
            at = at.parent()
    return found


def descendants(pid: int) -> list[Process]:
    """Children of process `pid`, their children, and so on, parents first, as far as they run."""
    children: dict[int, list[Process]] = {}
    for handle in psutil.process_iter():
        with suppress(psutil.Error):  # of other users, whose processes may be hidden
            children.setdefault(handle.ppid(), []).append(Process(handle))
    found = list(children.get(pid, ()))
    for process in found:  # the list grows while it is iterated
        found += children.get(process.pid, ())
    return [process for process in found if process.is_running]
