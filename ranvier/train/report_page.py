"""The report.html of a run: rewritten periodically during the run, and with timeline and memory at its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ranvier.config.run import Run
from ranvier.cost.memory import RankMemory
from ranvier.errors import OwnershipError
from ranvier.mesh import Mesh, mesh_text
from ranvier.pictures.report_page import Mark, Page, changed_settings, step_timeline
from ranvier.pictures.timelines import RankTimeline
from ranvier.system.atomic_file import write_atomically
from ranvier.system.terminal import memory_text
from ranvier.train.events import EndEvent, Event, NoteEvent, StartEvent, StepEvent, TransitionEvent
from ranvier.train.history import History
from ranvier.train.logs import writing
from ranvier.train.memory import merge_categories

NAME = "report.html"
SECONDS_BETWEEN = 20.0
"""Seconds between two updates of the page during a run; longer if writing takes more than a hundredth of that."""
_MAX_MARKS = 200
_FAULTS = frozenset({"bad-step", "went-back", "replicas-differ", "lost", "checkpoint-failed", "log-damaged", "skipped",
                     "checkpoint-skipped", "stopped", "failed"})
"""Notes that say that something went wrong."""


class ReportPage:
    """A tracker that writes a run's page. history: another tracker, which receives each event first. asked: the
    settings before `auto` was resolved. origins: the origin of each setting. verify: raises OwnershipError if another
    run now owns the folder. RanvierError if the file cannot be written."""

    def __init__(self, asked: Run, recipe: str, folder: Path, history: History, origins: Mapping[str, str],
                 clock: Callable[[], float] = time.monotonic, verify: Callable[[], None] = lambda: None) -> None:
        self.run: Run = asked
        """The settings as they are now."""
        self._asked, self._origins, self._recipe, self.path = asked, origins, recipe, folder / NAME
        self._history, self._clock, self._verify = history, clock, verify
        self._marks: list[Mark] = []
        self._mesh, self._steps, self._left_out, self._ended = "", 0, 0, False
        self._next = clock() + SECONDS_BETWEEN

    def event(self, event: Event) -> None:
        """Keep what the page shows of an event; rewrite the page if it is due."""
        match event:
            case StartEvent():
                self._mesh, self._steps = mesh_text(event.mesh), event.steps
                self._remember()
            case TransitionEvent():
                self._mesh = mesh_text(event.mesh)
                self._mark(Mark(step=event.step, kind="transition", text=str(event)))
            case NoteEvent():
                self._mark(Mark(step=event.step, kind=event.event, text=event.text, fault=event.event in _FAULTS))
                if event.event == "stopped":
                    self._ended = True
                    self._write(self._page("stopped"))
            case StepEvent() if self._clock() >= self._next:
                began = self._clock()
                self._write(self._page(f"step {event.step} of {self._steps}", live=True))
                self._next = self._clock() + max(SECONDS_BETWEEN, 100 * (self._clock() - began))
            case EndEvent():
                pass

    def finish(self, summary: Mapping[str, Any], timelines: Sequence[RankTimeline], mesh: Mesh,
               predicted: Sequence[RankMemory], peaks: Sequence[int], *, on_cpu: bool) -> None:
        """Write the complete page of a run that has ended without errors. peaks: see `memory_rows`."""
        self._ended = True
        figures = [("final loss", _number(summary["final_loss"])), ("held-out loss", _number(summary["eval_loss"])),
                   (f"{self._history.unit} per second, median", _number(summary["tokens_per_second"])),
                   ("seconds per step, median", _number(summary["step_seconds"])),
                   ("bubble, median", f"{summary['bubble_fraction']:.1%}"),
                   (f"FLOPs, of {summary['model_flops_utilisation_of']}",
                    f"{summary['model_flops_utilisation']:.1%}"),
                   ("largest memory of a rank", memory_text(max(summary["peak_memory_bytes"]))),
                   ("seconds since the last start", _number(summary["seconds"]))]
        memory = memory_rows(predicted, peaks, summary, mesh, on_cpu=on_cpu)
        self._write(self._page("finished", figures=[(name, value) for name, value in figures if value],
                               timeline=step_timeline(timelines, mesh), memory=memory))

    def close(self) -> None:
        """Write the page of a run that has ended by an error."""
        if self._history.steps and not self._ended:
            last = self._history.steps[-1]["step"]
            with suppress(OwnershipError):  # another run now owns the page
                self._write(self._page(f"ended by an error after step {last} of {self._steps}"))

    def _remember(self) -> None:
        """Mark the events before the run resumed, from its log. A start without an end or a stop ended by a fault that
        could not be logged."""
        is_under_way, last = False, 0
        for line in self._history.past_events:
            kind, last = str(line["event"]), max(last, line["step"])
            if kind not in ("start", "eval", "end"):
                self._mark(Mark(step=line["step"], kind=kind, text=str(line.get("text")), fault=kind in _FAULTS))
            if kind == "start" and is_under_way:
                self._interrupted(last)
            is_under_way = kind not in ("end", "stopped", "failed")
        if is_under_way:
            self._interrupted(last)

    def _interrupted(self, step: int) -> None:
        self._mark(Mark(step=step, kind="interrupted", fault=True,
                        text="the run ended after this step, or later, without logging why"))

    def _mark(self, mark: Mark) -> None:
        if len(self._marks) < _MAX_MARKS:
            self._marks.append(mark)
        else:
            self._left_out += 1

    def _page(self, state: str, live: bool = False, **more: Any) -> Page:
        marks = self._marks
        if self._left_out:
            marks = [*marks, Mark(step=marks[-1].step, kind="more",
                                  text=f"{self._left_out:,} further events are in events.jsonl")]
        return Page(title=f"{self._recipe} on mesh {self._mesh}", live=live, unit=self._history.unit,
                    subtitle=f"{state}, written {time.strftime('%Y-%m-%d %H:%M:%S')}; {self.path.parent}",
                    curves=curves(self._history), marks=marks,
                    settings=changed_settings(self.run, self._asked, self._origins), **more)

    def _write(self, page: Page) -> None:
        with writing(self.path):
            self._verify()
            write_atomically(self.path, page.html())


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def curves(history: History) -> dict[str, list[float | None]]:
    """The fields of metrics.jsonl by step; the speed's name has the unit of the targets. If a step was taken twice,
    after a rollback, the later values count."""
    lines = {line["step"]: line for line in history.steps}
    steps = sorted(lines)
    found: dict[str, list[float | None]] = {name: [lines[step].get(name) for step in steps] for name in (
        "loss", "grad_norm", "learning_rate", "bubble_fraction", "frozen_layers")}
    found[f"{history.unit}_per_second"] = [lines[step].get("tokens_per_second") for step in steps]
    found["eval_loss"] = [history.eval_losses.get(step) for step in steps]
    found["eval_accuracy"] = [history.accuracies.get(step) for step in steps]
    found["memory_gib"] = [None if (size := lines[step].get("memory_bytes")) is None else size / 2**30
                           for step in steps]
    return {"step": [float(step) for step in steps], **found}


def memory_rows(predicted: Sequence[RankMemory], peaks: Sequence[int], summary: Mapping[str, Any], mesh: Mesh, *,
                on_cpu: bool) -> list[dict[str, object]]:
    """For each stage the predicted categories next to those measured on its rank with most memory (with memory_report),
    and a row with the total peak of the device, or on a CPU of the process, since the start on any mesh. peaks:
    predicted peak of each rank."""
    rows: list[dict[str, object]] = []
    for entry in predicted:
        ranks = [rank for rank in range(mesh.size) if mesh.coordinates(rank).pipeline_rank == entry.pipeline_rank]
        rank = max(ranks, key=lambda rank: summary["peak_memory_bytes"][rank])
        measured = summary["memory"][rank] if "memory" in summary else {"device": {}, "host": {}}
        device = merge_categories(entry.device) if "memory" in summary else entry.device
        place = f"stage {entry.pipeline_rank}" + (f", {entry.ranks} ranks" if entry.ranks > 1 else "")
        rows += [
            {"place": place, "category": prefix + category, "predicted": sizes.get(category),
             "measured": known.get(category), "whole": False}
            for prefix, sizes, known in (("", device, measured["device"]), ("host ", entry.host, measured["host"]))
            for category in {**sizes, **known} if sizes.get(category) or known.get(category)]
        rows.append({"place": place, "category": "the whole process" if on_cpu else "the whole device", "whole": True,
                      "predicted": peaks[rank],
                      "measured": summary["peak_memory_bytes"][rank]})
    return rows
