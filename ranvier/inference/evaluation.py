"""One evaluation of a model on held-out samples, over all ranks: the mean loss, and the scores of the task."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ranvier.block import State
from ranvier.comm.protocol import Group
from ranvier.config.resolve import ResolvedRun
from ranvier.data.loader import Loader
from ranvier.data.sampler import Sampler
from ranvier.data.task import Dataset, Scoring, sample_lengths
from ranvier.pipeline.engine import Engine
from ranvier.pipeline.microbatch import Microbatch
from ranvier.tensor.activations import layout_of

SAMPLES_AT_ONCE = 256
"""Samples of a replica that are in memory at once in an evaluation."""


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """Result of an evaluation; the same on every rank.

    loss: sum of losses over the valid targets, over their weight; NaN where nothing was valid.
    weight: of the valid targets. scores: "eval_accuracy", "eval_count", ..., as the task's scoring names them.
    """

    loss: float
    weight: float
    seconds: float
    scores: dict[str, float] = field(default_factory=dict)


def evaluate(engine: Engine, ranks: Group, loader: Loader, scoring: Callable[[], Scoring] | None) -> Evaluated:
    """Go through the samples of `loader` once, without dropout. Collective over `ranks`, those of the engine.

    scoring: makes the scoring of one evaluation; None for the loss alone.
    """
    began = time.monotonic()
    mine = scoring() if scoring is not None and engine.is_last_stage else None
    assert loader.total is not None  # held-out samples are gone through once
    total = weight = 0.0
    for number in range(-(-loader.total // loader.global_size)):
        batch = loader.microbatches(number)

        def observe(place: int, output: State, batch: Sequence[Microbatch] = batch) -> None:
            samples = batch[place].samples
            assert mine is not None and samples is not None  # the loader numbers them
            mine.add(output, batch[place].targets, samples)

        result = engine.evaluate(batch, observe if mine is not None else None)
        if result.weight:
            total, weight = total + result.loss * result.weight, weight + result.weight
    scores: dict[str, float] = {}
    if scoring is not None:
        # of the columns of a row, which have the same outputs, the first counts
        part = mine.part() if mine is not None and engine.coordinates.is_first_with_samples else None
        scores = scoring().total([one for one in ranks.gather_objects(part) if one is not None])
    return Evaluated(loss=total / weight if weight else float("nan"), weight=weight, scores=scores,
                     seconds=time.monotonic() - began)


def evaluation_loader(run: ResolvedRun, engine: Engine, data: Dataset, total: int, *, at_once: int) -> Loader:
    """The microbatches of this rank of the first `total` samples, `at_once` of them over all replicas in a batch."""
    return Loader(data, Sampler(len(data), None), global_size=min(at_once, total), total=total,
                  lengths=lengths_of(run, data),
                  **loader_options(engine, run.batch.microbatch_size, length_multiple(run)))


def loader_options(engine: Engine, microbatch_size: int, length_multiple: int = 1) -> dict[str, Any]:
    """Arguments of a `Loader` that follow from the mesh and from this rank's place on it."""
    at = engine.coordinates
    return {"microbatch_size": microbatch_size, "replica": at.batch_share, "num_replicas": engine.mesh.batch_shares,
            "part": at.microbatch_part, "num_parts": engine.mesh.microbatch_parts, "device": engine.world.device,
            "needs_inputs": engine.is_first_stage, "needs_targets": engine.is_last_stage,
            "length_multiple": length_multiple}


def lengths_of(run: ResolvedRun, data: Dataset) -> np.ndarray | None:
    """Lengths of samples by which batches are grouped and padded; None where all are padded to the maximum. So are
    those of a cache whose ranks have parts of the sequence: a sample's part would depend on its microbatch."""
    is_cut = run.elastic.cache and length_multiple(run) > 1
    return None if run.data.padding == "maximum" or is_cut else sample_lengths(data)


def length_multiple(run: ResolvedRun) -> int:
    """Number that must divide the length of a microbatch: the columns that share it, with sequence parallelism."""
    shares = layout_of(run.tensor) == "sequence"
    return run.mesh.feature_parts if shares else 1
