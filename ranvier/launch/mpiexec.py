"""MPI on this machine: whether it can be used, the command that starts its ranks, and a filter that removes from
mpiexec's output the page of text that MPICH prints about a killed rank. Never initialises MPI.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from typing import IO, Literal

from ranvier.errors import LaunchError
from ranvier.system import child
from ranvier.system.machine import affinity

Flavour = Literal["mpich", "open-mpi", "unknown"]
"""Implementation of MPI; those derived from MPICH, such as Intel's, count as MPICH."""

_VERSION_PROGRAM = ("import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
                    "print(MPI.Get_library_version())")


def find_mpiexec() -> str | None:
    """Path of the mpiexec next to the running interpreter, whose library mpi4py loads; else of the first on PATH."""
    beside = Path(sys.executable).parent / "mpiexec"
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("mpiexec")


def flavour(version: str) -> Flavour:
    """The implementation that `version` names: the output of `mpiexec --version` or of the library itself."""
    lowered = version.lower()
    if any(name in lowered for name in ("open mpi", "openrte", "prrte", "prterun")):
        return "open-mpi"
    return "mpich" if any(name in lowered for name in ("mpich", "hydra", "intel(r) mpi")) else "unknown"


def _output(*command: str) -> str:
    """Output of `command`. LaunchError if it fails."""
    try:
        done = child.run(command, seconds=60)
    except (OSError, TimeoutExpired) as error:
        raise LaunchError("cannot be run", code="mpiexec-not-runnable", where=command[0], value=str(error),
                          remedy="Reinstall it.") from error
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise LaunchError("fails", code="mpiexec-fails", where="mpi4py" if command[-1] == _VERSION_PROGRAM else
                          " ".join(command[:2]), value=lines[-1] if lines else done.returncode, remedy="Reinstall it.")
    return done.stdout + done.stderr


def mpi_available() -> str | None:
    """The reason why MPI ranks cannot be started or would not connect, with the remedy; None if they can."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed (pip install 'ranvier[mpi]')"
    mpiexec = find_mpiexec()
    if mpiexec is None:
        return "no mpiexec next to the interpreter or on PATH (pip install 'ranvier[mpi]')"
    try:
        starter = flavour(_output(mpiexec, "--version"))
        library = flavour(_output(*child.python("-c", _VERSION_PROGRAM)))
    except LaunchError as error:
        return str(error)
    if "unknown" not in (starter, library) and starter != library:
        return f"{mpiexec} is {starter}'s but mpi4py loads {library}'s library: put the matching mpiexec first on PATH"
    return None


def mpiexec_command(num_ranks: int, command: Sequence[str]) -> list[str]:
    """The command line that starts `num_ranks` ranks of `command` on this machine.

    MPICH's mpiexec can run as root and with any number of ranks; Open MPI's needs options for both. LaunchError if
    there is no mpiexec.
    """
    mpiexec = find_mpiexec()
    if mpiexec is None:
        raise LaunchError("is neither next to the interpreter nor on PATH", code="mpiexec-missing", where="mpiexec",
                          remedy="pip install 'ranvier[mpi]', or set `--comm.transport torch`.")
    arguments = [mpiexec, "-n", str(num_ranks)]
    if flavour(_output(mpiexec, "--version")) == "open-mpi":
        arguments += ["--bind-to", "none"]
        if os.geteuid() == 0:
            arguments.append("--allow-run-as-root")
        if num_ranks > len(affinity()):
            arguments.append("--oversubscribe")
    return [*arguments, *command]


_BANNER_STARTS = (b"=   BAD TERMINATION", b"=   PID ", b"=   EXIT CODE", b"=   CLEANING UP", b"=   YOU CAN IGNORE",
                  b"YOUR APPLICATION TERMINATED WITH", b"This typically refers to a problem with your application",
                  b"Please see the FAQ page for debugging", b"[mpiexec@", b"[proxy:")


class MpiexecOutput:
    """Passes mpiexec's output through without its banner, from which it parses which process a signal killed."""

    def __init__(self) -> None:
        self.pid: int | None = None
        """Process id of the killed rank; None if none was reported."""
        self.signal: int | None = None
        """Number of the signal that killed it."""

    def relay(self, process: Popen[bytes]) -> list[threading.Thread]:
        """Start a thread for each output of `process` that is a pipe; returns these threads, which end with it."""
        pairs = [(process.stdout, 1), (process.stderr, 2)]
        readers = [threading.Thread(target=self._relay, args=pair, daemon=True) for pair in pairs
                   if pair[0] is not None]
        for reader in readers:
            reader.start()
        return readers

    def _relay(self, source: IO[bytes], destination: int) -> None:
        held = b""  # an empty line, which may be the first of the banner
        with source:
            for line in source:
                if self._is_banner(line):
                    held = b""
                elif line == b"\n" and not held:
                    held = line
                else:
                    # Our own output may be closed, but a full pipe would block the ranks: keep reading.
                    with suppress(OSError):
                        os.write(destination, held + line)
                    held = b""

    def _is_banner(self, line: bytes) -> bool:
        if match := re.match(rb"=   PID (\d+) RUNNING AT", line):
            self.pid = int(match[1])
        if match := re.match(rb"YOUR APPLICATION TERMINATED WITH THE EXIT STRING: .*\(signal (\d+)\)", line):
            self.signal = int(match[1])
        return line.startswith(_BANNER_STARTS) or line.rstrip() == b"=" * 83
