"""Sizes of a run's model before anything is built: its cut into stages, and the bytes on each rank by category.

They are counted by running the model's own code on the meta device: the same for `check`, the start of a run, the
planner and the report. The arithmetic on these counts is in `ranvier.cost.memory`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain, starmap
from math import prod
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ranvier import precision
from ranvier.block import Model, State, as_named_tensors, freeze, meta_device
from ranvier.comm.meta import MetaGroup
from ranvier.comm.nccl_transport import SLOTS
from ranvier.config.resolve import ResolvedRun
from ranvier.config.resolve import bucket_size as resolve_bucket_size
from ranvier.config.rules import looks_before_update
from ranvier.cost.blocks import BlockCost, Stages
from ranvier.cost.hardware import Cluster
from ranvier.cost.memory import (
    KEPT_STEPS,
    RankMemory,
    StoredMicrobatches,
    TiedGradients,
    activation_bytes,
    checkpoint_bytes,
)
from ranvier.layout import Chunking, Layout, Parameter
from ranvier.models import families
from ranvier.optim.buckets import Bucket
from ranvier.optim.gradients import Gradients
from ranvier.optim.optimizer import FlatOptimizer, gather_bytes, state_places, storage_bytes, tensors_by_category
from ranvier.optim.rules import averages_of, rules_of, skips_by_itself, working_bytes
from ranvier.pipeline.ties import gradient_specs
from ranvier.plan.block_costs import (
    FusedAttention,
    KeptBytes,
    Known,
    build_on_meta,
    loss_scratch_bytes,
    numeric_mask_bytes,
)
from ranvier.plan.cut import StageTable, meta_mesh, split_model
from ranvier.plan.formats import BlockFormats
from ranvier.plan.kernel_count import counting_of
from ranvier.plan.limits import MemoryChoice, memory_choices, queues_products, run_limits, stages_at_peak
from ranvier.plan.live_bytes import LiveBytes
from ranvier.plan.plan import Plan, make_for_run, whole_parameters
from ranvier.plan.recomputation import recomputed_segments, runs_of
from ranvier.planner.conditions import conditions_of
from ranvier.precision import DTYPES
from ranvier.schedule.limits import Limits, rule_limits
from ranvier.schedule.policies import policy_named
from ranvier.system.compilation import without_compiler
from ranvier.system.pinned_memory import pinned_bytes
from ranvier.tensor import float8
from ranvier.tensor.columns import on_local, plain
from ranvier.tensor.meta_mesh import MetaMesh, NoCounter
from ranvier.tensor.overlapped_transfers import WeightUse
from ranvier.tensor.quantized_weight import dequantization_bytes, quantized_bytes
from ranvier.tensor.split.linear import SplitLinear, SplitVocabularyLinear
from ranvier.tensor.split.loss import overwrites_logits
from ranvier.tensor.weight_gradients import WeightGradients, root_of

Needs = dict[object, Any]
"""Cache of partial results of predictions for one model on one tensor mesh, by the facts on which they depend."""
_CANDIDATES = 4
"""Number of replicas with most elements among which the one with most bytes is chosen."""


def laid_out(run: ResolvedRun, frozen: int = 0, frozen_above: Sequence[int] = (), *, cluster: Cluster | None = None
             ) -> tuple[StageTable, tuple[RankMemory, ...]]:
    """The cut of the run's model with its first `frozen` layers and the weights of `frozen_above` frozen, and the
    memory of each stage's ranks. cluster: as for `conditions_of`. ConfigError if the settings allow no cut."""
    def found() -> tuple[StageTable, tuple[RankMemory, ...]]:
        model, plan = _plan_replica(run, frozen, frozen_above, cluster)
        return plan.stages, predict(run, model, plan.stages, plan.layout, cluster=cluster, limits=plan.limits)

    return _laid_out.get((run, frozen, tuple(frozen_above), cluster), found)


_laid_out = Known[tuple[StageTable, tuple[RankMemory, ...]]](16)


def _plan_replica(run: ResolvedRun, frozen: int, frozen_above: Sequence[int], cluster: Cluster | None = None
                  ) -> tuple[Model, Plan]:
    """Model and plan of one replica: there may be very many replicas, which change neither cut nor limits."""
    with torch.device("meta"):
        sample = families.sample_of(run, run.row_microbatch_size)
    model = freeze(families.model_of(run, dtype=DTYPES[run.precision]), frozen, frozen_above)
    return model, make_for_run(run, model, sample, mesh=run.mesh.shaped(num_replicas=1),
                               conditions=partial(conditions_of, run, cluster=cluster))


def predict(run: ResolvedRun, model: Model, stages: StageTable, layout: Layout, needs: Needs | None = None, *,
            limits: Limits | None = None, cluster: Cluster | None = None
            ) -> tuple[RankMemory, ...]:
    """One prediction for each index along `pipe`. `layout` may be that of one replica: replicas do not differ. needs: a
    cache of results of predictions for the same model on the same tensor mesh, to which this one adds. limits: the
    schedule's, if known. cluster: as for `conditions_of`."""
    found: list[RankMemory] = []
    known = {} if needs is None else needs
    counted = stages.stage_costs()
    again = recomputed_runs(run, counted)
    conditions = conditions_of(run, counted, again, cluster)
    limits = limits or run_limits(run, counted, again, conditions)
    peaks = stages_at_peak(run, counted, limits, again, conditions)
    on_mesh = _MeshMemory() if run.mesh.stage_size == 1 else _mesh_memory(run, model, stages, layout, known)
    if "untrained" not in known:
        known["untrained"] = _untrained(run, model)
    untrained: _Untrained = known["untrained"]
    for pipe in range(run.mesh.pipeline_size):
        held = layout.stages.stages_of(pipe)
        runs = tuple(each for stage in held for each in _runs_of_stage(layout, stage, again[stage]))
        first = layout.blocks_on(pipe)[0]
        alike = (run.mesh, run.guard, run.precision, run.checkpoint, run.launch, run.train.eval_ema, tuple(
            range(each.start - first, each.stop - first) for each in runs if run.optim.update_in_backward),
            _likeness(layout, pipe), untrained.on_rank(layout, pipe))
        states = "states", run.optim, *alike
        if states not in known:
            gradients = "gradients", replace(run.optim, offload="none", offload_share="auto"), *alike
            known[states] = _state_bytes(run, layout, pipe, runs, untrained, known.setdefault(gradients, {}))
        lasting: _StateBytes = known[states]
        device = dict(lasting.device) | _sum_stages(run, [
            _activations(run, counted[stage], layout, stage, again[stage], on_mesh, limits,
                         None if peaks is None else peaks[stage], lasting.updates, untrained) for stage in held])
        device["workspace"] += _bytes_beyond_backward(
            lasting, device, [cost for stage in held for cost in counted[stage]], on_mesh)
        if on_mesh.buffers:
            device["tensor mesh"] = on_mesh.buffers[pipe]
            device["workspace"] += on_mesh.passing[pipe]
        found.append(RankMemory(pipeline_rank=pipe, ranks=run.mesh.num_replicas * run.mesh.stage_size, device=device,
                                host=dict(lasting.host)))
    return tuple(found)


def _bytes_beyond_backward(states: _StateBytes, working: Mapping[str, int], costs: Sequence[BlockCost],
                           on_mesh: _MeshMemory
                           ) -> int:
    """Bytes that the end of a step, or an evaluation with averages in place of the parameters, needs beyond those of
    the backward, whose memory is free by then."""
    evaluation = states.averaged + max(cost.kept_bytes + cost.loss_bytes + max(
        on_mesh.working.get(cost.name, cost.forward_bytes), cost.loss_forward_bytes) for cost in costs)
    needed = max(states.at_end, evaluation if states.averaged else 0)
    return max(0, needed - sum(working[name] for name in ("workspace", "activations", "deferred")))


def _sum_stages(run: ResolvedRun, stages: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Bytes that all stages of a rank keep alive; one stage computes at a time. A budget in bytes is for the rank."""
    found = {name: sum(stage[name] for stage in stages) for name in stages[0]}
    computing = max(stages, key=lambda stage: stage["recomputed"] + stage["workspace"])
    found["workspace"] = computing["workspace"]
    found["activations"] += computing["recomputed"]
    del found["recomputed"]
    if run.pipeline.defer_bytes != "auto":
        found["deferred"] = max(stage["deferred"] for stage in stages)
    return found


def device_bytes_of_stages(run: ResolvedRun, frozen: int = 0, frozen_above: Sequence[int] = ()
                           ) -> Callable[[int, int, int], int]:
    """(stage, start, stop) -> bytes of its device that a rank of that stage needs with blocks start .. stop - 1, for
    the search of a cut. ConfigError if the settings allow no cut.

    The bytes are those of `laid_out`, except where they depend on other stages: all earlier stages except the first are
    assumed to have one block (which matters if some of them train nothing), and gather buffers of products on several
    rows and columns are the largest of any stage of the run's own cut. The schedule's limits follow the rule, since
    simulated limits depend on all stages; `pipeline.memory` bounds the additional memory of simulated limits, and the
    cut that is found is counted completely.
    """
    model, plan = _plan_replica(run, frozen, frozen_above)
    stages, layout = plan.stages, plan.layout
    on_mesh = _MeshMemory() if run.mesh.stage_size == 1 else _mesh_memory(run, model, stages, layout, {})
    gathered = max(on_mesh.buffers.values(), default=0) + max(on_mesh.passing.values(), default=0)
    lasting: dict[object, _StateBytes] = {}
    untrained = _untrained(run, model)

    @cache
    def needed(stage: int, start: int, stop: int) -> int:
        there = replace(layout, boundaries=(*range(start - stage + 1, start + 1),
                                            *range(stop, stop + run.mesh.pipeline_size - stage - 1)))
        costs = replace(stages, boundaries=there.boundaries).stage_costs()
        limits = _rule_limits(run, costs)
        segments = _segments(run, costs, stage, limits)
        runs = _runs_of_stage(there, stage, segments)
        if (start, stop, runs) not in lasting:  # on whichever stage they are
            lasting[start, stop, runs] = _state_bytes(run, there, stage, runs, untrained)
        states = lasting[start, stop, runs]
        passing = _sum_stages(run, [_activations(run, costs[stage], there, stage, segments, on_mesh, limits, None,
                                                 states.updates, untrained)])
        return (sum(states.device.values()) + _bytes_beyond_backward(states, passing, costs[stage], on_mesh)
                + sum(passing.values()) + gathered)

    return needed


def _runs_of_stage(layout: Layout, stage: int, segments: Sequence[range]) -> tuple[range, ...]:
    """All runs of a stage's blocks, as block numbers in the model. segments: recomputed runs, as places on the
    stage."""
    blocks = layout.blocks(stage)
    return tuple(range(blocks.start + places.start, blocks.start + places.stop)
                 for places, _ in runs_of(len(blocks), segments))


def _likeness(layout: Layout, pipe: int) -> object:
    """Key of the facts that determine the bytes of ranks' states; with an end of a tie, also their place in the
    model."""
    held, first = layout.parameters_of(pipe), layout.blocks_on(pipe)[0]
    if any(layout.is_tied(p) for p in held):
        return pipe, layout.boundaries
    return tuple((p.block - first, layout.box(p, layout.mesh.positions[0]), p.trainable, p.summed, p.quantized,
                  layout.copy_axes(p.name)) for p in held)


@dataclass(frozen=True, kw_only=True)
class _Untrained:
    """Buffers, and frozen parameters in fp32, of the model's blocks, which no layout contains.

    buffers: of each block, on the meta device in their number formats; a buffer of several blocks is one tensor. saved:
    those that checkpoints contain. in_fp32: names of parameters that stay in fp32.
    """

    buffers: Sequence[Sequence[Tensor]]
    saved: Sequence[Sequence[Tensor]]
    in_fp32: frozenset[str]

    def on_rank(self, layout: Layout, pipe: int) -> tuple[int, tuple[int, ...], frozenset[str]]:
        """For a rank's blocks: bytes of all buffers, bytes of each buffer that checkpoints contain, and `in_fp32`."""
        blocks = layout.blocks_on(pipe)
        return (storage_bytes([buffer for block in blocks for buffer in self.buffers[block]]),
                tuple(buffer.nbytes for block in blocks for buffer in self.saved[block]), self.in_fp32)


def _untrained(run: ResolvedRun, model: Model) -> _Untrained:
    modules, on_meta = build_on_meta(model), dict[tuple[int, torch.dtype], Tensor]()
    if run.mesh.stage_size > 1 and any(True for module in modules.values() for _ in module.buffers()):
        modules = build_on_meta(split_model(model, meta_mesh(run.mesh, run.tensor, run.device_type)))
    buffers, saved, in_fp32 = list[list[Tensor]](), list[list[Tensor]](), set[str]()
    for block, module in modules.items():
        formats = BlockFormats.from_block(model, block, module, DTYPES[run.precision])
        in_fp32 |= {f"{block}.{name}" for name in formats.kept}
        parameters = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
        buffers.append([])
        saved.append([])
        for path, part in module.named_modules():
            for name, buffer in part.named_buffers(recurse=False):
                dtype = formats.format_of(f"{path}.{name}".removeprefix("."), buffer)
                like = on_meta.setdefault((id(buffer), dtype), torch.empty_like(buffer, dtype=dtype, device="meta"))
                if buffer.untyped_storage()._cdata not in parameters:  # it is not a view of one
                    buffers[-1].append(like)
                if name not in part._non_persistent_buffers_set:
                    saved[-1].append(like)
    return _Untrained(buffers=buffers, saved=saved, in_fp32=frozenset(in_fp32))


@dataclass(frozen=True, kw_only=True)
class _StateBytes:
    """Bytes that persist between steps on a rank, and those that updates need in addition.

    device, host: category -> bytes. at_end: bytes on the device when all backwards have run. updates: place of a block
    among those of the rank -> bytes on the device when it is updated, which is after its own backward. averaged: bytes
    of parameters that an evaluation keeps while averages are in their place.
    """

    device: Mapping[str, int]
    host: Mapping[str, int]
    at_end: int
    updates: Mapping[int, int]
    averaged: int


def _state_bytes(run: ResolvedRun, layout: Layout, pipe: int, runs: Sequence[range], untrained: _Untrained,
                 known: dict[tuple[int, int], Gradients] | None = None) -> _StateBytes:
    """Bytes that persist between steps, laid out as the run would, exactly. Of ends of a tie, one has the states.
    known: gradients of earlier calls that differ in nothing but the offload, to which this one adds."""
    rank = _RankStates(run, layout, pipe, runs, {} if known is None else known)
    persistent = tensors_by_category([], rank.gradients, rank.optimizer)
    device, host = ({name: storage_bytes(tensors) for name, tensors in persistent[place].items()}
                    for place in ("device", "host"))
    buffers, saved, in_fp32 = untrained.on_rank(layout, pipe)
    device["parameters"] += rank.frozen_bytes(in_fp32)
    device["buckets"] += rank.conversion_bytes()
    parameters, *states = (device.get(name, 0) + host.get(name, 0)
                           for name in ("parameters", "moments", "average", "master"))
    host["checkpoint"] = rank.copied_for_checkpoint(states, saved, in_fp32)
    if run.launch.survive_losses:
        copies = 2 if run.optim.shard and run.mesh.num_replicas > 1 else 1
        host["copies"] = KEPT_STEPS * (parameters + sum(saved) + sum(states) * copies)
    device["parameters"] += buffers
    if run.device_type == "cuda":
        pinned = [tensor.nbytes for tensors in persistent["host"].values() for tensor in tensors]
        pinned += [host["checkpoint"]] if run.checkpoint.background else []
        host["rounding"] = sum(pinned_bytes(size) - size for size in pinned)
    at_end, updates, host["workspace"] = rank.update_bytes()
    device["reduction"], passing = rank.reduction_bytes()
    if len(rank.gradients.chunks) == 1 and not run.optim.update_in_backward:
        at_end, passing = max(at_end, passing), 0  # all gradients are there when its sum begins
    device["arriving"] = passing
    if run.mesh.count(run.mesh.over(splits_samples=True)) > 1:  # these ranks send each other their buffers
        at_end += buffers
    averaged = storage_bytes([rank.optimizer.weights]) if run.train.eval_ema and averages_of(run.optim) else 0
    host = {name: size for name, size in host.items() if size or name not in ("staging", "workspace")}
    return _StateBytes(device=device, host=host, at_end=at_end, updates=updates, averaged=averaged)


class _RankStates:
    """Gradients and optimizer states of a rank on the meta device: of the replica that needs most. Arguments are those
    of `_state_bytes`."""

    def __init__(self, run: ResolvedRun, layout: Layout, pipe: int, runs: Sequence[range],
                 known: dict[tuple[int, int], Gradients]) -> None:
        if whole := whole_parameters(run.optim, layout):
            layout = replace(layout, chunking=Chunking(chunk_size=1, whole=whole))
        self._run, self._layout, self._pipe, self._runs, self._known = run, layout, pipe, runs, known
        self._dtype, self._optim = DTYPES[run.precision], run.optim
        self._wide, self._rules = precision.wide(self._dtype), rules_of(run.optim, self._dtype)
        self._held = {layout.key(p): p for p in layout.parameters_of(pipe)}
        self._shapes = {key: [stop - start for start, stop in layout.box(p, layout.mesh.positions[0])]  # the largest
                        for key, p in self._held.items()}
        self._bucket_size = resolve_bucket_size(run.optim, run.launch.device)
        self._offload = "none" if run.optim.offload == "auto" else run.optim.offload
        self.gradients, self.optimizer = self._member()
        self._has_owners = any(chunk.shares is not None for chunk in self.gradients.chunks)
        if run.optim.shard and self._has_owners:
            self.gradients, self.optimizer = max(starmap(self._member, _members_with_most(self.gradients)),
                                                 key=lambda states: _lasting_bytes(*states))
        self._largest_bucket = max((bucket.stop - bucket.start for bucket in self.optimizer.buckets), default=0)

    def _member(self, member: int = 0, members: int = 1) -> tuple[Gradients, FlatOptimizer]:
        """The states of a member of the largest group, which has `members`."""
        if (member, members) not in self._known:
            self._known[member, members] = self._gradients_of(member, members)
        gradients, share = self._known[member, members], self._optim.offload_share
        optim = replace(self._optim, offload_share=0.5 if share == "auto" else share)
        return gradients, FlatOptimizer(optim, gradients, offload=self._offload, bucket_size=self._bucket_size)

    def _gradients_of(self, member: int, members: int) -> Gradients:
        """Gradients of one member of the largest group, which in smaller groups is at the same relative position."""
        run, optim, layout = self._run, self._optim, self._layout
        over = {axes: MetaGroup("data", size, member * size // members, device=run.device_type)
                for axes in {(), *(p.summed for p in self._held.values())}
                for size in [run.mesh.num_replicas * run.mesh.count(axes)]}
        parameters = {key: nn.Parameter(torch.empty(shape, dtype=self._dtype, device="meta"),
                                        requires_grad=self._held[key].trainable) for key, shape in self._shapes.items()}
        rank = layout.mesh.rank(layout.mesh.place(pipeline_rank=self._pipe))
        return Gradients(gradient_specs(layout, rank, parameters, over), over[()],
                         self._bucket_size * optim.chunk_buckets, lambda spec: None, dtype=_gradient_dtype(run),
                         reduce_dtype=precision.reduce_dtype(optim, self._dtype),
                         reuse=self._runs if optim.update_in_backward else (), shard=optim.shard)

    def _frozen(self) -> dict[object, tuple[Parameter, int]]:
        """The frozen parameters, and their elements here."""
        return {key: (p, prod(self._shapes[key])) for key, p in self._held.items() if not p.trainable}

    def frozen_bytes(self, in_fp32: Collection[str]) -> int:
        """Bytes of the frozen parameters."""
        return sum(_stored_bytes(elements, p.quantized, torch.float32 if p.name in in_fp32 else self._dtype)
                   for p, elements in self._frozen().values())

    def conversion_bytes(self) -> int:
        """Bytes of the bucket in which half-precision gradients become fp32; the first update allocates it."""
        if self.gradients.dtype is self._wide or self._offload == "host":
            return 0
        return self._largest_bucket * self._wide.itemsize

    def copied_for_checkpoint(self, states: Sequence[int], saved: Sequence[int], in_fp32: Collection[str]) -> int:
        """Bytes in host memory while a checkpoint is written. states: bytes of moments, averages and masters. saved: of
        each buffer in it."""
        owners = [prod(self._shapes[key]) for key in self._held
                  if self._layout.pipe_of(self._layout[key].block) == self._pipe]
        if not self._run.checkpoint.background:
            return max(max(owners, default=0) * self._wide.itemsize, *saved, 0)
        in_fp32_bytes = sum((4 - self._dtype.itemsize) * -(-elements // self._run.mesh.num_replicas)
                            for p, elements in self._frozen().values() if p.name in in_fp32)
        whole_bytes = self._wide.itemsize * sum(
            prod(shape) for spec in self.gradients.owned_specs() for shape in self._rules.state_shapes(
                spec.rule_name, spec.whole_shape, in_layer=spec.in_layer).values() if shape is not None)
        return checkpoint_bytes(
            owners, more_bytes=sum(saved) + in_fp32_bytes,
            state_bytes=sum(states if precision.is_half(self._dtype) else states[:2]),
            element_bytes=self._dtype.itemsize, data=self._run.mesh.num_replicas, sharded=self._optim.shard,
            updated=sum(map(len, self.optimizer.buckets)) if self._has_owners else 0, whole_bytes=whole_bytes,
            random_state_bytes=torch.get_rng_state().nbytes)

    def update_bytes(self) -> tuple[int, dict[int, int], int]:
        """Bytes that updates need: on the device when all backwards have run; on the device after the backward of a
        block, by its place among those of the rank; and on the host, if it updates for a GPU."""
        specs, width = self.gradients.owned_specs(), self._wide.itemsize
        copied = _skipped_elements(self._run, self.gradients, self.optimizer.buckets)
        by_bucket = copied or self._offload in ("stream", "host") or self.gradients.dtype is not self._wide
        most = self._largest_bucket if by_bucket else self.optimizer.largest_piece
        if self._run.device_type == "cuda" and self._offload == "host":
            return width * copied, {}, width * copied + working_bytes(self._rules, specs, most, width)
        if not self._optim.update_in_backward:
            return width * copied + working_bytes(self._rules, specs, most, width), {}, 0
        first, updates = self._layout.blocks_on(self._pipe)[0], dict[int, int]()
        for chunk in (chunk for chunk in self.gradients.chunks if not chunk.sent_to_owner):
            start, stop = chunk.share
            place = (min(block for spec in chunk.specs for block in spec.blocks) if chunk.run is None
                     else chunk.run.start) - first
            updates[place] = max(updates.get(place, 0), width * copied + working_bytes(
                self._rules, chunk.specs, min(most, stop - start), width))
        return width * copied, updates, 0

    def reduction_bytes(self) -> tuple[int, int]:
        """Bytes of reductions and gathers: those that persist, and those that are allocated while one is in flight."""
        reductions, scatters = self.gradients.reductions, self._optim.shard and not self._has_owners
        lasting, passing = reductions.bytes(scatter=scatters)
        gathers = gather_bytes(self.gradients, self._dtype.itemsize) if self._optim.shard else 0
        return lasting + gathers, passing + reductions.widened_bytes(scatter=scatters)


def _skipped_elements(run: ResolvedRun, gradients: Gradients, buckets: list[Bucket]) -> int:
    """Number of elements that an update copies at a time, if only the device knows whether the update is skipped."""
    optim = run.optim
    if run.device_type != "cuda" or optim.offload == "host" or not (
            looks_before_update(run.guard, optim) or run.precision == "fp16"):
        return 0
    largest, rules = max(map(len, buckets), default=0), rules_of(optim, DTYPES[run.precision])
    if skips_by_itself(rules):
        return largest if averages_of(optim) else 0
    return largest + sum(state_places(gradients, rules, buckets).largest(buckets).values())


def _stored_bytes(elements: int, quantized: str | None, dtype: torch.dtype) -> int:
    return elements * dtype.itemsize if quantized is None else quantized_bytes(elements, quantized, dtype)


def _lasting_bytes(gradients: Gradients, optimizer: FlatOptimizer) -> int:
    return sum(storage_bytes(tensors) for categories in tensors_by_category([], gradients, optimizer).values()
               for tensors in categories.values())


def _members_with_most(gradients: Gradients) -> list[tuple[int, int]]:
    """(member, members of the largest group) of the few members that update most elements of tensors with owners."""
    chunks = [chunk for chunk in gradients.chunks if not chunk.sent_to_owner]
    members = max((len(chunk.group.ranks) for chunk in chunks), default=1)
    shares = [chunk.shares or (chunk.share,) for chunk in chunks]
    elements = [sum(stop - start for own in shares for start, stop in [own[member * len(own) // members]])
                for member in range(members)]
    return [(member, members) for member in sorted(range(members), key=elements.__getitem__)[-_CANDIDATES:]]


def _gradient_dtype(run: ResolvedRun) -> torch.dtype:
    dtype = DTYPES[run.precision]
    return precision.wide(dtype) if run.optim.accumulate == "fp32" else dtype


class _ImmediateWeightGradients:
    """A stage's weight gradients, none of which is deferred."""

    defers, last, forward_bytes = False, True, 0

    def in_pass(self) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class _MeshMemory:
    """Memory of products on a tensor mesh.

    buffers: index along `pipe` -> bytes of work buffers of products, and of gathered weights that are kept. passing:
    index along `pipe` -> bytes of weight gradients that are summed over rows once per batch, and of a bundle's weight
    as one matrix. kept_again: block -> bytes that its recomputed forward keeps, including gathered ones. working: block
    -> most bytes of its forward and its backward in addition to those.
    """

    buffers: Mapping[int, int] = field(default_factory=dict)
    passing: Mapping[int, int] = field(default_factory=dict)
    kept_again: Mapping[str, int] = field(default_factory=dict)
    working: Mapping[str, int] = field(default_factory=dict)


def _mesh_memory(run: ResolvedRun, model: Model, stages: StageTable, layout: Layout, known: Needs) -> _MeshMemory:
    """Memory of products on the tensor mesh: runs forward and backward of every block on a microbatch on the meta
    device."""
    mesh = meta_mesh(run.mesh, run.tensor, run.device_type)
    part, kept_again, working = split_model(model, mesh), dict[str, int](), dict[str, int]()
    gathered, passing = (dict.fromkeys(range(run.mesh.pipeline_size), 0) for _ in range(2))
    largest: list[dict[tuple[str, torch.dtype], int]] = [{} for _ in range(run.mesh.pipeline_size)]
    uses: list[list[WeightUse]] = [[] for _ in range(run.mesh.pipeline_size)]
    with torch.device("meta"):
        state, targets = families.sample_of(run, run.row_microbatch_size)
    costs = stages.stage_costs()
    again = recomputed_runs(run, costs)
    parameters: dict[int, list[Parameter]] = {block: [] for block in range(layout.num_blocks)}
    for parameter in layout.parameters:
        parameters[parameter.block].append(parameter)
    for row in stages.rows:
        blocks, pipe = layout.blocks(row.stage), row.pipeline_rank
        recomputed = {*chain(*again[row.stage])} if run.memory.recompute != "selective" else set[int]()
        times = Counter(layout.key(p) for block in blocks for p in parameters[block])
        for place, name in enumerate(row.blocks):
            last = row is stages.rows[-1] and name == row.blocks[-1]
            here = parameters[blocks.start + place]
            trains, shares = tuple(p.trainable for p in here), any(times[layout.key(p)] > 1 for p in here)
            alike = (model.alike.get(name, name), place in recomputed, last, trains, shares, tuple(
                (leaf.shape, leaf.requires_grad) for leaf in tree_leaves(plain(state))))
            if alike not in known:
                known[alike] = _block_needs(run, part, mesh, name, state, targets if last else None,
                                            recomputed=place in recomputed, shares=shares)
            needs = known[alike]
            state = needs.state
            working[name] = needs.working_bytes
            if last:  # the certain part of the loss's working memory
                cost = costs[row.stage][place]
                logits = cost.output_bytes if overwrites_logits(part.loss) else 0  # kept by the loss
                working[name] = max(working[name], needs.cast_bytes + max(
                    cost.forward_bytes - logits, cost.loss_forward_bytes))
            if place in recomputed:
                kept_again[name] = needs.kept_bytes
            gathered[pipe] += needs.gathered_bytes
            passing[pipe] += needs.unreduced_bytes if run.num_microbatches > 1 else 0
            uses[pipe] += needs.uses
            for key, size in needs.workspace.items():
                largest[pipe][key] = max(largest[pipe].get(key, 0), size)
    for pipe, (sizes, of_pipe) in enumerate(zip(largest, uses, strict=True)):
        backward = of_pipe[::-1]
        for key, size in (*mesh.bundle_sizes(of_pipe).items(), *mesh.bundle_sizes(backward).items()):
            sizes[key] = max(sizes.get(key, 0), size)
        passing[pipe] += max(map(mesh.bundled_matrix_bytes, (of_pipe, backward)))
    found = {pipe: sum(sizes.values()) + gathered[pipe] for pipe, sizes in enumerate(largest)}
    return _MeshMemory(buffers=found, passing=passing, kept_again=kept_again, working=working)


@dataclass(frozen=True, kw_only=True, eq=False)
class _BlockMemory:
    """Memory of one block on a tensor mesh, and the state after it, on the meta device."""

    workspace: dict[tuple[str, torch.dtype], int]
    uses: list[WeightUse]
    gathered_bytes: int
    unreduced_bytes: int
    kept_bytes: int
    working_bytes: int
    cast_bytes: int
    state: State


@without_compiler()
def _block_needs(run: ResolvedRun, part: Model, mesh: MetaMesh, name: str, state: State, targets: object, *,
                 recomputed: bool, shares: bool) -> _BlockMemory:
    """Run forward and backward of a block; with targets it is the last block, and the loss follows. shares: whether it
    shares a parameter with another block of the stage."""
    gathered, unreduced, uses, dtype = 0, 0, list[WeightUse](), DTYPES[run.precision]
    mesh.workspace.clear()
    with meta_device():
        block = part.blocks[name]().to(dtype)
    for parameter in block.parameters():
        parameter.grad_dtype = _gradient_dtype(run)
        parameter.grad = torch.empty_like(parameter, dtype=_gradient_dtype(run)) if parameter.requires_grad else None
    for layer in block.modules():
        if isinstance(layer, SplitLinear):
            layer.weight_gradients = cast(WeightGradients, _ImmediateWeightGradients())  # has all that a layer reads
            layer.recomputed = recomputed
            layer.has_own_weights = not (shares and isinstance(layer, SplitVocabularyLinear))
            gathered += layer.kept_bytes
            uses += layer.weight_uses
            unreduced += layer.unreduced_bytes
    counting = counting_of(run, device=run.device_type, stage_size=run.mesh.stage_size)
    once, live = mesh.like_panels_once, LiveBytes(counting, dtype)
    kept = KeptBytes(block.parameters())
    entering = tree_map(partial(on_local, lambda x: x.detach().requires_grad_(x.requires_grad)), state)
    # A recomputed layer keeps all panels that it gathers; those of the backward must have the same lengths.
    with live, nullcontext() if counting.has_scores else FusedAttention():
        state = tree_map(partial(on_local, lambda x: x.clone()), entering)  # freed when nothing keeps it
        with kept, nullcontext() if recomputed else once(NoCounter()):
            state = block(state)
            ends = ([*plain(as_named_tensors(state, name)).values()] if targets is None
                    else [part.loss(state, targets)[0]])
        kept_bytes = kept.count
        working = live.peak_bytes() - kept_bytes
        numbers = numeric_mask_bytes(kept.masks, counting, dtype)
        leaving = tree_map(partial(on_local, lambda x: torch.empty_like(x, requires_grad=x.requires_grad)), state)
        roots = [(root_of(end), torch.empty_like(end)) for end in ends if end.requires_grad]
        live.tag([gradient for _, gradient in roots], "activations")
        del kept, state, ends
        live.reset_peak()
        with once(NoCounter(), only_equal=recomputed):
            if roots:
                torch.autograd.backward([root for root, _ in roots], [gradient for _, gradient in roots])
            mesh.sums.finish()
        working = max(working, live.peak_bytes() - kept_bytes)
    if targets is not None:
        working -= loss_scratch_bytes(part.loss, leaving, counting)
    return _BlockMemory(workspace=dict(mesh.workspace.sizes()), uses=uses, gathered_bytes=gathered,
                        unreduced_bytes=unreduced, kept_bytes=kept_bytes + numbers, working_bytes=working,
                        cast_bytes=live.most_cast, state=leaving)


def _rule_limits(run: ResolvedRun, stages: Stages) -> Limits:
    """Limits of the pipeline by the rule."""
    rule = rule_limits([any(block.num_trainable for block in blocks) for blocks in stages], run.placement)
    return rule.with_user_limits(run.pipeline.in_flight, run.pipeline.deferred, run.pipeline.defer_last)


def recomputed_runs(run: ResolvedRun, stages: Stages) -> list[list[range]]:
    """For each stage, the runs of its blocks (places on the stage) that are recomputed. They follow from the rule's
    limits, as in the engine, since simulated limits depend on them."""
    rule = _rule_limits(run, stages)
    return [_segments(run, stages, stage, rule) for stage in range(len(stages))]


def _segments(run: ResolvedRun, stages: Stages, stage: int, rule: Limits) -> list[range]:
    return recomputed_segments(run.memory.recompute, [block.name for block in stages[stage]], families.layers_of(run),
                               stages[stage], policy_named(run.pipeline.policy), rule.in_flight, (stage, len(stages)))


def memory_curve(run: ResolvedRun, table: StageTable, cluster: Cluster | None = None) -> tuple[MemoryChoice, ...]:
    """Memory against speed of a run with this cut (`memory_choices`)."""
    costs = table.stage_costs()
    segments = recomputed_runs(run, costs)
    return memory_choices(run, costs, segments, conditions_of(run, costs, segments, cluster))


def _gradient_bytes(run: ResolvedRun, costs: Sequence[BlockCost], segments: Sequence[range], num_stages: int
                    ) -> list[int]:
    """`gradients` of `activation_bytes`. Autograd has a gradient in the parameter's format, then in that of the sums;
    linear layers that are not recomputed add theirs in one product, but for half precision on a CPU, and for layers of
    torch itself that are not queued. The first of two gradients of a tied parameter waits for the second one, and then
    for their sum, all in the format of the sums."""
    each, wide, inside = DTYPES[run.precision].itemsize, _gradient_dtype(run).itemsize, {*chain(*segments)}
    by_autograd = each + (wide if wide > each else 0)
    by_layer = each if wide > each and run.device_type != "cuda" else 0
    queued = queues_products(run.pipeline, run.mesh.pipeline_size)
    found = [max(cost.table_elements * by_autograd, 0 if queued else cost.plain_elements * by_autograd,
                 cost.weight_elements * (by_autograd if place in inside else by_layer))
             for place, cost in enumerate(costs)]
    waiting = _tied_gradient_bytes(run, costs, num_stages)
    return [3 * waiting if waiting and not place else one + waiting for place, one in enumerate(found)]


def _tied_gradient_bytes(run: ResolvedRun, costs: Sequence[BlockCost], num_stages: int) -> int:
    """Bytes of the first gradients of tied parameters until the backward reaches their other ends."""
    tied = costs[-1].num_trainable - costs[-1].num_owned if num_stages == 1 else 0
    return tied * max(DTYPES[run.precision].itemsize, _gradient_dtype(run).itemsize)


def _tied_gradients(run: ResolvedRun, layout: Layout, stage: int) -> TiedGradients:
    """Gradients of a stage's tied parameters. The owners' values return after the last backward."""
    blocks, sent, arriving, distance = layout.blocks(stage), Counter[int](), 0, 1
    itemsize = max(_gradient_dtype(run).itemsize, DTYPES[run.precision].itemsize)
    known = set[tuple[int, str]]()
    for end in layout.parameters:  # in model order: the backward reaches the first block of an end last
        if end.is_owner or not end.trainable:
            continue
        home, place = layout[end.owner].block, (layout.pipe_of(end.block), layout.key(end))
        if place[0] == layout.pipe_of(home) or place in known or not {home, end.block} & {*blocks}:
            continue
        known.add(place)
        size = itemsize * prod(stop - start for start, stop in layout.box(end, layout.mesh.positions[0]))
        if end.block in blocks:
            sent[end.block - blocks.start] += size
        else:
            arriving, distance = arriving + size, max(distance, layout.stage_of(end.block) - stage)
    return TiedGradients(sent=sent, arriving=arriving, distance=distance)


def _largest_values(run: ResolvedRun, layout: Layout, stage: int) -> list[int]:
    """For each block of a stage, peak bytes of the dequantized values of its largest quantized weight, for a
    product."""
    found = dict.fromkeys(layout.blocks(stage), 0)
    for p in layout.parameters_of(layout.stages.rank_of(stage)):
        if p.quantized is not None and p.block in found:
            elements = prod(stop - start for start, stop in layout.box(p, layout.mesh.positions[0]))
            found[p.block] = max(found[p.block], dequantization_bytes(elements, p.quantized, DTYPES[run.precision]))
    return list(found.values())


def _activations(run: ResolvedRun, costs: Sequence[BlockCost], layout: Layout, stage: int, segments: Sequence[range],
                 on_mesh: _MeshMemory, limits: Limits, at_peak: tuple[int, float] | None, updates: Mapping[int, int],
                 untrained: _Untrained) -> dict[str, int]:
    """Bytes that the microbatches in flight keep alive on a stage of these blocks. at_peak: as of `StoredMicrobatches`.
    updates: as of `_StateBytes`."""
    num_stages = layout.stages.num_stages
    gradients = [0] * len(costs) if on_mesh.working else _gradient_bytes(run, costs, segments, num_stages)
    if on_mesh.working:
        costs = [replace(cost, forward_bytes=working, backward_bytes=working, loss_forward_bytes=working
                         if cost.loss_bytes else 0, loss_backward_bytes=0)
                 for cost in costs for working in [on_mesh.working[cost.name]]]
    costs = [replace(cost, forward_bytes=cost.forward_bytes + values, backward_bytes=cost.backward_bytes + values)
             for cost, values in zip(costs, _largest_values(run, layout, stage), strict=True)]
    stored = StoredMicrobatches(run=run, stage=stage, limits=limits, at_peak=at_peak)
    before = layout.blocks(stage).start - layout.blocks_on(layout.stages.rank_of(stage))[0]
    here = {place - before: size for place, size in updates.items() if 0 <= place - before < len(costs)}
    waiting = _tied_gradient_bytes(run, costs, num_stages)
    found = activation_bytes(costs, segments, stored, on_mesh.kept_again, gradients,
                             _tied_gradients(run, layout, stage),
                             {place: size + (waiting if place else 0) for place, size in here.items()},
                             [storage_bytes(untrained.buffers[block]) for block in layout.blocks(stage)])
    if run.model.float8:  # all blocks but the model's first and last
        inner = costs[not stage:len(costs) - (stage == num_stages - 1)]
        found["workspace"] += max((float8.working_bytes(*product, DTYPES[run.precision].itemsize) for cost in inner
                                   for product in cost.float8_products), default=0)
    given = (0 if stage else costs[0].input_bytes) + costs[-1].target_bytes  # the loader has those of an entire step
    found["inputs"] = given * run.num_microbatches * (2 if run.device_type == "cuda" else 1)  # and the next step's
    if run.device_type == "cuda":  # forwards arrive from the stage before, gradients of outputs from the next one
        found["messages"] += SLOTS * ((costs[0].input_bytes if stage else 0)
                                      + (costs[-1].output_bytes if stage < num_stages - 1 else 0))
    return found
