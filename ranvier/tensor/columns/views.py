"""Rules of shapes, views, permutations and indices: the sharded dim is followed to its place in the result.

A rule `view(func, args, kwargs, find)` runs the function and asks `find(x, dim, args, kwargs, result)` for the new
place of the sharded dim: a dim, or a `shapes.Place`, or None where the result is no shard of one dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ranvier.tensor.columns import shapes
from ranvier.tensor.columns.calls import argument, refuse_call, sizes_or_dims
from ranvier.tensor.columns.local_size import LocalSize
from ranvier.tensor.columns.pointwise import convert
from ranvier.tensor.columns.tensor import Args, Func, Kwargs, mark_all, sharded_layout, tensors_in

Find = Callable[[Tensor, int, Args, Kwargs, Any], shapes.Place | int | None]


def view(func: Func, args: Args, kwargs: Kwargs, find: Find) -> Any:
    """A view of a sharded tensor, with the sharded dim where `find` says; see the top of the file."""
    x = args[0]
    layout = sharded_layout(x)
    if layout is None:
        refuse_call(func, tensors_in(args))
    try:
        result = func(*args, **kwargs)
    except (RuntimeError, IndexError, ValueError) as error:  # sizes written down, which fit the whole tensor only
        refuse_call(func, [x], f"({error})")
    place = find(x, layout.sharded_dim, args, kwargs, result)
    dim, times, over = place if isinstance(place, tuple) else (place, 1, 1)
    if dim is None or (times != over and not layout.is_even) or layout.size * times % over:
        refuse_call(func, [x], f"with {', '.join(map(str, args[1:]))}" if args[1:] else "",
                    "Read the size of the sharded dim from the tensor, or leave it as -1, and keep the dim in front of "
                    "those it is merged with: unflatten(-1, (-1, width)).")
    return mark_all(result, layout.moved(dim, layout.size * times // over))


# ---------------------------------------------------------------------- sizes


def sizes_of(x: Tensor) -> torch.Size:
    """x's local sizes; that of a sharded dim is a `LocalSize`."""
    layout, sizes = sharded_layout(x), list(x.size())
    if layout is not None:
        dim = layout.sharded_dim
        sizes[dim] = LocalSize(sizes[dim], layout.size)
    return torch.Size(sizes)


def size(func: Func, args: Args, kwargs: Kwargs) -> torch.Size | int:
    """x.shape, x.size(), x.size(dim)."""
    dim = argument(args, kwargs, 1, "dim")
    return sizes_of(args[0]) if dim is None else sizes_of(args[0])[dim]


def length(func: Func, args: Args, kwargs: Kwargs) -> int:
    """len(x): refused for a sharded first dim, because Python turns a `LocalSize` into a plain int there."""
    x: Tensor = args[0]
    layout = sharded_layout(x)
    if layout is not None and layout.dim == 0:
        refuse_call(func, [x])
    return x.size(0)


def num_elements(func: Func, args: Args, kwargs: Kwargs) -> int:
    """x.numel(): local and global count, as a `LocalSize`."""
    x = args[0]
    count, local = x.numel(), x.size(x.columns.dim)
    return LocalSize(count, count // local * x.columns.size if local else 0)


# ---------------------------------------------------------------------- new shapes


def reshaped(x: Tensor, dim: int, args: Args, kwargs: Kwargs, result: Tensor) -> shapes.Place | None:
    """view and reshape to sizes."""
    sizes = sizes_or_dims(args, 1, kwargs, "shape", "size")
    if sizes and not all(isinstance(size, int) for size in sizes):
        return None  # view(dtype)
    return shapes.reshape(tuple(x.size()), dim, sizes, tuple(result.size()))


def reshaped_as(x: Tensor, dim: int, args: Args, kwargs: Kwargs, result: Tensor) -> shapes.Place | None:
    """view_as and reshape_as: without a sharded dim in `other` the place is unknown."""
    other = argument(args, kwargs, 1, "other")
    sizes = sizes_of(other) if sharded_layout(other) is not None else ()
    return shapes.reshape(tuple(x.size()), dim, sizes, tuple(result.size()))


def flattened(x: Tensor, dim: int, args: Args, kwargs: Kwargs, result: Tensor) -> shapes.Place | None:
    """flatten(start_dim, end_dim)."""
    return shapes.flatten(tuple(x.size()), dim, argument(args, kwargs, 1, "start_dim", default=0),
                          argument(args, kwargs, 2, "end_dim", default=-1))


def unflattened(x: Tensor, dim: int, args: Args, kwargs: Kwargs, result: Tensor) -> shapes.Place | None:
    """unflatten(dim, sizes)."""
    return shapes.unflatten(dim, argument(args, kwargs, 1, "dim") % x.dim(), argument(args, kwargs, 2, "sizes"))


def expanded(x: Tensor, dim: int, args: Args, kwargs: Kwargs, result: Tensor) -> int | None:
    """expand, expand_as, broadcast_to."""
    other = argument(args, kwargs, 1, "other", "size", "shape")
    sizes = sizes_of(other) if isinstance(other, Tensor) else sizes_or_dims(args, 1, kwargs, "size", "shape")
    return shapes.expanded(tuple(x.size()), dim, sizes)


def repeated(x: Tensor, dim: int, args: Args, kwargs: Kwargs, result: Tensor) -> int | None:
    """repeat(counts), once along the sharded dim."""
    counts = sizes_or_dims(args, 1, kwargs, "repeats")
    place = dim + len(counts) - x.dim()
    return place if counts[place] == 1 else None


def repeat_interleaved(x: Tensor, dim: int, args: Args, kwargs: Kwargs, result: Tensor) -> shapes.Place | int | None:
    """repeat_interleave(count, dim): copies of an element are neighbours, so shards stay shards."""
    count, along = argument(args, kwargs, 1, "repeats"), argument(args, kwargs, 2, "dim")
    if along is None or not isinstance(count, int) or isinstance(count, LocalSize):
        return None
    return (dim, count, 1) if along % x.dim() == dim else dim


def unsqueezed(x: Tensor, dim: int, args: Args, kwargs: Kwargs, result: Tensor) -> int:
    """unsqueeze(dim)."""
    return dim + int(argument(args, kwargs, 1, "dim") % (x.dim() + 1) <= dim)


def squeezed(x: Tensor, dim: int, args: Args, kwargs: Kwargs, result: Tensor) -> int | None:
    """squeeze(dims). A sharded dim of local size 1 would vanish on this column only."""
    dims = argument(args, kwargs, 1, "dim")
    dims = range(x.dim()) if dims is None else [dims] if isinstance(dims, int) else dims
    removed = [one % x.dim() for one in dims if x.size(one) == 1]
    return None if dim in removed else shapes.without(dim, removed)


# ---------------------------------------------------------------------- permutations


def permuted(x: Tensor, dim: int, args: Args, kwargs: Kwargs, result: Tensor) -> int:
    """permute(dims)."""
    return shapes.permuted(x.dim(), dim, sizes_or_dims(args, 1, kwargs, "dims"))


def transposed(x: Tensor, dim: int, args: Args, kwargs: Kwargs, result: Tensor) -> int:
    """transpose, swapaxes, swapdims."""
    return shapes.transposed(x.dim(), dim, argument(args, kwargs, 1, "dim0", "axis0"),
                             argument(args, kwargs, 2, "dim1", "axis1"))


def matrix_transposed(x: Tensor, dim: int, args: Args, kwargs: Kwargs, result: Tensor) -> int:
    """x.mT, x.mH."""
    return shapes.transposed(x.dim(), dim, -2, -1)


def reversed_dims(x: Tensor, dim: int, args: Args, kwargs: Kwargs, result: Tensor) -> int:
    """x.t(), x.T, x.H."""
    return x.dim() - 1 - dim


def moved(x: Tensor, dim: int, args: Args, kwargs: Kwargs, result: Tensor) -> int:
    """movedim, moveaxis."""
    return shapes.moved(x.dim(), dim, argument(args, kwargs, 1, "source"), argument(args, kwargs, 2, "destination"))


# ---------------------------------------------------------------------- parts


def selected(x: Tensor, dim: int, args: Args, kwargs: Kwargs, result: Any) -> int | None:
    """select and unbind, of dims that are not sharded, which vanish."""
    along = argument(args, kwargs, 1, "dim", default=0) % x.dim()
    return None if along == dim else shapes.without(dim, [along])


def narrowed(x: Tensor, dim: int, args: Args, kwargs: Kwargs, result: Any) -> int | None:
    """narrow and index_select, of dims that are not sharded."""
    return None if argument(args, kwargs, 1, "dim", default=0) % x.dim() == dim else dim


def split(x: Tensor, dim: int, args: Args, kwargs: Kwargs, result: Any) -> int | None:
    """split, chunk and the like, along dims that are not sharded."""
    return None if argument(args, kwargs, 2, "dim", default=0) % x.dim() == dim else dim


def indexed(x: Tensor, dim: int, args: Args, kwargs: Kwargs, result: Any) -> int | None:
    """x[index], where the index is the same on every column."""
    if any(sharded_layout(one) is not None for one in tensors_in(args[1:])):
        return None
    return shapes.indexed(tuple(x.size()), dim, args[1])


def set_item(func: Func, args: Args, kwargs: Kwargs) -> None:
    """x[index] = value."""
    x, index, value = args
    operands, layout = tensors_in(args), sharded_layout(x)
    if layout is None:
        refuse_call(func, operands)
    place = indexed(x, layout.sharded_dim, args[:2], {}, None)
    if place is None:
        refuse_call(func, operands)
    if isinstance(value, Tensor):
        from_right, other = x[index].dim() - place, sharded_layout(value)
        if other is not None and (value.dim() - other.sharded_dim, other.size) != (from_right, layout.size):
            refuse_call(func, operands)
        value = convert(func, value, from_right, layout, operands)
    func(x, index, value)


def iterate(func: Func, args: Args, kwargs: Kwargs) -> Iterator[Tensor]:
    """for part in x."""
    return iter(view(torch.unbind, args, kwargs, selected))


def diagonal_masked(x: Tensor, dim: int, args: Args, kwargs: Kwargs, result: Tensor) -> int | None:
    """tril and triu, whose last two dims are not sharded."""
    return dim if dim < x.dim() - 2 else None


def padded(x: Tensor, dim: int, args: Args, kwargs: Kwargs, result: Tensor) -> int | None:
    """functional.pad, nothing along the sharded dim. Widths come in pairs, that of the last dim first."""
    widths = argument(args, kwargs, 1, "pad")
    place = 2 * (x.dim() - 1 - dim)
    return None if any(widths[place:place + 2]) else dim


def flipped(x: Tensor, dim: int, args: Args, kwargs: Kwargs, result: Tensor) -> int | None:
    """flip(dims)."""
    return None if dim in [one % x.dim() for one in sizes_or_dims(args, 1, kwargs, "dims")] else dim
