"""Timeline of a CUDA device: spans from CUDA events, read one step later.

On CUDA an action returns when its kernels are launched, so the host's clock says nothing about the work itself. An
event is recorded where an action starts and where it ends; the device reaches them in its own time:

    host      mark  add F0   mark  add F1   [waits for B0]   mark  add B0
    events     0      1        2     3                         4     5
    device     |--F0--|        |---F1-----|     (idle)         |--B0--|

A span of work lies between two events. What the host does in between (a wait, loading data, a report) costs the device
only the time between the last event before it and the first one after it: a wait that the device still had work for
becomes short. A step is read when the next one has been launched, so that the host does not wait for the device within
a step.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass
from typing import Literal

import torch

from ranvier.mesh import Mesh
from ranvier.pipeline.engine_timeline import EngineTimeline
from ranvier.schedule.spans import MOST_SPANS, Category, Span, StepWindow

_HOST_CATEGORIES = ("wait", "data", "report", "checkpoint")
"""Spans of the host, during which the device works or is idle."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """A span between two marks, by number."""

    category: Category
    label: str
    step: int
    first: int
    last: int


class _Marks:
    """The events of one step, in order, with the host's time at which they were recorded."""

    def __init__(self) -> None:
        self.events: list[torch.cuda.Event] = []
        self.host_ns: list[int] = []
        self.entries: list[_Entry] = []

    def before(self, host_ns: int) -> int:
        """The last mark up to a time of the host; the first one if none is earlier."""
        return max(0, bisect_right(self.host_ns, host_ns) - 1)


class DeviceTimeline(EngineTimeline):
    """The spans of a rank that computes on `device`; for the methods see `Timeline`."""

    def __init__(self, device: torch.device, mesh: Mesh, policy: str) -> None:
        super().__init__(device, mesh, policy)
        self._current, self._previous = _Marks(), None
        self._previous_step = 0
        self._unused: list[torch.cuda.Event] = []
        self._anchor: tuple[torch.cuda.Event, int] | None = None
        """An event, and the host's time at which the device reached it."""

    _previous: _Marks | None

    def mark(self) -> int:
        """See `Timeline.mark`; records an event on the device's current stream."""
        marks, now = self._current, time.monotonic_ns()
        event = self._unused.pop() if self._unused else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        marks.events.append(event)
        marks.host_ns.append(now)
        return now

    def add(self, category: Category, label: str, step: int, start_ns: int) -> int:
        """See `Timeline.add`."""
        if len(self._current.events) >= MOST_SPANS:  # steps are never ended
            self._unused += self._current.events
            self._current = _Marks()
        marks = self._current
        if not marks.events:
            self.mark()
        first = marks.before(start_ns)
        if category in _HOST_CATEGORIES:
            now, last = time.monotonic_ns(), len(marks.events)  # the next mark, whatever makes it
        else:
            now, last = self.mark(), len(marks.events) - 1
        marks.entries.append(_Entry(category, label, step, first, last))
        return now

    def take(self) -> list[Span]:
        """See `Timeline.take`; waits for the device."""
        windows = [*self.end_step(0), *self.begin_step()]
        return [span for window in windows for span in window.spans]

    def begin_step(self) -> list[StepWindow]:
        """See `Timeline.begin_step`; waits for the step that has been launched last."""
        found = self._read()
        self._unused += self._current.events
        self._current = _Marks()
        self.mark()
        return found

    def end_step(self, step: int) -> list[StepWindow]:
        """See `Timeline.end_step`: what can be read now is the step before."""
        found = self._read()
        self.mark()
        self._previous, self._previous_step, self._current = self._current, step, _Marks()
        self.mark()
        return found

    def _read(self) -> list[StepWindow]:
        """The step that was launched before the one that is under way, in the host's time."""
        marks, self._previous = self._previous, None
        if marks is None or not marks.events:
            return []
        marks.events[-1].synchronize()
        if self._anchor is None:  # the device has just got there, or did so a little before
            self._anchor = (marks.events[-1], time.monotonic_ns())
        anchor, anchor_ns = self._anchor
        times = [anchor_ns + round(1e6 * anchor.elapsed_time(event)) for event in marks.events]
        spans = [Span(entry.category, entry.label, entry.step, times[entry.first],
                      times[min(entry.last, len(times) - 1)]) for entry in marks.entries]
        # From here on times count from this step's end: over hours a float of milliseconds would lose its microseconds.
        self._anchor = (marks.events[-1], times[-1])
        self._unused += marks.events[:-1]
        return [StepWindow(step=self._previous_step, start_ns=times[0], stop_ns=times[-1], spans=spans)]


def timeline_of(device: torch.device, mesh: Mesh, policy: str) -> EngineTimeline:
    """The timeline of a rank that computes on `device`."""
    return (DeviceTimeline if device.type == "cuda" else EngineTimeline)(device, mesh, policy)


# --- look-ahead -------------------------------------------------------------------------------------------------------

# Limits how far the host runs ahead of its CUDA device.
#
# The host chooses an action when it launches it, which may be long before the device gets there, and from the messages
# that have arrived by then. Where times vary, a later choice is better. `benchmarks/gpu/models/run_ahead.py` simulates
# 8 stages and 32 microbatches: with a jitter of 0.5 the efficiency is 0.66 with one action of look-ahead, 0.65 at
# completion and 0.63 without a bound; without jitter 0.81, 0.77 and 0.82.


AUTO = 1
"""Launched actions that may be unfinished when the next one is chosen."""


class LookAhead:
    """Holds the host back until the device has finished all but the last launched actions.

    limit: `pipeline.look_ahead`; auto is AUTO on a pipeline of several stages, and no bound on one stage, where there
    is nothing to choose. On a CPU an action has ended when it returns, and this does nothing.
    """

    def __init__(self, limit: int | Literal["auto"], *, device: torch.device, num_stages: int) -> None:
        self._device = device
        self._limit = None if device.type != "cuda" else limit if limit != "auto" else AUTO if num_stages > 1 else None
        self._launched: deque[torch.cuda.Event] = deque()

    def after_launch(self) -> None:
        """An action has been launched; returns when few enough are unfinished."""
        if self._limit is None:
            return
        event = torch.cuda.Event(blocking=True)  # other threads need the core: they post sends and receives
        event.record(torch.cuda.current_stream(self._device))
        self._launched.append(event)
        while len(self._launched) > self._limit:
            self._launched.popleft().synchronize()
