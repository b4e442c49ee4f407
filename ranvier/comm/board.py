"""Who is doing what: each rank's current action, for the report of a hang.

A rank notes its action with one attribute write; a thread publishes it to the shared store once a second when it has
changed. Only when a wait has lasted too long does a rank read what the others wrote.
"""

from __future__ import annotations

import threading
import time

from torch.distributed import Store

from ranvier.mesh import Mesh


class Board:
    """This rank's line on the board, and the others' when something hangs."""

    def __init__(self, store: Store, rank: int, mesh: Mesh, interval_seconds: float = 1.0) -> None:
        self._store, self._rank, self._mesh, self._interval = store, rank, mesh, interval_seconds
        self.doing = "its start"
        """What this rank is in now, as a noun; written by the rank at every action."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._publish_changes, name=f"ranvier-board-{rank}", daemon=True)
        self._thread.start()

    def _publish_changes(self) -> None:
        published = None
        while not self._stop.wait(self._interval):
            if self.doing != published:
                published = self.doing
                if not self._publish():
                    return

    def _publish(self) -> bool:
        try:
            self._store.set(self._key(self._rank), self.doing)
        except Exception:  # the store has gone: the run is ending, and its own error is being told elsewhere
            return False
        return True

    @staticmethod
    def _key(rank: int) -> str:
        return f"ranvier/board/{rank}"

    def name(self, rank: int) -> str:
        """A rank in words: only the axes that the mesh uses."""
        at = self._mesh.coordinates(rank)
        used = [f"{axis} {getattr(at, axis)}" for axis in ("data", "pipe", "row", "col")
                if getattr(self._mesh, axis) > 1]
        return ", ".join(used) or f"rank {rank}"

    def read(self, rank: int) -> str:
        """What `rank` last said it was doing."""
        try:
            return self._store.get(self._key(rank)).decode() if self._store.check([self._key(rank)]) else "not heard of"
        except Exception:
            return "not heard of: the store cannot be reached"

    def waiting(self, what: str, source: int, seconds: float) -> str:
        """`pipe 1 waits 31 s for the forward of microbatch 5 from pipe 0, which is in backward 2`."""
        said = self.read(source)
        return (f"{self.name(self._rank)} waits {seconds:.0f} s for {what} from {self.name(source)}, "
                f"which is {said if said.startswith('not heard of') else f'in {said}'}")

    def report(self, what: str, source: int, seconds: float) -> str:
        """The line above for this rank, and one line for every other rank."""
        self._publish()
        time.sleep(2 * self._interval)  # ranks that have just begun to wait get to say so
        others = [f"  {self.name(rank)} (rank {rank}): {self.read(rank)}" for rank in range(self._mesh.size)
                  if rank != self._rank]
        return "\n".join([self.waiting(what, source, seconds), *others])

    def close(self) -> None:
        """Stop publishing. Idempotent."""
        self._stop.set()
        self._thread.join()
