"""The parent of local ranks: starts them, watches them, and leaves none behind.

    a rank ends with an error or is killed -> SIGTERM to the others, SIGKILL after a grace; one line says who and how
    a rank leaves with 0 before the end    -> likewise
    a rank is stopped (SIGSTOP)            -> likewise, after some seconds
    Ctrl-C, SIGTERM, SIGHUP here           -> the same signal to all, SIGKILL after a grace
    SIGTERM, SIGUSR1 to ranks that save    -> the same signal to all, who end by themselves; a second one kills them
    this process is killed outright        -> the kernel ends the ranks (ranvier.follow)

Each child has a process group of its own, so that Ctrl-C in a terminal reaches this process alone and is passed on
once. With torch the children are the ranks; with MPI there is one child, mpiexec, that starts and numbers them. What
they leave behind becomes this process's own child, on Linux, and is ended with them.
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
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import IO

from ranvier import follow
from ranvier.comm.mpi_launch import mpiexec_command
from ranvier.comm.signed_store import SignedStore, signed
from ranvier.failure import FAILED, FINISHED, mesh_of_now, place
from ranvier.launchers import SECRET, local_variables
from ranvier.mesh import Mesh
from ranvier.processes import Process, descendants
from ranvier.shared_store import keep_store, new_secret
from ranvier.stop import STOP_SIGNALS
from ranvier.stopped import LOOK_SECONDS, StoppedRanks, ranks_below, told_pids

_GRACE_SECONDS = 3.0
_POLL_SECONDS = 0.03
_PR_SET_CHILD_SUBREAPER = 36
# Variables of an outer launcher that would make the ranks, or MPI inside them, believe the wrong thing.
_FOREIGN = re.compile(r"PMI|PMIX_|OMPI_|MPI_LOCAL|HYDI_|HYDRA_|TORCHELASTIC_"
                      r"|(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|GROUP_WORLD_SIZE|ROLE_\w+"
                      r"|MASTER_ADDR|MASTER_PORT)$")


@dataclass
class _Child:
    """A process of ours: rank `rank`, or mpiexec (None)."""

    rank: int | None
    process: subprocess.Popen
    readers: list[threading.Thread] = field(default_factory=list)


@dataclass(frozen=True)
class _End:
    """How a rank ended: `code` as subprocess gives it, negative for a signal; `rank` None where it is not known.

    A code of 0 is that of a rank that left before the run had ended, SIGSTOP that of one which is stopped.
    """

    rank: int | None
    code: int

    def tell(self, mesh: Mesh) -> str:
        who = "mpiexec" if self.rank is None else f"rank {self.rank} ({place(mesh, self.rank)})"
        others = "" if mesh.size == 1 else "; the other ranks were stopped"
        if self.code == 0:
            return f"ranvier: {who} left with exit code 0 before the run had ended{others}"
        if self.code == -signal.SIGSTOP:
            return f"ranvier: {who} was stopped by SIGSTOP, and killed{others.replace('stopped', 'ended')}"
        if self.code > 0:
            return f"ranvier: {who} ended with exit code {self.code}{others}"
        hint = " (by the kernel, if memory ran out)" if self.code == -signal.SIGKILL else ""
        return f"ranvier: {who} was killed by {signal.Signals(-self.code).name}{hint}{others}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How the ranks ended.

    code: the exit code for this process: 0 when all ranks ended well, 2 when the first to fail did so by a
        RanvierError, 130 or 143 when this process was told to stop, otherwise 1.
    num_lost: ranks that were killed, or stopped, or hung: as if their device had gone.
    may_succeed_again: whether the same run may go better: not where it was told to stop, or its settings are refused.
    """

    code: int
    num_lost: int = 0
    may_succeed_again: bool = False


def supervise(mesh: Mesh, transport: str, reason: str, command: Sequence[str], variables: Mapping[str, str],
              explain_kill: Callable[[], str] | None = None, saves_on_stop: bool = False,
              stopped_seconds: float = 0.0) -> Outcome:
    """Run `command` as each rank of `mesh` on this machine, to the end.

    `reason` is why `transport` was chosen, for rank 0 to tell; `variables` are added to the ranks' environment;
    `explain_kill` says what may have made the kernel kill a rank. With `saves_on_stop` the ranks handle STOP_SIGNALS
    by ending well in their own time (ranvier.stop); as long as one of them does not do so yet, they end as others do.
    A rank that a signal has stopped for `stopped_seconds` ends them, unless that is 0.

    All ranks and their children are gone when it returns.
    """
    _adopt_orphans()
    ours = _Ours(mesh.size, StoppedRanks(stopped_seconds))
    # Signals are watched before the first rank exists, so that there is never one that nobody would stop.
    with _signals(STOP_SIGNALS if saves_on_stop else ()) as received:
        ours.children = _start(mesh, transport, reason, command, variables, ours)
        banner = _Banner()
        for child in ours.children:
            child.readers = banner.relay(child.process)
        try:
            end = _first_failure(ours, received)
            asked = _ask(ours, received) if saves_on_stop and end is None else None
            if asked is not None:
                end = _first_failure(ours, received, already=1)
        except BaseException:
            _stop(ours, signal.SIGKILL, received)
            raise
        if len(received) > (asked is not None):
            if asked is not None:
                _send(signal.SIGKILL, ours)
            _stop(ours, received[-1], received)
            return Outcome(code=_tell_stopped(received[-1]))
        if end is None:
            return Outcome(code=0)
        if saves_on_stop or end.code == -signal.SIGSTOP:
            _send(signal.SIGKILL, ours)  # on SIGTERM they would wait for the one that has failed
        _stop(ours, signal.SIGTERM, received)
    return _told(end, asked, banner, ours.store, mesh, explain_kill)


def _told(end: _End, asked: int | None, banner: _Banner, store: SignedStore, mesh: Mesh,
          explain_kill: Callable[[], str] | None) -> Outcome:
    """Say who failed, unless that rank has said so itself."""
    record = json.loads(store.get(FAILED)) if store.check([FAILED]) else None
    end = _culprit(end, record, banner, told_pids(store, mesh.size))
    if asked is not None and end.code == -asked:
        return Outcome(code=_tell_stopped(asked))  # it came before this rank could save anything
    lost = int(end.code in (0, -signal.SIGSTOP) or end.code < 0)
    if record is not None and record["told"] and end.code == record["code"] and end.code > 0:
        return Outcome(code=end.code, num_lost=record["num_lost"], may_succeed_again=record["may_succeed_again"])
    print(end.tell(mesh_of_now(store, mesh)), file=sys.stderr)
    if end.code == -signal.SIGKILL and explain_kill is not None:
        print(explain_kill(), file=sys.stderr)
    return Outcome(code=1, num_lost=lost, may_succeed_again=True)


class _Ours:
    """What this process has started, and the store that it keeps for it."""

    def __init__(self, num_ranks: int, stopped: StoppedRanks) -> None:
        self.num_ranks, self.children, self.secret = num_ranks, [], new_secret()
        self._tcp = keep_store("127.0.0.1", 0, timedelta(seconds=300))  # on this machine only; it outlives every rank
        self.port, self.store = self._tcp.port, signed(self._tcp, self.secret)[1]
        self._before, self._stopped, self._looked = set(descendants(os.getpid())), stopped, time.monotonic()
        self._ranks: dict[int, Process] = {}

    def ranks(self) -> dict[int, Process]:
        """The ranks' processes, as far as they are known."""
        if len(self._ranks) < self.num_ranks:
            if self.children and self.children[0].rank is not None:
                found = {child.rank: Process.find(child.process.pid) for child in self.children}
                self._ranks = {rank: process for rank, process in found.items() if process is not None}
            else:
                self._ranks = ranks_below(self.store, self.num_ranks, Process.find(os.getpid()))
        return self._ranks

    def stopped(self) -> int | None:
        """A rank that a signal holds for too long. Ranks of mpiexec that have not connected have no number yet, and are
        not looked for."""
        if time.monotonic() - self._looked < LOOK_SECONDS:
            return None
        self._looked = time.monotonic()
        return next(iter(self._stopped.look(self.ranks())), None)

    def left_early(self) -> int | None:
        """A rank that has ended with exit code 0 although others have not come to the end of their program."""
        ended = [child.rank for child in self.children if child.rank is not None and child.process.poll() == 0]
        return ended[0] if ended and not self.store.check([FINISHED]) else None

    def left(self) -> list[Process]:
        """Processes that have been started since, and still run."""
        return [process for process in descendants(os.getpid()) if process not in self._before]


def _adopt_orphans() -> None:
    """On Linux: a process below this one that loses its parent becomes this one's child, so that none can be lost."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _start(mesh: Mesh, transport: str, reason: str, command: Sequence[str], variables: Mapping[str, str],
           ours: _Ours) -> list[_Child]:
    environ = {name: value for name, value in os.environ.items() if not _FOREIGN.match(name)} | dict(variables)
    environ[SECRET] = ours.secret
    if transport == "mpi":
        more = local_variables(None, mesh.size, ours.port, transport, reason) | _terminals()
        return [_Child(None, _spawn(mpiexec_command(mesh.size, list(command)), environ | more, signal.SIGTERM,
                                    subprocess.PIPE))]
    return [_Child(rank, _spawn(command, environ | local_variables(rank, mesh.size, ours.port, transport, reason),
                                signal.SIGKILL, None)) for rank in range(mesh.size)]


def _spawn(command: Sequence[str], environ: Mapping[str, str], end_signal: int, output: int | None) -> subprocess.Popen:
    following = [sys.executable, "-I", "-S", str(Path(follow.__file__)), str(os.getpid()), str(int(end_signal))]
    return subprocess.Popen([*following, *command], env=dict(environ), stdin=subprocess.DEVNULL, stdout=output,
                            stderr=output, process_group=0)


def _terminals() -> dict[str, str]:
    """The terminals behind this process's output, for ranks whose own output is a pipe of mpiexec's."""
    return {f"RANVIER_TERMINAL_{number}": os.ttyname(number) for number in (1, 2) if os.isatty(number)}


@contextmanager
def _signals(more: Sequence[int]):
    """The signals to end, and `more`, that arrive inside, as a list that grows; ignored ones stay ignored."""
    received: list[int] = []
    before = {}
    for number in {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *more}:
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, lambda number, frame: received.append(number))
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _first_failure(ours: _Ours, received: Sequence[int], already: int = 0) -> _End | None:
    """Wait for the first child that ends badly; None when all end well, or when more than `already` signals came."""
    children = ours.children
    while len(received) <= already:
        codes = [child.process.poll() for child in children]
        if any(codes):
            # A rank that lost its peer may be seen before the peer: look again, and prefer whoever a signal killed.
            ends = [_End(child.rank, child.process.poll()) for child in children if child.process.poll()]
            return min(ends, key=lambda end: end.code >= 0)
        if None not in codes:
            return None
        if 0 in codes and (rank := ours.left_early()) is not None:
            return _End(rank, 0)
        if (rank := ours.stopped()) is not None:
            return _End(rank, -signal.SIGSTOP)
        time.sleep(_POLL_SECONDS)
    return None


def _ask(ours: _Ours, received: Sequence[int]) -> int | None:
    """Pass the signal that came to all ranks, who save and end by themselves; returns it. None where it is another
    signal than those, or not all ranks are there to take it."""
    if not received or received[0] not in STOP_SIGNALS or not _send(received[0], ours):
        return None
    print(f"ranvier: {signal.Signals(received[0]).name}: the ranks save and stop after this step; another signal ends "
          "them at once", file=sys.stderr)
    return received[0]


def _send(number: int, ours: _Ours) -> bool:
    """Signal every rank that runs; whether all ranks are known. Ranks of mpiexec are signalled past it: launchers
    differ in what they make of a signal."""
    if ours.children[0].rank is not None:
        for child in ours.children:
            child.process.send_signal(number)  # looks first whether it has ended
        return True
    ranks = ours.ranks()
    if len(ranks) == ours.num_ranks and ours.children[0].process.poll() is None:
        for process in ranks.values():
            if process.runs:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)
    return len(ranks) == ours.num_ranks


def _tell_stopped(number: int) -> int:
    """Say what ended the run; returns the exit code."""
    print("ranvier: interrupted" if number == signal.SIGINT else f"ranvier: stopped by {signal.Signals(number).name}",
          file=sys.stderr)
    return 128 + number


def _stop(ours: _Ours, number: int, received: list[int]) -> None:
    """Signal all children that still run; after a grace, or when asked to stop again, kill all that is left of them."""
    already = len(received)
    for child in ours.children:
        if child.process.poll() is None:
            child.process.send_signal(number)
    _wait(_GRACE_SECONDS, lambda: len(received) > already or all(child.process.poll() is not None
                                                                 for child in ours.children))
    for child in ours.children:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.process.pid, signal.SIGKILL)  # also what the child started and left in its group
    _wait(_GRACE_SECONDS, lambda: not _kill(ours.left()))
    for child in ours.children:
        child.process.wait()
        for reader in child.readers:
            reader.join(_GRACE_SECONDS)


def _wait(seconds: float, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _kill(processes: Sequence[Process]) -> Sequence[Process]:
    """Those that were still there."""
    for process in processes:
        with suppress(OSError):
            os.kill(process.pid, signal.SIGKILL)
    return processes


class _Banner:
    """mpiexec's output, passed through without its page on a killed rank, of which the process and signal are kept."""

    def __init__(self) -> None:
        self.pid: int | None = None
        self.signal: int | None = None

    def relay(self, process: subprocess.Popen) -> list[threading.Thread]:
        pairs = [(process.stdout, 1), (process.stderr, 2)]
        readers = [threading.Thread(target=self._pass, args=pair, daemon=True) for pair in pairs if pair[0] is not None]
        for reader in readers:
            reader.start()
        return readers

    def _pass(self, source: IO[bytes], destination: int) -> None:
        held = b""  # an empty line, which may be the first of the page
        for line in source:
            if self._belongs(line):
                held = b""
            elif line == b"\n" and not held:
                held = line
            else:
                with suppress(OSError):  # whoever read our output has gone; the ranks still need theirs read
                    os.write(destination, held + line)
                held = b""

    def _belongs(self, line: bytes) -> bool:
        if match := re.match(rb"=   PID (\d+) RUNNING AT", line):
            self.pid = int(match[1])
        if match := re.match(rb"YOUR APPLICATION TERMINATED WITH THE EXIT STRING: .*\(signal (\d+)\)", line):
            self.signal = int(match[1])
        return line.startswith(_BANNER_STARTS) or line.rstrip() == b"=" * 83


_BANNER_STARTS = (b"=   BAD TERMINATION", b"=   PID ", b"=   EXIT CODE", b"=   CLEANING UP", b"=   YOU CAN IGNORE",
                  b"YOUR APPLICATION TERMINATED WITH", b"This typically refers to a problem with your application",
                  b"Please see the FAQ page for debugging", b"[mpiexec@", b"[proxy:")


def _culprit(end: _End, record: dict | None, banner: _Banner, ranks: Mapping[int, int]) -> _End:
    """The rank that failed first: one that a signal killed or stopped, or that left early, else the one whose own
    account came first. ranks: by process id."""
    if end.rank is None and banner.signal is not None:
        return _End(ranks.get(banner.pid), -banner.signal)
    if record is not None and end.code > 0:
        return _End(record["rank"], record["code"])
    return end
