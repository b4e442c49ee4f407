"""Runs a function on local ranks from a notebook or a prompt, which have no command to run again.

    def train(world):
        engine = ranvier.Engine(blocks, world, loss=loss, optimizer=optimizer)
        ...
        return result.loss

    losses = ranvier.run(train, data=2, pipe=2)

The function is sent by cloudpickle, with all that it uses of the notebook, to `run_as_rank` in another process, a
program that starts the ranks as any program does. This process shows the other's output, and waits.
"""

from __future__ import annotations

import codecs
import os
import pickle
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen, TimeoutExpired
from types import ModuleType
from typing import Any, Literal

import torch

from ranvier.arguments import check_arguments
from ranvier.config.run import Positive, Seconds
from ranvier.errors import LaunchError
from ranvier.launch.start import start
from ranvier.mesh import Mesh, mesh_of
from ranvier.system import child

_GRACE_SECONDS = 10.0


def run(function: Callable[..., Any], *args: Any, mesh: Mesh | None = None, data: int = 1, pipe: int = 1,
        row: int = 1, col: int = 1, transport: Literal["auto", "torch", "mpi"] = "auto",
        threads: Positive | Literal["auto"] = "auto", device: Literal["auto", "cpu", "cuda"] = "auto",
        timeout_seconds: Seconds = 300.0) -> list[Any]:
    """Run `function(world, *args)` on local ranks, and return what each of them returns, in rank order.

    For notebooks and prompts. The output of rank 0 and errors of all ranks appear while they run, and Ctrl-C (a
    notebook's interrupt) ends the ranks.

    Args:
        function: may be defined in a cell, and use names from other cells. Each rank has copies of these objects and of
            `args`; changes to the copies are lost, so return results. It begins with the default dtype and the
            generator state of torch that are set here (`torch.set_default_dtype`, `torch.manual_seed`).
        mesh, data, pipe, row, col, transport, threads, device, timeout_seconds: as for `ranvier.start`.

    LaunchError, with the rank and its error, if a rank fails; ConfigError for an impossible mesh.
    """
    check_arguments(run, locals(), but=("mesh", "data", "pipe", "row", "col"))
    mesh = mesh_of(mesh, "ranvier.run", data=data, pipe=pipe, row=row, col=col)
    pickler = cloudpickle_module()
    settings = dict(mesh=mesh, transport=transport, threads=threads, device=device, timeout_seconds=timeout_seconds)
    with tempfile.TemporaryDirectory(prefix="ranvier-run-") as name:
        folder = Path(name)
        try:
            (folder / "job").write_bytes(pickler.dumps((settings, _torchs_state(), function, args)))
        except Exception as error:  # whatever an object's own pickling raises
            raise LaunchError(f"cannot be sent to the ranks: {type(error).__name__}: {error}",
                              code="function-not-picklable", where="ranvier.run",
                              value=getattr(function, "__name__", function),
                              remedy="Create files, locks, engines and devices inside the function.") from error
        code = _run_program(folder)
        results = [folder / f"{rank}.result" for rank in range(mesh.size)]
        if code or not all(path.exists() for path in results):  # a function may have called sys.exit
            raise _failure(folder, code)
        return [pickle.loads(path.read_bytes()) for path in results]


def cloudpickle_module() -> ModuleType:
    """The package cloudpickle; LaunchError if it is not installed."""
    try:
        import cloudpickle  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError as error:
        raise LaunchError("needs the package cloudpickle, which sends functions of a notebook to other processes",
                          code="cloudpickle-missing", where="ranvier.run",
                          remedy="Install it with pip install 'ranvier[notebook]'.") from error
    module: ModuleType = cloudpickle
    return module


def _torchs_state() -> tuple[torch.dtype, int, torch.Tensor]:
    """Global state of torch: the default dtype, and the generator's seed and state."""
    return torch.get_default_dtype(), torch.initial_seed(), torch.get_rng_state()


def rank_command(folder: Path) -> list[str]:
    """The command line of the program that starts the ranks of the job in `folder`, and of each rank."""
    return child.calling("ranvier.launch.run_function", "run_as_rank", str(folder))


def _run_program(folder: Path) -> int:
    """Run the program that starts the ranks of the job in `folder`, and show its output; returns its exit code."""
    environ = child.environment(PYTHONPATH=os.pathsep.join(path or os.getcwd() for path in sys.path))  # as it is here
    process = child.start(rank_command(folder), environ=environ, output=PIPE,
                          errors=STDOUT, end_signal=signal.SIGTERM, new_session=True)
    try:
        _show(process)
        return process.wait()
    finally:
        if process.poll() is None:  # Ctrl-C
            process.send_signal(signal.SIGINT)
            with suppress(TimeoutExpired):
                process.wait(_GRACE_SECONDS)  # it ends its ranks first
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _show(process: Popen[bytes]) -> None:
    """Write the process's output to this process's output, in a notebook the cell's, until it ends."""
    assert process.stdout is not None
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    while chunk := os.read(process.stdout.fileno(), 1 << 16):
        sys.stdout.write(decoder.decode(chunk))
        sys.stdout.flush()


def _failure(folder: Path, code: int) -> LaunchError:
    """The error of the rank that failed first."""
    errors = sorted(folder.glob("*.error"), key=lambda path: path.stat().st_mtime_ns)
    if not errors:
        how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return LaunchError(f"ended {how} before they had a result", code="function-ranks-ended", where="the ranks",
                           remedy="Read their output above.")
    who, _, what = errors[0].read_text().partition("\n")
    return LaunchError(f"failed: {what.rstrip('.')}", code="function-failed", where=who,
                       remedy="Its traceback is in the output above.")


def run_as_rank(name: str) -> None:
    """The program of `run`: it starts the ranks, and each rank runs it again, calls the function and writes N.result or
    N.error. name: the folder with the pickled job."""
    folder = Path(name)
    where = "ranvier.run"
    try:
        settings, (dtype, seed, generator), function, args = pickle.loads((folder / "job").read_bytes())
        world = start(**settings, rerun=rank_command(folder))
        where = f"rank {world.rank} of {world.size}"
        if world.rank:
            with open(os.devnull, "wb") as nothing:
                os.dup2(nothing.fileno(), sys.stdout.fileno())
        torch.set_default_dtype(dtype)
        torch.manual_seed(seed)  # on all devices
        torch.set_rng_state(generator)
        found = function(world, *args)
        try:
            result = cloudpickle_module().dumps(found)
        except Exception as error:  # whatever an object's own pickling raises
            raise LaunchError(f"returned a value that cannot be sent back: {type(error).__name__}: {error}",
                              code="result-not-picklable", where="ranvier.run", value=type(found).__name__,
                              remedy="Return numbers, tensors or strings.") from error
        temporary = folder / f"{world.rank}.unfinished"
        temporary.write_bytes(result)
        temporary.rename(folder / f"{world.rank}.result")
    except Exception as error:
        (folder / f"{os.getpid()}.error").write_text(f"{where}\n{type(error).__name__}: {error}")
        raise
