"""Point-to-point messages over MPI.

MPI moves data only inside its calls: a message above the eager size is sent when both sides have entered MPI again. So
receives are posted ahead of compute, and `progress`, called at every block boundary, is one `Testsome` over everything
in flight; it progresses collectives as well.

Tensors of a CUDA device travel in one of two ways; in neither does the host wait for the device.

    MPI takes device addresses    head -> the peer allocates device memory -> tensors, from device to device
    it does not                   head and tensors in pinned memory, from and to which they are copied

What MPI reads or writes has no order with a stream. So a send starts when an event after the copy into its memory has
been reached, and a receive into device memory when the memory's last user is through with it.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ranvier.comm.edges import Edges, invalid_message
from ranvier.comm.message import Message, decode, encode_head, encoded_bytes, pack, tensors_follow, total_bytes
from ranvier.comm.mpi_polling import poll_rounds
from ranvier.errors import TransportError

if TYPE_CHECKING:
    from mpi4py import MPI


def _event(device: torch.device) -> torch.cuda.Event:
    """Reached when the device's current stream has got to this point."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


class _Incoming:
    """One incoming edge and its posted receive: of a whole message, of the rest of one beyond the capacity, or of the
    tensors that follow a head."""

    def __init__(self, edges: Edges, source: int, comm: MPI.Comm, device: torch.device) -> None:
        self._edges, self.source, self._comm, self._device = edges, source, comm, device
        self._buffer: Tensor | None = None
        self._whole: Tensor | None = None
        self._tensors: Tensor | None = None
        self._free: torch.cuda.Event | None = None

    def _empty(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")

    def post(self) -> MPI.Request | None:
        """Post the next receive; None while the device still works in the memory that it would write."""
        capacity = self._edges.sources[self.source]
        if self._tensors is not None:
            if self._free is not None and not self._free.query():
                return None
            self._free = None
            return self._comm.Irecv(self._tensors, self.source)
        if self._whole is not None:
            return self._comm.Irecv(self._whole[capacity:].numpy(), self.source)
        if self._buffer is None or self._buffer.numel() != capacity:
            self._buffer = self._empty(capacity)
        return self._comm.Irecv(self._buffer.numpy(), self.source)

    def receive(self) -> Message | None:
        """The message of the completed receive; None if it was the first part of a large message.

        A message that fills less than half of the buffer is copied, so that it does not keep the whole buffer alive.
        """
        if self._tensors is not None:
            assert self._buffer is not None, "a head was received"
            packed, self._tensors = self._tensors, None
            return decode(self._buffer, self.source, packed)
        if self._whole is not None:
            whole, self._whole = self._whole, None
            self._edges.sources[self.source] = whole.numel()
            return decode(whole, self.source)
        wire = self._buffer
        assert wire is not None, "a receive was posted"
        total = total_bytes(wire)
        if tensors_follow(wire):
            self._tensors = torch.empty(total, dtype=torch.uint8, device=self._device)
            self._free = _event(self._device)
            return None
        if total > wire.numel():
            self._whole = self._empty(total)
            self._whole[:wire.numel()] = wire
            return None
        if total < wire.numel() // 2:
            return decode(self._empty(total).copy_(wire[:total]), self.source)
        self._buffer = None
        return decode(wire, self.source)


class MPITransport:
    """A `protocol.Transport` over one communicator of its own.

    Args:
        mpi: the module mpi4py.MPI.
        comm: a communicator of all ranks, with errors returned; freed by the caller after `close`.
        purpose: names the transport in errors.
        device: where the tensors of received messages go.
        aware: whether MPI accepts addresses on CUDA devices, on all ranks.
    """

    def __init__(self, mpi: ModuleType, comm: MPI.Comm, purpose: str, device: torch.device, aware: bool = False
                 ) -> None:
        self._mpi, self.comm, self._device, self._aware = mpi, comm, device, aware
        self._edges = Edges(purpose, comm.Get_rank(), comm.Get_size())
        # One list, as Testsome takes one: request i receives for _incoming[i], sends follow. A request of mpi4py keeps
        # the memory of its send alive.
        self._requests: list[MPI.Request] = []
        self._unposted: set[int] = set()
        self._copied: deque[tuple[torch.cuda.Event | None, int, list[Tensor]]] = deque()
        self._lock = threading.RLock()
        """Guards all of it, where a thread calls `advance` while the engine's thread waits for something else."""
        self._incoming: list[_Incoming] = []
        self._arrived: deque[Message] = deque()
        self._last_call = time.monotonic()
        self.longest_gap_seconds = 0.0

    @property
    def bytes_sent(self) -> int:
        """See `protocol.Transport`."""
        return self._edges.bytes_sent

    def connect(self, sources: Sequence[int], destinations: Sequence[int], capacity_bytes: int) -> None:
        """See `protocol.Transport`."""
        new = [_Incoming(self._edges, source, self.comm, self._device)
               for source in self._edges.open(sources, destinations, capacity_bytes)]
        with self._lock:
            self._requests[len(self._incoming):len(self._incoming)] = [incoming.post() or self._mpi.REQUEST_NULL
                                                                         for incoming in new]
            self._incoming += new

    def send(self, destination: int, message: Message) -> None:
        """See `protocol.Transport`."""
        self._edges.check_open()
        if self.sends_in_flight == 0:  # a gap before it did not delay anything
            self._last_call = time.monotonic()
        on_device = any(tensor.is_cuda for tensor in message.tensors.values())
        if on_device and self._aware and message.payload_bytes:
            self._edges.count(destination, encoded_bytes(message))
            parts = [encode_head(message), pack(message, self._device)]
        else:
            parts = self._edges.outgoing(destination, message)
        event = _event(self._device) if on_device else None
        with self._lock:
            self._copied.append((event, destination, parts))
            self._send_copied()

    def _send_copied(self) -> None:
        """Send what has arrived in host memory, in order."""
        while self._copied and (self._copied[0][0] is None or self._copied[0][0].query()):
            _, destination, parts = self._copied.popleft()
            self._requests += [self.comm.Isend(part if part.is_cuda else part.numpy(), destination) for part in parts]

    @property
    def sends_in_flight(self) -> int:
        """Number of parts that have not been sent yet."""
        return len(self._requests) - len(self._incoming) + len(self._copied)

    def progress(self) -> None:
        """One Testsome over all receives and sends; it also progresses the collectives of this process.

        TransportError if MPI reports one, or for a message that cannot be decoded.
        """
        self._edges.check_open()
        self.advance()

    def advance(self) -> None:
        """`progress` that also works on a closed transport, for its last sends."""
        with self._lock:
            self._advance()

    def _advance(self) -> None:
        called = time.monotonic()
        self._send_copied()
        for place in list(self._unposted):
            self._post(place)
        try:
            finished = self._mpi.Request.Testsome(self._requests) if self._requests else None
            if not self._requests:
                self.comm.Iprobe()  # any call progresses other transports and collectives
        except self._mpi.Exception as error:
            raise self._convert_error(error) from error
        if finished or self.sends_in_flight:
            self.longest_gap_seconds = max(self.longest_gap_seconds, called - self._last_call)
        self._last_call = called
        if finished:
            self._finish(finished)

    def _finish(self, finished: Sequence[int]) -> None:
        """Queue the messages of finished receives and post the next ones; drop finished sends."""
        receives = len(self._incoming)
        for place in finished:
            if place < receives:
                try:
                    message = self._incoming[place].receive()
                except ValueError as error:
                    raise invalid_message(self._edges.purpose, self._incoming[place].source, str(error)) from error
                self._post(place)
                if message is not None:
                    self._arrived.append(self._on_device(message))
        if any(place >= receives for place in finished):
            done = set(finished)
            self._requests[receives:] = [request for place, request in enumerate(self._requests)
                                         if place >= receives and place not in done]

    def _post(self, place: int) -> None:
        """Post the next receive of an edge, or leave it for later."""
        request = self._incoming[place].post()
        self._requests[place] = self._mpi.REQUEST_NULL if request is None else request
        if request is None:
            self._unposted.add(place)
        else:
            self._unposted.discard(place)

    def _on_device(self, message: Message) -> Message:
        if self._device.type == "cpu":
            return message
        return dataclasses.replace(message, tensors={
            name: tensor if tensor.is_cuda else tensor.to(self._device, non_blocking=True)
            for name, tensor in message.tensors.items()})

    def _convert_error(self, error: Exception) -> TransportError:
        return TransportError("MPI could not carry a message", value=str(error),
                              where=f"transport {self._edges.purpose!r} on rank {self._edges.rank}",
                              remedy="The first error is in another rank's output.")

    def poll(self) -> list[Message]:
        """See `protocol.Transport`."""
        before = -1
        while before != len(self._arrived):
            before = len(self._arrived)
            self.progress()
        messages = list(self._arrived)
        self._arrived.clear()
        return messages

    def wait(self, timeout_seconds: float) -> Message | None:
        """See `protocol.Transport`."""
        for _ in poll_rounds(timeout_seconds):
            if not self._arrived:
                self.progress()
            if self._arrived:
                return self._arrived.popleft()
        return None

    def flush(self, timeout_seconds: float = math.inf) -> bool:
        """See `protocol.Transport`."""
        for _ in poll_rounds(timeout_seconds):
            if not self.sends_in_flight:
                return True
            self.advance()
        return False

    def close(self) -> None:
        """Cancel posted receives and refuse further calls; sends in flight are left to `advance`. Idempotent."""
        if self._edges.closed:
            return
        with self._lock:
            self._close()

    def _close(self) -> None:
        self._edges.closed = True
        # A request is null after an invalid message: no receive was posted behind it.
        for request in filter(None, self._requests[:len(self._incoming)]):
            request.Cancel()
            request.Wait()
        self._requests = self._requests[len(self._incoming):]
        self._incoming = []
