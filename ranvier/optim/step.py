"""Updates parameters from the gradients of a batch, or skips the step on all ranks.

If nothing may skip or clip the step, a chunk is updated as soon as it is reduced, while the next one is still being
reduced:

    reduce   | 0 | 1 | 2 | 3 |
    update       | 0 | 1 | 2 | 3 |

Clipping needs the norm of all gradients, and an overflow or a bad step anywhere skips the step everywhere. With any of
these, all chunks are reduced first, (norm, overflow, bad) is combined into one status over all ranks, and updates
follow:

    reduce   | 0 | 1 | 2 | 3 |         | status  |
    update   states of first buckets copied in   | 0 | 1 | 2 | 3 |

With one microbatch, blocks may be updated while the backward still runs, and share one piece of memory for gradients:

    backward | head | layer 7 |          | layer 6 |          |
    reduce, update            | head     |         | layer 7  | ...
"""

from __future__ import annotations

import inspect
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ranvier.comm.protocol import Group, Work
from ranvier.config.resolve import bucket_size as resolve_bucket_size
from ranvier.config.resolve import chunk_size
from ranvier.config.rules import in_backward_problems
from ranvier.config.run import Optim
from ranvier.errors import ConfigError
from ranvier.layout import FlatOrder
from ranvier.optim.chunks import Chunk, GradientSpec
from ranvier.optim.gradients import Gradients
from ranvier.optim.guard import BadSteps
from ranvier.optim.loss_scale import LossScale
from ranvier.optim.masters import MasterCopies
from ranvier.optim.optimizer import FlatOptimizer, resolve_offload, tensors_by_category
from ranvier.precision import is_half, reduce_dtype
from ranvier.schedule.spans import Timeline
from ranvier.system.pinned_memory import HostCopy

_MAX_WEIGHT_RATIO = 8
"""Largest ratio of a batch's weight to its nominal weight at which the initial loss scale is kept."""


@dataclass(frozen=True, kw_only=True)
class StepVerdict:
    """Judgement of a step. bad: why the step is bad, or None. overflow: whether a gradient was not finite in fp16."""

    bad: str | None = None
    overflow: bool = False


@dataclass(frozen=True, kw_only=True)
class GradientStatus:
    """Facts about a batch's gradients, equal on every rank.

    squared_norm: [1] fp64, of the gradients of the mean loss, being summed over all ranks by `work`.
    factor: converts the buffer's gradients to those of the mean loss.
    may_update: whether parameters may be updated, as far as the host knows.
    verdict: returns the judgement of the step. is_undecided: whether it waits for a norm that is still on the device;
        `may_update` is then true.
    """

    squared_norm: Tensor
    work: Work
    factor: float
    may_update: bool
    verdict: Callable[[], StepVerdict] = StepVerdict
    is_undecided: bool = False

    @property
    def bad(self) -> str | None:
        """Why the step is bad, according to the guard, if there is one; otherwise None. May wait for the reduction."""
        return self.verdict().bad

    @property
    def overflow(self) -> bool:
        """Whether a gradient was not finite in fp16. May wait for the reduction."""
        return self.verdict().overflow

    @property
    def updates(self) -> bool:
        """Whether parameters are updated. May wait for the reduction."""
        return self.may_update and self.bad is None and not self.overflow

    @property
    def norm(self) -> float:
        """L2 norm of the gradients of the mean loss; waits for the reduction."""
        return float(self.norm_on_device)

    @property
    def norm_on_device(self) -> Tensor:
        """The same, zero-dimensional, in order with other work on its device."""
        self.work.wait()
        return self.squared_norm.sqrt().reshape(())


OptimizerFactory = Callable[[list[Any]], torch.optim.Optimizer]
"""Makes a torch optimizer from parameters; from (name, parameter) pairs if its first parameter is called
`named_parameters`."""


def _takes_names(optimizer: OptimizerFactory) -> bool:
    try:
        return next(iter(inspect.signature(optimizer).parameters), None) == "named_parameters"
    except (TypeError, ValueError):  # a builtin
        return False


def refuse_closures(optimizer: torch.optim.Optimizer) -> None:
    """ConfigError for an optimizer whose `step` requires a closure, and for an object that is not an optimizer."""
    if not callable(getattr(optimizer, "step", None)):
        raise ConfigError("returns no optimizer", code="optimizer-not-made", where="optimizer",
                          value=type(optimizer).__name__,
                          remedy="Pass optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3).")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError("computes the loss several times in a step, by a closure, for which the batch would run "
                          "again, and makes decisions from the parameters of this rank", code="optimizer-needs-closure",
                          where="optimizer", value=type(optimizer).__name__,
                          remedy="Use an optimizer that takes one gradient.")


def _check_norm(guard: BadSteps | None, scale: LossScale | None, kept: GradientStatus | None,
                norm: float) -> StepVerdict:
    """Judge a step whose loss is good by its norm, and inform the guard and the loss scale. kept: the status of earlier
    batches in the same step, whose overflow the scale has counted."""
    if scale is None:
        return StepVerdict(bad=None if guard is None else guard.check_norm(norm))
    overflow = not math.isfinite(norm)
    if kept is None or (overflow and not kept.overflow):  # a step counts once
        scale.update(overflow)
    if guard is not None and not overflow:
        guard.note_good()
    return StepVerdict(overflow=overflow)


class Updater:
    """The gradients of a rank, and all ways to update parameters from them.

    Args:
        specs: trainable parameters, in model order.
        replicas: the ranks over which gradients without their own group are summed. ranks: a group of all ranks.
        optim: how gradients are accumulated, sent and clipped, and how parameters are updated if `own`.
        optimizer: the user's torch optimizer for these parameters, if `own` is False; None for gradients only.
        order: order and chunks of the gradients of `specs` in their buffer (`Layout.flat_order`); None makes them here.
        runs: blocks (their numbers) whose gradients use the same memory in turn; () if each has its own memory.
        weight: waits for the weight of the global batch, which is known some time after a rank's last forward.
        progress: lets messages progress; called by `Updater.progress`, and so for each bucket.
        earlier_weight: that of the batches whose gradients `begin` has kept, known together with `weight`.
        bad_steps: checks each step before it is applied.
        bad_loss: returns what is bad about a step's loss before it is applied, if there is no `bad_steps`; None applies
            every step.
        users_names: name of a parameter -> its names in the user's module, if they differ.

    Raises ConfigError for settings that are incompatible.
    """

    def __init__(self, specs: Sequence[GradientSpec], replicas: Group, ranks: Group, *, optim: Optim, own: bool,
                 optimizer: OptimizerFactory | None, dtype: torch.dtype,
                 device: torch.device, nominal_weight: float, send_to_owner: Callable[[GradientSpec], None],
                 weight: Callable[[], float], timeline: Timeline, progress: Callable[[], None],
                 order: FlatOrder | None = None, runs: Sequence[range] = (),
                 earlier_weight: Callable[[], float] = lambda: 0.0,
                 bad_steps: BadSteps | None = None, bad_loss: Callable[[], str | None] | None = None,
                 users_names: Mapping[str, Sequence[str]] = MappingProxyType({})) -> None:
        for problem in in_backward_problems(optim, scales_loss=dtype is torch.float16, own=own):
            raise problem
        self._optim, self._ranks = optim, ranks
        self.nominal_weight = nominal_weight
        """Divisor of a loss before its backward; the same on every rank."""
        self._weight, self._timeline, self._move_messages, self._device = weight, timeline, progress, device
        bucket_size, half = resolve_bucket_size(optim, device.type), is_half(dtype)
        self.gradients = Gradients(
            specs, replicas, chunk_size(optim, device.type), send_to_owner,
            dtype=torch.float32 if half and optim.accumulate == "fp32" else dtype,
            reduce_dtype=reduce_dtype(optim, dtype), reuse=runs, allocate=False, order=order, keeps_strides=not own)
        owned = [spec.parameter for spec in self.gradients.owned_specs()]
        self.updates = own or optimizer is not None
        """Whether parameters are updated, on this rank or another."""
        self.in_backward, self.has_averages = optim.update_in_backward, own and bool(optim.ema)
        """Whether blocks are updated while the backward runs; whether moving averages of parameters are kept."""
        self.flat: FlatOptimizer | None = None
        if own:
            placed, offload = resolve_offload(optim, self.gradients, device)
            self.flat = FlatOptimizer(placed, self.gradients, bucket_size=bucket_size, offload=offload)
        self.gradients.allocate()  # not before parameters have moved, which takes twice their memory
        self.users = None
        if optimizer is not None and owned:
            try:
                self.users = optimizer([(users_names.get(spec.name, (spec.name,))[0], spec.parameter)
                                        for spec in self.gradients.owned_specs()] if _takes_names(optimizer) else owned)
            except ValueError as error:
                if "empty parameter list" not in str(error):
                    raise
                raise ConfigError("picks none of the parameters that this rank trains", code="optimizer-picks-none",
                                  where="optimizer", value=len(owned),
                                  remedy="Freeze what it leaves out (requires_grad_(False)) before the engine is "
                                         "built: on ranks that train nothing it is not called. If another engine "
                                         "trains those, as for a GAN, add them in a group with lr=0.") from error
            refuse_closures(self.users)
            in_groups = {id(parameter) for group in getattr(self.users, "param_groups", ())
                         for parameter in group["params"]}
            if in_groups and in_groups.isdisjoint(id(parameter) for parameter in owned):
                warnings.warn(f"optimizer: {type(self.users).__name__} has none of the parameters that it was given: "
                              "unless it updates them anyway, nothing is trained here. Build it from its argument: "
                              "optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)", stacklevel=2)
        self.masters = MasterCopies(self.users, owned) if self.users is not None and half else None
        self._scale = LossScale(scale=optim.initial_loss_scale, window=optim.loss_scale_window) \
            if dtype is torch.float16 else None
        self._undecided: Callable[[], StepVerdict] | None = None
        self._guard, self._bad_loss = bad_steps, bad_loss
        self._earlier_weight = earlier_weight
        self._kept: Tensor | None = None
        self._kept_status: GradientStatus | None = None
        self._averaged: GradientStatus | None = None
        self.learning_rate = 0.0
        self._clips_late = bool(optim.clip_norm) and optim.clip_from == "previous-step"
        self._norm_before: Tensor | None = None
        self._last: GradientStatus | None = None
        self._step = 0
        self._squared, self._began = torch.zeros(()), False
        self._by_block: Tensor | None = None
        self._by_block_factor = 0.0

    @property
    def _flat_optimizer(self) -> FlatOptimizer:
        """Ranvier's optimizer, which must exist."""
        assert self.flat is not None, "this engine has no optimizer of Ranvier's"
        return self.flat

    @property
    def bad_steps(self) -> BadSteps | None:
        """The guard, after it has judged all steps so far."""
        self._read_verdict()
        return self._guard

    @property
    def loss_scale(self) -> LossScale | None:
        """The scale of the next loss, in fp16. Waits for the device's verdict on the previous step."""
        self._read_verdict()
        return self._scale

    def _read_verdict(self) -> None:
        """Read the verdict that is still on the device; it was available before the device began the update."""
        undecided, self._undecided = self._undecided, None
        if undecided is not None:
            undecided()

    @property
    def loss_factor(self) -> float:
        """Factor of a loss before its backward."""
        scale = self.loss_scale
        return (1.0 if scale is None else scale.scale) / self.nominal_weight

    def expect_weight(self, weight: float, *, divide_by_it: bool) -> None:
        """In fp16: set the approximate weight of global batches (a power of two). It becomes the nominal weight or,
        without `divide_by_it`, lowers an initial loss scale that would overflow with it; an adapted scale stays."""
        if divide_by_it:
            self.nominal_weight = weight
        elif (scale := self.loss_scale) is not None and scale.is_initial and (
                weight > _MAX_WEIGHT_RATIO * self.nominal_weight):
            scale.lower(weight / self.nominal_weight)

    # ------------------------------------------------------------------ one batch

    def begin(self, step: int, *, updates: bool, keep: bool = False) -> None:
        """Begin a batch of step `step` (from 1). updates: whether `finish` follows, rather than `average`. keep:
        whether the gradients left by `average` belong to the same step."""
        self._kept, self._kept_status = (self.gradients.snapshot(), self._averaged) if keep else (None, None)
        if self.masters is not None:
            self.masters.forget_gradients()
        if not keep:
            self.gradients.warn_of_lost()
        self._averaged = None
        self._step, self._squared, self._began = step, torch.zeros(()), False
        if self._by_block is not None:
            self._by_block.zero_()
        self.gradients.begin(scatter=updates and self.flat is not None and self.flat.scatters, keep=keep)
        if self.in_backward:
            self._flat_optimizer.prefetch()
            self.gradients.on_complete = self._update_run

    def finish(self) -> GradientStatus:
        """After all backwards: average the gradients, check them, and update unless they are rejected."""
        if self.flat is not None and not self.in_backward:
            self.flat.prefetch()
        started, bad = time.monotonic_ns(), self._bad_before_update()
        self._timeline.add("reduce", "weight", self._step, started)
        if self.flat is not None and not (
                (self._optim.clip_norm and not self._clips_late) or self._scale or self._guard or bad):
            status = self._update_as_reduced()
        else:
            status = self._reduce_and_check()
            self._apply(status, status.factor)
        self._kept, self.gradients.on_complete = None, None
        self._last = status if status.may_update else self._last
        self.gradients.note_end()
        return status

    def average(self) -> GradientStatus:
        """After all backwards: convert the gradients to those of the mean loss, and update nothing."""
        if self.gradients.dtype is torch.float16:
            raise ConfigError("loses small gradients when they are unscaled in fp16", code="half-accumulation-in-fp16",
                              where="optim.accumulate", value="half",
                              remedy="Call train_batch, or set `--optim.accumulate fp32`.")
        status = self._reduce_and_check()
        self.gradients.scale(status.factor)
        self.gradients.remove_unreached()
        if self.masters is not None:
            self.masters.take_gradients(1.0)
        self.gradients.note_values()
        self._kept, self._averaged = None, status
        return status

    def _bad_before_update(self) -> str | None:
        """Description of a bad loss, or None; the loss is known together with its weight, so this waits for nothing
        more."""
        return self._bad_loss() if self._bad_loss is not None and self._weight() else None

    def apply(self) -> GradientStatus:
        """Update from the gradients that `average` has left, which a user may have changed since. Returns the status of
        all of them, from all batches of the step. Collective if they are clipped."""
        assert self._averaged is not None, "there are no averaged gradients"
        averaged = status = self._averaged
        drop_gradients = not self.gradients.unapplied and all(
            spec.parameter.grad is None for spec in self.gradients.owned_specs())
        self._take_edits()
        if self.flat is not None:
            self.flat.prefetch()
        if self._optim.clip_norm and not self._clips_late:
            status = self._recount(status)
        if not drop_gradients or self.flat is None:  # averages of parameters stay, too
            self._apply(status, 1.0)
        self._averaged, self.gradients.unapplied = None, False
        self._last = status if status.may_update and not drop_gradients else self._last
        self.gradients.note_end()
        return averaged

    @property
    def has_averaged(self) -> bool:
        """Whether `average` has left gradients that `apply` has not taken."""
        return self._averaged is not None

    def clip(self, max_norm: float) -> Tensor:
        """Scale the gradients that `average` has left, which a user may have changed since, so that their norm over all
        ranks is at most `max_norm`, like torch.nn.utils.clip_grad_norm_; returns the norm before. Collective."""
        assert self._averaged is not None, "there are no averaged gradients"
        self._take_edits()
        norm = self._recount(self._averaged).norm_on_device
        self.gradients.flat.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        if self.masters is not None:
            self.masters.take_gradients(1.0)
        return norm

    def _take_edits(self) -> None:
        """Apply a user's changes of gradients, of parameters or of the master copies that the optimizer updates."""
        if self.masters is not None:
            self.masters.give_gradients()
        self.gradients.take_edits()

    def were_zeroed(self) -> bool | None:
        """See `Gradients.were_zeroed`; only of what the user's optimizer updates, which zeroes no others."""
        if self.masters is not None:
            self.masters.give_gradients()
        copies = {} if self.masters is None else self.masters.of
        in_groups = {parameter for group in getattr(self.users, "param_groups", ()) for parameter in group["params"]}
        updated = {spec.parameter for spec in self.gradients.owned_specs()
                   if copies.get(spec.parameter, spec.parameter) in in_groups}
        zeroed = self.gradients.were_zeroed(updated)
        return zeroed or None if self.users is not None and not updated else zeroed  # other ranks tell

    def drop_gradients(self) -> None:
        """See `Gradients.drop_gradients`."""
        self.gradients.drop_gradients()
        if self.masters is not None:
            self.masters.take_gradients(1.0)

    def _recount(self, status: GradientStatus) -> GradientStatus:
        """The status of the averaged gradients as they are now. Starts a reduction over all ranks."""
        self._squared = torch.zeros(())
        if self._by_block is not None:
            self._by_block.zero_()
            self._by_block_factor = 1.0
        for chunk in self.gradients.reduced_chunks():
            self._count(chunk)
        norm = torch.zeros(1, dtype=torch.float64, device=self._device)
        norm += self._squared
        return replace(status, squared_norm=norm, work=self._ranks.all_reduce(norm))

    def wait(self) -> None:
        """Return when the parameters that other replicas update have arrived."""
        if self.flat is not None:
            self.flat.finish()
        if self.masters is not None:
            self.masters.show()

    def progress(self) -> None:
        """Let messages, reductions and gathers progress."""
        self._move_messages()
        self.gradients.progress()
        if self.flat is not None:
            self.flat.progress()

    # ------------------------------------------------------------------ checked gradients

    def _factor(self, weight: float) -> float:
        """Factor that turns the buffer's gradients into those of the mean loss."""
        scale = self.loss_scale
        return self.nominal_weight / (weight * (1.0 if scale is None else scale.scale)) if weight else 0.0

    def _reduce_and_check(self) -> GradientStatus:
        """Wait for the weight of the batch and the reduction of all chunks, and start the status (finish it, if the
        step depends on it)."""
        started, weight = time.monotonic_ns(), self._weight()
        self.gradients.wait()
        started = self._timeline.add("reduce", "average", self._step, started)
        for chunk in self.gradients.reduced_chunks():
            self._add_kept(chunk)
            self._count(chunk)
        status = self._gradient_status(weight)
        if weight:
            status = self._check_status(status)
        self._timeline.add("optimizer", "norm", self._step, started)
        return status

    def _check_status(self, status: GradientStatus) -> GradientStatus:
        """Check whether the step overflows in fp16, or is bad. If neither is possible, or the device can skip a step on
        its own, the norm is not awaited."""
        guard = self.bad_steps  # which has judged the previous step
        bad = guard.bad_loss() if guard is not None else self._bad_before_update()
        if bad is not None or (guard is None and self._scale is None):
            return replace(status, may_update=bad is None, verdict=partial(StepVerdict, bad=bad))
        kept = self._kept_status if self._earlier_weight() else None  # unless its gradients were set to zero
        check = partial(_check_norm, self._guard, self._scale, kept)
        if self.flat is not None and self.flat.on_device:
            norm = HostCopy(status.norm_on_device)
            self._undecided = cache(lambda: check(float(norm.read())))  # once: it counts good steps, too
            return replace(status, verdict=self._undecided, is_undecided=True)
        found = check(status.norm)
        return replace(status, may_update=found.bad is None and not found.overflow, verdict=lambda: found)

    def _apply(self, status: GradientStatus, factor: float) -> None:
        """Update all parameters from their reduced gradients times `factor`, clipped, if the status allows it."""
        if not status.may_update:
            return
        started = time.monotonic_ns()
        if self.flat is not None:
            skip, undecided = None, None
            if status.is_undecided:
                skip, undecided = (~status.norm_on_device.isfinite()).float(), lambda: status.updates
            scale = self._with_clipping(factor, status)
            self.flat.begin(self.learning_rate, skip=skip, undecided=undecided)
            for chunk in self.gradients.reduced_chunks():
                self._update_chunk(chunk, scale)
        elif self.users is not None:
            self._step_users(self.users, float(self._with_clipping(factor, status)))
        self._timeline.add("optimizer", "update", self._step, started)

    def _with_clipping(self, factor: float, status: GradientStatus | None = None) -> float | Tensor:
        """`factor` times the clipping coefficient, as in torch.nn.utils.clip_grad_norm_, from the norm of this status
        or of the previous step; on the device if updates run there, to avoid a synchronization."""
        if not self._optim.clip_norm:
            return factor
        if self._clips_late:
            norm = self._last_norm()
            return factor if norm is None else (self._optim.clip_norm / (norm + 1e-6)).clamp(max=1.0) * factor
        assert status is not None, "the norm of a step is known before its update"
        if self.flat is not None and self.flat.on_device:
            return (self._optim.clip_norm / (status.norm_on_device + 1e-6)).clamp(max=1.0) * factor
        return factor * min(1.0, self._optim.clip_norm / (status.norm + 1e-6))

    def _last_norm(self) -> Tensor | None:
        """The norm of the last step whose norm is finite; None before the first step. If the first norm is not finite,
        0, which clips nothing."""
        status, self._last = self._last, None
        if status is not None:
            norm = status.norm_on_device
            before = torch.zeros_like(norm) if self._norm_before is None else self._norm_before
            self._norm_before = torch.where(norm.isfinite(), norm, before)
        return self._norm_before

    @property
    def last_norm(self) -> float | None:
        """Norm by which the next step is clipped, if that is the norm of the previous step, and there is one."""
        norm = self._last_norm() if self._clips_late else None
        return None if norm is None else float(norm)

    def _step_users(self, users: torch.optim.Optimizer, factor: float) -> None:
        """Take one step of the user's optimizer; on its master copies, if parameters are in half precision."""
        not_updated = set().union(*(self.gradients.not_updated(chunk) for chunk in self.gradients.reduced_chunks()))
        for spec in self.gradients.owned_specs():
            if spec.parameter in not_updated:  # no decay, no momentum
                spec.parameter.grad = None
        if self.masters is None:
            self.gradients.scale(factor)
            users.step()
            return
        self.masters.step(factor)

    # ------------------------------------------------------------------ as chunks are reduced

    def _update_as_reduced(self) -> GradientStatus:
        """Update each chunk as soon as it is reduced; the norm is summed on the side."""
        started, weight = time.monotonic_ns(), self._weight()
        factor = self._with_clipping(self._factor(weight))
        self._begin_once(weight)
        for number, chunk in enumerate(self.gradients.reduced_chunks()):
            started = self._timeline.add("reduce", f"average {number}", self._step, started)
            self._add_kept(chunk)
            self._count(chunk)
            if weight:
                self._update_chunk(chunk, factor)
            started = self._timeline.add("optimizer", f"update {number}", self._step, started)
        return self._gradient_status(weight)

    def _update_run(self, chunk: Chunk) -> None:
        """Update the blocks of `chunk`, which the backward has left."""
        started, weight = time.monotonic_ns(), 0.0 if self._bad_before_update() else self._weight()
        self._begin_once(weight)
        self._count(chunk)
        if weight:
            self._update_chunk(chunk, self._with_clipping(self._factor(weight)))
        self._timeline.add("optimizer", f"update from block {min(chunk.specs[-1].blocks)}", self._step, started)

    def _begin_once(self, weight: float) -> None:
        if weight and not self._began:
            self._began = True
            self._flat_optimizer.begin(self.learning_rate)

    def _add_kept(self, chunk: Chunk) -> None:
        """Add the gradients of earlier batches of this step, those of their mean loss, in the buffer's scale."""
        weight = self._earlier_weight() if self._kept is not None else 0.0
        if weight and self._kept is not None:
            start, stop = chunk.start + chunk.offset, chunk.stop + chunk.offset
            self.gradients.flat[start:stop].add_(self._kept[start:stop], alpha=weight * self.loss_factor)

    def _count(self, chunk: Chunk) -> None:
        """Add this rank's part of a chunk to the squared norm; if members hold the same part, the first adds it."""
        if chunk.counts and (self.gradients.scattered or chunk.group.index == 0):
            self._squared = self._squared + self.gradients.squared_norm(chunk)
            if self._by_block is not None:
                for spec in chunk.specs:
                    norm = self.gradients.squared_norm(chunk, self.gradients.places[spec.parameter])
                    self._by_block[min(spec.blocks)] += norm.cpu()

    def watch_blocks(self, num_blocks: int) -> None:
        """Sum squared gradients by block from now on; 0 blocks stops this."""
        self._by_block = torch.zeros(num_blocks, dtype=torch.float64) if num_blocks else None

    def squared_by_block(self) -> Tensor | None:
        """[blocks] fp64: this rank's part of the squared norms of each block's gradient of the mean loss; None if they
        are not watched."""
        return None if self._by_block is None else self._by_block * self._by_block_factor ** 2

    def _update_chunk(self, chunk: Chunk, factor: float | Tensor) -> None:
        for _ in self._flat_optimizer.update(chunk, factor):
            self.progress()

    def _gradient_status(self, weight: float) -> GradientStatus:
        factor = self._by_block_factor = self._factor(weight)
        norm = (self._squared.to(self._device, torch.float64) * factor**2).view(1)  # not awaited here
        return GradientStatus(squared_norm=norm, work=self._ranks.all_reduce(norm), factor=factor,
                              may_update=weight != 0.0)

    # ------------------------------------------------------------------ state between steps

    def restore_counters(self, steps: int | None, loss_scale: Mapping[str, Any] | None, last_norm: float | None,
                         missed_updates: Mapping[str, int]) -> None:
        """Restore counters after parameters and states have been written as they were after `steps` updates (None: not
        counted here)."""
        self._read_verdict()
        self._last, self._norm_before = None, None
        if last_norm is not None:
            self._norm_before = torch.tensor(last_norm, dtype=torch.float64, device=self._device)
        if self.flat is not None:
            self.flat.restore_counters(steps or 0, missed_updates)
        if self._scale is not None and loss_scale is not None:
            self._scale = LossScale(**loss_scale)

    def forget(self) -> None:
        """Free gradients, master copies and states of Ranvier's optimizer when the engine is closed."""
        self.gradients.forget()
        self.flat = self.masters = self._kept = None

    def tensors(self, parameters: Sequence[Tensor]) -> dict[str, dict[str, list[Tensor]]]:
        """Tensors that persist between steps: {"device": {category: tensors}, "host": {...}}."""
        found = tensors_by_category(parameters, self.gradients, self.flat)
        if self.users is not None:
            states = getattr(self.users, "state", {})
            found["device"]["moments"] = [tensor for state in states.values() for tensor in state.values()
                                          if isinstance(tensor, Tensor)]
        if self.masters is not None:
            found["device"]["master"] = list(self.masters.of.values())
        return found
