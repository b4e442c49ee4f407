"""Ranks that a signal holds (SIGSTOP): they cannot fail, and would keep all others waiting until the time limit.

A rank that computes for long, or holds Python's lock, is not stopped: the kernel says which is which. It is asked about
processes of this machine only; those of another one are looked after by their neighbours there.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from contextlib import suppress

from torch.distributed import Store

from ranvier.comm.signed_store import SignedStore
from ranvier.processes import Process, descendants

PID = "ranvier/pid/"
LOOK_SECONDS = 1.0


class StoppedRanks:
    """Counts for how long ranks are stopped. Looks are counted, not seconds: where a whole job was held and goes on,
    nobody has looked meanwhile."""

    def __init__(self, seconds: float) -> None:
        self._looks = max(1, round(seconds / LOOK_SECONDS))
        self._enabled = seconds > 0
        self._counts: dict[int, int] = {}

    def look(self, ranks: Mapping[int, Process]) -> list[int]:
        """Those of `ranks` that are stopped for so long; to be called every LOOK_SECONDS."""
        self._counts = {rank: self._counts.get(rank, 0) + 1 for rank, process in ranks.items() if process.is_stopped}
        return [rank for rank, count in self._counts.items() if self._enabled and count >= self._looks]


def tell_pid(store: Store | SignedStore, rank: int) -> None:
    """Publish which process this rank is."""
    store.set(f"{PID}{rank}", str(os.getpid()))


def told_pids(store: Store | SignedStore, num_ranks: int) -> dict[int, int]:
    """Ranks by the process id that they have told, as far as they have. Anybody may have written that: it serves to
    name ranks, not to signal them."""
    told: dict[int, int] = {}
    for rank in range(num_ranks):
        key = f"{PID}{rank}"
        text = store.get(key).decode(errors="replace") if store.check([key]) else ""
        if text.isascii() and text.isdigit():
            told[int(text)] = rank
    return told


def ranks_below(store: Store | SignedStore, num_ranks: int, launcher: Process) -> dict[int, Process]:
    """The processes of the ranks that `launcher` has started on this machine, as far as they have told their ids. What
    the store says is believed only of descendants of that process."""
    told = told_pids(store, num_ranks)
    return {told[process.pid]: process for process in (descendants(launcher.pid) if told else ())
            if process.pid in told}


def kill_stopped(launcher: Process, variable: str) -> None:
    """End the processes below `launcher` that are stopped and were started as ranks, with the environment variable
    `variable`: a run that ends would leave them behind."""
    for process in descendants(launcher.pid):
        if process.pid != os.getpid() and process.is_stopped and process.has_variable(variable):
            with suppress(OSError):
                os.kill(process.pid, signal.SIGKILL)
