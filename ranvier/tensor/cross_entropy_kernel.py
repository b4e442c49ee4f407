"""The two passes of a cross-entropy over its logits, each as one Triton kernel.

With torch's operations the forward and the backward move about 30 bytes for each half-precision logit, since softmax
writes fp32 and each operation is a separate pass. These kernels read each logit once for the statistics of its row, and
read and write it once for the gradient: 6 bytes. Import this module only where Triton is installed; with
TRITON_INTERPRET=1 it runs on CPU tensors.

R rows of V logits, which may be a column's part of the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

_BLOCK = 4096
_LEAST: Any = tl.constexpr(torch.finfo(torch.float32).min)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _statistics(x_ptr, index_ptr, max_ptr, sum_ptr, target_ptr, stride,  # type: ignore[no-untyped-def]
                width: tl.constexpr, BLOCK: tl.constexpr):
    """One row's largest logit, its sum of exponentials, and its target's logit. Each lane has its own maximum."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    largest = tl.full((BLOCK,), _LEAST, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        x = tl.load(x_ptr + row * stride + start + lanes, mask=start + lanes < width,
                    other=float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, x)
        total = total * tl.exp(largest - larger) + tl.exp(x - larger)
        largest = larger
    row_max = tl.max(largest, 0)
    tl.store(max_ptr + row, row_max)
    tl.store(sum_ptr + row, tl.sum(total * tl.exp(largest - row_max), 0))
    index = tl.load(index_ptr + row)
    target = tl.load(x_ptr + row * stride + index, mask=(index >= 0) & (index < width), other=0.0).to(tl.float32)
    tl.store(target_ptr + row, target)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _gradient(x_ptr, index_ptr, log_sum_ptr, scale_ptr, stride,  # type: ignore[no-untyped-def]
              width: tl.constexpr, BLOCK: tl.constexpr):
    """A block of one row of logits becomes scale * (softmax - 1 at the target)."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < width
    x = tl.load(x_ptr + row * stride + place, mask=inside, other=0.0)
    softmax = tl.exp(x.to(tl.float32) - tl.load(log_sum_ptr + row))
    at_target = (place == tl.load(index_ptr + row)).to(tl.float32)
    tl.store(x_ptr + row * stride + place, ((softmax - at_target) * tl.load(scale_ptr + row)).to(x.dtype), mask=inside)


def statistics(logits_RV: Tensor, index_R: Tensor) -> tuple[Tensor, Tensor]:
    """[R, 1] largest logits, and [2, R, 1] sums of exp(logit - largest) and logits at `index_R`, in fp32.

    index_R: [R] int64; for an index outside the row, such as -1, the logit is 0.
    """
    rows, width = logits_RV.shape
    max_R1 = logits_RV.new_empty((rows, 1), dtype=torch.float32)
    sums_2R1 = logits_RV.new_empty((2, rows, 1), dtype=torch.float32)
    _statistics[(rows,)](logits_RV, index_R.contiguous(), max_R1, sums_2R1[0], sums_2R1[1], logits_RV.stride(0), width,
                         BLOCK=_BLOCK)
    return max_R1, sums_2R1


def overwrite_with_gradient(logits_RV: Tensor, index_R: Tensor, log_sum_R1: Tensor, scale_R1: Tensor) -> None:
    """logits = scale * (exp(logits - log_sum) - 1 at `index_R`), in place. log_sum and scale are fp32."""
    rows, width = logits_RV.shape
    _gradient[(rows, triton.cdiv(width, _BLOCK))](logits_RV, index_R.contiguous(), log_sum_R1, scale_R1.contiguous(),
                                                  logits_RV.stride(0), width, BLOCK=_BLOCK)
