"""The full names of everything that a file's code refers to, however it was imported: for tests that only one file
does what it is responsible for."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from tests.sources import ROOT, nodes, walk

_SAME = {"io": "", "_io": "", "builtins": "", "posix": "os", "torch.multiprocessing": "multiprocessing",
         "concurrent.futures.process": "concurrent.futures", "torch.distributed.distributed_c10d": "torch.distributed",
         "torch._C._distributed_c10d": "torch.distributed", "numpy.lib.npyio": "numpy", "safetensors.torch":
         "safetensors", "_pickle": "pickle"}
"""Modules that contain the names of another module."""
_NAMED = {ast.Name, ast.Attribute, ast.Call, ast.Subscript}
_REFERRING = _NAMED | {ast.ImportFrom}


@dataclass(frozen=True)
class Reference:
    """name: the full name (`subprocess.run`); for an attribute of anything but a module, a dot and the attribute
    (`.read_text`). call: the call, if it is called."""

    name: str
    call: ast.Call | None


@cache
def references_of_files() -> dict[str, list[Reference]]:
    """References of every file of the package, by its path in the package."""
    return {path.relative_to(ROOT).as_posix(): list(_references(inside)) for path, inside in nodes().items()}


def references(code: str) -> Iterator[Reference]:
    """All references of a module, except those in type annotations."""
    return _references(walk(ast.parse(code)))


def _references(inside: list[ast.AST]) -> Iterator[Reference]:
    names, skipped = _imported(inside), {id(inner) for outer in _annotations(inside) for inner in walk(outer)}
    called = {id(node.func): node for node in inside if isinstance(node, ast.Call)}
    for node in inside:
        if type(node) not in _REFERRING or id(node) in skipped or isinstance(
                getattr(node, "ctx", None), (ast.Store, ast.Del)):
            continue
        if isinstance(node, ast.ImportFrom):
            yield from (Reference(f"{node.module}.*", None) for alias in node.names if alias.name == "*")
        elif name := _name(node, names):
            yield Reference(name, called.get(id(node)))
        elif isinstance(node, ast.Attribute):
            yield Reference(f".{node.attr}", called.get(id(node)))
        elif isinstance(node, ast.Call) and (attribute := _attribute(node, names)):
            yield Reference(f".{attribute}", called.get(id(node)))


def _annotations(inside: list[ast.AST]) -> Iterator[ast.AST]:
    for node in inside:
        if isinstance(node, ast.arg | ast.AnnAssign):
            found = node.annotation
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found = node.returns
        else:
            continue
        if found is not None:
            yield found


def _imported(nodes: list[ast.AST]) -> dict[str, str]:
    """Name in the file -> full name, for everything that is imported anywhere in the file, and for its aliases."""
    found: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.asname or alias.name.partition(".")[0]:
                      alias.name if alias.asname else alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found.setdefault(node.targets[0].id, _name(node.value, found))
    return found


def _name(node: ast.AST, names: dict[str, str]) -> str:
    """The full name of an expression; empty if it has none."""
    if type(node) not in _NAMED:
        return ""
    found = ""
    if isinstance(node, ast.Name):
        found = names.get(node.id, node.id if hasattr(builtins, node.id) else "")
    elif isinstance(node, ast.Attribute) and (base := _name(node.value, names)):
        found = f"{base}.{node.attr}"
    elif isinstance(node, ast.Call):
        function = _name(node.func, names)
        if (attribute := _attribute(node, names)) and (base := _name(node.args[0], names)):
            found = f"{base}.{attribute}"
        elif function in ("importlib.import_module", "__import__"):
            found = _text(node.args[:1])
    elif isinstance(node, ast.Subscript) and (key := _text([node.slice])):
        base = _name(node.value, names)
        found = key if base == "sys.modules" else f"{base.removesuffix('.__dict__')}.{key}" if base.endswith(
            ".__dict__") else ""
    module, _, last = found.rpartition(".")
    return f"{_SAME[module]}.{last}".removeprefix(".") if module in _SAME else found


def _attribute(node: ast.Call, names: dict[str, str]) -> str:
    """The attribute that a call of getattr gets; empty for other calls."""
    return _text(node.args[1:2]) if isinstance(node.func, ast.Name) and node.func.id == "getattr" else ""


def _text(nodes: list[ast.expr]) -> str:
    value = nodes[0].value if nodes and isinstance(nodes[0], ast.Constant) else None
    return value if isinstance(value, str) else ""
