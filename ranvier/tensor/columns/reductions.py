"""Rules of functions along dims (reductions, softmax, sorting, parts, norms): those dims must not be sharded."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ranvier.tensor.columns import shapes
from ranvier.tensor.columns.calls import argument, refuse_call, sizes_or_dims
from ranvier.tensor.columns.pointwise import pointwise
from ranvier.tensor.columns.tensor import (
    Args,
    Func,
    Kwargs,
    locals_of,
    mark,
    mark_all,
    sharded_layout,
    tensors_in,
)


def along_dims(func: Func, args: Args, kwargs: Kwargs, place: int, default: object) -> Any:
    """A function along dims that columns do not share. place: of its `dim` among the arguments; default: of `dim`."""
    operands = tensors_in((*args, *kwargs.values()))
    if len(operands) > 1 and operands[1] is argument(args, kwargs, 1, "other"):
        return pointwise(func, args, kwargs)  # torch.max(x, y)
    dims = argument(args, kwargs, place, "dim", "axis", "dims", default=default)
    if func is Tensor.flip:
        dims = sizes_or_dims(args, 1, kwargs, "dims")
    if len(operands) > 1 or dims is None or isinstance(dims, bool):
        refuse_call(func, operands, "over all dims" if dims is None else "")
    return untouched(func, args, kwargs, [dims] if isinstance(dims, int) else dims)


def untouched(func: Func, args: Args, kwargs: Kwargs, dims: list[int]) -> Any:
    """A function along `dims`, which leaves the sharded dim as it is, or a ModelError."""
    x: Tensor = args[0]
    layout, dims = sharded_layout(x), [dim % x.dim() for dim in dims]
    if layout is None or layout.dim in dims or not dims:
        refuse_call(func, tensors_in((*args, *kwargs.values())),
                    f"along dim {layout.dim}, which is sharded over columns," if layout is not None else "")
    own, named = locals_of(args, kwargs)
    try:
        result = func(*own, **named)
    except (RuntimeError, IndexError, ValueError) as error:
        refuse_call(func, [x], f"({error})")
    keeps_dims = tensors_in([result])[0].dim() == x.dim()
    sharded = layout.sharded_dim
    return mark_all(result, layout.moved(sharded if keeps_dims else shapes.without(sharded, dims)))


def diagonal_masked(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """tril and triu, along the last two dims."""
    return untouched(func, args, kwargs, [-2, -1])


def padded(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """functional.pad. Widths come in pairs, that of the last dim first."""
    widths = argument(args, kwargs, 1, "pad")
    dims = [-1 - place // 2 for place in range(0, len(widths), 2) if any(widths[place:place + 2])]
    return untouched(func, args, kwargs, dims)


def normalize(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
    """F.layer_norm and F.rms_norm over trailing dims. Weights are constants here: parameters have been refused."""
    x: Tensor = args[0]
    shape, layout = argument(args, kwargs, 1, "normalized_shape"), sharded_layout(x)
    others = tensors_in((*args[1:], *kwargs.values()))
    if layout is None or layout.sharded_dim >= x.dim() - len(shape) or any(map(sharded_layout, others)):
        refuse_call(func, [x], "over a dim that is sharded over columns")
    own, named = locals_of(args, kwargs)
    return mark(func(*own, **named), layout)


def index_add(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """index_add and index_copy: slices of `source` go to places of a dim that columns do not share."""
    x, dim = args[0], argument(args, kwargs, 1, "dim")
    source, layout = argument(args, kwargs, 3, "source"), sharded_layout(args[0])
    other = sharded_layout(source)
    if layout is None or other is None or dim % x.dim() == layout.dim or other[1:] != layout[1:]:
        refuse_call(func, tensors_in((*args, *kwargs.values())), "of tensors with different layouts over columns")
    own, named = locals_of(args, kwargs)
    return mark_all(func(*own, **named), layout, x)
