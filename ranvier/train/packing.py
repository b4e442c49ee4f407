"""From what a run's ranks have measured to the meshes that AutoPipe may choose: times of blocks, bytes, cores."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf

import torch

from ranvier.elastic.auto_pipe import Choice, Situation, choices, compress, greedy, stage_sizes
from ranvier.elastic.microbatch_profile import MicrobatchProfile, microbatch_counts, size_of
from ranvier.layout import frozen_blocks
from ranvier.machine import shared_cores
from ranvier.mesh import Mesh
from ranvier.optim.rules import rule_of
from ranvier.pipeline.policies import policy_named
from ranvier.precision import DTYPES, is_half, wide
from ranvier.refit import on_mesh
from ranvier.run import Run
from ranvier.train.formation import Formation
from ranvier.train.room import Room

LINKS = {"in-process": (inf, 0.0), "mpi": (4e9, 20e-6), "torch": (3e9, 200e-6)}
"""Bytes per second and seconds of latency between two ranks on one machine, nominal, by backend."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What the blocks of a model cost on these ranks, and what they hold. Tuples have one entry for each block.

    forward, backward: seconds of one sample on a rank that computes alone. update: of the optimizer's step, on a rank
    that has all of the block's states. state_bytes: of the optimizer's states. seconds: of a step on the present mesh
    as the model predicts it.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    update: tuple[float, ...]
    output_bytes: tuple[int, ...]
    gradient_bytes: tuple[int, ...]
    state_bytes: tuple[int, ...]
    cores: float | None
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Packing:
    """A mesh that the run could go to, and its cut. seconds: of a step; None where it cannot be, or is not known.
    too_large: it cannot be because no cut fits the ranks' devices."""

    data: int
    pipe: int
    boundaries: tuple[int, ...]
    samples: int
    seconds: float | None
    fits: bool
    reason: str
    too_large: bool = False

    @property
    def seconds_per_sample(self) -> float:
        return inf if self.seconds is None else self.seconds / self.samples

    def mesh(self, like: Mesh) -> Mesh:
        return replace(like, data=self.data, pipe=self.pipe)


def work_of(now: Formation, measured: Sequence[Mapping], profile: MicrobatchProfile | None = None) -> Work:
    """Times of blocks from what all ranks were busy with since the last transition: measured in all, and shared out
    by the blocks' counted costs, those of the optimizer by their parameters. profile: of the numbers of microbatches,
    where the run goes by it."""
    run, engine = now.run, now.engine
    costs, size = engine.stages.costs, max(1, run.batch.microbatch_size // run.mesh.row)
    weights = [cost.weight(now.world.device.type) for cost in costs]
    steps = max((row["steps"] for row in measured), default=0)
    shares = max(1, steps * run.batch.global_size) * run.mesh.stage_size  # of a sample, one for each rank of a stage
    cores = _cores(now, measured)
    threads = torch.get_num_threads()
    share = 1.0 if cores is None else min(1.0, cores / (len(measured) * threads))  # of a core, while others compute
    busy = {name: share * sum(row["busy"].get(name, 0.0) for row in measured) for name in (
        "forward", "backward", "weight", "optimizer")}
    frozen = engine.frozen_blocks
    cached = engine.cached_blocks
    # without a measurement, times in units of the costs: choices compare them, and nobody reads them as seconds
    forward = busy["forward"] / shares / sum(weights[cached:]) if busy["forward"] else 1e-9
    trains = sum(weights[frozen:])
    backward = (busy["backward"] + busy["weight"]) / shares / trains if busy["backward"] and trains else 2 * forward
    dtype = DTYPES[run.precision]
    parameters = [0] * engine.layout.num_blocks
    for parameter in engine.layout.parameters:
        if parameter.is_owner:
            parameters[parameter.block] += parameter.numel
    states = wide(dtype).itemsize * (len(rule_of(run.optim).states) + is_half(dtype))
    update = _update_seconds(run, busy["optimizer"], steps, sum(parameters[frozen:]))
    work = Work(forward=tuple(forward * weight for weight in weights),
                backward=tuple(backward * weight for weight in weights),
                update=tuple(update * count for count in parameters),
                output_bytes=tuple(-(-cost.output_bytes // size) for cost in costs),
                gradient_bytes=tuple(dtype.itemsize * count for count in parameters),
                state_bytes=tuple(states * count for count in parameters),
                cores=None if cores is None else cores / threads / run.mesh.stage_size)
    present = _exact(run, now, frozen, work, data=run.mesh.data, pipe=run.mesh.pipe, samples=run.batch.global_size,
                     cached=cached, profile=profile)
    return replace(work, seconds=present.seconds)


def _update_seconds(run: Run, busy: float, steps: int, num_parameters: int) -> float:
    """Of one parameter on a rank of a stage that has its states. busy: of all ranks, in `steps` steps."""
    if run.optim.update_in_backward or steps < 1 or not num_parameters:  # the first is measured with the backward
        return 0.0
    holders = 1 if run.optim.shard else run.mesh.data
    return busy / steps / holders / run.mesh.stage_size / num_parameters


def _cores(now: Formation, measured: Sequence[Mapping]) -> float | None:
    """Cores of all machines together, by the masks of their ranks: those of one machine are numbered in a row."""
    if now.world.device.type != "cpu":
        return None
    local = now.world.local_size
    return sum(shared_cores([row["cores"] for row in measured[first:first + local]])
               for first in range(0, len(measured), local))


def packings(first: Run, now: Formation, depth: int, work: Work, *, cached: bool, batch: Callable[[int], int],
             profile: MicrobatchProfile | None = None, room: Room | None = None,
             among: Collection[tuple[int, int]] | None = None) -> list[Packing]:
    """The meshes that the run may go to with `depth` frozen layers, the best first; the present one is among them.

    first: the run as it was started. cached: whether the first stage will read the outputs of frozen layers. batch:
    samples of a step by number of replicas. profile: as for `work_of`. room: what cuts must fit into. among: (data,
    pipe) of the meshes that are looked at, beside the present one; None looks at all.
    """
    engine, elastic = now.engine, first.elastic
    frozen = frozen_blocks(engine.layers, engine.block_names, depth)
    if elastic.cut == "reference":
        return [_reference(first, now, frozen, work, batch)]
    ranks = first.mesh.data * first.mesh.pipe
    pipes = [pipe for pipe in range(1, ranks + 1) if ranks % pipe == 0]
    meshes = [(ranks // pipe, pipe) for pipe in pipes] if elastic.auto_dp else [
        (now.run.mesh.data, pipe) for pipe in range(1, first.mesh.pipe + 1) if first.mesh.pipe % pipe == 0]
    wanted = {mesh for mesh in meshes if among is None or mesh in among} | {(now.run.mesh.data, now.run.mesh.pipe)}
    exact = partial(_exact, first, now, frozen, work, cached=frozen if cached else 0, profile=profile, room=room)
    found = [exact(data=data, pipe=pipe, samples=batch(data)) for data, pipe in wanted]
    return sorted(found, key=lambda packing: (not packing.fits, packing.seconds_per_sample, -packing.pipe))


def _exact(first: Run, now: Formation, frozen: int, work: Work, *, data: int, pipe: int, samples: int, cached: int,
           profile: MicrobatchProfile | None = None, room: Room | None = None) -> Packing:
    """One mesh, cut exactly, with the run's schedule and microbatches of the size that its steps would have."""
    bandwidth, latency = LINKS.get(now.world.backend.name, LINKS["torch"])
    pipeline, share = first.pipeline, -(-samples // data)
    count = -(-share // min(share, first.batch.microbatch_size))
    there = on_mesh(replace(first, batch=replace(first.batch, global_size=samples)),
                    replace(first.mesh, data=data, pipe=pipe))
    best = profile and profile.found(pipe, data, microbatch_counts(pipe, share))
    if best is not None:
        count = best
        there = replace(there, batch=replace(there.batch, microbatch_size=size_of(share, best, first.mesh.row)))
    holders = data if first.optim.shard else 1
    choice: Choice = choices(Situation(
        data=data, pipe=pipe, global_batch=samples, forward_seconds=work.forward, backward_seconds=work.backward,
        update_seconds=tuple(seconds / holders for seconds in work.update),
        output_bytes=work.output_bytes, gradient_bytes=work.gradient_bytes, frozen=frozen, cached=min(cached, frozen),
        cores=work.cores, bandwidth=bandwidth, latency_seconds=latency, auto_pipe=False, microbatches=(count,),
        policy=policy_named(pipeline.policy), in_flight=None if pipeline.in_flight == "auto" else pipeline.in_flight,
        memory_bytes=room and room.stage_bytes(there), limit_bytes=room and room.device_bytes))[0]
    return Packing(data=data, pipe=pipe, boundaries=choice.boundaries, samples=samples, seconds=choice.seconds,
                   fits=choice.fits, reason=choice.reason, too_large=choice.too_large)


def moved_bytes(now: Formation, packing: Packing, work: Work, depth: int) -> int:
    """About what a transition sends from rank to rank: of each block that a rank has not had its parameters and, where
    it goes on training, its optimizer states."""
    frozen = frozen_blocks(now.engine.layers, now.engine.block_names, depth)
    old, new = now.run.mesh, packing.mesh(now.run.mesh)
    holders = new.data if now.run.optim.shard else 1
    sizes = [weights + (states // holders if block >= frozen else 0)
             for block, (weights, states) in enumerate(zip(work.gradient_bytes, work.state_bytes, strict=True))]
    moved = 0
    for rank in range(new.size):
        had = _blocks(now.engine.boundaries, old, rank, len(sizes)) if rank < old.size else range(0)
        moved += sum(sizes[block] for block in _blocks(packing.boundaries, new, rank, len(sizes)) if block not in had)
    return moved // new.stage_size


def _blocks(boundaries: Sequence[int], mesh: Mesh, rank: int, num_blocks: int) -> range:
    """Of a rank on a mesh with this cut."""
    edges, stage = (0, *boundaries, num_blocks), mesh.coordinates(rank).pipe
    return range(edges[stage], edges[stage + 1])


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
