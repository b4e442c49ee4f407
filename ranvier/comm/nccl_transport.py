"""Messages whose tensors live on CUDA devices: the header travels over Gloo, the tensors over NCCL.

    sender                                     receiver
    1 pack the tensors into one device buffer
    2 send it on the edge's own stream         3 a thread receives the header; the host learns size and shapes
      and the header over Gloo                 4 the NCCL receive is posted, on the edge's own stream
                                               5 the message is delivered when NCCL says that it is complete

A NCCL receive occupies the device until it is matched, so it is posted only when the header says that its sender has
posted the send. Each directed edge has a communicator and a stream of its own (torch makes one per pair of ranks and
process group, so one process group carries the edges to higher ranks and another those to lower ones): no edge waits
behind another, and the host waits nowhere.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from ranvier.comm.edges import no_message
from ranvier.comm.message import Message, decode, encode_head, pack, total_bytes

if TYPE_CHECKING:
    from ranvier.comm.torch_backend import GlooTransport

_HEAD = "ranvier: head of a message on CUDA"
_POLL_SECONDS = 50e-6


@dataclass
class _Edge:
    """One directed edge: its process group, its stream, and what is under way on it, oldest first."""

    channel: dist.ProcessGroup
    stream: torch.cuda.Stream
    sending: deque[tuple[dist.Work, Tensor]] = field(default_factory=deque)
    receiving: deque[tuple[dist.Work | None, Message]] = field(default_factory=deque)


class NcclTransport:
    """A `protocol.Transport` for a rank that computes on a CUDA device; messages without CUDA tensors go over Gloo."""

    longest_gap_seconds = 0.0

    def __init__(self, host: GlooTransport, device: torch.device, *, rising: dist.ProcessGroup,
                 falling: dist.ProcessGroup) -> None:
        self._host, self._device, self._rising, self._falling = host, device, rising, falling
        self._sources: dict[int, _Edge] = {}
        self._destinations: dict[int, _Edge] = {}
        self._complete: deque[Message] = deque()
        self._payload_bytes_sent = 0

    @property
    def bytes_sent(self) -> int:
        return self._host.bytes_sent + self._payload_bytes_sent

    def connect(self, sources: Sequence[int], destinations: Sequence[int], capacity_bytes: int) -> None:
        """Opens communicators in one global order of edges, so that no two ranks wait for each other."""
        rank = self._host.edges.rank
        new = sorted({(source, rank) for source in sources if source not in self._sources}
                     | {(rank, destination) for destination in destinations if destination not in self._destinations})
        self._host.connect(sources, destinations, min(capacity_bytes, 1 << 16))
        for source, destination in new:
            channel = self._rising if source < destination else self._falling
            edge = _Edge(channel, torch.cuda.Stream(self._device))
            first = torch.zeros(1, device=self._device)
            if source == rank:  # NCCL builds a communicator at its first use: here, and not inside a step.
                self._destinations[destination] = edge
                dist.isend(first, group_dst=destination, group=channel).wait()
            else:
                self._sources[source] = edge
                dist.irecv(first, group_src=source, group=channel).wait()
        torch.cuda.synchronize(self._device)

    def send(self, destination: int, message: Message) -> None:
        if not any(tensor.is_cuda and tensor.numel() for tensor in message.tensors.values()):
            self._host.send(destination, message)
            return
        head = Message(message.kind, message.step, message.microbatch, {_HEAD: encode_head(message)})
        self._host.edges.capacity_to(destination)
        edge, packed = self._destinations[destination], pack(message, self._device)  # 1
        edge.stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(edge.stream):  # 2
            edge.sending.append((dist.isend(packed, group_dst=destination, group=edge.channel), packed))
        self._host.send(destination, head)
        self._payload_bytes_sent += packed.numel()
        self._reap(edge)

    def _reap(self, edge: _Edge) -> None:
        while edge.sending and edge.sending[0][0].is_completed():
            edge.sending.popleft()

    def _accept(self, message: Message) -> None:
        edge = self._sources[message.source]
        if _HEAD not in message.tensors:
            edge.receiving.append((None, message))
            return
        head = message.tensors[_HEAD]
        try:
            total = total_bytes(head)
        except ValueError as error:
            raise no_message(self._host.edges.purpose, message.source, str(error)) from error
        with torch.cuda.stream(edge.stream):  # 4
            packed = torch.empty(total, dtype=torch.uint8, device=self._device)
            work = dist.irecv(packed, group_src=message.source, group=edge.channel)
        packed.record_stream(torch.cuda.current_stream(self._device))
        edge.receiving.append((work, decode(head, message.source, packed)))

    def progress(self) -> None:
        """Post the receives whose headers have come; keep what is complete. An edge keeps its order."""
        for edge in self._destinations.values():
            self._reap(edge)
        for message in self._host.poll():  # 3
            self._accept(message)
        for edge in self._sources.values():  # 5
            while edge.receiving and (edge.receiving[0][0] is None or edge.receiving[0][0].is_completed()):
                self._complete.append(edge.receiving.popleft()[1])

    def poll(self) -> list[Message]:
        self.progress()
        messages = list(self._complete)
        self._complete.clear()
        return messages

    def wait(self, timeout_seconds: float) -> Message | None:
        deadline = time.monotonic() + timeout_seconds
        while True:
            self.progress()
            if self._complete:
                return self._complete.popleft()
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            on_device = any(edge.receiving for edge in self._sources.values())
            message = self._host.wait(min(left, _POLL_SECONDS) if on_device else left)
            if message is not None:
                self._accept(message)

    def flush(self, timeout_seconds: float = math.inf) -> bool:
        deadline = time.monotonic() + timeout_seconds
        if not self._host.flush(timeout_seconds):
            return False
        for edge in self._destinations.values():
            while edge.sending:
                if time.monotonic() > deadline:
                    return False
                self._reap(edge)
                time.sleep(_POLL_SECONDS)
        return True

    def close(self) -> None:
        self._host.close()
