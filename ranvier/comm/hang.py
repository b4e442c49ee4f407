"""Actions that will not end: a loop without an end in a user's layer, a driver that does not return.

A wait has its time limit, and a stopped process is seen from outside. What is left is a rank that computes without end.
Whether an action takes too long can only be judged by those before it: so nothing is judged until some of its kind have
ended (the first ones may compile), and the limit is a generous multiple of the longest of them. Code that hangs while
it holds Python's lock cannot be seen from within: the time limit of those who wait for it ends the run.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType

from ranvier.errors import Hang

_FACTOR = 20
_LEAST_SECONDS = 30.0
_ENOUGH = 3
_JUDGED = ("forward", "backward", "weight")
_DEBUGGERS = re.compile(r"bdb|pdb|_?pydevd|IPython\.core\.debugger")


class HangWatch:
    """Judges the actions of one rank on one mesh. `report` is told the first that hangs, on the calling thread.

    seconds: the limit of one action; None for one that follows from those before.
    """

    def __init__(self, seconds: float | None, report: Callable[[Hang], None]) -> None:
        self._seconds, self._report = seconds, report
        self._longest: dict[str, float] = {}
        self._counts: Counter[str] = Counter()

    def ended(self, action: str, seconds: float) -> None:
        """`action`, such as "forward 3", has taken so long; without its waits."""
        kind = action.partition(" ")[0]
        if kind in _JUDGED:
            self._counts[kind] += 1
            self._longest[kind] = max(self._longest.get(kind, 0.0), seconds)

    def limit(self, action: str) -> float | None:
        """Seconds that `action` may take; None where it is not judged (yet)."""
        kind = action.partition(" ")[0]
        if kind not in _JUDGED or self._seconds == 0:
            return None
        if self._seconds is not None:
            return self._seconds
        return max(_LEAST_SECONDS, _FACTOR * self._longest[kind]) if self._counts[kind] >= _ENOUGH else None

    def look(self, action: str, seconds: float, rank: int, thread: int) -> None:
        """`action` runs for so long, on the thread of this id."""
        limit, frame = self.limit(action), sys._current_frames().get(thread)
        if limit is None or seconds <= limit or in_debugger(frame):
            return
        longest = self._longest.get(action.partition(" ")[0])
        before = "" if longest is None else f", and none of its kind has taken more than {longest:.2g} s"
        self._seconds = 0  # told once
        self._report(Hang(f"{action} runs for {seconds:.0f} s{before}: it hangs {_place(frame)}", where=f"rank {rank}",
                          remedy="Look at that line, or raise --launch.hang-seconds (0 never ends a run)."))


def in_debugger(frame: FrameType | None) -> bool:
    """Whether a debugger holds the code of this frame: one of its own functions is under way there."""
    while frame is not None:
        if _DEBUGGERS.match(frame.f_globals.get("__name__", "")):
            return True
        frame = frame.f_back
    return False


def _place(frame: FrameType | None) -> str:
    return "somewhere" if frame is None else f"in {frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})"
