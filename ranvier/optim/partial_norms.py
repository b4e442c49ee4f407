"""torch's norm of gradients, as `clip_grad_norm_` computes it, knows those of one rank: a warning where the model has
more. On rows and columns so does `Tensor.norm` of one gradient or parameter, of which a rank has a part."""

from __future__ import annotations

import sys
import warnings
from functools import wraps
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from ranvier.optim.gradients import Gradients, maker_of
from ranvier.optim.initialized_parts import has_parts

_OF_A_PART: WeakSet[Gradients] = WeakSet()
_OF_PARTS: WeakSet[Gradients] = WeakSet()
_GROUPS = "_group_tensors_by_device_and_dtype"
"""What torch's norm looks up in its module at each call, whenever a program has imported `get_total_norm`."""


def warn_of_norms(gradients: Gradients, *, splits: bool) -> None:
    """Warn where torch computes the norm of these gradients, which are those of a part of the model. splits: those of
    a part of each parameter."""
    _OF_A_PART.add(gradients)
    if splits:
        _OF_PARTS.add(gradients)
        if not hasattr(Tensor.norm, "warns_of_parts"):
            setattr(Tensor, "norm", _warning(Tensor.norm))  # noqa: B010 - of a class
    torchs = getattr(nn.utils.clip_grad, _GROUPS, None)
    if torchs is None or hasattr(torchs, "warns_of_parts"):
        return

    @wraps(torchs)
    def groups(tensors: Any, *args: Any, **options: Any) -> Any:
        if not torch.compiler.is_compiling() and sys._getframe(1).f_code.co_name.endswith("get_total_norm") and any(
                maker is not None and maker() in _OF_A_PART for maker in map(maker_of, tensors[0])):
            warnings.warn("torch.nn.utils.clip_grad_norm_ clips the parameters of this rank by their own norm, not by "
                          "that of the whole model. Call engine.clip_grad_norm_(max_norm) on all ranks.", stacklevel=6)
        return torchs(tensors, *args, **options)

    setattr(groups, "warns_of_parts", True)  # noqa: B010 - of a function
    setattr(nn.utils.clip_grad, _GROUPS, groups)


def _warning(torchs: Any) -> Any:
    @wraps(torchs)
    def norm(self: Tensor, p: Any = "fro", dim: Any = None, *args: Any, **options: Any) -> Tensor:
        if dim is None and not torch.compiler.is_compiling() and (
                ((maker := maker_of(self)) is not None and maker() in _OF_PARTS) or has_parts(self)):
            warnings.warn("this is the norm of one rank's part of a tensor that is split over rows and columns. "
                          "Sum the squares over them, or clip by engine.clip_grad_norm_(max_norm).", stacklevel=2)
        found: Tensor = torchs(self, p, dim, *args, **options)
        return found

    setattr(norm, "warns_of_parts", True)  # noqa: B010 - of a function
    return norm
