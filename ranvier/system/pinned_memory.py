"""Pinned (page-locked) host memory, from which a CUDA device copies without waiting for the host.

torch's allocator of pinned memory rounds a request up to a power of two: 20.1 GiB take 32. Large tensors are therefore
ordinary memory that is registered with the driver, in one call, at their own size. Requests of at most GRANULE are left
to torch, which reuses memory without calling the driver.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ranvier.errors import OutOfMemory

_ALIGNMENT = 64
GRANULE = 1 << 30
"""Bytes up to which torch's allocator is used; it wastes at most the same amount."""


def pinned_together(like: Sequence[Tensor]) -> list[Tensor]:
    """A tensor of the shape and dtype of each of these, all in one piece of pinned host memory. Raises as
    `pinned_zeros`."""
    if not like:
        return []
    stops = list(accumulate((-(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT for tensor in like),
                            initial=0))
    whole = pinned_zeros(stops[-1], torch.uint8, "copies of a checkpoint", "`--checkpoint.background false`")
    return [whole[start:start + tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip(stops, like, strict=False)]


def pinned_zeros(size: int, dtype: torch.dtype, where: str = "optimizer states in host memory",
                 instead: str = "`--optim.offload none`") -> Tensor:
    """A tensor of `size` zeros in pinned host memory. Raises OutOfMemory if the driver refuses to register it. where,
    instead: for that error, what the memory holds, and the setting that does not need it."""
    if size * dtype.itemsize <= GRANULE:
        return torch.zeros(size, dtype=dtype, device="cpu", pin_memory=True)
    tensor = torch.zeros(size, dtype=dtype, device="cpu")
    runtime: Any = torch.cuda.cudart()
    address = tensor.data_ptr()
    status = int(runtime.cudaHostRegister(address, tensor.nbytes, 0))
    if status:
        raise OutOfMemory(f"cannot be pinned: cudaHostRegister returned error {status}",
                          code="memory-not-pinned", where=where, value=f"{tensor.nbytes / 2**30:.1f} GiB",
                          remedy=f"Raise the limit of locked memory (ulimit -l unlimited), or set {instead}.")
    # The registration ends before the memory is freed: a storage is only freed after its Python object.
    weakref.finalize(tensor.untyped_storage(), runtime.cudaHostUnregister, address).atexit = False
    return tensor


class HostCopy:
    """A few numbers of a CUDA device on their way to the host, which waits for them only when it reads them."""

    def __init__(self, source: Tensor) -> None:
        self._copy = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=True)
        self._copy.copy_(source, non_blocking=True)
        self._arrived = torch.cuda.Event()
        self._arrived.record(torch.cuda.current_stream(source.device))

    def read(self) -> Tensor:
        """The numbers, as they were when this object was made."""
        self._arrived.synchronize()
        return self._copy


def pinned_bytes(requested: int) -> int:
    """Bytes of host memory that a pinned tensor of `requested` bytes takes, rounding included."""
    if requested > GRANULE or requested == 0:
        return requested
    return 1 << (requested - 1).bit_length()
