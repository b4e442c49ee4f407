"""What rank 0 tells ranks that take no part: they wait for it, and do nothing else meanwhile."""

from __future__ import annotations

import json

import torch

from ranvier.comm.message import Kind, Message
from ranvier.errors import TransportError
from ranvier.world import World

_CAPACITY_BYTES = 1 << 12
_WAIT_SECONDS = 5.0


class Orders:
    """A connection from rank 0 to every other rank of the world. Collective to make."""

    def __init__(self, world: World) -> None:
        self._rank, self._size = world.rank, world.size
        self._transport = world.backend.transport("orders")
        others = list(range(1, world.size)) if world.rank == 0 else []
        self._transport.connect([0] if world.rank else [], others, _CAPACITY_BYTES)

    def send(self, order: dict[str, object], first: int) -> None:
        """Rank 0 tells `order`, which JSON can hold, to ranks from `first` on."""
        assert self._rank == 0
        data = torch.frombuffer(bytearray(json.dumps(order).encode()), dtype=torch.uint8)
        for rank in range(first, self._size):
            self._transport.send(rank, Message(Kind.ORDER, 0, 0, {"": data}))
        self._transport.progress()

    def wait(self) -> dict[str, object]:
        """The next order. Waits as long as it takes: an idle rank has no work that could be late. TransportError where
        rank 0 has gone."""
        while True:
            message = self._transport.wait(_WAIT_SECONDS)
            if message is not None:
                break
        if message.kind is not Kind.ORDER:
            raise TransportError("is no order", where=f"message from rank {message.source}", value=str(message),
                                 remedy="Give all ranks one version of Ranvier.")
        return json.loads(bytes(message.tensors[""].numpy()))

    def progress(self) -> None:
        """Let orders leave."""
        self._transport.progress()
