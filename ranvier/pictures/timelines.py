"""The steps of all ranks on one clock, and the selection that is shown.

Ranks on one machine share its monotonic clock. Machines do not: their offsets are estimated from the moments at which
their ranks leave the same barriers.
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
from ranvier.schedule.spans import Category, Span, StepWindow, covering

_BARRIERS = 5
MAX_RANKS = 64
"""Most ranks in a picture; only the first ranks of a larger mesh are shown."""


@dataclass(frozen=True, kw_only=True)
class RankTimeline:
    """One rank's kept steps on rank 0's clock. `clock_error_ns`: possible error of the estimated offset."""

    rank: int
    steps: Sequence[StepWindow]
    clock_error_ns: int = 0


def gather_timelines(ranks: Group, steps: Sequence[StepWindow]) -> list[RankTimeline]:
    """The kept steps of all ranks on rank 0's clock. Collective and blocking; every rank gets all timelines."""
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
    """Identifier of the boot of this machine's kernel: ranks with the same one share a monotonic clock."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()


def _offset(reference: Mapping[str, Any], row: Mapping[str, Any]) -> tuple[int, int]:
    """Nanoseconds to add to `row`'s clock to get the reference's, and the error of this estimate."""
    if row["machine"] == reference["machine"]:
        return 0, 0
    differences = [ours - theirs for ours, theirs in zip(reference["left_ns"], row["left_ns"], strict=True)]
    return round(statistics.median(differences)), (max(differences) - min(differences)) // 2


def _pack(step: StepWindow) -> list[Any]:
    return [step.step, step.start_ns, step.stop_ns,
            [[span.category, span.label, span.start_ns, span.stop_ns] for span in step.spans]]


def _unpack(row: Sequence[Any], offset_ns: int) -> StepWindow:
    number, start_ns, stop_ns, spans = row
    return StepWindow(step=number, start_ns=start_ns + offset_ns, stop_ns=stop_ns + offset_ns, spans=[
        Span(category, label, number, begin + offset_ns, end + offset_ns) for category, label, begin, end in spans])


def representative_step(timelines: Sequence[RankTimeline]) -> int | None:
    """The kept step of median duration. Steps whose neighbours are also kept are preferred, and the first step (warmup)
    is used only if there is no other."""
    steps = list(timelines[0].steps) if timelines else []
    steady = [step for step in steps if step.step > 1] or steps
    numbers = {step.step for step in steps}
    steady = [step for step in steady if {step.step - 1, step.step + 1} <= numbers] or steady
    if not steady:
        return None
    middle = statistics.median_low([step.stop_ns - step.start_ns for step in steady])
    return next(step.step for step in steady if step.stop_ns - step.start_ns == middle)


def first_ranks(timelines: Sequence[RankTimeline]) -> tuple[Sequence[RankTimeline], str]:
    """The ranks that a picture shows, and a note for its title if they are not all."""
    shown = timelines[:MAX_RANKS]
    return shown, "" if len(shown) == len(timelines) else f"; first {len(shown)} of {len(timelines):,} ranks"


def within(line: RankTimeline, start_ns: int, stop_ns: int) -> list[Span]:
    """Spans of a rank from start_ns to stop_ns, without gaps; time between its kept steps (an evaluation, a step that
    was not kept) is overhead."""
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


def join_spans(row: Sequence[Span], gap_ns: float) -> list[Span]:
    """Join adjacent spans of a row with the same category and label: a W3 consists of many products, at most `gap_ns`
    apart."""
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


def row_name(mesh: Mesh, rank: int) -> str:
    at = mesh.coordinates(rank)
    parts = [f"{axis} {at[axis]}" for axis in mesh.over(divides_stages=False)]
    return "   ".join([*parts, *([at.position_text] if mesh.stage_size > 1 else [])])
