"""MPI through mpi4py: on CPU the fastest way between processes.

MPI moves data only inside its calls: a message above the eager size leaves when both sides have entered MPI again. So
receives are posted ahead of compute, and one `Testsome` over everything under way is what `progress` does at every
block boundary; it moves collectives, too. MPI's blocking calls spin and take the core from the ranks that they wait
for, so nothing here blocks: whoever waits tests, and sleeps in between.

Whoever initialises MPI finalises it: this backend, unless the program (or its `import mpi4py.MPI`) has done so before.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ranvier.comm.collectives import CheckedGroup, Then, check_subset, place_in
from ranvier.comm.edges import Edges, no_message
from ranvier.comm.message import Message, decode, total_bytes
from ranvier.comm.protocol import Reduction, Work
from ranvier.comm.ways import DIRECT_MEMBERS, Library
from ranvier.errors import LaunchError, MessageTimeout, TransportError

if TYPE_CHECKING:
    from mpi4py import MPI

_YIELD_SECONDS = 100e-6
_YIELD_IN_COLLECTIVES_SECONDS = 20e-3
"""A collective waits for ranks that are about to join it, a message for one that may compute for long."""
_SLEEP_SECONDS = 200e-6
_CLOSE_SECONDS = 10.0


def _rounds(timeout_seconds: float, yield_seconds: float = _YIELD_SECONDS) -> Iterator[None]:
    """Turns of a polling loop until the time is over; at least one.

    At first the core is offered to other ranks between turns; then each sleep is a quarter of the time waited so far,
    so that short waits end soon after they could, and long ones cost nothing.
    """
    started = time.monotonic()
    while True:
        yield
        waited = time.monotonic() - started
        if waited >= timeout_seconds:
            return
        if waited < yield_seconds:
            os.sched_yield()
        else:
            time.sleep(min(timeout_seconds - waited, waited / 4, _SLEEP_SECONDS))


def _load_mpi() -> tuple[Any, bool]:
    """mpi4py's module, initialised, and whether that was done here."""
    try:
        if "mpi4py.MPI" not in sys.modules:
            import mpi4py
            mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError("cannot be loaded", where="comm.transport mpi: mpi4py", value=str(error).splitlines()[0],
                          remedy="pip install 'ranvier[mpi]', or set --comm.transport torch.") from error
    if MPI.Is_finalized():
        raise LaunchError("is finalised, and MPI starts once in a process", where="comm.transport mpi",
                          remedy="Make one MPIBackend per process and close it last.")
    owns = not MPI.Is_initialized()
    if owns:
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    return MPI, owns


def _cuda_aware(mpi: MPI) -> bool:
    """Whether the library says that it takes addresses on CUDA devices (MPI 4.1's way, or Open MPI's and MPICH's)."""
    if "cuda" in (mpi.COMM_WORLD.Get_info().Get("mpi_memory_alloc_kinds") or ""):
        return True
    query = getattr(ctypes.CDLL(mpi.__file__), "MPIX_Query_cuda_support", None)
    return query is not None and bool(query())


class MPIBackend:
    """One rank's access to the others through MPI; rank and size are those of MPI's world.

    A collective that takes longer than `timeout_seconds` fails. comm: the ranks, if not all; freed with the backend.
    """

    name: Literal["mpi"] = "mpi"

    def __init__(self, device: torch.device, timeout_seconds: float = 300.0, *, comm: MPI.Comm | None = None) -> None:
        self._mpi, owns = _load_mpi()
        self._owns = owns and comm is None
        self._device, self._timeout = device, timeout_seconds
        self._world = self._communicator(comm or self._mpi.COMM_WORLD.Dup())
        self.rank, self.size = self._world.Get_rank(), self._world.Get_size()
        self._aware = device.type == "cuda" and _cuda_aware(self._mpi)
        self._transports: list[MPITransport] = []
        self._groups: list[MPIGroup] = []
        self._closed = False

    def _communicator(self, comm: MPI.Comm) -> MPI.Comm:
        comm.Set_errhandler(self._mpi.ERRORS_RETURN)
        return comm

    def transport(self, purpose: str) -> MPITransport:
        self._meet(f"transport {purpose!r}")
        comm = self._communicator(self._world.Dup())
        self._transports.append(MPITransport(self._mpi, comm, purpose, self._device))
        return self._transports[-1]

    def group(self, purpose: str, partition: Sequence[Sequence[int]]) -> MPIGroup:
        ranks, index = place_in(partition, self.rank, self.size, purpose)
        self._meet(f"group {purpose!r}")
        comm = self._communicator(self._world.Split(min(ranks), index))
        self._groups.append(MPIGroup(self._mpi, comm, purpose, ranks, index, self._aware, self._timeout,
                                     direct=self._device.type == "cpu"))
        return self._groups[-1]

    def subset(self, count: int) -> MPIBackend | None:
        check_subset(count, self.size)
        self._meet(f"subset of {count}")
        member = self.rank < count
        comm = self._world.Split(0 if member else self._mpi.UNDEFINED, self.rank)
        return MPIBackend(self._device, self._timeout, comm=comm) if member else None

    def _meet(self, what: str) -> None:
        """Return when all ranks are about to make `what`: MPI's own call would wait without end for one that has
        stopped, and take the cores of those that are still computing. MessageTimeout when one does not come."""
        if not self._until(self._world.Ibarrier().Test, self._timeout):
            raise MessageTimeout("not all ranks have come to make it", where=f"{what} on rank {self.rank}",
                                 value=f"{self._timeout:g} s",
                                 remedy="See what the others do, or raise --comm.timeout-seconds.")

    def abort(self, code: int) -> None:
        """End all ranks of MPI's world at once. Does not return."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._mpi.COMM_WORLD.Abort(code)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._until(lambda: not any(transport.sends_under_way for transport in self._transports), _CLOSE_SECONDS)
        together = self._world.Ibarrier()
        if not self._until(together.Test, 2 * _CLOSE_SECONDS):
            raise MessageTimeout("not all ranks have closed", where=f"MPI backend of rank {self.rank}",
                                 value=f"{2 * _CLOSE_SECONDS:g} s", remedy="Close the backend on every rank.")
        for part in (*self._transports, *self._groups):
            part.close()
            part.comm.Free()
        self._world.Free()
        if self._owns:
            self._mpi.Finalize()

    def _until(self, condition: Callable[[], bool], timeout_seconds: float) -> bool:
        """Keep messages moving until `condition`, so that a peer's last sends leave it; whether it came in time."""
        for _ in _rounds(timeout_seconds):
            if condition():
                return True
            for transport in self._transports:
                transport.advance()
        return False


class _Incoming:
    """One incoming edge: its posted receive, of a message that fits or of the rest of one that does not."""

    def __init__(self, edges: Edges, source: int, comm: MPI.Comm, pinned: bool) -> None:
        self._edges, self.source, self._comm, self._pinned = edges, source, comm, pinned
        self._buffer: Tensor | None = None
        self._whole: Tensor | None = None

    def _empty(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pinned)

    def post(self) -> MPI.Request:
        capacity = self._edges.sources[self.source]
        if self._whole is not None:
            return self._comm.Irecv(self._whole[capacity:].numpy(), self.source)
        if self._buffer is None or self._buffer.numel() != capacity:
            self._buffer = self._empty(capacity)
        return self._comm.Irecv(self._buffer.numpy(), self.source)

    def arrived(self) -> Message | None:
        """The message that the completed receive has brought; None when it was the first part of a large one.

        A message that fills less than half of the buffer is copied out of it, so that it keeps no more alive.
        """
        if self._whole is not None:
            wire, self._whole = self._whole, None
            self._edges.sources[self.source] = wire.numel()
            return decode(wire, self.source)
        wire, total = self._buffer, total_bytes(self._buffer)
        if total > wire.numel():
            self._whole = self._empty(total)
            self._whole[:wire.numel()] = wire
            return None
        if total < wire.numel() // 2:
            return decode(wire[:total].clone(), self.source)
        self._buffer = None
        return decode(wire, self.source)


class MPITransport:
    """A `protocol.Transport` over one communicator of its own."""

    def __init__(self, mpi: MPI, comm: MPI.Comm, purpose: str, device: torch.device) -> None:
        self._mpi, self.comm, self._device = mpi, comm, device
        self._edges = Edges(purpose, comm.Get_rank(), comm.Get_size())
        # Parallel lists, receives first: mpi4py wants all requests in one. A send's part is kept by its request.
        self._requests: list[MPI.Request] = []
        self._incoming: list[_Incoming] = []
        self._arrived: deque[Message] = deque()
        self._last_call = time.monotonic()
        self.longest_gap_seconds = 0.0

    @property
    def bytes_sent(self) -> int:
        return self._edges.bytes_sent

    def connect(self, sources: Sequence[int], destinations: Sequence[int], capacity_bytes: int) -> None:
        new = [_Incoming(self._edges, source, self.comm, self._device.type == "cuda")
               for source in self._edges.open(sources, destinations, capacity_bytes)]
        self._requests[len(self._incoming):len(self._incoming)] = [incoming.post() for incoming in new]
        self._incoming += new

    def send(self, destination: int, message: Message) -> None:
        self._edges.check_open()
        if self.sends_under_way == 0:
            self._last_call = time.monotonic()
        for part in self._edges.outgoing(destination, message):
            self._requests.append(self.comm.Isend(part.numpy(), destination))

    @property
    def sends_under_way(self) -> int:
        return len(self._requests) - len(self._incoming)

    def progress(self) -> None:
        """One Testsome over all receives and sends; it moves the collectives of this process, too."""
        self._edges.check_open()
        self.advance()

    def advance(self) -> None:
        """`progress`, also for the last sends of a closed transport."""
        called = time.monotonic()
        try:
            finished = self._mpi.Request.Testsome(self._requests) if self._requests else None
            if not self._requests:
                self.comm.Iprobe()
        except self._mpi.Exception as error:
            raise self._broken(error) from error
        if finished or self.sends_under_way:
            self.longest_gap_seconds = max(self.longest_gap_seconds, called - self._last_call)
        self._last_call = called
        if finished:
            self._take(finished)

    def _take(self, finished: Sequence[int]) -> None:
        """Keep the messages of finished receives and post the next ones; forget finished sends."""
        receives = len(self._incoming)
        for place in finished:
            if place < receives:
                try:
                    message = self._incoming[place].arrived()
                except ValueError as error:
                    raise no_message(self._edges.purpose, self._incoming[place].source, str(error)) from error
                self._requests[place] = self._incoming[place].post()
                if message is not None:
                    self._arrived.append(self._on_device(message))
        if any(place >= receives for place in finished):
            gone = set(finished)
            self._requests[receives:] = [request for place, request in enumerate(self._requests)
                                         if place >= receives and place not in gone]

    def _on_device(self, message: Message) -> Message:
        if self._device.type == "cpu":
            return message
        return dataclasses.replace(message, tensors={
            name: tensor.to(self._device, non_blocking=True) for name, tensor in message.tensors.items()})

    def _broken(self, error: Exception) -> TransportError:
        return TransportError("MPI could not carry a message", value=str(error),
                              where=f"transport {self._edges.purpose!r} on rank {self._edges.rank}",
                              remedy="The first error is in another rank's output.")

    def poll(self) -> list[Message]:
        before = -1
        while before != len(self._arrived):
            before = len(self._arrived)
            self.progress()
        messages = list(self._arrived)
        self._arrived.clear()
        return messages

    def wait(self, timeout_seconds: float) -> Message | None:
        for _ in _rounds(timeout_seconds):
            if not self._arrived:
                self.progress()
            if self._arrived:
                return self._arrived.popleft()
        return None

    def flush(self, timeout_seconds: float = math.inf) -> bool:
        for _ in _rounds(timeout_seconds):
            if not self.sends_under_way:
                return True
            self.advance()
        return False

    def close(self) -> None:
        if self._edges.closed:
            return
        self._edges.closed = True
        for request in filter(None, self._requests[:len(self._incoming)]):  # none is posted behind what was no message
            request.Cancel()
            request.Wait()
        self._requests = self._requests[len(self._incoming):]
        self._incoming = []


class MPIWork:
    """A `protocol.Work` around requests that end together."""

    def __init__(self, requests: Sequence[MPI.Request], group: MPIGroup) -> None:
        self._requests, self._group = list(requests), group

    def done(self) -> bool:
        try:
            return self._group.mpi.Request.Testall(self._requests)
        except self._group.mpi.Exception as error:
            raise self._group.broken(TransportError, str(error)) from error

    def wait(self) -> None:
        if not any(self.done() for _ in _rounds(self._group.timeout_seconds, _YIELD_IN_COLLECTIVES_SECONDS)):
            raise self._group.broken(MessageTimeout, f"{self._group.timeout_seconds:g} s")


class MPIGroup(CheckedGroup):
    """A `protocol.Group` over one communicator, on the tensors' own memory: with MPI's non-blocking collectives, or, in
    a small group on CPU, with one round of messages from each member to each."""

    def __init__(self, mpi: MPI, comm: MPI.Comm, purpose: str, ranks: Sequence[int], index: int, aware: bool,
                 timeout_seconds: float, direct: bool) -> None:
        super().__init__(purpose, ranks, index)
        self._direct = direct and len(ranks) <= DIRECT_MEMBERS
        self.mpi, self.comm, self._aware, self.timeout_seconds = mpi, comm, aware, timeout_seconds
        self._ops = {"sum": mpi.SUM, "max": mpi.MAX, "min": mpi.MIN}
        self._under_way: list[tuple[MPIWork, tuple[Tensor, ...]]] = []

    def broken(self, kind: type[TransportError], value: str) -> TransportError:
        return kind("a collective did not end", where=f"group {self.purpose!r} of ranks {list(self.ranks)}",
                    value=value, remedy="See what the other members do; the first error is in that rank's output.")

    def _start(self, call: Callable[..., MPI.Request], output: Tensor, *inputs: Tensor) -> Work:
        """`call` on the memory of these tensors: as it is, or staged through pinned memory of the host."""
        if not output.is_cuda:
            return self._keep([call(output.numpy(), *(tensor.numpy() for tensor in inputs))], output, *inputs)
        if self._aware:
            torch.cuda.current_stream(output.device).synchronize()
            return self._keep([call(output, *inputs)], output, *inputs)
        staged = [torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor) for tensor in (output, *inputs)]
        return Then(self._keep([call(*(tensor.numpy() for tensor in staged))], *staged),
                    lambda: output.copy_(staged[0]))

    def _exchange(self, output: Tensor, received: Sequence[int], pieces: Sequence[Tensor]) -> Work:
        """`pieces[i]` goes to member i, and what member i sends, of `received[i]` elements, comes to its place in
        `output`. Members call in the same order, so that messages meet by their order alone."""
        places, requests = output.split(list(received)), []
        for step in range(1, len(self.ranks)):
            source, destination = (self.index - step) % len(self.ranks), (self.index + step) % len(self.ranks)
            if places[source].numel():
                requests.append(self.comm.Irecv(places[source].numpy(), source))
            if pieces[destination].numel():
                requests.append(self.comm.Isend(pieces[destination].numpy(), destination))
        places[self.index].copy_(pieces[self.index])
        return self._keep(requests, output, *pieces)

    def _keep(self, requests: Sequence[MPI.Request], *tensors: Tensor) -> MPIWork:
        """The requests as work. Their memory stays alive until MPI has done with it, even if the caller forgets both.

        mpi4py's requests keep the memory of sends and receives, but not that of collectives in place.
        """
        self._under_way = [(work, kept) for work, kept in self._under_way if not work.done()]
        self._under_way.append((MPIWork(requests, self), tensors))
        return self._under_way[-1][0]

    def library(self, device_type: str) -> Library:
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
            return self._exchange(output, [tensor.numel()] * members, [tensor] * members)
        return self._start(lambda out, share: self.comm.Iallgather(share, out), output, tensor)

    def _broadcast(self, tensor: Tensor, root: int) -> Work:
        return self._start(lambda out: self.comm.Ibcast(out, root), tensor)

    def _all_to_all(self, output: Tensor, tensor: Tensor, received: list[int], sent: list[int]) -> Work:
        if self._direct:
            return self._exchange(output, received, tensor.split(sent))
        return self._start(lambda out, whole: self.comm.Ialltoallv([whole, sent], [out, received]), output, tensor)
