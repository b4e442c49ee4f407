"""Contenders in turn, seed by seed: each is started, trains, ends, and its results are read; nothing else runs at that
time."""

from __future__ import annotations

import io
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.elastic.contender import Contender
from benchmarks.elastic.initial import write_initial
from benchmarks.elastic.outcome import Clock, Outcome
from benchmarks.elastic.outcome import read as read_outcome
from benchmarks.elastic.task import checked
from ranvier.config import read
from ranvier.config.run import Run
from ranvier.testing.ranks import run_ranks
from ranvier.train.loop import train

ROOT = Path(__file__).parents[2]


class ContenderFailed(RuntimeError):
    """A contender's processes ended with an error or not in time; the text is the end of what they printed."""


@dataclass(frozen=True, kw_only=True)
class Stand:
    """Where contenders run. threads: their ranks are threads of this process, and the peer is one rank in it; for
    tests, since such times mean nothing. pin: one core for each of our ranks."""

    folder: Path
    threads: bool = False
    pin: bool = False
    timeout_seconds: float = 3600.0


def in_turn(seeds: Sequence[int], found: Sequence[Contender], few: Sequence[int] | None = None,
            ends: Sequence[str] = ()) -> list[tuple[int, Contender]]:
    """(seed, contender) in order: seed by seed, alternately forwards and backwards through the list. Contenders that
    are not named in `ends` take part only for the seeds of `few` (None: all)."""
    order = []
    for number, seed in enumerate(seeds):
        here = [one for one in found if few is None or seed in few or one.name in ends]
        order += [(seed, one) for one in (here if number % 2 == 0 else reversed(here))]
    return order


def run_one(contender: Contender, base: Run, stand: Stand) -> Outcome:
    """Run one contender from its start to its end. Its files are removed, except for the small ones."""
    began = time.monotonic()
    place = stand.folder / f"seed{base.seed}-{contender.name}"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    run = replace(contender.applied(base), run_dir=place / "run")
    if run.elastic.cache:
        run = replace(run, elastic=replace(run.elastic, cache_dir=place / "cache"))
    run = checked(run)
    initial = None
    if contender.peer:
        initial = place / "initial"
        run = write_initial(run, initial)
    if stand.threads:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            _in_threads(run, initial)
        finally:
            torch.set_num_threads(threads)
    else:
        _in_processes(run, initial, place, stand)
    seconds = time.monotonic() - began
    for heavy in (place / "initial", place / "cache", place / "run" / "checkpoint"):
        shutil.rmtree(heavy, ignore_errors=True)
    return read_outcome(place / "run", contender.name, base.seed, seconds)


def _in_threads(run: Run, initial: Path | None) -> None:
    if initial is None:
        run_ranks(lambda world: train(run, "elastic", world, trackers=[Clock(run.run_dir)], stream=io.StringIO()),
                  run.mesh.size, timeout_seconds=300.0)
        return
    from benchmarks.elastic.peer import train_peer  # only when needed: it imports transformers

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        train_peer(run, initial)
    finally:
        dist.destroy_process_group()


def _in_processes(run: Run, initial: Path | None, place: Path, stand: Stand) -> None:
    job, log = place / "job.toml", place / "log.txt"
    read.write(run, job)
    command = [sys.executable, "-m"]
    if initial is None:
        command += ["benchmarks.elastic.rank", str(job), *(["--pin"] if stand.pin else [])]
    else:
        command += ["torch.distributed.run", "--nproc-per-node", str(run.mesh.size), "--master-addr", "127.0.0.1",
                    "--master-port", str(_free_port()), "-m", "benchmarks.elastic.peer", str(job), str(initial)]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo", "TOKENIZERS_PARALLELISM": "false"}
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output,
                                   stderr=subprocess.STDOUT)
        try:
            code = process.wait(stand.timeout_seconds)
        except BaseException:
            _end(process)
            raise
    if code:
        raise ContenderFailed(f"{place.name} ended with code {code}:\n{log.read_text(errors='replace')[-4000:]}")


def _end(process: subprocess.Popen) -> None:
    """End a parent of ranks, which ends them."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(30.0)
        return
    process.kill()
    process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
