"""Memory of a CUDA device beside a rank's tensors: the allocator's unused memory, libraries, and the context. Pure.

These are estimates, from figures that others have published; `--memory-report true` shows what it was.
"""

from __future__ import annotations

from dataclasses import replace

from ranvier.cost.hardware import Device
from ranvier.cost.memory import RankMemory

ALLOCATOR_SHARE = 0.05
"""Memory that the caching allocator holds beyond the peak of tensors, as a share of it; with expandable segments."""
LIBRARY_BYTES = 256 << 20
"""Workspaces of cuBLAS (32 MiB for each stream that multiplies, on Hopper) and buffers of NCCL's communicators."""
CONTEXT_BYTES = 600 << 20
"""The context of a process, with all kernels of torch's libraries loaded."""


def with_overhead(entry: RankMemory, *, context: bool = False) -> RankMemory:
    """`entry` with the overhead of its device as categories of their own.

    context: whether to count the context, too. It is there already when a rank asks what is free.
    """
    more = {"allocator": round(ALLOCATOR_SHARE * entry.device_bytes),
            "context and libraries": LIBRARY_BYTES + (CONTEXT_BYTES if context else 0)}
    return replace(entry, device={**entry.device, **more})


def usable_bytes(device: Device) -> int:
    """Bytes of a device that the tensors of a rank may take, so that a plan that fills it also starts: all that is not
    reserved, but for the allocator's share."""
    free_bytes = device.memory_bytes - device.reserved_bytes
    return free_bytes if device.cores is not None else int(free_bytes / (1 + ALLOCATOR_SHARE))
