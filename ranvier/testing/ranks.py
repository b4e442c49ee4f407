"""Run a function on several ranks: threads of this process, or real processes over torch.distributed or MPI.

    run_ranks(lambda world: world.rank ** 2, 4) == [0, 1, 4, 9]

    run_processes("package.module:function", 4, "mpi")        # function(world, *args) returns something JSON can hold
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Literal, TypeVar

import torch
import torch.distributed as dist

from ranvier.comm.inprocess import InProcessWorld
from ranvier.comm.mpi_backend import MPIBackend
from ranvier.comm.mpi_launch import mpiexec_command
from ranvier.comm.throttle import Links, throttled
from ranvier.comm.torch_backend import TorchBackend
from ranvier.world import World

Result = TypeVar("Result")


class RanksFailed(RuntimeError):
    """Ranks that failed, did not end in time, or left no result; the text shows what is known of each."""


def run_ranks(fn: Callable[[World], Result], size: int, *, timeout_seconds: float = 60.0,
              throttle: Links | None = None) -> list[Result]:
    """`fn(world)` on `size` ranks that are threads of this process; their results in rank order.

    Args:
        throttle: a Link, or (source, destination) -> Link, for messages and collectives alike.

    Raises the first failure of any rank, with a note that names the rank; ranks that wait for a message or a collective
    are woken by it and end too. RanksFailed with every thread's stack when some have not ended in `timeout_seconds`.
    """
    shared, store = InProcessWorld(size), dist.HashStore()
    store.set_timeout(timedelta(seconds=timeout_seconds))
    results: list = [None] * size
    failures: list[tuple[int, BaseException]] = []

    def run(rank: int) -> None:
        backend = shared.backend(rank)
        world = World(backend=backend if throttle is None else throttled(backend, throttle), store=store,
                      launcher="in-process", device=torch.device("cpu"), local_rank=rank, local_size=size)
        try:
            results[rank] = fn(world)
            world.backend.close()
        except BaseException as error:
            failures.append((rank, error))
            shared.abort(rank)

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]
    deadline = time.monotonic() + timeout_seconds
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    stuck = [thread for thread in threads if thread.is_alive()]
    late = "" if not stuck else f"{', '.join(thread.name for thread in stuck)} of {size} had not ended after " \
                                f"{timeout_seconds:g} s\n{_stacks(stuck)}"
    if failures:
        rank, error = failures[0]
        error.add_note(f"on rank {rank} of {size}")
        if late:
            error.add_note(late)
        raise error
    if stuck:
        shared.abort()
        for thread in stuck:
            thread.join(2.0)
        raise RanksFailed(late)
    return results


def _stacks(threads: list[threading.Thread]) -> str:
    frames = sys._current_frames()
    return "\n".join(f"{thread.name}:\n{''.join(traceback.format_stack(frames[thread.ident]))}"
                     for thread in threads if thread.ident in frames)


_RANK_PROGRAM = "import sys; from ranvier.testing.ranks import run_one_rank; run_one_rank(sys.argv[1])"
_GRACE_SECONDS = 10.0


def run_processes(target: str, size: int, transport: Literal["torch", "mpi"], *, args: Sequence[object] = (),
                  timeout_seconds: float = 60.0, may_fail: Collection[int] = (), device: str = "cpu") -> list:
    """`function(world, *args)` on `size` ranks that are processes of their own; their results in rank order.

    Args:
        target: "module:function"; the module is found as this process would find it.
        args: what JSON can hold; so must be what the function returns.
        may_fail: ranks that may end without a result (which is None then), for tests of lost peers.

    RanksFailed with the output of the ranks that failed, of all ranks when they do not end in `timeout_seconds`. None
    of the processes is left when this returns or raises.
    """
    with tempfile.TemporaryDirectory(prefix="ranvier-ranks-") as name:
        folder = Path(name)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        (folder / "job.json").write_text(json.dumps(dict(
            target=target, size=size, transport=transport, args=list(args), port=store.port, device=device,
            timeout_seconds=timeout_seconds)))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        command = [sys.executable, "-c", _RANK_PROGRAM, name]
        if transport == "mpi":
            commands = [mpiexec_command(size, command)]
        else:
            commands = [[*command[:-1], f"{name}:{rank}"] for rank in range(size)]
        with open(folder / "launcher.txt", "wb") as output:
            children = [subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output,
                                         stderr=subprocess.STDOUT, start_new_session=True) for command in commands]
            try:
                in_time = _wait_for(children, folder, time.monotonic() + timeout_seconds, may_fail)
            finally:
                _end(children, folder)
        results = [_read(folder / f"{rank}.json") for rank in range(size)]
        missing = [rank for rank in range(size) if results[rank] is None and rank not in may_fail]
        if missing or not in_time:
            shown = range(size) if not in_time else missing
            what = f"had not ended after {timeout_seconds:g} s" if not in_time else "failed"
            outputs = "".join(f"\n--- rank {rank}:\n{_text(folder / f'{rank}.txt')}" for rank in shown)
            who = f"rank {', '.join(map(str, missing or shown))} of {size} ({target} over {transport})"
            raise RanksFailed(f"{who} {what}{outputs}\n--- launcher:\n{_text(folder / 'launcher.txt')}")
        return [None if result is None else result["result"] for result in results]


def _wait_for(children: list[subprocess.Popen], folder: Path, deadline: float, may_fail: Collection[int]) -> bool:
    """Whether all ended in time. Once a rank that may not fail has done so, the others have a short grace."""
    failed = False
    while any(child.poll() is None for child in children):
        if time.monotonic() > deadline:
            return failed
        if not failed and any(rank not in may_fail and child.poll() for rank, child in enumerate(children)):
            failed, deadline = True, min(deadline, time.monotonic() + _GRACE_SECONDS)
        time.sleep(0.02)
    return True


def _end(children: list[subprocess.Popen], folder: Path) -> None:
    """Kill what is left: launchers first, which end their ranks, then ranks by the process ids that they wrote."""
    for child in children:
        if child.poll() is None:
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(5.0)
            child.kill()
            child.wait()
    for path in folder.glob("*.pid"):
        with contextlib.suppress(ProcessLookupError, ValueError):
            process = int(path.read_text())
            if f"{folder}" in _text(Path(f"/proc/{process}/cmdline")):
                os.kill(process, signal.SIGKILL)


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace")
    return ""


def _read(path: Path) -> dict | None:
    with contextlib.suppress(OSError, ValueError):
        return json.loads(path.read_text())
    return None


def run_one_rank(where: str) -> None:
    """The life of one process of `run_processes`; `where` is its folder, and ":rank" where the launcher gives none."""
    name, _, rank_text = where.partition(":")
    folder, job = Path(name), json.loads((Path(name) / "job.json").read_text())
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", job["port"], is_master=False, timeout=timedelta(seconds=job["timeout_seconds"]))
    if job["transport"] == "mpi":
        backend = MPIBackend(torch.device(job["device"]), job["timeout_seconds"])
        device = _device(job["device"], backend.rank)
    else:
        device = _device(job["device"], int(rank_text))
        backend = TorchBackend(int(rank_text), job["size"], store, device, job["timeout_seconds"])
    (folder / f"{backend.rank}.pid").write_text(str(os.getpid()))
    with open(folder / f"{backend.rank}.txt", "wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    world = World(backend=backend, store=store, launcher="run_processes", device=device, local_rank=backend.rank,
                  local_size=job["size"])
    try:
        module, _, function = job["target"].partition(":")
        result = getattr(importlib.import_module(module), function)(world, *job["args"])
        backend.close()
        partial = folder / f"{backend.rank}.partial"
        partial.write_text(json.dumps({"result": result}))
        partial.rename(folder / f"{backend.rank}.json")
    except BaseException:
        traceback.print_exc()
        backend.abort(1)


def _device(kind: str, rank: int) -> torch.device:
    """The rank's own device; ranks share where there are fewer devices."""
    if kind == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(rank % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())
