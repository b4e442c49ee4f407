"""Point-to-point messages over MPI.

MPI moves data only inside its calls: a message above the eager size is sent when both sides have entered MPI again. So
receives are posted ahead of compute, and `progress`, called at every block boundary, is one `Testsome` over everything
in flight; it progresses collectives as well.

Tensors of a CUDA device are sent in one of two ways; in neither does the host wait for the device.

    MPI takes device addresses    head -> the peer allocates device memory -> tensors, from device to device
    it does not                   head and tensors in pinned memory, from and to which they are copied

MPI's reads and writes are not ordered with a stream. So a send starts when an event after the copy into its memory has
been reached, and a receive into device memory when the memory's last user has finished with it.
"""

from __future__ import annotations

import dataclasses
import math
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ranvier.comm.edges import EdgesOfRank, invalid_message
from ranvier.comm.message import Message, decode, encode_head, encoded_bytes, pack, read_head
from ranvier.errors import TransportError

if TYPE_CHECKING:
    from mpi4py import MPI


def _event(device: torch.device) -> torch.cuda.Event:
    """An event at the current point of the device's current stream."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


class _Incoming:
    """One incoming edge and its posted receive: of a complete message, of the rest of a message beyond the capacity, or
    of the tensors that follow a head."""

    def __init__(self, edges: EdgesOfRank, source: int, comm: MPI.Comm, device: torch.device) -> None:
        self._edges, self.source, self._comm, self._device = edges, source, comm, device
        self._buffer: Tensor | None = None
        self._whole: Tensor | None = None
        self._tensors: Tensor | None = None
        self._free: torch.cuda.Event | None = None

    def _empty(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")

    def post(self) -> MPI.Request | None:
        """Post the next receive; None while the device still uses the memory that it would write."""
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
        head = read_head(wire)
        total = head.total
        if self._device.type == "cuda" and head.tensors_follow:
            self._tensors = torch.empty(total, dtype=torch.uint8, device=self._device)
            self._free = _event(self._device)
            return None
        if total > wire.numel():
            self._whole = self._empty(total)
            self._whole[:wire.numel()] = wire
            return None
        if total < wire.numel() // 2:
            return decode(self._empty(total).copy_(wire[:total]), self.source, head=head)
        self._buffer = None
        return decode(wire, self.source, head=head)


class MPITransport(EdgesOfRank):
    """A `protocol.Transport` over its own communicator.

    Args:
        mpi: the module mpi4py.MPI.
        comm: a communicator of all ranks, with errors returned; freed by the caller after `close`.
        purpose: names the transport in errors.
        device: where the tensors of received messages go.
        aware: whether MPI accepts addresses on CUDA devices, on all ranks.
    """

    needs_progress = True

    def __init__(self, mpi: ModuleType, comm: MPI.Comm, purpose: str, device: torch.device, aware: bool = False
                 ) -> None:
        super().__init__(purpose, comm.Get_rank(), comm.Get_size())
        self._mpi, self.comm, self._device, self._aware = mpi, comm, device, aware
        self._receives: list[MPI.Request] = []  # number i belongs to _incoming[i]
        self._unposted: set[int] = set()
        self._sends: list[tuple[MPI.Request, Tensor]] = []  # with the memory that is sent
        self._sent: list[tuple[MPI.Request, Tensor]] = []  # which only the engine's thread may free
        self._copied: deque[tuple[torch.cuda.Event | None, int, list[Tensor]]] = deque()
        self._lock = threading.RLock()
        """Guards sends, since a thread calls `advance_sends` while the engine's thread waits for something else. Code
        that holds it must not allocate or free device memory: that may wait for the device, and the device for a send.
        """
        self._incoming: list[_Incoming] = []
        self._arrived: deque[Message] = deque()
        self._last_call = time.monotonic()
        self.longest_gap_seconds = 0.0

    def connect(self, sources: Sequence[int], destinations: Sequence[int], capacity_bytes: int) -> None:
        """See `protocol.Transport`."""
        new = [_Incoming(self, source, self.comm, self._device)
               for source in self.open(sources, destinations, capacity_bytes)]
        self._receives += [incoming.post() or self._mpi.REQUEST_NULL for incoming in new]
        self._incoming += new

    def send(self, destination: int, message: Message) -> None:
        """See `protocol.Transport`."""
        self.check_open()
        if self.sends_in_flight == 0:  # a gap before it did not delay anything
            self._last_call = time.monotonic()
        on_device = self._device.type == "cuda" and any(tensor.is_cuda for tensor in message.tensors.values())
        if on_device and self._aware and message.payload_bytes:
            self.count(destination, encoded_bytes(message))
            parts = [encode_head(message), pack(message, self._device)]
        else:
            parts = self.outgoing(destination, message)
        event = _event(self._device) if on_device else None
        with self._lock:
            self._copied.append((event, destination, parts))
            self._send_copied()

    def _send_copied(self) -> None:
        """Send the messages that have arrived in host memory, in order."""
        while self._copied and (self._copied[0][0] is None or self._copied[0][0].query()):
            _, destination, parts = self._copied.popleft()
            self._sends += [(self.comm.Isend(part if part.is_cuda else part.numpy(), destination), part)
                            for part in parts]

    @property
    def sends_in_flight(self) -> int:
        """Number of parts that have not been sent yet."""
        return len(self._sends) + len(self._copied)

    def progress(self) -> None:
        """One Testsome over all receives and sends; it also progresses the collectives of this process.

        TransportError if MPI reports one, or for a message that cannot be decoded.
        """
        if self.closed:
            self.check_open()
        self.advance()

    def advance(self) -> None:
        """`progress` that also works on a closed transport, for its last sends."""
        for place in list(self._unposted) if self._unposted else ():
            self._post(place)
        finished = self._test(self._receives)
        if self._sent:
            with self._lock:
                sent, self._sent = self._sent, []
            del sent  # and what was sent is freed
        if finished:
            self._finish(finished)

    def advance_sends(self) -> None:
        """`advance` for a thread other than the engine's; leaves arrived messages to the engine's thread."""
        self._test([])

    def _test(self, receives: Sequence[MPI.Request]) -> list[int]:
        """One Testsome, of these receives and all sends; returns the places of receives that have finished."""
        called, count = time.monotonic(), len(receives)
        with self._lock:
            if self._copied:
                self._send_copied()
            requests = [*receives, *[request for request, _ in self._sends]] if self._sends else receives
            try:
                found = self._mpi.Request.Testsome(requests) if requests else None
                if not requests:
                    self.comm.Iprobe()  # any call progresses other transports and collectives
            except self._mpi.Exception as error:
                raise self._convert_error(error) from error
            if (found or self._sends or self._copied) and called - self._last_call > self.longest_gap_seconds:
                self.longest_gap_seconds = called - self._last_call
            self._last_call = called
            if not found:
                return []
            finished = set(found)
            self._sent += [send for place, send in enumerate(self._sends, count) if place in finished]
            self._sends = [send for place, send in enumerate(self._sends, count) if place not in finished]
        return sorted(place for place in finished if place < count)

    def _finish(self, finished: Sequence[int]) -> None:
        """Queue the messages of finished receives, and post the next ones."""
        for place in finished:
            try:
                message = self._incoming[place].receive()
            except ValueError as error:
                raise invalid_message(self.purpose, self._incoming[place].source, str(error)) from error
            self._post(place)
            if message is not None:
                self._arrived.append(self._on_device(message))

    def _post(self, place: int) -> None:
        """Post the next receive of an edge, or leave it for later."""
        request = self._incoming[place].post()
        self._receives[place] = self._mpi.REQUEST_NULL if request is None else request
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
        return TransportError("MPI could not carry a message", code="mpi-transport-failed", value=str(error),
                              where=f"transport {self.purpose!r} on rank {self.rank}",
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
        if self.closed:
            return
        self.closed = True
        # A request is null after an invalid message: no receive was posted after it.
        for request in filter(None, self._receives):
            request.Cancel()
            request.Wait()
        self._receives, self._incoming = [], []
        self._unposted.clear()


# --- polling ----------------------------------------------------------------------------------------------------------

# Polling for MPI, whose blocking calls spin and take the core from the ranks that they wait for.


_YIELD_SECONDS = 100e-6
_SLEEP_SECONDS = 200e-6


def poll_rounds(timeout_seconds: float, yield_seconds: float = _YIELD_SECONDS) -> Iterator[None]:
    """Iterations of a polling loop until the time is over; at least one.

    For the first `yield_seconds` the core is offered to other processes between iterations. After that each sleep is a
    quarter of the time waited so far, at most 200 us: short waits end soon after they could, and long ones cost little.
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
