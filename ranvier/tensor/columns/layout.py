"""Layouts of a tensor over the columns of a tensor mesh, and conversions between them.

    replicated   every column holds all of it; its gradient is the full gradient, the same on all columns
    sharded      column j holds shard j of one dim; its gradient is the gradient of that shard

(`Replicate()` and `Shard(dim)` in torch's DTensor.) A replicated operand may be combined with a sharded one. Each
column then computes the replicated operand's gradient from its own shard alone, and the sum over columns is the full
gradient: `summed_gradient` is Megatron-LM's `copy_to_tensor_model_parallel_region` (identity forward, all-reduce
backward). This file works on plain tensors; `ranvier.tensor.columns.dispatch` applies it to what a block computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ranvier.layout import part
from ranvier.tensor.autograd import Function
from ranvier.tensor.mesh import TensorMesh, exchange


class ColumnLayout(NamedTuple):
    """The layout of one tensor over the columns of `mesh`.

    dim: the dim that is sharded over the columns; None if every column holds the full tensor.
    size: the global size of that dim.
    blocks: the number of equal blocks of the dim, each of which is sharded: [B, S, H] with a sharded sequence has B
        blocks when viewed as [B * S, H].
    """

    mesh: TensorMesh
    dim: int | None = None
    size: int = 0
    blocks: int = 1

    @property
    def sharded_dim(self) -> int:
        """`dim` of a layout that is known to be sharded."""
        assert self.dim is not None
        return self.dim

    def shard(self, whole: Tensor, dim: int) -> Tensor:
        """This column's shard of `dim` of a full tensor."""
        start, stop = part(self.size // self.blocks, self.mesh.num_cols, self.mesh.col)
        if self.blocks == 1:
            return whole.narrow(dim, start, stop - start)
        in_blocks: Tensor = whole.unflatten(dim, (self.blocks, -1))
        return in_blocks.narrow(dim + 1, start, stop - start).flatten(dim, dim + 1)

    @property
    def is_even(self) -> bool:
        """Whether the shards of all columns have the same size."""
        return self.size // self.blocks % self.mesh.num_cols == 0

    def moved(self, dim: int, size: int | None = None, blocks: int | None = None) -> ColumnLayout:
        """The same layout with another sharded dim, which may have another global size."""
        if dim == self.dim and size is None and blocks is None:
            return self
        return ColumnLayout(self.mesh, dim, self.size if size is None else size,
                            self.blocks if blocks is None else blocks)

    def place(self, num_dims: int) -> tuple[int, int, int]:
        """The sharded dim counted from the right, its size and blocks: the same for all operands of a call."""
        return num_dims - self.sharded_dim, self.size, self.blocks

    def whole_sizes(self, shape: Sequence[int]) -> list[int]:
        """The sizes of the full tensor, from those of this column's shard."""
        sizes = list(shape)
        sizes[self.sharded_dim] = self.size
        return sizes

    def text(self, shape: tuple[int, ...]) -> str:
        """A tensor's local `shape` and layout for messages: [4, 6, 12 of 24 on each of 2 columns]."""
        if self.dim is None:
            return f"{list(shape)} on every column"
        whole = f"{self.size}" if self.blocks == 1 else f"{self.size} in {self.blocks} blocks"
        sizes = [f"{size} of {whole}" if dim == self.dim else str(size) for dim, size in enumerate(shape)]
        return f"[{', '.join(sizes)}] on each of {self.mesh.num_cols} columns"


def summed_gradient(x: Tensor, mesh: TensorMesh) -> Tensor:
    """`x`, a replicated operand next to a sharded one, with its gradient all-reduced over columns."""
    return exchange(x, mesh, "none", "features") if torch.is_grad_enabled() and x.requires_grad else x


def own_part_of(x: Tensor, dim: int, layout: ColumnLayout) -> Tensor:
    """This column's shard of `dim` of a replicated tensor, copied; the backward collects the shards' gradients."""
    return _OwnPart.apply(x, dim, layout)


class _OwnPart(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, layout: ColumnLayout) -> Tensor:
        ctx.shape, ctx.dim, ctx.layout = x.shape, dim, layout
        return layout.shard(x, dim).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        # Zeros and an all-reduce, not an all-gather: shards may be uneven. x + 0 is exact, so no bit differs.
        dx, blocks = dy.new_zeros(ctx.shape), ctx.layout.blocks
        in_blocks = ctx.layout.moved(ctx.dim + 1, ctx.layout.size // blocks, 1)
        in_blocks.shard(dx.unflatten(ctx.dim, (blocks, -1)), ctx.dim + 1).copy_(dy.unflatten(ctx.dim, (blocks, -1)))
        ctx.layout.mesh.over_cols.all_reduce(dx).wait()
        return dx, None, None
