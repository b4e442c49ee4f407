"""The part of collectives that all backends share: checks, counted bytes, sums in a wider dtype, blocking gathers.

A backend's group derives from `CheckedGroup` and implements the six underscored calls on flat tensors, for two or more
members: reductions in dtypes that its library adds (see `comm.sum_algorithms`), everything else in bytes (uint8).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor

from ranvier.comm import sum_algorithms as sums
from ranvier.comm.protocol import Reduction, Work
from ranvier.errors import TransportError

SAME_CALLS = "All ranks make the same calls of the engine, of Checkpoints and of the world, in one order."
"""The usual cause of a collective that does not end, as errors name it."""
PIECE_ELEMENTS = 1 << 16
"""Elements that are cast to the wider dtype at a time, so that large sums need little extra memory."""


class CompletedWork:
    """A `protocol.Work` that is already done."""

    def done(self) -> bool:
        """True."""
        return True

    def wait(self) -> None:
        """Return immediately."""


class ChainedWork:
    """A `protocol.Work` followed by a local `step`, which runs once, in the call that finds the work done."""

    def __init__(self, work: Work, step: Callable[[], object]) -> None:
        self._work = work
        self._step: Callable[[], object] | None = step

    def done(self) -> bool:
        """Whether the work has finished and the step has run; runs it if the work has just finished."""
        if self._step is not None and self._work.done():
            self.wait()
        return self._step is None

    def wait(self) -> None:
        """Wait for the work, then run the step unless it has run."""
        if self._step is not None:
            self._work.wait()
            # Cleared first: neither a second call nor an error of the step may run it again, and its tensors are freed.
            step, self._step, self._work = self._step, None, CompletedWork()
            step()


class JointWork:
    """A `protocol.Work` that combines several."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def done(self) -> bool:
        """Whether all works have finished; progresses each."""
        return all([work.done() for work in self._works])

    def wait(self) -> None:
        """Wait for all works."""
        for work in self._works:
            work.wait()


class TwoRoundWork:
    """A `protocol.Work` whose second round starts in `wait`, so that all members start it in the same order."""

    def __init__(self, first: Work, second: Callable[[], Work], finish: Callable[[], None]) -> None:
        self._first, self._second, self._finish = first, second, finish
        self._rest: Work | None = None

    def done(self) -> bool:
        """Whether both rounds have finished; progresses the current round, and never starts the second."""
        return self._first.done() and self._rest is not None and self._rest.done()

    def wait(self) -> None:
        """Wait for the first round, run the second, then `finish`."""
        if self._rest is None:
            self._first.wait()
            self._rest = ChainedWork(self._second(), self._finish)
        self._rest.wait()


def _bytes(tensor: Tensor) -> Tensor:
    # as_strided because a tensor of one element counts as contiguous with any strides, which view() refuses
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


_COMBINE: dict[Reduction, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


def reduce_into(total: Tensor, other: Tensor, op: Reduction) -> None:
    """Combine `other` into `total` in place."""
    _COMBINE[op](total, other, out=total)


def reduce_shares(output: Tensor, shares: Sequence[Tensor], op: Reduction = "sum") -> None:
    """Reduce `shares`, two or more [n], by `op` into `output` [n], in this order, accumulated in the wider dtype and
    rounded once. `output` may be the first share."""
    first, *others = shares
    wide = sums.WIDER.get(output.dtype)
    if wide is None:
        for share in others:
            first = _COMBINE[op](first, share, out=output)
        return
    for start in range(0, output.numel(), PIECE_ELEMENTS):
        piece = slice(start, start + PIECE_ELEMENTS)
        total = first[piece].to(wide)
        for share in others:
            reduce_into(total, share[piece].to(wide), op)
        output[piece].copy_(total)


class CheckedGroup:
    """Base of every group; `protocol.Group` documents the public calls.

    Args:
        purpose: names the group in errors.
        ranks: global ranks of the members, ascending.
        index: this rank's index among the members.
    """

    def __init__(self, purpose: str, ranks: Sequence[int], index: int) -> None:
        self.purpose, self.ranks, self.index = purpose, tuple(ranks), index
        self.bytes_received = 0
        self.closed = False

    # To be implemented by a backend. Tensors are flat; splits are in bytes.
    def _all_reduce(self, tensor: Tensor, op: Reduction) -> Work: raise NotImplementedError
    def _reduce(self, tensor: Tensor, root: int) -> Work: raise NotImplementedError
    def _reduce_scatter(self, output: Tensor, tensor: Tensor) -> Work: raise NotImplementedError
    def _all_gather(self, output: Tensor, tensor: Tensor) -> Work: raise NotImplementedError
    def _broadcast(self, tensor: Tensor, root: int) -> Work: raise NotImplementedError
    def _all_to_all(self, output: Tensor, tensor: Tensor, received: list[int], sent: list[int]) -> Work:
        raise NotImplementedError

    def _exchanges_pieces(self, shard: Tensor, runs: int) -> bool:
        """Whether each member exchanges `runs` pieces of a shard with each other member, from and to their places."""
        return False

    def _exchange_pieces(self, output: Tensor, tensor: Tensor, *, own: bool) -> Work:
        """Send `tensor[i]` to member i and receive `output[i]` from it; [members, runs, n], each run contiguous. own:
        write this member's own part of the output, too."""
        raise NotImplementedError

    def _steps(self) -> list[tuple[int, int]]:
        """(member to receive from, member to send to), in the order in which pairs exchange."""
        members = len(self.ranks)
        return [((self.index - step) % members, (self.index + step) % members) for step in range(1, members)]

    def library(self, device_type: str) -> sums.Library:
        """The library that sums tensors on devices of this type."""
        return "nccl" if device_type == "cuda" else "gloo"

    def all_reduce(self, tensor: Tensor, op: Reduction = "sum") -> Work:
        """See `protocol.Group`. TransportError for tensors that cannot be reduced, as in all calls below."""
        self._check("all_reduce", tensor)
        algorithm = self._choose_and_count("all_reduce", tensor)
        if len(self.ranks) == 1 or tensor.numel() == 0:
            return CompletedWork()
        flat = tensor.detach().view(-1)
        if algorithm == "library":
            return self._all_reduce(flat, op)
        if algorithm == "exchanged":
            return self._exchanged_all_reduce(flat, op)
        shares = flat.new_empty(len(self.ranks), flat.numel())
        return self._then_reduce(self._all_gather(_bytes(shares), _bytes(flat)), flat, shares, op)

    def _exchanged_all_reduce(self, flat: Tensor, op: Reduction) -> Work:
        """Member k receives shard k of all members and adds it; then all shards are gathered."""
        members = len(self.ranks)
        shard = sums.shard_elements(flat.numel(), members)
        whole = flat
        if shard * members != flat.numel():
            whole = flat.new_empty(shard * members)
            whole[:flat.numel()].copy_(flat)
            whole[flat.numel():].zero_()
        shares, sizes = flat.new_empty(members, shard), [shard * flat.element_size()] * members

        def gather() -> Work:
            reduce_shares(shares[0], list(shares), op)
            return self._all_gather(_bytes(whole), _bytes(shares[0]))

        def finish() -> None:
            if whole is not flat:
                flat.copy_(whole[:flat.numel()])

        return TwoRoundWork(self._all_to_all(_bytes(shares), _bytes(whole), sizes, sizes), gather, finish)

    def _then_reduce(self, work: Work, output: Tensor, shares: Tensor, op: Reduction = "sum", *,
                     own: Tensor | None = None) -> Work:
        """`work`, which receives `shares` [k, n], followed by their reduction into `output` [n]. own: this member's
        share, if it is not in `shares`."""
        def add() -> None:
            rows = list(shares)
            if own is not None:
                rows[self.index] = own
            reduce_shares(output, rows, op)
        return ChainedWork(work, add)

    def reduce(self, tensor: Tensor, root: int = 0) -> Work:
        """See `protocol.Group`."""
        self._check("reduce", tensor)
        self._check_root("reduce", root)
        algorithm = self._choose_and_count("reduce", tensor, root)
        if len(self.ranks) == 1 or tensor.numel() == 0:
            return CompletedWork()
        flat, members = tensor.detach().view(-1), len(self.ranks)
        if algorithm == "library":
            return self._reduce(flat, root)
        size, is_root = flat.numel() * flat.element_size(), self.index == root
        shares = flat.new_empty(members, flat.numel()) if is_root else flat.new_empty(0)
        work = self._all_to_all(_bytes(shares), _bytes(flat), [size if is_root else 0] * members,
                                [size if member == root else 0 for member in range(members)])
        return self._then_reduce(work, flat, shares) if is_root else work

    def reduce_scatter(self, output: Tensor, tensor: Tensor, buffer: Tensor | None = None, dim: int = 0) -> Work:
        """See `protocol.Group`."""
        self._check("reduce_scatter", output, tensor)
        self._check_sizes("reduce_scatter", tensor, output)
        algorithm = self._choose_and_count("reduce_scatter", tensor)
        output, tensor, members, runs = output.detach(), tensor.detach(), len(self.ranks), prod(output.shape[:dim])
        if members == 1 or tensor.numel() == 0:
            output.view(-1).copy_(tensor.view(-1))
            return CompletedWork()
        if self._exchanges_pieces(output, runs) and (runs > 1 or algorithm == "exchanged"):
            shares = tensor.new_empty(members, output.numel()) if buffer is None else buffer.view(members, -1)
            work = self._exchange_pieces(shares.view(members, runs, -1), tensor.view(runs, members, -1).movedim(1, 0),
                                         own=runs > 1)
            return self._then_reduce(work, output.view(-1), shares,
                                     own=tensor.view(members, -1)[self.index] if runs == 1 else None)
        if runs > 1:
            parts = tensor.new_empty(tensor.numel()) if buffer is None else buffer.view(-1)
            parts.view(members, runs, -1).copy_(tensor.view(runs, members, -1).movedim(1, 0))
            tensor, buffer = parts, None
        output, tensor = output.view(-1), tensor.view(-1)
        if algorithm == "library":
            return self._reduce_scatter(output, tensor)
        shares = tensor.new_empty(members, output.numel()) if buffer is None else buffer.view(members, -1)
        sizes = [output.numel() * output.element_size()] * members
        return self._then_reduce(self._all_to_all(_bytes(shares), _bytes(tensor), sizes, sizes), output, shares)

    def buffer_bytes(self, operation: Literal["all_reduce", "reduce_scatter"], numel: int, dtype: torch.dtype,
                     device_type: str) -> int:
        """See `protocol.Group`."""
        members, size = len(self.ranks), numel * dtype.itemsize
        algorithm = sums.choose_algorithm(self.library(device_type), operation, dtype, size, members)
        return sums.buffer_bytes(algorithm, operation, numel, dtype.itemsize, members)

    def all_gather(self, output: Tensor, tensor: Tensor, dim: int = 0, buffer: Tensor | None = None) -> Work:
        """See `protocol.Group`."""
        self._check("all_gather", output, tensor)
        self._check_sizes("all_gather", output, tensor)
        self._count(output, sums.ring_bytes("all_gather", len(self.ranks), output.numel() * output.element_size()))
        if len(self.ranks) == 1 or tensor.numel() == 0:
            output.detach().view(-1).copy_(tensor.detach().view(-1))
            return CompletedWork()
        members, runs = len(self.ranks), prod(tensor.shape[:dim])
        if runs == 1:
            return self._all_gather(_bytes(output), _bytes(tensor))
        places = output.detach().view(runs, members, -1).movedim(1, 0)
        if self._exchanges_pieces(tensor, runs):
            return self._exchange_pieces(places, tensor.detach().view(1, runs, -1).expand(members, -1, -1), own=True)
        parts = (tensor.new_empty(output.numel()) if buffer is None else buffer).view(members, runs, -1)
        return ChainedWork(self._all_gather(_bytes(parts), _bytes(tensor)), lambda: places.copy_(parts))

    def broadcast(self, tensor: Tensor, root: int = 0) -> Work:
        """See `protocol.Group`."""
        self._check("broadcast", tensor)
        self._check_root("broadcast", root)
        if self.index != root:
            self._count(tensor, sums.ring_bytes("broadcast", len(self.ranks), tensor.numel() * tensor.element_size()))
        if len(self.ranks) == 1 or tensor.numel() == 0:
            return CompletedWork()
        return self._broadcast(_bytes(tensor), root)

    def all_to_all(self, output: Tensor, tensor: Tensor, output_splits: Sequence[int] | None = None,
                   input_splits: Sequence[int] | None = None) -> Work:
        """See `protocol.Group`."""
        self._check("all_to_all", output, tensor)
        received, sent = self._splits("output", output, output_splits), self._splits("input", tensor, input_splits)
        self._count(tensor, sum(received) - received[self.index])
        if len(self.ranks) == 1:
            if received != sent:
                raise self._error("all-to-all-of-one-member", "all_to_all", "a single member receives what it sends",
                                  (received, sent))
            _bytes(output).copy_(_bytes(tensor))
            return CompletedWork()
        return self._all_to_all(_bytes(output), _bytes(tensor), received, sent)

    def gather_objects(self, value: object) -> list[Any]:
        """See `protocol.Group`. Two all-gathers of JSON text: the lengths, then the texts padded to the longest."""
        text = json.dumps(value).encode()
        lengths = torch.empty(len(self.ranks), dtype=torch.int64, device="cpu")
        self.all_gather(lengths, torch.tensor([len(text)], device="cpu")).wait()
        longest = int(lengths.max())
        padded = torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8)
        texts = torch.empty(len(self.ranks), longest, dtype=torch.uint8, device="cpu")
        self.all_gather(texts, padded).wait()
        return [json.loads(row.numpy().tobytes()) for row in texts]

    def gather_number(self, number: int) -> list[int]:
        """See `protocol.Group`."""
        received, numbers = self.bytes_received, torch.empty(len(self.ranks), dtype=torch.int64, device="cpu")
        self.all_gather(numbers, torch.tensor([number], device="cpu")).wait()
        self.bytes_received = received
        return [int(number) for number in numbers.tolist()]

    def barrier(self) -> None:
        """See `protocol.Group`: an all-gather of one byte."""
        self._check("barrier")
        if len(self.ranks) > 1:
            here = torch.zeros(1, dtype=torch.uint8, device="cpu")
            self._all_gather(here.new_empty(len(self.ranks)), here).wait()

    def close(self) -> None:
        """Refuse further calls. Idempotent."""
        self.closed = True

    def _error(self, code: str, call: str, what: str, value: object = None) -> TransportError:
        return TransportError(what, code=code,
                              where=f"{call} in group {self.purpose!r} of ranks {list(self.ranks)}", value=value,
                              remedy="Make the same call with matching tensors on every member.")

    def _check(self, call: str, *tensors: Tensor) -> None:
        if self.closed:
            raise self._error("group-closed", call, "the group is closed")
        if len({tensor.dtype for tensor in tensors}) > 1:
            raise self._error("collective-dtypes-differ", call, "input and output differ in dtype",
                              [tensor.dtype for tensor in tensors])
        for tensor in tensors:
            if not tensor.is_contiguous():
                raise self._error("collective-not-contiguous", call, "a tensor is not contiguous",
                                  f"strides {tensor.stride()}")

    def _check_root(self, call: str, root: int) -> None:
        if not 0 <= root < len(self.ranks):
            raise self._error("collective-root", call, f"root must be an index into the {len(self.ranks)} members",
                              root)

    def _check_sizes(self, call: str, whole: Tensor, shard: Tensor) -> None:
        if whole.numel() != shard.numel() * len(self.ranks):
            raise self._error("collective-sizes", call,
                              f"one tensor must be {len(self.ranks)} times as large as the other",
                              (whole.numel(), shard.numel()))

    def _choose_and_count(self, operation: sums.Operation, tensor: Tensor, root: int = 0) -> sums.SumAlgorithm:
        """Choose the algorithm that sums `tensor` (unsharded), and count its bytes. TransportError for dtypes that
        cannot be reduced."""
        if tensor.dtype not in sums.NATIVE and tensor.dtype not in sums.WIDER:
            raise self._error("dtype-not-reduced", operation, "this dtype cannot be reduced", tensor.dtype)
        algorithm = sums.choose_algorithm(self.library(tensor.device.type), operation, tensor.dtype, tensor.nbytes,
                                     len(self.ranks))
        self._count(tensor, sums.sum_bytes(algorithm, operation, tensor.numel(), tensor.element_size(), len(self.ranks),
                                      from_root=(self.index - root) % len(self.ranks)))
        return algorithm

    def _count(self, tensor: Tensor, received_bytes: int) -> None:
        """Count the bytes that this member receives for a collective of `tensor`."""
        self.bytes_received += received_bytes

    def _splits(self, side: str, tensor: Tensor, splits: Sequence[int] | None) -> list[int]:
        """Bytes of each member's shard of `tensor`, from `splits` in rows (None: equal splits)."""
        rows, members = (tensor.shape[0] if tensor.dim() else 1), len(self.ranks)
        splits = list(splits) if splits is not None else [rows // members] * members
        if len(splits) != members or sum(splits) != rows or min(splits) < 0:
            raise self._error("all-to-all-splits", "all_to_all",
                              f"{side} splits must be {members} numbers with sum {rows}", splits)
        row_bytes = tensor.numel() * tensor.element_size() // max(rows, 1)
        return [split * row_bytes for split in splits]


def check_subset(count: int, size: int) -> None:
    """TransportError unless 1 <= `count` <= `size`."""
    if not 1 <= count <= size:
        raise TransportError(f"must be between 1 and {size}, the number of ranks", code="subset-size",
                             where="subset of ranks", value=count, remedy="Give a number of existing ranks.")


def locate_in_partition(partition: Sequence[Sequence[int]], rank: int, size: int, purpose: str
                        ) -> tuple[tuple[int, ...], int]:
    """The members of `rank`'s group, and its index there. TransportError unless each rank is in exactly one group."""
    if (sorted(member for members in partition for member in members) != list(range(size))
            or any(list(members) != sorted(members) for members in partition)):
        raise TransportError(f"must contain each of the {size} ranks once, in ascending order within a group",
                             code="partition-not-of-all-ranks", where=f"partition of group {purpose!r}",
                             value=[list(members) for members in partition],
                             remedy="Put ranks that need no group into groups of one.")
    members = next(tuple(members) for members in partition if rank in members)
    return members, members.index(rank)
