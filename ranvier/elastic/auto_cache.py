"""Outputs of the frozen prefix, kept per sample: the frozen blocks run once per sample, not once per epoch.

    forward(samples)   entry at this depth ------------------------------> state       hit
                       entry at an older depth -> newly frozen blocks ---> state       upgraded, kept
                       none ------------------> all frozen blocks -------> state       miss, kept

The plain form is `compute(0, inputs, None)`; what comes out here equals it to the precision of what is kept. Nothing
that a disk does fails a run: what cannot be read is a miss, what cannot be written is told once. (AutoCache: He et al.,
"PipeTransformer", 2021.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ranvier.elastic import cache_key
from ranvier.elastic.cache_folder import Folder
from ranvier.elastic.cache_form import Form, Precision, Unfit
from ranvier.elastic.cache_key import Block
from ranvier.elastic.cache_profile import Counts, Times
from ranvier.elastic.cache_reader import Found, Reader
from ranvier.elastic.cache_rows import Rows, check_rows, joined, select
from ranvier.elastic.cache_store import Store
from ranvier.elastic.cache_writer import Writer
from ranvier.models.block import State

Compute = Callable[[int, State, Tensor | None], State]
"""(first block, state before it, rows) -> state after the last frozen block. rows: [n] int64 on the cpu, which rows of
the microbatch the state has, in its order; None for all of them."""

_LEFTOVER_SECONDS = 3600.0
_MOST_CHANGES = 3


@dataclass(frozen=True, eq=False)
class _New:
    """What was computed. places: [n] int64, which of the microbatch's samples its rows are; None where it has all rows
    of the microbatch."""

    places: Tensor | None
    state: State


class AutoCache:
    """The cache of one rank of the first stage. One thread calls it.

    Args:
        folder: where files are; None for a folder of this user's, whose files go when no run uses them any more.
        blocks: the frozen blocks that this rank holds, from the model's first.
        fingerprint: everything else that outputs depend on: the data and its order of numbers, the input transform,
            what the model's settings are beside its weights.
        num_samples: of the data set; samples have numbers below it. Others are computed and not kept.
        quota_bytes: the most that all files in the folder may occupy, by all ranks of the node.
        precision: "half" or "full" (exact).
        part: which slice of the state this rank has, on a tensor mesh ("col 0 of 2").
        agree: a minimum of bools over the ranks of the stage, where blocks have collectives: all ranks then do the
            same, and a microbatch is a hit only if all of them have all of it. They all call it in one order.
        tell: takes one line about what is not kept, once each.
        prefetch_bytes: the most that is read ahead.
    """

    def __init__(self, folder: Path | None, *, blocks: Sequence[Block], fingerprint: str, num_samples: int,
                 quota_bytes: int, precision: Precision, device: torch.device, tell: Callable[[str], None],
                 agree: Callable[[bool], bool] | None = None, part: str = "whole",
                 prefetch_bytes: int = 1 << 28) -> None:
        self._folder = Folder(folder, quota_bytes)
        self._blocks, self._fingerprint, self._num_samples = list(blocks), fingerprint, num_samples
        self._precision, self._device, self._part = precision, torch.device(device), part
        self._agree, self._together = agree or (lambda mine: mine), agree is not None
        self._tell, self._told = tell, set()
        self.counts = Counts()
        self.writes = True
        """Whether what is computed is kept; without, what is there already is still read."""
        self._reader = Reader(prefetch_bytes, pinned=self._device.type == "cuda")
        self._writer = Writer(self._folder, num_samples, self.counts, self._say, self._let_go)
        self._inputs: list | None = None
        self._stamp: tuple | None = None
        self._digests: list[str] = []
        self._newest: Store | None = None
        self._sources: dict[int, Store | None] = {}
        self._keys: set[str] = set()
        self._off = False
        self._changes = 0

    @property
    def depth(self) -> int:
        """Frozen blocks."""
        return len(self._blocks)

    # ------------------------------------------------------------------ what the first stage calls

    @torch.no_grad()
    def forward(self, samples: Tensor, inputs: State, compute: Compute) -> State:
        """The carried state after the frozen blocks, on the device, detached; its rows are those of `inputs`.

        samples: [B] int64 on the cpu, the samples' own numbers; equal numbers have equal inputs. What `compute` raises
        goes through.
        """
        rows = Rows(samples.tolist(), self._num_samples)
        usable = self._usable(rows, inputs)
        self._open_where_changed()
        found = self._find(rows, usable)
        new: list[_New] = []
        try:
            state = self._assemble(rows, found, inputs, compute, new)
        except Unfit as why:
            usable, state = self._not_kept(why), self._run("compute", compute, 0, inputs, None)
        if new and usable and self.writes and self._unchanged_by_computing():
            self._keep(rows, new)
        return state

    def prefetch(self, samples: Iterable[Tensor]) -> None:
        """Start reading what the next microbatches have (each [b] int64, as `forward` will be given them), in the order
        in which they come; what an earlier call named and this one does not is forgotten."""
        if self._stamp is None or self._off or self._stamp != cache_key.stamp(self._blocks):
            return
        self._look_for_newest()
        self._reader.prefetch([Rows(each.tolist(), self._num_samples).numbers for each in samples], self._stores())

    def look_again(self) -> None:
        """Compare the weights' bytes: what was changed in a way that torch does not count (`.data`) is served until
        then."""
        if self._stamp is not None and cache_key.digests(self._blocks) != self._digests:
            self._stamp = None

    def deepen(self, blocks: Sequence[Block]) -> None:
        """Other blocks are frozen from now. What was kept at smaller depths of the same weights is upgraded."""
        self._close_stores()
        self._blocks, self._stamp, self.writes = list(blocks), None, True

    def times(self, samples: Tensor) -> Times | None:
        """Seconds per sample so far, for `cache_profile.decide`; `samples`, that were just kept, are read once for it.
        None until something was computed, written and can be read."""
        if self._newest is None or not self.counts.computed or not self.counts.written:
            return None
        entries = self._newest.read(Rows(samples.tolist(), self._num_samples).numbers)
        if not len(entries.places):
            return None
        return Times(compute=self.counts.seconds["compute"] / self.counts.computed,
                     read=entries.seconds / len(entries.places),
                     write=self.counts.seconds["write"] / self.counts.written)

    def close(self, *, keep: bool = False) -> None:
        """End the thread and let the files go; those in a folder that nobody named are removed by the last to go.

        keep: leave them there, because another cache of the same run goes on with them.
        """
        self._close_stores()
        self._reader.close()
        if not self._folder.given and not keep:
            for key in self._keys:
                self._folder.drop(key)
            self._folder.leave()
        self._off, self._stamp = True, None

    # ------------------------------------------------------------------ files

    def _open_where_changed(self) -> None:
        """Follow the weights: where they are not those of the open files, on any rank, all open theirs anew."""
        unchanged = self._off or (self._stamp is not None and self._stamp == cache_key.stamp(self._blocks))
        if self._agree(unchanged):
            return
        self._close_stores()
        if self._off or self._inputs is None:
            self._agree_on_sources({})
            return
        with self._timed("hash"):
            self._stamp, self._digests = cache_key.stamp(self._blocks), cache_key.digests(self._blocks)
        keys = {depth: self._key(depth) for depth in range(1, self.depth + 1)}
        if not self._folder.given:
            for key in self._keys - set(keys.values()):
                self._folder.drop(key)
            self._folder.drop_unheld(keep=set(keys.values()), older_seconds=_LEFTOVER_SECONDS)
        self._keys |= set(keys.values())
        self._agree_on_sources({depth: store for depth, key in keys.items()
                                if depth < self.depth and (store := self._find_store(key)) is not None})
        self._look_for_newest()

    def _agree_on_sources(self, mine: dict[int, Store]) -> None:
        """Older depths that all ranks have files of, the newest first."""
        for depth in range(self.depth - 1, 0, -1):
            if self._agree(depth in mine):
                self._sources[depth] = mine[depth]
            elif depth in mine:
                mine[depth].close()

    def _find_store(self, key: str) -> Store | None:
        try:
            return Store.find(self._folder, key, self._precision)
        except (OSError, Unfit) as error:
            self._say(f"a file of the cache cannot be read ({error})")
            return None

    def _look_for_newest(self) -> None:
        """Another rank may have made it meanwhile."""
        if self._newest is None and self._stamp is not None and not self._off:
            self._newest = self._find_store(self._key(self.depth))

    def _stores(self) -> dict[int, Store]:
        """By depth, the newest first."""
        return {depth: store for depth, store in ((self.depth, self._newest), *self._sources.items())
                if store is not None}

    def _let_go(self, depth: int) -> None:
        """Close an older file; the last of its ranks removes it. Ranks go on to ask each other for its depth."""
        self._reader.forget()
        store, self._sources[depth] = self._sources[depth], None
        store.close()
        self._folder.drop(store.key)

    def _close_stores(self) -> None:
        self._reader.forget()
        for store in self._stores().values():
            store.close()
        self._newest, self._sources = None, {}

    def _about(self, depth: int) -> dict:
        return cache_key.about(depth=depth, weights=self._digests[depth], fingerprint=self._fingerprint,
                               inputs=self._inputs, precision=self._precision, part=self._part)

    def _key(self, depth: int) -> str:
        return cache_key.key(self._about(depth))

    # ------------------------------------------------------------------ one microbatch

    def _usable(self, rows: Rows, inputs: State) -> bool:
        """Whether this microbatch may be read and kept: its inputs are formed as those of the first one."""
        if self._off or not self.depth:
            return False
        try:
            form = Form.of(inputs, "full")
            check_rows(inputs, rows.count)
        except Unfit as why:
            return self._not_kept(why)
        if self._inputs is None:
            self._inputs = form.describe()
        if form.describe() != self._inputs:
            return self._not_kept("the shapes of inputs differ between microbatches")
        return bool(rows.numbers)

    def _find(self, rows: Rows, usable: bool) -> list[Found]:
        """What there is of each sample, from the newest depth that has it. On several ranks of a stage: all of it at
        one depth, or nothing."""
        self._look_for_newest()
        if not self._together:
            return self._reader.take(rows.numbers, self._stores()) if usable else []
        for depth in (self.depth, *self._sources):
            store = self._stores().get(depth)
            found = self._reader.take(rows.numbers, {depth: store}) if usable and store is not None else []
            whole = len(found) == 1 and len(found[0].places) == len(rows.firsts)
            if self._agree(whole):
                return found
        return []

    def _assemble(self, rows: Rows, found: list[Found], inputs: State, compute: Compute, new: list[_New]) -> State:
        """The state of all rows. new: is given what was computed. Unfit when its parts cannot be put together."""
        missing = torch.ones(len(rows.firsts), dtype=torch.bool)
        for one in found:
            missing[one.places] = False
            self._count_read(rows, one)
        left = missing.nonzero().flatten()
        self.counts.misses += int(rows.repeats[left].sum())
        self.counts.computed += len(left)
        whole = self._together or len(rows.firsts) == rows.count
        if whole and not found:
            new.append(_New(None, self._run("compute", compute, 0, inputs, None)))
            return new[0].state
        if whole and not len(left) and len(found) == 1 and found[0].depth < self.depth:
            state = rows.expanded(self._decoded(found[0]))
            new.append(_New(None, self._run("upgrade", compute, found[0].depth, state, None)))
            return new[0].state
        pieces = [(one.places, self._decoded(one)) for one in found if one.depth == self.depth]
        for one in (one for one in found if one.depth < self.depth):
            new.append(_New(one.places, self._run("upgrade", compute, one.depth, self._decoded(one),
                                                  rows.firsts[one.places])))
        if len(left):
            at = rows.firsts[left]
            new.append(_New(left, self._run("compute", compute, 0, select(inputs, at), at)))
        pieces += [(one.places, one.state) for one in new]
        return rows.expanded(joined(pieces, len(rows.firsts)))

    def _decoded(self, one: Found) -> State:
        return one.store.form.decode(one.payload.to(self._device, non_blocking=True))

    def _run(self, what: str, compute: Compute, first: int, state: State, rows: Tensor | None) -> State:
        with self._timed(what):
            made = compute(first, state, rows)
            if self._device.type == "cuda":  # what was made is copied to the host next, which would wait for it anyway
                torch.cuda.current_stream(self._device).synchronize()
        return {name: tensor.detach() for name, tensor in made.items()} if isinstance(made, dict) else made.detach()

    def _unchanged_by_computing(self) -> bool:
        """Whether the frozen blocks left their own weights and buffers alone."""
        if self._stamp == cache_key.stamp(self._blocks):
            return True
        self._changes += 1
        if self._changes >= _MOST_CHANGES:
            self._off = True
            self._say("the frozen blocks change their own buffers as they run")
        return False

    def _keep(self, rows: Rows, new: list[_New]) -> None:
        with self._timed("write"):
            for one in new:
                try:
                    self._keep_some(rows, one)
                except Unfit as why:
                    self._not_kept(why)
                except OSError as error:
                    self._writer.stop(error)

    def _keep_some(self, rows: Rows, one: _New) -> None:
        places = torch.arange(len(rows.firsts)) if one.places is None else one.places
        samples = [rows.numbers[place] for place in places.tolist() if place < len(rows.numbers)]
        if not samples or self._writer.stopped:
            self.counts.unwritten += len(samples)
            return
        try:
            state = rows.reduced(one.state) if one.places is None else one.state
            form = Form.of(state, self._precision)
        except Unfit:
            self._off = True  # it is no state of rows, and will be none in any other microbatch
            raise
        self._make_newest(form)
        payload, fits = form.encode(state)
        older = {depth: store for depth, store in self._sources.items() if store is not None}
        self._writer.write(self._newest, older, samples, payload[:len(samples)], fits[:len(samples)])

    def _make_newest(self, form: Form) -> None:
        if self._newest is None:
            self._newest = Store.create(self._folder, self._key(self.depth), form, self._precision,
                                        self._about(self.depth))
        elif self._newest.form != form:
            raise Unfit("the state's shapes differ between microbatches")

    # ------------------------------------------------------------------ telling and counting

    def _count_read(self, rows: Rows, one: Found) -> None:
        count = int(rows.repeats[one.places].sum())
        if one.depth == self.depth:
            self.counts.hits += count
        else:
            self.counts.upgraded += count
        self.counts.read += len(one.places)
        self.counts.bytes_read += one.payload.nbytes
        self.counts.seconds["read"] += one.seconds
        self.counts.seconds["wait"] += one.waited

    def _not_kept(self, why: object) -> bool:
        self._say(str(why))
        return False

    def _say(self, why: str) -> None:
        if why not in self._told:
            self._told.add(why)
            self._tell(f"the cache of frozen layers' outputs goes on without what it cannot keep: {why}")

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.counts.seconds[what] += time.perf_counter() - start
