"""Shared by the memory benchmarks: their options, our engine on their workload, tables, and ratios round by round."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.pipeline.summary import Spread
from benchmarks.pipeline.workload import Workload
from benchmarks.record import results_file, write_results
from ranvier.config.run import Optim
from ranvier.mesh import Mesh
from ranvier.pipeline.engine import Engine
from ranvier.pipeline.microbatch import Microbatch, microbatches
from ranvier.world import World

MIB = 2**20


def parser(doc: str) -> argparse.ArgumentParser:
    """A parser with the options that all of these programs have."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="small sizes and few steps: does it work?")
    made.add_argument("--output", type=Path, help="the file of results; by default benchmarks/results/memory/NAME-DATE")
    return made


def write(options: argparse.Namespace, name: str, results: dict[str, object]) -> Path:
    """Write the results and print where; returns the file, next to which pictures are written."""
    path = options.output or results_file("memory", name, quick=options.quick)
    write_results(path, results)
    print(f"wrote {path}")
    return path


def build_engine(workload: Workload, world: World, mesh: Mesh, optim: Optim,
                 dtype: torch.dtype = torch.float32) -> Engine:
    """Our engine on the workload's model."""
    inputs, targets = workload.batch(0)
    sample = Microbatch(inputs[:workload.microbatch_size], targets[:workload.microbatch_size])
    return Engine(workload.model(), world, mesh=mesh, optim=optim, learning_rate=workload.learning_rate,
                  seed=workload.seed, nominal_weight=workload.tokens_per_step, dtype=dtype,
                  sample=sample if mesh.pipe > 1 else None)


def replica_batch(workload: Workload, engine: Engine, step: int) -> list[Microbatch]:
    """This replica's share of the global batch, cut into microbatches of the workload's size."""
    share = workload.sequences // engine.mesh.data
    mine = slice(engine.coordinates.data * share, (engine.coordinates.data + 1) * share)
    inputs, targets = workload.batch(step)
    return microbatches(inputs[mine], targets[mine], workload.microbatch_size)


def state_bytes(engine: Engine) -> int:
    """Bytes of the optimizer's states on this rank, master copies included, wherever they are."""
    return sum(size for categories in engine.memory().values() for category, size in categories.items()
               if category in ("master", "moments"))


def spread(ratios: Sequence[float]) -> Spread:
    """Least, middle and greatest."""
    ordered = sorted(ratios)
    half = len(ordered) // 2
    middle = ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
    return Spread(least=ordered[0], middle=middle, greatest=ordered[-1])


def ratios(above: Sequence[float], below: Sequence[float]) -> Spread:
    """above / below, round by round."""
    return spread([a / b for a, b in zip(above, below, strict=True)])


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table with columns as wide as needed; numbers are right-aligned, the first column is left-aligned."""
    lines = [list(map(str, head)), *(list(map(str, row)) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join("  ".join(cell.ljust(width) if column == 0 else cell.rjust(width)
                               for column, (cell, width) in enumerate(zip(line, widths, strict=True)))
                     for line in lines)


def mib(size: float) -> str:
    return f"{size / MIB:.2f}"
