"""What an elastic run remembers between decisions, and its form in checkpoints. Pure.

    policy evaluations    how many there were, whether one is due, and what the next one is given
    transitions           the ledger, refused meshes, measured numbers of microbatches
    measured times        of the newest steps and of the trial under way

Rank 0 decides (`ranvier.elastic.controller`), and the state goes to all ranks with the decision.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from math import inf, isfinite, nan
from statistics import median
from typing import Any

from ranvier.elastic.ledger import Ledger
from ranvier.elastic.microbatch_profile import TRIAL_STEPS, MicrobatchProfile

RECENT_STEPS = 8
"""Steps whose median says how long one takes now."""

Similarities = list[list[list[list[float]]]]
"""Of each layer and each row of the mesh: [samples, samples] (`ranvier.elastic.similarity`)."""


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """The numbers of one step that a freeze policy may ask for."""

    loss: float = nan
    targets: float = 0.0
    """Valid targets of the global batch, by weight."""
    learning_rate: float = nan
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of the evaluation after the step; empty without one."""


@dataclass(frozen=True, kw_only=True)
class PolicyInputs:
    """What the next evaluation of the freeze policy is given of the steps since the last one."""

    loss: float = 0.0
    """Sum over the valid targets of these steps."""
    targets: float = 0.0
    """Their weight."""
    learning_rate: float = nan
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of the newest evaluation on held-out data."""
    similarities: Similarities | None = None
    """Of each layer's outputs at the last evaluation of the policy."""

    def with_step(self, step: StepFigures) -> PolicyInputs:
        """The inputs after one more step."""
        counts = bool(step.targets) and isfinite(step.loss)
        return replace(self, loss=self.loss + (step.loss * step.targets if counts else 0.0),
                       targets=self.targets + (step.targets if counts else 0.0),
                       learning_rate=step.learning_rate, metrics=step.metrics or self.metrics)


@dataclass(frozen=True, kw_only=True)
class MicrobatchTrial:
    """A number of microbatches that is being tried for a few steps, of which the first warms up."""

    pipe: int
    data: int
    frozen: int
    count: int
    steps: tuple[int, ...] = ()
    """Those that have been started with it."""
    seconds: tuple[float, ...] = ()
    """Of those that have been measured."""

    @property
    def is_over(self) -> bool:
        """Whether enough steps have been measured."""
        return len(self.seconds) == TRIAL_STEPS


@dataclass(frozen=True, kw_only=True)
class ElasticState:
    """The state of `ranvier.elastic.controller.Controller`, whose methods return a new one."""

    evaluations: int = 0
    """Of the freeze policy, so far."""
    due: bool = False
    """Whether the policy is to be evaluated: the step after which it was due may have had no gradients."""
    norms: tuple[float, ...] | None = None
    """Of the layers' gradients in the last step, where the policy is evaluated after it."""
    inputs: PolicyInputs = field(default_factory=PolicyInputs)
    policy: Mapping[str, Any] | None = None
    """The policy's own state, where it has one."""
    kept: int = 0
    """Layers that stay frozen on this mesh, for want of memory to train them."""
    compares: bool = False
    """Whether meshes are to be compared without an evaluation of the policy."""
    unmeasured: bool = False
    """Whether the present mesh was chosen before a step was measured."""
    recent: tuple[float, ...] = ()
    """Seconds of the newest steps on this mesh, at most `RECENT_STEPS`."""
    ledger: Ledger = field(default_factory=Ledger)
    refused: frozenset[tuple[int, int, int]] = frozenset()
    """(data, pipe, frozen layers) of meshes that did not fit or did not pay, at the depth of the last refusal."""
    profile: MicrobatchProfile = field(default_factory=MicrobatchProfile)
    trial: MicrobatchTrial | None = None
    reported: frozenset[tuple[int, int]] = frozenset()
    """(pipe, data) whose best number of microbatches has been reported."""

    @property
    def asked(self) -> bool:
        """Whether there is something to decide."""
        return self.norms is not None or self.compares

    @property
    def seconds(self) -> float | None:
        """Of a step on this mesh; None before one was measured."""
        return median(self.recent) if self.recent else None

    def document(self) -> dict[str, object]:
        """What checkpoints and other ranks get; JSON holds it exactly."""
        inputs = self.inputs
        return {"evaluations": self.evaluations, "due": self.due, "unmeasured": self.unmeasured,
                "norms": self.norms and [_saved(norm) for norm in self.norms],
                "ledger": self.ledger.to_dict(), "profile": self.profile.to_dict(), "kept": self.kept,
                "progress": {"loss": _saved(inputs.loss), "targets": _saved(inputs.targets),
                             "learning_rate": _saved(inputs.learning_rate),
                             "metrics": {name: _saved(value) for name, value in inputs.metrics.items()},
                             "similarities": inputs.similarities},
                "policy": self.policy, "refused": [list(mesh) for mesh in sorted(self.refused)],
                "compares": self.compares, "recent": list(self.recent),
                "trial": self.trial and asdict(self.trial), "reported": [list(mesh) for mesh in sorted(self.reported)]}

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> ElasticState:
        """The inverse of `document`. Older checkpoints lack some entries, and have None for what is no number."""
        norms, inputs, trial = document["norms"], document.get("progress"), document.get("trial")
        return cls(
            evaluations=int(document["evaluations"]), due=bool(document["due"]),
            unmeasured=bool(document.get("unmeasured")), kept=int(document.get("kept", 0)),
            norms=None if norms is None else tuple(_read(norm, inf) for norm in norms),
            ledger=Ledger.from_dict(document["ledger"]), profile=MicrobatchProfile.from_dict(document["profile"]),
            inputs=PolicyInputs() if inputs is None else PolicyInputs(
                loss=_read(inputs["loss"]), targets=_read(inputs["targets"]),
                learning_rate=_read(inputs["learning_rate"]),
                metrics={name: _read(value) for name, value in inputs["metrics"].items()},
                similarities=inputs["similarities"]),
            policy=document.get("policy"), compares=bool(document.get("compares")),
            refused=frozenset((data, pipe, frozen) for data, pipe, frozen in document.get("refused", ())),
            recent=tuple(document.get("recent", ())),
            trial=None if trial is None else MicrobatchTrial(
                **{**trial, "steps": tuple(trial["steps"]), "seconds": tuple(trial["seconds"])}),
            reported=frozenset((pipe, data) for pipe, data in document.get("reported", ())))


def _saved(value: float) -> float | str:
    """JSON has no NaN and no infinity."""
    return value if isfinite(value) else repr(value)


def _read(value: float | str | None, missing: float = nan) -> float:
    return missing if value is None else nan if value == "nan" else float(value)
