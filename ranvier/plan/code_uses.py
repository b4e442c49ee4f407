"""Names that a function reads and writes: attributes, global and closure variables, by its bytecode.

    y = x * ctx.mask            reads mask
    ctx.mask = x > 0            writes mask
    ctx.calls += 1              accumulates calls, of which nothing reaches other code
    t[k] = t.get(k, 0) + 1      accumulates t
    log.append(y)               reads nothing of log: the result is dropped
    ctx.h = x; y = 2 * ctx.h    reads no h that others have left: its own comes first on every way
    cache[self.number]          reads of the cache what has this key
    y.mean()                    calls mean, which reads nothing of a number that has this name

What is not exactly understood counts as a read. Objects are not told apart here, but for a method's own (`self`).
"""

from __future__ import annotations

import dis
import sys
from collections import Counter
from dataclasses import dataclass, fields
from functools import lru_cache, reduce
from inspect import CO_VARARGS, CO_VARKEYWORDS
from types import CodeType
from typing import Any, NamedTuple

_VARIABLES = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FAST", "LOAD_FAST_CHECK"})
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_STORES = frozenset({"STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF", "STORE_NAME"})
_DELETES = frozenset({"DELETE_ATTR", "DELETE_GLOBAL", "DELETE_DEREF", "DELETE_NAME"})
_CHANGES = frozenset({"append", "appendleft", "extend", "extendleft", "insert", "add", "update", "clear", "discard"})
"""Methods of lists, dicts, sets and deques that return nothing."""
_READS_ANY = frozenset({"vars", "__dict__", "eval", "exec", "globals", "locals", "dir", "attrgetter", "asdict",
                        "astuple", "deepcopy"})
_READS_NAMED = frozenset({"getattr", "hasattr"})
_STORES_ANY = frozenset({"vars", "__dict__", "eval", "exec", "globals", "__setattr__", "__delattr__"})
_STORES_NAMED = frozenset({"setattr", "delattr"})
_CALLS = frozenset({"LOAD_METHOD"} if sys.version_info < (3, 12) else ())
_COMPUTING = frozenset({
    "abs", "float", "int", "max", "maximum", "min", "minimum", "round", "where", "add", "clamp", "clone", "cpu", "detach",
    "div", "double", "get", "item", "lerp", "mean", "mul", "pow", "sqrt", "square", "sub", "sum", "to", "add_", "clamp_",
    "div_", "lerp_", "mul_", "sub_"})
"""Functions and methods that leave what they are given nowhere but in their result and in their object."""
_BUILTIN = frozenset({"abs", "float", "int", "max", "min", "round", "sum"})
_EXTREMES = frozenset({"max", "min"})
_OF_ELEMENTS = frozenset({"get", "pop", "setdefault"})
_POPS = {"STORE_SUBSCR": 3, "DELETE_SUBSCR": 2, "BINARY_SUBSCR": 2, "STORE_ATTR": 2, "BINARY_OP": 2, "COMPARE_OP": 2,
         "CONTAINS_OP": 2, "IS_OP": 2, "LOAD_ATTR": 1, "LOAD_METHOD": 1, "POP_TOP": 1, "STORE_FAST": 1,
         "STORE_GLOBAL": 1, "STORE_DEREF": 1, "UNARY_NEGATIVE": 1, "UNARY_NOT": 1} | dict.fromkeys(
    _VARIABLES | {"LOAD_CONST", "PUSH_NULL", "PRECALL", "KW_NAMES", "NOP", "LOAD_CLOSURE", "EXTENDED_ARG"}, 0)
"""Values that an operation takes from the stack; those of others are not known here."""


Key = tuple[Any, ...]
"""("is", value), ("own", name) of an attribute of a method's own object, ("tuple", keys), ("text", keys) or ("any",)."""
ANY: Key = ("any",)


class ElementRead(NamedTuple):
    """One element is read of what has a name."""

    name: str
    key: Key


@dataclass(frozen=True)
class Uses:
    """own: names that methods read of their own object. others: other attributes and variables that are read.
    arguments: arguments and local variables that are. called: names of attributes that are called and read otherwise
    nowhere. whole, elements: of names that are read, those of more than an element, and elements of others. stores:
    names that are written, or of which an element is. accumulates: names whose new value comes of the old one.
    reads_any, stores_any: whether it may be any name.
    """

    own: frozenset[str] = frozenset()
    others: frozenset[str] = frozenset()
    arguments: frozenset[str] = frozenset()
    called: frozenset[str] = frozenset()
    whole: frozenset[str] = frozenset()
    elements: frozenset[ElementRead] = frozenset()
    stores: frozenset[str] = frozenset()
    accumulates: frozenset[str] = frozenset()
    reads_any: bool = False
    stores_any: bool = False

    def __or__(self, other: Uses) -> Uses:
        return Uses(*(getattr(self, one.name) | getattr(other, one.name) for one in fields(self)))

    def reads(self, name: str) -> bool:
        """Whether some attribute or variable of this name is read, and not only called."""
        return self.reads_any or name in self.own or name in self.others or name in self.arguments

    def writes(self, name: str) -> bool:
        """Whether some object's attribute, or a variable, of this name is written."""
        return self.stores_any or name in self.stores


@lru_cache(maxsize=1 << 14)
def uses_of(code: CodeType, own: str | None = None) -> Uses:
    """The uses of a function and of those inside it. own: its variable for the object whose method it is."""
    inside = (uses_of(one, own if own in one.co_freevars else None) for one in code.co_consts if isinstance(one, CodeType))
    return reduce(Uses.__or__, inside, _Function(code, own).uses())


class _Function:
    def __init__(self, code: CodeType, own: str | None) -> None:
        self._all = [one for one in dis.get_instructions(code) if one.opname not in ("CACHE", "RESUME")]
        self._jumps = [(place, one.argval) for place, one in enumerate(self._all)
                       if one.opcode in dis.hasjrel or one.opcode in dis.hasjabs]
        self._own, self._may_be_interrupted = own, bool(code.co_exceptiontable)
        several = bool(code.co_flags & CO_VARARGS) + bool(code.co_flags & CO_VARKEYWORDS)
        self._arguments = code.co_varnames[:code.co_argcount + code.co_kwonlyargcount + several]
        self._stored = Counter(one.argval for one in self._all if one.opname in ("STORE_FAST", "DELETE_FAST"))

    def uses(self) -> Uses:
        own, others, arguments, called, whole, stores, accumulates = (set[str]() for _ in range(7))
        elements = set[ElementRead]()
        reads_any = stores_any = False
        for place, one in enumerate(self._all):
            name = one.argval
            if one.opname in _STORES or one.opname in _DELETES:
                stores.add(name)
            elif one.opname in _VARIABLES or one.opname in _ATTRIBUTES:
                reads_any |= name in _READS_ANY
                stores_any |= name in _STORES_ANY
                if name in _READS_NAMED or name in _STORES_NAMED:
                    constant = self._second_argument(place)
                    if name in _STORES_NAMED:
                        stores_any |= constant is None
                        stores.update([] if constant is None else [constant])
                    else:
                        reads_any |= constant is None
                        of_own = self._path(place + 1) == (self._own,)
                        (own if of_own else others).update([] if constant is None else [constant])
                        whole.update([] if constant is None else [constant])
                adds_up = not self._is_extreme(place)
                if adds_up and self._is_accumulated(place):
                    accumulates.add(name)
                if (how := self._changed_by(place)) is not None:
                    stores.update([name] if how != "STORE_ATTR" else [])
                    accumulates.update([name] if how == "COPY" and adds_up else [])
                elif not self._is_stored_first(place) and not self._is_element_stored_first(place):
                    stores.update([name] if self._has_default_set(place) else [])
                    is_local = one.opname in ("LOAD_FAST", "LOAD_FAST_CHECK")
                    (called if self._is_called(one) else arguments if is_local
                     else own if self._path(place)[:-1] == (self._own,) else others).add(name)
                    element = self._element(place)
                    (whole.add(name) if element is None else elements.add(ElementRead(name, element)))
        return Uses(*map(frozenset, (own, others, arguments, called, whole, elements, stores, accumulates)),
                    reads_any, stores_any)

    def _is_called(self, one: dis.Instruction) -> bool:
        return one.opname in _CALLS or (one.opname == "LOAD_ATTR" and not _CALLS and bool((one.arg or 0) & 1))

    def _path(self, place: int) -> tuple[str, ...]:
        """("ctx", "mask") where an operation loads or stores ctx.mask; empty where the object is computed."""
        one = self._all[place]
        if one.opname in _VARIABLES or one.opname in ("STORE_GLOBAL", "STORE_DEREF", "STORE_NAME"):
            return (one.argval,)
        if place and (before := self._all[place - 1]).opname in _VARIABLES | {"LOAD_ATTR"}:
            return (*path, one.argval) if (path := self._path(place - 1)) and before.argval else ()
        return ()

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

    def _consumer(self, place: int) -> tuple[int, int] | None:
        """The operation that takes what another has put on the stack, and how much lies above that; None where it
        depends on the way, or is not known."""
        height = 0
        for number in range(place + 1, len(self._all)):
            one = self._all[number]
            if one.is_jump_target or one.opcode in dis.hasjrel or one.opcode in dis.hasjabs:
                return None
            if one.opname == "COPY" and (one.arg or 0) <= height:
                height += 1
                continue
            pops = self._pops(number)
            if pops is None or pops > height:
                return None if pops is None and one.opname != "COPY" else (number, height)
            height += _effect(one)
        return None

    def _is_accumulated(self, place: int) -> bool:
        """Whether the value goes, computed with, to where it came from: x.n += 1, x.n = f(x.n), a[k] = a[k] + 1."""
        path, name, before = self._path(place), self._all[place].argval, self._all[place - 1]
        is_loaded_again = False
        for number in range(place + 1, len(self._all)):
            one = self._all[number]
            if one.opname == "STORE_SUBSCR":
                return is_loaded_again
            if one.opname in _STORES or one.opname == "STORE_FAST":
                return bool(one.argval == name and ((before.opname, before.arg) == ("COPY", 1) or (
                    path and self._path(number) == path)))
            if one.opname.startswith("RETURN") or one.opcode in dis.hasjrel or one.opcode in dis.hasjabs:
                return False
            is_loaded_again |= bool(path) and self._path(number) == path
        return False

    def _changed_by(self, place: int) -> str | None:
        """The operation that changes the value which is read here, of which nothing reaches other code; None where
        something does."""
        return self._changed_in_place(place) or (
            "COPY" if self._returns(place) or self._guards_itself(place) else None)

    def _changed_in_place(self, place: int) -> str | None:
        one, before = self._all[place], self._all[place - 1]
        if one.opname in _ATTRIBUTES and (before.opname, before.arg) == ("COPY", 1) and self._is_accumulated(place):
            return "COPY"
        taken = self._consumer(place)
        if taken is None:
            return None
        number, height = taken
        then = self._all[number:number + 3]
        match then[0].opname:
            case "COPY":  # container[key] += value
                is_addition = height == 1 and [(other.opname, other.arg) for other in then[:2]] == [("COPY", 2)] * 2
                return "COPY" if is_addition and then[2].opname == "BINARY_SUBSCR" else None
            case "STORE_SUBSCR" | "DELETE_SUBSCR":
                return "STORE_SUBSCR" if height == 1 else None
            case "STORE_ATTR":
                return "STORE_ATTR" if height == 0 else None
            case "BINARY_SUBSCR":
                return self._changed_in_place(number) if height == 1 else None
            case "LOAD_ATTR" | "LOAD_METHOD":
                if then[0].argval == "setdefault" and (call := self._call_of(number)) is not None:
                    return self._changed_in_place(call)
                return "LOAD_METHOD" if then[0].argval in _CHANGES and self._is_dropped(number) else None
        return None

    def _returns(self, place: int) -> bool:
        """Whether the value goes nowhere but, computed with, to where it came from: x.n = x.n + 1, a[k] = max(a[k], n)."""
        path, at, is_computed = self._path(place), place, False
        while path and (taken := self._consumer(at)) is not None:
            at, height = taken
            one = self._all[at]
            match one.opname:
                case "BINARY_OP" | "UNARY_NEGATIVE":
                    is_computed = True
                case "BINARY_SUBSCR" if height == 1:
                    pass
                case "LOAD_ATTR" | "LOAD_METHOD" if one.argval in _COMPUTING and (call := self._call_of(at)) is not None:
                    at, is_computed = call, True
                case "CALL" if self._is_computing(at, height):
                    is_computed = True
                case "POP_TOP":
                    return is_computed
                case "STORE_SUBSCR":
                    return is_computed and height == 2 and any(
                        self._path(other) == path and self._consumer(other) == (at, 1) for other in range(place, at))
                case name if name in _STORES:
                    return is_computed and height == (name == "STORE_ATTR") and self._path(at) == path
                case _:
                    return False
        return False

    def _guards_itself(self, place: int) -> bool:
        """Whether the value decides nothing but whether itself is written: if n > x.n: x.n = n."""
        path, taken = self._path(place), self._consumer(place)
        if not path or taken is None or self._all[taken[0]].opname != "COMPARE_OP":
            return False
        jump, inside = self._all[taken[0] + 1], list[int]()
        if not jump.opname.startswith("POP_JUMP"):
            return False
        for number in range(taken[0] + 2, len(self._all)):
            one = self._all[number]
            if one.offset == jump.argval:
                return bool(inside)
            if not (one.opname in _VARIABLES | {"LOAD_CONST", "LOAD_ATTR"} or (
                    one.opname in _STORES and self._path(number) == path)):
                return False
            inside.append(number)
        return False

    def _is_extreme(self, place: int) -> bool:
        """Whether it becomes max(x.n, n) or min(x.n, n), which comes out alike however often it is done."""
        taken = self._consumer(place)
        return taken is not None and self._all[taken[0]].opname == "CALL" and self._is_computing(*taken, _EXTREMES) and (
            self._returns(place))

    def _is_computing(self, call: int, height: int, names: frozenset[str] = _COMPUTING) -> bool:
        """Whether an argument is given to max(...), torch.maximum(...) and their like."""
        number = self._all[call].arg or 0
        has_names = any(one.opname == "KW_NAMES" for one in self._all[call - 2:call])  # out=, say
        return height < number and not has_names and any(
            one.argval in names and ((one.opname == "LOAD_GLOBAL" and one.argval in _BUILTIN) or (
                one.opname in _ATTRIBUTES and self._path(place)[:-1] in (("torch",), ("math",))))
            and self._consumer(place) == (call, number) for place, one in enumerate(self._all[:call]))

    # ------------------------------------------------------------------ elements

    def _element(self, place: int) -> Key | None:
        """The key of the one element that is read of a container; None where more is."""
        taken = self._consumer(place)
        if taken is None:
            return None
        number, height = taken
        match self._all[number]:
            case one if one.opname == "BINARY_SUBSCR" and height == 1:
                return self._key(number)
            case one if one.opname == "CONTAINS_OP" and height == 0:
                return self._key(place + 1 - len(self._path(place)) if self._path(place) else 0)
            case one if one.opname in _ATTRIBUTES and one.argval in _OF_ELEMENTS:
                call = self._call_of(number)
                first = None if call is None or not self._all[call].arg else self._first_argument(number, call)
                return None if first is None else self._key(first)
        return None

    def _first_argument(self, method: int, call: int) -> int | None:
        """The place after the operations that give the first argument."""
        return next((number + 1 for number in range(method + 1, call)
                     if self._consumer(number) == (call, (self._all[call].arg or 0) - 1)), None)

    def _key(self, end: int, depth: int = 4) -> Key:
        """The value that operations before `end` have put on the stack."""
        one = self._all[end - 1] if end else None
        if one is None or not depth or self._all[end].is_jump_target:
            return ANY
        match one.opname:
            case "LOAD_CONST":
                return ("is", one.argval) if isinstance(one.argval, str | int) else ANY
            case "LOAD_ATTR" if self._path(end - 1) == (self._own, one.argval) and not self._stored[self._own]:
                return "own", one.argval
            case "FORMAT_VALUE" if not one.arg:
                return self._key(end - 1, depth - 1)
            case "LOAD_FAST":
                stored = next((number for number, other in enumerate(self._all[:end])
                               if other.opname == "STORE_FAST" and other.argval == one.argval), None)
                is_one = self._stored[one.argval] == 1 and one.argval not in self._arguments
                return self._key(stored, depth - 1) if is_one and stored is not None else ANY
            case "BUILD_TUPLE" | "BUILD_STRING":
                keys, at = list[Key](), end - 1
                for _ in range(one.arg or 0):
                    keys.append(self._key(at, depth - 1))
                    if (start := self._start(at)) is None:
                        return ANY
                    at = start
                return "tuple" if one.opname == "BUILD_TUPLE" else "text", tuple(reversed(keys))
        return ANY

    def _start(self, end: int) -> int | None:
        """Where the operations begin that put one value on the stack."""
        needed = 1
        for number in range(end - 1, -1, -1):
            one, pops = self._all[number], self._pops(number)
            if pops is None or one.is_jump_target or one.opcode in dis.hasjrel or one.opcode in dis.hasjabs:
                return None
            needed += pops - (_effect(one) + pops)
            if not needed:
                return number
        return None

    def _is_element_stored_first(self, place: int) -> bool:
        """Whether the function has stored an element of its own by this key before: cache[key] = y; z = cache[key]."""
        path, taken = self._path(place), self._consumer(place)
        if not path or self._may_be_interrupted or taken is None or (
                self._all[taken[0]].opname, taken[1]) != ("BINARY_SUBSCR", 1):
            return False
        key = [(one.opname, one.argval) for one in self._all[place + 1:taken[0]]]
        if not all(name in _VARIABLES | {"LOAD_ATTR", "LOAD_CONST"} for name, _ in key):
            return False
        for earlier in range(place):
            start = earlier - len(key)
            if self._all[earlier].opname == "STORE_SUBSCR" and start and self._path(start - 1) == path and [
                    (one.opname, one.argval) for one in self._all[start:earlier]] == key and not any(
                        jump < earlier and target > self._all[earlier].offset for jump, target in self._jumps):
                names = (*path, *(name for _, name in key), "")
                return not any(self._rebinds(number, names) for number in range(earlier + 1, place)) and not any(
                    one.opname in _VARIABLES | _ATTRIBUTES and one.argval == path[-1]  # the value may come of an old one
                    for one in self._all[:start - 1])
        return False

    # ------------------------------------------------------------------ the stack

    def _pops(self, place: int) -> int | None:
        one = self._all[place]
        if one.opname == "CALL":
            return (one.arg or 0) + 2
        if one.opname == "FORMAT_VALUE":
            return 2 if (one.arg or 0) & 4 else 1
        if one.opname.startswith("BUILD_") and one.opname not in ("BUILD_CONST_KEY_MAP", "BUILD_MAP", "BUILD_SLICE"):
            return one.arg or 0
        return 2 if one.opname == "BUILD_SLICE" and one.arg == 2 else _POPS.get(one.opname)

    def _is_dropped(self, method: int) -> bool:
        """Whether a loaded method is called, and what it returns is dropped."""
        call = self._call_of(method)
        return call is not None and self._all[call + 1].opname == "POP_TOP"

    def _call_of(self, method: int) -> int | None:
        """The call of a method that is loaded."""
        call = self._consumer(method)
        return call[0] if call is not None and self._all[call[0]].opname == "CALL" and (
            call[1] == self._all[call[0]].arg) else None

    def _has_default_set(self, place: int) -> bool:
        """Whether it is a dict of which an element is read, and made where there is none."""
        taken = self._consumer(place)
        return taken is not None and self._all[taken[0]].argval == "setdefault"

    def _is_stored_first(self, place: int) -> bool:
        """Whether the function has stored a value of its own there before, whatever way it took, and read none."""
        path = self._path(place)
        if not path or self._may_be_interrupted or (len(path) == 1 and self._all[place].opname in (
                "LOAD_FAST", "LOAD_FAST_CHECK")):
            return False
        for earlier in range(place):
            one = self._all[earlier]
            if one.opname in _VARIABLES | _ATTRIBUTES and one.argval == path[-1]:
                return False  # the new value may come of the old one
            if one.opname in _STORES and self._path(earlier) == path and not any(
                    jump < earlier and target > one.offset for jump, target in self._jumps):
                return not any(self._rebinds(number, path) for number in range(earlier + 1, place))
        return False

    def _rebinds(self, place: int, path: tuple[str, ...]) -> bool:
        """Whether another object comes into the way to the attribute."""
        one = self._all[place]
        return (one.opname in _STORES or one.opname == "STORE_FAST") and one.argval in path[:-1]


def _effect(one: dis.Instruction) -> int:
    """By how much an operation raises the stack. In Python 3.11 a call has two, of which CALL is taken for both."""
    if one.opname in ("PRECALL", "CALL"):
        return -1 - (one.arg or 0) if one.opname == "CALL" else 0
    return dis.stack_effect(one.opcode, one.arg, jump=False)
