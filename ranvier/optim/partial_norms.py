"""torch's norm of gradients, as `clip_grad_norm_` computes it, knows those of one rank: a warning where the model has
more."""

from __future__ import annotations

import sys
import warnings
from functools import wraps
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from ranvier.optim.gradients import Gradients, maker_of

_OF_A_PART: WeakSet[Gradients] = WeakSet()
_GROUPS = "_group_tensors_by_device_and_dtype"
"""What torch's norm looks up in its module at each call, whenever a program has imported `get_total_norm`."""


def warn_of_norms(gradients: Gradients) -> None:
    """Warn where torch computes the norm of these gradients, which are those of a part of the model."""
    _OF_A_PART.add(gradients)
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
