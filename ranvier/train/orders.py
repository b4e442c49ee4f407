"""What rank 0 tells ranks that take no part: they wait for it, and do nothing else meanwhile."""

from __future__ import annotations

import json
import time

import torch

from ranvier.comm.board import Board, in_time, said
from ranvier.comm.edges import no_message
from ranvier.comm.message import Kind, Message, checksum
from ranvier.errors import MessageTimeout, TransportError
from ranvier.world import World

_CAPACITY_BYTES = 1 << 12
_WAIT_SECONDS = 5.0


class Orders:
    """A connection from rank 0 to every other rank of the world. Collective to make."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._transport = world.backend.transport("orders")
        others = list(range(1, world.size)) if world.rank == 0 else []
        self._transport.connect([0] if world.rank else [], others, _CAPACITY_BYTES)

    def send(self, order: dict[str, object], first: int) -> None:
        """Rank 0 tells `order`, which JSON can hold, to ranks from `first` on."""
        assert self._world.rank == 0
        data = torch.frombuffer(bytearray(json.dumps(order).encode()), dtype=torch.uint8)
        for rank in range(first, self._world.size):
            self._transport.send(rank, Message(Kind.ORDER, 0, 0, {"": data, "checksum": checksum(data)}))
        self._transport.progress()

    def wait(self, timeout_seconds: float) -> dict[str, object]:
        """The next order. Waits as long as it takes: an idle rank has no work that could be late. Meanwhile others hear
        of it, and it of rank 0. TransportError where rank 0 has gone, MessageTimeout where nothing has been heard of it
        for so long."""
        board = Board(self._world.store, self._world.rank, self._world.mesh)
        board.doing = "idleness, waiting for orders"
        try:
            message = self._next(timeout_seconds)
        finally:
            board.close()
        if message.kind is not Kind.ORDER:
            raise TransportError("is no order", where=f"message from rank {message.source}", value=str(message),
                                 remedy="Give all ranks one version of Ranvier.")
        data = message.tensors[""].cpu()
        if int(message.tensors["checksum"]) != int(checksum(data)):
            raise no_message("orders", message.source, "the order has been changed on its way")
        return json.loads(bytes(data.numpy()))

    def _next(self, timeout_seconds: float) -> Message:
        heard, heard_at = None, time.monotonic()
        while (message := self._transport.wait(min(_WAIT_SECONDS, timeout_seconds))) is None:
            now = in_time(lambda: said(self._world.store, [0]))
            if now is not None and now != heard:
                heard, heard_at = now, time.monotonic()
            elif time.monotonic() - heard_at > timeout_seconds:
                raise MessageTimeout("nothing is heard any more from rank 0, whose orders an idle rank waits for",
                                     where="orders", value=f"{timeout_seconds:g} s",
                                     remedy="See what that rank does, and start again with --resume auto.")
        return message

    def progress(self) -> None:
        """Let orders leave."""
        self._transport.progress()
