"""course.png: how a run transformed itself, from its first step to its last.

Frozen layers, stages and replicas, speed, and what the task is judged by, one above the other over the same steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ranvier.figures import COLOURS, FAINT, INK, clean, new_figure
from ranvier.mesh import Mesh
from ranvier.train.events import EvalEvent, Event, StartEvent, StepEvent, TransitionEvent
from ranvier.train.files import writing
from ranvier.train.pictures import smoothed


class Course:
    """What the picture needs of the stream of events."""

    def __init__(self) -> None:
        self.speeds: dict[int, float] = {}
        """Step -> valid targets a second."""
        self.scores: dict[int, float] = {}
        """Step -> accuracy, where it was evaluated."""
        self.frozen: dict[int, int] = {}
        """Step -> layers that are frozen from the next step on."""
        self.meshes: dict[int, tuple[int, int]] = {}
        """Step -> (stages, replicas) from the next step on."""
        self.unit = "tokens"

    @property
    def is_elastic(self) -> bool:
        """Whether anything has changed."""
        return len(self.meshes) > 1

    def remember(self, steps: Sequence[Mapping[str, object]], events: Sequence[Mapping[str, object]]) -> None:
        """The run before it went on, by its own files."""
        for line in steps:
            if line.get("tokens_per_second") is not None:
                self.speeds[line["step"]] = line["tokens_per_second"]
            if line.get("eval_accuracy") is not None:
                self.scores[line["step"]] = line["eval_accuracy"]
        for line in events:
            mesh = line.get("mesh")
            if line.get("event") in ("start", "transition") and isinstance(mesh, dict):
                self._at(line["step"], int(line.get("frozen_layers", 0)), (mesh["pipe"], mesh["data"]))

    def event(self, event: Event) -> None:
        match event:
            case StartEvent():
                self.unit = event.unit
                if not self.meshes:
                    self._at(0, 0, _sizes(event.mesh))
            case TransitionEvent():
                self._at(event.step, event.frozen_layers, _sizes(event.mesh))
            case StepEvent():
                self.speeds[event.step] = event.tokens_per_second
            case EvalEvent() if "eval_accuracy" in event.scores:
                self.scores[event.step] = event.scores["eval_accuracy"]

    def _at(self, step: int, frozen: int, mesh: tuple[int, int]) -> None:
        self.frozen[step], self.meshes[step] = frozen, mesh


def _sizes(mesh: Mesh) -> tuple[int, int]:
    return mesh.pipe, mesh.data


def draw_course(path: Path, course: Course, title: str) -> None:
    """Draw `course`. RanvierError when the file cannot be written."""
    last = max(course.speeds, default=1)
    figure = new_figure(10, 8.5 if course.scores else 7)
    panels = figure.subplots(4 if course.scores else 3, 1, sharex=True)
    for axes in panels:
        clean(axes)
        axes.grid(axis="y", color="#E6E6E6", linewidth=0.8)
        axes.set_axisbelow(True)
        for step in list(course.meshes)[1:]:
            axes.axvline(step + 0.5, color=FAINT, linewidth=0.8, linestyle=":")
    _stairs(panels[0], course.frozen, last, COLOURS["forward"], "")
    panels[0].set_ylabel("frozen layers", fontsize=10, color=INK)
    _stairs(panels[1], {step: mesh[0] for step, mesh in course.meshes.items()}, last, COLOURS["forward"], "stages")
    _stairs(panels[1], {step: mesh[1] for step, mesh in course.meshes.items()}, last, COLOURS["backward"], "replicas")
    panels[1].set_ylabel("mesh", fontsize=10, color=INK)
    panels[1].legend(frameon=False, fontsize=9, ncols=2)
    for axes in panels[:2]:
        axes.set_ylim(bottom=0)
        axes.yaxis.get_major_locator().set_params(integer=True)
    steps, speeds = list(course.speeds), list(course.speeds.values())
    panels[2].plot(steps, speeds, color=COLOURS["weight"], linewidth=0.9, label="each step")
    window = max(5, len(steps) // 25)
    panels[2].plot(steps, smoothed(speeds, window), color=COLOURS["forward"], linewidth=2,
                   label=f"mean of {2 * (window // 2) + 1}")
    panels[2].set_ylabel(f"{course.unit} per second", fontsize=10, color=INK)
    panels[2].set_ylim(bottom=0)
    panels[2].legend(frameon=False, fontsize=9, ncols=2)
    if course.scores:
        panels[3].plot(list(course.scores), [100 * score for score in course.scores.values()], marker="o", markersize=5,
                       linewidth=1.5, color=COLOURS["optimizer"], markeredgecolor="white")
        panels[3].set_ylabel("accuracy in %, held-out", fontsize=10, color=INK)
    panels[-1].set_xlabel("step", fontsize=10, color=INK)
    panels[0].set_title(f"{title}: how the run transformed itself", fontsize=12, color=INK, loc="left")
    panels[0].margins(x=0.02)
    with writing(path):
        figure.savefig(path)


def _stairs(axes, values: Mapping[int, int], last: int, colour: str, label: str) -> None:
    """A value that holds from each step until the next."""
    steps = list(values)
    axes.step([*steps, last], [*values.values(), values[steps[-1]]], where="post", color=colour, linewidth=2,
              label=label or None)
