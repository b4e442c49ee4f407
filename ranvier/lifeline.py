"""What ends a rank that nobody could end any more: its launcher has gone, or the store that all ranks share.

A launcher that is killed outright stops nobody. Its ranks would go on, or wait for each other without end, while their
devices count as free and the next start writes into the same folder. So each rank looks itself:

    its launcher      the processes above it, up to the one that the launcher runs on this machine: our own starter,
                      torchrun's agent, mpiexec's proxy, Slurm's step daemon; shells in between are looked at, too
    the shared store  in that launcher, or in rank 0: a connection that breaks says that its keeper has ended

A rank ends within seconds of either, in one line and with exit code 1. A store that is only slow, or behind a network
that is cut, ends nothing here: then messages do not come either, and their time limit says who is silent.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from ranvier import follow
from ranvier.comm.board import BEAT
from ranvier.launchers import Launcher, Started
from ranvier.processes import Process, ancestors_with
from ranvier.stopped import LOOK_SECONDS, StoppedRanks, ranks_below, tell_pid
from ranvier.world import World

_INTERVAL_SECONDS = 0.5
_LOOKS_FOR_NEIGHBOURS = 60
_OWN_WORDS_SECONDS = 2.0
"""Whoever kept the store may have failed with words of its own, and have the others ended by their launcher."""

_SET_FOR_RANKS: dict[Launcher, tuple[str, ...]] = {
    "local": ("RANVIER_LOCAL_SIZE",), "torchrun": ("TORCHELASTIC_RUN_ID",),
    "mpiexec": ("PMI_RANK", "OMPI_COMM_WORLD_RANK"), "srun": ("SLURM_PROCID",)}
"""Variables that a launcher's ranks have, and shells between the two, but not the launcher itself."""

_NAMES: dict[Launcher, str] = {"local": "the command that started it", "torchrun": "torchrun's agent",
                               "mpiexec": "mpiexec", "srun": "Slurm's step daemon"}
_KEEPERS: dict[Launcher, str] = {"local": "the command that started the ranks keeps",
                                 "torchrun": "torchrun's agent keeps"}


def launcher_variable(launcher: Launcher) -> str:
    """An environment variable that this process has because it is a rank of `launcher`."""
    names = _SET_FOR_RANKS[launcher]
    return next((name for name in names if name in os.environ), names[0])


def launcher_processes(launcher: Launcher) -> list[Process]:
    """The processes above this one, up to its launcher's on this machine, which is the last."""
    return ancestors_with(launcher_variable(launcher))


def follow_launcher(started: Started) -> None:
    """From now on this process ends when one of its launcher's does."""
    watched = launcher_processes(started.launcher)
    # The kernel ends a rank that is stopped, too. It looks at the thread that has started us, not at the process: that
    # is the same only where there is one, or where we know who it was.
    if sys.platform == "linux" and watched and (
            watched[0].num_threads == 1 or (started.launcher == "local" and not started.mpi)):
        follow.follow(watched[0].pid, signal.SIGKILL)
    if not watched:
        return

    def watch() -> None:
        while all(process.runs for process in watched):
            time.sleep(_INTERVAL_SECONDS)
        gone = next((process for process in watched if not process.runs), watched[-1])
        end_now(f"rank {started.rank} ends: {_NAMES[started.launcher]} has gone (process {gone.pid})")

    threading.Thread(target=watch, name="ranvier-launcher", daemon=True).start()


class Heartbeat:
    """A sign of life of this rank in the shared store, once a second, and a look at what the run depends on.

    The rank ends when the store has gone. Of ranks that are stopped for `stopped_seconds` on this machine, `on_stopped`
    is told the first, in this thread; our own starter looks for them itself. `on_overdue` is told of a wait that goes
    on beyond its time limit.
    """

    def __init__(self, world: World, *, stopped_seconds: float, timeout_seconds: float,
                 on_stopped: Callable[[int, Process], None], on_overdue: Callable[[str], None]) -> None:
        self._on_overdue = on_overdue
        self._world, self._store = world, world.store.clone()  # a connection that nobody else waits on
        self._stopped, self._on_stopped = StoppedRanks(stopped_seconds), on_stopped
        self.timeout_seconds = timeout_seconds
        self._count = 0
        self._heard: dict[int, tuple[str, int]] = {}
        self._ending = threading.Event()
        # One rank of a machine looks after the others, and another one after that.
        looks = world.launcher != "local" and world.local_rank < 2 and stopped_seconds > 0
        self._launcher = next(reversed(launcher_processes(world.launcher)), None) if looks else None
        self._neighbours: dict[int, Process] = {}
        tell_pid(self._store, world.rank)
        self._thread = threading.Thread(target=self._keep_beating, name="ranvier-heartbeat", daemon=True)
        self._thread.start()

    def longest_silence(self) -> tuple[int, float]:
        """The rank of which nothing has been heard for longest, and for how many seconds; to be called every
        LOOK_SECONDS. Time in which this rank was stopped itself does not count."""
        for rank in range(self._world.size):
            key = f"{BEAT}{rank}"
            beat = self._world.store.get(key).decode() if self._world.store.check([key]) else ""
            last, looks = self._heard.get(rank, (beat, 0))
            self._heard[rank] = (beat, looks + 1 if beat == last else 0)
        rank = max(self._heard, key=lambda rank: self._heard[rank][1])
        return rank, self._heard[rank][1] * LOOK_SECONDS

    def close(self) -> None:
        """Stop the heartbeat. A thread inside a store while the interpreter is taken down would bring it down too."""
        self._ending.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_OWN_WORDS_SECONDS)

    def _keep_beating(self) -> None:
        try:
            while not self._ending.wait(LOOK_SECONDS):
                self._count += 1
                self._store.set(f"{BEAT}{self._world.rank}", str(self._count))
                self._look()
        except Exception as error:
            if self._ending.wait(_OWN_WORDS_SECONDS):
                return
            keeper = _KEEPERS.get(self._world.launcher, "rank 0 keeps")
            end_now(f"rank {self._world.rank} ends: the store that {keeper} has gone "
                    f"({str(error).partition(chr(10))[0]})")

    def _look(self) -> None:
        overdue = self._world.overdue()
        if overdue is not None:
            self._on_overdue(overdue)
        if self._launcher is None:
            return
        if len(self._neighbours) + 1 < self._world.local_size and self._count < _LOOKS_FOR_NEIGHBOURS:
            self._neighbours = ranks_below(self._store, self._world.size, self._launcher)
            self._neighbours.pop(self._world.rank, None)
        for rank in self._stopped.look(self._neighbours):
            self._on_stopped(rank, self._neighbours[rank])


def end_now(text: str) -> None:
    """End this process with exit code 1, after one line where somebody still reads it. Does not return."""
    def say() -> None:
        with suppress(OSError, ValueError):
            os.write(2, f"ranvier: {text}\n".encode())

    writer = threading.Thread(target=say, daemon=True)  # a pipe that nobody empties would hold us
    writer.start()
    writer.join(1.0)
    os._exit(1)
