"""Timeline of a rank: spans on its monotonic clock, cheap enough to be always enabled.

Categories: forward, backward, weight (deferred weight gradients), wait, reduce (gradient averaging), optimizer; data
(loading samples), report (metrics, events, logs), checkpoint (copying the state for one), and overhead: what the engine
does between all these, such as choosing the next action. A span's label is the action's text (F3, B3, W3) or what was
waited for.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

Category = Literal["forward", "backward", "weight", "wait", "reduce", "optimizer", "data", "report", "checkpoint",
                   "overhead"]
CATEGORIES: dict[str, Category] = {"F": "forward", "B": "backward", "W": "weight"}
"""Kind of action (`ranvier.schedule.schedule.Action`) -> category."""
MOST_SPANS = 100_000
"""Maximum number of spans that are kept if no program takes them, about 20 MB; older ones are dropped."""


class Span(NamedTuple):
    """A span of time; `start_ns` and `stop_ns` are time.monotonic_ns() of the rank's machine."""

    category: Category
    label: str
    step: int
    start_ns: int
    stop_ns: int

    @property
    def seconds(self) -> float:
        """Its duration."""
        return (self.stop_ns - self.start_ns) * 1e-9


@dataclass(frozen=True, kw_only=True)
class StepWindow:
    """A step's beginning and end, and its spans, in nanoseconds of the rank's monotonic clock."""

    step: int
    start_ns: int
    stop_ns: int
    spans: Sequence[Span]

    @property
    def seconds(self) -> float:
        """Duration of the step on this rank."""
        return (self.stop_ns - self.start_ns) * 1e-9

    @property
    def wait_seconds(self) -> float:
        """Seconds of the step in spans of category wait."""
        return sum(span.seconds for span in self.spans if span.category == "wait")

    def covered(self) -> StepWindow:
        """Return the same step with spans in the order of time, each beginning where the one before it ends."""
        return replace(self, spans=covering(self.spans, self.step, self.start_ns, self.stop_ns))


class Timeline:
    """The spans of one rank, oldest first, by the host's clock. `ranvier.pipeline.device_timeline` has another one."""

    def __init__(self) -> None:
        self.spans: deque[Span] = deque(maxlen=MOST_SPANS)
        self._start_ns = time.monotonic_ns()

    def mark(self) -> int:
        """Mark the start of something; returns the present time."""
        return time.monotonic_ns()

    def add(self, category: Category, label: str, step: int, start_ns: int) -> int:
        """Record a span that ends now; returns the present time, the start of whatever comes next."""
        now = time.monotonic_ns()
        self.spans.append(Span(category, label, step, start_ns, now))
        return now

    def take(self) -> list[Span]:
        """Return the spans since the last call, at most the latest 100,000, and forget them."""
        spans = list(self.spans)
        self.spans.clear()
        return spans

    def begin_step(self) -> list[StepWindow]:
        """Begin a step; spans since the last one belong to no step. Returns steps that had not been read."""
        self.take()
        self._start_ns = time.monotonic_ns()
        return []

    def end_step(self, step: int) -> list[StepWindow]:
        """End step `step` and begin the next one. Returns the steps that can be read now, without a wait."""
        stop_ns = time.monotonic_ns()
        window = StepWindow(step=step, start_ns=self._start_ns, stop_ns=stop_ns, spans=self.take())
        self._start_ns = stop_ns
        return [window]


def covering(spans: Sequence[Span], step: int, start_ns: int, stop_ns: int) -> list[Span]:
    """Spans of `step` that cover [start_ns, stop_ns] without gaps and overlaps: of nested spans the inner one counts,
    and time that no span covers is overhead.

    spans: as a `Timeline` records them, so an inner span comes before the span that contains it.
    """
    covered: list[Span] = []
    for span in spans:
        begin, end = max(span.start_ns, start_ns), min(span.stop_ns, stop_ns)
        later: list[Span] = []
        while covered and covered[-1].stop_ns > begin:  # inside this one
            inner = covered.pop()
            later += [] if inner.stop_ns >= end else [_piece(span, step, inner.stop_ns, end)]
            later.append(inner)
            end = min(end, inner.start_ns)
        covered += [_piece(span, step, begin, end)] if begin < end else []
        covered += reversed(later)
    found, at = [], start_ns
    for span in covered:
        found += [Span("overhead", "between actions", step, at, span.start_ns)] if at < span.start_ns else []
        found.append(span)
        at = span.stop_ns
    return found + ([Span("overhead", "between actions", step, at, stop_ns)] if at < stop_ns else [])


def _piece(span: Span, step: int, start_ns: int, stop_ns: int) -> Span:
    return Span(span.category, span.label, step, start_ns, stop_ns)
