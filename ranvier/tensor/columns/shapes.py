"""Where a sharded dim is after a view, a permutation or an index: pure arithmetic on shapes.

Each function takes the local shape, the sharded dim and the call's arguments, and returns the dim's new place (and,
where it may be merged or divided, its new global size), or None where the result is no shard of one dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from torch import Tensor

from ranvier.tensor.columns.local_size import LocalSize

Place = tuple[int, int, int]
"""(the new dim, times, over): its new global size is the old one * times / over."""


def flatten(shape: Sequence[int], dim: int, start: int, stop: int) -> Place | None:
    """Dims start..stop, both included, become one."""
    start, stop = start % len(shape), stop % len(shape)
    if not start <= dim <= stop:
        return (dim if dim < start else dim - (stop - start)), 1, 1
    if prod(shape[start:dim]) != 1:  # shards of this column would alternate with those of others
        return None
    return start, prod(shape[dim + 1:stop + 1]), 1


def unflatten(dim: int, unflattened: int, sizes: Sequence[int]) -> Place | None:
    """Dim `unflattened` becomes `sizes`."""
    if unflattened != dim:
        return (dim if dim < unflattened else dim + len(sizes) - 1), 1, 1
    place = _local_place(sizes)
    if place is None or prod(sizes[:place]) != 1:
        return None
    return dim + place, 1, prod(sizes[place + 1:]) or 1


def reshape(shape: Sequence[int], dim: int, sizes: Sequence[int], result: Sequence[int]) -> Place | None:
    """The whole shape becomes `sizes` (as the call has them), which is `result`."""
    place = _local_place(sizes)
    if place is None or prod(result[:place]) != prod(shape[:dim]):
        return None
    return place, prod(shape[dim + 1:]), prod(result[place + 1:]) or 1


def _local_place(sizes: Sequence[int]) -> int | None:
    """Which of a call's sizes differs from that on one rank: the one read from a sharded dim, else the -1.

    Sizes that are written down are the same on any mesh. None where no size differs, or several do.
    """
    read = [place for place, size in enumerate(sizes) if isinstance(size, LocalSize)]
    found = read or [place for place, size in enumerate(sizes) if size == -1]
    return found[0] if len(found) == 1 else None


def expanded(shape: Sequence[int], dim: int, sizes: Sequence[int]) -> int | None:
    """Broadcast to `sizes`, aligned to the right."""
    place = dim + len(sizes) - len(shape)
    size = sizes[place]
    return place if size == -1 or (isinstance(size, LocalSize) and size == shape[dim]) else None


def permuted(num_dims: int, dim: int, dims: Sequence[int]) -> int:
    """`dims` in the order of the result."""
    return [one % num_dims for one in dims].index(dim)


def transposed(num_dims: int, dim: int, first: int, second: int) -> int:
    """`first` and `second` swapped."""
    first, second = first % num_dims, second % num_dims
    return {first: second, second: first}.get(dim, dim)


def moved(num_dims: int, dim: int, source: int | Sequence[int], destination: int | Sequence[int]) -> int:
    """`source` dims at `destination`, the others in their order."""
    sources = [one % num_dims for one in ([source] if isinstance(source, int) else source)]
    targets = [one % num_dims for one in ([destination] if isinstance(destination, int) else destination)]
    placed = dict(zip(targets, sources, strict=True))
    rest = iter(one for one in range(num_dims) if one not in sources)
    return [placed[place] if place in placed else next(rest) for place in range(num_dims)].index(dim)


def without(dim: int, removed: Sequence[int]) -> int:
    """`removed` dims are gone."""
    return dim - sum(one < dim for one in removed)


def indexed(shape: Sequence[int], dim: int, index: Any) -> int | None:
    """x[index]. Only `:` and `...` may take the sharded dim.

    At most one index is a tensor, and then none is a number: several are broadcast together, and their dims may move to
    the front.
    """
    items = list(index) if isinstance(index, tuple) else [index]
    used = sum(_num_consumed(item) for item in items)
    if not any(item is Ellipsis for item in items):
        items.append(Ellipsis)
    tensors = sum(isinstance(item, (Tensor, list)) for item in items)
    if tensors > 1 or (tensors and any(isinstance(item, int) for item in items)) or used > len(shape):
        return None
    source = place = 0  # the next dim of x, and of the result
    for item in items:
        consumed = len(shape) - used if item is Ellipsis else _num_consumed(item)
        if source <= dim < source + consumed:
            if item is Ellipsis:
                return place + dim - source
            return place if isinstance(item, slice) and item == slice(None) else None
        if item is Ellipsis:
            place += consumed
        elif item is None or isinstance(item, (slice, list)):
            place += 1
        elif isinstance(item, Tensor):
            place += 1 if _is_mask(item) else item.dim()
        elif isinstance(item, bool) or not isinstance(item, int):
            return None
        source += consumed
    return None


def _num_consumed(item: Any) -> int:
    """How many dims of x an item of an index takes."""
    if item is None or item is Ellipsis:
        return 0
    return item.dim() if isinstance(item, Tensor) and _is_mask(item) else 1


def _is_mask(index: Tensor) -> bool:
    return str(index.dtype) in ("torch.bool", "torch.uint8")


def einsum_labels(equation: str) -> tuple[list[str], str] | None:
    """Labels of each operand and of the result; None where the equation has an ellipsis."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    if "." in equation:
        return None
    operands = left.split(",")
    if not arrow:  # implicit output: the labels that appear once, in alphabetical order
        right = "".join(sorted(label for label in set(left) - {","} if left.count(label) == 1))
    return operands, right
