"""Soft caps of logits and of attention scores (Gemma 2): cap tanh(x / cap)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ranvier.tensor.autograd import Function
from ranvier.tensor.columns import local_map
from ranvier.tensor.fused import Fused, current


def softcap(x: Tensor, cap: float) -> Tensor:
    """cap tanh(x / cap), of any shape."""
    fused = current()
    if torch.compiler.is_dynamo_compiling() or not fused.compiles:
        return (x / cap).tanh() * cap
    return local_map(_Capped.apply, x, cap, fused)


class _Capped(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cap: float, fused: Fused) -> Tensor:
        ctx.save_for_backward(x)
        ctx.cap, ctx.fused = cap, fused
        return fused(_capped, x, cap)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        x, = ctx.saved_tensors
        return ctx.fused(_gradient, dy, x, ctx.cap), None, None


def _capped(x: Tensor, cap: float) -> Tensor:
    return (x / cap).tanh() * cap


def _gradient(dy: Tensor, x: Tensor, cap: float) -> Tensor:
    return dy * (1.0 - (x / cap).tanh().square())
