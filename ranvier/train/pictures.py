"""loss.png and course.png: the loss, and the transitions of an elastic run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ranvier.pictures.figures import COLOURS, FAINT, INK, clean, new_figure
from ranvier.train.history import History
from ranvier.train.logs import writing

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
