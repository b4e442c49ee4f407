"""Everybody's spans on one clock, and as a trace that Perfetto and chrome://tracing open.

Ranks on one machine share its monotonic clock. Machines do not: their offsets are estimated from the moments at which
their ranks leave the same barriers, and the trace says how well.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ranvier.comm.protocol import Group
from ranvier.mesh import Mesh
from ranvier.schedule.spans import Category, Span
from ranvier.train.events import TransitionEvent
from ranvier.train.logs import write_json
from ranvier.train.metrics import StepSpans

_BARRIERS = 5

TRACE_COLOURS: dict[Category, str] = {
    "forward": "thread_state_running", "backward": "rail_response", "weight": "rail_animation", "wait": "grey",
    "reduce": "thread_state_iowait", "optimizer": "rail_load", "data": "rail_idle", "report": "black",
    "checkpoint": "cq_build_running", "overhead": "generic_work"}
"""chrome://tracing's own colour names; Perfetto colours by label, so F0, F1, ... share one colour there too."""


@dataclass(frozen=True, kw_only=True)
class RankTimeline:
    """One rank's kept steps on rank 0's clock. `clock_error_ns`: how far the estimate of the offset may be off."""

    rank: int
    steps: Sequence[StepSpans]
    clock_error_ns: int = 0


def gather_timelines(ranks: Group, steps: Sequence[StepSpans]) -> list[RankTimeline]:
    """The kept steps of all ranks on rank 0's clock. Collective, blocks; every rank gets all of them."""
    left_ns = []
    for _ in range(_BARRIERS):
        ranks.barrier()
        left_ns.append(time.monotonic_ns())
    rows = ranks.gather_objects({"machine": _machine(), "left_ns": left_ns, "steps": [_pack(step) for step in steps]})
    timelines = []
    for rank, row in enumerate(rows):
        offset, error = _offset(rows[0], row)
        timelines.append(RankTimeline(rank=rank, steps=[_unpack(step, offset) for step in row["steps"]],
                                      clock_error_ns=error))
    return timelines


def _machine() -> str:
    """What ranks that share a monotonic clock have in common: a boot of one kernel."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()


def _offset(reference: Mapping[str, Any], row: Mapping[str, Any]) -> tuple[int, int]:
    """Nanoseconds to add to `row`'s clock to read the reference's, and the estimate's error."""
    if row["machine"] == reference["machine"]:
        return 0, 0
    differences = [ours - theirs for ours, theirs in zip(reference["left_ns"], row["left_ns"], strict=True)]
    return round(statistics.median(differences)), (max(differences) - min(differences)) // 2


def _pack(step: StepSpans) -> list[Any]:
    return [step.step, step.start_ns, step.stop_ns,
            [[span.category, span.label, span.start_ns, span.stop_ns] for span in step.spans]]


def _unpack(row: Sequence[Any], offset_ns: int) -> StepSpans:
    number, start_ns, stop_ns, spans = row
    return StepSpans(step=number, start_ns=start_ns + offset_ns, stop_ns=stop_ns + offset_ns, spans=[
        Span(category, label, number, begin + offset_ns, end + offset_ns) for category, label, begin, end in spans])


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
