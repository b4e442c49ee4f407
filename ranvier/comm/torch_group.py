"""Collectives through torch.distributed: Gloo for tensors in host memory, NCCL for tensors on CUDA devices."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ranvier.comm.collectives import SAME_CALLS, ChainedWork, CheckedGroup, JointWork
from ranvier.comm.protocol import Reduction, Work
from ranvier.comm.sum_algorithms import DIRECT_MEMBERS
from ranvier.errors import MessageTimeout, TransportError

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # as torch 2.11 calls it
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_OVERDUE_SECONDS = 2.0
_MAX_REPEATED_BYTES = 3 << 19
"""Shards of at most this size are copied once for each of several members, to be sent in one step."""


def require_work(work: dist.Work | None) -> dist.Work:
    """`work` of an operation that this rank takes part in; torch returns None only on ranks outside the group."""
    assert work is not None
    return work


def error_cause(error: Exception) -> str:
    """The first sentence of a Gloo error, without its source location."""
    return str(error).split("] ", 1)[-1].split(". ", 1)[0]


class WaitRegistry:
    """The current waits of this process inside torch, with their start on the monotonic clock.

    torch's own time limits follow the wall clock in some of its builds: if that clock is set back, they never expire.
    A wait that is longer than `timeout_seconds` and a margin is then detected here.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout = timeout_seconds + _OVERDUE_SECONDS
        self._waits: dict[int, tuple[float, str]] = {}
        self._lost: str | None = None

    def lose(self, what: str) -> None:
        """Note that a thread has found a peer gone, which a thread that waits for a device does not notice."""
        self._lost = self._lost or what

    def lost_peer(self) -> str | None:
        """The first peer that was found to be gone; None while all are alive."""
        return self._lost

    def begin(self, what: str) -> None:
        """Record that the calling thread starts to wait for `what`."""
        self._waits[threading.get_ident()] = (time.monotonic(), what)

    def end(self) -> None:
        """Record that the calling thread has stopped waiting."""
        self._waits.pop(threading.get_ident(), None)

    def overdue(self) -> str | None:
        """The wait of a thread that is over its time limit; None if there is no such thread."""
        latest = time.monotonic() - self._timeout
        # list() because other threads may begin and end waits during the iteration
        return next((what for start, what in list(self._waits.values()) if start < latest), None)


class TorchWork:
    """A `protocol.Work`. On CUDA, `wait` makes the current stream wait for the collective, and does not block the host.

    Args:
        work: of torch.
        convert_error: converts torch's error to a TransportError.
        waits: where blocking waits are registered.
        what: the group, in words.
    """

    def __init__(self, work: dist.Work, convert_error: Callable[[RuntimeError], TransportError], waits: WaitRegistry,
                 what: str) -> None:
        self._work, self._convert_error, self._waits, self._what = work, convert_error, waits, what

    def done(self) -> bool:
        """See `protocol.Work`."""
        return self._work.is_completed()

    def wait(self) -> None:
        """See `protocol.Work`."""
        self._waits.begin(self._what)
        try:
            self._work.wait()
        except RuntimeError as error:
            raise self._convert_error(error) from error
        finally:
            self._waits.end()


class TorchGroup(CheckedGroup):
    """A `protocol.Group` over one process group: Gloo for tensors on the host, NCCL for those on CUDA.

    Args:
        process_group: of the members; None for a group of one.
        purpose, ranks, index: as for `CheckedGroup`.
        waits: where blocking waits are registered.
    """

    def __init__(self, process_group: ProcessGroup | None, purpose: str, ranks: Sequence[int], index: int,
                 waits: WaitRegistry) -> None:
        super().__init__(purpose, ranks, index)
        self._process_group, self._waits = process_group, waits
        self._where = f"group {purpose!r} of ranks {list(ranks)}"
        self._free: list[Tensor] = []

    def _start(self, call: Callable[..., dist.Work], *args: object, **kwargs: int) -> Work:
        try:
            work = call(*args, **kwargs, group=self._process_group, async_op=True)
            return TorchWork(work, self._convert_error, self._waits, self._where)
        except RuntimeError as error:
            raise self._convert_error(error) from error

    def _convert_error(self, error: RuntimeError) -> TransportError:
        where, cause = self._where, error_cause(error)
        if "timed out" in cause.lower():
            return MessageTimeout("a collective did not end", code="torch-collective-late", where=where, value=cause,
                                  remedy="Check what the other members do, or raise `--comm.timeout-seconds`. "
                                         + SAME_CALLS)
        return TransportError("a collective failed: a member is gone, too late, or passed another shape",
                              code="collective-failed", where=where, value=cause,
                              remedy="Another rank's error says why; if there is none, the launcher says which rank "
                                     "ended. Resume with `--resume auto`.")

    def _all_reduce(self, tensor: Tensor, op: Reduction) -> Work:
        return self._start(dist.all_reduce, tensor, _OPS[op])

    def _reduce(self, tensor: Tensor, root: int) -> Work:
        return self._start(dist.reduce, tensor, group_dst=root)

    def _reduce_scatter(self, output: Tensor, tensor: Tensor) -> Work:
        return self._start(_REDUCE_SCATTER, output, tensor)

    def _exchanges_pieces(self, shard: Tensor, runs: int) -> bool:
        members = len(self.ranks)
        return runs == 1 and not shard.is_cuda and (
            members == 2 or (members <= DIRECT_MEMBERS and shard.nbytes > _MAX_REPEATED_BYTES))

    def _exchange_pieces(self, output: Tensor, tensor: Tensor, *, own: bool) -> Work:
        # An all-to-all in which each member sends to one other member reads and writes the tensors in place.
        output, tensor, works = output.view(torch.uint8), tensor.view(torch.uint8), list[Work]()
        for source, destination in self._steps():
            received, sent = [0] * len(self.ranks), [0] * len(self.ranks)
            place, piece = output[source, 0], tensor[destination, 0]
            received[source], sent[destination] = len(place), len(piece)
            works.append(self._start(dist.all_to_all_single, place, piece, received, sent))
        if own:
            output[self.index].copy_(tensor[self.index])
        return JointWork(works)

    def _take(self, num_bytes: int) -> Tensor:
        """A buffer of at least this many bytes, to be put back into `_free`: new memory costs more than its copies."""
        buffer = self._free.pop() if self._free else torch.empty(0, dtype=torch.uint8, device="cpu")
        return buffer if len(buffer) >= num_bytes else buffer.new_empty(num_bytes)

    def _all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        members = len(self.ranks)
        if self._exchanges_pieces(tensor, 1):
            return self._exchange_pieces(output.view(members, 1, -1), tensor.expand(members, 1, -1), own=True)
        # Gloo's all-gather is a ring, and each of its steps has to wake a thread. One all-to-all is a single step.
        if not tensor.is_cuda and members <= DIRECT_MEMBERS:
            repeated = self._take(members * tensor.numel())
            sent = repeated[:members * tensor.numel()]
            sent.view(members, -1).copy_(tensor.expand(members, -1))
            return ChainedWork(self._start(dist.all_to_all_single, output, sent), lambda: self._free.append(repeated))
        return self._start(_ALL_GATHER, output, tensor)

    def _broadcast(self, tensor: Tensor, root: int) -> Work:
        return self._start(dist.broadcast, tensor, group_src=root)

    def _all_to_all(self, output: Tensor, tensor: Tensor, received: list[int], sent: list[int]) -> Work:
        return self._start(dist.all_to_all_single, output, tensor, received, sent)

    @property
    def process_group(self) -> ProcessGroup | None:
        """Process group of the members; None for a group of one, and once the group is closed."""
        return self._process_group

    def detach_process_group(self) -> ProcessGroup | None:
        """Close the group. Returns the process group, to be destroyed by the caller, as `GlooTransport` does."""
        self.close()
        process_group, self._process_group = self._process_group, None
        return process_group
