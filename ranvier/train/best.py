"""The best evaluation so far, by one metric, and early stopping once the metric has stopped improving.

Every rank counts with the same numbers, those of rank 0. The counts are saved in checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ranvier.config.run import Run
from ranvier.data.task import Prepared, metric_name
from ranvier.errors import ConfigError, counted

LOSS = "eval_loss"


class BestEvaluation:
    """Losses are minimised, all other metrics maximised. NaN is never better.

    metric: name as in metrics.jsonl. patience: training stops after this many evaluations without an improvement of
    more than `delta`; 0 for never.
    """

    def __init__(self, metric: str, *, patience: int = 0, delta: float = 0.0) -> None:
        self.metric, self._patience, self._delta = metric, patience, delta
        self._sign = 1.0 if metric.endswith("loss") else -1.0
        self.value: float | None = None
        """The best value so far; None before the first number."""
        self.step: int | None = None
        """The step after which the best value was measured."""
        self._reference: float | None = None  # the last value that improved by more than delta
        self._since = 0  # evaluations since then

    def add(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Count an evaluation; returns whether it is the best so far. ConfigError if it lacks the metric."""
        if self.metric not in metrics:
            raise _unknown_metric_error(self.metric, sorted(metrics))
        value = metrics[self.metric]
        found = self._sign * (math.inf * self._sign if math.isnan(value) else value)
        self._since += 1
        if found < math.inf and (self._reference is None or found < self._sign * self._reference - self._delta):
            self._reference, self._since = value, 0
        if found < math.inf and (self.value is None or found < self._sign * self.value):
            self.value, self.step = value, step
            return True
        return False

    @property
    def should_stop(self) -> bool:
        """Whether training should stop."""
        return bool(self._patience) and self._since >= self._patience

    @property
    def reason(self) -> str:
        """Why training stops, in words."""
        best = "" if self.value is None else f"; the best is {self.value:.6g}, after step {self.step}"
        least = f" by more than {self._delta:g}" if self._delta else ""
        return f"early stopping: {self.metric} has not improved{least} in {counted(self._since, 'evaluation')}{best}"

    def summary(self) -> dict[str, object]:
        """The best evaluation's part of the run's summary."""
        return {"best_metric": self.metric, "best_value": self.value, "best_step": self.step,
                **({"ended_by": self.reason} if self.should_stop else {})}

    def state(self) -> dict[str, object]:
        """State for a checkpoint; JSON-serialisable."""
        return {"metric": self.metric, "value": self.value, "step": self.step, "reference": self._reference,
                "since": self._since}

    def load(self, state: Mapping[str, Any], *, is_own: bool = True) -> None:
        """The inverse of `state`; a state of another metric is ignored. is_own: whether the state is this run's; from
        another run only the patience count is kept, since its best checkpoint is elsewhere."""
        if state.get("metric") == self.metric:
            if is_own:
                self.value, self.step = state["value"], state["step"]
            self._reference, self._since = state["reference"], int(state["since"])


def best_of(run: Run, data: Prepared) -> BestEvaluation | None:
    """The record of the metric that a run watches; None if it watches none. ConfigError if its evaluations lack the
    metric."""
    if run.checkpoint.best is None and not run.train.early_stopping:
        return None
    metric, known = run.checkpoint.best or LOSS, metrics_of(data)
    if known is not None and metric not in known:
        raise _unknown_metric_error(metric, known)
    return BestEvaluation(metric, patience=run.train.early_stopping, delta=run.train.early_stopping_delta)


def metrics_of(data: Prepared) -> list[str] | None:
    """Names of the metrics of an evaluation; None if a user's scoring does not name them before it has seen samples."""
    found = []
    for name, scoring in (("", data.scoring), *((name, eval_set.scoring) for name, eval_set in data.eval_sets.items())):
        try:
            scores = {} if scoring is None else scoring().total([])
        except Exception:  # any error of a user's scoring that is called without samples
            return None
        found += [metric_name(name, metric) for metric in ("eval_loss", *scores)]
    return found


def _unknown_metric_error(metric: str, known: Sequence[str]) -> ConfigError:
    return ConfigError("is not a metric of this run's evaluations", code="unknown-metric", where="checkpoint.best",
                       value=metric, remedy=f"Name one of these: {', '.join(known)}.")
