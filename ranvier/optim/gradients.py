"""The gradients of a rank: one flat buffer, cut into chunks that are averaged over `data` as soon as they are complete.

    buffer   | head ........ | layer 7 .... | layer 6 .... | ... |      in the order in which a backward finishes them
    chunks   |  0   |  1   |   2   |  3  |   4    | ...                 of equal size; they cut through parameters

A chunk counts what is still to come: blocks that the last backward has not passed, deferred products, gradients from
the other ends of tied parameters. At zero it is complete, and read-only until it is reduced. Chunks are reduced in one
fixed order on every replica, never by readiness, so that replicas agree on the order of collectives.

With `reuse` (Optimus, section 3.2.3) no such buffer exists: each run of blocks has the same piece of memory in turn,
and its one chunk is handed on, and forgotten, before the backward enters the run before:

    buffer   | head |  then  | layer 7 |  then  | layer 6 |  then ...

A half-precision parameter may have fp32 gradients here (`Tensor.grad_dtype`): many microbatches then add up without
losing bits.

Of a lookup table only the rows are summed that some replica has looked up (`reduction`).

A parameter that no loss reaches has no gradient, and whoever updates leaves it alone. On several replicas that is so
when none of them reaches it. Each knows that only of itself, and says it by the sign of zero: a gradient that nothing
was added to is -0.0, which no sum of anything else can be (-0.0 + -0.0 = -0.0, 0.0 + -0.0 = 0.0).

On a tensor mesh, copies of a parameter may each have a part of its gradient: it is summed over a group of its own, in
chunks that come last. The members of every group start its collectives in one order if all ranks of a stage have their
specs in the same order, with groups along the same axes.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from sys import getrefcount
from weakref import ref

import torch
from torch import Tensor, nn

from ranvier.comm.collectives import CompletedWork
from ranvier.comm.protocol import Group
from ranvier.errors import ConfigError
from ranvier.layout import FlatOrder, flat_order
from ranvier.optim.chunks import Chunk, GradientSpec
from ranvier.optim.reduction import MAX_COLLECTIVES, Reductions, TouchedRows
from ranvier.originals.same_memory import storage_of

_MAKER = "ranvier_gradients"
"""Attribute of a buffer's storage, which is not saved with tensors: its `Gradients`, as a weak reference."""

_REPLACED = sys.maxsize
"""In place of the version of a gradient that has had values since before its version was counted."""


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
        order: how the gradients lie in the buffer and are cut, as `Layout.flat_order` has it for these specs; by
            default by `chunk_size`, `reuse` and `shard`.
        keeps_strides: whether gradients lie in memory as their parameters do (channels_last), as torch makes them:
            fused optimizers of torch count on it. Otherwise their elements are in order.
    """

    def __init__(self, specs: Sequence[GradientSpec], group: Group, chunk_size: int,
                 send_to_owner: Callable[[GradientSpec], None], *, dtype: torch.dtype | None = None,
                 reduce_dtype: torch.dtype | None = None, in_flight: int = MAX_COLLECTIVES, reuse: Sequence[range] = (),
                 allocate: bool = True, order: FlatOrder | None = None, shard: bool = False,
                 keeps_strides: bool = False) -> None:
        self._keeps_strides = keeps_strides
        self._send_to_owner, self._in_model_order, self._reuse = send_to_owner, tuple(specs), reuse
        assert len({spec.name for spec in specs}) == len(specs), "two gradients have one name"
        groups: dict[Group | None, Group] = {spec.group: spec.group or group for spec in specs} | {None: group}
        if order is None:
            order = flat_order(specs, {
                key: (len(group.ranks), group.index) for key, group in groups.items()}, chunk_size, reuse, shard=shard)
        self._specs = [specs[number] for number in order.order]
        self.places: dict[nn.Parameter, tuple[int, int]] = {
            specs[number].parameter: order.places[number] for number in order.order}
        """Start and stop of each parameter's gradient in the buffer."""
        self._chunks_of = {spec.parameter: numbers for spec, numbers in zip(specs, order.chunks_of, strict=True)}
        self.chunks: list[Chunk] = []
        for cut in order.chunks:
            inside = [specs[number] for number in cut.gradients]
            self.chunks.append(Chunk.from_layout(cut, inside, groups[inside[0].group]))
        self._places_of: dict[range | None, list[tuple[GradientSpec, int, int]]] = {None: []}
        """The blocks with which gradients have their memory in turn, None for their own -> their places in it."""
        for spec in self._specs:
            chunk, (start, stop) = self.chunks[self._chunks_of[spec.parameter].start], self.places[spec.parameter]
            self._places_of.setdefault(chunk.run, []).append((spec, start + chunk.offset, stop + chunk.offset))
        self.size = order.size
        """Elements of all gradients, padding included."""
        self.length = order.length
        """Elements of the buffer."""
        self.on_complete: Callable[[Chunk], None] | None = None
        """With `reuse`: takes each chunk when it is complete; its memory is another's when this returns."""
        first = self._specs[0].parameter if self._specs else torch.empty(0)
        self.dtype, self._device = dtype or first.dtype, first.device
        self.reductions = Reductions(self.chunks, dtype=self.dtype, reduce_dtype=reduce_dtype or self.dtype,
                                      device=self._device, in_flight=in_flight)
        self._tables = {spec.parameter: TouchedRows(self.places[spec.parameter][0], *spec.parameter.shape)
                        for spec in self._specs if spec.is_table and not (spec.is_alone or spec.group)
                        and len(group.ranks) > 1 and self.chunks[self._chunks_of[spec.parameter].start].run is None}
        self._next = self._moving = 0
        self._passed = sys.maxsize
        self._versions: dict[str, int] = {}
        self._handed: dict[str, ref[Tensor]] = dict.fromkeys((spec.name for spec in specs), _GONE)
        """The tensors that parameters have been given as gradients."""
        self._strides: dict[str, tuple[int, ...]] = dict.fromkeys(self._handed, ())
        self._left: dict[str, int] = {}
        """Versions of the gradients when the last step or batch was over."""
        self._unreached: dict[str, bool] = {}
        self._removed: set[str] = set()
        self._frozen: set[str] = set()
        """Parameters that were frozen when each batch of this step began: whoever freezes one later has a gradient."""
        self._handed_on: dict[str, int | None] = {}
        """Versions of the gradients that have been handed on, when they were; None where their memory is another's."""
        self.unreached: set[str] = set()
        """Parameters that have no gradient since `show_unreached`."""
        self.unapplied = False
        """Whether there are gradients of a step that is not taken yet."""
        if allocate:
            self.allocate()

    def allocate(self) -> None:
        """Make the buffer, and the parameters' `.grad` views of it."""
        self._make_buffer()
        self.note_left()

    def _make_buffer(self) -> None:
        self.flat = torch.zeros(self.length, dtype=self.dtype, device=self._device)
        """All gradients, in reduction order; with `reuse` room for those of one run, and what keeps its own."""
        setattr(self.flat.untyped_storage(), _MAKER, ref(self))
        self.reductions.flat = self.flat
        self._attach()
        self._usual_uses = _reference_count(self.flat)

    def flat_slice(self, chunk: Chunk, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of all gradients, which lie in `chunk`."""
        return self.flat[start + chunk.offset:stop + chunk.offset]

    def _attach(self, run: range | None = None) -> None:
        """Whoever set a gradient to None, or to something else, gets its place in the buffer back: those of `run`, or
        those that keep their own memory."""
        begin, each = self.flat.data_ptr(), self.flat.itemsize
        for spec, start, stop in self._places_of[run]:
            grad = spec.parameter.grad
            if grad is None or not self._is_at(grad, begin + start * each, spec):
                place = self.flat[start:stop]
                early = run is not None and grad is not None
                if early and grad is not None:
                    self._view(place, spec.parameter).copy_(grad.to_dense().clone())
                    spec.parameter.grad = None
                spec.parameter.grad_dtype = self.flat.dtype
                attached = self._hand(spec, place)
                self._versions[spec.name] = -1 if early else attached._version

    # ------------------------------------------------------------------ counting

    def begin(self, *, scatter: bool = False, keep: bool = False) -> None:
        """A new batch: gradients are zero, everything is outstanding. scatter: each member needs its share only. keep:
        gradients of the batch before are of the same step."""
        for chunk in self.chunks[:self._next]:
            chunk.work.wait()  # a batch that failed may have left some under way
        self.reductions.begin(scatter=scatter)
        for chunk in self.chunks:
            chunk.work, chunk.gather, chunk.entered = CompletedWork(), None, False
            chunk.blocks = set().union(*(spec.blocks for spec in chunk.specs))
            chunk.outstanding = sum(spec.remote_ends for spec in chunk.specs)
        self._leave_to_program(self._specs, attached=not keep)
        self._attach()
        if not keep and _reference_count(self.flat) > self._usual_uses:
            self._make_buffer()  # views that the program keeps stay as they are
        self.flat.zero_()
        self._next = self._moving = 0
        self._passed = sys.maxsize
        self.unapplied = False
        self._unreached, self._removed, self.unreached = {}, set(), set()
        frozen = {spec.name for spec in self._specs if not spec.parameter.requires_grad}
        self._frozen = self._frozen & frozen if keep else frozen
        self._handed_on = {}
        self._versions = self._versions_now()
        for table in self._tables.values():
            table.begin()

    def note_left(self) -> None:
        """A batch or a step is over: gradients are of no use, and whatever is added to them from here on is not of this
        engine."""
        self._left = self._versions_now()

    def _versions_now(self) -> dict[str, int]:
        """The version counts of the gradients that there are."""
        return {spec.name: spec.parameter.grad._version for spec in self._specs if spec.parameter.grad is not None}

    def warn_of_lost(self) -> None:
        """Warn where somebody has computed gradients since `note_left`, which the batch begins without."""
        for spec in self.owned_specs():
            grad = spec.parameter.grad
            maker = maker_of(grad)
            is_left = maker is not None and (maker() is not self or (
                grad is not None and grad._version == self._left.get(spec.name)))
            if grad is None or is_left or not (grad.is_sparse or grad.any()):
                continue
            warnings.warn(f"the gradient that parameter {spec.name} has before the batch is lost: a batch begins with "
                          "none. Call backward() of your own between engine.forward_backward(batch) and "
                          "engine.step(result), or zero_grad() where its gradients are of no use", stacklevel=6)
            return

    def hold(self) -> None:
        """Until the next batch begins nothing is reduced or sent: gradients stay those of this rank alone."""
        for chunk in self.chunks:
            chunk.outstanding += 1

    def chunks_of(self, parameters: Iterable[nn.Parameter]) -> list[int]:
        """The places in the reduction order of the chunks that hold some of each of these."""
        return [number for parameter in parameters for number in self._chunks_of[parameter]]

    def note_deferred(self, parameters: Iterable[nn.Parameter]) -> list[int]:
        """A product for these parameters has been deferred: their chunks wait for its `note_added`."""
        chunks = self.chunks_of(parameters)
        for number in chunks:
            self.chunks[number].outstanding += 1
        return chunks

    def note_added(self, chunks: Iterable[int]) -> None:
        """What these chunks have waited for has been added: a deferred product, or the gradient from another end of a
        tie."""
        for number in chunks:
            self.chunks[number].outstanding -= 1
        self._reduce_complete()

    def added_rows(self, parameter: nn.Parameter, rows: Tensor) -> None:
        """Something was added to these rows of the gradient of a table, and to no others."""
        if parameter in self._tables:
            self._tables[parameter].add(rows)

    @property
    def moves_in_backward(self) -> bool:
        """Whether something is done with a chunk as soon as the last backward has passed its blocks."""
        return any(chunk.reused or chunk.sent_to_owner or len(chunk.group.ranks) > 1 for chunk in self.chunks)

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
        chunks = [chunk for chunk in self.chunks if chunk.run == run and not chunk.entered]
        for chunk in chunks:
            self.flat_slice(chunk, chunk.start, chunk.stop).zero_()
            chunk.entered = True
        if chunks:
            self._attach(run)

    def all_passed(self) -> None:
        """Every backward of the batch has run, whatever blocks took part."""
        for chunk in self.chunks:
            chunk.blocks.clear()
        self._reduce_complete()
        for chunk in self.chunks[self._next:]:  # before gradients of other ends are added
            for spec in chunk.specs:
                self._note_reach(spec)

    def _reduce_complete(self) -> None:
        while self._next < len(self.chunks):
            chunk = self.chunks[self._next]
            if chunk.blocks or chunk.outstanding:
                return
            self._next += 1
            if chunk.run is not None:  # where no backward came by, gradients are zero
                self._enter(chunk.run)
            for spec in chunk.specs:
                self._note_reach(spec)
            if chunk.sent_to_owner:
                self._send_to_owner(chunk.specs[0])
            elif len(chunk.group.ranks) > 1:
                self.reductions.start(chunk, self._tables_in(chunk))
            if chunk.reused:
                self.reductions.wait(chunk)
                self.reductions.forget()
                assert self.on_complete is not None
                self.on_complete(chunk)
                for spec in chunk.specs:
                    spec.parameter.grad = None
                self._leave_to_program(chunk.specs)
            for spec in chunk.specs if chunk.reused or chunk.sent_to_owner or len(chunk.group.ranks) > 1 else ():
                grad = spec.parameter.grad
                self._handed_on.setdefault(spec.name, None if grad is None else grad._version)

    def late_parameters(self) -> list[str]:
        """The parameters to whose gradients something was added in a backward after they were handed on, so that it is
        in no sum: a block has computed with a parameter of a later block without having it."""
        now = self._versions_now()
        return [spec.name for spec in self._specs if spec.name in self._handed_on
                and now.get(spec.name) != self._handed_on[spec.name]]

    def _tables_in(self, chunk: Chunk) -> list[TouchedRows]:
        """The tables with elements in a complete chunk of which only some rows need to be summed. Collective for the
        first chunk of each table, in the order of chunks."""
        found = []
        for spec in chunk.specs if self._tables else ():
            if spec.parameter not in self._tables:
                continue
            table, grad = self._tables[spec.parameter], spec.parameter.grad
            if not table.decided:
                told = grad is not None and grad.is_contiguous() and (
                    grad._version == self._versions.get(spec.name, -1) + table.additions)
                table.agree(chunk.group, any_row=not told or self._unreached[spec.name])
            found += [table] if table.found is not None else []
        return found

    def _note_reach(self, spec: GradientSpec) -> None:
        """Everything of this rank has been added to the gradient of `spec`. If that is nothing, it becomes -0.0."""
        if spec.name in self._unreached:
            return
        self._take_replaced(spec)
        grad = spec.parameter.grad
        untouched = grad is not None and grad._version == self._versions.get(spec.name, -1) \
            and spec.name not in self._frozen and not grad.any()
        self._unreached[spec.name] = bool(untouched)
        if untouched and grad is not None:
            grad.data.fill_(-0.0)

    def _take_replaced(self, spec: GradientSpec) -> None:
        """A hook, or a backward written by hand, may have put another tensor in the place of this rank's gradient, or
        None: it becomes the gradient."""
        chunk, grad = self.chunks[self._chunks_of[spec.parameter].start], spec.parameter.grad
        begin = self.flat.data_ptr() + (self.places[spec.parameter][0] + chunk.offset) * self.flat.itemsize
        if (chunk.run is None or chunk.entered) and (
                grad is None or not self._is_at(grad, begin, spec)):
            attached = self._hand(spec, self._place(spec), grad)
            if grad is None:
                attached.zero_()
            self._versions[spec.name] = attached._version if grad is None else _REPLACED

    def left_alone(self, chunk: Chunk) -> set[nn.Parameter]:
        """Parameters with sums of a reduced chunk here that are frozen, or that nobody's loss has reached; the same on
        all who have sums of them."""
        start, stop = self.share_of(chunk)
        found = {spec.parameter for spec in chunk.specs
                 if spec.name in self._removed or spec.name in self._frozen}
        for spec in chunk.specs:
            if self._unreached.get(spec.name):
                first, last = self.places[spec.parameter]
                part = self.flat_slice(chunk, max(first, start), max(first, start, min(last, stop)))
                if part.numel() and bool(torch.signbit(part).all()) and not bool(part.any()):
                    found.add(spec.parameter)
        return found

    def detach(self) -> None:
        """Parameters have no gradients any more, and take ones of their own format again."""
        self.on_complete, self.unapplied = None, False
        for spec in self._specs:
            spec.parameter.grad = None
            spec.parameter.grad_dtype = spec.parameter.dtype

    def forget(self) -> None:
        """After `detach`: the buffer is gone, and what reductions have worked in."""
        self.flat = self.reductions.flat = self.flat.new_empty(0)
        self.reductions.forget_buffers()
        for chunk in self.chunks:
            chunk.work, chunk.gather = CompletedWork(), None

    @property
    def complete(self) -> bool:
        """Whether every chunk is on its way."""
        return self._next == len(self.chunks)

    def progress(self) -> None:
        """Let the reductions under way move."""
        while self._moving < self._next and self.chunks[self._moving].work.done():
            self._moving += 1

    # ------------------------------------------------------------------ the end of the batch

    def reduced_chunks(self) -> Iterator[Chunk]:
        """The chunks that are summed here, in order, each as soon as its sum is there; see `share_of`. Those that
        `on_complete` has had are left out."""
        assert self.complete, "a chunk of gradients is still incomplete"
        return self.reductions.summed_chunks()

    def _place(self, spec: GradientSpec) -> Tensor:
        """The part of the buffer that holds a parameter's gradient, flat."""
        return self.flat_slice(self.chunks[self._chunks_of[spec.parameter].start], *self.places[spec.parameter])

    def _view(self, place: Tensor, parameter: nn.Parameter) -> Tensor:
        """A part of the buffer as the gradient of a parameter."""
        view = place.view(parameter.shape)
        if not self._keeps_strides or view.stride() == parameter.stride():
            return view
        return place.as_strided(view.shape, torch.empty_like(parameter, device="meta").stride())  # without gaps

    def _hand(self, spec: GradientSpec, place: Tensor, values: Tensor | None = None) -> Tensor:
        """The parameter's gradient is a view of `place`, with a version count of its own, and has these values."""
        values = None if values is None else values.to_dense().clone()
        self._leave_to_program((spec,))
        attached = spec.parameter.grad = self._view(place, spec.parameter).data
        self._handed[spec.name], self._strides[spec.name] = ref(attached), attached.stride()
        return attached if values is None else attached.copy_(values)

    def _leave_to_program(self, specs: Iterable[GradientSpec], *, attached: bool = True) -> None:
        """Gradients that the program keeps, in a list or as states of its optimizer, have memory of their own from now
        on. In a plain loop, which sets gradients to None, they would not change, either. attached: also those that
        parameters still have."""
        for spec in specs:
            kept = self._handed[spec.name]()
            if kept is None or (kept is spec.parameter.grad and (not attached or getrefcount(kept) <= _UNKEPT)):
                continue
            if kept is spec.parameter.grad:
                spec.parameter.grad = None
            kept.data = kept.detach().clone()

    def _is_at(self, grad: Tensor, address: int, spec: GradientSpec) -> bool:
        """Whether the elements of a gradient, which is real, lie from `address` on, in the order of `_view` and as they
        are: it is not a view such as `grad.t()`, or one with the negative bit, which begin there, too."""
        return (grad.layout is torch.strided and grad.data_ptr() == address
                and grad.stride() == self._strides[spec.name] and not grad.is_neg()) or not grad.numel()

    def show_unreached(self) -> None:
        """Parameters that are frozen, or that no loss has reached, have no gradient until the next batch, as a plain
        loop has it; nor have those whose owner has the sum: who updates all that he finds leaves them alone."""
        left_alone = set[nn.Parameter]().union(*(self.left_alone(chunk) for chunk in self.reduced_chunks()))
        self.unreached = {spec.name for spec in self.owned_specs() if spec.parameter in left_alone}
        for spec in self._specs:
            if spec.name in self.unreached or spec.sent_to_owner:
                spec.parameter.grad = None

    def take_edits(self) -> None:
        """Gradients that a user has put in the place of the averaged ones are copied to the buffer, those of frozen
        parameters, too, which this step updates then. Where one is None, the parameter is left alone until the next
        batch; in a later one, to which this is added, nothing has reached it here."""
        for spec in self.owned_specs():
            place, grad = self._place(spec), spec.parameter.grad
            if grad is None:
                self._leave_to_program((spec,))
                place.fill_(-0.0)
                self._removed.add(spec.name)
            elif not self._is_at(grad, place.data_ptr(), spec):
                self._hand(spec, place, grad)
                self._frozen.discard(spec.name)

    def let_go(self) -> None:
        """Parameters have no gradients until the next batch, as `zero_grad` of a plain loop leaves them."""
        for spec in self._specs:
            spec.parameter.grad = None
        self.unreached, self.unapplied = {spec.name for spec in self.owned_specs()}, False

    def snapshot(self) -> Tensor:
        """A copy of the buffer between batches, with what a user has put in the place of a parameter's gradient."""
        self.take_edits()
        return self.flat.clone()

    def note_values(self) -> None:
        """Gradients are whole, for a step that is to be taken; see `were_zeroed`."""
        self.unapplied = True
        self._versions = self._versions_now()

    def were_zeroed(self) -> bool | None:
        """Whether somebody has set all gradients of this rank to None or zero since `note_values`; None where it had
        none."""
        found = [spec.parameter.grad for spec in self.owned_specs() if spec.name in self._versions]
        given = [grad for grad in found if grad is not None]
        written = [spec.name for spec in self.owned_specs() if spec.parameter.grad is not None
                   and spec.parameter.grad._version != self._versions.get(spec.name)]
        return (not given or (bool(written) and not any(bool(grad.any()) for grad in given))) if found else None

    def wait(self) -> None:
        """Return when all chunks are reduced."""
        for _ in self.reduced_chunks():
            pass

    def share_of(self, chunk: Chunk) -> tuple[int, int]:
        """The part of a reduced chunk whose sums are here: all of it, unless the batch began with `scatter`."""
        return chunk.share if self.scattered else (chunk.start, chunk.stop)

    @property
    def scattered(self) -> bool:
        """Whether each member has the sums of its share only."""
        return self.reductions.scatter

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
        norm: Tensor = torch.linalg.vector_norm(self.flat_slice(chunk, start, stop), dtype=torch.promote_types(
            torch.float32, self.flat.dtype))
        return norm.double() ** 2

    def owned_specs(self) -> list[GradientSpec]:
        """The parameters that are updated here, in model order."""
        return [spec for spec in self._in_model_order if not spec.sent_to_owner]


def _reference_count(tensor: Tensor) -> int:
    """Tensors in the memory of one, and its Python object."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def _references(tensor: ref[Tensor]) -> int:
    found = tensor()
    return getrefcount(found)


_LIKE = nn.Parameter(torch.zeros(1))
_LIKE.grad = torch.zeros(1)
_GONE = ref(_LIKE.detach())
_UNKEPT = _references(ref(_LIKE.grad))
"""References to a gradient that only its parameter has."""


def maker_of(grad: Tensor | None) -> ref[Gradients] | None:
    """Whose buffer a gradient is a part of; None for others."""
    if grad is None or not storage_of(grad):
        return None
    return getattr(grad.untyped_storage(), _MAKER, None)


def refuse_others(parameters: Iterable[tuple[str, nn.Parameter]], own: Gradients | None, *, applied: bool) -> None:
    """ConfigError where a parameter has the gradient of another engine: in a step that is not taken yet, or, with
    `applied`, in any."""
    for name, parameter in parameters:
        maker = maker_of(parameter.grad)
        other = None if maker is None else maker()
        if other is not None and other is not own and parameter in other.places and (
                applied or (other.unapplied and not other.were_zeroed())):
            raise ConfigError("has the gradient of another engine of its module", code="gradient-of-another-engine",
                              where=f"parameter {name}",
                              remedy="Use engines of one module in turn: call step or zero_grad of the first one, or "
                                     "close it, before another one computes gradients. Two losses of one step are one "
                                     "loss, their sum.")
