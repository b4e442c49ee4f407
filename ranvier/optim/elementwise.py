"""Whether a user's torch optimizer computes with what one rank has.

    AdamW, Lion                  of each element by itself               anywhere
    Adafactor, Muon, LAMB        by norms and products of a parameter    not on rows and columns, which split it
    a norm over all gradients    of several parameters                   not on a pipeline, whose stages have others

No name of a class tells, so copies of the optimizer update small tensors in place of its parameters, three times: a
part of them must become what it becomes as a part of the whole, and one of them the same whatever another's gradient.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ranvier.errors import ConfigError

_SHAPE = (8, 6, 2, 2)
_STEPS = 3
_LARGEST = 1 << 20
"""So many elements a tensor may have that an optimizer keeps beside its parameters."""
_TOLERANCE = 1e-3
"""Of the difference of two updates, relative to the update: far above rounding."""


def refuse_coupled(optimizer: torch.optim.Optimizer, *, splits: bool, cuts: bool) -> None:
    """ConfigError where an update depends on what other ranks have. splits: they have other parts of its parameters.
    cuts: they have other parameters of the model. Says nothing of an optimizer that cannot be tried."""
    try:
        with torch.random.fork_rng(devices=()):
            whole = _updates(optimizer)
            if _differ(whole, _updates(optimizer)):  # it draws random numbers
                return
            part = _updates(optimizer, halves=True) if splits else []
            other = _updates(optimizer, factor=3.0) if cuts else []
    except Exception:  # it needs a closure, sparse gradients, a device, parameters that it has kept, ...
        return
    if splits and _differ([one[_half(one)] for one in whole], part):
        raise ConfigError("updates an element of a parameter by the others, as by a norm of it, and rows and columns "
                          "have a part of each", code="optimizer-needs-whole-parameters", where="optimizer",
                          value=type(optimizer).__name__,
                          remedy="Use `--optim.algorithm muon` or adafactor, an optimizer that updates each element by "
                                 "itself, or a mesh without rows and columns.")
    if cuts and _differ(whole, other):
        raise ConfigError("updates a parameter by the gradients of others, as by a norm over all, and each stage has "
                          "its own", code="optimizer-couples-parameters", where="optimizer",
                          value=type(optimizer).__name__,
                          remedy="Switch that off in the optimizer, and clip by `--optim.clip-norm` or "
                                 "Engine.clip_grad_norm_; or use a mesh without a pipeline.")


def _updates(optimizer: torch.optim.Optimizer, *, halves: bool = False, factor: float = 1.0) -> list[Tensor]:
    """What steps of a copy of the optimizer add to the first of two tensors in each of its groups. halves: to a part
    of them. factor: on the gradients of the others."""
    twin, pairs = _twin(optimizer, halves)
    before = [one.detach().clone() for one, _ in pairs]
    step = type(twin).step
    step = step.__wrapped__ if getattr(step, "hooked", False) else step  # without the hooks of the program
    for number in range(_STEPS):
        for place, parameter in enumerate(one for pair in pairs for one in pair):
            shape = _SHAPE[:parameter.dim()]  # of mostly one direction, which those look for that adapt to a distance
            gradient = _values(shape, parameter, place) + _values(shape, parameter, 2 * number + place)
            parameter.grad = (gradient[_half(gradient)] if halves else gradient) * (
                10.0 * factor if place % 2 else 10.0)
        step(twin)
    return [one.detach() - old for (one, _), old in zip(pairs, before, strict=True)]


def _twin(optimizer: torch.optim.Optimizer, halves: bool) -> tuple[Any, list[tuple[nn.Parameter, nn.Parameter]]]:
    """A copy with the same settings, without states, and with two small tensors in each group."""
    twin: Any = object.__new__(type(optimizer))
    memo: dict[int, Any] = {id(optimizer): twin} | {  # which methods and settings may know
        id(parameter): nn.Parameter(torch.empty(0))
        for group in optimizer.param_groups for parameter in group["params"]}
    settings = {name: OrderedDict() if name.startswith("_optimizer_") else value
                for name, value in vars(optimizer).items()
                if name not in ("param_groups", "state", "step")}
    for one in tree_leaves(settings):
        if isinstance(one, nn.Module) or (isinstance(one, Tensor) and id(one) not in memo and one.numel() > _LARGEST):
            raise ValueError("a copy would take the memory of a model")
    vars(twin).update(deepcopy(settings, memo), state=defaultdict(dict), param_groups=[])
    pairs = []
    for number, group in enumerate(optimizer.param_groups):
        copied = deepcopy({name: value for name, value in group.items() if name != "params"}, memo) | {"params": []}
        rate = group.get("lr")
        twin.param_groups.append(copied | {"lr": torch.ones_like(rate) if isinstance(rate, Tensor) else 1.0})
        if group["params"]:
            like = max(group["params"], key=Tensor.dim)
            values = [_values(_SHAPE[:like.dim()], like, 7 * number + place) for place in range(2)]
            one, other = (nn.Parameter(tensor[_half(tensor)].clone() if halves else tensor) for tensor in values)
            copied["params"] += [one, other]
            pairs.append((one, other))
    return twin, pairs


def _values(shape: tuple[int, ...], like: Tensor, seed: int) -> Tensor:
    """Values between -1 and 1, the same for the same arguments."""
    numbers = torch.arange(1, torch.Size(shape).numel() + 1, dtype=torch.float64)
    return torch.sin(numbers * (seed + 1.3)).view(shape).to(like.device, like.dtype)


def _half(tensor: Tensor) -> tuple[slice, ...]:
    return tuple(slice(0, (size + 1) // 2) for size in tensor.shape)


def _differ(tensors: list[Tensor], others: list[Tensor]) -> bool:
    return any(float((one - other).norm()) > _TOLERANCE * float(one.norm())
               for one, other in zip(tensors, others, strict=True))
