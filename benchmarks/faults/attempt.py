"""One start of a training run to which something happens, and its remains.

A process forked from this one, which has imported everything, becomes the parent of ranks that are forked in the same
way: the command, the supervisor and the ranks are the real ones, without the seconds that each would take to import
torch. Sometimes, and for MPI, the command is started as a user starts it.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ranvier.cli.main import run_command
from ranvier.launch import supervision as supervise
from ranvier.system import parent_death
from ranvier.testing.faults import Fault, faulty
from ranvier.world import World


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a start ended. code: negative for a signal, None if it had to be killed at its deadline. left: processes that
    were still running."""

    code: int | None
    seconds: float
    text: str
    left: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Outside:
    """An action on the run from outside: `act(parent's pid)` as soon as `when(seconds since the start)` is true."""

    when: Callable[[float], bool]
    act: Callable[[int], None]


def attempt(args: Sequence[str], faults: Sequence[Fault], log: Path, *, deadline_seconds: float, as_command: bool,
            outside: Sequence[Outside] = ()) -> Ended:
    """Run the ranvier command `args` with `faults` in its ranks, to its end or the deadline; `log` takes its output."""
    began = time.monotonic()
    with log.open("wb") as file:  # by another process: a disk that is full for the run must not cut off its output
        relay = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=file)
    output = relay.stdin.fileno()
    pid = _start_command(args, faults, output) if as_command else _fork(output, partial(_as_parent, args, faults))
    relay.stdin.close()
    code, waiting = None, list(outside)
    while time.monotonic() - began < deadline_seconds:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            break
        for one in [one for one in waiting if one.when(time.monotonic() - began)]:
            one.act(pid)
            waiting.remove(one)
        time.sleep(0.002)
    seconds = time.monotonic() - began
    left = _all_gone(pid, 10.0 if code is not None else 0.0)
    for process in left:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    if code is None:
        os.waitpid(pid, 0)
    relay.wait()
    return Ended(code=code, seconds=seconds, text=log.read_text(errors="replace"), left=left)


def ranks_of(parent: int) -> list[int]:
    """The children of a process, which for a run are its ranks."""
    return [process for process, (_, its_parent, _) in _processes().items() if its_parent == parent]


def _all_gone(session: int, seconds: float) -> tuple[int, ...]:
    """The processes of a session that are still alive after at most `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        left = tuple(process for process, (state, _, its) in _processes().items() if its == session and state != "Z")
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(0.05)


def _processes() -> dict[int, tuple[str, int, int]]:
    """Process id -> (state, parent, session) of all processes."""
    found = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with suppress(OSError):
                fields = (path / "stat").read_text().rpartition(")")[2].split()
                found[int(path.name)] = (fields[0], int(fields[1]), int(fields[3]))
    return found


# ---------------------------------------------------------------------- as a user starts it


def _start_command(args: Sequence[str], faults: Sequence[Fault], output: int) -> int:
    options = [word for fault in faults for word in ("--fault", str(fault))]
    return subprocess.Popen([sys.executable, "-m", "ranvier.cli.faults", *options, "--", *args],
                            stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True).pid


# ---------------------------------------------------------------------- by forks


def _fork(output: int, body: Callable[[], int]) -> int:
    """Fork a child, in its own session, that writes to `output` and ends with the exit code that `body` returns."""
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    _leave_with(body)


def _leave_with(body: Callable[[], int]) -> None:
    """Run `body` as a separate process runs its program, and end. Does not return."""
    atexit._clear()  # handlers of this process's parent
    code: object = 1
    try:
        code = body()
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    try:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def _as_parent(args: Sequence[str], faults: Sequence[Fault]) -> int:
    def start_child(command: Sequence[str], *, environ: Mapping[str, str]) -> _Forked:
        return _Forked(os.getpid(), dict(environ), signal.SIGKILL, partial(
            run_command, args, change_world=partial(_with_faults, faults)))

    vars(supervise)["start_child"] = start_child
    return run_command(args)


def _with_faults(faults: Sequence[Fault], world: World) -> World:
    return faulty(world, faults)


class _Forked:
    """The part of subprocess.Popen that the supervisor uses, for a rank that is forked from it."""

    stdout = stderr = None

    def __init__(self, parent: int, environ: dict[str, str], end_signal: int, body: Callable[[], int]) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid:
            return
        os.setpgid(0, 0)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        parent_death.signal_on_parent_death(parent, end_signal)
        os.environ.clear()
        os.environ.update(environ)
        _leave_with(body)

    def poll(self) -> int | None:
        if self.returncode is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)
