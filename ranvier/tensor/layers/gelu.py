"""GELU that computes its gradient in the place of its input."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ranvier.tensor.autograd import Function
from ranvier.tensor.columns import local_map


def gelu(x: Tensor, *, approximate: Literal["tanh", "none"] = "tanh") -> Tensor:
    """GELU, by its tanh approximation or exact ("none"), of a tensor that nothing else needs in a backward.

    The gradient takes x's place in memory (Xu et al., 2021, section 3.2.3, method 1), so the backward runs once;
    autograd raises a RuntimeError where another function would see the changed values.
    """
    if torch.compiler.is_dynamo_compiling():  # the compiler plans memory itself
        return functional.gelu(x, approximate=approximate)
    return local_map(_GELU.apply, x, approximate)


class _GELU(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, approximate: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.approximate = approximate
        return functional.gelu(x, approximate=approximate)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        x, = ctx.saved_tensors
        dx: Tensor = torch.ops.aten.gelu_backward.grad_input(dy, x, approximate=ctx.approximate, grad_input=x)
        return dx, None
