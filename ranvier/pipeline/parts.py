"""The parts of one rank's engine, made from a plan and a checked model.

All ranks make them in the same order: groups open, settings are compared and initial values are shared on the way.
Parts refer to each other, never to the engine: a reference cycle would keep it alive after `Engine.close`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Lt
from torch import nn

from ranvier.arguments import fits
from ranvier.block import (
    Loss,
    LossBlock,
    Model,
    Modules,
    as_model,
    existing_blocks,
    freeze,
    frozen_prefix,
    names_in_whole,
)
from ranvier.comm.protocol import Group
from ranvier.config import rules
from ranvier.config.run import Guard, Memory, Optim, Pipeline, TensorParallel
from ranvier.errors import ConfigError, ModelError, counted
from ranvier.mesh import Mesh
from ranvier.optim.elementwise import refuse_coupled
from ranvier.optim.guard import BadSteps
from ranvier.optim.step import OptimizerFactory, Updater
from ranvier.optim.torch_functions import refuse_initializers, warn_of_norms
from ranvier.pipeline.autocast import check_autocast
from ranvier.pipeline.batch import BatchRunner
from ranvier.pipeline.build import StageCopies, build_stage, stage_parameters
from ranvier.pipeline.connections import Connections, share_start_values
from ranvier.pipeline.copied_modules import LOSS, CopiedModules
from ranvier.pipeline.device_timeline import timeline_of
from ranvier.pipeline.held_parameters import HeldParameters, refuse_left_behind
from ranvier.pipeline.left_values import LeftValues, SameValueCheck
from ranvier.pipeline.microbatch import Microbatch, as_microbatches
from ranvier.pipeline.rank_stages import RankStages, some_train
from ranvier.pipeline.replica_randomness import ReplicaRandomness
from ranvier.pipeline.same_on_ranks import OwnSamples, SameRates, SameTargets, settings_of
from ranvier.pipeline.shared_values import BufferSync, ReplicaBuffers, SharedValues
from ranvier.pipeline.stage import Stage
from ranvier.pipeline.statistics import BatchStatistics, NominalWeight
from ranvier.pipeline.ties import TiedParameters, TieMessages, gradient_specs, tied_parameters, ties_of
from ranvier.pipeline.trained_elsewhere import OthersParameters, TrainedElsewhere
from ranvier.pipeline.users_changes import SharedBufferChanges, UsersChanges
from ranvier.plan.block_costs import build_on_meta
from ranvier.plan.cut import Sample, split_model
from ranvier.plan.formats import cast_warning, check_formats
from ranvier.plan.limits import queues_products
from ranvier.plan.plan import Plan, make
from ranvier.precision import DTYPES, is_half
from ranvier.schedule.schedule import Policy, check_policy_object
from ranvier.system.machine import has_triton
from ranvier.tensor.deferred_linear import lookup_tables
from ranvier.tensor.float8 import float8_layers
from ranvier.tensor.mesh import TensorMesh
from ranvier.tensor.weight_gradients import WeightGradients
from ranvier.world import World


class EngineParts:
    """container: the module in which a user has given the blocks. The other arguments are those of `Engine`."""

    def __init__(self, prepared: PreparedModel, plan: Plan, world: World, *, container: nn.Module | None,
                 optimizer: OptimizerFactory | None, policy: Policy | None, guard: Guard | None, seed: int,
                 nominal_weight: float | Literal["auto"], buffers: BufferSync, frozen_dropout: bool,
                 compile: bool | Literal["auto"], timeout_seconds: float, check_order: bool) -> None:
        self._given, self._plan, self._world, layout = prepared, plan, world, plan.layout
        self._at = at = plan.mesh.coordinates(world.rank)
        if (optimizer is not None or plan.own_optimizer) and not prepared.frozen and not any(
                parameter.trainable for parameter in plan.layout.parameters):
            raise ModelError("has no trainable parameter, so that steps would change nothing",
                             code="nothing-trains", where="model", value=f"{len(plan.layout.parameters)} parameters",
                             remedy="Set requires_grad_(True) where it should train, or leave the optimizer out.")
        numbers, last = layout.stages.stages_of(at.pipeline_rank), layout.stages.num_stages - 1
        self.timeline = timeline_of(world.device, plan.mesh, plan.policy)
        samples_over = plan.mesh.over(splits_samples=True)
        self.randomness = ReplicaRandomness(  # ranks in one process share a generator, so that their numbers differ
            0 if world.backend.name == "in-process" else at.index(samples_over), seed, world.device)

        # this rank's part of the model
        self.connections = Connections(world, layout, plan.tensor, check_order=check_order)
        self.model, self.copies = self._split_model(), StageCopies()
        self.blocks, self.cast_buffers = build_stage(self.model, layout, at, seed=seed, dtype=prepared.dtype,
                                                     device=world.device, copies=self.copies)
        if self.cast_buffers and at.is_first_on_pipeline_rank:
            warnings.warn(cast_warning(self.cast_buffers, prepared.dtype), stacklevel=4)
        self.parameters = stage_parameters(layout, self.blocks)
        self.elsewhere = TrainedElsewhere(existing_blocks(prepared.model), (name for _, name, _ in self.blocks),
                                          self.parameters.values(),
                                          splits=self.connections.tensor_mesh is not None)
        self.held = HeldParameters(
            self.blocks, container, others=self.elsewhere.blocks,
            owners={parameter.name: parameter.owner for parameter in layout.parameters},
            replicas=1 if plan.optim.update_in_backward else plan.mesh.count(samples_over))

        # connections to other ranks, and values that start the same on several
        ties, arrived = ties_of(layout, world.rank, self.parameters), TieMessages()
        settings = settings_of(plan, guard, dtype=prepared.dtype, autocast=prepared.autocast, float8=prepared.float8,
                               nominal_weight=nominal_weight, frozen=prepared.frozen,
                               frozen_above=prepared.frozen_above,
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

        # parts that steps need
        self._left: list[LeftValues] = []  # of the stages, which are built last
        self.statistics = BatchStatistics(
            self.connections.all, SameTargets(at, layout.stages), SameRates(at, own=plan.own_optimizer),
            SameValueCheck(plan.stages.shared_places, at, layout.stages, self._left), self.ties,
            OwnSamples(at, layout.stages), on_device=world.device.type == "cuda")
        tables = lookup_tables(module for _, _, module in self.blocks)
        self.updater = self._build_updater(optimizer, nominal_weight, guard, tables)
        if plan.mesh.size > plan.mesh.num_replicas:
            warn_of_norms(self.updater.gradients, splits=self.connections.tensor_mesh is not None)
            if self.updater.users is not None:
                refuse_coupled(self.updater.users, splits=self.connections.tensor_mesh is not None, cuts=len({
                    layout.pipe_of(parameter.block) for parameter in layout.parameters
                    if parameter.trainable and parameter.is_owner}) > 1)
        masters = self.updater.masters
        self.elsewhere.note_optimizer(self.updater.users, masters.of if masters is not None else {})
        if (flat := self.updater.flat) is not None:
            refuse_left_behind(flat.views, self.blocks, self.model.loss if numbers[-1] == last else None)
        self.ties.send_values(self.connections.board.calls, trained=False)  # parameters have their places in memory
        refuse_initializers(parameter for name, parameter in self.parameters.items()
                            if parameter.shape != layout[name].shape)
        self.stages = RankStages([self._build_stage(number, seed, compile, tables) for number in numbers],
                                 eval_blocks=range(0 if frozen_dropout else prepared.frozen_blocks))
        self.stages.last.looks_at_mean = at.is_first_on_pipeline_rank
        self.runner = BatchRunner(
            plan, at, policy=policy, stages=self.stages, connections=self.connections, updater=self.updater,
            statistics=self.statistics, timeline=self.timeline,
            nominal_weight=NominalWeight(self.connections.all) if prepared.dtype is torch.float16 else None,
            takes_nominal_weight=nominal_weight == "auto", forwards_ended=self.held.forwards_ended)
        self.values = SharedValues(self.updater, self.ties, self.buffers, self.held, self.elsewhere, self.stages,
                                   self.connections.board)
        self.users_changes = UsersChanges(
            layout, self.parameters, prepared.names_in_whole, self.updater.gradients, held_parameters=self.held,
            elsewhere=self.elsewhere, buffers=SharedBufferChanges(plan.stages.shared_buffers, self.blocks),
            copied=None if self.connections.tensor_mesh is None else CopiedModules(
                existing_blocks(prepared.model) | ({LOSS: prepared.model.loss} if isinstance(prepared.model.loss,
                                                                                             nn.Module)
                                                   else {}),
                self.blocks, self.parameters, lambda name, whole: whole[
                    tuple(slice(*edges) for edges in layout.box(layout[name], at.position))]),
            is_of_mean=nominal_weight != "auto" and plan.mesh.count(samples_over) == 1)

    def _split_model(self) -> Model:
        """The model with this rank's part of each block, if several ranks split them."""
        mesh, model = self.connections.tensor_mesh, self._given.model
        if mesh is None:
            return model
        if self._plan.mesh.feature_parts > 1 and self._world.backend.name != "in-process":
            self.randomness.is_compared, mesh.order.drawn = True, self.randomness.state_hash
        mesh.autocast = self._given.autocast
        return split_model(model, mesh)

    def _replica_buffers(self, how: BufferSync) -> ReplicaBuffers:
        """The buffers of this rank's stages, synchronised over all ranks that compute the same blocks for other
        samples."""
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
                name: parameter for other, block, module in self.blocks if other not in numbers
                for path, parameter in module.named_parameters()
                if layout[name := f"{block}.{path}"].block not in numbers}, code)
        known = gradients.note_deferred, gradients.note_added, gradients.added_rows
        return Stage(
            blocks, loss=loss, seed=seed, device=world.device, left=left, others=others,
            progress=self.updater.progress if self.connections.needs_progress else None,
            segments=plan.recomputed[number], selective=plan.memory.recompute == "selective",
            block_passed=partial(_block_passed, self.updater, mesh) if mesh is not None or gradients.moves_in_backward
            else None,
            mesh=mesh, compile=compiles(compile, world.device), tables=tables,
            may_wait=queues_products(pipeline, plan.mesh.pipeline_size),
            autocast=given.autocast,
            in_float8=float8_layers(self.blocks, len(given.model.blocks), world.device) if given.float8 else (),
            weight_gradients=WeightGradients(*known, after=None if mesh is None else mesh.sums.call_after))


def compiles(setting: bool | Literal["auto"], device: torch.device) -> bool | Literal["auto"]:
    """Whether blocks are compiled here, or, on several rows or columns, their chains of elementwise operations."""
    return setting if setting is True or (setting == "auto" and device.type == "cuda" and has_triton()) else False


def _block_passed(updater: Updater, mesh: TensorMesh | None, block: int) -> None:
    """Called when the last backward of the batch has left `block`, which may be updated while the backward
    continues."""
    if mesh is not None and updater.in_backward:
        mesh.order.compare()
    updater.gradients.block_passed(block)


# --- what a user gives ------------------------------------------------------------------------------------------------

# The model and the arguments that a user gives the engine, checked and completed, and their plan.


@dataclass(frozen=True, kw_only=True)
class PreparedModel:
    """A user's model as the engine uses it.

    model: with its frozen layers, and the formats of parameters that stay in fp32.
    dtype: of parameters, buffers and activations. autocast, float8: of products, as for `Engine`.
    frozen, frozen_above: as for `Engine`. frozen_blocks: number of blocks in the first `frozen` layers.
    names_in_whole: global name of a parameter or buffer -> its names in the module that `blocks_of` was given.
    in_evaluation: whether the entire model was given in evaluation mode.
    """

    model: Model
    dtype: torch.dtype
    autocast: torch.dtype | None
    float8: bool
    frozen: int
    frozen_above: tuple[int, ...]
    frozen_blocks: int
    names_in_whole: dict[str, tuple[str, ...]]
    in_evaluation: bool


def prepare(given: Model | Modules, loss: Loss | None, *, world: World, dtype: torch.dtype | None,
            autocast: torch.dtype | None, float8: bool, keep_fp32: str | Sequence[str], frozen: int,
            frozen_above: Sequence[int], optim: Optim | None, own_optimizer: bool) -> PreparedModel:
    """Apply these settings of the engine to the model. Raises ModelError or ConfigError for settings that do not fit
    it."""
    model = as_model(given, loss)
    modules = existing_blocks(model).values()
    if dtype is None:
        dtype = torch.float32 if autocast or float8 else _format_of(modules, world)
    if dtype not in DTYPES.values():
        raise ConfigError("is not a number format to train in", code="dtype-not-trained", where="Engine(dtype=...)",
                          value=dtype, remedy="Give torch.float32, torch.bfloat16, torch.float16 or torch.float64.")
    check_autocast(autocast, dtype=dtype, float8=float8)
    names, in_evaluation = names_in_whole(model), bool(modules) and not some_train(modules)
    if len(keep_fp32):
        keep_fp32 = [keep_fp32] if isinstance(keep_fp32, str) else keep_fp32
        model = replace(model, keep_fp32=(*model.keep_fp32, *keep_fp32))
        if not is_half(dtype) and world.rank == 0:
            warnings.warn(f"Engine(keep_fp32=...) has no effect: dtype is {dtype}", stacklevel=4)
    model = freeze(model, frozen, frozen_above)
    if len(keep_fp32) or is_half(dtype):
        check_formats(model, build_on_meta(model), dtype, own=own_optimizer,
                      accumulates_half=optim is not None and optim.accumulate == "half")
    return PreparedModel(model=model, dtype=dtype, autocast=autocast, float8=float8, frozen=frozen,
                         frozen_above=tuple(frozen_above), frozen_blocks=frozen_prefix(model, frozen),
                         names_in_whole=names, in_evaluation=in_evaluation)


def make_plan(prepared: PreparedModel, world: World, mesh: Mesh | None, sample: Sample | Microbatch | None, *,
              policy: Policy | None, pipeline: Pipeline | None, tensor: TensorParallel | None, memory: Memory | None,
              optim: Optim | None, own_optimizer: bool) -> Plan:
    """Make the plan of an engine that is given none. Raises ConfigError for a mesh of another size, and as `plan.make`
    does."""
    mesh = mesh or world.mesh or Mesh.of_replicas(world.size)
    if mesh.size != world.size:
        raise ConfigError(f"has {counted(mesh.size, 'rank')}, but {world.size} were started", code="mesh-of-other-size",
                          where="mesh", value=str(mesh),
                          remedy="Make data x pipe x row x col equal to the number of ranks.")
    if optim is not None and optim.ema and not own_optimizer:
        raise ConfigError("is supported only by Ranvier's own optimizers", code="ema-with-own-optimizer",
                          where="optim.ema", value=optim.ema,
                          remedy="Give optim= without optimizer=, or use torch.optim.swa_utils.AveragedModel.")
    if optim is not None and not own_optimizer and world.rank == 0 and (
            idle := rules.unused_with_torch_optimizer(optim)):
        warnings.warn(f"Optim({', '.join(f'{name}=...' for name in idle)}) has no effect with optimizer=: it applies "
                      "to Ranvier's own optimizer", stacklevel=4)
    if optim is not None and own_optimizer and optim.algorithm == "muon" and not prepared.model.layers and (
            world.rank == 0):
        warnings.warn("Optim(algorithm='muon') updates the matrices of all blocks, also those of embeddings and heads, "
                      "since the model does not say which blocks are layers: ranvier.Model(layers=...)", stacklevel=4)
    one = None if sample is None else as_microbatches([sample], "Engine(sample=...)")[0]
    shape = None if one is None or one.inputs is None else (one.inputs, one.targets)
    return make(prepared.model, mesh, sample=shape, pipeline=pipeline or Pipeline(), tensor=tensor or TensorParallel(),
                memory=memory or Memory(), optim=optim, own_optimizer=own_optimizer, policy=policy,
                dtype=prepared.dtype,
                device=world.device.type)


def check_objects(policy: Policy | None, optimizer: OptimizerFactory | None) -> None:
    """Raise ConfigError for a policy or an optimizer that the engine cannot use."""
    if policy is not None:
        check_policy_object(policy)
    if optimizer is not None and not callable(optimizer):
        raise ConfigError("is not a function that makes an optimizer of this rank's parameters",
                          code="optimizer-not-a-factory", where="optimizer", value=type(optimizer).__name__,
                          remedy="Pass optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3).")


def check_learning_rate(rate: float) -> float:
    """Return `rate`. Raises ConfigError if it is not a number, or would destroy the parameters."""
    if not fits(rate, Annotated[float, Ge(0), Lt(inf)]):
        raise ConfigError("is not a finite number of at least 0", code="learning-rate-range", where="learning_rate",
                          value=repr(rate), remedy="Look at the schedule that it comes from.")
    return float(rate)


def _format_of(modules: Iterable[nn.Module], world: World) -> torch.dtype:
    """Return fp64 if all parameters of a user's modules have it, else fp32; warn if all are in half precision, as
    transformers loads most models, or some in fp64."""
    found = {parameter.dtype for module in modules
             for parameter in module.parameters() if parameter.is_floating_point()}
    if len(found) == 1 and is_half(half := next(iter(found))) and world.rank == 0:
        warnings.warn(f"the model is in {half}, and trains in fp32: Engine(dtype={half}) trains it in its own format, "
                      "with fp32 master copies", stacklevel=5)
    if len(found) > 1 and torch.float64 in found and world.rank == 0:
        warnings.warn("some parameters are in fp64, and train in fp32 like the others: Engine(dtype=torch.float64) "
                      "trains all in fp64", stacklevel=5)
    return torch.float64 if found == {torch.float64} else torch.float32
