"""Number formats by their names in a run, and the wider ones in which half precision adds up."""

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


def reduce_dtype(settings: Optim | TensorParallel, dtype: torch.dtype) -> torch.dtype:
    """The number format in which tensors of `dtype` are summed over ranks, as `settings.reduce_dtype` says."""
    return torch.float32 if is_half(dtype) and settings.reduce_dtype == "fp32" else dtype
