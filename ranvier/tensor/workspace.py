"""Memory that the products on a tensor mesh reuse."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

BUFFERS = 2
"""Buffers of each kind: one is in use while another is filled."""


class Workspace:
    """Memory that products reuse: one buffer for each name and dtype, as large as the largest that was requested.

    The next `take` of a name overwrites the buffer, so the results of a product are never stored in one.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, shape: Sequence[int], like: Tensor) -> Tensor:
        """An uninitialised [*shape] of the dtype and on the device of `like`."""
        size, key = prod(shape), (name, like.dtype)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < size or buffer.device != like.device:
            del buffer  # the smaller one goes first
            self._buffers.pop(key, None)
            buffer = self._buffers[key] = like.new_empty(size)
        return buffer[:size].view(*shape)

    def buffers(self) -> list[Tensor]:
        """All buffers, each flat."""
        return list(self._buffers.values())

    def clear(self) -> None:
        """Give all memory back."""
        self._buffers.clear()

    def take_one(self, number: int, name: str, shape: Sequence[int], like: Tensor) -> Tensor:
        """One of the `BUFFERS` of a name. All of them are as large as the largest requested for any of them."""
        buffer = self._buffers.get((f"{name} {number}", like.dtype))
        if buffer is None or buffer.numel() < prod(shape) or buffer.device != like.device:
            for each in range(BUFFERS):
                self.take(f"{name} {each}", shape, like)
        return self.take(f"{name} {number}", shape, like)

    def sizes(self) -> dict[tuple[str, torch.dtype], int]:
        """Bytes of each buffer."""
        return {key: buffer.numel() * buffer.element_size() for key, buffer in self._buffers.items()}
