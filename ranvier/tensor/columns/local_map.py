"""`local_map`: a function of plain tensors, computed on one column's shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from ranvier.layout import part
from ranvier.tensor.columns.calls import refuse_call
from ranvier.tensor.columns.layout import ColumnLayout, summed_gradient
from ranvier.tensor.columns.tensor import ColumnTensor, layout_of_tensor, mapped, mark, plain, refuse


def local_map(function: Callable[..., Tensor], x: Tensor, *others: Any) -> Tensor:
    """`function(x, *others)` on each column's shards as plain tensors; the result has the layout of x.

    For what is computed for each head, or each feature, by itself: `function` must compute a column's shard of the
    result from the column's shards alone. Nothing that it calls is checked, so none of it costs time for checks, and
    torch functions that have no rule may be among it. On one column it is a plain call. For DTensors it is
    `torch.distributed.tensor.experimental.local_map`.

    Args:
        x: a tensor between layers.
        others: passed on; of tensors, those in lists, tuples and dicts too, this column's shards. A replicated tensor's
            gradient is summed over the columns.

    Raises:
        ModelError: for a parameter among `others`, or a tensor computed from one outside of its layer; for a shard
            beside a replicated x; for a tensor between layers that `function` uses and is not given; for a result with
            another number of dims than x, or of another size where shards differ in size.
    """
    layout = layout_of_tensor(x)
    if layout is None:
        return function(x, *others)
    values = plain(x)

    y = function(values, *[mapped(lambda one: _own_shard(one, layout, x), one) for one in others])
    if isinstance(y, ColumnTensor):
        refuse("local_map's function computes with a tensor between layers that it was not given",
               y.columns.text(tuple(y.local.shape)), "Pass it to local_map as an argument of the function.")
    if layout.dim is None or y.shape == values.shape:
        return mark(y, layout)
    if y.dim() != values.dim() or (y.shape[layout.dim] != values.shape[layout.dim] and not layout.is_even):
        refuse("local_map cannot tell which dim of the result is sharded over columns, or how",
               f"{list(y.shape)} of {layout.text(tuple(values.shape))}",
               "Return the dims of the first tensor in their order; shards that differ in size must keep it.")
    if y.shape[layout.dim] % layout.blocks:
        refuse("local_map's result does not keep the blocks of the first tensor's sharded dim",
               f"{list(y.shape)} of {layout.text(tuple(values.shape))}", "Keep the dim's size.")
    size = y.shape[layout.dim] * layout.mesh.num_cols if layout.is_even else layout.size
    return mark(y, layout.moved(layout.dim, size))


def _own_shard(tensor: Tensor, layout: ColumnLayout, x: Tensor) -> Tensor:
    """A tensor beside x, which has `layout`, as `function` gets it."""
    own = layout_of_tensor(tensor)
    if own is None:
        if tensor.requires_grad or isinstance(tensor, torch.nn.Parameter):
            refuse_call(local_map, [x, tensor], "with a parameter outside of its layer, or with a tensor computed from "
                        "one,", "Call the layer, and pass on what it returns.")
        return tensor
    if own.dim is None and layout.dim is not None:
        return summed_gradient(plain(tensor), layout.mesh)
    if own.dim is not None and layout.dim is None:
        refuse_call(local_map, [x, tensor], "of a replicated tensor and a shard",
                    "Give the shard first: the result has its layout.")
    return plain(tensor)


# --- outputs ----------------------------------------------------------------------------------------------------------

# Outputs of a split model as a caller outside of it wants them: whole, on every column.


_T = TypeVar("_T")


def gather_whole(tree: _T) -> _T:
    """`tree`, a tensor or a tree of them, as plain tensors without graph. What columns have shards of is gathered, so
    all columns call this in the same order."""
    found: _T = mapped(_gather_if_sharded, tree)
    return found


def _gather_if_sharded(x: Tensor) -> Tensor:
    layout, own = layout_of_tensor(x), plain(x).detach()
    return own if layout is None or layout.dim is None else _gather(own, layout)


def _gather(own: Tensor, layout: ColumnLayout) -> Tensor:
    """All columns' shards. They differ by one at most; an all-gather needs equal ones, so they are padded."""
    mesh, dim = layout.mesh, layout.sharded_dim
    sizes = [stop - start for start, stop in (part(layout.size, mesh.num_cols, column)
                                              for column in range(mesh.num_cols))]
    values = (own.byte() if own.dtype is torch.bool else own).movedim(dim, -1)
    padded = functional.pad(values, (0, max(sizes) - values.shape[-1])).contiguous()
    every = padded.new_empty(mesh.num_cols, *padded.shape)
    mesh.over_cols.all_gather(every, padded).wait()
    whole = torch.cat([one[..., :size] for one, size in zip(every, sizes, strict=True)], dim=-1).movedim(-1, dim)
    return whole.to(own.dtype).contiguous()
