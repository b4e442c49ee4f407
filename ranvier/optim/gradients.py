"""The gradients of a rank: one flat buffer, cut into chunks that are averaged over `data` as soon as they are complete.

    buffer   | head ........ | layer 7 .... | layer 6 .... | ... |      in the order in which a backward finishes them
    chunks   |  0   |  1   |   2   |  3  |   4    | ...                 of equal size; they cut through parameters

A chunk counts what is still to come: blocks that the last backward has not passed, postponed products, gradients from
the other ends of tied parameters. At zero it is complete, and read-only until it is reduced. Chunks are reduced in one
fixed order on every replica, never by readiness, so that replicas agree on the order of collectives.

A half-precision parameter may have fp32 gradients here (`Tensor.grad_dtype`): many microbatches then add up without
losing bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ranvier.comm.collectives import Finished, Then
from ranvier.comm.protocol import Group, Work
from ranvier.precision import is_half


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
class Chunk:
    """A piece [start, stop) of the flat buffer. `share`: the part of it that is summed here; all of it unless the
    reduction scatters."""

    start: int
    stop: int
    specs: list[GradientSpec]
    share: tuple[int, int]
    blocks: set[int] = field(default_factory=set)
    outstanding: int = 0
    work: Work = field(default_factory=Finished)
    gather: Callable[[], Work] | None = None
    """Starts the second half of a sum that travels in half precision: members collect the shares of the others."""

    @property
    def sent_to_owner(self) -> bool:
        return self.specs[0].sent_to_owner


class Gradients:
    """Flat gradients of one rank, their completion, and their reduction over `data`.

    Args:
        specs: trainable parameters, in model order. Their `.grad` become views of the flat buffer.
        group: the ranks that hold the same stage in all replicas.
        chunk_size: elements that are reduced in one piece; rounded up to a multiple of the group's size.
        send_to_owner: called with the spec of a complete gradient that goes to its owner.
        dtype: of the buffer; by default that of the parameters.
        reduce_dtype: in which chunks travel; by default that of the buffer.
    """

    def __init__(self, specs: Sequence[GradientSpec], group: Group, chunk_size: int,
                 send_to_owner: Callable[[GradientSpec], None], *, dtype: torch.dtype | None = None,
                 reduce_dtype: torch.dtype | None = None) -> None:
        self._group, self._send_to_owner = group, send_to_owner
        order = sorted(enumerate(specs), key=lambda item: (-max(item[1].blocks), -item[0]))
        self._specs = [spec for _, spec in order]
        self.places: dict[nn.Parameter, tuple[int, int]] = {}
        """Where each parameter's gradient begins and ends in the buffer."""
        self.chunks: list[Chunk] = []
        self._chunks_of: dict[nn.Parameter, range] = {}
        total = self._lay_out(chunk_size)
        first = self._specs[0].parameter if self._specs else torch.empty(0)
        self.flat = torch.zeros(total, dtype=dtype or first.dtype, device=first.device)
        """All gradients, in reduction order."""
        self._reduce_dtype = reduce_dtype or self.flat.dtype
        self._next = self._moving = 0
        self._scatter = False
        self._attach()

    def _lay_out(self, chunk_size: int) -> int:
        """Places and chunks; returns the buffer's size. What is sent away, what is awaited from elsewhere, and the rest
        never share a chunk; where a chunk ends for that, it is padded to a multiple of the group's size."""
        members = len(self._group.ranks)
        chunk_size = -(-chunk_size // members) * members
        offset = 0
        for run in _runs(self._specs):
            start = offset
            for spec in run:
                self.places[spec.parameter] = offset, offset + spec.parameter.numel()
                offset += spec.parameter.numel()
            offset = -(-offset // members) * members
            step = max(1, offset - start) if run[0].sent_to_owner else chunk_size
            for begin in range(start, offset, step):
                end = min(begin + step, offset)
                inside = [spec for spec in run
                          if self.places[spec.parameter][0] < end and self.places[spec.parameter][1] > begin]
                for spec in inside:
                    known = self._chunks_of.get(spec.parameter, range(len(self.chunks), 0))
                    self._chunks_of[spec.parameter] = range(known.start, len(self.chunks) + 1)
                width = (end - begin) // members
                share = begin + self._group.index * width
                self.chunks.append(Chunk(begin, end, inside or run[-1:], (share, share + width)))
        return offset

    def _attach(self) -> None:
        """Whoever set a gradient to None, or to something else, gets its place in the buffer back."""
        for parameter, (start, stop) in self.places.items():
            place = self.flat[start:stop]
            if parameter.grad is None or parameter.grad.data_ptr() != place.data_ptr():
                parameter.grad_dtype = self.flat.dtype
                parameter.grad = place.view(parameter.shape)

    # ------------------------------------------------------------------ counting

    def begin(self, *, scatter: bool = False) -> None:
        """A new batch: gradients are zero, everything is outstanding. scatter: each member needs its share only."""
        self.flat.zero_()
        self._next = self._moving = 0
        self._scatter = scatter
        self._attach()
        for chunk in self.chunks:
            chunk.work, chunk.gather = Finished(), None
            chunk.blocks = set().union(*(spec.blocks for spec in chunk.specs))
            chunk.outstanding = sum(spec.remote_ends for spec in chunk.specs)

    def chunk_of(self, parameter: nn.Parameter) -> int:
        """The place in the reduction order of the first chunk that holds some of `parameter`."""
        return self._chunks_of[parameter].start

    def queued(self, parameter: nn.Parameter) -> None:
        """A product for this parameter has been postponed."""
        for number in self._chunks_of[parameter]:
            self.chunks[number].outstanding += 1

    def added(self, parameter: nn.Parameter) -> None:
        """A postponed product, or the gradient from another end of a tie, has been added."""
        for number in self._chunks_of[parameter]:
            self.chunks[number].outstanding -= 1
        self._reduce_complete()

    def block_passed(self, block: int) -> None:
        """The last backward of the batch is through with `block`."""
        for chunk in self.chunks:
            chunk.blocks.discard(block)
        self._reduce_complete()

    def all_passed(self) -> None:
        """Every backward of the batch has run, whatever blocks took part."""
        for chunk in self.chunks:
            chunk.blocks.clear()
        self._reduce_complete()

    def _reduce_complete(self) -> None:
        while self._next < len(self.chunks):
            chunk = self.chunks[self._next]
            if chunk.blocks or chunk.outstanding:
                return
            self._next += 1
            if chunk.sent_to_owner:
                self._send_to_owner(chunk.specs[0])
            elif len(self._group.ranks) > 1:
                self._reduce(chunk)

    def _reduce(self, chunk: Chunk) -> None:
        """Start the sum of one chunk over the replicas, in the format in which it travels.

        In half precision, shares travel as they are and are summed in fp32 by their member; a library's all-reduce
        would send fp32, or round at each hop.
        """
        whole = self.flat[chunk.start:chunk.stop]
        sent = whole.to(self._reduce_dtype)
        if not self._scatter and not is_half(sent.dtype):
            work = self._group.all_reduce(sent)
            chunk.work = work if sent is whole else Then(work, lambda: whole.copy_(sent))
            return
        share = sent.new_empty(len(sent) // len(self._group.ranks))
        work = self._group.reduce_scatter(share, sent)
        if self._scatter:
            chunk.work = Then(work, lambda: self.flat[slice(*chunk.share)].copy_(share))
        else:
            chunk.work = work
            chunk.gather = lambda: Then(self._group.all_gather(sent, share), lambda: whole.copy_(sent))

    @property
    def complete(self) -> bool:
        """Whether every chunk is on its way."""
        return self._next == len(self.chunks)

    def progress(self) -> None:
        """Let the reductions under way move."""
        while self._moving < self._next and self.chunks[self._moving].work.done():
            self._moving += 1

    # ------------------------------------------------------------------ the end of the batch

    def reduced(self) -> Iterator[Chunk]:
        """The chunks that are summed here, in order, each as soon as its sum is there; see `share_of`."""
        assert self.complete, "a chunk of gradients is still incomplete"
        gathering: Chunk | None = None
        for chunk in self.chunks:
            chunk.work.wait()
            if chunk.gather is not None:  # in the order of chunks, the same on every replica
                chunk.work, chunk.gather = chunk.gather(), None
                gathering, chunk = chunk, gathering
                if chunk is None:
                    continue
                chunk.work.wait()
            if not chunk.sent_to_owner:
                yield chunk
        if gathering is not None:
            gathering.work.wait()
            yield gathering

    def wait(self) -> None:
        """Return when all chunks are reduced."""
        for _ in self.reduced():
            pass

    def share_of(self, chunk: Chunk) -> tuple[int, int]:
        """The part of a reduced chunk whose sums are here: all of it, unless the batch began with `scatter`."""
        return chunk.share if self._scatter else (chunk.start, chunk.stop)

    @property
    def scattered(self) -> bool:
        """Whether each member has the sums of its share only."""
        return self._scatter

    def scale(self, factor: float) -> None:
        """Multiply all gradients."""
        if factor != 1.0:
            self.flat.mul_(factor)

    def squared_norm(self, chunk: Chunk) -> Tensor:
        """Sum of squares of what this rank has the sums of in `chunk`, fp64, zero-dimensional."""
        start, stop = self.share_of(chunk)
        return torch.linalg.vector_norm(self.flat[start:stop], dtype=torch.promote_types(
            torch.float32, self.flat.dtype)).double() ** 2

    def owned(self) -> list[GradientSpec]:
        """The parameters that are updated here, in model order."""
        return [spec for spec in reversed(self._specs) if not spec.sent_to_owner]


def _runs(specs: Sequence[GradientSpec]) -> Iterator[list[GradientSpec]]:
    """Consecutive specs that may share a chunk; tied parameters are alone."""
    run: list[GradientSpec] = []
    for spec in specs:
        alone = spec.sent_to_owner or spec.remote_ends > 0
        if run and (alone or run[0].sent_to_owner or run[0].remote_ends > 0):
            yield run
            run = []
        run.append(spec)
    if run:
        yield run
