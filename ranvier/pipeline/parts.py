"""The parts of one rank's engine, made from a plan and a checked model.

All ranks make them in the same order: groups open, settings are compared and start values are shared on the way. Parts
are given each other, never the engine: what a part refers to would live on in a circle after `Engine.close`.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Literal

import torch
from torch import nn

from ranvier.block import LossBlock, Model, ready_made
from ranvier.comm.protocol import Group
from ranvier.config import rules
from ranvier.config.run import Guard
from ranvier.optim.elementwise import refuse_coupled
from ranvier.optim.guard import BadSteps
from ranvier.optim.step import OptimizerFactory, Updater
from ranvier.optim.torch_functions import refuse_initializers, warn_of_norms
from ranvier.pipeline.batch import BatchRunner
from ranvier.pipeline.buffer_sync import BufferSync, ReplicaBuffers
from ranvier.pipeline.build import StageCopies, build_stage, stage_parameters
from ranvier.pipeline.connections import Connections, share_start_values
from ranvier.pipeline.device_timeline import timeline_of
from ranvier.pipeline.held_parameters import HeldParameters, refuse_left_behind
from ranvier.pipeline.left_values import LeftValues, SameLeft
from ranvier.pipeline.prepared_model import PreparedModel
from ranvier.pipeline.rank_stages import RankStages
from ranvier.pipeline.replica_randomness import ReplicaRandomness
from ranvier.pipeline.same_on_ranks import SameRates, SameTargets, settings_of
from ranvier.pipeline.shared_values import SharedValues
from ranvier.pipeline.stage import Stage
from ranvier.pipeline.statistics import BatchStatistics, NominalWeight
from ranvier.pipeline.ties import TiedParameters, TieMessages, gradient_specs, tied_parameters, ties_of
from ranvier.pipeline.trained_elsewhere import OthersParameters, TrainedElsewhere
from ranvier.pipeline.users_changes import SharedBufferChanges, UsersChanges
from ranvier.plan.cut import split_model
from ranvier.plan.formats import told
from ranvier.plan.plan import Plan
from ranvier.schedule.schedule import Policy
from ranvier.system.machine import has_triton
from ranvier.tensor.deferred_linear import lookup_tables
from ranvier.tensor.float8 import float8_layers
from ranvier.tensor.mesh import TensorMesh
from ranvier.tensor.weight_gradients import WeightGradients
from ranvier.world import World


class EngineParts:
    """container: the module in which a user has given the blocks. The other arguments are those of `Engine`."""

    def __init__(self, given: PreparedModel, plan: Plan, world: World, *, container: nn.Module | None,
                 optimizer: OptimizerFactory | None, policy: Policy | None, guard: Guard | None, seed: int,
                 nominal_weight: float | Literal["auto"], buffers: BufferSync, frozen_dropout: bool,
                 compile: bool | Literal["auto"], timeout_seconds: float, check_order: bool) -> None:
        self._given, self._plan, self._world, layout = given, plan, world, plan.layout
        self._at = at = plan.mesh.coordinates(world.rank)
        numbers, last = layout.stages.stages_of(at.pipeline_rank), layout.stages.num_stages - 1
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
        self.elsewhere = TrainedElsewhere(ready_made(given.model), (name for _, name, _ in self.blocks),
                                          self.parameters.values(),
                                          splits=self.connections.tensor_mesh is not None)
        self.held = HeldParameters(
            self.blocks, container, others=self.elsewhere.others,
            owners={one.name: one.owner for one in layout.parameters},
            replicas=1 if plan.optim.update_in_backward else plan.mesh.count(samples_over))

        # the way to other ranks, and the values that start alike on several
        ties, arrived = ties_of(layout, world.rank, self.parameters), TieMessages()
        settings = settings_of(plan, guard, dtype=given.dtype, autocast=given.autocast, float8=given.float8,
                               nominal_weight=nominal_weight, frozen=given.frozen, frozen_above=given.frozen_above,
                               buffers=buffers)
        largest = 1 << 20 if plan.stages.costs is None else 4096 + max(  # of the carried state, and its description
            (plan.stages.costs[cut - 1].output_bytes for cut in plan.stages.boundaries), default=0)
        self.connections.open([peer for tie in ties for peer in tie.peers], capacity_bytes=largest,
                              timeline=self.timeline, timeout_seconds=timeout_seconds, other=arrived.put,
                              settings=settings)
        self.timeline.ranks = self.connections.all
        self.ties = TiedParameters(ties, arrived, self.connections.send, self.connections.inbox.wait,
                                   tied_parameters(layout))
        share_start_values(layout, self.blocks, self.parameters, self.connections)
        self.buffers = self._replica_buffers(buffers)
        self.connections.open_splits(layout)

        # what steps need
        self._left: list[LeftValues] = []  # of the stages, which are built last
        self.statistics = BatchStatistics(
            self.connections.all, SameTargets(at, layout.stages), SameRates(at, own=plan.own_optimizer),
            SameLeft(plan.stages.shared_places, at, layout.stages, self._left), self.ties,
            on_device=world.device.type == "cuda")
        tables = lookup_tables(module for _, _, module in self.blocks)
        self.updater = self._build_updater(optimizer, nominal_weight, guard, tables)
        if plan.mesh.size > plan.mesh.num_replicas:
            warn_of_norms(self.updater.gradients, splits=self.connections.tensor_mesh is not None)
            if self.updater.users is not None:
                refuse_coupled(self.updater.users, splits=self.connections.tensor_mesh is not None, cuts=len({
                    layout.pipe_of(one.block) for one in layout.parameters if one.trainable and one.is_owner}) > 1)
        masters = self.updater.masters
        self.elsewhere.note_optimizer(self.updater.users, masters.of if masters is not None else {})
        if (flat := self.updater.flat) is not None:
            refuse_left_behind(flat.left_behind, self.blocks, self.model.loss if numbers[-1] == last else None)
        self.ties.send_values(self.connections.board.calls, trained=False)  # parameters have their places in memory
        refuse_initializers(one for name, one in self.parameters.items() if one.shape != layout[name].shape)
        self.stages = RankStages([self._build_stage(one, seed, compile, tables) for one in numbers],
                                 eval_blocks=range(0 if frozen_dropout else given.frozen_blocks))
        self.runner = BatchRunner(
            plan, at, policy=policy, stages=self.stages, connections=self.connections, updater=self.updater,
            statistics=self.statistics, timeline=self.timeline,
            nominal_weight=NominalWeight(self.connections.all) if given.dtype is torch.float16 else None,
            takes_nominal_weight=nominal_weight == "auto", forwards_ended=self.held.forwards_ended)
        self.values = SharedValues(self.updater, self.ties, self.buffers, self.held, self.elsewhere, self.stages,
                                   self.connections.board)
        self.users_changes = UsersChanges(
            layout, self.parameters, given.names_in_whole, self.updater.gradients, held=self.held,
            elsewhere=self.elsewhere, buffers=SharedBufferChanges(plan.stages.shared_buffers, self.blocks))

    def _split_model(self) -> Model:
        """The model with this rank's part of each block, where several ranks split them."""
        mesh, model = self.connections.tensor_mesh, self._given.model
        if mesh is None:
            return model
        if self._plan.mesh.feature_parts > 1 and self._world.backend.name != "in-process":
            self.randomness.is_compared, mesh.order.drawn = True, self.randomness.drawn
        mesh.autocast = self._given.autocast
        return split_model(model, mesh)

    def _replica_buffers(self, how: BufferSync) -> ReplicaBuffers:
        """The buffers of this rank's stages, over all ranks that compute their blocks for other samples."""
        connections, mesh = self.connections, self._plan.mesh
        group: Group = connections.data if mesh.microbatch_parts == 1 else connections.group(
            "buffers", mesh.over(splits_samples=True))
        buffers = ReplicaBuffers(self.blocks, group, how)
        if how != "broadcast":
            count = torch.tensor([len(buffers)])
            connections.all.all_reduce(count).wait()
            why = "there is one replica" if len(group.ranks) == 1 else None if count else "no block has a buffer"
            if why is not None and self._world.rank == 0:
                warnings.warn(f"Engine(buffers={how!r}) has no effect: {why}", stacklevel=5)
        return buffers

    def _build_updater(self, optimizer: OptimizerFactory | None, nominal_weight: float | Literal["auto"],
                       guard: Guard | None, tables: set[nn.Parameter]) -> Updater:
        plan, rank, dtype, statistics = self._plan, self._world.rank, self._given.dtype, self.statistics
        ties, connections = self.ties, self.connections
        return Updater(
            gradient_specs(plan.layout, rank, self.parameters, connections.sums, connections.splits, tables=tables),
            connections.data, connections.all, optim=plan.optim, own=plan.own_optimizer, optimizer=optimizer,
            dtype=dtype, device=self._world.device, nominal_weight=1.0 if nominal_weight == "auto" else nominal_weight,
            order=plan.layout.flat_order(rank), runs=plan.chunking.runs.get(self._at.pipeline_rank, ()),
            users_names=self._given.names_in_whole,
            send_to_owner=lambda spec: ties.send_gradient(spec.name, connections.board.calls),
            weight=statistics.weight, earlier_weight=statistics.earlier_weight, timeline=self.timeline,
            progress=connections.transport.progress,
            bad_loss=partial(statistics.bad_loss, is_scaled=dtype is torch.float16) if guard is None else None,
            bad_steps=BadSteps(guard, statistics.loss)
            if guard is not None and rules.looks_before_update(guard, plan.optim) else None)

    def _build_stage(self, number: int, seed: int, compile: bool | Literal["auto"], tables: set[nn.Parameter]) -> Stage:
        plan, world, given, mesh = self._plan, self._world, self._given, self.connections.tensor_mesh
        layout, gradients, pipeline = plan.layout, self.updater.gradients, plan.pipeline
        placement, numbers = layout.stages, layout.blocks(number)
        blocks, loss = [block for block in self.blocks if block[0] in numbers], None
        code = {name for _, name, _ in blocks}
        if number == placement.num_stages - 1:
            last, loss = blocks[-1][2], self.model.loss
            if isinstance(last, LossBlock) and mesh is None:
                loss = last.loss
            code.add("loss")
        left = others = None
        if places := [place for place in plan.stages.shared_places if place.stage == number]:
            left = LeftValues(places, blocks, loss, is_alone=placement.per_rank == 1, only_here={
                place.number for place in plan.stages.shared_places
                if len({placement.rank_of(stage) for stage in place.stages}) == 1})
            self._left.append(left)
        if code := code & plan.stages.with_others_parameters:
            others = OthersParameters(self.elsewhere, given.names_in_whole, {
                name: one for other, block, module in self.blocks if other not in numbers
                for path, one in module.named_parameters()
                if layout[name := f"{block}.{path}"].block not in numbers}, code)
        sets_deferral = pipeline.defer_bytes not in ("auto", 0) or any(pipeline.deferred or ())
        known = gradients.chunk_of, gradients.queued, gradients.added, gradients.added_rows
        return Stage(
            blocks, loss=loss, seed=seed, device=world.device, left=left, others=others,
            progress=self.updater.progress if self.connections.needs_progress else None,
            segments=plan.recomputed[number], selective=plan.memory.recompute == "selective",
            block_passed=partial(_block_passed, self.updater, mesh) if mesh is not None or gradients.moves_in_backward
            else None,
            mesh=mesh, compile=compiles(compile, world.device), tables=tables,
            may_wait=plan.mesh.pipeline_size > 1 or sets_deferral,  # under any policy: all agree
            autocast=given.autocast,
            in_float8=float8_layers(self.blocks, len(given.model.blocks), world.device) if given.float8 else (),
            weight_gradients=WeightGradients(*known) if mesh is None else
            WeightGradients(*known, after=mesh.sums.after))


def compiles(how: bool | Literal["auto"], device: torch.device) -> bool | Literal["auto"]:
    """Whether blocks are compiled here, or on several rows or columns their chains of elementwise operations."""
    return how if how is True or (how == "auto" and device.type == "cuda" and has_triton()) else False


def _block_passed(updater: Updater, mesh: TensorMesh | None, block: int) -> None:
    """The last backward of the batch has left `block`, which may be updated while the backward goes on."""
    if mesh is not None and updater.in_backward:
        mesh.order.compare()
    updater.gradients.block_passed(block)
