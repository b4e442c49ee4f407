"""Host time of a microbatch on a pipeline of two ranks, in addition to the work of its blocks.

    python -m benchmarks.pipeline.host_time [--rounds 7] [--transport torch]

Each round times steps of 8 and of 24 microbatches: the difference of the two, divided by 16, is the time of one
microbatch without the start and the end of a step, where ranks wait. The same is timed for plain loops over the blocks
of each stage, on both ranks at the same time and without messages; `host` is the additional time of the engine over the
slower loop.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

import torch
from torch import nn

import ranvier
from benchmarks.memory.program import table
from benchmarks.pipeline.one_rank import SIZES, Size, adamw, cross_entropy, network
from benchmarks.record import results_file, write_results
from ranvier.config.run import Pipeline
from ranvier.mesh import Mesh
from ranvier.pipeline.microbatch import Microbatch

FEW, MANY = 8, 24


def batch(size: Size, microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(microbatches)
    shape = (microbatches * size.sequences, size.tokens)
    return (torch.randint(size.vocabulary, shape, generator=generator),
            torch.randint(size.vocabulary, shape, generator=generator))


def plain_stage(size: Size, boundary: int, rank: int) -> Callable[[int], object]:
    """A loop over the blocks of one stage, which sends and receives nothing."""
    blocks = list(network(size))
    stage = nn.Sequential(*(blocks[:boundary] if rank == 0 else blocks[boundary:]))
    optimizer = adamw(stage.parameters())
    between = torch.randn(size.sequences, size.tokens, size.width)

    def step(microbatches: int) -> None:
        optimizer.zero_grad()
        inputs, targets = batch(size, microbatches)
        for part, expected in zip(inputs.split(size.sequences), targets.split(size.sequences), strict=True):
            if rank == 0:
                stage(part).backward(between)
            else:
                total, weight = cross_entropy(stage(between.clone().requires_grad_()), expected)
                (total / weight).backward()
        optimizer.step()

    return step


def pipeline(size: Size, boundary: int, world: ranvier.World) -> Callable[[int], object]:
    sample = Microbatch(*(part[:size.sequences] for part in batch(size, 1)))
    engine = ranvier.Engine(network(size), world, mesh=Mesh(pipe=2), loss=cross_entropy, optimizer=adamw,
                            pipeline=Pipeline(boundaries=(boundary,)), sample=sample)
    return lambda microbatches: engine.train_batch(ranvier.microbatches(*batch(size, microbatches), size.sequences))


def seconds(step: Callable[[int], object], microbatches: int, repeats: int, world: ranvier.World) -> float:
    """Seconds of the slower rank."""
    times = []
    for _ in range(repeats):
        world.gather_objects(None)
        started = time.perf_counter()
        step(microbatches)
        times.append(time.perf_counter() - started)
    return max(world.gather_objects(median(times)))


def compare(size: Size, world: ranvier.World, rounds: int, repeats: int) -> dict[str, object]:
    boundary = 1 + size.layers // 2
    loops = {"plain": plain_stage(size, boundary, world.rank), "ranvier": pipeline(size, boundary, world)}
    per_microbatch: dict[str, list[float]] = {name: [] for name in loops}
    for turn in range(rounds + 1):
        for name in loops if turn % 2 == 0 else reversed(loops):
            few, many = (seconds(loops[name], count, repeats, world) for count in (FEW, MANY))
            if turn:
                per_microbatch[name].append(1e3 * (many - few) / (MANY - FEW))
    host = sorted(ours - theirs for theirs, ours in zip(*per_microbatch.values(), strict=True))
    return {"size": asdict(size), "milliseconds_a_microbatch": {name: median(v) for name, v in per_microbatch.items()},
            "host_milliseconds_a_microbatch": {"median": median(host), "least": host[0], "greatest": host[-1]}}


def main(arguments: Sequence[str] | None = None) -> dict[str, object]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=7, help="steps of each kind in a round")
    parser.add_argument("--transport", choices=("auto", "torch", "mpi"), default="auto")
    parser.add_argument("--quick", action="store_true", help="one round of two steps")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    rounds, repeats = (1, 2) if options.quick else (options.rounds, options.repeats)
    world = ranvier.start(pipe=2, transport=options.transport)
    torch.set_num_threads(1)
    found = {"rounds": rounds, "steps_a_round": repeats, "transport": world.backend.name,
             "cases": [compare(size, world, rounds, repeats) for size in SIZES]}
    if world.rank == 0:
        print(table(("width", "plain ms", "ranvier ms", "host ms a microbatch"),
                    [(str(case["size"]["width"]), *(f"{v:.2f}" for v in case["milliseconds_a_microbatch"].values()),
                      "{median:.2f} [{least:.2f}, {greatest:.2f}]".format(**case["host_milliseconds_a_microbatch"]))
                     for case in found["cases"]]))
        path = options.output or results_file("pipeline", f"host-time-{world.backend.name}", quick=options.quick)
        write_results(path, found)
        print(f"wrote {path}")
    return found


if __name__ == "__main__":
    main()
