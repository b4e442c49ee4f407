"""Functions of torch that know what one rank has alone: norms warn of that, and initializers are refused.

torch's norm of gradients, as `clip_grad_norm_` computes it, knows those of one rank: a warning where the model has
more. On rows and columns so do reductions of one gradient or parameter over a dim of which a rank has a part, such as
`Tensor.norm`, and `Tensor.renorm`, whose result is a value for the parameter, is refused.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Sequence
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
"""What torch's norm looks up in its module at each call, whenever a program has imported `get_total_norm`."""
_REDUCTIONS = ("norm", "mean", "sum", "std", "var", "amax", "amin", "max", "min", "renorm", "renorm_")
"""Methods of tensors."""


def warn_of_norms(gradients: Gradients, *, splits: bool) -> None:
    """Warn where torch computes the norm of these gradients, which are those of a part of the model. splits: those of
    a part of each parameter."""
    _OF_A_PART.add(gradients)
    if splits:
        _OF_PARTS.add(gradients)
        for name in _REDUCTIONS:
            if not hasattr(getattr(Tensor, name), "warns_of_parts"):
                setattr(Tensor, name, _warning(name, getattr(Tensor, name)))
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


def _warning(name: str, torchs: Any) -> Any:
    @wraps(torchs)
    def reduce(self: Tensor, *args: Any, **options: Any) -> Any:
        if not torch.compiler.is_compiling() and (parts := _parts_under(self)) and any(
                not _cut_dims(self, part, whole).isdisjoint(_reduced(name, self.dim(), args, options))
                for part, whole in parts):
            if name.startswith("renorm"):
                raise ModelError("would bring one rank's part of vectors to a norm, as if it were all of them",
                                 code="renormalized-part", where=f"torch.Tensor.{name}", value=tuple(self.shape),
                                 remedy="Sum the squares of the parts over rows and columns, and scale by their root.")
            warnings.warn(f"this is the {name} of one rank's part of a tensor that is split over rows and columns. "
                          "Combine those of all ranks (of a norm the squares), or clip by "
                          "engine.clip_grad_norm_(max_norm).", stacklevel=2)
        return torchs(self, *args, **options)

    setattr(reduce, "warns_of_parts", True)  # noqa: B010 - of a function
    return reduce


def _reduced(name: str, num_dims: int, args: tuple[Any, ...], options: dict[str, Any]) -> set[int]:
    """The dims over which a call of a reduction goes."""
    place = int(name in ("norm", "renorm", "renorm_"))
    dims = options.get("dim", options.get("axis", args[place] if len(args) > place else None))
    if isinstance(dims, Tensor):  # the larger of two
        return set()
    every = set(range(num_dims))
    if dims is None or isinstance(dims, bool | str):
        return every
    given = {one % max(num_dims, 1) for one in ((dims,) if isinstance(dims, int) else dims)} or every
    return every - given if name.startswith("renorm") else given


def _parts_under(tensor: Tensor) -> list[tuple[Tensor, Sequence[int]]]:
    """Parts of parameters, or their gradients, that a tensor shares memory with, and the shapes of the whole ones."""
    if not storage_of(tensor):
        return []
    maker = maker_of(tensor)
    gradients = None if maker is None else maker()
    if gradients is None or gradients not in _OF_PARTS:
        return [(part, whole) for one, whole in getattr(tensor.untyped_storage(), _PARTS, ())
                if (part := one()) is not None and overlaps(tensor, part)]
    return [(parameter.grad, whole) for parameter in gradients.places if parameter.grad is not None
            for part, whole in getattr(parameter.untyped_storage(), _PARTS, ())
            if part() is parameter and overlaps(tensor, parameter.grad)]


def _cut_dims(tensor: Tensor, part: Tensor, whole: Sequence[int]) -> set[int]:
    """Dims of which other rows or columns have more. Of a view of another form it may be any."""
    if tensor.shape != part.shape or tensor.stride() != part.stride():
        return set(range(tensor.dim()))
    return {dim for dim, size in enumerate(whole) if size != part.shape[dim]}


# --- initial values ---------------------------------------------------------------------------------------------------

# torch's initializers know the shape that they are given, and draw the same numbers on each rank: of a part of a
# parameter, as rows and columns have it, they are refused.


_PARTS = "ranvier_parts"
"""Attribute of a storage: the parts of parameters in it, as weak references, with the shapes of the whole ones."""
_INITIALIZERS = ("uniform_", "normal_", "trunc_normal_", "xavier_uniform_", "xavier_normal_", "kaiming_uniform_",
                 "kaiming_normal_", "orthogonal_", "sparse_", "eye_", "dirac_")


def refuse_initializers(parts: Iterable[tuple[nn.Parameter, Sequence[int]]]) -> None:
    """From now on a ModelError where a function of `torch.nn.init` that does not fill with one value is given one of
    `parts`, or a view of one. With each part comes the shape of the whole parameter."""
    by_storage: dict[int, list[tuple[nn.Parameter, Sequence[int]]]] = {}
    for part, whole in parts:
        by_storage.setdefault(storage_of(part), []).append((part, whole))
    by_storage.pop(0, None)
    for group in by_storage.values():
        setattr(group[0][0].untyped_storage(), _PARTS, tuple((ref(part), whole) for part, whole in group))
    for name in _INITIALIZERS if by_storage else ():
        if not hasattr(getattr(nn.init, name), _PARTS):
            setattr(nn.init, name, _refusing(getattr(nn.init, name)))


def _refusing(torchs: Any) -> Any:
    @wraps(torchs)
    def initialize(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
        known = getattr(tensor.untyped_storage(), _PARTS, ()) if storage_of(tensor) else ()
        if any((part := one()) is not None and overlaps(tensor, part) for one, _ in known):
            raise ModelError("would initialize a part of a parameter, on each of the ranks that share it, as a whole "
                             "one", code="initialized-part", where=f"torch.nn.init.{torchs.__name__}",
                             value=tuple(tensor.shape),
                             remedy="Initialize the model before the engine is built, or a whole tensor, the same on "
                                    "all ranks, and copy this rank's part of it (engine.layout.box).")
        found: Tensor = torchs(tensor, *args, **options)
        return found

    setattr(initialize, _PARTS, ())
    return initialize
