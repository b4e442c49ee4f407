"""The runtime context of one started rank: its backend, shared store, device and place on its machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed import Store

from ranvier.comm.hang import HangDetector
from ranvier.comm.protocol import Backend
from ranvier.comm.signed_store import SharedStore
from ranvier.mesh import Mesh


@dataclass(frozen=True, kw_only=True)
class JoinPoint:
    """Where ranks that join a run later reach its store. address, port: where it listens. secret: of its signed values.
    """

    address: str
    port: int
    secret: str = field(repr=False)


@dataclass(kw_only=True)
class World:
    """One started rank, as `ranvier.start` returns it.

    backend: connects it to the other ranks.
    store: key-value store shared by all ranks (current actions, the first failure); never used on a hot path.
    launcher: "local", "torchrun", "mpiexec" or "srun"; another word if `start` has not made it.
    device: where it computes.
    local_rank, local_size: its number among the ranks of its machine, and their count, as the launcher says.
    local_ranks: the ranks on its machine in order, itself included. Slurm's cyclic distribution and Open MPI's local
        ranks follow another order than one machine after the other, which an empty tuple stands for.
    mesh: the one that `start` was called with; None if ranks were started without one.
    hang: makes the detector for hanging actions; None if they are not checked.
    overdue: names a blocking wait that is over its time limit; returns None if there is none.
    lost: names a peer whose connection has broken, where the waiting thread cannot see it; None if there is none.
    sever: ends this rank's connections to the others, so that waits for these fail at both ends.
    members: names of the ranks, by their numbers, which may change; names stay. Those of the start are numbers, too.
    num_losses: ranks that the run has gone on without.
    joins: how ranks join later (`grow`); None if none may.
    torch_store: `store` without signatures, over which a backend of other ranks connects; None where the ranks stay
        those that were started.
    """

    backend: Backend
    store: SharedStore
    launcher: str
    device: torch.device
    local_rank: int
    local_size: int
    local_ranks: tuple[int, ...] = ()
    mesh: Mesh | None = None
    hang: Callable[[], HangDetector] | None = None
    overdue: Callable[[], str | None] = lambda: None
    lost: Callable[[], str | None] = lambda: None
    sever: Callable[[], object] = lambda: None
    members: tuple[str, ...] = ()
    num_losses: int = 0
    joins: JoinPoint | None = None
    torch_store: Store | None = None
    _first: Backend | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.members = self.members or tuple(map(str, range(self.size)))
        first = self.rank - self.local_rank
        self.local_ranks = self.local_ranks or tuple(range(first, min(first + self.local_size, self.size)))

    @property
    def rank(self) -> int:
        """Number of this rank, from 0."""
        return self.backend.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.backend.size

    @property
    def is_alone(self) -> bool:
        """Whether this is the only rank, now and later."""
        return self.size == 1 and self.joins is None

    def change(self, backend: Backend, members: Sequence[str]) -> None:
        """Replace the backend by one of `members`. Collective over the ranks that stay. What was made from the first
        backend stays usable; of later ones it is freed."""
        local = {self.members[rank] for rank in self.local_ranks}
        before, self.backend, self.members = self.backend, backend, tuple(members)
        self.local_ranks = tuple(rank for rank, name in enumerate(self.members) if name in local)
        if self._first is None:
            self._first = before
        else:
            before.close()

    def close(self) -> None:
        """Close the backend, and the one that this rank was started with. Idempotent; all ranks call it."""
        self.backend.close()
        if self._first is not None:
            self._first.close()
