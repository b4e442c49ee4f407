"""timeline.png, loss.png and course.png: what each rank did, the loss, and the transitions of an elastic run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ranvier.elastic.transition_selector import mesh_text
from ranvier.mesh import Mesh
from ranvier.pictures.figures import COLOURS, DARK, DPI, FAINT, INK, NAMES, clean, new_figure
from ranvier.schedule.spans import Category, Span, covering
from ranvier.train.history import History
from ranvier.train.logs import writing
from ranvier.train.metrics import StepSpans
from ranvier.train.timeline import RankTimeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import Patch


_MAX_RANKS = 64


def representative_step(timelines: Sequence[RankTimeline]) -> int | None:
    """The kept step of median duration. Steps whose neighbours are kept, too, are preferred, and the first step (which
    warms up) is taken only where there is no other."""
    steps = list(timelines[0].steps) if timelines else []
    steady = [step for step in steps if step.step > 1] or steps
    numbers = {step.step for step in steps}
    steady = [step for step in steady if {step.step - 1, step.step + 1} <= numbers] or steady
    if not steady:
        return None
    middle = statistics.median_low([step.stop_ns - step.start_ns for step in steady])
    return next(step.step for step in steady if step.stop_ns - step.start_ns == middle)


def draw_timeline(path: Path, timelines: Sequence[RankTimeline], mesh: Mesh, policy: str) -> None:
    """One step as a row of bars per rank, microbatch numbers on those that are wide enough.

    Ranks begin and end a step at different times: what each does in the steps before and after is shown, too. Shows
    the first ranks of a mesh of more than 64. RanvierError when the file cannot be written.
    """
    number = representative_step(timelines)
    if number is None:
        return
    shown = timelines[:_MAX_RANKS]
    steps = {line.rank: next(step for step in line.steps if step.step == number) for line in shown}
    zero_ns, end_ns = min(step.start_ns for step in steps.values()), max(step.stop_ns for step in steps.values())
    span_ms = (end_ns - zero_ns) * 1e-6
    windows = [within(line, zero_ns, end_ns) for line in shown]
    rows = [(line.rank, joined(spans, gap_ns=span_ms * 1e6 / 1000)) for line, spans in zip(shown, windows, strict=True)]
    figure = new_figure(14, 1.95 + 0.42 * len(rows) + 0.12 * mesh.num_replicas)
    axes = figure.subplots()
    clean(axes)
    places = _rows(mesh, [rank for rank, _ in rows])
    axes.set_xlim(0, span_ms)
    axes.set_ylim(max(places.values()) + 0.6, -0.6)
    for rank, spans in rows:
        _draw_row(axes, spans, zero_ns, places[rank], narrow_ms=span_ms / 600)
    axes.set_yticks([places[rank] for rank, _ in rows], [row_name(mesh, rank) for rank, _ in rows])
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"milliseconds since step {number} began", fontsize=9, color=INK)
    waits = axes.secondary_yaxis("right")
    waits.set_yticks([places[rank] for rank, _ in rows], [f"waits {_waited(steps[rank]):.0%}" for rank, _ in rows])
    waits.tick_params(length=0, labelsize=9, colors=FAINT)
    waits.spines["right"].set_visible(False)
    bubble = statistics.fmean(map(_waited, steps.values()))
    some = "" if len(rows) == len(timelines) else f"; first {len(rows)} of {len(timelines)} ranks"
    figure.suptitle(f"Step {number} on mesh {mesh_text(mesh)}, {policy}: {span_ms:,.0f} ms, bubble {bubble:.1%}{some}",
                    fontsize=12, color=INK, x=0.01, ha="left")
    figure.legend(handles=_legend(shares(windows)), loc="outside lower left", ncols=6, fontsize=9,
                  frameon=False, handlelength=1.2, handleheight=1.0)
    figure.canvas.draw()  # lays out the axes, so that widths of bars in pixels are known
    for rank, spans in rows:
        _label_row(axes, spans, zero_ns, places[rank])
    with writing(path):
        figure.savefig(path)


def within(line: RankTimeline, start_ns: int, stop_ns: int) -> list[Span]:
    """What a rank did from start_ns to stop_ns, without a gap; what is between its kept steps (an evaluation, a step
    that was not kept) is overhead."""
    inside = [span for step in line.steps for span in step.spans if span.start_ns < stop_ns and span.stop_ns > start_ns]
    return covering(inside, -1, start_ns, stop_ns)


def shares(rows: Sequence[Sequence[Span]]) -> dict[Category, int]:
    """Per cent of all rows' time in each category that occurs; they add up to 100 (largest remainders)."""
    spent: dict[Category, int] = {}
    for span in (span for row in rows for span in row):
        spent[span.category] = spent.get(span.category, 0) + span.stop_ns - span.start_ns
    total = max(1, sum(spent.values()))
    whole = {category: 100 * part // total for category, part in spent.items()}
    missing = 100 - sum(whole.values())
    for category in sorted(spent, key=lambda category: -(100 * spent[category] % total))[:missing]:
        whole[category] += 1
    return whole


def joined(row: Sequence[Span], gap_ns: float) -> list[Span]:
    """A row with neighbours of one category and label as one span: a W3 is many products, at most `gap_ns` apart."""
    spans: list[Span] = []
    for span in row:
        if span.category == "overhead" and span.stop_ns - span.start_ns <= gap_ns:
            continue
        before = spans[-1] if spans else None
        if before and (before.category, before.label) == (span.category, span.label) \
                and span.start_ns - before.stop_ns <= gap_ns:
            spans[-1] = Span(span.category, span.label, span.step, before.start_ns, span.stop_ns)
        else:
            spans.append(span)
    return spans


def _rows(mesh: Mesh, ranks: Sequence[int]) -> dict[int, float]:
    """Vertical place of each rank: one apart, and a little more between replicas."""
    return {rank: index + 0.3 * mesh.coordinates(rank).replica for index, rank in enumerate(ranks)}


def row_name(mesh: Mesh, rank: int) -> str:
    at = mesh.coordinates(rank)
    parts = [f"{axis} {at[axis]}" for axis in mesh.over(divides_stages=False)]
    return "   ".join([*parts, *([at.position_text] if mesh.stage_size > 1 else [])])


def _waited(step: StepSpans) -> float:
    return min(1.0, step.wait_seconds / step.seconds)


def _draw_row(axes: Axes, row: Sequence[Span], zero_ns: int, place: float, narrow_ms: float) -> None:
    for category, colour in COLOURS.items():
        spans = [span for span in row if span.category == category]
        bars = [((span.start_ns - zero_ns) * 1e-6, span.seconds * 1e3) for span in spans]
        height = 0.5 if category == "wait" else 0.8
        # A white edge parts neighbours of one colour; on a bar of a few pixels it would be all there is to see.
        edges = [0.0 if category == "wait" or width < narrow_ms else 0.4 for _, width in bars]
        axes.broken_barh(bars, (place - height / 2, height), facecolor=colour, linewidth=edges, edgecolor="white")


def _label_row(axes: Axes, row: Sequence[Span], zero_ns: int, place: float) -> None:
    """The microbatch's number on each bar, as small as the bar needs it, and none where nobody could read it."""
    points_per_ms = (axes.transData.transform((1, 0))[0] - axes.transData.transform((0, 0))[0]) * 72 / DPI
    for span in row:
        text = _bar_text(span)
        width = (span.stop_ns - span.start_ns) * 1e-6 * points_per_ms
        size = min(8.0, (width - 0.5) / (0.65 * len(text))) if text else 0.0
        if size >= 4:
            axes.text((span.start_ns + span.stop_ns - 2 * zero_ns) * 0.5e-6, place, text, ha="center",
                      va="center_baseline", fontsize=size, color="white" if span.category in DARK else INK)


def _bar_text(span: Span) -> str:
    """F3 is shown as 3, for the colour says F; F3.1, on the rank's second stage, as 3 with a prime. Bars without a
    microbatch have no text."""
    number, _, turn = span.label[1:].partition(".")
    known = span.category in ("forward", "backward", "weight") and number.isdigit() and (not turn or turn.isdigit())
    return number + "\u2032" * int(turn or 0) if known else ""


def _legend(percent: Mapping[Category, int]) -> list[Patch]:
    """The categories that occur, each with its share of all ranks' time."""
    from matplotlib.patches import Patch

    return [Patch(facecolor=colour, label=f"{NAMES.get(category, category)}  {percent[category]}%")
            for category, colour in COLOURS.items() if category in percent]


def draw_loss(path: Path, losses: Mapping[int, float], eval_losses: Mapping[int, float], title: str,
              unit: str = "tokens") -> None:
    """Training loss over steps, smoothed where there are enough of them, and held-out loss where it was evaluated.

    losses, eval_losses: step -> loss; unit: what targets are of. RanvierError when the file cannot be written.
    """
    figure = new_figure(9, 5)
    axes = figure.subplots()
    clean(axes)
    axes.grid(axis="y", color="#E6E6E6", linewidth=0.8)
    axes.set_axisbelow(True)
    points = [(step, loss) for step, loss in losses.items() if math.isfinite(loss)]
    steps, values = [step for step, _ in points], [loss for _, loss in points]
    if len(points) >= 40:
        axes.plot(steps, values, color=COLOURS["weight"], linewidth=0.9, alpha=0.8, label="training, each step")
        window = max(5, len(points) // 25)
        axes.plot(steps, smoothed(values, window), color=COLOURS["forward"], linewidth=2,
                  label=f"training, mean of {2 * (window // 2) + 1} steps")
    else:
        axes.plot(steps, values, color=COLOURS["forward"], linewidth=2, marker="o", markersize=3, label="training")
    if eval_losses:
        axes.plot(list(eval_losses), list(eval_losses.values()), color=COLOURS["backward"], marker="o", markersize=6,
                  linewidth=1.2, linestyle="--", markeredgecolor="white", label="held-out")
        last = max(eval_losses)
        axes.annotate(f"{eval_losses[last]:.3f}", (last, eval_losses[last]), xytext=(0, 8), ha="right",
                      textcoords="offset points", fontsize=9, color=INK)
    axes.set_xlabel("step", fontsize=10, color=INK)
    axes.set_ylabel(f"loss (nats per {unit.removesuffix('s')})", fontsize=10, color=INK)
    axes.set_title(title, fontsize=12, color=INK, loc="left")
    axes.margins(x=0.02)
    axes.legend(frameon=False, fontsize=9)
    with writing(path):
        figure.savefig(path)


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Centred running mean over `window` values, fewer at the ends, so that the curve does not lag."""
    half = window // 2
    return [statistics.fmean(values[max(0, index - half):index + half + 1]) for index in range(len(values))]


def draw_course(path: Path, history: History, title: str) -> None:
    """Draw `history`. RanvierError when the file cannot be written."""
    speeds_by_step = history.column("tokens_per_second")
    last = max(speeds_by_step, default=1)
    figure = new_figure(10, 8.5 if history.accuracies else 7)
    panels = figure.subplots(4 if history.accuracies else 3, 1, sharex=True)
    for axes in panels:
        clean(axes)
        axes.grid(axis="y", color="#E6E6E6", linewidth=0.8)
        axes.set_axisbelow(True)
        for step in list(history.meshes)[1:]:
            axes.axvline(step + 0.5, color=FAINT, linewidth=0.8, linestyle=":")
    _stairs(panels[0], history.frozen, last, COLOURS["forward"], "")
    panels[0].set_ylabel("frozen layers", fontsize=10, color=INK)
    _stairs(panels[1], {step: mesh[0] for step, mesh in history.meshes.items()}, last, COLOURS["forward"], "stages")
    _stairs(panels[1], {step: mesh[1] for step, mesh in history.meshes.items()}, last, COLOURS["backward"], "replicas")
    panels[1].set_ylabel("mesh", fontsize=10, color=INK)
    panels[1].legend(frameon=False, fontsize=9, ncols=2)
    for axes in panels[:2]:
        axes.set_ylim(bottom=0)
        axes.yaxis.get_major_locator().set_params(integer=True)
    steps, speeds = list(speeds_by_step), list(speeds_by_step.values())
    panels[2].plot(steps, speeds, color=COLOURS["weight"], linewidth=0.9, label="each step")
    window = max(5, len(steps) // 25)
    panels[2].plot(steps, smoothed(speeds, window), color=COLOURS["forward"], linewidth=2,
                   label=f"mean of {2 * (window // 2) + 1}")
    panels[2].set_ylabel(f"{history.unit} per second", fontsize=10, color=INK)
    panels[2].set_ylim(bottom=0)
    panels[2].legend(frameon=False, fontsize=9, ncols=2)
    if history.accuracies:
        panels[3].plot(list(history.accuracies), [100 * score for score in history.accuracies.values()], marker="o",
                       markersize=5, linewidth=1.5, color=COLOURS["optimizer"], markeredgecolor="white")
        panels[3].set_ylabel("accuracy in %, held-out", fontsize=10, color=INK)
    panels[-1].set_xlabel("step", fontsize=10, color=INK)
    panels[0].set_title(f"{title}: how the run transformed itself", fontsize=12, color=INK, loc="left")
    panels[0].margins(x=0.02)
    with writing(path):
        figure.savefig(path)


def _stairs(axes: Axes, values: Mapping[int, int], last: int, colour: str, label: str) -> None:
    """A value that holds from each step until the next."""
    steps = list(values)
    axes.step([*steps, last], [*values.values(), values[steps[-1]]], where="post", color=colour, linewidth=2,
              label=label or None)
