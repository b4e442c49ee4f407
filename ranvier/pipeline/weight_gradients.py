"""Weight gradients that can wait: a linear layer whose backward returns the input gradient and queues the rest.

    y = x W^T + b        forward
    dx = dy W            backward, at once: the stage before waits for it
    dW += dy^T x         a product in the queue, run when the stage would wait, or at the end of the step
    db += sum dy

Walking the autograd graph twice, once for each gradient, costs 10 to 15 % more time; queueing the one product costs
nothing, and adding straight into the gradient buffer saves the temporary that autograd would make.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ranvier.pipeline.schedule import Product
from ranvier.tensor.split import SplitLinear


@dataclass(frozen=True, slots=True, eq=False)
class _Operands:
    """One postponed product: everything that must stay alive for it."""

    parameters: Sequence[nn.Parameter]
    """Those whose gradients this product adds to; they may belong to different chunks."""
    tensors: Sequence[Tensor]
    add_gradients: Callable[..., None]
    """Takes the tensors."""


def _add_gradients(weight: nn.Parameter, bias: nn.Parameter | None, x: Tensor, dy: Tensor) -> None:
    """weight.grad += dy^T x and bias.grad += sum dy, over all leading dims. x: [..., in], dy: [..., out]."""
    dy = dy.reshape(-1, dy.shape[-1])
    x = x.reshape(-1, x.shape[-1])
    if weight.grad is None:
        weight.grad = dy.t().mm(x).to(weight.grad_dtype)
    elif weight.grad.dtype is x.dtype:
        weight.grad.addmm_(dy.t(), x)
    else:  # fp32 sums of half-precision products
        weight.grad.add_(dy.t().mm(x))
    if bias is not None and bias.requires_grad:
        if bias.grad is None:
            bias.grad = dy.sum(0).to(bias.grad_dtype)
        else:
            bias.grad.add_(dy.sum(0))


class WeightGradients:
    """The postponed products of one stage, in order, and the switch that decides whether products are postponed.

    chunk_of: gives the chunk of gradients that a parameter belongs to.
    on_queued, on_added: called with each parameter that a product adds to, when the product is queued and when it has
        been added.
    """

    def __init__(self, chunk_of: Callable[[nn.Parameter], int], on_queued: Callable[[nn.Parameter], None],
                 on_added: Callable[[nn.Parameter], None]) -> None:
        self._chunk_of, self._on_queued, self._on_added = chunk_of, on_queued, on_added
        self._waiting: dict[tuple[int, int], _Operands] = {}
        self._fresh: list[_Operands] | None = None
        self._in_pass = False
        self.forward_bytes = 0
        """Bytes that postponing the products of the forward passes since the last reset would keep alive."""

    def backward_pass(self, microbatch: int, backward: Callable[[], None], defer: bool) -> list[Product]:
        """Run `backward`; with `defer` its products wait under (microbatch, number), and are described here."""
        fresh: list[_Operands] = []
        self._fresh, self._in_pass = fresh if defer else None, True
        try:
            backward()
        finally:
            self._fresh, self._in_pass = None, False
        for number, operands in enumerate(fresh):
            self._waiting[microbatch, number] = operands
        return [Product(size, min(map(self._chunk_of, operands.parameters)))
                for size, operands in zip(_freed_bytes(fresh), fresh, strict=True)]

    @property
    def in_pass(self) -> bool:
        """Whether the stage's own backward runs; a block may call autograd for purposes of its own."""
        return self._in_pass

    @property
    def postpones(self) -> bool:
        """Whether products of this pass wait."""
        return self._fresh is not None

    def add(self, parameters: Sequence[nn.Parameter], tensors: Sequence[Tensor],
            add_gradients: Callable[..., None]) -> None:
        """Called by a layer's backward: postpone `add_gradients(*tensors)`, which adds to the gradients of
        `parameters`, or call it now."""
        if self._fresh is None:
            add_gradients(*tensors)
        else:
            self._fresh.append(_Operands(parameters, [_alone(tensor) for tensor in tensors], add_gradients))
            for parameter in parameters:
                self._on_queued(parameter)

    def run(self, microbatch: int, product: int) -> None:
        """Compute one postponed product and let go of its operands."""
        operands = self._waiting.pop((microbatch, product))
        operands.add_gradients(*operands.tensors)
        for parameter in operands.parameters:
            self._on_added(parameter)

    def __len__(self) -> int:
        return len(self._waiting)

    def clear(self) -> None:
        """Forget everything that waits: the batch has failed."""
        self._waiting.clear()
        self._fresh = None


def _alone(tensor: Tensor) -> Tensor:
    """`tensor` without its graph; copied where it is a part of something larger, which must not stay alive for it."""
    own_bytes = tensor.numel() * tensor.element_size()
    return tensor.detach().clone() if tensor.untyped_storage().nbytes() > own_bytes else tensor.detach()


def _freed_bytes(products: list[_Operands]) -> list[int]:
    """Bytes that each product frees when they run in order: a shared storage counts for the last that holds it."""
    last_user: dict[int, tuple[int, int]] = {}
    for number, operands in enumerate(products):
        for tensor in operands.tensors:
            storage = tensor.untyped_storage()
            last_user[storage.data_ptr()] = number, storage.nbytes()
    freed = [0] * len(products)
    for number, size in last_user.values():
        freed[number] += size
    return freed


class _DeferrableLinear(torch.autograd.Function):
    """F.linear whose backward hands dW and db to a `WeightGradients`.

    The parameters whose gradients grow are kept beside the saved tensors: under activation checkpointing, or where
    saved tensors are packed away, what autograd gives back is a copy.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, gradients: WeightGradients) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.bias, ctx.gradients = weight, bias, gradients
        return F.linear(x, weight, bias).detach()  # no view, so that users may change it in place

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, weight = ctx.saved_tensors
        dx = dy.matmul(weight) if ctx.needs_input_grad[0] else None
        if ctx.gradients.in_pass:
            grown = [ctx.weight] if ctx.bias is None or not ctx.bias.requires_grad else [ctx.weight, ctx.bias]
            ctx.gradients.add(grown, (x, dy), partial(_add_gradients, ctx.weight, ctx.bias))
            return dx, None, None, None
        rows = dy.reshape(-1, dy.shape[-1])
        db = rows.sum(0) if ctx.needs_input_grad[2] else None
        return dx, rows.t().mm(x.reshape(-1, x.shape[-1])), db, None


def _is_deferrable(module: nn.Linear, x: Tensor) -> bool:
    """Whether weight and bias are plain parameters, into whose gradients nobody hooks, and the product is not cast."""
    return (_is_plain(module.weight) and module.weight.requires_grad and (module.bias is None or _is_plain(module.bias))
            and not nn.utils.parametrize.is_parametrized(module) and not torch.is_autocast_enabled(x.device.type))


def _is_plain(parameter: Tensor) -> bool:
    return (isinstance(parameter, nn.Parameter) and not parameter._backward_hooks
            and not parameter._post_accumulate_grad_hooks)


class _DeferrableForward:
    """The forward of a plain nn.Linear, with its weight gradients going through `gradients`."""

    def __init__(self, module: nn.Linear, gradients: WeightGradients) -> None:
        self._module, self._gradients = module, gradients

    def __call__(self, input: Tensor) -> Tensor:
        module, x = self._module, input
        if not (torch.is_grad_enabled() and _is_deferrable(module, x)):
            return F.linear(x, module.weight, module.bias)
        y = _DeferrableLinear.apply(x, module.weight, module.bias, self._gradients)
        self._gradients.forward_bytes += x.numel() * x.element_size() + y.numel() * y.element_size()
        return y


def _takes(module: nn.Module) -> bool:
    """Whether `module` computes exactly nn.Linear's product: no forward of its own, by class or by assignment."""
    return (isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
            and isinstance(module.__dict__.get("forward"), (_DeferrableForward, type(None))))


def postpone_weight_gradients(blocks: Sequence[nn.Module], others: Sequence[nn.Module],
                              gradients: WeightGradients) -> None:
    """Give every plain nn.Linear in `blocks` a forward whose weight gradients go through `gradients`.

    others: blocks on the same stage that keep autograd's path. Layers with a forward of their own, parametrised ones,
    hooked parameters, and parameters that another module than such a layer holds too, keep it as well: a sum that
    autograd and the queue grew in turn would depend on the order of actions. Whether a weight is trainable is asked at
    every forward, so freezing later needs nothing more.
    """
    modules = list(dict.fromkeys(module for block in blocks for module in block.modules()))
    elsewhere = {parameter for module in (*(m for block in others for m in block.modules()),
                                          *(module for module in modules
                                            if not (_takes(module) or isinstance(module, SplitLinear))))
                 for parameter in module.parameters(recurse=False)}
    for module in modules:
        free = elsewhere.isdisjoint(module.parameters(recurse=False))
        if isinstance(module, SplitLinear):
            module.may_wait = free
        elif _takes(module) and free:
            module.forward = _DeferrableForward(module, gradients)
    for block in (*blocks, *others):
        for module in block.modules():
            if isinstance(module, SplitLinear):
                module.weight_gradients = gradients


def restore_forward(block: nn.Module) -> None:
    """Undo `postpone_weight_gradients`: the block is a plain module again."""
    for module in block.modules():
        if isinstance(module.__dict__.get("forward"), _DeferrableForward):
            del module.forward
        if isinstance(module, SplitLinear):
            module.weight_gradients = None
