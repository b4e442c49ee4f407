"""State that every transport keeps about its edges: which are open, their capacity, and the bytes sent.

A message that fits an edge's capacity is sent as one part. A larger message is sent as two parts, its first `capacity`
bytes and the rest, and both ends then raise the capacity to its size. The receiver learns the size from the first part,
so both ends agree on the capacity without a further message.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ranvier.comm.message import PREAMBLE_BYTES, Message, encode
from ranvier.errors import TransportError


def peer_lost(purpose: str, rank: int, cause: str | None = None) -> TransportError:
    """The error for a peer that is gone. purpose: of the transport or group."""
    return TransportError("is gone: it failed, was killed, or exited early", code="peer-gone",
                          where=f"rank {rank} on {purpose!r}", value=cause,
                          remedy="The first error is in that rank's output.")


def invalid_message(purpose: str, rank: int, cause: str) -> TransportError:
    """The error for bytes from a peer that cannot be decoded. purpose: of the transport; cause: what is wrong."""
    return TransportError("sent an invalid message", code="invalid-message", where=f"rank {rank} on {purpose!r}",
                          value=cause,
                          remedy="Install the same version of Ranvier on all ranks, and check the network between the "
                                 "two, and their memory.")


class EdgesOfRank:
    """Base of transports: the edges of one rank.

    sources, destinations: peer -> capacity of its edge in bytes. bytes_sent: of all messages, headers included.
    """

    def __init__(self, purpose: str, rank: int, size: int) -> None:
        self.purpose, self.rank, self.size = purpose, rank, size
        self.sources: dict[int, int] = {}
        self.destinations: dict[int, int] = {}
        self.bytes_sent = 0
        self.closed = False

    def open(self, sources: Sequence[int], destinations: Sequence[int], capacity_bytes: int) -> list[int]:
        """Add edges; those already open keep their capacity. Returns the new sources.

        TransportError if a peer is this rank itself or does not exist.
        """
        self.check_open()
        for peer in (*sources, *destinations):
            if not 0 <= peer < self.size or peer == self.rank:
                raise TransportError(f"must be another one of the {self.size} ranks", code="peer-not-another-rank",
                                     value=peer,
                                     where=f"peer of rank {self.rank} in connect of transport {self.purpose!r}",
                                     remedy="Connect to the ranks of neighbouring stages.")
        capacity = max(capacity_bytes, PREAMBLE_BYTES)
        new = [source for source in dict.fromkeys(sources) if source not in self.sources]
        self.sources.update((source, capacity) for source in new)
        for destination in destinations:
            self.destinations.setdefault(destination, capacity)
        return new

    def check_open(self) -> None:
        """TransportError if the transport is closed."""
        if self.closed:
            raise TransportError("is closed", code="transport-closed",
                                 where=f"transport {self.purpose!r} on rank {self.rank}",
                                 remedy="Make a new transport; a closed one cannot be used again.")

    def capacity_to(self, destination: int) -> int:
        """Largest message in bytes that reaches `destination` as one part. TransportError unless that edge is open."""
        if self.closed:
            self.check_open()
        if destination not in self.destinations:
            raise TransportError("is not connected", code="edge-not-connected",
                                 where=f"edge {self.rank} -> {destination} of {self.purpose!r}",
                                 remedy="Name the destination in connect() before sending to it.")
        return self.destinations[destination]

    def count(self, destination: int, num_bytes: int) -> None:
        """Count a message of `num_bytes` bytes to `destination`, whichever way it is sent. TransportError unless that
        edge is open."""
        self.capacity_to(destination)
        self.bytes_sent += num_bytes

    def outgoing(self, destination: int, message: Message) -> list[Tensor]:
        """The parts (uint8, on the host) in which `message` is sent to `destination`; counts them as sent."""
        capacity = self.capacity_to(destination)
        wire = encode(message)
        total = wire.numel()
        self.bytes_sent += total
        if total <= capacity:
            return [wire]
        self.destinations[destination] = total
        return [wire[:capacity], wire[capacity:]]
