"""Ranks as threads of one process: for tests, and for debugging a complete run in one debugger.

Messages are encoded and decoded as in the other backends, so that a received message is a copy with the same limits.
In a collective each member deposits its tensors, and the last member to call does the work for all, in member order:
results are bit-identical on every member and in every interleaving. A call that starts a collective never blocks.

`InProcessWorld.abort` wakes every waiting thread with a TransportError that names the failed rank.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, cast

from torch import Tensor

from ranvier.comm.collectives import CheckedGroup, check_subset, locate_in_partition, reduce_into
from ranvier.comm.edges import EdgesOfRank, peer_lost
from ranvier.comm.message import Message, decode
from ranvier.comm.protocol import Reduction, Work
from ranvier.errors import TransportError

_Shared = TypeVar("_Shared", bound="_Meeting | InProcessWorld")


class _Meeting:
    """State for which threads wait on a condition."""

    def __init__(self) -> None:
        self.condition = threading.Condition()

    def abort(self, rank: int) -> None:
        """Wake all waiting threads."""
        with self.condition:
            self.condition.notify_all()


class InProcessWorld:
    """State that the ranks of one process share. Threads wait only on conditions of objects in `_shared`.

    Args:
        size: number of ranks.
        whole: the world of all ranks, for the world of a subset; None for the world of all ranks itself.
    """

    def __init__(self, size: int, whole: InProcessWorld | None = None) -> None:
        self.size, self.whole = size, whole or self
        self.failed_rank: int | None = None
        self._lock = threading.Lock()
        self._purposes: dict[int, str] = {}
        self._shared: dict[object, _Meeting | InProcessWorld] = {}

    def backend(self, rank: int) -> InProcessBackend:
        """The backend of `rank`, to be used by that rank's thread."""
        return InProcessBackend(self, rank)

    def abort(self, rank: int = -1) -> None:
        """Wake all threads that wait now or later with a TransportError: `rank` has failed. Idempotent."""
        with self._lock:
            if self.failed_rank is None:
                self.failed_rank = rank
            shared = list(self._shared.values())
        for one in shared:
            one.abort(rank)

    def check(self, purpose: str) -> None:
        """TransportError if a rank has failed. purpose: of the caller's transport or group."""
        if self.whole.failed_rank is not None:
            raise peer_lost(purpose, self.whole.failed_rank)

    def shared_result(self, call: int, what: str, part: object, make: Callable[[], _Shared]) -> _Shared:
        """The result of `make` that all ranks share, requested in their `call`-th call. part: which result, if there
        are several. TransportError if another rank makes something other than `what` in that call."""
        with self._lock:
            if self._purposes.setdefault(call, what) != what:
                raise TransportError(f"is made while another rank makes {self._purposes[call]}",
                                     code="transport-order-differs", where=what,
                                     remedy="Make the same transports and groups in the same order on every rank.")
            return cast(_Shared, self._shared.setdefault((call, part), make()))


class InProcessBackend:
    """A `protocol.Backend` for one rank, which is a thread."""

    name: Literal["in-process"] = "in-process"

    def __init__(self, world: InProcessWorld, rank: int) -> None:
        self.world, self.rank, self.size = world, rank, world.size
        self._calls = 0
        self._open: list[InProcessTransport | InProcessGroup] = []

    def transport(self, purpose: str, *, on_host: bool = False) -> InProcessTransport:
        """See `protocol.Backend`."""
        self._calls += 1
        inboxes = [self.world.shared_result(self._calls, f"transport {purpose!r}", rank, _Inbox)
                   for rank in range(self.size)]
        transport = InProcessTransport(self.world, purpose, self.rank, inboxes)
        self._open.append(transport)
        return transport

    def group(self, purpose: str, partition: Sequence[Sequence[int]]) -> InProcessGroup:
        """See `protocol.Backend`."""
        self._calls += 1
        ranks, index = locate_in_partition(partition, self.rank, self.size, purpose)
        exchange = self.world.shared_result(self._calls, f"group {purpose!r}", ranks, _Exchange)
        group = InProcessGroup(self.world, exchange, purpose, ranks, index)
        self._open.append(group)
        return group

    def subset(self, count: int) -> InProcessBackend | None:
        """See `protocol.Backend`."""
        self._calls += 1
        check_subset(count, self.size)
        shared = self.world.shared_result(self._calls, f"subset of {count}", count,
                                          lambda: InProcessWorld(count, self.world.whole))
        return InProcessBackend(shared, self.rank) if self.rank < count else None

    def abort(self, code: int) -> None:
        """Wake all waiting threads with an error; a thread has no exit code."""
        self.world.whole.abort(self.rank)

    def close(self) -> None:
        """See `protocol.Backend`."""
        while self._open:
            self._open.pop().close()


class _Inbox(_Meeting):
    """Messages for one rank. Messages from sources that it has not connected to yet are held back."""

    def __init__(self) -> None:
        super().__init__()
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


class InProcessTransport(EdgesOfRank):
    """A `protocol.Transport` between threads."""

    longest_gap_seconds = 0.0
    needs_progress = False
    """Messages are delivered when they are sent, so there is no gap."""

    def __init__(self, world: InProcessWorld, purpose: str, rank: int, inboxes: list[_Inbox]) -> None:
        super().__init__(purpose, rank, world.size)
        self._world, self._inboxes, self._inbox = world, inboxes, inboxes[rank]

    def connect(self, sources: Sequence[int], destinations: Sequence[int], capacity_bytes: int) -> None:
        """See `protocol.Transport`. Memory is shared, so a message of any size arrives in one part."""
        self._inbox.connect(self.open(sources, destinations, sys.maxsize))

    def send(self, destination: int, message: Message) -> None:
        """See `protocol.Transport`. TransportError if a rank has failed, as for `poll` and `wait`."""
        self._check()
        (wire,) = self.outgoing(destination, message)
        self._inboxes[destination].put(decode(wire, self.rank))

    def poll(self) -> list[Message]:
        """See `protocol.Transport`."""
        self._check()
        with self._inbox.condition:
            messages = list(self._inbox.arrived)
            self._inbox.arrived.clear()
        return [_copy_to_receiver(message) for message in messages]

    def wait(self, timeout_seconds: float) -> Message | None:
        """See `protocol.Transport`."""
        self._check()
        inbox, deadline = self._inbox, time.monotonic() + timeout_seconds
        with inbox.condition:
            while not inbox.arrived:
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._world.check(self.purpose)
                inbox.condition.wait(left)
            message = inbox.arrived.popleft()
        return _copy_to_receiver(message)

    def _check(self) -> None:
        self.check_open()
        self._world.check(self.purpose)

    def progress(self) -> None:
        """Nothing to progress: messages are delivered when sent. TransportError if a rank has failed."""
        self._world.check(self.purpose)

    def flush(self, timeout_seconds: float = math.inf) -> bool:
        """True: messages have left when `send` returns."""
        return True

    def close(self) -> None:
        """Refuse further calls. Idempotent."""
        self.closed = True


def _copy_to_receiver(message: Message) -> Message:
    """The message in the receiver's own memory, where its memory tracker counts it instead of the sender's."""
    message.tensors = {name: tensor.clone() for name, tensor in message.tensors.items()}
    return message


_Call = tuple[Any, ...]
"""Name and parameters of a collective, equal on all members."""
_Deposit = tuple[Any, ...]
"""Tensors, and splits, of one member."""


class _Collective:
    """One collective in flight, the `protocol.Work` of every member: the tensors of each, and how it ended."""

    def __init__(self, call: _Call, world: InProcessWorld, exchange: _Exchange, group: CheckedGroup) -> None:
        self.call, self._world, self._exchange, self._purpose = call, world, exchange, group.purpose
        self.deposits: list[_Deposit | None] = [None] * len(group.ranks)
        self.finished = False
        self.error: TransportError | None = None

    def done(self) -> bool:
        if not self.finished:
            self._world.check(self._purpose)
        return self.finished

    def wait(self) -> None:
        with self._exchange.condition:
            while not self.done():
                self._exchange.condition.wait()
        if self.error is not None:
            raise self.error


class _Exchange(_Meeting):
    """The unfinished collectives of one group, by their number."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: dict[int, _Collective] = {}


class InProcessGroup(CheckedGroup):
    """A `protocol.Group` of threads."""

    def __init__(self, world: InProcessWorld, exchange: _Exchange, purpose: str, ranks: Sequence[int], index: int
                 ) -> None:
        super().__init__(purpose, ranks, index)
        self._world, self._exchange, self._number = world, exchange, 0

    def _start(self, call: _Call, deposit: _Deposit, work: Callable[[list[Any]], None]) -> Work:
        """Add `deposit`; the last member to call runs `work` on the deposits of all, in member order.

        It runs under the exchange's lock, and every member makes its calls in the same order, so collectives finish in
        call order.
        """
        self._world.check(self.purpose)
        exchange = self._exchange
        with exchange.condition:
            collective = exchange.collectives.setdefault(
                self._number, _Collective(call, self._world, exchange, self))
            if collective.call != call:
                collective.error = self._error("collectives-differ", call[0],
                                               f"member {self.index} calls {call} where another called "
                                               f"{collective.call}")
            collective.deposits[self.index] = deposit
            if None not in collective.deposits:
                del exchange.collectives[self._number]
                self._finish(collective, work)
                exchange.condition.notify_all()
        self._number += 1
        return collective

    def _finish(self, collective: _Collective, work: Callable[[list[Any]], None]) -> None:
        try:
            if collective.error is None:
                work(collective.deposits)
        except TransportError as error:
            collective.error = error
        collective.deposits = []  # a member's tensors must not stay alive until the last member has waited
        collective.finished = True

    def _all_reduce(self, tensor: Tensor, op: Reduction) -> Work:
        def work(deposits: list[tuple[Tensor]]) -> None:
            (total,), *others = deposits
            for (tensor,) in others:
                reduce_into(total, tensor, op)
            for (tensor,) in others:
                tensor.copy_(total)
        return self._start(("all_reduce", op, tensor.dtype, tensor.numel()), (tensor,), work)

    def _reduce(self, tensor: Tensor, root: int) -> Work:
        return self._all_reduce(tensor, "sum")

    def _reduce_scatter(self, output: Tensor, tensor: Tensor) -> Work:
        def work(deposits: list[tuple[Tensor, Tensor]]) -> None:
            for (out, _), shares in zip(deposits,
                                        zip(*(tensor.chunk(len(deposits)) for _, tensor in deposits), strict=True),
                                        strict=True):
                total = shares[0].clone()  # `out` may be one of the shares
                for share in shares[1:]:
                    total.add_(share)
                out.copy_(total)
        return self._start(("reduce_scatter", tensor.dtype, tensor.numel()), (output, tensor), work)

    def _all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        def work(deposits: list[tuple[Tensor, Tensor]]) -> None:
            for out, _ in deposits:  # without a copy of the full tensor, which no other backend makes
                for place, (_, tensor) in zip(out.tensor_split(len(deposits)), deposits, strict=True):
                    place.copy_(tensor)
        return self._start(("all_gather", tensor.numel()), (output, tensor), work)

    def _broadcast(self, tensor: Tensor, root: int) -> Work:
        def work(deposits: list[tuple[Tensor]]) -> None:
            for index, (tensor,) in enumerate(deposits):
                if index != root:
                    tensor.copy_(deposits[root][0])
        return self._start(("broadcast", root, tensor.numel()), (tensor,), work)

    def _all_to_all(self, output: Tensor, tensor: Tensor, received: list[int], sent: list[int]) -> Work:
        def work(deposits: list[tuple[Tensor, Tensor, list[int], list[int]]]) -> None:
            shares = [tensor.split(sizes) for _, tensor, _, sizes in deposits]
            for index, (out, _, sizes, _) in enumerate(deposits):
                parts = [share[index] for share in shares]
                if [share.numel() for share in parts] != sizes:
                    raise self._error("all-to-all-sizes-differ", "all_to_all",
                                      f"member {index} expects other sizes than it receives",
                                      (sizes, [share.numel() for share in parts]))
                for place, share in zip(out.split(sizes), parts, strict=True):
                    place.copy_(share)
        return self._start(("all_to_all",), (output, tensor, received, sent), work)
