"""Detects changes of parameters, gradients and buffers by a user's program or a forward that would be lost or wrong.

    before a batch    gradients that are not the engine's, parameters with old values or unfrozen ones, `eval()`
    after a batch     what was replaced, frozen or written during the batch, or got a gradient that is in no sum

Each is refused by name, or warned of.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from ranvier.errors import ModelError
from ranvier.layout import Layout
from ranvier.optim.gradients import Gradients, refuse_others
from ranvier.originals.object_contents import container
from ranvier.pipeline.copied_modules import CopiedModules
from ranvier.pipeline.held_parameters import BATCHES_BY_VALUE, HeldParameters
from ranvier.pipeline.left_values import Mark
from ranvier.pipeline.trained_elsewhere import TrainedElsewhere, used_from_outside
from ranvier.plan.shared_buffers import shared_buffer_error

_BY_SCHEDULERS = frozenset({"step", "_opt_called", "_step_count", "grad_scale", "found_inf"})
"""Attributes that torch's schedulers and scalers write into an optimizer."""
_saved_tensor_hooks = torch._C._autograd._top_saved_tensors_default_hooks
"""The functions of the innermost hooks of saved tensors, or None."""


class UsersChanges:
    """Checks one rank. parameters: those of this rank by key. names_in_whole: name -> names in the user's module.
    elsewhere: the modules that other ranks train. buffers: those that blocks of several stages share. copied: modules
    of which rows and columns train copies. is_of_mean: whether one microbatch has the gradient of the mean loss, and
    one replica computes it."""

    def __init__(self, layout: Layout, parameters: Mapping[str, nn.Parameter],
                 names_in_whole: Mapping[str, Sequence[str]], gradients: Gradients, *, held_parameters: HeldParameters,
                 elsewhere: TrainedElsewhere, buffers: SharedBufferChanges, copied: CopiedModules | None,
                 is_of_mean: bool) -> None:
        self._names_in_whole, self._gradients, self._held = names_in_whole, gradients, held_parameters
        self._elsewhere, self._buffers, self._copied = elsewhere, buffers, copied
        self._frozen = [(name, parameter) for name, parameter in parameters.items() if not layout[name].trainable]
        """Parameters that are frozen since the start."""
        self._parts = {name for name in parameters if layout.split_axes(name) or layout.summed_axes(name)}
        """Parameters of which, or of whose gradient, each row or column has a part."""
        self._trained = [(name, parameter) for name, parameter in parameters.items() if layout[name].trainable]
        self._is_of_mean, self._has_warned, self._has_warned_of_saved = is_of_mean, False, False

    def refuse_gradients(self, *, applied: bool) -> None:
        """Call `refuse_others` for the parameters that this rank owns."""
        refuse_others(((self._name(spec.name), spec.parameter) for spec in self._gradients.owned_specs()),
                      self._gradients, applied=applied)

    def check_start(self, *, training: bool) -> None:
        """Raise ModelError if a batch cannot begin. Changes nothing."""
        if training:
            self.refuse_gradients(applied=False)
        self._elsewhere.check_start()

    def begin(self, num_microbatches: int) -> None:
        """Begin a training batch, after `HeldParameters.adopt`."""
        if self._copied is not None:
            self._copied.begin()
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise ModelError("was frozen when the engine was built, and is trainable now",
                                 code="parameter-unfrozen", where=f"parameter {self._name(name)}",
                                 remedy="Build a new engine to train more parameters.")
        if not self._has_warned and (hooked := next((
                name for name, parameter in self._trained
                if parameter._backward_hooks or parameter._post_accumulate_grad_hooks), None)):
            self._warn_of_hook(hooked, num_microbatches)
        if (hooks := _saved_tensor_hooks(True)) and not self._has_warned_of_saved and not any(
                str(getattr(hook, "__module__", "")).startswith("torch.") for hook in hooks):
            self._has_warned_of_saved = True
            warnings.warn("torch.autograd.graph.saved_tensors_hooks around a training batch get other tensors than in "
                          "a plain loop: parts of them, or none if weight gradients are deferred. They may move and "
                          "pack tensors, as save_on_cpu does, but hooks that change values give other gradients",
                          stacklevel=5)
        self._buffers.begin()
        self._elsewhere.begin()
        self._held.begin()

    def _warn_of_hook(self, name: str, num_microbatches: int) -> None:
        """Warn of a gradient hook, unless it sees the gradient of a plain loop."""
        if name in self._parts:
            what = "one rank's part of the gradient, which rows and columns share"
        elif num_microbatches > 1 or not self._is_of_mean:
            what = "the gradient of the summed loss of one or more of this replica's microbatches, not of the mean loss"
        else:
            return
        self._has_warned = True
        warnings.warn(f"a gradient hook of parameter {self._name(name)} sees {what}: it may mask elements, and with "
                      "register_hook scale them, but clipping or anything computed from several, such as a norm, sees "
                      "only that. Gradients are summed between engine.forward_backward(batch) and engine.step(result)",
                      stacklevel=6)

    def check(self) -> None:
        """Check a batch whose forwards and backwards have run. Raises ModelError for what they must not do."""
        self._held.check_kept()
        for name in (*self._elsewhere.reached_parameters(), *self._gradients.late_parameters()):
            raise used_from_outside(self._name(name))
        self._buffers.check()

    def _name(self, name: str) -> str:
        return self._names_in_whole.get(name, (name,))[0]


class SharedBufferChanges:
    """Notices buffers of several stages that a training batch changes: they have no single value, since stages run
    microbatches in their own order. Shared batch norms are refused before the first step, and other modules that change
    a buffer before the first update. For other values see `left_values`.

    shared: as `buffers_of_several_stages` returns it. blocks: this rank's, (number in the model, name, module).
    """

    def __init__(self, shared: Mapping[str, str], blocks: Sequence[tuple[int, str, nn.Module]]) -> None:
        self._shared, self._blocks = shared, blocks if shared else ()
        self._before: dict[str, tuple[Tensor, int, Tensor]] = {}
        """Each buffer with its version, and in the first batches a copy: changes by kernels of running statistics show
        only in the values."""
        self._batches = 0

    def _buffers_now(self) -> Iterable[tuple[str, Tensor]]:
        for _, block, module in self._blocks:
            for name, buffer in module.named_buffers(remove_duplicate=False):
                if f"{block}.{name}" in self._shared:
                    yield f"{block}.{name}", buffer

    def begin(self) -> None:
        """Begin a training batch."""
        self._batches += 1
        self._before = {name: (buffer, buffer._version, buffer.clone() if self._batches <= BATCHES_BY_VALUE else buffer)
                        for name, buffer in self._buffers_now()}

    def check(self) -> None:
        """Raise ModelError for a buffer that the batch has changed."""
        for name, now in self._buffers_now():
            one, version, value = self._before.get(name, (None, 0, now))
            if now is not one or now._version != version or not (value is now or torch.equal(value, now)):
                raise shared_buffer_error(name, self._shared[name], None)


class UnsavedAttributes:
    """Attributes of a user's optimizer that have changed since the engine was built, such as its own count of steps:
    they are in no state, so that a resumed run begins with those of a new optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self._optimizer, self._has_warned = optimizer, False
        self._of_torch = set() if optimizer is None else {  # building one of torch's imports its compiler
            *vars(torch.optim.SGD([nn.Parameter(torch.empty(0))])), *_BY_SCHEDULERS}
        self._marks = self._snapshot()

    def _snapshot(self) -> dict[str, Mark]:
        own = getattr(self._optimizer, "__dict__", {})
        values = {name: value.state if isinstance(value, torch.optim.Optimizer) else value
                  for name, value in own.items() if name not in self._of_torch}
        return {name: Mark(value) for name, value in values.items() if value is not own.get("state") and (
            type(value) in (int, float, type(None)) or isinstance(value, Tensor) or container(value) is not None)}

    def warn(self) -> None:
        """Warn of such attributes when the optimizer's state is saved."""
        changed = [] if self._has_warned else [name for name, now in self._snapshot().items() if not (
            name in self._marks and now.is_same(self._marks[name]))]
        if changed:
            self._has_warned = True
            warnings.warn(f"attribute {changed[0]} of the optimizer {type(self._optimizer).__name__} has changed since "
                          "the engine was built, and is not saved: a resumed run begins with that of a new one. Keep "
                          "it in param_groups or in state, or save it yourself", stacklevel=4)
