"""Detects actions that will never end: an infinite loop in a user's layer, a driver call that does not return.

Waits have a time limit, and a stopped process is detected from outside. The remaining case is a rank that computes
forever. A collective inside an action, as on a tensor mesh, is a wait: the delay is caused by another rank. Only
earlier actions of the same kind show how long an action may take. So an action has no limit until a few of its kind
have ended (the first ones may compile), and the limit is a generous multiple of the longest of them. Code that hangs
while it holds the GIL cannot be detected from within: the time limit of the ranks that wait for it ends the run.
"""

from __future__ import annotations

import gc
import re
import sys
import threading
from collections.abc import Callable
from types import FrameType

from ranvier.errors import Hang

_TIMES_LONGEST = 20
_MIN_LIMIT_SECONDS = 30.0
_MIN_SAMPLES = 3
_CHECKED_KINDS = ("forward", "backward", "weight")
_WAITS = re.compile(r"ranvier\.(comm\.(?!hang)|pipeline\.device_timeline|system\.pinned_memory)"
                    r"|bdb|pdb|_?pydevd|IPython\.core\.debugger")
"""Modules that wait for other ranks, for a device that may wait for them, or for a person at a debugger."""
_BACKWARD = "torch.autograd.graph", "_engine_run_backward"
"""The module of torch, and its function, that waits for a backward."""


class HangDetector:
    """Checks the actions of one rank on one mesh, and reports the first that hangs.

    Args:
        seconds: the limit of one action; 0 for no limit; None for 20 times the longest earlier action of its kind, at
            least 30 seconds.
        report: called once with the error, on the thread that calls `check`.
    """

    def __init__(self, seconds: float | None, report: Callable[[Hang], None]) -> None:
        self._seconds, self._report = seconds, report
        self._longest: dict[str, float] = {}
        self._counts = dict.fromkeys(_CHECKED_KINDS, 0)
        self._waited = 0.0
        """Seconds that the action had run when it was last seen waiting."""

    def record(self, action: str, seconds: float) -> None:
        """Note that `action`, such as "forward 3", has ended after `seconds`, waits excluded."""
        kind = action.partition(" ")[0]
        if kind in self._counts:
            self._counts[kind] += 1
            self._longest[kind] = max(seconds, self._longest.get(kind, seconds))

    def limit(self, action: str) -> float | None:
        """Seconds that `action` may take; None if it has no limit (yet)."""
        kind = action.partition(" ")[0]
        if kind not in _CHECKED_KINDS or self._seconds == 0:
            return None
        if self._seconds is not None:
            return self._seconds
        if self._counts[kind] < _MIN_SAMPLES:
            return None
        return max(_MIN_LIMIT_SECONDS, _TIMES_LONGEST * self._longest[kind])

    def check(self, action: str, seconds: float, rank: int, thread: int) -> None:
        """Report a `Hang` if `action`, which has run for `seconds` on the thread with id `thread`, is over its limit.

        Time counts from the last wait in the second half of the limit on.
        """
        limit = self.limit(action)
        if limit is None:
            return
        if seconds < self._waited:  # another action
            self._waited = 0.0
        if seconds < limit / 2:  # reading frames inspects all threads of the process
            return
        frame = _frame_of_action(thread)
        if is_waiting(frame):
            self._waited = seconds
        seconds -= self._waited
        if seconds <= limit:
            return
        longest = self._longest.get(action.partition(" ")[0])
        before = "" if longest is None else f", and none of its kind has taken more than {longest:.2g} s"
        self._seconds = 0  # report only once
        self._report(Hang(f"{action} runs for {seconds:.0f} s{before}: it hangs {_location(frame)}",
                          code="hang", where=f"rank {rank}",
                          remedy="Look at that line, or raise `--launch.hang-seconds` (0 sets no limit)."))


_FRAMES_LOCK = threading.Lock()


def frames_of_threads() -> dict[int, FrameType]:
    """The innermost frame of each thread of this process, by the thread's id."""
    # Before Python 3.12 a garbage collection inside may release the GIL to a thread that then waits forever for the
    # lock of all frames. Threads take turns, so that none enables collections again while another one reads.
    with _FRAMES_LOCK:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if collects:
                gc.enable()


def _frame_of_action(thread: int) -> FrameType | None:
    """The innermost frame of an action on this thread. A backward on a device runs hooks and functions in a thread of
    autograd's, which no Python code has started: its frame, if the thread of the action waits for it."""
    frames = frames_of_threads()
    frame = frames.get(thread)
    if frame is None or (frame.f_globals.get("__name__"), frame.f_code.co_name) != _BACKWARD:
        return frame
    started = {one.ident for one in threading.enumerate() if not isinstance(one, threading._DummyThread)}
    return next((other for number, other in frames.items() if number not in started), frame)


def is_waiting(frame: FrameType | None) -> bool:
    """Whether the code of `frame` waits for other ranks, or is halted by a debugger: whether a function of the modules
    in `_WAITS` is on the stack."""
    while frame is not None:
        if _WAITS.match(frame.f_globals.get("__name__", "")):
            return True
        frame = frame.f_back
    return False


def _location(frame: FrameType | None) -> str:
    if frame is None:
        return "at an unknown place"
    return f"in {frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})"
