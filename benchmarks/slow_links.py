"""Simulates slow links: a wrapper for any backend that delays messages and collectives by latency and bandwidth.

A message is delivered no earlier than a link of that latency and bandwidth would deliver it, counted from the moment it
was sent. A link carries one message at a time, and edges stay FIFO. A collective ends no earlier than on a ring of such
links, counted from the call of its last member. Delays sleep and do not use the CPU, they depend only on seeds, and
each purpose has its own links. The clocks of ranks are compared, so all ranks must run on one machine.

    run_ranks(slowed(function, Link(latency_seconds=0.001)), 4)
"""

from __future__ import annotations

import heapq
import math
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar, cast, get_args

import torch
from torch import Tensor

from ranvier.comm.message import Message, encoded_bytes
from ranvier.comm.protocol import Backend, Group, Transport, Work
from ranvier.comm.sum_algorithms import Operation, ring_bytes
from ranvier.world import World


@dataclass(frozen=True, kw_only=True)
class Link:
    """A directed link between two ranks. The random delay of each message is uniform in [0, jitter_seconds].

    ValueError for a negative time or a bandwidth that is not positive.
    """

    latency_seconds: float = 0.0
    bytes_per_second: float = math.inf
    jitter_seconds: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("latency_seconds", 0.0), ("bytes_per_second", 1e-9), ("jitter_seconds", 0.0)):
            if not getattr(self, name) >= least:
                raise ValueError(f"Link.{name} is too small: {getattr(self, name)}")


Links = Link | Callable[[int, int], Link]
"""One link for every pair of ranks, or (source, destination) -> the link between them."""


def throttled(backend: Backend, links: Links, *, rank_delay_seconds: float = 0.0, seed: int = 0) -> Backend:
    """`backend` with every message and collective slowed down to `links`.

    Args:
        backend: of this rank.
        links: the same on every rank.
        rank_delay_seconds: each call on this rank first sleeps for a random time of up to this, which varies the
            interleaving of ranks in tests.
        seed: of these sleeps, together with the rank.
    """
    return _ThrottledBackend(backend, links, _Pause(rank_delay_seconds, f"{seed} rank {backend.rank}"))


_Result = TypeVar("_Result")


def slowed(function: Callable[[World], _Result], links: Links | None) -> Callable[[World], _Result]:
    """`function` for a world whose messages and collectives are slowed down to `links`; None leaves them as they
    are."""
    if links is None:
        return function
    return lambda world: function(replace(world, backend=throttled(world.backend, links)))


class _Pause:
    """A random sleep of bounded length."""

    def __init__(self, longest_seconds: float, key: str) -> None:
        self._longest, self._random = longest_seconds, random.Random(key)

    def __call__(self) -> None:
        if self._longest > 0.0:
            time.sleep(self._random.uniform(0.0, self._longest))


class _LinkClock:
    """Arrival times on one link: transfers queue for its bandwidth, then take latency and jitter, and stay in order."""

    def __init__(self, links: Links, source: int, destination: int, purpose: str) -> None:
        self.link = links if isinstance(links, Link) else links(source, destination)
        self._random = random.Random(f"{self.link.seed} {purpose} {source} {destination}")
        self._free_ns = self._last_ns = 0

    def arrival(self, sent_ns: int, num_bytes: int, hops: int = 1) -> int:
        """Arrival time (monotonic ns) of `num_bytes` sent at `sent_ns`. Must be called in the order of sending."""
        link = self.link
        self._free_ns = max(self._free_ns, sent_ns) + int(1e9 * num_bytes / link.bytes_per_second)
        delay = hops * link.latency_seconds + self._random.uniform(0.0, link.jitter_seconds)
        self._last_ns = max(self._last_ns, self._free_ns + int(1e9 * delay))
        return self._last_ns


class _ThrottledBackend:
    def __init__(self, backend: Backend, links: Links, pause: _Pause) -> None:
        self._inner, self._links, self._pause = backend, links, pause
        self.name, self.rank, self.size = backend.name, backend.rank, backend.size
        self.abort, self.close = backend.abort, backend.close

    def transport(self, purpose: str, *, on_host: bool = False) -> Transport:
        return cast(Transport, _ThrottledTransport(self._inner.transport(purpose, on_host=on_host), self._links,
                                                   self._pause, self.rank, purpose))

    def group(self, purpose: str, partition: Sequence[Sequence[int]]) -> Group:
        return cast(Group, _ThrottledGroup(self._inner.group(purpose, partition), self._links, self._pause, purpose))

    def subset(self, count: int) -> Backend | None:
        inner = self._inner.subset(count)
        return inner and _ThrottledBackend(inner, self._links, self._pause)


class _ThrottledTransport:
    def __init__(self, inner: Transport, links: Links, pause: _Pause, rank: int, purpose: str) -> None:
        self._inner, self._links, self._pause = inner, links, pause
        self._rank, self._purpose = rank, purpose
        self._clocks: dict[int, _LinkClock] = {}
        self._in_flight: list[tuple[int, int, Message]] = []
        self._count = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def connect(self, sources: Sequence[int], destinations: Sequence[int], capacity_bytes: int) -> None:
        self._inner.connect(sources, destinations, capacity_bytes)
        for source in sources:
            self._clocks.setdefault(source, _LinkClock(self._links, source, self._rank, self._purpose))

    def send(self, destination: int, message: Message) -> None:
        self._pause()
        self._inner.send(destination, message)

    def _accept(self, message: Message) -> None:
        arrival = self._clocks[message.source].arrival(message.sent_ns, encoded_bytes(message))
        heapq.heappush(self._in_flight, (arrival, self._count, message))
        self._count += 1

    def _due(self) -> Message | None:
        if self._in_flight and self._in_flight[0][0] <= time.monotonic_ns():
            return heapq.heappop(self._in_flight)[2]
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
        due = self._due()
        while due is None:
            until = min(deadline, self._in_flight[0][0]) if self._in_flight else deadline
            arrived = self._inner.wait(max(0.0, 1e-9 * (until - time.monotonic_ns())))
            if arrived is not None:
                self._accept(arrived)
            elif time.monotonic_ns() >= deadline:
                return self._due()
            due = self._due()
        return due


class _ThrottledGroup:
    """Each collective is accompanied by a tiny all-reduce, which finds the time at which its last member called."""

    def __init__(self, inner: Group, links: Links, pause: _Pause, purpose: str) -> None:
        self._inner, self._pause = inner, pause
        ring = zip(inner.ranks, (*inner.ranks[1:], inner.ranks[0]), strict=True) if len(inner.ranks) > 1 else ()
        self._clocks = [_LinkClock(links, source, destination, purpose) for source, destination in ring]
        self._in_flight: deque[_ThrottledWork] = deque()
        self._stamp_bytes = 0

    @property
    def bytes_received(self) -> int:
        return self._inner.bytes_received - self._stamp_bytes

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return partial(self._slow, cast(Operation, name), found) if name in get_args(Operation) else found

    def _slow(self, operation: Operation, start: Callable[..., Work], *tensors: Any, **options: Any) -> Work:
        self._pause()
        members = len(self.ranks)
        if members == 1:
            return start(*tensors, **options)
        called_ns = torch.tensor([time.monotonic_ns()], device="cpu")
        before = self._inner.bytes_received
        stamp = self._inner.all_reduce(called_ns, "max")
        self._stamp_bytes += self._inner.bytes_received - before
        whole: Tensor = tensors[1 if operation == "reduce_scatter" else 0]
        load = ring_bytes(operation, members, whole.numel() * whole.element_size())
        hops = (members - 1) * (2 if operation == "all_reduce" else 1)
        work = _ThrottledWork(start(*tensors, **options), stamp, self._in_flight, lambda: max(
            clock.arrival(int(called_ns), load, hops) for clock in self._clocks))
        self._in_flight.append(work)
        return work


class _ThrottledWork:
    """Work that is done when `work` is done and its arrival time has passed.

    Arrival times are computed in call order, as link clocks require.
    """

    def __init__(self, work: Work, stamp: Work, in_flight: deque[_ThrottledWork], arrival: Callable[[], int]) -> None:
        self._work, self._stamp, self._in_flight, self._arrival = work, stamp, in_flight, arrival
        self._due_ns: int | None = None

    def _find_due(self, block: bool) -> int | None:
        """Compute the arrival times of all earlier work and of this; None if `block` is False and a member of one has
        not called yet."""
        while self._due_ns is None:
            first = self._in_flight[0]
            if block:
                first._stamp.wait()
            elif not first._stamp.done():
                return None
            first._due_ns = first._arrival()
            self._in_flight.popleft()
        return self._due_ns

    def done(self) -> bool:
        if not self._work.done():
            return False
        due_ns = self._find_due(block=False)
        return due_ns is not None and time.monotonic_ns() >= due_ns

    def wait(self) -> None:
        self._work.wait()
        due_ns = self._find_due(block=True)
        assert due_ns is not None, "blocking finds all arrival times"
        time.sleep(max(0.0, 1e-9 * (due_ns - time.monotonic_ns())))
