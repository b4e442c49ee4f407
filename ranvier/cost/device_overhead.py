"""Memory of a CUDA device besides a rank's tensors: the allocator's unused memory, libraries, and the context. Pure.

These are estimates from published figures; `--memory-report true` shows the actual memory.
"""

from __future__ import annotations

from dataclasses import replace

from ranvier.cost.hardware import Device
from ranvier.cost.memory import RankMemory

ALLOCATOR_SHARE = 0.05
"""Memory that the caching allocator holds beyond the peak of tensors, as a share of that; with expandable segments."""
LIBRARY_BYTES = 256 << 20
"""Workspaces of cuBLAS (32 MiB for each stream that multiplies, on Hopper) and buffers of NCCL's communicators."""
CONTEXT_BYTES = 600 << 20
"""The context of a process, with all kernels of torch's libraries loaded."""


def with_overhead(entry: RankMemory, *, context: bool = False) -> RankMemory:
    """`entry` with the overhead of its device as separate categories.

    context: whether to count the context, too. It already exists when a rank queries its free memory.
    """
    more = {"allocator": round(ALLOCATOR_SHARE * entry.device_bytes),
            "context and libraries": LIBRARY_BYTES + (CONTEXT_BYTES if context else 0)}
    return replace(entry, device={**entry.device, **more})


def usable_bytes(device: Device) -> int:
    """Bytes of a device that the tensors of a rank may take, so that a plan that fills it can also start: all bytes
    that are not reserved, except the allocator's share."""
    free_bytes = device.memory_bytes - device.reserved_bytes
    return free_bytes if device.cores is not None else int(free_bytes / (1 + ALLOCATOR_SHARE))
