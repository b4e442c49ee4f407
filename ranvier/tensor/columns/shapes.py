"""Position of a sharded dim after a view, a permutation or an index: pure arithmetic on global sizes."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from torch import Tensor


def inferred(shape: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """`sizes` of a view of a tensor of `shape`, with a -1 replaced by the inferred size."""
    known = prod(size for size in sizes if size != -1)
    return [prod(shape) // known if size == -1 and known else size for size in sizes]


def begins_at(shape: Sequence[int], dim: int, blocks: int, sizes: Sequence[int]) -> tuple[int, int] | None:
    """(the dim of `sizes` that holds `dim` of `shape`, its number of blocks there), or None if there is none. The same
    number of elements precedes both dims. blocks: of `dim` in `shape`.

    If a size is 0, equal dims of `shape` and `sizes` at the front or at the end determine it.
    """
    behind = len(shape) - dim
    if len(sizes) >= behind and list(sizes[len(sizes) - behind:]) == list(shape[dim:]):
        return len(sizes) - behind, blocks
    place = 0
    while place < min(dim, len(sizes)) and shape[place] == sizes[place]:
        place += 1
    before, passed = prod(shape[place:dim]) * blocks, 1
    while place < len(sizes) and passed and before and before % passed == 0:
        found = before // passed
        if sizes[place] > found:
            return (place, found) if sizes[place] % found == 0 else None
        passed *= sizes[place]
        place += 1
    return None


def transposed(num_dims: int, dim: int, first: int, second: int) -> int:
    """`dim` after `first` and `second` are swapped."""
    first, second = first % num_dims, second % num_dims
    return {first: second, second: first}.get(dim, dim)


def without(dim: int, removed: Sequence[int]) -> int:
    """`dim` after the `removed` dims are gone."""
    return dim - sum(place < dim for place in removed)


def indexed(shape: Sequence[int], dim: int, index: Any) -> int | None:
    """`dim` of x in x[index], or None. Only `:` and `...` may index the sharded dim.

    At most one index may be a tensor, and then none may be a number: several would be broadcast together, and their
    dims could move to the front.
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
    """Number of dims of x that an item of an index takes."""
    if item is None or item is Ellipsis:
        return 0
    return item.dim() if isinstance(item, Tensor) and _is_mask(item) else 1


def _is_mask(index: Tensor) -> bool:
    return str(index.dtype) in ("torch.bool", "torch.uint8")


def einsum_labels(equation: str) -> tuple[list[str], str] | None:
    """Labels of each operand and of the result; None if the equation has an ellipsis."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    if "." in equation:
        return None
    operands = left.split(",")
    if not arrow:  # implicit output: the labels that appear once, in alphabetical order
        right = "".join(sorted(label for label in set(left) - {","} if left.count(label) == 1))
    return operands, right
