"""Run a function on several ranks, each in its own process, over torch.distributed or MPI.

    run_processes("package.module:function", 4, "mpi")        # function(world, *args) returns something JSON can hold

Public as `ranvier.testing.ranks.run_processes`; `ranvier doctor --measure` uses it too.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Collection, Sequence
from datetime import timedelta
from pathlib import Path
from subprocess import STDOUT, Popen, TimeoutExpired
from typing import Any, Literal

import psutil
import torch

from ranvier.comm.mixed_backend import MixedBackend
from ranvier.comm.mpi_backend import MPIBackend
from ranvier.comm.protocol import Backend
from ranvier.comm.signed_store import sign_store
from ranvier.comm.torch_backend import TorchBackend
from ranvier.config.named_object import import_named
from ranvier.launch.mpiexec import mpiexec_command
from ranvier.launch.shared_store import new_secret
from ranvier.launch.stores import LOOPBACK, connect_store, create_store
from ranvier.system import child
from ranvier.world import World


class RanksFailed(RuntimeError):
    """Ranks that failed, did not end in time, or left no result; the text shows the output of each.

    hung: whether no rank had failed, but they did not end in time.
    """

    def __init__(self, text: str, *, hung: bool = False) -> None:
        super().__init__(text)
        self.hung = hung


_GRACE_SECONDS = 10.0


def run_processes(target: str, size: int, transport: Literal["torch", "mpi", "mpi+torch"], *,
                  args: Sequence[object] = (), timeout_seconds: float = 60.0, may_fail: Collection[int] = (),
                  device: str = "cpu") -> list[Any]:
    """Run `function(world, *args)` on `size` ranks, each in its own process; returns their results in rank order.

    Args:
        target: "module:function"; the module is found as this process would find it.
        transport: mpi+torch has messages over MPI and collectives over torch.distributed.
        args: JSON-serialisable, like the function's result.
        may_fail: ranks that may end without a result (None is returned for them), for tests of lost peers.

    RanksFailed with the output of the ranks that failed, or of all ranks if they do not end within `timeout_seconds`.
    No process is left when this returns or raises.
    """
    with tempfile.TemporaryDirectory(prefix="ranvier-ranks-") as name:
        folder = Path(name)
        store, secret = create_store(LOOPBACK, 0, timedelta(seconds=timeout_seconds)), new_secret()
        (folder / "job.json").write_text(json.dumps(dict(
            target=target, size=size, transport=transport, args=list(args), port=store.port, secret=secret,
            device=device, timeout_seconds=timeout_seconds)))
        environment = child.environment(PYTHONPATH=os.pathsep.join(path or os.getcwd() for path in sys.path))
        command = child.calling("ranvier.launch.rank_processes", "run_one_rank", name)
        if transport != "torch":
            commands = [mpiexec_command(size, command)]
        else:
            commands = [[*command[:-1], f"{name}:{rank}"] for rank in range(size)]
        with open(folder / "launcher.txt", "wb") as output:
            children = [child.start(command, environ=environment, output=output, errors=STDOUT, new_session=True)
                        for command in commands]
            try:
                in_time = _wait_for(children, folder, time.monotonic() + timeout_seconds, may_fail)
            finally:
                _end(children, folder)
        results: list[Any] = [json.loads(_text(folder / f"{rank}.json") or "null") for rank in range(size)]
        missing = [rank for rank in range(size) if results[rank] is None and rank not in may_fail]
        if missing or not in_time:
            shown = range(size) if not in_time else missing
            what = f"had not ended after {timeout_seconds:g} s" if not in_time else "failed"
            outputs = "".join(f"\n--- rank {rank}:\n{_text(folder / f'{rank}.txt')}" for rank in shown)
            who = f"rank {', '.join(map(str, missing or shown))} of {size} ({target} over {transport})"
            raise RanksFailed(f"{who} {what}{outputs}\n--- launcher:\n{_text(folder / 'launcher.txt')}",
                              hung=not in_time)
        return [None if result is None else result["result"] for result in results]


def _wait_for(children: list[Popen[bytes]], folder: Path, deadline: float, may_fail: Collection[int]
              ) -> bool:
    """Whether all ended in time. Once a rank has failed that may not fail, the others get a short grace period."""
    failed = False
    while any(process.poll() is None for process in children):
        if time.monotonic() > deadline:
            return failed
        if not failed and any(rank not in may_fail and process.poll() for rank, process in enumerate(children)):
            failed, deadline = True, min(deadline, time.monotonic() + _GRACE_SECONDS)
        time.sleep(0.02)
    return True


def _end(children: list[Popen[bytes]], folder: Path) -> None:
    """Kill remaining processes: launchers first, which end their ranks, then all with the folder in their command."""
    for started in children:
        if started.poll() is None:
            started.terminate()
            with contextlib.suppress(TimeoutExpired):
                started.wait(5.0)
            started.kill()
            started.wait()
    for process in psutil.process_iter(["cmdline"]):
        if any(str(folder) in word for word in process.info["cmdline"] or ()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace")
    return ""


def run_one_rank(where: str) -> None:
    """The program of one process of `run_processes`; `where` is the folder, with ":rank" if no launcher sets the
    rank."""
    name, _, rank_text = where.partition(":")
    folder, job = Path(name), json.loads((Path(name) / "job.json").read_text())
    torch.set_num_threads(1)
    torch_store, store = sign_store(connect_store(LOOPBACK, job["port"], timedelta(seconds=job["timeout_seconds"])),
                                    job["secret"])
    backend: Backend
    if job["transport"] != "torch":
        messages = backend = MPIBackend(torch.device(job["device"]), job["timeout_seconds"])
        device = _device(job["device"], backend.rank)
        if job["transport"] == "mpi+torch":
            backend = MixedBackend(messages, TorchBackend(messages.rank, job["size"], torch_store, device,
                                                          job["timeout_seconds"]))
    else:
        device = _device(job["device"], int(rank_text))
        backend = TorchBackend(int(rank_text), job["size"], torch_store, device, job["timeout_seconds"])
    with open(folder / f"{backend.rank}.txt", "wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    world = World(backend=backend, store=store, launcher="run_processes", device=device, local_rank=backend.rank,
                  local_size=job["size"])
    try:
        module, _, function = job["target"].partition(":")
        result = import_named(module, function)(world, *job["args"])
        backend.close()
        partial = folder / f"{backend.rank}.partial"
        partial.write_text(json.dumps({"result": result}))
        partial.rename(folder / f"{backend.rank}.json")
    except BaseException:
        traceback.print_exc()
        backend.abort(1)


def _device(kind: str, rank: int) -> torch.device:
    """The rank's own device; ranks share devices if there are not enough."""
    if kind == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(rank % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())
