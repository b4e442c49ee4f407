"""What a rank did when: spans on its monotonic clock, cheap enough to be always on.

Categories: forward, backward, weight (deferred weight gradients), wait, reduce (gradient averaging), optimizer.
A span's label is the action's text (F3, B3, W3) or what was waited for.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

Category = Literal["forward", "backward", "weight", "wait", "reduce", "optimizer"]


@dataclass(frozen=True, slots=True)
class Span:
    """`start_ns` and `stop_ns` are time.monotonic_ns() of the rank's machine."""

    category: Category
    label: str
    step: int
    start_ns: int
    stop_ns: int

    @property
    def seconds(self) -> float:
        return (self.stop_ns - self.start_ns) * 1e-9


class Timeline:
    """The spans of one rank, oldest first."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def add(self, category: Category, label: str, step: int, start_ns: int) -> int:
        """Record a span that ends now; returns now, the start of whatever comes next."""
        now = time.monotonic_ns()
        self.spans.append(Span(category, label, step, start_ns, now))
        return now

    def take(self) -> list[Span]:
        """All spans so far, which are forgotten here."""
        spans, self.spans = self.spans, []
        return spans
