"""Cache of counted costs in this process. A rank that checks its memory, freezes layers or changes its mesh plans the
same model again, and counting its blocks takes longer than all else in a plan.

Only models of Ranvier's own blocks are known again: their builders are `functools.partial`s of its classes and values
that cannot change. Any other code may build something else each time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import suppress
from enum import Enum
from functools import partial
from types import FunctionType
from typing import Generic, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from ranvier.block import Model
from ranvier.cost.blocks import BlockCost
from ranvier.tensor.columns import plain

_OF_ANY_MODULE = vars(nn.Module()).keys()
Found = TypeVar("Found")


class Known(Generic[Found]):
    """Results by what they depend on, the last `most` of them. Ranks that are threads need the same one at the same
    time: one of them computes it."""

    def __init__(self, most: int) -> None:
        self._most, self._computing = most, threading.Lock()
        self._found: dict[Hashable, Found] = {}

    def get(self, key: Hashable, compute: Callable[[], Found]) -> Found:
        """The result for `key`; what `compute` returns, where there is none yet, or `key` has no hash."""
        try:
            hash(key)
        except TypeError:
            return compute()
        with self._computing:
            if key not in self._found:
                found = compute()
                if len(self._found) == self._most:
                    del self._found[next(iter(self._found))]
                self._found[key] = found
            return self._found[key]


_known = Known[tuple[BlockCost, ...]](256)


def known_or_counted(model: Model, sample: object, settings: Hashable, count: Callable[[], Iterable[BlockCost]]
                     ) -> tuple[BlockCost, ...]:
    """The cached result of `count` for a model that computes the same, else a new one. sample: its inputs and targets,
    of which shapes and formats matter. settings: all else on which the costs depend."""
    key: Hashable = None
    with suppress(TypeError):
        key = (_recipe(model.blocks), _recipe(model.loss), model.tied, _recipe(model.alike), model.keep_fp32,
               _shapes(sample), settings)
    return tuple(count()) if key is None else _known.get(key, lambda: tuple(count()))


def _recipe(value: object) -> Hashable:
    """Equal for builders of equal blocks, and for equal losses. TypeError for what may build something else later."""
    match value:
        case None | bool() | int() | float() | str() | Enum() | torch.dtype():
            return type(value), value
        case partial():
            return _recipe(value.func), _recipe(value.args), _recipe(value.keywords)
        case Mapping():
            return tuple((key, _recipe(each)) for key, each in value.items())
        case tuple() | list():
            return tuple(map(_recipe, value))
    code = value if isinstance(value, (type, FunctionType)) else type(value)
    if code.__module__.partition(".")[0] != "ranvier" or getattr(code, "__closure__", None):
        raise TypeError
    if not isinstance(value, nn.Module):  # code, or a dataclass of settings, which has a hash where it is frozen
        return value
    if any(True for _ in (*value.parameters(), *value.buffers())):
        raise TypeError
    own = {name: each for name, each in vars(value).items() if name not in _OF_ANY_MODULE}
    return type(value), _recipe(own), _recipe(value._modules)


def _shapes(sample: object) -> Hashable:
    leaves, spec = tree_flatten(sample)
    return str(spec), tuple((plain(leaf).shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else _recipe(leaf)
                            for leaf in leaves)
