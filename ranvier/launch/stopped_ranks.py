"""Detects ranks that a signal has stopped (SIGSTOP): they do not fail, but all others would wait for them.

The kernel reports which processes are stopped, so a rank that computes for a long time, or holds the GIL, is not
mistaken for a stopped one. Only processes of this machine can be checked; ranks on another machine are checked by their
neighbours there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from ranvier.comm.signed_store import SharedStore
from ranvier.system.processes import Process, descendants

PID = "ranvier/pid/"
"""Prefix of the key under which each rank publishes its process id."""
CHECK_SECONDS = 1.0
"""Interval between two checks."""


class StoppedRankDetector:
    """Finds ranks that have been stopped for `seconds`; 0 finds none.

    It counts checks rather than seconds: if an entire job is stopped and continued, this process did not check
    meanwhile.
    """

    def __init__(self, seconds: float) -> None:
        self._min_checks = max(1, round(seconds / CHECK_SECONDS))
        self._enabled = seconds > 0
        self._counts: dict[int, int] = {}

    def check(self, ranks: Mapping[int, Process]) -> list[int]:
        """Numbers of the `ranks` that have been stopped for `seconds`. Must be called every CHECK_SECONDS."""
        self._counts = {rank: self._counts.get(rank, 0) + 1 for rank, process in ranks.items() if process.is_stopped}
        return [rank for rank, count in self._counts.items() if self._enabled and count >= self._min_checks]


def publish_pid(store: SharedStore, rank: int) -> None:
    """Publish the process id of this process as that of `rank`."""
    store.set(f"{PID}{rank}", str(os.getpid()))


def read_pids(store: SharedStore, num_ranks: int) -> dict[int, int]:
    """Published process id -> rank.

    An unsigned store may contain values of any process: use this to name ranks, and never to signal processes.
    """
    ranks: dict[int, int] = {}
    for rank in range(num_ranks):
        key = f"{PID}{rank}"
        text = store.get(key).decode(errors="replace") if store.check([key]) else ""
        if text.isascii() and text.isdigit():
            ranks[int(text)] = rank
    return ranks


def find_rank_processes(store: SharedStore, num_ranks: int, launcher: Process) -> dict[int, Process]:
    """The processes, by rank, that `launcher` runs on this machine and whose ids are published.

    Only descendants of `launcher` count, whatever the store says, so they may be signalled.
    """
    ranks = read_pids(store, num_ranks)
    return {ranks[process.pid]: process for process in (descendants(launcher.pid) if ranks else ())
            if process.pid in ranks}


def find_rank_processes_by_variable(launcher: Process, variable: str) -> dict[int, Process]:
    """Find rank processes, like `find_rank_processes`, but by the environment variable that has the rank: for use when
    the store does not answer.

    A shell between the launcher and its rank has the variable, too, and is then mistaken for the rank.
    """
    found: dict[int, Process] = {}
    for process in descendants(launcher.pid):
        text = process.variable(variable) or ""
        if text.isascii() and text.isdigit():
            found.setdefault(int(text), process)
    return found


def kill_stopped_ranks(launcher: Process, variable: str) -> None:
    """Kill the descendants of `launcher` that are stopped and have the environment variable `variable` of its ranks.

    For the end of a run, which would otherwise leave them behind.
    """
    for process in descendants(launcher.pid):
        if process.pid != os.getpid() and process.is_stopped and process.variable(variable) is not None:
            process.kill()
