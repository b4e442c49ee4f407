"""Whether a function needs what others have left in a place that it also stores in by itself.

    if ctx.n != n:                      if ctx.step != n:                 if n in seen:
        ctx.n = n                           ctx.step = n                      return y
        ctx.table = table_of(n)             y = 2 * y                     seen.add(n)
    return y * ctx.table                return y                          return 2 * y

The first finds a table or makes the same one: no other code notices which. The other two go on in another way where
nobody has been before, so that they need what others have left.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from ranvier.plan.function_tree import CHANGES, FunctionTree, Store, names_in, text_of

_COMPUTING = frozenset({
    "abs", "add", "add_", "clamp", "clamp_", "clone", "cpu", "detach", "div", "div_", "double", "float", "get", "int",
    "item", "lerp", "lerp_", "max", "maximum", "mean", "min", "minimum", "mul", "mul_", "pow", "round", "sqrt",
    "square", "sub", "sub_", "sum", "to"})
"""Methods that leave their object nowhere but in their result and in itself."""
_BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.Try, ast.TryStar, ast.Match, ast.IfExp, ast.BoolOp)
_LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)


class OldValues(FunctionTree):
    """One function, and what becomes of the values that it finds."""

    def _flows_back(self, node: Any) -> bool:
        """Whether the value goes nowhere but, computed with, to where it came from: x.n = x.n + 1, a[k] = a[k] + 1."""
        at, key, is_computed = node, None, False
        while True:
            parent, call = self._parents[at], self._call_on(at)
            match parent:
                case ast.BinOp() | ast.UnaryOp(op=ast.USub()):
                    at, is_computed = parent, True
                case ast.BoolOp(op=ast.Or(), values=[first, ast.Constant()]) if first is at:
                    at = parent
                case ast.Subscript() if at is parent.value and at is node:
                    at, key = parent, parent.slice
                case ast.Attribute() if call is not None and parent.attr in _COMPUTING:
                    key = call.args[0] if parent.attr == "get" and call.args else key
                    at, is_computed = call, True
                case ast.Expr():
                    return is_computed
                case ast.Assign(targets=[ast.Subscript(value=place, slice=other)]) if key is not None:
                    return is_computed and (text_of(place), text_of(other)) == (text_of(node), text_of(key))
                case ast.Assign(targets=[place]) if key is None:
                    return is_computed and text_of(place) == text_of(node)
                case _:
                    return False

    def _is_fresh(self, node: Any) -> bool:
        """Whether the function has stored a value of its own there before, whatever way it took, and read none."""
        parent = self._parents[node]
        place = parent if isinstance(parent, ast.Subscript) and parent.value is node else node
        number, text = self._numbers[node], text_of(place) if self._stores else ""
        for store in (one for one in self._stores if one.number < number and text in one.targets):
            names, around = names_in(place), [node, *self._around(node)]
            loops = {one for one in around if isinstance(one, ast.For | ast.While | ast.AsyncFor)}.difference(
                self._around(store.node))
            others = [one for one in self._stores if one.name in names and (
                one.place != text or one.name in names[:-1])]
            if self._precedes(store.statement, around) and not any(
                    store.number < one.number < number or loops.intersection(self._around(one.node))
                    for one in others) and not any(
                    self._numbers[one] < store.number and one is not getattr(store.node, "value", None)
                    for one in self._reads[self._name(node)]):  # the new value may come of the old one
                return True
        return False

    # ------------------------------------------------------------------ an old value, where a new one follows

    def _is_stored_later(self, node: Any) -> bool:
        """Whether the function stores there afterwards, and needs the old value that it reads here: always, but where
        it stores one only for want of an old one, and goes on alike with both."""
        if not self._stores:
            return False
        text, parent = text_of(node), self._parents[node]
        return any(self._needs_old(node, one) for one in self._stores
                   if one.place == text and one.number > self._numbers[node] and one.place not in self._locals
                   and one.node is not parent and one.node is not node)

    def _needs_old(self, node: Any, store: Store) -> bool:
        branches = list[Any]()
        for one in (one for one in self._around(store.node) if isinstance(one, _BRANCHES)):
            here, there = self._arm(one, node), self._arm(one, store.node)
            if here is there:  # it runs where the old value is read, whatever that is, but for a = max(a, b)
                branches += [one] if self._grows(node, store) else []
                break
            if here not in (None, getattr(one, "test", None), getattr(one, "subject", None)) and isinstance(
                    one, ast.If | ast.IfExp | ast.Match):
                return False  # not both of them run
            branches.append(one)
        exits = [one for one in self._before(store.statement) if isinstance(one, ast.If) and self._leaves(one)
                 and self._numbers[one] > self._numbers[node]]
        if any(node in ast.walk(body) for one in exits for body in one.body):
            return False
        asking = [one for one in (*branches, *exits) if self._asks(one)]
        return not asking or self._is_used(node) or self._goes_stale(node, store) or any(
            self._has_effects(one, store, self._after(one) if one in exits else [one]) for one in asking)

    def _grows(self, node: Any, store: Store) -> bool:
        """Whether the old value is stored again where it is the greatest, or the least."""
        call = self._parents[node]
        return call is getattr(store.statement, "value", None) and isinstance(call, ast.Call) and text_of(
            call.func) in ("max", "min")

    def _arm(self, branch: Any, node: Any) -> Any:
        """The part of a branch that has a node: its test, a list of statements, a case, an operand; None if none."""
        inside = [node, *self._around(node)]
        if branch not in inside[1:]:
            return None
        child = inside[inside.index(branch) - 1]
        return next((body for body in _bodies(branch) if child in body), child)

    def _before(self, statement: Any) -> Iterator[Any]:
        """The statements that run before this one on every way, in the function's own list or in those around it."""
        for one in (statement, *self._around(statement)) if statement is not None else ():
            for body in _bodies(self._parents[one]) if isinstance(one, ast.stmt) else ():
                if one in body:
                    yield from body[:body.index(one)]

    def _after(self, statement: Any) -> list[Any]:
        body = next(one for one in _bodies(self._parents[statement]) if statement in one)
        return body[body.index(statement) + 1:]

    def _leaves(self, branch: ast.If) -> bool:
        return isinstance(branch.body[-1], _LEAVES) and not branch.orelse

    def _asks(self, branch: Any) -> bool:
        """Whether it depends on what is in a place that the function stores in."""
        places = {one.place for one in self._stores if one.place not in self._locals}
        places |= {name for name, values in self._values.items() for value in values if not places.isdisjoint(
            text_of(one) for one in ast.walk(value) if isinstance(one, ast.Name | ast.Attribute))}
        tests = branch.body if isinstance(branch, ast.Try | ast.TryStar) else [
            getattr(branch, name) for name in ("test", "subject", "iter") if hasattr(branch, name)] or [branch]
        return any(text_of(one) in places for test in tests for one in ast.walk(test)
                   if isinstance(one, ast.Name | ast.Attribute) and isinstance(one.ctx, ast.Load))

    def _is_used(self, node: Any) -> bool:
        """Whether it is computed with."""
        at = node
        while isinstance(parent := self._parents[at], ast.Subscript | ast.BoolOp) and at is not getattr(
                parent, "slice", None):
            at = parent
        return isinstance(parent, ast.BinOp | ast.AugAssign) and not self._flows_back(node)

    def _goes_stale(self, node: Any, store: Store) -> bool:
        """Whether a local variable that has the old value is used after the new one is stored, as if it were that."""
        parent = self._parents[node]
        if not isinstance(parent, ast.Assign | ast.NamedExpr) or node is not parent.value:
            return False
        targets = parent.targets if isinstance(parent, ast.Assign) else [parent.target]
        arm = list(_bodies(self._parents.get(store.statement))) if store.statement is not None else []
        for load in self._loads({one.id for one in targets if isinstance(one, ast.Name)}):
            new = [one for one in self._stores if one.place == load.id and one.node not in targets
                   and self._numbers[node] < one.number < self._numbers[load]]
            if self._numbers[load] > store.number and not any(
                    self._sets(one, load) or any(one.statement in body for body in arm) for one in new):
                return True
        return False

    def _loads(self, names: set[str]) -> Iterator[Any]:
        return (one for one in self._places if isinstance(one, ast.Name) and one.id in names
                and isinstance(one.ctx, ast.Load))

    def _sets(self, store: Store, load: Any) -> bool:
        """Whether it is on every way to where the variable is used, as the statement before or the loop around is."""
        around = [load, *self._around(load)]
        return store.statement is not None and (self._precedes(store.statement, around) or (
            isinstance(store.statement, ast.For) and store.statement in around))

    # ------------------------------------------------------------------ what a branch changes

    def _has_effects(self, branch: Any, mark: Store, region: Sequence[Any]) -> bool:
        """Whether the function goes on in another way where it has run a region, as `branch` decides: it returns
        something else, or uses variables or objects of its own that have been changed there, but for a variable whose
        value it has just found or stored in a place. mark: a place that tells whether it has been there."""
        inside = {one for part in region for one in ast.walk(part)}
        if hasattr(branch, "test"):  # which runs on every way
            inside -= set(ast.walk(branch.test))
        stores = [one for one in self._stores if one.node in inside]
        local = {one.place for one in stores if one.place in self._locals}
        if isinstance(branch, ast.IfExp | ast.BoolOp):  # whose value it is
            return not (isinstance(mark.node, ast.Attribute) and mark.node.attr == "setdefault")
        if any(isinstance(one, ast.Yield | ast.Break | ast.Continue) for one in inside):
            return True
        if (branch not in region or any(isinstance(one, ast.Return) for one in inside)) and not self._returns_alike(
                local):
            return True
        last = max(self._numbers[one] for one in inside if one in self._numbers)
        for load in self._loads(local):
            if load not in inside and not self._is_kept(load.id, branch, inside) and not any(
                    last < one.number < self._numbers[load] and self._sets(one, load)
                    for one in self._stores if one.place == load.id):
                return True
        own = {one.place for one in stores if isinstance(one.statement, ast.Assign) and isinstance(
            one.statement.value, ast.Call | ast.List | ast.Dict | ast.Set | ast.BinOp)}
        return any(self._is_of_others(place, mark, own) for place in self._changed(inside)) or any(
            self._is_stored_otherwise(one, branch) for one in stores if one.place not in self._locals)

    def _changed(self, inside: set[Any]) -> Iterator[Any]:
        """The objects whose attributes, elements or values are changed."""
        for one in inside:
            match one:
                case ast.Attribute(value=place) | ast.Subscript(value=place) if not isinstance(one.ctx, ast.Load):
                    yield place
                case ast.Expr(value=ast.Call(func=ast.Attribute(value=place, attr=name))) if (
                        name in CHANGES or (name.endswith("_") and not name.startswith("_"))):
                    yield place

    def _is_of_others(self, place: Any, mark: Store, own: set[str]) -> bool:
        """Whether it is an object in a local variable, not in one of `own`, and no part of that which has the mark."""
        root, of_mark = place, mark.place.rpartition(".")[0] or mark.place
        while isinstance(root, ast.Attribute | ast.Subscript | ast.Call):
            root = root.func if isinstance(root, ast.Call) else root.value
        return isinstance(root, ast.Name) and root.id in self._locals - own and not f"{text_of(place)}.".startswith(
            f"{of_mark}.")

    def _is_stored_otherwise(self, store: Store, branch: Any) -> bool:
        """Whether another value is stored in the same place where the branch is not taken."""
        return any(
            other.place == store.place and _value(other) != _value(store)
            and self._arm(branch, other.node) is not self._arm(branch, store.node)
            and not [one for one in self._around(other.node) if isinstance(one, _BRANCHES)
                     and one is not branch and one not in self._around(branch)]
            for other in self._stores)

    def _is_kept(self, name: str, branch: Any, inside: set[Any]) -> bool:
        """Whether a local variable has what is in a place, found or just stored there, whatever way has been taken."""
        mine = [one for one in self._stores if one.place == name]
        arms = {id(self._arm(branch, one.node)) for one in mine if one.node in inside}
        if len(arms) < 2 and any(self._numbers[branch] > one.number and one.node not in inside
                                 and self._found_in(one) is None for one in mine):
            return False
        return all(self._found_in(one) is not None or any(
            link is one.statement or self._is_before(one.node, link) for link, _ in self._links.get(name, ())
            if link in inside and not any(
                other.number > self._numbers[link] and other.node in inside and self._found_in(other) is None
                for other in mine)) for one in mine if one.node in inside)

    def _is_before(self, node: Any, statement: Any) -> bool:
        """Whether a node is a part of a statement before another one, in the same list."""
        body = next(one for one in _bodies(self._parents[statement]) if statement in one)
        return any(one in self._around(node) for one in body[:body.index(statement)])

    def _returns_alike(self, local: set[str]) -> bool:
        """Whether the function returns the same on all ways. local: variables that have other values on some."""
        texts, names = set[str](), set[str]()
        as_places = _AsPlaces({name: places.pop() for name in self._values
                               if len(places := self._places_of(name)) == 1})
        for one in self._numbers:
            if isinstance(one, ast.Return) and one.value is not None:
                value = as_places.visit(ast.parse(ast.unparse(one.value), mode="eval").body)
                texts.add(ast.unparse(value))
                names |= {part.id for part in ast.walk(value) if isinstance(part, ast.Name)}
            elif isinstance(one, ast.Return):
                texts.add("")
        return len(texts) == 1 and names.isdisjoint(local)

    def _places_of(self, name: str) -> set[str]:
        """The places whose value a local variable has: that it was found in, or that it was stored in last."""
        found, mine = set[str](), [one for one in self._stores if one.place == name]
        for one in mine:
            links = [place for link, place in self._links.get(name, ()) if (
                link is one.statement or self._is_before(one.node, link)) and not any(
                self._numbers[link] < other.number for other in mine if self._found_in(other) is None)]
            found.add(self._found_in(one) or (links[0] if links else ""))
        return found if "" not in found else set()

    def _found_in(self, store: Store) -> str | None:
        """The place in which a local variable's new value is found, where the function stores, too; None for others."""
        for target, value in _pairs(store.statement) if isinstance(store.statement, ast.Assign) else ():
            if target is store.node and (place := _place(value)) in self._targets:
                return place
        return None

    @cached_property
    def _targets(self) -> set[str | None]:
        """Attributes and elements in which the function stores."""
        return {_place(target) for one in self._numbers if isinstance(one, ast.Assign) for target, _ in _pairs(one)} | {
            _place(one.target) for one in self._numbers if isinstance(one, ast.NamedExpr)} - {None}

    @cached_property
    def _values(self) -> dict[str, list[Any]]:
        """Local variables, and what is assigned to them."""
        found: dict[str, list[Any]] = {}
        for one in self._stores:
            value = getattr(one.statement, "value", None)
            if one.place in self._locals and value is not None:
                found.setdefault(one.place, []).append(value)
        return found

    @cached_property
    def _links(self) -> dict[str, list[tuple[Any, str]]]:
        """Local variables, and the statements that store their values in places, with these."""
        found: dict[str, list[tuple[Any, str]]] = {}
        for statement in self._numbers:
            if isinstance(statement, ast.Assign):
                for target, value in _pairs(statement):
                    place = _place(target)
                    names = [value] if len(statement.targets) == 1 else [value, *statement.targets]
                    for one in names if place is not None else ():
                        if isinstance(one, ast.Name) and one.id in self._locals:
                            found.setdefault(one.id, []).append((statement, str(place)))
        return found


class _AsPlaces(ast.NodeTransformer):
    """Local variables as the places whose values they have."""

    def __init__(self, places: dict[str, str]) -> None:
        self._places = places

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(self._places.get(node.id, node.id), node.ctx)

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        return node


def _bodies(node: Any) -> Iterator[list[Any]]:
    """The lists of statements of a node."""
    for name in ("body", "orelse", "finalbody"):
        if isinstance(body := getattr(node, name, None), list):
            yield body


def _pairs(statement: ast.Assign) -> Iterator[tuple[Any, Any]]:
    """Targets and values of an assignment, tuples by their elements."""
    for target in statement.targets:
        if isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple) and len(target.elts) == len(
                statement.value.elts):
            yield from zip(target.elts, statement.value.elts, strict=True)
        else:
            yield target, statement.value


def _place(node: Any) -> str | None:
    """An attribute or element, as a text; None for others."""
    match node:
        case ast.Attribute():
            return text_of(node)
        case ast.Subscript():
            return f"{text_of(node.value)}[{text_of(node.slice)}]"
        case ast.Call(func=ast.Attribute(value=value, attr="get"), args=[key, *_]):
            return f"{text_of(value)}[{text_of(key)}]"
        case ast.BoolOp(op=ast.Or(), values=[ast.Attribute() as first, _]):
            return text_of(first)
    return None


def _value(store: Store) -> str:
    value = getattr(store.statement, "value", None)
    return "" if value is None else ast.unparse(value)
