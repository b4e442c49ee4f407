"""Values in the places that code of several stages reaches (`plan/shared_places`), and which of them have changed.

    watch = Watch(place, value, found)      what there is now: values, elements of containers, versions of tensors
    watch.changes()                         exactly: numbers and texts are the same if they are equal
    Identities(watches).is_same()           of many at once, by identity, in C: for each forward of each batch

What cannot be looked into, such as a generator, is never the same. Not seen is what is as it was when somebody looks
again, and what C code changes in a tensor's memory. Of more than 10,000 elements the ends are compared, and of large
arrays a sample.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextvars import ContextVar
from functools import partial
from itertools import chain, repeat
from operator import attrgetter, call, is_
from types import CellType
from typing import Any, NamedTuple
from zlib import crc32

from torch import Tensor, nn

from ranvier.plan.code_uses import is_key
from ranvier.plan.object_contents import (
    attributes_of,
    bytes_of,
    contents,
    elements,
    elements_with_keys,
    entries_of,
    is_array,
    is_data,
    is_of_user,
    is_opaque,
    is_whole,
    own_dict,
    size_of,
)
from ranvier.plan.shared_places import ANY_NAME, Element, Entry, SharedPlace

PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})
_MOST_DEPTH = 4
_SAMPLED = 1 << 17
"""Of larger arrays so many elements are compared, evenly spread."""
_version_of = attrgetter("_version")


class Mark:
    """What there was: the value, or the elements of a container, which this keeps alive, and how often tensors among
    them have been changed in place."""

    __slots__ = ("containers", "is_opaque", "is_sampled", "kept", "tensors", "versions")

    def __init__(self, value: object, found: Collection[int] = (), *, is_found: bool = True) -> None:
        self.kept: list[Any] = [value]
        self.containers: list[Any] = []
        self.is_sampled = False
        """Whether its elements, or those of an array, are compared by themselves, and not by identity."""
        self._add(value, found if is_found else (), found, _MOST_DEPTH)
        self.tensors = [] if PLAIN.issuperset(map(type, self.kept)) else [
            one for one in self.kept if isinstance(one, Tensor) or is_array(one)]
        self.versions = [_version(one) for one in self.tensors]
        self.is_opaque = any(type(one) not in PLAIN and is_opaque(one) for one in self.kept)
        """Whether nobody can tell that it is as it was."""
        self.is_sampled |= self.is_opaque or any(map(is_array, self.tensors))

    @property
    def has_gradient(self) -> bool:
        return any(isinstance(one, Tensor) and one.requires_grad and not isinstance(one, nn.Parameter)
                   for one in self.tensors)

    def _add(self, value: object, left_out: Collection[int], found: Collection[int], depth: int) -> None:
        if type(value) in PLAIN or id(value) in left_out:
            return
        inside = elements(value)
        if is_of_user(value) and depth:  # made by a forward, or a container
            if (own := own_dict(value)) is not None:
                self._add(own, (), found, depth - 1)
            self.is_sampled |= own is None
        if inside is None:
            return
        if is_data(value):
            self.is_sampled = True
            self.kept += _sample(value)
            return
        self.containers.append(value)
        self.kept += inside
        if isinstance(value, dict):
            self.kept += dict.keys(value)
        if depth and not PLAIN.issuperset(map(type, inside)):
            for one in inside:
                self._add(one, found, found, depth - 1)

    def is_same(self, other: Mark) -> bool:
        """Whether it is the same value, with the same elements: numbers and texts are, if they are equal."""
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
    """One place. found: identities of what is looked at by itself, and not as a part of what has it."""

    def __init__(self, place: SharedPlace, value: object, found: Collection[int]) -> None:
        self.place, self.value, self._found = place, value, found
        self.has_changed = False
        self._look()

    def _look(self) -> None:
        self.marks = {entry: self.mark(one) for entry, one in self.entries()}
        self.iterators = self._iterators()
        """What gives all that there is, for a comparison by identity; None where that does not tell."""
        self._identities = None if self.iterators is None else Identities((self,))

    @property
    def is_steady(self) -> bool:
        """Whether it can be compared together with others, which hardly ever change."""
        return self.iterators is not None and not self.has_changed

    def mark(self, one: object) -> Mark:
        return Mark(one, self._found, is_found=one is not self.value)

    def entries(self) -> Iterable[tuple[Entry, Any]]:
        """What there is now."""
        if self.place.keys is not None and not is_data(self.value):
            return [(Element(key), one) for key, one in elements_with_keys(self.value)]
        if None in self.place.read or ANY_NAME in self.place.read:
            return contents(self.value)
        return entries_of(self.value, self.place.read)

    def changes(self) -> Iterator[Change]:
        """What has changed since; afterwards it counts as it is."""
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
        elif not is_whole(self.value):
            if (mappings := attributes_of(self.value)) is None:
                return None
            names = list(self.marks) if ANY_NAME in self.place.read else self.place.read
            for one in mappings:
                found.append(partial(map, one.get, names, repeat(_NOTHING)))
                found += [one.keys().__iter__] if ANY_NAME in self.place.read else []
        containers = [one for mark in marks for one in mark.containers]
        for one in (self.value, *containers) if self.place.keys is not None else containers:
            if isinstance(one, dict):
                found += [dict.values(one).__iter__, dict.keys(one).__iter__]
            elif type(one) in (list, tuple, set) or type(one).__module__ == "collections":
                found.append(one.__iter__)
            else:
                return None  # which may iterate by code of its own
        return found


class Identities:
    """All that there is in these places, of which there are iterators, to be compared with what there is later."""

    def __init__(self, watches: Iterable[Watch]) -> None:
        watches = list(watches)
        self._iterators = [one for watch in watches for one in watch.iterators or ()]
        self._there = list(chain.from_iterable(map(call, self._iterators)))
        self._tensors = [one for watch in watches for mark in watch.marks.values() for one in mark.tensors
                         if not one.is_inference() and not _is_trained(one)]
        self._versions = list(map(_version_of, self._tensors))

    def is_same(self) -> bool:
        try:
            now = list(chain.from_iterable(map(call, self._iterators)))
        except (ValueError, RuntimeError):  # it is no more, or another thread changes it
            return False
        return len(now) == len(self._there) and all(map(is_, now, self._there)) and (
            list(map(_version_of, self._tensors)) == self._versions)


def _sample(value: Any) -> list[Any]:
    """The size of a container that holds data, and the ends of what has some."""
    found = [size_of(value)]
    if isinstance(value, dict):
        found += [one for ends in (dict.__iter__(value), dict.__reversed__(value))
                  for key in (next(ends),) for one in (key, dict.__getitem__(value, key))]
    elif isinstance(value, list | tuple):
        found += [list.__getitem__(value, end) if isinstance(value, list) else tuple.__getitem__(value, end)
                  for end in (0, -1)]
    return found


def _is_trained(value: object) -> bool:
    """Whether an optimizer may change it during a backward."""
    return isinstance(value, nn.Parameter) and value.requires_grad


def _version(value: Any) -> object:
    if isinstance(value, Tensor):
        return 0 if value.is_inference() or _is_trained(value) else value._version
    return crc32(bytes_of(value, _SAMPLED))


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and type(one) in PLAIN and one == other)


_NOTHING = Mark(object())
