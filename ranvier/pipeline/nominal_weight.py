"""The expected weight of a global batch, from the first microbatches of the first one.

In fp16 a loss must be divided by about its weight before the backward, and multiplied by the loss scale: a sum over
thousands of targets times that scale overflows, and a run would skip steps until the scale has come down. The weight of
the whole batch is known only after its last forward, so the ranks agree on an estimate before the first backward.
"""

from __future__ import annotations

import math

import torch

from ranvier.comm.protocol import Group, Work


class NominalWeight:
    """One agreement among all ranks, batch after batch until one has a valid target.

    ranks: a group of all ranks. Every rank calls `start` once a batch, at the same place in its order of collectives.
    """

    def __init__(self, ranks: Group) -> None:
        self._ranks = ranks
        self._sum = torch.zeros(1, dtype=torch.float64)
        self._work: Work | None = None

    @property
    def started(self) -> bool:
        """Whether this rank has said what it knows of this batch."""
        return self._work is not None

    def start(self, weight: float) -> None:
        """This rank's part of the estimate; 0 where another rank counts the same targets, or nothing is known."""
        self._sum.fill_(weight)
        self._work = self._ranks.all_reduce(self._sum)

    def agree(self) -> float | None:
        """The power of two next to the sum of all parts, so that dividing by it rounds nothing; None when no rank has a
        valid target. Waits for all ranks' first forward."""
        assert self._work is not None, "agree comes after start"
        self._work.wait()
        self._work = None
        estimate = float(self._sum)
        return 2.0 ** round(math.log2(estimate)) if 0 < estimate < math.inf else None
