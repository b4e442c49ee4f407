"""Protocol by which a run continues without lost ranks: messages in the run's store between supervisors, rank 0 and the
other survivors.

    supervisors             rank 0                                    survivors
    write who was killed
                            break their connections, so that every wait for a rank ends; then say what they still have
                            hears all, and decides on members and
                            all that follows
                                                                      read the verdict
                            connect to each other under their new numbers, in the old order

Members keep their names when their ranks change: a name is the number of the process among those started together, or
for ranks that have joined the ID of their request and their number in it. Every wait here has a limit. If another lost
rank is reported meanwhile, the agreement starts again. If the verdict is that the run cannot continue, or no verdict
comes, the run ends with the first error.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ranvier.comm.signed_store import SharedStore, await_keys, clone_shared_store
from ranvier.comm.torch_backend import TorchBackend, torch_generation
from ranvier.errors import TransportError
from ranvier.launch.heartbeat import FAILED
from ranvier.world import World

_SURVIVES = "ranvier/lost-ranks/survives"
_GIVEN_UP = "ranvier/lost-ranks/given-up"
_LOST = "ranvier/lost-ranks/lost/"
_CLOSED = json.dumps(None)
_WATCH_SECONDS = 0.1
_NOTICE_SECONDS = 3.0
"""A supervisor reports a lost rank within hundredths of a second; an error without a report has another cause."""
_SETTLE_SECONDS = 0.1
"""Ranks that are killed together are reported one after the other."""
_CONNECT_SECONDS = 10.0

Decide = Callable[[Sequence[Any]], dict[str, object] | str]
"""Makes the decision, JSON-serialisable, from what each survivor has; a string says why the run cannot continue."""


@dataclass(frozen=True, kw_only=True)
class LostRank:
    """A lost rank. member: its name. how: its end, as in "was killed by SIGKILL"."""

    member: str
    how: str


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Agreement with which survivors continue. number: number of lost ranks so far. lost: lost ranks, by their old
    ranks. members: the survivors' names, by their new ranks. decision: of rank 0, JSON-serialisable."""

    number: int
    lost: Mapping[int, LostRank]
    members: tuple[str, ...]
    decision: Mapping[str, Any]


# --- for supervisors


def report_lost_rank(store: SharedStore, lost: LostRank) -> bool:
    """Report a lost rank to the run. False if the run does not continue without it: its ranks have no copies yet, the
    run has ended, or its settings do not allow it."""
    if not store.check([_SURVIVES]):
        return False
    own, number = json.dumps([lost.member, lost.how]), 0
    while (found := store.compare_set(f"{_LOST}{number}", "", own).decode()) != own:
        if found == _CLOSED:
            return False
        number += 1
    return True


def end_reason(store: SharedStore) -> str | None:
    """Why the run ends after the reported losses of ranks; None while it continues."""
    return store.get(_GIVEN_UP).decode() if store.check([_GIVEN_UP]) else None


# --- for ranks


class LostRanks:
    """The lost ranks of a run that continues without them, as one of its ranks sees them.

    Args:
        world: of this rank, which `connect` changes.
        on_lost_rank: called, on any thread, as soon as a lost rank is reported, after this rank's connections have been
            broken.
    """

    def __init__(self, world: World, *, timeout_seconds: float, on_lost_rank: Callable[[], None]) -> None:
        self._world = world
        self._store, self._timeout = clone_shared_store(world.store), timeout_seconds
        self._on_lost_rank = on_lost_rank
        self._known = world.num_lost_ranks
        """Number of lost ranks for which connections have been broken."""
        self._lock, self._ending = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ranvier-lost-ranks", daemon=True)

    def begin(self) -> None:
        """Begin to survive lost ranks, once all ranks have the copies for it. Supervisors report lost ranks only after
        `begin` on rank 0."""
        self._thread.start()
        if self._world.rank == 0:
            self._world.store.set(_SURVIVES, "")

    def end(self) -> None:
        """On rank 0: let a lost rank end the run from now on. TransportError if a lost rank has just been reported."""
        if self._world.store.compare_set(f"{_LOST}{self._known}", "", _CLOSED).decode() != _CLOSED:
            raise TransportError("was lost", code="rank-lost", where="a rank", remedy="Check which rank has stopped.")

    def close(self) -> None:
        """Stop watching. A thread inside a store call while the interpreter shuts down would crash the process."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join(_NOTICE_SECONDS)

    def agree(self, error: Exception, has: object, decide: Decide) -> Agreement:
        """After `error`: agree with the other survivors on how to continue. Raises `error` if no rank is lost, or the
        run cannot continue.

        has: description of this rank's state, JSON-serialisable. decide: called on rank 0.
        """
        store = self._world.store
        await_keys(store, [f"{_LOST}{self._world.num_lost_ranks}"], _NOTICE_SECONDS,
                   stops=lambda: store.check([FAILED]))
        while len(self._read(store)) > self._world.num_lost_ranks:
            time.sleep(_SETTLE_SECONDS)
            reported = self._read(store)
            self._break(len(reported))
            found = self._agree(reported, has, decide)
            if found is not None:
                if isinstance(found, str):
                    break
                self._world.num_lost_ranks = len(reported)
                return found
        raise error

    def connect(self, agreement: Agreement) -> None:
        """Connect the survivors, which become the world's only ranks, with new numbers. TransportError if a survivor
        does not answer."""
        world, members = self._world, agreement.members
        assert world.torch_store is not None, "the run survives lost ranks"
        before = world.backend if isinstance(world.backend, TorchBackend) else None
        with self._lock:
            if self._known > agreement.number:
                raise TransportError("was lost", code="rank-lost", where="another rank",
                                     remedy="Check which rank has stopped.")
            if before is not None:
                before.sockets.severed = False
        new_rank = members.index(world.members[world.rank])
        made = torch_generation(f"lost-ranks/{agreement.number}", new_rank, len(members), world.torch_store,
                                world.device, self._timeout,
                                connect_seconds=min(_CONNECT_SECONDS, self._timeout), before=before)
        world.change(made, members)

    def _agree(self, reported: Sequence[LostRank], has: object, decide: Decide) -> Agreement | str | None:
        """An agreement, why there is none, or None if another lost rank has been reported meanwhile."""
        store, rank, members = self._world.store, self._world.rank, self._world.members
        place = f"{_LOST}{len(reported)}/"
        gone = {loss.member: loss for loss in reported}
        lost = {number: gone[name] for number, name in enumerate(members) if name in gone}
        survivors = [number for number in range(len(members)) if number not in lost]
        if 0 in lost:
            return "rank 0 is lost"
        store.set(f"{place}has/{members[rank]}", json.dumps(has))

        def stops() -> bool:
            return store.check([FAILED]) or self._has_more(reported)

        if rank == 0:
            names = [f"{place}has/{members[number]}" for number in survivors]
            answered = await_keys(store, names, self._timeout, stops=stops)
            if self._has_more(reported):
                return None
            decision = decide([json.loads(store.get(name)) for name in names]) if answered else \
                "survivors do not answer"
            if isinstance(decision, str):
                store.set(_GIVEN_UP, decision)
            store.set(f"{place}verdict", json.dumps({
                "decision": decision, "members": [members[number] for number in survivors]}))
        if not await_keys(store, [f"{place}verdict"], 2 * self._timeout, stops=stops):
            return None if self._has_more(reported) else "rank 0 does not answer"
        verdict = json.loads(store.get(f"{place}verdict"))
        if isinstance(verdict["decision"], str) or members[rank] not in verdict["members"]:
            return str(verdict["decision"])
        return Agreement(number=len(reported), lost=lost, decision=verdict["decision"],
                         members=tuple(verdict["members"]))

    def _has_more(self, reported: Sequence[LostRank]) -> bool:
        return len(self._read(self._world.store, len(reported))) > 0

    @staticmethod
    def _read(store: SharedStore, first: int = 0) -> list[LostRank]:
        """The lost ranks reported so far, from number `first` on."""
        found: list[LostRank] = []
        while store.check([key := f"{_LOST}{first + len(found)}"]):
            value = json.loads(store.get(key))
            if value is None:
                break
            found.append(LostRank(member=value[0], how=value[1]))
        return found

    def _watch(self) -> None:
        try:
            while not self._ending.wait(_WATCH_SECONDS):
                more = len(self._read(self._store, self._known))
                if more:
                    self._break(self._known + more)
        except Exception:  # the store is gone: the heartbeat reports it, and ends this rank
            return

    def _break(self, number: int) -> None:
        """Break this rank's connections once for `number` lost ranks. Connections made after that stay."""
        with self._lock:
            if number > self._known:
                self._known = number
                self._world.sever()
                self._on_lost_rank()
