"""Buckets: pieces of the flat buffer that are updated together, and within them segments with the same settings.

    chunk     |           0           |           1           |      reduced in one piece
    share     |     | mine|           |     | mine|           |      updated here, if states are sharded
    buckets         | 0|1 |                 | 2|3 |                  updated in one piece, states side by side

Pure: no tensors.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from operator import attrgetter


@dataclass(frozen=True)
class Segment:
    """Elements [start, stop) of the flat buffer, with their group's factor on the learning rate and weight decay.

    tensor: the gradient (`GradientSpec`) of a parameter that is updated as a whole; None if elements are updated
        independently.
    missed_updates: number of the optimizer's updates that did not change these elements.
    """

    start: int
    stop: int
    learning_rate_factor: float
    weight_decay: float
    tensor: object = None
    missed_updates: int = 0

    def updates_like(self, other: Segment) -> bool:
        """Whether both have the same settings, so that neighbours are updated in one piece."""
        return self.tensor is None and other.tensor is None and (
            self.learning_rate_factor, self.weight_decay, self.missed_updates) == (
                other.learning_rate_factor, other.weight_decay, other.missed_updates)


@dataclass(slots=True)
class Bucket:
    """Elements [start, stop) of the flat buffer; their states start at `state` in the flat states of this rank.

    Immutable by convention. It is not frozen, since a rank may have hundreds of thousands, and frozen dataclasses take
    three times as long.
    """

    number: int
    start: int
    stop: int
    state: int

    def __len__(self) -> int:
        return self.stop - self.start


def join_buckets(buckets: Sequence[Bucket]) -> list[Bucket]:
    """The same elements in as few buckets as possible: buckets adjacent in memory are joined."""
    first: list[Bucket] = []
    stops: list[int] = []
    before: Bucket | None = None
    for bucket in buckets:
        if before is not None and before.stop == bucket.start and (
                before.state + before.stop - before.start == bucket.state):
            stops[-1] = bucket.stop
        else:
            first.append(bucket)
            stops.append(bucket.stop)
        before = bucket
    return [Bucket(bucket.number, bucket.start, stop, bucket.state) for bucket, stop in zip(first, stops, strict=True)]


def buckets_of(shares: Sequence[tuple[int, int]], size: int, uncut: Sequence[tuple[int, int]] = ()
               ) -> list[list[Bucket]]:
    """The buckets of each share, none larger than `size` elements; states are numbered in the same order.

    uncut: elements [start, stop), ascending and disjoint, that must be in one bucket, which may then be larger.
    """
    stops = [stop for _, stop in uncut]
    found: list[list[Bucket]] = []
    inside: list[Bucket]
    number = state = 0
    for first, last in shares:
        found.append(inside := [])
        start = first
        while start < last:
            stop = start + size if start + size < last else last
            near = bisect_left(stops, stop) if uncut else 0  # the first that ends at `stop` or later
            if near < len(uncut) and uncut[near][0] < stop < uncut[near][1]:
                stop = uncut[near][0] if uncut[near][0] > start else uncut[near][1]
            inside.append(Bucket(number, start, stop, state))
            number, state, start = number + 1, state + stop - start, stop
    return found


def split_by_share(buckets: Sequence[Bucket], host_share: float) -> tuple[list[Bucket], list[Bucket]]:
    """The buckets whose states are on the device, and those whose states are in host memory: at least `host_share` of
    all elements, and less than a bucket more, spread evenly over the order of updates so that copies overlap all of
    them. Each list's states are numbered from 0.
    """
    found: tuple[list[Bucket], list[Bucket]] = [], []
    sizes, passed = [0, 0], 0
    for bucket in buckets:
        passed += len(bucket)
        on_host = sizes[1] < host_share * passed
        found[on_host].append(Bucket(bucket.number, bucket.start, bucket.stop, sizes[on_host]))
        sizes[on_host] += len(bucket)
    return found


def within(segments: Sequence[Segment], start: int, stop: int) -> list[Segment]:
    """The parts of `segments` (ascending, disjoint) inside [start, stop), with equal neighbours joined."""
    found: list[Segment] = []
    for number in range(bisect_right(segments, start, key=attrgetter("stop")), len(segments)):
        segment = segments[number]
        if segment.start >= stop:
            break
        first, last = max(segment.start, start), min(segment.stop, stop)
        if first >= last:
            continue
        if found and found[-1].stop == first and found[-1].updates_like(segment):
            first = found.pop().start
        found.append(replace(segment, start=first, stop=last))
    return found


# --- states -----------------------------------------------------------------------------------------------------------

# Places of each parameter's states in a rank's flat states, one tensor for each name.
#
#     weights          | wte ....... | qkv ..... | bias |  up ........ |
#     momentum_buffer                | qkv ..... |      |  up ........ |      Muon's
#     exp_avg          | wte ....... |             bias |                     AdamW's, next to it
#
# States are in the order of the buckets, so those of a bucket are one piece of each state. Pure: no tensors.


@dataclass(frozen=True)
class StateOwner:
    """Elements [start, stop) of the flat buffer that have these states. None: one number for each element; otherwise
    the shape of a state of the whole parameter, which must be in one bucket."""

    start: int
    stop: int
    shapes: Mapping[str, tuple[int, ...] | None]


@dataclass(frozen=True)
class _Interval:
    """The states of elements [start, stop), from `at` on in the flat state; indivisible if `whole`."""

    start: int
    stop: int
    at: int
    whole: bool


class StatePlaces:
    """Places of all states except master copies.

    owners: ascending and disjoint; they need not cover all elements.
    """

    def __init__(self, buckets: Sequence[Bucket], owners: Sequence[StateOwner]) -> None:
        self.sizes: dict[str, int] = {name: 0 for owner in owners for name in owner.shapes}
        """Name -> elements of the flat state."""
        self._intervals: dict[str, list[_Interval]] = {name: [] for name in self.sizes}
        stops = [owner.stop for owner in owners]
        for bucket in join_buckets(buckets):  # neighbours have adjacent states
            for owner in owners[bisect_right(stops, bucket.start):]:
                start, stop = max(owner.start, bucket.start), min(owner.stop, bucket.stop)
                if owner.start >= bucket.stop:
                    break
                for name, shape in owner.shapes.items() if start < stop else ():
                    self._intervals[name].append(_Interval(start, stop, self.sizes[name], shape is not None))
                    self.sizes[name] += stop - start if shape is None else prod(shape)
        self._stops = {name: [each.stop for each in found] for name, found in self._intervals.items()}

    def largest(self, buckets: Sequence[Bucket]) -> dict[str, int]:
        """Name -> size of the state in the bucket that has the most of it."""
        parts = {name: [self.slice_of(name, bucket.start, bucket.stop) for bucket in buckets] for name in self.sizes}
        return {name: max((part.stop - part.start for part in found), default=0) for name, found in parts.items()}

    def slice_of(self, name: str, start: int, stop: int) -> slice:
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
