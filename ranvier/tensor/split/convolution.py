"""A depthwise convolution over tokens that columns share: each column convolves all tokens of its features.

    [B, S / c, F]  --all-to-all-->  [B, S, F / c]  --convolution-->  [B, S, F / c]  --all-to-all-->  [B, S / c, F]
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


class SplitStreamConv1d(SplitLayer):
    """A `DepthwiseConv1d` of the residual stream with a sharded sequence. Each column has all weights, and gradients
    of those of its features."""

    def __init__(self, layer: Layer, mesh: TensorMesh, *, causal: bool) -> None:
        super().__init__(layer, mesh)
        self._causal = causal

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S / c, F] to [B, S / c, F]."""
        own = x.shape[-1] // self.mesh.num_cols
        features = slice(self.mesh.col * own, (self.mesh.col + 1) * own)
        bias = None if self.bias is None else self.bias[features]
        y = depthwise(_Exchanged.apply(x, 2, 1, self.mesh), self.weight[features], bias, causal=self._causal)
        return _Exchanged.apply(y, 1, 2, self.mesh)


def depthwise(x: Tensor, weight: Tensor, bias: Tensor | None, *, causal: bool) -> Tensor:
    """x [B, S, F] convolved with weight [F, 1, K], with zeros beside the sequence: [B, S, F]."""
    size = weight.shape[-1]
    before = size - 1 if causal else (size - 1) // 2
    padded = functional.pad(x.transpose(1, 2), (before, size - 1 - before))
    return functional.conv1d(padded, weight, bias, groups=len(weight)).transpose(1, 2)


class _Exchanged(Function):
    """Shards of `given` of x, of which each column has one of `taken`: afterwards it has one of `given`, and all of
    `taken`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, given: int, taken: int, mesh: TensorMesh) -> Tensor:
        ctx.given, ctx.taken, ctx.mesh = given, taken, mesh
        return _exchange(x, given, taken, mesh)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(dy, ctx.taken, ctx.given, ctx.mesh), None, None, None


def _exchange(x: Tensor, given: int, taken: int, mesh: TensorMesh) -> Tensor:
    parts = torch.stack(x.chunk(mesh.num_cols, given))
    received = torch.empty_like(parts)
    mesh.over_cols.all_to_all(received, parts).wait()
    return torch.cat(received.unbind(), taken)
