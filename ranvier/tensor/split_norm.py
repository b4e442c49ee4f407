"""Layer norm and RMS norm on a row x col mesh whose columns share the features; see `ranvier.tensor.split`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ranvier.tensor.layers import LayerNorm, RMSNorm
from ranvier.tensor.mesh import TensorMesh
from ranvier.tensor.own_part import SplitLayer


class SplitNorm(SplitLayer):
    """A norm over features that the columns share: one small collective forward, one backward."""

    def __init__(self, layer: LayerNorm | RMSNorm, mesh: TensorMesh) -> None:
        super().__init__(layer, mesh)
        self._epsilon, self._centred = layer.eps, isinstance(layer, LayerNorm)

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias if self._centred else None
        return _Norm.apply(x, self.weight, bias, self._epsilon, self._centred, self.mesh)


class _Norm(torch.autograd.Function):
    """Columns' means and centred sums of squares are merged (Chan, Golub and LeVeque, 1979), in fp32 at least: the
    difference of E[x^2] and E[x]^2 would cancel. Not centred: the mean is taken as 0."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float, centred: bool,
                mesh: TensorMesh) -> Tensor:
        ctx.centred = centred
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if not x.numel():
            ctx.save_for_backward(x, weight, wide, wide)
            ctx.mesh = mesh
            return x.clone()
        if centred:
            variance, mean = torch.var_mean(wide, -1, correction=0, keepdim=True)
        else:
            variance = wide.square().mean(-1, keepdim=True)
            mean = torch.zeros_like(variance)
        mine = torch.stack([mean, variance])
        all_of_row = mine.new_empty(mesh.num_cols, *mine.shape)
        mesh.over_cols.all_gather(all_of_row, mine).wait()
        means, variances = all_of_row.unbind(1)
        mean = means.mean(0)
        variance = variances.mean(0) + (means - mean).square_().mean(0)  # columns have equally many features
        rstd = variance.add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.mesh = mesh
        y = (wide - mean).mul_(rstd).to(x.dtype)
        if weight is not None:
            return y.mul_(weight) if bias is None else torch.addcmul(bias, y, weight)
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        x, weight, mean, rstd = ctx.saved_tensors
        if not x.numel():
            return (dy, *(dy.new_zeros(x.shape[-1]) if wanted else None for wanted in ctx.needs_input_grad[1:3]), None,
                    None, None)
        normal = (x.to(mean.dtype) - mean).mul_(rstd)
        wide = dy.to(mean.dtype)
        dw = (wide * normal).flatten(0, -2).sum(0).to(x.dtype) if ctx.needs_input_grad[1] else None
        db = wide.flatten(0, -2).sum(0).to(x.dtype) if ctx.needs_input_grad[2] else None
        if not ctx.needs_input_grad[0]:
            return None, dw, db, None, None, None
        gradient = wide.clone() if weight is None else wide * weight
        sums = torch.stack([gradient.sum(-1, keepdim=True), (gradient * normal).sum(-1, keepdim=True)])
        ctx.mesh.over_cols.all_reduce(sums).wait()
        sums /= x.shape[-1] * ctx.mesh.num_cols
        if ctx.centred:
            gradient.sub_(sums[0])
        dx = gradient.sub_(normal.mul_(sums[1])).mul_(rstd)
        return dx.to(x.dtype), dw, db, None, None, None
