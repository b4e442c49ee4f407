"""timeline.json: everybody's spans on one clock as a trace that Perfetto and chrome://tracing open."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ranvier.mesh import Mesh
from ranvier.pictures.timelines import RankTimeline
from ranvier.schedule.spans import Category
from ranvier.train.events import TransitionEvent
from ranvier.train.logs import write_json

TRACE_COLOURS: dict[Category, str] = {
    "forward": "thread_state_running", "backward": "rail_response", "weight": "rail_animation", "wait": "grey",
    "reduce": "thread_state_iowait", "optimizer": "rail_load", "data": "rail_idle", "report": "black",
    "checkpoint": "cq_build_running", "overhead": "generic_work"}
"""chrome://tracing's own colour names; Perfetto colours by label, so F0, F1, ... share one colour there too."""


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
