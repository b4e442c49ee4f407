"""Products of linear layers in float8, with one scale for each tensor.

    y = x W^T      x, W  e4m3          a tensor is divided by its scale, its largest value over the format's largest,
    dx = dy W      dy    e5m2, W e4m3  and rounded; products are summed in fp32 and multiplied by both scales
    dW = dy^T x    dy    e5m2, x e4m3

e4m3 has 4 bits of exponent and 3 of mantissa, e5m2 more range and less precision, for gradients (Micikevicius et al.,
2022, FP8 Formats for Deep Learning). Scales are computed from the current tensors, so no state is kept between steps.
Parameters, activations between layers, gradients and optimizer states keep the run's formats. All products use
`torch.nn.functional.scaled_mm`, also on a CPU if torch supports it there (`runs_on_cpu`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ranvier.errors import ConfigError
from ranvier.tensor.autograd import Function

VALUES, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16
"""The inner dim and the number of columns of a product must be multiples of this."""
CAPABILITY = (8, 9)
"""The first CUDA compute capability with these products (Ada; Hopper is 9.0)."""


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(x / scale in `dtype`, scale): the largest value of x becomes the largest of `dtype`. If x has a NaN or an
    infinite value, so do all products with it."""
    largest = torch.finfo(dtype).max
    scale = x.abs().amax().float().clamp(min=torch.finfo(torch.float32).tiny * largest) / largest
    return (x.float() / scale).clamp(-largest, largest).to(dtype), scale


def product(a: Tensor, a_format: torch.dtype, b: Tensor, b_format: torch.dtype, dtype: torch.dtype) -> Tensor:
    """a b^T in `dtype`. a: [m, k]; b: [n, k]; n is a multiple of `MULTIPLE`; k is zero-padded to a multiple of it."""
    if not a.numel():
        return a.new_zeros(len(a), len(b), dtype=dtype)
    (a8, a_scale), (b8, b_scale) = quantize(a, a_format), quantize(b, b_format)
    missing = -a.shape[1] % MULTIPLE
    if missing:
        a8, b8 = (torch.cat([one, one.new_zeros(len(one), missing)], 1) for one in (a8, b8))
    return functional.scaled_mm(a8.contiguous(), b8.contiguous().t(), a_scale, functional.ScalingType.TensorWise,
                                b_scale, functional.ScalingType.TensorWise, output_dtype=dtype)


def runs_on_cpu() -> bool:
    """Whether this version of torch has products in float8 on a CPU."""
    zeros = torch.zeros(MULTIPLE, MULTIPLE, device="cpu")
    try:
        product(zeros, VALUES, zeros, VALUES, torch.float32)
    except NotImplementedError:
        return False
    return True


def working_bytes(tokens: int, inputs: int, outputs: int, element_bytes: int) -> int:
    """Peak bytes that one of the three products of a linear layer of this size allocates, uncompiled. An operand is
    widened to fp32, scaled and clamped (8 bytes an element) while the other is already in float8; then both operands
    are in float8, with copies of transposed ones, in addition to the product."""
    def one(m: int, k: int, n: int) -> int:
        a, b = m * k, n * k
        return max(8 * a, a + 8 * b, 2 * (a + b) + 2 * m * n * element_bytes)

    return max(one(tokens, inputs, outputs), one(tokens, outputs, inputs), one(outputs, tokens, inputs))


def forward_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b, in the format of x. x: [..., in]; weight: [out, in]; bias: [out]."""
    y = product(x.reshape(-1, x.shape[-1]), VALUES, weight, VALUES, x.dtype).view(*x.shape[:-1], len(weight))
    return y if bias is None else y + bias


def input_gradient(dy: Tensor, weight: Tensor) -> Tensor:
    """dx [..., in] of dy [..., out], in the format of dy."""
    dx = product(dy.reshape(-1, dy.shape[-1]), GRADIENTS, weight.t(), VALUES, dy.dtype)
    return dx.view(*dy.shape[:-1], weight.shape[1])


def weight_gradient(x: Tensor, dy: Tensor, dtype: torch.dtype) -> Tensor:
    """dW [out, in] in `dtype`. x: [tokens, in]; dy: [tokens, out]."""
    return product(dy.t(), GRADIENTS, x.t(), VALUES, dtype)


class Float8Linear(Function):
    """functional.linear by products in float8, with the weight gradient accumulated by autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return forward_product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows = dy.reshape(-1, dy.shape[-1])
        return (input_gradient(dy, weight) if ctx.needs_input_grad[0] else None,
                weight_gradient(x.reshape(-1, x.shape[-1]), rows, weight.dtype) if ctx.needs_input_grad[1] else None,
                rows.sum(0) if ctx.needs_input_grad[2] else None)


def float8_layers(blocks: Iterable[tuple[int, str, nn.Module]], num_blocks: int, device: torch.device
                  ) -> set[nn.Module]:
    """The linear layers of these blocks, from a model of `num_blocks`, that multiply in float8: those whose two sizes
    are multiples of `MULTIPLE`, except in the first and last block, which are the most sensitive.

    ConfigError if the GPU, or torch on the CPU, does not support it.
    """
    if device.type == "cpu" and not runs_on_cpu():
        raise ConfigError("needs a later version of torch on a CPU: this version has no float8 products there",
                          code="float8-needs-torch", where="model.float8", value=f"torch {torch.__version__}",
                          remedy="Install torch 2.13, or set `--model.float8 false`.")
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY:
        raise ConfigError("needs a GPU with compute capability 8.9 or more (Ada, Hopper)", code="float8-needs-gpu",
                          where="model.float8", value=torch.cuda.get_device_name(device),
                          remedy="Set `--model.float8 false`.")
    return {layer for number, _, block in blocks if 0 < number < num_blocks - 1 for layer in block.modules()
            if isinstance(layer, nn.Linear) and not (layer.in_features % MULTIPLE or layer.out_features % MULTIPLE)}
