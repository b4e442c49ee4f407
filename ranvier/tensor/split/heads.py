"""Classifier heads on a row x col mesh: every column gets all scores.

B batch, S sequence, H hidden width, C classes; c columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ranvier.tensor.autograd import Function
from ranvier.tensor.mesh import TensorMesh
from ranvier.tensor.split.own_part import SplitLayer
from ranvier.tensor.splittable import Layer


class SplitClassifierHead(SplitLayer):
    """A `ClassifierHead` on the mesh, of one token or (None) of each."""

    def __init__(self, layer: Layer, mesh: TensorMesh, token: int | None) -> None:
        super().__init__(layer, mesh)
        self._token = token

    def forward(self, x: Tensor) -> Tensor:
        """This rank's part of x_BSH to [B, C] or [B, S, C], the same on every column."""
        match self.mesh.activations.name, self._token:
            case "whole", token:
                return functional.linear(x if token is None else x[:, token], self.weight, self.bias)
            case "sequence", None:
                return _TokensOfColumns.apply(functional.linear(x, self.weight, self.bias), self.mesh)
            case "sequence", token:
                return functional.linear(_TokenOfColumn.apply(x, token, self.mesh), self.weight, self.bias)
            case _, token:
                x = x if token is None else x[:, token]
        dtype, total = x.dtype, self.mesh.sum_dtype(x.dtype)
        own = functional.linear(x.to(total), self.weight.to(total))
        scores = _SumOverColumns.apply(own, self.mesh)
        return (scores if self.bias is None else scores + self.bias).to(dtype)


class _SumOverColumns(Function):
    """All-reduce forward, identity backward (Megatron-LM's reduce_from_tensor_model_parallel_region): every column
    computes the same from the sum, so it has the full gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: TensorMesh) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        mesh.over_cols.all_reduce(total).wait()
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


class _TokenOfColumn(Function):
    """One token of every sequence, broadcast from the column that has it: [B, S/c, H] to [B, H]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: int, mesh: TensorMesh) -> Tensor:
        length = mesh.num_cols * x.shape[1]
        if not -length <= token < length:
            raise IndexError(f"token {token} is out of range of a sequence of {length}")
        token %= length
        column, ctx.place = divmod(token, x.shape[1])
        ctx.here, ctx.shape = column == mesh.col, x.shape
        found = x[:, ctx.place].contiguous() if ctx.here else x.new_empty(x.shape[0], x.shape[2])
        mesh.over_cols.broadcast(found, column).wait()
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        dx = dy.new_zeros(ctx.shape)
        if ctx.here:
            dx[:, ctx.place] = dy
        return dx, None, None


class _TokensOfColumns(Function):
    """All-gather of the sequence: [B, S/c, C] to [B, S, C]. Every column has the gradient of all tokens, and takes that
    of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: TensorMesh) -> Tensor:
        ctx.mesh, ctx.length = mesh, x.shape[1]
        whole = x.new_empty(mesh.num_cols, *x.shape)
        mesh.over_cols.all_gather(whole, x.contiguous()).wait()
        return whole.movedim(0, 1).flatten(1, 2).data  # no view, which a block could not change in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy[:, ctx.mesh.col * ctx.length:(ctx.mesh.col + 1) * ctx.length], None
