"""Reads entries of a microbatch, on request or ahead of it in a thread, and writes entries while quota and disk allow
it.

    space for an entry?  no ->  remove files that no process uses
                                free the older entries of the samples that are being written
                                close an older file if every one of its samples has a newer entry
                         no ->  the entry is not written, and is a miss the next time
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ranvier.elastic.cache.store import PAGE_BYTES, Entries, Folder, Store


@dataclass(eq=False)
class Counts:
    """What the cache of one rank has done. hits, upgraded and misses count rows of microbatches; computed, read,
    written and unwritten (no space, or a value outside half precision's range) count distinct samples of each
    microbatch.

    seconds: of the calling thread for hash (of the weights), compute (misses), upgrade (newly frozen blocks), verify
    (entries of an earlier start), write and wait (for entries that are being read); of any thread for read.
    """

    hits: int = 0
    upgraded: int = 0
    misses: int = 0
    computed: int = 0
    read: int = 0
    written: int = 0
    unwritten: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(
        ("hash", "read", "wait", "compute", "upgrade", "verify", "write"), 0.0))


class Reader:
    """Reads for one thread, which must call `forget` before it closes a store.

    Only the microbatches of the last call of `prefetch` are read ahead, so memory is bounded by them and by
    `max_bytes`. The caller reads a microbatch that the thread has not begun, and one with which the thread failed.
    """

    def __init__(self, max_bytes: int, *, pinned: bool) -> None:
        self._max_bytes, self._pinned = max_bytes, pinned
        self._thread: ThreadPoolExecutor | None = None
        self._ahead: dict[tuple[int, ...], Future[list[Entries]]] = {}
        self._running: list[Future[list[Entries]]] = []

    def prefetch(self, microbatches: Sequence[Sequence[int]], stores: Sequence[Store]) -> None:
        """Start to read these microbatches, in this order, from the first of `stores`. The other stores are not read
        ahead: what they have may be in the first one when the microbatch is needed."""
        row_bytes = max((store.rows.payload_bytes for store in stores), default=0)
        wanted: list[tuple[int, ...]] = []
        free_bytes = self._max_bytes
        for samples in microbatches if stores else ():
            free_bytes -= len(samples) * row_bytes
            if free_bytes < 0:
                break
            wanted.append(tuple(samples))
        for samples in self._ahead.keys() - set(wanted):
            self._ahead.pop(samples).cancel()
        for samples in wanted:
            if samples not in self._ahead:
                if self._thread is None:
                    self._thread = ThreadPoolExecutor(1, thread_name_prefix="ranvier-cache")
                self._ahead[samples] = self._thread.submit(_read, samples, stores[:1], self._pinned)
        self._running = [future for future in {*self._running, *self._ahead.values()} if not future.done()]

    def read(self, samples: Sequence[int], stores: Sequence[Store]) -> list[Entries]:
        """Entries of `samples`, each from the first of `stores` that has it."""
        start = time.perf_counter()
        ahead: list[Entries] = []
        future = self._ahead.pop(tuple(samples), None)
        if future is not None and not future.cancel() and future.exception() is None:
            ahead = [entries for entries in future.result() if entries.store in stores[:1]]
        waited = time.perf_counter() - start
        now = _read(samples, stores, self._pinned, ahead)
        return [replace(entries, waited=waited) for entries in ahead] + now

    def forget(self) -> None:
        """Return when nothing is being read, and drop what was read ahead."""
        for future in self._ahead.values():
            future.cancel()
        for future in [*self._ahead.values(), *self._running]:
            if not future.cancelled():
                future.exception()
        self._ahead, self._running = {}, []

    def close(self) -> None:
        """End the thread."""
        self.forget()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None


def _read(samples: Sequence[int], stores: Sequence[Store], pinned: bool,
          ahead: Sequence[Entries] = ()) -> list[Entries]:
    """Entries of the samples that are not in `ahead`; at most one `Entries` for each store."""
    is_missing = torch.ones(len(samples), dtype=torch.bool)
    for entries in ahead:
        is_missing[entries.places] = False
    found: list[Entries] = []
    for store in stores:
        places = is_missing.nonzero().flatten()
        if not len(places):
            break
        entries = store.read([samples[place] for place in places.tolist()], pinned=pinned)
        if len(entries.places):
            found.append(replace(entries, places=places[entries.places]))
            is_missing[found[-1].places] = False
    return found


class Writer:
    """Writes for one rank.

    warn: takes a reason why something is not cached. drop: closes an older file that is not needed any more.
    """

    def __init__(self, folder: Folder, num_samples: int, counts: Counts, warn: Callable[[str], None],
                 drop: Callable[[int], None]) -> None:
        self._folder, self._num_samples, self._counts = folder, num_samples, counts
        self._warn, self._drop = warn, drop
        self._needed_from: dict[tuple[str, ...], int] = {}
        self.is_stopped = False

    def stop(self, error: Exception) -> None:
        """Write nothing more in this run: the disk does not take it."""
        self.is_stopped = True
        self._warn(f"nothing more is written, because the disk does not take it ({error})")

    def write(self, store: Store, older: Mapping[int, Store], samples: Sequence[int], payload: Tensor,
              in_range: Tensor) -> None:
        """Write the entries of `samples` while there is space.

        older: by depth, files whose entries these replace; payload: [n, bytes] uint8 on any device; in_range: [n] bool,
        the
        rows that may be written. OSError if the folder cannot be used.
        """
        rows = torch.empty_like(payload, device="cpu", pin_memory=payload.is_cuda).copy_(payload).numpy()
        ready = [(sample, row) for sample, row, fits in zip(samples, rows, in_range.tolist(), strict=True) if fits]
        if len(ready) < len(samples):
            self._counts.unwritten += len(samples) - len(ready)
            self._warn("values outside half precision's range; --elastic.cache-precision full stores them")
        with self._folder.write_lock() as is_held:
            if is_held:
                self._write_rows(store, older, ready)
            else:
                self._counts.unwritten += len(ready)

    def _write_rows(self, store: Store, older: Mapping[int, Store],
                    rows: Sequence[tuple[int, npt.NDArray[np.uint8]]]) -> None:
        free_bytes, has_freed = self._folder.free_bytes(), False
        pages: set[int] = set()
        for place, (sample, row) in enumerate(rows):
            new_bytes = PAGE_BYTES * len(set(store.pages(sample)) - pages)
            if new_bytes > free_bytes and not has_freed:
                self._free_space(store, older, [sample for sample, _ in rows[place:]], pages)
                free_bytes, has_freed = self._folder.free_bytes(), True
            if new_bytes > free_bytes:
                self._counts.unwritten += 1
                self._warn(f"the quota of {self._folder.quota_bytes:,} bytes is used up; --elastic.cache-bytes sets a "
                           "larger one")
                continue
            try:
                store.write(sample, row)
            except (OSError, OverflowError) as error:
                self._counts.unwritten += len(rows) - place
                self.stop(error)
                return
            free_bytes -= new_bytes
            pages |= set(store.pages(sample))
            self._counts.written += 1
            self._counts.bytes_written += store.own_bytes(sample)

    def _free_space(self, store: Store, older: Mapping[int, Store], samples: Sequence[int], pages: set[int]) -> None:
        """Evict older entries until those of `samples` fit, as far as possible. pages: those that were just written."""
        needed = len({page for sample in samples for page in store.pages(sample)} - pages) * PAGE_BYTES
        self._folder.remove_unused(keep={store.key}, needed_bytes=needed)
        for depth, source in sorted(older.items()):
            if self._folder.free_bytes() >= needed:
                return
            newer = [store, *(other for another, other in older.items() if another > depth)]
            if source.free_slots(samples) and self._folder.free_bytes() >= needed:
                return
            if not self._is_needed(source, newer):
                self._drop(depth)

    def _is_needed(self, source: Store, newer: Sequence[Store]) -> bool:
        """Whether `source` has a sample that none of `newer` has. Entries stay, so the search resumes where it
        ended."""
        keys = (source.key, *(store.key for store in newer))
        for sample in range(self._needed_from.get(keys, 0), self._num_samples):
            if source.has(sample) and not any(store.has(sample) for store in newer):
                self._needed_from[keys] = sample
                return True
        self._needed_from[keys] = self._num_samples
        return False
