"""Bytes on each rank, by category, before anything is built: one model for `check`, the start of a run and the report.

    device   parameters   2 or 4 (8) bytes each        host   master      where states are offloaded
             gradients    in the format they add up in        moments
                                                              checkpoint  copies of a rank's share, while it is written
             master       fp32 copies of half-precision parameters
             moments      two of AdamW, one of SGD
             buckets      what streams through (optim.offload), and room for scaled gradients
             activations  of the microbatches that a stage stores
             postponed    operands of weight gradients that wait
             workspace    what the widest block writes on the way
             messages     receives that are posted, and what arrives before its turn
             tensor mesh  what products on several rows and columns gather into, and weights that stay gathered
             reduction    what sums of gradients that travel between replicas work in, and what parameters are sent from
             arriving     small sums of gradients, which all replicas gather

Parameters, gradients, states and buckets are laid out as the run lays them out; the others are bounds, from the
operations of one microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from typing import Literal

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from ranvier import keyed_random, precision
from ranvier.comm.meta import MetaGroup
from ranvier.errors import ConfigError
from ranvier.layout import Layout
from ranvier.models import families
from ranvier.models.block import Model, State, freeze
from ranvier.models.carried_state import named
from ranvier.optim import groups
from ranvier.optim.buckets import buckets_of
from ranvier.optim.gradients import Gradients
from ranvier.optim.optimizer import gather_bytes, resolve_bucket_size
from ranvier.optim.rules import rule_of
from ranvier.pipeline.build import StageTable, cut, meta_mesh, split_model
from ranvier.pipeline.checkpointing import stage_segments
from ranvier.pipeline.microbatch import Microbatch
from ranvier.pipeline.partition import BlockCost, FusedAttention, KeptBytes
from ranvier.pipeline.policies import MANY, auto_defer_microbatches, auto_in_flight, policy_named
from ranvier.pipeline.stage import runs_of
from ranvier.pipeline.ties import gradient_specs
from ranvier.precision import DTYPES
from ranvier.run import Run
from ranvier.tensor.column_tensor import plain
from ranvier.tensor.mesh import TensorMesh, Workspace
from ranvier.tensor.split import SplitLinear

PROCESS_BYTES = 330 << 20
"""Host memory of a rank before it holds anything: interpreter, torch, this package (measured on Linux, CPU build)."""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Predicted peak bytes on each of the `ranks` ranks of stage `pipe`: category -> bytes."""

    pipe: int
    ranks: int
    device: Mapping[str, int]
    host: Mapping[str, int] = field(default_factory=dict)

    @property
    def device_bytes(self) -> int:
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())


def device_kind(run: Run) -> str:
    """cuda, or cpu where that is not said."""
    return "cuda" if run.launch.device == "cuda" else "cpu"


def laid_out(run: Run, frozen: int = 0) -> tuple[StageTable, tuple[RankMemory, ...]]:
    """The cut of the run's model with its first `frozen` layers frozen, and what each stage's ranks need. ConfigError
    when the settings allow no cut."""
    model, stages, layout = _cut_of(run, frozen)
    return stages, predict(run, model, stages, layout)


def _cut_of(run: Run, frozen: int) -> tuple[Model, StageTable, Layout]:
    with torch.device("meta"):
        inputs, targets = families.sample_of(run, run.batch.microbatch_size // run.mesh.row)
    sample = Microbatch(inputs=inputs, targets=targets, samples=torch.arange(1))
    # Replicas do not change the cut, and there may be very many of them.
    model = freeze(families.model_of(run, dtype=DTYPES[run.precision]), frozen)
    stages, layout = cut(model, replace(run.mesh, data=1), boundaries=run.pipeline.boundaries,
                         how=run.pipeline.partition, sample=sample, dtype=DTYPES[run.precision],
                         device=device_kind(run), tensor=run.tensor)
    for problem in groups.problems(run.optim, [parameter.name for parameter in layout.parameters]):
        raise problem
    return model, stages, layout


def predict(run: Run, model: Model, stages: StageTable, layout: Layout, needs: dict | None = None
            ) -> tuple[RankMemory, ...]:
    """One prediction for each stage. `layout` may be that of one replica: replicas differ in nothing. needs: what
    earlier predictions for the same model on the same tensor mesh found; goes on growing."""
    found, known, limit = [], {} if needs is None else needs, _limit(run, layout)
    on_mesh = run.mesh.stage_size > 1 and stages.costs
    buffers, passing, kept = _tensor_mesh(run, model, stages, layout, known) if on_mesh else ({}, {}, {})
    for row in stages.rows:
        costs, segments, runs = _computed(run, model, stages, layout, row.stage, limit)
        first = layout.blocks(row.stage).start
        alike = ("states", run.mesh, run.optim, run.precision, run.launch.device, layout.boundaries,
                 tuple(range(each.start - first, each.stop - first) for each in runs), _likeness(layout, row.stage))
        if alike not in known:
            known[alike] = _states(run, layout, row.stage, runs)
        memory = {name: dict(parts) for name, parts in known[alike].items()}
        if costs:
            memory["device"] |= _activations(run, costs, row.stage, segments, kept, limit)
        if buffers:
            memory["device"]["tensor mesh"] = buffers[row.stage]
            memory["device"]["workspace"] += passing[row.stage]
        found.append(RankMemory(pipe=row.stage, ranks=run.mesh.data * run.mesh.stage_size, **memory))
    return tuple(found)


def device_bytes_of_stages(run: Run, frozen: int = 0) -> Callable[[int, int, int], int]:
    """(stage, start, stop) -> what a rank of that stage needs of its device when it has blocks start .. stop - 1, for
    the search of a cut. ConfigError when the settings allow none.

    As `laid_out` says it, but for what depends on the other stages too: of those before it all but the first are taken
    to have one block (which matters where some of them train nothing), and what products on several rows and columns
    gather into is the most of any stage of the run's own cut.
    """
    model, stages, layout = _cut_of(run, frozen)
    buffers, arriving, kept = _tensor_mesh(run, model, stages, layout, {}) if run.mesh.stage_size > 1 else ({}, {}, {})
    gathered = max(buffers.values(), default=0) + max(arriving.values(), default=0)
    lasting: dict[object, int] = {}

    @cache
    def needed(stage: int, start: int, stop: int) -> int:
        there = replace(layout, boundaries=(*range(start - stage + 1, start + 1),
                                            *range(stop, stop + run.mesh.pipe - stage - 1)))
        limit = _limit(run, there)
        costs, segments, runs = _computed(run, model, stages, there, stage, limit)
        if (start, stop, runs) not in lasting:  # on whichever stage they are
            lasting[start, stop, runs] = sum(_states(run, there, stage, runs)["device"].values())
        passing = _activations(run, costs, stage, segments, kept, limit)
        return lasting[start, stop, runs] + sum(passing.values()) + gathered

    return needed


def _computed(run: Run, model: Model, stages: StageTable, layout: Layout, stage: int, limit: int
              ) -> tuple[Sequence[BlockCost], list[range], tuple[range, ...]]:
    """The costs of a stage's blocks, which runs of them are computed again (as places on the stage), and all its runs
    (as numbers in the model)."""
    blocks = layout.blocks(stage)
    costs = stages.costs[blocks.start:blocks.stop] if stages.costs else ()
    names = tuple(model.blocks)[blocks.start:blocks.stop]
    segments = _segments(run, model, names, costs, stage, limit)
    return costs, segments, tuple(range(blocks.start + places.start, blocks.start + places.stop)
                                  for places, _ in runs_of(len(blocks), segments))


def _likeness(layout: Layout, stage: int) -> object:
    """What the bytes of a stage's states depend on; the stage itself where it has an end of a tie."""
    held, first = layout.parameters_of(stage), layout.blocks(stage).start
    if any(layout.is_tied(p) for p in held):
        return stage
    return tuple((p.block - first, layout.box(p, 0, 0), p.trainable, p.summed, layout.copy_axes(p.name)) for p in held)


def _states(run: Run, layout: Layout, stage: int, runs: Sequence[range]) -> dict[str, dict[str, int]]:
    """What lives from step to step, laid out as the run would: to the byte. Of ends of a tie, one has the states."""
    optim, dtype = run.optim, DTYPES[run.precision]
    half, wide = precision.is_half(dtype), precision.wide(dtype)
    held = {layout.key(p): p for p in layout.parameters_of(stage)}
    shapes = {key: [stop - start for start, stop in layout.box(p, 0, 0)] for key, p in held.items()}  # the largest
    parameters = {key: nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=held[key].trainable)
                  for key, shape in shapes.items()}
    over = {axes: MetaGroup("data", run.mesh.data * prod(getattr(run.mesh, axis) for axis in axes),
                            device=device_kind(run)) for axes in {(), *(p.summed for p in held.values())}}
    specs = [replace(spec, group=over[held[spec.name].summed] if held[spec.name].summed and not spec.sent_to_owner
                     else None, copied=bool(layout.copy_axes(spec.name)))
             for spec in gradient_specs(layout, stage, parameters)]
    bucket_size = resolve_bucket_size(optim, run.launch.device)
    gradients = Gradients(specs, over[()], bucket_size * optim.chunk_buckets, lambda spec: None, allocate=False,
                          dtype=_gradient_dtype(run), reduce_dtype=precision.reduce_dtype(optim, dtype),
                          reuse=runs if optim.update_in_backward else ())
    owned = [chunk for chunk in gradients.chunks if not chunk.sent_to_owner]
    buckets = [bucket for group in buckets_of([chunk.share if optim.shard else (chunk.start, chunk.stop)
                                               for chunk in owned], bucket_size) for bucket in group]
    largest, updated = max(map(len, buckets), default=0), sum(map(len, buckets))
    in_flight = min(optim.buckets_in_flight, len(buckets))
    states = len(rule_of(optim).states)
    offload = "none" if optim.offload == "auto" else optim.offload
    frozen = sum(prod(shapes[key]) for key, p in held.items() if not p.trainable)
    device = {"parameters": (gradients.size + frozen) * dtype.itemsize,
              "gradients": gradients.length * gradients.dtype.itemsize}
    host: dict[str, int] = {}
    home = device if offload == "none" else host
    home["master"] = updated * wide.itemsize if half or offload == "host" else 0
    home["moments"] = updated * wide.itemsize * states
    widened = largest * wide.itemsize if gradients.dtype is not wide else 0
    device["buckets"] = largest * wide.itemsize * (in_flight * (states + half) if offload == "stream" else 0)
    if offload == "host":
        host["staging"] = largest * in_flight * (gradients.dtype.itemsize + dtype.itemsize) + widened
    else:
        device["buckets"] += widened
    owners = [prod(shapes[key]) for key in held if layout[key].block in layout.blocks(stage)]
    host["checkpoint"] = _checkpoint_bytes(run, owners, updated * wide.itemsize * (states + half))
    device["reduction"], device["arriving"] = gradients.reduction_bytes(scatter=optim.shard)
    if optim.shard:
        device["reduction"] += gather_bytes(gradients, dtype.itemsize)
    return {"device": device, "host": host}


def _checkpoint_bytes(run: Run, sizes: Sequence[int], state_bytes: int) -> int:
    """What a rank copies of its parameters (of `sizes`, each end of a tie that is no owner left out) and states when a
    checkpoint is begun, at most: replicas share what all of them hold."""
    share = sum(-(-size // run.mesh.data) for size in sizes)
    states = state_bytes if run.optim.shard else -(-state_bytes // run.mesh.data) + 16 * len(sizes)
    return share * DTYPES[run.precision].itemsize + states + torch.get_rng_state().nbytes


def _gradient_dtype(run: Run) -> torch.dtype:
    dtype = DTYPES[run.precision]
    return precision.wide(dtype) if run.optim.accumulate == "fp32" else dtype


class _AtOnce:
    """A stage's weight gradients, none of which waits."""

    in_pass, postpones, forward_bytes = True, False, 0


def _tensor_mesh(run: Run, model: Model, stages: StageTable, layout: Layout, known: dict
                 ) -> tuple[dict[int, int], dict[int, int], dict[str, int]]:
    """Stage -> bytes that its products work in, and that keep gathered weights; stage -> bytes that sums take while
    they are under way, where members add them; and block -> bytes that its forward
    keeps when it runs again, what it has gathered included. By the code that runs, on a microbatch without values,
    forward and backward through every block."""
    mesh = meta_mesh(run.mesh, run.tensor, device_kind(run))
    part, found, kept_again = split_model(model, mesh), {}, {}
    passing: dict[int, int] = {}
    limit = _limit(run, layout)
    with torch.device("meta"):
        state, targets = families.sample_of(run, run.batch.microbatch_size // run.mesh.row)
    for row in stages.rows:
        largest: dict[object, int] = {}
        blocks, costs = layout.blocks(row.stage), stages.costs
        segments = _segments(run, model, row.blocks, costs[blocks.start:blocks.stop], row.stage, limit)
        recomputed = {place for segment in segments for place in segment}
        gathered = passing[row.stage] = 0
        for place, name in enumerate(row.blocks):
            last = row is stages.rows[-1] and name == row.blocks[-1]
            trains = tuple(p.trainable for p in layout.parameters_of(row.stage) if p.block == blocks.start + place)
            alike = (model.alike.get(name, name), place in recomputed, last, trains, tuple(
                (leaf.shape, leaf.requires_grad) for leaf in tree_leaves(state)))
            if alike not in known:
                known[alike] = _block_needs(run, part, mesh, name, state, targets if last else None,
                                            recomputed=place in recomputed)
            needs = known[alike]
            state, kept_again[name] = needs.state, needs.kept_bytes
            gathered += needs.gathered_bytes
            passing[row.stage] = max(passing[row.stage], needs.arriving_bytes)
            for key, size in needs.workspace.items():
                largest[key] = max(largest.get(key, 0), size)
        found[row.stage] = sum(largest.values()) + gathered
    return found, passing, kept_again


@dataclass(frozen=True, kw_only=True, eq=False)
class _BlockNeeds:
    """What one block takes on a tensor mesh, and the state after it, without values."""

    workspace: dict[object, int]
    gathered_bytes: int
    arriving_bytes: int
    kept_bytes: int
    state: State


def _block_needs(run: Run, part: Model, mesh: TensorMesh, name: str, state: State, targets: object, *,
                 recomputed: bool) -> _BlockNeeds:
    """Forward and backward of a block; with targets it is the last one, and the loss follows."""
    mesh.workspace, gathered, groups = Workspace(), 0, (mesh.over_rows, mesh.over_cols)
    for group in groups:
        group.reset_peak()
    with torch.device("meta"):
        block = part.blocks[name]().to(DTYPES[run.precision])
    for layer in block.modules():
        if isinstance(layer, SplitLinear):
            layer.weight_gradients, layer.recomputed = _AtOnce(), recomputed
            layer.weight.grad_dtype = _gradient_dtype(run)
            layer.weight.grad = torch.empty_like(layer.weight, dtype=_gradient_dtype(run))
            gathered += layer.kept_bytes
    kept = KeptBytes(block.parameters())
    with keyed_random.scope(0, 0, torch.zeros(1, dtype=torch.int64), name), kept, FusedAttention():
        state = block(state)
        kept_bytes = kept.count
        ends = plain(named(state, name)).values() if targets is None else [part.loss(state, targets)[0]]
    wanted = [tensor.sum() for tensor in ends if tensor.requires_grad]
    if wanted:
        sum(wanted).backward()
    return _BlockNeeds(workspace=dict(mesh.workspace.sizes()), gathered_bytes=gathered,
                       arriving_bytes=sum(group.peak_buffer_bytes for group in groups), kept_bytes=kept_bytes,
                       state=tree_map(lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), state))


def _limit(run: Run, layout: Layout) -> int:
    """Most microbatches of a replica on their way."""
    if run.pipeline.in_flight != "auto":
        return run.pipeline.in_flight
    trained = {parameter.block for parameter in layout.parameters if parameter.trainable}
    idle = sum(trained.isdisjoint(layout.blocks(stage)) for stage in range(run.mesh.pipe))
    return auto_in_flight(run.mesh.pipe, idle)


def _segments(run: Run, model: Model, blocks: Sequence[str], costs: Sequence[BlockCost], stage: int,
              limit: int) -> list[range]:
    """The runs of a stage's blocks that are computed again, as places in `blocks`."""
    policy = policy_named(run.pipeline.policy)
    if run.memory.checkpoint == "auto" and not costs:
        return []
    return stage_segments(run.memory.checkpoint, blocks, model.layers, [cost.kept_bytes for cost in costs],
                          [cost.input_bytes for cost in costs],
                          policy.stored(policy.in_flight(limit, MANY), stage, run.mesh.pipe))


def _activations(run: Run, costs: Sequence[BlockCost], stage: int, segments: Sequence[range],
                 kept_again: Mapping[str, int], limit: int) -> dict[str, int]:
    """What the microbatches on their way, `limit` at most, keep alive on a stage of these blocks. kept_again: block ->
    what it keeps when it is recomputed, where that differs."""
    mesh, policy = run.mesh, policy_named(run.pipeline.policy)
    share = -(-run.batch.global_size // mesh.data)
    count = -(-share // run.batch.microbatch_size)
    stored = min(policy.stored(policy.in_flight(limit, count), stage, mesh.pipe), count)
    kept = [cost.kept_bytes for cost in costs]
    inside = {place for segment in segments for place in segment}
    outside = sum(kept[place] for place in range(len(kept)) if place not in inside)
    recomputed = max((sum(kept_again.get(costs[place].name, kept[place]) for place in segment)
                      for segment in segments), default=0)
    waiting = 0
    if policy.defers and not run.optim.update_in_backward:
        last = len(kept) - 1 if stage == mesh.pipe - 1 else len(kept)  # the head, whose gradients never wait
        operands = sum(kept[place] for place in range(last) if place not in inside and costs[place].flops)
        most = count - stored  # a microbatch of the batch is on its way or postponed, not both
        waiting = (min(most, auto_defer_microbatches(stage, mesh.pipe)) * operands
                   if run.pipeline.defer_bytes == "auto" else run.pipeline.defer_bytes)
    entering = costs[0].input_bytes if stage else 0
    leaving = costs[-1].output_bytes if stage < mesh.pipe - 1 else 0
    return {"activations": stored * (outside + sum(costs[segment.start].input_bytes for segment in segments))
            + recomputed,
            "postponed": waiting,
            "workspace": max(cost.allocated_bytes for cost in costs),
            "messages": (limit + 1) * entering + 2 * leaving}


def too_large(memory: Sequence[RankMemory], *, place: Literal["device", "host", "both"], processes: int,
              available_bytes: int, run: Run, process_bytes: int = 0) -> ConfigError | None:
    """What is wrong where these ranks need more than there is, and what would help, the least costly first.

    Args:
        memory: one entry for each rank that shares a machine.
        place: what is compared: the dearest rank's device, the host for all ranks, or (a CPU as the device) both.
        processes: ranks that share `available_bytes`. process_bytes: what each takes beside its tensors.
    """
    def needed(entry: RankMemory) -> int:
        return (process_bytes + (entry.device_bytes if place != "host" else 0)
                + (entry.host_bytes if place != "device" else 0))

    worst = max(memory, key=needed)
    total = sum(map(needed, memory)) if processes > 1 else needed(worst)
    if total <= available_bytes:
        return None
    who = f"{processes} ranks here need" if processes > 1 else f"a rank of stage {worst.pipe} needs"
    return ConfigError(f"does not suffice: {who} {total / 2**20:,.0f} MiB, and there are "
                       f"{available_bytes / 2**20:,.0f}; of stage {worst.pipe}: {_table_line(worst)}",
                       where=f"memory of the {'device' if place == 'device' else 'machine'}",
                       remedy="In this order: " + "; ".join(remedies(run, shared=place == "both")) + ".")


def _table_line(entry: RankMemory) -> str:
    parts = {**entry.device, **{f"host {name}": size for name, size in entry.host.items()}}
    return ", ".join(f"{name} {size / 2**20:,.0f} MiB" for name, size in parts.items() if size)


def remedies(run: Run, *, shared: bool) -> list[str]:
    """What would need less memory, the least costly first. shared: device and host are the same memory."""
    found = []
    if run.batch.microbatch_size > 1:
        found.append(f"lower --batch.microbatch-size (it is {run.batch.microbatch_size})")
    if run.memory.checkpoint == "none":
        found.append("set --memory.checkpoint auto")
    if run.mesh.data > 1 and not run.optim.shard:
        found.append("set --optim.shard true")
    if run.precision in ("fp32", "fp64"):
        found.append("set --precision bf16")
    if not shared and run.optim.offload in ("none", "auto"):
        found.append("set --optim.offload stream")
    found.append("raise --mesh.pipe, with more ranks")
    return found
