"""The gradients of a rank: one flat buffer, cut into chunks that are averaged over `data` as soon as they are complete.

    buffer   | head ........ | layer 7 .... | layer 6 .... | ... |      in the order in which a backward finishes them
    chunks   |  0   |  1   |   2   |  3  |   4    | ...                 of equal size; they cut through parameters

A chunk counts its outstanding contributions: blocks that the last backward has not passed, deferred products, gradients
from the other ends of tied parameters. At zero it is complete, and read-only until it is reduced. Chunks are reduced in
one fixed order on every replica, never by readiness, so that replicas agree on the order of collectives.

With `reuse` (Optimus, section 3.2.3) no such buffer exists: runs of blocks use the same piece of memory in turn, and
a run's one chunk is processed and discarded before the backward enters the preceding run:

    buffer   | head |  then  | layer 7 |  then  | layer 6 |  then ...

A half-precision parameter may have fp32 gradients here (`Tensor.grad_dtype`), so that many microbatches are accumulated
without losing bits.

For a lookup table, only the rows that some replica has looked up are summed (`reduction`).

A parameter that no loss reaches has no gradient, and is not updated. With several replicas this holds if no replica
reaches it. Each replica signals it by the sign of zero: a gradient that nothing was added to is -0.0, which no other
sum can be (-0.0 + -0.0 = -0.0, 0.0 + -0.0 = 0.0).

On a tensor mesh, copies of a parameter may each have a part of its gradient: it is summed over its own group, in chunks
that come last. The members of every group start its collectives in one order if all ranks of a stage have their specs
in the same order, with groups along the same axes.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
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
"""Replaces the version of a gradient that had values before its version was recorded."""


class Gradients:
    """Flat gradients of one rank, their completion, and their reduction.

    Args:
        specs: trainable parameters, in model order. Their `.grad` become views of the flat buffer.
        group: the ranks over which gradients without their own group are summed.
        chunk_size: elements that are reduced in one piece; rounded up to a multiple of the group's size.
        send_to_owner: called with the spec of a complete gradient that goes to its owner.
        dtype: of the buffer; by default that of the parameters.
        reduce_dtype: in which chunks are sent; by default that of the buffer.
        in_flight: number of reductions that may use their own memory at the same time, 2 or more.
        reuse: runs of blocks (their numbers) whose gradients use the same memory in turn; `chunk_size` is then unused.
            Gradients that are tied, used in several runs, or summed over their own group keep their own memory.
        allocate: whether the buffer exists immediately; otherwise `allocate` makes it, after parameters have moved.
        order: order and chunks of the gradients in the buffer, from `Layout.flat_order` for these specs; by default
            from `chunk_size`, `reuse` and `shard`.
        keeps_strides: whether gradients have the strides of their parameters (channels_last), as torch makes them:
            torch's fused optimizers rely on it. Otherwise their elements are in order.
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
        """The blocks with which gradients take turns in memory, None for their own memory -> their places in it."""
        for spec in self._specs:
            chunk, (start, stop) = self.chunks[self._chunks_of[spec.parameter].start], self.places[spec.parameter]
            self._places_of.setdefault(chunk.run, []).append((spec, start + chunk.offset, stop + chunk.offset))
        self.size = order.size
        """Elements of all gradients, padding included."""
        self.length = order.length
        """Elements of the buffer."""
        self.on_complete: Callable[[Chunk], None] | None = None
        """With `reuse`: called with each chunk when it is complete; afterwards another chunk uses its memory."""
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
        """The tensors that were set as gradients of parameters."""
        self._strides: dict[str, tuple[int, ...]] = dict.fromkeys(self._handed, ())
        self._left: dict[str, int] = {}
        """Versions of the gradients when the last step or batch ended."""
        self._unreached: dict[str, bool] = {}
        self._removed: set[str] = set()
        self._frozen: set[str] = set()
        """Parameters that were frozen when each batch of this step began: one that is frozen later has a gradient."""
        self._handed_on: dict[str, int | None] = {}
        """Versions of the gradients when they were processed; None if another gradient uses their memory now."""
        self.unreached: set[str] = set()
        """Parameters that have no gradient since `remove_unreached`."""
        self.unapplied = False
        """Whether there are gradients of a step that is not taken yet."""
        if allocate:
            self.allocate()

    def allocate(self) -> None:
        """Make the buffer, and the parameters' `.grad` views of it."""
        self._make_buffer()
        self.note_end()

    def _make_buffer(self) -> None:
        self.flat = torch.zeros(self.length, dtype=self.dtype, device=self._device)
        """All gradients, in reduction order; with `reuse`, memory for one run and for those that keep their own."""
        setattr(self.flat.untyped_storage(), _MAKER, ref(self))
        self.reductions.flat = self.flat
        self._attach()
        self._usual_uses = _reference_count(self.flat)

    def flat_slice(self, chunk: Chunk, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of all gradients, which lie in `chunk`."""
        return self.flat[start + chunk.offset:stop + chunk.offset]

    def _attach(self, run: range | None = None) -> None:
        """Point gradients that were set to None, or to another tensor, back to the buffer: those of `run`, or those
        that keep their own memory."""
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
                attached = self._set_gradient(spec, place)
                self._versions[spec.name] = -1 if early else attached._version

    # ------------------------------------------------------------------ counting

    def begin(self, *, scatter: bool = False, keep: bool = False) -> None:
        """Begin a batch: gradients are zero, everything is outstanding. scatter: each member needs only its share.
        keep: gradients of the previous batch belong to the same step."""
        for chunk in self.chunks[:self._next]:
            chunk.work.wait()  # a failed batch may have left some in flight
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

    def note_end(self) -> None:
        """Note the end of a batch or a step: gradients are no longer needed, and additions to them from now on are not
        made by this engine."""
        self._left = self._versions_now()

    def _versions_now(self) -> dict[str, int]:
        """The version counts of the existing gradients."""
        return {spec.name: spec.parameter.grad._version for spec in self._specs if spec.parameter.grad is not None}

    def warn_of_lost(self) -> None:
        """Warn if gradients were computed since `note_end`, which the batch discards."""
        for spec in self.owned_specs():
            grad = spec.parameter.grad
            maker = maker_of(grad)
            is_left = maker is not None and (maker() is not self or (
                grad is not None and grad._version == self._left.get(spec.name)))
            if grad is None or is_left or not (grad.is_sparse or grad.any()):
                continue
            warnings.warn(f"the gradient that parameter {spec.name} has before the batch is lost: a batch begins with "
                          "none. Call your own backward() between engine.forward_backward(batch) and "
                          "engine.step(result), or zero_grad() if its gradients are not needed", stacklevel=6)
            return

    def hold(self) -> None:
        """Reduce and send nothing until the next batch begins: gradients stay those of this rank alone."""
        for chunk in self.chunks:
            chunk.outstanding += 1

    def chunks_of(self, parameters: Iterable[nn.Parameter]) -> list[int]:
        """The positions in the reduction order of the chunks that hold parts of these parameters' gradients."""
        return [number for parameter in parameters for number in self._chunks_of[parameter]]

    def note_deferred(self, parameters: Iterable[nn.Parameter]) -> list[int]:
        """Note that a product for these parameters has been deferred: their chunks wait for its `note_added`."""
        chunks = self.chunks_of(parameters)
        for number in chunks:
            self.chunks[number].outstanding += 1
        return chunks

    def note_added(self, chunks: Iterable[int]) -> None:
        """Note that one contribution for which these chunks waited has been added: a deferred product, or the gradient
        from another end of a tie."""
        for number in chunks:
            self.chunks[number].outstanding -= 1
        self._reduce_complete()

    def added_rows(self, parameter: nn.Parameter, rows: Tensor) -> None:
        """Note that these rows of a table's gradient, and no others, were added to."""
        if parameter in self._tables:
            self._tables[parameter].add(rows)

    @property
    def moves_in_backward(self) -> bool:
        """Whether a chunk is processed as soon as the last backward has passed its blocks."""
        return any(chunk.reused or chunk.sent_to_owner or len(chunk.group.ranks) > 1 for chunk in self.chunks)

    def block_passed(self, block: int) -> None:
        """Note that the batch's last backward has finished `block` and all later blocks, and enters the previous one.

        With a state of several tensors, boundaries may be reported late or out of order: those after one that has been
        passed are ignored.
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
        """Give the memory that runs use in turn to `run`. If a state has several tensors, autograd may have entered the
        run before: the gradients that it has made are copied."""
        chunks = [chunk for chunk in self.chunks if chunk.run == run and not chunk.entered]
        for chunk in chunks:
            self.flat_slice(chunk, chunk.start, chunk.stop).zero_()
            chunk.entered = True
        if chunks:
            self._attach(run)

    def all_passed(self) -> None:
        """Note that every backward of the batch has run, whichever blocks took part."""
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
        """The parameters whose gradients were added to in a backward after they were processed, so that the addition is
        missing from the sum: a block has computed with a parameter of a later block that it does not own."""
        now = self._versions_now()
        return [spec.name for spec in self._specs if spec.name in self._handed_on
                and now.get(spec.name) != self._handed_on[spec.name]]

    def _tables_in(self, chunk: Chunk) -> list[TouchedRows]:
        """The tables with elements in a complete chunk for which only some rows need to be summed. Collective for the
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
        """Called when the gradient of `spec` is complete on this rank. If nothing was added, it becomes -0.0."""
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
        """Copy a tensor (or None) with which a hook or a handwritten backward has replaced this rank's gradient into
        the buffer."""
        chunk, grad = self.chunks[self._chunks_of[spec.parameter].start], spec.parameter.grad
        begin = self.flat.data_ptr() + (self.places[spec.parameter][0] + chunk.offset) * self.flat.itemsize
        if (chunk.run is None or chunk.entered) and (
                grad is None or not self._is_at(grad, begin, spec)):
            attached = self._set_gradient(spec, self._place(spec), grad)
            if grad is None:
                attached.zero_()
            self._versions[spec.name] = attached._version if grad is None else _REPLACED

    def not_updated(self, chunk: Chunk) -> set[nn.Parameter]:
        """Parameters with sums of a reduced chunk here that are frozen, or that no rank's loss has reached; the same on
        all ranks that have their sums."""
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
        """Remove the gradients of parameters, which accept gradients of their own dtype again."""
        self.on_complete, self.unapplied = None, False
        for spec in self._specs:
            spec.parameter.grad = None
            spec.parameter.grad_dtype = spec.parameter.dtype

    def forget(self) -> None:
        """After `detach`: free the buffer and the work memory of reductions."""
        self.flat = self.reductions.flat = self.flat.new_empty(0)
        self.reductions.forget_buffers()
        for chunk in self.chunks:
            chunk.work, chunk.gather = CompletedWork(), None

    @property
    def complete(self) -> bool:
        """Whether every chunk's reduction has been started."""
        return self._next == len(self.chunks)

    def progress(self) -> None:
        """Let the reductions in flight progress."""
        while self._moving < self._next and self.chunks[self._moving].work.done():
            self._moving += 1

    # ------------------------------------------------------------------ the end of the batch

    def reduced_chunks(self) -> Iterator[Chunk]:
        """The chunks that are summed here, in order, each as soon as its sum is available; see `share_of`. Those passed
        to `on_complete` are left out."""
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

    def _set_gradient(self, spec: GradientSpec, place: Tensor, values: Tensor | None = None) -> Tensor:
        """Make the parameter's gradient a view of `place`, with its own version count and these values."""
        values = None if values is None else values.to_dense().clone()
        self._leave_to_program((spec,))
        attached = spec.parameter.grad = self._view(place, spec.parameter).data
        self._handed[spec.name], self._strides[spec.name] = ref(attached), attached.stride()
        return attached if values is None else attached.copy_(values)

    def _leave_to_program(self, specs: Iterable[GradientSpec], *, attached: bool = True) -> None:
        """Give gradients that the program keeps, in a list or as states of its optimizer, their own memory from now on.
        In a plain loop, which sets gradients to None, they would not change, either. attached: also those that
        parameters still have."""
        for spec in specs:
            kept = self._handed[spec.name]()
            if kept is None or (kept is spec.parameter.grad and (not attached or getrefcount(kept) <= _UNKEPT)):
                continue
            if kept is spec.parameter.grad:
                spec.parameter.grad = None
            kept.data = kept.detach().clone()

    def _is_at(self, grad: Tensor, address: int, spec: GradientSpec) -> bool:
        """Whether the elements of a (real) gradient are stored from `address` on, unchanged and in the order of
        `_view`: not a view such as `grad.t()`, or one with the negative bit, which begin there, too."""
        return (grad.layout is torch.strided and grad.data_ptr() == address
                and grad.stride() == self._strides[spec.name] and not grad.is_neg()) or not grad.numel()

    def remove_unreached(self) -> None:
        """Until the next batch, remove the gradients of parameters that are frozen or that no loss has reached, as in a
        plain loop, and of those whose owner has the sum: an optimizer that updates all gradients skips them."""
        not_updated = set[nn.Parameter]().union(*(self.not_updated(chunk) for chunk in self.reduced_chunks()))
        self.unreached = {spec.name for spec in self.owned_specs() if spec.parameter in not_updated}
        for spec in self._specs:
            if spec.name in self.unreached or spec.sent_to_owner:
                spec.parameter.grad = None

    def take_edits(self) -> None:
        """Copy gradients with which a user has replaced the averaged ones to the buffer, including those of frozen
        parameters, which this step then updates. If one is None, the parameter is not updated until the next batch; in
        a later batch, to which this one is added, nothing has reached it here."""
        for spec in self.owned_specs():
            place, grad = self._place(spec), spec.parameter.grad
            if grad is None:
                self._leave_to_program((spec,))
                place.fill_(-0.0)
                self._removed.add(spec.name)
            elif not self._is_at(grad, place.data_ptr(), spec):
                self._set_gradient(spec, place, grad)
                self._frozen.discard(spec.name)

    def drop_gradients(self) -> None:
        """Remove the gradients of parameters until the next batch, like `zero_grad` in a plain loop."""
        for spec in self._specs:
            spec.parameter.grad = None
        self.unreached, self.unapplied = {spec.name for spec in self.owned_specs()}, False

    def snapshot(self) -> Tensor:
        """A copy of the buffer between batches, including gradients that a user has replaced."""
        self.take_edits()
        return self.flat.clone()

    def note_values(self) -> None:
        """Note that gradients are complete, for a step that is to be taken; see `were_zeroed`."""
        self.unapplied = True
        self._versions = self._versions_now()

    def were_zeroed(self, updated: Collection[nn.Parameter] = ()) -> bool | None:
        """Whether all gradients of this rank were set to None or zero since `note_values`; None if it had none.
        updated: the parameters whose gradients count, if there are any."""
        specs = [spec for spec in self.owned_specs() if not updated or spec.parameter in updated]
        found = [spec.parameter.grad for spec in specs if spec.name in self._versions]
        given = [grad for grad in found if grad is not None]
        written = [spec.name for spec in specs if spec.parameter.grad is not None
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
        """Sum of squares of the summed elements of `chunk` on this rank (only those in the range `within`), fp64,
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
    """Number of tensors in the memory of `tensor`, plus its Python object."""
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
    """The `Gradients` whose buffer contains a gradient; None for others."""
    if grad is None or not storage_of(grad):
        return None
    return getattr(grad.untyped_storage(), _MAKER, None)


def refuse_others(parameters: Iterable[tuple[str, nn.Parameter]], own: Gradients | None, *, applied: bool) -> None:
    """Raise a ConfigError if a parameter has the gradient of another engine: in a step that is not taken yet, or, with
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
