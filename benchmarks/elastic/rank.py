"""One rank of one of our contenders: `python -m benchmarks.elastic.rank RUN.toml [--pin]`, which starts all ranks.

--pin gives each rank its own core. AutoPipe then assumes that all ranks together have only one core.
"""

from __future__ import annotations

import os
import sys

import ranvier
from benchmarks.elastic.outcome import Clock
from ranvier.config import read
from ranvier.train.loop import train


def main(path: str, *options: str) -> None:
    run = read.merge([read.load(path)[1]]).run
    world = ranvier.start(run.mesh, transport=run.comm.transport, threads=run.launch.threads, device="cpu",
                          timeout_seconds=run.comm.timeout_seconds)
    if "--pin" in options:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[world.local_rank % len(cores)]})
    train(run, "elastic", world, trackers=[Clock(run.run_dir)])
    world.backend.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
