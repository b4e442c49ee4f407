"""The gradients of a rank: one flat buffer, cut into chunks that are averaged over `data` as soon as they are complete.

    buffer   | head ........ | layer 7 .... | layer 6 .... | ... |      in the order in which a backward finishes them
    chunks   |  0   |  1   |   2   |  3  |   4    | ...

A chunk counts what is still to come: blocks that the last backward has not passed, postponed products, gradients from
the other ends of tied parameters. At zero it is complete, and read-only from then on. Chunks are reduced in one fixed
order on every replica, never by readiness, so that replicas agree on the order of collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ranvier.comm.protocol import Group, Work


@dataclass(frozen=True, kw_only=True)
class GradientSpec:
    """One trainable parameter of this rank.

    blocks: numbers of all the blocks of this stage that use it.
    remote_ends: other stages that hold an end of it and send their gradients here (this rank owns it).
    sent_to_owner: its gradient goes to the stage that owns it, and is not reduced here.
    """

    name: str
    parameter: nn.Parameter
    blocks: frozenset[int]
    remote_ends: int = 0
    sent_to_owner: bool = False


@dataclass(eq=False)
class _Chunk:
    start: int
    stop: int
    specs: list[GradientSpec] = field(default_factory=list)
    blocks: set[int] = field(default_factory=set)
    outstanding: int = 0

    @property
    def sent_to_owner(self) -> bool:
        return self.specs[0].sent_to_owner


class Gradients:
    """Flat gradients of one rank, their completion, and their reduction over `data`.

    Args:
        specs: trainable parameters, in model order. Their `.grad` become views of the flat buffer.
        group: the ranks that hold the same stage in all replicas.
        chunk_bytes: parameters are gathered into chunks of at least this size.
        send_to_owner: called with the specs of a complete chunk that goes to its owner.
    """

    def __init__(self, specs: Sequence[GradientSpec], group: Group, chunk_bytes: int,
                 send_to_owner: Callable[[Sequence[GradientSpec]], None]) -> None:
        self._group, self._send_to_owner = group, send_to_owner
        order = sorted(enumerate(specs), key=lambda item: (-max(item[1].blocks), -item[0]))
        self._specs = [spec for _, spec in order]
        total = sum(spec.parameter.numel() for spec in self._specs)
        first = self._specs[0].parameter if self._specs else torch.empty(0)
        self.flat = torch.zeros(total, dtype=first.dtype, device=first.device)
        """All gradients, in reduction order."""
        self._chunks: list[_Chunk] = []
        self._chunk_of: dict[nn.Parameter, int] = {}
        self._places: dict[nn.Parameter, tuple[int, int]] = {}
        self._cut(chunk_bytes)
        self._next = 0
        self._works: list[Work] = []

    def _cut(self, chunk_bytes: int) -> None:
        """Whole parameters in order, a new chunk when the last is large enough; tied parameters get their own."""
        offset = 0
        for spec in self._specs:
            size = spec.parameter.numel()
            special = spec.sent_to_owner or spec.remote_ends > 0
            last = self._chunks[-1] if self._chunks else None
            full = last is None or (last.stop - last.start) * self.flat.element_size() >= chunk_bytes
            if special or full or last.specs[0].sent_to_owner or last.specs[0].remote_ends:
                last = _Chunk(offset, offset)
                self._chunks.append(last)
            last.specs.append(spec)
            last.blocks |= spec.blocks
            last.stop = offset + size
            self._chunk_of[spec.parameter] = len(self._chunks) - 1
            self._places[spec.parameter] = offset, offset + size
            spec.parameter.grad = self.flat[offset:offset + size].view_as(spec.parameter)
            offset += size

    # ------------------------------------------------------------------ counting

    def begin(self) -> None:
        """A new batch: gradients are zero, everything is outstanding."""
        self.flat.zero_()
        self._next, self._works = 0, []
        for spec in self._specs:  # whoever set a gradient to None gets its place in the buffer back
            start, stop = self._places[spec.parameter]
            if spec.parameter.grad is None or spec.parameter.grad.data_ptr() != self.flat[start:stop].data_ptr():
                spec.parameter.grad = self.flat[start:stop].view_as(spec.parameter)
        for chunk in self._chunks:
            chunk.blocks = set().union(*(spec.blocks for spec in chunk.specs))
            chunk.outstanding = sum(spec.remote_ends for spec in chunk.specs)

    def chunk_of(self, parameter: nn.Parameter) -> int:
        """The chunk's place in the reduction order."""
        return self._chunk_of[parameter]

    def queued(self, parameter: nn.Parameter) -> None:
        """A product for this parameter has been postponed."""
        self._chunks[self._chunk_of[parameter]].outstanding += 1

    def added(self, parameter: nn.Parameter) -> None:
        """A postponed product, or the gradient from another end of a tie, has been added."""
        self._chunks[self._chunk_of[parameter]].outstanding -= 1
        self._reduce_complete()

    def block_passed(self, block: int) -> None:
        """The last backward of the batch is through with `block`."""
        for chunk in self._chunks:
            chunk.blocks.discard(block)
        self._reduce_complete()

    def all_passed(self) -> None:
        """Every backward of the batch has run, whatever blocks took part."""
        for chunk in self._chunks:
            chunk.blocks.clear()
        self._reduce_complete()

    def _reduce_complete(self) -> None:
        while self._next < len(self._chunks):
            chunk = self._chunks[self._next]
            if chunk.blocks or chunk.outstanding:
                return
            self._next += 1
            if chunk.sent_to_owner:
                self._send_to_owner(chunk.specs)
            elif len(self._group.ranks) > 1:
                self._works.append(self._group.all_reduce(self.flat[chunk.start:chunk.stop]))

    @property
    def complete(self) -> bool:
        """Whether every chunk is on its way."""
        return self._next == len(self._chunks)

    def progress(self) -> None:
        """Let the reductions under way move."""
        while self._works and self._works[0].done():
            self._works.pop(0).wait()

    # ------------------------------------------------------------------ the end of the batch

    def wait(self) -> None:
        """Return when all chunks are reduced."""
        assert self.complete, "a chunk of gradients is still incomplete"
        for work in self._works:
            work.wait()
        self._works = []

    def scale(self, factor: float) -> None:
        """Multiply all gradients."""
        if factor != 1.0:
            self.flat.mul_(factor)

    def squared_norm(self) -> Tensor:
        """Sum of squares of the gradients owned here, fp64, zero-dimensional."""
        total = torch.zeros((), dtype=torch.float64, device=self.flat.device)
        for chunk in self._chunks:
            if not chunk.sent_to_owner:
                total += torch.linalg.vector_norm(self.flat[chunk.start:chunk.stop]).double() ** 2
        return total

    def owned(self) -> list[GradientSpec]:
        """The parameters that are updated here, in model order."""
        return [spec for spec in reversed(self._specs) if not spec.sent_to_owner]
