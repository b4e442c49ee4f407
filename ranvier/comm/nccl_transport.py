"""Messages with tensors on CUDA devices: headers are sent over Gloo, tensors over NCCL.

    sender                                              receiver
                                                        1 announces its free receive buffers (slots)
    2 packs the tensors into one device buffer
    3 when that has ended, and there is a slot: a       4 a thread takes the announcement and posts the receive into
      thread posts the send, on the edge's own            that slot, on the edge's own stream
      stream, and announces it over Gloo                5 when NCCL says that it is complete: copies it out of the slot
                                                        6 when that copy has ended: announces the slot again

An NCCL send or receive is a kernel that occupies its device until both sides have posted it, and any wait for the full
device (cudaFree, the first use of a kernel, `torch.cuda.synchronize`) waits for it, too. A rank in such a wait posts
nothing. So a deadlock is ruled out as follows (`benchmarks.gpu.models.nccl` tries random waits):

  - a send is posted when its data and its slot are available, a receive when its send has been posted: neither ever
    waits for other work, such as an earlier collective, or occupies the device for longer than the transfer
  - a receive is posted by a thread that only reacts to messages of Gloo, and a send by that thread or by one that waits
    for its data. These threads never take the lock of torch's allocator, for which they would wait after a cudaFree:
    they neither allocate nor free device memory, and NCCL gets memory that the allocator does not track
    (`_as_foreign_memory`)

Each directed edge has its own communicator and stream, so that no edge waits for another. torch makes one communicator
per pair of ranks and process group: one process group carries the edges to higher ranks, another those to lower ranks.
A message larger than a slot is sent in parts, and slots grow to its size when they are next free.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import dlpack

from ranvier.comm.edges import invalid_message
from ranvier.comm.message import Message, MessageKind, decode, encode_head, encoded_bytes, pack, read_head
from ranvier.comm.torch_group import require_work
from ranvier.errors import TransportError

if TYPE_CHECKING:
    from ranvier.comm.gloo_transport import GlooTransport

SLOTS = 2
"""Receive buffers of an edge: one is filled while the other is copied out."""
_HEAD = "ranvier: head of a message on CUDA"
_PART = "ranvier: slot, start and stop of a part"
_SLOT = "ranvier: free slot and its bytes"
_MIN_SLOT_BYTES = 1 << 16
_HOST_BYTES = 1 << 16
_POLL_SECONDS = 50e-6
_CLOSE_SECONDS = 0.2
_left_behind: list[object] = []
"""Work that NCCL had not finished when its transport was closed after an error: its memory is never reused."""


def _as_foreign_memory(buffer: Tensor) -> Tensor:
    """The same memory as foreign memory, which keeps `buffer` alive. torch informs its allocator of the streams on
    which NCCL sends and receives (`record_stream`), except for memory that is not the allocator's own."""
    return dlpack.from_dlpack(dlpack.to_dlpack(buffer))  # type: ignore[attr-defined]  # torch documents it


@dataclass(eq=False)
class _Outgoing:
    """A message to be sent. With tensors on the device: its head, and its tensors in `packed`, which are available once
    `is_ready`; the first `sent` bytes of them are posted. `message` then has no tensors, so that the thread that drops
    this object frees no device memory."""

    message: Message
    head: Tensor | None = None
    packed: Tensor | None = None
    total: int = 0
    sent: int = 0
    is_ready: bool = True


@dataclass(eq=False)
class _Destination:
    """A directed edge to another rank.

    free: slots there, with their bytes, oldest first. waiting: messages without a slot. posted: sends on the device.
    buffers: buffers of sent messages, which are reused, so that no thread frees device memory.
    """

    rank: int
    channel: dist.ProcessGroup
    stream: torch.cuda.Stream
    free: deque[tuple[int, int]] = field(default_factory=deque)
    waiting: deque[_Outgoing] = field(default_factory=deque)
    posted: deque[tuple[dist.Work, Tensor, bool]] = field(default_factory=deque)
    buffers: list[Tensor] = field(default_factory=list)


@dataclass(eq=False)
class _Part:
    """A part of a message: posted into a slot, then copied out of it."""

    work: dist.Work
    slot: int
    start: int
    stop: int
    is_copied: bool = False


@dataclass(eq=False)
class _Incoming:
    """A message that arrives in parts; a message without tensors on the device is complete from the start."""

    message: Message | None = None
    head: Tensor | None = None
    total: int = 0
    announced: int = 0
    parts: deque[_Part] = field(default_factory=deque)
    whole: Tensor | None = None


@dataclass(eq=False)
class _Source:
    """A directed edge from another rank.

    releasing: slots that are being copied out of, and the event at the end of the copy. outgrown: slots that were too
    small, kept because NCCL's last reference to a slot may be dropped by any thread, which would then free it.
    """

    rank: int
    channel: dist.ProcessGroup
    stream: torch.cuda.Stream
    slots: list[Tensor]
    incoming: deque[_Incoming] = field(default_factory=deque)
    releasing: deque[tuple[torch.cuda.Event, int]] = field(default_factory=deque)
    outgrown: list[Tensor] = field(default_factory=list)


class NcclTransport:
    """A `protocol.Transport` for a rank that computes on a CUDA device; messages without CUDA tensors go over Gloo.

    The methods are for one thread, that of the engine. Two more threads post sends and receives.

    Args:
        host: carries headers, announcements, and messages without CUDA tensors.
        device: of this rank.
        rising, falling: process groups of all ranks, for edges to higher and to lower ranks.
        on_lost: called, on another thread, with the error that shows that a peer is gone.
    """

    needs_progress = True
    longest_gap_seconds = 0.0
    """NCCL and Gloo progress without calls, so there is no gap."""

    def __init__(self, host: GlooTransport, device: torch.device, *, rising: dist.ProcessGroup,
                 falling: dist.ProcessGroup, on_lost: Callable[[str], None] = lambda what: None) -> None:
        self._host, self._device, self._rising, self._falling = host, device, rising, falling
        self._on_lost = on_lost
        self._sources: dict[int, _Source] = {}
        self._destinations: dict[int, _Destination] = {}
        self._complete: deque[Message] = deque()
        self._payload_bytes_sent = 0
        self._post = threading.Lock()  # guards `free`, `waiting`, `posted`, and calls of Gloo's and NCCL's sends
        self._heard = threading.Event()
        self._packing: queue.SimpleQueue[tuple[torch.cuda.Event, _Destination, _Outgoing] | None] = queue.SimpleQueue()
        self._failure: TransportError | None = None
        self._closed = False
        self._threads: list[threading.Thread] = []

    @property
    def bytes_sent(self) -> int:
        """See `protocol.Transport`."""
        return self._host.bytes_sent + self._payload_bytes_sent

    def connect(self, sources: Sequence[int], destinations: Sequence[int], capacity_bytes: int) -> None:
        """See `protocol.Transport`. Opens communicators in one global order of edges, which rules out a deadlock."""
        rank = self._host.rank
        new = sorted({(source, rank) for source in sources if source not in self._sources}
                     | {(rank, destination) for destination in destinations if destination not in self._destinations})
        peers = sorted({*sources, *destinations})  # announcements go the other way
        self._host.connect(peers, peers, _HOST_BYTES)
        size = max(capacity_bytes, _MIN_SLOT_BYTES)
        for source, destination in new:
            channel = self._rising if source < destination else self._falling
            stream, first = torch.cuda.Stream(self._device), torch.zeros(1, device=self._device)
            if source == rank:  # NCCL builds a communicator at its first use: do that here, not inside a step
                self._destinations[destination] = _Destination(destination, channel, stream)
                require_work(dist.isend(first, group_dst=destination, group=channel)).wait()
            else:
                slots = [self._slot(size) for _ in range(SLOTS)]
                self._sources[source] = _Source(source, channel, stream, slots)
                require_work(dist.irecv(first, group_src=source, group=channel)).wait()
        torch.cuda.synchronize(self._device)
        if new and not self._threads:
            for what, target in (("reacts to messages", self._react), ("waits for data", self._await_data)):
                self._threads.append(threading.Thread(target=self._run_thread, args=(target,), daemon=True,
                                                      name=f"{self._host.purpose}: {what}"))
                self._threads[-1].start()
        for source in sorted(source for source, destination in new if destination == rank):
            for slot in range(SLOTS):
                self._announce_slot(self._sources[source], slot)

    def _slot(self, size: int) -> Tensor:
        return _as_foreign_memory(torch.empty(size, dtype=torch.uint8, device=self._device))

    # ------------------------------------------------------------------ sending

    def send(self, destination: int, message: Message) -> None:
        """See `protocol.Transport`. TransportError if a peer is lost, as for `poll` and `wait`."""
        self._check()
        edge, outgoing = self._destinations.get(destination), _Outgoing(message)
        if edge is None:
            raise TransportError("is not connected", code="edge-not-connected",
                                 where=f"edge {self._host.rank} -> {destination} of {self._host.purpose!r}",
                                 remedy="Name the destination in connect() before sending to it.")
        if any(tensor.is_cuda and tensor.numel() for tensor in message.tensors.values()):
            outgoing = _Outgoing(Message(message.kind, message.step, message.microbatch), head=encode_head(message),
                                 total=encoded_bytes(message), is_ready=False)
            buffer = self._buffer(edge, outgoing.total)
            outgoing.packed = _as_foreign_memory(pack(message, self._device)) if buffer is None else pack(
                message, self._device, buffer)  # 2
            event = torch.cuda.Event(blocking=True)
            event.record(torch.cuda.current_stream(self._device))
        with self._post:
            edge.waiting.append(outgoing)
            self._send_waiting(edge)
        if not outgoing.is_ready:
            self._packing.put((event, edge, outgoing))
        self._reap(edge)

    def _buffer(self, edge: _Destination, size: int) -> Tensor | None:
        """A used buffer of at least `size` bytes, the smallest; None if there is none."""
        fitting = [place for place, buffer in enumerate(edge.buffers) if buffer.numel() >= size]
        return edge.buffers.pop(min(fitting, key=lambda place: edge.buffers[place].numel())) if fitting else None

    def _send_waiting(self, edge: _Destination) -> None:
        """Send messages that have a slot (3), in order. The caller holds the lock."""
        while edge.waiting:
            outgoing = edge.waiting[0]
            if outgoing.packed is None:
                self._host.send(edge.rank, outgoing.message)
            elif not outgoing.is_ready or not self._send_parts(edge, outgoing, outgoing.packed):
                return
            edge.waiting.popleft()

    def _send_parts(self, edge: _Destination, outgoing: _Outgoing, packed: Tensor) -> bool:
        """Send as many parts as there are slots; returns whether all parts have been sent."""
        while outgoing.sent < outgoing.total and edge.free:
            slot, size = edge.free.popleft()
            start, stop = outgoing.sent, min(outgoing.sent + size, outgoing.total)
            with torch.cuda.stream(edge.stream):
                work = require_work(dist.isend(packed[start:stop], group_dst=edge.rank, group=edge.channel))
            edge.posted.append((work, packed, stop == outgoing.total))
            message = outgoing.message
            tensors = {_PART: torch.tensor([slot, start, stop], dtype=torch.int64, device="cpu")}
            if start == 0 and outgoing.head is not None:
                tensors[_HEAD] = outgoing.head
            self._host.send(edge.rank, Message(message.kind, message.step, message.microbatch, tensors))
            self._payload_bytes_sent += stop - start
            outgoing.sent = stop
        return outgoing.sent == outgoing.total

    def _reap(self, edge: _Destination) -> None:
        """Keep the buffers of completed sends. Only the engine's thread does so."""
        while edge.posted and edge.posted[0][0].is_completed():
            _, packed, is_last = edge.posted.popleft()
            if is_last:
                edge.buffers.append(packed)

    # ------------------------------------------------------------------ the other threads

    def _run_thread(self, target: Callable[[], None]) -> None:
        """Run a thread: its error becomes the transport's error, which the engine's thread raises."""
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            target()
        except TransportError as error:
            self._failure = self._failure or error
        except (RuntimeError, ValueError) as error:
            self._failure = self._failure or TransportError(
                "cannot send or receive", code="nccl-transport-failed",
                where=f"transport {self._host.purpose!r} on rank {self._host.rank}",
                value=str(error).partition("\n")[0], remedy="The first error is in another rank's output.")
        self._heard.set()
        if self._failure is not None and not self._closed and not self._host.closed:
            self._on_lost(str(self._failure))

    def _await_data(self) -> None:
        """Post sends when their data is available: in order, since one stream packs them all."""
        while (packing := self._packing.get()) is not None:
            event, edge, outgoing = packing
            event.synchronize()
            with self._post:  # 3
                outgoing.is_ready = True
                self._send_waiting(edge)

    def _react(self) -> None:
        """Post the transfers that messages of Gloo request, until the transport is closed or a peer is lost."""
        while not self._closed:
            message = self._host.wait(_CLOSE_SECONDS)
            if message is not None:
                self._take_announcement(message)
                self._heard.set()

    def _take_announcement(self, message: Message) -> None:
        if _SLOT in message.tensors:
            edge = self._destinations[message.source]
            slot, size = message.tensors[_SLOT].tolist()
            with self._post:
                edge.free.append((slot, size))
                self._send_waiting(edge)
            return
        source = self._sources[message.source]
        if _PART not in message.tensors:
            source.incoming.append(_Incoming(message=message))
            return
        slot, start, stop = message.tensors[_PART].tolist()
        with self._post, torch.cuda.stream(source.stream):  # 4
            part = _Part(require_work(dist.irecv(source.slots[slot][:stop - start], group_src=source.rank,
                                                 group=source.channel)), slot, start, stop)
        if start:
            incoming = source.incoming[-1]
        else:
            head = message.tensors[_HEAD]
            try:
                incoming = _Incoming(head=head, total=read_head(head).total)
            except ValueError as error:
                raise invalid_message(self._host.purpose, message.source, str(error)) from error
        incoming.parts.append(part)
        incoming.announced = stop
        if not start:
            source.incoming.append(incoming)

    def _check(self) -> None:
        self._host.check_open()
        if self._failure is not None:
            raise self._failure

    # ------------------------------------------------------------------ receiving

    def _announce_slot(self, source: _Source, slot: int) -> None:
        size = source.slots[slot].numel()
        with self._post:
            self._host.send(source.rank, Message(MessageKind.CREDIT, 0, 0, {
                _SLOT: torch.tensor([slot, size], dtype=torch.int64, device="cpu")}))

    def _collect(self, source: _Source) -> None:
        """Copy completed parts out of their slots (5), announce the slots (6), and queue complete messages in order."""
        while source.releasing and source.releasing[0][0].query():
            self._announce_slot(source, source.releasing.popleft()[1])
        while source.incoming:
            incoming = source.incoming[0]
            if incoming.message is None:
                self._copy_parts(source, incoming)
                if incoming.announced < incoming.total or not all(part.is_copied for part in incoming.parts):
                    return
                assert incoming.head is not None and incoming.whole is not None
                try:
                    incoming.message = decode(incoming.head, source.rank, incoming.whole)
                except ValueError as error:
                    raise invalid_message(self._host.purpose, source.rank, str(error)) from error
            self._complete.append(incoming.message)
            source.incoming.popleft()

    def _copy_parts(self, source: _Source, incoming: _Incoming) -> None:
        for part in list(incoming.parts):
            if part.is_copied:
                continue
            if not part.work.is_completed():
                return
            if incoming.whole is None:
                incoming.whole = torch.empty(incoming.total, dtype=torch.uint8, device=self._device)
            incoming.whole[part.start:part.stop].copy_(source.slots[part.slot][:part.stop - part.start])
            if incoming.total > source.slots[part.slot].numel():
                source.outgrown.append(source.slots[part.slot])
                source.slots[part.slot] = self._slot(incoming.total)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device))
            source.releasing.append((event, part.slot))
            part.is_copied = True

    def progress(self) -> None:
        """Reap sends, and queue complete messages. Each edge keeps its order."""
        for edge in self._destinations.values():
            self._reap(edge)
        for source in self._sources.values():
            self._collect(source)

    def poll(self) -> list[Message]:
        """See `protocol.Transport`. Messages that arrived before an error are returned before it is raised."""
        self._host.check_open()
        self.progress()
        messages = list(self._complete)
        self._complete.clear()
        if not messages:
            self._check()
        return messages

    def wait(self, timeout_seconds: float) -> Message | None:
        """See `protocol.Transport`."""
        self._host.check_open()
        deadline = time.monotonic() + timeout_seconds
        while True:
            self._heard.clear()
            self.progress()
            if self._complete:
                return self._complete.popleft()
            on_device = any(source.incoming or source.releasing for source in self._sources.values())
            if not on_device:
                self._check()
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            if not self._heard.wait(min(left, _POLL_SECONDS) if on_device else left):
                self._check()

    def flush(self, timeout_seconds: float = math.inf) -> bool:
        """See `protocol.Transport`."""
        deadline = time.monotonic() + timeout_seconds
        while any(edge.waiting or edge.posted for edge in self._destinations.values()):
            self._check()
            if time.monotonic() > deadline:
                return False
            self.progress()
            time.sleep(_POLL_SECONDS)
        return self._host.flush(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Close the host transport, and end the threads. Idempotent."""
        self._closed = True
        self._packing.put(None)
        self._host.close()
        for thread in self._threads:
            thread.join(10 * _CLOSE_SECONDS)
        if not self._has_ended():
            _left_behind.append((self._destinations, self._sources))

    def _has_ended(self) -> bool:
        """Whether NCCL has finished everything that was posted; False if that is unknown."""
        try:
            works = [work for edge in self._destinations.values() for work, _, _ in edge.posted]
            works += [part.work for source in self._sources.values() for incoming in source.incoming
                      for part in incoming.parts]
            return all(work.is_completed() for work in works)
        except RuntimeError:  # the device has failed, or a thread still posts
            return False
