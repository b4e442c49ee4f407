"""What was in the places that code of several stages reaches (`plan/shared_places`), and which of it has changed.

    watch = Watch(place, value, found)      what there is now: values, elements of containers, versions of tensors
    watch.is_same()                         some comparisons by identity, in C: for each forward of each batch
    watch.changes()                         exactly: numbers and texts are the same if they are equal

Many are compared at once by `Identities.of(watches).is_same()`. What cannot be looked into, such as a generator, is
never the same. Not seen is what is as it was when somebody looks
again, what C code changes in a tensor's memory, and an attribute of a class or variable of a module that comes while
another one goes. Of more than 10,000 elements, and of arrays beyond 1 MiB, a sample is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextvars import ContextVar
from functools import partial
from itertools import chain
from operator import attrgetter, call, getitem, is_
from types import CellType, ModuleType
from typing import Any, NamedTuple
from zlib import crc32

from torch import Tensor, nn

from ranvier.plan.code_uses import is_key
from ranvier.plan.object_contents import (
    attributes_of,
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
from ranvier.plan.shared_places import Element, Entry, SharedPlace

PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})
_MOST_DEPTH = 4
_MOST_BYTES = 1 << 20
_SAMPLED = 1 << 14
"""Of larger arrays so many elements are compared, evenly spread, and of containers that hold data a hundredth."""
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


class Identities:
    """Values of attributes, variables and elements, to be compared with what they are later."""

    __slots__ = ("contents", "elements", "getters", "mappings", "names", "sized", "sizes", "tensors", "values",
                 "versions", "views")

    def __init__(self) -> None:
        self.mappings: list[Any] = []
        self.names: list[str] = []
        self.values: list[Any] = []
        self.getters: list[Callable[[], Any]] = []
        self.contents: list[Any] = []
        self.views: list[Any] = []
        self.elements: list[Any] = []
        self.sized: list[Any] = []
        self.sizes: list[int] = []
        self.tensors: list[Tensor] = []
        self.versions: list[int] = []

    def is_same(self) -> bool:
        try:
            return (list(map(len, self.sized)) == self.sizes
                    and all(map(is_, map(getitem, self.mappings, self.names), self.values))
                    and all(map(is_, map(call, self.getters), self.contents))
                    and all(map(is_, chain.from_iterable(self.views), self.elements))
                    and list(map(_version_of, self.tensors)) == self.versions)
        except (KeyError, ValueError, RuntimeError):  # it is no more, or another thread changes it
            return False

    @classmethod
    def of(cls, watches: Iterable[Watch]) -> Identities:
        """Those of all of them that are steady."""
        found = cls()
        for one in (watch.identities for watch in watches if watch.is_steady):
            for name in cls.__slots__:
                getattr(found, name).extend(getattr(one, name))
        return found


class Change(NamedTuple):
    """An entry of a watched place, before and after."""

    watch: Watch
    entry: Entry
    before: Mark
    now: Mark

    @property
    def is_read(self) -> bool:
        """Whether another stage may read it."""
        place = self.watch.place
        if isinstance(self.entry, Element):
            return any(is_key(self.entry.key, key) for key in place.keys or ())
        return self.entry not in place.called or callable(self.before.kept[0]) or callable(self.now.kept[0])


class Watch:
    """One place. found: identities of what is looked at by itself, and not as a part of what has it."""

    def __init__(self, place: SharedPlace, value: object, found: Collection[int]) -> None:
        self.place, self.value, self._found = place, value, found
        self.marks = self._marks()
        self.identities = self._identities()
        """None where identities do not tell that it is the same."""
        self.has_changed = False

    @property
    def is_steady(self) -> bool:
        """Whether it can be compared together with others, which hardly ever change."""
        return self.identities is not None and not self.has_changed

    def _mark(self, one: object) -> Mark:
        return Mark(one, self._found, is_found=one is not self.value)

    def _marks(self) -> dict[Entry, Mark]:
        return {entry: self._mark(one) for entry, one in self._entries()}

    def _entries(self) -> Iterable[tuple[Entry, Any]]:
        if self.place.keys is not None and not is_data(self.value):
            return [(Element(key), one) for key, one in elements_with_keys(self.value)]
        if self.place.any or None in self.place.read:
            return contents(self.value)
        return entries_of(self.value, self.place.read)

    def changes(self) -> Iterator[Change]:
        """What has changed since; afterwards it counts as it is."""
        before, self.marks = self.marks, self._marks()
        self.identities = self._identities()
        for entry in before.keys() | self.marks.keys():
            then, now = before.get(entry, _NOTHING), self.marks.get(entry, _NOTHING)
            if not now.is_same(then):
                self.has_changed = True
                yield Change(self, entry, then, now)

    def is_same(self) -> bool:
        """Whether nothing has changed, by identity."""
        return self.identities is not None and self.identities.is_same()

    def _identities(self) -> Identities | None:
        found, marks = Identities(), self.marks
        if any(mark.is_sampled for mark in marks.values()):
            return None
        if isinstance(self.value, CellType | ContextVar):
            if not marks:
                return None
            found.getters = [partial(self.value.get, None) if isinstance(self.value, ContextVar) else partial(
                getattr, self.value, "cell_contents")]
            found.contents = [mark.kept[0] for mark in marks.values()]
        elif not is_whole(self.value):
            if (mappings := attributes_of(self.value)) is None:
                return None
            for mapping in mappings:
                here = [str(name) for name in marks if name in mapping]
                found.mappings += [mapping] * len(here)
                found.names += here
                found.values += [marks[name].kept[0] for name in here]
                found.sized.append(mapping)
                if not isinstance(self.value, type | ModuleType):  # which have many, hardly ever exchanged
                    found.views.append(mapping.keys())
                    found.elements += mapping
        whole = [[self.value]] if self.place.keys is not None else []
        for containers in (*whole, *(mark.containers for mark in marks.values())):
            for one in containers:
                views = (dict.values(one), dict.keys(one)) if isinstance(one, dict) else (one,)
                if len(views) == 1 and type(one) not in (list, tuple, set) and type(one).__module__ != "collections":
                    return None  # which may iterate by code of its own
                found.views += views
                for view in views:
                    found.elements += view
                found.sized.append(views[0])
        found.tensors = [one for mark in marks.values() for one in mark.tensors
                         if not one.is_inference() and not _is_trained(one)]
        found.versions = list(map(_version_of, found.tensors))
        found.sizes = list(map(len, found.sized))
        return found


def _sample(value: Any) -> list[Any]:
    """The size of a container that holds data, its ends, and of a list a hundredth of its elements."""
    found = [size_of(value)]
    if isinstance(value, dict):
        for ends in (dict.__iter__(value), dict.__reversed__(value)):
            found += [key := next(ends), dict.__getitem__(value, key)]
    elif isinstance(value, list | tuple):
        kind: Any = list if isinstance(value, list) else tuple
        found += kind.__getitem__(value, slice(None, None, 100))
        found.append(kind.__getitem__(value, -1))
    return found


def _is_trained(value: object) -> bool:
    """Whether an optimizer may change it during a backward."""
    return isinstance(value, nn.Parameter) and value.requires_grad


def _version(value: Any) -> object:
    if isinstance(value, Tensor):
        return 0 if value.is_inference() or _is_trained(value) else value._version
    if getattr(value, "nbytes", 0) <= _MOST_BYTES:
        return crc32(value if isinstance(value, bytearray) else value.tobytes())
    return crc32(value.flat[::max(value.size // _SAMPLED, 1)].tobytes())


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and type(one) in PLAIN and one == other)


_NOTHING = Mark(object())
