"""The engine: runs a model's blocks on a mesh of ranks, message by message.

    engine = Engine(model, world, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3))
    result = engine.train_batch(microbatches)

One batch on one rank:

    1. messages that have arrived are reported to the schedule                           pipeline/batch
    2. the schedule chooses the next action; the leader of a row x col stage announces it to its peers
    3. the stage runs it and sends the result
    4. complete chunks of gradients are averaged over `data` concurrently                 optim/gradients
    5. at the end: ties, the global weight, the optimizer, new values of tied parameters

Losses and norms are reduced asynchronously and waited for only when they are read, so a rank that has finished a batch
starts the next one while others still work on this one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from math import inf
from os import PathLike
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor, nn

from ranvier.arguments import check_arguments
from ranvier.block import Loss, Model, Modules, State
from ranvier.config import rules
from ranvier.config.python_names import engine_method
from ranvier.config.run import Guard, Memory, Optim, Pipeline, Seconds, TensorParallel
from ranvier.errors import ConfigError, RanvierError
from ranvier.mesh import Mesh
from ranvier.optim.guard import BadSteps
from ranvier.optim.optimizer import storage_bytes
from ranvier.optim.step import GradientStatus, OptimizerFactory
from ranvier.pipeline.autocast import refuse_default_device, refuse_outer_modes
from ranvier.pipeline.examine import Cause, examine
from ranvier.pipeline.held_parameters import RankParameters
from ranvier.pipeline.lifetime import Lifetime
from ranvier.pipeline.microbatch import Batch, Microbatch, as_microbatches, check_microbatches
from ranvier.pipeline.parts import (
    EngineParts,
    check_learning_rate,
    check_objects,
    make_plan,
    prepare,
)
from ranvier.pipeline.rank_stages import some_train
from ranvier.pipeline.replica_comparison import ReplicaComparison
from ranvier.pipeline.result import BatchResult, LastOutputs
from ranvier.pipeline.shared_values import BufferSync
from ranvier.pipeline.state_dict import StateDict, gather_full_state, load_state, take_state
from ranvier.pipeline.users_changes import UnsavedAttributes
from ranvier.plan.cut import Sample
from ranvier.plan.plan import Plan, refuse_settings_beside
from ranvier.schedule.limits import Limits
from ranvier.schedule.schedule import Policy
from ranvier.system.memory_tracker import release_cached_memory
from ranvier.tensor.split.loss import NextTokenLoss
from ranvier.world import World

if TYPE_CHECKING:
    from ranvier.optim.loss_scale import LossScale
    from ranvier.optim.optimizer import FlatOptimizer
    from ranvier.pictures.report_page import Page
    from ranvier.pipeline.engine_timeline import Curve

_OUTSIDE = "code outside the engine"
_LEARNING_RATE = 1e-3


class Engine:
    """A model on a mesh, close to a module and its optimizer on one device.

    Settings are the sections of a run's configuration; each field is documented there.

    Args:
        model: a `Model`, a list or dict of modules, or a plain container of them (`nn.Sequential`, `nn.ModuleList`,
            `nn.ModuleDict`) without its own parameters, hooks or forward. Every rank passes the same model and keeps
            only its stage's blocks, which are moved to the device and `dtype` in place. Training does not change any
            module's mode; evaluation switches all modules to `eval()` and then back.
        world: this rank, from `ranvier.start`.
        mesh: how the ranks are arranged; by default that of `ranvier.start`, else all along `data`.
        plan: the result of `ranvier.plan.plan.make` for this model, in place of mesh, pipeline, tensor, memory,
            optim and sample; without it the engine makes its own plan (`engine.plan`).
        loss: (output, targets) -> (sum of losses, weight), for models without one. A module with
            parameters is trained as a last block named loss; on several rows or columns it is refused.
        optimizer: function from this rank's parameters to a torch optimizer; None without `optim` computes gradients
            only. If its first parameter is called `named_parameters`, it gets (name, parameter) pairs. It is not called
            on a rank that owns no trainable parameter. With a half-precision `dtype` the optimizer updates fp32 master
            copies, which replace the parameters in its groups once it is built.
        optim: train with Ranvier's own optimizers, as these settings say: in buckets, offloaded, sharded, with fp32
            master copies for half-precision parameters. Its settings for accumulating, reducing and clipping gradients
            also apply with `optimizer`.
        learning_rate: of the optimizer that `optim` describes; `engine.learning_rate` may be set before any step.
        pipeline: stages, their cut, and their schedule. Without `sample` the cost of a block is its number of
            parameters.
        policy: your own `Policy`, which chooses among ready actions, in place of `pipeline.policy`.
        tensor: how blocks are split over the row x col ranks of a stage, which must be written with the layers of
            `ranvier.tensor`.
        memory: which activations are recomputed; auto needs `sample`.
        guard: decides when a step is bad and must not be applied (`BatchResult.bad`); stop, skip and rollback
            have the same effect here, and none applies every step. Without a guard, a NaN or infinite loss
            (in fp16: a NaN loss) is an error that names the block and microbatch of its origin, and nothing is updated.
        sample: a microbatch of the usual shape, or its (inputs, targets); with several rows, one row's share of it. Its
            values do not matter.
        seed: of initial weights and dropout. Dropout of plain modules draws from torch's generator: the first replica
            from the user's, other replicas and rows from one forked within each batch, so that masks differ.
        dtype: of parameters, buffers and activations; by default fp64 for modules whose parameters all are in fp64,
            without autocast and float8, else fp32. float16 scales the loss, and skips steps whose gradients overflow.
        keep_fp32: names of modules, parameters and buffers, or patterns of them ("*.norm"), that stay in fp32 with a
            half-precision `dtype`. They begin with the block's name. Parameters that a transformers model keeps in fp32
            stay in fp32 without being named (`plan/formats`); a warning names buffers that have been cast.
        autocast: torch.bfloat16: forwards and losses run under torch.autocast, as in a loop in plain PyTorch, with
            parameters, gradients and optimizer states in fp32 (`pipeline/autocast`). Costs and bytes are counted as
            for fp32. Not together with another `dtype` or float8.
        nominal_weight: expected weight of a global batch. The loss is divided by it before the backward, and gradients
            are corrected to the true weight afterwards. It matters in fp16, where auto takes it from the first batch,
            and a value far below that batch's weight lowers the loss scale. Elsewhere auto is 1, and other values
            change only rounding and the gradients that hooks see.
        frozen: number of frozen layers, counted from the first, with all blocks before them. A parameter tied to one
            of theirs continues to train separately (`ranvier.block.freeze`). frozen_above: layers above the first
            trainable one whose weights are frozen; gradients pass through them. frozen_dropout: whether dropout is
            active in the first `frozen` layers.
        buffers: how replicas synchronise buffers that a forward changes, such as BatchNorm's running statistics, after
            each training batch: all take the first replica's (as DistributedDataParallel does), their average, or each
            keeps its own (local); then checkpoints and exports have the first replica's.
        timeout_seconds: longest wait for one message before MessageTimeout, with a report of which rank waits for what.
        check_order: compare the order of actions among the ranks of a stage before each action, and of layers among its
            rows before each layer (slow; for debugging).
        flags: whether errors name the command's flags instead of Python arguments.
        compile, float8: as `model.compile` and `model.float8` in a run: whether blocks are compiled, and whether their
            linear layers multiply in float8.

    Raises ModelError or ConfigError for invalid arguments, on every rank.
    """

    @engine_method
    def __init__(self, /, model: Model | Modules, world: World, *,
                 mesh: Mesh | None = None, plan: Plan | None = None, loss: Loss | None = None,
                 optimizer: OptimizerFactory | None = None,
                 optim: Optim | None = None,
                 learning_rate: Annotated[float, Ge(0), Lt(inf)] = _LEARNING_RATE,
                 pipeline: Pipeline | None = None, policy: Policy | None = None, tensor: TensorParallel | None = None,
                 memory: Memory | None = None, guard: Guard | None = None, sample: Sample | Microbatch | None = None,
                 seed: int = 0, dtype: torch.dtype | None = None, keep_fp32: str | Sequence[str] = (),
                 autocast: torch.dtype | None = None,
                 nominal_weight: Annotated[float, Gt(0), Lt(inf)] | Literal["auto"] = "auto",
                 frozen: int = 0, frozen_above: Sequence[int] = (), frozen_dropout: bool = True,
                 buffers: BufferSync = "broadcast", timeout_seconds: Seconds = 300.0,
                 check_order: bool = False, flags: bool = False, compile: bool | Literal["auto"] = "auto",
                 float8: bool = False) -> None:
        check_objects(policy, optimizer)
        check_arguments(Engine.__init__, locals(), but=("model", "sample"))
        self.world, self.flags = world, flags
        world.num_calls += 1
        refuse_default_device()
        if plan is not None:
            refuse_settings_beside(mesh=mesh, pipeline=pipeline, tensor=tensor, memory=memory, optim=optim,
                                   sample=sample)
            dtype, optim = dtype or plan.dtype, plan.optim
        own = optimizer is None and (optim is not None if plan is None else plan.own_optimizer)
        given = prepare(model, loss, world=world, dtype=dtype, autocast=autocast, float8=float8, keep_fp32=keep_fp32,
                        frozen=frozen, frozen_above=frozen_above, optim=optim, own_optimizer=own)
        if plan is None:
            plan = make_plan(given, world, mesh, sample, policy=policy, pipeline=pipeline, tensor=tensor,
                             memory=memory, optim=optim, own_optimizer=own)
        else:
            plan.check(given.model, world.size, given.dtype, has_optimizer=optimizer is not None)
        for problem in (*rules.recompute_problems(plan.memory, plan.mesh, compile=compile, float8=float8),
                        *(rules.float8_problems(plan.mesh, is_fp64=given.dtype is torch.float64) if float8 else ()),
                        *rules.guard_problems(guard or Guard(bad_step="none"), plan.optim)):
            raise problem
        self.plan, self.mesh, self.layout, self.stages = plan, plan.mesh, plan.layout, plan.stages
        self.coordinates = plan.mesh.coordinates(world.rank)
        self.layers, self.block_names = given.model.layers, list(given.model.blocks)
        self.frozen, self.frozen_above, self.frozen_blocks = given.frozen, given.frozen_above, given.frozen_blocks
        self.names_in_whole, self._came_in_evaluation = given.names_in_whole, given.in_evaluation
        self._step, self._refuses_bad_losses, self._lifetime = 0, guard is None, Lifetime(forks=world.size == 1)
        parts = EngineParts(given, plan, world, container=model if isinstance(model, nn.Module) else None,
                            optimizer=optimizer, policy=policy, guard=guard, seed=seed, nominal_weight=nominal_weight,
                            buffers=buffers, frozen_dropout=frozen_dropout, compile=compile,
                            timeout_seconds=float(timeout_seconds), check_order=check_order)
        self.timeline, self.cast_buffers = parts.timeline, parts.cast_buffers
        """Buffers of this rank's blocks that `dtype` has cast to less precision: name -> number format before."""
        self._connections, self._copies, self._randomness = parts.connections, parts.copies, parts.randomness
        self._parameters, self._statistics, self._updater = parts.parameters, parts.statistics, parts.updater
        self._stages, self._runner = parts.stages, parts.runner
        self._values, self._users_changes = parts.values, parts.users_changes
        self.unsaved = UnsavedAttributes(self._updater.users)
        """Warns of attributes of the user's optimizer that checkpoints do not contain."""
        self._updater.learning_rate = float(learning_rate)
        if learning_rate != _LEARNING_RATE and not plan.own_optimizer and world.rank == 0:
            warnings.warn("Engine(learning_rate=...) has no effect: it applies to Ranvier's own optimizers (optim= "
                          "without optimizer=)", stacklevel=3)
        self._looks_at_shift = isinstance(parts.model.loss, NextTokenLoss)

    def __reduce__(self) -> NoReturn:
        raise RanvierError("is connected to running ranks, and can be neither copied nor saved", code="engine-copied",
                           where="engine", remedy="Copy or save engine.blocks or engine.state_dict(), or write a "
                                                  "checkpoint (ranvier.Checkpoints).")

    # ------------------------------------------------------------------ what a rank is

    @property
    def limits(self) -> Limits:
        """The in-flight limit, and the bounds on deferred weight gradients."""
        return self.plan.limits

    @property
    def in_flight(self) -> int:
        """Maximum number of microbatches of a replica between the first stage's forward and their return."""
        return self.limits.in_flight

    def use_limits(self, limits: Limits) -> None:
        """Use these limits, the same on every rank, from the next batch on. Gradients stay bit-identical."""
        self.plan = self.plan.with_limits(limits)
        self._runner.use_limits(limits)

    def rank_of_outputs(self, replica: int = 0) -> int:
        """The first rank of the replica that has the last stage, and so what the model returns. Raises IndexError if
        there is no such replica."""
        check_arguments(Engine.rank_of_outputs, locals())
        stages = self.layout.stages
        return self.mesh.rank(self.mesh.place(replica=replica, pipeline_rank=stages.rank_of(stages.num_stages - 1)))

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank has the first stage, and so needs the inputs."""
        return self.coordinates.pipeline_rank == self.layout.stages.rank_of(0)

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank has the last stage, and so needs the targets."""
        return self.coordinates.pipeline_rank == self.layout.stages.rank_of(self.layout.stages.num_stages - 1)

    @property
    def boundaries(self) -> tuple[int, ...]:
        """First block of each stage after the first."""
        return self.stages.boundaries

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step, with Ranvier's own optimizers."""
        return self._updater.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        value = check_learning_rate(value)
        if value != self._updater.learning_rate and self._updater.flat is None:
            raise ConfigError("applies to Ranvier's own optimizers, and this engine has none", value=value,
                              code="learning-rate-of-users-optimizer", where="Engine.learning_rate",
                              remedy="Set it in engine.optimizer.param_groups, or give engine.optimizer to a scheduler "
                                     "of torch.optim.lr_scheduler.")
        self._updater.learning_rate = value

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The user's torch optimizer, if one was given and this rank owns trainable parameters."""
        return self._updater.users

    @property
    def optimizer_name(self) -> str | None:
        """The optimizer of this rank: "ranvier adamw", the class of the user's optimizer, or None."""
        if self.plan.own_optimizer:
            return f"ranvier {self.plan.optim.algorithm}"
        return None if self.optimizer is None else type(self.optimizer).__name__

    def updated(self, parameter: nn.Parameter) -> nn.Parameter:
        """The tensor that the user's optimizer updates for `parameter`: its fp32 master copy if parameters are in half
        precision, else itself."""
        masters = self._updater.masters
        return parameter if masters is None else masters.updated(parameter)

    @property
    def flat_optimizer(self) -> FlatOptimizer | None:
        """Ranvier's own optimizer, if `optim` was given and `optimizer` was not."""
        return self._updater.flat

    @property
    def loss_scale(self) -> LossScale | None:
        """The factor on the loss and its history, in fp16."""
        return self._updater.loss_scale

    @property
    def bad_steps(self) -> BadSteps | None:
        """The detector of bad steps; None without a guard."""
        return self._updater.bad_steps

    def parameters(self) -> list[nn.Parameter]:
        """The trainable parameters that this rank owns and its optimizer updates, up to date. If other ranks own
        further parameters, torch.nn.utils.clip_grad_norm_ warns: use `clip_grad_norm_`."""
        self._updater.wait()
        owned = [spec.parameter for spec in self._updater.gradients.owned_specs()]
        return RankParameters(owned) if self.mesh.size > self.mesh.num_replicas else owned

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """All parameters of this rank's blocks by global name, up to date. A tied parameter has its owner's name, and
        also its own if the rank's ends are on several stages, or are cut differently over rows and columns. A program
        that writes or freezes one end must do so with all ends, on all ranks. In an engine without an optimizer, other
        ends take what the owner's rank has written when the next batch begins."""
        self._values.wait()
        return dict(self._parameters)

    def gradients(self) -> dict[str, Tensor]:
        """After `forward_backward`: the gradients that this rank owns, of the mean loss over the global batch. If no
        loss has reached a parameter, its gradient here is zeros, and its `grad` is None, as in a plain loop."""
        gradients = self._updater.gradients
        self._users_changes.refuse_gradients(applied=True)
        return {spec.name: torch.zeros_like(spec.parameter, dtype=gradients.dtype) if grad is None else grad.detach()
                for spec in gradients.owned_specs() if (grad := spec.parameter.grad) is not None
                or spec.name in gradients.unreached}

    def counters(self) -> dict[str, Any]:
        """Bytes sent and received so far on this rank, its bound on deferred weight gradients (for auto: as measured in
        the first batch), and the longest time without letting messages move."""
        return {"defer_bytes": self._runner.defer_bytes, "bytes_sent": self._connections.transport.bytes_sent,
                "bytes_received_by_axis": self._connections.bytes_received_by_axis(),
                "longest_gap_seconds": self._connections.transport.longest_gap_seconds}

    def report(self, path: str | PathLike[str], **curves: Curve) -> Page:
        """Write a page at `path`, on rank 0, with the timeline of the last training batch, by rank, and the peak
        memory. Takes the spans of `timeline`. Collective; returns the page, which notebooks show, on every rank.

        curves: by name, one value per step, None for steps without one, for example loss=losses; or a dict from steps
        to values. `step`: the numbers of the steps, if they are not 1, 2, 3, ... Raises ConfigError before the first
        batch and for other curves, RanvierError if the file cannot be written.
        """
        self.check_usable("report")
        check_arguments(Engine.report, locals(), but=("curves",))
        return self.timeline.report(path, curves)

    def named_buffers(self) -> dict[str, object]:
        """The entries of this rank's state_dicts other than parameters, by global name: buffers, and whatever else a
        module adds."""
        self._values.wait_for_buffers()
        return {f"{block}.{name}": value for _, block, module in self._stages.blocks
                for name, value in module.state_dict(keep_vars=True).items() if not isinstance(value, nn.Parameter)}

    @property
    def blocks(self) -> dict[str, nn.Module]:
        """This rank's blocks by name, with parameters up to date: plain modules, which may be deep-copied between
        batches (`torch.optim.swa_utils.AveragedModel(engine.blocks[name])`). On rows and columns a copy has the same
        part of each layer and computes with the same ranks."""
        self._values.wait()
        return {name: module for _, name, module in self._stages.blocks}

    @property
    def steps(self) -> int:
        """Batches that this engine has trained on; dropout masks are keyed by it."""
        return self._step

    @property
    def num_accumulated(self) -> int:
        """Batches of `forward_backward` whose gradients the next step applies; 0 for engines that never update."""
        return self._statistics.num_accumulated if self._updater.updates and not self._updater.were_zeroed() else 0

    @property
    def last_norm(self) -> float | None:
        """The gradient norm by which the next step is clipped, with `optim.clip_from` previous-step."""
        return self._updater.last_norm

    def restore_counters(self, steps: int, *, optimizer_steps: int | None, loss_scale: Mapping[str, Any] | None,
                         last_norm: float | None = None, missed_updates: Mapping[str, int] | None = None) -> None:
        """Restore the counts after parameters and optimizer states have been written from outside, as they were after
        `steps` batches.

        missed_updates: parameter -> number of updates that left it unchanged, if there were any.
        """
        self._step, self._statistics.num_updates = steps, 0
        self._values.after_load()
        self.zero_grad()  # of earlier batches, which a step would add to the next one's
        self._updater.restore_counters(optimizer_steps, loss_scale, last_norm, missed_updates or {})

    @property
    def nominal_weight(self) -> tuple[float, bool]:
        """The divisor of losses before their backward, and whether it is final: in fp16 the first batch with a valid
        target may change it."""
        return self._updater.nominal_weight, self._runner.nominal_weight is None

    @nominal_weight.setter
    def nominal_weight(self, value: tuple[float, bool]) -> None:
        self._updater.nominal_weight, is_agreed = value
        if is_agreed:
            self._runner.nominal_weight = None

    @engine_method
    def state_dict(self) -> StateDict:
        """This rank's full state between two steps, as tensors and plain values that `torch.save` accepts: parameters,
        master copies, optimizer states, buffers, counts of steps, learning rate, loss scale.

        Every tensor has the shape that this rank holds, so the state fits only the same rank of the same layout
        (`pipeline/state_dict`); `ranvier.Checkpoints` fit any mesh. As with torch, the tensors are the live ones: copy
        those that must not change. The model and the dropout seed are not part of it. All ranks call it.
        """
        self.check_usable("state_dict")
        self.refuse_in_averages("state_dict")
        return take_state(self)

    @engine_method
    def full_state_dict(self) -> dict[str, Tensor] | None:
        """The full model's parameters and buffers on the CPU, on rank 0; None on other ranks. All ranks call it.

        Names are those of the module's own state_dict: the one that `blocks_of` or `from_transformers` was given, or an
        nn.Sequential of the blocks ("block.parameter"). Tied parameters appear under all of their names. For models
        that fit into one machine's memory; `ranvier.Checkpoints` writes models of any size.
        """
        self.check_usable("full_state_dict")
        self._values.wait()
        with self._lifetime.working(), self.during("full_state_dict"):
            return gather_full_state(self, self._connections.all)

    def during(self, call: str) -> AbstractContextManager[None]:
        """Return a context in which this rank waits for others in `call`; hang reports of all ranks name it."""
        self.world.num_calls += 1
        return self._connections.board.during(call)

    @engine_method
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from what `state_dict` returned on this rank, bit-identical; all ranks call it with their own.

        Raises CheckpointError, before anything is written, for a state of another mesh, rank, model or optimizer.
        """
        self.check_usable("load_state_dict")
        self.refuse_in_averages("load_state_dict")
        load_state(self, state)

    def tensors(self) -> dict[str, dict[str, list[Tensor]]]:
        """Tensors of this rank that persist between steps: {"device": {category: tensors}, "host": {...}}. If the
        device is a CPU, offloaded states count as the host's."""
        buffers = [buffer for _, _, module in self._stages.blocks for buffer in module.buffers()]
        found = self._updater.tensors([*self._parameters.values(), *buffers])
        if self._connections.tensor_mesh is not None:
            workspace = self._connections.tensor_mesh.workspace
            found["device"]["tensor mesh"] = [*workspace.buffers(), *self._stages.gathered_weights()]
        return found

    def count_received(self, count: Callable[[Iterable[Tensor]], None]) -> None:
        """Have `count` called with the tensors of each message from another rank, which no local operation creates."""
        self._connections.inbox.received = count

    def memory(self) -> dict[str, dict[str, int]]:
        """The bytes of `tensors`; each storage counts once."""
        return {place: {category: storage_bytes(tensors) for category, tensors in categories.items()}
                for place, categories in self.tensors().items()}

    # ------------------------------------------------------------------ batches

    @engine_method
    def train_batch(self, microbatches: Batch, *, keep_outputs: bool = False) -> BatchResult:
        """One step: gradients of the mean loss over the global batch, and an update.

        microbatches: this replica's share, as Microbatch objects or (inputs, targets) pairs; all ranks of a replica
        give the same number of them. A batch whose weight is zero everywhere updates nothing and warns. Gradients of
        `forward_backward` since the last step are part of this step.

        keep_outputs: the result has what the last block has returned, and the loss of each microbatch
            (`BatchResult.outputs`, `losses`), on the ranks of the last stage. Columns gather their parts, so all of
            them must give the same value.
        """
        self.check_usable("train_batch")
        self.refuse_in_averages("train_batch")
        if not self._updater.updates:
            raise ConfigError("is missing", code="optimizer-missing", where="Engine(optimizer=...)",
                              remedy="Give the engine an optimizer, or call forward_backward and update by hand.")
        batch = self._check_batch(microbatches)
        if self._updater.in_backward and len(batch) != 1:
            raise ConfigError(f"needs batches of one microbatch, not {len(batch)}: blocks share the memory of "
                              "gradients, in which those of several microbatches cannot add up",
                              code="in-backward-batch", where="optim.update-in-backward", value=True,
                              remedy="Set `--batch.microbatch-size` to a replica's share of the batch, or leave it "
                                     "out.")
        kept = LastOutputs() if keep_outputs and self.is_last_stage else None
        self._accumulate(batch, updates=True, wanted=kept)
        with self._lifetime.batch():  # an optimizer and its hooks are the user's code
            if self._updater.users is not None:
                self._values.wait_for_buffers()  # its hooks may change them
            status = self._updater.finish()
        self._statistics.after_step(status.may_update)
        return self._finish_step(status, batch, kept)

    @engine_method
    def forward_backward(self, microbatches: Batch) -> BatchResult:
        """The gradients of `train_batch` without its update; see `gradients`.

        Several calls before a `step` accumulate, as if their microbatches were one batch: gradients, loss and norm are
        those of the sum of all losses over the sum of all weights. `step`, `train_batch` and `zero_grad` end the
        accumulation; so does setting all gradients to None or zero.
        """
        self.check_usable("forward_backward")
        self.refuse_in_averages("forward_backward")
        if self._updater.in_backward:
            raise ConfigError("leaves no gradients", code="in-backward-keeps-no-gradients",
                              where="optim.update-in-backward", value=True,
                              remedy="Call train_batch, or leave the setting out.")
        self._accumulate(self._check_batch(microbatches), updates=False)
        with self._lifetime.working():
            status = self._updater.average()
        self._statistics.keep()
        self._values.wait_for_buffers()
        self._connections.board.action = _OUTSIDE
        return BatchResult(self._statistics.sums, self._statistics.work, status)

    @engine_method
    def step(self, result: BatchResult) -> None:
        """Update this rank's parameters from the gradients of `forward_backward`, and send tied ones to their ends.

        Gradients may have been changed since, in the same way on all replicas: `parameter.grad` of the parameters that
        `parameters` returns, in place or by replacement; a gradient of None leaves its parameter unchanged.
        `optim.clip_norm` clips them as they are now. result: of any of the calls that have added to them.
        """
        self.check_usable("step")
        self.refuse_in_averages("step")
        if not isinstance(result, BatchResult):
            raise ConfigError("is not what forward_backward has returned", code="step-without-result",
                              where="Engine.step(result)", value=type(result).__name__,
                              remedy="Call engine.step(result) after result = engine.forward_backward(batch).")
        if result.status is None:
            raise ConfigError("is of an evaluation, which has no gradients", code="step-after-evaluation",
                              where="Engine.step(result)", remedy="Give the result of forward_backward.")
        if not self._updater.has_averaged:
            raise ConfigError("has no gradients to apply", code="step-without-gradients",
                              where="Engine.step(result)",
                              remedy="Call forward_backward before each step; train_batch updates on its own.")
        self._users_changes.refuse_gradients(applied=True)
        self._values.wait()
        self._connections.board.action = "the optimizer"
        updates = self._updater.gradients.unapplied  # unless they have been discarded
        with self._lifetime.batch():  # an optimizer and its hooks are the user's code
            status = self._updater.apply()
        self._statistics.after_step(updates and status.may_update)
        self._finish_step(status)

    @engine_method
    def clip_grad_norm_(self, max_norm: Annotated[float, Ge(0)]) -> Tensor:
        """Between `forward_backward` and `step`: scale the gradients of all ranks so that their common L2 norm is at
        most `max_norm`. Returns the norm before, a zero-dimensional tensor. All ranks call it.

        `torch.nn.utils.clip_grad_norm_(engine.parameters(), ...)` would clip each stage by its own norm, and
        `optim.clip_norm` does the same automatically in every step.
        """
        self.check_usable("clip_grad_norm_")
        check_arguments(Engine.clip_grad_norm_, locals())
        if not self._updater.has_averaged:
            raise ConfigError("has no gradients to clip", code="clip-without-gradients", where="Engine.clip_grad_norm_",
                              value=max_norm,
                              remedy="Call it between forward_backward and step; train_batch clips by "
                                     "`--optim.clip-norm`.")
        self._users_changes.refuse_gradients(applied=True)
        return self._updater.clip(max_norm)

    def zero_grad(self) -> None:
        """Discard all gradients, so that the next `forward_backward` starts from zero; for programs that update
        parameters themselves or skip a step. A `step` before the next `forward_backward` changes nothing."""
        self._statistics.forget()
        self._updater.drop_gradients()

    def _accumulate(self, batch: Sequence[Microbatch], *, updates: bool, wanted: LastOutputs | None = None) -> None:
        """Run forwards and backwards, and start every reduction. updates: whether a step follows. wanted: takes what
        the last block returns."""
        self._values.begin(training=True)
        self._users_changes.begin(len(batch))
        if self._came_in_evaluation and self.world.rank == 0 and not some_train(
                module for _, _, module in self._stages.blocks):
            warnings.warn("the entire model is in evaluation mode, as transformers' from_pretrained returns it, and "
                          "trains without dropout: call model.train() before training", stacklevel=4)
        self._came_in_evaluation = False
        self._step += 1
        self._stages.last.loss_factor = self._updater.loss_factor
        self._statistics.begin_training(
            self._updater.were_zeroed, updates=updates, users=self._updater.users,
            rate=None if self._updater.flat is None else self.learning_rate)
        self._updater.begin(self._step, updates=updates, keep=self._statistics.continues_a_step)
        try:
            self._run(batch, training=True, wanted=wanted)
        except BaseException:
            self._statistics.forget()
            raise
        with self._lifetime.working():
            self._users_changes.check()
            self._updater.gradients.all_passed()
            self._values.after_backwards()
        self._connections.board.action = "the average of gradients over data, and the optimizer"

    def _finish_step(self, status: GradientStatus, batch: Sequence[Microbatch] | None = None,
                     kept: LastOutputs | None = None) -> BatchResult:
        """Send new values to the other ends of ties; warn if a step has no valid target, and refuse a bad step. batch:
        all of its microbatches, if they are known."""
        if not status.may_update and status.bad is not None and self._refuses_bad_losses:
            cause = ""
            if batch is not None and not self._updater.in_backward:
                cause = f". It began here: {self.examine(batch)}"
            raise RanvierError(f"{status.bad}, and nothing was updated{cause}", code="step-refused",
                               where=f"step {self._step}",
                               remedy="Lower the learning rate, or look at the data and the loss. Engine(guard=Guard("
                                      "bad_step='skip')) leaves out such steps and reports them in BatchResult.bad; "
                                      "bad_step='none' applies them.")
        if status.may_update:
            self._values.after_update()
        elif not status.overflow and status.bad is None:
            warnings.warn(f"step {self._step} is skipped: no valid target in the global batch", stacklevel=4)
        self._values.wait_for_step()
        self._connections.board.action = _OUTSIDE
        return BatchResult(self._statistics.sums, self._statistics.work, status, kept)

    @engine_method
    def examine(self, microbatches: Batch) -> Cause:
        """Find the origin of a bad step. Runs its batch again, microbatch by microbatch, and compares what all ranks
        see; collective. The result of `gradients` is meaningless afterwards."""
        self.check_usable("examine")
        if self._updater.in_backward:
            raise ConfigError("has changed the parameters of the step that is to be examined",
                              code="in-backward-examined", where="optim.update-in-backward", value=True,
                              remedy="Leave the setting out.")
        batch = self._check_batch(microbatches)
        self._values.wait()
        self._statistics.forget()
        self._connections.board.action = "the examination of a bad step"
        cause = examine(batch, stages=self._stages, layout=self.layout, at=self.coordinates,
                        gradients=self._updater.gradients, judges_gradients=self.loss_scale is None,
                        ranks=self._connections.all, run=partial(self._run, training=True))
        self._updater.gradients.drop_gradients()
        self._connections.board.action = _OUTSIDE
        return cause

    def frozen_stage_blocks(self) -> list[tuple[int, str, nn.Module]]:
        """The blocks of the frozen prefix that this rank's first stage has: (number in the model, name, module)."""
        return [block for block in self._stages.first.blocks if block[0] < self.frozen_blocks]

    def use_cache(self, forward: Callable[[Tensor, State, Callable[..., State]], State] | None,
                  num_blocks: int) -> None:
        """Have `forward(samples, inputs, compute)` compute the first stage's first `num_blocks` blocks in training,
        which are frozen (`ranvier.elastic.cache.AutoCache.forward`). None: the blocks compute themselves."""
        self._stages.first.use_cache(forward, num_blocks)

    @property
    def cached_blocks(self) -> int:
        """Blocks of this rank whose outputs come from a cache."""
        return self._stages.first.cached_blocks

    def agree(self, own: bool) -> bool:
        """Whether `own` is true on all ranks of this stage of this replica; they all call it."""
        if self._connections.tensor_mesh is None:
            return own
        least = torch.tensor([int(own)], dtype=torch.int32)
        for group in (self._connections.tensor_mesh.over_cols, self._connections.tensor_mesh.over_rows):
            group.all_reduce(least, "min").wait()
        return bool(least)

    def gather_over_rows(self, own: list[str]) -> list[list[str]]:
        """Gather `own` from the ranks of this column on all rows; they all call it. Blocks; not for use in every
        step."""
        mesh = self._connections.tensor_mesh
        return [own] if mesh is None else mesh.over_rows.gather_objects(own)

    def watch_layers(self, watch: bool = True) -> None:
        """Have the following steps sum each layer's squared gradient, for `layer_gradient_norms`."""
        self._updater.watch_blocks(self.layout.num_blocks if watch else 0)

    def stage_of_layers(self) -> tuple[int, ...]:
        """For each layer, the index along `pipe` of the stage with its last block."""
        stages = self.layout.stages
        return tuple(stages.rank_of(self.layout.stage_of(self.block_names.index(layer[-1]))) for layer in self.layers)

    @engine_method
    def layer_gradient_norms(self) -> tuple[float, ...]:
        """L2 norm of each layer's gradient of the mean loss in the last step, before clipping; 0.0 for a frozen one.
        Collective; the result is the same on every rank. A tied parameter counts for the block of its first end."""
        self.check_usable("layer_gradient_norms")
        squared = self._updater.squared_by_block()
        if squared is None:
            raise ConfigError("needs a step whose layers were watched", code="layers-not-watched",
                              where="Engine.layer_gradient_norms", remedy="Call engine.watch_layers() before the step.")
        self._connections.all.all_reduce(squared).wait()
        names = self.block_names
        return tuple(float(sum(squared[names.index(block)] for block in layer)) ** 0.5 for layer in self.layers)

    @engine_method
    def compare_replicas(self) -> None:
        """Check that parameters that several ranks hold are bit-identical; collective. If they differ, raises
        RanvierError on every rank, which names the ranks in the minority."""
        self.check_usable("compare_replicas")
        self._values.wait()
        self._connections.board.action = "the comparison of replicas"
        self._connections.replicas = self._connections.replicas or ReplicaComparison(
            self.layout, self.world, self._connections.all)
        self._connections.replicas.compare(self._parameters)
        self._connections.board.action = _OUTSIDE

    @engine_method
    def evaluate(self, microbatches: Batch,
                 observe: Callable[[int, State], None] | None = None) -> BatchResult:
        """Forward only: loss and weight over the global batch, without dropout. observe: called on the ranks of the
        last stage, all of which must give it, with each microbatch's number and the last block's full output for it,
        the same on every column."""
        self.check_usable("evaluate")
        check_arguments(Engine.evaluate, locals(), but=("microbatches",))
        batch = self._check_batch(microbatches, training=False)
        self._run(batch, training=False, wanted=None if observe is None else LastOutputs(observe))
        return BatchResult(self._statistics.sums, self._statistics.work, None)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Context in which parameters are their moving averages (`optim.ema`), for evaluation; collective. Inside,
        memory holds both. Raises ConfigError without averages, and for a step inside, which the end would undo."""
        self.check_usable("averaged")
        with self._values.averaged():
            yield

    def refuse_in_averages(self, call: str) -> None:
        """Raise ConfigError inside `averaged`."""
        self._values.refuse_in_averages(call)

    @engine_method
    def predict(self, microbatches: Batch,
                observe: Callable[[int, State], None] | None = None) -> list[State] | None:
        """Forward only, without the loss: what the last block returns, on the last stage's ranks; None elsewhere.
        observe: called with each microbatch's number and outputs, as in `evaluate`; the list is then empty."""
        self.check_usable("predict")
        check_arguments(Engine.predict, locals(), but=("microbatches",))
        batch = self._check_batch(microbatches, training=False, has_loss=False)
        wanted = LastOutputs(observe, has_loss=False)
        self._run(batch, training=False, wanted=wanted)
        if self.is_last_stage and self._values.may_be_written_apart:
            self._statistics.work.wait()  # which compares them
        return wanted.outputs if self.is_last_stage else None

    @engine_method
    def close(self) -> None:
        """Release the communicators; the modules become plain modules without gradients (with `optim`, parameters
        remain views of one buffer). Idempotent; all ranks call it. After an error it does not wait for other ranks.
        Raises TransportError if others continue to train."""
        if self._lifetime.is_closed:
            return
        self._lifetime.is_closed = True
        calls = self._connections.board.calls
        self._connections.board.calls += 1
        if self._lifetime.failure is None:
            self._values.wait()
            if self._updater.flat is not None:  # last copies into memory that may soon be unregistered and freed
                self._updater.flat.placement.synchronize()
        self._stages.forget_weights()
        self._updater.gradients.detach()
        self._copies.restore()
        if self._lifetime.failure is None:
            self._connections.close(calls=calls, steps=self._step)
        else:
            self._connections.abandon()

    def abandon(self) -> None:
        """Release this rank's own resources after a rank is lost, instead of `close` or after a `close` that failed.
        Does not wait for other ranks; the engine and its parameters can no longer be used."""
        self._lifetime.is_closed = True
        self._updater.gradients.detach()
        self._connections.abandon()

    def forget_states(self) -> None:
        """After `close`: free the memory of gradients and optimizer states for another engine, even if this one is
        still referenced. Parameters stay."""
        self._updater.forget()
        if self._connections.tensor_mesh is not None:
            self._connections.tensor_mesh.workspace.clear()
        release_cached_memory(self.world.device)

    # ------------------------------------------------------------------ one batch

    def _check_batch(self, microbatches: Batch, *, training: bool = True, has_loss: bool = True) -> list[Microbatch]:
        """Check that this rank can begin the batch, and return it. A call that is refused here has changed nothing, and
        may be repeated."""
        refuse_outer_modes(self.world.device, training=training)
        self._users_changes.check_start(training=training)
        batch = as_microbatches(microbatches)
        check_microbatches(batch, needs_inputs=self.is_first_stage, needs_targets=self.is_last_stage and has_loss,
                           training=training)
        if has_loss and self._looks_at_shift:
            self._looks_at_shift = False
            if any(NextTokenLoss.is_unshifted(microbatch.inputs, microbatch.targets) for microbatch in batch):
                warnings.warn("the targets of the batch are the inputs of their own positions, and the loss is that of "
                              "the next token: the model learns to repeat each token. Models of transformers shift "
                              "their labels themselves; here give each position the label of the next one: "
                              "torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)", stacklevel=4)
        self._stages.check(training=training)
        return batch

    def _run(self, batch: Sequence[Microbatch], *, training: bool, wanted: LastOutputs | None = None) -> None:
        self._connections.board.calls += 1
        if not training:
            self._values.begin(training=False)
        with self._lifetime.batch(), self._randomness.batch():
            self._runner.run(batch, call=self._connections.board.calls, step=self._step, training=training,
                             wanted=wanted)
        if not training:
            self._values.after_evaluation()
            self._connections.board.action = _OUTSIDE

    def check_usable(self, call: str) -> None:
        """Raise RanvierError if the engine is closed, or an earlier call has failed in the middle. call: the method
        that is being called, of the engine or of another object."""
        self._lifetime.check(call)
