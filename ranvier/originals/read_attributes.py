"""Attributes of modules that traced code has read: in a graph they are constants, whatever they become later.

    self.alpha = 0.5;  x * self.alpha        traced: x * 0.5
    model.alpha = 0.1                        refused before the next batch
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, new_class
from typing import Any
from weakref import ref

import torch
from torch import nn

from ranvier.errors import ModelError

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""Attributes that a graph has as they are at each call: parameters, buffers, submodules; and the mode."""
_PLAIN = bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size
_MOST_ENTRIES, _MOST_DEPTH = 256, 4
"""What is longer, or lies deeper, is compared by identity."""
_GONE = object()

Reads = set[tuple[str, nn.Module, str]]
"""(name of a module, it, and its attribute)."""


@contextmanager
def reads_of(modules: Sequence[tuple[str, nn.Module]]) -> Iterator[Reads]:
    """What code inside reads of these modules' attributes, other than those of every module."""
    found: Reads = set()
    kinds = [(module, type(module)) for _, module in modules]
    try:
        for name, module in modules:
            module.__class__ = _noting(type(module), name, found)
        yield found
    finally:
        for module, kind in kinds:
            module.__class__ = kind


def _noting(kind: type[nn.Module], path: str, found: Reads) -> type[nn.Module]:
    """A class like `kind` whose instance notes what is read of it."""
    def __getattribute__(self: nn.Module, name: str) -> Any:
        if name not in _OF_EVERY_MODULE and name in object.__getattribute__(self, "__dict__"):
            found.add((path, self, name))
        return kind.__getattribute__(self, name)

    def body(namespace: dict[str, Any]) -> None:
        namespace |= {"__getattribute__": __getattribute__, "__module__": kind.__module__,
                      "__qualname__": kind.__qualname__}

    made: type[nn.Module] = new_class(kind.__name__, (kind,), {}, body)
    return made


class ReadAttributes:
    """What traced code has read, as it was then. A block has it as its attribute `read_attributes`; copies of a block,
    and saved ones, know no other module."""

    def __init__(self, reads: Reads = frozenset()) -> None:  # type: ignore[assignment]
        self._read = [(path, ref(module), name, _known(vars(module).get(name, _GONE)))
                      for path, module, name in reads]

    def check(self) -> None:
        """ModelError where one has another value now."""
        for path, module, name, before in self._read:
            if (one := module()) is not None and _known(value := vars(one).get(name, _GONE)) != before:
                raise ModelError("has changed since the module was cut into blocks, whose traced code has its value "
                                 "from then", code="traced-attribute-changed",
                                 where=f"attribute {f'{path}.{name}'.lstrip('.')}",
                                 value=None if value is _GONE else value if isinstance(value, _PLAIN) else
                                 type(value).__name__,
                                 remedy="Make it a buffer (self.register_buffer) and write into that, read it in a "
                                        "submodule that is not cut, or build blocks and engine again.")

    def __reduce__(self) -> tuple[type[ReadAttributes], tuple[()]]:
        return ReadAttributes, ()


@dataclass(frozen=True, eq=False)
class _Same:
    """An object that is compared by identity."""

    value: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    __hash__ = None  # type: ignore[assignment]


def _known(value: object, depth: int = 0) -> object:
    """What tells whether a value has changed: numbers and texts by value, and what holds such; others by identity."""
    if isinstance(value, _PLAIN):
        return type(value), repr(value)  # as of a NaN, which does not equal itself
    if depth < _MOST_DEPTH and isinstance(value, list | tuple | dict | set) and len(value) <= _MOST_ENTRIES:
        if isinstance(value, dict):
            return type(value), [(repr(key), _known(one, depth + 1)) for key, one in value.items()]
        if isinstance(value, set):
            return type(value), sorted(map(repr, value))
        return type(value), [_known(one, depth + 1) for one in value]
    if depth < _MOST_DEPTH and not isinstance(value, nn.Module | torch.Tensor | type | FunctionType):
        held: Mapping[str, object] = getattr(value, "__dict__", {})
        if 0 < len(held) <= _MOST_ENTRIES:
            return _Same(value), [(name, _known(one, depth + 1)) for name, one in held.items()]
    return _Same(value)
