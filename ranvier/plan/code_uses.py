"""Names that a function reads and writes: attributes, global and closure variables, by its syntax tree.

    y = x * ctx.mask            reads mask
    ctx.mask = x > 0            writes mask
    ctx.calls += 1              accumulates calls, of which nothing reaches other code
    t[k] = t.get(k, 0) + 1      accumulates t
    log.append(y)               reads nothing of log: the result is dropped
    ctx.h = x; y = 2 * ctx.h    reads no h that others have left: its own comes first on every way
    cache[self.number]          reads of the cache what has this key (`Key`)
    y.mean()                    calls mean, which reads nothing of a number that has this name

What is not exactly understood counts as a read, and so does every name of a function whose source is not found. Objects
are not told apart here, but for a method's own (`self`). To let another harmless form through, say in `_Function.uses`
what becomes of a value that is a part of it, or in `old_values` where an old value makes no difference.
"""

from __future__ import annotations

import ast
import dis
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from types import CodeType
from typing import Any, NamedTuple

from ranvier.plan.function_tree import BY_NAME, CHANGES, node_of, source_of
from ranvier.plan.old_values import OldValues

_OF_ELEMENTS = frozenset({"get", "pop", "setdefault"})
_READS_ANY = frozenset({"vars", "__dict__", "eval", "exec", "globals", "locals", "dir", "attrgetter", "asdict",
                        "astuple", "deepcopy", "__getattribute__"})
_STORES_ANY = frozenset({"vars", "__dict__", "eval", "exec", "globals", "__setattr__", "__delattr__"})
_INLINE = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"})

Key = tuple[Any, ...]
"""What a key may be: ("is", value), ("own", name) for an attribute of a method's own object, ("tuple", keys), ("text",
keys), ("any",)."""
ANY: Key = ("any",)


class ElementRead(NamedTuple):
    """One element is read of what has a name."""

    name: str
    key: Key


@dataclass(frozen=True)
class Uses:
    """own: names that methods read of their own object. others: other attributes and variables that are read.
    called: names of attributes that are called. elsewhere: names of attributes of
    other objects than a method's own. whole, elements: of names that are read, those of which more than an element is,
    and elements of others. stores: names that are written, or of which an element is. accumulates: names whose old
    value is read for the new one, or before it.  reads_any, stores_any: whether it may be any name.
    """

    own: frozenset[str] = frozenset()
    others: frozenset[str] = frozenset()
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
        found: dict[str, Any] = {one.name: [getattr(uses, one.name) for uses in several] for one in fields(cls)}
        merged: dict[str, Any] = {name: any(each) if name.endswith("_any") else frozenset().union(*each)
                                  for name, each in found.items()}
        return cls(**merged)

    def reads(self, name: str) -> bool:
        """Whether some attribute, global or closure variable of this name is read, and not only called."""
        return self.reads_any or name in self.own or name in self.others


@lru_cache(maxsize=1 << 14)
def uses_of(code: CodeType, own: str | None = None) -> Uses:
    """The uses of a function and of those inside it. own: its variable for the object whose method it is."""
    return Uses.of(list(_uses_of_all(code, own, source_of(code))))


def _uses_of_all(code: CodeType, own: str | None, source: Mapping[Any, list[Any]]) -> Iterator[Uses]:
    node = node_of(code, source)
    yield _all_names(code) if node is None else _Function(code, node, own).uses()
    for one in code.co_consts:
        if isinstance(one, CodeType) and (node is None or one.co_name not in _INLINE):
            yield from _uses_of_all(one, own if own in one.co_freevars else None, source)


def _all_names(code: CodeType) -> Uses:
    """Every name of a function is read, and what it stores comes of what there was."""
    names = frozenset((*code.co_names, *code.co_freevars, *code.co_cellvars))
    stores = names & {one.argval for one in dis.get_instructions(code) if one.opname.startswith(("STORE", "DELETE"))}
    return Uses(own=names, others=names, elsewhere=names, whole=names,
                stores=stores, accumulates=names, reads_any=not (_READS_ANY | BY_NAME).isdisjoint(
                    names), stores_any=not (_STORES_ANY | BY_NAME).isdisjoint(names))


class _Function(OldValues):
    """One function, with its uses."""

    def uses(self) -> Uses:
        found: dict[str, set[Any]] = {one.name: set() for one in fields(Uses)}
        for node in self._places:
            name, is_own = self._name(node), self._is_own(node)
            found["reads_any"] |= {name} & _READS_ANY
            found["stores_any"] |= {name} & _STORES_ANY
            if isinstance(node, ast.Attribute) and not is_own:
                found["elsewhere"].add(name)
            if isinstance(node.ctx, ast.Load):
                how = self._change(node) or ("accumulates" if self._flows_back(node) else None)
                if how is not None:
                    found["stores"].add(name)
                elif not self._is_fresh(node) and not (isinstance(node, ast.Name) and name in self._locals):
                    found["called" if self._call(node) else "own" if is_own else "others"].add(name)
                    key = self._element(node)
                    found["whole" if key is None else "elements"].add(name if key is None else ElementRead(name, key))
                if how == "accumulates" or self._is_stored_later(node):
                    found["accumulates"].add(name)
            elif isinstance(self._parents[node], ast.AugAssign):
                found["accumulates"].add(name)
        found["stores"].update(one.name for one in self._stores if one.place not in self._locals)
        for node in self._numbers:
            match node:
                case ast.Name(id=by) if by in BY_NAME:  # with a name that is computed
                    found["stores_any" if by in ("setattr", "delattr") else "reads_any"].add(by)
                case ast.ImportFrom():
                    for kind in ("others", "whole", "elsewhere"):
                        found[kind].update(one.name for one in node.names)
                case ast.MatchClass():
                    found["reads_any"].add(node)
        return Uses(**{name: bool(one) if name.endswith("_any") else frozenset(one)  # type: ignore[arg-type]
                       for name, one in found.items()})

    # ------------------------------------------------------------------ what is done with a value

    def _change(self, node: Any) -> str | None:
        """How a container is changed, of which nothing is read for it; None where it is not."""
        parent, call = self._parents[node], self._call_on(node)
        if isinstance(parent, ast.Subscript) and parent.value is node:
            if not isinstance(parent.ctx, ast.Load):
                return "accumulates" if isinstance(self._parents[parent], ast.AugAssign) else "stores"
            return self._change(parent)
        if call is not None and call.func.attr == "setdefault":
            return self._change(call)
        is_dropped = call is not None and isinstance(self._parents[call], ast.Expr)
        if not is_dropped or call.func.attr not in CHANGES:
            return None
        return "stores" if call.func.attr in ("add", "clear", "discard") else "accumulates"

    # ------------------------------------------------------------------ keys

    def _element(self, node: Any) -> Key | None:
        """The key of the one element that is read of a container; None where more is."""
        parent, call = self._parents[node], self._call_on(node)
        match parent:
            case ast.Subscript() if parent.value is node:
                return self._key(parent.slice)
            case ast.Compare(ops=[ast.In() | ast.NotIn()]) if parent.left is not node:
                return self._key(parent.left)
        return self._key(call.args[0]) if call is not None and call.func.attr in _OF_ELEMENTS and call.args else None

    def _key(self, node: Any, depth: int = 4) -> Key:
        match node:
            case ast.Constant(value=str() | int()):
                return "is", node.value
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(number))):
                return "is", -number
            case ast.Attribute() if self._is_own(node):
                return "own", self._name(node)
            case ast.FormattedValue(conversion=-1, format_spec=None):
                return self._key(node.value, depth)
            case ast.Name(id=name) if depth and name in self._locals and name in self._once:
                return self._key(self._once[name], depth - 1)
            case ast.Tuple(elts=parts) | ast.JoinedStr(values=parts) if depth:
                kind = "tuple" if isinstance(node, ast.Tuple) else "text"
                return kind, tuple(self._key(one, depth - 1) for one in parts)
        return ANY


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
            return bool(type(value) in (type(None), bool, int, float, complex, str, bytes) and value == other)
        case "tuple", parts:
            return type(value) is tuple and len(value) == len(parts) and all(map(is_key, value, parts))
        case "text", _:
            return type(value) is str
    return True


def names_own(key: Key) -> bool:
    return key[0] == "own" or (key[0] in ("tuple", "text") and any(map(names_own, key[1])))
