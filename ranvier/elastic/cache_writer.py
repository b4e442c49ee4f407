"""Entries are written as long as the quota and the disk have room; what older depths occupy makes room for newer ones.

    room for an entry?  no ->  remove files that no process holds
                               give back the older entries of the very samples that are being written
                               let go of an older file whose every sample has a newer entry
                        no ->  the entry is not written: a miss the next time
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ranvier.elastic.cache_folder import Folder
from ranvier.elastic.cache_profile import Counts
from ranvier.elastic.cache_store import Store

_PAGE_BYTES = 4096


class Writer:
    """Writes for one rank.

    say: takes a reason why something is not kept. let_go: is told a depth whose file is needed no more, and closes it.
    """

    def __init__(self, folder: Folder, num_samples: int, counts: Counts, say: Callable[[str], None],
                 let_go: Callable[[int], None]) -> None:
        self._folder, self._num_samples, self._counts = folder, num_samples, counts
        self._say, self._let_go = say, let_go
        self._needed: dict[tuple[str, ...], int] = {}
        self.stopped = False

    def stop(self, error: Exception) -> None:
        """Write no more in this run: the disk takes nothing."""
        self.stopped = True
        self._say(f"nothing more is written, because the disk does not take it ({error})")

    def write(self, store: Store, older: Mapping[int, Store], samples: Sequence[int], payload: Tensor,
              fits: Tensor) -> None:
        """Write the entries of `samples`, as far as there is room. older: sources of upgrades.

        payload: [n, bytes] uint8 on any device; fits: [n] bool, rows that may be written. OSError when the folder
        cannot be used.
        """
        rows = torch.empty_like(payload, device="cpu", pin_memory=payload.is_cuda).copy_(payload).numpy()
        ready = [(sample, row) for sample, row, fit in zip(samples, rows, fits.tolist(), strict=True) if fit]
        if len(ready) < len(samples):
            self._counts.unwritten += len(samples) - len(ready)
            self._say("numbers beyond half precision's range; --elastic.cache-precision full keeps them")
        with self._folder.alone() as mine:
            if not mine:
                self._counts.unwritten += len(ready)
                return
            self._write_some(store, older, ready)

    def _write_some(self, store: Store, older: Mapping[int, Store], ready: list) -> None:
        room, asked, pages = self._folder.room_bytes(), False, set()
        for place, (sample, row) in enumerate(ready):
            fresh = set(store.pages(sample)) - pages
            if len(fresh) * _PAGE_BYTES > room and not asked:
                asked = True
                self._make_room(store, older, [sample for sample, _ in ready[place:]], pages)
                room = self._folder.room_bytes()
            if len(fresh) * _PAGE_BYTES > room:
                self._counts.unwritten += 1
                self._say(f"the quota of {self._folder.quota_bytes:,} bytes is used up; --elastic.cache-bytes is more")
                continue
            try:
                store.write(sample, row)
            except (OSError, OverflowError) as error:
                self._counts.unwritten += len(ready) - place
                self.stop(error)
                return
            room -= len(fresh) * _PAGE_BYTES
            pages |= fresh
            self._counts.written += 1
            self._counts.bytes_written += row.nbytes

    def _make_room(self, store: Store, older: Mapping[int, Store], samples: Sequence[int], pages: set[int]) -> None:
        """For the entries of `samples`, as far as it can be had. pages: that were written to just now."""
        needed = len({page for sample in samples for page in store.pages(sample)} - pages) * _PAGE_BYTES
        self._folder.drop_unheld(keep={store.key}, until_bytes=needed)
        for depth, source in sorted(older.items()):
            if self._folder.room_bytes() >= needed:
                return
            newer = [store, *(other for another, other in older.items() if another > depth)]
            if source.give_back(samples) and self._folder.room_bytes() >= needed:
                return
            if not self._is_needed(source, newer):
                self._let_go(depth)

    def _is_needed(self, source: Store, newer: Sequence[Store]) -> bool:
        """Whether `source` has a sample that none of `newer` has. Looks on where the last look ended: entries stay."""
        keys = (source.key, *(store.key for store in newer))
        for sample in range(self._needed.get(keys, 0), self._num_samples):
            if source.has(sample) and not any(store.has(sample) for store in newer):
                self._needed[keys] = sample
                return True
        self._needed[keys] = self._num_samples
        return False
