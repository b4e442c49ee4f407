"""Collectives over MPI."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ranvier.comm.collectives import ChainedWork, CheckedGroup
from ranvier.comm.mpi_polling import poll_rounds
from ranvier.comm.protocol import Reduction, Work
from ranvier.comm.sum_algorithms import DIRECT_MEMBERS, Library
from ranvier.errors import MessageTimeout, TransportError

if TYPE_CHECKING:
    from mpi4py import MPI

_YIELD_SECONDS = 20e-3
"""Longer than for messages: the other members are about to join a collective, while a sender may still compute."""


_RUN_BYTES = 64 << 10
"""Pieces of shards that are at least so large travel as messages of their own; smaller ones are copied together."""


class MPIWork:
    """A `protocol.Work` that is done when all of `requests`, made by `group`, are; None: not begun."""

    def __init__(self, requests: Sequence[MPI.Request] | None, group: MPIGroup) -> None:
        self._requests, self._group = None if requests is None else list(requests), group

    def begin(self, request: MPI.Request) -> None:
        """The collective has begun."""
        self._requests = [request]

    def done(self) -> bool:
        """See `protocol.Work`. TransportError if MPI reports one."""
        try:
            if self._requests is None:
                self._group.begin_ready()
            return self._requests is not None and bool(self._group.mpi.Request.Testall(self._requests))
        except self._group.mpi.Exception as error:
            raise self._group.convert_error(TransportError, str(error)) from error

    def wait(self) -> None:
        """See `protocol.Work`. MessageTimeout after the group's time limit."""
        if not any(self.done() for _ in poll_rounds(self._group.timeout_seconds, _YIELD_SECONDS)):
            raise self._group.convert_error(MessageTimeout, f"{self._group.timeout_seconds:g} s")


class MPIGroup(CheckedGroup):
    """A `protocol.Group` over one communicator, on the tensors' own memory: with MPI's non-blocking collectives, or, in
    a small group on CPU, with one round of messages from each member to each.

    Args:
        mpi: the module mpi4py.MPI.
        comm: a communicator of the members, with errors returned; freed by the caller after `close`.
        purpose, ranks, index: as for `CheckedGroup`.
        aware: whether MPI accepts addresses on CUDA devices; otherwise tensors are staged through pinned memory.
        timeout_seconds: time limit of a collective.
        direct: exchange directly in small groups.
    """

    def __init__(self, mpi: ModuleType, comm: MPI.Comm, purpose: str, ranks: Sequence[int], index: int, aware: bool,
                 timeout_seconds: float, direct: bool) -> None:
        super().__init__(purpose, ranks, index)
        self._direct = direct and len(ranks) <= DIRECT_MEMBERS
        self.mpi, self.comm, self._aware, self.timeout_seconds = mpi, comm, aware, timeout_seconds
        self._ops = {"sum": mpi.SUM, "max": mpi.MAX, "min": mpi.MIN}
        self._in_flight: list[tuple[MPIWork, tuple[Tensor, ...]]] = []
        self._to_begin: deque[tuple[torch.cuda.Event, MPIWork, Callable[[], MPI.Request]]] = deque()

    def convert_error(self, kind: type[TransportError], value: str) -> TransportError:
        """The error of class `kind` for a collective that failed, with `value` as its cause."""
        return kind("a collective did not end", code="mpi-collective-failed",
                    where=f"group {self.purpose!r} of ranks {list(self.ranks)}", value=value,
                    remedy="See what the other members do; the first error is in that rank's output.")

    def _start(self, call: Callable[..., MPI.Request], output: Tensor, *inputs: Tensor) -> Work:
        """Start `call` on the memory of these tensors, directly or staged through pinned host memory. On a CUDA device
        it begins when what the device does before it has ended, in the order of calls."""
        if not output.is_cuda:
            return self._keep([call(output.numpy(), *(tensor.numpy() for tensor in inputs))], output, *inputs)
        used = [output, *inputs] if self._aware else [
            torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
            for tensor in (output, *inputs)]
        reached = torch.cuda.Event()
        reached.record(torch.cuda.current_stream(output.device))
        work = self._keep(None, *used)
        self._to_begin.append((reached, work, lambda: call(*(
            tensor if self._aware else tensor.numpy() for tensor in used))))
        self.begin_ready()
        return work if self._aware else ChainedWork(work, lambda: output.copy_(used[0], non_blocking=True))

    def begin_ready(self) -> None:
        """Begin the collectives whose tensors the device has made, in the order of calls, on all members alike."""
        while self._to_begin and self._to_begin[0][0].query():
            _, work, call = self._to_begin.popleft()
            work.begin(call())

    def _messages(self, places: Sequence[Iterable[Any]], pieces: Sequence[Iterable[Any]]) -> list[MPI.Request]:
        """Start to send the arrays `pieces[i]` to each other member i, and to receive `places[i]` from it.

        All members call in the same order, so messages match by their order and need no tags.
        """
        requests = []
        for source, destination in self._steps():
            requests += [self.comm.Irecv(place, source) for place in places[source] if place.size]
            requests += [self.comm.Isend(piece, destination) for piece in pieces[destination] if piece.size]
        return requests

    def _exchange_ranges(self, output: Tensor, received: Sequence[slice], tensor: Tensor, sent: Sequence[slice]
                         ) -> Work:
        """Send `tensor[sent[i]]` to member i, and receive `output[received[i]]` from member i."""
        into, of = output.numpy(), tensor.numpy()  # arrays, whose views cost less than a tensor's
        requests = self._messages([[into[one]] for one in received], [[of[one]] for one in sent])
        into[received[self.index]] = of[sent[self.index]]
        return self._keep(requests, output, tensor)

    def _exchanges_pieces(self, shard: Tensor, runs: int) -> bool:
        return self._direct and not shard.is_cuda and shard.nbytes >= runs * _RUN_BYTES

    def _exchange_pieces(self, output: Tensor, tensor: Tensor, *, own: bool) -> Work:
        places, pieces = output.view(torch.uint8).numpy(), tensor.view(torch.uint8).numpy()
        requests = self._messages(list(places), list(pieces))
        if own:
            places[self.index] = pieces[self.index]
        return self._keep(requests, output, tensor)

    def _keep(self, requests: Sequence[MPI.Request] | None, *tensors: Tensor) -> MPIWork:
        """Work for `requests`. The tensors stay alive until MPI has finished, even if the caller drops the work.

        mpi4py's requests keep the memory of sends and receives alive, but not that of in-place collectives.
        """
        self._in_flight = [(work, kept) for work, kept in self._in_flight if not work.done()]
        self._in_flight.append((MPIWork(requests, self), tensors))
        return self._in_flight[-1][0]

    def library(self, device_type: str) -> Library:
        """"mpi", for any device."""
        return "mpi"

    def _all_reduce(self, tensor: Tensor, op: Reduction) -> Work:
        return self._start(lambda out: self.comm.Iallreduce(self.mpi.IN_PLACE, out, self._ops[op]), tensor)

    def _reduce(self, tensor: Tensor, root: int) -> Work:
        if self.index == root:
            return self._start(lambda out: self.comm.Ireduce(self.mpi.IN_PLACE, out, self.mpi.SUM, root), tensor)
        return self._start(lambda out: self.comm.Ireduce(out, None, self.mpi.SUM, root), tensor)

    def _reduce_scatter(self, output: Tensor, tensor: Tensor) -> Work:
        return self._start(lambda out, whole: self.comm.Ireduce_scatter_block(whole, out), output, tensor)

    def _all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        if self._direct:
            members = len(self.ranks)
            return self._exchange_ranges(output, _ranges([tensor.numel()] * members), tensor, [slice(None)] * members)
        return self._start(lambda out, share: self.comm.Iallgather(share, out), output, tensor)

    def _broadcast(self, tensor: Tensor, root: int) -> Work:
        return self._start(lambda out: self.comm.Ibcast(out, root), tensor)

    def _all_to_all(self, output: Tensor, tensor: Tensor, received: list[int], sent: list[int]) -> Work:
        if self._direct:
            return self._exchange_ranges(output, _ranges(received), tensor, _ranges(sent))
        return self._start(lambda out, whole: self.comm.Ialltoallv([whole, sent], [out, received]), output, tensor)


def _ranges(sizes: Sequence[int]) -> list[slice]:
    """Ranges of these sizes, one behind the other."""
    return [slice(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0))]
