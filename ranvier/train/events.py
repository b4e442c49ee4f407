"""The events of a run: one stream, read by files, pictures, the console and users' trackers.

Only rank 0 has trackers. Events arrive in order: one StartEvent, then steps, evaluations and notes as they become known
(a step's numbers are known one step later), then one EndEvent; a run that fails has no EndEvent.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ranvier.data.task import metric_name
from ranvier.elastic.freezing import FrozenLayers, layers_text
from ranvier.mesh import Mesh


@dataclass(frozen=True, kw_only=True)
class StartEvent:
    """The run is about to take its first step.

    settings: what a reader wants to know of the run, in words ("policy": "message-driven"), `auto` resolved.
    stages: the table of stages, several lines of text.
    """

    recipe: str
    run_dir: Path
    mesh: Mesh
    steps: int
    settings: Mapping[str, str]
    stages: str
    unit: str = "tokens"
    """Unit of valid targets: tokens, sentences, questions, images."""


@dataclass(frozen=True, kw_only=True)
class StepEvent:
    """One optimizer step. Means over ranks are over all ranks of the mesh."""

    step: int
    """Number of the step, from 1."""
    loss: float
    """Sum over the valid targets of the global batch, divided by their weight; NaN if that weight is zero."""
    tokens: float
    """Valid targets of the global batch."""
    step_seconds: float
    """Seconds from the end of the previous step to the end of this one, with data loading; mean over ranks."""
    wait_seconds: float
    """Seconds of the step spent waiting (timeline spans of category wait); mean over ranks."""
    bubble_fraction: float
    """Waited share of the step: wait over step seconds of each rank, mean over ranks. Waits for other stages count;
    those within sums and gathers of replicas, rows and columns do not."""
    grad_norm: float
    """L2 norm of the gradient of the loss, all parameters together."""
    learning_rate: float
    flops_per_second: float
    """FLOPs of the step's matrix products on the whole mesh, without recomputation, over step_seconds."""
    model_flops_utilisation: float
    """MFU: flops_per_second over the published peak rate of the ranks' devices; without such a rate, as on CPUs, over
    what the ranks reach together in bare matrix products, measured at the start."""
    against_published_peak: bool = False
    """Whether model_flops_utilisation is relative to the published peak rather than to the measured one."""
    num_ranks: int = 1
    """Number of ranks of the mesh."""
    memory_bytes: int = 0
    """Peak memory of a rank so far: on CUDA what its allocator has reserved, elsewhere the process's
    resident memory. The largest over the ranks."""
    slowest_replica: int | None = None
    """The replica (index along `data`) that computes longest: if all have the same number of samples of the same
    length, the replica on the slowest machine. None if there is only one replica."""
    slowest_replica_ratio: float | None = None
    """The slowest replica's seconds of work (forwards, backwards, weight gradients and loading data, without waits) in
    its slowest stage, over the median of the other replicas."""
    stepped: bool = True
    """False when the global batch had no valid target, a gradient overflowed in fp16, or the step was bad: nothing was
    updated."""
    loss_scale: float | None = None
    """fp16 only: the factor on the loss for the next step."""
    skipped_steps: int | None = None
    """fp16 only: steps skipped for an overflow so far."""
    eval_loss: float | None = None
    """Held-out loss after this step, if it was evaluated."""
    eval_scores: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the task after this step: "eval_accuracy", "eval_count" (samples), ..., and all metrics of named
    evaluation sets: "eval_NAME_loss", ..."""
    frozen_layers: int | None = None
    """Number of layers that did not train in this step; None while all train on the run's first mesh and none may
    freeze."""
    mesh: Mesh | None = None
    """Mesh on which the step was taken; None with `frozen_layers`."""
    checkpoint_stall_seconds: float | None = None
    """Part of step_seconds that rank 0 waited for a checkpoint begun in this step."""

    @property
    def tokens_per_second(self) -> float:
        """Valid targets of the whole mesh per second."""
        return self.tokens / self.step_seconds


@dataclass(frozen=True, kw_only=True)
class EvalEvent:
    """An evaluation on held-out data after `step`; seconds are wall time, outside any step. name: the evaluation set
    (`data.eval_sets`); empty for the run's own held-out data."""

    step: int
    loss: float
    tokens: float
    seconds: float
    scores: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the task: "eval_accuracy", "eval_count", ..."""
    name: str = ""

    def metrics(self) -> dict[str, float]:
        """Loss and scores under their names in metrics.jsonl: eval_loss, or eval_NAME_loss for a named set."""
        return {metric_name(self.name, metric): value
                for metric, value in {"eval_loss": self.loss, **self.scores}.items()}


@dataclass(frozen=True, kw_only=True)
class TransitionEvent:
    """The run has moved to another mesh, or layers were frozen, between `step` and the next."""

    step: int
    old_mesh: Mesh
    mesh: Mesh
    old_frozen: FrozenLayers
    frozen: FrozenLayers
    bytes_moved: int
    """Bytes that moved between ranks, over all ranks."""
    seconds: float
    """Seconds from the decision until training resumed."""
    began_ns: int
    """Start on rank 0's monotonic clock."""
    cache: bool
    """Whether rank 0 keeps the outputs of frozen layers from now on."""
    reason: str
    global_size: int
    microbatch_size: int
    stages: str
    request_id: str | None = None
    """The ID of the resize request that the transition fulfils."""

    def __str__(self) -> str:
        parts = []
        for did, layers in (("froze", self.frozen.layers - self.old_frozen.layers),
                            ("unfroze", self.old_frozen.layers - self.frozen.layers)):
            parts += [f"{did} {layers_text(layers)}"] if layers else []
        changed = [f"{axis} {self.old_mesh[axis]} -> {self.mesh[axis]}" for axis in sorted(
            self.old_mesh.changed_axes(self.mesh), key=lambda axis: axis not in self.mesh.over(orders_stages=True))]
        parts += [", ".join(changed)] if changed else []
        parts.append(f"moved {self.bytes_moved / 1e6:,.1f} MB in {self.seconds:.1f} s")
        parts += ["cache on"] if self.cache else []
        return "; ".join(parts) + f" ({self.reason})"


@dataclass(frozen=True, kw_only=True)
class NoteEvent:
    """An occasional occurrence: `event` is its short name, `text` one line for people."""

    step: int
    event: str
    text: str
    fields: Mapping[str, object] = field(default_factory=dict)
    """JSON-serialisable details, for machines."""
    verbose: bool = False
    """Whether the console prints it only with --verbose; files always have it."""


@dataclass(frozen=True, kw_only=True)
class EndEvent:
    """The run is done and its files are written.

    summary: the contents of summary.json. sample: text from the model, or None. sample_note: what to expect of it,
    one sentence. pictures: files worth opening. report: predicted and measured memory as a table, where the run asks
    for it.
    """

    step: int
    summary: Mapping[str, Any]
    sample: str | None = None
    sample_note: str | None = None
    pictures: Sequence[Path] = ()
    report: str | None = None


Event = StartEvent | StepEvent | EvalEvent | NoteEvent | TransitionEvent | EndEvent


class Tracker(Protocol):
    """Receives a run's events, on rank 0. An exception from it becomes a warning and never ends the run; it still
    receives further events."""

    def event(self, event: Event) -> None:
        """Receive one event. Called between steps: its duration is added to the step's time."""

    def close(self) -> None:
        """Called once, after the last event, whether or not the run succeeded."""


class Trackers:
    """Several trackers as one: each event goes to all, in order."""

    def __init__(self, trackers: Sequence[Tracker] = ()) -> None:
        self._trackers = tuple(trackers)
        self._failed: set[int] = set()

    def event(self, event: Event) -> None:
        """Hand the event to each tracker. The first exception of each becomes a warning, and the run continues."""
        self._call_each(lambda tracker: tracker.event(event),
                        "the start" if isinstance(event, StartEvent) else f"step {event.step}")

    def close(self) -> None:
        """Close all trackers; exceptions become warnings, as in `event`."""
        self._call_each(lambda tracker: tracker.close(), "the end of the run")

    def _call_each(self, call: Callable[[Tracker], None], when: str) -> None:
        for number, tracker in enumerate(self._trackers):
            try:
                call(tracker)
            except Exception as error:
                if number not in self._failed:
                    self._failed.add(number)
                    warnings.warn(f"{type(tracker).__name__} has failed at {when}; the run continues without its "
                                  f"output: {type(error).__name__}: {error}", stacklevel=3)
