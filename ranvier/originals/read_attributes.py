"""Values that traced code has read, other than its inputs: in a graph they are constants, even if they change later.

    self.alpha = 0.5;  x * self.alpha                 traced: x * 0.5
    model.alpha = 0.1                                 refused before the next batch
    x = self.experts(x);  x + self.experts.loss       refused in the first forward that sets it
"""

from __future__ import annotations

import dis
import enum
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ref

import torch
from torch import nn

from ranvier.errors import ModelError
from ranvier.originals.object_contents import OF_EVERY_MODULE

_PLAIN = bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, enum.Enum
_MOST_ENTRIES, _MOST_DEPTH = 64, 3
"""Limits beyond which values are not compared: entries, and levels of nesting."""
_MISSING, _MODULE_GONE = object(), object()

Reads = dict[str, Callable[[], object]]
"""Name of an attribute or variable that was read -> function that returns its current value."""


@contextmanager
def reads_of(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[Reads]:
    """Record the attributes of these modules that this thread's code reads, other than those of every module. Only one
    call at a time: it patches attribute access of all modules of the process."""
    found: Reads = {}
    names, thread = {id(module): name for name, module in modules}, threading.get_ident()

    def noting(self: nn.Module, name: str) -> Any:
        if id(self) in names and threading.get_ident() == thread and not name.startswith("__") and (
                name not in OF_EVERY_MODULE):  # of which a graph reads the current value at each call
            where = f"attribute {names[id(self)]}.{name}".replace(" .", " ")
            found[where] = partial(_attribute, ref(self), name)
        return object.__getattribute__(self, name)

    nn.Module.__getattribute__ = noting  # type: ignore[assignment]
    try:
        yield found
    finally:
        del nn.Module.__getattribute__


def _attribute(module: ref[nn.Module], name: str) -> object:
    """The module's own attribute, or its class's; parameters, buffers and submodules are not constants of a graph."""
    one = module()
    return _MODULE_GONE if one is None else vars(one).get(name, getattr(type(one), name, _MISSING))


def variables_of(values: Iterable[object]) -> Reads:
    """Global variables, and variables of enclosing functions, that functions among `values` read, including functions
    and methods that they name."""
    found: Reads = {}
    known: dict[FunctionType, None] = {}
    values = list(values)
    for value in values:
        known |= dict.fromkeys(_functions_of(value, ()))
    names = {name for function in known for code in codes_in(function.__code__) for name in code.co_names}
    for value in values:
        known |= dict.fromkeys(_functions_of(value, names))
    waiting = list(known)
    while waiting:
        function = waiting.pop()
        codes, reader = list(codes_in(function.__code__)), function.__qualname__
        own: Reads = {f"variable {instruction.argval} of {reader}": partial(function.__globals__.get,
                                                                            instruction.argval, _MISSING)
                      for code in codes for instruction in dis.get_instructions(code)
                      if instruction.opname == "LOAD_GLOBAL" and instruction.argval in function.__globals__}
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            own[f"variable {name} of {reader}"] = partial(_cell_value, cell)
        names = {name for code in codes for name in code.co_names}
        new = {function: None for value in own.values()
               for function in _functions_of(value(), names) if function not in known}
        known |= new
        waiting += new
        found |= own
    return found


def _functions_of(value: object, names: Collection[str]) -> Iterator[FunctionType]:
    """Functions whose code runs when `value` is read or called, and those of its class in `names`."""
    while not isinstance(value, FunctionType):
        if isinstance(value, partial):
            value = value.func
        elif isinstance(value, MethodType | classmethod | staticmethod):
            value = value.__func__
        elif isinstance(value, property):
            value = value.fget
        else:
            break
    if isinstance(value, FunctionType):
        if str(value.__module__).partition(".")[0] != "torch":
            yield value
    elif not isinstance(value, nn.Module):
        for base in (value if isinstance(value, type) else type(value)).__mro__:  # bases, for a function with super()
            for name in vars(base).keys() & names:
                yield from _functions_of(vars(base)[name], ())


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """The code of a function, and of functions inside it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from codes_in(inner)


def _cell_value(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return _MISSING


class ReadAttributes:
    """Values that traced code has read, as they were then. A block has it as its attribute `read_attributes`; copies of
    a block, and saved blocks, have no reference to another module."""

    def __init__(self, reads: Reads | None = None) -> None:
        self._read = [(where, value, _fingerprint(value())) for where, value in (reads or {}).items()]
        self._at_start: list[object] = []
        """The same at the last `check`, with the fields of objects."""

    def check(self) -> None:
        """Raise a ModelError if a value has changed."""
        self._at_start = [_fingerprint(value(), fields=True) for _, value, _ in self._read]
        for where, value, before in self._read:
            if (now := value()) is not _MODULE_GONE and _fingerprint(now) != before:
                raise ModelError("has changed since the module was cut into blocks, whose traced code has its old "
                                 "value", code="traced-attribute-changed", where=where,
                                 value=None if now is _MISSING else now if isinstance(now, _PLAIN) else
                                 type(now).__name__,
                                 remedy="Make it a buffer (self.register_buffer) and write into that, read it in a "
                                        "submodule that is not cut, or build blocks and engine again.")

    def check_after_forward(self) -> None:
        """Raise a ModelError if a forward has changed a value since `check`."""
        for (where, value, _), before in zip(self._read, self._at_start, strict=bool(self._at_start)):
            if (now := value()) is not _MODULE_GONE and _fingerprint(now, fields=True) != before:
                raise ModelError("is changed by a forward, and read by code around the cuts, which is traced without "
                                 "values and has the old value", code="traced-attribute-stored", where=where,
                                 remedy="Return it from the forward that computes it, or read it in a submodule that "
                                        "is not cut.")

    def __reduce__(self) -> tuple[type[ReadAttributes], tuple[()]]:
        return ReadAttributes, ()


def read_attributes_of(blocks: Iterable[nn.Module]) -> Iterable[ReadAttributes]:
    """The `ReadAttributes` of all blocks, each once."""
    found = [vars(module).get("read_attributes") for module in blocks]
    return {id(one): one for one in found if isinstance(one, ReadAttributes)}.values()


def _fingerprint(value: object, depth: int = 0, *, fields: bool = False) -> object:
    """A fingerprint that changes with the value: numbers and strings, small containers of them, and the identity of a
    tensor (which the graph keeps alive). Of other objects only the type, since most of their contents do not affect the
    code's result, or with `fields` their attributes."""
    if isinstance(value, _PLAIN):
        return type(value), repr(value)  # repr, because a NaN does not equal itself
    if isinstance(value, torch.Tensor):
        return id(value)
    if callable(value):  # the engine replaces methods
        return callable
    if isinstance(value, list | tuple | dict | set):
        if depth == _MOST_DEPTH or len(value) > _MOST_ENTRIES:
            return type(value), len(value)
        if isinstance(value, dict):
            return type(value), [(repr(key) if isinstance(key, _PLAIN) else type(key), _fingerprint(item, depth + 1))
                                 for key, item in value.items()]
        if isinstance(value, set):
            return type(value), sorted(repr(item) for item in value if isinstance(item, _PLAIN))
        return type(value), [_fingerprint(item, depth + 1) for item in value]
    if fields and not isinstance(value, ModuleType | logging.Logger):  # a logger's cache changes with every new level
        return type(value), _fingerprint(dict(getattr(value, "__dict__", {})))
    return type(value)
