"""The end of a batch: from reduced gradients to new parameters, or to a step that everyone skips.

Where nothing may skip or shorten the step, a chunk is updated as soon as it is reduced, while the next one is still
under way:

    reduce   | 0 | 1 | 2 | 3 |
    update       | 0 | 1 | 2 | 3 |

Clipping needs the norm of everything, and an overflow anywhere skips the step everywhere. With either, all chunks are
reduced first, (norm, overflow) becomes one verdict over all ranks, and then the updates follow:

    reduce   | 0 | 1 | 2 | 3 |         | verdict |
    update   states of the first buckets come in | 0 | 1 | 2 | 3 |
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ranvier.comm.protocol import Group, Work
from ranvier.optim.gradients import Gradients
from ranvier.optim.loss_scale import LossScale
from ranvier.optim.optimizer import FlatOptimizer
from ranvier.pipeline.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is known of a batch's gradients, on every rank alike.

    squared_norm: [1] fp64, of the gradients of the mean loss, being summed over all ranks by `work`.
    factor: what turns the buffer's gradients into those of the mean loss.
    steps: whether parameters may be updated; overflow: whether a gradient was no finite number in fp16.
    """

    squared_norm: Tensor
    work: Work
    factor: float
    steps: bool
    overflow: bool = False

    @property
    def norm(self) -> float:
        self.work.wait()
        return float(self.squared_norm.sqrt())


class StepEnd:
    """Averages, judges and updates.

    Args:
        optimizer: ours; None where the user's own does the update, or nobody.
        ranks: a group of all ranks. counts: whether this rank's unscattered gradients enter the norm (replicas have
            equal ones, and one of them counts).
        clip_norm: 0 does not clip.
        progress: called between buckets, so that messages move.
    """

    def __init__(self, gradients: Gradients, optimizer: FlatOptimizer | None, ranks: Group, *, counts: bool,
                 clip_norm: float, loss_scale: LossScale | None, nominal_weight: float, timeline: Timeline,
                 progress: Callable[[], None]) -> None:
        self._gradients, self._optimizer, self._ranks, self._counts = gradients, optimizer, ranks, counts
        self._clip_norm, self._loss_scale, self._nominal_weight = clip_norm, loss_scale, nominal_weight
        self._timeline, self._progress = timeline, progress

    @property
    def waits_for_verdict(self) -> bool:
        """Whether a step may be skipped or shortened by what the gradients turn out to be."""
        return bool(self._clip_norm) or self._loss_scale is not None

    def _factor(self, weight: float) -> float:
        scale = self._loss_scale.scale if self._loss_scale is not None else 1.0
        return self._nominal_weight / (weight * scale) if weight else 0.0

    def judge(self, weight: float, step: int) -> Verdict:
        """Wait for the reduction of all chunks, and start (where the step depends on it: finish) the verdict."""
        if self._optimizer is not None:
            self._optimizer.prefetch()
        started = time.monotonic_ns()
        self._gradients.wait()
        started = self._timeline.add("reduce", "average", step, started)
        factor = self._factor(weight)
        squared = sum((self._gradients.squared_norm(chunk) for chunk in self._gradients.reduced()
                       if self._counts or self._gradients.scattered), torch.zeros(()))
        norm = torch.zeros(1, dtype=torch.float64)
        norm[0] = squared * factor**2
        work = self._ranks.all_reduce(norm)
        overflow = False
        if self._loss_scale is not None:
            work.wait()
            overflow = weight != 0.0 and not math.isfinite(float(norm))
            if weight:
                self._loss_scale.update(overflow)
        self._timeline.add("optimizer", "weigh", step, started)
        return Verdict(squared_norm=norm, work=work, factor=factor, steps=weight != 0.0 and not overflow,
                       overflow=overflow)

    def clip_factor(self, verdict: Verdict) -> float:
        """What clipping multiplies the gradients of the mean loss by; as torch.nn.utils.clip_grad_norm_."""
        return min(1.0, self._clip_norm / (verdict.norm + 1e-6)) if self._clip_norm else 1.0

    def update(self, factor: float, learning_rate: float, step: int) -> None:
        """Update all parameters from their reduced gradients times `factor`; after `judge`."""
        started = time.monotonic_ns()
        self._optimizer.begin(learning_rate)
        for chunk in self._gradients.reduced():
            for _ in self._optimizer.update(chunk, factor):
                self._progress()
        self._timeline.add("optimizer", "update", step, started)

    def update_as_reduced(self, weight: float, learning_rate: float, step: int) -> Verdict:
        """Update each chunk as soon as it is reduced; the norm is summed on the side."""
        assert not self.waits_for_verdict
        factor = self._factor(weight)
        squared = torch.zeros(())
        self._optimizer.prefetch()
        if weight:
            self._optimizer.begin(learning_rate)
        started = time.monotonic_ns()
        for number, chunk in enumerate(self._gradients.reduced()):
            started = self._timeline.add("reduce", f"average {number}", step, started)
            if self._counts or self._gradients.scattered:
                squared = squared + self._gradients.squared_norm(chunk)
            if weight:
                for _ in self._optimizer.update(chunk, factor):
                    self._progress()
            started = self._timeline.add("optimizer", f"update {number}", step, started)
        norm = torch.zeros(1, dtype=torch.float64)
        norm[0] = squared * factor**2
        return Verdict(squared_norm=norm, work=self._ranks.all_reduce(norm), factor=factor, steps=weight != 0.0)
