"""Whether a user's torch optimizer can compute with the parameters of one rank.

    AdamW, Lion                  each element independently              anywhere
    Adafactor, Muon, LAMB        by norms and products of a parameter    not on rows and columns, which split it
    a norm over all gradients    of several parameters                   not on a pipeline, whose stages have others

The name of a class does not say this, so copies of the optimizer update small tensors instead of its parameters, three
times: the update of a part must equal that part of the full update, and must not depend on another tensor's gradient.
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
"""Largest number of elements of a tensor that an optimizer keeps in addition to its parameters."""
_TOLERANCE = 1e-3
"""Tolerance of the difference of two updates, relative to the update: far above rounding."""


def refuse_coupled(optimizer: torch.optim.Optimizer, *, splits: bool, cuts: bool) -> None:
    """ConfigError if an update depends on data of other ranks. splits: they have other shards of its parameters. cuts:
    they have other parameters of the model. An optimizer that cannot be tried is accepted."""
    try:
        with torch.random.fork_rng(devices=()):
            whole = _updates(optimizer)
            if _differ(whole, _updates(optimizer)):  # it draws random numbers
                return
            part = _updates(optimizer, halves=True) if splits else []
            other = _updates(optimizer, factor=3.0) if cuts else []
    except Exception:  # it needs a closure, sparse gradients, a device, parameters that it has stored, ...
        return
    if splits and _differ([one[_half(one)] for one in whole], part):
        raise ConfigError("updates an element of a parameter depending on the others, as by its norm, and each row "
                          "and column has only a shard", code="optimizer-needs-whole-parameters", where="optimizer",
                          value=type(optimizer).__name__,
                          remedy="Use `--optim.algorithm muon` or adafactor, an optimizer that updates each element "
                                 "independently, or a mesh without rows and columns.")
    if cuts and _differ(whole, other):
        raise ConfigError("updates a parameter depending on the gradients of others, as by a norm over all, and each "
                          "stage has its own", code="optimizer-couples-parameters", where="optimizer",
                          value=type(optimizer).__name__,
                          remedy="Switch that off in the optimizer, and clip by `--optim.clip-norm` or "
                                 "Engine.clip_grad_norm_; or use a mesh without a pipeline.")


def _updates(optimizer: torch.optim.Optimizer, *, halves: bool = False, factor: float = 1.0) -> list[Tensor]:
    """The updates by steps of a copy of the optimizer to the first of two tensors in each group. halves: use a part of
    each tensor. factor: on the gradients of the second tensors."""
    twin, pairs = _small_copy(optimizer, halves)
    before = [one.detach().clone() for one, _ in pairs]
    step = type(twin).step
    step = step.__wrapped__ if getattr(step, "hooked", False) else step  # without the hooks of the program
    for number in range(_STEPS):
        for place, parameter in enumerate(one for pair in pairs for one in pair):
            shape = _SHAPE[:parameter.dim()]  # mostly one direction, for optimizers that adapt to a distance
            gradient = _values(shape, parameter, place) + _values(shape, parameter, 2 * number + place)
            parameter.grad = (gradient[_half(gradient)] if halves else gradient) * (
                10.0 * factor if place % 2 else 10.0)
        step(twin)
    return [one.detach() - old for (one, _), old in zip(pairs, before, strict=True)]


def _small_copy(optimizer: torch.optim.Optimizer, halves: bool) -> tuple[Any, list[tuple[nn.Parameter, nn.Parameter]]]:
    """A copy with the same settings, without states, and with two small tensors in each group."""
    twin: Any = object.__new__(type(optimizer))
    memo: dict[int, Any] = {id(optimizer): twin} | {  # to which methods and settings may refer
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
