"""Rules of functions that work element by element, of joins, and of new tensors like a given one.

Each rule has the signature rule(func, args, kwargs) -> the function's result, marked with its layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ranvier.tensor.columns.calls import argument, refuse_call
from ranvier.tensor.columns.layout import ColumnLayout, own_part_of, summed_gradient
from ranvier.tensor.columns.names import IN_PLACE
from ranvier.tensor.columns.tensor import (
    Args,
    ColumnTensor,
    Func,
    Kwargs,
    layout_of_tensor,
    local,
    locals_of,
    mapped,
    mark,
    mark_all,
    sharded_layout,
    tensors_in,
)


def common_layout(func: Func, operands: Sequence[Tensor], result_dims: int) -> tuple[int, ColumnLayout]:
    """(the sharded dim counted from the right, layout) that all sharded operands have; refuses different ones.

    Dims are counted from the right because broadcasting aligns them there.
    """
    found = {layout.place(one.dim()): layout
             for one in operands if (layout := sharded_layout(one)) is not None}
    if len(found) > 1:
        refuse_call(func, operands, "of tensors with different layouts over columns",
                    "Go from one to the other through the layers: Linear(stationary='output') from the residual "
                    "stream, Linear(stationary='input') back to it, ClassifierHead to a replicated tensor.")
    (from_right, *_), common = next(iter(found.items()))
    if from_right > result_dims:
        refuse_call(func, operands)
    return from_right, common


def convert(func: Func, one: Tensor, from_right: int, layout: ColumnLayout, operands: Sequence[Tensor]) -> Tensor:
    """This column's part of `one`, an operand beside others whose sharded dim is `from_right` places from the right.

    A replicated operand of size 1 there is broadcast; of the global size, each column takes its shard.
    """
    if sharded_layout(one) is not None:
        return local(one)  # type: ignore[no-any-return]
    one = local(one)
    size = one.size(-from_right) if one.dim() >= from_right else 1
    if size == 1:
        return summed_gradient(one, layout.mesh)
    if size != layout.size:
        refuse_call(func, operands,
                    f"of a tensor with {size} of {layout.size} elements along the dim that is sharded over columns",
                    "Make it with the size that the tensor reports (each column then takes its shard), or like another "
                    "tensor: zeros_like(x).")
    dim = one.dim() - from_right
    return own_part_of(one, dim, layout) if torch.is_grad_enabled() and one.requires_grad else layout.shard(one, dim)


WHERE: tuple[Func, ...] = (torch.where, Tensor.where)
"""Pointwise functions that are something else with a condition alone."""


def are_alike(operands: Sequence[Tensor]) -> bool:
    """Whether they are one sharded tensor, or have the same sizes and layout: shards are then computed as they are."""
    first = operands[0]
    if not isinstance(first, ColumnTensor) or first.columns.dim is None:
        return False
    for one in operands:
        if one is not first and not (isinstance(one, ColumnTensor) and one.columns == first.columns
                                     and one.local.shape == first.local.shape):
            return False
    return True


def pointwise(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Functions whose every result depends on the elements at the same place of the operands."""
    operands = tensors_in((*args, *kwargs.values()) if kwargs else args)
    if func in WHERE and len(operands) < 2:
        refuse_call(func, operands, "of a condition alone")
    dims = max(one.dim() for one in operands)
    if func in IN_PLACE and (sharded_layout(args[0]) is None or args[0].dim() != dims):
        refuse_call(func, operands, "of a sharded tensor into one that is not sharded",
                    "Use the form that returns a new tensor.")
    from_right, layout = common_layout(func, operands, dims)
    if any(sharded_layout(one) is None for one in operands):
        own, named = mapped(lambda one: convert(func, one, from_right, layout, operands)
                            if isinstance(one, Tensor) else one, (tuple(args), kwargs))
    else:
        own, named = locals_of(args, kwargs)
    return mark_all(func(*own, **named), layout.moved(dims - from_right), args[0] if func in IN_PLACE else None)


def join(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
    """torch.cat and torch.stack, along dims that are not sharded."""
    tensors, dim = argument(args, kwargs, 0, "tensors"), argument(args, kwargs, 1, "dim", "axis", default=0)
    stacked = func is torch.stack
    from_right, layout = common_layout(func, tensors, tensors[0].dim())
    sharded, dim = tensors[0].dim() - from_right, dim % (tensors[0].dim() + stacked)
    if not stacked and dim == sharded:
        refuse_call(func, tensors, "along the dim that is sharded over columns")
    found = func([convert(func, one, from_right, layout, tensors) for one in tensors], dim)
    return mark(found, layout.moved(sharded + (stacked and dim <= sharded)))


def like_first(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Functions whose result has the first operand's layout: copies, conversions, tensors of constants."""
    layout = layout_of_tensor(args[0])
    own, named = locals_of(args, kwargs)
    result = func(*own, **named)
    return result if layout is None else mark_all(result, layout, args[0])


def new_tensor(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
    """x.new_zeros(sizes) and the like: sizes are whole, so the tensor is replicated."""
    own, named = locals_of(args, kwargs)
    return mark(func(*own, **named), ColumnLayout(args[0].columns.mesh))
