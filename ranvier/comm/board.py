"""Who is doing what: each rank's current action, for the report of a hang.

A rank notes its action with one attribute write; a thread publishes it to the shared store once a second, with a count
that rises, so that a rank which is stopped or cut off can be told from a busy one. Only when a wait has lasted too long
does a rank read what the others wrote; a store that does not answer does not hold it up for long.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch.distributed import Store

from ranvier.comm.hang import HangWatch
from ranvier.comm.signed_store import SignedStore
from ranvier.mesh import Mesh

BEAT = "ranvier/beat/"
"""Where each rank counts the signs of life that it gives from its start to its end (ranvier.lifeline)."""
_STORE_SECONDS = 5.0
_WORTH_TELLING_SECONDS = 3.0
_Result = TypeVar("_Result")


def in_time(function: Callable[[], _Result], seconds: float | None = None) -> _Result | None:
    """`function()`, or None when it raises or takes longer (5 s by default): a store behind a dead link answers after
    many minutes, if ever, and its own timeouts do not bound that."""
    found: list[_Result] = []

    def call() -> None:
        try:
            found.append(function())
        except Exception:  # the store has gone
            return

    thread = threading.Thread(target=call, name="ranvier-store", daemon=True)
    thread.start()
    thread.join(_STORE_SECONDS if seconds is None else seconds)
    return found[0] if found else None


def said(store: Store | SignedStore, ranks: Sequence[int]) -> dict[int, tuple[int, str]]:
    """How often each of `ranks` has said something, and the last of it; without those that never have."""
    found = {}
    for rank in ranks:
        if store.check([_key(rank)]):
            count, _, doing = store.get(_key(rank)).decode().partition(" ")
            found[rank] = (int(count), doing)
    return found


def silent(store: Store | SignedStore, ranks: Sequence[int], seconds: float = 2.5) -> list[int] | None:
    """Those of `ranks` that have said something before, and nothing in the next `seconds`: they are gone, stopped or
    cut off. None when the store does not answer."""
    before = in_time(lambda: _signs(store, ranks))
    time.sleep(seconds)
    after = before and in_time(lambda: _signs(store, ranks))
    return None if before is None or after is None else [rank for rank in before if before[rank] == after[rank]]


def begun(store: Store | SignedStore, rank: int) -> tuple[int, int]:
    """How many calls that all ranks of its mesh make a rank has begun with its engine, and how many ranks that mesh
    has."""
    if not store.check([_calls_key(rank)]):
        return 0, 0
    calls, size = store.get(_calls_key(rank)).decode().split()
    return int(calls), int(size)


def waits_for(store: Store | SignedStore, rank: int, ranks: Sequence[int]) -> int | None:
    """One of `ranks` that has begun a call which needs `rank`, whose program has ended before it; None where there is
    none."""
    mine = begun(store, rank)[0]
    for other in ranks:
        calls, size = begun(store, other)
        if other != rank and rank < size and calls > mine:
            return other
    return None


def _signs(store: Store | SignedStore, ranks: Sequence[int]) -> dict[int, list[bytes]]:
    """All that `ranks` have said last: here, and by their heartbeat, which beats where there is no board, too."""
    keys = {rank: [key for key in (_key(rank), f"{BEAT}{rank}") if store.check([key])] for rank in ranks}
    return {rank: [store.get(key) for key in found] for rank, found in keys.items() if found}


def _key(rank: int) -> str:
    return f"ranvier/board/{rank}"


def _calls_key(rank: int) -> str:
    return f"ranvier/calls/{rank}"


class Board:
    """This rank's line on the board, and the others' when something hangs.

    hang: judges how long this rank's actions may take; None judges none.
    """

    def __init__(self, store: Store | SignedStore, rank: int, mesh: Mesh, interval_seconds: float = 1.0,
                 hang: HangWatch | None = None) -> None:
        self._store, self._rank, self._mesh, self._interval = store, rank, mesh, interval_seconds
        self._hang = hang
        self._doing, self._since, self._last, self._changes = "its start", time.monotonic(), "", 0
        self._runs_on = threading.get_ident()
        self.calls = 0
        """Calls that this rank has begun of those that all ranks of the mesh make; see `waits_for`."""
        self._count = 0
        self._looks = (0, 0)  # at which change, and how often since
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep_publishing, name=f"ranvier-board-{rank}", daemon=True)
        self._thread.start()
        # A thread that is inside a store while the interpreter is taken down brings the process down with it.
        atexit.register(self.close)

    @property
    def doing(self) -> str:
        """What this rank is in now, as a noun; written by the rank at every action."""
        return self._doing

    @doing.setter
    def doing(self, what: str) -> None:
        now = time.monotonic()
        if self._hang is not None:
            self._hang.ended(self._doing, now - self._since)
        if not self._doing.startswith("a wait"):
            self._last = self._doing
        self._doing, self._since, self._runs_on = what, now, threading.get_ident()
        self._changes += 1

    def _keep_publishing(self) -> None:
        try:
            self._publish()
            while not self._stop.wait(self._interval):
                self._look()
                self._publish()
        except Exception:  # the store has gone: the run is ending, and its own error is being told elsewhere
            return

    def _look(self) -> None:
        """Looks are counted, not seconds: of those in which this process was stopped, nothing follows."""
        change, looks = self._looks
        self._looks = (self._changes, looks + 1 if change == self._changes else 0)
        if self._hang is not None:
            self._hang.look(self._doing, self._looks[1] * self._interval, self._rank, self._runs_on)

    def _publish(self) -> None:
        self._count += 1
        seconds = self._looks[1] * self._interval
        how_long = f" for {seconds:.0f} s, after {self._last or 'nothing'}" if seconds >= _WORTH_TELLING_SECONDS else ""
        self._store.set(_key(self._rank), f"{self._count} {self._doing}{how_long}")
        self._store.set(_calls_key(self._rank), f"{self.calls} {self._mesh.size}")

    def name(self, rank: int) -> str:
        """A rank in words: only the axes that the mesh uses."""
        at = self._mesh.coordinates(rank)
        used = [f"{axis} {getattr(at, axis)}" for axis in ("data", "pipe", "row", "col")
                if getattr(self._mesh, axis) > 1]
        return ", ".join(used) or f"rank {rank}"

    def report(self, what: str, source: int, seconds: float) -> str:
        """`pipe 1 waits 31 s for the forward of microbatch 5 from pipe 0, which is in backward 2`, and one line for
        every other rank."""
        in_time(self._publish)
        time.sleep(2 * self._interval)  # ranks that have just begun to wait get to say so
        others = [rank for rank in range(self._mesh.size) if rank != self._rank]
        heard = in_time(lambda: said(self._store, others))
        nothing = "not heard of: the store cannot be reached" if heard is None else "not heard of"
        doing = {rank: heard[rank][1] if heard and rank in heard else nothing for rank in others}
        at = doing[source]
        first = (f"{self.name(self._rank)} waits {seconds:.0f} s for {what} from {self.name(source)}, "
                 f"which is {at if at == nothing else f'in {at}'}")
        return "\n".join([first, *(f"  {self.name(rank)} (rank {rank}): {doing[rank]}" for rank in others)])

    def close(self) -> None:
        """Stop publishing. Idempotent."""
        atexit.unregister(self.close)
        self._stop.set()
        self._thread.join(_STORE_SECONDS)
        in_time(self._publish)
