"""report.html: one file that shows a run or a plan, without network or server.

The page is a template next to this file; its content is one JSON document in it (`Page`). Curves are drawn by uPlot
(MIT licence, next to the template); tables and the timeline of a step are drawn by the template itself.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources

from ranvier.config import read
from ranvier.config.run import Run
from ranvier.mesh import Mesh
from ranvier.pictures.figures import COLOURS, DARK, NAMES
from ranvier.pictures.timelines import RankTimeline, first_ranks, join_spans, representative_step, row_name, within
from ranvier.schedule.spans import Category, Span

MAX_POINTS = 2000
"""Most points of a curve; a longer one is thinned out evenly."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """An event at a step. kind: transition, checkpoint, ... fault: whether it is shown as a fault."""

    step: int
    kind: str
    text: str
    fault: bool = False


@dataclass(frozen=True, kw_only=True)
class StepTimeline:
    """Spans of each rank in one step. rows: name of a rank, and its spans in nanoseconds of one clock."""

    title: str
    rows: Sequence[tuple[str, Sequence[Span]]]
    start_ns: int
    stop_ns: int

    def document(self) -> dict[str, object]:
        """The spans in milliseconds from the beginning of the step, for JSON."""
        found: set[Category] = {span.category for _, spans in self.rows for span in spans}

        def at(nanoseconds: int) -> float:
            return round((nanoseconds - self.start_ns) * 1e-6, 4)

        return {"title": self.title, "milliseconds": at(self.stop_ns), "dark": sorted(DARK),
                "categories": {category: (NAMES.get(category, category), colour)
                               for category, colour in COLOURS.items() if category in found},
                "rows": [{"name": name, "spans": [(span.category, span.label, at(span.start_ns), at(span.stop_ns))
                                                  for span in spans]} for name, spans in self.rows]}


def step_timeline(timelines: Sequence[RankTimeline], mesh: Mesh) -> StepTimeline | None:
    """The timeline of the step that `timeline_picture` shows; None if no step was kept."""
    number = representative_step(timelines)
    if number is None:
        return None
    shown, note = first_ranks(timelines)
    steps = [next(step for step in line.steps if step.step == number) for line in shown]
    start_ns, stop_ns = min(step.start_ns for step in steps), max(step.stop_ns for step in steps)
    rows = [(row_name(mesh, line.rank),
             join_spans(within(line, start_ns, stop_ns), gap_ns=(stop_ns - start_ns) / 1e5)) for line in shown]
    return StepTimeline(title=f"Step {number}: {(stop_ns - start_ns) * 1e-6:,.0f} ms{note}", rows=rows,
                        start_ns=start_ns, stop_ns=stop_ns)


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table. header, rows: texts. numbers: columns that are aligned to the right."""

    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    numbers: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True)
class Page:
    """Content of a page; sections without content are left out.

    figures: (name, value) at the top. text: paragraphs below. fixed: lines below them, in a monospaced font. curves:
    name -> values at each of the steps "step".
    memory: rows with place, category, predicted and measured bytes. settings: (name, value, default, chosen by).
    candidates: the last column is shown below the second. live: whether the page changes.
    """

    title: str
    subtitle: str
    figures: Sequence[tuple[str, str]] = ()
    curves: Mapping[str, Sequence[float | None]] = field(default_factory=lambda: {"step": ()})
    unit: str = "tokens"
    text: Sequence[str] = ()
    fixed: str = ""
    marks: Sequence[Mark] = ()
    timeline: StepTimeline | None = None
    memory: Sequence[Mapping[str, object]] = ()
    settings: Sequence[tuple[str, str, str, str]] = ()
    candidates: Table = Table()
    live: bool = False

    def html(self) -> str:
        """The content of the file."""
        timeline = {"rows": ()} if self.timeline is None else self.timeline.document()
        shown = {"subtitle": self.subtitle, "figures": self.figures, "curves": _finite(self.curves), "unit": self.unit,
                 "text": self.text, "fixed": self.fixed,
                 "marks": [asdict(mark) for mark in self.marks], "timeline": timeline, "memory": self.memory,
                 "settings": self.settings, "candidates": asdict(self.candidates), "live": self.live}
        # "</script>" in any text would end the script element
        document = json.dumps(shown, allow_nan=False).replace("<", "\\u003c")
        page = _file("report.html")
        for name, text in (("__TITLE__", html.escape(self.title)), ("__UPLOT_CSS__", _file("uPlot.min.css")),
                           ("__UPLOT_JS__", _file("uPlot.iife.min.js")), ("__DATA__", document)):
            page = page.replace(name, text)
        return page

    def _repr_html_(self) -> str:
        """The page in a frame, for notebooks."""
        return f'<iframe srcdoc="{html.escape(self.html())}" style="width: 100%; height: 80vh; border: 0"></iframe>'

    def __repr__(self) -> str:
        return f"Page(title={self.title!r})"


def changed_settings(run: Run, asked: Run, origins: Mapping[str, str]) -> list[tuple[str, str, str, str]]:
    """Name, value, default, and where the value comes from, of settings that are not at their default; the folder is
    the page's own. asked: the settings before `auto` was resolved. origins: as of `ranvier.config.read.Merged`."""
    values, before = read.flatten(run), read.flatten(asked)
    chosen = {name: origin for name, origin in origins.items() if origin != "default" and values[name] == before[name]}

    def other(name: str) -> str:
        return "model.pretrained" if run.model.pretrained is not None and name.startswith("model.") else "auto"

    return [(setting.flag, read.as_text(values[name]), read.as_text(setting.default), chosen.get(name, other(name)))
            for name, setting in read.settings().items() if values[name] != setting.default and name != "run_dir"]


def _file(name: str) -> str:
    return (resources.files("ranvier") / "pictures" / "report_page_files" / name).read_text(encoding="utf-8")


def _finite(curves: Mapping[str, Sequence[float | None]]) -> dict[str, list[float | None]]:
    """The curves at no more than `MAX_POINTS` steps, with None for NaN and infinite values. Steps with rare values,
    such as an evaluation's, are kept. A curve with only zeros, such as the bubble of one stage, is left out."""
    steps = curves["step"]
    every = max(1, -(-len(steps) // MAX_POINTS))
    rare = [values for values in curves.values() if 2 * sum(value is not None for value in values) < len(values)]
    kept = [place for place in range(len(steps)) if place % every == 0 or place == len(steps) - 1
            or any(values[place] is not None for values in rare)]
    return {name: [value if value is not None and math.isfinite(value) else None
                   for value in (values[place] for place in kept)]
            for name, values in curves.items() if name == "step" or any(values)}
