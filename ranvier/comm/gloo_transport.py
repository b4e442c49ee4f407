"""Point-to-point messages over Gloo, between tensors in host memory.

Gloo cannot be asked whether a receive is complete: `is_completed()` turns true only after `wait()`, and a wait that
times out destroys the group. So each source has a thread that blocks in a receive and feeds a queue; it sleeps in the
kernel, and Gloo moves data in its own threads. A receive accepts a message that is shorter than its buffer (measured:
the bytes after it are unchanged), so a message that fits the capacity needs no separate header.

Only its sender can end a blocked receive: aborting, shutting down or destroying the group does not wake it. So `close`
sends a goodbye along each outgoing edge, and a receive thread ends when it reads one, or when the connection breaks. A
thread still inside a receive when the interpreter exits would crash the process.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ranvier.comm.edges import EdgesOfRank, invalid_message, peer_lost
from ranvier.comm.message import Message, decode, read_head
from ranvier.comm.torch_group import error_cause
from ranvier.errors import TransportError

_GOODBYE = b"RNV bye."
_SMALL_BYTES, _REAP_SECONDS = 1 << 20, 0.01
"""A part of at most this many bytes may stay alive this many seconds longer than its send."""
_FOREVER = timedelta(days=3650)
"""A receive has no time limit: waits on the transport have one. The process group's limit is for connecting."""


class GlooTransport(EdgesOfRank):
    """A `protocol.Transport` over its own Gloo process group.

    Args:
        process_group: of all ranks; None with one rank.
        purpose: names the transport in errors and threads.
        rank, size: of this rank.
    """

    longest_gap_seconds = 0.0
    needs_progress = False
    """Gloo's threads progress messages, so there is no gap."""

    def __init__(self, process_group: ProcessGroup | None, purpose: str, rank: int, size: int) -> None:
        super().__init__(purpose, rank, size)
        self._process_group = process_group
        self._arrived: queue.SimpleQueue[Message | TransportError] = queue.SimpleQueue()
        self._failure: TransportError | None = None
        self._receivers: list[threading.Thread] = []
        self._sends: queue.SimpleQueue[tuple[dist.Work, int, Tensor] | None] = queue.SimpleQueue()
        self._num_started, self._num_sent = 0, 0
        self._send_finished = threading.Condition()
        self._reaper: threading.Thread | None = None

    def connect(self, sources: Sequence[int], destinations: Sequence[int], capacity_bytes: int) -> None:
        """See `protocol.Transport`. Starts one thread per new source, and one for all sends."""
        for source in self.open(sources, destinations, capacity_bytes):
            self._receivers.append(self._start(f"receive from {source}", self._receive, source))
        if destinations and self._reaper is None:
            self._reaper = self._start("sends", self._reap)

    def _start(self, what: str, target: Callable[..., None], *args: object) -> threading.Thread:
        thread = threading.Thread(target=target, args=args, name=f"{self.purpose}: {what}", daemon=True)
        thread.start()
        return thread

    def send(self, destination: int, message: Message) -> None:
        """See `protocol.Transport`. TransportError if a peer is lost, as for `poll` and `wait`."""
        self._check()
        for part in self.outgoing(destination, message):
            self._start_send(destination, part)

    def _start_send(self, destination: int, part: Tensor) -> None:
        assert self._process_group is not None, "a transport of one rank has no destinations"
        try:
            work = self._process_group.send([part], destination, 0)
        except RuntimeError as error:
            raise self._fail(peer_lost(self.purpose, destination, error_cause(error))) from error
        self._num_started += 1
        self._sends.put((work, destination, part))

    def _reap(self) -> None:
        """Keep each part alive until it has been sent: Gloo reads it in place. Runs on a thread."""
        while (send := self._sends.get()) is not None:
            work, destination, part = send
            if part.numel() <= _SMALL_BYTES and self._sends.empty():
                time.sleep(_REAP_SECONDS)  # each time this thread wakes, it takes the GIL from the engine's thread
            try:
                work.wait(_FOREVER)
            except RuntimeError as error:
                self._arrived.put(peer_lost(self.purpose, destination, error_cause(error)))
            with self._send_finished:
                self._num_sent += 1
                self._send_finished.notify_all()

    def _receive(self, source: int) -> None:
        """Receive all messages of one source, on a separate thread.

        A message that fills less than half of the buffer is copied, so that it does not keep the whole buffer alive.
        """
        group = self._process_group
        assert group is not None, "a transport of one rank has no sources"
        buffer: Tensor | None = None
        try:
            while True:
                capacity = self.sources[source]
                if buffer is None or buffer.numel() != capacity:
                    buffer = torch.empty(capacity, dtype=torch.uint8)
                group.recv([buffer], source, 0).wait(_FOREVER)
                if buffer.numpy().data[:len(_GOODBYE)] == _GOODBYE:
                    return
                head = read_head(buffer)
                total = head.total
                if total > capacity:
                    wire = torch.empty(total, dtype=torch.uint8)
                    wire[:capacity] = buffer
                    group.recv([wire[capacity:]], source, 0).wait(_FOREVER)
                    self.sources[source] = total
                elif total < capacity // 2:
                    wire = buffer[:total].clone()
                else:
                    wire, buffer = buffer, None
                self._arrived.put(decode(wire, source, head=head))
        except ValueError as error:
            self._arrived.put(invalid_message(self.purpose, source, str(error)))
        except RuntimeError as error:
            self._arrived.put(peer_lost(self.purpose, source, error_cause(error)))

    def _fail(self, error: TransportError) -> TransportError:
        """The first error of this transport, which all later calls raise; `error` if it is the first."""
        self._failure = self._failure or error
        return self._failure

    def _check(self) -> None:
        self.check_open()
        if self._failure is not None:
            raise self._failure

    def poll(self) -> list[Message]:
        """See `protocol.Transport`. Messages that arrived before an error are returned before it is raised."""
        self._check()
        messages: list[Message] = []
        while not self._arrived.empty():
            arrived = self._arrived.get_nowait()
            if isinstance(arrived, TransportError):
                failure = self._fail(arrived)
                if not messages:
                    raise failure
                return messages
            messages.append(arrived)
        return messages

    def wait(self, timeout_seconds: float) -> Message | None:
        """See `protocol.Transport`."""
        self._check()
        try:
            arrived = self._arrived.get(timeout=max(0.0, timeout_seconds))
        except queue.Empty:
            return None
        if isinstance(arrived, TransportError):
            raise self._fail(arrived)
        return arrived

    def progress(self) -> None:
        """Nothing to do: Gloo's threads progress messages."""

    def flush(self, timeout_seconds: float = math.inf) -> bool:
        """See `protocol.Transport`."""
        with self._send_finished:
            return self._send_finished.wait_for(lambda: self._num_sent == self._num_started,
                                        None if math.isinf(timeout_seconds) else timeout_seconds)

    def close(self) -> None:
        """Send a goodbye along each outgoing edge, and refuse further calls. Idempotent; see `join`."""
        if self.closed:
            return
        self.closed = True
        goodbye = torch.frombuffer(bytearray(_GOODBYE), dtype=torch.uint8)
        for destination in self.destinations:
            try:
                self._start_send(destination, goodbye)
            except TransportError:
                continue
        self._sends.put(None)

    def join(self, deadline: float) -> None:
        """Wait until every peer has sent its goodbye or is gone; at most until `deadline` (monotonic seconds)."""
        for thread in (*self._receivers, *([self._reaper] if self._reaper else [])):
            thread.join(max(0.0, deadline - time.monotonic()))

    def detach_process_group(self) -> ProcessGroup | None:
        """The process group, to be destroyed by the caller; None if there is none, or at a second call."""
        process_group, self._process_group = self._process_group, None
        return process_group
