"""Ends ranks that stay behind after a failure elsewhere, within ten seconds and with a report of who waits for whom.

A rank in a collective on a CUDA device waits in the driver: no error of a peer reaches it, and torchrun's agent gives
it 30 seconds, or on another machine none notices at all. So the thread of the heartbeat looks, once a second, at

    the record of the first failure in the shared store, which each failing rank writes
    the processes of the other ranks on this machine: one that was killed outright writes nothing
    the connections of Gloo, which break at once when a peer's process ends, also on another machine

A rank that is still there LEAVE_CHECKS seconds after one of these leaves: by then its own error, or its launcher, would
have ended it. The first one that leaves prints what every rank was doing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from ranvier.comm.board import call_with_timeout, read_actions
from ranvier.comm.signed_store import SharedStore
from ranvier.system.processes import Process

FAILED = "ranvier/failed"
"""Store key of the record (JSON) of the first rank that failed."""
FINISHED = "ranvier/finished"
"""Store key that is set once all ranks have finished; FINISHED/RANK once one has."""
_REPORTED = "ranvier/left-behind"
LEAVE_CHECKS = 5
"""Checks, once a second, after which a rank leaves that a failure has left behind."""
_GONE_CHECKS = 2
"""A process that ends writes its record before, but this rank may read the store in between."""


class FailureWatch:
    """Watches, on one rank, for failures of others. `check` is to be called once a second.

    Args:
        rank, size: of this rank; both may change.
        store: a connection that no other thread uses.
        lost: what this rank's connections tell of a lost peer; None while all are there.
    """

    def __init__(self, rank: int, size: int, store: SharedStore, lost: Callable[[], str | None]) -> None:
        self.rank, self.size, self._store, self._lost = rank, size, store, lost
        self._checks = 0
        self._gone: dict[int, int] = {}
        self._cause: str | None = None

    def check(self, neighbours: Mapping[int, Process]) -> str | None:
        """Why this rank must leave now; None to stay. neighbours: processes of other ranks on this machine."""
        for rank, process in neighbours.items():
            if process.runs or self._store.check([f"{FINISHED}/{rank}"]):
                continue
            self._gone[rank] = self._gone.get(rank, 0) + 1
            if self._gone[rank] == _GONE_CHECKS:  # killed: others, on other machines too, learn of it from the record
                self._store.compare_set(FAILED, "", json.dumps(
                    {"rank": rank, "code": 1, "reported": False, "num_lost": 1, "retryable": True, "killed": True}))
        if self._cause is None:
            self._cause = self._failure() or self._lost()
        if self._cause is None:
            return None
        self._checks += 1
        return self._cause if self._checks > LEAVE_CHECKS else None

    def _failure(self) -> str | None:
        if not self._store.check([FAILED]):
            return None
        record = json.loads(self._store.get(FAILED))
        return None if record["rank"] == self.rank else f"rank {record['rank']} has failed"

    def report(self, cause: str, describe: Callable[[int], str]) -> str | None:
        """Report of what all ranks are doing, for the first rank that asks; None for the others.

        describe: coordinates of a rank, in words.
        """
        if call_with_timeout(lambda: may_report_killed(self._store, self.rank)) is False:
            return None
        actions = call_with_timeout(lambda: read_actions(self._store, range(self.size))) or {}
        return "\n".join([f"{cause}, and rank {self.rank} leaves, which waits for it. Ranks were in:", *(
            f"  rank {rank} ({describe(rank)}): {actions[rank][1] if rank in actions else 'not heard from'}"
            for rank in range(self.size))])


def may_report_killed(store: SharedStore, rank: int) -> bool:
    """Whether `rank` is the first that asks: it reports the loss of a rank that could not report it itself."""
    return store.compare_set(_REPORTED, "", str(rank)).decode() == str(rank)
