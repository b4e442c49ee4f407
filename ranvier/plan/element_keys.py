"""Keys by which functions read single elements of lists and dicts.

    cache[self.number]                 ("own", "number"): the number of the method's own object
    masks.get(f"{self.name}.mask")     ("text", (("own", "name"), ("is", ".mask")))
    tables[n, x.shape[1]]              ("tuple", (("any",), ("any",)))
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ranvier.plan.bytecode import ATTRIBUTES, VARIABLES, Bytecode

Key = tuple[Any, ...]
"""("is", value), ("own", name) of an attribute of a method's own object, ("tuple", keys), ("text", keys), ("any",)."""
ANY: Key = ("any",)
_OF_ELEMENTS = frozenset({"get", "pop", "setdefault"})
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})


class Elements(Bytecode):
    """Which elements of containers a function reads."""

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
            case one if one.opname in ATTRIBUTES and one.argval in _OF_ELEMENTS:
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

    def _is_element_stored_first(self, place: int) -> bool:
        """Whether the function has stored an element of its own by this key before: cache[key] = y; z = cache[key]."""
        path, taken = self._path(place), self._consumer(place)
        if not path or self._may_be_interrupted or taken is None or (
                self._all[taken[0]].opname, taken[1]) != ("BINARY_SUBSCR", 1):
            return False
        key = [(one.opname, one.argval) for one in self._all[place + 1:taken[0]]]
        if not all(name in VARIABLES | {"LOAD_ATTR", "LOAD_CONST"} for name, _ in key):
            return False
        for earlier in range(place):
            start = earlier - len(key)
            if self._all[earlier].opname == "STORE_SUBSCR" and start and self._path(start - 1) == path and [
                    (one.opname, one.argval) for one in self._all[start:earlier]] == key and not any(
                        jump < earlier and target > self._all[earlier].offset for jump, target in self._jumps):
                names = (*path, *(name for _, name in key), "")
                return not any(self._rebinds(number, names) for number in range(earlier + 1, place)) and not any(
                    one.opname in VARIABLES | ATTRIBUTES and one.argval == path[-1]  # the value may come of an old one
                    for one in self._all[:start - 1])
        return False


def with_values(key: Key, values: Mapping[str, Any]) -> Key:
    """The key with these attributes of an object."""
    match key:
        case "own", name:
            return ("is", values[name]) if name in values else ANY
        case "tuple" | "text", parts:
            found = tuple(with_values(one, values) for one in parts)
            is_whole_text = key[0] == "text" and all(one[0] == "is" for one in found)
            return ("is", "".join(str(one[1]) for one in found)) if is_whole_text else (key[0], found)
    return key


def is_key(value: Any, key: Key) -> bool:
    """Whether a key may be this value."""
    match key:
        case "is", other:
            return bool(type(value) in _PLAIN and value == other)
        case "tuple", parts:
            return type(value) is tuple and len(value) == len(parts) and all(map(is_key, value, parts))
        case "text", _:
            return type(value) is str
    return True


def names_own(key: Key) -> bool:
    return key[0] == "own" or (key[0] in ("tuple", "text") and any(map(names_own, key[1])))
