"""The agreement of all ranks that an engine is closed, over the shared store.

A rank that closes its engine while others start another batch would meet them in collectives that do not belong
together: a hang, or an error of the transport. So a rank says in the store that it closes, and waits there until all
have said so. Meanwhile it looks at what the others publish (`comm/board`): one that has started more calls than this
rank has made would wait for it forever.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ranvier.comm.board import read_engine_calls
from ranvier.comm.signed_store import SharedStore

_POLL_SECONDS = 0.005
_LOOK_SECONDS = 0.5


class Closing:
    """engine: a name of the engine, the same on all of its ranks and on no other engine's."""

    def __init__(self, store: SharedStore, engine: str, rank: int, size: int) -> None:
        self._store, self._engine, self._rank, self._size = store, engine, rank, size

    def _key(self, rank: int) -> str:
        return f"ranvier/closing/{self._engine}/{rank}"

    def wait(self, calls: int, *, progress: Callable[[], None], seconds: float) -> int | None:
        """Return when all ranks close the engine, or after `seconds`. A rank that has started more than `calls` calls
        of it, as many as this one has made, is returned at once. progress: lets messages move."""
        self._store.set(self._key(self._rank), "")
        missing = [rank for rank in range(self._size) if rank != self._rank]
        began = looked = time.monotonic()
        while missing and time.monotonic() - began < seconds:
            progress()
            missing = [rank for rank in missing if not self._store.check([self._key(rank)])]
            if time.monotonic() - looked >= _LOOK_SECONDS:
                looked = time.monotonic()
                for rank in missing:
                    engine, started = read_engine_calls(self._store, rank)
                    if engine == self._engine and started > calls:
                        return rank
            time.sleep(_POLL_SECONDS if missing else 0.0)
        return None

    def forget(self) -> None:
        """All ranks have returned from `wait`."""
        self._store.delete_key(self._key(self._rank))
