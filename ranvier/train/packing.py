"""From what a run's ranks have measured to the meshes that AutoPipe may choose: times of blocks, bytes, cores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

import torch

from ranvier.elastic.auto_pipe import Choice, Situation, choices, compress, greedy, stage_sizes
from ranvier.layout import frozen_blocks
from ranvier.machine import shared_cores
from ranvier.mesh import Mesh
from ranvier.precision import DTYPES
from ranvier.run import Run
from ranvier.train.formation import Formation

LINKS = {"in-process": (inf, 0.0), "mpi": (4e9, 20e-6), "torch": (3e9, 200e-6)}
"""Bytes per second and seconds of latency between two ranks on one machine, nominal, by backend."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What the blocks of a model cost on these ranks, and what they hold. Tuples have one entry for each block.

    forward, backward: seconds of one sample on a rank that computes alone. seconds: of a step on the present mesh as
    the model predicts it. state_bytes: of parameters and optimizer states, of one replica.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    output_bytes: tuple[int, ...]
    gradient_bytes: tuple[int, ...]
    cores: float | None
    state_bytes: int
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Packing:
    """A mesh that the run could go to, and its cut. seconds: of a step; None where it cannot be, or is not known."""

    data: int
    pipe: int
    boundaries: tuple[int, ...]
    samples: int
    seconds: float | None
    fits: bool
    reason: str

    @property
    def seconds_per_sample(self) -> float:
        return inf if self.seconds is None else self.seconds / self.samples

    def mesh(self, like: Mesh) -> Mesh:
        return replace(like, data=self.data, pipe=self.pipe)


def work_of(now: Formation, measured: Sequence[Mapping]) -> Work:
    """Times of blocks from what all ranks were busy with since the last transition: measured in all, and shared out
    by the blocks' counted costs."""
    run, engine = now.run, now.engine
    costs, size = engine.stages.costs, max(1, run.batch.microbatch_size // run.mesh.row)
    weights = [cost.weight(now.world.device.type) for cost in costs]
    steps = max((row["steps"] for row in measured), default=0)
    shares = max(1, steps * run.batch.global_size) * run.mesh.stage_size  # of a sample, one for each rank of a stage
    cores = _cores(now, measured)
    threads = torch.get_num_threads()
    share = 1.0 if cores is None else min(1.0, cores / (len(measured) * threads))  # of a core, while others compute
    busy = {name: share * sum(row["busy"].get(name, 0.0) for row in measured) / shares
            for name in ("forward", "backward", "weight")}
    frozen = engine.frozen_blocks
    cached = engine.cached_blocks
    # without a measurement, times in units of the costs: choices compare them, and nobody reads them as seconds
    forward = busy["forward"] / sum(weights[cached:]) if busy["forward"] else 1e-9
    trains = sum(weights[frozen:])
    backward = (busy["backward"] + busy["weight"]) / trains if busy["backward"] and trains else 2 * forward
    itemsize = DTYPES[run.precision].itemsize
    parameters = [0] * engine.layout.num_blocks
    for parameter in engine.layout.parameters:
        if parameter.is_owner:
            parameters[parameter.block] += parameter.numel
    work = Work(forward=tuple(forward * weight for weight in weights),
                backward=tuple(backward * weight for weight in weights),
                output_bytes=tuple(-(-cost.output_bytes // size) for cost in costs),
                gradient_bytes=tuple(itemsize * count for count in parameters),
                cores=None if cores is None else cores / threads / run.mesh.stage_size,
                state_bytes=sum(parameters) * (itemsize + 8))
    present = _exact(run, now, frozen, work, cached, run.mesh.data, run.mesh.pipe, run.batch.global_size)
    return replace(work, seconds=present.seconds)


def _cores(now: Formation, measured: Sequence[Mapping]) -> float | None:
    """Cores of all machines together, by the masks of their ranks: those of one machine are numbered in a row."""
    if now.world.device.type != "cpu":
        return None
    local = now.world.local_size
    return sum(shared_cores([row["cores"] for row in measured[first:first + local]])
               for first in range(0, len(measured), local))


def packings(first: Run, now: Formation, depth: int, work: Work, *, cached: bool,
             batch: Callable[[int], int]) -> list[Packing]:
    """The meshes that the run may go to with `depth` frozen layers, the best first; the present one is among them.

    first: the run as it was started. cached: whether the first stage will read the outputs of frozen layers. batch:
    samples of a step by number of replicas.
    """
    engine, elastic = now.engine, first.elastic
    frozen = frozen_blocks(engine.layers, engine.block_names, depth)
    if elastic.cut == "reference":
        return [_reference(first, now, frozen, work, batch)]
    ranks = first.mesh.data * first.mesh.pipe
    pipes = [pipe for pipe in range(1, ranks + 1) if ranks % pipe == 0]
    meshes = [(ranks // pipe, pipe) for pipe in pipes] if elastic.auto_dp else [
        (now.run.mesh.data, pipe) for pipe in range(1, first.mesh.pipe + 1) if first.mesh.pipe % pipe == 0]
    found = [_exact(first, now, frozen, work, frozen if cached else 0, data, pipe, batch(data))
             for data, pipe in {*meshes, (now.run.mesh.data, now.run.mesh.pipe)}]
    return sorted(found, key=lambda packing: (not packing.fits, packing.seconds_per_sample, -packing.pipe))


def _exact(first: Run, now: Formation, frozen: int, work: Work, cached: int, data: int, pipe: int,
           samples: int) -> Packing:
    """One mesh, cut exactly, with microbatches of the size that the run has."""
    bandwidth, latency = LINKS.get(now.world.backend.name, LINKS["torch"])
    share = -(-samples // data)
    choice: Choice = choices(Situation(
        data=data, pipe=pipe, global_batch=samples, forward_seconds=work.forward, backward_seconds=work.backward,
        output_bytes=work.output_bytes, gradient_bytes=work.gradient_bytes, frozen=frozen, cached=min(cached, frozen),
        cores=work.cores, bandwidth=bandwidth, latency_seconds=latency, auto_pipe=False,
        microbatches=(-(-share // min(share, first.batch.microbatch_size)),)))[0]
    return Packing(data=data, pipe=pipe, boundaries=choice.boundaries, samples=samples, seconds=choice.seconds,
                   fits=choice.fits, reason=choice.reason)


def _reference(first: Run, now: Formation, frozen: int, work: Work, batch: Callable[[int], int]) -> Packing:
    """The article's rule: by parameters alone."""
    itemsize = DTYPES[first.precision].itemsize
    sizes = [size / itemsize / 1e6 for size in work.gradient_bytes]
    largest = max(stage_sizes(sizes, greedy(sizes, first.mesh.pipe)))
    pipe = compress(sizes, now.run.mesh.pipe, frozen, largest)
    data = first.mesh.data * first.mesh.pipe // pipe if first.elastic.auto_dp else now.run.mesh.data
    counts = greedy(sizes, pipe, frozen)
    boundaries = tuple(sum(counts[:stage]) for stage in range(1, pipe))
    return Packing(data=data, pipe=pipe, boundaries=boundaries, samples=batch(data), seconds=None, fits=True,
                   reason="the article's rule")
