"""Which sequences are in which step, and who takes which of them: a matter of the seed alone, never of the mesh. Pure.

The whole state is the number of the step, so a run resumes anywhere and on any mesh.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ranvier import keyed_random


class Sampler:
    """Every sequence once per epoch, in an order keyed by (seed, epoch); without a seed in their own order."""

    def __init__(self, num_sequences: int, seed: int | None) -> None:
        if num_sequences < 1:
            raise ValueError("a sampler needs at least one sequence")
        self.num_sequences, self.seed = num_sequences, seed
        self._orders: dict[int, np.ndarray] = {}

    def global_batch(self, step: int, global_size: int, offset: int = 0) -> np.ndarray:
        """[global_size] int64: sequence numbers of step `step`, counted from 0. Epochs follow without a gap.
        offset: sequences that were taken beside those of earlier steps."""
        epoch, within = self._place(step, global_size, offset)
        batch = np.empty_like(within)
        needed = range(int(epoch[0]), int(epoch[-1]) + 1)
        self._orders = {number: self._orders[number] if number in self._orders else self._order(number)
                        for number in needed}
        for number, order in self._orders.items():
            here = epoch == number
            batch[here] = order[within[here]]
        return batch

    def epochs(self, step: int, global_size: int, offset: int = 0) -> np.ndarray:
        """[global_size] int64: how often each sample of `global_batch` was taken before."""
        return self._place(step, global_size, offset)[0]

    def _place(self, step: int, global_size: int, offset: int) -> tuple[np.ndarray, np.ndarray]:
        """Epoch, and place in its order, of each sample of a step."""
        return np.divmod(np.arange(global_size, dtype=np.int64) + step * global_size + offset, self.num_sequences)

    def _order(self, epoch: int) -> np.ndarray:
        """A permutation of the sequence numbers: the order of their keyed hashes."""
        if self.seed is None:
            return np.arange(self.num_sequences, dtype=np.int64)
        numbers = torch.arange(self.num_sequences, dtype=torch.int64)
        hashes = keyed_random.bits(keyed_random.key("order", self.seed, epoch), numbers)
        return torch.argsort(hashes, stable=True).numpy()


def share(total: int, parts: int, index: int) -> slice:
    """The contiguous part of `total` things that `index` of `parts` takes; where uneven, the first take one more."""
    size, extra = divmod(total, parts)
    start = index * size + min(index, extra)
    return slice(start, start + size + (index < extra))


def at_home(samples: np.ndarray, nodes: Sequence[int]) -> np.ndarray:
    """Places in `samples` in an order in which the shares of replicas on `nodes` (one number each) have as many samples
    as can be whose home is that node. A sample's home depends on its number alone, so that what one epoch has left on a
    machine is there in the next. The set of samples stays; within a share they keep their order."""
    order = sorted(set(nodes))
    homes = np.array(order)[samples % len(order)]
    sizes = [share(len(samples), len(nodes), index) for index in range(len(nodes))]
    taken: list[list[int]] = [[] for _ in nodes]
    left = []
    for place, home in enumerate(homes):
        mine = next((index for index, node in enumerate(nodes)
                     if node == home and len(taken[index]) < sizes[index].stop - sizes[index].start), None)
        (left if mine is None else taken[mine]).append(place)
    for index, size in enumerate(sizes):
        missing = size.stop - size.start - len(taken[index])
        taken[index], left = sorted(taken[index] + left[:missing]), left[missing:]
    return np.array([place for part in taken for place in part], dtype=np.int64)


def microbatches(samples: np.ndarray, size: int) -> list[np.ndarray]:
    """Consecutive pieces of `size`; the last may be smaller."""
    return [samples[start:start + size] for start in range(0, len(samples), size)]
