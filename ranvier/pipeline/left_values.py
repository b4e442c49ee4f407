"""Values that a forward leaves outside of the carried state, where code of another stage reads them
(`plan/shared_places`).

    before a forward, or a backward        record what is in these places
    afterwards                             ModelError for a value that has changed, by name
    after the last one of a batch          a checksum of what all readers compute themselves, which must be the same

The checksum is added to the sums of the batch (`pipeline/statistics`) with factors whose sum is zero over the ranks of
a replica that have the place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from itertools import chain, repeat
from operator import attrgetter, call, is_
from types import CellType, FunctionType, ModuleType
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor, nn

from ranvier.errors import ModelError
from ranvier.mesh import Coordinates, StagePlacement
from ranvier.originals import object_contents as objects
from ranvier.originals.same_memory import storage_of
from ranvier.pipeline.same_on_ranks import NUMBER_BITS
from ranvier.plan.code_uses import is_key
from ranvier.plan.reached_objects import CodeReach
from ranvier.plan.shared_places import ANY_NAME, Element, Entry, SharedPlace

_MOST_DEPTH = 4
_CLOSE_BATCHES = 2
"""Number of batches in which each forward and backward is checked. Later batches are checked from the first forward to
the last backward of a stage, or in each forward if other stages of the rank run in between."""
_OR_SAY_SO = ("If no block needs what another one has left there, as in a logger, a timer or a workspace, set "
              "ranvier_per_stage = True on the object or its class; make a variable, dict or list an attribute of one.")


class LeftValues:
    """The places of one stage on this rank. blocks: (number in the model, name, module). loss: None if the stage has
    none. is_alone: whether no other stage of this rank runs in between. only_here: numbers of places that no other rank
    has, so that no rank can check whether the stages compute the same values."""

    def __init__(self, places: Sequence[SharedPlace], blocks: Sequence[tuple[int, str, nn.Module]], loss: object, *,
                 is_alone: bool, only_here: Collection[int] = ()) -> None:
        self._is_alone, self._only_here, self._batches = is_alone, only_here, 0
        self._made: dict[tuple[int, Entry], Watch] = {}
        """Entries that a forward here has made, among those that all readers compute themselves."""
        self._numbers: dict[tuple[int, Entry], tuple[Mark, int]] = {}
        self._places: list[tuple[SharedPlace, Any]] = []
        self._watches: list[Watch] | None = None
        """Of all places, from the first forward on."""
        self._steady, self._unsteady = Identities(()), list[Watch]()
        self._found: frozenset[int] = frozenset()
        """Identities of objects that are watched on their own, not as a part of what contains them."""
        if places:
            reach = CodeReach.from_roots([*((name, module) for _, name, module in blocks), ("loss", loss)])
            self._found = frozenset(reach.found) | reach.per_stage
            found = reach.places()
            self._places = [(place, found[place.at]) for place in places if place.at in found]

    def begin(self, *, first: bool, backward: bool = False) -> None:
        """Begin a forward or a backward. first: whether it is the first of its batch."""
        self._batches += first
        if self._is_due(first, backward):
            self._changes()  # by code between batches, or of another stage

    def check(self, *, last: bool, backward: bool = False) -> None:
        """End a forward or a backward. Raises ModelError if it has left something that another stage reads and does not
        compute itself. last: whether it is the last of its batch."""
        for change in self._changes() if self._is_due(last, backward) else ():
            place = change.watch.place
            if not change.is_read:
                continue
            if not place.is_agreed(change.entry) or place.number in self._only_here or change.now.has_gradient:
                raise _left_value_error(place, change.entry)
            self._made[place.number, change.entry] = change.watch

    def _is_due(self, at_an_end: bool, backward: bool) -> bool:
        if self._batches <= _CLOSE_BATCHES:
            return True
        return at_an_end if self._is_alone else not backward

    def _changes(self) -> list[Change]:
        """What has changed since the last look."""
        if self._watches is None:
            self._watches, found = [Watch(place, value, self._found) for place, value in self._places], list[Change]()
        elif self._steady.is_same():
            return [change for watch in self._unsteady for change in watch.changes()]
        else:
            found = [change for watch in self._watches for change in watch.changes()]
        self._steady = Identities(watch for watch in self._watches if watch.is_steady)
        self._unsteady = [watch for watch in self._watches if not watch.is_steady]
        return found

    def count_made(self) -> dict[tuple[int, Entry], int]:
        """A checksum of each entry that forwards of the stage have made so far, computed again if the entry has
        changed; for tensors on a device the host waits."""
        for (number, entry), watch in self._made.items():
            now = dict(watch.entries()).get(entry)
            mark, known = watch.mark(now), self._numbers.get((number, entry))
            if known is None or not mark.is_same(known[0]):
                self._numbers[number, entry] = mark, _number(now, self._found - {id(watch.value)})
        return {place: one for place, (_, one) in self._numbers.items()}

    def first_made(self) -> tuple[SharedPlace, Entry] | None:
        """The first place where a forward of the stage has made something."""
        return next(((watch.place, entry) for (_, entry), watch in self._made.items()), None)


class SameValueCheck:
    """Checks that the stages of a model compute the same for values that each of them computes itself. stages: those of
    this rank."""

    def __init__(self, places: Sequence[SharedPlace], at: Coordinates, placement: StagePlacement,
                 stages: Sequence[LeftValues]) -> None:
        self._stages = stages
        self._factors: dict[int, int] = {}
        weight = 1 + at.index(tuple(axis for axis in at.mesh if axis not in at.mesh.pipeline_axes))
        agreed = {place.number: place for place in places if place.agreed}
        for number, place in agreed.items():
            ranks = sorted({placement.rank_of(stage) for stage in place.stages})
            if at.pipeline_rank in ranks:
                self._factors[number] = weight * (len(ranks) - 1 if at.pipeline_rank == ranks[0] else -1)

    def number(self) -> float:
        """The checksum that this rank adds to the sums."""
        if not self._factors:
            return 0.0
        made: dict[tuple[int, Entry], int] = {}
        for stage in self._stages:
            for place, one in stage.count_made().items():
                if made.setdefault(place, one) != one:  # stages of this rank differ in their copies
                    raise _differs(stage.first_made())
        numbers: dict[int, int] = {}
        for (number, entry), one in sorted(made.items(), key=lambda one: (one[0][0], repr(one[0][1]))):
            numbers[number] = crc32(f"{entry} {one}".encode(), numbers.get(number, 0))
        return float(sum(self._factors.get(number, 0) * (one >> 32 - NUMBER_BITS) for number, one in numbers.items()))

    def check(self, total: float) -> None:
        """Raise ModelError if the sum over all ranks shows that they differ."""
        if total:
            raise _differs(next(filter(None, (stage.first_made() for stage in self._stages)), None))


def _number(value: Any, found: Collection[int], depth: int = _MOST_DEPTH) -> int:
    """A checksum of a value, the same on all ranks for equal values. found: identities of what is left out."""
    if id(value) in found:
        return 0
    if isinstance(value, Tensor):
        plain = value.detach().cpu().contiguous()
        return crc32(plain.view(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b"",
                     crc32(f"{plain.dtype} {tuple(plain.shape)}".encode()))
    if objects.is_array(value):
        shape = f"{getattr(value, 'dtype', '')} {getattr(value, 'shape', '')}"
        return crc32(objects.bytes_of(value), crc32(shape.encode()))
    if isinstance(value, type | FunctionType | ModuleType):
        return crc32(value.__name__.encode())
    kind, own = objects.container(value), objects.own_dict(value)
    if kind is None and own is None:
        return crc32(repr(value).encode())
    inside = list(own.items()) if kind is None and own is not None else objects.elements_with_keys(value)
    parts = [f"{0 if kind is set else key!r} {_number(item, found, depth - 1)}" for key, item in inside if depth]
    return crc32(f"{type(value).__name__ if kind is None else ''} {sorted(parts)}".encode())  # in any order


def _end(entry: Entry) -> str:
    """What follows the name of a place."""
    return f"[{entry.key!r}]" if isinstance(entry, Element) else f".{entry}" if entry else ""


def _left_value_error(place: SharedPlace, entry: Entry) -> ModelError:
    end = _end(entry)
    return ModelError(f"is also {place.other}{end}, for code of another stage, and a forward changes it, which the "
                      "other stage does not see", code="shared-container-changes",
                      where=f"attribute {place.at.path}{end}",
                      remedy="Pass what later blocks or the loss need in the carried state, or put the blocks on one "
                             f"stage (Pipeline(boundaries=...)). {_OR_SAY_SO}")


def _differs(made: tuple[SharedPlace, Entry] | None) -> ModelError:
    where, also = "code of several stages", "computes other values on another stage for what this stage reads, too"
    if made is not None:
        place, end = made[0], _end(made[1])
        where = f"attribute {place.at.path}{end}"
        also = f"is also {place.other}{end}, for code of another stage, and the stages have made different values of it"
    return ModelError(f"{also}; nothing was updated", code="shared-container-differs", where=where,
                      remedy="Pass what later blocks need in the carried state, give each block its own value, or "
                             f"put the blocks on one stage (Pipeline(boundaries=...)). {_OR_SAY_SO}")


# --- values in the places that several stages reach -------------------------------------------------------------------

# Values in the places that code of several stages reaches (`plan/shared_places`), and which of them have changed.
#
#     watch = Watch(place, value, found)      what there is now: values, elements of containers, versions of tensors
#     watch.changes()                         exactly: numbers and texts are the same if they are equal
#     Identities(watches).is_same()           for many together, by identity, in C: for each forward of each batch
#
# Opaque objects, such as generators, are never the same. Not noticed are changes that are undone before the next look,
# and what C code changes in a tensor's memory. Of more than 10,000 elements only the ends are compared, and of large
# arrays a sample.


PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})
_SAMPLED = 1 << 17
"""Number of elements, evenly spread, that are compared in larger arrays."""
_version_of = attrgetter("_version")


class Mark:
    """A snapshot: the value, or the elements of a container, which this keeps alive, and the version counters of
    tensors among them."""

    __slots__ = ("containers", "is_opaque", "is_sampled", "kept", "tensors", "versions")

    def __init__(self, value: object, found: Collection[int] = (), *, is_found: bool = True) -> None:
        self.kept: list[Any] = [value]
        self.containers: list[Any] = []
        self.is_sampled = False
        """Whether its elements, or those of an array, are compared by value, and not by identity."""
        self._add(value, found if is_found else (), found, _MOST_DEPTH)
        self.tensors = [] if PLAIN.issuperset(map(type, self.kept)) else [
            one for one in self.kept if isinstance(one, Tensor) or objects.is_array(one)]
        self.versions = [_version(tensor) for tensor in self.tensors]
        self.is_opaque = any(type(one) not in PLAIN and objects.is_opaque(one) for one in self.kept)
        """Whether it is impossible to tell that it has not changed."""
        self.is_sampled |= self.is_opaque or any(map(objects.is_array, self.tensors))

    @property
    def has_gradient(self) -> bool:
        return any(isinstance(tensor, Tensor) and tensor.requires_grad and not isinstance(tensor, nn.Parameter)
                   for tensor in self.tensors)

    def _add(self, value: object, left_out: Collection[int], found: Collection[int], depth: int) -> None:
        if type(value) in PLAIN or id(value) in left_out:
            return
        inside = objects.elements(value)
        if objects.is_of_user(value) and depth:  # made by a forward, or a container
            if (own := objects.own_dict(value)) is not None:
                self._add(own, (), found, depth - 1)
            self.is_sampled |= own is None
        if inside is None:
            return
        if objects.is_data(value):
            self.is_sampled = True
            self.kept += _sample(value)
            return
        self.containers.append(value)
        self.kept += inside
        if isinstance(value, dict):
            self.kept += dict.keys(value)
        if depth and not PLAIN.issuperset(map(type, inside)):
            for item in inside:
                self._add(item, found, found, depth - 1)

    def is_same(self, other: Mark) -> bool:
        """Whether it is the same value, with the same elements: numbers and texts are the same if they are equal."""
        return not self.is_opaque and len(self.kept) == len(other.kept) and self.versions == other.versions and (
            all(map(is_, self.kept, other.kept)) or all(map(_is_same, self.kept, other.kept)))


class Change(NamedTuple):
    """An entry of a watched place, and what it is now."""

    watch: Watch
    entry: Entry
    now: Mark

    @property
    def is_read(self) -> bool:
        """Whether another stage may read it."""
        return not isinstance(self.entry, Element) or any(
            is_key(self.entry.key, key) for key in self.watch.place.keys or ())


class Watch:
    """Watches one place. found: identities of objects that are watched on their own, not as a part of what contains
    them."""

    def __init__(self, place: SharedPlace, value: object, found: Collection[int]) -> None:
        self.place, self.value, self._found = place, value, found
        self.has_changed = False
        self._look()

    def _look(self) -> None:
        self.marks = {entry: self.mark(element) for entry, element in self.entries()}
        self.iterators = self._iterators()
        """Iterators over all that there is, for a comparison by identity; None if identity is not sufficient."""
        self._identities = None if self.iterators is None else Identities((self,))

    @property
    def is_steady(self) -> bool:
        """Whether it can be compared together with others, which hardly ever change."""
        return self.iterators is not None and not self.has_changed

    def mark(self, value: object) -> Mark:
        return Mark(value, self._found, is_found=value is not self.value)

    def entries(self) -> Iterable[tuple[Entry, Any]]:
        """What there is now."""
        if self.place.keys is not None and not objects.is_data(self.value):
            return [(Element(key), element) for key, element in objects.elements_with_keys(self.value)]
        if None in self.place.read or ANY_NAME in self.place.read:
            return objects.contents(self.value)
        return objects.entries_of(self.value, self.place.read)

    def changes(self) -> Iterator[Change]:
        """Yield what has changed since the last look; its present state is the new reference."""
        if self._identities is not None and self._identities.is_same():
            return
        before = self.marks
        self._look()
        for entry in before.keys() | self.marks.keys():
            then, now = before.get(entry, _NOTHING), self.marks.get(entry, _NOTHING)
            if not now.is_same(then):
                self.has_changed = True
                yield Change(self, entry, now)

    def _iterators(self) -> list[Callable[[], Iterator[Any]]] | None:
        found, marks = list[Callable[[], Any]](), self.marks.values()
        if any(mark.is_sampled for mark in marks) or (isinstance(self.value, CellType) and not marks):
            return None
        if isinstance(self.value, CellType | ContextVar):
            get, of = (getattr, "cell_contents") if isinstance(self.value, CellType) else (ContextVar.get, None)
            found.append(partial(map, get, (self.value,), (of,)))
        elif not objects.is_whole(self.value):
            if (mappings := objects.attributes_of(self.value)) is None:
                return None
            names = list(self.marks) if ANY_NAME in self.place.read else self.place.read
            for mapping in mappings:
                found.append(partial(map, mapping.get, names, repeat(_NOTHING)))
                found += [mapping.keys().__iter__] if ANY_NAME in self.place.read else []
        containers = [container for mark in marks for container in mark.containers]
        for one in (self.value, *containers) if self.place.keys is not None else containers:
            if isinstance(one, dict):
                found += [dict.values(one).__iter__, dict.keys(one).__iter__]
            elif type(one) in (list, tuple, set) or type(one).__module__ == "collections":
                found.append(one.__iter__)
            else:
                return None  # which may iterate by its own code
        return found


class Identities:
    """The contents of places that have iterators, for a comparison by identity with their later contents."""

    def __init__(self, watches: Iterable[Watch]) -> None:
        watches = list(watches)
        self._iterators = [iterator for watch in watches for iterator in watch.iterators or ()]
        self._there = list(chain.from_iterable(map(call, self._iterators)))
        self._tensors = [tensor for watch in watches for mark in watch.marks.values() for tensor in mark.tensors
                         if not tensor.is_inference() and not _is_trained(tensor)]
        self._versions = list(map(_version_of, self._tensors))
        self._storages = list(map(storage_of, self._tensors))

    def is_same(self) -> bool:
        try:
            now = list(chain.from_iterable(map(call, self._iterators)))
        except (ValueError, RuntimeError):  # it is gone, or another thread changes it
            return False
        return len(now) == len(self._there) and all(map(is_, now, self._there)) and (
            list(map(_version_of, self._tensors)) == self._versions) and (
            list(map(storage_of, self._tensors)) == self._storages)  # of tensor.data = other, which counts nothing


def _sample(value: Any) -> list[Any]:
    """The size of a container that holds data, and the first and last element of an ordered one."""
    found = [objects.size_of(value)]
    if isinstance(value, dict):
        found += [item for ends in (dict.__iter__(value), dict.__reversed__(value))
                  for key in (next(ends),) for item in (key, dict.__getitem__(value, key))]
    elif isinstance(value, list | tuple):
        found += [list.__getitem__(value, end) if isinstance(value, list) else tuple.__getitem__(value, end)
                  for end in (0, -1)]
    return found


def _is_trained(value: object) -> bool:
    """Whether an optimizer may change it during a backward."""
    return isinstance(value, nn.Parameter) and value.requires_grad


def _version(value: Any) -> object:
    if isinstance(value, Tensor):
        return 0 if value.is_inference() or _is_trained(value) else (value._version, storage_of(value))
    return crc32(objects.bytes_of(value, _SAMPLED))


def _is_same(value: Any, other: Any) -> bool:
    return value is other or (type(value) is type(other) and type(value) in PLAIN and value == other)


_NOTHING = Mark(object())
