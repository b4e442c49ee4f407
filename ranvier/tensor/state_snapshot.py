"""Snapshots, for a forward that runs again, of state that it may read and change besides parameters and buffers:
attributes of modules, the contents of their lists, dicts, sets and objects, and states of random number generators. For
tensors and arrays in these, only the fact that they were changed in place is detected.

    then = StateSnapshot(modules)          before the first run, which may change all this
    with then.restored(): ...         the second run finds the state of the first; then the current state is restored

Torch's own generators are left out: `torch.utils.checkpoint` restores their states.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from operator import is_
from types import FunctionType
from typing import Any

import torch
from torch import nn

from ranvier.originals.object_contents import (
    OF_EVERY_MODULE,
    bytes_of,
    is_array,
    is_of_user,
    is_per_stage,
    is_random,
    own_dict,
    random_state,
)

_HOLD_NOTHING = frozenset({type(None), bool, int, float, complex, str, bytes, torch.Tensor, nn.Parameter, torch.dtype,
                           torch.device, FunctionType, type})
"""Types of values that refer to no list, dict, set, object or generator."""
_MOST_OBJECTS = 3
"""Depth to which references from object to object are followed."""
_MOST_ELEMENTS = 10_000
"""Largest list, dict or set of an object that is copied (larger ones hold data); elements of an array to compare."""


class StateSnapshot:
    """A snapshot. modules: modules whose attributes a forward may read or change. common: whether to include the
    generators of the modules `random` and `numpy.random`. arrays: whether to compare the contents of arrays."""

    def __init__(self, modules: Collection[nn.Module], *, common: bool = True, arrays: bool = False) -> None:
        self._modules, self._looks_at_arrays, self._num_objects = modules, arrays, 0
        self._at: tuple[nn.Module, str] | None = None
        """The attribute from which the recorded value was reached."""
        self._tensors: list[tuple[tuple[nn.Module, str] | None, torch.Tensor, int]] = []
        """Tensors in lists, dicts and objects, and their versions."""
        self._arrays: list[tuple[tuple[nn.Module, str] | None, Any, bytes]] = []
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        """The attributes of each module, and a copy of them."""
        self._contents: dict[int, tuple[Any, Any]] = {}
        """Identity of each list, dict or set reachable from attributes -> the object and a copy of it."""
        self._generators: dict[int, tuple[Any, Any]] = {}
        """Identity of each random number generator -> the generator and its state."""
        if common:
            self._note(random.getstate.__self__)  # type: ignore[attr-defined]
            if (numpy := sys.modules.get("numpy")) is not None:
                self._note(numpy.random.get_state.__self__)
        for module in modules:
            found = {name: value for name, value in vars(module).items() if name not in OF_EVERY_MODULE}
            self._attributes.append((vars(module), found))
            for name, value in found.items():
                if type(value) not in _HOLD_NOTHING:
                    self._at = module, name
                    self._note(value)

    def _note(self, value: Any) -> None:
        if isinstance(value, list | deque | dict | set):
            if id(value) not in self._contents and not (self._num_objects and len(value) > _MOST_ELEMENTS):
                contents = _copy(value)
                self._contents[id(value)] = value, contents
                values = contents.values() if isinstance(contents, dict) else contents
                if torch.Tensor in map(type, values):
                    self._tensors += [(self._at, one, one._version) for one in values
                                      if type(one) is torch.Tensor and not one.is_inference()]
                self._note_all(values)
        elif isinstance(value, tuple):
            self._note_all(value)
        elif is_random(value):
            self._generators[id(value)] = value, random_state(value)
        elif is_array(value):
            if self._looks_at_arrays:
                self._arrays.append((self._at, value, bytes_of(value, _MOST_ELEMENTS)))
        elif self._num_objects < _MOST_OBJECTS and not isinstance(value, nn.Module) and is_of_user(value) and (
                own := own_dict(value)) is not None and not is_per_stage(value):
            self._num_objects += 1
            self._note(own)
            self._num_objects -= 1

    def _note_all(self, values: Iterable[Any]) -> None:
        """Record all values, without a Python call for each of many words or numbers."""
        if not _HOLD_NOTHING.issuperset(map(type, values)):
            for value in values:
                if type(value) not in _HOLD_NOTHING:
                    self._note(value)

    def forget_unmoved(self) -> None:
        """After the first run: drop the states of generators from which it has not drawn."""
        self._generators = {key: (generator, state) for key, (generator, state) in self._generators.items()
                            if not _same_state(random_state(generator), state)}

    def changed_in_place(self) -> tuple[nn.Module, str] | None:
        """The module and attribute that refer to a tensor or array that the first run has changed in place."""
        changed = (at for at, tensor, version in self._tensors if tensor._version != version)
        return next(changed, None) or next((at for at, array, before in self._arrays
                                            if bytes_of(array, _MOST_ELEMENTS) != before), None)

    @contextmanager
    def restored(self) -> Iterator[None]:
        now = StateSnapshot(self._modules, common=bool(self._generators))
        self.restore()
        try:
            yield
        finally:
            now.restore()

    def restore(self) -> None:
        """Restore the recorded state."""
        for attributes, found in self._attributes:
            for name in attributes.keys() - found.keys() - OF_EVERY_MODULE:
                del attributes[name]
            attributes.update(found)
        for value, contents in self._contents.values():
            if not _same_contents(value, contents):
                value.clear()
                (value.extend if isinstance(value, list | deque) else value.update)(contents)
        for generator, state in self._generators.values():
            _set_state(generator, state)


def _copy(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else set(value) if isinstance(value, set) else list(value)


def _same_contents(value: Any, contents: Any) -> bool:
    if len(value) != len(contents):
        return False
    if isinstance(value, dict):
        return all(map(is_, value, contents)) and all(map(is_, value.values(), contents.values()))
    if isinstance(value, set):
        return bool(value == contents)
    return all(map(is_, value, contents))


def _same_state(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same_state(value, other[key]) for key, value in one.items())
    return bool((one == other).all() if hasattr(one, "all") else one == other)


def _set_state(generator: Any, state: Any) -> None:
    if hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        (generator.setstate if isinstance(generator, random.Random) else generator.set_state)(state)
