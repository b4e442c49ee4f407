"""Weight gradients that can wait: a linear layer whose backward returns the input gradient and queues the rest.

    y = x W^T + b        forward
    dx = dy W            backward, at once: the stage before waits for it
    dW += dy^T x         a product in the queue, run when the stage would wait, or at the end of the step
    db += sum dy

Walking the autograd graph twice, once for each gradient, costs 10 to 15 % more time; queueing the one product costs
nothing, and adding straight into the gradient buffer saves the temporary that autograd would make.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ranvier.pipeline.schedule import Product


@dataclass(frozen=True, slots=True, eq=False)
class _Operands:
    """One postponed product: everything that must stay alive for it."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    x: Tensor
    dy: Tensor

    def add_gradients(self) -> None:
        _add_gradients(self.weight, self.bias, self.x, self.dy)


def _add_gradients(weight: nn.Parameter, bias: nn.Parameter | None, x: Tensor, dy: Tensor) -> None:
    """weight.grad += dy^T x and bias.grad += sum dy, over all leading dims. x: [..., in], dy: [..., out]."""
    dy = dy.reshape(-1, dy.shape[-1])
    x = x.reshape(-1, x.shape[-1])
    if weight.grad is None:
        weight.grad = dy.t().mm(x)
    else:
        weight.grad.addmm_(dy.t(), x)
    if bias is not None and bias.requires_grad:
        if bias.grad is None:
            bias.grad = dy.sum(0)
        else:
            bias.grad.add_(dy.sum(0))


class WeightGradients:
    """The postponed products of one stage, in order, and the switch that decides whether products are postponed.

    chunk_of: gives the chunk of gradients that a parameter belongs to.
    on_queued, on_added: called with a weight when one of its products is queued, and when that product has been added.
    """

    def __init__(self, chunk_of: Callable[[nn.Parameter], int], on_queued: Callable[[nn.Parameter], None],
                 on_added: Callable[[nn.Parameter], None]) -> None:
        self._chunk_of, self._on_queued, self._on_added = chunk_of, on_queued, on_added
        self._waiting: dict[tuple[int, int], _Operands] = {}
        self._fresh: list[_Operands] | None = None
        self.forward_bytes = 0
        """Bytes that postponing the products of the forward passes since the last reset would keep alive."""

    def backward_pass(self, microbatch: int, backward: Callable[[], None], defer: bool) -> list[Product]:
        """Run `backward`; with `defer` its products wait under (microbatch, number), and are described here."""
        if not defer:
            backward()
            return []
        self._fresh = []
        try:
            backward()
            fresh = self._fresh
        finally:
            self._fresh = None
        for number, operands in enumerate(fresh):
            self._waiting[microbatch, number] = operands
        return [Product(size, self._chunk_of(operands.weight))
                for size, operands in zip(_freed_bytes(fresh), fresh, strict=True)]

    def add(self, weight: nn.Parameter, bias: nn.Parameter | None, x: Tensor, dy: Tensor) -> None:
        """Called by a layer's backward: postpone this product, or compute it now."""
        if self._fresh is None:
            _add_gradients(weight, bias, x, dy)
        else:
            self._fresh.append(_Operands(weight, bias, x.detach(), dy.detach()))
            self._on_queued(weight)

    def run(self, microbatch: int, product: int) -> None:
        """Compute one postponed product and let go of its operands."""
        operands = self._waiting.pop((microbatch, product))
        operands.add_gradients()
        self._on_added(operands.weight)

    def __len__(self) -> int:
        return len(self._waiting)

    def clear(self) -> None:
        """Forget everything that waits: the batch has failed."""
        self._waiting.clear()
        self._fresh = None


def _freed_bytes(products: list[_Operands]) -> list[int]:
    """Bytes that each product frees when they run in order: a shared storage counts for the last that holds it."""
    last_user: dict[int, tuple[int, int]] = {}
    for number, operands in enumerate(products):
        for tensor in (operands.x, operands.dy):
            storage = tensor.untyped_storage()
            last_user[storage.data_ptr()] = number, storage.nbytes()
    freed = [0] * len(products)
    for number, size in last_user.values():
        freed[number] += size
    return freed


class _DeferrableLinear(torch.autograd.Function):
    """F.linear whose backward hands dW and db to a `WeightGradients`."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, gradients: WeightGradients) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.gradients = gradients
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, weight, bias = ctx.saved_tensors
        dx = dy.matmul(weight) if ctx.needs_input_grad[0] else None
        ctx.gradients.add(weight, bias, x, dy)
        return dx, None, None, None


def _is_deferrable(module: nn.Module) -> bool:
    """Whether `module` computes exactly nn.Linear's product, and nobody hooks into its parameters' gradients."""
    return (isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
            and module.weight.requires_grad and not module.weight._backward_hooks
            and not nn.utils.parametrize.is_parametrized(module))


def postpone_weight_gradients(block: nn.Module, gradients: WeightGradients) -> None:
    """Give every plain nn.Linear in `block` a forward whose weight gradients go through `gradients`.

    Subclasses with a forward of their own, parametrised layers and weights with gradient hooks keep autograd's path.
    Whether a weight is trainable is asked at every forward, so freezing later needs nothing more.
    """
    for module in block.modules():
        if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
            module.forward = _deferrable_forward(module, gradients)


def _deferrable_forward(module: nn.Linear, gradients: WeightGradients) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() and _is_deferrable(module)):
            return F.linear(x, module.weight, module.bias)
        y = _DeferrableLinear.apply(x, module.weight, module.bias, gradients)
        gradients.forward_bytes += x.numel() * x.element_size() + y.numel() * y.element_size()
        return y

    return forward


def restore_forward(block: nn.Module) -> None:
    """Undo `postpone_weight_gradients`: the block is a plain module again."""
    for module in block.modules():
        if isinstance(module, nn.Linear):
            module.__dict__.pop("forward", None)
