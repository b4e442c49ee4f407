"""A group whose members exist in name only: what one of them would send and receive, for tensors without storage.

Blocks that contain collectives run on the meta device with it, so that their cost is counted by the code that runs.
"""

from __future__ import annotations

from torch import Tensor

from ranvier.comm.collectives import CheckedGroup, Finished
from ranvier.comm.protocol import Reduction, Work
from ranvier.comm.ways import Library


class MetaGroup(CheckedGroup):
    """A `protocol.Group` of `size` members on such devices, seen by member `index`. Nothing moves; `bytes_received` and
    `peak_buffer_bytes` count."""

    def __init__(self, purpose: str, size: int, index: int = 0, *, device: str = "cpu") -> None:
        super().__init__(purpose, range(size), index)
        self._library: Library = "nccl" if device == "cuda" else "gloo"
        self._live_bytes = 0
        self.peak_buffer_bytes = 0
        """The most that sums have worked in at once since `reset_peak`, beside the callers' tensors."""

    def reset_peak(self) -> None:
        self.peak_buffer_bytes = self._live_bytes

    def library(self, device_type: str) -> Library:
        return self._library

    def _new(self, like: Tensor, *shape: int) -> Tensor:
        buffer = super()._new(like, *shape)
        self._live_bytes += buffer.nbytes
        self.peak_buffer_bytes = max(self.peak_buffer_bytes, self._live_bytes)
        return buffer

    def _let_go(self, buffer: Tensor) -> None:
        self._live_bytes -= buffer.nbytes

    def gather_number(self, number: int) -> list[int]:
        return [number] * len(self.ranks)

    def _all_reduce(self, tensor: Tensor, op: Reduction) -> Work:
        return Finished()

    def _reduce(self, tensor: Tensor, root: int) -> Work:
        return Finished()

    def _reduce_scatter(self, output: Tensor, tensor: Tensor) -> Work:
        return Finished()

    def _all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        return Finished()

    def _broadcast(self, tensor: Tensor, root: int) -> Work:
        return Finished()

    def _all_to_all(self, output: Tensor, tensor: Tensor, received: list[int], sent: list[int]) -> Work:
        return Finished()
