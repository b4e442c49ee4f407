"""Interfaces of communication: point-to-point messages, collectives, and the backends that provide both.

A `Backend` connects one rank to all others; there are backends for threads, torch.distributed and MPI. It makes one
`Transport` or `Group` per purpose (pipeline edges, control, data, row, column), so that no purpose waits for another.
All backends pass tests/comm/conformance.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from ranvier.comm.message import Message

Reduction = Literal["sum", "max", "min"]
"""Element-wise operation of an all-reduce."""
BackendName = Literal["in-process", "torch", "mpi"]
COLLECTIVES = frozenset({"all_reduce", "reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all",
                         "gather_objects", "gather_number", "barrier"})
"""The methods of a `Group` that all its members call."""


class Transport(Protocol):
    """Moves messages between pairs of ranks, regardless of their meaning.

    Edges are FIFO: messages from one source arrive in the order in which they were sent. Sends never block: the
    transport lets a sender run arbitrarily far ahead of its receiver (the pipeline's credits bound that).
    """

    @property
    def bytes_sent(self) -> int:
        """Bytes on the wire that this rank has sent, headers included."""

    @property
    def longest_gap_seconds(self) -> float:
        """The longest time between two calls that progress messages, while any were in flight."""

    @property
    def needs_progress(self) -> bool:
        """Whether messages progress only inside calls of this rank, so that long work must call `progress` often."""

    def connect(self, sources: Sequence[int], destinations: Sequence[int], capacity_bytes: int) -> None:
        """Open the edges of this rank and post one receive of `capacity_bytes` on each incoming one.

        A message of at most that size arrives in one part. A larger one arrives as its first bytes and then the rest,
        and raises the capacity of that edge, at both ends, to its own size. May be called again to add edges.
        """

    def send(self, destination: int, message: Message) -> None:
        """Start to send; returns immediately. The caller may change the message's tensors afterwards."""

    def poll(self) -> list[Message]:
        """All messages that have arrived since the last call, oldest first; never blocks."""

    def wait(self, timeout_seconds: float) -> Message | None:
        """The next message, or None if none arrives in time. Sleeps rather than spins."""

    def progress(self) -> None:
        """Progress messages in flight; cheap, called at every block boundary. A no-op if threads or the OS do it."""

    def flush(self, timeout_seconds: float = inf) -> bool:
        """Wait until every send has left this rank; returns False if some have not left in time."""

    def close(self) -> None:
        """Stop receiving and free posted buffers. Idempotent."""


class Work(Protocol):
    """A collective in flight."""

    def done(self) -> bool:
        """Whether it has finished; never blocks; also progresses it."""

    def wait(self) -> None:
        """Wait until it has finished. Sleeps rather than spins. TransportError if a peer is lost."""


class Group(Protocol):
    """A fixed set of ranks that make collective calls in the same order. Collectives return immediately.

    Tensors must be contiguous, equal in shape and dtype on every member, and untouched until the work is done. Results
    are bit-identical on all members.

    Sums are sent in the tensor's own dtype. Those of half-precision tensors are accumulated in fp32 and rounded once,
    except by NCCL, which rounds after each addition; `comm.fp32_sums` casts to fp32 first. An all-reduce of a large
    half-precision tensor between hosts has two rounds, and the second starts in `wait`: members must wait for such
    work in the same order.
    """

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of the members, in order."""

    @property
    def index(self) -> int:
        """This rank's index among the members."""

    @property
    def bytes_received(self) -> int:
        """Payload bytes that this member has received so far, in the dtype in which they were sent. Operations that the
        library implements count as on a ring."""

    def all_reduce(self, tensor: Tensor, op: Reduction = "sum") -> Work:
        """Reduce `tensor` over all members, in place."""

    def reduce(self, tensor: Tensor, root: int = 0) -> Work:
        """Sum `tensor` into that of member `root` (an index within the group); the others' content is undefined."""

    def reduce_scatter(self, output: Tensor, tensor: Tensor, buffer: Tensor | None = None, dim: int = 0) -> Work:
        """Write shard `index` of the sum of all members' `tensor` [.., size * n, ..] to `output` [.., n, ..], which
        is not a part of `tensor`.

        buffer: work memory of `tensor`'s size and dtype, if `buffer_bytes` is not 0 or `dim` is not the first; None
            allocates it.
        dim: along which `tensor` is divided.
        """

    def all_gather(self, output: Tensor, tensor: Tensor, dim: int = 0, buffer: Tensor | None = None) -> Work:
        """Write the concatenation along `dim` of all members' `tensor` [.., n, ..] to `output` [.., size * n, ..].

        buffer: work memory of `output`'s size and dtype, if `dim` is not the first; None allocates it.
        """

    def broadcast(self, tensor: Tensor, root: int = 0) -> Work:
        """Overwrite `tensor` with that of member `root` (an index within the group)."""

    def all_to_all(self, output: Tensor, tensor: Tensor, output_splits: Sequence[int] | None = None,
                   input_splits: Sequence[int] | None = None) -> Work:
        """Send shard i of `tensor` to member i; shards arrive in member order. Splits count rows of dim 0."""

    def buffer_bytes(self, operation: Literal["all_reduce", "reduce_scatter"], numel: int, dtype: torch.dtype,
                     device_type: str) -> int:
        """Bytes that such a call for `numel` elements allocates while in flight, besides the caller's tensors."""

    def gather_objects(self, value: object) -> list[Any]:
        """Every member's JSON-serialisable `value`, in member order. Blocks; for start-up, not for steps."""

    def gather_number(self, number: int) -> list[int]:
        """Every member's number (int64), in member order, over host memory. Blocks; not counted as payload."""

    def barrier(self) -> None:
        """Wait until every member has called it."""

    def close(self) -> None:
        """Free the communicator. Idempotent."""


class Backend(Protocol):
    """Connects one rank to all others."""

    @property
    def name(self) -> BackendName:
        """Name of this backend."""

    @property
    def rank(self) -> int:
        """This rank, from 0."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def transport(self, purpose: str, *, on_host: bool = False) -> Transport:
        """A new transport for `purpose`. Collective: all ranks make the same calls in the same order.

        on_host: no message has tensors on a device, so that devices need not be connected.
        """

    def group(self, purpose: str, partition: Sequence[Sequence[int]]) -> Group:
        """The group of `partition` with this rank (disjoint groups of all ranks, each ascending). Collective."""

    def subset(self, count: int) -> Backend | None:
        """A backend of the first `count` ranks, with the same numbers; None on the other ranks. Collective.

        Closing it frees everything that was made from it, and affects nothing else.
        """

    def abort(self, code: int) -> None:
        """End all ranks now with exit code `code`, as far as the backend can; called when this rank has failed."""

    def close(self) -> None:
        """Shut down in order: transports, groups, then the library. Idempotent; all ranks call it."""
