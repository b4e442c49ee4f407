"""Point-to-point messages over MPI.

MPI moves data only inside its calls: a message above the eager size is sent when both sides have entered MPI again. So
receives are posted ahead of compute, and `progress`, called at every block boundary, is one `Testsome` over everything
in flight; it progresses collectives as well.
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
from ranvier.comm.message import Message, decode, total_bytes
from ranvier.comm.mpi_polling import poll_rounds
from ranvier.errors import TransportError

if TYPE_CHECKING:
    from mpi4py import MPI


class _Incoming:
    """One incoming edge and its posted receive: of a whole message, or of the rest of one beyond the capacity."""

    def __init__(self, edges: Edges, source: int, comm: MPI.Comm, pinned: bool) -> None:
        self._edges, self.source, self._comm, self._pinned = edges, source, comm, pinned
        self._buffer: Tensor | None = None
        self._whole: Tensor | None = None

    def _empty(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pinned)

    def post(self) -> MPI.Request:
        """Post the next receive."""
        capacity = self._edges.sources[self.source]
        if self._whole is not None:
            return self._comm.Irecv(self._whole[capacity:].numpy(), self.source)
        if self._buffer is None or self._buffer.numel() != capacity:
            self._buffer = self._empty(capacity)
        return self._comm.Irecv(self._buffer.numpy(), self.source)

    def receive(self) -> Message | None:
        """The message of the completed receive; None if it was the first part of a large message.

        A message that fills less than half of the buffer is copied, so that it does not keep the whole buffer alive.
        """
        if self._whole is not None:
            whole, self._whole = self._whole, None
            self._edges.sources[self.source] = whole.numel()
            return decode(whole, self.source)
        wire = self._buffer
        assert wire is not None, "a receive was posted"
        total = total_bytes(wire)
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
    """

    def __init__(self, mpi: ModuleType, comm: MPI.Comm, purpose: str, device: torch.device) -> None:
        self._mpi, self.comm, self._device = mpi, comm, device
        self._edges = Edges(purpose, comm.Get_rank(), comm.Get_size())
        # One list, as Testsome takes one: request i receives for _incoming[i], sends follow. A request of mpi4py keeps
        # the memory of its send alive.
        self._requests: list[MPI.Request] = []
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
        new = [_Incoming(self._edges, source, self.comm, self._device.type == "cuda")
               for source in self._edges.open(sources, destinations, capacity_bytes)]
        with self._lock:
            self._requests[len(self._incoming):len(self._incoming)] = [incoming.post() for incoming in new]
            self._incoming += new

    def send(self, destination: int, message: Message) -> None:
        """See `protocol.Transport`."""
        self._edges.check_open()
        if self.sends_in_flight == 0:  # a gap before it did not delay anything
            self._last_call = time.monotonic()
        parts = self._edges.outgoing(destination, message)
        event = None
        if any(tensor.is_cuda for tensor in message.tensors.values()):  # on their way into pinned memory
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device))
        with self._lock:
            self._copied.append((event, destination, parts))
            self._send_copied()

    def _send_copied(self) -> None:
        """Send what has arrived in host memory, in order."""
        while self._copied and (self._copied[0][0] is None or self._copied[0][0].query()):
            _, destination, parts = self._copied.popleft()
            self._requests += [self.comm.Isend(part.numpy(), destination) for part in parts]

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
                self._requests[place] = self._incoming[place].post()
                if message is not None:
                    self._arrived.append(self._on_device(message))
        if any(place >= receives for place in finished):
            done = set(finished)
            self._requests[receives:] = [request for place, request in enumerate(self._requests)
                                         if place >= receives and place not in done]

    def _on_device(self, message: Message) -> Message:
        if self._device.type == "cpu":
            return message
        return dataclasses.replace(message, tensors={
            name: tensor.to(self._device, non_blocking=True) for name, tensor in message.tensors.items()})

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
