"""fp32 master copies for a user's torch optimizer, which updates them instead of half-precision parameters.

    gradients (fp32, or half) -> master.grad -> optimizer.step() -> parameter = master, rounded

Between batches a program may use the optimizer directly: its parameters are the copies, and have gradients.

An update is often smaller than the distance between two half-precision numbers: without a full-precision copy it is
rounded away (Micikevicius et al., 2018, section 3.1).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain
from math import inf

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ranvier.errors import ConfigError
from ranvier.precision import wide


class MasterCopies:
    """Replaces every parameter of `optimizer` by a master copy.

    The optimizer is built with the parameters themselves, so that its groups may depend on them; then the copies
    replace them in its groups and states.

    Args:
        parameters: in half precision; those that the optimizer does not have get no copy.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        self._optimizer, self._parameters = optimizer, dict.fromkeys(parameters)
        self._watch = Watch(parameters[0].device.type if parameters else "cpu")
        self._refuse({id(parameter) for parameter in parameters})
        self.of: dict[nn.Parameter, nn.Parameter] = {}
        """Parameter -> its master copy."""
        self._given: dict[nn.Parameter, tuple[_GradientRecord, _GradientRecord]] = {}
        """Copy -> its gradient when it was set, and its parameter's gradient then."""
        self._known: dict[nn.Parameter, tuple[tuple[int, int], tuple[int, int]]] = {}
        """Parameter -> `_versions` when it and its copy were last the same."""
        self._norms: dict[nn.Parameter, Tensor] = {}
        """Parameter -> the norm of its copy then, if copies are compared: writes through `data` change no version."""
        self._take_places()
        self._steps_are_noticed = hasattr(optimizer, "_optimizer_step_post_hooks")
        if self._steps_are_noticed:  # also those that the program takes
            optimizer.register_step_pre_hook(lambda *_: self._begin_step())
            optimizer.register_step_post_hook(lambda *_: self.write_parameters())

    def _take_places(self) -> None:
        """Put copies into groups and states, also for parameters that a program has added to groups."""
        has = {parameter for group in self._optimizer.param_groups for parameter in group["params"]
               if parameter in self._parameters and parameter not in self.of}
        for parameter in self._parameters if has else ():
            if parameter in has:
                master = self.of[parameter] = nn.Parameter(parameter.detach().to(wide(parameter.dtype)))
                states = getattr(self._optimizer, "state", {})
                if parameter in states:
                    states[master] = {
                        name: value.to(wide(value.dtype)) if isinstance(value, Tensor) and value.is_floating_point()
                        else value for name, value in states.pop(parameter).items()}
        for group in self._optimizer.param_groups if has else ():
            group["params"][:] = [self.of.get(parameter, parameter) for parameter in group["params"]]

    def _refuse(self, parameters: Collection[int]) -> None:
        """Raise a ConfigError for an optimizer that has parameters outside its groups."""
        name = type(self._optimizer).__name__
        remedy = "Use an optimizer that takes them from its param_groups, or fp32."
        if not hasattr(self._optimizer, "param_groups"):
            raise ConfigError("has no param_groups, in which master copies would replace half-precision "
                              "parameters", code="optimizer-without-groups", where="optimizer", value=name,
                              remedy=remedy)
        shared = {id(group["params"]) for group in self._optimizer.param_groups}
        for attribute, value in vars(self._optimizer).items():
            leaves = () if attribute in ("param_groups", "state") else tree_leaves(value)
            inner = [group["params"] for one in leaves for group in getattr(one, "param_groups", ())]
            if any(id(one) in parameters for one in chain(leaves, *(one for one in inner if id(one) not in shared))):
                raise ConfigError(f"keeps half-precision parameters in its attribute {attribute}, and master copies "
                                  "replace them only in param_groups", code="optimizer-keeps-parameters",
                                  where="optimizer", value=name, remedy=remedy)

    def step(self, factor: float) -> None:
        """Update copies and parameters from the parameters' gradients times `factor`."""
        self.take_gradients(factor)
        if not self._steps_are_noticed:
            self.synchronize()
        self._optimizer.step()
        self.write_parameters()  # hooks of the program may have written copies

    @torch.no_grad()
    def synchronize(self) -> None:
        """Make parameters and copies the same again, if either have been written since they were the same."""
        self._take_places()
        looks = self._watch.should_compare()
        for parameter, master in self.of.items():
            self._synchronize(parameter, master, looks)

    @torch.no_grad()
    def show(self) -> None:
        """Copy master copies that have been written to their parameters. Writes to parameters may be undone before the
        next update, as averages for an evaluation are: the copies would have lost their extra precision."""
        for parameter, master in self.of.items():
            self._show(parameter, master)

    @torch.no_grad()
    def updated(self, parameter: nn.Parameter) -> nn.Parameter:
        """The copy of a parameter as the next update will find it; the parameter itself if it has none."""
        master = self.of.get(parameter, parameter)
        if master is not parameter:
            self._synchronize(parameter, master, self._watch.is_on)
        return master

    def _show(self, parameter: nn.Parameter, master: nn.Parameter) -> bool:
        """Whether only the copy has been written since both were the same; if so, the parameter is set to it."""
        was, now = self._known.get(parameter), _versions(parameter, master)
        if was is None or was[0] != now[0] or was[1] == now[1]:
            return False
        parameter.copy_(master)
        self._note(parameter, master)
        return True

    def _synchronize(self, parameter: nn.Parameter, master: nn.Parameter, looks: bool) -> None:
        was, now = self._known.get(parameter), _versions(parameter, master)
        if looks and was == now and not torch.equal(_norm(master), self._norms.get(parameter, _norm(master))):
            parameter.copy_(master)
            self._watch.note_comparison(True)
            self._note(parameter, master)
        elif not self._show(parameter, master) and (looks or was is None or was[0] != now[0]):
            self._watch.note_comparison(take_written_elements(master, parameter) and looks)
            self._note(parameter, master)

    def _note(self, parameter: nn.Parameter, master: nn.Parameter) -> None:
        """Note that both are the same now."""
        self._known[parameter] = _versions(parameter, master)
        if self._watch.is_on:
            self._norms[parameter] = _norm(master)

    def _begin_step(self) -> None:
        """Apply a program's changes of parameters' gradients, since copies got theirs, to the copies' gradients."""
        for parameter, master in self.of.items():
            if (given := self._given.get(master)) and given[0].matches(master.grad) and (
                    not given[1].matches(parameter.grad)):
                self._take_gradient(parameter, master, 1.0)
        self.synchronize()

    def take_gradients(self, factor: float) -> None:
        """Give each copy its parameter's gradient times `factor`, in fp32, or None."""
        self._take_places()
        for parameter, master in self.of.items():
            self._take_gradient(parameter, master, factor)

    def _take_gradient(self, parameter: nn.Parameter, master: nn.Parameter, factor: float) -> None:
        if parameter.grad is None:
            master.grad = None
        elif parameter.grad.dtype is master.dtype:
            master.grad = parameter.grad.mul_(factor) if factor != 1.0 else parameter.grad
        else:
            master.grad = parameter.grad.to(master.dtype).mul_(factor)
        self._given[master] = _GradientRecord(master.grad), _GradientRecord(parameter.grad)

    def forget_gradients(self) -> None:
        """Remove the gradients of copies at the start of a batch."""
        self._given.clear()
        for master in self.of.values():
            master.grad = None

    def give_gradients(self) -> None:
        """Apply a program's changes of the copies' gradients, since they were set, to the parameters' gradients."""
        for parameter, master in self.of.items():
            now, (given, _) = master.grad, self._given.get(master, (_GradientRecord(None), None))
            if now is not parameter.grad and not given.matches(now):
                parameter.grad = None if now is None else now.to(parameter.grad_dtype)

    @torch.no_grad()
    def write_parameters(self) -> None:
        """Set parameters to their updated copies, rounded. Those without a gradient stay: they may have been frozen and
        set."""
        for parameter, master in self.of.items():
            if master.grad is not None:
                parameter.copy_(master)
            self._note(parameter, master)


def _versions(parameter: nn.Parameter, master: nn.Parameter) -> tuple[tuple[int, int], tuple[int, int]]:
    """State of a parameter and its copy that changes when they are written; `parameter.data = ...` is not a version."""
    return (parameter._version, parameter.data_ptr()), (master._version, master.data_ptr())


def _norm(master: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(master.detach())
    return norm


class _GradientRecord:
    """A record of a gradient, or None, and its version."""

    def __init__(self, grad: Tensor | None) -> None:
        self._grad, self._version = grad, 0 if grad is None else grad._version

    def matches(self, grad: Tensor | None) -> bool:
        """Whether `grad` is the recorded gradient, unchanged."""
        return grad is self._grad and (grad is None or grad._version == self._version)


class Watch:
    """Whether copies are compared with parameters element by element before an update: always on a CPU. On a device a
    comparison takes as long as an update, so only before the first two updates, and before all if these find writes: a
    program that writes through `parameter.data` mostly does so after each step."""

    def __init__(self, device_type: str) -> None:
        self._left = {"cpu": inf, "meta": 0}.get(device_type, 2)

    @property
    def is_on(self) -> bool:
        """Whether the next update compares."""
        return self._left > 0

    def should_compare(self) -> bool:
        """Whether this update should compare. Called once for each update."""
        self._left -= 1
        return self._left >= 0

    def note_comparison(self, has_written: bool) -> None:
        """Note the result of a comparison."""
        if has_written:
            self._left = inf


def take_written_elements(master: Tensor, values: Tensor) -> bool:
    """Set elements of a master copy to `values` where these differ from the rounded copy, because they have been
    written (a write through `parameter.data` leaves no trace). Others keep their bits. Returns whether any differ."""
    values = values.to(master.device)
    written = values != master.to(values.dtype)
    has_written = bool(written.any())
    if has_written:
        master.copy_(torch.where(written, values, master))
    return has_written
