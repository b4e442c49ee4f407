"""Whether MPI can be used here, and how its ranks are started. Nothing in this file initialises MPI."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from ranvier.errors import LaunchError

Flavour = Literal["mpich", "open-mpi", "unknown"]

_VERSION_PROGRAM = ("import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
                    "print(MPI.Get_library_version())")


def find_mpiexec() -> str | None:
    """The mpiexec beside the running interpreter, whose library mpi4py loads; else the first on PATH."""
    beside = Path(sys.executable).parent / "mpiexec"
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("mpiexec")


def flavour(version: str) -> Flavour:
    """Whose text this is: of `mpiexec --version`, or of the library itself."""
    lowered = version.lower()
    if any(name in lowered for name in ("open mpi", "openrte", "prrte", "prterun")):
        return "open-mpi"
    return "mpich" if any(name in lowered for name in ("mpich", "hydra", "intel(r) mpi")) else "unknown"


def _output(*command: str) -> str:
    """What `command` prints. LaunchError when it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError("cannot be run", where=command[0], value=str(error), remedy="Reinstall it.") from error
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise LaunchError("fails", where=" ".join(command[:2]), value=said[-1] if said else done.returncode,
                          remedy="Reinstall it.")
    return done.stdout + done.stderr


def mpi_available() -> str | None:
    """None where MPI ranks can be started and would find each other; otherwise the reason, with the remedy."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed (pip install 'ranvier[mpi]')"
    mpiexec = find_mpiexec()
    if mpiexec is None:
        return "no mpiexec beside the interpreter or on PATH (pip install 'ranvier[mpi]')"
    try:
        starter = flavour(_output(mpiexec, "--version"))
        library = flavour(_output(sys.executable, "-c", _VERSION_PROGRAM))
    except LaunchError as error:
        return str(error)
    if "unknown" not in (starter, library) and starter != library:
        return f"{mpiexec} is {starter}'s but mpi4py loads {library}'s library: put the matching mpiexec first on PATH"
    return None


def mpiexec_command(num_ranks: int, command: Sequence[str]) -> list[str]:
    """The command line that starts `num_ranks` ranks of `command` on this machine.

    MPICH's mpiexec runs as root and at any number of ranks; Open MPI's must be told that it may. LaunchError without an
    mpiexec.
    """
    mpiexec = find_mpiexec()
    if mpiexec is None:
        raise LaunchError("is neither beside the interpreter nor on PATH", where="mpiexec",
                          remedy="pip install 'ranvier[mpi]', or set --comm.transport torch.")
    arguments = [mpiexec, "-n", str(num_ranks)]
    if flavour(_output(mpiexec, "--version")) == "open-mpi":
        arguments += ["--bind-to", "none"]
        if os.geteuid() == 0:
            arguments.append("--allow-run-as-root")
        if num_ranks > len(os.sched_getaffinity(0)):
            arguments.append("--oversubscribe")
    return [*arguments, *command]
