"""Progress of a run: samples, steps taken and left, learning rate, and when it evaluates and saves.

The length of a run and its learning rates are counted in steps of the initial global batch, so both stay at the same
position in the data when the global batch changes during the run. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ranvier.config.resolve import ResolvedRun
from ranvier.optim.learning_rate import learning_rate


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Progress of a run; immutable: methods that change it return a new object.

    run: as it was started. size: samples of the present global batch. since: (the step of the last change of size,
    samples consumed by then).
    """

    run: ResolvedRun
    size: int
    since: tuple[int, int] = (0, 0)

    @classmethod
    def begin(cls, run: ResolvedRun) -> Progress:
        """Progress at the start of a run, with the initial global batch."""
        return cls(run=run, size=run.batch.global_size)

    def samples(self, step: int) -> int:
        """Samples of the first `step` steps, without those that were skipped after a rollback."""
        since, samples = self.since
        return samples + (step - since) * self.size

    def steps_left(self, step: int) -> int:
        """Steps of the present global batch after `step`."""
        return max(0, -(-(self.run.samples_of(self.run.train.steps) - self.samples(step)) // self.size))

    def learning_rate(self, step: int) -> float:
        """The learning rate of `step`: the schedule's at the same position in the data; with elastic.global-batch
        "scale", in proportion to the global batch."""
        run, first = self.run, self.run.batch.global_size
        rate = learning_rate(run.train, min(self.samples(step) / first, run.train.steps))
        return rate * self.size / first if run.elastic.global_batch == "scale" else rate

    def evaluates(self, step: int) -> bool:
        """Whether held-out data is evaluated after `step`."""
        every = self.run.train.eval_every
        return not self.steps_left(step) or bool(every and step % every == 0)

    def is_save_due(self, step: int) -> bool:
        """Whether a checkpoint is due after `step`."""
        every = self.run.checkpoint.every
        return not self.steps_left(step) or bool(every and step % every == 0)

    def with_size(self, step: int, size: int) -> Progress:
        """Progress in which the steps after `step` have global batches of `size` samples."""
        return self if size == self.size else replace(self, since=(step, self.samples(step)), size=size)

    def rolled_back(self, step: int, saved: Mapping[str, Any]) -> Progress:
        """Progress after a rollback to `step`, whose checkpoint has `saved`. The global batch stays; undone steps of
        another size no longer count."""
        if step >= self.since[0]:
            return self
        (since, samples), size = saved.get("since", (0, 0)), saved.get("global_size", self.run.batch.global_size)
        return replace(self, since=(step, samples + (step - since) * size))

    def state(self) -> dict[str, object]:
        """State for a checkpoint; JSON-serialisable."""
        return {"since": list(self.since), "size": self.size, "first_size": self.run.batch.global_size}

    def restore(self, saved: Mapping[str, Any]) -> Progress:
        """The inverse of `state`; a run that is started with another global batch uses it from the first step on."""
        if not saved:
            return self
        if saved["first_size"] != self.run.batch.global_size:
            return Progress.begin(self.run)
        since, samples = saved["since"]
        return replace(self, since=(int(since), int(samples)), size=int(saved["size"]))
