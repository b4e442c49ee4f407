"""Whether all replicas update by the same learning rates.

One that depends on what a rank alone knows, such as its own loss, lets the parameters of replicas drift apart. So each
rank adds a number made of its rates to the sums of the batch (`pipeline/statistics`), with factors whose sum is zero
over ranks that must agree: all of them for Ranvier's optimizer, and the replicas of a stage for a user's, of which
stages may have groups of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import torch
from torch import Tensor

from ranvier.errors import ConfigError
from ranvier.mesh import Coordinates

_NUMBER_BITS = 20
"""So short are the numbers of ranks that their sums over thousands of ranks are exact in fp64."""


class SameRates:
    """The comparison on one rank. at: its place. own: whether Ranvier's optimizer updates, by one learning rate."""

    def __init__(self, at: Coordinates, *, own: bool) -> None:
        mesh = at.mesh
        axes = tuple(mesh) if own else mesh.replica_axes
        others = () if own else tuple(axis for axis in mesh if axis not in axes)
        self._factor = (1 + at.index(others)) * (-1 if at.index(axes) else mesh.count(axes) - 1)
        self._rates: tuple[float, ...] = ()

    def begin(self, own: float | None, users: torch.optim.Optimizer | None) -> None:
        """A training batch begins. own: the rate of Ranvier's optimizer. Those of a user's are in its groups; one that
        a device has is not waited for."""
        found = [own] if own is not None else [group.get("lr") for group in getattr(users, "param_groups", ())]
        self._rates = tuple(float(rate) for rate in found if isinstance(rate, (int, float)) or (
            isinstance(rate, Tensor) and rate.device.type == "cpu" and rate.numel() == 1))

    def number(self) -> float:
        """The number that this rank adds to the sums: of rates to six digits, since the last bits of a cosine differ
        between machines, and sorted, since groups of parameters may be in any order."""
        shown = " ".join(sorted(f"{rate:.6g}" for rate in self._rates))
        return float(self._factor * (crc32(shown.encode()) >> 32 - _NUMBER_BITS))

    def check(self, total: float) -> None:
        """ConfigError where the sum over all ranks is that of different rates."""
        if total:
            raise ConfigError("is not the same on all ranks that update the same parameters; nothing was updated",
                              code="learning-rates-differ", where="learning rate",
                              value=_text(self._rates),
                              remedy="Compute it from what is the same on every rank, such as the step or "
                                     "BatchResult.loss (of the global batch), or send one rank's value to all with "
                                     "world.broadcast.")


def _text(rates: Sequence[float]) -> float | list[float] | None:
    return rates[0] if len(rates) == 1 else list(rates) or None
