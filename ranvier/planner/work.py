"""The blocks of a run's model, counted once for each tensor mesh and microbatch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from ranvier.block import Model, freeze
from ranvier.config.resolve import ResolvedRun
from ranvier.config.rules import check_boundaries
from ranvier.cost.blocks import BlockCost, ById, Repeated, selectively
from ranvier.cost.device_overhead import usable_bytes
from ranvier.cost.hardware import Cluster
from ranvier.cost.kernels import Kernels, extrapolate
from ranvier.cost.memory import PROCESS_BYTES, RankMemory, too_large
from ranvier.errors import ConfigError, RanvierError
from ranvier.mesh import Mesh
from ranvier.models import families
from ranvier.plan.block_costs import block_costs, build_on_meta, known_or_counted
from ranvier.plan.cut import Parts, meta_mesh, split_model
from ranvier.plan.kernel_count import Counting, counting_of
from ranvier.plan.partition import partition_for, uniform
from ranvier.planner.count import Needs, device_bytes_of_stages
from ranvier.planner.count import predict as predict_memory
from ranvier.precision import DTYPES

_MOST_COUNTED = 4
"""Samples of a row up to which blocks are counted directly: with more, products are large, and panels full."""


class Work:
    """The blocks of a run's model as in the run, counted once for each tensor mesh and microbatch."""

    def __init__(self) -> None:
        self._counted: dict[object, list[BlockCost]] = {}
        self._selective: dict[int, list[BlockCost]] = {}
        """Counts with selective recomputation, by the identity of those in `_counted`."""
        self._cuts: dict[object, tuple[int, ...]] = {}
        self._models: dict[object, tuple[Model, Mapping[str, nn.Module]]] = {}
        self._parts: dict[object, tuple[Model, Parts]] = {}
        self._needs: dict[object, Needs] = {}
        self._memories: dict[object, tuple[RankMemory, ...]] = {}
        self._stage_bytes: dict[object, Callable[[int, int, int], int]] = {}

    def blocks(self, run: ResolvedRun, frozen: int = 0) -> list[BlockCost]:
        """Each block's cost on one rank of the run's tensor mesh, for its microbatch."""
        share = -(-run.batch.microbatch_size // run.mesh.microbatch_parts)
        blocks = self._share_costs(run, share, frozen)
        if run.memory.recompute != "selective":
            return blocks
        if id(blocks) not in self._selective:
            self._selective[id(blocks)] = selectively(blocks)
        return self._selective[id(blocks)]

    def _share_costs(self, run: ResolvedRun, share: int, frozen: int) -> list[BlockCost]:
        """Costs of the blocks for `share` samples of a row."""
        key = _kind(run), _counting(run), frozen, share
        if key not in self._counted:
            self._counted[key] = _count(run, share, frozen) if share <= _MOST_COUNTED else _all_larger(
                self._share_costs(run, _MOST_COUNTED // 2, frozen),
                self._share_costs(run, _MOST_COUNTED, frozen), share)
        return self._counted[key]

    def stages(self, run: ResolvedRun, frozen: int = 0) -> list[list[BlockCost]]:
        """The blocks of each stage, by the run's own cut."""
        blocks = self.blocks(run, frozen)
        return [blocks[start:stop] for start, stop in pairwise([0, *self.boundaries(run, frozen), len(blocks)])]

    def boundaries(self, run: ResolvedRun, frozen: int = 0) -> tuple[int, ...]:
        """First block of each stage after the first, by the run's own cut with `frozen` frozen layers."""
        cut = run.placement, run.pipeline.boundaries, run.pipeline.partition
        key = _kind(run), _counting(run), frozen, run.batch.microbatch_size, cut
        if key not in self._cuts:
            self._cuts[key] = _cut(run, self.blocks(run, frozen), frozen > 0)
        return self._cuts[key]

    def memory(self, run: ResolvedRun, frozen: int = 0, *, cluster: Cluster | None = None) -> tuple[RankMemory, ...]:
        """Memory as predicted by `ranvier check`, with the blocks that are already counted. cluster: as for
        `conditions_of`."""
        key = run, frozen, ById(cluster)
        if key not in self._memories:
            self._memories[key] = self._memory(run, frozen, cluster)
        return self._memories[key]

    def _memory(self, run: ResolvedRun, frozen: int, cluster: Cluster | None) -> tuple[RankMemory, ...]:
        kind = _kind(run), frozen
        if kind not in self._parts:
            whole = run.precision, run.model, run.lora, *_data(run), frozen
            if whole not in self._models:
                model = freeze(families.model_of(run, dtype=DTYPES[run.precision]), frozen)
                self._models[whole] = model, build_on_meta(model)
            model, modules = self._models[whole]
            self._parts[kind] = model, Parts(model, run.mesh, run.tensor, run.device_type, modules)
        model, parts = self._parts[kind]
        table, layout = parts.cut(run.mesh.shaped(num_replicas=1), self.blocks(run, frozen),
                                  boundaries=self.boundaries(run, frozen), how="cost", placement=run.placement)
        return predict_memory(run, model, table, layout, self._needs.setdefault(kind, {}), cluster=cluster)

    def problem(self, run: ResolvedRun, cluster: Cluster, frozen: int = 0) -> RanvierError | None:
        """Why the run does not fit the cluster; None if it fits."""
        try:
            return shortage(run, cluster, self.memory(run, frozen, cluster=cluster))
        except RanvierError as error:
            return error

    def stage_bytes(self, run: ResolvedRun, frozen: int) -> Callable[[int, int, int], int]:
        """`device_bytes_of_stages`, cached for each run and number of frozen layers."""
        key = _kind(run), run.mesh, run.batch, run.pipeline, run.optim, run.memory, frozen
        if key not in self._stage_bytes:
            self._stage_bytes[key] = device_bytes_of_stages(run, frozen)
        return self._stage_bytes[key]


def _kind(run: ResolvedRun) -> object:
    """Key of the facts that determine one rank's part of each block, without the microbatch."""
    sizes = tuple(run.mesh[axis] for axis in run.mesh.stage_axes)
    return sizes, run.tensor, run.precision, run.model, run.lora, _data(run), run.device_type


def _data(run: ResolvedRun) -> tuple[object, ...]:
    """Settings of the data on which a model depends."""
    return run.data.task, run.data.options, run.data.packing


def _cut(run: ResolvedRun, blocks: Sequence[BlockCost], freezes: bool) -> tuple[int, ...]:
    """The cut into stages. freezes: cut like AutoPipe, for which a block without a backward costs a third."""
    num_stages = run.placement.num_stages
    if run.pipeline.boundaries is not None:
        return check_boundaries(run.pipeline.boundaries, len(blocks), num_stages)
    if run.pipeline.partition == "uniform":
        return uniform(len(blocks), num_stages)
    device = run.device_type
    begins = next((place for place, block in enumerate(blocks) if block.num_trainable), len(blocks)) if freezes else 0
    return partition_for([block.weight(device) / (3 if place < begins else 1) for place, block in enumerate(blocks)],
                         run.placement)


def _count(run: ResolvedRun, share: int, frozen: int) -> list[BlockCost]:
    with torch.device("meta"):
        inputs, targets = families.sample_of(run, share)
    model, counting = freeze(families.model_of(run, dtype=DTYPES[run.precision]), frozen), _counting(run)

    def count() -> list[BlockCost]:
        split = model if run.mesh.stage_size == 1 else split_model(
            model, meta_mesh(run.mesh, run.tensor, run.device_type))
        return block_costs(split, inputs, targets, DTYPES[run.precision], counting)

    return list(known_or_counted(model, (inputs, targets), (_kind(run), counting), count))


def _counting(run: ResolvedRun) -> Counting:
    return counting_of(run, device=run.device_type, stage_size=run.mesh.stage_size)


_GROWING = ("flops", "written_bytes", "forward_bytes", "backward_bytes", "kept_bytes", "loss_bytes",
            "loss_forward_bytes", "loss_backward_bytes", "target_bytes", "operand_bytes", "input_bytes",
            "unsaved_input_bytes", "output_bytes")


def _all_larger(half: Sequence[BlockCost], most: Sequence[BlockCost], share: int) -> list[BlockCost]:
    """`_larger` of all blocks. Equal blocks share their kernels as one object, whose time is computed once."""
    kernels: dict[int, Kernels] = {}
    further = (share - _MOST_COUNTED) / (_MOST_COUNTED / 2)
    for less, more in zip(half, most, strict=True):
        if id(more.kernels) not in kernels:
            for fewer, own in ((less.kernels, more.kernels), (less.repeated.kernels, more.repeated.kernels)):
                kernels[id(own)] = extrapolate(fewer, own, further)
    return [_larger(less, more, further, kernels) for less, more in zip(half, most, strict=True)]


def _larger(half: BlockCost, most: BlockCost, further: float, kernels: Mapping[int, Kernels]) -> BlockCost:
    """A block's cost for more samples of a row, extrapolated from those for half of `_MOST_COUNTED` and for all of it:
    its sums grow linearly, and its kernels are the same number, each larger."""
    products = tuple((tokens + round(further * (tokens - fewer)), inputs, outputs) for (fewer, *_), (
        tokens, inputs, outputs) in zip(half.float8_products, most.float8_products, strict=True))

    def larger(less: object, more: object, *names: str) -> dict[str, Any]:
        return {name: getattr(more, name) + round(further * (getattr(more, name) - getattr(less, name)))
                for name in names}

    repeated = Repeated(kernels=kernels[id(most.repeated.kernels)], **larger(
        half.repeated, most.repeated, "kept_bytes", "inside_bytes", "written_bytes"))
    return replace(most, float8_products=products, kernels=kernels[id(most.kernels)], repeated=repeated,
                   **larger(half, most, *_GROWING))


def excess(run: ResolvedRun, cluster: Cluster, memory: Sequence[RankMemory]) -> str:
    """Description of the memory that these ranks need beyond the cluster's; empty if they fit."""
    problem = shortage(run, cluster, memory)
    return f"{problem.where} {problem.what}" if problem is not None else ""


def shortage(run: ResolvedRun, cluster: Cluster, memory: Sequence[RankMemory]) -> ConfigError | None:
    """The error for memory that these ranks need beyond the cluster's; None if they fit."""
    on_cpu, device, problem = cluster.device.cores is not None, cluster.device, None
    if not on_cpu:
        problem = too_large(memory, place="device", processes=1, run=run,
                            available_bytes=usable_bytes(device))
    for here in _on_nodes(run.mesh, cluster.devices_per_node):
        problem = problem or too_large([memory[stage] for stage in here], place="both" if on_cpu else "host", run=run,
                                       processes=len(here), available_bytes=cluster.host.memory_bytes,
                                       process_bytes=PROCESS_BYTES)
    return problem


def _on_nodes(mesh: Mesh, per_node: int) -> set[tuple[int, ...]]:
    """The stages of the ranks of a node, for every kind of node."""
    found, seen, first = set(), set(), 0
    while first < mesh.size and (place := first % (mesh.pipeline_size * mesh.stage_size)) not in seen:
        seen.add(place)
        ranks = range(first, min(first + per_node, mesh.size))
        found.add(tuple(sorted(rank // mesh.stage_size % mesh.pipeline_size for rank in ranks)))
        first += per_node
    return found
