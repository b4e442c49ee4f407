"""The last training batch of all ranks, as a picture and as a page, for loops that do not end steps themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from ranvier.comm.protocol import Group
from ranvier.errors import ConfigError, RanvierError
from ranvier.mesh import Mesh, mesh_text
from ranvier.pictures.report_page import Page, step_timeline
from ranvier.pictures.timeline_picture import Picture, timeline_picture
from ranvier.pictures.timelines import RankTimeline, gather_timelines
from ranvier.schedule.spans import StepWindow, Timeline
from ranvier.system.atomic_file import write_atomically
from ranvier.system.memory_tracker import peak_memory_bytes
from ranvier.system.terminal import memory_text

Curve = Sequence[float | None] | Mapping[int, float | None]
"""A value of each step, or steps and their values."""


class EngineTimeline(Timeline):
    """The spans of one rank of an engine. policy: for the picture's title."""

    ranks: Group
    """Group of all ranks, once they are connected."""

    def __init__(self, device: torch.device, mesh: Mesh, policy: str) -> None:
        super().__init__()
        self._device, self._mesh, self._policy = device, mesh, policy
        self._last: list[StepWindow] = []

    def draw(self, path: str | PathLike[str]) -> Picture:
        """Draw what each rank did in the last training batch as a PNG at `path`, which rank 0 writes. Takes the spans,
        as `take` does. Collective; returns the picture, which notebooks show, on every rank. Raises ConfigError before
        the first batch, RanvierError if the file cannot be written."""
        picture = timeline_picture(self._last_batch("Engine.timeline.draw"), self._mesh, self._policy)
        assert picture is not None
        self._write(Path(path), picture)
        return picture

    def report(self, path: str | PathLike[str], curves: Mapping[str, Curve]) -> Page:
        """See `Engine.report`."""
        shown = _align_steps(curves)
        timelines = self._last_batch("Engine.report")
        steps = [line.steps[0] for line in timelines]
        memory = self.ranks.gather_objects(peak_memory_bytes(self._device))
        waited = sum(min(1.0, step.wait_seconds / step.seconds) for step in steps) / len(steps)
        page = Page(
            title=f"Step {steps[0].step} on mesh {mesh_text(self._mesh)}", subtitle=f"policy {self._policy}",
            figures=[("seconds per step", f"{max(step.seconds for step in steps):,.4g}"), ("bubble", f"{waited:.1%}"),
                     ("largest memory of a rank", memory_text(max(memory)))],
            curves=shown, timeline=step_timeline(timelines, self._mesh))
        self._write(Path(path), page.html())
        return page

    def _write(self, path: Path, content: str | bytes) -> None:
        """Write a file on rank 0; if that fails, all ranks raise its error."""
        problem = None
        if self.ranks.index == 0:
            try:
                write_atomically(path, content)
            except OSError as error:
                problem = error.strerror or str(error)
        if (problem := self.ranks.gather_objects(problem)[0]) is not None:
            raise RanvierError(f"cannot be written: {problem}", code="picture-not-writable", where=str(path),
                               remedy="Give a file in a folder that exists.")

    def _last_batch(self, call: str) -> list[RankTimeline]:
        """The last training batch on every rank. Evaluation has the number of the batch before it: a batch ends with
        its last backward, reduction or update."""
        spans = self.take()
        trained = [span for span in spans if span.category in ("backward", "weight", "reduce", "optimizer")]
        if trained:
            number, stop_ns = trained[-1].step, max(span.stop_ns for span in trained)
            inside = [span for span in spans if span.step == number and span.stop_ns <= stop_ns]
            start_ns = min(span.start_ns for span in inside)
            self._last = [StepWindow(step=number, start_ns=start_ns, stop_ns=stop_ns, spans=inside).covered()]
        timelines = gather_timelines(self.ranks, self._last)
        if not all(line.steps for line in timelines):
            raise ConfigError("needs a training batch", code="no-batch-to-draw", where=call,
                              remedy="Call `train_batch` before.")
        return timelines


def _align_steps(curves: Mapping[str, Curve]) -> dict[str, list[float | None]]:
    """All curves over the steps of all of them, "step". The values of a sequence belong to the steps in a curve "step",
    if there is one, else to 1, 2, 3, ..."""
    try:
        numbers: Iterable[Any] = curves.get("step", range(1, 1 + max(map(len, curves.values()), default=0)))
        found = {name: dict(values) if isinstance(values, Mapping) else dict(zip(numbers, values, strict=False))
                 for name, values in curves.items() if name != "step"}
        steps = sorted({step for values in found.values() for step in values})
        return {"step": [float(step) for step in steps],
                **{name: [None if (value := values.get(step)) is None else float(value) for step in steps]
                   for name, values in found.items()}}
    except (TypeError, ValueError) as error:
        raise ConfigError(f"are not numbers of steps: {error}", code="curves-of-no-numbers",
                          where=f"Engine.report({', '.join(f'{name}=...' for name in curves)})",
                          remedy="Give each a list with a number for each step, or a dict {step: number}.") from error
