"""torch's initializers know the shape that they are given, and draw the same numbers on each rank: of a part of a
parameter, as rows and columns have it, they are refused."""

from __future__ import annotations

from collections.abc import Iterable
from functools import wraps
from typing import Any
from weakref import ref

from torch import Tensor, nn

from ranvier.errors import ModelError
from ranvier.originals.same_memory import overlaps, storage_of

_PARTS = "ranvier_parts"
"""Attribute of a storage: the parts of parameters in it, as weak references."""
_INITIALIZERS = ("uniform_", "normal_", "trunc_normal_", "xavier_uniform_", "xavier_normal_", "kaiming_uniform_",
                 "kaiming_normal_", "orthogonal_", "sparse_", "eye_", "dirac_")


def refuse_initializers(parts: Iterable[nn.Parameter]) -> None:
    """From now on a ModelError where a function of `torch.nn.init` that does not fill with one value is given one of
    `parts`, or a view of one."""
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
    """Whether its memory holds such parts."""
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
