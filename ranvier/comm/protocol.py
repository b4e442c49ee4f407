"""What the rest of Ranvier may ask of a way to communicate: point-to-point messages and collectives.

A `Backend` is one rank's access to all the others; in-process, torch.distributed and MPI each provide one. It makes one
`Transport` or `Group` per purpose (pipeline edges, control, data, row, column), so that no purpose waits behind
another. All three pass tests/comm/conformance.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Literal, Protocol

import torch
from torch import Tensor

from ranvier.comm.message import Message

Reduction = Literal["sum", "max", "min"]


class Transport(Protocol):
    """Moves messages between pairs of ranks; knows nothing of training.

    Edges are FIFO: messages from one source arrive in the order in which they were sent. Sends never block: a sender
    may be arbitrarily far ahead of its receiver (credits bound it, not the transport).
    """

    bytes_sent: int
    """Wire bytes this rank has handed to the transport."""
    longest_gap_seconds: float
    """The longest time between two calls that let messages move, while any were under way."""

    def connect(self, sources: Sequence[int], destinations: Sequence[int], capacity_bytes: int) -> None:
        """Open the edges of this rank and post one receive of `capacity_bytes` on each incoming one.

        A message of at most that size arrives as one; a larger one arrives as its first bytes and then the rest, and
        raises the capacity of that edge, at both ends, to its own size. May be called again to add edges.
        """

    def send(self, destination: int, message: Message) -> None:
        """Start sending; returns at once. The message's tensors may be changed as soon as this returns."""

    def poll(self) -> list[Message]:
        """All messages that have arrived since the last call, oldest first; never blocks."""

    def wait(self, timeout_seconds: float) -> Message | None:
        """The next message, or None when none arrived in time. Sleeps rather than spins."""

    def progress(self) -> None:
        """Let messages move; cheap, called at every block boundary. A no-op where a thread or the kernel does it."""

    def flush(self, timeout_seconds: float = inf) -> bool:
        """Return when every send has left this rank; False when some have not in time."""

    def close(self) -> None:
        """Stop receiving and free what was posted. Idempotent."""


class Work(Protocol):
    """A collective under way."""

    def done(self) -> bool:
        """Whether it has finished; never blocks; lets it progress."""

    def wait(self) -> None:
        """Return when it has finished. Sleeps rather than spins. TransportError when a peer is lost."""


class Group(Protocol):
    """A fixed set of ranks that make collective calls in the same order. All calls return at once.

    Tensors must be contiguous, equal in shape and dtype on every member, and untouched until the work is done. Results
    are the same to the bit on every member.

    Sums travel in the tensor's own number format. Those of half-precision tensors are accumulated in fp32 and rounded
    once, but for NCCL's, which are rounded wherever it adds; who wants them to travel in fp32 casts before (`comm.wide`
    does). The all-reduce of a large half-precision tensor on hosts goes in two rounds, the second of which begins in
    `wait`: members wait for such work in the same order.
    """

    ranks: tuple[int, ...]
    """Global ranks of the members, in order."""
    index: int
    """This rank's place among them."""
    bytes_received: int
    """Payload bytes this member has received so far, in the format in which they travelled; of what the library does by
    itself, those of a ring."""

    def all_reduce(self, tensor: Tensor, op: Reduction = "sum") -> Work:
        """In place."""

    def reduce(self, tensor: Tensor, root: int = 0) -> Work:
        """`tensor` of member `root` (an index within the group) becomes the sum; the others' become anything."""

    def reduce_scatter(self, output: Tensor, tensor: Tensor, room: Tensor | None = None) -> Work:
        """`output` [n] becomes share `index` of the sum of all members' `tensor` [size * n]. room: memory [size * n] of
        the same format that may be written meanwhile, where `buffer_bytes` says that some is needed; otherwise it is
        allocated."""

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        """`output` [size * n] becomes the concatenation of all members' `tensor` [n]."""

    def broadcast(self, tensor: Tensor, root: int = 0) -> Work:
        """`tensor` becomes that of member `root` (an index within the group)."""

    def all_to_all(self, output: Tensor, tensor: Tensor, output_splits: Sequence[int] | None = None,
                   input_splits: Sequence[int] | None = None) -> Work:
        """Share i of `tensor` goes to member i; shares arrive in member order. Splits count rows of dim 0."""

    def buffer_bytes(self, operation: Literal["all_reduce", "reduce_scatter"], numel: int, dtype: torch.dtype,
                     device_type: str) -> int:
        """Memory that such a call for `numel` elements takes while it is under way, beside the caller's tensors."""

    def gather_objects(self, value: object) -> list:
        """Every member's JSON-serialisable `value`, in member order. Blocks; for start-up, not for steps."""

    def gather_number(self, number: int) -> list[int]:
        """Every member's number (of int64), in member order, over host memory. Blocks; no payload, so not counted."""

    def barrier(self) -> None:
        """Return when every member has called it. Blocks."""

    def close(self) -> None:
        """Free the communicator. Idempotent."""


class Backend(Protocol):
    """One rank's access to all others."""

    name: Literal["in-process", "torch", "mpi"]
    rank: int
    size: int

    def transport(self, purpose: str) -> Transport:
        """A transport of its own for `purpose`. Collective: all ranks make the same calls in the same order."""

    def group(self, purpose: str, partition: Sequence[Sequence[int]]) -> Group:
        """The group of `partition` (disjoint, covering all ranks, each rising) with this rank. Collective likewise."""

    def subset(self, count: int) -> Backend | None:
        """The first `count` ranks as a backend of their own, in which they have the same numbers; None on the others.
        Collective likewise. Closing it frees all that was made of it, and ends nothing else."""

    def abort(self, code: int) -> None:
        """End all ranks now, as far as the backend can; called when this rank has failed."""

    def close(self) -> None:
        """Shut down in order: transports, groups, then the library. Idempotent; all ranks call it."""
