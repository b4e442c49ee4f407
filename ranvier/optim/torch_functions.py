"""Functions of torch that see only one rank's data: norms emit a warning, and initializers are refused.

torch's norm of gradients, as computed by `clip_grad_norm_`, covers those of one rank: it warns if the model has more.
On rows and columns, `Tensor.norm` of one gradient or parameter, of which a rank has a shard, warns, too.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from functools import wraps
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn

from ranvier.errors import ModelError
from ranvier.optim.gradients import Gradients, maker_of
from ranvier.originals.same_memory import overlaps, storage_of

_OF_A_PART: WeakSet[Gradients] = WeakSet()
_OF_PARTS: WeakSet[Gradients] = WeakSet()
_GROUPS = "_group_tensors_by_device_and_dtype"
"""The function that torch's norm looks up in its module at each call, whenever `get_total_norm` was imported."""


def warn_of_norms(gradients: Gradients, *, splits: bool) -> None:
    """Warn when torch computes the norm of these gradients, which are those of a part of the model. splits: those of a
    part of each parameter."""
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


# --- initial values ---------------------------------------------------------------------------------------------------

# torch's initializers use the shape of their argument, and draw the same numbers on each rank: for a shard of a
# parameter, as rows and columns have it, they are refused.


_PARTS = "ranvier_parts"
"""Attribute of a storage: the parts of parameters in it, as weak references."""
_INITIALIZERS = ("uniform_", "normal_", "trunc_normal_", "xavier_uniform_", "xavier_normal_", "kaiming_uniform_",
                 "kaiming_normal_", "orthogonal_", "sparse_", "eye_", "dirac_")


def refuse_initializers(parts: Iterable[nn.Parameter]) -> None:
    """From now on, raise a ModelError when a function of `torch.nn.init` that does not fill with one value is called
    with one of `parts`, or a view of one."""
    by_storage: dict[int, list[nn.Parameter]] = {}
    for one in parts:
        by_storage.setdefault(storage_of(one), []).append(one)
    by_storage.pop(0, None)
    for group in by_storage.values():
        setattr(group[0].untyped_storage(), _PARTS, tuple(map(ref, group)))
    for name in _INITIALIZERS if by_storage else ():
        if not hasattr(getattr(nn.init, name), _PARTS):
            setattr(nn.init, name, _refusing(getattr(nn.init, name)))


def has_parts(tensor: Tensor) -> bool:
    """Whether the tensor's memory holds parts of parameters."""
    return bool(storage_of(tensor)) and hasattr(tensor.untyped_storage(), _PARTS)


def _refusing(torchs: Any) -> Any:
    @wraps(torchs)
    def initialize(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
        known = getattr(tensor.untyped_storage(), _PARTS, ()) if storage_of(tensor) else ()
        if any((part := one()) is not None and overlaps(tensor, part) for one in known):
            raise ModelError("would initialize a part of a parameter, on each of the ranks that share it, as a whole "
                             "one", code="initialized-part", where=f"torch.nn.init.{torchs.__name__}",
                             value=tuple(tensor.shape),
                             remedy="Initialize the model before the engine is built, or a whole tensor, the same on "
                                    "all ranks, and copy this rank's part of it (engine.layout.box).")
        found: Tensor = torchs(tensor, *args, **options)
        return found

    setattr(initialize, _PARTS, ())
    return initialize
