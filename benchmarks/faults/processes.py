"""One start of `ranvier` under a launcher, and every process that belongs to it.

A start's processes are found by a unique variable in their environment, which children inherit: launchers put ranks
into other process groups and sessions, and a process that has lost its parent still has its environment. Nothing is
ever found, or killed, by its name.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from ranvier.launch.mpiexec import find_mpiexec

Launcher = Literal["python", "torchrun", "mpiexec"]
LAUNCHERS: tuple[Launcher, ...] = get_args(Launcher)
MARK = "RANVIER_SOAK_START"
_RANK = {"python": b"RANVIER_LOCAL_RANK", "torchrun": b"RANK", "mpiexec": b"PMI_RANK"}
_POLL_SECONDS = 0.005


def command(launcher: Launcher, ranks: int, program: Sequence[str]) -> list[str]:
    """The command with which a user runs `python PROGRAM` on `ranks` ranks of this machine."""
    match launcher:
        case "python":
            return [sys.executable, *program]
        case "torchrun":
            return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
                    *program]
        case "mpiexec":
            return [find_mpiexec(), "-n", str(ranks), sys.executable, *program]


@dataclass(frozen=True)
class Process:
    """pid, parent and environment, as /proc shows them."""

    pid: int
    parent: int
    environ: dict[bytes, bytes]


class Start:
    """A start under way: `program` (after python's own name) on `ranks` ranks; `log` takes its output."""

    def __init__(self, launcher: Launcher, ranks: int, program: Sequence[str], log: Path) -> None:
        self.launcher, self.log, self.began = launcher, log, time.monotonic()
        self._mark = secrets.token_hex(8)
        with log.open("wb") as file:
            self._top = subprocess.Popen(command(launcher, ranks, program), stdin=subprocess.DEVNULL, stdout=file,
                                         stderr=file, start_new_session=True, env=os.environ | {MARK: self._mark})

    # ------------------------------------------------------------------ its processes

    @property
    def pid(self) -> int:
        """Process id of the launcher: the supervisor, torchrun's agent or mpiexec."""
        return self._top.pid

    @property
    def code(self) -> int | None:
        """The launcher's exit code, negative for a signal; None while it runs."""
        return self._top.poll()

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def processes(self) -> list[Process]:
        """All live processes, without zombies, which have no environment any more."""
        wanted = f"{MARK}={self._mark}".encode()
        found = []
        for path in Path("/proc").iterdir():
            if path.name.isdigit():
                with suppress(OSError):
                    words = (path / "environ").read_bytes().split(b"\0")
                    if wanted in words:
                        parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                        found.append(Process(int(path.name), parent, dict(
                            (name, value) for name, _, value in (word.partition(b"=") for word in words))))
        return found

    def ranks(self) -> dict[int, int]:
        """Rank -> pid, of the ranks that have been started and are alive."""
        name = _RANK[self.launcher]
        numbered = {process.pid: process for process in self.processes() if name in process.environ}
        return {int(process.environ[name]): process.pid for process in numbered.values()
                if process.parent not in numbered}  # children of a rank have its number, too

    # ------------------------------------------------------------------ waiting

    def wait_until(self, happened: Callable[[], bool], seconds: float) -> bool:
        """Wait until `happened` is true, at most `seconds` and as long as the launcher lives; returns whether it is."""
        deadline = time.monotonic() + seconds
        while not happened():
            if self.code is not None or time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def wait_gone(self, seconds: float) -> float | None:
        """Wait at most `seconds` until no process is left; returns the moment (monotonic), or None if some are left."""
        deadline = time.monotonic() + seconds
        while self.code is None or self.processes():
            if time.monotonic() > deadline:
                return None
            time.sleep(0.05)
        return time.monotonic()

    # ------------------------------------------------------------------ signals

    def signal(self, pid: int, number: int) -> None:
        """Send a signal to a process of this start; does nothing if it is gone."""
        if pid == self.pid:
            self._top.send_signal(number)
        elif pid in {process.pid for process in self.processes()}:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill_all(self) -> list[int]:
        """Kill all processes that are left; returns their pids."""
        killed = set()
        if self.code is None:
            killed.add(self.pid)
            self.signal(self.pid, signal.SIGKILL)
        while left := self.processes():
            for process in left:
                killed.add(process.pid)
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            time.sleep(0.02)
        self._top.wait()
        return sorted(killed)
