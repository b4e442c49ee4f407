"""What every group does the same way: checks, volumes, sums in a wider type, and the blocking conveniences.

A backend's group derives from `CheckedGroup` and implements the six underscored calls on flat tensors, for two or more
members: reductions in one of NATIVE's types, everything else in bytes (uint8).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from ranvier.comm.protocol import Reduction, Work
from ranvier.errors import TransportError

Operation = Literal["all_reduce", "reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"]

NATIVE = (torch.float64, torch.float32, torch.int64, torch.int32, torch.int8, torch.uint8)
_WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32,
          torch.int16: torch.int32, torch.bool: torch.int32}


DIRECT_MEMBERS = 16
"""Groups of at most so many exchange directly, each with each, in one round: where ranks share cores, every further
round waits for all of them to be scheduled."""
DIRECT_REDUCE_BYTES = 64 << 10
"""Sums of at most so many bytes are gathered and added up by everyone."""


def ring_bytes(operation: Operation, members: int, payload_bytes: int) -> int:
    """Bytes one member receives when a ring carries `operation`; `payload_bytes` is the whole (unscattered) tensor.

    A broadcast is counted for a member that is not its root; a reduction, which passes along the ring and ends at its
    root, for one that it does not begin with.
    """
    if members == 1:
        return 0
    if operation in ("broadcast", "reduce"):
        return payload_bytes
    rounds = 2 if operation == "all_reduce" else 1
    return rounds * (members - 1) * payload_bytes // members


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


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)  # a lone element may have any strides


def sum_shares(output: Tensor, shares: Tensor) -> None:
    """`output` [n] = sum over k of `shares` [k, n], in member order, accumulated in the wider type; rounded once."""
    wide = _WIDER.get(output.dtype)
    total = output if wide is None else torch.empty_like(output, dtype=wide)
    total.copy_(shares[0])
    for share in shares[1:]:
        total.add_(share)
    if total is not output:
        output.copy_(total)


REDUCE = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


def reduce_shares(output: Tensor, shares: Tensor, op: Reduction) -> None:
    """`output` [n] = all `shares` [k, n] by `op`, in member order."""
    output.copy_(shares[0])
    for share in shares[1:]:
        REDUCE[op](output, share, out=output)


class CheckedGroup:
    """Base of every group; see `protocol.Group` for what the public calls promise."""

    sums_natively = True
    """Whether `_reduce_scatter` exists; otherwise it, and on CPU a reduction to one root, is an all-to-all and a local
    sum."""

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

    def all_reduce(self, tensor: Tensor, op: Reduction = "sum") -> Work:
        self._check("all_reduce", tensor)
        self._count("all_reduce", tensor)
        wide = self._reducible("all_reduce", tensor)
        if len(self.ranks) == 1 or tensor.numel() == 0:
            return Finished()
        flat = tensor.detach().view(-1)
        if wide is None:
            return self._all_reduce(flat, op)
        staged = flat.to(wide)
        return Then(self._all_reduce(staged, op), lambda: flat.copy_(staged))

    def reduce(self, tensor: Tensor, root: int = 0) -> Work:
        self._check("reduce", tensor)
        self._check_root("reduce", root)
        if self.index != (root + 1) % len(self.ranks):
            self._count("reduce", tensor)
        wide = self._reducible("reduce", tensor)
        if len(self.ranks) == 1 or tensor.numel() == 0:
            return Finished()
        flat, members = tensor.detach().view(-1), len(self.ranks)
        if not self.sums_natively and not tensor.is_cuda:
            size = flat.numel() * flat.element_size()
            shares = flat.new_empty(members if self.index == root else 0, flat.numel())
            work = self._all_to_all(_bytes(shares), _bytes(flat), [size if self.index == root else 0] * members,
                                    [size if member == root else 0 for member in range(members)])
            return Then(work, lambda: sum_shares(flat, shares)) if self.index == root else work
        if wide is None:
            return self._reduce(flat, root)
        staged = flat.to(wide)
        return Then(self._reduce(staged, root), lambda: flat.copy_(staged))

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> Work:
        self._check("reduce_scatter", output, tensor)
        self._fits("reduce_scatter", tensor, output)
        self._count("reduce_scatter", tensor)
        wide = self._reducible("reduce_scatter", tensor)
        output, tensor = output.detach().view(-1), tensor.detach().view(-1)
        if len(self.ranks) == 1 or tensor.numel() == 0:
            output.copy_(tensor)
            return Finished()
        if wide is None and self.sums_natively:
            return self._reduce_scatter(output, tensor)
        received = torch.empty_like(tensor)
        share = [output.numel() * output.element_size()] * len(self.ranks)
        work = self._all_to_all(_bytes(received), _bytes(tensor), share, share)
        return Then(work, lambda: sum_shares(output, received.view(len(self.ranks), -1)))

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        self._check("all_gather", output, tensor)
        self._fits("all_gather", output, tensor)
        self._count("all_gather", output)
        if len(self.ranks) == 1 or tensor.numel() == 0:
            output.detach().view(-1).copy_(tensor.detach().view(-1))
            return Finished()
        return self._all_gather(_bytes(output), _bytes(tensor))

    def broadcast(self, tensor: Tensor, root: int = 0) -> Work:
        self._check("broadcast", tensor)
        self._check_root("broadcast", root)
        if self.index != root:
            self._count("broadcast", tensor)
        if len(self.ranks) == 1 or tensor.numel() == 0:
            return Finished()
        return self._broadcast(_bytes(tensor), root)

    def all_to_all(self, output: Tensor, tensor: Tensor, output_splits: Sequence[int] | None = None,
                   input_splits: Sequence[int] | None = None) -> Work:
        self._check("all_to_all", output, tensor)
        received, sent = self._splits("output", output, output_splits), self._splits("input", tensor, input_splits)
        self.bytes_received += sum(received) - received[self.index]
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
            self._all_reduce(torch.zeros(1, dtype=torch.int32), "sum").wait()

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

    def _reducible(self, call: str, tensor: Tensor) -> torch.dtype | None:
        """The wider type in which `tensor` is summed; None where it is summed as it is."""
        if tensor.dtype not in NATIVE and tensor.dtype not in _WIDER:
            raise self._error(call, "this dtype cannot be reduced", tensor.dtype)
        return _WIDER.get(tensor.dtype)

    def _count(self, operation: Operation, whole: Tensor) -> None:
        self.bytes_received += ring_bytes(operation, len(self.ranks), whole.numel() * whole.element_size())

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
