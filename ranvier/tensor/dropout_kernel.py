"""Keyed dropout as one Triton kernel, with the masks of `keyed_random.dropout`, bit-identical.

With torch's operations a mask costs ten passes over int64 and fp64 numbers. The kernel reads x, computes the hash and
the uniform number of each element in registers, and writes y. Its backward recomputes the mask: only the samples' keys
are kept. Import this module only where Triton is installed; with TRITON_INTERPRET=1 it runs on CPU tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor
from torch.autograd.function import once_differentiable

from ranvier.tensor.autograd import Function

_BLOCK = 1024
_GOLDEN: Any = tl.constexpr(0x9E3779B97F4A7C15 - (1 << 64))
_FIRST: Any = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64))
_SECOND: Any = tl.constexpr(0x94D049BB133111EB - (1 << 64))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _dropout(x_ptr, y_ptr, keys_ptr, constants_ptr, count, rows, width, first_row, first_column,  # type: ignore[no-untyped-def]
             full_width, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """y = x * factor where the element's number is at least the probability. x: [samples, rows, width]."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    sample, here = place // (rows * width), place % (rows * width)
    index = (here // width + first_row) * full_width + here % width + first_column
    mixed = index * _GOLDEN + tl.load(keys_ptr + sample, mask=inside, other=0)
    mixed = (mixed ^ ((mixed >> 30) & 0x3FFFFFFFF)) * _FIRST
    mixed = (mixed ^ ((mixed >> 27) & 0x1FFFFFFFFF)) * _SECOND
    mixed = mixed ^ ((mixed >> 31) & 0x1FFFFFFFF)
    chance = (((mixed >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) + 0.5) * 1.1102230246251565e-16
    factor = tl.where(chance >= tl.load(constants_ptr), tl.load(constants_ptr + 1), 0.0)
    x = tl.load(x_ptr + place, mask=inside, other=0.0)
    product = x.to(tl.float64) * factor if WIDE else x.to(tl.float32) * factor.to(tl.float32)
    tl.store(y_ptr + place, product.to(x.dtype), mask=inside)


@lru_cache(maxsize=32)
def _constants(probability: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[probability, factor of kept elements], fp64. The factor is rounded to `dtype`, as in torch's operations."""
    factor = torch.ones((), dtype=dtype, device="cpu") / (1.0 - probability)
    return torch.tensor([probability, float(factor)], dtype=torch.float64, device="cpu").to(device)


class _Dropped(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: Tensor, probability: float, place: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(keys)
        ctx.set_materialize_grads(False)
        ctx.probability, ctx.place = probability, place
        return _launch(x, keys, probability, place)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        if dy is None:
            return None, None, None, None
        keys, = ctx.saved_tensors
        return _launch(dy, keys, ctx.probability, ctx.place), None, None, None


def _launch(x: Tensor, keys: Tensor, probability: float, place: tuple[int, ...]) -> Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    if x.numel():
        _dropout[(triton.cdiv(x.numel(), _BLOCK),)](
            x, y, keys.contiguous(), _constants(probability, x.dtype, x.device), x.numel(), *place, BLOCK=_BLOCK,
            WIDE=x.dtype is torch.float64)
    return y


def place_of(shape: Sequence[int], start: Sequence[int], full_shape: Sequence[int]) -> tuple[int, ...] | None:
    """(rows, width, first row, first column, full width) of a sample's elements [*shape] in [*full_shape].

    None if they are not rows of a matrix, that is, for more than two dims of which one is sharded.
    """
    if list(shape) == list(full_shape):
        size = prod(shape)
        return 1, size, 0, 0, size
    if len(shape) > 2:
        return None
    rows, first_row = (shape[0], start[0]) if len(shape) == 2 else (1, 0)
    return rows, shape[-1], first_row, start[-1], full_shape[-1]


def dropout(x: Tensor, keys: Tensor, probability: float, place: tuple[int, ...]) -> Tensor:
    """x [b, ...] with elements zeroed and the others scaled.

    keys: [b] int64, of `keyed_random.next_sample_keys`. place: of `place_of`.
    """
    return _Dropped.apply(x, keys, probability, place)
