"""Linear layers on a row x col mesh.

A product's backward does not go through autograd's graph of small steps, but through one function that knows which
tensors travel. The function has two halves, so that activation recomputation, which stops when the last operand has
been saved, never repeats the product that follows it:

    operands -> [save] -> [multiply] -> y        forward: saved, then multiplied
    dx, dW   <- [save] <- [multiply] <- dy       backward: dy passes through to where the operands are
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ranvier.layout import part
from ranvier.tensor.autograd import Function
from ranvier.tensor.mesh import TensorMesh
from ranvier.tensor.quantized_weight import dense
from ranvier.tensor.split.own_part import SplitLayer
from ranvier.tensor.split.products import InputStationary, OutputStationary, Product, SummaVocabulary
from ranvier.tensor.split.stationary import gather_weight
from ranvier.tensor.splittable import Layer
from ranvier.tensor.weight_gradients import WeightGradients


class SplitLinear(SplitLayer):
    """A `Linear` on the mesh: x and y as `product` defines, which also decides what travels.

    reuse_input: as of `Linear`.
    """

    def __init__(self, layer: Layer, mesh: TensorMesh, product: Product, *, reuse_input: bool = False) -> None:
        super().__init__(layer, mesh)
        self._product = product
        self._reuse_input = reuse_input
        self._has_one_weight = True
        self.weight_gradients: WeightGradients | None = None
        """Takes the weight's gradient in the backward of a stage; None leaves it to autograd."""
        self.may_wait = False
        """Whether weight gradients may be computed after the backward."""
        self.recomputed = False
        """Whether this layer's forward runs again before its backward: it then keeps what it gathers."""
        self._gathered: Tensor | None = None

    @property
    def gathered(self) -> Tensor | None:
        """The column's weight [rows, *weight.shape], where it is kept and has been gathered."""
        return self._gathered

    @property
    def kept_bytes(self) -> int:
        """Bytes of the column's weight where it stays gathered."""
        rows = self.mesh.num_rows if self._keeps_weight else 0
        return rows * sum(weight.numel() * weight.element_size() for weight in self.weights)

    @property
    def weights(self) -> tuple[nn.Parameter, ...]:
        """The parameters that the product multiplies with."""
        return (self.weight,)

    @property
    def biases(self) -> tuple[nn.Parameter, ...]:
        """The parameters that are added to the product: as many as `weights`, or none."""
        return () if self.bias is None else (self.bias,)

    def multiplied(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias as the product takes them, without a graph."""
        return dense(self.weight.detach()), None if self.bias is None else self.bias.detach()

    def shares(self, gradient: Tensor) -> list[Tensor]:
        """Of the gradient of what `multiplied` returns, rows first, that of each parameter."""
        return [gradient]

    @property
    def _keeps_weight(self) -> bool:
        return self.mesh.settings.keep_weights and self._product.keeps and self.mesh.num_rows > 1

    def forget(self) -> None:
        """Drop the gathered weight: the optimizer is about to change it."""
        self._gathered = None

    def forward(self, x: Tensor) -> Tensor:
        """y, as `product` defines."""
        weight, bias = self.multiplied()
        kept: list[Tensor | None] = [None, self._kept_weight()]
        compute = partial(self._compute, x.detach(), weight, bias, kept)
        if not (torch.is_grad_enabled() and any(one.requires_grad for one in (x, *self.weights, *self.biases))):
            return compute()
        y = _Multiply.apply(_Save.apply(x, self, weight, kept, *self.weights, *self.biases), compute)
        gradients = self.weight_gradients
        if gradients is not None and self.may_wait and any(one.requires_grad for one in self.weights):
            travelling = self.mesh.num_cols if isinstance(self._product, InputStationary) else 1
            gradients.forward_bytes += x.numel() * x.element_size() + travelling * y.numel() * y.element_size()
        return y

    def _kept_weight(self) -> Tensor | None:
        """The column's weight, where it stays gathered for a step."""
        if not self._keeps_weight:
            return None
        if self._gathered is None:
            self._gathered = self._gather_weight(self.multiplied()[0])
        return self._gathered

    def _gather_weight(self, weight: Tensor) -> Tensor | None:
        if self.mesh.num_rows == 1 and not self._has_one_weight:
            return None  # `weight` lies in the workspace, where the next layer puts its own
        slabs, work = gather_weight(self.mesh, weight, keep=True)
        if work is not None:
            work.wait()
        return slabs

    def _compute(self, x: Tensor, weight: Tensor, bias: Tensor | None, kept: list[Tensor | None]) -> Tensor:
        y = self._product.forward(x, weight, bias, *kept)
        kept.clear()
        return y

    def save(self, x: Tensor, weight: Tensor, kept: list[Tensor | None]) -> tuple[int, ...]:
        """Gather into `kept` what a recomputation shares with its backward; returns y's shape."""
        if self.recomputed and self._product.keeps:
            kept[:] = [self._product.gather_x(x), self._gather_weight(weight) if kept[1] is None else kept[1]]
        return self._product.out_shape(x, weight)

    def backward(self, dy: Tensor, like: Tensor, x: Tensor | None, x_slabs: Tensor | None,
                 weight_slabs: Tensor | None, *, wants_input: bool, wants_weight: bool
                 ) -> tuple[Tensor | None, Tensor | None]:
        """(dx, dW); dW is None where it is added to the parameters' gradients, here or when a deferred product runs.

        like: of x's shape, without values. x: None where only `x_slabs`, its gathered form, was saved, or where the
        weight's gradient is not wanted.
        """
        product, weight = self._product, self.multiplied()[0]
        gradients = self.weight_gradients
        if gradients is not None and (not gradients.in_pass or any(one._backward_hooks for one in self.weights)):
            gradients = None  # a hook sees gradients that go through autograd only
        weight_slabs = self._kept_weight() if weight_slabs is None else weight_slabs
        if wants_weight and gradients is not None and gradients.defers and self.may_wait:
            assert x is not None  # saved: only layers that are recomputed save slabs, and those never wait
            dy_slabs = product.gather_dy(dy)
            gradients.add([one for one in self.weights if one.requires_grad], (dy if dy_slabs is None else dy_slabs, x),
                          partial(self._deferred, dy_slabs is not None))
            return product.input_gradient(dy, like, weight, weight_slabs=weight_slabs, dy_slabs=dy_slabs
                                          ) if wants_input else None, None
        into = self._into(dy.dtype) if gradients is not None else None
        dx: Tensor | None
        if wants_input and wants_weight and x_slabs is None:
            assert x is not None
            dx, dw = product.gradients(dy, x, weight, weight_slabs=weight_slabs, into=into,
                                       reuse=self._reuse_input and x.is_contiguous())
        else:
            dx = product.input_gradient(dy, like, weight, weight_slabs=weight_slabs) if wants_input else None
            dw = product.weight_gradient(dy, x, weight, x_slabs=x_slabs, into=into) if wants_weight else None
        if dw is not None and gradients is not None:
            self._add_gradients(dw)
            dw = None
        return dx, None if dw is None else dw.clone()

    def _into(self, dtype: torch.dtype) -> Tensor | None:
        """The gradient to which dW is added in one product: on one row dW needs no sum over ranks."""
        if self.mesh.num_rows > 1 or not self._has_one_weight:
            return None
        gradient = self.weight.grad
        return gradient if gradient is not None and gradient.dtype is dtype else None

    def _add_gradients(self, dw: Tensor) -> None:
        for weight, share in zip(self.weights, self.shares(dw), strict=True):
            if weight.requires_grad:
                _add_gradient(weight, share)

    def _deferred(self, gathered: bool, dy: Tensor, x: Tensor) -> None:
        """Compute a weight gradient that was deferred, and add it to the parameters'."""
        dw = self._product.weight_gradient(dy, x, self.multiplied()[0], dy_slabs=dy if gathered else None,
                                           into=self._into(x.dtype))
        if dw is not None:
            self._add_gradients(dw)


def _add_gradient(parameter: nn.Parameter, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient.to(parameter.grad_dtype, copy=True)
    else:
        parameter.grad.add_(gradient)


class _Save(Function):
    """The first half: saves operands, and computes the backward. Its result has y's shape and no values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: SplitLinear, weight: Tensor, kept: list[Tensor | None],
                *parameters: Tensor) -> Tensor:
        shape = layer.save(x, weight, kept)
        ctx.num_weights = len(layer.weights)
        wants_input, wants_weight = ctx.needs_input_grad[0], any(ctx.needs_input_grad[4:4 + ctx.num_weights])
        x_slabs, weight_slabs = kept if layer.recomputed else (None, None)
        ctx.save_for_backward(x if wants_weight and x_slabs is None else None, x_slabs if wants_weight else None,
                              weight_slabs if wants_input else None)
        ctx.layer, ctx.like = layer, x.new_empty(()).expand(x.shape)
        return x.new_empty(()).expand(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        wants_input, wanted = ctx.needs_input_grad[0], ctx.needs_input_grad[4:]
        wants_weight, wants_bias = any(wanted[:ctx.num_weights]), any(wanted[ctx.num_weights:])
        db = dy.reshape(-1, dy.shape[-1]).sum(0) if wants_bias else None
        dx, dw = ctx.layer.backward(dy, ctx.like, *ctx.saved_tensors, wants_input=wants_input,
                                    wants_weight=wants_weight)
        found = [share for gradient, count in ((dw, ctx.num_weights), (db, len(wanted) - ctx.num_weights)) if count
                 for share in ([None] * count if gradient is None else ctx.layer.shares(gradient))]
        return dx, None, None, None, *(share if want else None for share, want in zip(found, wanted, strict=True))


class _Multiply(Function):
    """The second half: computes y; its gradient passes through."""

    @staticmethod
    def forward(ctx: Any, saved: Tensor, compute: Callable[[], Tensor]) -> Tensor:
        return compute()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


class SplitVocabularyLinear(SplitLinear):
    """A `VocabularyLinear` on the mesh: logits of this column's part of `vocab`, `part(vocab, columns, column)`.

    It returns all logits where `TensorMesh.whole_outputs` is set.
    """

    def __init__(self, layer: Layer, mesh: TensorMesh, vocab: int) -> None:
        self._vocab = vocab
        start, stop = part(self._vocab, mesh.num_cols, mesh.col)
        super().__init__(layer, mesh, SummaVocabulary(mesh, self._vocab, stop - start)
                         if mesh.settings.scheme == "summa" else OutputStationary(mesh))

    def forward(self, x: Tensor) -> Tensor:
        """logits [B, S, V_j] of column j."""
        logits = super().forward(x)
        return self._whole(logits) if self.mesh.whole_outputs else logits

    def _whole(self, logits: Tensor) -> Tensor:
        """All columns' logits: [..., vocab]. Parts differ by one at most; an all-gather needs equal ones, so they are
        padded."""
        columns = self.mesh.num_cols
        sizes = [stop - start for start, stop in (part(self._vocab, columns, index) for index in range(columns))]
        padded = functional.pad(logits, (0, max(sizes) - logits.shape[-1])).contiguous()
        whole = padded.new_empty(columns, *padded.shape)
        self.mesh.over_cols.all_gather(whole, padded).wait()
        return torch.cat([one[..., :size] for one, size in zip(whole, sizes, strict=True)], dim=-1)
