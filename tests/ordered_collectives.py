"""Collectives of one rank without peers, for the detector of races: which agent accesses which memory, and when.

A collective runs on its own agent, like an NCCL kernel or a thread of Gloo: after all earlier work of its caller's
stream (for host memory, of its caller), and before only what waits for it. Two collectives of the same group are not
ordered either, since `protocol.Group` promises no order. Peers send what this rank sends, or zeros.

    with OrderedCuda() as cuda:
        world = World(backend=LoneBackend(cuda, size=2), store=LoneStore(), ...)
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ranvier.comm import torch_group
from ranvier.comm.collectives import locate_in_partition
from ranvier.comm.inprocess import InProcessWorld
from ranvier.comm.torch_group import TorchGroup, TorchWork, WaitRegistry
from tests.stream_order import ROOT, Clock, OrderedCuda, Site, join


class LoneStore(dist.HashStore):
    """A store in which the peers close each engine as soon as this rank does."""

    def check(self, keys: list[str]) -> bool:
        """Whether the store has the keys."""
        return all(key.startswith("ranvier/closing/") for key in keys) or super().check(keys)


def waiting() -> set[Site]:
    """The waits in progress: the innermost call that is not a wait itself, and the waits that it called."""
    found, frame = set[Site](), sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(f"{ROOT}/"):
            found.add((str(Path(path).relative_to(ROOT)), frame.f_lineno, 0))
            if frame.f_code.co_name not in ("wait", "done"):
                break
        frame = frame.f_back
    return found


class _Collective:
    """The work that torch returns for a collective."""

    def __init__(self, cuda: OrderedCuda, reads: list[Tensor], writes: list[Tensor]) -> None:
        self._cuda, (first, *_) = cuda, (*writes, *reads)
        self._index = cuda.place(first)
        self._clock = Clock(cuda.host)
        if self._index is not None:
            join(self._clock, cuda.current_stream(self._index).clock)
        self._clock[self] = 1
        for tensor, written in [*((one, False) for one in reads), *((one, True) for one in writes)]:
            if cuda.place(tensor) is None:
                cuda.follow(tensor)
            cuda.access(tensor, self, self._clock, writes=written)
            cuda.keep_for(tensor, self)  # torch keeps a collective's tensors alive

    def wait(self) -> None:
        here = waiting()
        self._cuda.sites |= here
        if self._cuda.left_out not in here:
            join(self._cuda.host if self._index is None else self._cuda.current_stream(self._index).clock, self._clock)

    def is_completed(self) -> bool:
        return False


class LoneGroup(TorchGroup):
    """One member of a group."""

    def __init__(self, cuda: OrderedCuda, purpose: str, ranks: tuple[int, ...], index: int) -> None:
        super().__init__(None, purpose, ranks, index, WaitRegistry(1.0))
        self._cuda = cuda

    def _start(self, call: Any, *args: Any, group_src: int = 0, group_dst: int = 0) -> TorchWork:
        output, inputs = args[0], [one for one in args[1:2] if isinstance(one, Tensor)]
        reads = [output] if call is dist.broadcast and group_src == self.index else []
        collective = _Collective(self._cuda, [*inputs, *reads], [] if reads else [output])
        with _disable_current_modes():
            self._move(call, output, *inputs)
        return TorchWork(collective, self._convert_error, self._waits, self._where)

    def _move(self, call: Any, output: Tensor, source: Tensor | None = None) -> None:
        if source is None:  # members have the same value, or send zeros
            return
        if call is torch_group._REDUCE_SCATTER:
            output.copy_(source.chunk(len(self.ranks))[self.index])
        elif call is torch_group._ALL_GATHER or output.numel() == source.numel():
            output.copy_(source.repeat(output.numel() // source.numel()))
        else:
            output.zero_()


class LoneBackend:
    """A `protocol.Backend` of one rank of `size`; the others do not exist."""

    name = "torch"

    def __init__(self, cuda: OrderedCuda, size: int, rank: int = 0) -> None:
        self.rank, self.size, self._cuda = rank, size, cuda
        self._world = InProcessWorld(size).backend(rank)

    def group(self, purpose: str, partition: Any) -> LoneGroup:
        ranks, index = locate_in_partition(partition, self.rank, self.size, purpose)
        return LoneGroup(self._cuda, purpose, ranks, index)

    def transport(self, purpose: str, *, on_host: bool = False) -> Any:
        return self._world.transport(purpose, on_host=on_host)

    def abort(self, code: int) -> None:
        raise AssertionError(f"the rank aborts with {code}")

    def close(self) -> None:
        pass
