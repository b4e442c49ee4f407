"""The current action of each rank, published in the shared store for the report of a hang.

A rank records its action with one attribute write; a thread publishes it to the store once a second, together with an
increasing counter, so that a stopped or disconnected rank can be told from a busy one. Other ranks read these entries
only after a wait has lasted too long, and never wait long for a store that does not answer.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Literal, TypeVar

from ranvier.comm.hang import HangDetector
from ranvier.comm.signed_store import SharedStore
from ranvier.errors import MessageTimeout
from ranvier.mesh import Mesh
from ranvier.system.background import in_background, set_result
from ranvier.system.compilation import COMPILATIONS

HEARTBEAT_KEY = "ranvier/beat/"
"""Prefix of the key under which each rank counts its heartbeats (ranvier.launch.heartbeat)."""
_STORE_SECONDS = 5.0
_SHOW_DURATION_SECONDS = 3.0
_POLL_SECONDS = 0.005
_LOOK_SECONDS = 0.5
_UNKNOWN = "not heard from"
_Result = TypeVar("_Result")


class _ExitThread:
    """Runs calls for atexit handlers: Python 3.12 starts no thread while the interpreter shuts down."""

    def __init__(self) -> None:
        self.calls: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, once in a process."""
        if self._thread is None or not self._thread.is_alive():
            self.calls = SimpleQueue()
            self._thread = threading.Thread(target=self._serve, args=(self.calls,), name="ranvier-exit", daemon=True)
            self._thread.start()

    @staticmethod
    def _serve(calls: SimpleQueue[Callable[[], object]]) -> None:
        while True:
            calls.get()()


EXIT_THREAD = _ExitThread()


def call_with_timeout(function: Callable[[], _Result], seconds: float | None = None) -> _Result | None:
    """The result of `function()`; None if it raises or takes longer than `seconds` (default: 5).

    A store behind a broken connection answers after many minutes or never, and its own timeouts do not bound that.
    The call therefore runs on a daemon thread, which is abandoned when the time is over. Code that registers an atexit
    handler starts `EXIT_THREAD`.
    """
    try:
        future = in_background(function, "ranvier-store")
    except RuntimeError:  # the interpreter shuts down
        future = Future()
        EXIT_THREAD.calls.put(partial(set_result, future, function))
    try:
        return future.result(_STORE_SECONDS if seconds is None else seconds)
    except Exception:  # the process that hosts the store has exited, or it is late
        return None
    finally:
        del future  # the error refers to this frame


def read_actions(store: SharedStore, ranks: Sequence[int]) -> dict[int, tuple[int, str]]:
    """Publication counter and latest action of each of `ranks` that has published anything."""
    actions = {}
    for rank in ranks:
        if store.check([_key("action", rank)]):
            count, _, action = store.get(_key("action", rank)).decode().partition(" ")
            actions[rank] = (int(count), action)
    return actions


@contextmanager
def call_of_all_ranks(call: str, report: Callable[[], str]) -> Iterator[None]:
    """Inside, ranks wait for each other in `call`. The error of a wait that is over its time limit names the call and
    includes `report()`, the action of each rank."""
    try:
        yield
    except MessageTimeout as error:
        error.extend(f": {call} must be called by all ranks, and they are in\n{report()}")
        raise


def describe_actions(store: SharedStore, size: int) -> str:
    """One line for each rank that has published its action, for use without an engine and its mesh."""
    actions = call_with_timeout(lambda: read_actions(store, range(size))) or {}
    return "\n".join(f"  rank {rank}: {action}" for rank, (_, action) in actions.items())


def find_silent_ranks(store: SharedStore, ranks: Sequence[int], seconds: float = 2.5) -> list[int] | None:
    """The `ranks` that have published before but publish nothing during the next `seconds`.

    They have exited, are stopped or are disconnected. None if the store does not answer.
    """
    before = call_with_timeout(lambda: _read_all_counters(store, ranks))
    if before is None:
        return None
    time.sleep(seconds)
    after = call_with_timeout(lambda: _read_all_counters(store, ranks))
    return None if after is None else [rank for rank in before if before[rank] == after[rank]]


def read_engine_calls(store: SharedStore, rank: int) -> tuple[str, int]:
    """The last engine (`Board.engine`) of `rank`, and how many of its collective calls the rank has started; ("", 0) if
    it has not published any. A collective call is one that all ranks of the engine's mesh must make.
    """
    if not store.check([_key("calls", rank)]):
        return "", 0
    calls, engine = store.get(_key("calls", rank)).decode().split()
    return engine, int(calls)


def find_waiting_rank(store: SharedStore, rank: int, ranks: Sequence[int]) -> int | None:
    """One of `ranks` that has started a collective call of an engine that `rank`, of the same engine, has not; None if
    there is none. Entries of a lost rank stay in the store, but belong to an earlier engine.

    For a `rank` whose program has ended: the other rank would wait for it forever.
    """
    engine, calls = read_engine_calls(store, rank)
    published = {other: read_engine_calls(store, other) for other in ranks}
    return next((other for other, (name, count) in published.items() if name == engine and count > calls), None)


def _read_all_counters(store: SharedStore, ranks: Sequence[int]) -> dict[int, list[bytes]]:
    """Action entry and heartbeat of each rank. Ranks without an engine have no action entry, but a heartbeat."""
    keys = {rank: [key for key in (_key("action", rank), f"{HEARTBEAT_KEY}{rank}") if store.check([key])]
            for rank in ranks}
    return {rank: [store.get(key) for key in present] for rank, present in keys.items() if present}


def _key(of: Literal["action", "calls", "compiled"], rank: int) -> str:
    return f"ranvier/{of}/{rank}"


class Board:
    """Publishes this rank's current action, and reads those of other ranks for the report of a hang.

    Args:
        store: shared by all ranks.
        rank: this rank.
        mesh: its axes name ranks in reports.
        interval_seconds: time between two publications.
        hang: checks how long this rank's actions take; None checks nothing.
    """

    def __init__(self, store: SharedStore, rank: int, mesh: Mesh, interval_seconds: float = 1.0,
                 hang: HangDetector | None = None) -> None:
        self._store, self._rank, self._mesh, self._interval = store, rank, mesh, interval_seconds
        self._hang = hang
        self._action, self._since, self._previous, self._changes = "its start", time.monotonic(), "", 0
        self._awaited: tuple[str, int] | None = None
        """The message that this rank waits for, and its sender."""
        self._compiled_before = COMPILATIONS.seconds()
        self._action_thread = threading.get_ident()
        self.engine = "-"
        """Name of the engine, the same on all of its ranks."""
        self.place: Callable[[], str] = lambda: ""
        """Position of this rank within its action, such as a layer and pass."""
        self.calls = 0
        """Number of collective engine calls that this rank has started; see `find_waiting_rank`."""
        self._count = 0
        self._checks = (-1, 0)  # the value of _changes at the last check, and checks since then without a change
        self._stop = threading.Event()
        self._thread = threading.Thread(target=_keep_publishing, args=(weakref.ref(self), self._stop, interval_seconds),
                                        name=f"ranvier-board-{rank}", daemon=True)
        self._thread.start()
        # A thread inside a store call while the interpreter shuts down would crash the process.
        EXIT_THREAD.start()
        _OPEN.add(self)
        atexit.unregister(_close_all)
        atexit.register(_close_all)

    @property
    def action(self) -> str:
        """This rank's current action, as a noun phrase ("forward 3", "the optimizer"). Set at every action."""
        if (awaited := self._awaited) is None:
            return self._action
        return f"a wait for {awaited[0]} from {self.name(awaited[1])}"

    @action.setter
    def action(self, action: str) -> None:
        self._count_time()
        self._previous, self._action, self._awaited = self._action, action, None
        self._action_thread = threading.get_ident()

    def _count_time(self) -> None:
        """Record the time when an action, or a wait in it, begins or ends."""
        now = time.monotonic()
        if self._hang is not None:
            compiled = COMPILATIONS.seconds()
            if self._awaited is None:
                self._hang.record(self._action, now - self._since - (compiled - self._compiled_before))
            self._compiled_before = compiled
        self._since = now
        self._changes += 1

    def _check(self) -> None:
        """Count checks, not seconds: time in which this process is stopped must not count as a hang, nor time in which
        it compiles."""
        change, checks = self._checks
        waits = change == self._changes and COMPILATIONS.idle_seconds() != 0
        self._checks = (self._changes, checks + 1 if waits else 0)
        if self._hang is not None:
            self._hang.check(self.action, self._checks[1] * self._interval, self._rank, self._action_thread)

    def _publish(self) -> None:
        self._count += 1
        seconds = self._checks[1] * self._interval
        previous = self._previous if self._awaited is None else self._action
        duration = (f" for {seconds:.0f} s, after {previous or 'nothing'}"
                    if seconds >= _SHOW_DURATION_SECONDS else "")
        place = self.place()
        action = f"{self.action} ({place})" if place else self.action
        self._store.set(_key("action", self._rank), f"{self._count} {action}{duration}")
        self._store.set(_key("calls", self._rank), f"{self.calls} {self.engine}")
        idle = COMPILATIONS.idle_seconds()
        if idle is not None:
            self._store.set(_key("compiled", self._rank), f"{self._count} {idle}")

    def wait(self, what: str, source: int, receive: Callable[[float], _Result | None], seconds: float
             ) -> _Result | None:
        """`receive(seconds)`, which waits that long for `what` from rank `source`; None if it does not arrive: the wait
        then remains this rank's action until the next one is set.

        `receive` is called again while some rank compiles, and until `seconds` have passed since: stages compile one
        after the other, and a message that is late because of that is not lost.
        """
        self._count_time()
        self._awaited = what, source
        seen: dict[int, bytes] = {}
        left = seconds
        while (found := receive(left)) is None:
            new = call_with_timeout(partial(self._compiled_elsewhere, seen)) or {}
            left = seconds - min((float(entry.split()[1]) for entry in new.values()), default=seconds)
            if left <= 0:
                return None
            seen |= new
        self._count_time()
        self._awaited = None
        return found

    def _compiled_elsewhere(self, seen: dict[int, bytes]) -> dict[int, bytes]:
        """Other ranks' published compilation records that have changed since they were `seen`."""
        found = {rank: self._store.get(_key("compiled", rank)) for rank in range(self._mesh.size)
                 if rank != self._rank and self._store.check([_key("compiled", rank)])}
        return {rank: entry for rank, entry in found.items() if seen.get(rank) != entry}

    @contextmanager
    def during(self, call: str) -> Iterator[None]:
        """Inside, `call` is this rank's action; see `call_of_all_ranks`."""
        before, self.action = self._action, call
        try:
            with call_of_all_ranks(call, self.report_all):
                yield
        finally:
            self.action = before

    def name(self, rank: int) -> str:
        """The coordinates of `rank` on the axes of the mesh that have more than one rank: "data 1, pipe 0"."""
        coordinates = self._mesh.coordinates(rank)
        used = [f"{axis} {index}" for axis, index in coordinates.items() if self._mesh[axis] > 1]
        return ", ".join(used) or f"rank {rank}"

    def report(self, what: str, source: int, seconds: float) -> str:
        """Text for a wait of this rank for `what` from rank `source` that has lasted `seconds`.

        The first line is such as "pipe 1 waits 31 s for the forward of microbatch 5 from pipe 0, which is in backward
        2"; one line for each other rank follows.
        """
        actions = self._actions_of_others()
        action = actions[source]
        first = (f"{self.name(self._rank)} waits {seconds:.0f} s for {what} from {self.name(source)}, "
                 f"which is {action if action.startswith(_UNKNOWN) else f'in {action}'}")
        return f"{first}\n{self._lines(actions)}"

    def report_all(self) -> str:
        """One line for each rank with its action and its place in it, for a collective that does not end."""
        place = self.place()
        own = f"{self.action} ({place})" if place else self.action
        return self._lines({self._rank: own} | self._actions_of_others())

    def _actions_of_others(self) -> dict[int, str]:
        call_with_timeout(self._publish)
        time.sleep(2 * self._interval)  # lets ranks that have just started to wait publish that
        others = [rank for rank in range(self._mesh.size) if rank != self._rank]
        published = call_with_timeout(lambda: read_actions(self._store, others))
        unknown = f"{_UNKNOWN}: the store cannot be reached" if published is None else _UNKNOWN
        return {rank: published[rank][1] if published and rank in published else unknown for rank in others}

    def _lines(self, actions: dict[int, str]) -> str:
        return "\n".join(f"  {self.name(rank)} (rank {rank}): {actions[rank]}" for rank in sorted(actions))

    def await_closing(self, calls: int, *, progress: Callable[[], None], seconds: float) -> int | None:
        """Return when all ranks close the engine, or after `seconds`. calls: number of engine calls of this rank; a
        rank that has started more is returned immediately. progress: lets messages progress.

        A rank that closes its engine while others start another batch would meet them in mismatched collectives: a
        hang, or an error of the transport. So it announces in the store that it closes, and waits there until all have
        announced it. A rank that has started more calls would wait for it forever.
        """
        self._store.set(self._closing_key(self._rank), "")
        missing = [rank for rank in range(self._mesh.size) if rank != self._rank]
        began = looked = time.monotonic()
        while missing and time.monotonic() - began < seconds:
            progress()
            missing = [rank for rank in missing if not self._store.check([self._closing_key(rank)])]
            if time.monotonic() - looked >= _LOOK_SECONDS:
                looked = time.monotonic()
                for rank in missing:
                    engine, started = read_engine_calls(self._store, rank)
                    if engine == self.engine and started > calls:
                        return rank
            time.sleep(_POLL_SECONDS if missing else 0.0)
        return None

    def forget_closing(self) -> None:
        """Remove this rank's announcement, after all ranks have returned from `await_closing`."""
        self._store.delete_key(self._closing_key(self._rank))

    def _closing_key(self, rank: int) -> str:
        return f"ranvier/closing/{self.engine}/{rank}"

    def close(self) -> None:
        """Stop publishing. Idempotent."""
        _OPEN.discard(self)
        self._stop.set()
        self._thread.join(_STORE_SECONDS)
        call_with_timeout(self._publish)


_OPEN: weakref.WeakSet[Board] = weakref.WeakSet()


def _close_all() -> None:
    for board in list(_OPEN):
        board.close()


def _keep_publishing(of: weakref.ref[Board], stop: threading.Event, interval_seconds: float) -> None:
    """Publish until the board is closed or unreferenced: an engine that a program has dropped leaves no thread."""
    try:
        while (board := of()) is not None:
            board._check()
            board._publish()
            del board
            if stop.wait(interval_seconds):
                return
    except Exception:  # the store is gone: the run is ending, and its own error is reported elsewhere
        return
