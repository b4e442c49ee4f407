"""Ends a rank that waits in MPI's start for ranks that never come.

MPI_Init waits for all ranks without a time limit, and mpi4py calls it with the GIL held: no thread of the rank can
check the time meanwhile. A forked process does.
"""

from __future__ import annotations

import os
import select
import signal
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec

from ranvier.errors import LaunchError
from ranvier.launch.heartbeat import find_launcher_processes, launcher_variable
from ranvier.launch.launchers import Started
from ranvier.launch.stopped_ranks import CHECK_SECONDS, StoppedRankDetector, find_rank_processes_by_variable
from ranvier.system.processes import Process

_RELAY_SECONDS = 0.3  # mpiexec discards output that it has not read yet when a rank ends


@contextmanager
def mpi_start_watch(started: Started, timeout_seconds: float, stopped_seconds: float) -> Iterator[None]:
    """While the body starts MPI: end this rank after `timeout_seconds`, or when a rank of this machine has been stopped
    (SIGSTOP) for `stopped_seconds` (0: never), with an error that names it.
    """
    rank = Process.find(os.getpid())
    if not started.mpi or started.size == 1 or rank is None or find_spec("mpi4py") is None or not hasattr(os, "fork"):
        yield
        return
    launcher = next(reversed(find_launcher_processes(started.launcher)), None)
    detector = StoppedRankDetector(0 if started.launcher == "local" else stopped_seconds)  # its supervisor detects them
    done, end_of_body = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: other threads; the child uses none of theirs
        watcher = os.fork()
    if watcher == 0:
        with suppress(BaseException):  # nothing of the rank's program runs in the child, not even its error handlers
            os.close(end_of_body)
            _watch(done, rank, launcher, started, detector, timeout_seconds)
        os._exit(0)
    os.close(done)
    try:
        yield
    finally:
        os.close(end_of_body)
        with suppress(ChildProcessError):
            os.waitpid(watcher, 0)


def _watch(done: int, rank: Process, launcher: Process | None, started: Started, detector: StoppedRankDetector,
           timeout_seconds: float) -> None:
    """Returns when `done` is closed at its other end; otherwise kills `rank`."""
    deadline = time.monotonic() + timeout_seconds
    variable = launcher_variable(started.launcher)
    while not select.select([done], [], [], CHECK_SECONDS)[0]:
        ranks = {} if launcher is None else find_rank_processes_by_variable(launcher, variable)
        error = _error({number: ranks[number] for number in detector.check(ranks)}, time.monotonic() > deadline,
                       timeout_seconds)
        if error is None:
            continue
        able = [number for number, process in ranks.items() if not process.is_stopped]
        if started.rank == min(able, default=started.rank):
            os.write(2, f"ranvier: error: {error} [rank {started.rank}]\n".encode())
        time.sleep(_RELAY_SECONDS)
        os.kill(rank.pid, signal.SIGKILL)
        return


def _error(stopped: Mapping[int, Process], late: bool, timeout_seconds: float) -> LaunchError | None:
    for number, process in stopped.items():
        return LaunchError("is stopped (SIGSTOP) while all others wait for it to start MPI, so the run ends",
                           code="rank-stopped-before-mpi", where=f"rank {number}", value=f"process {process.pid}",
                           remedy="Start again; `--launch.stopped-seconds 0` allows a rank to be stopped.")
    if not late:
        return None
    return LaunchError("has not started on all ranks", code="mpi-start-late", where="MPI",
                       value=f"more than {timeout_seconds:g} s",
                       remedy="See whether the launcher started every rank and whether the machines reach each other, "
                              "or raise `--comm.timeout-seconds`.")
