"""Records when this process compiles with torch.compile, which time limits do not count; `without_compiler` avoids the
import of torch's compiler and of sympy."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch.fx.experimental  # noqa: F401  (a stand-in becomes an attribute of it)

_LONGEST_SECONDS = 3600.0
"""A compilation that lasts longer counts as ended: it may never end."""


class Compilations:
    """The compilations of a process. torch reports their begin and end, on any thread (`watch`)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._state: tuple[float, float | None, float | None] = 0.0, None, None
        """Seconds of compilations that have ended; when the current one began; when the last one ended. Replaced as a
        whole, so that readers need no lock."""

    def begin(self, *_: object) -> None:
        """Note that a compilation begins; others that run at the same time are part of it."""
        with self._lock:
            seconds, _began, ended = self._state
            self._state = seconds, time.monotonic(), ended

    def end(self, *_: object) -> None:
        """Note that all compilations have ended."""
        with self._lock:
            seconds, began, _ended = self._state
            now = time.monotonic()
            self._state = seconds if began is None else seconds + now - began, None, now

    def seconds(self) -> float:
        """Seconds that this process has spent in compilations so far."""
        seconds, began, _ = self._state
        return seconds if began is None else seconds + time.monotonic() - began

    def idle_seconds(self) -> float | None:
        """Seconds since the last compilation ended, 0 during one; None if nothing was compiled."""
        _, began, ended = self._state
        if began is not None:
            return max(0.0, time.monotonic() - began - _LONGEST_SECONDS)
        return None if ended is None else time.monotonic() - ended


COMPILATIONS = Compilations()
"""Compilations of this process."""


def watch() -> None:
    """Have torch report its compilations to `COMPILATIONS`. Idempotent; imports torch's compiler."""
    from torch._dynamo.callback import callback_handler

    if COMPILATIONS.begin not in callback_handler.start_callbacks:  # `torch._dynamo.reset` forgets them
        callback_handler.register_start_callback(COMPILATIONS.begin)
        callback_handler.register_end_callback(COMPILATIONS.end)


class _ImportedOnUse(ModuleType):
    """Stands in for a module, and imports it when anything other than `known` is accessed. load: imports it."""

    def __init__(self, name: str, load: Callable[[], ModuleType], is_package: bool, known: Mapping[str, object]
                 ) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)  # which shows whether a package is installed
        self._load, self._is_package, self._known = load, is_package, known

    def __getattr__(self, name: str) -> Any:
        if name in self._known and sys.modules.get(self.__name__) is self:
            return self._known[name]
        if name == "__path__" and not self._is_package:  # which each import of a name accesses
            raise AttributeError(name)
        self.remove()
        return getattr(self._load(), name)

    def install(self) -> None:
        """Install it unless the module is already imported."""
        parent, _, name = self.__name__.rpartition(".")
        if self.__name__ not in sys.modules:
            sys.modules[self.__name__] = self
            if parent:
                setattr(sys.modules[parent], name, self)

    def remove(self) -> None:
        parent, _, name = self.__name__.rpartition(".")
        if sys.modules.get(self.__name__) is self:
            sys.modules.pop(self.__name__, None)  # ranks that are threads may remove it at the same time
            if parent and vars(sys.modules[parent]).get(name) is self:
                delattr(sys.modules[parent], name)


def _compiler() -> ModuleType:
    import torch._dynamo

    module: ModuleType = torch._dynamo
    return module


def _sympy() -> ModuleType:
    import sympy  # type: ignore[import-untyped]

    module: ModuleType = sympy
    return module


def _symbolic_shapes() -> ModuleType:
    """Import the module; also for functions of its stand-in that are called with more than plain numbers."""
    if isinstance(present := sys.modules.get("torch.fx.experimental.symbolic_shapes"), _ImportedOnUse):
        present.remove()
    from torch.fx.experimental import symbolic_shapes

    return symbolic_shapes


def _of_numbers(name: str, kinds: Collection[type], compute: Callable[..., object]) -> Callable[..., object]:
    """torch's function of symbolic sizes, computed here if all arguments, or their elements, are of these types."""
    def are_known(values: Iterable[object]) -> bool:
        return all(are_known(one) if isinstance(one, (tuple, list)) else type(one) in kinds for one in values)

    def call(*args: Any, **options: Any) -> object:
        if options or not are_known(args):
            return getattr(_symbolic_shapes(), name)(*args, **options)
        return compute(*args)

    return call


def _same(value: object) -> object:
    return value


def _are_equal(one: Any, other: Any) -> bool:
    return tuple(one) == tuple(other) if isinstance(one, (tuple, list)) else bool(one == other)


_FLAG, _NUMBER = (bool,), (bool, int)
_COMPUTED: tuple[tuple[str, tuple[type, ...], Callable[..., object]], ...] = (
    *((name, _FLAG, _same) for name in ("expect_true", "guard_or_false", "guard_or_true", "guard_size_oblivious",
                                        "statically_known_true")),
    ("sym_and", _FLAG, lambda *flags: all(flags)), ("sym_or", _FLAG, lambda *flags: any(flags)),
    ("sym_eq", _NUMBER, _are_equal), ("is_nested_int", _NUMBER, lambda size: False),
    *((name, (), _same) for name in ("guarding_hint_or_throw", "has_guarding_hint", "has_hint", "size_hint")))
_STAND_INS: tuple[tuple[str, Callable[[], ModuleType], bool, Mapping[str, object]], ...] = (
    ("torch._dynamo", _compiler, True, {"disable": lambda function, *_, **__: function}),
    ("torch.fx.experimental.symbolic_shapes", _symbolic_shapes, False,
     {name: _of_numbers(name, kinds, compute) for name, kinds, compute in _COMPUTED}),
    ("sympy", _sympy, True, {"Basic": type("Basic", (), {})}))
"""Modules that operations on the meta device import to check whether a size or a number is symbolic; none is."""


@contextmanager
def without_compiler() -> Iterator[None]:
    """Context in which operations on the meta device import neither torch's compiler, which takes more than a second,
    nor sympy, which takes more than half a second.

    Torch computes shapes with Python functions that it hides from the compiler (`torch._disable_dynamo`), and imports
    it for the first of them. Nothing is compiled here, so there is nothing to hide them from. They also work for sizes
    that are symbols of sympy.
    """
    stand_ins = [_ImportedOnUse(*each) for each in _STAND_INS]
    for one in stand_ins:
        one.install()
    try:
        yield
    finally:
        for one in stand_ins:
            one.remove()
