"""The syntax tree of a function, found by its code: what each node is a part of, and the order in which nodes run."""

from __future__ import annotations

import ast
import linecache
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from inspect import CO_VARARGS, CO_VARKEYWORDS
from types import CodeType
from typing import Any, NamedTuple

BY_NAME = frozenset({"getattr", "hasattr", "setattr", "delattr"})
CHANGES = frozenset({"append", "appendleft", "extend", "extendleft", "insert", "add", "update", "clear", "discard"})
"""Methods of lists, dicts, sets and deques that return nothing."""
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_PARSES = threading.Lock()
"""CPython 3.11 counts the depth of a tree wrongly where threads parse at once, and raises SystemError."""


def source_of(code: CodeType) -> Mapping[tuple[str, int], list[Any]]:
    """Functions, lambdas and classes in the source of a function, by name and first line: its own lines, or the whole
    file for a lambda, which may stand in the midst of anything."""
    lines, first = linecache.getlines(code.co_filename), code.co_firstlineno - 1
    codes = list(_codes_in(code))
    here = "".join(lines[first:max(line or 0 for one in codes for _, line, _, _ in one.co_positions())])
    names = {name[name.find("__", 1):] if "__" in name[1:] else name for one in codes for name in one.co_names}
    if not all(part in here or part.startswith(("@", "__")) for name in names for part in name.split(".")):
        return {}  # the file has changed since
    if code.co_name == "<lambda>":
        return _functions_in("".join(lines))
    is_inside = here[:1].isspace() and first > 0
    return _functions_in("\n" * (first - is_inside) + "if 1:\n" * is_inside + here)


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    yield code
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _codes_in(one)


@lru_cache(maxsize=1 << 6)
def _functions_in(source: str) -> Mapping[tuple[str, int], list[Any]]:
    found: dict[tuple[str, int], list[Any]] = {}
    try:
        with _PARSES:
            tree = _ByName().visit(ast.parse(source))
    except (SyntaxError, ValueError):
        return {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = min(one.lineno for one in (node, *node.decorator_list))
            found.setdefault((node.name, first), []).append(node)
        elif isinstance(node, ast.Lambda):
            found.setdefault(("<lambda>", node.lineno), []).append(node)
    return found


def node_of(code: CodeType, source: Mapping[tuple[str, int], list[Any]]) -> Any:
    """The tree of a function; None where there is no source, or it is another one now."""
    nodes = source.get((code.co_name, code.co_firstlineno), [])
    if code.co_name == "<lambda>":
        places = set(code.co_positions())
        nodes = [one for one in nodes if (one.body.lineno, one.body.end_lineno, one.body.col_offset,
                                          one.body.end_col_offset) in places]
    return nodes[0] if len(nodes) == 1 else None


class _ByName(ast.NodeTransformer):
    """getattr(a, "b", c) becomes a.b or c, and setattr(a, "b", c) stores in a.b."""

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        match node:
            case ast.Call(func=ast.Name(id=by), args=[value, ast.Constant(value=str(name)), *rest]) if by in BY_NAME:
                new: ast.expr = ast.Attribute(value, name, ast.Load() if by in ("getattr", "hasattr") else ast.Store())
                if by == "getattr" and rest:
                    new = ast.BoolOp(ast.Or(), [new, *rest])
                elif by == "setattr":
                    new = ast.NamedExpr(new, rest[0])  # type: ignore[arg-type]  # a tree that is only looked at
                return ast.fix_missing_locations(ast.copy_location(new, node))
        return node


class Store(NamedTuple):
    """A place gets a value. place, targets: as texts; number: in the order of the function."""

    place: str
    name: str
    node: Any
    statement: Any
    targets: tuple[str, ...]
    number: int


class FunctionTree:
    """One function: what is done with a value is seen by what its node is a part of."""

    def __init__(self, code: CodeType, node: Any, own: str | None) -> None:
        self._code = code
        self._parents: dict[Any, Any] = {}
        self._numbers: dict[Any, int] = {}
        """The order in which nodes run, loops left aside."""
        for one in node.body if isinstance(node.body, list) else [node.body]:
            self._add(one, node)
        nodes = list(self._numbers)
        self._places = [one for one in nodes if isinstance(one, ast.Name | ast.Attribute)]
        self._reads: dict[str, list[Any]] = {}
        for one in self._places:
            self._reads.setdefault(self._name(one), []).extend([one] if isinstance(one.ctx, ast.Load) else [])
        stored = [one.id for one in self._places if isinstance(one, ast.Name) and not isinstance(one.ctx, ast.Load)]
        self._once = {one.targets[0].id: one.value for one in nodes if isinstance(one, ast.Assign) and isinstance(
            one.targets[0], ast.Name) and len(one.targets) == 1 and stored.count(one.targets[0].id) == 1}
        flags = bool(code.co_flags & CO_VARARGS) + bool(code.co_flags & CO_VARKEYWORDS)
        self._once = {name: one for name, one in self._once.items() if name not in code.co_varnames[
            :code.co_argcount + code.co_kwonlyargcount + flags]}
        """Local variables with one value."""
        inner = {one.id for node in nodes if isinstance(node, ast.comprehension) for one in ast.walk(node.target)
                 if isinstance(one, ast.Name)}
        self._locals = {*code.co_varnames, *inner.difference(code.co_names, code.co_freevars)} - {*code.co_cellvars}
        self._own = own if own not in stored else None
        self._stores = [Store(text_of(place), self._name(place), one, statement := self._statement(one), tuple(
            map(text_of, statement.targets)) if isinstance(statement, ast.Assign) else (), self._numbers[one])
            for one in nodes for place in self._stored_by(one)]

    def _add(self, node: Any, parent: Any) -> None:
        self._parents[node] = parent
        inside = [one for one in ast.iter_child_nodes(node) if not isinstance(one, ast.expr_context | ast.operator)]
        if isinstance(node, _FUNCTIONS):  # whose bodies are functions of their own
            inside = [one for one in inside if one not in (node.body if isinstance(node.body, list) else [node.body])]
        if (first := getattr(node, "value", getattr(node, "iter", None))) in inside:  # before the target
            inside.remove(first)
            inside.insert(0, first)
        for one in inside:
            self._add(one, node)
        self._numbers[node] = len(self._numbers)

    # ------------------------------------------------------------------ what a node is

    def _name(self, node: Any) -> str:
        """Private ones with their class."""
        name: str = node.id if isinstance(node, ast.Name) else node.attr
        return next((one for one in self._code.co_names if one.endswith(name)), name) if name.startswith("__") else name

    def _is_own(self, node: Any) -> bool:
        """Whether it is an attribute of the method's own object."""
        return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == self._own

    def _call(self, node: Any) -> Any:
        """The call of a method."""
        call = self._parents[node]
        return call if isinstance(node, ast.Attribute) and isinstance(call, ast.Call) and call.func is node else None

    def _call_on(self, node: Any) -> Any:
        """The call of a method of what a node has."""
        method = self._parents[node]
        return self._call(method) if isinstance(method, ast.Attribute) else None

    def _statement(self, node: Any) -> Any:
        while not isinstance(node, ast.stmt):
            node = self._parents.get(node)
            if node is None:
                break
        return node

    def _around(self, node: Any) -> Iterator[Any]:
        """What a node is a part of, inside of the function."""
        while (node := self._parents.get(node)) in self._parents:
            yield node

    def _stored_by(self, node: Any) -> Iterator[Any]:
        """The place that a node stores in, as a variable or attribute, or that has the element."""
        if isinstance(node, ast.Name | ast.Attribute) and not isinstance(node.ctx, ast.Load):
            yield node
        elif (isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load)) or (
                isinstance(node, ast.Attribute) and (node.attr == "setdefault" or (
                    node.attr in CHANGES and isinstance(self._parents.get(self._call(node)), ast.Expr)))):
            yield from [node.value] if isinstance(node.value, ast.Name | ast.Attribute) else []
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield ast.Name(node.name, ast.Store())

    def _precedes(self, statement: Any, around: Sequence[Any]) -> bool:
        """Whether it comes before another one, on each way to that: in the same list of statements."""
        bodies = [body for _, body in ast.iter_fields(self._parents[statement]) if isinstance(body, list)]
        return any(one in around for body in bodies if statement in body for one in body[body.index(statement) + 1:])


def text_of(node: Any) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return f"{text_of(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ast.unparse(node)


def names_in(node: Any) -> list[str]:
    """Names of variables and attributes, the last one of a path last."""
    found = [one.id if isinstance(one, ast.Name) else one.attr for one in ast.walk(node)
             if isinstance(one, ast.Name | ast.Attribute)]
    return found[::-1]
