"""The picture of a step: a row of bars for each rank."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import TYPE_CHECKING

from ranvier.mesh import Mesh, mesh_text
from ranvier.pictures.figures import COLOURS, DARK, DPI, FAINT, INK, NAMES, new_figure, remove_frame
from ranvier.pictures.timelines import (
    RankTimeline,
    first_ranks,
    join_spans,
    representative_step,
    row_name,
    shares,
    within,
)
from ranvier.schedule.spans import Category, Span, StepWindow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import Patch


class Picture(bytes):
    """A PNG, which notebooks show."""

    def _repr_png_(self) -> bytes:
        return bytes(self)

    def __repr__(self) -> str:
        return f"Picture({len(self):,} bytes)"

    __str__ = __repr__  # bytes.__str__ does not call __repr__


def timeline_picture(timelines: Sequence[RankTimeline], mesh: Mesh, policy: str) -> Picture | None:
    """One step as a row of bars per rank, with microbatch numbers on bars that are wide enough.

    Ranks begin and end a step at different times, so parts of the previous and next steps are shown, too. Only the
    first ranks of a mesh of more than 64 are shown. None if no step was kept.
    """
    number = representative_step(timelines)
    if number is None:
        return None
    shown, note = first_ranks(timelines)
    steps = {line.rank: next(step for step in line.steps if step.step == number) for line in shown}
    zero_ns, end_ns = min(step.start_ns for step in steps.values()), max(step.stop_ns for step in steps.values())
    span_ms = (end_ns - zero_ns) * 1e-6
    windows = [within(line, zero_ns, end_ns) for line in shown]
    rows = [(line.rank, join_spans(spans, gap_ns=span_ms * 1e6 / 1000))
            for line, spans in zip(shown, windows, strict=True)]
    figure = new_figure(14, 1.95 + 0.42 * len(rows) + 0.12 * mesh.num_replicas)
    axes = figure.subplots()
    remove_frame(axes)
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
    waits.set_yticks([places[rank] for rank, _ in rows],
                     [f"waits {_waiting_seconds(steps[rank]):.0%}" for rank, _ in rows])
    waits.tick_params(length=0, labelsize=9, colors=FAINT)
    waits.spines["right"].set_visible(False)
    bubble = statistics.fmean(map(_waiting_seconds, steps.values()))
    figure.suptitle(f"Step {number} on mesh {mesh_text(mesh)}, {policy}: {span_ms:,.0f} ms, bubble {bubble:.1%}{note}",
                    fontsize=12, color=INK, x=0.01, ha="left")
    figure.legend(handles=_legend(shares(windows)), loc="outside lower left", ncols=6, fontsize=9,
                  frameon=False, handlelength=1.2, handleheight=1.0)
    figure.canvas.draw()  # lays out the axes, so that widths of bars in pixels are known
    for rank, spans in rows:
        _label_row(axes, spans, zero_ns, places[rank])
    drawn = BytesIO()
    figure.savefig(drawn)
    return Picture(drawn.getvalue())


def _rows(mesh: Mesh, ranks: Sequence[int]) -> dict[int, float]:
    """Vertical place of each rank: one apart, and a little more between replicas."""
    return {rank: index + 0.3 * mesh.coordinates(rank).replica for index, rank in enumerate(ranks)}


def _waiting_seconds(step: StepWindow) -> float:
    return min(1.0, step.wait_seconds / step.seconds)


def _draw_row(axes: Axes, row: Sequence[Span], zero_ns: int, place: float, narrow_ms: float) -> None:
    for category, colour in COLOURS.items():
        spans = [span for span in row if span.category == category]
        bars = [((span.start_ns - zero_ns) * 1e-6, span.seconds * 1e3) for span in spans]
        height = 0.5 if category == "wait" else 0.8
        # A white edge separates adjacent bars of one colour; it would cover a bar of a few pixels.
        edges = [0.0 if category == "wait" or width < narrow_ms else 0.4 for _, width in bars]
        axes.broken_barh(bars, (place - height / 2, height), facecolor=colour, linewidth=edges, edgecolor="white")


def _label_row(axes: Axes, row: Sequence[Span], zero_ns: int, place: float) -> None:
    """Write the microbatch's number on each bar, in a size that fits, unless it would be unreadably small."""
    points_per_ms = (axes.transData.transform((1, 0))[0] - axes.transData.transform((0, 0))[0]) * 72 / DPI
    for span in row:
        text = _bar_text(span)
        width = (span.stop_ns - span.start_ns) * 1e-6 * points_per_ms
        size = min(8.0, (width - 0.5) / (0.65 * len(text))) if text else 0.0
        if size >= 4:
            axes.text((span.start_ns + span.stop_ns - 2 * zero_ns) * 0.5e-6, place, text, ha="center",
                      va="center_baseline", fontsize=size, color="white" if span.category in DARK else INK)


def _bar_text(span: Span) -> str:
    """The text on a bar: 3 for F3, since the colour shows F; 3 with a prime for F3.1, on the rank's second stage. Bars
    without a microbatch have no text."""
    number, _, turn = span.label[1:].partition(".")
    known = span.category in ("forward", "backward", "weight") and number.isdigit() and (not turn or turn.isdigit())
    return number + "\u2032" * int(turn or 0) if known else ""


def _legend(percent: Mapping[Category, int]) -> list[Patch]:
    """The categories that occur, each with its share of all ranks' time."""
    from matplotlib.patches import Patch

    return [Patch(facecolor=colour, label=f"{NAMES.get(category, category)}  {percent[category]}%")
            for category, colour in COLOURS.items() if category in percent]
