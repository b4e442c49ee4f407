"""The parts of one rank's engine, made from a plan and a checked model.

All ranks make them in the same order: groups open, settings are compared and start values are shared on the way. Parts
are given each other, never the engine: what a part refers to would live on in a circle after `Engine.close`.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import nn

from ranvier.block import Loss, LossBlock, Model, ready_made
from ranvier.comm.protocol import Group
from ranvier.config import rules
from ranvier.config.run import Guard
from ranvier.optim.guard import BadSteps
from ranvier.optim.step import OptimizerFactory, Updater
from ranvier.pipeline.batch import BatchRunner
from ranvier.pipeline.build import build_stage, stage_parameters
from ranvier.pipeline.connections import Connections, share_start_values
from ranvier.pipeline.device_timeline import LookAhead, timeline_of
from ranvier.pipeline.held_parameters import HeldParameters, refuse_left_behind
from ranvier.pipeline.left_values import LeftValues, SameLeft
from ranvier.pipeline.others_parameters import OthersParameters
from ranvier.pipeline.prepared_model import PreparedModel
from ranvier.pipeline.rank_stages import RankStages
from ranvier.pipeline.replica_randomness import ReplicaRandomness
from ranvier.pipeline.same_on_ranks import SameRates, SameTargets, settings_of
from ranvier.pipeline.shared_buffers import BufferSync, SharedBuffers, unused_buffer_sync
from ranvier.pipeline.shared_objects import SharedBufferChanges, StageCopies
from ranvier.pipeline.shared_values import SharedValues
from ranvier.pipeline.stage import Blocks, Stage
from ranvier.pipeline.statistics import BatchStatistics, NominalWeight
from ranvier.pipeline.ties import TiedParameters, TieMessages, gradient_specs, tied_parameters, ties_of
from ranvier.pipeline.trained_elsewhere import TrainedElsewhere
from ranvier.pipeline.users_changes import UsersChanges
from ranvier.plan.cut import split_model
from ranvier.plan.formats import told
from ranvier.plan.plan import Plan
from ranvier.schedule.policies import policy_named
from ranvier.schedule.schedule import Policy
from ranvier.system.machine import has_triton
from ranvier.tensor.float8 import float8_layers
from ranvier.tensor.lookups import lookup_tables
from ranvier.tensor.mesh import TensorMesh
from ranvier.tensor.weight_gradients import WeightGradients
from ranvier.world import World


class _OfStage(NamedTuple):
    """What one stage of this rank computes, and what is looked for in its code (`Stage`)."""

    number: int
    blocks: Blocks
    loss: Loss | None
    left: LeftValues | None
    others: OthersParameters | None


class EngineParts:
    """container: the module in which a user has given the blocks. The other arguments are those of `Engine`."""

    def __init__(self, given: PreparedModel, plan: Plan, world: World, *, container: nn.Module | None,
                 optimizer: OptimizerFactory | None, policy: Policy | None, guard: Guard | None, seed: int,
                 nominal_weight: float | Literal["auto"], buffers: BufferSync, frozen_dropout: bool,
                 compile: bool | Literal["auto"], timeout_seconds: float, check_order: bool) -> None:
        self._given, self._plan, self._world, layout = given, plan, world, plan.layout
        self._at = at = plan.mesh.coordinates(world.rank)
        self.timeline = timeline_of(world.device, plan.mesh, plan.policy)
        samples_over = plan.mesh.over(splits_samples=True)
        self.randomness = ReplicaRandomness(  # ranks in one process share a generator, so that their numbers differ
            0 if world.backend.name == "in-process" else at.index(samples_over), seed, world.device)

        # this rank's part of the model
        self.connections = Connections(world, layout, plan.tensor, check_order=check_order)
        self.model, self.copies = self._split_model(), StageCopies()
        self.blocks, self.cast_buffers = build_stage(self.model, layout, at, seed=seed, dtype=given.dtype,
                                                     device=world.device, copies=self.copies)
        if self.cast_buffers and at.is_first_on_pipeline_rank:
            warnings.warn(told(self.cast_buffers, given.dtype), stacklevel=4)
        self.parameters = stage_parameters(layout, self.blocks)
        self.held = HeldParameters(self.blocks, container, replicas=1 if plan.optim.update_in_backward else
                                   plan.mesh.count(samples_over))
        self.elsewhere = TrainedElsewhere(ready_made(given.model), (name for _, name, _ in self.blocks),
                                          self.parameters.values())

        # the way to other ranks, and the values that start alike on several
        ties, arrived = ties_of(layout, world.rank, self.parameters), TieMessages()
        self.connections.open([peer for tie in ties for peer in tie.peers], capacity_bytes=self._edge_capacity(),
                              timeline=self.timeline, timeout_seconds=timeout_seconds, other=arrived.put,
                              settings=settings_of(
                                  plan.optim, guard, dtype=given.dtype, autocast=given.autocast, float8=given.float8,
                                  nominal_weight=nominal_weight, frozen=given.frozen, frozen_above=given.frozen_above,
                                  buffers=buffers))
        self.timeline.ranks = self.connections.all
        self.ties = TiedParameters(ties, arrived, self.connections.send, self.connections.inbox.wait,
                                   tied_parameters(layout))
        share_start_values(layout, self.blocks, self.parameters, self.connections)
        self.buffers = self._shared_buffers(buffers)
        self.connections.open_splits(layout)

        # what steps need
        stages = [self._of_stage(number) for number in layout.stages.stages_of(at.pipeline_rank)]
        others = [one.others for one in stages if one.others is not None]
        self.statistics = BatchStatistics(
            self.connections.all, SameTargets(at, layout.stages), SameRates(at, own=plan.own_optimizer),
            SameLeft(plan.stages.shared_places, at, layout.stages, [one.left for one in stages if one.left]),
            self.ties, on_device=world.device.type == "cuda")
        tables = lookup_tables(module for _, _, module in self.blocks)
        self.updater = self._build_updater(optimizer, nominal_weight, guard, tables)
        masters = self.updater.masters
        self.elsewhere.note_optimizer(self.updater.users, masters.of.values() if masters is not None else ())
        if (flat := self.updater.flat) is not None:
            refuse_left_behind(flat.left_behind, self.blocks, self.model.loss if stages[-1].loss is not None else None)
        self.ties.send_values(self.connections.board.calls, trained=False)  # parameters have their places in memory
        self.stages = RankStages([self._build_stage(one, seed, compile, tables) for one in stages],
                                 eval_blocks=range(0 if frozen_dropout else given.frozen_blocks))
        self.runner = self._build_runner(policy, nominal_weight)
        self.values = SharedValues(self.updater, self.ties, self.buffers, self.held, self.stages,
                                   self.connections.board)
        self.users_changes = UsersChanges(
            layout, self.parameters, given.names_in_whole, self.updater.gradients, held=self.held,
            elsewhere=self.elsewhere, buffers=SharedBufferChanges(plan.stages.shared_buffers, self.blocks),
            others=others)

    def _split_model(self) -> Model:
        """The model with this rank's part of each block, where several ranks split them."""
        mesh, model = self.connections.tensor_mesh, self._given.model
        if mesh is None:
            return model
        if self._plan.mesh.feature_parts > 1 and self._world.backend.name != "in-process":
            self.randomness.is_compared, mesh.order.drawn = True, self.randomness.drawn
        mesh.autocast = self._given.autocast
        return split_model(model, mesh)

    def _edge_capacity(self) -> int:
        """Room for the largest carried state that crosses a boundary, and its description; 1 MiB when unknown."""
        stages = self._plan.stages
        if stages.costs is None:
            return 1 << 20
        return 4096 + max((stages.costs[cut - 1].output_bytes for cut in stages.boundaries), default=0)

    def _shared_buffers(self, how: BufferSync) -> SharedBuffers:
        """The buffers of this rank's stages, over all ranks that compute their blocks for other samples."""
        connections, mesh = self.connections, self._plan.mesh
        group: Group = connections.data if mesh.microbatch_parts == 1 else connections.group(
            "buffers", mesh.over(splits_samples=True))
        shared = SharedBuffers(self.blocks, group, how)
        if how != "broadcast":
            why = unused_buffer_sync(shared, group, connections.all)
            if why is not None and self._world.rank == 0:
                warnings.warn(f"Engine(buffers={how!r}) has no effect: {why}", stacklevel=5)
        return shared

    def _of_stage(self, number: int) -> _OfStage:
        layout, places = self._plan.layout, self._plan.stages.shared_places
        placement, numbers = layout.stages, layout.blocks(number)
        blocks, loss = [block for block in self.blocks if block[0] in numbers], None
        code = {name for _, name, _ in blocks}
        if number == placement.num_stages - 1:
            last, loss = blocks[-1][2], self.model.loss
            if isinstance(last, LossBlock) and self.connections.tensor_mesh is None:
                loss = last.loss
            code.add("loss")
        left = others = None
        if own := [place for place in places if place.stage == number]:
            here = {place.number for place in places if len({placement.rank_of(one) for one in place.stages}) == 1}
            left = LeftValues(own, blocks, loss, is_alone=placement.per_rank == 1, only_here=here)
        if code := code & self._plan.stages.with_others_parameters:
            others = OthersParameters(self.elsewhere.others, self._given.names_in_whole, {
                name: one for other, block, module in self.blocks if other not in numbers
                for path, one in module.named_parameters()
                if layout[name := f"{block}.{path}"].block not in numbers}, code)
        return _OfStage(number, blocks, loss, left, others)

    def _build_updater(self, optimizer: OptimizerFactory | None, nominal_weight: float | Literal["auto"],
                       guard: Guard | None, tables: set[nn.Parameter]) -> Updater:
        plan, rank, dtype, statistics = self._plan, self._world.rank, self._given.dtype, self.statistics
        ties, connections = self.ties, self.connections
        judges = guard is not None and rules.looks_before_update(guard, plan.optim)
        return Updater(
            gradient_specs(plan.layout, rank, self.parameters, connections.sums, connections.splits, tables=tables),
            connections.data, connections.all, optim=plan.optim, own=plan.own_optimizer, optimizer=optimizer,
            dtype=dtype, device=self._world.device, nominal_weight=1.0 if nominal_weight == "auto" else nominal_weight,
            order=plan.layout.flat_order(rank), runs=plan.chunking.runs.get(self._at.pipeline_rank, ()),
            send_to_owner=lambda spec: ties.send_gradient(spec.name, connections.board.calls),
            weight=statistics.weight, earlier_weight=statistics.earlier_weight, timeline=self.timeline,
            progress=connections.transport.progress,
            bad_loss=partial(statistics.bad_loss, is_scaled=dtype is torch.float16) if guard is None else None,
            bad_steps=BadSteps(guard, statistics.loss) if guard is not None and judges else None)

    def _build_stage(self, one: _OfStage, seed: int, compile: bool | Literal["auto"], tables: set[nn.Parameter]
                     ) -> Stage:
        plan, world, given, updater = self._plan, self._world, self._given, self.updater
        gradients, mesh, pipeline = updater.gradients, self.connections.tensor_mesh, plan.pipeline
        sets_deferral = pipeline.defer_bytes not in ("auto", 0) or any(pipeline.deferred or ())
        known = gradients.chunk_of, gradients.queued, gradients.added, gradients.added_rows
        return Stage(
            one.blocks, loss=one.loss, seed=seed, device=world.device,
            progress=updater.progress if self.connections.needs_progress else None,
            segments=plan.recomputed[one.number], selective=plan.memory.recompute == "selective",
            block_passed=partial(_block_passed, updater, mesh) if mesh is not None or gradients.moves_in_backward
            else None,
            mesh=mesh, compile=compiles(compile, world.device), tables=tables,
            may_wait=plan.mesh.pipeline_size > 1 or sets_deferral,  # under any policy: all agree
            autocast=given.autocast,
            in_float8=float8_layers(self.blocks, len(given.model.blocks), world.device) if given.float8 else (),
            weight_gradients=WeightGradients(*known) if mesh is None else
            WeightGradients(*known, after=mesh.sums.after),
            left=one.left, others=one.others)

    def _build_runner(self, policy: Policy | None, nominal_weight: float | Literal["auto"]) -> BatchRunner:
        plan, placement, pipeline = self._plan, self._plan.layout.stages, self._plan.pipeline
        defer_bytes = None if pipeline.defer_bytes == "auto" else pipeline.defer_bytes
        return BatchRunner(
            placement=placement, at=self._at, stages=self.stages, connections=self.connections,
            updater=self.updater, statistics=self.statistics, timeline=self.timeline,
            policy=policy or policy_named(plan.policy), limits=plan.limits,
            look_ahead=LookAhead(pipeline.look_ahead, device=self._world.device, num_stages=placement.num_stages),
            defer_bytes=0 if self.updater.in_backward else defer_bytes,  # a waiting product holds a block's gradients
            nominal_weight=NominalWeight(self.connections.all) if self._given.dtype is torch.float16 else None,
            takes_nominal_weight=nominal_weight == "auto", forwards_ended=self.held.forwards_ended)


def compiles(how: bool | Literal["auto"], device: torch.device) -> bool | Literal["auto"]:
    """Whether blocks are compiled here, or on several rows or columns their chains of elementwise operations."""
    return how if how is True or (how == "auto" and device.type == "cuda" and has_triton()) else False


def _block_passed(updater: Updater, mesh: TensorMesh | None, block: int) -> None:
    """The last backward of the batch has left `block`, which may be updated while the backward goes on."""
    if mesh is not None and updater.in_backward:
        mesh.order.compare()
    updater.gradients.block_passed(block)
