"""Update rules: their protocols, AdamW and SGD, and the assignment of rules to parameters.

    ElementwiseRule   AdamW, SGD, Lion        flat pieces of parameters, cut anywhere
    TensorRule        Muon, Adafactor         whole tensors by name; it may leave some of them to AdamW

A rule depends neither on where states are stored, nor on buckets, nor on the mesh: `TensorUpdate` gathers and sums for
it. A user's rule is named `module:name` (docs/optimizers.md); `ranvier.testing.rules.check_rule` checks it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Protocol, cast, runtime_checkable

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from ranvier.config.named_object import load_object, missing_attribute
from ranvier.config.run import Optim
from ranvier.errors import ConfigError
from ranvier.layout import Parameter
from ranvier.optim.adafactor import Adafactor
from ranvier.optim.chunks import GradientSpec
from ranvier.optim.lion import Lion
from ranvier.optim.muon import Muon
from ranvier.optim.tensor_update import TensorUpdate
from ranvier.precision import is_half

EMA = "ema"
"""Name of the state of moving averages, and its kind in a checkpoint."""
_RESERVED = ("parameter", "master", "buffer", "random", "object", EMA, "start", "stop")
"""Names that states cannot have: checkpoints use them for other tensors."""


class ElementwiseRule(Protocol):
    """Updates flat tensors in place, each element independently. One call may have pieces of several parameters."""

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the states of each element, as in torch.optim if it has them. All start at zero."""

    def update(self, parameters: Tensor, gradients: Tensor, states: dict[str, Tensor], *, step: int,
               learning_rate: float, weight_decay: float) -> None:
        """Make update number `step` (from 1) of these elements: updates that skipped them, because they were frozen or
        no loss reached them, do not count. All tensors: [n], one device."""


@runtime_checkable
class SkippingRule(Protocol):
    """An `ElementwiseRule` that can leave all tensors unchanged, depending on a number on their device. For other rules
    a copy of a bucket's parameters and states is kept until that number is known."""

    def update_unless(self, skip: Tensor, parameters: Tensor, gradients: Tensor, states: dict[str, Tensor], *,
                      step: int, learning_rate: float, weight_decay: float) -> None:
        """Update as `update` does, unless `skip` (fp32, zero-dimensional) is 1."""


class TensorRule(Protocol):
    """Updates whole tensors in place, by name."""

    def applies_to(self, name: str, shape: tuple[int, ...], *, in_layer: bool) -> bool:
        """Whether the rule updates this parameter; AdamW updates the others. in_layer: whether the parameter's block is
        a layer of the model, not an embedding or head."""

    def state_shapes(self, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...] | None]:
        """The states of a parameter of this shape, and their shapes. None means the parameter's shape; such a state is
        split over rows and columns like the parameter. Other states are full on each rank. All start at zero."""

    def update_tensors(self, tensors: Mapping[str, TensorUpdate]) -> None:
        """Update these parameters, by name. With rows and columns every rank of a stage passes the same names in the
        same order."""


@dataclass(frozen=True)
class AdamW:
    """Decoupled weight decay (Loshchilov and Hutter, 2019)."""

    optim: Optim
    states = ("exp_avg", "exp_avg_sq")

    def update(self, parameters: Tensor, gradients: Tensor, states: dict[str, Tensor], *, step: int,
               learning_rate: float, weight_decay: float) -> None:
        """See `ElementwiseRule`."""
        self.update_unless(None, parameters, gradients, states, step=step, learning_rate=learning_rate,
                           weight_decay=weight_decay)

    def update_unless(self, skip: Tensor | None, parameters: Tensor, gradients: Tensor, states: dict[str, Tensor], *,
                      step: int, learning_rate: float, weight_decay: float) -> None:
        """See `SkippingRule`."""
        counted = torch.full((), step - 1, dtype=torch.float32, device=parameters.device)
        adamw([parameters], [gradients], [states["exp_avg"]], [states["exp_avg_sq"]], [], [counted], fused=True,
              amsgrad=False, beta1=self.optim.betas[0], beta2=self.optim.betas[1], lr=learning_rate, found_inf=skip,
              weight_decay=weight_decay, eps=self.optim.epsilon, maximize=False)


@dataclass(frozen=True)
class SGD:
    """Momentum without dampening (Sutskever et al., 2013); weight decay is added to the gradient."""

    optim: Optim

    @property
    def states(self) -> tuple[str, ...]:
        """See `ElementwiseRule`."""
        return ("momentum_buffer",) if self.optim.momentum else ()

    def update(self, parameters: Tensor, gradients: Tensor, states: dict[str, Tensor], *, step: int,
               learning_rate: float, weight_decay: float) -> None:
        """See `ElementwiseRule`."""
        self.update_unless(None, parameters, gradients, states, step=step, learning_rate=learning_rate,
                           weight_decay=weight_decay)

    def update_unless(self, skip: Tensor | None, parameters: Tensor, gradients: Tensor, states: dict[str, Tensor], *,
                      step: int, learning_rate: float, weight_decay: float) -> None:
        """See `SkippingRule`."""
        sgd([parameters], [gradients], [states.get("momentum_buffer")], fused=True, lr=learning_rate, found_inf=skip,
            weight_decay=weight_decay, momentum=self.optim.momentum, dampening=0.0,
            nesterov=False, maximize=False)


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Assignment of rules to parameters: `elementwise` updates all parameters that `tensors` does not."""

    elementwise: ElementwiseRule
    tensors: TensorRule | None = None

    def needs_whole(self, name: str, shape: tuple[int, ...], *, in_layer: bool) -> bool:
        """Whether this parameter's update needs all of it."""
        return self.tensors is not None and self.tensors.applies_to(name, shape, in_layer=in_layer)

    def state_shapes(self, name: str, shape: tuple[int, ...], *, in_layer: bool
                     ) -> Mapping[str, tuple[int, ...] | None]:
        """The states of a parameter, as `TensorRule.state_shapes` describes them."""
        if self.tensors is not None and self.needs_whole(name, shape, in_layer=in_layer):
            return self.tensors.state_shapes(shape)
        return dict.fromkeys(self.elementwise.states)


def states_per_element(rules: Rules, parameters: Iterable[Parameter]) -> float:
    """Average number of state values that the optimizer keeps for each element of these parameters, without master
    copies. Tied parameters count once."""
    if rules.tensors is None:
        return len(rules.elementwise.states)
    elements, states = 0, 0
    for parameter in (parameter for parameter in parameters if parameter.is_owner):
        shapes = rules.state_shapes(parameter.settings_name, parameter.shape, in_layer=parameter.in_layer)
        elements += parameter.numel
        states += sum(parameter.numel if shape is None else prod(shape) for shape in shapes.values())
    return states / max(1, elements)


def update_flops(rules: Rules, parameters: Iterable[Parameter]) -> float:
    """Operations of one update of these parameters, in addition to those for every element: from a tensor rule's
    `flops`, which is optional."""
    flops = getattr(rules.tensors, "flops", None)
    if flops is None:
        return 0.0
    return float(sum(flops(parameter.shape) for parameter in parameters if parameter.is_owner and rules.needs_whole(
        parameter.settings_name, parameter.shape, in_layer=parameter.in_layer)))


def working_bytes(rules: Rules, specs: Iterable[GradientSpec], elements: int, element_bytes: int) -> int:
    """Peak bytes that an update allocates in addition to these parameters and their states: from the rules'
    `working_bytes`, which are optional. elements: the most that an elementwise rule updates in one call."""
    elementwise = getattr(rules.elementwise, "working_bytes", lambda *_: 0)(elements, element_bytes)
    of_tensor = getattr(rules.tensors, "working_bytes", lambda *_: 0)
    return max([elementwise, *(of_tensor(spec.whole_shape, tuple(spec.parameter.shape), element_bytes)
                               for spec in specs if spec.whole)])


def skips_by_itself(rules: Rules) -> bool:
    """Whether all rules are `SkippingRule`s, so that nothing is copied in case a step is skipped."""
    return rules.tensors is None and isinstance(rules.elementwise, SkippingRule)


def rules_of(optim: Optim, dtype: torch.dtype = torch.float32) -> Rules:
    """The rules that `optim.algorithm` names, for parameters of this dtype. ConfigError for a user's object that is not
    a rule."""
    match optim.algorithm:
        case "adamw":
            return Rules(elementwise=AdamW(optim))
        case "sgd":
            return Rules(elementwise=SGD(optim))
        case "lion":
            return Rules(elementwise=Lion(betas=optim.betas))
        case "muon":
            return Rules(elementwise=AdamW(optim), tensors=Muon(
                momentum=optim.momentum, scale=optim.muon_scale,
                compute_dtype=torch.bfloat16 if is_half(dtype) else None))
        case "adafactor":
            return Rules(elementwise=AdamW(optim), tensors=Adafactor())
    # The rules of an object that a run names `module:name`.
    text, elementwise = optim.algorithm, ("states", "update()")
    tensors = ("applies_to()", "state_shapes()", "update_tensors()")
    found = load_object(text, "optim.algorithm", (), optim.options)
    if missing_attribute(found, tensors) is None:
        return Rules(elementwise=AdamW(optim), tensors=cast(TensorRule, found))
    if (missing := missing_attribute(found, elementwise)) is not None:
        raise ConfigError(f"is not an update rule: it gives a {type(found).__name__}, which has no {missing}",
                          code="update-rule-lacks-method", where="optim.algorithm", value=text,
                          remedy="Give it `states` and `update`, or `applies_to`, `state_shapes` and `update_tensors` "
                                 "(docs/optimizers.md).")
    rule = cast(ElementwiseRule, found)
    for name in rule.states:
        check_state_name(name, text)
    return Rules(elementwise=rule)


def check_state_name(name: str, rule: str) -> None:
    """Raise a ConfigError for a name that a state of a rule cannot have."""
    if name in _RESERVED:
        raise ConfigError(f"has a state named {name}, which checkpoints use for something else",
                          code="update-rule-state-name", where="optim.algorithm", value=rule,
                          remedy="Rename the state.")


# --- moving averages --------------------------------------------------------------------------------------------------

# Exponential moving average (EMA) of parameters: a state of the optimizer, stored with the others.
#
# After update t the average is decay x average + (1 - decay) x parameters; after the first it is the parameters, as in
# torch.optim.swa_utils.AveragedModel with get_ema_multi_avg_fn. It is in fp32 (fp64 for fp64 parameters), and averages
# the master copies if there are any. As a state it is sharded, offloaded, saved and moved like the moments.


def averages_of(optim: Optim) -> tuple[str, ...]:
    """Names of the states that average parameters."""
    return (EMA,) if optim.ema else ()


def update_average(average: Tensor, parameters: Tensor, *, step: int, decay: float) -> None:
    """Make update number `step` (from 1) of all elements of a bucket, including those of frozen parameters."""
    if step == 1:
        average.copy_(parameters)
    else:
        average.lerp_(parameters.to(average.dtype), 1.0 - decay)
