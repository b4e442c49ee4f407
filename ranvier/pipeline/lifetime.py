"""Whether an engine can be called: not when it is closed, or when a call has failed in the middle."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from ranvier.errors import RanvierError


class Lifetime:
    """State of one engine from its start on. forks: whether it may be called in a forked process, which has no
    connections to other ranks."""

    def __init__(self, *, forks: bool) -> None:
        self._process = None if forks else os.getpid()
        self.is_closed = False
        self.failure: str | None = None
        """The first error inside of `working`."""
        self._runs_batch = False

    def check(self, call: str) -> None:
        """Raise RanvierError if the engine cannot be called. call: as for `Engine.check_usable`."""
        where = call if "." in call else f"Engine.{call}"
        if self.is_closed:
            raise RanvierError("is closed" if where != call else "has an engine that is closed", code="engine-closed",
                               where=where, remedy="Build a new engine.")
        if self.failure is not None:
            raise RanvierError(f"cannot be used: a call of the engine failed in the middle with {self.failure}",
                               code="engine-failed", where=where,
                               remedy="Close the engine, build a new one on all ranks, and load a checkpoint.")
        if self._process not in (None, os.getpid()):
            raise RanvierError("is called in a forked process, which has no connections to other ranks",
                               code="engine-forked", where=where, value=os.getpid(),
                               remedy="Call it in the process that built the engine.")
        if self._runs_batch:
            raise RanvierError("is called while the engine runs a batch, as by observe, a block or an optimizer",
                               code="engine-in-batch", where=where, remedy="Call it after the batch.")

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Context for a batch: as `working`, and the engine cannot be called inside."""
        self._runs_batch = True
        try:
            with self.working():
                yield
        finally:
            self._runs_batch = False

    @contextmanager
    def working(self) -> Iterator[None]:
        """Context for work in which other ranks take part, or which changes the state step by step: after an error
        inside, the state is undefined."""
        try:
            yield
        except BaseException as error:
            text = error.what if isinstance(error, RanvierError) else str(error)
            self.failure = self.failure or f"{type(error).__name__}: {text.partition(chr(10))[0]}"
            raise
