"""Held-out loss and what the task is judged by, over all ranks and all held-out samples."""

from __future__ import annotations

import time

from ranvier.data.task import Prepared
from ranvier.models.block import State
from ranvier.train.events import EvalEvent
from ranvier.train.formation import Formation


def evaluate(formation: Formation, data: Prepared, step: int) -> EvalEvent:
    """One evaluation, the same samples each time, without dropout. Collective; the same on every rank."""
    began, engine, loader = time.monotonic(), formation.engine, formation.eval_data
    scoring = data.scoring() if data.scoring is not None and engine.is_last_stage else None
    total = weight = 0.0
    for number in range(-(-loader.total // loader.global_size)):
        batch = loader.microbatches(number)

        def observe(place: int, output: State, batch=batch) -> None:
            scoring.add(output, batch[place].targets, batch[place].samples)

        result = engine.evaluate(batch, observe if scoring is not None else None)
        if result.weight:
            total, weight = total + result.loss * result.weight, weight + result.weight
    scores = {}
    if data.scoring is not None:
        # of the columns of a row, which have the same outputs, the first counts
        counts = scoring is not None and engine.coordinates.col == 0
        parts = formation.ranks.gather_objects(scoring.part() if counts else None)
        scores = data.scoring().total([part for part in parts if part is not None])
    return EvalEvent(step=step, loss=total / weight if weight else float("nan"), tokens=weight,
                     seconds=time.monotonic() - began, scores=scores)
