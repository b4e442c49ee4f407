"""AutoCache: outputs of frozen blocks by sample, so that these blocks run once per sample instead of once per epoch.

    forward(samples)   entry at this depth ---------------------------------> state       hit
                       entry at a smaller depth -> newly frozen blocks -----> state       upgraded, written
                       no entry -----------------> all frozen blocks -------> state       miss, written

Entries belong to one start of a run. `repeatable` checks whether blocks may be cached at all: whether they give the
same outputs twice.

Without a cache the state is `compute(0, inputs, None)`; the result equals it up to the precision of the entries. A disk
cannot make a run fail: an entry that cannot be read is a miss, and a failure to write is reported once. (AutoCache: He
et al., "PipeTransformer", 2021, section 3.4.)
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ranvier.block import State, as_named_tensors, from_named_tensors, named_tensors
from ranvier.elastic.cache_file import WHERE, CacheFile, Lengths, NotCacheable, Precision, RowFormat, RunFolder
from ranvier.elastic.cache_profile import Times


class Compute(Protocol):
    """The frozen blocks."""

    def __call__(self, first: int, state: State, rows: Tensor | None, *, other_keys: bool = False) -> State:
        """The state after the last frozen block, computed from the state before block `first`. rows: [n] int64 on the
        CPU, the rows of the microbatch that the state has, in its order; None for all rows. other_keys: use the random
        numbers of another step; only `repeatable` sets this."""
        ...


Block = tuple[int, str, nn.Module]
"""(number in the model, name, module) of a block."""

_HASHED_AT_ONCE = 1 << 24
_PART_DIGITS = 8
"""Digits of a key that identify the part of the state in its file."""
_TOLERANCES = {torch.float64: 1e-11, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest relative difference, in norm, between results of one computation with sums in another order, by dtype."""
_TF32_TOLERANCE = 1e-2


# --- weights ---------------------------------------------------------------------------------------------------------


def versions(blocks: Sequence[Block]) -> tuple[tuple[int, int, int], ...]:
    """Version counters of these blocks' tensors: they differ after a tensor was replaced, or changed in place if
    torch's version counter shows it (changes through `.data` do not count). Reads no weights."""
    return tuple((id(tensor), tensor.data_ptr(), tensor._version)
                 for _, _, module in blocks for _, tensor in named_tensors(module))


def digests(blocks: Sequence[Block]) -> list[str]:
    """Hashes of all depths in one pass, as a chain: item i is a hash of the first i blocks, of their numbers, names,
    and all tensors by name, dtype, shape and bytes."""
    found = [""]
    for number, name, module in blocks:
        digest = hashlib.blake2b(repr((found[-1], number, name)).encode(), digest_size=16)
        for label, tensor in named_tensors(module):
            digest.update(repr((label, str(tensor.dtype), tuple(tensor.shape))).encode())
            flat = tensor.detach().flatten()
            for start in range(0, len(flat), _HASHED_AT_ONCE):
                piece = flat[start:start + _HASHED_AT_ONCE]
                digest.update(piece.clone(memory_format=torch.contiguous_format).view(torch.uint8).cpu().numpy().data)
        found.append(digest.hexdigest())
    return found


# --- comparison ------------------------------------------------------------------------------------------------------


def _equal(first: State, second: State, *, exactly: bool) -> bool:
    """Whether two states are equal, including NaNs and infinities: bit for bit, or within the tolerance of their
    dtype."""
    one, other = as_named_tensors(first, WHERE), as_named_tensors(second, WHERE)
    if list(one) != list(other):
        return False
    for name, tensor in one.items():
        there, tolerance = other[name], _TOLERANCES.get(tensor.dtype)
        if tensor.shape != there.shape or tensor.dtype is not there.dtype:
            return False
        if exactly or tolerance is None:
            same = torch.allclose(tensor, there, rtol=0, atol=0, equal_nan=True)
        else:
            if tensor.is_cuda and tensor.dtype is torch.float32:
                tolerance = _TF32_TOLERANCE
            finite = tensor.isfinite()
            exact, found = (each.double().where(finite, 0.0) for each in (tensor, there))
            same = bool((finite == there.isfinite()).all()) and bool(
                (exact - found).norm() <= tolerance * exact.norm())
        if not same:
            return False
    return True


@torch.no_grad()
def repeatable(blocks: Sequence[Block], inputs: State, compute: Compute, device: torch.device
               ) -> tuple[str | None, State]:
    """(why outputs of these blocks cannot be cached, or None; their output), found by running the blocks twice on one
    microbatch, with different random keys and states of torch's generators.

    Equal means bit for bit on a CPU, and within the tolerance of the number format on a GPU, whose kernels may sum in
    any order. Restores the generators and the blocks' buffers."""
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
        return "they change their own buffers as they run", first
    same = _equal(first, second, exactly=device.type != "cuda")
    return None if same else "they give other outputs when they run again, as dropout does", first


# --- rows of a microbatch --------------------------------------------------------------------------------------------


def _join(pieces: Sequence[tuple[Tensor, State]], count: int) -> State:
    """One state of `count` rows from (places of rows, state with these rows). places: int64, ascending, on the CPU.
    NotCacheable if the pieces differ in shape, or a piece's number of rows differs from its number of places."""
    if len(pieces) == 1 and len(pieces[0][0]) == count:
        return pieces[0][1]
    if any(RowFormat.from_state(state, "full", count=len(places)) != RowFormat.from_state(pieces[0][1], "full",
                                                                         count=len(pieces[0][0]))
           for places, state in pieces):
        raise NotCacheable("the state's shapes differ between microbatches")
    whole = {name: tensor.new_empty((count, *tensor.shape[1:]))
             for name, tensor in as_named_tensors(pieces[0][1], WHERE).items()}
    for places, state in pieces:
        for name, tensor in as_named_tensors(state, WHERE).items():
            whole[name].index_copy_(0, places.to(tensor.device), tensor)
    return from_named_tensors(whole)


# --- the cache -------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Counts:
    """Rows of microbatches that the cache of one rank has read (hits, upgraded), computed (misses), written, and not
    written (no space, or a value outside half precision's range).

    seconds: of the calling thread for compute (misses), upgrade (newly frozen blocks) and write.
    """

    hits: int = 0
    upgraded: int = 0
    misses: int = 0
    written: int = 0
    unwritten: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("compute", "upgrade", "write"), 0.0))


class AutoCache:
    """The cache of one rank of the first stage. One thread calls it.

    Args:
        folder: where the run's files are.
        blocks: the frozen blocks of this rank, from the first block of the model on.
        num_samples: size of the dataset; a microbatch with a number outside it is computed and not cached.
        precision: "half" or "full" (exact).
        part: which slice of the state this rank has on a tensor parallel mesh ("col 0 of 2"), and all else on which
            outputs depend besides weights and samples.
        max_bytes: most bytes of the file of the present depth, and of the files of two depths together.
        agree: the minimum of a bool over the ranks of the stage, if blocks have collectives: all ranks then do the
            same, and a microbatch is a hit only if every rank has all of it. All ranks call it in the same order.
        gather_over_rows: gathers strings over the ranks with the same part of the state, which have other samples and
            other parts of the weights. Entries are named by all their strings, so that each rank reads the entries of
            the others.
        warn: receives one line about what is not cached, once for each reason.
        lengths: positions of each sample, if microbatches are padded to their longest sample: an entry has only the
            positions of its sample, and the blocks' outputs for them must not depend on the padding. Dim 1 of all
            tensors of inputs and states is then the positions.
    """

    def __init__(self, folder: RunFolder, *, blocks: Sequence[Block], num_samples: int, precision: Precision,
                 device: torch.device, warn: Callable[[str], None], max_bytes: int,
                 agree: Callable[[bool], bool] | None = None,
                 gather_over_rows: Callable[[list[str]], list[list[str]]] | None = None, part: str = "whole",
                 lengths: Lengths | None = None) -> None:
        self._folder, self._blocks, self._num_samples, self._max_bytes = folder, list(blocks), num_samples, max_bytes
        self._precision, self._device, self._part = precision, torch.device(device), part
        self._part_digest = hashlib.blake2b(part.encode()).hexdigest()[:_PART_DIGITS]
        """Prefix of the keys of all files of this part of the state."""
        self._lengths = lengths
        self._agree, self._is_shared = agree or (lambda mine: mine), agree is not None
        self._gather_over_rows = gather_over_rows or (lambda mine: [mine])
        self._warn_once, self._warned = warn, set[str]()
        self.counts, self._before = Counts(), Counts()
        self.writes = True
        """Whether computed states are written; if not, existing entries are still read."""
        self._inputs: RowFormat | None = None
        """Form of the first microbatch's inputs; the others must have the same."""
        self._rows: RowFormat | None = None
        """Row format of the last computed state after the frozen blocks."""
        self._length: int | None = None
        """Number of positions of this microbatch, if samples have different lengths."""
        self._versions: tuple[tuple[int, int, int], ...] | None = None
        """Version counters of the weights to which the open files belong; None if files must be opened."""
        self._own_digests: list[str] = []
        """Digests of this rank's part of the weights."""
        self._digests: list[str] = []
        """Digests of the weights of all rows."""
        self._newest: CacheFile | None = None
        self._source: CacheFile | None = None
        """The file of the next smaller depth, from whose entries the newly frozen blocks compute those of this
        depth."""
        self._is_off = False

    @property
    def upgrades(self) -> bool:
        """Whether entries of a smaller depth have been upgraded to entries of these blocks."""
        return self.counts.upgraded > self._before.upgraded

    @property
    def depth(self) -> int:
        """Number of frozen blocks."""
        return len(self._blocks)

    def problem(self, inputs: State, compute: Compute) -> str | None:
        """Why outputs of the frozen blocks cannot be cached, judging by one microbatch (`repeatable`). Its output shows
        the format of a row, so that entries of other ranks are found from the first `forward` on."""
        found, state = repeatable(self._blocks, inputs, compute, self._device)
        with suppress(NotCacheable):
            count = len(next(iter(as_named_tensors(state, WHERE).values())))
            self._rows = RowFormat.from_state(state, self._precision, count=count,
                                              has_positions=self._lengths is not None)
        return found

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
            is_usable, state = self._warn(reason), self._run("compute", compute, 0, inputs, None)
        # If blocks have changed their own buffers, their outputs belong to neither the old nor the new buffers.
        if is_usable and self.writes and self._versions == versions(self._blocks):
            start = time.perf_counter()
            for places, one in new:
                self._write([numbers[place] for place in places.tolist()], one)
            self.counts.seconds["write"] += time.perf_counter() - start
        return state

    def prefetch(self, samples: Iterable[Tensor]) -> None:
        """Start to read the entries of the next microbatches (each [b] int64, as `forward` will get them), in their
        order. Microbatches of an earlier call that are not in this call are dropped."""
        if self._newest is not None and self._versions == versions(self._blocks):
            numbers = [each.tolist() for each in samples]
            self._newest.prefetch([each for each in numbers if self._are_in_dataset(each)],
                                  pinned=self._device.type == "cuda")

    def check_weights(self) -> None:
        """Compare the weights' bytes. Changes that torch's version counter does not show (`.data`) are noticed only
        here."""
        if self._versions is not None and digests(self._blocks) != self._own_digests:
            self._versions = None

    def set_blocks(self, blocks: Sequence[Block]) -> None:
        """Use other frozen blocks from now on. Entries of the previous depth are upgraded if its weights are the
        same."""
        self._blocks, self._versions, self.writes = list(blocks), None, True
        self._before = replace(self.counts, seconds=dict(self.counts.seconds))

    def times(self, samples: Tensor) -> Times | None:
        """Seconds per sample for `cache_profile.decide`, with these blocks: those that an entry saves, those to read it
        and to write it. `samples`, which were just written, are read once to measure reading. None until entries were
        computed, written and can be read."""
        computed, what = self.counts.misses - self._before.misses, "compute"
        if self.upgrades:  # an entry saves the newly frozen blocks, and reading the entry before them
            computed, what = self.counts.upgraded - self._before.upgraded, "upgrade"
        if self._newest is None or not computed or not self.counts.written:
            return None
        start = time.perf_counter()
        places, _ = self._newest.read(samples.tolist())
        read = (time.perf_counter() - start) / max(len(places), 1)
        seconds = (self.counts.seconds[what] - self._before.seconds[what]) / computed
        return None if not len(places) else Times(
            compute=seconds + (read if self.upgrades else 0.0), read=read,
            write=self.counts.seconds["write"] / self.counts.written)

    def close(self) -> None:
        """End the threads and close the files. Everything is computed from now on."""
        for store in (self._newest, self._source):
            if store is not None:
                store.close()
        self._newest = self._source = None
        self._is_off, self._versions = True, None

    # ------------------------------------------------------------------ files

    def _open_if_changed(self) -> None:
        """Open the files of the current weights. If the weights of any rank have changed, all ranks open theirs
        again."""
        if self._agree(self._versions is not None and self._versions == versions(self._blocks)):
            return
        is_off = self._is_off
        self.close()
        self._is_off, self._versions, self._own_digests = is_off, versions(self._blocks), digests(self._blocks)
        self._digests = [repr(each) if len(each) > 1 else each[0] for each in zip(
            *self._gather_over_rows(self._own_digests), strict=True)]
        for depth in range(self.depth - 1, 0, -1):
            found = self._open(depth)
            if self._agree(found is not None and 2 * found.num_bytes <= self._max_bytes):
                self._source = found
                break
            if found is not None:
                found.close()
        if not self._is_off and self._rows is not None:
            kept = {self._key(self.depth), *([] if self._source is None else [self._source.key])}
            self._folder.remove_others(self._part_digest, kept)

    def _open(self, depth: int, *, creates: bool = False) -> CacheFile | None:
        """The file of a depth, if there is one: another rank may have created it. None until the blocks have shown the
        format of a row."""
        if self._is_off or self._rows is None:
            return None
        try:
            self._folder.acquire()
            lengths = np.ones(self._num_samples, np.int64) if self._lengths is None else self._lengths
            return CacheFile(self._folder, self._key(depth), depth, self._rows, lengths, self._max_bytes,
                             creates=creates)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._is_off = True
            self._warn(f"its files cannot be used ({error})")
            return None

    def _key(self, depth: int) -> str:
        """A hash of all that must be equal for two entries of one sample to be the same."""
        common = repr((self._part, depth, self._digests[depth], self._inputs, self._rows))
        return self._part_digest + hashlib.blake2b(common.encode(), digest_size=16).hexdigest()

    # ------------------------------------------------------------------ one microbatch

    def _is_usable(self, numbers: Sequence[int], inputs: State) -> bool:
        """Whether this microbatch may be read and written: its inputs have the form of the first microbatch's
        inputs."""
        if self._is_off or not self.depth or not numbers or not self._are_in_dataset(numbers):
            return False
        try:
            form = RowFormat.from_state(inputs, "full", count=len(numbers), has_positions=self._lengths is not None)
        except NotCacheable as reason:
            return self._warn(reason)
        if self._lengths is not None:
            self._length = next(iter(as_named_tensors(inputs, WHERE).values())).shape[1]
        self._inputs = self._inputs or form
        return form == self._inputs or self._warn("the shapes of inputs differ between microbatches")

    def _are_in_dataset(self, numbers: Sequence[int]) -> bool:
        return all(0 <= number < self._num_samples for number in numbers)

    def _find(self, numbers: Sequence[int], is_usable: bool) -> list[tuple[Tensor, CacheFile, Tensor]]:
        """(places, file, rows) of the samples' entries: of this depth, and of the source if this depth has none. Ranks
        that share a stage take all samples from one depth, or none."""
        self._newest = self._newest or self._open(self.depth)
        found, missing = list[tuple[Tensor, CacheFile, Tensor]](), torch.arange(len(numbers))
        for store in (self._newest, self._source):
            read = None
            if store is not None and is_usable and len(missing):
                places, rows = store.read([numbers[place] for place in missing.tolist()],
                                          pinned=self._device.type == "cuda")
                read = (missing[places], store, rows) if len(places) else None
            if self._is_shared:
                if self._agree(read is not None and len(read[0]) == len(numbers)):
                    assert read is not None
                    return [read]
            elif read is not None:
                found.append(read)
                missing = missing[~torch.isin(missing, read[0])]
        return found

    def _assemble(self, count: int, found: Sequence[tuple[Tensor, CacheFile, Tensor]], inputs: State, compute: Compute,
                  new: list[tuple[Tensor, State]]) -> State:
        """The state of all rows. Appends (places, state) of computed rows to `new`. NotCacheable if the parts do not
        fit together."""
        is_missing = torch.ones(count, dtype=torch.bool)
        parts: list[tuple[Tensor, int, State]] = []
        for places, store, rows in found:
            is_missing[places] = False
            if store.depth == self.depth:
                self.counts.hits += len(places)
            else:
                self.counts.upgraded += len(places)
            self.counts.bytes_read += rows.nbytes
            parts.append((places, store.depth, store.rows.decode(
                rows.to(self._device, non_blocking=True), None if self._lengths is None else self._length)))
        missing = is_missing.nonzero().flatten()
        self.counts.misses += len(missing)
        # If all rows go through the blocks, they go together: no row is copied, and collectives need all of them.
        if len(missing) or not count:
            parts.append((missing, 0, inputs if not found else from_named_tensors({
                name: tensor.index_select(0, missing.to(tensor.device))
                for name, tensor in as_named_tensors(inputs, WHERE).items()})))
        pieces: list[tuple[Tensor, State]] = []
        for places, depth, state in parts:
            if depth < self.depth or not self.depth:
                state = self._run("upgrade" if depth else "compute", compute, depth, state,
                                  None if len(places) == count else places)
                new.append((places, state))
            pieces.append((places, state))
        return _join(pieces, count)

    def _run(self, what: str, compute: Compute, first: int, state: State, rows: Tensor | None) -> State:
        start = time.perf_counter()
        made = compute(first, state, rows)
        if self._device.type == "cuda":  # the result is copied to the host next, which would wait for it anyway
            torch.cuda.current_stream(self._device).synchronize()
        self.counts.seconds[what] += time.perf_counter() - start
        return from_named_tensors({name: tensor.detach() for name, tensor in as_named_tensors(made, WHERE).items()})

    def _write(self, samples: Sequence[int], state: State) -> None:
        """Write rows, except those that do not fit."""
        self.counts.unwritten += len(samples)
        try:
            rows = RowFormat.from_state(state, self._precision, count=len(samples),
                                        has_positions=self._lengths is not None)
            if self._lengths is not None and next(iter(
                    as_named_tensors(state, WHERE).values())).shape[1] != self._length:
                raise NotCacheable("samples have different lengths, and the state's positions differ from the inputs'")
        except NotCacheable as reason:
            self._is_off = True  # the state has no rows, and will have none in any other microbatch
            self._warn(reason)
            return
        if self._newest is None:
            self._rows = rows
            self._newest = self._open(self.depth, creates=True)
        elif self._newest.rows != rows:
            self._warn("the state's shapes differ between microbatches")
            return
        if self._newest is None:
            return
        encoded, in_range = rows.encode(state)
        on_host = torch.empty_like(encoded, device="cpu", pin_memory=encoded.is_cuda).copy_(encoded)
        for sample, row, fits in zip(samples, on_host.numpy(), in_range.tolist(), strict=True):
            if not fits:
                self._warn("values outside half precision's range; --elastic.cache-precision full stores them")
                continue
            try:
                size = self._newest.write(sample, row)
            except OSError as error:
                self.writes = False
                self._warn(f"nothing more is written, because the disk does not take it ({error})")
                return
            if not size:
                self._warn(f"the limit of {self._max_bytes:,} bytes is reached; --elastic.cache-bytes sets a larger "
                           "one")
                continue
            self.counts.unwritten -= 1
            self.counts.written += 1
            self.counts.bytes_written += size

    # ------------------------------------------------------------------ warnings

    def _warn(self, reason: object) -> bool:
        """False."""
        reason = str(reason)
        if reason not in self._warned:
            self._warned.add(reason)
            self._warn_once(f"the cache of frozen layers' outputs does not keep everything: {reason}")
        return False
