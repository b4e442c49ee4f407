"""Plain layers that accumulate their own weight gradients: nn.Linear, deferred if necessary, and nn.Embedding tables.

The backward of an nn.Linear returns the input's gradient and queues the product for the weight's; see
`ranvier.tensor.weight_gradients`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.nn import functional

from ranvier.tensor import float8
from ranvier.tensor.autograd import Function, apply_outside_transforms
from ranvier.tensor.split.linear import SplitLinear
from ranvier.tensor.splittable import Layer, forward_slot
from ranvier.tensor.weight_gradients import WeightGradients

_ROW_MULTIPLE = 128


def add_gradients(weight: nn.Parameter, bias: nn.Parameter | None, x: Tensor, dy: Tensor, *, in_float8: bool = False
                  ) -> None:
    """weight.grad += dy^T x and bias.grad += sum dy, over all leading dims. x: [..., in], dy: [..., out]."""
    dy = dy.reshape(-1, dy.shape[-1])
    x = x.reshape(-1, x.shape[-1])
    sums = weight.grad
    wide = (weight.grad_dtype or weight.dtype) if sums is None else sums.dtype
    if in_float8:
        gradient = float8.weight_gradient(x, dy, wide)
        weight.grad = gradient if sums is None else sums.add_(gradient)
    elif sums is not None and wide is x.dtype:
        sums.addmm_(dy.t(), x)
    elif x.is_cuda and wide is torch.float32 and x.dtype in (torch.bfloat16, torch.float16):
        _add_wide_product(weight, dy.t(), x)
    elif sums is None:
        weight.grad = dy.t().mm(x).to(weight.grad_dtype)
    else:  # fp32 sums of half-precision products
        sums.add_(dy.t().mm(x))
    if bias is not None and bias.requires_grad:
        if (sums := bias.grad) is None:
            bias.grad = dy.sum(0).to(bias.grad_dtype)
        else:
            sums.add_(dy.sum(0))


def padded_rows_product(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T as a view [..., out] of rows whose length in memory is the next multiple of 128.

    GPUs read and write aligned rows faster: a vocabulary of 50,257 costs as much time as one of 50,304. The gaps
    between the rows are never computed or read, so values, gradients and shape are those of the plain product.
    """
    features = weight.shape[0]
    width = -(-features // _ROW_MULTIPLE) * _ROW_MULTIPLE
    y = x.new_empty(*x.shape[:-1], width)[..., :features]
    torch.mm(x.reshape(-1, x.shape[-1]), weight.t(), out=y.view(-1, features))
    return y


def _add_wide_product(weight: nn.Parameter, a: Tensor, b: Tensor) -> None:
    """weight.grad += a b in one kernel, for half-precision operands and an fp32 gradient, on CUDA only. The product is
    not rounded to half precision before it is added."""
    if weight.grad is None:
        weight.grad = torch.ops.aten.mm.dtype(a, b, torch.float32)
    else:
        torch.ops.aten.addmm.dtype_out(weight.grad, a, b, torch.float32, out=weight.grad)


class _PaddedLinear(Function):
    """functional.linear of a `PaddedLinear` whose weight gradient is computed by autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.set_materialize_grads(False)
        return padded_rows_product(x, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        if dy is None:
            return None, None
        x, weight = ctx.saved_tensors
        rows = dy.reshape(-1, dy.shape[-1])
        return (dy.matmul(weight) if ctx.needs_input_grad[0] else None,
                rows.t().mm(x.reshape(-1, x.shape[-1])) if ctx.needs_input_grad[1] else None)


class PaddedLinear(nn.Linear):
    """An nn.Linear without bias whose outputs, on CUDA, lie in padded rows (`padded_rows_product`)."""

    def forward(self, input: Tensor) -> Tensor:
        """Computes what nn.Linear does."""
        if (not input.is_cuda or is_transformed() or is_dynamo_compiling()  # the compiler does its own padding
                or torch.is_autocast_enabled(input.device.type)):
            return functional.linear(input, self.weight)
        return _PaddedLinear.apply(input, self.weight)


class _DeferrableLinear(Function):
    """functional.linear whose backward gives dW and db to a `WeightGradients`.

    `ctx` holds the parameters themselves in addition to the saved tensors: with activation recomputation, or with hooks
    on saved tensors, autograd returns copies, whose `.grad` is not the parameter's.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None,
                layer: _DeferrableForward, autocast: torch.dtype | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.set_materialize_grads(False)
        ctx.weight, ctx.bias, ctx.layer = weight, bias, layer
        if layer.in_float8:
            return float8.forward_product(x, weight, bias)
        w, b = weight, bias
        if autocast is not None:  # torch's own cast would cache a tensor without a graph, for others too
            w, b = w.to(autocast), None if b is None else b.to(autocast)  # type: ignore[assignment]
        if layer.pads_rows and x.is_cuda:
            return padded_rows_product(x, w)
        return functional.linear(x, w, b).detach()  # users may change what is not a view in place

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        if dy is None:  # as a function behind it has returned, which is no gradient of zeros
            return None, None, None, None, None
        (x, weight), layer = ctx.saved_tensors, ctx.layer
        dx = None
        if ctx.needs_input_grad[0]:
            if layer.in_float8:
                dx = float8.input_gradient(dy, weight)
            else:
                dx = dy.matmul(weight if weight.dtype is dy.dtype else weight.to(dy.dtype))
        gradients = layer.gradients
        if gradients.in_pass():
            if gradients.defers and not layer.steps_aside:
                grown = [ctx.weight] if ctx.bias is None or not ctx.bias.requires_grad else [ctx.weight, ctx.bias]
                gradients.add(grown, (x, dy), partial(add_gradients, ctx.weight, ctx.bias, in_float8=layer.in_float8))
            else:
                add_gradients(ctx.weight, ctx.bias, x, dy, in_float8=layer.in_float8)
            return dx, None, None, None, None
        layer.steps_aside = True
        rows, x = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
        db = rows.sum(0) if ctx.needs_input_grad[2] else None
        dw = float8.weight_gradient(x, rows, weight.dtype) if layer.in_float8 else rows.t().mm(x)
        return dx, dw, db, None, None


_apply = apply_outside_transforms(_DeferrableLinear)
_PLAIN_TENSORS = frozenset({Tensor, nn.Parameter})
"""Classes of plain operands: others may compute a product differently, through __torch_function__."""


def autocast_dtype(*operands: Tensor | None) -> torch.dtype | None:
    """The dtype to which autocast casts the operands of a product; None if autocast is off, or leaves an operand
    unchanged, as it does with fp64."""
    given = [operand for operand in operands if operand is not None]
    device = given[0].device.type
    fit = torch.is_autocast_enabled(device) and all(
        one.device.type == device and one.is_floating_point() and one.dtype is not torch.float64 for one in given)
    return torch.get_autocast_dtype(device) if fit else None


def is_deferrable(module: nn.Linear) -> bool:
    """Whether weight and bias are plain parameters without hooks on their gradients, and the weight trains and has
    elements."""
    weight, bias = module._parameters["weight"], module._parameters["bias"]
    return (weight is not None and weight.requires_grad and weight.numel() > 0 and is_plain(weight)
            and (bias is None or is_plain(bias)))


def is_plain(parameter: Tensor) -> bool:
    """Whether it is a parameter of torch's own class (not a subclass), without hooks on its gradient."""
    return (type(parameter) is nn.Parameter and not parameter._backward_hooks
            and not parameter._post_accumulate_grad_hooks)


class _PlainForward:
    """The forward of a plain torch layer while batches run. A copy of the layer has torch's own forward."""

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module

    @staticmethod
    def accepts(module: nn.Module) -> bool:
        """Whether `module` computes exactly nn.Linear's product with its own parameters: no custom forward, by class or
        by assignment, and no parametrization, which each access to the weight would evaluate."""
        return (isinstance(module, nn.Linear) and type(module).forward in (nn.Linear.forward, PaddedLinear.forward)
                and forward_slot(module) not in module.__dict__ and {"weight", "bias"} <= module._parameters.keys())

    def __reduce__(self) -> tuple[type[partial[Any]], tuple[object, ...]]:
        kind = nn.Embedding if isinstance(self._module, nn.Embedding) else nn.Linear
        return partial, (kind.forward, self._module)


class _DeferrableForward(_PlainForward):
    """The forward of a plain nn.Linear, which passes its weight gradients to `gradients`.

    Inside a transform of torch.func (vmap, grad, jvp), and in a block that compiles its own code, it computes what
    nn.Linear computes.

    steps_aside: whether its products are never deferred. This is so from the first time that autograd itself may add to
    the same gradient (in a transform, in compiled code, or in a block with its own calls of autograd): the order in
    which the queue and autograd add would depend on the schedule's policy. Implicit layers and reentrant checkpointing
    first run without gradients, so that this is known before any backward.
    """

    def __init__(self, module: nn.Module, gradients: WeightGradients, *, in_float8: bool = False) -> None:
        super().__init__(module)
        self.gradients, self.in_float8 = gradients, in_float8
        self._by_autograd = _Float8Forward(module) if in_float8 else None
        self.pads_rows = isinstance(module, PaddedLinear)
        self.steps_aside = False

    def __call__(self, input: Tensor) -> Tensor:
        x, held = input, self._module._parameters
        weight: Any = held["weight"]
        bias = held["bias"]
        if type(x) not in _PLAIN_TENSORS:
            return functional.linear(x, weight, bias)
        if not is_deferrable(self._module):
            return functional.linear(x, weight, bias) if self._by_autograd is None else self._by_autograd(x)
        if is_dynamo_compiling() or is_transformed() or not torch.is_grad_enabled() or (
                x.layout is not torch.strided):
            self.steps_aside = True
            return functional.linear(x, weight, bias) if self._by_autograd is None else self._by_autograd(x)
        dtype = autocast_dtype(x, weight, bias) if torch._C._is_any_autocast_enabled() else None
        if dtype is not None:
            if self.in_float8:
                return functional.linear(x, weight, bias)
            x = x.to(dtype)
        y = _apply(torch._C._functorch.unwrap_if_dead(x), weight, bias, self, dtype)
        if not self.steps_aside:
            self.gradients.forward_bytes += x.nbytes + y.nbytes
        return y


class _Float8Forward(_PlainForward):
    """The forward of a plain nn.Linear whose products are in float8, with weight gradients accumulated by autograd."""

    def __call__(self, input: Tensor) -> Tensor:
        module = self._module
        if (not (torch.is_grad_enabled() and module.weight.requires_grad) or input.layout is not torch.strided
                or torch.is_autocast_enabled(input.device.type) or is_transformed()):
            return functional.linear(input, module.weight, module.bias)
        return float8.Float8Linear.apply(input, module.weight, module.bias)


def is_transformed() -> bool:
    """Whether a torch.func transform or forward-mode differentiation is active; custom functions support neither."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


class DeferringForwards:
    """While batches run, gives plain nn.Linear layers a forward that passes weight gradients to `gradients`, and
    embedding tables a forward whose backward adds only to the rows that were looked up.

    Between batches they are plain modules, which can be copied, saved and transformed like any others.

    Args:
        blocks: blocks whose layers defer. Autograd computes the weight gradients of layers with a custom forward, of
            parametrised layers, of parameters with hooks, and of parameters that a module of another kind shares: a sum
            to which both autograd and the queue add would depend on the order of actions. Every forward checks whether
            the weight is trainable, so that parameters can be frozen later.
        others: blocks of the same stage whose weight gradients are computed by autograd.
        in_float8: layers of both kinds of blocks whose products are in float8 (`float8`).
        may_wait: whether products may be deferred at all. If not, a user's plain layers stay unchanged; those of
            `ranvier.tensor.layers` still add directly to their gradients.
        tables: lookup tables of both kinds of blocks whose gradients are accumulated row by row.
    """

    def __init__(self, blocks: Sequence[nn.Module], others: Sequence[nn.Module], gradients: WeightGradients,
                 in_float8: Collection[nn.Module] = (), *, may_wait: bool = True,
                 tables: Collection[nn.Parameter] = ()) -> None:
        inside, beside = list(dict.fromkeys(_modules(blocks))), list(_modules(others))
        plain = {module for module in (*inside, *beside) if _PlainForward.accepts(module)}
        by_autograd = [module for module in inside if not (module in plain or isinstance(module, SplitLinear))]
        elsewhere = set(_own_parameters((*beside, *by_autograd)))
        free = {module: None for module in inside if elsewhere.isdisjoint(module.parameters(recurse=False))}
        waiting = plain if may_wait else plain.intersection((*in_float8, *_modules(
            module for module in inside if isinstance(module, Layer))))
        self._gradients = gradients
        self._forwards = {module: _DeferrableForward(module, gradients, in_float8=module in in_float8)
                          for module in free if module in waiting}
        self.float8_forwards = {module: _Float8Forward(module) for module in (*inside, *beside)
                                if module in in_float8 and module in plain and module not in self._forwards}
        """Forwards of the layers whose products are in float8 and never queued."""
        lookups = {module: _LookupForward(module, gradients) for module in (*inside, *beside)
                   if isinstance(module, nn.Embedding) and module._parameters.get("weight") in tables}
        self._installed: list[tuple[nn.Module, _PlainForward]] = [
            *self._forwards.items(), *self.float8_forwards.items(), *lookups.items()]
        self._split = [module for module in (*inside, *beside) if isinstance(module, SplitLinear)]
        holders = Counter(_own_parameters((*inside, *beside)))
        for module in self._split:
            module.may_wait = module in free
            module.has_own_weights = all(holders[weight] == 1 for weight in module.weights)

    def layers_of(self, block: nn.Module) -> list[nn.Linear]:
        """The plain linear layers of a block whose products may be deferred."""
        return [module for module in block.modules() if isinstance(module, nn.Linear) and module in self._forwards]

    def is_in_float8(self, layer: nn.Linear) -> bool:
        """Whether the products of a layer of `layers_of` are in float8."""
        return self._forwards[layer].in_float8

    def install(self) -> None:
        """Before a batch: give the layers their forwards."""
        for module, forward in self._installed:
            if forward.accepts(module):
                module.__dict__[forward_slot(module)] = forward
        for layer in self._split:
            layer.weight_gradients = self._gradients

    def remove(self) -> None:
        """After a batch: the blocks are plain modules again."""
        for module, forward in self._installed:
            if module.__dict__.get(slot := forward_slot(module)) is forward:
                del module.__dict__[slot]
        for layer in self._split:
            layer.weight_gradients = None


def _modules(blocks: Iterable[nn.Module]) -> Iterator[nn.Module]:
    return (module for block in blocks for module in block.modules())


def _own_parameters(modules: Iterable[nn.Module]) -> Iterator[nn.Parameter]:
    return (parameter for module in modules for parameter in module.parameters(recurse=False))


# --- lookup tables ----------------------------------------------------------------------------------------------------

# Embedding tables whose backward adds to the rows that were looked up, and to no others.
#
#     autograd   dW = zeros [V, H]; dW[ids] += dy; weight.grad += dW       three passes over the whole table
#     here       rows = unique(ids); weight.grad[rows] += sums of dy
#
# A batch of short sentences looks up a few hundred of 30,000 rows. The sums are computed by autograd's kernel, in its
# order, so that gradients are bit-identical. The reduction of gradients gets the rows (`optim/reduction`).


LEAST_ROWS = 1024
"""Smaller tables are left to autograd."""


def adds_rows(rows: int, tokens: int) -> bool:
    """Whether looking up `tokens` tokens in a CPU table of `rows` rows adds to the gradients of their rows only."""
    return rows >= LEAST_ROWS and 2 * tokens <= rows


class _RowLookup(Function):
    """functional.embedding whose backward adds rows directly to the weight's gradient, if there is one."""

    @staticmethod
    def forward(ctx: Any, weight: nn.Parameter, ids: Tensor, padding: int, gradients: WeightGradients) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.set_materialize_grads(False)
        ctx.weight, ctx.padding, ctx.gradients = weight, padding, gradients
        return functional.embedding(ids, weight).detach()  # users may change what is not a view in place

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        if dy is None:
            return None, None, None, None
        (ids,), weight = ctx.saved_tensors, ctx.weight
        if not ctx.gradients.in_pass() or weight.grad is None:
            return torch.ops.aten.embedding_dense_backward(dy, ids, len(weight), ctx.padding, False), None, None, None
        ids, dy = ids.reshape(-1), dy.reshape(-1, dy.shape[-1])
        if ctx.padding >= 0:
            kept = ids != ctx.padding
            ids, dy = ids[kept], dy[kept]
        rows, places = torch.unique(ids, return_inverse=True)
        sums = torch.ops.aten.embedding_dense_backward(dy, places, len(rows), -1, False)
        weight.grad.index_add_(0, rows, sums.to(weight.grad.dtype))
        ctx.gradients.added_rows(weight, rows)
        return None, None, None, None


def lookup_tables(blocks: Iterable[nn.Module]) -> set[nn.Parameter]:
    """The trainable tables of these blocks that are held by a single plain nn.Embedding: with further holders the sum
    would depend on their order. The result is the same on every rank that has these blocks."""
    modules = dict.fromkeys(module for block in blocks for module in block.modules())
    holders = Counter(parameter for module in modules for parameter in module.parameters(recurse=False))
    weights = (module._parameters["weight"] for module in modules if _LookupForward.accepts(module))
    return {weight for weight in weights if weight is not None and weight.requires_grad and holders[weight] == 1}


class _LookupForward(_PlainForward):
    """The forward of a plain nn.Embedding, which passes its gradient to `gradients`."""

    def __init__(self, module: nn.Module, gradients: WeightGradients) -> None:
        super().__init__(module)
        self._gradients = gradients

    @staticmethod
    def accepts(module: nn.Module) -> bool:
        """Whether `module` is a plain table on a CPU: no custom forward, by class or by assignment, and no
        parametrization, which each access to the weight would evaluate. On a GPU the number of rows would need a
        synchronization."""
        return (isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward
                and forward_slot(module) not in module.__dict__ and "weight" in module._parameters
                and module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
                and module.num_embeddings >= LEAST_ROWS and module.weight.device.type == "cpu")

    def __call__(self, input: Tensor) -> Tensor:
        module, weight = self._module, self._module.weight
        if (torch.is_grad_enabled() and weight.requires_grad and is_plain(weight) and not is_transformed()
                and adds_rows(len(weight), input.numel())):
            padding = -1 if module.padding_idx is None else module.padding_idx
            return _RowLookup.apply(weight, input, padding, self._gradients)
        return functional.embedding(input, weight, module.padding_idx)
