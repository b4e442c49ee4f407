"""The layers of `ranvier.tensor.layers` on a row x col mesh: each rank has its part of parameters and activations.

A product's backward does not go through autograd's graph of small steps, but through one function that knows what has
to travel. The function comes in two halves, so that activation checkpointing, which stops a recomputation when the last
operand has been saved, never repeats the product that follows it:

    operands -> [save] -> [multiply] -> y        forward: saved, then multiplied
    dx, dW   <- [save] <- [multiply] <- dy       backward: dy passes through to where the operands are
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ranvier import keyed_random
from ranvier.errors import DivisibilityError, ModelError
from ranvier.layout import part
from ranvier.tensor.boundaries import checked_loss, cut_dim, guard_block, guard_layer, named_module, own_hooks
from ranvier.tensor.layers import (
    Dropout,
    Embedding,
    Layer,
    LayerNorm,
    Linear,
    PatchEmbedding,
    PositionEmbedding,
    RMSNorm,
    SmallEmbedding,
    Splittable,
    TokenLinear,
    VocabularyLinear,
    WholeLinear,
    check_plain,
)
from ranvier.tensor.loss import NextTokenLoss, SplitNextTokenLoss
from ranvier.tensor.mesh import TensorMesh
from ranvier.tensor.own_part import SplitLayer, own_part
from ranvier.tensor.products import InputStationary, OutputStationary, Product, SummaProduct, SummaVocabulary
from ranvier.tensor.split_embeddings import (
    HiddenEmbedding,
    SplitPatchEmbedding,
    SplitPositionEmbedding,
    SplitSmallEmbedding,
    SummaEmbedding,
    VocabularyEmbedding,
)
from ranvier.tensor.split_heads import SplitTokenLinear
from ranvier.tensor.split_norm import SplitNorm
from ranvier.tensor.stationary import gather_weight

if TYPE_CHECKING:
    from ranvier.models.block import Loss
    from ranvier.pipeline.weight_gradients import WeightGradients


def split_layers(module: nn.Module, mesh: TensorMesh, where: str, *, in_chain: bool = False) -> nn.Module:
    """A copy of `module` in which every `Splittable` layer is replaced by one for this rank's place on the mesh.

    Parameters on the meta device become empty ones on the default device; others are cut. where: the module's name in
    messages. in_chain: it is a block of a model, whose inputs and outputs carry their layout; otherwise it is called
    with plain tensors, this rank's part of the residual stream (or, a layer by itself, of what it takes), and returns
    such. Raises ModelError, by name, for sizes that cannot be divided and for layers that cannot be split.
    """
    _check_sharing(module, where)
    alone = isinstance(module, Splittable) and not in_chain
    found = _split_modules(module, mesh, where, {}, alone)
    if not alone and not isinstance(module, NextTokenLoss):
        guard_block(found, mesh, where, in_chain=in_chain)
    return found


def split_loss(loss: Loss, mesh: TensorMesh) -> Loss:
    """The loss of what a split model's last block returns."""
    whole = _split_modules(loss, mesh, "loss", {}, alone=False) if isinstance(loss, nn.Module) else loss
    return checked_loss(whole, mesh, loss.vocab if isinstance(loss, NextTokenLoss) else None)


def _split_modules(module: nn.Module, mesh: TensorMesh, where: str, done: dict[nn.Module, nn.Module],
                   alone: bool) -> nn.Module:
    """done: what has been split already, for modules that come twice. alone: no block is around it."""
    if module in done:
        return done[module]
    if isinstance(module, Splittable):
        _check_sizes(module, mesh, where)
        check_plain(module, where)
        part_of_it = module.split(mesh)
        if any(parameter.is_meta for parameter in part_of_it.parameters()):  # it is whole on every rank
            part_of_it.to_empty(device=torch.get_default_device())
        done[module] = named_module(own_hooks(copy.copy(part_of_it)), where)
        guard_layer(done[module], mesh, where, getattr(module, "takes", "same"), getattr(module, "gives", "same"),
                    alone=alone, vocab=getattr(module, "out_features", 0))
        return done[module]
    if isinstance(module, NextTokenLoss):
        return SplitNextTokenLoss(module, mesh)
    if isinstance(module, (nn.modules.dropout._DropoutNd, nn.RReLU)):
        raise ModelError("draws other random numbers on each rank", where=f"{where} (nn.{type(module).__name__})",
                         value=getattr(module, "p", None),
                         remedy="Use ranvier.tensor.Dropout, whose masks are keyed by place.")
    for name, _ in module.named_parameters(recurse=False):
        raise ModelError("belongs to a layer that cannot be split over rows and columns",
                         where=f"parameter {where}.{name}", value=type(module).__name__,
                         remedy="Use the layers of ranvier.tensor in its place, or set --mesh.row 1 --mesh.col 1.")
    copied = done[module] = named_module(own_hooks(copy.copy(module)), where)
    copied._buffers = dict(module._buffers)
    copied._modules = {name: child and _split_modules(child, mesh, f"{where}.{name}", done, alone=False)
                       for name, child in module._modules.items()}
    return copied


def _check_sharing(module: nn.Module, where: str) -> None:
    """Two layers of one block that share a parameter would become two."""
    holders: dict[nn.Parameter, nn.Module] = {}
    for layer in module.modules():
        for name, parameter in layer.named_parameters(recurse=False):
            if holders.setdefault(parameter, layer) is not layer:
                raise ModelError("is shared by two layers of a block, which a mesh would part",
                                 where=f"parameter {name} in {where}", value=type(layer).__name__,
                                 remedy="Share the layer itself, or put the layers into two blocks and declare them "
                                        "as tied.")


def _check_sizes(layer: Splittable, mesh: TensorMesh, where: str) -> None:
    for what, size, axis, count in layer.cannot(mesh):
        if size % count if what != "vocabulary" else size < count:
            problem = "is smaller than" if what == "vocabulary" else "cannot be divided by"
            raise DivisibilityError(f"{what} {problem} mesh.{axis} {count}", where=where, value=size,
                                    remedy=f"Set --mesh.{axis} to a divisor, or change the model's size.")


def split_layer(layer: Layer, mesh: TensorMesh) -> nn.Module:
    """One of `ranvier.tensor.layers` as it is on the mesh."""
    match layer:
        case Linear():
            kinds = {"output": OutputStationary, "input": InputStationary}
            kind = SummaProduct if mesh.settings.scheme == "summa" else kinds[layer.stationary]
            return SplitLinear(layer, mesh, kind(mesh))
        case VocabularyLinear():
            return SplitVocabularyLinear(layer, mesh)
        case Embedding():
            kinds = {"stationary": HiddenEmbedding, "summa": SummaEmbedding, "megatron": VocabularyEmbedding}
            return kinds[mesh.settings.scheme](layer, mesh)
        case PositionEmbedding():
            return SplitPositionEmbedding(layer, mesh)
        case SmallEmbedding():
            return SplitSmallEmbedding(layer, mesh)
        case PatchEmbedding():
            return SplitPatchEmbedding(layer, mesh)
        case LayerNorm() | RMSNorm():
            merges = cut_dim(mesh, layer.takes, 1) == 0 and mesh.num_cols > 1
            return SplitNorm(layer, mesh) if merges else _with_own(layer, mesh)
        case Dropout():
            return _with_own(layer, mesh) if layer.whole else SplitDropout(layer, mesh)
        case TokenLinear():
            return SplitTokenLinear(layer, mesh)
        case WholeLinear():
            return _with_own(layer, mesh)


def _with_own(layer: LayerNorm | RMSNorm | Dropout | WholeLinear, mesh: TensorMesh) -> nn.Module:
    """A layer that computes alone what it computes unsplit: it has its parameters of its own."""
    copied, splits = copy.copy(layer), layer.splits(mesh.settings)
    copied._parameters = {name: None if parameter is None else own_part(parameter, splits[name], mesh)
                          for name, parameter in layer._parameters.items()}
    return copied


# ---------------------------------------------------------------------- products


class SplitLinear(SplitLayer):
    """A `Linear` on the mesh. `product`: what it sends, and when."""

    def __init__(self, layer: Linear | VocabularyLinear, mesh: TensorMesh, product: Product) -> None:
        super().__init__(layer, mesh)
        self._product = product
        self._reuse_input = getattr(layer, "reuse_input", False)
        self.weight_gradients: WeightGradients | None = None
        """Takes what the backward of a stage finds for the weight; None leaves it to autograd."""
        self.may_wait = False
        """Whether weight gradients may be computed after the backward."""
        self.recomputed = False
        """Whether this layer's forward runs again before its backward: what it gathers is kept then."""
        self._gathered: Tensor | None = None

    @property
    def gathered(self) -> Tensor | None:
        """The column's weight, where it is kept and has been gathered."""
        return self._gathered

    @property
    def kept_bytes(self) -> int:
        """Bytes of the column's weight where it stays gathered."""
        return self.mesh.num_rows * self.weight.numel() * self.weight.element_size() if self._keeps_weight else 0

    @property
    def _keeps_weight(self) -> bool:
        return self.mesh.settings.keep_weights and self._product.keeps and self.mesh.num_rows > 1

    def forget(self) -> None:
        """Weights are about to change: those that were gathered are old."""
        self._gathered = None

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Tensor | None] = [None, self._kept_weight()]
        compute = partial(self._compute, x.detach(), kept)
        if not (torch.is_grad_enabled() and (x.requires_grad or self.weight.requires_grad or (
                self.bias is not None and self.bias.requires_grad))):
            return compute()
        y = _Multiply.apply(_Save.apply(x, self.weight, self.bias, self, kept), compute)
        gradients = self.weight_gradients
        if gradients is not None and self.may_wait and self.weight.requires_grad:
            travelling = self.mesh.num_cols if isinstance(self._product, InputStationary) else 1
            gradients.forward_bytes += x.numel() * x.element_size() + travelling * y.numel() * y.element_size()
        return y

    def _kept_weight(self) -> Tensor | None:
        """The whole column's weight, where it stays for a step."""
        if not self._keeps_weight:
            return None
        if self._gathered is None:
            self._gathered = self._gather_weight()
        return self._gathered

    def _gather_weight(self) -> Tensor:
        slabs, work = gather_weight(self.mesh, self.weight.detach(), keep=True)
        if work is not None:
            work.wait()
        return slabs

    def _compute(self, x: Tensor, kept: list[Tensor | None]) -> Tensor:
        bias = None if self.bias is None else self.bias.detach()
        y = self._product.forward(x, self.weight.detach(), bias, *kept)
        kept.clear()
        return y

    def save(self, x: Tensor, kept: list[Tensor | None]) -> tuple[int, ...]:
        """Gather what a recomputation shares with its backward, into `kept`; returns y's shape."""
        if self.recomputed and self._product.keeps:
            kept[:] = [self._product.gather_x(x), self._gather_weight() if kept[1] is None else kept[1]]
        return self._product.out_shape(x, self.weight)

    def backward(self, dy: Tensor, like: Tensor, x: Tensor | None, x_slabs: Tensor | None,
                 weight_slabs: Tensor | None, *, wants_input: bool, wants_weight: bool
                 ) -> tuple[Tensor | None, Tensor | None]:
        """(dx, dW); dW is None where it is added to the parameter's gradient here, or later."""
        product, weight = self._product, self.weight.detach()
        gradients = self.weight_gradients
        if gradients is not None and (not gradients.in_pass or self.weight._backward_hooks):
            gradients = None  # a hook wants to see it
        weight_slabs = self._kept_weight() if weight_slabs is None else weight_slabs
        if wants_weight and gradients is not None and gradients.postpones and self.may_wait:
            dy_slabs = product.gather_dy(dy)
            gradients.add([self.weight], (dy if dy_slabs is None else dy_slabs, x),
                          partial(self._postponed, dy_slabs is not None))
            return product.input_gradient(dy, like, weight, weight_slabs=weight_slabs, dy_slabs=dy_slabs
                                          ) if wants_input else None, None
        into = None
        if gradients is not None and self.mesh.num_rows == 1 and self.weight.grad is not None \
                and self.weight.grad.dtype is dy.dtype:
            into = self.weight.grad
        if wants_input and wants_weight and x_slabs is None:
            dx, dw = product.gradients(dy, x, weight, weight_slabs=weight_slabs, into=into,
                                       reuse=self._reuse_input and x.is_contiguous())
        else:
            dx = product.input_gradient(dy, like, weight, weight_slabs=weight_slabs) if wants_input else None
            dw = product.weight_gradient(dy, x, weight, x_slabs=x_slabs, into=into) if wants_weight else None
        if dw is not None and gradients is not None:
            _add_gradient(self.weight, dw)
            dw = None
        return dx, None if dw is None else dw.clone()

    def _postponed(self, gathered: bool, dy: Tensor, x: Tensor) -> None:
        """The weight gradient that has waited, added to the parameter's."""
        into = self.weight.grad if self.mesh.num_rows == 1 and self.weight.grad is not None \
            and self.weight.grad.dtype is x.dtype else None
        dw = self._product.weight_gradient(dy, x, self.weight.detach(), dy_slabs=dy if gathered else None, into=into)
        if dw is not None:
            _add_gradient(self.weight, dw)


def _add_gradient(parameter: nn.Parameter, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient.to(parameter.grad_dtype, copy=True)
    else:
        parameter.grad.add_(gradient)


class _Save(torch.autograd.Function):
    """The first half: saves operands, and in the backward has everything that is needed. Its result has y's shape and
    no values."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, layer: SplitLinear,
                kept: list[Tensor | None]) -> Tensor:
        shape = layer.save(x, kept)
        wants_input, wants_weight = ctx.needs_input_grad[:2]
        x_slabs, weight_slabs = kept if layer.recomputed else (None, None)
        ctx.save_for_backward(x if wants_weight and x_slabs is None else None, x_slabs if wants_weight else None,
                              weight_slabs if wants_input else None)
        ctx.layer, ctx.like = layer, x.new_empty(()).expand(x.shape)
        return x.new_empty(()).expand(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        wants_input, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        db = dy.reshape(-1, dy.shape[-1]).sum(0) if wants_bias else None
        dx, dw = ctx.layer.backward(dy, ctx.like, *ctx.saved_tensors, wants_input=wants_input,
                                    wants_weight=wants_weight)
        return dx, dw, db, None, None


class _Multiply(torch.autograd.Function):
    """The second half: y; its gradient passes through."""

    @staticmethod
    def forward(ctx, saved: Tensor, compute: Callable[[], Tensor]) -> Tensor:
        return compute()

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        return dy, None


class SplitVocabularyLinear(SplitLinear):
    """A `VocabularyLinear` on the mesh: logits of this column's part of the vocabulary, `part(vocab, columns, column)`;
    all of them where the mesh says `whole_outputs`."""

    def __init__(self, layer: VocabularyLinear, mesh: TensorMesh) -> None:
        self._vocab = layer.out_features
        start, stop = part(self._vocab, mesh.num_cols, mesh.col)
        super().__init__(layer, mesh, SummaVocabulary(mesh, self._vocab, stop - start)
                         if mesh.settings.scheme == "summa" else OutputStationary(mesh))

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        return self._whole(logits) if self.mesh.whole_outputs else logits

    def _whole(self, logits: Tensor) -> Tensor:
        """All columns' logits: [..., vocab]. Parts differ by one at most, and are padded to travel."""
        columns = self.mesh.num_cols
        sizes = [stop - start for start, stop in (part(self._vocab, columns, index) for index in range(columns))]
        padded = functional.pad(logits, (0, max(sizes) - logits.shape[-1])).contiguous()
        whole = padded.new_empty(columns, *padded.shape)
        self.mesh.over_cols.all_gather(whole, padded).wait()
        return torch.cat([one[..., :size] for one, size in zip(whole, sizes, strict=True)], dim=-1)


# ---------------------------------------------------------------------- the rest


class SplitDropout(SplitLayer):
    """Drops what the unsplit layer drops: masks are keyed by a sample and a place in it."""

    def __init__(self, layer: Dropout, mesh: TensorMesh) -> None:
        super().__init__(layer, mesh)
        self._probability = layer.probability

    def forward(self, x: Tensor) -> Tensor:
        sizes = list(x.shape[1:])
        start, full = [0] * len(sizes), list(sizes)
        for dim in self.mesh.activations.cut_dims:
            place = dim - 2  # of (S, H)
            start[place], full[place] = self.mesh.col * sizes[place], self.mesh.num_cols * sizes[place]
        return keyed_random.dropout(x, self._probability, self.training, start=start, full_shape=full)
