"""Random numbers of plain modules, such as `nn.Dropout`, that differ between replicas.

The first replica draws from torch's own generator, as on one device. Users seed it with the same value on all ranks, so
the others would draw the same numbers for other samples. Within a batch they draw from the same generator with another
seed, which follows from its state, the engine's seed and the number of the replica: a program that is seeded again
draws the same numbers.

    generator:   state --(seed of this replica)--> batch draws ... --(state, one number further)--> the user's code

Columns compute the same samples, and must draw the same numbers: they compare `state_hash`. (Python's and NumPy's
generators are left out: libraries draw from them when they are first imported.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ranvier import keyed_random

_POSITIVE = (1 << 63) - 1


class ReplicaRandomness:
    """Args:
        replica: index among the groups of ranks that compute the same blocks for other samples; ranks that compute the
            same samples have the same index, and draw the same numbers. seed: the engine's. device: this rank's.
    """

    def __init__(self, replica: int, seed: int, device: torch.device) -> None:
        self._replica, self._seed, self._device = replica, seed, device
        self._began: tuple[bytes, ...] = ()
        """The states with which the batch began, if `state_hash` is used."""
        self.is_compared = False
        """Whether `state_hash` is used."""

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Context in which numbers are this replica's own. Afterwards the generators have their earlier state, or are
        one number further if any was drawn."""
        if self._replica == 0:
            self._began = self.states() if self.is_compared else ()
            yield
            return
        generators = self._generators()
        before = [generator.get_state() for generator in generators]
        for generator, state in zip(generators, before, strict=True):
            generator.manual_seed(keyed_random.key("replica", self._seed, self._replica, bytes(state.numpy().data))
                                  & _POSITIVE)
        began = [generator.get_state() for generator in generators]
        self._began = self.states() if self.is_compared else ()
        try:
            yield
        finally:
            for generator, state, first in zip(generators, before, began, strict=True):
                drawn = not torch.equal(generator.get_state(), first)
                generator.set_state(state)
                if drawn:  # otherwise the next batch would draw the same
                    torch.rand((), generator=generator, device=generator.device)

    def state_hash(self) -> int:
        """A hash of the generators' states, which depends on what has been drawn in this batch; 0 if nothing has."""
        states = self.states()
        return 0 if states == self._began else keyed_random.key(self._began, states)

    def states(self) -> tuple[bytes, ...]:
        """States of torch's generators of the CPU and of this rank's device."""
        return tuple(generator.get_state().numpy().tobytes() for generator in self._generators())

    def _generators(self) -> list[torch.Generator]:
        found = [torch.default_generator]
        if self._device.type == "cuda":
            index = torch.cuda.current_device() if self._device.index is None else self._device.index
            found.append(torch.cuda.default_generators[index])
        return found

