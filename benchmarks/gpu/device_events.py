"""What a device does in a call, by torch's profiler: its kernels and copies, and the purpose of each."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.case import synchronize

_CLASSES = (("attention", ("flash", "fmha", "sdpa", "attention")),
            ("product", ("nvjet", "gemm", "xmma", "cutlass", "splitk", "gemv")),
            ("norm", ("layer_norm", "layernorm", "gammabeta")), ("loss", ("softmax", "nll", "cross_entropy")),
            ("gelu", ("gelu",)), ("optimizer", ("adam", "multi_tensor")), ("memory", ("memcpy", "memset")),
            ("copy and cast", ("copy", "fill", "cat")), ("reduction", ("reduce", "sum")), ("compiled", ("triton",)),
            ("elementwise", ("elementwise", "add", "mul")))
"""Kernels by what their names contain; nvjet are the products of Hopper's libraries."""


def covered_length(intervals: list[tuple[float, float]]) -> float:
    """The length of the union of these intervals."""
    covered, until = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        covered += max(0.0, stop - max(start, until))
        until = max(until, stop)
    return covered


def device_events(call: Callable[[], object], device: torch.device) -> list[tuple[str, float, float]]:
    """(name, start, end in microseconds) of the device's kernels and copies in a call, in order. Host entries are left
    out, since they repeat the time of their kernels. On a CPU, its operations."""
    cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as profiled:
        call()
        synchronize(device)
    kind = DeviceType.CUDA if cuda else DeviceType.CPU
    return sorted(((event.name, event.time_range.start, event.time_range.end) for event in profiled.events()
                   if event.device_type == kind and not getattr(event, "is_user_annotation", False)),
                  key=lambda event: event[1])


def kernel_class(name: str) -> str:
    """The class of the kernel with this name."""
    lower = name.lower()
    return next((kind for kind, parts in _CLASSES if any(part in lower for part in parts)), "rest")
