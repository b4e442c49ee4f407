"""Embedding tables whose backward adds to the rows that were looked up, and to no others.

    autograd   dW = zeros [V, H]; dW[ids] += dy; weight.grad += dW       three passes over the whole table
    here       rows = unique(ids); weight.grad[rows] += sums of dy

A batch of short sentences looks up a few hundred of 30,000 rows. The sums are those of autograd's kernel, in its order,
so that gradients are bit-identical. Whoever reduces gradients is told the rows (`optim.touched_rows`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ranvier.tensor.autograd import Function
from ranvier.tensor.deferred_linear import are_plain, is_transformed
from ranvier.tensor.splittable import forward_slot
from ranvier.tensor.weight_gradients import WeightGradients

LEAST_ROWS = 1024
"""Smaller tables are left to autograd."""


def adds_rows(rows: int, tokens: int) -> bool:
    """Whether looking up so many tokens in a table on a CPU adds to the gradients of their rows alone."""
    return rows >= LEAST_ROWS and 2 * tokens <= rows


class _RowLookup(Function):
    """functional.embedding whose backward adds rows straight to the weight's gradient, where there is one."""

    @staticmethod
    def forward(ctx: Any, weight: nn.Parameter, ids: Tensor, padding: int, gradients: WeightGradients) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight, ctx.padding, ctx.gradients = weight, padding, gradients
        return functional.embedding(ids, weight).detach()  # users may change what is no view in place

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, None, None]:
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


def _takes(module: nn.Module) -> bool:
    """Whether `module` is a plain table on a CPU: no forward of its own, by class or by assignment, and no
    parametrization, which each look at the weight would evaluate. A GPU would have to wait for the number of rows."""
    return (isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward
            and forward_slot(module) not in module.__dict__ and "weight" in module._parameters
            and module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
            and module.num_embeddings >= LEAST_ROWS and module.weight.device.type == "cpu")


def lookup_tables(blocks: Iterable[nn.Module]) -> set[nn.Parameter]:
    """The trainable tables of these blocks that only one plain nn.Embedding holds: a sum to which others add too would
    depend on the order. The same on every rank that has these blocks."""
    modules = dict.fromkeys(module for block in blocks for module in block.modules())
    holders = Counter(parameter for module in modules for parameter in module.parameters(recurse=False))
    return {module.weight for module in modules if isinstance(module, nn.Embedding) and _takes(module)
            and isinstance(module.weight, nn.Parameter) and module.weight.requires_grad and holders[module.weight] == 1}


class _LookupForward:
    """The forward of a plain nn.Embedding, with its gradient going through `gradients`."""

    def __init__(self, module: nn.Embedding, gradients: WeightGradients) -> None:
        self._module, self._gradients = module, gradients

    def __call__(self, input: Tensor) -> Tensor:
        module, weight = self._module, self._module.weight
        if (torch.is_grad_enabled() and weight.requires_grad and are_plain(weight) and not is_transformed()
                and adds_rows(len(weight), input.numel())):
            padding = -1 if module.padding_idx is None else module.padding_idx
            return _RowLookup.apply(weight, input, padding, self._gradients)
        return functional.embedding(input, weight, module.padding_idx)

    def __reduce__(self) -> tuple[type[partial[Any]], tuple[object, ...]]:
        """nn.Embedding's forward: a copy of the layer adds its gradient as autograd does."""
        return partial, (nn.Embedding.forward, self._module)


class LookupForwards:
    """Gives the modules that hold `tables`, while batches run, a forward whose backward adds to the touched rows."""

    def __init__(self, blocks: Iterable[nn.Module], tables: Collection[nn.Parameter], gradients: WeightGradients
                 ) -> None:
        self._forwards = {module: _LookupForward(module, gradients) for block in blocks for module in block.modules()
                          if isinstance(module, nn.Embedding) and module._parameters.get("weight") in tables}

    def install(self) -> None:
        """Before a batch."""
        for module, forward in self._forwards.items():
            if _takes(module):
                module.__dict__[forward_slot(module)] = forward

    def remove(self) -> None:
        """After a batch: the modules are plain again."""
        for module, forward in self._forwards.items():
            if module.__dict__.get(slot := forward_slot(module)) is forward:
                del module.__dict__[slot]
