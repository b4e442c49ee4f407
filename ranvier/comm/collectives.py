"""What every group does the same way: checks, volumes, sums in a wider type, and the blocking conveniences.

A backend's group derives from `CheckedGroup` and implements the six underscored calls on flat tensors, for two or more
members: reductions in formats that its library adds (see `comm.ways`), everything else in bytes (uint8).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from ranvier.comm.protocol import Reduction, Work
from ranvier.comm.ways import (
    NATIVE,
    WIDER,
    Library,
    Operation,
    Way,
    buffer_bytes,
    part_elements,
    ring_bytes,
    sum_bytes,
    way_of,
)
from ranvier.errors import TransportError

_ADDED_AT_ONCE = 1 << 16
"""Elements of a wider format that are added up in one piece, so that sums of any size take little memory for it."""


class Finished:
    """Work that was done before it was asked for."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class Then:
    """Work followed by a local step, which runs once, in the call that finds the work done."""

    def __init__(self, work: Work, step: Callable[[], object]) -> None:
        self._work, self._step = work, step

    def done(self) -> bool:
        if self._step is not None and self._work.done():
            self.wait()
        return self._step is None

    def wait(self) -> None:
        if self._step is not None:
            self._work.wait()
            step, self._step, self._work = self._step, None, Finished()
            step()


class TwoRounds:
    """Work whose second round begins in `wait`, so that members begin it in the same order."""

    def __init__(self, first: Work, second: Callable[[], Work], finish: Callable[[], None]) -> None:
        self._first, self._second, self._finish, self._over = first, second, finish, False

    def done(self) -> bool:
        self._first.done()
        return self._over

    def wait(self) -> None:
        if not self._over:
            self._first.wait()
            self._second().wait()
            self._finish()
            self._over = True


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)  # a lone element may have any strides


REDUCE = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


def reduce_shares(output: Tensor, shares: Tensor, op: Reduction = "sum") -> None:
    """`output` [n] = all `shares` [k, n] by `op`, in member order, accumulated in the wider type; rounded once.
    `output` may be the memory of one of them."""
    wide = WIDER.get(output.dtype)
    if wide is None:
        total = shares[0].clone() if output.data_ptr() == shares.data_ptr() else output.copy_(shares[0])
        for share in shares[1:]:
            REDUCE[op](total, share, out=total)
        if total is not output:
            output.copy_(total)
        return
    for start in range(0, output.numel(), _ADDED_AT_ONCE):
        piece = slice(start, start + _ADDED_AT_ONCE)
        total = shares[0, piece].to(wide)
        for share in shares[1:, piece]:
            REDUCE[op](total, share.to(wide), out=total)
        output[piece].copy_(total)


class CheckedGroup:
    """Base of every group; see `protocol.Group` for what the public calls promise."""

    def __init__(self, purpose: str, ranks: Sequence[int], index: int) -> None:
        self.purpose, self.ranks, self.index = purpose, tuple(ranks), index
        self.bytes_received = 0
        self.closed = False

    # What a backend implements. Tensors are flat; splits are in bytes.
    def _all_reduce(self, tensor: Tensor, op: Reduction) -> Work: raise NotImplementedError
    def _reduce(self, tensor: Tensor, root: int) -> Work: raise NotImplementedError
    def _reduce_scatter(self, output: Tensor, tensor: Tensor) -> Work: raise NotImplementedError
    def _all_gather(self, output: Tensor, tensor: Tensor) -> Work: raise NotImplementedError
    def _broadcast(self, tensor: Tensor, root: int) -> Work: raise NotImplementedError
    def _all_to_all(self, output: Tensor, tensor: Tensor, received: list[int], sent: list[int]) -> Work:
        raise NotImplementedError

    def library(self, device_type: str) -> Library:
        """Which library carries tensors on such a device, as far as sums are concerned."""
        return "nccl" if device_type == "cuda" else "gloo"

    def _new(self, like: Tensor, *shape: int) -> Tensor:
        """Memory for a sum under way."""
        return like.new_empty(shape)

    def _let_go(self, buffer: Tensor) -> None:
        """A sum that was under way in `buffer` is over."""

    def all_reduce(self, tensor: Tensor, op: Reduction = "sum") -> Work:
        self._check("all_reduce", tensor)
        way = self._sum("all_reduce", tensor)
        if len(self.ranks) == 1 or tensor.numel() == 0:
            return Finished()
        flat = tensor.detach().view(-1)
        if way == "library":
            return self._all_reduce(flat, op)
        if way == "exchanged":
            return self._exchanged_all_reduce(flat, op)
        shares = self._new(flat, len(self.ranks), flat.numel())
        return self._added(self._all_gather(_bytes(shares), _bytes(flat)), flat, shares, op)

    def _exchanged_all_reduce(self, flat: Tensor, op: Reduction) -> Work:
        """Member k receives everybody's part k and adds; then all parts are gathered."""
        members = len(self.ranks)
        part = part_elements(flat.numel(), members)
        whole = flat
        if part * members != flat.numel():
            whole = self._new(flat, part * members)
            whole[:flat.numel()].copy_(flat)
            whole[flat.numel():].zero_()
        shares, sizes = self._new(flat, members, part), [part * flat.element_size()] * members

        def gather() -> Work:
            reduce_shares(shares[0], shares, op)
            return self._all_gather(_bytes(whole), _bytes(shares[0]))

        def finish() -> None:
            if whole is not flat:
                flat.copy_(whole[:flat.numel()])
                self._let_go(whole)
            self._let_go(shares)

        return TwoRounds(self._all_to_all(_bytes(shares), _bytes(whole), sizes, sizes), gather, finish)

    def _added(self, work: Work, output: Tensor, shares: Tensor, op: Reduction = "sum", *, own: bool = True) -> Work:
        """`work`, which brings `shares` [k, n], and then their sum in `output` [n]. own: they lie in memory of ours."""
        def add() -> None:
            reduce_shares(output, shares, op)
            if own:
                self._let_go(shares)
        return Then(work, add)

    def reduce(self, tensor: Tensor, root: int = 0) -> Work:
        self._check("reduce", tensor)
        self._check_root("reduce", root)
        way = self._sum("reduce", tensor, root)
        if len(self.ranks) == 1 or tensor.numel() == 0:
            return Finished()
        flat, members = tensor.detach().view(-1), len(self.ranks)
        if way == "library":
            return self._reduce(flat, root)
        size, is_root = flat.numel() * flat.element_size(), self.index == root
        shares = self._new(flat, members, flat.numel()) if is_root else flat.new_empty(0)
        work = self._all_to_all(_bytes(shares), _bytes(flat), [size if is_root else 0] * members,
                                [size if member == root else 0 for member in range(members)])
        return self._added(work, flat, shares) if is_root else work

    def reduce_scatter(self, output: Tensor, tensor: Tensor, room: Tensor | None = None) -> Work:
        self._check("reduce_scatter", output, tensor)
        self._fits("reduce_scatter", tensor, output)
        way = self._sum("reduce_scatter", tensor)
        output, tensor, members = output.detach().view(-1), tensor.detach().view(-1), len(self.ranks)
        if members == 1 or tensor.numel() == 0:
            output.copy_(tensor)
            return Finished()
        if way == "library":
            return self._reduce_scatter(output, tensor)
        shares = self._new(tensor, members, output.numel()) if room is None else room.view(members, -1)
        sizes = [output.numel() * output.element_size()] * members
        return self._added(self._all_to_all(_bytes(shares), _bytes(tensor), sizes, sizes), output, shares,
                           own=room is None)

    def buffer_bytes(self, operation: Literal["all_reduce", "reduce_scatter"], numel: int, dtype: torch.dtype,
                     device_type: str) -> int:
        members, size = len(self.ranks), numel * dtype.itemsize
        way = way_of(self.library(device_type), operation, dtype, size, members)
        return buffer_bytes(way, operation, numel, dtype.itemsize, members)

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        self._check("all_gather", output, tensor)
        self._fits("all_gather", output, tensor)
        self._count(output, ring_bytes("all_gather", len(self.ranks), output.numel() * output.element_size()))
        if len(self.ranks) == 1 or tensor.numel() == 0:
            output.detach().view(-1).copy_(tensor.detach().view(-1))
            return Finished()
        return self._all_gather(_bytes(output), _bytes(tensor))

    def broadcast(self, tensor: Tensor, root: int = 0) -> Work:
        self._check("broadcast", tensor)
        self._check_root("broadcast", root)
        if self.index != root:
            self._count(tensor, ring_bytes("broadcast", len(self.ranks), tensor.numel() * tensor.element_size()))
        if len(self.ranks) == 1 or tensor.numel() == 0:
            return Finished()
        return self._broadcast(_bytes(tensor), root)

    def all_to_all(self, output: Tensor, tensor: Tensor, output_splits: Sequence[int] | None = None,
                   input_splits: Sequence[int] | None = None) -> Work:
        self._check("all_to_all", output, tensor)
        received, sent = self._splits("output", output, output_splits), self._splits("input", tensor, input_splits)
        self._count(tensor, sum(received) - received[self.index])
        if len(self.ranks) == 1:
            if received != sent:
                raise self._error("all_to_all", "a single member receives what it sends", (received, sent))
            _bytes(output).copy_(_bytes(tensor))
            return Finished()
        return self._all_to_all(_bytes(output), _bytes(tensor), received, sent)

    def gather_objects(self, value: object) -> list:
        text = json.dumps(value).encode()
        lengths = torch.empty(len(self.ranks), dtype=torch.int64)
        self.all_gather(lengths, torch.tensor([len(text)])).wait()
        longest = int(lengths.max())
        padded = torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8)
        texts = torch.empty(len(self.ranks), longest, dtype=torch.uint8)
        self.all_gather(texts, padded).wait()
        return [json.loads(row.numpy().tobytes()) for row in texts]

    def gather_number(self, number: int) -> list[int]:
        received, numbers = self.bytes_received, torch.empty(len(self.ranks), dtype=torch.int64, device="cpu")
        self.all_gather(numbers, torch.tensor([number], device="cpu")).wait()
        self.bytes_received = received
        return numbers.tolist()

    def barrier(self) -> None:
        self._check("barrier")
        if len(self.ranks) > 1:
            here = torch.zeros(1, dtype=torch.uint8)
            self._all_gather(here.new_empty(len(self.ranks)), here).wait()

    def close(self) -> None:
        self.closed = True

    def _error(self, call: str, what: str, value: object = None) -> TransportError:
        return TransportError(what, where=f"{call} in group {self.purpose!r} of ranks {list(self.ranks)}", value=value,
                              remedy="Make the same call with matching tensors on every member.")

    def _check(self, call: str, *tensors: Tensor) -> None:
        if self.closed:
            raise self._error(call, "the group is closed")
        if len({tensor.dtype for tensor in tensors}) > 1:
            raise self._error(call, "input and output differ in dtype", [tensor.dtype for tensor in tensors])
        for tensor in tensors:
            if not tensor.is_contiguous():
                raise self._error(call, "a tensor is not contiguous", f"strides {tensor.stride()}")

    def _check_root(self, call: str, root: int) -> None:
        if not 0 <= root < len(self.ranks):
            raise self._error(call, f"root must be an index into the {len(self.ranks)} members", root)

    def _fits(self, call: str, whole: Tensor, share: Tensor) -> None:
        if whole.numel() != share.numel() * len(self.ranks):
            raise self._error(call, f"one tensor must be {len(self.ranks)} times as large as the other",
                              (whole.numel(), share.numel()))

    def _sum(self, operation: Operation, tensor: Tensor, root: int = 0) -> Way:
        """How `tensor` (whole) is summed, counted. TransportError for formats that cannot be."""
        if tensor.dtype not in NATIVE and tensor.dtype not in WIDER:
            raise self._error(operation, "this dtype cannot be reduced", tensor.dtype)
        way = way_of(self.library(tensor.device.type), operation, tensor.dtype, tensor.nbytes, len(self.ranks))
        self._count(tensor, sum_bytes(way, operation, tensor.numel(), tensor.element_size(), len(self.ranks),
                                      from_root=(self.index - root) % len(self.ranks)))
        return way

    def _count(self, tensor: Tensor, received_bytes: int) -> None:
        """Add what this member receives for a collective of `tensor`."""
        self.bytes_received += received_bytes

    def _splits(self, side: str, tensor: Tensor, splits: Sequence[int] | None) -> list[int]:
        """Bytes of each member's share of `tensor`."""
        rows, members = (tensor.shape[0] if tensor.dim() else 1), len(self.ranks)
        splits = list(splits) if splits is not None else [rows // members] * members
        if len(splits) != members or sum(splits) != rows or min(splits) < 0:
            raise self._error("all_to_all", f"{side} splits must be {members} numbers of sum {rows}", splits)
        row_bytes = tensor.numel() * tensor.element_size() // max(rows, 1)
        return [split * row_bytes for split in splits]


def check_subset(count: int, size: int) -> None:
    """TransportError unless `count` of `size` ranks can be a subset."""
    if not 1 <= count <= size:
        raise TransportError(f"must be one to all of the {size} ranks", where="subset of ranks", value=count,
                             remedy="Give a number of ranks that are there.")


def place_in(partition: Sequence[Sequence[int]], rank: int, size: int, purpose: str) -> tuple[tuple[int, ...], int]:
    """The members that `rank` belongs to, and its place there. TransportError unless each rank is in one place."""
    if (sorted(member for members in partition for member in members) != list(range(size))
            or any(list(members) != sorted(members) for members in partition)):
        raise TransportError(f"must hold each of the {size} ranks once, in rising order within a group",
                             where=f"partition of group {purpose!r}", value=[list(members) for members in partition],
                             remedy="Put ranks that take no part into groups of one.")
    members = next(tuple(members) for members in partition if rank in members)
    return members, members.index(rank)
