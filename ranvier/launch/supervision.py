"""The supervisor of local ranks: starts them, watches them, and ends all of their processes.

    a rank exits with an error or is killed  SIGTERM to the others, SIGKILL after a grace period; one line names it
                                             (reported to a run that survives lost ranks, which may continue)
    a rank exits with 0 before the end       likewise
    a rank is stopped (SIGSTOP)              likewise, after some seconds
    Ctrl-C, SIGTERM, SIGHUP here             the same signal to all ranks, SIGKILL after a grace period
    these and SIGUSR1, if ranks save         the same signal to all ranks, which exit on their own; a second one kills
    this process is killed with SIGKILL      the kernel ends the ranks (ranvier.system.parent_death)

Each child has its own process group, so that Ctrl-C in a terminal reaches only this process, which forwards it once.
With torch the children are the ranks; with MPI the only child is mpiexec, which starts and numbers the ranks. On Linux
orphaned descendants become children of this process, and are ended, too.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any

from torch.distributed import PrefixStore, TCPStore

from ranvier.comm.board import call_with_timeout
from ranvier.comm.signed_store import SignedStore, private_prefix
from ranvier.errors import LaunchError
from ranvier.launch.contact import connect
from ranvier.launch.failures import INTERRUPTED, describe_rank, read_mesh
from ranvier.launch.heartbeat import FAILED, FINISHED
from ranvier.launch.joining import REQUEST_ID, member_name, rank_of_newcomer
from ranvier.launch.launchers import SECRET, local_variables
from ranvier.launch.lost_ranks import LostRank, end_reason, report_lost_rank
from ranvier.launch.mpiexec import MpiexecOutput, mpiexec_command
from ranvier.launch.shared_store import new_secret
from ranvier.launch.stop import FINISHED_RUN, STOP_SIGNALS, signal_name
from ranvier.launch.stopped_ranks import CHECK_SECONDS, StoppedRankDetector, find_rank_processes, read_pids
from ranvier.launch.stores import LOOPBACK, create_store
from ranvier.mesh import Mesh
from ranvier.system.child import package_path
from ranvier.system.child import start as start_child
from ranvier.system.processes import Process, descendants
from ranvier.system.terminal import print_stderr
from ranvier.world import JoinPoint

_GRACE_SECONDS = 3.0
_POLL_SECONDS = 0.03
_USER_ERROR = 2
"""Exit code of a rank that has printed a RanvierError."""
_PR_SET_CHILD_SUBREAPER = 36
# Variables of an outer launcher, which would mislead the ranks or MPI inside them.
_LAUNCHER_VARIABLES = re.compile(r"PMI|PMIX_|OMPI_|MPI_LOCAL|HYDI_|HYDRA_|TORCHELASTIC_"
                      r"|(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|GROUP_WORLD_SIZE|ROLE_\w+"
                      r"|MASTER_ADDR|MASTER_PORT)$")


_MPIEXEC = -1
"""The number of mpiexec among ranks."""
_KILL_SECONDS = 5.0
"""Longest wait until the kernel has ended a killed process."""


@dataclass
class _Child:
    """A child process: rank `rank`, or mpiexec (None)."""

    rank: int | None
    process: subprocess.Popen[bytes]
    readers: list[threading.Thread] = field(default_factory=list)


@dataclass(frozen=True)
class _RankEnd:
    """End of a rank.

    rank: None if unknown, or mpiexec. code: as of subprocess, negative for a signal; 0 for a rank that exited before
    the run had ended, -SIGSTOP for a stopped one.
    """

    rank: int | None
    code: int

    def describe(self, mesh: Mesh, others: str = "; the other ranks were terminated") -> str:
        """One line for the user, with the rank's coordinates on `mesh`. others: what becomes of the other ranks."""
        name = "mpiexec" if self.rank is None else f"rank {self.rank} ({describe_rank(mesh, self.rank)})"
        hint = {0: " before the run had ended", -signal.SIGKILL: " (by the kernel, if memory ran out)"}
        return f"ranvier: {name} {self.description}{hint.get(self.code, '')}{'' if mesh.size == 1 else others}"

    def is_by(self, number: int) -> bool:
        """Whether signal `number` ended the rank; Python exits with INTERRUPTED after Ctrl-C."""
        return self.code in (-number, INTERRUPTED)

    @property
    def description(self) -> str:
        """How it ended, as in "was killed by SIGKILL"."""
        if self.code >= 0:
            return f"exited with code {self.code}"
        stopped = self.code == -signal.SIGSTOP
        return "was stopped by SIGSTOP, and killed" if stopped else f"was killed by {signal.Signals(-self.code).name}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """End of all ranks.

    code: the exit code for this process: 0 if all ranks succeeded, 2 if the first failure is a RanvierError, 130 or 143
        if this process was asked to stop, otherwise 1. Ranks that saved after Ctrl-C give 130; after another signal, or
        after the run's last step, 0.
    num_lost: number of ranks that were killed, stopped or hung; their devices are assumed to be unusable.
    retryable: whether a new start may succeed; False if the run was asked to stop or its settings were rejected.
    """

    code: int
    num_lost: int = 0
    retryable: bool = False


def supervise(mesh: Mesh, transport: str, reason: str, command: Sequence[str], variables: Mapping[str, str],
              explain_kill: Callable[[], str] | None = None, saves_on_stop: bool = False,
              stopped_seconds: float = 0.0, address: str | None = None, joins: JoinPoint | None = None,
              explain_stop: Callable[[], str] | None = None) -> Outcome:
    """Run `command` as each rank of `mesh` on this machine, until all have ended.

    Args:
        mesh: its size is the number of ranks.
        transport: torch or mpi.
        reason: why `transport` was chosen, for rank 0 to print.
        command: the command line of a rank.
        variables: added to the ranks' environment.
        explain_kill: text to print when the kernel has killed a rank.
        saves_on_stop: the ranks handle STOP_SIGNALS themselves (ranvier.launch.stop). A rank that has not installed its
            handler yet is killed by the signal, and the run ends.
        stopped_seconds: a rank that a signal has stopped for this long ends the run; 0 never.
        address: on which the store listens; None for the loopback address.
        joins: the store of a running run that these ranks join; None for a run of their own. With it, `mesh` is only
            their number, and `variables` has the ID of their request (`ranvier.launch.joining.REQUEST_ID`).
        explain_stop: text to print when ranks that save were ended before they had saved.

    LaunchError if nothing can listen on `address`, or the store of `joins` cannot be reached.

    When this returns, no rank and no descendant of a rank is left.
    """
    # On Linux: make orphaned descendants children of this process, so that `descendants` still finds them.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    children = _Children(mesh.size, StoppedRankDetector(stopped_seconds), address or LOOPBACK, joins)
    continues_without = partial(_continues_without, children, mesh, variables.get(REQUEST_ID))
    # Signals are handled before the first rank exists, so that no signal can leave a rank without supervisor.
    with _signals(STOP_SIGNALS if saves_on_stop else ()) as received:
        children.started = _start(mesh, transport, reason, command, variables, children)
        output = MpiexecOutput()
        for child in children.started:
            child.readers = output.relay(child.process)
        try:
            end = _first_failure(children, received, continues_without)
            forwarded = _forward_stop(children, received) if saves_on_stop and end is None else None
            if forwarded is not None:
                end = _first_failure(children, received, continues_without, already=1)
        except BaseException:
            _stop(children, signal.SIGKILL, received)
            raise
        if len(received) > (forwarded is not None):
            if forwarded is not None:
                _send(signal.SIGKILL, children)
            _stop(children, received[-1], received)
            return Outcome(code=_report_stop(received[-1], explain_stop if forwarded is not None else None))
        if end is None:
            stopped = forwarded == signal.SIGINT and not children.finished_run()
            return Outcome(code=(INTERRUPTED if stopped else 0) if children.started else 1)
        if saves_on_stop or end.code == -signal.SIGSTOP:
            _send(signal.SIGKILL, children)  # on SIGTERM they would wait for the failed rank
        _stop(children, signal.SIGTERM, received)
    if joins is not None:
        return _report_newcomer(end, forwarded, children, variables[REQUEST_ID])
    end, lost = children.named_now(end), len(children.lost)
    outcome = _report_failure(end, forwarded, output, children.store, mesh, explain_kill)
    if (why := end_reason(children.store)) is not None:
        print_stderr(f"ranvier: the run cannot continue without it: {why}")
    return replace(outcome, num_lost=outcome.num_lost + lost, retryable=outcome.retryable and not received)


def _report_failure(end: _RankEnd, forwarded: int | None, output: MpiexecOutput, store: SignedStore, mesh: Mesh,
                    explain_kill: Callable[[], str] | None) -> Outcome:
    """Print which rank failed, unless that rank has printed its error itself."""
    record = json.loads(store.get(FAILED)) if store.check([FAILED]) else None
    if end.rank is None and output.signal is not None:
        ranks = read_pids(store, mesh.size)
        end = _RankEnd(None if output.pid is None else ranks.get(output.pid), -output.signal)
    elif record is not None and end.code > 0:  # no signal has ended this rank: the writer of the record failed first
        end = _RankEnd(record["rank"], record["code"])
    if forwarded is not None and end.is_by(forwarded):
        return Outcome(code=_report_stop(forwarded))  # the signal came before this rank had installed its handler
    # A stopped mpiexec is not a rank.
    lost = int(end.code <= 0 and not (end.rank is None and end.code == -signal.SIGSTOP))
    if record is not None and record["reported"] and end.code == record["code"] and end.code > 0:
        return Outcome(code=end.code, num_lost=record["num_lost"], retryable=record["retryable"])
    print_stderr(end.describe(read_mesh(store, mesh)))
    if end.code == -signal.SIGKILL and explain_kill is not None:
        print_stderr(explain_kill())
    return Outcome(code=1, num_lost=lost, retryable=True)


def _report_newcomer(end: _RankEnd, forwarded: int | None, children: _Children, request_id: str) -> Outcome:
    """Print which of the ranks that joined a run has failed, unless it has printed its error itself, and report it to
    the run, whose ranks wait for it: it may be the only rank on its machine."""
    if forwarded is not None and end.is_by(forwarded):
        return Outcome(code=_report_stop(forwarded))
    number = end.rank
    assert number is not None, "these ranks are children of this process"
    try:
        rank = rank_of_newcomer(children.store, request_id, number)
    except RuntimeError:  # the run has ended
        rank = None
    if rank is not None:
        record = {"rank": rank, "code": 1, "reported": False, "num_lost": 0, "retryable": True}
        call_with_timeout(lambda: children.store.compare_set(FAILED, "", json.dumps(record)))
    if end.code != _USER_ERROR:
        what = "has not joined" if rank is None else f"was rank {rank} of the run"
        print_stderr(f"ranvier: joining rank {end.rank}, which {what}, {end.description}")
    return Outcome(code=end.code if end.code == _USER_ERROR else 1)


class _Children:
    """The processes that this process has started, and the store: hosted for them, or that of the run that they
    join."""

    def __init__(self, num_ranks: int, stopped: StoppedRankDetector, address: str, joins: JoinPoint | None) -> None:
        self.num_ranks, self._joins = num_ranks, joins
        self.started: list[_Child] = []
        self.lost: list[_RankEnd] = []
        """Killed ranks that were reported to the run; they are not in `started` any more."""
        if joins is None:
            self.secret, self._tcp = new_secret(), _host(address)  # it outlives every rank
            self.place = address, self._tcp.port
        else:
            self.secret, self._tcp = joins.secret, connect(joins)
            self.place = joins.address, joins.port
        self.store = SignedStore(PrefixStore(private_prefix(self.secret), self._tcp), self.secret)
        self._before, self._stopped, self._checked = set(descendants(os.getpid())), stopped, time.monotonic()
        self._ranks: dict[int, Process] = {}

    def ranks(self) -> dict[int, Process]:
        """The processes of ranks, as far as known."""
        if len(self._ranks) < self.num_ranks:
            if self.started and self.started[0].rank is not None:
                found = {child.rank: Process.find(child.process.pid) for child in self.started}
                self._ranks = {rank: process for rank, process in found.items()
                               if rank is not None and process is not None}
            else:
                own = Process.find(os.getpid())
                assert own is not None, "this process runs"
                self._ranks = find_rank_processes(self.store, self.num_ranks, own)
        return self._ranks

    def find_stopped(self) -> _RankEnd | None:
        """A rank, or mpiexec, that a signal has stopped for too long. Ranks of mpiexec are unknown until they have
        connected."""
        if time.monotonic() - self._checked < CHECK_SECONDS:
            return None
        self._checked = time.monotonic()
        watched = dict(self.ranks())
        if self.started and self.started[0].rank is None:
            mpiexec = Process.find(self.started[0].process.pid)
            watched |= {} if mpiexec is None else {_MPIEXEC: mpiexec}
        found = next(iter(self._stopped.check(watched)), None)
        return None if found is None else _RankEnd(None if found == _MPIEXEC else found, -signal.SIGSTOP)

    def exited_early(self) -> int | None:
        """A rank that has exited with code 0 although not all ranks have reached the end of their program."""
        ended = [child.rank for child in self.started if child.rank is not None and child.process.poll() == 0]
        return ended[0] if ended and not self._has_finished() else None

    def _has_finished(self) -> bool:
        try:
            return self.store.check([FINISHED])
        except RuntimeError:
            if self._joins is None:
                raise
            return True  # the run's own supervisor, which hosts the store, has exited

    def finished_run(self) -> bool:
        """Whether the run has done its last step, so that a request to stop is too late."""
        return self._joins is None and self.store.check([FINISHED_RUN])

    def named_now(self, end: _RankEnd) -> _RankEnd:
        """`end` with the process's present rank in the run, which is lower after ranks with lower numbers were lost."""
        if end.rank is None:
            return end
        return replace(end, rank=end.rank - sum(other.rank < end.rank for other in self.lost if other.rank is not None))

    def given_up(self) -> bool:
        """Whether the run cannot continue without a lost rank."""
        return self._joins is None and end_reason(self.store) is not None

    def end_rank(self, end: _RankEnd) -> None:
        """End all processes of a lost rank, without which the run continues."""
        child = next(child for child in self.started if child.rank == end.rank)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            child.process.wait(_KILL_SECONDS)  # a stopped rank has not ended yet
        self.started.remove(child)
        self.lost.append(end)

    def remaining(self) -> list[Process]:
        """Descendants that were started after this object was made and still run."""
        return [process for process in descendants(os.getpid()) if process not in self._before]


def _host(address: str) -> TCPStore:
    try:
        return create_store(address, 0, timedelta(seconds=300))
    except OSError as error:
        raise LaunchError(f"nothing can listen there: {error.strerror or error}", code="join-address-not-here",
                          where="launch.join-address", value=address,
                          remedy="Give an address of this machine (ip addr lists them).") from error


def _start(mesh: Mesh, transport: str, reason: str, command: Sequence[str], variables: Mapping[str, str],
           children: _Children) -> list[_Child]:
    environ = {name: value for name, value in os.environ.items() if not _LAUNCHER_VARIABLES.match(name)}
    environ |= variables
    environ |= package_path(environ)
    environ[SECRET] = children.secret
    if transport == "mpi":
        more = local_variables(None, mesh.size, children.place, transport, reason) | _terminals()
        return [_Child(None, start_child(mpiexec_command(mesh.size, list(command)), environ=environ | more,
                                         end_signal=signal.SIGTERM, output=subprocess.PIPE, errors=subprocess.PIPE))]
    return [_Child(rank, start_child(command, environ=environ | local_variables(
        rank, mesh.size, children.place, transport, reason))) for rank in range(mesh.size)]


def _terminals() -> dict[str, str]:
    """Paths of this process's terminals, for ranks whose own output is a pipe of mpiexec."""
    return {f"RANVIER_TERMINAL_{number}": os.ttyname(number) for number in (1, 2) if os.isatty(number)}


@contextmanager
def _signals(more: Sequence[int]) -> Iterator[list[int]]:
    """Collect SIGINT, SIGTERM, SIGHUP and `more` in a list that grows as they arrive; ignored ones stay ignored.

    When a terminal closes, the kernel and the shell send SIGHUP: it counts once.
    """
    received: list[int] = []
    before: dict[int, Any] = {}

    def on_signal(number: int, frame: FrameType | None) -> None:
        if number != signal.SIGHUP or number not in received:
            received.append(number)

    for number in {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *more}:
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, on_signal)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _continues_without(children: _Children, mesh: Mesh, request_id: str | None, end: _RankEnd) -> bool:
    """Report a rank that a signal has killed or stopped to the run; returns whether the run tries to continue without
    it.

    request_id: ID of the request with which these ranks have joined the run; None for the ranks with which it was
        started.
    """
    if end.code >= 0 or end.rank is None or (request_id is None and end.rank == 0):
        return False
    name = str(end.rank) if request_id is None else member_name(request_id, end.rank)
    try:
        if request_id is not None and rank_of_newcomer(children.store, request_id, end.rank) is None:
            return False
        if not report_lost_rank(children.store, LostRank(member=name, how=end.description)):
            return False
    except RuntimeError:  # the run has ended
        return False
    if request_id is None:
        mesh = read_mesh(children.store, mesh)
        print_stderr(children.named_now(end).describe(mesh, "; the others try to continue without it"))
    else:
        print_stderr(f"ranvier: joining rank {end.rank} {end.description}; the run tries to continue without it")
    children.end_rank(end)
    return True


def _first_failure(children: _Children, received: Sequence[int], continues_without: Callable[[_RankEnd], bool],
                   already: int = 0) -> _RankEnd | None:
    """Wait for the first failure of a child without which the run does not continue; None if all succeed, or if more
    than `already` signals arrive."""
    while len(received) <= already:
        codes = [child.process.poll() for child in children.started]
        if any(codes):
            # A rank that lost its peer may be seen before the peer: poll again, and prefer one that a signal killed.
            ends = [_RankEnd(child.rank, code) for child in children.started if (code := child.process.poll())]
            end = min(ends, key=lambda end: end.code >= 0)
            if continues_without(end):
                continue
            return end
        if None not in codes:
            return None
        if children.lost and children.given_up():
            return children.lost.pop()
        if 0 in codes and (rank := children.exited_early()) is not None:
            return _RankEnd(rank, 0)
        if (stopped := children.find_stopped()) is not None:
            if continues_without(stopped):
                continue
            return stopped
        time.sleep(_POLL_SECONDS)
    return None


def _forward_stop(children: _Children, received: Sequence[int]) -> int | None:
    """Forward the received signal to all ranks, which save and exit on their own; returns the signal.

    None if there is no signal, if it is not one of STOP_SIGNALS, or if not all ranks are known yet.
    """
    if not received or received[0] not in STOP_SIGNALS or not _send(received[0], children):
        return None
    print_stderr(f"ranvier: {signal_name(received[0])}: the ranks save and stop after this step; another signal ends "
                 "them at once")
    return received[0]


def _send(number: int, children: _Children) -> bool:
    """Signal every running rank; returns whether all ranks are known.

    Ranks of mpiexec are signalled directly, since implementations differ in how they forward a signal.
    """
    if not children.started or children.started[0].rank is not None:
        for child in children.started:
            child.process.send_signal(number)  # a no-op if it has ended
        return True
    ranks = children.ranks()
    if len(ranks) == children.num_ranks and children.started[0].process.poll() is None:
        for process in ranks.values():
            if process.is_running:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)
    return len(ranks) == children.num_ranks


def _report_stop(number: int, explain: Callable[[], str] | None = None) -> int:
    """Print that signal `number` ended the run, and what `explain` says; returns the exit code."""
    print_stderr("ranvier: interrupted" if number == signal.SIGINT
                 else f"ranvier: stopped by {signal.Signals(number).name}")
    if explain is not None:
        print_stderr(explain())
    return 128 + number


def _stop(children: _Children, number: int, received: list[int]) -> None:
    """Signal all running children; after a grace period, or at another received signal, kill all descendants."""
    already = len(received)
    for child in children.started:
        if child.process.poll() is None:
            child.process.send_signal(number)
    _wait(_GRACE_SECONDS, lambda: len(received) > already or all(child.process.poll() is not None
                                                                 for child in children.started))
    for child in children.started:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.process.pid, signal.SIGKILL)  # includes what the child has started in its group
    # Until none is left: a process may fork while its descendants are listed.
    _wait(_GRACE_SECONDS, lambda: not _kill(children.remaining()))
    for child in children.started:
        child.process.wait()
        for reader in child.readers:
            reader.join(_GRACE_SECONDS)


def _wait(seconds: float, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _kill(processes: Sequence[Process]) -> Sequence[Process]:
    """Kill `processes`; returns them."""
    for process in processes:
        process.kill()
    return processes
