"""Names that a function reads and writes: attributes, global and closure variables, by its bytecode.

    y = x * ctx.mask            reads mask
    ctx.mask = x > 0            writes mask
    ctx.calls += 1              accumulates calls, of which nothing reaches other code
    log.append(y)               reads nothing of log: the result is dropped
    ctx.h = x; y = 2 * ctx.h    reads no h that others have left: its own comes first on every way

What is not exactly understood counts as a read. Objects are not told apart here, but for a method's own (`self`).
"""

from __future__ import annotations

import dis
from dataclasses import dataclass
from functools import lru_cache, reduce
from types import CodeType

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
_POPS = {"STORE_SUBSCR": 3, "DELETE_SUBSCR": 2, "BINARY_SUBSCR": 2, "STORE_ATTR": 2, "BINARY_OP": 2, "COMPARE_OP": 2,
         "CONTAINS_OP": 2, "IS_OP": 2, "LOAD_ATTR": 1, "LOAD_METHOD": 1, "POP_TOP": 1, "STORE_FAST": 1,
         "UNARY_NEGATIVE": 1, "UNARY_NOT": 1} | dict.fromkeys(
    _VARIABLES | {"LOAD_CONST", "PUSH_NULL", "PRECALL", "KW_NAMES", "NOP", "LOAD_CLOSURE", "EXTENDED_ARG"}, 0)
"""Values that an operation takes from the stack; those of others are not known here."""


@dataclass(frozen=True)
class Uses:
    """own: names that methods read of their own object. others: other attributes and variables that are read.
    arguments: arguments and local variables that are. stores: names that are written, or of which an element is.
    accumulates: names whose new value comes of the old one. reads_any, stores_any: whether it may be any name.
    """

    own: frozenset[str] = frozenset()
    others: frozenset[str] = frozenset()
    arguments: frozenset[str] = frozenset()
    stores: frozenset[str] = frozenset()
    accumulates: frozenset[str] = frozenset()
    reads_any: bool = False
    stores_any: bool = False

    def __or__(self, other: Uses) -> Uses:
        return Uses(self.own | other.own, self.others | other.others, self.arguments | other.arguments,
                    self.stores | other.stores,
                    self.accumulates | other.accumulates, self.reads_any or other.reads_any,
                    self.stores_any or other.stores_any)

    def reads(self, name: str) -> bool:
        """Whether some attribute or variable of this name is read."""
        return self.reads_any or name in self.own or name in self.others or name in self.arguments

    def writes(self, name: str) -> bool:
        """Whether some object's attribute, or a variable, of this name is written."""
        return self.stores_any or name in self.stores


@lru_cache(maxsize=1 << 14)
def uses_of(code: CodeType, own: str | None = None) -> Uses:
    """The uses of a function and of those inside it. own: its variable for the object whose method it is."""
    return reduce(Uses.__or__, (uses_of(one, own) for one in code.co_consts if isinstance(one, CodeType)),
                  _Function(code, own).uses())


class _Function:
    def __init__(self, code: CodeType, own: str | None) -> None:
        self._all = [one for one in dis.get_instructions(code) if one.opname not in ("CACHE", "RESUME")]
        self._jumps = [(place, one.argval) for place, one in enumerate(self._all)
                       if one.opcode in dis.hasjrel or one.opcode in dis.hasjabs]
        self._own, self._may_be_interrupted = own, bool(code.co_exceptiontable)

    def uses(self) -> Uses:
        own, others, arguments, stores, accumulates = (set[str]() for _ in range(5))
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
                if self._is_accumulated(place):
                    accumulates.add(name)
                if (how := self._changed_by(place)) is not None:
                    stores.update([name] if how != "STORE_ATTR" else [])
                    accumulates.update([name] if how == "COPY" else [])
                elif not self._is_stored_first(place):
                    stores.update([name] if self._has_default_set(place) else [])
                    is_local = one.opname in ("LOAD_FAST", "LOAD_FAST_CHECK")
                    (arguments if is_local else own if self._path(place)[:-1] == (self._own,) else others).add(name)
        return Uses(frozenset(own), frozenset(others), frozenset(arguments), frozenset(stores), frozenset(accumulates),
                    reads_any, stores_any)

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
                return self._changed_by(number) if height == 1 else None
            case "BINARY_OP":  # x.n = x.n + 1, n += 1
                path = self._path(place)
                end = self._all[number + len(path)] if path and number + len(path) < len(self._all) else then[0]
                return "COPY" if end.opname in _STORES and self._path(number + len(path)) == path else None
            case "LOAD_ATTR" | "LOAD_METHOD":
                if then[0].argval == "setdefault" and (call := self._call_of(number)) is not None:
                    return self._changed_by(call)
                return "LOAD_METHOD" if then[0].argval in _CHANGES and self._is_dropped(number) else None
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
