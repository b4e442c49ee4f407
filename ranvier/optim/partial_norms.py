"""torch's norm of gradients, as `clip_grad_norm_` computes it, knows those of one rank: a warning where the model has
more."""

from __future__ import annotations

import warnings
from functools import wraps
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from ranvier.optim.gradients import Gradients, maker_of

_OF_A_PART: WeakSet[Gradients] = WeakSet()
_FUNCTION = "_get_total_norm"
"""The function of torch with which `clip_grad_norm_` and `get_total_norm` compute."""


def warn_of_norms(gradients: Gradients) -> None:
    """Warn where torch computes the norm of these gradients, which are those of a part of the model."""
    _OF_A_PART.add(gradients)
    torchs = getattr(nn.utils.clip_grad, _FUNCTION, None)
    if torchs is None or hasattr(torchs, "warns_of_parts"):
        return

    @wraps(torchs)
    def total_norm(tensors: Any, *args: Any, **options: Any) -> Any:
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if not torch.compiler.is_compiling() and any(
                maker is not None and maker() in _OF_A_PART for maker in map(maker_of, tensors)):
            warnings.warn("torch.nn.utils.clip_grad_norm_ clips the parameters of this rank by their own norm, not by "
                          "that of the whole model. Call engine.clip_grad_norm_(max_norm) on all ranks.", stacklevel=4)
        return torchs(tensors, *args, **options)

    setattr(total_norm, "warns_of_parts", True)  # noqa: B010 - of a function
    for module, name in ((nn.utils.clip_grad, _FUNCTION), (nn.utils, "get_total_norm")):
        setattr(module, name, total_norm)
