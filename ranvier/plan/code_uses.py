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
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from types import CodeType
from typing import NamedTuple

import torch

from ranvier.plan.bytecode import ATTRIBUTES, JUMPS, STORES, VARIABLES
from ranvier.plan.element_keys import Elements, Key

_DELETES = frozenset({"DELETE_ATTR", "DELETE_GLOBAL", "DELETE_DEREF", "DELETE_NAME"})
_CHANGES = frozenset({"append", "appendleft", "extend", "extendleft", "insert", "add", "update", "clear", "discard"})
"""Methods of lists, dicts, sets and deques that return nothing."""
_READS_ANY = frozenset({"vars", "__dict__", "eval", "exec", "globals", "locals", "dir", "attrgetter", "asdict",
                        "astuple", "deepcopy", "__getattribute__"})
_READS_NAMED = frozenset({"getattr", "hasattr"})
_STORES_ANY = frozenset({"vars", "__dict__", "eval", "exec", "globals", "__setattr__", "__delattr__"})
_STORES_NAMED = frozenset({"setattr", "delattr"})
_CALLS = frozenset({"LOAD_METHOD"} if sys.version_info < (3, 12) else ())
_COMPUTING = frozenset({
    "abs", "add", "add_", "clamp", "clamp_", "clone", "cpu", "detach", "div", "div_", "double", "float", "get", "int",
    "item", "lerp", "lerp_", "max", "maximum", "mean", "min", "minimum", "mul", "mul_", "pow", "round", "sqrt",
    "square", "sub", "sub_", "sum", "to", "where"})
"""Functions and methods that leave what they are given nowhere but in their result and in their object."""
COMPUTING = {"torch": torch, "math": math, "abs": abs, "float": float, "int": int, "max": max, "min": min,
             "round": round, "sum": sum}
"""Modules with functions of these names, and functions."""
_EXTREMES = frozenset({"max", "min"})


class ElementRead(NamedTuple):
    """One element is read of what has a name."""

    name: str
    key: Key


@dataclass(frozen=True)
class Uses:
    """own: names that methods read of their own object. others: other attributes and variables that are read.
    arguments: arguments and local variables that are. called: names of attributes that are called. elsewhere: names of
    attributes of other objects than a method's own. whole, elements: of
    names that are read, those of which more than an element is, and elements of others. stores: names that are written,
    or of which an element is. accumulates: names whose old value is read for the new one, or before it. reads_any,
    stores_any: whether it may be any name.
    """

    own: frozenset[str] = frozenset()
    others: frozenset[str] = frozenset()
    arguments: frozenset[str] = frozenset()
    called: frozenset[str] = frozenset()
    elsewhere: frozenset[str] = frozenset()
    whole: frozenset[str] = frozenset()
    stores: frozenset[str] = frozenset()
    accumulates: frozenset[str] = frozenset()
    elements: frozenset[ElementRead] = frozenset()
    reads_any: bool = False
    stores_any: bool = False

    @classmethod
    def of(cls, several: Sequence[Uses]) -> Uses:
        """Those of several functions."""
        names = [one.name for one in fields(cls) if one.type == "frozenset[str]"]
        return cls(**{name: frozenset[str]().union(*(getattr(one, name) for one in several)) for name in names},
                   elements=frozenset[ElementRead]().union(*(one.elements for one in several)),
                   reads_any=any(one.reads_any for one in several), stores_any=any(one.stores_any for one in several))

    def reads(self, name: str) -> bool:
        """Whether some attribute, global or closure variable of this name is read, and not only called."""
        return self.reads_any or name in self.own or name in self.others

    def writes(self, name: str) -> bool:
        """Whether some object's attribute, or a variable, of this name is written."""
        return self.stores_any or name in self.stores


@lru_cache(maxsize=1 << 14)
def uses_of(code: CodeType, own: str | None = None, *, trusts: bool = True) -> Uses:
    """The uses of a function and of those inside it. own: its variable for the object whose method it is. trusts:
    whether names of `COMPUTING` are what they are in Python and torch."""
    functions = (one for one in code.co_consts if isinstance(one, CodeType))
    inside = (uses_of(one, own if own in one.co_freevars else None, trusts=trusts) for one in functions)
    return Uses.of([_Function(code, own, trusts).uses(), *inside])


class _Function(Elements):
    def __init__(self, code: CodeType, own: str | None, trusts: bool) -> None:
        super().__init__(code, own)
        self._trusts = trusts

    def uses(self) -> Uses:
        own, others, arguments, called, elsewhere, whole, stores, accumulates = (set[str]() for _ in range(8))
        elements = set[ElementRead]()
        reads_any = stores_any = False
        for place, one in enumerate(self._all):
            name = one.argval
            if one.opname in STORES or one.opname in _DELETES:
                stores.add(name)
            elif one.opname == "MATCH_CLASS":  # whose names of attributes are a constant
                reads_any = True
            elif one.opname in VARIABLES or one.opname in ATTRIBUTES:
                if one.opname in ATTRIBUTES and self._path(place)[:-1] != (self._own,):
                    elsewhere.add(name)
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
                if (adds_up and self._is_accumulated(place)) or self._is_stored_later(place):
                    accumulates.add(name)
                if (how := self._changed_by(place)) is not None:
                    stores.update([name] if how != "STORE_ATTR" else [])
                    accumulates.update([name] if how == "COPY" and adds_up else [])
                elif not self._is_stored_first(place) and not self._is_element_stored_first(place):
                    stores.update([name] if self._has_default_set(place) else [])
                    if one.opname in ("LOAD_FAST", "LOAD_FAST_CHECK"):
                        arguments.add(name)
                        continue
                    (called if self._is_called(one) else own if self._path(place)[:-1] == (self._own,) else others).add(
                        name)
                    element = self._element(place)
                    (whole.add(name) if element is None else elements.add(ElementRead(name, element)))
        return Uses(frozenset(own), frozenset(others), frozenset(arguments), frozenset(called),
                    frozenset(elsewhere), frozenset(whole), frozenset(stores), frozenset(accumulates),
                    frozenset(elements), reads_any, stores_any)

    def _is_called(self, one: dis.Instruction) -> bool:
        return one.opname in _CALLS or (one.opname == "LOAD_ATTR" and not _CALLS and bool((one.arg or 0) & 1))

    def _is_accumulated(self, place: int) -> bool:
        """Whether the value goes, computed with, to where it came from: x.n += 1, x.n = f(x.n), a[k] = a[k] + 1."""
        path, name, before = self._path(place), self._all[place].argval, self._all[place - 1]
        is_loaded_again = False
        for number in range(place + 1, len(self._all)):
            one = self._all[number]
            if one.opname == "STORE_SUBSCR":
                return is_loaded_again
            if one.opname in STORES or one.opname == "STORE_FAST":
                return bool(one.argval == name and ((before.opname, before.arg) == ("COPY", 1) or (
                    path and self._path(number) == path)))
            if one.opname.startswith("RETURN") or one.opcode in JUMPS:
                return False
            is_loaded_again |= bool(path) and self._path(number) == path
        return False

    def _changed_by(self, place: int) -> str | None:
        """The operation that changes the value which is read here, of which nothing reaches other code; None where
        something does. COPY: the new value comes of the old one."""
        if (found := self._changed_in_place(place)) is not None:
            return found
        return "COPY" if self._returns(place) else "COMPARE_OP" if self._guards_itself(place) else None

    def _changed_in_place(self, place: int) -> str | None:
        one, before = self._all[place], self._all[place - 1]
        if one.opname in ATTRIBUTES and (before.opname, before.arg) == ("COPY", 1) and self._is_accumulated(place):
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
        """Whether the value goes nowhere but, computed with, to where it came from: x.n = x.n + 1, a[k] = max(a[k], n).
        """
        path, at, is_computed = self._path(place), place, False
        while path and (taken := self._consumer(at)) is not None:
            at, height = taken
            one = self._all[at]
            match one.opname:
                case "BINARY_OP" | "UNARY_NEGATIVE":
                    is_computed = True
                case "BINARY_SUBSCR" if height == 1:
                    pass
                case "LOAD_ATTR" | "LOAD_METHOD" if one.argval in _COMPUTING:
                    if (call := self._call_of(at)) is None:
                        return False
                    at, is_computed = call, True
                case "CALL" if self._is_computing(at, height):
                    is_computed = True
                case "POP_TOP":
                    return is_computed
                case "STORE_SUBSCR":
                    return is_computed and height == 2 and any(
                        self._path(other) == path and self._consumer(other) == (at, 1) for other in range(place, at))
                case name if name in STORES:
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
            if not (one.opname in VARIABLES | {"LOAD_CONST", "LOAD_ATTR"} or (
                    one.opname in STORES and self._path(number) == path)):
                return False
            inside.append(number)
        return False

    def _is_stored_later(self, place: int) -> bool:
        """Whether the function stores there afterwards, so that an old value is read here: whatever way it takes, or on
        some way if the value is computed with."""
        path = self._path(place) if self._places_stored else ()
        taken = self._consumer(place) if path else None
        is_used = taken is not None and self._all[taken[0]].opname == "BINARY_OP" and not self._returns(place)
        return bool(path) and any(
            stored == path and place < number and (is_sure or is_used) and taken not in ((number, 0), (number, 1))
            for number, stored, is_sure in self._places_stored)

    @cached_property
    def _places_stored(self) -> list[tuple[int, tuple[str, ...], bool]]:
        """Where an attribute or variable is stored, or an element of it, and whether a function always comes there."""
        found = list[tuple[int, tuple[str, ...], bool]]()
        for number, one in enumerate(self._all):
            path: tuple[str, ...] = ()
            if one.opname in STORES:
                path = self._path(number)
            elif one.opname in ATTRIBUTES and one.argval == "setdefault":
                path = self._path(number)[:-1]
            elif one.opname == "STORE_SUBSCR" and (start := self._start(number)):
                path = self._path(start - 1)
            if path:
                found.append((number, path, not any(
                    jump < number and target > one.offset for jump, target in self._jumps)))
        return found

    def _is_extreme(self, place: int) -> bool:
        """Whether it becomes max(x.n, n) or min(x.n, n) where a look at x.n has decided so: that comes out alike,
        however often it is done."""
        taken, path = self._consumer(place), self._path(place)
        if taken is None or self._all[taken[0]].opname != "CALL" or not self._is_computing(*taken, _EXTREMES):
            return False
        looks = [look for look in range(place) if self._path(look) == path]
        return self._returns(place) and any(self._decides(look, place) for look in looks)

    def _decides(self, look: int, place: int) -> bool:
        """Whether what is read at `look` decides by a comparison whether the function comes to `place`."""
        taken = self._consumer(look)
        if taken is None or self._all[taken[0]].opname not in ("COMPARE_OP", "IS_OP"):
            return False
        jump = self._all[taken[0] + 1]
        return jump.opname.startswith("POP_JUMP") and jump.argval > self._all[place].offset

    def _is_computing(self, call: int, height: int, names: frozenset[str] = _COMPUTING) -> bool:
        """Whether an argument is given to max(...), torch.maximum(...) and their like."""
        number = self._all[call].arg or 0
        has_names = any(one.opname == "KW_NAMES" for one in self._all[call - 2:call])  # out=, say
        return height < number and not has_names and any(
            self._all[place].argval in names and self._consumer(place) == (call, number) for place in self._functions)

    @cached_property
    def _functions(self) -> list[int]:
        """Where a function that only computes is loaded."""
        return [place for place, one in enumerate(self._all) if one.argval in _COMPUTING and self._trusts and (
            (one.opname == "LOAD_GLOBAL" and one.argval in COMPUTING) or (
                one.opname in ATTRIBUTES and not one.argval.endswith("_")  # which change their first argument
                and self._path(place)[:-1] in (("torch",), ("math",))))]

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
            if one.opname in VARIABLES | ATTRIBUTES and one.argval == path[-1]:
                return False  # the new value may come of the old one
            if one.opname in STORES and self._path(earlier) == path and not any(
                    jump < earlier and target > one.offset for jump, target in self._jumps):
                return not any(self._rebinds(number, path) for number in range(earlier + 1, place))
        return False

