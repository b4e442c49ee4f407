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

    For computations on each head, or each feature, independently: `function` must compute a column's shard of the
    result from the column's shards alone. Its calls are not checked, so checks cost no time, and it may call torch
    functions that have no rule. On one column this is a plain call. The counterpart for DTensors is
    `torch.distributed.tensor.experimental.local_map`.

    Args:
        x: a tensor between layers.
        others: passed on; tensors, including those in lists, tuples and dicts, as this column's shards. A replicated
            tensor's gradient is summed over the columns.

    Raises:
        ModelError: for a parameter among `others`, or a tensor computed from one outside of its layer; for a shard
            together with a replicated x; for a tensor between layers that `function` uses without getting it as an
            argument; for a result with another number of dims than x, or of another size if shards differ in size.
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
    """One of `others` as `function` gets it. layout: of x."""
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

# Outputs of a split model for a caller outside of it: gathered on every column.


_T = TypeVar("_T")


def gather_whole(tree: _T) -> _T:
    """`tree`, a tensor or a tree of tensors, as plain tensors without graph. Sharded tensors are gathered, so all
    columns must call this in the same order."""
    found: _T = mapped(_gather_if_sharded, tree)
    return found


def _gather_if_sharded(x: Tensor) -> Tensor:
    layout, own = layout_of_tensor(x), plain(x).detach()
    return own if layout is None or layout.dim is None else _gather(own, layout)


def _gather(own: Tensor, layout: ColumnLayout) -> Tensor:
    """All columns' shards. Sizes differ by one at most; they are padded, because an all-gather needs equal sizes."""
    mesh, dim = layout.mesh, layout.sharded_dim
    sizes = [stop - start for start, stop in (part(layout.size, mesh.num_cols, column)
                                              for column in range(mesh.num_cols))]
    values = (own.byte() if own.dtype is torch.bool else own).movedim(dim, -1)
    padded = functional.pad(values, (0, max(sizes) - values.shape[-1])).contiguous()
    every = padded.new_empty(mesh.num_cols, *padded.shape)
    mesh.over_cols.all_gather(every, padded).wait()
    whole = torch.cat([one[..., :size] for one, size in zip(every, sizes, strict=True)], dim=-1).movedim(-1, dim)
    return whole.to(own.dtype).contiguous()
