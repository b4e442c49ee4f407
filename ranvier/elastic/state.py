"""State of an elastic run between decisions, and its form in checkpoints. Pure.

    policy evaluations    how many there were, whether one is due, and the inputs of the next one
    transitions           the ledger, refused meshes, measured numbers of microbatches
    measured times        of the newest steps and of the trial in progress

Rank 0 decides (`ranvier.elastic.controller`), and the state goes to all ranks with the decision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from math import inf, isfinite, nan
from statistics import median
from typing import Any

from pydantic import TypeAdapter

from ranvier.elastic.ledger import Ledger
from ranvier.elastic.microbatch_profile import TRIAL_STEPS, MicrobatchProfile

RECENT_STEPS = 8
"""Number of newest steps whose median is the present time of a step."""

Similarities = list[list[list[list[float]]]]
"""Similarity matrix of each layer and each row of the mesh: [samples, samples] (`ranvier.elastic.similarity`)."""


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """The numbers of one step that a freeze policy may need."""

    loss: float = nan
    targets: float = 0.0
    """Valid targets of the global batch, by weight."""
    learning_rate: float = nan
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the evaluation after the step; empty without one."""


@dataclass(frozen=True, kw_only=True)
class PolicyInputs:
    """Input of the freeze policy's next evaluation, from the steps since the last one."""

    loss: float = 0.0
    """Sum over the valid targets of these steps."""
    targets: float = 0.0
    """Weight of these targets."""
    learning_rate: float = nan
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the newest evaluation on held-out data."""
    similarities: Similarities | None = None
    """Similarities of each layer's outputs at the last evaluation of the policy."""

    def with_step(self, step: StepFigures) -> PolicyInputs:
        """The inputs after one more step."""
        counts = bool(step.targets) and isfinite(step.loss)
        return replace(self, loss=self.loss + (step.loss * step.targets if counts else 0.0),
                       targets=self.targets + (step.targets if counts else 0.0),
                       learning_rate=step.learning_rate, metrics=step.metrics or self.metrics)


@dataclass(frozen=True, kw_only=True)
class MicrobatchTrial:
    """A number of microbatches that is being tried for a few steps, the first of which warms up."""

    pipe: int
    data: int
    frozen: int
    count: int
    steps: tuple[int, ...] = ()
    """Steps started with this number."""
    seconds: tuple[float, ...] = ()
    """Seconds of the measured steps."""


@dataclass(frozen=True, kw_only=True)
class ElasticState:
    """The state of `ranvier.elastic.controller.Controller`, whose methods return a new one."""

    evaluations: int = 0
    """Evaluations of the freeze policy so far."""
    due: bool = False
    """Whether the policy is to be evaluated: the step after which it was due may have had no gradients."""
    norms: tuple[float, ...] | None = None
    """Norms of the layers' gradients in the last step, if the policy is evaluated after it."""
    inputs: PolicyInputs = field(default_factory=PolicyInputs)
    policy: Mapping[str, Any] | None = None
    """The policy's own state, if it has one."""
    kept: int = 0
    """Number of layers that stay frozen on this mesh for lack of memory to train them."""
    schedule: Mapping[str, Any] | None = None
    """Schedule of the `Change` to the present mesh."""
    compares: bool = False
    """Whether meshes should be compared without an evaluation of the policy."""
    unmeasured: bool = False
    """Whether the present mesh was chosen before a step was measured."""
    recent: tuple[float, ...] = ()
    """Seconds of the newest steps on this mesh, at most `RECENT_STEPS`."""
    ledger: Ledger = field(default_factory=Ledger)
    refused: frozenset[tuple[int, int, int]] = frozenset()
    """(replicas, ranks of a pipeline, frozen layers) of meshes that did not fit or did not pay, at the depth of the
    last refusal."""
    profile: MicrobatchProfile = field(default_factory=MicrobatchProfile)
    trial: MicrobatchTrial | None = None
    reported: frozenset[tuple[int, int]] = frozenset()
    """(pipe, data) whose best number of microbatches has been reported."""

    @property
    def needs_decision(self) -> bool:
        """Whether there is something to decide."""
        return self.norms is not None or self.compares

    @property
    def seconds(self) -> float | None:
        """Seconds of a step on this mesh; None before one was measured."""
        return median(self.recent) if self.recent else None

    def with_gradients(self, norms: Sequence[float]) -> ElasticState:
        """The state with an evaluation due, after a step whose gradients have these norms by layer."""
        return replace(self, norms=tuple(norm if isfinite(norm) else inf for norm in norms))

    def with_step(self, step: int, seconds: float, figures: StepFigures) -> ElasticState:
        """The state with the numbers of one more step."""
        recent = (*self.recent, seconds)[-RECENT_STEPS:]
        state = replace(self, inputs=self.inputs.with_step(figures), recent=recent,
                        compares=self.compares or (self.unmeasured and len(recent) == RECENT_STEPS))
        trial = state.trial
        if trial is None or step not in trial.steps:
            return state
        trial = replace(trial, seconds=(*trial.seconds, seconds))
        if len(trial.seconds) < TRIAL_STEPS:
            return replace(state, trial=trial)
        return replace(state, trial=None, profile=state.profile.with_measurement(
            trial.pipe, trial.data, trial.frozen, trial.count, min(trial.seconds[1:])))

    def with_measured(self) -> ElasticState:
        """The state with the measured seconds of a step after the last transition."""
        entries = self.ledger.entries
        if self.recent and entries and entries[-1].measured_after is None:
            return replace(self, ledger=self.ledger.with_measured(after=self.seconds))
        return self

    def document(self) -> dict[str, object]:
        """The state for checkpoints and other ranks; JSON holds it exactly."""
        found: dict[str, object] = _as_json(asdict(self))
        return found

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> ElasticState:
        """The inverse of `document`. Older checkpoints lack some entries, name the inputs "progress", and have None for
        values that are not finite. pydantic's ValidationError for impossible values."""
        norms, inputs = document.get("norms"), document.get("inputs", document.get("progress")) or {}
        found = _FORM.validate_python({
            **{field.name: document[field.name] for field in fields(cls) if field.name in document},
            "norms": norms and [inf if norm is None else norm for norm in norms],
            "inputs": {name: value for name, value in inputs.items() if value is not None}})
        return found


_FORM = TypeAdapter(ElasticState)


def _as_json(value: Any) -> Any:
    """`value` with lists for tuples and sets, and strings for NaN and infinity, which JSON lacks; reading accepts
    both."""
    if isinstance(value, Mapping):
        return {name: _as_json(item) for name, item in value.items()}
    if isinstance(value, (tuple, list, frozenset)):
        return [_as_json(item) for item in (sorted(value) if isinstance(value, frozenset) else value)]
    return repr(value) if isinstance(value, float) and not isfinite(value) else value
