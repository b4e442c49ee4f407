"""Pictures of the comparisons: speed-ups with their range and bound, accuracies with their interval, courses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.elastic.compare import Line
from benchmarks.elastic.outcome import Outcome

_OURS, _PEER = "#d1495b", "#30638e"


def draw_parts(lines: Sequence[Line], outcomes: Sequence[Outcome], title: str, path: Path) -> None:
    """Draw speed-ups on the left, accuracies in the middle, and on the right the courses of the runs (each with its
    first seed)."""
    figure = Figure(figsize=(15, 1.6 + 0.42 * len(lines)))
    speeds, accuracies, course = figure.subplots(1, 3, width_ratios=[1.2, 0.9, 1.2])
    names = [line.name for line in lines]
    for place, line in enumerate(lines):
        colour = _PEER if "torch" in line.name or line.name == "gpipe-dp" else _OURS
        speeds.barh(place, line.speedup.middle, color=colour, height=0.7)
        speeds.plot([line.speedup.least, line.speedup.greatest], [place, place], color="black", linewidth=1)
        speeds.text(0.03, place, f"{line.speedup.middle:.2f}", va="center", color="white", fontsize=8)
        if line.bound is not None:
            speeds.plot(line.bound, place, marker="|", color="black", markersize=14, linestyle="none")
        _difference(accuracies, line, place, colour)
    speeds.axvline(1.0, color="black", linewidth=0.6, linestyle=":")
    accuracies.axvline(0.0, color="black", linewidth=0.6)
    accuracies.axvline(-0.5, color="black", linewidth=0.6, linestyle=":")
    for axes, label, ticks in ((speeds, "speed, x of none; | bound by compute alone", names),
                               (accuracies, "accuracy less that of none, points", [""] * len(names))):
        axes.set_yticks(range(len(names)), ticks, fontsize=8)
        axes.invert_yaxis()
        axes.set_xlabel(label, fontsize=8)
    draw_courses(course, {one.name: one for one in reversed(outcomes) if len(one.course) > 1})
    for axes in (speeds, accuracies, course):
        axes.spines[["top", "right"]].set_visible(False)
    speeds.set_title(title, loc="left", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _difference(axes, line: Line, place: float, colour: str) -> None:
    """Draw the mean difference with the wider of its known intervals."""
    if line.by_seed is None:
        return
    halves = [one.half for one in (line.by_seed, line.by_count) if isfinite(one.half)]
    axes.errorbar(line.by_seed.middle, place, xerr=max(halves, default=0.0), fmt="o", color=colour, linewidth=1,
                  markersize=4, capsize=2)


def draw_courses(axes, outcomes: Mapping[str, Outcome]) -> None:
    """Draw frozen layers over the steps, with the mesh (data x pipe) written where it changes."""
    for number, (name, one) in enumerate(reversed(outcomes.items())):
        last = len(one.step_seconds)
        steps = [at["step"] for at in one.course] + [last]
        shift = 0.06 * number
        depths = [at["frozen"] + shift for at in one.course]
        (drawn,) = axes.step(steps, [*depths, depths[-1]], where="post", label=name, linewidth=1.2)
        before = None
        for at, depth in zip(one.course, depths, strict=True):
            mesh = (at["data"], at["pipe"])
            if mesh != before and before is not None:
                axes.annotate(f"{mesh[0]} x {mesh[1]}", (at["step"], depth), fontsize=7, color=drawn.get_color(),
                              xytext=(2, -8 - 8 * number), textcoords="offset points")
            before = mesh
    axes.set_xlabel("step; data x pipe where it changes", fontsize=8)
    axes.set_ylabel("frozen layers", fontsize=8)
    if outcomes:
        axes.legend(frameon=False, fontsize=7)


def draw_trade(points: Sequence[tuple[str, Line]], title: str, path: Path) -> None:
    """Draw speed-up against accuracy, with one named point for each line."""
    figure = Figure(figsize=(6.5, 4.5))
    axes = figure.subplots()
    for name, line in points:
        if line.by_seed is None:
            continue
        spread = line.speedup
        halves = [one.half for one in (line.by_seed, line.by_count) if isfinite(one.half)]
        axes.errorbar(line.by_seed.middle, spread.middle, xerr=max(halves, default=0.0), yerr=[
            [spread.middle - spread.least], [spread.greatest - spread.middle]], fmt="o", color=_OURS, linewidth=0.8,
            capsize=2)
        axes.annotate(name, (line.by_seed.middle, spread.middle), xytext=(5, 5), textcoords="offset points", fontsize=8)
    axes.set_xlabel("accuracy less that of none, points")
    axes.set_ylabel("speed, x of none")
    axes.set_title(title, loc="left", fontsize=9)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def draw_curves(curves: Mapping[str, Sequence[tuple[float, float, float, float]]], title: str, x: str, y: str,
                path: Path, marks: Mapping[str, float | None] | None = None) -> None:
    """Draw lines of (x, least, middle, greatest). marks: the marked x of each line, if any."""
    figure = Figure(figsize=(7, 4.5))
    axes = figure.subplots()
    for name, points in curves.items():
        xs, least, middle, greatest = zip(*points, strict=True)
        (drawn,) = axes.plot(xs, middle, "o-", label=name, markersize=4)
        axes.fill_between(xs, least, greatest, color=drawn.get_color(), alpha=0.15)
        mark = (marks or {}).get(name)
        if mark is not None:
            axes.plot(mark, dict(zip(xs, middle, strict=True))[mark], "*", color=drawn.get_color(), markersize=16)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_ylim(bottom=0)
    axes.set_title(title, loc="left", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
