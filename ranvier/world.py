"""One started rank's surroundings, as everything above `launch` sees them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.distributed import Store

from ranvier.comm.hang import HangWatch
from ranvier.comm.protocol import Backend
from ranvier.comm.signed_store import SignedStore
from ranvier.mesh import Mesh


@dataclass(kw_only=True)
class World:
    """This rank, how it was started, how it reaches the others, and where it computes.

    mesh: what `start` was asked for; None where the ranks were started without one.
    hang: makes what judges whether this rank's actions hang; None where they are not judged.
    overdue: names a wait that should have ended at its time limit and has not, None where there is none.
    store: a key-value store that all ranks share (who does what, who failed); never used on a hot path.
    """

    backend: Backend
    store: Store | SignedStore
    launcher: str
    device: torch.device
    local_rank: int
    local_size: int
    mesh: Mesh | None = None
    hang: Callable[[], HangWatch] | None = None
    overdue: Callable[[], str | None] = lambda: None

    @property
    def rank(self) -> int:
        return self.backend.rank

    @property
    def size(self) -> int:
        return self.backend.size
