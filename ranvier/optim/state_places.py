"""Places of each parameter's states in a rank's flat states, one tensor for each name.

    weights          | wte ....... | qkv ..... | bias |  up ........ |
    momentum_buffer                | qkv ..... |      |  up ........ |      Muon's
    exp_avg          | wte ....... |             bias |                     AdamW's, beside it

They lie in the order of the buckets, so those of a bucket are one piece of each state. Pure: no tensors.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ranvier.optim.buckets import Bucket, joined


@dataclass(frozen=True)
class StateOwner:
    """Elements [start, stop) of the flat buffer that have these states. None: one number for each element; otherwise
    the shape of a state of the whole parameter, which lies in one bucket."""

    start: int
    stop: int
    shapes: Mapping[str, tuple[int, ...] | None]


@dataclass(frozen=True)
class _Interval:
    """Elements [start, stop) have their states from `at` on; all of it where `whole`."""

    start: int
    stop: int
    at: int
    whole: bool


class StatePlaces:
    """Places of all states but master copies.

    owners: rising and disjoint; they need not cover all elements.
    """

    def __init__(self, buckets: Sequence[Bucket], owners: Sequence[StateOwner]) -> None:
        self.sizes: dict[str, int] = {name: 0 for owner in owners for name in owner.shapes}
        """Name -> elements of the flat state."""
        self._intervals: dict[str, list[_Interval]] = {name: [] for name in self.sizes}
        stops = [owner.stop for owner in owners]
        for bucket in joined(buckets):  # neighbours have their states side by side
            for owner in owners[bisect_right(stops, bucket.start):]:
                start, stop = max(owner.start, bucket.start), min(owner.stop, bucket.stop)
                if owner.start >= bucket.stop:
                    break
                for name, shape in owner.shapes.items() if start < stop else ():
                    self._intervals[name].append(_Interval(start, stop, self.sizes[name], shape is not None))
                    self.sizes[name] += stop - start if shape is None else prod(shape)
        self._stops = {name: [each.stop for each in found] for name, found in self._intervals.items()}

    def largest(self, buckets: Sequence[Bucket]) -> dict[str, int]:
        """Name -> elements of the state of the bucket that has most of it."""
        parts = {name: [self.of(name, bucket.start, bucket.stop) for bucket in buckets] for name in self.sizes}
        return {name: max((part.stop - part.start for part in found), default=0) for name, found in parts.items()}

    def of(self, name: str, start: int, stop: int) -> slice:
        """Place of the states of elements [start, stop), which are in one bucket or in neighbouring ones."""
        return slice(self._offset(name, start), self._offset(name, stop))

    def _offset(self, name: str, element: int) -> int:
        number = bisect_right(self._stops[name], element)
        if number == len(self._stops[name]):
            return self.sizes[name]
        found = self._intervals[name][number]
        if element <= found.start:
            return found.at
        assert not found.whole, f"the state {name} of a whole tensor is cut"
        return found.at + element - found.start
