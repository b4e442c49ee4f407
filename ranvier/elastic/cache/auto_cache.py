"""The cache of frozen blocks' outputs, by sample: the frozen blocks run once for a sample and not once per epoch.

    forward(samples)   entry at this depth ---------------------------------> state       hit
                       entry at a smaller depth -> newly frozen blocks -----> state       upgraded, written
                       no entry -----------------> all frozen blocks -------> state       miss, written

Entries belong to one run. Those of an earlier start of it are compared with what the blocks compute before they are
used, since their code may have changed; if they differ, all are dropped. `repeatable` says whether blocks may be cached
at all: whether they give the same twice.

The plain form is `compute(0, inputs, None)`; the result equals it up to the precision of the entries. A disk cannot
make a run fail: what cannot be read is a miss, and what cannot be written is reported once. (AutoCache: He et al.,
"PipeTransformer", 2021, section 3.4.)
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ranvier.block import State, carried, named
from ranvier.elastic.cache.store import (
    HEADER_BYTES,
    WHERE,
    Entries,
    Lengths,
    NotCacheable,
    Precision,
    Reader,
    RowFormat,
    RunFolder,
    Store,
    digest_of,
)
from ranvier.elastic.cache_profile import Times


class Compute(Protocol):
    """The frozen blocks."""

    def __call__(self, first: int, state: State, rows: Tensor | None, *, other_keys: bool = False) -> State:
        """The state after the last frozen block, from that before block `first`. rows: [n] int64 on the CPU, which rows
        of the microbatch the state has, in its order; None for all of them. other_keys: with the random numbers of
        another step; only `repeatable` asks for them."""
        ...


Block = tuple[int, str, nn.Module]
"""(number in the model, name, module) of a block."""

_VERSION = 2
_HASHED_AT_ONCE = 1 << 24
_PART_DIGITS = 8
"""Of a key that say which part of the state its file has."""
_TOLERANCES = {torch.float64: 1e-11, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Relative difference, in norm, of the results of one computation that sums in another order, by number format."""
_TF32_TOLERANCE = 1e-2


# --- weights ---------------------------------------------------------------------------------------------------------


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and all buffers, also those that are not saved: outputs depend on them as well."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def versions(blocks: Sequence[Block]) -> tuple[tuple[int, int, int], ...]:
    """Differs after any of these tensors was replaced, or changed in place as far as torch's version counter shows it
    (changes through `.data` do not count). Reads no weights."""
    return tuple((id(tensor), tensor.data_ptr(), tensor._version)
                 for _, _, module in blocks for _, tensor in _tensors(module))


def digests(blocks: Sequence[Block]) -> list[str]:
    """Item i is a hash of the first i blocks: their numbers, names, and all tensors by name, dtype, shape and bytes. It
    is a chain, so one pass gives the hashes of all depths."""
    found = [""]
    for number, name, module in blocks:
        digest = hashlib.blake2b(repr((found[-1], number, name)).encode(), digest_size=16)
        for label, tensor in _tensors(module):
            digest.update(repr((label, str(tensor.dtype), tuple(tensor.shape))).encode())
            flat = tensor.detach().flatten()
            for start in range(0, len(flat), _HASHED_AT_ONCE):
                piece = flat[start:start + _HASHED_AT_ONCE]
                digest.update(piece.clone(memory_format=torch.contiguous_format).view(torch.uint8).cpu().numpy().data)
        found.append(digest.hexdigest())
    return found


# --- comparison ------------------------------------------------------------------------------------------------------


def equal_states(first: State, second: State, *, tolerance_of: Callable[[Tensor], float]) -> bool:
    """Whether two states are equal, NaNs and infinities included. tolerance_of: the relative difference in norm that a
    tensor may have; 0 compares bit for bit."""
    one, other = named(first, WHERE), named(second, WHERE)
    if list(one) != list(other):
        return False
    for name, tensor in one.items():
        there, tolerance = other[name], tolerance_of(tensor)
        if tensor.shape != there.shape or tensor.dtype is not there.dtype:
            return False
        if not tolerance or not tensor.dtype.is_floating_point:
            same = torch.allclose(tensor, there, rtol=0, atol=0, equal_nan=True)
        else:
            finite = tensor.isfinite()
            exact, found = (each.double().where(finite, 0.0) for each in (tensor, there))
            same = bool((finite == there.isfinite()).all()) and bool(
                (exact - found).norm() <= tolerance * exact.norm())
        if not same:
            return False
    return True


def format_tolerance(tensor: Tensor) -> float:
    """The relative difference in norm between two computations of one tensor that sum in another order."""
    tolerance = _TOLERANCES.get(tensor.dtype, 0.0)
    return _TF32_TOLERANCE if tensor.is_cuda and tensor.dtype is torch.float32 else tolerance


@torch.no_grad()
def repeatable(blocks: Sequence[Block], inputs: State, compute: Compute, device: torch.device) -> str | None:
    """Why outputs of these blocks cannot be cached, found by running them twice on one microbatch, with other random
    keys and another state of torch's generators; None where they can. Equal means bit for bit on a CPU, and within the
    tolerance of the number format on a GPU, whose kernels may sum in any order. Leaves the generators and the blocks'
    buffers as they are."""
    before = [(tensor, tensor.clone(), tensor._version) for _, _, module in blocks for tensor in module.buffers()]
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        first = compute(0, inputs, None)
        torch.manual_seed(1)
        second = compute(0, inputs, None, other_keys=True)
    changed = [(tensor, copy) for tensor, copy, version in before if tensor._version != version]
    for tensor, copy in changed:
        tensor.copy_(copy)
    if changed:
        return "they change their own buffers as they run"
    same = equal_states(first, second, tolerance_of=format_tolerance if device.type == "cuda" else lambda tensor: 0.0)
    return None if same else "they give other outputs when they run again, as dropout does"


# --- rows of a microbatch --------------------------------------------------------------------------------------------


def _check_rows(state: State, count: int) -> None:
    if any(tensor.shape[:1] != (count,) for tensor in named(state, WHERE).values()):
        raise NotCacheable("the first dim of a state's tensor is not the samples")


def _select(state: State, rows: Tensor) -> State:
    """Rows of a state. rows: int64, on the CPU."""
    return carried({name: tensor.index_select(0, rows.to(tensor.device))
                    for name, tensor in named(state, WHERE).items()})


def _join(pieces: Sequence[tuple[Tensor, State]], count: int) -> State:
    """One state of `count` rows from (places of rows, state with these rows). places: int64, ascending, on the CPU.
    NotCacheable if the pieces differ in shapes, or have another number of rows than places."""
    if len(pieces) == 1 and len(pieces[0][0]) == count:
        return pieces[0][1]
    for places, state in pieces:
        _check_rows(state, len(places))
    states = [named(state, WHERE) for _, state in pieces]
    shapes = [{name: (tensor.shape[1:], tensor.dtype) for name, tensor in state.items()} for state in states]
    if any(shape != shapes[0] for shape in shapes):
        raise NotCacheable("the state's shapes differ between microbatches")
    whole = {name: tensor.new_empty((count, *tensor.shape[1:])) for name, tensor in states[0].items()}
    for (places, _), state in zip(pieces, states, strict=True):
        for name, tensor in state.items():
            whole[name].index_copy_(0, places.to(tensor.device), tensor)
    return carried(whole)


# --- the cache -------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Counts:
    """Rows of microbatches that the cache of one rank has read (hits, upgraded), computed (misses), written, and not
    written (no space, or a value outside half precision's range).

    seconds: of the calling thread for compute (misses), upgrade (newly frozen blocks), verify (entries of an earlier
    start) and write.
    """

    hits: int = 0
    upgraded: int = 0
    misses: int = 0
    written: int = 0
    unwritten: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(
        ("compute", "upgrade", "verify", "write"), 0.0))


class AutoCache:
    """The cache of one rank of the first stage. One thread calls it.

    Args:
        folder: where the run's files are.
        blocks: the frozen blocks of this rank, from the first block of the model on.
        fingerprint: everything else that outputs depend on: the dataset and its numbering, the input transform, the
            model's settings besides its weights.
        num_samples: size of the dataset; a microbatch with a number outside of it is computed and not cached.
        precision: "half" or "full" (exact).
        verifies: compare the first entries that were there when their file was opened with what the blocks compute.
        part: which slice of the state this rank has on a tensor parallel mesh ("col 0 of 2").
        agree: the minimum of a bool over the ranks of the stage, if blocks have collectives: all ranks then do the
            same, and a microbatch is a hit only if every rank has all of it. All ranks call it in the same order.
        gather_over_rows: gathers texts of the ranks that have other samples, and other parts of the weights, with the
            same part of the state: entries are named by what all of them say, so that any of them reads what another
            has written.
        warn: takes one line about what is not cached, once for each reason.
        prefetch_bytes: the most that is read ahead.
        lengths: positions of each sample, where microbatches are padded to their longest one: an entry has those of its
            sample alone, and what the blocks compute of them must not depend on the padding. Dim 1 of all tensors of
            inputs and states is then the positions.
    """

    def __init__(self, folder: RunFolder, *, blocks: Sequence[Block], fingerprint: str, num_samples: int,
                 precision: Precision, device: torch.device, warn: Callable[[str], None],
                 agree: Callable[[bool], bool] | None = None,
                 gather_over_rows: Callable[[list[str]], list[list[str]]] | None = None, part: str = "whole",
                 prefetch_bytes: int = 1 << 28, lengths: Lengths = None, verifies: bool = True) -> None:
        self._folder = folder
        self._blocks, self._fingerprint, self._num_samples = list(blocks), fingerprint, num_samples
        self._precision, self._device, self._part = precision, torch.device(device), part
        self._lengths = lengths
        self._longest = None if lengths is None else int(lengths.max())
        self._length: int | None = None
        """Positions of this microbatch, where samples have lengths of their own."""
        self._agree, self._is_shared = agree or (lambda mine: mine), agree is not None
        self._gather_over_rows = gather_over_rows or (lambda mine: [mine])
        self._warn_once, self._warned = warn, set[str]()
        self.counts = Counts()
        self.writes = True
        """Whether computed states are written; if not, existing entries are still read."""
        self._reader = Reader(prefetch_bytes, pinned=self._device.type == "cuda")
        self._inputs: object = None
        """Names, shapes and dtypes of the inputs of the first microbatch; the others must have the same."""
        self._versions: tuple[tuple[int, int, int], ...] | None = None
        """Of the weights to which the open files belong; None if files have to be opened."""
        self._own_digests: list[str] = []
        """Of this rank's part of the weights."""
        self._digests: list[str] = []
        """Of those of all rows."""
        self._newest: Store | None = None
        self._source: Store | None = None
        """The file of the greatest smaller depth, whose entries the newly frozen blocks make those of this depth."""
        self._verifies = verifies
        self._is_off = self._is_full = False

    @property
    def depth(self) -> int:
        """Number of frozen blocks."""
        return len(self._blocks)

    @torch.no_grad()
    def forward(self, samples: Tensor, inputs: State, compute: Compute) -> State:
        """The carried state after the frozen blocks, on the device and detached; its rows are those of `inputs`.

        samples: [B] int64 on the CPU, the numbers of the samples; equal numbers have equal inputs. Exceptions of
        `compute` are not caught.
        """
        numbers: list[int] = samples.tolist()
        is_usable = self._is_usable(numbers, inputs)
        self._open_if_changed()
        found = self._find(numbers, is_usable)
        new: list[tuple[Tensor, State]] = []
        try:
            state = self._assemble(len(numbers), found, inputs, compute, new)
        except NotCacheable as reason:
            is_usable, state = self._refuse(reason), self._run("compute", compute, 0, inputs, None)
        if found and self._verifies and not self._agree(not self._has_unverified(numbers, found)):
            state, new = self._verify(state, inputs, compute), []
        # Blocks that have changed their own buffers have made outputs of neither the old ones nor the new ones.
        if is_usable and self.writes and self._versions == versions(self._blocks):
            with self._timed("write"):
                for places, one in new:
                    self._write([numbers[place] for place in places.tolist()], one)
        return state

    def prefetch(self, samples: Iterable[Tensor]) -> None:
        """Start to read the entries of the next microbatches (each [b] int64, as `forward` will get them), in their
        order. Microbatches of an earlier call that this one does not name are dropped."""
        if self._versions is None or self._is_off or self._versions != versions(self._blocks):
            return
        self._find_newest()
        if self._newest is not None:
            self._reader.prefetch([each.tolist() for each in samples], self._newest)

    def check_weights(self) -> None:
        """Compare the weights' bytes. Until then, changes that torch's version counter does not show (`.data`) go
        unnoticed."""
        if self._versions is not None and digests(self._blocks) != self._own_digests:
            self._versions = None

    def set_blocks(self, blocks: Sequence[Block]) -> None:
        """Use other frozen blocks from now on. Entries of the depth before are upgraded, if its weights are the
        same."""
        self._close_stores()
        self._blocks, self._versions, self.writes = list(blocks), None, True

    def times(self, samples: Tensor) -> Times | None:
        """Seconds per sample so far, for `cache_profile.decide`; `samples`, which were just written, are read once to
        measure it. None until something was computed, written and can be read."""
        if self._newest is None or not self.counts.misses or not self.counts.written:
            return None
        entries = self._newest.read(samples.tolist())
        if not len(entries.places):
            return None
        return Times(compute=self.counts.seconds["compute"] / self.counts.misses,
                     read=entries.seconds / len(entries.places),
                     write=self.counts.seconds["write"] / self.counts.written)

    def close(self) -> None:
        """End the thread, close the files and release the folder."""
        self._close_stores()
        self._reader.close()
        self._folder.release()
        self._is_off, self._versions = True, None

    # ------------------------------------------------------------------ files

    def _open_if_changed(self) -> None:
        """Open the files of the current weights. If the weights of any rank have changed, all ranks open theirs
        again."""
        if self._agree(self._is_off or (self._versions is not None and self._versions == versions(self._blocks))):
            return
        self._close_stores()
        found: dict[int, Store] = {}
        opens = not self._is_off and self._inputs is not None
        self._own_digests = digests(self._blocks) if opens else [""] * (self.depth + 1)
        self._digests = [repr(each) if len(each) > 1 else each[0] for each in zip(
            *self._gather_over_rows(self._own_digests), strict=True)]
        if opens:
            self._versions = versions(self._blocks)
            try:
                self._folder.acquire()
                found = {depth: store for depth in range(1, self.depth)
                         if (store := self._find_store(depth)) is not None}
            except (OSError, NotCacheable) as error:
                self._is_off = True
                self._warn(f"its folder cannot be used ({error})")
        for depth in range(self.depth - 1, 0, -1):
            if self._agree(depth in found):
                self._source = found.pop(depth)
                break
        for store in found.values():
            store.close()
        if opens and not self._is_off:
            kept = {self._key(self.depth), *([] if self._source is None else [self._source.key])}
            self._folder.remove_others(self._part_digest, kept)
        self._find_newest()

    def _find_store(self, depth: int) -> Store | None:
        try:
            return self._marked(Store.find(self._folder, self._key(depth), depth, self._precision, self._lengths))
        except (OSError, NotCacheable) as error:
            self._warn(f"a file of the cache cannot be read ({error})")
            return None

    def _marked(self, store: Store | None) -> Store | None:
        """The store, which knows the entries that have to be compared."""
        if store is not None and self._verifies:
            store.unverified = store.written(self._num_samples)
        return store

    def _find_newest(self) -> None:
        """Open the file of this depth if there is one by now: another rank may have created it."""
        if self._newest is None and self._versions is not None and not self._is_off:
            self._newest = self._find_store(self.depth)

    def _close_stores(self) -> None:
        self._reader.forget()
        for store in (self._newest, self._source):
            if store is not None:
                store.close()
        self._newest = self._source = None

    def _drop_source(self) -> None:
        """Give the space of the smaller depth to this one: what was not upgraded yet is computed again."""
        assert self._source is not None
        self._source.clear()
        self._source.close()
        self._source = None

    # ------------------------------------------------------------------ entries of an earlier start

    def _has_unverified(self, numbers: Sequence[int], found: Sequence[Entries]) -> bool:
        """Whether one of these entries was in its file when that was opened, and none of the file has been compared."""
        return any(bool(entries.store.unverified[[numbers[place] for place in entries.places.tolist()]].any())
                   for entries in found if entries.store.unverified is not None)

    def _verify(self, state: State, inputs: State, compute: Compute) -> State:
        """Compare a state that entries have made with that of the blocks, which is returned. If they differ, the
        entries were made by other code, and all open files become empty."""
        plain = self._run("verify", compute, 0, inputs, None)

        def tolerance_of(tensor: Tensor) -> float:
            narrowed = self._precision == "half" and tensor.dtype in (torch.float32, torch.float64)
            return max(format_tolerance(tensor), _TOLERANCES[torch.float16] if narrowed else 0.0)

        is_same = self._agree(equal_states(plain, state, tolerance_of=tolerance_of))
        if not is_same:
            self._reader.forget()
            self._warn(f"entries in {self._folder.path} differ from what the frozen blocks compute now, so their code "
                       "has changed since; they are computed again")
        for store in (self._newest, self._source):
            if store is not None:
                store.unverified = None
                if not is_same:
                    store.clear()
        return plain

    # ------------------------------------------------------------------ keys

    @property
    def _part_digest(self) -> str:
        """How the keys of all files of this part of the state begin."""
        return digest_of({"part": self._part})[:_PART_DIGITS]

    def _key(self, depth: int) -> str:
        """A hash of what two entries of one sample must have in common to be the same."""
        return self._part_digest + digest_of({
            "version": _VERSION, "torch": torch.__version__, "depth": depth, "weights": self._digests[depth],
            "fingerprint": self._fingerprint, "inputs": self._inputs, "precision": self._precision,
            "longest": self._longest})[_PART_DIGITS:]

    # ------------------------------------------------------------------ one microbatch

    def _is_usable(self, numbers: Sequence[int], inputs: State) -> bool:
        """Whether this microbatch may be read and written: its inputs have the form of those of the first one."""
        if self._is_off or not self.depth or not numbers or not all(
                0 <= number < self._num_samples for number in numbers):
            return False
        try:
            form = RowFormat.of(inputs, "full", self._longest).describe()
            _check_rows(inputs, len(numbers))
            if self._longest is not None:
                self._length = next(iter(named(inputs, WHERE).values())).shape[1]
        except NotCacheable as reason:
            return self._refuse(reason)
        if self._inputs is None:
            self._inputs = form
        if form != self._inputs:
            return self._refuse("the shapes of inputs differ between microbatches")
        return True

    def _find(self, numbers: Sequence[int], is_usable: bool) -> list[Entries]:
        """Entries of the samples: of this depth, and of the source where this depth has none. Ranks that share a stage
        take all samples from one depth, or nothing."""
        self._find_newest()
        found, is_missing = list[Entries](), torch.ones(len(numbers), dtype=torch.bool)
        for store in (self._newest, self._source):
            places, read = is_missing.nonzero().flatten(), list[Entries]()
            if store is not None and is_usable and len(places):
                read = [replace(entries, places=places[entries.places]) for entries in self._reader.read(
                    [numbers[place] for place in places.tolist()], store) if len(entries.places)]
            if self._is_shared:
                if self._agree(bool(read) and sum(len(entries.places) for entries in read) == len(numbers)):
                    return read
                continue
            found += read
            for entries in read:
                is_missing[entries.places] = False
        return found

    def _assemble(self, count: int, found: Sequence[Entries], inputs: State, compute: Compute,
                  new: list[tuple[Tensor, State]]) -> State:
        """The state of all rows. (places, state) of what was computed is appended to `new`. NotCacheable if the parts
        do not fit together."""
        is_missing = torch.ones(count, dtype=torch.bool)
        for entries in found:
            is_missing[entries.places] = False
            self._count_read(entries)
        missing = is_missing.nonzero().flatten()
        self.counts.misses += len(missing)
        # Rows go through the blocks together where all do: no row is copied, and collectives need all of them.
        parts = [(entries.places, entries.store.depth, self._decode(entries)) for entries in found]
        if len(missing) or not count:
            parts.append((missing, 0, _select(inputs, missing) if found else inputs))
        pieces: list[tuple[Tensor, State]] = []
        for places, depth, state in parts:
            if depth < self.depth or not self.depth:
                state = self._run("upgrade" if depth else "compute", compute, depth, state,
                                  None if len(places) == count else places)
                new.append((places, state))
            pieces.append((places, state))
        return _join(pieces, count)

    def _decode(self, entries: Entries) -> State:
        slots = entries.slots.to(self._device, non_blocking=True)
        return entries.store.rows.decode(slots[:, HEADER_BYTES:], self._length)

    def _run(self, what: str, compute: Compute, first: int, state: State, rows: Tensor | None) -> State:
        with self._timed(what):
            made = compute(first, state, rows)
            if self._device.type == "cuda":  # the result is copied to the host next, which would wait for it anyway
                torch.cuda.current_stream(self._device).synchronize()
        return carried({name: tensor.detach() for name, tensor in named(made, WHERE).items()})

    def _write(self, samples: Sequence[int], state: State) -> None:
        self.counts.unwritten += len(samples)
        if self._is_off or self._is_full:
            return
        try:
            _check_rows(state, len(samples))
            row_format = RowFormat.of(state, self._precision, self._longest)
            self._check_positions(state)
        except NotCacheable as reason:
            self._is_off = True  # the state has no rows, and will have none in any other microbatch
            self._warn(str(reason))
            return
        try:
            if self._newest is None:
                self._newest = self._marked(Store.create(self._folder, self._key(self.depth), self.depth, row_format,
                                                         self._lengths))
                assert self._newest is not None
            elif self._newest.rows != row_format:
                raise NotCacheable("the state's shapes differ between microbatches")
            payload, in_range = row_format.encode(state)
            on_host = torch.empty_like(payload, device="cpu", pin_memory=payload.is_cuda).copy_(payload)
            self._write_rows(self._newest, samples, on_host.numpy(), in_range.tolist())
        except NotCacheable as reason:
            self._warn(str(reason))
        except (OSError, OverflowError) as error:
            self._stop(error)

    def _write_rows(self, store: Store, samples: Sequence[int], rows: npt.NDArray[np.uint8],
                    in_range: Sequence[bool]) -> None:
        """Write the rows for which there is space. OSError or OverflowError if the disk does not take one."""
        free_bytes = self._folder.free_bytes()
        for sample, row, fits in zip(samples, rows, in_range, strict=True):
            size = store.bytes_of(sample)
            if not fits:
                self._warn("values outside half precision's range; --elastic.cache-precision full stores them")
                continue
            if size > free_bytes and self._source is not None:
                self._drop_source()
                free_bytes = self._folder.free_bytes()
            if size > free_bytes:
                self._warn(f"the limit of {self._folder.max_bytes:,} bytes is reached; --elastic.cache-bytes sets a "
                           "larger one")
                continue
            store.write(sample, row)
            free_bytes -= size
            self.counts.unwritten -= 1
            self.counts.written += 1
            self.counts.bytes_written += size

    def _stop(self, error: Exception) -> None:
        """Write nothing more in this run: the disk does not take it."""
        self._is_full = True
        self._warn(f"nothing more is written, because the disk does not take it ({error})")

    def _check_positions(self, state: State) -> None:
        """NotCacheable if the state has other positions than the inputs, where samples have lengths of their own."""
        if self._longest is not None and next(iter(named(state, WHERE).values())).shape[1] != self._length:
            raise NotCacheable("samples have different lengths, and the state has other positions than the inputs")

    # ------------------------------------------------------------------ counts and warnings

    def _count_read(self, entries: Entries) -> None:
        if entries.store.depth == self.depth:
            self.counts.hits += len(entries.places)
        else:
            self.counts.upgraded += len(entries.places)
        self.counts.bytes_read += entries.slots.nbytes

    def _refuse(self, reason: object) -> bool:
        self._warn(str(reason))
        return False

    def _warn(self, reason: str) -> None:
        if reason not in self._warned:
            self._warned.add(reason)
            self._warn_once(f"the cache of frozen layers' outputs does not keep everything: {reason}")

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.counts.seconds[what] += time.perf_counter() - start
