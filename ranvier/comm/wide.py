"""A group whose half-precision sums travel in fp32: twice the bytes, and rounded once, whoever adds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from ranvier.comm.collectives import Then
from ranvier.comm.protocol import Group, Reduction, Work
from ranvier.precision import is_half, wide


class WideSums:
    """`inner`, but for sums of half-precision tensors."""

    def __init__(self, inner: Group) -> None:
        self._inner = inner
        self.ranks, self.index = inner.ranks, inner.index
        self.all_gather, self.broadcast, self.all_to_all = inner.all_gather, inner.broadcast, inner.all_to_all
        self.gather_objects, self.gather_number = inner.gather_objects, inner.gather_number
        self.barrier, self.close = inner.barrier, inner.close
        self._live_bytes = self._peak_bytes = 0

    @property
    def bytes_received(self) -> int:
        return self._inner.bytes_received

    @property
    def peak_buffer_bytes(self) -> int:
        """As that of a `MetaGroup` inside, with the copies in fp32."""
        return self._peak_bytes + self._inner.peak_buffer_bytes

    def reset_peak(self) -> None:
        self._peak_bytes = self._live_bytes
        self._inner.reset_peak()

    def all_reduce(self, tensor: Tensor, op: Reduction = "sum") -> Work:
        return self._cast(tensor, tensor, lambda sent: (sent, self._inner.all_reduce(sent, op)))

    def reduce(self, tensor: Tensor, root: int = 0) -> Work:
        return self._cast(tensor, tensor, lambda sent: (sent, self._inner.reduce(sent, root)))

    def reduce_scatter(self, output: Tensor, tensor: Tensor, room: Tensor | None = None) -> Work:
        if not is_half(tensor.dtype):
            return self._inner.reduce_scatter(output, tensor, room)

        def start(sent: Tensor) -> tuple[Tensor, Work]:
            share = torch.empty_like(output, dtype=torch.float32)
            return share, self._inner.reduce_scatter(share, sent)
        return self._cast(tensor, output, start)

    def _cast(self, tensor: Tensor, output: Tensor, start: Callable[[Tensor], tuple[Tensor, Work]]) -> Work:
        """`start` with `tensor` in fp32; what it gives, once its work is done, goes to `output`."""
        if not is_half(tensor.dtype):
            return start(tensor)[1]
        sent = tensor.float()
        summed, work = start(sent)
        taken = sent.nbytes + (0 if summed is sent else summed.nbytes)
        self._live_bytes += taken
        self._peak_bytes = max(self._peak_bytes, self._live_bytes)

        def finish() -> None:
            output.copy_(summed)
            self._live_bytes -= taken
        return Then(work, finish)

    def buffer_bytes(self, operation: Literal["all_reduce", "reduce_scatter"], numel: int, dtype: torch.dtype,
                     device_type: str) -> int:
        copies = numel * 4 if is_half(dtype) else 0
        if operation == "reduce_scatter":
            copies += copies // len(self.ranks)
        return copies + self._inner.buffer_bytes(operation, numel, wide(dtype), device_type)
