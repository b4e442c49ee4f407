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
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from ranvier.errors import ModelError
from ranvier.mesh import Coordinates, StagePlacement
from ranvier.plan.reached_objects import CodeReach, contents, elements, entry_of
from ranvier.plan.shared_places import Entry, SharedPlace

_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})
_NUMBER_BITS = 20
"""So short are the numbers of ranks that their sums over thousands of ranks are exact in fp64."""
_MOST_DEPTH = 4
_MOST_BYTES = 1 << 16
"""Changes of larger arrays are not looked for."""
_ABSENT = object()


class LeftValues:
    """The places of one stage on this rank. blocks: (number in the model, name, module). loss: None where the stage has
    none."""

    def __init__(self, places: Sequence[SharedPlace], blocks: Sequence[tuple[int, str, nn.Module]], loss: object
                 ) -> None:
        self._places: list[tuple[SharedPlace, Any]] = []
        self._before: list[dict[Entry, _Mark]] = []
        self._made: dict[tuple[int, Entry], SharedPlace] = {}
        """Entries that a forward here has made, of those that all readers make by themselves."""
        self._values: dict[int, Any] = {}
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

    def begin(self) -> None:
        """A forward begins."""
        self._before = [{entry: _Mark(one, self._found, is_found=one is not value)
                         for entry, one in _entries(place, value)} for place, value in self._places]

    def check(self) -> None:
        """The forward has ended. ModelError where it has left something that another stage reads, and does not make by
        itself."""
        for (place, value), before in zip(self._places, self._before, strict=True):
            now = dict(_entries(place, value))
            for entry in before.keys() | now.keys():
                one = now.get(entry, _ABSENT)
                mark = _Mark(one, self._found, is_found=one is not value)
                if mark == before.get(entry, _NOTHING):
                    continue
                if entry not in place.agreed or mark.has_gradient:
                    raise _left(place, entry)
                self._made[place.number, entry] = place
                self._values[place.number] = value
        self._before = []

    def made(self) -> dict[int, int]:
        """Place -> a number of all that forwards of the stage have made there so far."""
        found: dict[int, int] = {}
        for (number, entry), _ in sorted(self._made.items(), key=lambda one: (one[0][0], one[0][1] or "")):
            value = self._values[number]
            now = next((one for _, one in contents(value)), None) if entry is None else entry_of(value, entry)
            found[number] = crc32(f"{entry} {_number(now, self._found - {id(value)})}".encode(), found.get(number, 0))
        return found

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
        for number, place in {place.number: place for place in places if place.agreed}.items():
            ranks = sorted({placement.rank_of(stage) for stage in place.stages})
            if at.pipeline_rank in ranks:
                self._factors[number] = weight * (len(ranks) - 1 if at.pipeline_rank == ranks[0] else -1)

    def number(self) -> float:
        """The number that this rank adds to the sums."""
        total = 0
        for one in self._numbers().items():
            total += self._factors.get(one[0], 0) * (one[1] >> 32 - _NUMBER_BITS)
        return float(total)

    def _numbers(self) -> dict[int, int]:
        """ModelError where stages of this rank differ, of what each has a copy."""
        found: dict[int, int] = {}
        for stage in self._stages:
            for number, one in stage.made().items():
                if found.setdefault(number, one) != one:
                    raise _differs(stage.first_made())
        return found

    def check(self, total: float) -> None:
        """ModelError where the sum over all ranks shows that they differ."""
        if total:
            raise _differs(next(filter(None, (stage.first_made() for stage in self._stages)), None))


class _Mark:
    """What there was: numbers and texts by value, tensors and objects by identity, which this keeps alive, and tensors
    by how often they were changed in place."""

    __slots__ = ("_found", "_kept", "_key", "has_gradient")

    def __init__(self, value: object, found: Collection[int] = (), *, is_found: bool = True) -> None:
        self._kept: list[object] = []
        self._found = found
        self.has_gradient = False
        self._key = self._of(value, _MOST_DEPTH, is_found=is_found)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Mark) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def _of(self, value: Any, depth: int, *, is_found: bool = True) -> tuple[object, ...]:
        if type(value) in _PLAIN:
            return type(value), value
        self._kept.append(value)
        if isinstance(value, Tensor):
            self.has_gradient |= value.requires_grad and not isinstance(value, nn.Parameter)
            return id(value), 0 if value.is_inference() else value._version
        inside = None if is_found and id(value) in self._found else elements(value)
        if inside is None and is_dataclass(value) and not isinstance(value, type):
            inside = [vars(value).get(one.name) for one in fields(value)] if hasattr(value, "__dict__") else None
        if inside is not None:
            if _PLAIN.issuperset(map(type, inside)):
                keys = tuple(dict.keys(value)) if isinstance(value, dict) else ()
                return id(value), len(value), tuple(inside), keys
            return (id(value), *(self._of(one, depth - 1) for one in inside)) if depth else (id(value),)
        numpy = sys.modules.get("numpy")
        if numpy is not None and type(value) is numpy.ndarray and value.nbytes <= _MOST_BYTES:
            return id(value), value.tobytes()
        return (id(value),)


_NOTHING = _Mark(_ABSENT)


def _entries(place: SharedPlace, value: object) -> Iterator[tuple[Entry, Any]]:
    if place.any or None in place.read:
        yield from contents(value)
        return
    for name in place.read:
        if name is not None and (one := entry_of(value, name)) is not None:
            yield name, one


def _number(value: Any, found: Collection[int], depth: int = _MOST_DEPTH) -> int:
    """A number of a value, the same on all ranks for equal values. found: what is left out."""
    if id(value) in found:
        return 0
    if isinstance(value, Tensor):
        plain = value.detach().cpu().contiguous()
        return crc32(plain.view(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b"",
                     crc32(f"{plain.dtype} {tuple(plain.shape)}".encode()))
    if isinstance(value, Mapping):
        return sum(crc32(f"{key!r} {_number(one, found, depth - 1)}".encode()) for key, one in value.items()) if depth else 0
    inside = elements(value)
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
