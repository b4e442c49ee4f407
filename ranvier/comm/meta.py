"""A group without peers: counts what one member would send and receive, for tensors on the meta device.

Blocks that contain collectives use it to run on the meta device, so that the training code also counts its own cost.
"""

from __future__ import annotations

from typing import Any

from ranvier.comm.collectives import CheckedGroup, CompletedWork
from ranvier.comm.protocol import Work
from ranvier.comm.sum_algorithms import Library


class MetaGroup(CheckedGroup):
    """A `protocol.Group` in which no data moves, but `bytes_received` is counted.

    Args:
        purpose: names the group in errors.
        size: number of members.
        index: the member that it counts for.
        device: type of device whose library is simulated: "cuda" (NCCL) or "cpu" (Gloo).
    """

    def __init__(self, purpose: str, size: int, index: int = 0, *, device: str = "cpu") -> None:
        super().__init__(purpose, range(size), index)
        self._library: Library = "nccl" if device == "cuda" else "gloo"

    def library(self, device_type: str) -> Library:
        """The simulated library, whatever the device: meta tensors have no other."""
        return self._library

    def gather_number(self, number: int) -> list[int]:
        """`number` once for each member."""
        return [number] * len(self.ranks)

    def _nothing(self, *args: Any, **kwargs: Any) -> Work:
        """No data moves."""
        return CompletedWork()

    _all_reduce = _reduce = _reduce_scatter = _all_gather = _broadcast = _all_to_all = _nothing
