"""Slow links on a fast machine: a wrapper that fits any backend, so that what a network would do is set, not hoped for.

A message is delivered no earlier than a link of that latency and bandwidth would have brought it, counted from the
moment it was sent. A link carries one message after another and edges stay FIFO. A collective ends no earlier than a
ring of such links would end it, counted from the call of its last member. Nothing is busy while it waits, delays come
from seeds alone, and each purpose has links of its own. Clocks are compared, so all ranks are on one machine.
"""

from __future__ import annotations

import heapq
import math
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ranvier.comm.message import Message, encoded_bytes
from ranvier.comm.protocol import Backend, Group, Reduction, Transport, Work
from ranvier.comm.ways import Operation, ring_bytes
from ranvier.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Link:
    """A directed link between two ranks. The random delay of each message is uniform in [0, jitter_seconds]."""

    latency_seconds: float = 0.0
    bytes_per_second: float = math.inf
    jitter_seconds: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("latency_seconds", 0.0), ("bytes_per_second", 1e-9), ("jitter_seconds", 0.0)):
            if not getattr(self, name) >= least:
                raise ConfigError("is too small", where=f"Link.{name}", value=getattr(self, name),
                                  remedy="Times are 0 or more, bandwidths greater than 0.")


Links = Link | Callable[[int, int], Link]
"""One link for every pair of ranks, or (source, destination) -> the link between them."""


def throttled(backend: Backend, links: Links, *, rank_delay_seconds: float = 0.0, seed: int = 0) -> Backend:
    """`backend` with every message and collective slowed down to `links`.

    Args:
        rank_delay_seconds: each call on this rank first sleeps for a random time of up to this, by (seed, rank): for
            tests that want every interleaving.
    """
    return _ThrottledBackend(backend, links, _Pause(rank_delay_seconds, f"{seed} rank {backend.rank}"))


class _Pause:
    """A random sleep of bounded length."""

    def __init__(self, longest_seconds: float, key: str) -> None:
        self._longest, self._random = longest_seconds, random.Random(key)

    def __call__(self) -> None:
        if self._longest > 0.0:
            time.sleep(self._random.uniform(0.0, self._longest))


class _Lane:
    """The clock of one link: loads follow each other by bandwidth, then take latency and jitter, and never overtake."""

    def __init__(self, links: Links, source: int, destination: int, purpose: str) -> None:
        self.link = links if isinstance(links, Link) else links(source, destination)
        self._random = random.Random(f"{self.link.seed} {purpose} {source} {destination}")
        self._free_ns = self._last_ns = 0

    def arrival(self, sent_ns: int, num_bytes: int, hops: int = 1) -> int:
        """When a load of `num_bytes` sent at `sent_ns` arrives; loads are asked for in the order of sending."""
        link = self.link
        self._free_ns = max(self._free_ns, sent_ns) + int(1e9 * num_bytes / link.bytes_per_second)
        delay = hops * link.latency_seconds + self._random.uniform(0.0, link.jitter_seconds)
        self._last_ns = max(self._last_ns, self._free_ns + int(1e9 * delay))
        return self._last_ns


class _ThrottledBackend:
    def __init__(self, backend: Backend, links: Links, pause: _Pause) -> None:
        self._inner, self._links, self._pause = backend, links, pause
        self.name, self.rank, self.size = backend.name, backend.rank, backend.size

    def transport(self, purpose: str) -> Transport:
        return _ThrottledTransport(self._inner.transport(purpose), self._links, self._pause, self.rank, purpose)

    def group(self, purpose: str, partition: Sequence[Sequence[int]]) -> Group:
        return _ThrottledGroup(self._inner.group(purpose, partition), self._links, self._pause, purpose)

    def subset(self, count: int) -> Backend | None:
        inner = self._inner.subset(count)
        return inner and _ThrottledBackend(inner, self._links, self._pause)

    def abort(self, code: int) -> None:
        self._inner.abort(code)

    def close(self) -> None:
        self._inner.close()


class _ThrottledTransport:
    def __init__(self, inner: Transport, links: Links, pause: _Pause, rank: int, purpose: str) -> None:
        self._inner, self._links, self._pause = inner, links, pause
        self._rank, self._purpose = rank, purpose
        self._lanes: dict[int, _Lane] = {}
        self._on_the_way: list[tuple[int, int, Message]] = []
        self._count = 0

    @property
    def bytes_sent(self) -> int:
        return self._inner.bytes_sent

    @property
    def longest_gap_seconds(self) -> float:
        return self._inner.longest_gap_seconds

    def connect(self, sources: Sequence[int], destinations: Sequence[int], capacity_bytes: int) -> None:
        self._inner.connect(sources, destinations, capacity_bytes)
        for source in sources:
            self._lanes.setdefault(source, _Lane(self._links, source, self._rank, self._purpose))

    def send(self, destination: int, message: Message) -> None:
        self._pause()
        self._inner.send(destination, message)

    def _accept(self, message: Message) -> None:
        arrival = self._lanes[message.source].arrival(message.sent_ns, encoded_bytes(message))
        heapq.heappush(self._on_the_way, (arrival, self._count, message))
        self._count += 1

    def _due(self) -> Message | None:
        if self._on_the_way and self._on_the_way[0][0] <= time.monotonic_ns():
            return heapq.heappop(self._on_the_way)[2]
        return None

    def poll(self) -> list[Message]:
        self._pause()
        for message in self._inner.poll():
            self._accept(message)
        return list(iter(self._due, None))

    def wait(self, timeout_seconds: float) -> Message | None:
        self._pause()
        deadline = time.monotonic_ns() + int(1e9 * timeout_seconds)
        for message in self._inner.poll():
            self._accept(message)
        while (due := self._due()) is None:
            until = min(deadline, self._on_the_way[0][0]) if self._on_the_way else deadline
            message = self._inner.wait(max(0.0, 1e-9 * (until - time.monotonic_ns())))
            if message is not None:
                self._accept(message)
            elif time.monotonic_ns() >= deadline:
                return self._due()
        return due

    def progress(self) -> None:
        self._inner.progress()

    def flush(self, timeout_seconds: float = math.inf) -> bool:
        return self._inner.flush(timeout_seconds)

    def close(self) -> None:
        self._inner.close()


class _ThrottledGroup:
    """Beside each collective travels a tiny one that finds out when its last member called."""

    def __init__(self, inner: Group, links: Links, pause: _Pause, purpose: str) -> None:
        self._inner, self._pause = inner, pause
        self.ranks, self.index = inner.ranks, inner.index
        ring = zip(inner.ranks, (*inner.ranks[1:], inner.ranks[0]), strict=True) if len(inner.ranks) > 1 else ()
        self._lanes = [_Lane(links, source, destination, purpose) for source, destination in ring]
        self._under_way: deque[_ThrottledWork] = deque()
        self._stamp_bytes = 0

    @property
    def bytes_received(self) -> int:
        return self._inner.bytes_received - self._stamp_bytes

    def _slow(self, operation: Operation, whole: Tensor, start: Callable[[], Work]) -> Work:
        self._pause()
        members = len(self.ranks)
        if members == 1:
            return start()
        called_ns = torch.tensor([time.monotonic_ns()])
        before = self._inner.bytes_received
        stamp = self._inner.all_reduce(called_ns, "max")
        self._stamp_bytes += self._inner.bytes_received - before
        load = ring_bytes(operation, members, whole.numel() * whole.element_size())
        hops = (members - 1) * (2 if operation == "all_reduce" else 1)
        work = _ThrottledWork(start(), stamp, self._under_way, lambda: max(
            lane.arrival(int(called_ns), load, hops) for lane in self._lanes))
        self._under_way.append(work)
        return work

    def all_reduce(self, tensor: Tensor, op: Reduction = "sum") -> Work:
        return self._slow("all_reduce", tensor, lambda: self._inner.all_reduce(tensor, op))

    def reduce(self, tensor: Tensor, root: int = 0) -> Work:
        return self._slow("reduce", tensor, lambda: self._inner.reduce(tensor, root))

    def reduce_scatter(self, output: Tensor, tensor: Tensor, room: Tensor | None = None) -> Work:
        return self._slow("reduce_scatter", tensor, lambda: self._inner.reduce_scatter(output, tensor, room))

    def buffer_bytes(self, operation: Literal["all_reduce", "reduce_scatter"], numel: int, dtype: torch.dtype,
                     device_type: str) -> int:
        return self._inner.buffer_bytes(operation, numel, dtype, device_type)

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        return self._slow("all_gather", output, lambda: self._inner.all_gather(output, tensor))

    def broadcast(self, tensor: Tensor, root: int = 0) -> Work:
        return self._slow("broadcast", tensor, lambda: self._inner.broadcast(tensor, root))

    def all_to_all(self, output: Tensor, tensor: Tensor, output_splits: Sequence[int] | None = None,
                   input_splits: Sequence[int] | None = None) -> Work:
        return self._slow("all_to_all", output,
                          lambda: self._inner.all_to_all(output, tensor, output_splits, input_splits))

    def gather_objects(self, value: object) -> list:
        return self._inner.gather_objects(value)

    def gather_number(self, number: int) -> list[int]:
        return self._inner.gather_number(number)

    def barrier(self) -> None:
        self._inner.barrier()

    def close(self) -> None:
        self._inner.close()


class _ThrottledWork:
    """Work that ends when it has ended and its time has come. Times are found in call order, since lanes need that."""

    def __init__(self, work: Work, stamp: Work, under_way: deque[_ThrottledWork], arrival: Callable[[], int]) -> None:
        self._work, self._stamp, self._under_way, self._arrival = work, stamp, under_way, arrival
        self._due_ns: int | None = None

    def _settle(self, block: bool) -> bool:
        """Find out when this and all earlier work is due, as far as their members have called."""
        while self._due_ns is None:
            first = self._under_way[0]
            if block:
                first._stamp.wait()
            elif not first._stamp.done():
                return False
            first._due_ns = first._arrival()
            self._under_way.popleft()
        return True

    def done(self) -> bool:
        return self._work.done() and self._settle(block=False) and time.monotonic_ns() >= self._due_ns

    def wait(self) -> None:
        self._work.wait()
        self._settle(block=True)
        time.sleep(max(0.0, 1e-9 * (self._due_ns - time.monotonic_ns())))
