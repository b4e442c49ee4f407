"""Objects that the code of a block or of a loss reaches: where a forward may leave a tensor that other code finds.

    class Aux(nn.Module):                             Head(blocks).blocks[0]        a module, by a list
        def forward(self, x):                         context                       an object, by a global variable
            self.aux = context.aux = x.mean()         lambda y, t: model[0].aux     a module, by a closure

Followed are attributes, hooks, elements of lists, tuples, dicts and sets, what functions and methods have in closures
and defaults, and the global variables that they name. Not followed are Python's own objects, torch's and Ranvier's.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType, SimpleNamespace
from typing import Any, NamedTuple

from torch import Tensor, nn

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_HOLD_NOTHING = frozenset({type(None), bool, int, float, complex, str, bytes, Tensor, nn.Parameter})
_PLAIN = _HOLD_NOTHING - {Tensor, nn.Parameter}
_FOREIGN = frozenset({"torch", "ranvier", "numpy", *sys.stdlib_module_names} - {"__main__"})
"""Packages whose functions and objects hold no tensors for others."""


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
        if isinstance(value, list | dict | set | deque) or _is_of_user(value):
            yield Reached(path, value, False)
        waiting.extend(_next(path, value))


def contents(value: Any) -> Iterable[tuple[str, Any]]:
    """What a forward may have left in an object, by attribute; without names of elements. What hooks of torch compute
    anew for each forward, such as normalised weights, is a module's own."""
    if isinstance(value, nn.Module):
        computed = {name for hook in value._forward_pre_hooks.values()
                    for name in (getattr(hook, "name", None), getattr(hook, "_tensor_name", None))}
        return [(name, one) for name, one in vars(value).items()
                if name not in _OF_EVERY_MODULE and name not in computed]
    if isinstance(value, list | tuple | set | deque | dict):
        elements = value.values() if isinstance(value, dict) else value
        return () if _PLAIN.issuperset(map(type, elements)) else [("", one) for one in elements]
    attributes = getattr(value, "__dict__", {})
    return () if _PLAIN.issuperset(map(type, attributes.values())) else list(attributes.items())


def _next(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The objects that lie behind one, with their names."""
    if isinstance(value, nn.Module):
        if not _is_foreign(type(value)):
            yield from ((f"{path}.{name}", one) for name, one in vars(value).items() if name not in _OF_EVERY_MODULE)
            yield from _of_class(path, type(value))
        yield from ((f"{path}.{name}", one) for name, one in value._modules.items())
        for kind in _HOOKS:
            yield from ((f"{path}.{getattr(hook, '__name__', 'hook')}", hook)
                        for hook in getattr(value, kind).values())
    elif isinstance(value, dict):
        if not _HOLD_NOTHING.issuperset(map(type, value.values())):
            yield from ((f"{path}[{key!r}]", one) for key, one in list(value.items()))
    elif isinstance(value, list | tuple | set | deque):
        if not _HOLD_NOTHING.issuperset(map(type, value)):
            yield from ((f"{path}[{number}]", one) for number, one in enumerate(list(value)))
    elif isinstance(value, partial):
        yield from ((path, one) for one in (value.func, *value.args, *value.keywords.values()))
    elif isinstance(value, MethodType):
        yield from ((path, one) for one in (value.__self__, value.__func__))
    elif isinstance(value, FunctionType):
        yield from _of_function(path, value)
    elif _is_of_user(value):
        yield from ((f"{path}.{name}", one) for name, one in vars(value).items())
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


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _names(one)


def _of_class(path: str, kind: type) -> Iterator[tuple[str, Any]]:
    """Methods and attributes of a class and of those that it inherits from."""
    for one in kind.__mro__:
        if not _is_foreign(one):
            for name, value in vars(one).items():
                value = getattr(value, "__func__", getattr(value, "fget", value))
                if isinstance(value, FunctionType):
                    yield path, value
                elif not name.startswith("__"):
                    yield f"{path}.{name}", value


def _is_foreign(one: Any) -> bool:
    return str(getattr(one, "__module__", "")).partition(".")[0] in _FOREIGN


def _is_of_user(value: Any) -> bool:
    """Whether it is an object of a class of the user's, or one that takes any attributes."""
    kind = type(value)
    return hasattr(value, "__dict__") and not isinstance(value, type) and (
        kind in (SimpleNamespace, threading.local) or not _is_foreign(kind))
