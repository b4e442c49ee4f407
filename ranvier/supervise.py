"""The parent of local ranks: starts them, watches them, and leaves none behind.

    a rank ends with an error or is killed -> SIGTERM to the others, SIGKILL after a grace; one line says who and how
    Ctrl-C, SIGTERM, SIGHUP here           -> the same signal to all, SIGKILL after a grace
    SIGTERM, SIGUSR1 to ranks that save    -> the same signal to all, who end by themselves; a second one kills them
    this process is killed outright        -> the kernel ends the ranks (ranvier.follow)

Each child has a process group of its own, so that Ctrl-C in a terminal reaches this process alone and is passed on
once. With torch the children are the ranks; with MPI there is one child, mpiexec, that starts and numbers them.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from torch.distributed import TCPStore

from ranvier import follow
from ranvier.comm.mpi_launch import mpiexec_command
from ranvier.failure import FAILED, mesh_of_now, place
from ranvier.launchers import local_variables
from ranvier.mesh import Mesh
from ranvier.stop import STOP_SIGNALS

PID = "ranvier/pid/"
_GRACE_SECONDS = 3.0
_POLL_SECONDS = 0.03
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
    """How a rank ended: `code` as subprocess gives it, negative for a signal; `rank` None where it is not known."""

    rank: int | None
    code: int

    def tell(self, mesh: Mesh) -> str:
        who = "mpiexec" if self.rank is None else f"rank {self.rank} ({place(mesh, self.rank)})"
        others = "" if mesh.size == 1 else "; the other ranks were stopped"
        if self.code >= 0:
            return f"ranvier: {who} ended with exit code {self.code}{others}"
        hint = " (by the kernel, if memory ran out)" if self.code == -signal.SIGKILL else ""
        return f"ranvier: {who} was killed by {signal.Signals(-self.code).name}{hint}{others}"


def supervise(mesh: Mesh, transport: str, reason: str, command: Sequence[str], variables: Mapping[str, str],
              explain_kill: Callable[[], str] | None = None, saves_on_stop: bool = False) -> int:
    """Run `command` as each rank of `mesh` on this machine; returns the exit code for this process.

    `reason` is why `transport` was chosen, for rank 0 to tell; `variables` are added to the ranks' environment;
    `explain_kill` says what may have made the kernel kill a rank. With `saves_on_stop` the ranks handle STOP_SIGNALS
    by ending well in their own time (ranvier.stop); as long as one of them does not do so yet, they end as others do.

    0 when all ranks ended well, 2 when the first to fail did so by a RanvierError, 130 or 143 when this process was
    told to stop, otherwise 1. All ranks and their children are gone when it returns.
    """
    store = _open_store()
    # Signals are watched before the first rank exists, so that there is never one that nobody would stop.
    with _signals(STOP_SIGNALS if saves_on_stop else ()) as received:
        children = _start(mesh, transport, reason, command, variables, store)
        banner = _Banner()
        for child in children:
            child.readers = banner.relay(child.process)
        try:
            end = _first_failure(children, received)
            asked = _ask(children, received, store, mesh) if saves_on_stop and end is None else None
            if asked is not None:
                end = _first_failure(children, received, already=1)
        except BaseException:
            _stop(children, signal.SIGKILL, received)
            raise
        if len(received) > (asked is not None):
            if asked is not None:
                _send(signal.SIGKILL, children, store, mesh)
            _stop(children, received[-1], received)
            return _tell_stopped(received[-1])
        if end is None:
            return 0
        if saves_on_stop:
            _send(signal.SIGKILL, children, store, mesh)  # on SIGTERM they would wait for the one that has failed
        _stop(children, signal.SIGTERM, received)
    record = json.loads(store.get(FAILED)) if store.check([FAILED]) else None
    end = _culprit(end, record, banner, store, mesh)
    if asked is not None and end.code == -asked:
        return _tell_stopped(asked)  # it came before this rank could save anything
    if record is not None and record["told"] and end.code == record["code"]:
        return end.code  # the rank has printed its one line
    print(end.tell(mesh_of_now(store, mesh)), file=sys.stderr)
    if end.code == -signal.SIGKILL and explain_kill is not None:
        print(explain_kill(), file=sys.stderr)
    return 1


def _open_store() -> TCPStore:
    """A store of this process, reachable from this machine only, that outlives every rank."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _start(mesh: Mesh, transport: str, reason: str, command: Sequence[str], variables: Mapping[str, str],
           store: TCPStore) -> list[_Child]:
    environ = {name: value for name, value in os.environ.items() if not _FOREIGN.match(name)} | dict(variables)
    if transport == "mpi":
        ours = local_variables(None, mesh.size, store.port, transport, reason) | _terminals()
        return [_Child(None, _spawn(mpiexec_command(mesh.size, list(command)), environ | ours, signal.SIGTERM,
                                    subprocess.PIPE))]
    return [_Child(rank, _spawn(command, environ | local_variables(rank, mesh.size, store.port, transport, reason),
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


def _first_failure(children: Sequence[_Child], received: Sequence[int], already: int = 0) -> _End | None:
    """Wait for the first child that ends badly; None when all end well, or when more than `already` signals came."""
    while len(received) <= already:
        codes = [child.process.poll() for child in children]
        if any(codes):
            # A rank that lost its peer may be seen before the peer: look again, and prefer whoever a signal killed.
            ends = [_End(child.rank, child.process.poll()) for child in children if child.process.poll()]
            return min(ends, key=lambda end: end.code >= 0)
        if None not in codes:
            return None
        time.sleep(_POLL_SECONDS)
    return None


def _ask(children: Sequence[_Child], received: Sequence[int], store: TCPStore, mesh: Mesh) -> int | None:
    """Pass the signal that came to all ranks, who save and end by themselves; returns it. None where it is another
    signal than those, or not all ranks are there to take it."""
    if not received or received[0] not in STOP_SIGNALS or not _send(received[0], children, store, mesh):
        return None
    print(f"ranvier: {signal.Signals(received[0]).name}: the ranks save and stop after this step; another signal ends "
          "them at once", file=sys.stderr)
    return received[0]


def _send(number: int, children: Sequence[_Child], store: TCPStore, mesh: Mesh) -> bool:
    """Signal every rank that runs; whether all ranks are known. Ranks of mpiexec are signalled past it: launchers
    differ in what they make of a signal."""
    if children[0].rank is not None:
        for child in children:
            child.process.send_signal(number)  # looks first whether it has ended
        return True
    pids = _pids(store, mesh)
    if len(pids) == mesh.size and children[0].process.poll() is None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
    return len(pids) == mesh.size


def _pids(store: TCPStore, mesh: Mesh) -> dict[int, int]:
    """Ranks by process id, as far as they have connected."""
    keys = [f"{PID}{rank}" for rank in range(mesh.size)]
    return {int(store.get(key)): rank for rank, key in enumerate(keys) if store.check([key])}


def _tell_stopped(number: int) -> int:
    """Say what ended the run; returns the exit code."""
    print("ranvier: interrupted" if number == signal.SIGINT else f"ranvier: stopped by {signal.Signals(number).name}",
          file=sys.stderr)
    return 128 + number


def _stop(children: Sequence[_Child], number: int, received: list[int]) -> None:
    """Signal all children that still run; after a grace, or when asked to stop again, kill their whole groups."""
    already = len(received)
    for child in children:
        if child.process.poll() is None:
            child.process.send_signal(number)
    deadline = time.monotonic() + _GRACE_SECONDS
    while time.monotonic() < deadline and len(received) <= already:
        if all(child.process.poll() is not None for child in children):
            break
        time.sleep(_POLL_SECONDS)
    for child in children:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.process.pid, signal.SIGKILL)  # also what the child started and left in its group
        child.process.wait()
        for reader in child.readers:
            reader.join(_GRACE_SECONDS)


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


def _culprit(end: _End, record: dict | None, banner: _Banner, store: TCPStore, mesh: Mesh) -> _End:
    """The rank that failed first: one that a signal killed, else the one whose own account came first."""
    if end.rank is None and banner.signal is not None:
        return _End(_pids(store, mesh).get(banner.pid), -banner.signal)
    if record is not None and end.code >= 0:
        return _End(record["rank"], record["code"])
    return end
