"""The syntax tree of a function, found by its code object, in a normalised form: one spelling for each operation.

    getattr(a, "b", c)           a.b or c
    ctx.calls += 1               ctx.calls = ctx.calls + 1
    a, ctx.b = c, d              a = c; ctx.b = d
    if known: return old         if known: return old
    return new                   else: return new
"""

from __future__ import annotations

import ast
import copy
import linecache
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from inspect import CO_VARARGS, CO_VARKEYWORDS
from types import CodeType
from typing import Any, NamedTuple

from ranvier.originals.read_attributes import codes_in

BY_NAME = frozenset({"getattr", "hasattr", "setattr", "delattr"})
CHANGES = frozenset({"append", "appendleft", "extend", "extendleft", "insert", "add", "update", "clear", "discard"})
"""Methods of lists, dicts, sets and deques that return nothing."""
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)
_PARSES = threading.Lock()
"""CPython 3.11 counts the depth of a tree wrongly if threads parse at the same time, and raises SystemError."""


def source_of(code: CodeType) -> Mapping[tuple[str, int], list[Any]]:
    """Functions, lambdas and classes in the source of a function, by name and first line: its own lines, or the full
    file for a lambda, which may be inside any expression."""
    lines, first = linecache.getlines(code.co_filename), code.co_firstlineno - 1
    codes = list(codes_in(code))
    text = "".join(lines[first:max(line or 0 for code in codes for _, line, _, _ in code.co_positions())])
    names = {name[name.find("__", 1):] if "__" in name[1:] else name for code in codes for name in code.co_names}
    if not all(part in text or part.startswith(("@", "__")) for name in names for part in name.split(".")):
        return {}  # the file has changed since
    if code.co_name == "<lambda>":
        return _functions_in("".join(lines))
    is_inside = text[:1].isspace() and first > 0
    return _functions_in("\n" * (first - is_inside) + "if 1:\n" * is_inside + text)


@lru_cache(maxsize=1 << 6)
def _functions_in(source: str) -> Mapping[tuple[str, int], list[Any]]:
    found: dict[tuple[str, int], list[Any]] = {}
    try:
        with _PARSES:
            tree = _Plain().visit(ast.parse(source))
    except (SyntaxError, ValueError, RecursionError):
        return {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = min(one.lineno for one in (node, *node.decorator_list))
            found.setdefault((node.name, first), []).append(node)
        elif isinstance(node, ast.Lambda):
            found.setdefault(("<lambda>", node.lineno), []).append(node)
    return found


def node_of(code: CodeType, source: Mapping[tuple[str, int], list[Any]]) -> Any:
    """The tree of a function; None if there is no source, or it has changed."""
    nodes = source.get((code.co_name, code.co_firstlineno), [])
    if code.co_name == "<lambda>":
        places = set(code.co_positions())
        nodes = [one for one in nodes if (one.body.lineno, one.body.end_lineno, one.body.col_offset,
                                          one.body.end_col_offset) in places]
    return nodes[0] if len(nodes) == 1 else None


class _Plain(ast.NodeTransformer):
    """Rewrites a tree into the normalised form, for inspection only."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for body in bodies(node):
            for number in reversed(range(len(body) - 1)):
                statement = body[number]
                if isinstance(statement, ast.If) and isinstance(statement.body[-1], _LEAVES) and not statement.orelse:
                    statement.orelse, body[number + 1:] = body[number + 1:], []
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        match node:
            case ast.Call(func=ast.Name(id=by), args=[value, ast.Constant(value=str(name)), *rest]) if by in BY_NAME:
                new: ast.expr = ast.Attribute(value, name, ast.Load() if by in ("getattr", "hasattr") else ast.Store())
                if by == "getattr" and rest:
                    new = ast.BoolOp(ast.Or(), [new, *rest])
                elif by == "setattr":
                    new = ast.NamedExpr(new, rest[0])  # type: ignore[arg-type]
                return ast.fix_missing_locations(ast.copy_location(new, node))
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        self.generic_visit(node)
        old = copy.deepcopy(node.target)
        old.ctx = ast.Load()
        return ast.fix_missing_locations(ast.copy_location(
            ast.Assign([node.target], ast.BinOp(old, node.op, node.value)), node))

    def visit_Assign(self, node: ast.Assign) -> Any:
        self.generic_visit(node)
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)) if len(targets) == len(
                    values) and {text_of(target) for target in targets}.isdisjoint(
                    text_of(inner) for value in values for inner in ast.walk(value) if isinstance(inner, ast.expr)):
                return [ast.copy_location(ast.Assign([target], value), target)
                        for target, value in zip(targets, values, strict=True)]
        return node


class Store(NamedTuple):
    """A store to a place. place: as text; number: in the order of the function."""

    place: str
    name: str
    node: Any
    statement: Any
    number: int


class FunctionTree:
    """The tree of one function, with parents: a node's parents show what is done with its value."""

    def __init__(self, code: CodeType, node: Any, own: str | None) -> None:
        flags = bool(code.co_flags & CO_VARARGS) + bool(code.co_flags & CO_VARKEYWORDS)
        self._arguments = code.co_varnames[:code.co_argcount + code.co_kwonlyargcount + flags]
        self._code = code
        self._parents: dict[Any, Any] = {}
        self._numbers: dict[Any, int] = {}
        """The order in which nodes run, ignoring loops."""
        for statement in node.body if isinstance(node.body, list) else [node.body]:
            self._add(statement, node)
        nodes = list(self._numbers)
        self._places = [one for one in nodes if isinstance(one, ast.Name | ast.Attribute)]
        self._reads: dict[str, list[Any]] = {}
        for place in self._places:
            self._reads.setdefault(self._name(place), []).extend([place] if isinstance(place.ctx, ast.Load) else [])
        stored = Counter(place.id for place in self._places if isinstance(place, ast.Name)
                         and not isinstance(place.ctx, ast.Load))
        self._once = {target.id: one.value for one in nodes if isinstance(one, ast.Assign) for target in one.targets
                      if isinstance(target, ast.Name) and stored[target.id] == 1 and target.id not in self._arguments}
        """Local variables with one value."""
        inner = {inner.id for node in nodes if isinstance(node, ast.comprehension) for inner in ast.walk(node.target)
                 if isinstance(inner, ast.Name)}
        self._locals = {*code.co_varnames, *inner.difference(code.co_names, code.co_freevars)} - {*code.co_cellvars}
        self._own = own if own not in stored else None
        self._stores = [Store(text_of(place), self._name(place), one, self._statement(one), self._numbers[one])
                        for one in nodes for place in self._stored_by(one)]

    def _add(self, node: Any, parent: Any) -> None:
        self._parents[node] = parent
        inside = [child for child in ast.iter_child_nodes(node)
                  if not isinstance(child, ast.expr_context | ast.operator)]
        if isinstance(node, _FUNCTIONS):  # whose bodies are separate functions
            body = node.body if isinstance(node.body, list) else [node.body]
            inside = [inner for inner in inside if inner not in body]
        if (first := getattr(node, "value", getattr(node, "iter", None))) in inside:  # before the target
            inside.remove(first)
            inside.insert(0, first)
        for inner in inside:
            self._add(inner, node)
        self._numbers[node] = len(self._numbers)

    def _name(self, node: Any) -> str:
        """The name of a variable or attribute; private names with their class."""
        name: str = node.id if isinstance(node, ast.Name) else node.attr
        if not name.startswith("__"):
            return name
        return next((variable for variable in self._code.co_names if variable.endswith(name)), name)

    def _is_own(self, node: Any) -> bool:
        """Whether it is an attribute of the method's own object."""
        return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == self._own

    def _call(self, node: Any) -> Any:
        """The call of which a node is the method; None if it is not called."""
        call = self._parents[node]
        return call if isinstance(node, ast.Attribute) and isinstance(call, ast.Call) and call.func is node else None

    def _call_on(self, node: Any) -> Any:
        """The call of a method on the value of a node; None if there is none."""
        method = self._parents[node]
        return self._call(method) if isinstance(method, ast.Attribute) else None

    def _statement(self, node: Any) -> Any:
        return next((outer for outer in (node, *self._around(node)) if isinstance(outer, ast.stmt | ast.NamedExpr)),
                    None)

    def _around(self, node: Any) -> Iterator[Any]:
        """Yield what contains a node, inside of the function."""
        while (node := self._parents.get(node)) in self._parents:
            yield node

    def _stored_by(self, node: Any) -> Iterator[Any]:
        """Yield the place in which a node stores: a variable or attribute, or the container of the element."""
        if isinstance(node, ast.Name | ast.Attribute) and not isinstance(node.ctx, ast.Load):
            yield node
        elif (isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load)) or (
                isinstance(node, ast.Attribute) and (node.attr == "setdefault" or (
                    node.attr in CHANGES and isinstance(self._parents.get(self._call(node)), ast.Expr)))):
            yield from [node.value] if isinstance(node.value, ast.Name | ast.Attribute) else []
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield ast.Name(node.name, ast.Store())

    def _precedes(self, statement: Any, around: Sequence[Any]) -> bool:
        """Whether a statement comes before another node on every path to it: in the same list of statements."""
        return any(later in around for body in bodies(self._parents[statement]) if statement in body
                   for later in body[body.index(statement) + 1:])


def bodies(node: Any) -> Iterator[list[Any]]:
    """The lists of statements of a node."""
    for name in ("body", "orelse", "finalbody"):
        if isinstance(body := getattr(node, name, None), list):
            yield body


def place_in(node: Any) -> Any:
    """The attribute or element whose value an expression has; None if there is none."""
    match node:
        case ast.Attribute() | ast.Subscript():
            return node
        case ast.Call(func=ast.Attribute(value=value, attr="get"), args=[key, *_]):
            return ast.Subscript(value, key, ast.Load())
        case ast.BoolOp(op=ast.Or(), values=[ast.Attribute() as first, _]):
            return first
    return None


def text_of(node: Any) -> str:
    match node:
        case ast.Name():
            return str(node.id)
        case ast.Attribute():
            return f"{text_of(node.value)}.{node.attr}"
        case ast.Subscript():
            return f"{text_of(node.value)}[{text_of(node.slice)}]"
    return ast.unparse(node)
