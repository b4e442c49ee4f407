"""`ColumnTensor`: a tensor that carries its layout over the columns of a tensor mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, TypeVar, overload

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ranvier.tensor.columns.layout import ColumnLayout

Args = Sequence[Any]
"""Positional arguments of a torch function: whatever the caller gave."""
Kwargs = dict[str, Any]
Func = Callable[..., Any]

_T = TypeVar("_T")
_untracked = torch._C.DisableTorchFunctionSubclass
"""Inside it, torch functions do not call `__torch_function__` of subclasses."""


class ColumnTensor(Tensor):
    """A tensor of a split model on one of several columns. `mark` makes one, `plain` is the inverse.

    It has no storage of its own format: it is an ordinary tensor whose torch functions go through `dispatch`.
    """

    columns: ColumnLayout
    """How it is laid out over the columns."""
    dispatch: ClassVar[Callable[[Func, Args, Kwargs], Any]]
    """Computes a torch function and marks its results. The package binds it: the rules import this class."""

    @classmethod
    def __torch_function__(cls, func: Func, types: Iterable[type], args: Args = (),
                           kwargs: Kwargs | None = None) -> Any:
        with _untracked():
            return cls.dispatch(func, args, kwargs or {})


def mark(x: Tensor, layout: ColumnLayout) -> Tensor:
    """`x` itself, which carries `layout` from now on. Its storage, its graph and its identity stay."""
    if type(x) is Tensor:
        x.__class__ = ColumnTensor
    if isinstance(x, ColumnTensor):
        x.columns = layout
    return x


def mark_all(result: _T, layout: ColumnLayout) -> _T:
    """Mark every tensor of a torch function's result."""
    if isinstance(result, Tensor):
        mark(result, layout)
    elif isinstance(result, (list, tuple)):
        for one in result:
            mark_all(one, layout)
    return result


@overload
def plain(x: Tensor) -> Tensor: ...
@overload
def plain(x: _T) -> _T: ...
def plain(x: object) -> object:
    """`x`, a tensor or a tree of them, without layouts: what layers and the runtime compute with."""
    if isinstance(x, ColumnTensor):
        with _untracked():
            return x.as_subclass(Tensor)
    return x if isinstance(x, Tensor) else mapped(lambda leaf: plain(leaf) if isinstance(leaf, Tensor) else leaf, x)


def mapped(call: Callable[[Any], Any], tree: Any) -> Any:
    """`tree` with `call` of each leaf, as `tree_map` has it, whose registry of containers costs more than the products
    of a small layer: it is asked only about what is no plain container, tensor or None."""
    kind = type(tree)
    if kind is tuple:
        return tuple([mapped(call, one) for one in tree])
    if kind is dict:
        return {name: mapped(call, one) for name, one in tree.items()}
    if kind is list:
        return [mapped(call, one) for one in tree]
    return call(tree) if isinstance(tree, Tensor) else tree_map(call, tree)


def layout_of_tensor(x: Tensor) -> ColumnLayout | None:
    """The layout of a `ColumnTensor`; None for a plain tensor."""
    return x.columns if isinstance(x, ColumnTensor) else None


def sharded_layout(x: Tensor) -> ColumnLayout | None:
    """The layout of a sharded tensor; None for a replicated or a plain one."""
    return x.columns if isinstance(x, ColumnTensor) and x.columns.dim is not None else None


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among a call's arguments, those in lists and tuples too, in order."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_in(value)
    return found
