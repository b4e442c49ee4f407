"""Attributes of modules that traced code has read: in a graph they are constants, whatever they become later.

    self.alpha = 0.5;  x * self.alpha        traced: x * 0.5
    model.alpha = 0.1                        refused before the next batch
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch import nn

from ranvier.errors import ModelError

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""Attributes that a graph has as they are at each call: parameters, buffers, submodules; and the mode."""
_PLAIN = bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size
_MOST_ENTRIES, _MOST_DEPTH = 64, 3
"""Limits beyond which values are not compared: entries, and levels of nesting."""
_GONE = object()

Reads = set[tuple[str, nn.Module, str]]
"""(name of a module, it, and its attribute)."""


@contextmanager
def reads_of(modules: Sequence[tuple[str, nn.Module]]) -> Iterator[Reads]:
    """Record the attributes of these modules that this thread's code reads, other than those of every module. One at a
    time: it changes how all modules of the process read."""
    found: Reads = set()
    names, thread = {id(module): name for name, module in modules}, threading.get_ident()

    def noting(self: nn.Module, name: str) -> Any:
        if id(self) in names and threading.get_ident() == thread and name not in _OF_EVERY_MODULE and (
                name in object.__getattribute__(self, "__dict__")):
            found.add((names[id(self)], self, name))
        return object.__getattribute__(self, name)

    nn.Module.__getattribute__ = noting  # type: ignore[assignment]
    try:
        yield found
    finally:
        del nn.Module.__getattribute__


class ReadAttributes:
    """Values that traced code has read, as they were then. A block has it as its attribute `read_attributes`; copies of
    a block, and saved ones, know no other module."""

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


def _known(value: object, depth: int = 0) -> object:
    """A fingerprint that changes with the value: numbers and texts, what holds few of them, and which tensor it is (the
    graph keeps that alive). Of other objects nothing: much of what is in them has no part in the code's result."""
    if isinstance(value, _PLAIN):
        return type(value), repr(value)  # as of a NaN, which does not equal itself
    if isinstance(value, torch.Tensor):
        return id(value)
    if depth == _MOST_DEPTH or not isinstance(value, list | tuple | dict | set) or len(value) > _MOST_ENTRIES:
        return type(value)
    if isinstance(value, dict):
        return type(value), [(repr(key) if isinstance(key, _PLAIN) else type(key), _known(one, depth + 1))
                             for key, one in value.items()]
    if isinstance(value, set):
        return type(value), sorted(repr(one) for one in value if isinstance(one, _PLAIN))
    return type(value), [_known(one, depth + 1) for one in value]
