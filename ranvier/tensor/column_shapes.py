"""Where a cut dim is after a view, a permutation or an index: pure arithmetic on shapes.

Each function takes the local shape, the cut dim and the call's arguments, and returns the dim's new place (and, where
it is merged or taken apart, the factor of its size), or None where the result is not one part of one dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import prod

from torch import Tensor

from ranvier.tensor.columns import LocalSize

Place = tuple[int, Fraction] | None
"""Its new dim, and its new size as a multiple of the old one."""


def flatten(shape: Sequence[int], cut: int, start: int, stop: int) -> Place:
    """Dims start..stop, both included, become one."""
    start, stop = start % len(shape), stop % len(shape)
    if not start <= cut <= stop:
        return (cut if cut < start else cut - (stop - start)), Fraction(1)
    if prod(shape[start:cut]) != 1:  # parts of the cut dim would alternate with other columns'
        return None
    return start, Fraction(prod(shape[cut + 1:stop + 1]))


def unflatten(cut: int, dim: int, sizes: Sequence[int]) -> Place:
    """Dim `dim` becomes `sizes`."""
    if dim != cut:
        return (cut if cut < dim else cut + len(sizes) - 1), Fraction(1)
    place = _varying(sizes)
    if place is None or prod(sizes[:place]) != 1:
        return None
    return cut + place, Fraction(1, prod(sizes[place + 1:]) or 1)


def reshape(shape: Sequence[int], cut: int, sizes: Sequence[int], result: Sequence[int]) -> Place:
    """The whole shape becomes `sizes` (as the call has them), which is `result`."""
    place = _varying(sizes)
    if place is None or prod(result[:place]) != prod(shape[:cut]):
        return None
    return place, Fraction(prod(shape[cut + 1:]), prod(result[place + 1:]) or 1)


def _varying(sizes: Sequence[int]) -> int | None:
    """Which of a call's sizes is not the same as on one rank: the one that was read from a cut dim, else the -1. What
    is written down is the same; None where no size varies, or several do."""
    read = [place for place, size in enumerate(sizes) if isinstance(size, LocalSize)]
    found = read or [place for place, size in enumerate(sizes) if size == -1]
    return found[0] if len(found) == 1 else None


def expanded(shape: Sequence[int], cut: int, sizes: Sequence[int]) -> int | None:
    """Broadcast to `sizes`, aligned to the right."""
    place = cut + len(sizes) - len(shape)
    size = sizes[place]
    return place if size == -1 or (isinstance(size, LocalSize) and size == shape[cut]) else None


def permuted(num_dims: int, cut: int, dims: Sequence[int]) -> int:
    return [dim % num_dims for dim in dims].index(cut)


def transposed(num_dims: int, cut: int, first: int, second: int) -> int:
    first, second = first % num_dims, second % num_dims
    return {first: second, second: first}.get(cut, cut)


def moved(num_dims: int, cut: int, source: int | Sequence[int], destination: int | Sequence[int]) -> int:
    sources = [dim % num_dims for dim in ([source] if isinstance(source, int) else source)]
    targets = [dim % num_dims for dim in ([destination] if isinstance(destination, int) else destination)]
    placed = dict(zip(targets, sources, strict=True))
    rest = iter(dim for dim in range(num_dims) if dim not in sources)
    return [placed[place] if place in placed else next(rest) for place in range(num_dims)].index(cut)


def without(cut: int, removed: Sequence[int]) -> int:
    """`removed` dims are gone."""
    return cut - sum(dim < cut for dim in removed)


def indexed(shape: Sequence[int], cut: int, index: object) -> int | None:
    """x[index]. The cut dim may be taken whole only; at most one index is a tensor, and then none is a number."""
    items = list(index) if isinstance(index, tuple) else [index]
    used = sum(_consumed(item) for item in items)
    if not any(item is Ellipsis for item in items):
        items.append(Ellipsis)
    tensors = sum(isinstance(item, (Tensor, list)) for item in items)
    if tensors > 1 or (tensors and any(isinstance(item, int) for item in items)) or used > len(shape):
        return None
    dim = place = 0
    for item in items:
        consumed = len(shape) - used if item is Ellipsis else _consumed(item)
        if dim <= cut < dim + consumed:
            if item is Ellipsis:
                return place + cut - dim
            return place if isinstance(item, slice) and item == slice(None) else None
        if item is None:
            place += 1
        elif item is Ellipsis:
            place += consumed
        elif isinstance(item, slice):
            place += 1
        elif isinstance(item, (Tensor, list)):
            place += 1 if isinstance(item, list) or _is_mask(item) else item.dim()
        elif isinstance(item, bool) or not isinstance(item, int):
            return None
        dim += consumed
    return None


def _consumed(item: object) -> int:
    if item is None or item is Ellipsis:
        return 0
    return item.dim() if isinstance(item, Tensor) and _is_mask(item) else 1


def _is_mask(index: Tensor) -> bool:
    return str(index.dtype) in ("torch.bool", "torch.uint8")


def einsum_labels(equation: str) -> tuple[list[str], str] | None:
    """Operands' and the result's labels; None where the equation has an ellipsis."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    if "." in equation:
        return None
    operands = left.split(",")
    if not arrow:
        right = "".join(sorted(label for label in set(left) - {","} if left.count(label) == 1))
    return operands, right
