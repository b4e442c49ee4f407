"""When this process compiles with torch.compile, so that no limit of time counts that."""

from __future__ import annotations

import threading
import time

_LONGEST_SECONDS = 3600.0
"""A compilation that lasts longer counts as ended: it may never end."""


class Compilations:
    """The compilations of a process. torch tells of their begin and end, on whichever thread (`watch`)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began: float | None = None
        self._ended: float | None = None
        self._seconds = 0.0

    def begin(self, *_: object) -> None:
        """One begins; others that run at the same time are part of it."""
        with self._lock:
            self._began = time.monotonic()

    def end(self, *_: object) -> None:
        """All have ended."""
        with self._lock:
            if self._began is not None:
                self._seconds += time.monotonic() - self._began
            self._began, self._ended = None, time.monotonic()

    def seconds(self) -> float:
        """Seconds of this process in compilations so far."""
        with self._lock:
            return self._seconds + (0.0 if self._began is None else time.monotonic() - self._began)

    def idle_seconds(self) -> float | None:
        """Seconds since the last compilation ended, 0 during one; None where nothing was compiled."""
        with self._lock:
            if self._began is not None:
                return max(0.0, time.monotonic() - self._began - _LONGEST_SECONDS)
            return None if self._ended is None else time.monotonic() - self._ended


COMPILATIONS = Compilations()
"""Of this process."""


def watch() -> None:
    """Have torch tell `COMPILATIONS` of its compilations. Idempotent; imports torch's compiler."""
    from torch._dynamo.callback import callback_handler

    if COMPILATIONS.begin not in callback_handler.start_callbacks:  # `torch._dynamo.reset` forgets them
        callback_handler.register_start_callback(COMPILATIONS.begin)
        callback_handler.register_end_callback(COMPILATIONS.end)
