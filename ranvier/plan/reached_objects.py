"""Objects that the code of a block or of a loss reaches: where a forward may leave a tensor that other code finds.

    class Aux(nn.Module):                             Head(blocks).blocks[0]        a module, by a list
        def forward(self, x):                         context                       an object, by a global variable
            self.aux = context.aux = x.mean()         lambda y, t: model[0].aux     a module, by a closure

Followed are attributes, hooks, elements of lists, tuples, dicts and sets, what functions and methods have in closures
and defaults, and the global variables that they name. Not followed are Python's own objects, torch's and Ranvier's, and
elements of containers of more than 10,000, which hold data. No code of the user's runs here, and another thread may
change what is looked at.
"""

from __future__ import annotations

import dis
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cached_property, lru_cache, partial
from types import CodeType, FunctionType, MethodType, SimpleNamespace
from typing import Any, NamedTuple

from torch import Tensor, nn

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_HOLD_NOTHING = frozenset({type(None), bool, int, float, complex, str, bytes, Tensor, nn.Parameter})
_PLAIN = _HOLD_NOTHING - {Tensor, nn.Parameter}
_FOREIGN = frozenset({"torch", "ranvier", "numpy", *sys.stdlib_module_names} - {"__main__"})
"""Packages whose functions and objects hold no tensors for others."""
_CONTAINERS = (list, tuple, set, deque, dict)
_MOST_ELEMENTS = 10_000
_TRIES = 100
"""To copy a container that another thread changes."""


class Reached(NamedTuple):
    """A list, dict or set, or a module or another object of a class of the user's.

    name: how it is reached, "block.path.attribute[0]". is_part: whether it is the root or a registered submodule of it.
    """

    name: str
    value: Any
    is_part: bool


def reached_from(name: str, root: object) -> Iterator[Reached]:
    """What the code of `root` reaches, each object once: first by attributes of its own submodules."""
    seen: set[int] = set()
    waiting: deque[tuple[str, Any]] = deque()
    if isinstance(root, nn.Module):
        for path, part in root.named_modules(prefix=name):
            seen.add(id(part))
            if not _is_foreign(type(part)):
                yield Reached(path, part, True)
            waiting.extend(_next(path, part))
    else:
        waiting.append((name, root))
    while waiting:
        path, value = waiting.popleft()
        if type(value) in _HOLD_NOTHING or id(value) in seen:
            continue
        seen.add(id(value))
        if _container(value) not in (None, tuple) or _is_of_user(value):
            yield Reached(path, value, False)
        waiting.extend(_next(path, value))


def contents(value: Any) -> Iterable[tuple[str, Any]]:
    """What a forward may have left in an object, by attribute; without names of elements. What hooks of torch compute
    anew for each forward, such as normalised weights, is a module's own."""
    if _container(value) is not None:
        elements = [one for _, one in _elements(value)]
        return () if _PLAIN.issuperset(map(type, elements)) else [("", one) for one in elements]
    attributes = _attributes(value)
    if isinstance(value, nn.Module):
        hooks = map(_attributes, attributes.get("_forward_pre_hooks", {}).values())
        computed = {hook.get(name) for hook in hooks for name in ("name", "_tensor_name")}
        return [(name, one) for name, one in attributes.items()
                if name not in _OF_EVERY_MODULE and name not in computed]
    return () if _PLAIN.issuperset(map(type, attributes.values())) else list(attributes.items())


def _attributes(value: object) -> dict[str, Any]:
    """Those that an object itself has; none where it has slots alone."""
    found = _dict(value)
    return {} if found is None else dict(_elements(found))


def _dict(value: object) -> dict[str, Any] | None:
    kind: Any = threading.local if isinstance(value, threading.local) else object
    try:
        found: dict[str, Any] = kind.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return found


def _container(value: object) -> Any:
    """The kind of container that a value is, whatever it says of itself; None for others."""
    return next((kind for kind in _CONTAINERS if issubclass(type(value), kind)), None)


def _elements(value: Any) -> list[tuple[Any, Any]]:
    """Those of a container, each with its key or number; none where they are data."""
    kind = _container(value)
    for _ in range(_TRIES if kind.__len__(value) <= _MOST_ELEMENTS else 0):
        with suppress(RuntimeError):  # another thread has changed its size
            return list(dict.items(value)) if kind is dict else list(enumerate(kind.__iter__(value)))
    return []


def _next(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The objects that lie behind one, with their names."""
    if isinstance(value, nn.Module):
        attributes = _attributes(value)
        if not _is_foreign(type(value)):
            yield from ((f"{path}.{name}", one) for name, one in attributes.items() if name not in _OF_EVERY_MODULE)
            yield from _of_class(path, type(value))
        yield from ((f"{path}.{name}", one) for name, one in attributes.get("_modules", {}).items())
        for kind in _HOOKS:
            yield from ((f"{path}.{hook.__name__ if isinstance(hook, FunctionType) else 'hook'}", hook)
                        for hook in attributes.get(kind, {}).values())
    elif _container(value) is not None:
        elements = _elements(value)
        if not _HOLD_NOTHING.issuperset(type(one) for _, one in elements):
            yield from ((f"{path}[{key!r}]" if type(key) in (int, str) else f"{path}[{type(key).__name__}]", one)
                        for key, one in elements)
    elif isinstance(value, partial):
        yield from ((path, one) for one in (value.func, *value.args, *value.keywords.values()))
    elif isinstance(value, MethodType):
        yield from ((path, one) for one in (value.__self__, value.__func__))
    elif isinstance(value, FunctionType):
        yield from _of_function(path, value)
    elif _is_of_user(value):
        yield from ((f"{path}.{name}", one) for name, one in _attributes(value).items())
        yield from _of_class(path, type(value))


def _of_function(path: str, function: FunctionType) -> Iterator[tuple[str, Any]]:
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"{path}.{variable}", cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield from ((path, one) for one in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()))
    if function.__module__ is not None and not _is_foreign(function):
        yield from ((f"{path}.{name}", function.__globals__[name]) for name in _names(function.__code__)
                    if name in function.__globals__)


@lru_cache(maxsize=1 << 14)
def _names(code: CodeType) -> tuple[str, ...]:
    """Global variables that a function reads."""
    own = [one.argval for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    return *own, *(name for one in code.co_consts if isinstance(one, CodeType) for name in _names(one))


def _of_class(path: str, kind: type) -> Iterator[tuple[str, Any]]:
    """Methods and attributes of a class and of those that it inherits from."""
    for one in kind.__mro__:
        for name, value in () if _is_foreign(one) else vars(one).items():
            match value:
                case staticmethod() | classmethod():
                    value = value.__func__
                case property():
                    value = value.fget
                case cached_property():
                    value = value.func
            if isinstance(value, FunctionType):
                yield path, value
            elif not name.startswith("__"):
                yield f"{path}.{name}", value


def _is_foreign(one: Any) -> bool:
    return str(getattr(one, "__module__", "")).partition(".")[0] in _FOREIGN


def _is_of_user(value: Any) -> bool:
    """Whether it is an object of a class of the user's, or one that takes any attributes."""
    kind = type(value)
    return not isinstance(value, type) and _dict(value) is not None and (
        kind in (SimpleNamespace, threading.local) or not _is_foreign(kind))
