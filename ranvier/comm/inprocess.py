"""Ranks as threads of one process: for tests, and for looking into a whole run with one debugger.

Messages pass through the wire form like everywhere else, so that what arrives is a copy with the same limits. A
collective is a meeting: members leave their tensors, and the last to come does the work for all, in member order, so
that results are the same to the bit on every member and in every interleaving. Nobody waits in a call that starts one.

`InProcessWorld.abort` wakes every thread that waits with a TransportError that names the failed rank.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from ranvier.comm.collectives import REDUCE, CheckedGroup, check_subset, place_in
from ranvier.comm.edges import Edges, lost_peer
from ranvier.comm.message import Message, decode
from ranvier.comm.protocol import Reduction, Work
from ranvier.errors import TransportError


class InProcessWorld:
    """What the ranks of one process share. Every thread that waits does so on a condition listed in `_conditions`."""

    def __init__(self, size: int, whole: InProcessWorld | None = None) -> None:
        self.size, self.whole = size, whole or self
        self._subsets: dict[int, InProcessWorld] = {}
        self.failed_rank: int | None = None
        self._lock = threading.Lock()
        self._conditions: list[threading.Condition] = []
        self._inboxes: dict[int, list[_Inbox]] = {}
        self._circles: dict[tuple[int, tuple[int, ...]], _Circle] = {}
        self._purposes: dict[int, str] = {}

    def backend(self, rank: int) -> InProcessBackend:
        """The backend of one rank; to be used by that rank's thread."""
        return InProcessBackend(self, rank)

    def abort(self, rank: int = -1) -> None:
        """`rank` has failed: wake all threads that wait, now and later, with a TransportError. Idempotent."""
        with self._lock:
            if self.failed_rank is None:
                self.failed_rank = rank
            conditions, subsets = list(self._conditions), list(self._subsets.values())
        for subset in subsets:
            subset.abort(rank)
        for condition in conditions:
            with condition:
                condition.notify_all()

    def check(self, purpose: str) -> None:
        if self.failed_rank is not None:
            raise lost_peer(purpose, self.failed_rank)

    def inboxes(self, call: int, purpose: str) -> list[_Inbox]:
        """One inbox per rank, for the transport that all ranks make in their `call`-th call."""
        with self._lock:
            self._agree(call, f"transport {purpose!r}")
            if call not in self._inboxes:
                self._inboxes[call] = [_Inbox() for _ in range(self.size)]
                self._conditions += [inbox.condition for inbox in self._inboxes[call]]
            return self._inboxes[call]

    def circle(self, call: int, purpose: str, ranks: tuple[int, ...]) -> _Circle:
        """The meeting place of `ranks`, for the group that all ranks make in their `call`-th call."""
        with self._lock:
            self._agree(call, f"group {purpose!r}")
            if (call, ranks) not in self._circles:
                self._circles[call, ranks] = _Circle()
                self._conditions.append(self._circles[call, ranks].condition)
            return self._circles[call, ranks]

    def subset(self, call: int, count: int) -> InProcessWorld:
        """What the first `count` ranks share, in the subset that all ranks make in their `call`-th call."""
        with self._lock:
            self._agree(call, f"subset of {count}")
            if call not in self._subsets:
                self._subsets[call] = InProcessWorld(count, self.whole)
                self._subsets[call].failed_rank = self.failed_rank
            return self._subsets[call]

    def _agree(self, call: int, what: str) -> None:
        if self._purposes.setdefault(call, what) != what:
            raise TransportError(f"is made where another rank makes {self._purposes[call]}", where=what,
                                 remedy="Make the same transports and groups in the same order on every rank.")


class InProcessBackend:
    """One thread's access to the others."""

    name: Literal["in-process"] = "in-process"

    def __init__(self, world: InProcessWorld, rank: int) -> None:
        self.world, self.rank, self.size = world, rank, world.size
        self._calls = 0
        self._open: list[InProcessTransport | InProcessGroup] = []

    def transport(self, purpose: str) -> InProcessTransport:
        self._calls += 1
        self._open.append(InProcessTransport(self.world, purpose, self.rank, self.world.inboxes(self._calls, purpose)))
        return self._open[-1]

    def group(self, purpose: str, partition: Sequence[Sequence[int]]) -> InProcessGroup:
        self._calls += 1
        ranks, index = place_in(partition, self.rank, self.size, purpose)
        circle = self.world.circle(self._calls, purpose, ranks)
        self._open.append(InProcessGroup(self.world, circle, purpose, ranks, index))
        return self._open[-1]

    def subset(self, count: int) -> InProcessBackend | None:
        self._calls += 1
        check_subset(count, self.size)
        shared = self.world.subset(self._calls, count)
        return InProcessBackend(shared, self.rank) if self.rank < count else None

    def abort(self, code: int) -> None:
        self.world.whole.abort(self.rank)

    def close(self) -> None:
        while self._open:
            self._open.pop().close()


class _Inbox:
    """Messages for one rank. Those from sources that it has not connected yet are held back."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.sources: set[int] = set()
        self.arrived: deque[Message] = deque()
        self.held: list[Message] = []

    def put(self, message: Message) -> None:
        with self.condition:
            if message.source in self.sources:
                self.arrived.append(message)
                self.condition.notify()
            else:
                self.held.append(message)

    def connect(self, sources: Sequence[int]) -> None:
        with self.condition:
            self.sources.update(sources)
            self.arrived.extend(message for message in self.held if message.source in self.sources)
            self.held = [message for message in self.held if message.source not in self.sources]


class InProcessTransport:
    """A `protocol.Transport` between threads."""

    longest_gap_seconds = 0.0

    def __init__(self, world: InProcessWorld, purpose: str, rank: int, inboxes: list[_Inbox]) -> None:
        self._world, self._inboxes, self._inbox = world, inboxes, inboxes[rank]
        self._edges = Edges(purpose, rank, world.size)

    @property
    def bytes_sent(self) -> int:
        return self._edges.bytes_sent

    def connect(self, sources: Sequence[int], destinations: Sequence[int], capacity_bytes: int) -> None:
        # Memory is shared: a message of any size arrives as one.
        self._inbox.connect(self._edges.open(sources, destinations, sys.maxsize))

    def send(self, destination: int, message: Message) -> None:
        self._check()
        (wire,) = self._edges.outgoing(destination, message)
        self._inboxes[destination].put(decode(wire, self._edges.rank))

    def poll(self) -> list[Message]:
        self._check()
        with self._inbox.condition:
            messages = list(self._inbox.arrived)
            self._inbox.arrived.clear()
        return messages

    def wait(self, timeout_seconds: float) -> Message | None:
        self._check()
        inbox, deadline = self._inbox, time.monotonic() + timeout_seconds
        with inbox.condition:
            while not inbox.arrived:
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._world.check(self._edges.purpose)
                inbox.condition.wait(left)
            return inbox.arrived.popleft()

    def _check(self) -> None:
        self._edges.check_open()
        self._world.check(self._edges.purpose)

    def progress(self) -> None:
        """Messages move when they are sent."""

    def flush(self, timeout_seconds: float = math.inf) -> bool:
        """Messages have left when `send` returns."""
        return True

    def close(self) -> None:
        self._edges.closed = True


class _Meeting:
    """One collective: what each member brought, and how it ended."""

    def __init__(self, call: tuple, members: int) -> None:
        self.call = call
        self.brought: list[tuple | None] = [None] * members
        self.over = False
        self.error: TransportError | None = None


class _Circle:
    """The meetings of one group, by their number."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.meetings: dict[int, _Meeting] = {}


class _Attendance:
    """A member's `protocol.Work`."""

    def __init__(self, world: InProcessWorld, circle: _Circle, meeting: _Meeting, purpose: str) -> None:
        self._world, self._circle, self._meeting, self._purpose = world, circle, meeting, purpose

    def done(self) -> bool:
        if not self._meeting.over:
            self._world.check(self._purpose)
        return self._meeting.over

    def wait(self) -> None:
        with self._circle.condition:
            while not self.done():
                self._circle.condition.wait()
        if self._meeting.error is not None:
            raise self._meeting.error


class InProcessGroup(CheckedGroup):
    """A `protocol.Group` of threads."""

    def __init__(self, world: InProcessWorld, circle: _Circle, purpose: str, ranks: Sequence[int], index: int) -> None:
        super().__init__(purpose, ranks, index)
        self._world, self._circle, self._number = world, circle, 0

    def _meet(self, call: tuple, bring: tuple, work: Callable[[list[tuple]], None]) -> Work:
        """Leave `bring`; the last member runs `work` on everybody's, in member order.

        That happens under the circle's lock and every member brings its calls in the same order, so meetings end in
        call order.
        """
        self._world.check(self.purpose)
        circle = self._circle
        with circle.condition:
            meeting = circle.meetings.setdefault(self._number, _Meeting(call, len(self.ranks)))
            if meeting.call != call:
                meeting.error = self._error(call[0], f"member {self.index} brings {call} where another brought "
                                                     f"{meeting.call}")
            meeting.brought[self.index] = bring
            if None not in meeting.brought:
                del circle.meetings[self._number]
                self._finish(meeting, work)
                circle.condition.notify_all()
        self._number += 1
        return _Attendance(self._world, circle, meeting, self.purpose)

    def _finish(self, meeting: _Meeting, work: Callable[[list[tuple]], None]) -> None:
        try:
            if meeting.error is None:
                work(meeting.brought)
        except TransportError as error:
            meeting.error = error
        meeting.brought = []  # who has waited lets go of its tensors, whoever has not
        meeting.over = True

    def _all_reduce(self, tensor: Tensor, op: Reduction) -> Work:
        def work(brought: list[tuple[Tensor]]) -> None:
            total = brought[0][0].clone()
            for (one,) in brought[1:]:
                REDUCE[op](total, one, out=total)
            for (one,) in brought:
                one.copy_(total)
        return self._meet(("all_reduce", op, tensor.dtype, tensor.numel()), (tensor,), work)

    def _reduce(self, tensor: Tensor, root: int) -> Work:
        def work(brought: list[tuple[Tensor]]) -> None:
            total = brought[root][0]
            for index, (one,) in enumerate(brought):
                if index != root:
                    total.add_(one)
        return self._meet(("reduce", root, tensor.dtype, tensor.numel()), (tensor,), work)

    def _reduce_scatter(self, output: Tensor, tensor: Tensor) -> Work:
        def work(brought: list[tuple[Tensor, Tensor]]) -> None:
            total = brought[0][1].clone()
            for _, one in brought[1:]:
                total.add_(one)
            for share, (out, _) in zip(total.chunk(len(brought)), brought, strict=True):
                out.copy_(share)
        return self._meet(("reduce_scatter", tensor.dtype, tensor.numel()), (output, tensor), work)

    def _all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        def work(brought: list[tuple[Tensor, Tensor]]) -> None:
            whole = torch.cat([one for _, one in brought])
            for out, _ in brought:
                out.copy_(whole)
        return self._meet(("all_gather", tensor.numel()), (output, tensor), work)

    def _broadcast(self, tensor: Tensor, root: int) -> Work:
        def work(brought: list[tuple[Tensor]]) -> None:
            for index, (one,) in enumerate(brought):
                if index != root:
                    one.copy_(brought[root][0])
        return self._meet(("broadcast", root, tensor.numel()), (tensor,), work)

    def _all_to_all(self, output: Tensor, tensor: Tensor, received: list[int], sent: list[int]) -> Work:
        def work(brought: list[tuple[Tensor, Tensor, list[int], list[int]]]) -> None:
            shares = [one.split(sizes) for _, one, _, sizes in brought]
            for index, (out, _, sizes, _) in enumerate(brought):
                mine = [share[index] for share in shares]
                if [share.numel() for share in mine] != sizes:
                    raise self._error("all_to_all", f"member {index} expects other sizes than it is sent",
                                      (sizes, [share.numel() for share in mine]))
                out.copy_(torch.cat(mine))
        return self._meet(("all_to_all",), (output, tensor, received, sent), work)
