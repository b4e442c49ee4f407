"""The facts on which the choice of a mesh depends, from the measurements of a run's ranks: times, bytes, cores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

import torch

from ranvier.elastic.inputs import LINKS, BlockFacts, ElasticRules, PresentMesh
from ranvier.elastic.mesh_candidates import with_present_seconds
from ranvier.elastic.microbatch_profile import MicrobatchProfile
from ranvier.optim.rules import rules_of, states_per_element
from ranvier.precision import DTYPES, is_half, wide
from ranvier.system.machine import shared_cores
from ranvier.train.runtime import RankRuntime


class RankMeasurement(TypedDict):
    """Measurements of one rank since the last transition."""

    busy: Mapping[str, float]
    """Seconds by category of span."""
    steps: int
    """Number of steps over which `busy` adds up."""
    cores: Sequence[int]
    """Cores that the rank may use."""
    device_bytes: int | None
    """Bytes of its device that it may use; None where device and host are the same memory."""


def present_mesh(runtime: RankRuntime) -> PresentMesh:
    """The run's present mesh and cut."""
    engine = runtime.engine
    return PresentMesh(mesh=runtime.run.mesh, boundaries=tuple(engine.boundaries), frozen=runtime.frozen.prefix,
                       cached_blocks=engine.cached_blocks, global_size=runtime.run.samples_of(1),
                       layers=tuple(tuple(layer) for layer in engine.layers), block_names=tuple(engine.block_names))


def measured_blocks(runtime: RankRuntime, measured: Sequence[RankMeasurement], profile: MicrobatchProfile | None = None
                    ) -> BlockFacts:
    """Times of blocks from the busy times of all ranks since the last transition: totals are measured and divided among
    the blocks by counted costs, those of the optimizer by parameters. profile: times by number of microbatches, if the
    run uses them."""
    run, engine = runtime.run, runtime.engine
    costs, size = engine.stages.costs or (), max(1, run.batch.microbatch_size // run.mesh.microbatch_parts)
    weights = [cost.weight(runtime.world.device.type) for cost in costs]
    steps = max((row["steps"] for row in measured), default=0)
    shares = max(1, run.samples_of(steps)) * run.mesh.stage_size  # parts of samples, one for each rank of a stage
    cores = _cores(runtime, measured)
    threads = torch.get_num_threads()
    share = 1.0 if cores is None else min(1.0, cores / (len(measured) * threads))  # of a core, while others compute
    busy = {name: share * sum(row["busy"].get(name, 0.0) for row in measured) for name in (
        "forward", "backward", "weight", "optimizer")}
    frozen = engine.frozen_blocks
    cached = engine.cached_blocks
    # without a measurement, times in units of the costs: choices only compare them, and never use them as seconds
    forward = busy["forward"] / shares / sum(weights[cached:]) if busy["forward"] else 1e-9
    trains = sum(weights[frozen:])
    backward = (busy["backward"] + busy["weight"]) / shares / trains if busy["backward"] and trains else 2 * forward
    dtype = DTYPES[run.precision]
    parameters = [0] * engine.layout.num_blocks
    for parameter in engine.layout.parameters:
        if parameter.is_owner:
            parameters[parameter.block] += parameter.numel
    kept = states_per_element(rules_of(run.optim), engine.layout.parameters)
    states = round(wide(dtype).itemsize * (kept + is_half(dtype)))
    holders, trained = 1 if run.optim.shard else run.mesh.num_replicas, sum(parameters[frozen:])
    update = 0.0  # seconds of one parameter on a rank of a stage that has its states
    if not run.optim.update_in_backward and steps >= 1 and trained:  # else measured with the backward, or not at all
        update = busy["optimizer"] / steps / holders / run.mesh.stage_size / trained
    bandwidth, latency = LINKS.get(runtime.world.backend.name, LINKS["torch"])
    facts = BlockFacts(
        forward_seconds=tuple(forward * weight for weight in weights),
        backward_seconds=tuple(backward * weight for weight in weights),
        update_seconds=tuple(update * count for count in parameters),
        output_bytes=tuple(-(-cost.output_bytes // size) for cost in costs), num_parameters=tuple(parameters),
        parameter_bytes=tuple(dtype.itemsize * count for count in parameters),
        state_bytes=tuple(states * count for count in parameters),
        cores=None if cores is None else cores / threads / run.mesh.stage_size, bandwidth=bandwidth,
        latency_seconds=latency)
    return with_present_seconds(facts, ElasticRules(run), present_mesh(runtime), profile)


def stage_seconds(runtime: RankRuntime, measured: Sequence[RankMeasurement]) -> tuple[float, ...]:
    """Seconds that a rank of each stage computed in a step, on average since the last transition; 0.0 without a
    measurement."""
    found = [0.0] * runtime.run.mesh.pipeline_size
    for rank, row in enumerate(measured):
        busy = sum(row["busy"].get(name, 0.0) for name in ("forward", "backward", "weight"))
        found[runtime.run.mesh.coordinates(rank).pipeline_rank] += busy / max(1, row["steps"])
    return tuple(seconds * runtime.run.mesh.pipeline_size / runtime.run.mesh.size for seconds in found)


def _cores(runtime: RankRuntime, measured: Sequence[RankMeasurement]) -> float | None:
    """Cores of all machines together, by the masks of their ranks: a machine's ranks have consecutive numbers."""
    if runtime.world.device.type != "cpu":
        return None
    local = runtime.world.local_size
    return sum(shared_cores([row["cores"] for row in measured[first:first + local]])
               for first in range(0, len(measured), local))
