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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ranvier.block import State, carried, named
from ranvier.elastic.cache.store import (
    WHERE,
    Entries,
    Folder,
    Lengths,
    NotCacheable,
    Precision,
    RowFormat,
    Store,
    digest_of,
)
from ranvier.elastic.cache.transfer import Counts, Reader, Writer
from ranvier.elastic.cache_profile import Times


class Compute(Protocol):
    """The frozen blocks."""

    def __call__(self, first: int, state: State, rows: Tensor | None) -> State:
        """The state after the last frozen block, from that before block `first`. rows: [n] int64 on the CPU, which rows
        of the microbatch the state has, in its order; None for all of them."""
        ...


class KeyedCompute(Compute, Protocol):
    """Frozen blocks that can be run with other random keys."""

    def __call__(self, first: int, state: State, rows: Tensor | None, *, other_keys: bool = False) -> State:
        """As `Compute`. other_keys: with the random numbers of another step."""
        ...


Block = tuple[int, str, nn.Module]
"""(number in the model, name, module) of a block."""

_VERSION = 1
_HASHED_AT_ONCE = 1 << 24
_ABANDONED_AFTER_SECONDS = 3600.0
_MAX_BUFFER_CHANGES = 3
_RUN_DIGITS = 8
"""Of a file's name that say whose run it is."""
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
def repeatable(blocks: Sequence[Block], inputs: State, compute: KeyedCompute, device: torch.device) -> str | None:
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


class Rows:
    """The rows of one microbatch, whose samples may repeat.

    numbers: the distinct samples that may be cached (0 <= number < num_samples), in the order of their first rows.
    firsts: [n] int64, the first row of each, followed by every row whose number is outside the dataset.
    repeats: [n] int64, how many rows each of `firsts` stands for.
    """

    def __init__(self, samples: Sequence[int], num_samples: int) -> None:
        self.count = len(samples)
        self.numbers = list(dict.fromkeys(sample for sample in samples if 0 <= sample < num_samples))
        places = {sample: place for place, sample in enumerate(self.numbers)}
        firsts, inverse = [-1] * len(places), []
        for row, sample in enumerate(samples):
            place = places.get(sample, len(firsts))
            if place == len(firsts):
                firsts.append(row)
            elif firsts[place] < 0:
                firsts[place] = row
            inverse.append(place)
        self.firsts, self._inverse = torch.tensor(firsts, dtype=torch.int64), torch.tensor(inverse, dtype=torch.int64)
        self.repeats = torch.bincount(self._inverse, minlength=len(firsts))
        self._is_identity = inverse == list(range(len(firsts)))

    def expand(self, state: State) -> State:
        """All rows, from one row of each sample in the order of `firsts`."""
        return state if self._is_identity else _select(state, self._inverse)

    def reduce(self, state: State) -> State:
        """One row of each sample, from all rows. NotCacheable if the state's first dim is not the rows."""
        _check_rows(state, self.count)
        return state if self._is_identity else _select(state, self.firsts)


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
    for places, state in pieces:
        _check_rows(state, len(places))
    if len(pieces) == 1 and len(pieces[0][0]) == count:
        return pieces[0][1]
    states = [named(state, WHERE) for _, state in pieces]
    shapes = [{name: (tensor.shape[1:], tensor.dtype) for name, tensor in state.items()} for state in states]
    if any(shape != shapes[0] for shape in shapes):
        raise NotCacheable("the state's shapes differ between microbatches")
    whole = {name: tensor.new_empty((count, *tensor.shape[1:])) for name, tensor in states[0].items()}
    for (places, _), state in zip(pieces, states, strict=True):
        for name, tensor in state.items():
            whole[name].index_copy_(0, places.to(tensor.device), tensor)
    return carried(whole)


# --- runs ------------------------------------------------------------------------------------------------------------


def run_prefix(run: str) -> str:
    """How the names of the files of a run's cache begin."""
    return digest_of({"run": run})[:_RUN_DIGITS]


def remove_run(folder: Path, run: str) -> None:
    """Remove the files of a run that has ended, which no process uses."""
    Folder(folder, 0).remove_unused(prefix=run_prefix(run))


# --- the cache -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _New:
    """A computed state. places: [n] int64, which of `Rows.firsts` its rows are; None if it has all rows of the
    microbatch."""

    places: Tensor | None
    state: State


class AutoCache:
    """The cache of one rank of the first stage. One thread calls it.

    Args:
        folder: where the files are; None for a folder of this user, whose files are removed when no run uses them.
        blocks: the frozen blocks of this rank, from the first block of the model on.
        fingerprint: everything else that outputs depend on: the dataset and its numbering, the input transform, the
            model's settings besides its weights.
        num_samples: size of the dataset; samples have numbers below it. Other samples are computed and not cached.
        quota_bytes: the most disk space that all files in the folder may occupy, for all ranks of the machine.
        precision: "half" or "full" (exact).
        run: names the run that the entries belong to; other runs do not read them.
        verifies: compare the first entries that were there when their file was opened with what the blocks compute.
        part: which slice of the state this rank has on a tensor parallel mesh ("col 0 of 2").
        agree: the minimum of a bool over the ranks of the stage, if blocks have collectives: all ranks then do the
            same, and a microbatch is a hit only if every rank has all of it. All ranks call it in the same order.
        of_rows: gathers texts of the ranks that have other samples, and other parts of the weights, with the same part
            of the state: entries are named by what all of them say, so that any of them reads what another has written.
        warn: takes one line about what is not cached, once for each reason.
        prefetch_bytes: the most that is read ahead.
        lengths: positions of each sample, where microbatches are padded to their longest one: an entry has those of its
            sample alone, and what the blocks compute of them must not depend on the padding. Dim 1 of all tensors of
            inputs and states is then the positions.
    """

    def __init__(self, folder: Path | None, *, blocks: Sequence[Block], fingerprint: str, num_samples: int,
                 quota_bytes: int, precision: Precision, device: torch.device, warn: Callable[[str], None],
                 agree: Callable[[bool], bool] | None = None,
                 of_rows: Callable[[list[str]], list[list[str]]] | None = None, part: str = "whole",
                 prefetch_bytes: int = 1 << 28, lengths: Lengths = None, run: str = "",
                 verifies: bool = True) -> None:
        self._folder = Folder(folder, quota_bytes)
        self._blocks, self._fingerprint, self._num_samples = list(blocks), fingerprint, num_samples
        self._precision, self._device, self._part = precision, torch.device(device), part
        self._lengths = lengths
        self._longest = None if lengths is None else int(lengths.max())
        self._length: int | None = None
        """Positions of this microbatch, where samples have lengths of their own."""
        self._agree, self._is_shared = agree or (lambda mine: mine), agree is not None
        self._of_rows = of_rows or (lambda mine: [mine])
        self._warn_once, self._warned = warn, set[str]()
        self.counts = Counts()
        self.writes = True
        """Whether computed states are written; if not, existing entries are still read."""
        self._reader = Reader(prefetch_bytes, pinned=self._device.type == "cuda")
        self._writer = Writer(self._folder, num_samples, self.counts, self._warn, self._drop)
        self._inputs: list[list[Any]] | None = None
        """Names, shapes and dtypes of the inputs of the first microbatch; the others must have the same."""
        self._versions: tuple[tuple[int, int, int], ...] | None = None
        """Of the weights to which the open files belong; None if files have to be opened."""
        self._own_digests: list[str] = []
        """Of this rank's part of the weights."""
        self._digests: list[str] = []
        """Of those of all rows."""
        self._newest: Store | None = None
        self._run_prefix, self._verifies = run_prefix(run), verifies
        self._unverified: dict[str, npt.NDArray[np.bool_]] = {}
        """[samples] by file: the entries that it had when it was opened, until one of them has been compared."""
        self._sources: dict[int, Store | None] = {}
        """By smaller depth, the greatest first: files whose entries can be upgraded. A depth whose file was dropped
        stays, as other ranks of the stage may still have theirs and ask for it."""
        self._keys: set[str] = set()
        self._is_off = False
        self._buffer_changes = 0

    @property
    def depth(self) -> int:
        """Number of frozen blocks."""
        return len(self._blocks)

    @torch.no_grad()
    def forward(self, samples: Tensor, inputs: State, compute: Compute) -> State:
        """The carried state after the frozen blocks, on the device and detached; its rows are those of `inputs`.

        samples: [B] int64 on the CPU, the numbers of the samples; equal numbers have equal inputs. Exceptions of
        `compute`
        are not caught.
        """
        rows = Rows(samples.tolist(), self._num_samples)
        is_usable = self._is_usable(rows, inputs)
        self._open_if_changed()
        found = self._find(rows, is_usable)
        new: list[_New] = []
        try:
            state = self._assemble(rows, found, inputs, compute, new)
        except NotCacheable as reason:
            is_usable, state = self._refuse(reason), self._run("compute", compute, 0, inputs, None)
        if found and self._verifies and not self._agree(not self._has_unverified(rows, found)):
            state, new = self._verify(state, inputs, compute), []
        if new and is_usable and self.writes and self._weights_are_unchanged():
            with self._timed("write"):
                for one in new:
                    self._write(rows, one)
        return state

    def prefetch(self, samples: Iterable[Tensor]) -> None:
        """Start to read the entries of the next microbatches (each [b] int64, as `forward` will get them), in their
        order. Microbatches of an earlier call that this one does not name are dropped."""
        if self._versions is None or self._is_off or self._versions != versions(self._blocks):
            return
        self._find_newest()
        self._reader.prefetch([Rows(each.tolist(), self._num_samples).numbers for each in samples],
                              list(self._stores().values()))

    def check_weights(self) -> None:
        """Compare the weights' bytes. Until then, changes that torch's version counter does not show (`.data`) go
        unnoticed."""
        if self._versions is not None and digests(self._blocks) != self._own_digests:
            self._versions = None

    def set_blocks(self, blocks: Sequence[Block]) -> None:
        """Use other frozen blocks from now on. Entries of smaller depths of the same weights are upgraded."""
        self._close_stores()
        self._blocks, self._versions, self.writes = list(blocks), None, True

    def times(self, samples: Tensor) -> Times | None:
        """Seconds per sample so far, for `cache_profile.decide`; `samples`, which were just written, are read once to
        measure it. None until something was computed, written and can be read."""
        if self._newest is None or not self.counts.computed or not self.counts.written:
            return None
        entries = self._newest.read(Rows(samples.tolist(), self._num_samples).numbers)
        if not len(entries.places):
            return None
        return Times(compute=self.counts.seconds["compute"] / self.counts.computed,
                     read=entries.seconds / len(entries.places),
                     write=self.counts.seconds["write"] / self.counts.written)

    def close(self, *, keep: bool = False) -> None:
        """End the thread and close the files; the last process to close them removes those in a temporary folder.

        keep: do not remove them, because another cache of the same run follows.
        """
        self._close_stores()
        self._reader.close()
        if self._folder.is_temporary and not keep:
            for key in self._keys:
                self._folder.remove(key)
            self._folder.remove_if_empty()
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
        with self._timed("hash"):
            self._own_digests = digests(self._blocks) if opens else [""] * (self.depth + 1)
            self._digests = [repr(each) if len(each) > 1 else each[0] for each in zip(
                *self._of_rows(self._own_digests), strict=True)]
        if opens:
            self._versions = versions(self._blocks)
            keys = {depth: self._key(depth) for depth in range(1, self.depth + 1)}
            if self._folder.is_temporary:
                for key in self._keys - set(keys.values()):
                    self._folder.remove(key)
                self._folder.remove_unused(keep=set(keys.values()), min_age_seconds=_ABANDONED_AFTER_SECONDS)
            self._keys |= set(keys.values())
            found = {depth: store for depth, key in keys.items()
                     if depth < self.depth and (store := self._find_store(key)) is not None}
        for depth in range(self.depth - 1, 0, -1):
            if self._agree(depth in found):
                self._sources[depth] = found[depth]
            elif depth in found:
                found[depth].close()
        self._find_newest()

    def _find_store(self, key: str) -> Store | None:
        try:
            store = Store.find(self._folder, key, self._precision, self._lengths)
            if store is not None and self._verifies:
                self._unverified[key] = np.fromiter((store.has(sample) for sample in range(self._num_samples)), bool)
            return store
        except (OSError, NotCacheable) as error:
            self._warn(f"a file of the cache cannot be read ({error})")
            return None

    def _find_newest(self) -> None:
        """Open the file of this depth if there is one by now: another rank may have created it."""
        if self._newest is None and self._versions is not None and not self._is_off:
            self._newest = self._find_store(self._key(self.depth))

    def _stores(self) -> dict[int, Store]:
        """Open files by depth, the greatest first."""
        return {depth: store for depth, store in ((self.depth, self._newest), *self._sources.items())
                if store is not None}

    def _drop(self, depth: int) -> None:
        """Close a file that is not needed; the last rank to do so removes it."""
        self._reader.forget()
        if (store := self._sources[depth]) is not None:
            self._sources[depth] = None
            store.close()
            self._folder.remove(store.key)

    def _close_stores(self) -> None:
        self._reader.forget()
        for store in self._stores().values():
            store.close()
        self._newest, self._sources, self._unverified = None, {}, {}

    # ------------------------------------------------------------------ entries of an earlier start

    def _has_unverified(self, rows: Rows, found: Sequence[Entries]) -> bool:
        """Whether one of these entries was in its file when that was opened, and none of the file has been compared."""
        return any(bool(there[[rows.numbers[place] for place in entries.places.tolist()]].any())
                   for entries in found if (there := self._unverified.get(entries.store.key)) is not None)

    def _verify(self, state: State, inputs: State, compute: Compute) -> State:
        """Compare a state that entries have made with that of the blocks, which is returned. If they differ, the
        entries were made by other code, and all open files become empty."""
        plain = self._run("verify", compute, 0, inputs, None)
        stored = torch.float16 if self._precision == "half" else None

        def tolerance_of(tensor: Tensor) -> float:
            narrowed = stored is not None and tensor.dtype in (torch.float32, torch.float64)
            return max(format_tolerance(tensor), _TOLERANCES[torch.float16] if narrowed else 0.0)

        self._unverified = {}
        if not self._agree(equal_states(plain, state, tolerance_of=tolerance_of)):
            self._reader.forget()
            for store in self._stores().values():
                store.clear()
            self._warn(f"entries in {self._folder.path} differ from what the frozen blocks compute now, so their code "
                       "has changed since; they are computed again")
        return plain

    # ------------------------------------------------------------------ keys

    def _about(self, depth: int) -> dict[str, Any]:
        """What two entries of one sample must have in common to be the same, as JSON."""
        return {"version": _VERSION, "torch": torch.__version__, "depth": depth, "weights": self._digests[depth],
                "fingerprint": self._fingerprint, "inputs": self._inputs, "precision": self._precision,
                "part": self._part, **({} if self._longest is None else {"longest": self._longest})}

    def _key(self, depth: int) -> str:
        return self._run_prefix + digest_of(self._about(depth))[_RUN_DIGITS:]

    # ------------------------------------------------------------------ one microbatch

    def _is_usable(self, rows: Rows, inputs: State) -> bool:
        """Whether this microbatch may be read and written: its inputs have the form of those of the first one."""
        if self._is_off or not self.depth:
            return False
        try:
            form = RowFormat.of(inputs, "full", self._longest).describe()
            _check_rows(inputs, rows.count)
            if self._longest is not None:
                self._length = next(iter(named(inputs, WHERE).values())).shape[1]
        except NotCacheable as reason:
            return self._refuse(reason)
        if self._inputs is None:
            self._inputs = form
        if form != self._inputs:
            return self._refuse("the shapes of inputs differ between microbatches")
        return bool(rows.numbers)

    def _find(self, rows: Rows, is_usable: bool) -> list[Entries]:
        """Entries of the samples, each from the greatest depth that has it. Ranks that share a stage take all samples
        from one depth, or nothing."""
        self._find_newest()
        stores = self._stores() if is_usable else {}
        if not self._is_shared:
            return self._reader.read(rows.numbers, list(stores.values())) if is_usable else []
        for depth in (self.depth, *self._sources):
            found = self._reader.read(rows.numbers, [stores[depth]]) if depth in stores else []
            if self._agree(len(found) == 1 and len(found[0].places) == len(rows.firsts)):
                return found
        return []

    def _assemble(self, rows: Rows, found: list[Entries], inputs: State, compute: Compute, new: list[_New]) -> State:
        """The state of all rows. What was computed is appended to `new`. NotCacheable if the parts do not fit
        together."""
        depths = {id(store): depth for depth, store in self._stores().items()}
        is_missing = torch.ones(len(rows.firsts), dtype=torch.bool)
        for entries in found:
            is_missing[entries.places] = False
            self._count_read(rows, entries, depths[id(entries.store)])
        missing = is_missing.nonzero().flatten()
        self.counts.misses += int(rows.repeats[missing].sum())
        self.counts.computed += len(missing)
        # All rows go through the blocks together where they can: no row is copied, and collectives need all of them.
        if self._is_shared or len(rows.firsts) == rows.count:
            if not found:
                new.append(_New(None, self._run("compute", compute, 0, inputs, None)))
                return new[0].state
            if not len(missing) and len(found) == 1 and (depth := depths[id(found[0].store)]) < self.depth:
                state = rows.expand(self._decode(found[0]))
                new.append(_New(None, self._run("upgrade", compute, depth, state, None)))
                return new[0].state
        pieces: list[tuple[Tensor, State]] = []
        for entries in found:
            depth, state = depths[id(entries.store)], self._decode(entries)
            if depth < self.depth:
                state = self._run("upgrade", compute, depth, state, rows.firsts[entries.places])
                new.append(_New(entries.places, state))
            pieces.append((entries.places, state))
        if len(missing):
            at = rows.firsts[missing]
            state = self._run("compute", compute, 0, _select(inputs, at), at)
            new.append(_New(missing, state))
            pieces.append((missing, state))
        return rows.expand(_join(pieces, len(rows.firsts)))

    def _decode(self, entries: Entries) -> State:
        return entries.store.rows.decode(entries.payload.to(self._device, non_blocking=True), self._length)

    def _run(self, what: str, compute: Compute, first: int, state: State, rows: Tensor | None) -> State:
        with self._timed(what):
            made = compute(first, state, rows)
            if self._device.type == "cuda":  # the result is copied to the host next, which would wait for it anyway
                torch.cuda.current_stream(self._device).synchronize()
        return carried({name: tensor.detach() for name, tensor in named(made, WHERE).items()})

    def _weights_are_unchanged(self) -> bool:
        """Whether the frozen blocks left their own weights and buffers alone while they ran."""
        if self._versions == versions(self._blocks):
            return True
        self._buffer_changes += 1
        if self._buffer_changes >= _MAX_BUFFER_CHANGES:
            self._is_off = True
            self._warn("the frozen blocks change their own buffers as they run")
        return False

    def _write(self, rows: Rows, one: _New) -> None:
        places = range(len(rows.firsts)) if one.places is None else one.places.tolist()
        samples = [rows.numbers[place] for place in places if place < len(rows.numbers)]
        if not samples or self._writer.is_stopped:
            self.counts.unwritten += len(samples)
            return
        try:
            state = rows.reduce(one.state) if one.places is None else one.state
            row_format = RowFormat.of(state, self._precision, self._longest)
            self._check_positions(state)
        except NotCacheable as reason:
            self._is_off = True  # the state has no rows, and will have none in any other microbatch
            self._warn(str(reason))
            return
        try:
            if self._newest is None:
                self._newest = Store.create(self._folder, self._key(self.depth), row_format, self._precision,
                                            self._about(self.depth), self._lengths)
            elif self._newest.rows != row_format:
                raise NotCacheable("the state's shapes differ between microbatches")
            payload, in_range = row_format.encode(state)
            older = {depth: store for depth, store in self._sources.items() if store is not None}
            self._writer.write(self._newest, older, samples, payload[:len(samples)], in_range[:len(samples)])
        except NotCacheable as reason:
            self._warn(str(reason))
        except OSError as error:
            self._writer.stop(error)

    def _check_positions(self, state: State) -> None:
        """NotCacheable if the state has other positions than the inputs, where samples have lengths of their own."""
        if self._longest is not None and next(iter(named(state, WHERE).values())).shape[1] != self._length:
            raise NotCacheable("samples have different lengths, and the state has other positions than the inputs")

    # ------------------------------------------------------------------ counts and warnings

    def _count_read(self, rows: Rows, entries: Entries, depth: int) -> None:
        count = int(rows.repeats[entries.places].sum())
        if depth == self.depth:
            self.counts.hits += count
        else:
            self.counts.upgraded += count
        self.counts.read += len(entries.places)
        self.counts.bytes_read += entries.payload.nbytes
        self.counts.seconds["read"] += entries.seconds
        self.counts.seconds["wait"] += entries.waited

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
