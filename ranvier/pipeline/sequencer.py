"""One order of actions on all row x col ranks of a stage.

Blocks on a tensor mesh contain collectives, and messages reach the ranks of a stage in different orders. Ranks that
chose for themselves would deadlock, or mix buffers. So the leader, position (0, 0), decides from its own arrivals and
announces action n as it starts it; its peers follow, and each waits for its own message of that action. That message
arrives, because the stages before and after have the same order and sends never block.
"""

from __future__ import annotations

from typing import Literal

import torch

from ranvier.comm.board import Board
from ranvier.comm.message import Message, MessageKind
from ranvier.comm.protocol import Backend
from ranvier.errors import MessageTimeout, TransportError
from ranvier.mesh import Mesh
from ranvier.schedule.schedule import Action

_KINDS: tuple[Literal["F", "B", "W", "C"], ...] = ("F", "B", "W", "C")
_DONE = -1


class Sequencer:
    """Sends the leader's announcements, and receives them on peers. Does nothing on a stage of one rank.

    check_order: before each action all ranks of the stage compare its number and text; TransportError if they differ.
    """

    def __init__(self, mesh: Mesh, rank: int, backend: Backend, board: Board, timeout_seconds: float,
                 check_order: bool) -> None:
        ranks = mesh.stage_ranks(rank)
        self._leader, self._peers = ranks[0], ranks[1:]
        self.leads = rank == self._leader
        """Whether this rank decides; always so on a stage of one rank."""
        self._board, self._timeout, self._sent = board, timeout_seconds, 0
        self._announced = 0
        """Number of announcements that this rank has sent or received."""
        self._transport = self._group = None
        if mesh.stage_size > 1:
            self._transport = backend.transport("stage order", on_host=True)
            sources = [] if self.leads else [self._leader]
            self._transport.connect(sources, list(self._peers) if self.leads else [], 4096)
            stages = sorted({mesh.stage_ranks(other) for other in range(mesh.size)})
            self._group = backend.group("stage order", stages) if check_order else None

    def announce(self, call: int, action: Action | None) -> None:
        """Leader: tell the peers the next action; None says that the batch is done."""
        if self._transport is None:
            return
        self._announced += 1
        code = [_DONE, 0, 0, 0] if action is None else [
            _KINDS.index(action.kind), int(action.defer), action.product, action.turn]
        message = Message(MessageKind.ACTION, call, 0 if action is None else action.microbatch,
                          {"action": torch.tensor([*code, self._announced], dtype=torch.int64)})
        for peer in self._peers:
            self._transport.send(peer, message)
        self._check(action)

    def next(self, call: int) -> Action | None:
        """Peer: wait for the leader's next action; None when the batch is done."""
        assert self._transport is not None, "a stage of one rank has no announcements"
        message = self._board.wait("the next action", self._leader, self._transport.wait, self._timeout)
        if message is None:
            raise MessageTimeout(
                "an announcement did not come\n" + self._board.report("the next action", self._leader, self._timeout),
                code="announcement-late", where="comm.timeout-seconds", value=self._timeout,
                remedy="Check which rank is behind, or raise `--comm.timeout-seconds`.")
        self._announced += 1
        kind, defer, product, turn, number = message.tensors["action"].tolist()
        if number != self._announced:  # ranks of a stage with different orders compute silently wrong results
            raise TransportError(f"announcement {self._announced} is lost: that of {number} came first",
                                 code="announcement-lost", where=f"messages from {self._board.name(self._leader)}",
                                 remedy="Resume with `--resume auto`; if it happens again, check the network between "
                                        "the two, and their memory.")
        assert message.step == call, f"an action of batch {message.step} came in batch {call}"
        action = None if kind == _DONE else Action(_KINDS[kind], message.microbatch, bool(defer), product, turn)
        self._check(action)
        return action

    def _check(self, action: Action | None) -> None:
        if self._group is not None:
            self._sent += 1
            actions = self._group.gather_objects([self._sent, str(action)])
            if any(word != actions[0] for word in actions):
                raise TransportError("the ranks of a stage run different actions", code="stage-order-differs",
                                     where="stage order", value=actions,
                                     remedy="This is a bug in Ranvier: please report it with this text.")

    def close(self) -> None:
        """Release the communicators. Idempotent."""
        if self._transport is not None:
            self._transport.flush()
            self._transport.close()
            self._transport = None
        if self._group is not None:
            self._group.close()
            self._group = None
