"""Contents of objects, modules, classes, functions and containers: attributes, including slots, and elements.

No user code runs here, whatever methods a class defines, and another thread may change the examined objects. Containers
of more than 10,000 elements hold data; their elements are not returned.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from contextvars import ContextVar
from enum import Enum
from functools import lru_cache
from io import IOBase
from pathlib import Path
from queue import SimpleQueue
from random import Random, SystemRandom
from types import CellType, FunctionType, MemberDescriptorType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""Attributes in which torch keeps parameters, buffers, submodules, hooks and the mode."""
_FOREIGN = frozenset({"torch", "ranvier", "numpy", "pytest", "_pytest", *sys.stdlib_module_names} - {"__main__"})
"""Packages whose functions and objects hold no state of others."""
_INSTALLED = frozenset({"site-packages", "dist-packages"})
_OF_ENUMS = frozenset({"_value_", "_name_", "__objclass__", "_sort_order_"})
_CONTAINERS = (list, tuple, set, deque, dict)
_MOST_ELEMENTS = 10_000
_PER_STAGE = "ranvier_per_stage"
_TRIES = 100
"""Attempts to copy a container that another thread changes."""


def contents(value: Any) -> Iterable[tuple[str | None, Any]]:
    """The values that a forward may have stored in an object, by attribute or variable, or as a whole (None). Values
    that torch's hooks recompute for each forward, such as normalised weights, are left out."""
    if isinstance(value, CellType):
        with suppress(ValueError):  # not assigned yet
            return [(None, value.cell_contents)]
        return ()
    if isinstance(value, ContextVar):
        return [(None, value.get(None))]
    if is_whole(value):
        return [(None, value)]
    own = attributes(value)
    if isinstance(value, nn.Module):
        hooks = map(attributes, own.get("_forward_pre_hooks", {}).values())
        computed = {hook.get(name) for hook in hooks for name in ("name", "_tensor_name")}
        return [*((name, value) for name, value in own.items()
                  if name not in OF_EVERY_MODULE and name not in computed),
                *own.get("_buffers", {}).items()]
    return list(own.items())


def entries_of(value: Any, names: Collection[object]) -> list[tuple[str | None, Any]]:
    """The existing ones among these attributes or variables, as in `contents`."""
    return [(name, entry) for name, entry in contents(value) if name in names]


def attributes_of(value: Any) -> list[Any] | None:
    """The mappings themselves that hold an object's attributes, and a module's buffers; None if some are in slots, or
    differ between threads."""
    found = dict_of(value)
    kind: Any = type(value)
    if isinstance(value, type | ModuleType | FunctionType):
        return [found]
    if type(found) is not dict or isinstance(value, threading.local) or slots_of(kind):
        return None
    return [found, value._buffers] if isinstance(value, nn.Module) else [found]


def elements(value: object) -> list[Any] | None:
    """The elements of a list, tuple, set or dict, without keys; empty if they are data; None for anything else."""
    return None if container(value) is None else [element for _, element in elements_with_keys(value)]


def is_data(value: object) -> bool:
    """Whether `value` is a container with too many elements to examine each."""
    return container(value) is not None and size_of(value) > _MOST_ELEMENTS


def size_of(value: Any) -> int:
    """The size of a container, regardless of the methods of its class."""
    return int(container(value).__len__(value))


def is_whole(value: object) -> bool:
    """Whether `value` changes as a whole instead of by attributes: a container, a tensor, an array, an iterator, the
    variable of a closure or context."""
    return isinstance(value, CellType | ContextVar) or container(value) is not None or type(value) is Tensor or (
        is_array(value) or is_opaque(value))


def is_array(value: object) -> bool:
    """Whether `value` is a NumPy array or a random number generator, with a state that changes in place."""
    numpy = sys.modules.get("numpy")
    return is_random(value) or (numpy is not None and type(value) is numpy.ndarray)


def tensor_under(value: Any) -> Tensor | None:
    """The tensor whose memory a NumPy array has, as `tensor.numpy()` returns it, or a part of such an array."""
    while type(value).__module__ == "numpy" and hasattr(value, "base"):
        value = value.base
    return value if isinstance(value, Tensor) else None


def bytes_of(value: Any, most: int | None = None) -> bytes:
    """The contents of such an array or generator; of an array at most about `most` elements, evenly spread."""
    if is_random(value):
        state = random_state(value)
        return state.numpy().tobytes() if isinstance(state, Tensor) else repr(state).encode()
    return bytes(value.flat[::1 if most is None else max(value.size // most, 1)].tobytes())


def is_random(value: object) -> bool:
    """Whether `value` is a random number generator with a state: of torch, Python or NumPy."""
    numpy = sys.modules.get("numpy")
    return (isinstance(value, torch.Generator | Random) and not isinstance(value, SystemRandom)) or (
        numpy is not None and isinstance(value, numpy.random.Generator | numpy.random.RandomState))


def random_state(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, Random):
        return value.getstate()
    return value.bit_generator.state if hasattr(value, "bit_generator") else value.get_state(legacy=False)


def is_opaque(value: object) -> bool:
    """Whether `value` may have advanced without showing it, such as a generator or itertools.count()."""
    kind: Any = type(value)
    return kind is SimpleQueue or (hasattr(kind, "__next__") and is_foreign(kind) and not issubclass(kind, IOBase))


def is_of_user(value: Any) -> bool:
    """Whether `value` is an object of a user's class, or one that accepts any attributes."""
    kind: Any = type(value)
    if issubclass(kind, type | ModuleType | Tensor) or (issubclass(kind, Enum) and vars(value).keys() <= _OF_ENUMS):
        return False
    return kind in (SimpleNamespace, threading.local) or (not is_foreign(kind) and (
        dict_of(value) is not None or bool(slots_of(kind))))


def attributes(value: object) -> dict[str, Any]:
    """The attributes that an object itself has, including slots."""
    found = dict_of(value)
    kept = {} if found is None else dict(found) if isinstance(value, type) else dict(elements_with_keys(found))
    return kept if isinstance(value, type | ModuleType | FunctionType | nn.Module) else kept | dict(_slots(value))


def _slots(value: Any) -> Iterator[tuple[str, Any]]:
    kind: Any = type(value)
    for slot in slots_of(kind):
        with suppress(AttributeError):  # not set yet
            yield slot.__name__, slot.__get__(value)


@lru_cache(maxsize=1 << 12)
def slots_of(kind: Any) -> tuple[Any, ...]:
    return tuple(slot for base in kind.__mro__ if not is_foreign(base) for slot in vars(base).values()
                 if isinstance(slot, MemberDescriptorType))


def dict_of(value: object) -> Any:
    if isinstance(value, type):
        return type.__getattribute__(value, "__dict__")
    kind: Any = threading.local if isinstance(value, threading.local) else object
    try:
        return kind.__getattribute__(value, "__dict__")
    except AttributeError:
        return None


def own_dict(value: object) -> dict[str, Any] | None:
    """The attributes of an object if they are in a plain dict, so that no user code looks them up."""
    found = dict_of(value)
    return found if type(found) is dict else None


def container(value: object) -> Any:
    """The built-in container type of a value, regardless of the methods of its class; None for others."""
    return next((kind for kind in _CONTAINERS if issubclass(type(value), kind)), None)


def elements_with_keys(value: Any) -> list[tuple[Any, Any]]:
    """The elements of a container, each with its key or index; empty if they are data."""
    kind = container(value)
    for _ in range(0 if is_data(value) else _TRIES):
        with suppress(RuntimeError):  # another thread has changed its size
            return list(dict.items(value)) if kind is dict else list(enumerate(kind.__iter__(value)))
    return []


def constants(value: Any) -> dict[str, Any]:
    """Numbers and strings among the attributes of an object and its classes."""
    found: dict[str, Any] = {}
    for owner in (*reversed(type(value).__mro__), value):
        here = dict_of(owner) if isinstance(owner, type) else own_dict(owner)
        found |= {name: other for name, other in (here or {}).items() if not isinstance(found.get(name), property)}
    return {name: value for name, value in found.items() if type(value) in (int, str)}


def is_per_stage(value: object) -> bool:
    """Whether the user has declared, by `ranvier_per_stage = True` on the value or its class, that no block reads what
    another block stores in it."""
    if isinstance(value, ModuleType):
        return False
    if not isinstance(value, type) and (own := own_dict(value)) is not None and own.get(_PER_STAGE) is True:
        return True
    try:
        return type.__getattribute__(value if isinstance(value, type) else type(value), _PER_STAGE) is True
    except AttributeError:
        return False


def is_foreign(kind: Any) -> bool:
    """Whether `kind` is from a package that holds no user state. For a function, its globals decide, since
    `functools.wraps` gives it another function's module name."""
    of = vars(kind) if isinstance(kind, ModuleType) else kind.__globals__ if isinstance(kind, FunctionType) else None
    name = getattr(kind, "__module__", "") if of is None else of.get("__name__", "")
    package = str(name).partition(".")[0]
    return package in _FOREIGN or _is_without_torch(package, len(sys.modules))


@lru_cache(maxsize=1 << 10)
def _is_without_torch(package: str, modules: int) -> bool:
    """Whether the package is installed, and none of its modules has a variable torch. modules: their number (a key)."""
    found = sys.modules.get(package)
    place = vars(found).get("__file__") if isinstance(found, ModuleType) else None
    if not isinstance(place, str) or _INSTALLED.isdisjoint(Path(place).parts):
        return False
    inside = [module for name, module in list(sys.modules.items()) if name == package or name.startswith(f"{package}.")]
    return not any(vars(item).get("torch") is sys.modules["torch"] for item in inside if isinstance(item, ModuleType))
