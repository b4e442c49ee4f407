"""Trackers for Weights & Biases, MLflow and Aim.

Each is a separate package, which is imported if a run names it (`log.tracker`). They get the curves that TensorBoard
gets, and the settings of the run. Their own environment variables apply (WANDB_API_KEY and others).
"""

from __future__ import annotations

import math
import secrets
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ranvier.config.run import Log
from ranvier.config.urls import has_user_information, without_user_information
from ranvier.errors import ConfigError
from ranvier.system.atomic_file import write_atomically
from ranvier.system.untrusted_file import read_bytes
from ranvier.train.events import EndEvent, EvalEvent, Event, StartEvent, StepEvent, Tracker, TransitionEvent
from ranvier.train.trackers import scalars


def tracker_problems(log: Log) -> Iterator[ConfigError]:
    """Errors for trackers whose package is not installed, and for user information in the URL of their server."""
    if has_user_information(log.store):
        yield ConfigError("has user information in a URL", code="password-in-log-store", where="log.store",
                          value=without_user_information(log.store),
                          remedy="Set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD instead.")
    for name in log.tracker:
        if find_spec(name) is None:
            yield ConfigError(f"needs the package {name}, which is not installed", code="tracker-missing",
                              where="log.tracker", value=name,
                              remedy=f"Install the extra: pip install 'ranvier[{name}]'.")


def experiment_trackers(log: Log, run_dir: Path, *, continues: bool) -> list[Tracker]:
    """The trackers that a run names. continues: whether the run resumes in its folder, and continues its curves.
    ConfigError for a missing package."""
    for problem in tracker_problems(log):
        raise problem
    kinds: dict[str, Callable[..., Tracker]] = {"wandb": WeightsAndBiases, "mlflow": MLflow, "aim": Aim}
    return [kinds[name](log, run_dir, continues=continues) for name in log.tracker]


class _ExperimentTracker(ABC):
    """Base of all three. A failure after the start ends tracking but not the run: a server may be unreachable.

    The tracker's ID of the run, by which a resumed run finds its curves, is in a file in the run's folder.
    """

    kind: str
    """Name in `log.tracker`, of the package, and of the extra."""

    def __init__(self, log: Log, run_dir: Path, *, continues: bool = False) -> None:
        self._log, self._run_dir, self._continues = log, run_dir, continues
        self._package: Any = import_module(self.kind)
        self._is_open = self._has_failed = self._is_done = False
        self._run: Any = None  # the package's run object; from `_open` on
        self._client: Any = None  # the package's client, if it has one

    def event(self, event: Event) -> None:
        """Track a step, an evaluation, a transition, the settings at the start and the summary at the end."""
        try:
            match event:
                case StartEvent():
                    self._open(event, self._id() if self._continues else None)
                    self._is_open = True
                case StepEvent() | EvalEvent() | TransitionEvent() if self._is_open:
                    values = {name: value for name, value in scalars(event).items() if math.isfinite(value)}
                    self._track(values, event.step)
                case EndEvent() if self._is_open:
                    self._end({name: value for name, value in {**event.summary, "sample": event.sample or None}.items()
                               if isinstance(value, (int, float, str))})
                    self._is_done = True
        except Exception as error:
            self._fail(error)

    def close(self) -> None:
        """End the tracked run, as finished if the run has ended, else as failed."""
        if self._is_open:
            try:
                self._close(is_done=self._is_done)
            except Exception as error:
                self._fail(error)
        self._is_open = False

    def _fail(self, error: Exception) -> None:
        if not self._has_failed:
            warnings.warn(f"{self.kind} tracks this run no more: {type(error).__name__}: {error}", stacklevel=3)
        self._has_failed, self._is_open = True, False

    @property
    def _file(self) -> Path:
        return self._run_dir / f"{self.kind}.id"

    def _id(self) -> str | None:
        with suppress(OSError, ValueError):
            return read_bytes(self._file, 1000).decode().strip() or None
        return None

    def _remember(self, identifier: str) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._file, identifier + "\n")

    def _settings(self, event: StartEvent) -> dict[str, str]:
        return {"recipe": event.recipe, "mesh": str(event.mesh), "steps": str(event.steps), **event.settings}

    @abstractmethod
    def _open(self, event: StartEvent, identifier: str | None) -> None:
        """Begin a tracked run, or continue the one with this ID."""

    @abstractmethod
    def _track(self, values: Mapping[str, float], step: int) -> None:
        """Track finite numbers."""

    @abstractmethod
    def _end(self, summary: Mapping[str, float | str]) -> None:
        """Track the summary of the run, with its sample text."""

    @abstractmethod
    def _close(self, *, is_done: bool) -> None:
        """End the tracked run."""


class WeightsAndBiases(_ExperimentTracker):
    """A run of Weights & Biases. Its files are in the run's folder; with `log.offline` they stay there, until
    `wandb sync`."""

    kind = "wandb"

    def _open(self, event: StartEvent, identifier: str | None) -> None:
        identifier = identifier or secrets.token_hex(4)
        self._run_dir.mkdir(parents=True, exist_ok=True)
        self._run = self._package.init(
            project=self._log.project, name=event.run_dir.name, id=identifier, resume="allow", dir=str(self._run_dir),
            config=self._settings(event), mode="offline" if self._log.offline else None, reinit="create_new")
        self._remember(identifier)
        # a rollback returns to earlier steps, which W&B's own step counter cannot
        self._run.define_metric("*", step_metric="step")

    def _track(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({**values, "step": step})

    def _end(self, summary: Mapping[str, float | str]) -> None:
        self._run.summary.update(summary)

    def _close(self, *, is_done: bool) -> None:
        self._run.finish(exit_code=0 if is_done else 1)


class MLflow(_ExperimentTracker):
    """A run of MLflow, on the server or in the store that `log.store` names."""

    kind = "mlflow"

    def _open(self, event: StartEvent, identifier: str | None) -> None:
        self._client = self._package.MlflowClient(tracking_uri=self._log.store)
        if identifier is None:
            found = self._client.get_experiment_by_name(self._log.project)
            experiment = self._client.create_experiment(self._log.project) if found is None else found.experiment_id
            identifier = str(self._client.create_run(experiment, run_name=event.run_dir.name).info.run_id)
            for name, value in self._settings(event).items():
                self._client.log_param(identifier, name.replace(",", " "), value[:_MOST_CHARACTERS])
            self._remember(identifier)
        else:
            self._client.update_run(identifier, status="RUNNING")
        self._run = identifier

    def _track(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._client.log_metric(self._run, name, value, step=step, synchronous=True)

    def _end(self, summary: Mapping[str, float | str]) -> None:
        for name, value in summary.items():
            self._client.set_tag(self._run, name, str(value)[:_MOST_CHARACTERS])

    def _close(self, *, is_done: bool) -> None:
        self._client.set_terminated(self._run, status="FINISHED" if is_done else "FAILED")


_MOST_CHARACTERS = 500
"""Longest text in MLflow: older servers do not accept longer parameters."""


class Aim(_ExperimentTracker):
    """A run of Aim, in the repository that `log.store` names."""

    kind = "aim"

    def _open(self, event: StartEvent, identifier: str | None) -> None:
        self._run = self._package.Run(run_hash=identifier, repo=self._log.store, experiment=self._log.project)
        self._run.name = event.run_dir.name
        self._run["hparams"] = self._settings(event)
        self._remember(str(self._run.hash))

    def _track(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._run.track(value, name=name, step=step)

    def _end(self, summary: Mapping[str, float | str]) -> None:
        self._run["summary"] = dict(summary)

    def _close(self, *, is_done: bool) -> None:
        self._run["finished"] = is_done
        self._run.close()
