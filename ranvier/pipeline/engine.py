"""The engine: runs a model's blocks on a mesh of ranks, message by message.

    engine = Engine(model, world, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3))
    result = engine.train_batch(microbatches)

One batch on one rank:

    1. messages that have arrived are told to the schedule
    2. the schedule names the next action; the leader of a row x col stage announces it to its peers
    3. the stage runs it, and what it produced is sent
    4. complete chunks of gradients are averaged over `data` meanwhile
    5. when all is done: ties, the global weight, the optimizer, new values of tied parameters

Nothing waits for a number that only people want: losses and norms are reduced asynchronously and waited for when read,
so a rank that has finished a batch starts the next one while others still work on this one.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from ranvier.arguments import of_engine
from ranvier.comm.board import Board
from ranvier.comm.collectives import Then
from ranvier.comm.message import Kind, Message
from ranvier.comm.protocol import Group, Transport, Work
from ranvier.errors import ConfigError, ModelError, RanvierError
from ranvier.mesh import Mesh
from ranvier.models.block import Loss, Model, State, as_model, freeze, frozen_prefix
from ranvier.models.carried_state import named
from ranvier.optim.gradients import GradientSpec
from ranvier.optim.groups import problems as group_problems
from ranvier.optim.guard import BadSteps, guard_problems, looks_before_update
from ranvier.optim.optimizer import storage_bytes
from ranvier.optim.step import Updater, Verdict
from ranvier.pipeline.build import build_stage, cut, split_model, stage_parameters
from ranvier.pipeline.checkpointing import Checkpoint, stage_segments
from ranvier.pipeline.examine import Cause, examine
from ranvier.pipeline.held_parameters import HeldParameters
from ranvier.pipeline.inbox import Inbox
from ranvier.pipeline.microbatch import Microbatch
from ranvier.pipeline.nominal_weight import NominalWeight
from ranvier.pipeline.policies import MANY, auto_defer_microbatches, auto_in_flight, policy_named
from ranvier.pipeline.replicas import Replicas
from ranvier.pipeline.result import BatchResult
from ranvier.pipeline.schedule import Action, Done, Policy, Schedule, Wait, actions_text
from ranvier.pipeline.sequencer import Sequencer
from ranvier.pipeline.shared_buffers import BufferSync, SharedBuffers
from ranvier.pipeline.stage import Stage, runs_of
from ranvier.pipeline.ties import TiedParameters, gradient_specs, ties_of
from ranvier.pipeline.timeline import Category, Timeline
from ranvier.pipeline.weight_gradients import WeightGradients
from ranvier.run import Guard, Optim, TensorParallel
from ranvier.tensor.mesh import TensorMesh, tensor_problems
from ranvier.world import World

if TYPE_CHECKING:
    from ranvier.optim.loss_scale import LossScale
    from ranvier.optim.optimizer import FlatOptimizer


class Engine:
    """A model on a mesh, close to a module and its optimizer on one device.

    Args:
        model: a `Model`, an `nn.Sequential`, or a list or dict of modules; every rank gives the same one and keeps only
            its stage's blocks, which are moved to the device and `dtype` in place.
        world: this rank, from `ranvier.start`.
        mesh: how the ranks are arranged; by default as `ranvier.start` was told, else all along `data`.
        loss: (output, targets) -> (sum of losses, weight), for models that do not bring theirs.
        optim: train with Ranvier's own AdamW or SGD, as these settings say: in buckets, offloaded, sharded, with
            fp32 master copies for half-precision parameters. Also how gradients add up, travel and are clipped.
        learning_rate: of the optimizer that `optim` describes; `engine.learning_rate` may be set before any step.
        optimizer: from this rank's parameters to a torch optimizer, used instead; None with no `optim` for gradients
            only. Not called on a rank that owns no trainable parameter. With a `dtype` of half precision it updates
            fp32 master copies, which take the parameters' places in its groups once it is built.
        policy: a name or a `Policy` of your own: which ready action a stage runs next.
        partition: cut by cost, or into equal numbers of blocks. seed: of initial weights and dropout.
        in_flight: most microbatches of a replica between the first stage's forward and their return; auto is the number
            of stages, and of those that train nothing once more.
        boundaries: first block of each stage after the first; None cuts by `partition`, from the costs that `sample`
            gives (or numbers of parameters, without).
        defer_bytes: most bytes that postponed weight gradients keep alive on this rank; 0 postpones nothing. auto is
            what those of `auto_defer_microbatches` keep alive: 0 on the first stage, whose input gradient nobody waits
            for. There postponing pays only where times vary much, and that rank already keeps the most activations.
        nominal_weight: expected weight of a global batch. The loss is divided by it before the backward, and gradients
            are corrected to the true weight afterwards. It matters in fp16, where auto takes it from the first batch,
            and a value that is far below that batch's weight lowers the loss scale; elsewhere it only moves rounding,
            and auto is 1.
        timeout_seconds: longest wait for one message before MessageTimeout, with a report of who waits for what.
        checkpoint: layers between stored activations, the others being computed again in the backward; auto needs
            `sample` and chooses what takes the least memory on each stage, "paper" is AxoNN's rule.
        tensor: how blocks are split over the row x col ranks of a stage, which must be written with the layers of
            `ranvier.tensor`.
        dtype: of parameters and activations. float16 scales the loss, and skips steps whose gradients overflow.
        frozen: layers that are not trained, from the first on, with whatever comes before them. frozen_dropout: whether
            they drop out as others do, or compute as in evaluation.
        sample: a microbatch of the usual shape; on several rows a row's share of one.
        guard: when a step is bad, so that nothing is updated from it (`BatchResult.bad`); all its modes but none are
            alike here, and none applies every step. Without a guard, a loss that is NaN or infinite (in fp16: that
            is NaN) is an error, with the block and microbatch that it began with, and nothing is updated from it.
        buffers: what replicas do about buffers that a forward changes, such as BatchNorm's running statistics, after
            each training batch: all take the first replica's (as DistributedDataParallel does), their average, or each
            keeps its own (local), of which checkpoints and exports have the first replica's.
        check_order: compare the order of actions among the ranks of a stage before each action, and of layers among its
            rows before each layer (slow; for debugging).
        flags: whether errors name the command's flags, rather than arguments.

    Raises ModelError or ConfigError for what does not fit, on every rank alike.
    """

    @of_engine
    def __init__(self, model: Model | nn.Sequential | Sequence[nn.Module], world: World, *, mesh: Mesh | None = None,
                 loss: Loss | None = None,
                 optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
                 policy: str | Policy = "message-driven", in_flight: int | Literal["auto"] = "auto",
                 boundaries: Sequence[int] | None = None, partition: Literal["cost", "uniform"] = "cost",
                 defer_bytes: int | Literal["auto"] = "auto", seed: int = 0, dtype: torch.dtype = torch.float32,
                 nominal_weight: float | Literal["auto"] = "auto", timeout_seconds: float = 300.0,
                 optim: Optim | None = None, learning_rate: float = 1e-3, checkpoint: Checkpoint = "none",
                 sample: Microbatch | None = None, tensor: TensorParallel | None = None, guard: Guard | None = None,
                 frozen: int = 0, frozen_dropout: bool = True, buffers: BufferSync = "broadcast",
                 check_order: bool = False, flags: bool = False) -> None:
        self.flags = flags
        mesh = mesh or world.mesh or Mesh(data=world.size)
        if mesh.size != world.size:
            raise ConfigError(f"has {mesh.size} ranks, but {world.size} were started", where="mesh", value=str(mesh),
                              remedy="Make data x pipe x row x col equal to the number of ranks.")
        self.world, self.mesh, self.coordinates = world, mesh, mesh.coordinates(world.rank)
        self._policy = policy_named(policy)
        if in_flight != "auto" and in_flight < 1:
            raise ConfigError("must be at least 1", where="pipeline.in-flight", value=in_flight,
                              remedy="Use auto, or at least the number of stages.")
        self.defer_bytes = 0 if defer_bytes == "auto" else defer_bytes
        self._auto_defer = defer_bytes == "auto"
        self._call = 0
        self._step = 0
        self._accumulated: Tensor | None = None  # losses and weights of `forward_backward` since the last step
        self._earlier: Tensor | None = None  # the same, while another batch of that step runs
        self._zeroed = False
        self._closed = False
        self._replicas: Replicas | None = None
        self.timeline = Timeline()

        model, tensor = freeze(as_model(model, loss), frozen), tensor or TensorParallel()
        self.layers, self.frozen = model.layers, frozen
        self.block_names = list(model.blocks)
        self.frozen_blocks = frozen_prefix(model, frozen)
        still = range(0 if frozen_dropout else self.frozen_blocks)
        for problem in tensor_problems(mesh, tensor):
            raise problem
        self.stages, self.layout = cut(model, mesh, boundaries=boundaries, how=partition, sample=sample, dtype=dtype,
                                       device=world.device.type, tensor=tensor)
        idle = sum(not row.num_trainable for row in self.stages.rows)
        self.in_flight = auto_in_flight(mesh.pipe, idle) if in_flight == "auto" else in_flight
        self._tensor_mesh = self._open_tensor_mesh(tensor, check_order)
        if self._tensor_mesh is not None:
            model = split_model(model, self._tensor_mesh)
        blocks = build_stage(model, self.layout, self.coordinates, seed=seed, dtype=dtype, device=world.device)
        self._parameters, self._held = stage_parameters(self.layout, blocks), HeldParameters(blocks)
        ties = ties_of(self.layout, world.rank, self._parameters)
        self._ties = TiedParameters(ties, self._send, self._wait_for)
        self._open_communication(timeout_seconds, check_order)
        self._synchronise_start(blocks)
        self._buffers = self._share_buffers(blocks, buffers)

        segments = self._segments(checkpoint, model)
        self._refuses_bad_losses = guard is None
        guard = guard or Guard(bad_step="none")
        for problem in (*group_problems(optim or Optim(), [parameter.name for parameter in self.layout.parameters]),
                        *guard_problems(guard, optim or Optim())):
            raise problem
        self.learning_rate = learning_rate
        self._updater = Updater(
            self._gradient_specs(), self._data_group, self._all,
            optim=optim or Optim(), own=optim is not None and optimizer is None, optimizer=optimizer, dtype=dtype,
            device=world.device, nominal_weight=1.0 if nominal_weight == "auto" else nominal_weight,
            runs=[range(blocks[run.start][0], blocks[run.start][0] + len(run))
                  for run, _ in runs_of(len(blocks), segments)],
            send_to_owner=lambda spec: self._ties.send_gradient(spec.name, self._call), weight=self._weight,
            timeline=self.timeline, progress=self._progress,
            earlier_weight=self._earlier_weight, bad_loss=self._bad_loss if self._refuses_bad_losses else None,
            bad_steps=BadSteps(guard, self._loss) if looks_before_update(guard, optim or Optim()) else None)
        if self._updater.in_backward:  # a product that waits would hold its block's gradients
            self.defer_bytes, self._auto_defer = 0, False
        self._nominal_weight = NominalWeight(self._all) if dtype is torch.float16 else None
        self._auto_nominal_weight = nominal_weight == "auto"
        gradients = self._updater.gradients
        self._stage = Stage(blocks, still=still, loss=model.loss if self.is_last_stage else None, seed=seed,
                            device=world.device, progress=self._progress, block_passed=gradients.block_passed,
                            segments=segments, mesh=self._tensor_mesh,
                            weight_gradients=WeightGradients(gradients.chunk_of, gradients.queued, gradients.added))

    # ------------------------------------------------------------------ what a rank is

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank needs the inputs."""
        return self.coordinates.pipe == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank needs the targets."""
        return self.coordinates.pipe == self.mesh.pipe - 1

    @property
    def boundaries(self) -> tuple[int, ...]:
        """First block of each stage after the first."""
        return self.stages.boundaries

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The user's own, where one was given and this rank owns something trainable."""
        return self._updater.users

    def updated(self, parameter: nn.Parameter) -> nn.Parameter:
        """What the user's optimizer updates for `parameter`: its fp32 master copy where parameters are in half
        precision, else itself."""
        masters = self._updater.masters
        return parameter if masters is None else masters.of.get(parameter, parameter)

    @property
    def flat_optimizer(self) -> FlatOptimizer | None:
        """Ranvier's, where `optim` was given and `optimizer` was not."""
        return self._updater.flat

    @property
    def loss_scale(self) -> LossScale | None:
        """The factor on the loss and its history, in fp16."""
        return self._updater.loss_scale

    @property
    def bad_steps(self) -> BadSteps | None:
        """What judges steps, where a guard looks."""
        return self._updater.bad_steps

    def parameters(self) -> list[nn.Parameter]:
        """The trainable parameters that this rank owns and an optimizer of it updates, up to date."""
        self._updater.wait()
        return [spec.parameter for spec in self._updater.gradients.owned()]

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """All parameters of this rank's blocks by global name, up to date; a tied one by its owner's name, and on rows
        and columns by its own, too, where the ends on a stage are cut differently. Who writes one writes both."""
        self._finish_update()
        return dict(self._parameters)

    def gradients(self) -> dict[str, Tensor]:
        """After `forward_backward`: the gradients that this rank owns, of the mean loss over the global batch."""
        return {spec.name: spec.parameter.grad for spec in self._updater.gradients.owned()}

    def counters(self) -> dict:
        """Bytes so far on this rank, the bound on postponed weight gradients that holds here (for auto: what the first
        batch has shown), and the longest time without letting messages move."""
        return {"defer_bytes": self.defer_bytes, "bytes_sent": self._transport.bytes_sent,
                "bytes_received_by_axis": {"pipe": self._inbox.bytes_received,
                                           "data": sum(group.bytes_received for group in (
                               self._data_group, *self._sum_groups.values()))}
                | ({} if self._tensor_mesh is None else {"row": self._tensor_mesh.over_rows.bytes_received,
                                                         "col": self._tensor_mesh.over_cols.bytes_received}),
                "longest_gap_seconds": self._transport.longest_gap_seconds}

    def named_buffers(self) -> dict[str, object]:
        """What the state_dict of this rank's blocks has beside parameters, by global name: buffers, and whatever else a
        module puts there."""
        self._buffers.finish()
        return {f"{block}.{name}": value for _, block, module in self._stage.blocks
                for name, value in module.state_dict(keep_vars=True).items() if not isinstance(value, nn.Parameter)}

    @property
    def blocks(self) -> dict[str, nn.Module]:
        """This rank's blocks by name, with parameters up to date: plain modules, which may be copied and saved between
        batches (`torch.optim.swa_utils.AveragedModel(engine.blocks[name])`). On rows and columns a copy has the same
        part of each layer and computes with the same ranks."""
        self._finish_update()
        return {name: module for _, name, module in self._stage.blocks}

    @property
    def steps(self) -> int:
        """Batches that this engine has trained on; dropout masks are keyed by it."""
        return self._step

    def go_on_from(self, steps: int, *, optimizer_steps: int | None, loss_scale: Mapping | None) -> None:
        """Parameters and optimizer states have been written from outside, as they were after `steps` batches."""
        self._step = steps
        self._stage.forget_weights()
        self._updater.go_on_from(optimizer_steps, loss_scale)

    def tensors(self) -> dict[str, dict[str, list[Tensor]]]:
        """What lives from step to step on this rank: {"device": {category: tensors}, "host": {...}}. On a CPU as the
        device, offloaded states count as the host's."""
        buffers = [buffer for _, _, module in self._stage.blocks for buffer in module.buffers()]
        found = self._updater.tensors([*self._parameters.values(), *buffers])
        if self._tensor_mesh is not None:
            found["device"]["tensor mesh"] = [*self._tensor_mesh.workspace.buffers(), *self._stage.gathered_weights()]
        return found

    def memory(self) -> dict[str, dict[str, int]]:
        """The bytes of `tensors`, each storage once."""
        return {place: {category: storage_bytes(tensors) for category, tensors in categories.items()}
                for place, categories in self.tensors().items()}

    # ------------------------------------------------------------------ batches

    @of_engine
    def train_batch(self, microbatches: Sequence[Microbatch | tuple]) -> BatchResult:
        """One step: gradients of the mean loss over the global batch, and an update.

        microbatches: this replica's share, as Microbatch objects or (inputs, targets) pairs; all ranks of a replica
        give the same number of them. A batch whose weight is zero everywhere updates nothing and warns. Gradients
        of `forward_backward` since the last step are part of this one.
        """
        if not self._updater.updates:
            raise ConfigError("is missing", where="Engine(optimizer=...)",
                              remedy="Give the engine an optimizer, or call forward_backward and update by hand.")
        if self._updater.in_backward and len(microbatches) != 1:
            raise ConfigError(f"needs batches of one microbatch, not {len(microbatches)}",
                              where="optim.update-in-backward", value=True,
                              remedy="Set --batch.microbatch-size to a replica's share of the batch, or leave it out.")
        self._updater.learning_rate = self.learning_rate
        self._accumulate(microbatches, updates=True)
        verdict = self._updater.finish()
        self._earlier = self._accumulated = None
        return self._stepped(verdict, microbatches)

    @of_engine
    def forward_backward(self, microbatches: Sequence[Microbatch | tuple]) -> BatchResult:
        """The gradients of `train_batch` without its update; see `gradients`.

        Several calls before a `step` add up, as if their microbatches were one batch: gradients, loss and norm are of
        the sum of all losses over the sum of all weights. `step`, `train_batch` and `zero_grad` end that; so does
        setting all gradients to None or zero.
        """
        if self._updater.in_backward:
            raise ConfigError("keeps no gradients", where="optim.update-in-backward", value=True,
                              remedy="Call train_batch, or leave the setting out.")
        self._accumulate(microbatches, updates=False)
        verdict = self._updater.average()
        self._accumulated, self._earlier = self._stats[:2].clone(), None
        self._buffers.finish()
        self._board.doing = _OUTSIDE
        return BatchResult(self._stats, self._stats_work, verdict)

    @of_engine
    def step(self, result: BatchResult) -> None:
        """Update this rank's parameters from the gradients of `forward_backward`, and send tied ones to their ends."""
        self._held.adopt()
        self._board.doing = "the optimizer"
        self._updater.learning_rate = self.learning_rate
        self._updater.apply(result.verdict)
        self._accumulated = None
        self._stepped(result.verdict)

    def zero_grad(self) -> None:
        """The next `forward_backward` begins with gradients of zero; for those who update by themselves."""
        self._accumulated = None
        self._updater.gradients.flat.zero_()

    def _accumulate(self, microbatches: Sequence[Microbatch | tuple], *, updates: bool) -> None:
        """Run forwards and backwards, and start every reduction. updates: whether a step follows."""
        self._finish_update()
        for name, parameter in self._parameters.items():
            # an end that `named_parameters` leaves out trains as the one that it shows
            parameter.requires_grad_(self._parameters[self.layout[name].owner].requires_grad)
            if parameter.requires_grad and not self.layout[name].trainable:
                raise ModelError("was frozen when the engine was built, and is trainable now",
                                 where=f"parameter {name}", remedy="Build a new engine to train more parameters.")
        self._step += 1
        self._stage.loss_factor = self._updater.loss_factor
        self._earlier, self._accumulated = self._accumulated, None  # which a batch that fails would leave unusable
        self._zeroed = self._earlier is not None and self._updater.gradients.were_zeroed()
        self._updater.begin(self._step, updates=updates, keep=self._earlier is not None)
        try:
            self._run(microbatches, training=True)
        except BaseException:
            self._earlier = None
            raise
        self._held.check_kept()
        self._updater.gradients.all_passed()
        for tie in self._ties.add_gradients(self._call):
            self._updater.gradients.added(tie.parameter)
        self._buffers.start()  # after the reduction of every chunk has begun, so in one order on all replicas
        self._board.doing = "the average of gradients over data, and the optimizer"

    def _weight(self) -> float:
        """The weight of the global batch, which is being summed since this rank's last forward."""
        self._stats_work.wait()
        return float(self._stats[1])

    def _earlier_weight(self) -> float:
        """Of it, the weight of earlier batches of this step."""
        self._stats_work.wait()
        return 0.0 if self._earlier is None or self._stats[2] else float(self._earlier[1])

    def _bad_loss(self) -> str | None:
        """"loss is nan", where the mean loss of the global batch is no finite number. An infinite one in fp16 may be an
        overflow, of which the gradients tell."""
        loss = self._loss()
        good = not math.isnan(loss) if self.loss_scale is not None else math.isfinite(loss)
        return None if good else f"loss is {loss}"

    def _loss(self) -> float:
        """The mean loss of the global batch, which is reduced with its weight."""
        weight = self._weight()
        return float(self._stats[0]) / weight

    def _stepped(self, verdict: Verdict, microbatches: Sequence[Microbatch | tuple] | None = None) -> BatchResult:
        """New values go to the other ends of ties; a step without a valid target is told of, and a bad one refused.
        microbatches: all of them, where that is known."""
        if verdict.bad is not None and self._refuses_bad_losses:
            examined = microbatches is not None and not self._updater.in_backward
            cause = f". It began here: {self.examine(microbatches)}" if examined else ""
            raise RanvierError(f"{verdict.bad}, and nothing was updated{cause}", where=f"step {self._step}",
                               remedy="Lower the learning rate, or look at the data and the loss. Engine(guard=Guard("
                                      "bad_step='skip')) leaves out such steps and reports them in BatchResult.bad; "
                                      "bad_step='none' applies them.")
        if verdict.steps:
            if self._ties.owns:
                self._updater.wait()
            self._ties.send_values(self._call, trained=True)
        elif not verdict.overflow and verdict.bad is None:
            warnings.warn(f"step {self._step} is skipped: no valid target in the global batch", stacklevel=4)
        self._buffers.finish()
        self._board.doing = _OUTSIDE
        return BatchResult(self._stats, self._stats_work, verdict)

    @of_engine
    def examine(self, microbatches: Sequence[Microbatch | tuple]) -> Cause:
        """After a bad step: what it began with. Runs its batch again, microbatch by microbatch, and compares what all
        ranks see; collective. What `gradients` gives is of no use afterwards."""
        if self._updater.in_backward:
            raise ConfigError("has changed the parameters of the step that is to be examined",
                              where="optim.update-in-backward", value=True, remedy="Leave the setting out.")
        self._finish_update()
        self._accumulated = None
        self._board.doing = "the examination of a bad step"
        batch = [entry if isinstance(entry, Microbatch) else Microbatch(*entry) for entry in microbatches]
        cause = examine(batch, stage=self._stage, num_blocks=self.layout.num_blocks, is_last_stage=self.is_last_stage,
                        mesh=self.mesh, at=self.coordinates, gradients=self._updater.gradients,
                        judges_gradients=self.loss_scale is None, ranks=self._all,
                        run=partial(self._run, training=True))
        self._board.doing = _OUTSIDE
        return cause

    def frozen_stage_blocks(self) -> list[tuple[int, str, nn.Module]]:
        """The blocks of the frozen prefix that this rank's stage has: (number in the model, name, module)."""
        return [block for block in self._stage.blocks if block[0] < self.frozen_blocks]

    def use_cache(self, forward: Callable[[Tensor, State, Callable], State] | None, num_blocks: int) -> None:
        """On the first stage: have its first `num_blocks` blocks, which are frozen, computed by `forward(samples,
        inputs, compute)` in training (see `ranvier.elastic.auto_cache.AutoCache.forward`); None: by themselves."""
        self._stage.use_cache(forward, num_blocks)

    @property
    def cached_blocks(self) -> int:
        """Blocks of this rank whose outputs come from a cache."""
        return self._stage.cached_blocks

    def agree(self, mine: bool) -> bool:
        """Whether `mine` is true on all ranks of this stage of this replica; they all call it."""
        if self._tensor_mesh is None:
            return mine
        least = torch.tensor([int(mine)], dtype=torch.int32)
        for group in (self._tensor_mesh.over_cols, self._tensor_mesh.over_rows):
            group.all_reduce(least, "min").wait()
        return bool(least)

    def watch_layers(self, watch: bool = True) -> None:
        """Have the steps from here on sum up each layer's gradient, for `layer_gradient_norms`."""
        self._updater.watch_blocks(self.layout.num_blocks if watch else 0)

    def layer_gradient_norms(self) -> tuple[float, ...]:
        """L2 norm of each layer's gradient of the mean loss in the last step, before clipping; 0.0 for a frozen one.
        Collective, and the same on every rank. Of a tied parameter the block of its first end has it."""
        squared = self._updater.squared_by_block()
        self._all.all_reduce(squared).wait()
        names = self.block_names
        return tuple(float(sum(squared[names.index(block)] for block in layer)) ** 0.5 for layer in self.layers)

    @of_engine
    def compare_replicas(self) -> None:
        """Compare, bit by bit, the parameters that several ranks hold alike; collective. RanvierError on every rank,
        with the odd ones out, where they differ."""
        self._finish_update()
        self._board.doing = "the comparison of replicas"
        self._replicas = self._replicas or Replicas(self.layout, self.world, self._all)
        self._replicas.compare(self._parameters)
        self._board.doing = _OUTSIDE

    @of_engine
    def evaluate(self, microbatches: Sequence[Microbatch | tuple],
                 observe: Callable[[int, State], None] | None = None) -> BatchResult:
        """Forward only: loss and weight over the global batch, without dropout. observe: called on the ranks of the
        last stage with each microbatch's number and what the last block has returned for it."""
        self._stage.observe = observe
        try:
            self._run(microbatches, training=False)
        finally:
            self._stage.observe = None
        return BatchResult(self._stats, self._stats_work, None)

    @of_engine
    def predict(self, microbatches: Sequence[Microbatch | tuple]) -> list[State] | None:
        """Forward only, without the loss: what the last block returns, on the last stage's ranks; None elsewhere."""
        self._run(microbatches, training=False, keep_outputs=True)
        return self._stage.outputs if self.is_last_stage else None

    @of_engine
    def close(self) -> None:
        """Give the communicators back; the modules are plain modules again, without gradients (parameters remain views
        of one buffer where `optim` was given). Idempotent; all ranks call it."""
        if not self._closed:
            self._closed = True
            self._board.calls += 1
            self._finish_update()
            self._stage.forget_weights()
            self._updater.gradients.detach()
            self._transport.flush()
            self._all.barrier()
            self._transport.close()
            self._sequencer.close()
            for group in self._groups:
                group.close()
            self._data_group.close()
            if self._replicas is not None:
                self._replicas.close()
            self._all.close()
            self._board.close()

    # ------------------------------------------------------------------ start

    def _open_tensor_mesh(self, tensor: TensorParallel, check_order: bool) -> TensorMesh | None:
        """The groups of this rank's row and column, and those over which parameters with several holders sum their
        gradients; None where a stage is one rank."""
        backend, mesh = self.world.backend, self.mesh
        self._groups: list[Group] = []
        self._sum_groups: dict[tuple[str, ...], Group] = {}
        if mesh.stage_size == 1:
            return None
        over_rows, over_cols = (backend.group(axis, mesh.groups(axis)) for axis in ("row", "col"))
        self._groups += [over_rows, over_cols]
        for axes in sorted({parameter.summed for parameter in self.layout.parameters} - {()}):
            self._sum_groups[axes] = backend.group(f"data and {' and '.join(axes)}", mesh.groups("data", *axes))
        self._groups += self._sum_groups.values()
        return TensorMesh(over_rows, over_cols, tensor, device=self.world.device.type, check_order=check_order)

    def _gradient_specs(self) -> list[GradientSpec]:
        """Where each gradient goes, over whom it is summed, and whether this rank's counts in the norm."""
        return [spec if spec.sent_to_owner else
                replace(spec, group=self._sum_groups.get(self.layout[spec.name].summed),
                        copied=bool(self.layout.copy_axes(spec.name)),
                        counts=self.layout.is_first_copy(spec.name, self.coordinates))
                for spec in gradient_specs(self.layout, self.coordinates.pipe, self._parameters)]

    def _segments(self, checkpoint: Checkpoint, model: Model) -> list[range]:
        """The runs of this stage's blocks that are computed again in their backward."""
        if checkpoint not in ("none", "auto", "paper") and not (type(checkpoint) is int and checkpoint > 0):
            raise ConfigError("must be none, auto, paper, or a number of layers", where="memory.checkpoint",
                              value=checkpoint, remedy="Set a whole number of at least 1, or one of the three words.")
        if checkpoint == "auto" and self.stages.costs is None:
            raise ConfigError("needs a sample to count activations with", where="memory.checkpoint", value=checkpoint,
                              remedy="Give the engine sample=, a microbatch of the usual shape, or set an interval.")
        own = self.layout.blocks(self.coordinates.pipe)
        names = list(model.blocks)[own.start:own.stop]
        costs = self.stages.costs[own.start:own.stop] if self.stages.costs else ()
        stored = self._policy.stored(self._policy.in_flight(self.in_flight, MANY), self.coordinates.pipe,
                                     self.mesh.pipe)
        return stage_segments(checkpoint, names, model.layers, [cost.kept_bytes for cost in costs],
                              [cost.input_bytes for cost in costs], stored)

    def _open_communication(self, timeout_seconds: float, check_order: bool) -> None:
        backend, mesh, rank = self.world.backend, self.mesh, self.world.rank
        self._board = Board(self.world.store, rank, mesh, hang=self.world.hang and self.world.hang())
        self._data_group: Group = backend.group("data", mesh.groups("data"))
        self._all: Group = backend.group("all", [range(mesh.size)])
        self._sequencer = Sequencer(mesh, rank, backend, self._board, timeout_seconds, check_order)
        self._transport: Transport = backend.transport("pipeline")
        self._before, self._after = mesh.neighbour(rank, -1), mesh.neighbour(rank, +1)
        tied = [peer for tie in self._ties.ties for peer in tie.peers]
        peers = sorted({peer for peer in (self._before, self._after, *tied) if peer is not None})
        self._transport.connect(peers, peers, self._edge_capacity())
        self._inbox = Inbox(self._transport, self._board, self.timeline, timeout_seconds, self._ties.receive)

    def _edge_capacity(self) -> int:
        """Room for the largest carried state that crosses a boundary, and its description; 1 MiB when unknown."""
        if self.stages.costs is None:
            return 1 << 20
        return 4096 + max((self.stages.costs[cut - 1].output_bytes for cut in self.boundaries), default=0)

    def _synchronise_start(self, blocks: list[tuple[int, str, nn.Module]]) -> None:
        """Replicas start from replica 0's weights and buffers, ends of a tie from their owner's, and positions of the
        tensor mesh that hold the same from the first of them."""
        tensors = {tensor: self._data_group for _, _, module in blocks
                   for tensor in (*module.parameters(), *module.buffers())}
        tensors |= {parameter: self._sum_groups[self.layout[name].summed]
                    for name, parameter in self._parameters.items() if self.layout[name].summed}
        sent = {tensor: tensor.data.contiguous() for tensor in tensors}  # itself, but for transposed ones and the like
        for work in [group.broadcast(sent[tensor]) for tensor, group in tensors.items() if len(group.ranks) > 1]:
            work.wait()
        for tensor, value in sent.items():
            tensor.data.copy_(value)
        copies = [parameter for name, parameter in self._parameters.items() if "col" in self.layout.copy_axes(name)]
        for work in [self._tensor_mesh.over_cols.broadcast(parameter.data) for parameter in copies]:
            work.wait()
        self._ties.send_values(self._call, trained=False)

    def _share_buffers(self, blocks: list[tuple[int, str, nn.Module]], how: BufferSync) -> SharedBuffers:
        """The buffers of this stage, over all ranks that compute its blocks for other samples."""
        group = self._data_group
        if self.mesh.row > 1:
            group = self.world.backend.group("buffers", self.mesh.groups("data", "row"))
            self._groups.append(group)
        shared = SharedBuffers(blocks, group, how)
        if how != "broadcast":
            count = torch.tensor([len(shared)])
            self._all.all_reduce(count).wait()
            why = "there is one replica" if len(group.ranks) == 1 else "no block has a buffer" if not count else None
            if why is not None and self.world.rank == 0:
                warnings.warn(f"Engine(buffers={how!r}) has no effect: {why}", stacklevel=3)
        return shared

    # ------------------------------------------------------------------ one batch

    def _run(self, microbatches: Sequence[Microbatch | tuple], *, training: bool, keep_outputs: bool = False) -> None:
        self._call += 1
        self._board.calls += 1
        batch = [entry if isinstance(entry, Microbatch) else Microbatch(*entry) for entry in microbatches]
        self._finish_update()
        self._stage.begin(training)
        if self._tensor_mesh is not None:
            self._tensor_mesh.whole_outputs = keep_outputs
        schedule = Schedule(
            stage=self.coordinates.pipe, num_stages=self.mesh.pipe, num_microbatches=len(batch), policy=self._policy,
            in_flight=self.in_flight, training=training, defer_bytes=self.defer_bytes)
        ran: list[Action] = []
        running: Action | None = None
        try:
            self._inbox.begin(self._call, self._step, len(batch),
                              schedule.on_message if self._sequencer.leads else _unheard)
            if training and self._nominal_weight is not None and not (self.is_last_stage and batch):
                self._nominal_weight.start(0.0)
            self._stats_work = None if batch else self._reduce_stats()
            while (action := self._next_action(schedule)) is not None:
                running = action
                facts = self._execute(action, batch, training, keep_outputs)
                running = None
                if self._sequencer.leads:
                    if self._auto_defer:
                        auto = auto_defer_microbatches(self.coordinates.pipe, self.mesh.pipe)
                        self.defer_bytes = max(self.defer_bytes, auto * facts.get("deferrable_bytes", 0))
                        schedule.defer_bytes = self.defer_bytes
                    schedule.on_done(action, **facts)
                if training and self._nominal_weight is not None and self.is_last_stage and not ran:
                    self._estimate_weight(len(batch))
                if action.kind == "F" and action.microbatch == len(batch) - 1:
                    self._stats_work = self._reduce_stats()
                ran.append(action)
        except Exception as error:
            self._stage.clear()
            text = f"{actions_text(ran)} >{running}<" if running else actions_text(ran)
            error.add_note(f"{self._board.name(self.world.rank)}: actions so far: {text.strip() or 'none'}")
            raise
        finally:
            self._stage.end()
        if training and self._nominal_weight is not None and self._nominal_weight.started:
            self._take_nominal_weight()
        if not training:
            self._board.doing = _OUTSIDE

    def _estimate_weight(self, num_microbatches: int) -> None:
        """After the first forward of the last stage: all its ranks need the estimate for their first backward."""
        counts = self.coordinates.col == 0
        self._nominal_weight.start(float(self._stage.loss_and_weight[1]) * num_microbatches if counts else 0.0)
        self._take_nominal_weight()

    def _take_nominal_weight(self) -> None:
        weight = self._nominal_weight.agree()
        if weight is not None:
            self._updater.expect_weight(weight, divide_by_it=self._auto_nominal_weight)
            self._stage.loss_factor = self._updater.loss_factor
            self._nominal_weight = None

    def _next_action(self, schedule: Schedule) -> Action | None:
        if not self._sequencer.leads:
            return self._sequencer.next(self._call)
        self._inbox.poll()
        while isinstance(action := schedule.next_action(), Wait):
            if action.backward is not None:
                self._inbox.wait(f"the backward of microbatch {action.backward}", self._after)
            else:
                self._inbox.wait(f"the forward of microbatch {action.forward}", self._before)
        action = None if isinstance(action, Done) else action
        self._sequencer.announce(self._call, action)
        return action

    def _execute(self, action: Action, batch: list[Microbatch], training: bool, keep_outputs: bool) -> dict:
        """Run `action`, send what it produced, and return what the schedule wants to know about it."""
        number = action.microbatch
        match action.kind:
            case "F":
                inputs, wants = self._inputs(number, batch)
                started = self._start(action)
                outcome = self._stage.forward(number, self._step, batch[number], inputs, wants, training=training,
                                              keep_outputs=keep_outputs)
                if not self.is_last_stage:
                    self._transport.send(self._after, Message(Kind.FORWARD, self._call, number, outcome.tensors,
                                                              outcome.requires_grad))
                awaited = bool(wants) or not self._auto_defer
                facts = {"expects_backward": outcome.expects_backward,
                         "deferrable_bytes": outcome.deferrable_bytes if awaited else 0}
            case "B":
                arrived = {} if self.is_last_stage else self._inbox.take("return", number, self._after).tensors
                started = self._start(action)
                gradients, products = self._stage.backward(number, self._to_device(arrived), defer=action.defer,
                                                           last=number == len(batch) - 1)
                self._send_return(number, gradients)
                facts = {"products": products}
            case "C":
                if not self.is_last_stage:
                    self._inbox.take("return", number, self._after)
                self._send_return(number, {})
                return {}
            case "W":
                started = self._start(action)
                self._stage.weight(number, action.product)
                self._progress()
                facts = {}
        self.timeline.add(_CATEGORIES[action.kind], str(action), self._step, started)
        return facts

    def _start(self, action: Action) -> int:
        self._board.doing = f"{_CATEGORIES[action.kind]} {action.microbatch}"
        return time.monotonic_ns()

    def _inputs(self, number: int, batch: list[Microbatch]) -> tuple[dict[str, Tensor], frozenset[str]]:
        """The carried state that enters this stage, and which of it wants a gradient."""
        if not self.is_first_stage:
            message = self._inbox.take("forward", number, self._before)
            return self._to_device(message.tensors), message.requires_grad
        if batch[number].inputs is None:
            raise ModelError("has no inputs on the first stage", where=f"microbatch {number}",
                             remedy="Give the ranks of the first stage the inputs of every microbatch.")
        return self._to_device(named(batch[number].inputs, f"inputs of microbatch {number}")), frozenset()

    def _to_device(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(self.world.device, non_blocking=True) for name, tensor in tensors.items()}

    def _send_return(self, number: int, gradients: dict[str, Tensor]) -> None:
        """What goes back over the edge before this stage: gradients where there are some, else a bare credit."""
        if not self.is_first_stage:
            kind = Kind.BACKWARD if gradients else Kind.CREDIT
            self._transport.send(self._before, Message(kind, self._call, number, gradients))

    def _progress(self) -> None:
        """Let messages and reductions move; called at every block boundary and between products."""
        self._transport.progress()
        self._updater.progress()

    def _reduce_stats(self) -> Work:
        """Start summing loss and weight over all ranks; of a row of the last stage, all columns know the same."""
        counts = self.is_last_stage and self.coordinates.col == 0
        mine = self._stage.loss_and_weight.to("cpu") if counts else torch.zeros(2, dtype=torch.float64)
        earlier, stats = self._earlier, torch.cat([mine, torch.tensor([self._zeroed], dtype=torch.float64)])
        self._stats = stats

        def add_earlier() -> None:
            if earlier is not None and not stats[2]:  # unless somebody has set gradients to zero, on any rank
                stats[:2].add_(earlier)

        return Then(self._all.all_reduce(stats), add_earlier)

    def _finish_update(self) -> None:
        """Wait until parameters are those of the last step, updated by other replicas or other ends of ties too; take
        over those that have been replaced since."""
        self._updater.wait()
        self._ties.receive_values()
        self._buffers.finish()
        self._held.adopt()

    def _send(self, destination: int, message: Message) -> None:
        self._transport.send(destination, message)

    def _wait_for(self, what: str, source: int) -> None:
        self._inbox.wait(what, source)


def _unheard(direction: str, microbatch: int) -> None:
    """Where the leader decides, arrivals elsewhere are news to nobody."""


_OUTSIDE = "code outside the engine"
_CATEGORIES: dict[str, Category] = {"F": "forward", "B": "backward", "W": "weight"}
