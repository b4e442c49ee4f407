"""Linear layers on a row x col mesh.

A product's backward does not go through autograd's graph of small steps, but through one function that controls which
tensors are sent. The function has two halves, so that activation recomputation, which stops when the last operand has
been saved, never repeats the product that follows it:

    operands -> [save] -> [multiply] -> y        forward: saved, then multiplied
    dx, dW   <- [save] <- [multiply] <- dy       backward: dy passes through to where the operands are
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ranvier.layout import part
from ranvier.precision import wide
from ranvier.tensor import kept_outputs
from ranvier.tensor.autograd import Function
from ranvier.tensor.layer_order import Pass
from ranvier.tensor.mesh import TensorMesh
from ranvier.tensor.overlapped_transfers import Arriving, WeightUse
from ranvier.tensor.quantized_weight import dense
from ranvier.tensor.split.products import Gathered, Product
from ranvier.tensor.split.stationary import InputStationary, OutputStationary
from ranvier.tensor.split.summa import SummaVocabulary
from ranvier.tensor.splittable import Layer, SplitLayer
from ranvier.tensor.weight_gradients import WeightGradients

_PASSES: dict[tuple[bool, bool], Pass] = {
    (True, True): "backward", (True, False): "backward of the input", (False, True): "backward of the weight",
    (False, False): "backward"}
"""Whether the gradients of the input and of the weight are needed -> the pass."""


@dataclass(slots=True, eq=False)
class _Operands:
    """Operands of one product whose gathers have been started. gathered: x."""

    weight: Arriving | None = None
    gathered: Gathered | None = None


class SplitLinear(SplitLayer):
    """A `Linear` on the mesh: `product` defines the layouts of x and y and which tensors are sent.

    reuse_input: as in `Linear`.
    """

    def __init__(self, layer: Layer, mesh: TensorMesh, product: Product, *, reuse_input: bool = False) -> None:
        super().__init__(layer, mesh)
        self._product = product
        self._reuse_input = reuse_input
        self._has_one_weight = True
        self.weight_gradients: WeightGradients | None = None
        """Receives the weight's gradient in the backward of a stage; None leaves it to autograd."""
        self.may_wait = False
        """Whether weight gradients may be computed after the backward."""
        self.recomputed = False
        """Whether this layer's product runs again before its backward: it then keeps the gathered tensors."""
        self.has_own_weights = False
        """Whether no other module holds a weight of this one. Sums of the weights' gradients may then be added late,
        which would otherwise change the order of additions."""
        self._kept: Arriving | None = None
        self._coming: dict[int, Arriving] = {}
        self._unreduced: Tensor | None = None
        """This row's part [rows, *weight_shape] of the weight gradients of the batch so far, if they are summed over
        rows once."""
        self._waiting, self._closed = 0, False

    @property
    def gathered(self) -> Tensor | None:
        """The column's weight [rows, *weight.shape], if it is kept and has been gathered."""
        return None if self._kept is None else self._kept.tensor

    @property
    def kept_bytes(self) -> int:
        """Bytes of the column's weight if it stays gathered."""
        rows = self.mesh.num_rows if self._keeps_weight else 0
        return rows * sum(weight.numel() * weight.element_size() for weight in self.weights)

    @property
    def weight_uses(self) -> list[WeightUse]:
        """The weight, if each pass gathers it."""
        return [WeightUse(self, False)] if self._gathers_weight and not self._keeps_weight else []

    @property
    def unreduced_bytes(self) -> int:
        """Bytes of the weight gradients of a batch that are accumulated before they are summed over rows."""
        wide = next((weight.grad_dtype or weight.dtype for weight in self.weights if weight.requires_grad), None)
        if wide is None or not self._adds_up:
            return 0
        return self.mesh.num_rows * prod(self.weight_shape) * wide.itemsize

    @property
    def weights(self) -> tuple[nn.Parameter, ...]:
        """The parameters that the product multiplies with."""
        return (self.weight,)

    @property
    def biases(self) -> tuple[nn.Parameter, ...]:
        """The parameters that are added to the product: as many as `weights`, or none."""
        return () if self.bias is None else (self.bias,)

    @cached_property  # computing it reads parameters, several calls each
    def own_shape(self) -> torch.Size:
        """[out, in] of this rank's weight."""
        shape: torch.Size = self.weight.shape
        return shape

    @cached_property
    def weight_shape(self) -> torch.Size:
        """Shape of the weight that `own_weight` returns."""
        features, width = self.own_shape
        return torch.Size((width, features)) if self._product.transposes_weight else self.own_shape

    @property
    def weight_dtype(self) -> torch.dtype:
        """Number format in which this rank's weight is sent."""
        return self.mesh.product_dtype(self.weights[0].dtype)

    def own_weight(self, buffer: int = 0) -> Tensor:
        """This rank's weight as it is sent, [out, in] or transposed, without a graph. buffer: which of the workspace's
        `BUFFERS` it may use."""
        own: Tensor = self.mesh.cast(dense(self.weight.detach()))
        if not self._product.transposes_weight:
            return own
        return self.mesh.workspace.take_one(buffer, "own weight", self.weight_shape, own).copy_(own.t())

    def own_bias(self) -> Tensor | None:
        """The bias of the same features, without a graph."""
        return None if self.bias is None else self.mesh.cast(self.bias.detach())

    def shares(self, gradient: Tensor) -> list[Tensor]:
        """Each parameter's share of the gradient of the weight that `own_weight` returns."""
        return [gradient.t() if self._product.transposes_weight else gradient]

    @property
    def _gathers_weight(self) -> bool:
        return self._product.gathers_weight and self.mesh.num_rows > 1

    @property
    def _keeps_weight(self) -> bool:
        return self.mesh.settings.keep_weights and self._gathers_weight

    @property
    def _adds_up(self) -> bool:
        """Whether weight gradients of a batch are accumulated here, and summed over rows once."""
        return self._keeps_weight and self.has_own_weights

    def forget(self) -> None:
        """Drop the gathered weight, which the optimizer is about to change, and leftovers of a failed batch."""
        self._kept = self._unreduced = None
        self._waiting, self._closed = 0, False

    def close(self) -> None:
        """Record that the last backward of the batch has passed this layer: accumulated gradients are summed over rows
        when no deferred product is left."""
        self._closed = True
        self._sum_over_rows()

    def _sum_over_rows(self) -> None:
        if self._unreduced is None or self._waiting or not self._closed:
            return
        partial_sums, self._unreduced = self._unreduced, None
        total = partial_sums.new_empty(partial_sums.shape[1:])
        self.mesh.sums.next_buffer()  # limits the number of these sums in flight to that of other sums
        self.mesh.sums.add(Arriving(total, self.mesh.over_rows.reduce_scatter(total, partial_sums),
                                    source=partial_sums), self._add_gradients)

    def _add_up(self, dw: Tensor) -> None:
        if self._unreduced is None:
            wide = next(weight.grad_dtype or weight.dtype for weight in self.weights if weight.requires_grad)
            self._unreduced = dw.to(wide, copy=True)
        else:
            self._unreduced.add_(dw)

    def start_gather(self, buffer: int, kept: bool) -> Arriving:
        """See `overlapped_transfers.GatheringLayer`."""
        weight = self.own_weight(buffer)
        shape = (self.mesh.num_rows, *weight.shape)
        slabs = weight.new_empty(shape) if kept else self.mesh.workspace.take_one(buffer, "weight", shape, weight)
        return Arriving(slabs, self.mesh.over_rows.all_gather(slabs, weight), source=weight)

    def _column_weight(self, *, kept: bool = False) -> Arriving:
        """[rows, *weight.shape], arrived or arriving; kept: in separate memory."""
        if not self._gathers_weight:
            return Arriving(self.own_weight().unsqueeze(0))
        if not self._keeps_weight:
            return self.mesh.weights.take(self, kept=kept)
        if self._kept is None:
            self._kept = self.mesh.weights.take(self, kept=True)
        return self._kept

    def forward(self, x: Tensor) -> Tensor:
        """y, as `product` defines."""
        x = self.mesh.cast(x)
        operands, weights, biases = _Operands(), self.weights, self.biases
        compute = partial(self._compute, x.detach(), operands)
        if not (torch.is_grad_enabled() and any(operand.requires_grad for operand in (x, *weights, *biases))):
            if self.weight_gradients is not None and any(weight.requires_grad for weight in weights):
                self.may_wait = False  # a block may call autograd, which adds the gradient itself
            return compute()
        y = _Multiply.apply(_Save.apply(x, self, operands, *weights, *biases), self, compute)
        gradients = self.weight_gradients
        if gradients is not None and self.may_wait and any(weight.requires_grad for weight in weights):
            travelling = self.mesh.num_cols if isinstance(self._product, InputStationary) else 1
            gradients.forward_bytes += x.numel() * x.element_size() + travelling * y.numel() * y.element_size()
        return y

    def _compute(self, x: Tensor, operands: _Operands) -> Tensor:
        weight = self._column_weight() if operands.weight is None else operands.weight
        y = self._product.forward(x, weight, self.own_bias(), operands.gathered)
        operands.weight = operands.gathered = None
        self._coming.clear()  # all of it has arrived
        return y

    def save(self, x: Tensor, operands: _Operands) -> tuple[int, ...]:
        """Start gathering the tensors that a recomputation shares with its backward; returns y's shape."""
        if self.recomputed:
            if self._gathers_weight:
                operands.weight = self._column_weight(kept=True)
            operands.gathered = self._product.gather_x(x.detach())
            for tensor in (*(operands.gathered or ()), *([] if operands.weight is None else [operands.weight])):
                self._coming[_storage(tensor.tensor)] = tensor
        return self._product.out_shape(x, self.own_shape[0])

    def backward(self, dy: Tensor, like: Tensor, x: Tensor | None, slabs: Tensor | None, panels: Sequence[Tensor], *,
                 wants_input: bool, wants_weight: bool) -> tuple[Tensor | None, Tensor | None]:
        """(dx, dW); dW is None if it is added to the parameters' gradients: here, later in this pass, or when a
        deferred product runs.

        like: of x's shape, without values. x: None if only `panels`, its gathered form, were saved, or if the weight's
        gradient is not needed. slabs: the column's weight, if it was saved.
        """
        self.begins(_PASSES[wants_input, wants_weight])
        gradients = self.weight_gradients
        if gradients is not None and not gradients.in_pass():
            gradients, self.may_wait = None, False
        elif gradients is not None and any(weight._backward_hooks for weight in self.weights):
            gradients = None  # a hook sees gradients that go through autograd only
        weight = None
        if wants_input:
            weight = self._column_weight() if slabs is None else self._take_started(slabs)
        if wants_weight and gradients is not None and gradients.defers and self.may_wait:
            assert x is not None  # saved: only layers that are recomputed save panels, and those never wait
            return self._defer(gradients, dy, like, x, weight), None
        gathered = [self._take_started(panel) for panel in panels] or None
        into = self._accumulation_target(dy.dtype) if gradients is not None else None
        # The only product of a batch has no others to be accumulated with.
        summed = gradients is None or not self._adds_up or (
            gradients.last and self._unreduced is None and not self._waiting)
        dx, dw = (None, None) if not (wants_input or wants_weight) else self._product.gradients(
            dy, like if x is None else x, weight, self.weight_shape if wants_weight else None, gathered=gathered,
            into=into, reuse=self._reuse_input and x is not None and x.is_contiguous(), summed=summed)
        for one in self._coming.values():  # saved, but not needed
            one.wait()
        self._coming.clear()
        if dw is None or gradients is None:
            return dx, None if dw is None else dw.wait().to(self.weights[0].dtype, copy=True)
        self._take(dw, summed)
        return dx, None

    def _take_started(self, saved: Tensor) -> Arriving:
        """A tensor that `save` started to gather in a recomputation, which may have ended before it arrived."""
        return self._coming.pop(_storage(saved), None) or Arriving(saved)

    def _defer(self, gradients: WeightGradients, dy: Tensor, like: Tensor, x: Tensor,
               weight: Arriving | None) -> Tensor | None:
        """Queue dW; returns dx if `weight` is given."""
        self._waiting += 1
        gathered = self._product.gather_dy(dy)
        dx = None if weight is None else self._product.gradients(dy, like, weight, None, gathered=gathered)[0]
        if gathered is None:
            operands = [x, dy]
        else:
            operands = [x, dy.new_empty(()).expand(dy.shape), *(one.wait() for one in gathered)]
        gradients.add([weight for weight in self.weights if weight.requires_grad], operands,
                      partial(self._compute_deferred, gathered is not None))
        return dx

    def _accumulation_target(self, dtype: torch.dtype) -> Tensor | None:
        """The gradient to which dW of operands of `dtype` is added in one product: on one row dW needs no sum over
        ranks."""
        if self.mesh.num_rows > 1 or not self._has_one_weight:
            return None
        gradient = self.weight.grad
        return gradient if gradient is not None and gradient.dtype is wide(dtype) else None

    def _take(self, dw: Arriving, summed: bool) -> None:
        """Add dW to the parameters' gradients, while later products run if its sum is in flight and the order of
        additions permits; or accumulate it, if it is this row's part of the sum."""
        if not summed:
            self._add_up(dw.tensor)
        elif self.has_own_weights and dw.is_coming:
            self.mesh.sums.add(dw, self._add_gradients)
        else:
            self._add_gradients(dw.wait())

    def _add_gradients(self, dw: Tensor) -> None:
        for weight, share in zip(self.weights, self.shares(dw), strict=True):
            if weight.requires_grad:
                _add_gradient(weight, share)

    def _compute_deferred(self, is_gathered: bool, x: Tensor, dy: Tensor, *panels: Tensor) -> None:
        """Compute a deferred weight gradient, and add it to the parameters' gradients, or start its sum over ranks."""
        self.begins("deferred weight gradient")
        gathered = [Arriving(panel) for panel in panels] if is_gathered else None
        self._waiting -= 1
        summed = not self._adds_up or (self._closed and self._unreduced is None and not self._waiting)
        _, dw = self._product.gradients(dy, x, None, self.weight_shape, gathered=gathered,
                                        into=self._accumulation_target(x.dtype), summed=summed)
        if dw is not None:
            self._take(dw, summed)
        self._sum_over_rows()


def _storage(tensor: Tensor) -> int:
    """Identifies the memory of a tensor, including tensors without values, whose addresses are 0."""
    number: int = tensor.untyped_storage()._cdata
    return number


def _add_gradient(parameter: nn.Parameter, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient.to(parameter.grad_dtype, copy=True)
    else:
        parameter.grad.add_(gradient)


class _Save(Function):
    """The first half: saves operands, and computes the backward. Its result has y's shape and no values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: SplitLinear, operands: _Operands, *parameters: Tensor) -> Tensor:
        shape = layer.save(x, operands)
        ctx.num_weights = len(layer.weights)
        wants_input, wants_weight = ctx.needs_input_grad[0], any(ctx.needs_input_grad[3:3 + ctx.num_weights])
        gathered, weight = operands.gathered, operands.weight
        # `.data`: a collective's writes in the meantime must not count as changes of saved tensors.
        ctx.save_for_backward(x if wants_weight and gathered is None else None,
                              weight.tensor.data if weight is not None and wants_input else None,
                              *(tensor.tensor.data for tensor in gathered or () if wants_weight))
        ctx.layer, ctx.like = layer, x.new_empty(()).expand(x.shape)
        return x.new_empty(()).expand(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        wants_input, wanted = ctx.needs_input_grad[0], ctx.needs_input_grad[3:]
        wants_weight, wants_bias = any(wanted[:ctx.num_weights]), any(wanted[ctx.num_weights:])
        db = dy.reshape(-1, dy.shape[-1]).sum(0) if wants_bias else None
        x, slabs, *panels = ctx.saved_tensors
        dx, dw = ctx.layer.backward(dy, ctx.like, x, slabs, panels, wants_input=wants_input, wants_weight=wants_weight)
        found = [share for gradient, count in ((dw, ctx.num_weights), (db, len(wanted) - ctx.num_weights)) if count
                 for share in ([None] * count if gradient is None else ctx.layer.shares(gradient))]
        return dx, None, None, *(share if want else None for share, want in zip(found, wanted, strict=True))


class _Multiply(Function):
    """The second half: computes y; its gradient passes through."""

    @staticmethod
    def forward(ctx: Any, saved: Tensor, layer: SplitLinear, compute: Callable[[], Tensor]) -> Tensor:
        # `.data`: not a view, which autograd would not let a block change in place
        return kept_outputs.current().product(layer, lambda: compute().data)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return dy, None, None


class SplitVocabularyLinear(SplitLinear):
    """A `VocabularyLinear` on the mesh: logits [B, S, V_j] of this column's part of `vocab`, `part(vocab, columns,
    column)`."""

    def __init__(self, layer: Layer, mesh: TensorMesh, vocab: int) -> None:
        self._vocab = vocab
        start, stop = part(self._vocab, mesh.num_cols, mesh.col)
        super().__init__(layer, mesh, SummaVocabulary(mesh, self._vocab, stop - start)
                         if mesh.settings.scheme == "summa" else OutputStationary(mesh))
