"""Rules of views, permutations and indices: the sharded dim is followed to its place in the result.

Sizes in calls are those of full tensors. A view is computed with this column's size at the place of the sharded dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor

from ranvier.tensor.columns import shapes
from ranvier.tensor.columns.calls import argument, function_name, refuse_call, sizes_or_dims
from ranvier.tensor.columns.layout import ColumnLayout
from ranvier.tensor.columns.rules import convert, untouched
from ranvier.tensor.columns.tensor import (
    Args,
    Func,
    Kwargs,
    layouts_text,
    local,
    locals_of,
    mark,
    mark_all,
    refuse,
    sharded_layout,
    tensors_in,
)

Place = Callable[[Tensor, int, Args, Kwargs], int | None]
"""(x, its sharded dim, the call's arguments) -> that dim's place in the result; None if the result is not a shard."""
_KEEP_IN_FRONT = ("A view is a shard of the whole view where the sharded dim is in front of the dims that it is merged "
                  "with, or divided into, and the columns divide the new size: unflatten(-1, (heads, width)).")


def _sharded_operand(func: Func, args: Args) -> tuple[Tensor, ColumnLayout]:
    x = args[0]
    layout = sharded_layout(x)
    if layout is None:
        refuse_call(func, tensors_in(args))
    return x, layout


def _refuse_view(func: Func, args: Args, x: Tensor, what: str = "") -> NoReturn:
    refuse_call(func, [x], what or (f"with {', '.join(map(_describe_argument, args[1:]))}" if args[1:] else ""),
                _KEEP_IN_FRONT)


def _describe_argument(argument: object) -> str:
    """An argument in a message; for a tensor its sizes, since its values may fill a page."""
    if isinstance(argument, (tuple, list)):
        shown = ", ".join(map(_describe_argument, argument))
        return f"({shown})" if isinstance(argument, tuple) else f"[{shown}]"
    return f"a tensor of {list(argument.size())}" if isinstance(argument, Tensor) else str(argument)


# ---------------------------------------------------------------------- new shapes


def reshaped(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
    """view, reshape, view_as, reshape_as, flatten, unflatten: the same elements in dims of other sizes."""
    x, layout = _sharded_operand(func, args)
    dim, shape, name = layout.sharded_dim, list(x.size()), func.__name__
    if name == "flatten":
        start = argument(args, kwargs, 1, "start_dim", default=0) % x.dim()
        stop = argument(args, kwargs, 2, "end_dim", default=-1) % x.dim() + 1
        sizes = [*shape[:start], torch.Size(shape[start:stop]).numel(), *shape[stop:]]
    elif name == "unflatten":
        start, parts = argument(args, kwargs, 1, "dim") % x.dim(), list(argument(args, kwargs, 2, "sizes"))
        sizes = [*shape[:start], *shapes.inferred(shape[start:start + 1], parts), *shape[start + 1:]]
    elif name.endswith("_as"):
        sizes = list(argument(args, kwargs, 1, "other").size())
    else:
        sizes = sizes_or_dims(args, 1, kwargs, "shape", "size")
        if not all(isinstance(size, int) for size in sizes):
            _refuse_view(func, args, x)  # view(dtype)
        sizes = shapes.inferred(shape, sizes)
    found = shapes.begins_at(shape, dim, layout.blocks, sizes)
    if found is None or torch.Size(sizes).numel() != x.numel():
        _refuse_view(func, args, x)
    place, blocks = found
    own, extent = list(sizes), sizes[place] // blocks
    if extent * layout.blocks == layout.size:
        own[place] = blocks * (local(x).size(dim) // layout.blocks)
    elif layout.is_even and extent % layout.mesh.num_cols == 0:
        own[place] = sizes[place] // layout.mesh.num_cols
    else:
        _refuse_view(func, args, x)
    try:
        result = local(x).view(own) if name.startswith("view") else local(x).reshape(own)
    except RuntimeError as error:  # strides that view cannot make
        _refuse_view(func, args, x, f"({error})")
    return mark(result, layout.moved(place, sizes[place], blocks))


def expanded(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
    """expand, expand_as, broadcast_to: the sharded dim keeps its size. Sizes are aligned to the right."""
    x, layout = _sharded_operand(func, args)
    other = argument(args, kwargs, 1, "other", "size", "shape")
    sizes = list(other.size()) if isinstance(other, Tensor) else sizes_or_dims(args, 1, kwargs, "size", "shape")
    place = layout.sharded_dim + len(sizes) - x.dim()
    if place < 0 or sizes[place] not in (-1, layout.size):
        _refuse_view(func, args, x)
    return mark(local(x).expand([-1 if at == place else size for at, size in enumerate(sizes)]), layout.moved(place))


def repeat_interleaved(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
    """repeat_interleave(count, dim): copies of an element are neighbours, so shards stay shards."""
    x, layout = _sharded_operand(func, args)
    count, along = argument(args, kwargs, 1, "repeats"), argument(args, kwargs, 2, "dim")
    if along is None or not isinstance(count, int):
        refuse_call(func, [x], "with another count for each element, or over all dims")
    if along % x.dim() != layout.dim:
        return untouched(func, args, kwargs, [along])  # type: ignore[no-any-return]
    if not layout.is_even:
        _refuse_view(func, args, x)
    return mark(local(x).repeat_interleave(count, along), layout.moved(layout.sharded_dim, layout.size * count))


def squeezed(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
    """squeeze(dims): those whose global size is 1."""
    x, layout = _sharded_operand(func, args)
    dims = argument(args, kwargs, 1, "dim")
    dims = range(x.dim()) if dims is None else [dims] if isinstance(dims, int) else dims
    removed = [dim % x.dim() for dim in dims if x.size(dim) == 1]
    return mark(local(x).squeeze(tuple(removed)), layout.moved(shapes.without(layout.sharded_dim, removed)))


# ---------------------------------------------------------------------- the same sizes at another place


def placed(func: Func, args: Args, kwargs: Kwargs, place: Place) -> Any:
    """A function that keeps the sharded dim's size and moves it to the position that `place` returns."""
    x, layout = _sharded_operand(func, args)
    found = place(x, layout.sharded_dim, args, kwargs)
    if found is None:
        _refuse_view(func, args, x)
    own, named = locals_of(args, kwargs)
    try:
        return mark_all(func(*own, **named), layout.moved(found))
    except (RuntimeError, IndexError, ValueError) as error:
        refuse(f"{function_name(func)} ({error})", layouts_text([x]), _KEEP_IN_FRONT)


def unsqueezed(x: Tensor, dim: int, args: Args, kwargs: Kwargs) -> int:
    """unsqueeze(dim)."""
    return dim + int(argument(args, kwargs, 1, "dim") % (x.dim() + 1) <= dim)


def permuted(x: Tensor, dim: int, args: Args, kwargs: Kwargs) -> int:
    """permute(dims)."""
    return [dim % x.dim() for dim in sizes_or_dims(args, 1, kwargs, "dims")].index(dim)


def transposed(x: Tensor, dim: int, args: Args, kwargs: Kwargs) -> int:
    """transpose, swapaxes, swapdims."""
    return shapes.transposed(x.dim(), dim, argument(args, kwargs, 1, "dim0", "axis0"),
                             argument(args, kwargs, 2, "dim1", "axis1"))


def matrix_transposed(x: Tensor, dim: int, args: Args, kwargs: Kwargs) -> int:
    """x.mT."""
    return shapes.transposed(x.dim(), dim, -2, -1)


def reversed_dims(x: Tensor, dim: int, args: Args, kwargs: Kwargs) -> int:
    """x.t(), x.T."""
    return x.dim() - 1 - dim


def indexed(x: Tensor, dim: int, args: Args, kwargs: Kwargs) -> int | None:
    """x[index], where the index is the same on every column."""
    if any(sharded_layout(tensor) is not None for tensor in tensors_in(args[1:])):
        return None
    return shapes.indexed(tuple(x.size()), dim, args[1])


def set_item(func: Func, args: Args, kwargs: Kwargs) -> None:
    """x[index] = value."""
    x, index, value = args
    operands, layout = tensors_in(args), sharded_layout(x)
    place = None if layout is None else indexed(x, layout.sharded_dim, args[:2], {})
    if layout is None or place is None:
        refuse_call(func, operands)
    (own_index,), _ = locals_of((index,), {})
    if isinstance(value, Tensor):
        from_right, other = local(x)[own_index].dim() - place, sharded_layout(value)
        if other is not None and other.place(value.dim()) != (from_right, layout.size, layout.blocks):
            refuse_call(func, operands)
        value = convert(func, value, from_right, layout, operands)
    func(local(x), own_index, value)


def iterate(func: Func, args: Args, kwargs: Kwargs) -> Iterator[Tensor]:
    """for part in x."""
    return iter(untouched(torch.unbind, args, kwargs, [0]))
