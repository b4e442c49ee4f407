"""Names that a function reads and writes: attributes, global and closure variables, found in its syntax tree.

    y = x * ctx.mask            reads mask
    ctx.mask = x > 0            writes mask
    ctx.calls += 1              accumulates calls, whose value reaches no other code
    t[k] = t.get(k, 0) + 1      accumulates t
    log.append(y)               reads nothing of log: the result is dropped
    ctx.h = x; y = 2 * ctx.h    reads no h left by other code: its own comes first on every path
    cache[self.number]          reads the cache's element with this key (`Key`)
    y.mean()                    calls mean, which does not read a number of this name

What is not exactly understood counts as a read, and so does every name of a function whose source is not found. Objects
are not distinguished here, except a method's own (`self`).

If a function reads a place and also stores in it, the old value counts as needed: another rank, which has not run the
same code before, cannot compute it. It does not count if the new value is stored only because there is no old one, and
the function continues in the same way with both.

    if ctx.n != n:                      if ctx.step != n:                 if n in seen:
        ctx.n = n                           ctx.step = n                      return y
        ctx.table = table_of(n)             y = 2 * y                     seen.add(n)
    return y * ctx.table                return y                          return 2 * y

The first finds a table or computes the same one. The other two do something only on the first visit.
"""

from __future__ import annotations

import ast
import dis
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from itertools import chain
from types import CodeType
from typing import Any, NamedTuple

from ranvier.plan import function_tree as trees
from ranvier.plan.function_tree import FunctionTree, Store, text_of

_COMPUTING = frozenset({
    "abs", "add", "add_", "clamp", "clamp_", "clone", "cpu", "detach", "div", "div_", "double", "float", "int", "item",
    "lerp", "lerp_", "max", "maximum", "mean", "min", "minimum", "mul", "mul_", "pow", "round", "sqrt", "square", "sub",
    "sub_", "sum", "to"})
"""Methods that leave their object nowhere but in their result and in itself."""
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_BRANCHES = (*_LOOPS, ast.If, ast.Try, ast.TryStar, ast.Match, ast.IfExp, ast.BoolOp)

_ASKS_FOR_CLASSES = frozenset({"isinstance", "issubclass", "super"})
_OF_ELEMENTS = frozenset({"get", "pop", "setdefault"})
_READS_ANY = frozenset({"vars", "__dict__", "eval", "exec", "globals", "locals", "dir", "attrgetter", "asdict",
                        "astuple", "deepcopy", "__getattribute__"})
_STORES_ANY = frozenset({"vars", "__dict__", "eval", "exec", "globals", "__setattr__", "__delattr__"})
_INLINE = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"})

_FINDS = threading.Lock()
"""Ranks that are threads analyse the same functions at the same time: only one of them computes the uses."""
_VARIABLE = re.compile(r"(?<![\w.])[a-zA-Z_]\w*")
"""A variable in the text of an expression."""

Key = tuple[Any, ...]
"""Description of a key: ("is", value), ("own", name) for an attribute of a method's own object, ("tuple", keys),
("text", keys), ("any",)."""
ANY: Key = ("any",)


class ElementRead(NamedTuple):
    """A read of one element of the container of this name."""

    name: str
    key: Key


@dataclass(frozen=True)
class Uses:
    """Names that functions use. own: names that methods read of their own object. others: other attributes and
    variables that are read. called: names of attributes that are called. given: names that are called or passed on: if
    one is a class, objects of it may be made. whole: names of which more than an element is read; elements: elements
    that are read of others. stores: names that are written, or of which an element is written. accumulates: names whose
    old value is needed for the new one. reads_any, stores_any: whether any name may be read or written.
    """

    own: frozenset[str] = frozenset()
    others: frozenset[str] = frozenset()
    called: frozenset[str] = frozenset()
    given: frozenset[str] = frozenset()
    whole: frozenset[str] = frozenset()
    stores: frozenset[str] = frozenset()
    accumulates: frozenset[str] = frozenset()
    elements: frozenset[ElementRead] = frozenset()
    reads_any: bool = False
    stores_any: bool = False

    @classmethod
    def union(cls, several: Sequence[Uses]) -> Uses:
        """The uses of several functions."""
        found: dict[str, Any] = {field.name: [getattr(uses, field.name) for uses in several] for field in fields(cls)}
        merged: dict[str, Any] = {name: any(each) if name.endswith("_any") else frozenset().union(*each)
                                  for name, each in found.items()}
        return cls(**merged)

    @cached_property
    def only_written(self) -> frozenset[str]:
        """Names that are written, and never computed from their old value."""
        return self.stores - self.accumulates

    def reads(self, name: str) -> bool:
        """Whether some attribute, global or closure variable of this name is read, and not only called."""
        return self.reads_any or name in self.own or name in self.others


def uses_of(code: CodeType, own: str | None = None) -> Uses:
    """The uses of a function and of those inside it. own: its variable for the object whose method it is."""
    with _FINDS:
        return _uses_of(code, own)


@lru_cache(maxsize=1 << 14)
def _uses_of(code: CodeType, own: str | None) -> Uses:
    return Uses.union(list(_uses_of_all(code, own, trees.source_of(code))))


def _uses_of_all(code: CodeType, own: str | None, source: Mapping[Any, list[Any]]) -> Iterator[Uses]:
    node = trees.node_of(code, source)
    yield _all_names(code) if node is None else _Function(code, node, own).uses()
    for constant in code.co_consts:
        if isinstance(constant, CodeType) and (node is None or constant.co_name not in _INLINE):
            yield from _uses_of_all(constant, own if own in constant.co_freevars else None, source)


def _all_names(code: CodeType) -> Uses:
    """The uses if every name of a function is read, and stored values depend on old ones."""
    names = frozenset((*code.co_names, *code.co_freevars, *code.co_cellvars))
    stores = names & {instruction.argval for instruction in dis.get_instructions(code)
                      if instruction.opname.startswith(("STORE", "DELETE"))}
    return Uses(own=names, others=names, given=names, whole=names,
                stores=stores, accumulates=names, reads_any=not (_READS_ANY | trees.BY_NAME).isdisjoint(
                    names), stores_any=not (_STORES_ANY | trees.BY_NAME).isdisjoint(names))


class _Function(FunctionTree):
    """One function, with its uses."""

    def uses(self) -> Uses:
        names = {self._name(node) for node in self._places}
        computed = {node.id for node in self._places if isinstance(node, ast.Name)} & trees.BY_NAME
        reads_any = names & _READS_ANY or computed & {"getattr", "hasattr"} or any(
            isinstance(node, ast.MatchClass) for node in self._numbers)
        new = f"{self._own}." if self._code.co_name == "__init__" else "."  # a new object without attributes
        stored = ((store.name, "stores") for store in self._stores
                  if store.place not in self._locals and store.place != f"{new}{store.name}")
        found: dict[str, set[Any]] = {}
        for what, kind in chain(stored, *map(self._uses_of_node, self._numbers)):
            found.setdefault(kind, set()).add(what)
        return Uses(**{kind: frozenset(one) for kind, one in found.items()}, reads_any=bool(reads_any),
                    stores_any=bool(names & _STORES_ANY or computed & {"setattr", "delattr"}))

    def _uses_of_node(self, node: Any) -> Iterator[tuple[Any, str]]:
        """Yield names, and the fields of `Uses` that contain them."""
        if isinstance(node, ast.ImportFrom):
            yield from ((name.name, kind) for name in node.names for kind in ("others", "whole"))
        if not isinstance(node, ast.Name | ast.Attribute) or not isinstance(node.ctx, ast.Load) or (
                isinstance(node, ast.Name) and node.id in self._locals):
            return
        name, how = self._name(node), self._change(node) or ("accumulates" if self._flows_back(node) else None)
        if how is not None:
            yield name, "stores"
        elif not self._is_fresh(node):
            yield name, "called" if self._call(node) else "own" if self._is_own(node) else "others"
            key = self._element(node)
            yield (name, "whole") if key is None else (ElementRead(name, key), "elements")
            if self._is_given(node):
                yield name, "given"
        if how == "accumulates" or self._is_stored_later(node):
            yield name, "accumulates"

    # ------------------------------------------------------------------ what is done with a value

    def _is_given(self, node: Any) -> bool:
        """Whether a value is used for more than reading an attribute of it, or checking its class."""
        parent = self._parents[node]
        call = self._parents.get(parent) if isinstance(parent, ast.Tuple) else parent
        return not isinstance(parent, ast.Attribute | ast.ExceptHandler) and not (
            isinstance(call, ast.Call) and call.func is not node and isinstance(call.func, ast.Name)
            and call.func.id in _ASKS_FOR_CLASSES)

    def _change(self, node: Any) -> str | None:
        """How a container is changed without being read; None if it is not."""
        parent, call = self._parents[node], self._call_on(node)
        if isinstance(parent, ast.Subscript) and parent.value is node:
            return self._change(parent) if isinstance(parent.ctx, ast.Load) else "stores"
        if call is not None and call.func.attr == "setdefault":
            return self._change(call)
        is_dropped = call is not None and isinstance(self._parents[call], ast.Expr)
        if not is_dropped or call.func.attr not in trees.CHANGES:
            return None
        return "stores" if call.func.attr in ("add", "clear", "discard") else "accumulates"

    def _flows_back(self, node: Any) -> bool:
        """Whether the value is only computed with and stored where it came from: x.n = x.n + 1, a[k] = a[k] + 1."""
        call, parent = self._call_on(node), self._parents[node]
        element = parent if isinstance(parent, ast.Subscript) and parent.value is node else (
            call if call is not None and call.func.attr == "get" else node)
        at, is_computed = element, False
        while True:
            parent, call = self._parents[at], self._call_on(at)
            if isinstance(parent, ast.BinOp | ast.UnaryOp):
                at, is_computed = parent, True
            elif call is not None and parent.attr in _COMPUTING:
                at, is_computed = call, True
            elif isinstance(parent, ast.BoolOp) and parent.values[0] is at:
                at = parent
            else:
                break
        back = [text_of(element if (place := trees.place_in(element)) is None else place)]
        return is_computed and (isinstance(parent, ast.Expr) or (
            isinstance(parent, ast.Assign) and list(map(text_of, parent.targets)) == back))

    def _is_fresh(self, node: Any) -> bool:
        """Whether the function has stored its own value there before, on every path, and not read an old one."""
        if not self._stores:
            return False
        parent, around = self._parents[node], [node, *self._around(node)]
        place = parent if isinstance(parent, ast.Subscript) and parent.value is node else node
        number, text, names = self._numbers[node], text_of(place), _names_in(place)
        others = [store for store in self._stores if store.name in names
                  and (store.place != text or store.name in names[:-1])]
        for store in self._stores:
            statement = store.statement
            if store.number < number and isinstance(statement, ast.Assign) and text in map(
                    text_of, statement.targets) and self._precedes(statement, around):
                loops = {outer for outer in around if isinstance(outer, _LOOPS)}.difference(self._around(store.node))
                if not any(store.number < one.number < number or loops.intersection(self._around(one.node))
                           for one in others) and not any(  # the new value may depend on the old one
                        self._numbers[read] < store.number and read is not getattr(store.node, "value", None)
                        for read in self._reads[self._name(node)]):
                    return True
        return False

    # ------------------------------------------------------------------ an old value, if a new one follows

    def _is_stored_later(self, node: Any) -> bool:
        """Whether the function stores there afterwards, and needs the old value that it reads here: always, unless it
        stores a value only because there is no old one, and continues in the same way with both."""
        text = text_of(node) if self._stores else ""
        return any(self._needs_old(node, store) for store in self._stores
                   if store.place == text and store.number > self._numbers[node] and store.place not in self._locals
                   and store.node not in (node, self._parents[node]))

    def _needs_old(self, node: Any, store: Store) -> bool:
        around, asking = [node, *self._around(node)], list[Any]()
        for branch in (outer for outer in self._around(store.node) if isinstance(outer, _BRANCHES)):
            here, there = self._arm(branch, around), self._arm(branch, [store.node, *self._around(store.node)])
            if here is there:  # it runs whenever the old value is read, whatever that is, except for a = max(a, b)
                call = _value(store)
                is_most = isinstance(call, ast.Call) and text_of(call.func) in ("max", "min")
                asking += [branch] if is_most and call is self._parents[node] else []
                break
            if isinstance(here, list) and isinstance(branch, ast.If | ast.Match):
                return False  # only one of them runs
            asking.append(branch)
        asking = [outer for outer in asking if self._depends_on_place(outer)]
        return not asking or self._goes_on(around, store) or any(self._has_effects(outer, store) for outer in asking)

    def _arm(self, branch: Any, around: list[Any]) -> Any:
        """The part of a branch that contains a node: its test, a list of statements, a case; None if it contains
        none."""
        child = around[around.index(branch) - 1] if branch in around else None
        return next((body for body in trees.bodies(branch) if child in body), child)

    def _depends_on_place(self, branch: Any) -> bool:
        """Whether it depends on what is in a place that the function stores in."""
        places = {store.place for store in self._stores if store.place not in self._locals}
        places |= {store.place for store in self._stores if store.place in self._locals and not places.isdisjoint(
            map(text_of, _places_in(_value(store))))}
        tests = branch.body if isinstance(branch, ast.Try | ast.TryStar) else [
            getattr(branch, name) for name in ("test", "subject", "iter") if hasattr(branch, name)]
        return any(text_of(place) in places for test in tests for place in _places_in(test))

    def _goes_on(self, around: list[Any], store: Store) -> bool:
        """Whether a variable that has been computed from the old value is used after the new one is stored."""
        assign = next((outer for outer in around if isinstance(outer, ast.Assign | ast.NamedExpr)), None)
        targets = () if assign is None else {
            store.place for store in self._stores if store.node in ast.walk(assign)}
        return any(self._numbers[load] > store.number and not any(
            self._numbers[assign] < new.number < self._numbers[load] and new.place == load.id for new in self._stores)
            for load in self._loads(targets))

    def _has_effects(self, branch: Any, mark: Store) -> bool:
        """Whether the function continues differently if it has stored, as `branch` decides: it returns something else,
        or uses variables or objects that have been changed there. mark: the store."""
        if isinstance(branch, ast.IfExp | ast.BoolOp):
            return True
        inside = set(ast.walk(branch)).difference(ast.walk(getattr(branch, "test", ast.Pass())))
        stores = [store for store in self._stores if store.node in inside]
        local = {store.place for store in stores if store.place in self._locals}
        changed = {name for name in local if name not in self._stored_locals or not all(
            trees.place_in(_value(store)) is not None or (store.node in inside and self._is_stored_next(store))
            for store in self._stores if store.place == name)}
        last = max(self._numbers[inner] for inner in inside if inner in self._numbers)
        of_mark = mark.place.rpartition(".")[0] or mark.place
        is_used_later = any(load not in inside and not self._is_set(load, last) for load in self._loads(changed))
        changes_another_object = any(root in self._locals - local and not f"{text}.".startswith(f"{of_mark}.")
                                     for root, text in _changed_objects(inside))
        stores_another_value = any(
            store.place == other.place and _text(store) != _text(other) and other.node not in inside
            for store in stores if store.place not in self._locals for other in self._stores)
        return is_used_later or changes_another_object or stores_another_value or self._leaves(inside, changed)

    def _leaves(self, inside: set[Any], changed: set[str]) -> bool:
        """Whether a branch yields, leaves a loop, or returns something else than the function does elsewhere. changed:
        local variables that it changes."""
        kinds = {type(inner) for inner in inside}
        if not kinds.isdisjoint((ast.Yield, ast.Break, ast.Continue)):
            return True
        if ast.Return not in kinds:
            return False
        returned = {_VARIABLE.sub(lambda one: self._stored_locals.get(one[0], one[0]),
                                  ast.unparse(node.value or ast.Pass()))
                    for node in self._numbers if isinstance(node, ast.Return)}
        return len(returned) > 1 or not changed.isdisjoint(name for text in returned
                                                           for name in _VARIABLE.findall(text))

    @cached_property
    def _stored_locals(self) -> dict[str, str]:
        """Local variables with the value of a place, found or stored there -> the place."""
        found: dict[str, str] = {}
        for node in (node for node in self._numbers if isinstance(node, ast.Assign | ast.NamedExpr)):
            values = [node.value, *(node.targets if isinstance(node, ast.Assign) else [node.target])]
            places = [place for value in values if (place := trees.place_in(value)) is not None]
            found |= {value.id: text_of(places[0]) for value in values if places and isinstance(value, ast.Name)
                      and value.id in self._locals.difference(self._arguments)}
        return found

    def _is_stored_next(self, store: Store) -> bool:
        """Whether the new value of a local variable is also stored in a place, on every path from there."""
        around = [store.node, *self._around(store.node)]
        for node in self._numbers:
            if isinstance(node, ast.Assign) and any(trees.place_in(target) is not None for target in node.targets) and (
                    node is store.statement or (
                        isinstance(node.value, ast.Name) and node.value.id == store.place and any(
                            part in around for body in trees.bodies(self._parents[node]) if node in body
                            for part in body[:body.index(node)]))):
                return True
        return False

    def _loads(self, names: Iterable[str]) -> Iterator[Any]:
        return (read for name in names for read in self._reads.get(name, ()) if isinstance(read, ast.Name))

    def _is_set(self, load: Any, number: int) -> bool:
        """Whether a variable gets a value after this number, on every path to its use."""
        around = [load, *self._around(load)]
        return any(number < store.number < self._numbers[load] and store.statement is not None and (
            self._precedes(store.statement, around)
            or (isinstance(store.statement, ast.For) and store.statement in around))
            for store in self._stores if store.place == load.id)

    # ------------------------------------------------------------------ keys

    def _element(self, node: Any) -> Key | None:
        """The key of the only element that is read of a container; None if more is read."""
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
                return kind, tuple(self._key(part, depth - 1) for part in parts)
        return ANY


def _names_in(node: Any) -> list[str]:
    """Names of variables and attributes, the last one of a path last."""
    found = [inner.id if isinstance(inner, ast.Name) else inner.attr for inner in ast.walk(node)
             if isinstance(inner, ast.Name | ast.Attribute)]
    return found[::-1]


def _places_in(node: Any) -> Iterator[Any]:
    """Variables and attributes that an expression reads."""
    return (inner for inner in (() if node is None else ast.walk(node))
            if isinstance(inner, ast.Name | ast.Attribute) and isinstance(inner.ctx, ast.Load))


def _changed_objects(inside: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """Yield the objects whose attributes, elements or values are changed: (variable that holds it, its text)."""
    for inner in inside:
        match inner:
            case ast.Attribute(value=place) | ast.Subscript(value=place) if not isinstance(inner.ctx, ast.Load):
                pass
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=place, attr=name))) if (
                    name in trees.CHANGES or (name.endswith("_") and not name.startswith("_"))):
                pass
            case _:
                continue
        yield next((part.id for part in ast.walk(place) if isinstance(part, ast.Name)), ""), text_of(place)


def _value(store: Store) -> Any:
    return getattr(store.statement, "value", None)


def _text(store: Store) -> str:
    return "" if _value(store) is None else ast.unparse(_value(store))


def with_values(key: Key, values: Mapping[str, Any]) -> Key:
    """Return the key with the values of these attributes of an object."""
    match key:
        case "own", name:
            return ("is", values[name]) if name in values else ANY
        case "tuple" | "text", parts:
            found = tuple(with_values(part, values) for part in parts)
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
