"""torch.distributed: Gloo between hosts' memories, NCCL for what lives on CUDA devices.

Gloo cannot be asked whether a receive is complete: `is_completed()` turns true only after `wait()`, and a wait that
times out destroys the group. So each source has a thread that blocks in a receive and feeds a queue; it sleeps in the
kernel, and Gloo moves data in threads of its own. A receive accepts a message that is shorter than its buffer
(measured: the bytes behind it stay as they were), so a message that fits the capacity needs no header of its own.

A blocked receive can be ended by its sender only; neither abort, shutdown nor destroying the group wakes it. So `close`
sends a goodbye along each outgoing edge, and a receive thread ends when it reads one, or when the connection breaks. A
thread that were still in a receive while the interpreter ends would bring the process down.
"""

from __future__ import annotations

import math
import os
import queue
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroup, Store

from ranvier.comm.collectives import CheckedGroup, check_subset, place_in
from ranvier.comm.edges import Edges, lost_peer, no_message
from ranvier.comm.message import Message, decode, total_bytes
from ranvier.comm.nccl_transport import NcclTransport
from ranvier.comm.protocol import Reduction, Transport, Work
from ranvier.comm.ways import DIRECT_MEMBERS
from ranvier.errors import LaunchError, MessageTimeout, TransportError

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the older torch's name
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_FOREVER = timedelta(days=3650)
_GOODBYE = b"RNV bye."
_CLOSE_SECONDS = 10.0
_OVERDUE_SECONDS = 2.0
_REPEATED_BYTES = 512 << 10
"""Shares of at most so many bytes are copied once for each member, to be sent directly."""


def _cause(error: Exception) -> str:
    """Gloo's first sentence, without the place in its source."""
    return str(error).split("] ", 1)[-1].split(". ", 1)[0]


class TorchBackend:
    """One rank's access to the others through torch.distributed.

    Where the user's program has initialised torch.distributed, that is used and left alone at the end. `store` is used
    otherwise. A collective fails after `timeout_seconds`; how long to wait for messages is the caller's choice.
    """

    name: Literal["torch"] = "torch"

    def __init__(self, rank: int, size: int, store: Store, device: torch.device, timeout_seconds: float, *,
                 start: bool = True) -> None:
        self.rank, self.size, self._device = rank, size, device
        self._timeout = timedelta(seconds=timeout_seconds)
        self.waits = Waits(timeout_seconds)
        self._kinds = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        self._owns = start and not dist.is_initialized()
        if not start:
            pass  # it runs already
        elif self._owns:
            dist.init_process_group(self._kinds, store=PrefixStore("ranvier", store), rank=rank, world_size=size,
                                    timeout=self._timeout)
        elif (dist.get_rank(), dist.get_world_size()) != (rank, size):
            raise LaunchError("is initialised with another rank or size", where=f"torch.distributed on rank {rank}",
                              value=(dist.get_rank(), dist.get_world_size()),
                              remedy=f"Initialise it as rank {rank} of {size}, or leave that to Ranvier.")
        self._store, self._subsets = store, 0
        self._transports: list[GlooTransport] = []
        self._groups: list[TorchGroup] = []
        self._nccl_channels: list[ProcessGroup] = []
        self._closed = False

    def subset(self, count: int) -> _TorchSubset | None:
        check_subset(count, self.size)
        self._subsets += 1
        if self.rank >= count:
            return None
        store = PrefixStore(f"ranvier/subset/{self._subsets}", self._store.clone())
        part = _TorchSubset(self.rank, count, store, self._device, self._timeout.total_seconds())
        part.waits = self.waits
        return part

    def transport(self, purpose: str) -> Transport:
        everyone = range(self.size)
        channel = self._connected(purpose, everyone, _FOREVER, "gloo") if self.size > 1 else None
        host = GlooTransport(channel, purpose, self.rank, self.size)
        self._transports.append(host)
        if self._device.type != "cuda" or channel is None:
            return host
        rising, falling = (self._connected(purpose, everyone, self._timeout, "nccl") for _ in range(2))
        self._nccl_channels += [rising, falling]
        return NcclTransport(host, self._device, rising=rising, falling=falling)

    def group(self, purpose: str, partition: Sequence[Sequence[int]]) -> TorchGroup:
        ranks, index = place_in(partition, self.rank, self.size, purpose)
        # Every rank makes every group: torch names a group by how many its maker has, and the members must agree.
        made = {tuple(members): self._connected(purpose, members, self._timeout, self._kinds)
                for members in partition if len(members) > 1}
        channel = made.get(ranks)
        self._groups.append(TorchGroup(channel, purpose, ranks, index, self.waits))
        return self._groups[-1]

    def _connected(self, purpose: str, members: Sequence[int], timeout: timedelta, kinds: str) -> ProcessGroup:
        """A new group of torch's, which all ranks make. TransportError when one of them does not answer."""
        try:
            return dist.new_group(list(members), timeout=timeout, backend=kinds)
        except RuntimeError as error:
            raise self._no_answer(purpose, error) from error

    def _no_answer(self, purpose: str, error: Exception) -> TransportError:
        return TransportError(f"its ranks cannot be connected, one has gone or does not answer: {_cause(error)}",
                              where=f"group '{purpose}' of rank {self.rank}",
                              remedy="See which rank has stopped or is behind, and start again with --resume auto.")

    def _disconnect(self, channel: ProcessGroup | None) -> None:
        if channel is not None and dist.is_initialized():
            dist.destroy_process_group(channel)

    def abort(self, code: int) -> None:
        """End this process at once; the others find their connections to it broken. Does not return."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for transport in self._transports:
            transport.close()
        deadline = time.monotonic() + _CLOSE_SECONDS
        for transport in self._transports:
            transport.join(deadline)
        for part in (*self._groups, *self._transports):
            self._disconnect(part.take_channel())
        for channel in self._nccl_channels:
            self._disconnect(channel)
        if self._owns and dist.is_initialized():
            dist.destroy_process_group()


class GlooTransport:
    """A `protocol.Transport` over one Gloo process group of its own."""

    longest_gap_seconds = 0.0

    def __init__(self, channel: ProcessGroup | None, purpose: str, rank: int, size: int) -> None:
        self._channel, self.edges = channel, Edges(purpose, rank, size)
        self._arrived: queue.SimpleQueue[Message | TransportError] = queue.SimpleQueue()
        self._failure: TransportError | None = None
        self._receivers: list[threading.Thread] = []
        self._leaving: queue.SimpleQueue[tuple[dist.Work, int, Tensor] | None] = queue.SimpleQueue()
        self._handed, self._left = 0, 0
        self._moved = threading.Condition()
        self._reaper: threading.Thread | None = None

    @property
    def bytes_sent(self) -> int:
        return self.edges.bytes_sent

    def connect(self, sources: Sequence[int], destinations: Sequence[int], capacity_bytes: int) -> None:
        for source in self.edges.open(sources, destinations, capacity_bytes):
            self._receivers.append(self._start(f"receive from {source}", self._receive, source))
        if destinations and self._reaper is None:
            self._reaper = self._start("sends", self._reap)

    def _start(self, what: str, target, *args) -> threading.Thread:
        thread = threading.Thread(target=target, args=args, name=f"{self.edges.purpose}: {what}", daemon=True)
        thread.start()
        return thread

    def send(self, destination: int, message: Message) -> None:
        self._check()
        for part in self.edges.outgoing(destination, message):
            self._hand_over(destination, part)

    def _hand_over(self, destination: int, part: Tensor) -> None:
        try:
            work = dist.isend(part, group_dst=destination, group=self._channel)
        except RuntimeError as error:
            raise self._fail(lost_peer(self.edges.purpose, destination, _cause(error))) from error
        self._handed += 1
        self._leaving.put((work, destination, part))

    def _reap(self) -> None:
        """Keep each part alive until it has left: Gloo reads it from where it is."""
        while (leaving := self._leaving.get()) is not None:
            work, destination, _ = leaving
            try:
                work.wait()
            except RuntimeError as error:
                self._arrived.put(lost_peer(self.edges.purpose, destination, _cause(error)))
            with self._moved:
                self._left += 1
                self._moved.notify_all()

    def _receive(self, source: int) -> None:
        """The life of one incoming edge. A message that fills less than half of the buffer is copied out of it."""
        edges, buffer = self.edges, None
        try:
            while True:
                capacity = edges.sources[source]
                if buffer is None or buffer.numel() != capacity:
                    buffer = torch.empty(capacity, dtype=torch.uint8)
                dist.irecv(buffer, group_src=source, group=self._channel).wait()
                if bytes(buffer[:len(_GOODBYE)].numpy()) == _GOODBYE:
                    return
                total = total_bytes(buffer)
                if total > capacity:
                    wire = torch.empty(total, dtype=torch.uint8)
                    wire[:capacity] = buffer
                    dist.irecv(wire[capacity:], group_src=source, group=self._channel).wait()
                    edges.sources[source] = total
                elif total < capacity // 2:
                    wire = buffer[:total].clone()
                else:
                    wire, buffer = buffer, None
                self._arrived.put(decode(wire, source))
        except ValueError as error:
            self._arrived.put(no_message(edges.purpose, source, str(error)))
        except RuntimeError as error:
            self._arrived.put(lost_peer(edges.purpose, source, _cause(error)))

    def _fail(self, error: TransportError) -> TransportError:
        self._failure = self._failure or error
        return self._failure

    def _check(self) -> None:
        self.edges.check_open()
        if self._failure is not None:
            raise self._failure

    def poll(self) -> list[Message]:
        self._check()
        messages: list[Message] = []
        while True:
            try:
                arrived = self._arrived.get_nowait()
            except queue.Empty:
                return messages
            if isinstance(arrived, TransportError):
                self._fail(arrived)
                if not messages:
                    raise self._failure
                return messages
            messages.append(arrived)

    def wait(self, timeout_seconds: float) -> Message | None:
        self._check()
        try:
            arrived = self._arrived.get(timeout=max(0.0, timeout_seconds))
        except queue.Empty:
            return None
        if isinstance(arrived, TransportError):
            raise self._fail(arrived)
        return arrived

    def progress(self) -> None:
        """Gloo's threads move messages."""

    def flush(self, timeout_seconds: float = math.inf) -> bool:
        with self._moved:
            return self._moved.wait_for(lambda: self._left == self._handed,
                                        None if math.isinf(timeout_seconds) else timeout_seconds)

    def close(self) -> None:
        if self.edges.closed:
            return
        self.edges.closed = True
        goodbye = torch.frombuffer(bytearray(_GOODBYE), dtype=torch.uint8)
        for destination in self.edges.destinations:
            try:
                self._hand_over(destination, goodbye)
            except TransportError:
                continue
        self._leaving.put(None)

    def join(self, deadline: float) -> None:
        """Wait until every peer has said goodbye too (or is gone), until `deadline` on the monotonic clock."""
        for thread in (*self._receivers, *([self._reaper] if self._reaper else [])):
            thread.join(max(0.0, deadline - time.monotonic()))

    def take_channel(self) -> ProcessGroup | None:
        """What is to be destroyed."""
        channel, self._channel = self._channel, None
        return channel


class _TorchSubset(TorchBackend):
    """Some of the ranks. torch's registry of groups takes every rank for each new one, and those outside are busy: so
    groups are made of its parts, over a store of their own, without the registry."""

    def __init__(self, rank: int, size: int, store: Store, device: torch.device, timeout_seconds: float) -> None:
        self._made = 0
        super().__init__(rank, size, store, device, timeout_seconds, start=False)

    def _connected(self, purpose: str, members: Sequence[int], timeout: timedelta, kinds: str) -> ProcessGroup | None:
        self._made += 1
        if self.rank not in members:
            return None
        index = members.index(self.rank)
        store = PrefixStore(f"{self._made}/{min(members)}", self._store)
        group = ProcessGroup(store, index, len(members))
        try:
            if "gloo" in kinds:
                gloo = dist.ProcessGroupGloo(PrefixStore("gloo", store), index, len(members), timeout)
                gloo._set_sequence_number_for_group()
                group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
                group._set_default_backend(ProcessGroup.BackendType.GLOO)
            if "nccl" in kinds:
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timeout
                nccl = dist.ProcessGroupNCCL(PrefixStore("nccl", store), index, len(members), options)
                nccl._set_sequence_number_for_group()
                group._register_backend(torch.device("cuda"), ProcessGroup.BackendType.NCCL, nccl)
                if "gloo" not in kinds:
                    group._set_default_backend(ProcessGroup.BackendType.NCCL)
        except RuntimeError as error:
            raise self._no_answer(purpose, error) from error
        return group

    def _disconnect(self, channel: ProcessGroup | None) -> None:
        if channel is not None:
            channel.shutdown()


class Waits:
    """What this process waits for inside torch, and for how long on the monotonic clock. torch's own limits follow the
    wall clock in some of its builds, and a clock that is set keeps them from ever coming."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout = timeout_seconds + _OVERDUE_SECONDS
        self._since: dict[int, tuple[float, str]] = {}

    def begin(self, what: str) -> None:
        """This thread begins to wait."""
        self._since[threading.get_ident()] = (time.monotonic(), what)

    def end(self) -> None:
        self._since.pop(threading.get_ident(), None)

    def overdue(self) -> str | None:
        """A wait that torch should have ended long ago; None where there is none."""
        latest = time.monotonic() - self._timeout
        return next((what for began, what in list(self._since.values()) if began < latest), None)


class TorchWork:
    """A `protocol.Work`. On CUDA, `wait` orders the current stream behind the collective and does not hold the host."""

    def __init__(self, work: dist.Work, failed, waits: Waits, what: str) -> None:
        self._work, self._failed, self._waits, self._what = work, failed, waits, what

    def done(self) -> bool:
        return self._work.is_completed()

    def wait(self) -> None:
        self._waits.begin(self._what)
        try:
            self._work.wait()
        except RuntimeError as error:
            raise self._failed(error) from error
        finally:
            self._waits.end()


class TorchGroup(CheckedGroup):
    """A `protocol.Group` over one process group: Gloo for tensors on the host, NCCL for those on CUDA."""

    def __init__(self, channel: ProcessGroup | None, purpose: str, ranks: Sequence[int], index: int,
                 waits: Waits) -> None:
        super().__init__(purpose, ranks, index)
        self._channel, self._waits = channel, waits
        self._where = f"group {purpose!r} of ranks {list(ranks)}"

    def _start(self, call, *args, **kwargs) -> Work:
        try:
            work = call(*args, **kwargs, group=self._channel, async_op=True)
            return TorchWork(work, self._lost, self._waits, self._where)
        except RuntimeError as error:
            raise self._lost(error) from error

    def _lost(self, error: RuntimeError) -> TransportError:
        where, cause = self._where, _cause(error)
        if "timed out" in cause.lower():
            return MessageTimeout("a collective did not end", where=where, value=cause,
                                  remedy="See what the other members do, or raise --comm.timeout-seconds.")
        return TransportError("a collective failed: a member is gone, or too late, or brought another shape",
                              where=where, value=cause, remedy="The first error is in another rank's output.")

    def _all_reduce(self, tensor: Tensor, op: Reduction) -> Work:
        return self._start(dist.all_reduce, tensor, _OPS[op])

    def _reduce(self, tensor: Tensor, root: int) -> Work:
        return self._start(dist.reduce, tensor, group_dst=root)

    def _reduce_scatter(self, output: Tensor, tensor: Tensor) -> Work:
        return self._start(_REDUCE_SCATTER, output, tensor)

    def _all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        # Where Gloo goes round a ring, every step wakes a thread up.
        if not tensor.is_cuda and len(self.ranks) <= DIRECT_MEMBERS and tensor.nbytes <= _REPEATED_BYTES:
            return self._start(dist.all_to_all_single, output, tensor.repeat(len(self.ranks)))
        return self._start(_ALL_GATHER, output, tensor)

    def _broadcast(self, tensor: Tensor, root: int) -> Work:
        return self._start(dist.broadcast, tensor, group_src=root)

    def _all_to_all(self, output: Tensor, tensor: Tensor, received: list[int], sent: list[int]) -> Work:
        return self._start(dist.all_to_all_single, output, tensor, received, sent)

    def take_channel(self) -> ProcessGroup | None:
        """What is to be destroyed; the group is closed."""
        self.close()
        channel, self._channel = self._channel, None
        return channel
