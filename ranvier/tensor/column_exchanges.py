"""Exchanges of activations among the columns of a tensor mesh, with their gradients.

What is empty does not travel: all columns of a row have the same tokens.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ranvier.tensor.autograd import Function
from ranvier.tensor.mesh import TensorMesh

Sharded = Literal["features", "tokens", "none"]
"""The dim of an activation that the columns shard."""


def exchanged(u: Tensor, mesh: TensorMesh, enters: Sharded, leaves: Sharded) -> Tensor:
    """u [B, S, R], which each column has computed from its part of x, as that from which it computes its part of y.

        enters: x is      leaves: y is      u forward          u backward
        features sharded  features sharded  all-reduce         all-reduce
        features sharded  replicated        all-reduce         identity         Megatron-LM's g
        features sharded  tokens sharded    reduce-scatter     all-gather
        tokens sharded    features sharded  all-gather         reduce-scatter
        replicated        features sharded  identity           all-reduce       Megatron-LM's f
    """
    return _Exchange.apply(u, mesh, enters, leaves)


class _Exchange(Function):
    @staticmethod
    def forward(ctx: Any, u: Tensor, mesh: TensorMesh, enters: Sharded, leaves: Sharded) -> Tensor:
        ctx.mesh, ctx.enters, ctx.leaves = mesh, enters, leaves
        if enters == "tokens":
            return gathered(u, mesh)
        if enters == "none":
            return u.view_as(u)
        return _scattered(u, mesh) if leaves == "tokens" else _summed(u, mesh)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, du: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.enters == "tokens":
            du = _scattered(du, ctx.mesh)
        elif ctx.leaves == "tokens":
            du = gathered(du, ctx.mesh)
        elif ctx.leaves == "features":
            du = _summed(du, ctx.mesh)
        return du, None, None, None


def _summed(u: Tensor, mesh: TensorMesh) -> Tensor:
    total = u.clone(memory_format=torch.contiguous_format)  # autograd may hand a gradient to others too
    if total.numel():
        mesh.over_cols.all_reduce(total).wait()
    return total


def gathered(u: Tensor, mesh: TensorMesh) -> Tensor:
    """[B, S, R] of the columns' [B, S / c, R], without a gradient."""
    parts = u.new_empty(mesh.num_cols, *u.shape)
    if u.numel():
        mesh.over_cols.all_gather(parts, u.contiguous()).wait()
    return parts.movedim(0, 1).flatten(1, 2)


def _scattered(u: Tensor, mesh: TensorMesh) -> Tensor:
    """This column's [B, S / c, R] of the sum of the columns' [B, S, R]."""
    parts = u.unflatten(1, (mesh.num_cols, -1)).movedim(1, 0).contiguous()
    own = u.new_empty(parts.shape[1:])
    if own.numel():
        mesh.over_cols.reduce_scatter(own, parts).wait()
    return own


def transposed(x: Tensor, given: int, taken: int, mesh: TensorMesh) -> Tensor:
    """x, of which each column has all of the dim `given` and a shard of `taken`, with a shard of `given` and all of
    `taken`, by an all-to-all. The columns divide both."""
    return _Transposed.apply(x, given, taken, mesh)


class _Transposed(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, given: int, taken: int, mesh: TensorMesh) -> Tensor:
        ctx.given, ctx.taken, ctx.mesh = given, taken, mesh
        return _transposed(x, given, taken, mesh)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        return _transposed(dy, ctx.taken, ctx.given, ctx.mesh), None, None, None


def _transposed(x: Tensor, given: int, taken: int, mesh: TensorMesh) -> Tensor:
    parts = torch.stack(x.chunk(mesh.num_cols, given))
    received = torch.empty_like(parts)
    mesh.over_cols.all_to_all(received, parts).wait()
    return torch.cat(received.unbind(), taken)
