"""The inbox of one rank: arrived messages of the current batch, in any order.

Ranks do not wait for each other between batches, so messages of the next batch may arrive while this one runs: they are
kept until it begins. A wait that takes too long ends in a report of which rank waits for what.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Literal

from torch import Tensor

from ranvier.comm.board import Board
from ranvier.comm.message import Message, MessageKind
from ranvier.comm.protocol import Transport
from ranvier.errors import MessageTimeout, ModelError, TransportError
from ranvier.pipeline.statistics import calls_differ
from ranvier.schedule.spans import Timeline

Direction = Literal["forward", "return"]
OnArrival = Callable[[Direction, int, int], None]
"""Called with a message's direction, its microbatch, and the stage that it is for."""


_DIRECTIONS: dict[MessageKind, Direction] = {
    MessageKind.FORWARD: "forward", MessageKind.BACKWARD: "return", MessageKind.CREDIT: "return"}
"""Kind of message -> which of a microbatch's two crossings of an edge it is; other kinds are outside the pipeline's
flow."""


_CALLS = "evaluates or predicts", "trains"


def call_number(call: int, *, training: bool) -> int:
    """The number of batch `call` in its messages, by which a receiver sees whether both ranks do the same with it."""
    return 2 * call + training


class Inbox:
    """Messages that have arrived over one transport.

    other: called with messages that are neither forward nor return.
    """

    def __init__(self, transport: Transport, board: Board, timeline: Timeline, timeout_seconds: float,
                 other: Callable[[Message], None]) -> None:
        self._transport, self._board, self._timeline, self._other = transport, board, timeline, other
        self._timeout = timeout_seconds
        self.bytes_received = 0
        """Payload bytes of everything that has arrived here."""
        self.received: Callable[[Iterable[Tensor]], None] | None = None
        """Called with the tensors of each message from another rank, if their memory is counted."""
        self._call = self._step = 0
        self._count = 0
        self._arrived: dict[tuple[Direction, int, int], Message] = {}
        self._early: list[Message] = []
        self._next: dict[tuple[Direction, int], int] = {}
        self._on_arrival: OnArrival = lambda direction, microbatch, stage: None

    def begin(self, call: int, step: int, num_microbatches: int, on_arrival: OnArrival) -> None:
        """Begin the batch with this number (`call_number`); `on_arrival` is called for each of its messages on arrival,
        immediately for early ones.

        step: the training step to which waits are attributed.
        """
        self._call, self._step, self._count, self._on_arrival = call, step, num_microbatches, on_arrival
        early, self._early, self._next = self._early, [], {}
        for message in early:  # which an evaluation under torch.inference_mode may have received
            message.tensors = {name: tensor.clone() if tensor.is_inference() else tensor
                               for name, tensor in message.tensors.items()}
            self._sort(message)

    def _receive(self, message: Message) -> None:
        self.bytes_received += message.payload_bytes
        if self.received is not None:
            self.received(message.tensors.values())
        self._sort(message)

    def _sort(self, message: Message) -> None:
        way = _DIRECTIONS.get(message.kind)
        if way is None:
            self._other(message)
        elif message.step != self._call and message.step // 2 == self._call // 2:
            raise calls_differ(f"{self._board.name(message.source)} {_CALLS[message.step % 2]}, and this rank "
                               f"{_CALLS[self._call % 2]}")
        elif message.step > self._call:
            self._early.append(message)
        else:
            if message.step < self._call:
                raise ModelError(f"the {message} came from {self._board.name(message.source)}, but belongs to a batch "
                                 "that has ended here", code="message-of-ended-batch", where="train_batch",
                                 remedy="Give all ranks of a replica the same number of microbatches.")
            if message.microbatch >= self._count:
                raise ModelError(f"has {self._count} microbatches here, but {self._board.name(message.source)} sends "
                                 f"number {message.microbatch}", code="microbatch-counts-differ", where="train_batch",
                                 remedy="Give all ranks of a replica the same number of microbatches.")
            edge = way, message.stage
            expected = self._next.get(edge, 0)
            if message.microbatch != expected:  # an edge keeps the order of its messages to a stage
                raise TransportError(f"the {_NAMES[way]} of microbatch {expected} is lost: that of "
                                     f"{message.microbatch} came first", code="message-lost",
                                     where=f"messages from {self._board.name(message.source)}",
                                     remedy="Resume with `--resume auto`; if it happens again, check the network "
                                            "between the two, and their memory.")
            self._next[edge] = expected + 1
            self._arrived[way, message.stage, expected] = message
            self._on_arrival(way, expected, message.stage)

    def poll(self) -> None:
        """Receive everything that has arrived; never blocks."""
        for message in self._transport.poll():
            self._receive(message)

    def deliver(self, message: Message) -> None:
        """Take a message from another stage of this rank."""
        self._sort(message)

    def take(self, way: Direction, microbatch: int, stage: int, source: int) -> Message:
        """Return this message for `stage`; wait for it if it has not arrived yet."""
        place = way, stage, microbatch
        while place not in self._arrived:
            self.wait(f"the {_NAMES[way]} of microbatch {microbatch}", source)
        return self._arrived.pop(place)

    def wait(self, what: str, source: int) -> None:
        """Sleep until any message arrives. Raises MessageTimeout, with the full board, if none does in time."""
        started = time.monotonic_ns()
        message = self._board.wait(what, source, self._transport.wait, self._timeout)
        if message is None:
            seconds = (time.monotonic_ns() - started) * 1e-9
            raise MessageTimeout("a message did not come\n" + self._board.report(what, source, seconds),
                                 code="message-late", where="comm.timeout-seconds", value=self._timeout,
                                 remedy="Check which rank is behind, or raise `--comm.timeout-seconds`.")
        self._timeline.add("wait", what, self._step, started)
        self._receive(message)


_NAMES: dict[Direction, str] = {"forward": "forward", "return": "backward"}
