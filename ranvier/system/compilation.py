"""When this process compiles with torch.compile, which no time limit counts; and `without_compiler`, which avoids the
import of torch's compiler."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

_LONGEST_SECONDS = 3600.0
"""A compilation that lasts longer counts as ended: it may never end."""


class Compilations:
    """The compilations of a process. torch tells of their begin and end, on whichever thread (`watch`)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._state: tuple[float, float | None, float | None] = 0.0, None, None
        """Seconds of compilations that have ended; when that under way began; when the last one ended. Replaced as a
        whole, so that readers need no lock."""

    def begin(self, *_: object) -> None:
        """One begins; others that run at the same time are part of it."""
        with self._lock:
            seconds, _began, ended = self._state
            self._state = seconds, time.monotonic(), ended

    def end(self, *_: object) -> None:
        """All have ended."""
        with self._lock:
            seconds, began, _ended = self._state
            now = time.monotonic()
            self._state = seconds if began is None else seconds + now - began, None, now

    def seconds(self) -> float:
        """Seconds of this process in compilations so far."""
        seconds, began, _ = self._state
        return seconds if began is None else seconds + time.monotonic() - began

    def idle_seconds(self) -> float | None:
        """Seconds since the last compilation ended, 0 during one; None where nothing was compiled."""
        _, began, ended = self._state
        if began is not None:
            return max(0.0, time.monotonic() - began - _LONGEST_SECONDS)
        return None if ended is None else time.monotonic() - ended


COMPILATIONS = Compilations()
"""Compilations of this process."""


def watch() -> None:
    """Have torch tell `COMPILATIONS` of its compilations. Idempotent; imports torch's compiler."""
    from torch._dynamo.callback import callback_handler

    if COMPILATIONS.begin not in callback_handler.start_callbacks:  # `torch._dynamo.reset` forgets them
        callback_handler.register_start_callback(COMPILATIONS.begin)
        callback_handler.register_end_callback(COMPILATIONS.end)


class _ImportedOnUse(ModuleType):
    """Stands for `torch._dynamo`, which whoever asks for more than `disable` imports."""

    @staticmethod
    def disable(function: Callable[..., object], *args: object, **options: object) -> Callable[..., object]:
        return function

    def __getattr__(self, name: str) -> Any:
        self.remove()
        import torch._dynamo

        return getattr(torch._dynamo, name)

    def remove(self) -> None:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__], torch._dynamo


@contextmanager
def without_compiler() -> Iterator[None]:
    """Inside, operations on the meta device do not import torch's compiler, which takes more than a second.

    Torch computes shapes with Python functions that it hides from the compiler (`torch._disable_dynamo`), and imports
    it for the first of them. Nothing is compiled here, so there is nothing to hide them from.
    """
    stand_in = _ImportedOnUse("torch._dynamo")
    if stand_in.__name__ not in sys.modules:
        sys.modules[stand_in.__name__] = torch._dynamo = stand_in
    try:
        yield
    finally:
        stand_in.remove()
