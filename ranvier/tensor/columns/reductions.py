"""Rules of functions along dims (reductions, softmax, sorting, norms): those dims must not be sharded."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ranvier.tensor.columns import shapes
from ranvier.tensor.columns.calls import argument, refuse_call
from ranvier.tensor.columns.pointwise import pointwise
from ranvier.tensor.columns.tensor import Args, Func, Kwargs, mark, mark_all, sharded_layout, tensors_in


def along_dims(func: Func, args: Args, kwargs: Kwargs, place: int, default: object) -> Any:
    """A function along dims that columns do not share. place: of its `dim` among the arguments; default: of `dim`."""
    x: Tensor = args[0]
    layout, operands = sharded_layout(x), tensors_in((*args, *kwargs.values()))
    if len(operands) > 1 and operands[1] is argument(args, kwargs, 1, "other"):
        return pointwise(func, args, kwargs)  # torch.max(x, y)
    dims = argument(args, kwargs, place, "dim", "axis", "dims", default=default)
    if layout is None or len(operands) > 1 or dims is None or isinstance(dims, bool):
        refuse_call(func, operands, "over all dims" if dims is None else "")
    dims = [dim % x.dim() for dim in ([dims] if isinstance(dims, int) else dims)]
    sharded = layout.sharded_dim
    if sharded in dims or not dims:
        refuse_call(func, operands, f"along dim {sharded}, which is sharded over columns,")
    result = func(*args, **kwargs)
    keeps_dims = tensors_in([result])[0].dim() == x.dim()
    return mark_all(result, layout.moved(sharded if keeps_dims else shapes.without(sharded, dims)))


def normalize(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
    """F.layer_norm and F.rms_norm over trailing dims. Weights are constants here: parameters have been refused."""
    x: Tensor = args[0]
    shape, layout = argument(args, kwargs, 1, "normalized_shape"), sharded_layout(x)
    others = tensors_in((*args[1:], *kwargs.values()))
    if layout is None or layout.sharded_dim >= x.dim() - len(shape) or any(map(sharded_layout, others)):
        refuse_call(func, [x], "over a dim that is sharded over columns")
    return mark(func(*args, **kwargs), layout)


def index_add(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
    """index_add and index_copy: slices of `source` go to places of a dim that columns do not share."""
    x, dim = args[0], argument(args, kwargs, 1, "dim")
    source, layout = argument(args, kwargs, 3, "source"), sharded_layout(args[0])
    other = sharded_layout(source)
    if layout is None or other is None or dim % x.dim() == layout.dim or other[1:] != layout[1:]:
        refuse_call(func, tensors_in((*args, *kwargs.values())), "of tensors with different layouts over columns")
    return mark(func(*args, **kwargs), layout)
