"""AutoCache in a run: which ranks cache what, whether caching saves time, and the events about it.

Whether outputs may be cached is tested on the data and the frozen blocks themselves, not read from settings: samples
are read for several epochs before the run begins, and the blocks run twice whenever a cache of their outputs opens.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ranvier.block import State
from ranvier.config.resolve import ResolvedRun
from ranvier.data.loader import Loader
from ranvier.data.task import Prepared
from ranvier.elastic.cache import AutoCache, Compute
from ranvier.elastic.cache_file import RunFolder
from ranvier.elastic.cache_profile import decide
from ranvier.elastic.inputs import ElasticRules
from ranvier.errors import ConfigError
from ranvier.train.events import Event, NoteEvent
from ranvier.train.runtime import RankRuntime

_TRIAL_BATCHES = 3
"""Microbatches that are computed, written and read before the run decides whether the cache saves time."""
_COMPARED_EPOCHS = range(1, 4)
_COMPARED_SAMPLES = 8


def check_repeats(data: Prepared) -> None:
    """ConfigError if a sample's inputs change between epochs, so that outputs cannot be cached: the task says so, or
    its first samples show it."""
    samples = np.arange(min(_COMPARED_SAMPLES, len(data.train)))

    def inputs(epoch: int) -> list[Tensor]:
        return tree_leaves(data.train.inputs(samples, np.full_like(samples, epoch)))

    first = inputs(0)
    if data.repeats and all(torch.equal(one, other) for epoch in _COMPARED_EPOCHS
                            for one, other in zip(first, inputs(epoch), strict=True)):
        return
    raise ConfigError("would keep the inputs of one epoch, but the task's samples have different inputs in each epoch",
                      code="cache-of-changing-samples", where="elastic.cache", value=True,
                      remedy="Leave out `--elastic.cache`, or have the task give each sample the same inputs in every "
                             "epoch.")


class Caching:
    """One run's cache on one rank: used on ranks of the first stage, for the frozen layers of that stage."""

    def __init__(self, run: ResolvedRun, data: Prepared, tell: Callable[[Event], None]) -> None:
        self._run, self._data, self._tell = run, data, tell
        self._cache: AutoCache | None = None
        self._folder: RunFolder | None = None
        self._token = secrets.token_hex(8)
        self._part = ""  # the part of each output that the entries hold
        self._now: RankRuntime | None = None
        self._reads = self._seen = 0
        self.is_on = run.elastic.cache
        """Whether outputs of frozen layers may be cached."""
        self._is_checked = False  # whether the frozen blocks have shown that their outputs can be cached
        self._unrepeatable_from: int | None = None  # number of frozen layers from which on they cannot
        if run.elastic.cache:
            check_repeats(data)
        self._refused_at = 0  # frozen layers at which the cache did not pay; it is tried again with more

    @property
    def _runtime(self) -> RankRuntime:
        """The runtime of the last `enter`."""
        assert self._now is not None
        return self._now

    @property
    def _open_cache(self) -> AutoCache:
        """The cache, while the engine uses it."""
        assert self._cache is not None
        return self._cache

    def would_cache(self, frozen: int) -> bool:
        """Whether the outputs of this many layers would be cached, as far as known."""
        repeats = self._unrepeatable_from is None or frozen < self._unrepeatable_from
        return repeats and ElasticRules(self._run).caches(frozen, self._refused_at)

    def enter(self, runtime: RankRuntime, reads: int) -> bool:
        """Continue with another engine; `reads` samples of the run are still to come. Returns whether this rank
        caches."""
        engine = runtime.engine
        if self._run.elastic.cache:  # another start's entries may come from different code
            self._token = runtime.ranks.gather_objects(self._token)[0]
        blocks = engine.frozen_stage_blocks()
        if not (self.would_cache(runtime.frozen.prefix) and engine.is_first_stage and blocks):
            self.leave()
            return False
        at, mesh, columns = engine.coordinates, engine.mesh, engine.mesh.over(splits_features=True)
        # a row's samples change with each epoch, so an entry is the same whichever row computed it
        column = f"col {at.index(columns)} of {mesh.feature_parts}"
        part = f"{self._run.tensor.scheme}, {mesh.microbatch_parts} rows, {column}" if mesh.stage_size > 1 else "whole"
        if part != self._part:  # the entries hold another part of each output
            self.leave()
        self._now = runtime
        if self._cache is None:
            self._part, elastic = part, self._run.elastic
            self._folder = self._folder or RunFolder(elastic.cache_dir, self._token)
            self._cache = AutoCache(
                self._folder, blocks=blocks, num_samples=len(self._data.train), precision=elastic.cache_precision,
                device=runtime.world.device, warn=self._report, max_bytes=elastic.cache_bytes // mesh.feature_parts,
                agree=self._agree if mesh.stage_size > 1 else None,
                gather_over_rows=None if mesh.microbatch_parts == 1 else (
                    lambda mine: self._runtime.engine.gather_over_rows(mine)),
                lengths=runtime.train_data.lengths, part=part)
        else:
            self._cache.set_blocks(blocks)
        self._reads, self._seen, self._is_checked = reads // runtime.run.mesh.num_replicas, 0, False
        engine.use_cache(self._forward, len(blocks))
        return True

    def leave(self) -> None:
        """Stop caching on this rank until the next `enter`."""
        if self._cache is not None:
            self._cache.close()
            self._cache = None
        self._now = None

    def close(self) -> None:
        """End the cache with the run. The last rank of a machine removes the entries."""
        self.leave()
        if self._folder is not None:
            self._folder.remove()

    def prefetch(self, loader: Loader, step: int, *, more: bool) -> None:
        """Read ahead the samples of `step`, counted from 0, and with `more` those of the step after it, whose first
        microbatch is read while this step computes."""
        if self._cache is not None and self._runtime.engine.cached_blocks:
            self._cache.prefetch([*loader.samples(step), *(loader.samples(step + 1) if more else ())])

    def check_weights(self) -> None:
        """Check the weights after an epoch: this notices changes that torch's version counters do not count."""
        if self._cache is not None and self._runtime.engine.cached_blocks:
            self._cache.check_weights()

    def facts(self) -> dict[str, object]:
        """Numbers of outputs read and computed, for the summary."""
        if self._cache is None:
            return {}
        counts = self._cache.counts
        return {"cache": {"hits": counts.hits, "upgraded": counts.upgraded, "misses": counts.misses,
                          "unwritten": counts.unwritten, "bytes_read": counts.bytes_read,
                          "bytes_written": counts.bytes_written}}

    def _agree(self, own: bool) -> bool:
        """Whether `own` is true on all ranks of the stage, on the present engine: the cache outlives a transition."""
        engine = self._runtime.engine
        return own if engine.mesh.stage_size == 1 else engine.agree(own)

    def _forward(self, samples: Tensor, inputs: State, compute: Compute) -> State:
        if not self._is_checked and not self._check(inputs, compute):
            return compute(0, inputs, None)
        state = self._open_cache.forward(samples, inputs, compute)
        self._seen += 1
        if self._seen == _TRIAL_BATCHES and self._run.elastic.cache_from == "auto":
            self._keep_if_faster(samples)
        return state

    def _check(self, inputs: State, compute: Compute) -> bool:
        """Whether the frozen blocks give the same outputs twice. If they do not, they are computed from now on."""
        self._is_checked = True
        engine, frozen = self._runtime.engine, self._runtime.frozen.prefix
        problem = self._open_cache.problem(inputs, compute)
        if self._agree(problem is None):
            return True
        self._unrepeatable_from = frozen
        self._report(f"cache off: the {frozen} frozen layers cannot be cached: "
                     f"{problem or 'their outputs on another rank of the stage are not repeatable'}; "
                     "--elastic.frozen-dropout false turns dropout off in frozen layers")
        engine.use_cache(None, 0)
        return False

    def _keep_if_faster(self, samples: Tensor) -> None:
        """Keep the cache only if reading is faster than computing. If it is not, layers are computed from now on; if
        outputs of fewer layers are cached, only the layers above are computed, and their outputs are not kept."""
        times = self._open_cache.times(samples)
        # None: all were hits that other ranks had written, or nothing could be written
        if not self._agree(times is not None) or times is None:
            return
        decision = decide(times, frozen_layers=self._runtime.frozen.prefix, remaining_reads=self._reads,
                          num_samples=min(len(self._data.train), self._reads))
        if self._agree(decision.pays):
            return
        cache = self._open_cache
        if cache.upgrades:
            cache.writes = False
            self._report(f"outputs of the layers frozen before are read, and those of the new ones are not kept: "
                         f"{decision.why}")
            return
        self._refused_at = self._runtime.frozen.prefix
        self._report(f"cache off: {decision.why}")
        self._runtime.engine.use_cache(None, 0)

    def _report(self, text: str) -> None:
        step = self._now.engine.steps if self._now is not None else 0
        self._tell(NoteEvent(step=step, event="cache", text=text))
