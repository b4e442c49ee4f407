"""The gradients of a rank: one flat buffer, cut into chunks that are averaged over `data` as soon as they are complete.

    buffer   | head ........ | layer 7 .... | layer 6 .... | ... |      in the order in which a backward finishes them
    chunks   |  0   |  1   |   2   |  3  |   4    | ...                 of equal size; they cut through parameters

A chunk counts what is still to come: blocks that the last backward has not passed, postponed products, gradients from
the other ends of tied parameters. At zero it is complete, and read-only until it is reduced. Chunks are reduced in one
fixed order on every replica, never by readiness, so that replicas agree on the order of collectives.

With `reuse` (Optimus, section 3.2.3) no such buffer exists: each run of blocks has the same piece of memory in turn,
and its one chunk is handed on, and forgotten, before the backward enters the run before:

    buffer   | head |  then  | layer 7 |  then  | layer 6 |  then ...

A half-precision parameter may have fp32 gradients here (`Tensor.grad_dtype`): many microbatches then add up without
losing bits.

A parameter that no loss reaches has no gradient, and whoever updates leaves it alone. On several replicas that is so
when none of them reaches it. Each knows that only of itself, and says it by the sign of zero: a gradient that nothing
was added to is -0.0, which no sum of anything else can be (-0.0 + -0.0 = -0.0, 0.0 + -0.0 = 0.0).

At most `in_flight` reductions that work in memory of their own are under way, however late a peer is, and have such
memory in turn. Where half-precision sums come in two halves, with in_flight 3:

    scatter        | 0 | 1 | 2 | 3 | 4 |      before scatter 3 begins, 0 has been gathered, and gather 1 has begun
    gather                 | 0 | 1 | 2 |

On a tensor mesh, copies of a parameter may each have a part of its gradient: it is summed over a group of its own, in
chunks that come last. The members of every group start its collectives in one order if all ranks of a stage have their
specs in the same order, with groups along the same axes.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ranvier.comm.collectives import Finished, Then
from ranvier.comm.protocol import Group, Work
from ranvier.precision import is_half

IN_FLIGHT = 4
"""Reductions, and gathers of parameters, that may work in memory of their own at once. A replica that is that many
chunks ahead of the slowest waits for it, as it would at the end of the step."""


@dataclass(frozen=True, kw_only=True)
class GradientSpec:
    """One trainable parameter of this rank.

    blocks: numbers of all the blocks of this stage that use it.
    remote_ends: other stages that hold an end of it and send their gradients here (this rank owns it).
    sent_to_owner: its gradient goes to the stage that owns it, and is not reduced here.
    group: the ranks over which this gradient is summed; None: those given to `Gradients`.
    copied: whether ranks of the stage hold copies with the same gradient. They are cut apart from the others, and so
        alike on every rank: an update's last bit may depend on where pieces begin.
    counts: whether this rank's copy is the one that enters the norm, where ranks of the stage hold copies with the same
        gradient; the same on all members of the group.
    """

    name: str
    parameter: nn.Parameter
    blocks: frozenset[int]
    remote_ends: int = 0
    sent_to_owner: bool = False
    group: Group | None = None
    counts: bool = True
    copied: bool = False


@dataclass(eq=False)
class Chunk:
    """A piece [start, stop) of all gradients, summed over `group`. `share`: the part of it that is summed here; all of
    it unless the reduction scatters. `counts`: as in its specs. `offset`: what is added to a place to find it in the
    buffer. `reused`: its memory is others' too, and its own from `entered` on."""

    start: int
    stop: int
    specs: list[GradientSpec]
    share: tuple[int, int]
    group: Group
    counts: bool
    offset: int = 0
    reused: bool = False
    entered: bool = False
    blocks: set[int] = field(default_factory=set)
    outstanding: int = 0
    work: Work = field(default_factory=Finished)
    gather: Callable[[], Work] | None = None
    """Starts the second half of a sum that travels in half precision: members collect the shares of the others."""

    @property
    def sent_to_owner(self) -> bool:
        return self.specs[0].sent_to_owner


class Gradients:
    """Flat gradients of one rank, their completion, and their reduction.

    Args:
        specs: trainable parameters, in model order. Their `.grad` become views of the flat buffer.
        group: the ranks over which gradients without a group of their own are summed.
        chunk_size: elements that are reduced in one piece; rounded up to a multiple of the group's size.
        send_to_owner: called with the spec of a complete gradient that goes to its owner.
        dtype: of the buffer; by default that of the parameters.
        reduce_dtype: in which chunks travel; by default that of the buffer.
        in_flight: reductions that may work in memory of their own at once, 2 or more.
        reuse: runs of blocks (their numbers) whose gradients have the same memory in turn; `chunk_size` is not used
            then. What is tied, used in several runs, or summed over a group of its own keeps its own.
        allocate: whether the buffer is there at once; otherwise `allocate` makes it, after parameters have moved.
    """

    def __init__(self, specs: Sequence[GradientSpec], group: Group, chunk_size: int,
                 send_to_owner: Callable[[GradientSpec], None], *, dtype: torch.dtype | None = None,
                 reduce_dtype: torch.dtype | None = None, in_flight: int = IN_FLIGHT, reuse: Sequence[range] = (),
                 allocate: bool = True) -> None:
        self._group, self._send_to_owner = group, send_to_owner
        self._run = {spec.parameter: _run_of(spec, reuse) for spec in specs}
        groups = [group, *(spec.group for spec in specs if spec.group is not None)]

        def turn(item: tuple[int, GradientSpec]) -> tuple[int, ...]:
            number, spec = item
            late = groups.index(spec.group or group)
            return (late, spec.copied, late > 0 and not spec.counts, bool(reuse) and self._run[spec.parameter] is None,
                    -min(spec.blocks), -number)

        self._in_model_order = tuple(specs)
        self._specs = [spec for _, spec in sorted(enumerate(specs), key=turn)]
        self.places: dict[nn.Parameter, tuple[int, int]] = {}
        """Where each parameter's gradient begins and ends in the buffer."""
        self.chunks: list[Chunk] = []
        self._chunks_of: dict[nn.Parameter, range] = {}
        self._reuse = reuse
        self.size = self._lay_out(chunk_size)
        """Elements of all gradients, padding included."""
        self.on_complete: Callable[[Chunk], None] | None = None
        """With `reuse`: takes each chunk when it is complete; its memory is another's when this returns."""
        first = self._specs[0].parameter if self._specs else torch.empty(0)
        self.dtype, self._device = dtype or first.dtype, first.device
        self.length = self._place_chunks()
        """Elements of the buffer."""
        self._reduce_dtype, self._in_flight = reduce_dtype or self.dtype, in_flight
        self._memory: dict[tuple[int, str], Tensor] = {}
        self._under_way: dict[int, Chunk] = {}
        self._next = self._moving = 0
        self._passed = sys.maxsize
        self._scatter = False
        self._versions: dict[nn.Parameter, int] = {}
        self._unreached: dict[nn.Parameter, bool] = {}
        if allocate:
            self.allocate()

    def allocate(self) -> None:
        """Make the buffer, and the parameters' `.grad` views of it."""
        self.flat = torch.zeros(self.length, dtype=self.dtype, device=self._device)
        """All gradients, in reduction order; with `reuse` room for those of one run, and what keeps its own."""
        self._attach(reused=False)

    def _kind(self, spec: GradientSpec) -> tuple[range | None, Group, bool, bool]:
        """What specs in one chunk have in common: the run whose memory they have, their group, whether there are copies
        of them, and whether they count."""
        return self._run[spec.parameter], spec.group or self._group, spec.copied, spec.counts

    def _lay_out(self, chunk_size: int) -> int:
        """Places and chunks; returns the buffer's size. What is sent away, what is awaited from elsewhere, and the rest
        never share a chunk; where a chunk ends for that, it is padded to a multiple of its group's size."""
        offset = 0
        for run in _runs(self._specs, self._kind):
            reused, group, _, counts = self._kind(run[0])
            members, start = len(group.ranks), offset
            for spec in run:
                self.places[spec.parameter] = offset, offset + spec.parameter.numel()
                offset += spec.parameter.numel()
            offset += -(offset - start) % members
            whole = run[0].sent_to_owner or reused is not None
            step = max(1, offset - start) if whole else -(-chunk_size // members) * members
            starts, stops = zip(*(self.places[spec.parameter] for spec in run), strict=True)
            for begin in range(start, max(offset, start + 1), step):
                end = min(begin + step, offset)
                inside = list(run[bisect_right(stops, begin):bisect_left(starts, end)])
                for spec in inside:
                    known = self._chunks_of.get(spec.parameter, range(len(self.chunks), 0))
                    self._chunks_of[spec.parameter] = range(known.start, len(self.chunks) + 1)
                width = (end - begin) // members
                share = begin + group.index * width
                self.chunks.append(Chunk(begin, end, inside, (share, share + width), group, counts,
                                         reused=reused is not None))
            for spec in run:
                if spec.parameter not in self._chunks_of:  # it has no elements
                    self._chunks_of[spec.parameter] = range(len(self.chunks) - 1, len(self.chunks))
                    self.chunks[-1].specs.append(spec)
        return offset

    def _place_chunks(self) -> int:
        """Give chunks their places in the buffer; returns its size. Without `reuse` they are as in `places`."""
        if not self._reuse:
            return self.size
        first: dict[range, int] = {}
        taken = 0
        for chunk in self.chunks:
            if chunk.reused:
                chunk.offset = -first.setdefault(self._run[chunk.specs[0].parameter], chunk.start)
                taken = max(taken, chunk.stop + chunk.offset)
        for chunk in self.chunks:
            if not chunk.reused:
                chunk.offset = taken - chunk.start
                taken += chunk.stop - chunk.start
        return taken

    def of(self, chunk: Chunk, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of all gradients, which lie in `chunk`."""
        return self.flat[start + chunk.offset:stop + chunk.offset]

    def _attach(self, *, reused: bool, run: range | None = None) -> None:
        """Whoever set a gradient to None, or to something else, gets its place in the buffer back; with `reused` those
        of `run` alone."""
        for spec in self._specs:
            first = self.chunks[self._chunks_of[spec.parameter].start]
            if first.reused != reused or (reused and self._run[spec.parameter] != run):
                continue
            start, stop = self.places[spec.parameter]
            place = self.flat[start + first.offset:stop + first.offset]
            if spec.parameter.grad is None or spec.parameter.grad.data_ptr() != place.data_ptr():
                early = reused and spec.parameter.grad is not None
                if early:
                    place.copy_(spec.parameter.grad.reshape(-1))
                    spec.parameter.grad = None
                spec.parameter.grad_dtype = self.flat.dtype
                spec.parameter.grad = place.view(spec.parameter.shape).data  # with a version count of its own
                self._versions[spec.parameter] = -1 if early else spec.parameter.grad._version

    # ------------------------------------------------------------------ counting

    def begin(self, *, scatter: bool = False) -> None:
        """A new batch: gradients are zero, everything is outstanding. scatter: each member needs its share only."""
        for chunk in self.chunks[:self._next]:
            chunk.work.wait()  # a batch that failed may have left some under way
        self._under_way.clear()
        self.flat.zero_()
        self._next = self._moving = 0
        self._passed = sys.maxsize
        self._scatter = scatter
        self._attach(reused=False)
        self._unreached = {}
        self._versions = {spec.parameter: spec.parameter.grad._version for spec in self._specs
                          if spec.parameter.grad is not None}
        for chunk in self.chunks:
            chunk.work, chunk.gather, chunk.entered = Finished(), None, False
            chunk.blocks = set().union(*(spec.blocks for spec in chunk.specs))
            chunk.outstanding = sum(spec.remote_ends for spec in chunk.specs)

    def hold(self) -> None:
        """Until the next batch begins nothing is reduced or sent: gradients stay those of this rank alone."""
        for chunk in self.chunks:
            chunk.outstanding += 1

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
        """The last backward of the batch is through with `block` and all behind it, and enters the one before.

        A state of several tensors may tell of boundaries late, or out of order: what is behind one that has been passed
        is no news.
        """
        if block >= self._passed:
            return
        self._passed = block
        for chunk in self.chunks:
            chunk.blocks = {other for other in chunk.blocks if other < block}
        self._reduce_complete()
        for run in self._reuse:
            if block - 1 in run:
                self._enter(run)

    def _enter(self, run: range) -> None:
        """The memory that runs have in turn is that of `run` now. Where a state has several tensors, autograd may have
        entered it before: what it has made is copied."""
        chunks = [chunk for chunk in self.chunks
                  if chunk.reused and not chunk.entered and self._run[chunk.specs[0].parameter] == run]
        for chunk in chunks:
            self.of(chunk, chunk.start, chunk.stop).zero_()
            chunk.entered = True
        if chunks:
            self._attach(reused=True, run=run)

    def all_passed(self) -> None:
        """Every backward of the batch has run, whatever blocks took part."""
        for chunk in self.chunks:
            chunk.blocks.clear()
        self._reduce_complete()
        for spec in self._specs:  # before gradients of other ends are added
            self._note_reach(spec)

    def _reduce_complete(self) -> None:
        while self._next < len(self.chunks):
            chunk = self.chunks[self._next]
            if chunk.blocks or chunk.outstanding:
                return
            self._next += 1
            if chunk.reused:  # where no backward came by, gradients are zero
                self._enter(self._run[chunk.specs[0].parameter])
            for spec in chunk.specs:
                self._note_reach(spec)
            if chunk.sent_to_owner:
                self._send_to_owner(chunk.specs[0])
            elif len(chunk.group.ranks) > 1:
                self._reduce(chunk)
            if chunk.reused:
                self._wait(chunk)
                self._under_way.clear()
                self.on_complete(chunk)
                for spec in chunk.specs:
                    spec.parameter.grad = None

    def _note_reach(self, spec: GradientSpec) -> None:
        """Everything of this rank has been added to the gradient of `spec`. If that is nothing, it becomes -0.0."""
        parameter = spec.parameter
        if parameter in self._unreached:
            return
        untouched = parameter.requires_grad and parameter.grad is not None and \
            parameter.grad._version == self._versions.get(parameter, -1) and not parameter.grad.any()
        self._unreached[parameter] = bool(untouched)
        if untouched:
            parameter.grad.data.fill_(-0.0)

    def left_alone(self, chunk: Chunk) -> set[nn.Parameter]:
        """Parameters in a reduced chunk that nobody's loss has reached; the same on all who summed it."""
        start, stop = self.share_of(chunk)
        found = set()
        for spec in chunk.specs:
            if self._unreached.get(spec.parameter):
                first, last = self.places[spec.parameter]
                part = self.of(chunk, max(first, start), max(first, start, min(last, stop)))
                if bool(torch.signbit(part).all()) and not bool(part.any()):
                    found.add(spec.parameter)
        return found

    def _wait(self, chunk: Chunk) -> None:
        """Return when `chunk` is reduced."""
        chunk.work.wait()
        if chunk.gather is not None:
            self._collect(chunk)
            chunk.work.wait()

    def _collect(self, chunk: Chunk) -> None:
        """All shares of `chunk` have been summed: start collecting them."""
        chunk.work, chunk.gather = chunk.gather(), None

    def _reduce(self, chunk: Chunk) -> None:
        """Start the sum of one chunk over its group, in the format in which it travels.

        In half precision, shares are summed by their member; who wants the whole collects the shares then.
        """
        whole, needs = self.of(chunk, chunk.start, chunk.stop), self._needs(chunk, self._scatter)
        slot = self._next_slot(chunk) if needs else 0
        sent = self._buffer(slot, "copy", len(whole)).copy_(whole) if "copy" in needs else whole
        if "share" not in needs:
            work = chunk.group.all_reduce(sent)
            chunk.work = work if sent is whole else Then(work, lambda: whole.copy_(sent))
            return
        share = self._buffer(slot, "share", needs["share"])
        room = self._buffer(slot, "room", needs["room"]) if "room" in needs else None
        work = chunk.group.reduce_scatter(share, sent, room)
        if self._scatter:
            chunk.work = Then(work, lambda: self.of(chunk, *chunk.share).copy_(share))
        else:
            chunk.work, chunk.gather = work, lambda: _gather(chunk.group, whole, sent, share)

    # ------------------------------------------------------------------ memory of reductions

    def _needs(self, chunk: Chunk, scatter: bool) -> dict[str, int]:
        """Elements that the reduction of `chunk` works in, beside its gradients: a copy in the format that travels, the
        share that is summed here, and room for what arrives (`passing` where the group takes it by itself)."""
        size, members, dtype = chunk.stop - chunk.start, len(chunk.group.ranks), self._reduce_dtype
        if members == 1 or not size or chunk.sent_to_owner:
            return {}
        scattered = scatter or is_half(dtype)
        arriving = chunk.group.buffer_bytes("reduce_scatter" if scattered else "all_reduce", size, dtype,
                                            self._device.type) // dtype.itemsize
        found = {"copy": size if dtype is not self.dtype else 0, "share": size // members if scattered else 0,
                 "room" if scattered else "passing": arriving}
        return {name: elements for name, elements in found.items() if elements}

    def _next_slot(self, chunk: Chunk) -> int:
        """The number of the memory that `chunk` has in its turn. Who had it before must be done, and who has it next
        must have been summed: both are waited for in the order of chunks, the same on every replica, whoever is
        late."""
        waiting = self._under_way
        if len(waiting) == self._in_flight:
            self._wait(waiting.pop(next(iter(waiting))))
        if len(waiting) == self._in_flight - 1:
            oldest = next(iter(waiting.values()))
            if oldest.gather is not None:
                oldest.work.wait()
                self._collect(oldest)
        slot = next(number for number in range(self._in_flight) if number not in waiting)
        waiting[slot] = chunk
        return slot

    def _buffer(self, slot: int, name: str, elements: int) -> Tensor:
        if (slot, name) not in self._memory:
            self._memory[slot, name] = torch.empty(self._largest(self._scatter)[name], dtype=self._reduce_dtype,
                                                   device=self._device)
        return self._memory[slot, name][:elements]

    def _largest(self, scatter: bool) -> Counter[str]:
        """Elements of the memory that reductions have in turn, for one of them."""
        found: Counter[str] = Counter()
        for chunk in self.chunks:
            found |= Counter(self._needs(chunk, scatter))
        del found["passing"]
        return found

    def reduction_bytes(self, *, scatter: bool) -> tuple[int, int]:
        """What reductions work in, beside the buffer, when all that may be are under way: memory that stays, and what
        groups take meanwhile."""
        needing = [chunk for chunk in self.chunks if self._needs(chunk, scatter)]
        slots = max(min(self._in_flight, sum(not chunk.reused for chunk in needing)),
                    any(chunk.reused for chunk in needing))
        lasting = slots * sum(self._largest(scatter).values())
        passing = sorted((self._needs(chunk, scatter).get("passing", 0) for chunk in needing), reverse=True)
        return lasting * self._reduce_dtype.itemsize, sum(passing[:slots]) * self._reduce_dtype.itemsize

    @property
    def reduction_buffers(self) -> list[Tensor]:
        """What reductions have worked in so far, and will again."""
        return list(self._memory.values())

    def detach(self) -> None:
        """Parameters have no gradients any more, and take ones of their own format again."""
        for spec in self._specs:
            spec.parameter.grad = None
            spec.parameter.grad_dtype = spec.parameter.dtype

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
        """The chunks that are summed here, in order, each as soon as its sum is there; see `share_of`. Those that
        `on_complete` has had are left out."""
        assert self.complete, "a chunk of gradients is still incomplete"
        gathering: Chunk | None = None
        for chunk in (chunk for chunk in self.chunks if not chunk.reused):
            chunk.work.wait()
            if chunk.gather is not None:  # in the order of chunks, the same on every replica
                self._collect(chunk)
                gathering, chunk = chunk, gathering
                if chunk is None:
                    continue
                chunk.work.wait()
            if not chunk.sent_to_owner:
                yield chunk
        if gathering is not None:
            gathering.work.wait()
            yield gathering

    def snapshot(self) -> Tensor:
        """A copy of the buffer between batches, with what a user has put in the place of a parameter's gradient."""
        copied = self.flat.clone()
        for spec in self._specs:
            start, stop = self.places[spec.parameter]
            offset, grad = self.chunks[self._chunks_of[spec.parameter].start].offset, spec.parameter.grad
            place = copied[start + offset:stop + offset]
            if grad is None:
                place.zero_()
            elif grad.data_ptr() != self.flat.data_ptr() + (start + offset) * self.flat.element_size():
                place.copy_(grad.reshape(-1))
        return copied

    def note_values(self) -> None:
        """Gradients are whole; see `were_zeroed`."""
        self._versions = {spec.parameter: spec.parameter.grad._version for spec in self._specs
                          if spec.parameter.grad is not None}

    def were_zeroed(self) -> bool:
        """Whether somebody has set all gradients of this rank to None or zero since `note_values`."""
        found = [spec.parameter.grad for spec in self.owned()]
        given = [grad for grad in found if grad is not None]
        written = [spec.parameter for spec in self.owned() if spec.parameter.grad is not None
                   and spec.parameter.grad._version != self._versions.get(spec.parameter)]
        return bool(found) and (not given or (bool(written) and not any(bool(grad.any()) for grad in given)))

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

    def squared_norm(self, chunk: Chunk, within: tuple[int, int] | None = None) -> Tensor:
        """Sum of squares of what this rank has the sums of in `chunk` (of it `within` a part of all gradients), fp64,
        zero-dimensional."""
        start, stop = self.share_of(chunk)
        if within is not None:
            start = max(start, within[0])
            stop = max(start, min(stop, within[1]))
        return torch.linalg.vector_norm(self.of(chunk, start, stop), dtype=torch.promote_types(
            torch.float32, self.flat.dtype)).double() ** 2

    def owned(self) -> list[GradientSpec]:
        """The parameters that are updated here, in model order."""
        return [spec for spec in self._in_model_order if not spec.sent_to_owner]


def _gather(group: Group, whole: Tensor, sent: Tensor, share: Tensor) -> Work:
    """Start collecting all shares of a chunk into its place, by way of what was sent where formats differ."""
    work = group.all_gather(sent, share)
    return work if sent is whole else Then(work, lambda: whole.copy_(sent))


def _run_of(spec: GradientSpec, reuse: Sequence[range]) -> range | None:
    """The run whose memory the gradient of `spec` has in its turn; None where it keeps its own."""
    if spec.sent_to_owner or spec.remote_ends or spec.group is not None or spec.copied:
        return None
    return next((run for run in reuse if all(block in run for block in spec.blocks)), None)


def _runs(specs: Sequence[GradientSpec], kind: Callable[[GradientSpec], object]) -> Iterator[list[GradientSpec]]:
    """Consecutive specs that may share a chunk: those of one kind; tied parameters are alone."""
    run: list[GradientSpec] = []
    for spec in specs:
        alone = spec.sent_to_owner or spec.remote_ends > 0
        if run and (alone or run[0].sent_to_owner or run[0].remote_ends > 0 or kind(run[0]) != kind(spec)):
            yield run
            run = []
        run.append(spec)
    if run:
        yield run
