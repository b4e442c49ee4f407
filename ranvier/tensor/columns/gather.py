"""Outputs of a split model as a caller outside of it wants them: whole, on every column."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from ranvier.layout import part
from ranvier.tensor.columns.layout import ColumnLayout
from ranvier.tensor.columns.tensor import layout_of_tensor, mapped, plain

_T = TypeVar("_T")


def gather_whole(tree: _T) -> _T:
    """`tree`, a tensor or a tree of them, as plain tensors without graph. What columns have shards of is gathered, so
    all columns call this in the same order."""
    found: _T = mapped(lambda leaf: _whole(leaf) if isinstance(leaf, Tensor) else leaf, tree)
    return found


def _whole(x: Tensor) -> Tensor:
    layout, own = layout_of_tensor(x), plain(x).detach()
    return own if layout is None or layout.dim is None else _gathered(own, layout)


def _gathered(own: Tensor, layout: ColumnLayout) -> Tensor:
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
