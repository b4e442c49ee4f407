"""Norms over the last dim: of the residual stream, of activations inside a sublayer, or of each head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ranvier.tensor.autograd import Function
from ranvier.tensor.fused import Fused, current
from ranvier.tensor.layers.features import Over, OverFeatures
from ranvier.tensor.mesh import TensorMesh
from ranvier.tensor.splittable import Layer, SplitLayer


def _shape(normalized_shape: int | tuple[int, ...]) -> int | list[int]:
    """The shape as torch 2.11's annotations require it."""
    return list(normalized_shape) if isinstance(normalized_shape, tuple) else normalized_shape


class LayerNorm(OverFeatures, nn.LayerNorm):
    """Layer norm over the last dim (Ba et al., 2016). over: see `Over`."""

    def __init__(self, normalized_shape: int | tuple[int, ...], eps: float = 1e-5, elementwise_affine: bool = True,
                 bias: bool = True, *, over: Over = "stream", dtype: torch.dtype | None = None) -> None:
        super().__init__(_shape(normalized_shape), eps, elementwise_affine, bias, dtype=dtype)
        self._set_over(over, self.normalized_shape[-1])

    def split(self, mesh: TensorMesh) -> nn.Module:
        """A `SplitNorm` if the features are sharded, else the same layer."""
        return SplitNorm(self, mesh, self.eps, centred=True) if self._is_sharded(mesh) else super().split(mesh)


class RMSNorm(OverFeatures, nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) over the last dim, times a weight (Zhang and Sennrich, 2019).

    over: see `Over`. A norm of queries and keys is over "inner" if it normalizes all heads together, over "heads" if it
    normalizes each head independently. offset: added to the weight, such as 1 in Gemma, whose weights start from 0.
    units: pieces of the features that are never divided, such as heads.
    """

    def __init__(self, normalized_shape: int | tuple[int, ...], eps: float = 1e-6, elementwise_affine: bool = True, *,
                 over: Over = "stream", offset: float = 0.0, units: int | None = None,
                 dtype: torch.dtype | None = None) -> None:
        super().__init__(_shape(normalized_shape), eps, elementwise_affine, dtype=dtype)
        self._set_over(over, self.normalized_shape[-1])
        self.offset, self.units = offset, units

    def forward(self, x: Tensor) -> Tensor:
        """The norm, in at least fp32 if the weight has an offset: 1 + weight would lose digits in half precision."""
        if not self.offset:
            return functional.rms_norm(x, self.normalized_shape, self.weight, self.eps)
        wide = torch.promote_types(x.dtype, torch.float32)
        return functional.rms_norm(x.to(wide), self.normalized_shape, self.weight.to(wide) + self.offset, self.eps
                                   ).to(x.dtype)

    def split(self, mesh: TensorMesh) -> nn.Module:
        """A `SplitNorm` if the features are sharded, else the same layer."""
        return SplitNorm(self, mesh, self.eps, centred=False, offset=self.offset) if self._is_sharded(mesh) \
            else super().split(mesh)


class SplitNorm(SplitLayer):
    """A norm over features that are sharded over columns: one small collective forward, one backward.

    centred: subtract the mean (layer norm) or take it as 0 (RMS norm). offset: added to the weight.
    """

    def __init__(self, layer: Layer, mesh: TensorMesh, epsilon: float | None, *, centred: bool,
                 offset: float = 0.0) -> None:
        super().__init__(layer, mesh)
        self.eps, self._centred, self._offset = epsilon, centred, offset

    def forward(self, x: Tensor) -> Tensor:
        """[..., H/c] to [..., H/c]."""
        bias = self.bias if self._centred else None
        return _NormOverColumns.apply(x, self.weight, bias, self.eps, self._centred, self._offset, self.mesh,
                                      current())


class _NormOverColumns(Function):
    """Columns' means and variances are merged (Chan, Golub and LeVeque, 1979), in fp32 at least: the difference of
    E[x^2] and E[x]^2 would cancel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float, centred: bool,
                offset: float, mesh: TensorMesh, fused: Fused) -> Tensor:
        ctx.centred, ctx.offset, ctx.mesh, ctx.fused = centred, offset, mesh, fused
        if not x.numel():  # a row without tokens; the other rows' columns are other groups
            wide = x.to(torch.promote_types(x.dtype, torch.float32))
            ctx.save_for_backward(x, weight, wide, wide)
            return x.clone()
        statistics = fused(_statistics, x, centred)
        all_of_row = statistics.new_empty(mesh.num_cols, *statistics.shape)
        mesh.over_cols.all_gather(all_of_row, statistics).wait()
        y, mean, rstd = fused(_normalize, x, all_of_row, weight, bias, epsilon, offset)
        ctx.save_for_backward(x, weight, mean, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        if not x.numel():
            dw, db = (dy.new_zeros(x.shape[-1]) if wanted else None for wanted in ctx.needs_input_grad[1:3])
            return dy, dw, db, None, None, None, None, None
        wanted = ctx.needs_input_grad[:3]
        sums, dw, db, normal, gradient = ctx.fused(_gradients, x, dy, weight, mean, rstd, ctx.offset, *wanted)
        if sums is None:
            return None, dw, db, None, None, None, None, None
        ctx.mesh.over_cols.all_reduce(sums).wait()
        features = x.shape[-1] * ctx.mesh.num_cols
        dx = ctx.fused(_input_gradient, x, sums, normal, gradient, rstd, features, ctx.centred)
        return dx, dw, db, None, None, None, None, None


def _statistics(x: Tensor, centred: bool) -> Tensor:
    """[2, ..., 1]: mean and variance of a column's features; the mean is 0 if not centred."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if centred and wide.is_cuda:
        variance, mean = torch.var_mean(wide, -1, correction=0, keepdim=True)
    elif centred:  # on a CPU var_mean takes four to seventeen times as long
        mean = wide.mean(-1, keepdim=True)
        variance = (wide - mean).square_().mean(-1, keepdim=True)
    else:
        variance = wide.square().mean(-1, keepdim=True)
        mean = torch.zeros_like(variance)
    return torch.stack([mean, variance])


def _normalize(x: Tensor, all_of_row: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float,
               offset: float) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean, rstd) from the statistics [columns, 2, ..., 1] of all columns, which have equal numbers of features."""
    means, variances = all_of_row.unbind(1)
    mean = means.mean(0)  # saved for the backward, so not a view of both
    variance = variances.mean(0) + (means - mean).square_().mean(0)
    rstd = variance.add_(epsilon).rsqrt_()
    y = (x.to(mean.dtype) - mean).mul_(rstd)
    if weight is not None and offset:
        weight = weight.to(mean.dtype) + offset
    if weight is not None and weight.dtype is not x.dtype:
        return y.mul_(weight).to(x.dtype), mean, rstd
    y = y.to(x.dtype)
    if weight is not None:
        return y.mul_(weight) if bias is None else torch.addcmul(bias, y, weight), mean, rstd
    return y if bias is None else y.add_(bias), mean, rstd


def _gradients(x: Tensor, dy: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, offset: float,
               wants_input: bool, wants_weight: bool, wants_bias: bool) -> tuple[Tensor | None, ...]:
    """(terms to be summed over columns for dx, dW, db, normalized x, its gradient); None for what is not needed."""
    normal = (x.to(mean.dtype) - mean).mul_(rstd)
    wide = dy.to(mean.dtype)
    dw = (wide * normal).flatten(0, -2).sum(0).to(weight.dtype) if wants_weight and weight is not None else None
    db = wide.flatten(0, -2).sum(0).to(x.dtype) if wants_bias else None
    if not wants_input:
        return None, dw, db, None, None
    if weight is not None and offset:
        weight = weight.to(mean.dtype) + offset
    gradient = wide.clone() if weight is None else wide * weight
    return (torch.stack([gradient.sum(-1, keepdim=True), (gradient * normal).sum(-1, keepdim=True)]), dw, db, normal,
            gradient)


def _input_gradient(x: Tensor, sums: Tensor, normal: Tensor, gradient: Tensor, rstd: Tensor, features: int,
                    centred: bool) -> Tensor:
    """dx from the sums over all columns. features: of all columns together."""
    sums = sums / features
    if centred:
        gradient.sub_(sums[0])
    return gradient.sub_(normal.mul_(sums[1])).mul_(rstd).to(x.dtype)
