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
from torch.autograd import forward_ad

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
            add_gradients: Callable[..., None], *, at_once: bool = False) -> None:
        """Called by a layer's backward: postpone `add_gradients(*tensors)`, which adds to the gradients of
        `parameters`, or call it now."""
        if self._fresh is None or at_once:
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

    def __reduce__(self):
        """A copy of a layer, made while a batch runs, leaves its weight gradients to autograd."""
        return type(None), ()

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
    def forward(ctx, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, layer: _DeferrableForward) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.bias, ctx.layer = weight, bias, layer
        return F.linear(x, weight, bias).detach()  # no view, so that users may change it in place

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, weight = ctx.saved_tensors
        dx = dy.matmul(weight) if ctx.needs_input_grad[0] else None
        gradients = ctx.layer.gradients
        if gradients.in_pass:
            grown = [ctx.weight] if ctx.bias is None or not ctx.bias.requires_grad else [ctx.weight, ctx.bias]
            gradients.add(grown, (x, dy), partial(_add_gradients, ctx.weight, ctx.bias),
                          at_once=ctx.layer.steps_aside)
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
    """The forward of a plain nn.Linear, with its weight gradients going through `gradients`.

    Inside a transform of torch.func (vmap, grad, jvp) it computes what nn.Linear does, and so it does from then on: the
    two ways of adding up would take turns in an order that depends on the policy.
    """

    def __init__(self, module: nn.Linear, gradients: WeightGradients) -> None:
        self._module, self.gradients = module, gradients
        self.steps_aside = False

    def __call__(self, input: Tensor) -> Tensor:
        module, x = self._module, input
        if not (torch.is_grad_enabled() and _is_deferrable(module, x)):
            return F.linear(x, module.weight, module.bias)
        if self.steps_aside or _is_transformed():
            self.steps_aside = True
            return F.linear(x, module.weight, module.bias)
        y = _DeferrableLinear.apply(x, module.weight, module.bias, self)
        self.gradients.forward_bytes += x.numel() * x.element_size() + y.numel() * y.element_size()
        return y

    def __reduce__(self):
        """A copy of the layer computes by itself."""
        return partial, (nn.Linear.forward, self._module)


def _is_transformed() -> bool:
    """Whether torch.func or forward-mode differentiation is at work, which a custom function would have to know."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def _takes(module: nn.Module) -> bool:
    """Whether `module` computes exactly nn.Linear's product: no forward of its own, by class or by assignment."""
    return (isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
            and "forward" not in module.__dict__)


class PostponingForwards:
    """While batches run, plain nn.Linear layers have a forward whose weight gradients go through `gradients`.

    Between batches they are plain modules, which can be copied, saved and transformed as any other.

    Args:
        blocks: whose layers are meant. Layers with a forward of their own, parametrised ones, hooked parameters, and
            parameters that another module than such a layer holds too, keep autograd's path: a sum that autograd and
            the queue grew in turn would depend on the order of actions. Whether a weight is trainable is asked at every
            forward, so freezing later needs nothing more.
        others: blocks on the same stage that keep autograd's path.
    """

    def __init__(self, blocks: Sequence[nn.Module], others: Sequence[nn.Module], gradients: WeightGradients) -> None:
        modules = list(dict.fromkeys(module for block in blocks for module in block.modules()))
        elsewhere = {parameter for module in (*(m for block in others for m in block.modules()),
                                              *(module for module in modules
                                                if not (_takes(module) or isinstance(module, SplitLinear))))
                     for parameter in module.parameters(recurse=False)}
        free = {module: None for module in modules if elsewhere.isdisjoint(module.parameters(recurse=False))}
        self._gradients = gradients
        self._forwards = {module: _DeferrableForward(module, gradients) for module in free if _takes(module)}
        self._split = [module for block in (*blocks, *others) for module in block.modules()
                       if isinstance(module, SplitLinear)]
        for module in self._split:
            module.may_wait = module in free

    def install(self) -> None:
        """A batch begins."""
        for module, forward in self._forwards.items():
            if _takes(module):
                module.forward = forward
        for module in self._split:
            module.weight_gradients = self._gradients

    def remove(self) -> None:
        """A batch has ended: the blocks are plain modules again."""
        for module, forward in self._forwards.items():
            if module.__dict__.get("forward") is forward:
                del module.forward
        for module in self._split:
            module.weight_gradients = None
