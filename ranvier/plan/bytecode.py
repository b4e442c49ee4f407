"""The operations of a function, and what each of them does to the stack of values.

    x.n = f(x.n)     LOAD f, LOAD x, LOAD_ATTR n, CALL 1, LOAD x, STORE_ATTR n
    path             ("x", "n") of LOAD_ATTR, and of STORE_ATTR
    consumer         CALL takes what LOAD_ATTR has put on the stack; nothing lies above it

Known are operations between two jumps. Of the others nothing is said (None).
"""

from __future__ import annotations

import dis
from collections import Counter
from inspect import CO_VARARGS, CO_VARKEYWORDS
from types import CodeType

VARIABLES = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FAST", "LOAD_FAST_CHECK"})
ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM"})
STORES = frozenset({"STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF", "STORE_NAME"})
JUMPS = frozenset({*dis.hasjrel, *dis.hasjabs})
_POPS = {"STORE_SUBSCR": 3, "DELETE_SUBSCR": 2, "BINARY_SUBSCR": 2, "STORE_ATTR": 2, "BINARY_OP": 2, "COMPARE_OP": 2,
         "CONTAINS_OP": 2, "IS_OP": 2, "LOAD_ATTR": 1, "LOAD_METHOD": 1, "POP_TOP": 1, "STORE_FAST": 1,
         "STORE_GLOBAL": 1, "STORE_DEREF": 1, "UNARY_NEGATIVE": 1, "UNARY_NOT": 1} | dict.fromkeys(
    VARIABLES | {"LOAD_CONST", "PUSH_NULL", "PRECALL", "KW_NAMES", "NOP", "LOAD_CLOSURE", "EXTENDED_ARG"}, 0)
"""Values that an operation takes from the stack; those of others are not known here."""


class Bytecode:
    """own: the variable of the object whose method a function is."""

    def __init__(self, code: CodeType, own: str | None) -> None:
        self._all = [one for one in dis.get_instructions(code) if one.opname not in ("CACHE", "RESUME")]
        self._jumps = [(place, one.argval) for place, one in enumerate(self._all) if one.opcode in JUMPS]
        self._consumers: dict[int, tuple[int, int] | None] = {}
        self._own, self._may_be_interrupted = own, bool(code.co_exceptiontable)
        several = bool(code.co_flags & CO_VARARGS) + bool(code.co_flags & CO_VARKEYWORDS)
        self._arguments = code.co_varnames[:code.co_argcount + code.co_kwonlyargcount + several]
        self._stored = Counter(one.argval for one in self._all if one.opname in (
            "STORE_FAST", "DELETE_FAST", "STORE_DEREF", "DELETE_DEREF"))

    def _path(self, place: int) -> tuple[str, ...]:
        """("ctx", "mask") where an operation loads or stores ctx.mask; empty where the object is computed."""
        one = self._all[place]
        if one.opname in VARIABLES or one.opname in ("STORE_GLOBAL", "STORE_DEREF", "STORE_NAME"):
            return (one.argval,)
        if place and (before := self._all[place - 1]).opname in VARIABLES | {"LOAD_ATTR"}:
            return (*path, one.argval) if (path := self._path(place - 1)) and before.argval else ()
        return ()

    def _consumer(self, place: int) -> tuple[int, int] | None:
        """The operation that takes what another has put on the stack, and how much lies above that; None where it
        depends on the way, or is not known."""
        if place not in self._consumers:
            self._consumers[place] = self._find_consumer(place)
        return self._consumers[place]

    def _find_consumer(self, place: int) -> tuple[int, int] | None:
        height = 0
        for number in range(place + 1, len(self._all)):
            one = self._all[number]
            if one.is_jump_target or one.opcode in JUMPS:
                return None
            if one.opname == "COPY" and (one.arg or 0) <= height:
                height += 1
                continue
            pops = self._pops(number)
            if pops is None or pops > height:
                return None if pops is None and one.opname != "COPY" else (number, height)
            height += _effect(one)
        return None

    def _start(self, end: int) -> int | None:
        """Where the operations begin that put one value on the stack."""
        needed = 1
        for number in range(end - 1, -1, -1):
            one, pops = self._all[number], self._pops(number)
            if pops is None or one.is_jump_target or one.opcode in JUMPS:
                return None
            needed += pops - (_effect(one) + pops)
            if not needed:
                return number
        return None

    def _pops(self, place: int) -> int | None:
        one = self._all[place]
        if one.opname == "CALL":
            return (one.arg or 0) + 2
        if one.opname == "FORMAT_VALUE":
            return 2 if (one.arg or 0) & 4 else 1
        if one.opname.startswith("BUILD_") and one.opname not in ("BUILD_CONST_KEY_MAP", "BUILD_MAP", "BUILD_SLICE"):
            return one.arg or 0
        return 2 if one.opname == "BUILD_SLICE" and one.arg == 2 else _POPS.get(one.opname)

    def _second_argument(self, place: int) -> str | None:
        """The second argument of a call of getattr and its like where that is a constant."""
        height = 0
        for number in range(place + 1, len(self._all)):
            one = self._all[number]
            if height == 1 and one.opname == "LOAD_CONST" and isinstance(one.argval, str):
                call = self._consumer(number)
                return one.argval if call is not None and self._all[call[0]].opname == "CALL" else None
            if one.opname not in _POPS:
                return None
            height += _effect(one)
        return None

    def _is_dropped(self, method: int) -> bool:
        """Whether a loaded method is called, and what it returns is dropped."""
        call = self._call_of(method)
        return call is not None and self._all[call + 1].opname == "POP_TOP"

    def _call_of(self, method: int) -> int | None:
        """The call of a method that is loaded."""
        call = self._consumer(method)
        return call[0] if call is not None and self._all[call[0]].opname == "CALL" and (
            call[1] == self._all[call[0]].arg) else None

    def _rebinds(self, place: int, path: tuple[str, ...]) -> bool:
        """Whether another object comes into the way to the attribute."""
        one = self._all[place]
        return (one.opname in STORES or one.opname == "STORE_FAST") and one.argval in path[:-1]


def _effect(one: dis.Instruction) -> int:
    """By how much an operation raises the stack. In Python 3.11 a call has two, of which CALL is taken for both."""
    if one.opname in ("PRECALL", "CALL"):
        return -1 - (one.arg or 0) if one.opname == "CALL" else 0
    return dis.stack_effect(one.opcode, one.arg, jump=False)
