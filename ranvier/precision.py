"""Number formats by their names in a run, and the wider formats in which half precision is summed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ranvier.config.run import Optim, TensorParallel

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def is_half(dtype: torch.dtype) -> bool:
    """Whether parameters of `dtype` have fp32 master copies."""
    return dtype in (torch.bfloat16, torch.float16)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The format of master copies and moments for parameters of `dtype`."""
    return torch.float32 if is_half(dtype) else dtype


def reduce_dtype(optim: Optim, dtype: torch.dtype) -> torch.dtype:
    """The number format in which gradients of `dtype` are summed over replicas only."""
    return torch.float32 if is_half(dtype) and optim.reduce_dtype == "fp32" else dtype


def sum_dtype(tensor: TensorParallel, dtype: torch.dtype, device: str) -> torch.dtype:
    """The number format in which activations of `dtype` are summed over columns on such devices, "cpu" or "cuda".

    Partial sums in half precision add a rounding error as large as that of the product itself. GPUs would wait for
    twice the bytes, which their products no longer hide, so they do it only on request.
    """
    half = tensor.reduce_dtype == "half" or (tensor.reduce_dtype == "auto" and device == "cuda")
    return dtype if half else wide(dtype)
