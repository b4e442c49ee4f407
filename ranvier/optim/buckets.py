"""Which pieces of the flat buffer are updated together: buckets, and within them segments that are updated alike.

    chunk     |           0           |           1           |      reduced in one piece
    share     |     | mine|           |     | mine|           |      updated here, where states are sharded
    buckets         | 0|1 |                 | 2|3 |                  updated in one piece, states side by side

Pure: no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Segment:
    """Elements [start, stop) of the flat buffer, with their group's factor on the learning rate and weight decay."""

    start: int
    stop: int
    learning_rate_factor: float
    weight_decay: float

    def like(self, other: Segment) -> bool:
        """Whether both are updated alike."""
        return (self.learning_rate_factor, self.weight_decay) == (other.learning_rate_factor, other.weight_decay)


@dataclass(frozen=True)
class Bucket:
    """Elements [start, stop) of the flat buffer; their states start at `state` in the flat states of this rank."""

    number: int
    start: int
    stop: int
    state: int

    def __len__(self) -> int:
        return self.stop - self.start


def buckets_of(shares: Sequence[tuple[int, int]], size: int) -> list[list[Bucket]]:
    """The buckets of each share, none larger than `size` elements; states are numbered in the same order."""
    found: list[list[Bucket]] = []
    number = state = 0
    for first, last in shares:
        found.append([])
        for start in range(first, last, size):
            stop = min(start + size, last)
            found[-1].append(Bucket(number, start, stop, state))
            number, state = number + 1, state + stop - start
    return found


def within(segments: Sequence[Segment], start: int, stop: int) -> list[Segment]:
    """The parts of `segments` (rising, disjoint) inside [start, stop), neighbours that are alike in one."""
    found: list[Segment] = []
    for segment in segments:
        first, last = max(segment.start, start), min(segment.stop, stop)
        if first >= last:
            continue
        if found and found[-1].stop == first and found[-1].like(segment):
            first = found.pop().start
        found.append(replace(segment, start=first, stop=last))
    return found
