"""Assignment of sequences to steps, which depends on the seed and not on the mesh, and to ranks.

The only state is the number of samples taken so far, so a run resumes anywhere and on any mesh.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ranvier import keyed_random
from ranvier.data.task import Share

GROUP = 32
"""Samples of similar lengths that stay together, whatever the batch size: the order must not depend on it."""
GROUPS_SORTED = 64
"""Groups whose samples are sorted by length together. With more groups, lengths are more uniform; with fewer, the order
is more random."""
_HASHED = 1 << 16
"""Numbers that are hashed together."""


class Sampler:
    """Every sequence once per epoch, in an order keyed by (seed, epoch); without a seed in their own order.

    lengths: of the sequences, which are then ordered in groups of similar lengths; None keeps the order random. shares:
    parts of a mixture, with the number of samples that an epoch takes of each; () takes all sequences in an epoch.
    """

    def __init__(self, num_sequences: int, seed: int | None, *, lengths: np.ndarray | None = None,
                 shares: Sequence[Share] = ()) -> None:
        if num_sequences < 1:
            raise ValueError("a sampler needs at least one sequence")
        self.seed, self._lengths = seed, lengths
        self._shares = shares or (Share(first=0, count=num_sequences, taken=num_sequences),)
        self.num_sequences = sum(share.taken for share in self._shares)
        """Sequences of an epoch."""
        self._orders: dict[int, np.ndarray] = {}

    def global_batch(self, step: int, global_size: int, offset: int = 0) -> np.ndarray:
        """[global_size] int64: sequence numbers of step `step`, counted from 0. Epochs follow without a gap: no
        batch is dropped (drop_last), the last one of an epoch takes samples of the next.
        offset: sequences that were taken in addition to those of earlier steps."""
        epoch, within = self._place(step, global_size, offset)
        batch = np.empty_like(within)
        needed = range(int(epoch[0]), int(epoch[-1]) + 1)
        self._orders = {number: order for number, order in self._orders.items() if number in needed}
        for number in needed:
            if number not in self._orders:
                self._orders[number] = self._order(number)
            here = epoch == number
            batch[here] = self._orders[number][within[here]]
        return batch

    def epochs(self, step: int, global_size: int, offset: int = 0) -> np.ndarray:
        """[global_size] int64: how often each sample of `global_batch` was taken before."""
        return self._place(step, global_size, offset)[0]

    def _place(self, step: int, global_size: int, offset: int) -> tuple[np.ndarray, np.ndarray]:
        """Epoch, and place in its order, of each sample of a step."""
        return np.divmod(np.arange(global_size, dtype=np.int64) + step * global_size + offset, self.num_sequences)

    def _order(self, epoch: int) -> np.ndarray:
        """The sequence numbers of an epoch in their order."""
        order = _concatenate([self._share_samples(share, epoch) for share in self._shares])
        if self.seed is None:
            return order
        if len(self._shares) > 1:
            order = order[permutation(len(order), "mixture", self.seed, epoch)]
        return order if self._lengths is None else group_by_length(order, self._lengths, self.seed, epoch)

    def _share_samples(self, share: Share, epoch: int) -> np.ndarray:
        """[taken] int64: the samples that `epoch` takes of a share; it continues where the previous epoch ended."""
        place, stop, found = epoch * share.taken, (epoch + 1) * share.taken, []
        while place < stop:
            number, within = divmod(place, share.count)
            key = ("order",) if len(self._shares) == 1 else ("share", share.first)
            order = (np.arange(share.count, dtype=np.int64) if self.seed is None
                     else permutation(share.count, *key, self.seed, number))
            found.append(order[within:within + stop - place])
            place += len(found[-1])
        taken = _concatenate(found)
        taken += share.first
        return taken


def _concatenate(parts: Sequence[np.ndarray]) -> np.ndarray:
    """All parts in one array; a single part is not copied."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def permutation(count: int, *key: object) -> np.ndarray:
    """[count] int64: the numbers below `count` in the order of their hashes, keyed by `key`. No two hashes are equal:
    the hash can be inverted. In addition to the result, 8 bytes for each number are needed temporarily."""
    hashes, keyed = np.empty(count, dtype=np.int64), keyed_random.key(*key)
    for start in range(0, count, _HASHED):
        numbers = torch.arange(start, min(count, start + _HASHED), dtype=torch.int64)
        hashes[start:start + _HASHED] = keyed_random.bits(keyed, numbers).numpy()
    return hashes.argsort()


def group_by_length(order: np.ndarray, lengths: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    """`order`, changed in place, with similar lengths next to each other: pieces of GROUP x GROUPS_SORTED samples are
    sorted by length and cut into groups, and the groups of a piece are shuffled. lengths: by sample number.

    Groups begin at multiples of GROUP among the samples of all epochs, so that a batch of that size has one group, and
    not parts of two. The two ends of an epoch, where no full group fits, have long samples, and share a batch with the
    end of the adjacent epoch.
    """
    begun, size = -epoch * len(order) % GROUP, GROUP * GROUPS_SORTED  # begun: what the preceding group still lacks
    for number, stop in enumerate(range(begun + size, max(len(order), begun + 1) + size, size)):
        piece = order[stop - size if number else 0:stop]
        by_length = piece[np.argsort(lengths[piece], kind="stable")]
        first = begun if number == 0 else 0
        whole = max(0, len(by_length) - first) // GROUP * GROUP
        groups, rest = microbatches(by_length[:whole], GROUP), by_length[whole:]
        piece[:] = np.concatenate([rest[:first], *(groups[place] for place in permutation(
            len(groups), "groups", seed, epoch, number)), rest[first:]])
    return order


def share(total: int, parts: int, index: int) -> slice:
    """The contiguous part of `total` items that `index` of `parts` takes; if `parts` does not divide `total`, the first
    take one more."""
    size, extra = divmod(total, parts)
    start = index * size + min(index, extra)
    return slice(start, start + size + (index < extra))


def order_by_node(samples: np.ndarray, nodes: Sequence[int]) -> np.ndarray:
    """Places in `samples`, ordered so that the shares of replicas on `nodes` (one number each) have as many samples as
    possible whose home is that node. A sample's home depends only on its number, so that what one epoch has left on a
    machine is used in the next. The set of samples stays the same; within a share they keep their order."""
    order = sorted(set(nodes))
    homes = np.array(order)[samples % len(order)]
    sizes = [share(len(samples), len(nodes), index) for index in range(len(nodes))]
    taken: list[list[int]] = [[] for _ in nodes]
    left: list[int] = []
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
