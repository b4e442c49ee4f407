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
from contextlib import suppress

from ranvier import follow
from ranvier.launchers import Launcher, Started
from ranvier.processes import Process, ancestors_with
from ranvier.world import World

_INTERVAL_SECONDS = 0.5
_BEAT_SECONDS = 1.0
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


def launcher_processes(started: Started) -> list[Process]:
    """The processes above this one, up to its launcher's on this machine, which is the last."""
    found = next((name for name in _SET_FOR_RANKS[started.launcher] if name in os.environ),
                 _SET_FOR_RANKS[started.launcher][0])
    return ancestors_with(found)


def follow_launcher(started: Started) -> None:
    """From now on this process ends when one of its launcher's does."""
    watched = launcher_processes(started)
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
    """A sign of life of this rank in the shared store, once a second, and the end of the rank when that has gone."""

    def __init__(self, world: World) -> None:
        self._world, self._store = world, world.store.clone()  # a connection that nobody else waits on
        self._count = 0
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._keep_beating, name="ranvier-heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the heartbeat. A thread inside a store while the interpreter is taken down would bring it down too."""
        self._ending.set()
        self._thread.join(_OWN_WORDS_SECONDS)

    def _keep_beating(self) -> None:
        try:
            while not self._ending.wait(_BEAT_SECONDS):
                self._count += 1
                self._store.set(f"ranvier/beat/{self._world.rank}", str(self._count))
        except Exception as error:
            if self._ending.wait(_OWN_WORDS_SECONDS):
                return
            keeper = _KEEPERS.get(self._world.launcher, "rank 0 keeps")
            end_now(f"rank {self._world.rank} ends: the store that {keeper} has gone "
                    f"({str(error).partition(chr(10))[0]})")


def end_now(text: str) -> None:
    """End this process with exit code 1, after one line where somebody still reads it. Does not return."""
    def say() -> None:
        with suppress(OSError, ValueError):
            os.write(2, f"ranvier: {text}\n".encode())

    writer = threading.Thread(target=say, daemon=True)  # a pipe that nobody empties would hold us
    writer.start()
    writer.join(1.0)
    os._exit(1)
