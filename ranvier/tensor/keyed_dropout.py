"""Keyed dropout by the fastest way on the device: one Triton kernel on CUDA, torch's operations elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ranvier import keyed_random
from ranvier.system.machine import has_triton


def dropout(x: Tensor, probability: float, training: bool, *, start: Sequence[int] | None = None,
            full_shape: Sequence[int] | None = None) -> Tensor:
    """Dropout with masks bit-identical to those of `keyed_random.dropout`. In compiled graphs the compiler fuses the
    operations."""
    on_device = x.is_cuda and type(x) is Tensor and not torch.compiler.is_dynamo_compiling()  # and has values
    if training and probability and on_device and has_triton():
        from ranvier.tensor import dropout_kernel  # needs Triton

        shape = x.shape[1:]
        place = dropout_kernel.place_of(shape, start or [0] * len(shape), full_shape or shape)
        if place is not None:
            return dropout_kernel.dropout(x, keyed_random.next_sample_keys(x.shape[0], x.device), probability, place)
    return keyed_random.dropout(x, probability, training, start=start, full_shape=full_shape)
