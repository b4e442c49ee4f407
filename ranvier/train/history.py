"""History of a run's events for the summary and the pictures, including those before it resumed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from ranvier.mesh import REQUIRED_AXES, Mesh
from ranvier.train.events import EvalEvent, Event, StartEvent, StepEvent, TransitionEvent
from ranvier.train.logs import step_fields


class History:
    """A tracker that keeps a few numbers of each step."""

    def __init__(self) -> None:
        self.steps: list[Mapping[str, Any]] = []
        """Lines of metrics.jsonl; after a rollback a step has several."""
        self.eval_losses: dict[int, float] = {}
        """Step -> held-out loss, for steps with an evaluation; likewise `accuracies`."""
        self.accuracies: dict[int, float] = {}
        self.scores: dict[str, float] = {}
        """Metrics of the last evaluation: eval_accuracy, eval_count, ..."""
        self.frozen: dict[int, int] = {}
        """Step -> layers that are frozen from the next step on."""
        self.meshes: dict[int, tuple[int, int]] = {}
        """Step -> (stages, replicas) from the next step on."""
        self.transitions: list[TransitionEvent] = []
        self.past_events: Sequence[Mapping[str, Any]] = ()
        """Lines of events.jsonl from before the run resumed, including those after the step from which it resumed."""
        self.unit = "tokens"

    @property
    def losses(self) -> dict[int, float]:
        """Step -> training loss."""
        return {line["step"]: math.nan if line.get("loss") is None else line["loss"] for line in self.steps}

    def values(self, name: str) -> list[float]:
        """The values of a field in all steps that have it, in chronological order."""
        return [line[name] for line in self.steps if line.get(name) is not None]

    def column(self, name: str) -> dict[int, float]:
        """Step -> value of a field, for the steps that have it."""
        return {line["step"]: line[name] for line in self.steps if line.get(name) is not None}

    def on_this_mesh(self, name: str) -> list[float]:
        """`values` of the steps since the mesh last changed; of all steps if none has been taken since."""
        meshes, since = sorted(self.meshes.items()), 0
        for (_, before), (step, mesh) in pairwise(meshes):
            since = step if mesh != before else since
        return [line[name] for line in self.steps if line["step"] > since and line.get(name) is not None
                ] or self.values(name)

    def remember(self, steps: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]] = ()) -> None:
        """Add the steps and events from before the run resumed, as read from its logs."""
        self.steps += steps
        self.eval_losses |= self.column("eval_loss")
        self.accuracies |= self.column("eval_accuracy")
        reached = 0  # a resumed run has another start event; its step is that of the events before it
        for line in events:
            mesh, reached = line.get("mesh"), max(reached, line["step"])
            if line.get("event") in ("start", "transition") and isinstance(mesh, dict):
                frozen = int(line.get("frozen_layers", self.frozen[max(self.frozen)] if self.frozen else 0))
                self._record(reached, frozen, Mesh(**{axis: mesh[axis] for axis in REQUIRED_AXES}))

    def event(self, event: Event) -> None:
        """Add one event."""
        match event:
            case StartEvent():
                self.unit = event.unit
                last = max(self.meshes, default=0)
                if not self.meshes:
                    self._record(0, 0, event.mesh)
                elif self.meshes[last] != (event.mesh.pipeline_size, event.mesh.num_replicas):  # on another mesh
                    self._record(max(last, *self.losses, 0), self.frozen[last], event.mesh)
            case StepEvent():
                self.steps.append(step_fields(event))
            case EvalEvent() if event.name:
                self.scores |= event.metrics()
            case EvalEvent():
                self.eval_losses[event.step], self.scores = event.loss, dict(event.scores)
                if "eval_accuracy" in event.scores:
                    self.accuracies[event.step] = event.scores["eval_accuracy"]
            case TransitionEvent():
                self.transitions.append(event)
                self._record(event.step, len(event.frozen), event.mesh)

    def _record(self, step: int, frozen: int, mesh: Mesh) -> None:
        """Record frozen layers and mesh from `step` on. A start that changes neither leaves no mark."""
        now, last = (mesh.pipeline_size, mesh.num_replicas), max(self.meshes, default=0)
        if (self.meshes.get(last), self.frozen.get(last)) != (now, frozen):
            self.frozen[step], self.meshes[step] = frozen, now

    def close(self) -> None:
        """Does nothing: no file is open."""
