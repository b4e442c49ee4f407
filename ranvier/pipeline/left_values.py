"""Values that a forward leaves outside of the carried state, where code of another stage reads them
(`plan/shared_places`).

    before the forward of a microbatch     what is in these places
    afterwards                             ModelError for one that has changed, by name
    after the last forward of a batch      a number of what all readers make by themselves, which they must have alike

The number is added to the sums of the batch (`pipeline/statistics`) with factors whose sum is zero over the ranks of a
replica that have the place.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import fields, is_dataclass
from operator import is_
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from ranvier.errors import ModelError
from ranvier.mesh import Coordinates, StagePlacement
from ranvier.plan.reached_objects import CodeReach, contents, elements, entries_of
from ranvier.plan.shared_places import Entry, SharedPlace

_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})
_NUMBER_BITS = 20
"""So short are the numbers of ranks that their sums over thousands of ranks are exact in fp64."""
_MOST_DEPTH = 4
_MOST_BYTES = 1 << 16
"""Changes of larger arrays are not looked for."""
_CLOSE_BATCHES = 2
"""So many batches are looked at forward by forward, and later ones from their first forward to their last."""
_ABSENT = object()


class LeftValues:
    """The places of one stage on this rank. blocks: (number in the model, name, module). loss: None where the stage has
    none. is_alone: whether no other stage of this rank runs in between."""

    def __init__(self, places: Sequence[SharedPlace], blocks: Sequence[tuple[int, str, nn.Module]], loss: object, *,
                 is_alone: bool) -> None:
        self._is_alone, self._batches = is_alone, 0
        self._places: list[tuple[SharedPlace, Any]] = []
        self._before: list[dict[Entry, _Mark]] = []
        self._made: dict[tuple[int, Entry], SharedPlace] = {}
        """Entries that a forward here has made, of those that all readers make by themselves."""
        self._values: dict[int, Any] = {}
        self._numbers: dict[tuple[int, Entry], tuple[_Mark, int]] = {}
        self._found: frozenset[int] = frozenset()
        """What is looked at by itself, and not as a part of what has it."""
        if places:
            reach = CodeReach()
            for _, name, module in blocks:
                reach.add(name, module)
            if loss is not None:
                reach.add("loss", loss)
            self._found = frozenset(reach.found)
            found = {(one.name, type(one.value).__name__): one.value for one in reversed(reach.found.values())}
            self._places = [(place, found[place.name, place.kind]) for place in places
                            if (place.name, place.kind) in found]

    @property
    def _looks_each_time(self) -> bool:
        return not self._is_alone or self._batches <= _CLOSE_BATCHES

    def begin(self, *, first: bool) -> None:
        """A forward begins. first: of its batch."""
        self._batches += first
        if not (first or self._looks_each_time):
            return
        self._before = [{entry: _Mark(one, self._found, is_found=one is not value)
                         for entry, one in _entries(place, value)} for place, value in self._places]

    def check(self, *, last: bool) -> None:
        """The forward has ended. ModelError where it has left something that another stage reads, and does not make by
        itself. last: of its batch."""
        if not (last or self._looks_each_time):
            return
        for (place, value), before in zip(self._places, self._before, strict=True):
            now = dict(_entries(place, value))
            for entry in before.keys() | now.keys():
                one = now.get(entry, _ABSENT)
                mark = _Mark(one, self._found, is_found=one is not value)
                if mark.is_same(before.get(entry, _NOTHING)):
                    continue
                is_agreed = entry in place.agreed if entry in place.read else place.any_agreed
                if not is_agreed or _has_gradient(one):
                    raise _left(place, entry)
                self._made[place.number, entry] = place
                self._values[place.number] = value
        self._before = []

    def made(self) -> dict[tuple[int, Entry], int]:
        """A number of each entry that forwards of the stage have made so far, which is counted anew where that has
        changed: of tensors on a device, the host waits for it."""
        for number, entry in self._made:
            value = self._values[number]
            now = next((one for name, one in contents(value) if name == entry), None)
            mark, known = _Mark(now, self._found, is_found=now is not value), self._numbers.get((number, entry))
            if known is None or not mark.is_same(known[0]):
                self._numbers[number, entry] = mark, _number(now, self._found - {id(value)})
        return {place: one for place, (_, one) in self._numbers.items()}

    def first_made(self) -> tuple[SharedPlace, Entry] | None:
        """Where a forward of the stage has made something."""
        return next(((place, entry) for (_, entry), place in self._made.items()), None)


class SameLeft:
    """Whether the stages of a model make alike what each of them makes by itself. stages: those of this rank."""

    def __init__(self, places: Sequence[SharedPlace], at: Coordinates, placement: StagePlacement,
                 stages: Sequence[LeftValues]) -> None:
        self._stages = stages
        self._factors: dict[int, int] = {}
        weight = 1 + at.index(tuple(axis for axis in at.mesh if axis not in at.mesh.pipeline_axes))
        agreed = {place.number: place for place in places if place.agreed or place.any_agreed}
        for number, place in agreed.items():
            ranks = sorted({placement.rank_of(stage) for stage in place.stages})
            if at.pipeline_rank in ranks:
                self._factors[number] = weight * (len(ranks) - 1 if at.pipeline_rank == ranks[0] else -1)

    def number(self) -> float:
        """The number that this rank adds to the sums."""
        if not self._factors:
            return 0.0
        made: dict[tuple[int, Entry], int] = {}
        for stage in self._stages:
            for place, one in stage.made().items():
                if made.setdefault(place, one) != one:  # stages of this rank differ, of what each has a copy
                    raise _differs(stage.first_made())
        numbers: dict[int, int] = {}
        for (number, entry), one in sorted(made.items(), key=lambda one: (one[0][0], one[0][1] or "")):
            numbers[number] = crc32(f"{entry} {one}".encode(), numbers.get(number, 0))
        return float(sum(self._factors.get(number, 0) * (one >> 32 - _NUMBER_BITS) for number, one in numbers.items()))

    def check(self, total: float) -> None:
        """ModelError where the sum over all ranks shows that they differ."""
        if total:
            raise _differs(next(filter(None, (stage.first_made() for stage in self._stages)), None))


class _Mark:
    """What there was: the value, or the elements of a container, which this keeps alive, and how often tensors among
    them have been changed in place."""

    __slots__ = ("_kept", "_versions")

    def __init__(self, value: object, found: Collection[int] = (), *, is_found: bool = True) -> None:
        self._kept: list[Any] = [value]
        _add_elements(value, found if is_found else (), self._kept, found)
        self._versions = [_version(one) for one in self._kept if type(one) not in _PLAIN] if (
            not _PLAIN.issuperset(map(type, self._kept))) else []

    def is_same(self, other: _Mark) -> bool:
        """Whether it is the same value, with the same elements: numbers and texts are, if they are equal."""
        return len(self._kept) == len(other._kept) and self._versions == other._versions and (
            all(map(is_, self._kept, other._kept)) or all(map(_is_same, self._kept, other._kept)))


def _add_elements(value: object, left_out: Collection[int], kept: list[Any], found: Collection[int],
                  depth: int = _MOST_DEPTH) -> None:
    inside = None if type(value) in _PLAIN or id(value) in left_out else elements(value)
    if inside is None:
        return
    kept += inside
    if isinstance(value, dict):
        kept += dict.keys(value)
    if depth and not _PLAIN.issuperset(map(type, inside)):
        for one in inside:
            _add_elements(one, found, kept, found, depth - 1)


def _version(value: Any) -> object:
    if isinstance(value, Tensor):
        return 0 if value.is_inference() else value._version
    numpy = sys.modules.get("numpy")
    if numpy is not None and type(value) is numpy.ndarray and value.nbytes <= _MOST_BYTES:
        return value.tobytes()
    return None


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and type(one) in _PLAIN and one == other)


def _has_gradient(value: Any, depth: int = _MOST_DEPTH) -> bool:
    """Whether gradients flow through a tensor that is there, in lists, dicts and dataclasses, too."""
    if isinstance(value, Tensor):
        return value.requires_grad and not isinstance(value, nn.Parameter)
    inside = elements(value)
    if inside is None and is_dataclass(value) and not isinstance(value, type):
        inside = [getattr(value, one.name, None) for one in fields(value)]
    return bool(depth) and any(_has_gradient(one, depth - 1) for one in inside or ())


_NOTHING = _Mark(_ABSENT)


def _entries(place: SharedPlace, value: object) -> Iterator[tuple[Entry, Any]]:
    if place.any or None in place.read:
        yield from contents(value)
        return
    yield from entries_of(value, place.read)


def _number(value: Any, found: Collection[int], depth: int = _MOST_DEPTH) -> int:
    """A number of a value, the same on all ranks for equal values. found: what is left out."""
    if id(value) in found:
        return 0
    if isinstance(value, Tensor):
        plain = value.detach().cpu().contiguous()
        return crc32(plain.view(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b"",
                     crc32(f"{plain.dtype} {tuple(plain.shape)}".encode()))
    inside = elements(value)
    if isinstance(value, dict) and inside is not None:  # in whatever order
        return sum(crc32(f"{key!r} {_number(one, found, depth - 1)}".encode()) if depth else 0
                   for key, one in zip(dict.keys(value), inside, strict=False))
    if inside is not None:
        numbers = [_number(one, found, depth - 1) for one in inside] if depth else []
        return crc32(repr(sorted(numbers) if isinstance(value, set) else numbers).encode())
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return crc32(value.tobytes(), crc32(f"{value.dtype} {value.shape}".encode()))
    return crc32((repr(value) if type(value) in _PLAIN else type(value).__name__).encode())


def _left(place: SharedPlace, entry: Entry) -> ModelError:
    end = f".{entry}" if entry else ""
    return ModelError(f"is also {place.other}{end}, for code of another stage, and a forward changes it, which the "
                      "other stage does not see", code="shared-container-changes", where=f"attribute {place.name}{end}",
                      remedy="Pass what later blocks or the loss need in the carried state, or put the blocks on one "
                             "stage (Pipeline(boundaries=...)). What is only logged, code of other blocks must not "
                             "read.")


def _differs(made: tuple[SharedPlace, Entry] | None) -> ModelError:
    where, also = "code of several stages", "makes other values on another stage, of what this one reads, too"
    if made is not None:
        place, end = made[0], f".{made[1]}" if made[1] else ""
        where = f"attribute {place.name}{end}"
        also = f"is also {place.other}{end}, for code of another stage, and the stages have made different values of it"
    return ModelError(f"{also}; nothing was updated", code="shared-container-differs", where=where,
                      remedy="Pass what later blocks need in the carried state, give each block a value of its own, or "
                             "put the blocks on one stage (Pipeline(boundaries=...)).")
