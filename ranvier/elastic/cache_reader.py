"""Entries of a microbatch, read when they are asked for, or ahead of that by a thread.

Microbatches that are read ahead are those of the last call of `prefetch`, so memory is bounded by what it names and by
`most_bytes`. One that the thread has not begun is read by who asks; where the thread fails, too.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from ranvier.elastic.cache_store import Store


@dataclass(frozen=True, eq=False)
class Found:
    """Entries at one depth. places: [n] int64, where in the asked samples; payload: [n, bytes] uint8.
    seconds: that reading took; waited: those of them that the caller waited."""

    depth: int
    store: Store
    places: Tensor
    payload: Tensor
    seconds: float
    waited: float


class Reader:
    """Reads for one thread, which must call `forget` before it closes a store."""

    def __init__(self, most_bytes: int, *, pinned: bool) -> None:
        self._most_bytes, self._pinned = most_bytes, pinned
        self._thread: ThreadPoolExecutor | None = None
        self._ahead: dict[tuple[int, ...], Future[list[Found]]] = {}
        self._running: list[Future] = []

    def prefetch(self, microbatches: Sequence[Sequence[int]], stores: Mapping[int, Store]) -> None:
        """Begin to read these, in this order, as far as memory is given for it, from the newest store: what an older
        one has may be in the newest when it is taken."""
        newest = dict(list(stores.items())[:1])
        wanted, room = {}, self._most_bytes
        for samples in microbatches if stores else ():
            room -= len(samples) * max(store.form.payload_bytes for store in stores.values())
            if room < 0:
                break
            wanted[tuple(samples)] = None
        for samples in [samples for samples in self._ahead if samples not in wanted]:
            self._ahead.pop(samples).cancel()
        for samples in wanted:
            if samples not in self._ahead:
                if self._thread is None:
                    self._thread = ThreadPoolExecutor(1, thread_name_prefix="ranvier-cache")
                self._ahead[samples] = self._thread.submit(_read, samples, newest, self._pinned)
        self._running = [future for future in {*self._running, *self._ahead.values()} if not future.done()]

    def take(self, samples: Sequence[int], stores: Mapping[int, Store]) -> list[Found]:
        """What `stores` (by depth, the newest first) have of `samples`; each sample from the first that has it."""
        start = time.perf_counter()
        ready: list[Found] = []
        future = self._ahead.pop(tuple(samples), None)
        if future is not None and not future.cancel():
            try:
                newest = next(iter(stores), None)
                ready = [one for one in future.result() if one.depth == newest and stores[newest] is one.store]
            except Exception:  # whatever the thread met, its samples are read here
                ready = []
        waited = time.perf_counter() - start
        here = _read(samples, stores, self._pinned, ready)
        return [*(Found(one.depth, one.store, one.places, one.payload, one.seconds, waited if not place else 0.0)
                  for place, one in enumerate(ready)), *here]

    def forget(self) -> None:
        """Return when nothing is read ahead and nothing is being read."""
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


def _read(samples: Sequence[int], stores: Mapping[int, Store], pinned: bool,
          ready: Sequence[Found] = ()) -> list[Found]:
    """Of the samples that `ready` has not, those that the stores have."""
    left = torch.ones(len(samples), dtype=torch.bool)
    for one in ready:
        left[one.places] = False
    found = []
    for depth, store in stores.items():
        places = left.nonzero().flatten()
        if not len(places):
            break
        entries = store.read([samples[place] for place in places.tolist()], pinned=pinned)
        if len(entries.places):
            places = places[entries.places]
            left[places] = False
            found.append(Found(depth, store, places, entries.payload, entries.seconds, entries.seconds))
    return found
