"""A group that sums half-precision tensors in fp32: twice the bytes, but rounded once with any library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from ranvier.comm.collectives import ChainedWork
from ranvier.comm.protocol import Group, Reduction, Work
from ranvier.precision import is_half, wide


class Fp32Sums:
    """A `protocol.Group` around `inner` that casts half-precision tensors to fp32 before every sum."""

    def __init__(self, inner: Group) -> None:
        self._inner = inner
        self.ranks, self.index = inner.ranks, inner.index
        self.all_gather, self.broadcast, self.all_to_all = inner.all_gather, inner.broadcast, inner.all_to_all
        self.gather_objects, self.gather_number = inner.gather_objects, inner.gather_number
        self.barrier, self.close = inner.barrier, inner.close

    @property
    def bytes_received(self) -> int:
        """Bytes received by `inner`; sums count in fp32, the dtype in which they are sent."""
        return self._inner.bytes_received

    def all_reduce(self, tensor: Tensor, op: Reduction = "sum") -> Work:
        """See `protocol.Group`."""
        return self._cast(tensor, tensor, lambda sent: (sent, self._inner.all_reduce(sent, op)))

    def reduce(self, tensor: Tensor, root: int = 0) -> Work:
        """See `protocol.Group`."""
        return self._cast(tensor, tensor, lambda sent: (sent, self._inner.reduce(sent, root)))

    def reduce_scatter(self, output: Tensor, tensor: Tensor, buffer: Tensor | None = None, dim: int = 0) -> Work:
        """See `protocol.Group`; `buffer` is used only if nothing is cast."""
        if not is_half(tensor.dtype):
            return self._inner.reduce_scatter(output, tensor, buffer, dim)

        def start(sent: Tensor) -> tuple[Tensor, Work]:
            shard = torch.empty_like(output, dtype=torch.float32)
            return shard, self._inner.reduce_scatter(shard, sent, dim=dim)
        return self._cast(tensor, output, start)

    def _cast(self, tensor: Tensor, output: Tensor, start: Callable[[Tensor], tuple[Tensor, Work]]) -> Work:
        """Call `start` with `tensor` in fp32; when the work that it returns is done, copy its result to `output`."""
        if not is_half(tensor.dtype):
            return start(tensor)[1]
        sent = tensor.float()
        summed, work = start(sent)
        return ChainedWork(work, lambda: output.copy_(summed))

    def buffer_bytes(self, operation: Literal["all_reduce", "reduce_scatter"], numel: int, dtype: torch.dtype,
                     device_type: str) -> int:
        """See `protocol.Group`; the copies in fp32 are included."""
        copies = numel * 4 if is_half(dtype) else 0
        if operation == "reduce_scatter":
            copies += copies // len(self.ranks)
        return copies + self._inner.buffer_bytes(operation, numel, wide(dtype), device_type)
