"""Gated activations: SwiGLU and GeGLU (Shazeer, 2020), which keep their two inputs and nothing else."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ranvier.tensor.autograd import Function
from ranvier.tensor.columns import layout_of_tensor, local_map
from ranvier.tensor.fused import Fused, current

Activation = Literal["silu", "gelu", "gelu-tanh"]
"""Of the gate: SiLU (Swish), exact GELU, or GELU by its tanh approximation."""


def gated(gate: Tensor, up: Tensor, *, activation: Activation = "silu") -> Tensor:
    """activation(gate) * up, of two tensors with one shape and layout. The backward computes the activation again
    instead of keeping it."""
    if torch.compiler.is_dynamo_compiling():  # the compiler plans memory itself
        return _activated(gate, activation) * up
    if layout_of_tensor(gate) != layout_of_tensor(up):
        return _activated(gate, activation) * up
    return local_map(_Gated.apply, gate, up, activation, current())


def _activated(gate: Tensor, activation: Activation) -> Tensor:
    if activation == "silu":
        return functional.silu(gate)
    return functional.gelu(gate, approximate="tanh" if activation == "gelu-tanh" else "none")


class _Gated(Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: Activation, fused: Fused) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation, ctx.fused = activation, fused
        return fused(_gated, gate, up, activation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None, None]:
        gate, up = ctx.saved_tensors
        return *ctx.fused(_gradients, dy, gate, up, ctx.activation), None, None


def _gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    return _activated(gate, activation).mul_(up)


def _gradients(dy: Tensor, gate: Tensor, up: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
    d_gate: Tensor
    if activation == "silu":
        d_gate = torch.ops.aten.silu_backward(dy * up, gate)
    else:
        d_gate = torch.ops.aten.gelu_backward(dy * up, gate, approximate="tanh" if activation == "gelu-tanh"
                                              else "none")
    return d_gate, _activated(gate, activation).mul_(dy)
