"""Heads on a row x col mesh that give every column the whole scores; see `ranvier.tensor.split`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ranvier.tensor.layers import TokenLinear
from ranvier.tensor.mesh import TensorMesh
from ranvier.tensor.own_part import SplitLayer


class SplitTokenLinear(SplitLayer):
    """A classification head; every column has the whole scores."""

    def __init__(self, layer: TokenLinear, mesh: TensorMesh) -> None:
        super().__init__(layer, mesh)
        self._token = layer.token

    def forward(self, x: Tensor) -> Tensor:
        match self.mesh.activations.name, self._token:
            case "whole", token:
                return functional.linear(x if token is None else x[:, token], self.weight, self.bias)
            case "sequence", None:
                return _TokensOfColumns.apply(functional.linear(x, self.weight, self.bias), self.mesh)
            case "sequence", token:
                return functional.linear(_TokenOfColumn.apply(x, token, self.mesh), self.weight, self.bias)
            case _, token:
                own = functional.linear(x if token is None else x[:, token], self.weight)
        scores = _SumOverColumns.apply(own, self.mesh)
        return scores if self.bias is None else scores + self.bias


class _SumOverColumns(torch.autograd.Function):
    """Forward a sum; every column uses all of it, so that the gradient is each one's own."""

    @staticmethod
    def forward(ctx, x: Tensor, mesh: TensorMesh) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        mesh.over_cols.all_reduce(total).wait()
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        return dy, None


class _TokenOfColumn(torch.autograd.Function):
    """One token of every sequence, from the column that has it: [B, S/c, H] to [B, H]."""

    @staticmethod
    def forward(ctx, x: Tensor, token: int, mesh: TensorMesh) -> Tensor:
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
    def backward(ctx, dy: Tensor):
        dx = dy.new_zeros(ctx.shape)
        if ctx.here:
            dx[:, ctx.place] = dy
        return dx, None, None


class _TokensOfColumns(torch.autograd.Function):
    """All tokens, of which each column has a part: [B, S/c, H] to [B, S, H]."""

    @staticmethod
    def forward(ctx, x: Tensor, mesh: TensorMesh) -> Tensor:
        ctx.mesh, ctx.length = mesh, x.shape[1]
        whole = x.new_empty(mesh.num_cols, *x.shape)
        mesh.over_cols.all_gather(whole, x.contiguous()).wait()
        return whole.movedim(0, 1).flatten(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        return dy[:, ctx.mesh.col * ctx.length:(ctx.mesh.col + 1) * ctx.length], None
