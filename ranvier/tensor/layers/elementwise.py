"""Elementwise functions, with backward passes that keep less memory than autograd's.

    gated      SwiGLU and GeGLU (Shazeer, 2020), which keep only their two inputs
    gelu       its gradient overwrites its input
    softcap    cap tanh(x / cap), of logits and of attention scores (Gemma 2)
"""

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
"""Activation function of the gate: SiLU (Swish), exact GELU, or GELU by its tanh approximation."""


def gated(gate: Tensor, up: Tensor, *, activation: Activation = "silu") -> Tensor:
    """activation(gate) * up, of two tensors with the same shape and layout. The backward recomputes the activation
    instead of keeping it."""
    if torch.compiler.is_dynamo_compiling():  # the compiler plans memory itself
        return _activate(gate, activation) * up
    if layout_of_tensor(gate) != layout_of_tensor(up):
        return _activate(gate, activation) * up
    return local_map(_Gated.apply, gate, up, activation, current())


def _activate(gate: Tensor, activation: Activation) -> Tensor:
    if activation == "silu":
        return functional.silu(gate)
    return functional.gelu(gate, approximate="tanh" if activation == "gelu-tanh" else "none")


class _Gated(Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: Activation, fused: Fused) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.set_materialize_grads(False)
        ctx.activation, ctx.fused = activation, fused
        return fused(_gate, gate, up, activation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None]:
        if dy is None:
            return None, None, None, None
        gate, up = ctx.saved_tensors
        return *ctx.fused(_gated_gradients, dy, gate, up, ctx.activation), None, None


def _gate(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    return _activate(gate, activation).mul_(up)


def _gated_gradients(dy: Tensor, gate: Tensor, up: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
    d_gate: Tensor
    if activation == "silu":
        d_gate = torch.ops.aten.silu_backward(dy * up, gate)
    else:
        d_gate = torch.ops.aten.gelu_backward(dy * up, gate, approximate="tanh" if activation == "gelu-tanh"
                                              else "none")
    return d_gate, _activate(gate, activation).mul_(dy)


def gelu(x: Tensor, *, approximate: Literal["tanh", "none"] = "tanh") -> Tensor:
    """GELU, by its tanh approximation or exact ("none"), of a tensor that no other backward needs.

    The gradient overwrites x in memory (Xu et al., 2021, section 3.2.3, method 1), so the backward can run only once;
    autograd raises a RuntimeError if another function would see the changed values.
    """
    if torch.compiler.is_dynamo_compiling():  # the compiler plans memory itself
        return functional.gelu(x, approximate=approximate)
    return local_map(_GELU.apply, x, approximate)


class _GELU(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, approximate: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        ctx.approximate = approximate
        return functional.gelu(x, approximate=approximate)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, None]:
        if dy is None:
            return None, None
        x, = ctx.saved_tensors
        dx: Tensor = torch.ops.aten.gelu_backward.grad_input(dy, x, approximate=ctx.approximate, grad_input=x)
        return dx, None


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
        return fused(_cap, x, cap)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        x, = ctx.saved_tensors
        return ctx.fused(_capped_gradient, dy, x, ctx.cap), None, None


def _cap(x: Tensor, cap: float) -> Tensor:
    return (x / cap).tanh() * cap


def _capped_gradient(dy: Tensor, x: Tensor, cap: float) -> Tensor:
    return dy * (1.0 - (x / cap).tanh().square())
