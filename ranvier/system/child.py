"""Child processes: the one place that starts them.

    start    a process that runs alongside this one
    run      a command that ends on its own, or at a deadline
    python   the command line of an interpreter for Ranvier's own programs
    calling  the command line of an interpreter that calls a function

Ranvier's own interpreters run with -P: a file in the current folder never shadows a package. A user's own program keeps
its folder, as under `python`. No child reads this process's standard input: it has a pipe, or nothing.
"""

from __future__ import annotations

import os
import signal
import site
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ranvier
from ranvier.system import parent_death

_PRIVATE = "RANVIER_SECRET"
"""A variable that only ranks inherit: any process that has it can take part in the run."""


def python(*arguments: str) -> list[str]:
    """The command line of this interpreter with `arguments`, for Ranvier's own programs."""
    return [sys.executable, "-P", *arguments]


def calling(module: str, function: str, *arguments: str) -> list[str]:
    """The command line of this interpreter that calls `function` of `module` with `arguments`.

    Modules are never collected: the garbage collector examines none of their objects, neither while they are imported
    nor at the end. That saves a third of the CPU time of a short process.
    """
    program = f"import gc, sys; gc.disable(); from {module} import {function}; gc.freeze(); gc.enable(); "
    return python("-c", f"{program}{function}(*sys.argv[1:])", *arguments)


def environment(**more: str) -> dict[str, str]:
    """This process's environment variables for a child that is not a rank, and `more`. The child finds Ranvier as this
    process does."""
    found = {name: value for name, value in os.environ.items() if name != _PRIVATE} | more
    return found | package_path(found)


def package_path(environ: Mapping[str, str]) -> dict[str, str]:
    """PYTHONPATH for an interpreter that does not search the current folder, if the package may be found only there."""
    root = Path(ranvier.__file__).resolve().parent.parent
    installed = [*site.getsitepackages(), site.getusersitepackages()]
    given = [place for place in environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    if any(Path(place).resolve() == root for place in (*installed, *given)):
        return {}
    return {"PYTHONPATH": os.pathsep.join([*given, str(root)])}


def start(command: Sequence[str], *, environ: Mapping[str, str] | None = None, folder: Path | None = None,
          input: Any = None, output: Any = None, errors: Any = None, end_signal: int | None = signal.SIGKILL,
          new_session: bool = False) -> subprocess.Popen[bytes]:
    """Start `command` in its own process group: the terminal's Ctrl-C does not reach it.

    environ: all its variables (`environment()` unless given). input: as for Popen; None: nothing. output, errors: as
    for Popen; None: this process's.
    end_signal: signal that the kernel sends it when this process ends (Linux); None: none. Raises OSError if it cannot
    be started.
    """
    wrapper = [] if end_signal is None else [sys.executable, "-I", "-S", str(parent_death.__file__), str(os.getpid()),
                                             str(int(end_signal))]
    return subprocess.Popen([*wrapper, *command], env=dict(environment() if environ is None else environ), cwd=folder,
                            stdin=subprocess.DEVNULL if input is None else input, stdout=output, stderr=errors,
                            start_new_session=new_session,
                            process_group=None if new_session else 0)


def run(command: Sequence[str], *, seconds: float, folder: Path | None = None, check: bool = False
        ) -> subprocess.CompletedProcess[str]:
    """Run `command` to its end and return what it printed. It and its group are killed after `seconds`.

    Raises OSError if it cannot be started, TimeoutExpired, and with `check` CalledProcessError if it fails.
    """
    child = start(command, folder=folder, output=subprocess.PIPE, errors=subprocess.PIPE, end_signal=None)
    try:
        output, errors = child.communicate(timeout=seconds)
    except BaseException:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        raise
    done = subprocess.CompletedProcess(command, child.returncode, output.decode(errors="replace"),
                                       errors.decode(errors="replace"))
    if check:
        done.check_returncode()
    return done


@contextmanager
def safe_spawning() -> Iterator[None]:
    """Context in which interpreters that `multiprocessing` starts do not search the current folder first, as with
    -P."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before
