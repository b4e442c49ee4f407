"""Ends a rank whose launcher or shared store is gone, or that a failure left behind; publishes its heartbeat.

A launcher that is killed with SIGKILL ends none of its ranks. They would continue, or wait for each other forever,
while their devices count as free and the next start writes into the same folder. So each rank watches what it depends
on:

    its launcher      the processes above it, up to the one that the launcher runs on this machine: our own supervisor,
                      torchrun's agent, mpiexec's proxy or Slurm's step daemon, and shells in between
    the shared store  hosted by that launcher or by rank 0: a broken connection shows that its host has exited

If either is gone, a rank ends within seconds, with one line and exit code 1. A store that is only slow, or on a
disconnected network, does not end a rank: then messages do not arrive either, and their timeout names silent ranks.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from typing import NoReturn

from ranvier.comm.board import HEARTBEAT_KEY, call_with_timeout, read_actions
from ranvier.comm.signed_store import SharedStore, clone_shared_store
from ranvier.errors import LaunchError
from ranvier.launch import stopped_ranks
from ranvier.launch.launchers import LAUNCHERS, Started
from ranvier.launch.stopped_ranks import CHECK_SECONDS, StoppedRankDetector, find_rank_processes_by_variable
from ranvier.system import parent_death
from ranvier.system.background import in_background
from ranvier.system.processes import Process, ancestors_with
from ranvier.world import World

LeftBehind = Callable[[Callable[[Callable[[int], str]], str | None]], None]
"""Receives a function that makes the report, given a function that describes a rank."""
_INTERVAL_SECONDS = 0.5
_MAX_NEIGHBOUR_SEARCHES = 60
_STORE_HOST_SECONDS = 2.0
"""Seconds for the process that hosted the store to report its own error, and for its launcher to end this rank."""


def launcher_variable(launcher: str) -> str:
    """An environment variable that this process has because it is a rank of `launcher`."""
    names = LAUNCHERS[launcher].variables
    return next((name for name in names if name in os.environ), names[0])


def find_launcher_processes(launcher: str) -> list[Process]:
    """The ancestors of this process up to the launcher's process on this machine, which is the last; empty for ranks
    that were started by hand."""
    name = launcher_variable(launcher)
    return ancestors_with(name) if name in os.environ else []


def exit_with_launcher(started: Started) -> None:
    """Make this process end when one of its launcher's processes on this machine ends."""
    watched = find_launcher_processes(started.launcher)
    # The kernel also ends a rank that is stopped, which a thread cannot do. Its signal is tied to the thread that
    # started us, not to the process: use it only if the parent has one thread, or that is our supervisor's main thread.
    if sys.platform == "linux" and watched and (
            watched[0].num_threads == 1 or (started.launcher == "local" and not started.mpi)):
        parent_death.signal_on_parent_death(watched[0].pid, signal.SIGKILL)
    if not watched:
        return

    def watch() -> None:
        while all(process.is_running for process in watched):
            time.sleep(_INTERVAL_SECONDS)
        gone = next((process for process in watched if not process.is_running), watched[-1])
        exit_now(f"rank {started.rank} ends: {LAUNCHERS[started.launcher].process} is gone (process {gone.pid})")

    threading.Thread(target=watch, name="ranvier-launcher", daemon=True).start()


class Heartbeat:
    """Publishes a rising count in the shared store once a second, and checks what this rank depends on.

    The rank ends when the store is gone.

    Args:
        world: of this rank.
        stopped_seconds: `on_stopped(rank, process)` is called, on a separate thread, for the first rank of this machine
        that a signal has stopped for this long; 0 never. Our own supervisor checks its ranks itself.
        timeout_seconds: limit with which callers compare `longest_silence`.
        on_overdue: called, on the same thread, with the description of a wait that exceeds its time limit.
        on_left_behind: called, on the same thread, when another rank has failed and this rank still runs.
    """

    def __init__(self, world: World, *, stopped_seconds: float, timeout_seconds: float,
                 on_stopped: Callable[[int, Process], None], on_overdue: Callable[[str], None],
                 on_left_behind: LeftBehind = lambda report: None) -> None:
        self._on_overdue, self._on_left_behind = on_overdue, on_left_behind
        # A separate connection, since a blocking call on the shared one would delay the heartbeat.
        self._world, self._store = world, clone_shared_store(world.store)
        self._stopped, self._on_stopped = stopped_ranks.StoppedRankDetector(stopped_seconds), on_stopped
        self.timeout_seconds = timeout_seconds
        self._count = 0
        self._heard: dict[int, tuple[str, int]] = {}
        self._ending = threading.Event()
        # The first rank of a machine watches the others, and the second one watches the first.
        watches = world.launcher != "local" and world.local_rank < 2 and stopped_seconds > 0
        self._launcher = next(reversed(find_launcher_processes(world.launcher)), None) if watches else None
        self._neighbours: dict[int, Process] = {}
        self._failures = FailureWatch(world.rank, world.size, self._store, world.lost)
        stopped_ranks.publish_pid(self._store, world.rank)
        # The watch has its own thread: a store whose host is stopped blocks its callers.
        self._threads = [threading.Thread(target=self._repeat, args=(check,), name="ranvier-heartbeat", daemon=True)
                         for check in (self._beat, self._watch)]
        for thread in self._threads:
            thread.start()

    def longest_silence(self) -> tuple[int, float]:
        """The rank whose last heartbeat is oldest, and its age in seconds. Must be called every CHECK_SECONDS.

        The age is counted in calls, so that time in which this rank itself was stopped does not count.
        """
        for rank in range(self._world.size):
            key = f"{HEARTBEAT_KEY}{rank}"
            beat = self._world.store.get(key).decode() if self._world.store.check([key]) else ""
            last, checks = self._heard.get(rank, (beat, 0))
            self._heard[rank] = (beat, checks + 1 if beat == last else 0)
        rank = max(self._heard, key=lambda rank: self._heard[rank][1])
        return rank, self._heard[rank][1] * CHECK_SECONDS

    def find_waiting_rank(self) -> int | None:
        """A rank that, as of `longest_silence`, has begun more collective calls outside batches than this rank; None if
        there is none."""
        calls = {rank: int(beat.partition(" ")[2] or 0) for rank, (beat, _) in self._heard.items()}
        return next((rank for rank, count in calls.items() if count > self._world.num_calls), None)

    def close(self) -> None:
        """Stop. A thread inside a store call while the interpreter shuts down would crash the process."""
        self._ending.set()
        for thread in self._threads:
            if threading.current_thread() is not thread:
                thread.join(_STORE_HOST_SECONDS)

    def _repeat(self, check: Callable[[], None]) -> None:
        """Call `check` once a second; without the store this rank exits."""
        try:
            while not self._ending.wait(CHECK_SECONDS):
                check()
        except Exception as error:
            if not self._ending.wait(_STORE_HOST_SECONDS):
                exit_now(store_is_gone(self._world, error))

    def _beat(self) -> None:
        self._count += 1
        self._store.set(f"{HEARTBEAT_KEY}{self._world.rank}", f"{self._count} {self._world.num_calls}")

    def _watch(self) -> None:
        overdue = self._world.overdue()
        if overdue is not None:
            self._on_overdue(overdue)
        if self._launcher is not None:
            if len(self._neighbours) + 1 < self._world.local_size and self._count < _MAX_NEIGHBOUR_SEARCHES:
                self._neighbours = self._find_neighbours(self._launcher)
                self._neighbours.pop(self._world.rank, None)
            for rank in self._stopped.check(self._neighbours):
                self._on_stopped(rank, self._neighbours[rank])
        self._failures.rank, self._failures.size = self._world.rank, self._world.size  # ranks come and go
        cause = call_with_timeout(lambda: self._failures.check(self._neighbours), CHECK_SECONDS)
        if cause is not None:
            self._on_left_behind(partial(self._failures.report, cause))

    def _find_neighbours(self, launcher: Process) -> dict[int, Process]:
        published = call_with_timeout(lambda: stopped_ranks.find_rank_processes(
            self._store, self._world.size, launcher), CHECK_SECONDS)
        if published is not None or LAUNCHERS[self._world.launcher].store_host:
            return published or {}
        return stopped_ranks.find_rank_processes_by_variable(launcher, launcher_variable(self._world.launcher))


def store_is_gone(world: World, error: BaseException) -> str:
    """The message of a rank that ends because its store does not answer. error: the store's error."""
    known = LAUNCHERS.get(world.launcher)
    host = (known and known.store_host) or "rank 0"
    return f"rank {world.rank} ends: the store that {host} hosts is gone ({str(error).partition(chr(10))[0]})"


def exit_now(text: str) -> NoReturn:
    """End this process with exit code 1 after printing one line, if standard error can still be written."""
    def write() -> None:
        with suppress(OSError, ValueError):
            os.write(2, f"ranvier: {text}\n".encode())

    wait((in_background(write, "ranvier-exit"),), 1.0)  # a full pipe without a reader would block forever
    os._exit(1)


# --- the start of MPI -------------------------------------------------------------------------------------------------

# Ends a rank that waits in MPI's start for ranks that never start.
#
# MPI_Init waits for all ranks without a time limit, and mpi4py calls it with the GIL held, so no thread of the rank can
# check the time meanwhile. A forked process checks it.


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
    detector = StoppedRankDetector(0 if started.launcher == "local" else stopped_seconds)  # our supervisor does it
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
    """Return once `done` is closed at its other end; kill `rank` on a timeout or a stopped rank."""
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
                       remedy="Check that the launcher started every rank and that the machines can reach each other, "
                              "or raise `--comm.timeout-seconds`.")


# --- failures of others -----------------------------------------------------------------------------------------------

# Ends ranks that are left behind by a failure elsewhere, within ten seconds, with a report of who waits for whom.
#
# A rank in a collective on a CUDA device waits in the driver: no error of a peer reaches it, and torchrun's agent gives
# it 30 seconds; on another machine nothing notices at all. So the heartbeat's thread checks, once a second,
#
#     the record of the first failure in the shared store, which each failing rank writes
#     the processes of the other ranks on this machine: a rank that was killed with SIGKILL writes nothing
#     the connections of Gloo, which break immediately when a peer's process ends, also on another machine
#
# A rank that still runs exits LEAVE_CHECKS seconds after one of these signs: by then its own error, or its launcher,
# would have ended it. The first such rank prints what every rank was doing.


FAILED = "ranvier/failed"
"""Store key of the record (JSON) of the first rank that failed."""
FINISHED = "ranvier/finished"
"""Store key that is set once all ranks have finished; FINISHED/RANK once one has."""
_REPORTED = "ranvier/left-behind"
LEAVE_CHECKS = 5
"""Number of checks, once a second, after which a rank that a failure has left behind exits."""
_GONE_CHECKS = 2
"""Number of checks before a missing process counts as killed: a process writes its record before it ends, but this rank
may read the store in between."""


class FailureWatch:
    """Watches, on one rank, for failures of others. `check` must be called once a second.

    Args:
        rank, size: of this rank; both may change.
        store: a connection that no other thread uses.
        lost: returns the description of a lost peer from this rank's connections; None while all are connected.
    """

    def __init__(self, rank: int, size: int, store: SharedStore, lost: Callable[[], str | None]) -> None:
        self.rank, self.size, self._store, self._lost = rank, size, store, lost
        self._checks = 0
        self._gone: dict[int, int] = {}
        self._cause: str | None = None

    def check(self, neighbours: Mapping[int, Process]) -> str | None:
        """Why this rank must exit now; None to stay. neighbours: processes of other ranks on this machine."""
        for rank, process in neighbours.items():
            if process.is_running or self._store.check([f"{FINISHED}/{rank}"]):
                continue
            self._gone[rank] = self._gone.get(rank, 0) + 1
            if self._gone[rank] == _GONE_CHECKS:  # killed: ranks on other machines, too, learn of it from the record
                self._store.compare_set(FAILED, "", json.dumps(
                    {"rank": rank, "code": 1, "reported": False, "num_lost": 1, "retryable": True, "killed": True}))
        if self._cause is None:
            self._cause = self._failure() or self._lost()
        if self._cause is None:
            return None
        self._checks += 1
        return self._cause if self._checks > LEAVE_CHECKS else None

    def _failure(self) -> str | None:
        if not self._store.check([FAILED]):
            return None
        record = json.loads(self._store.get(FAILED))
        return None if record["rank"] == self.rank else f"rank {record['rank']} has failed"

    def report(self, cause: str, describe: Callable[[int], str]) -> str | None:
        """Report of what all ranks are doing, for the first caller; None on later ranks.

        describe: coordinates of a rank, in words.
        """
        if call_with_timeout(lambda: may_report_killed(self._store, self.rank)) is False:
            return None
        actions = call_with_timeout(lambda: read_actions(self._store, range(self.size))) or {}
        return "\n".join([f"{cause}, and rank {self.rank}, which waits for it, leaves. Ranks were in:", *(
            f"  rank {rank} ({describe(rank)}): {actions[rank][1] if rank in actions else 'not heard from'}"
            for rank in range(self.size))])


def may_report_killed(store: SharedStore, rank: int) -> bool:
    """Whether `rank` is the first to ask, and so reports the loss of a rank that could not report it itself."""
    return store.compare_set(_REPORTED, "", str(rank)).decode() == str(rank)
