"""Who names an axis: callers ask a mesh by roles, so that a new axis does not change them.

An axis stands by name in `mesh`, in the tensor layers that define a scheme, in the settings, in the command, and in
launch's public arguments. Elsewhere a file that names one is counted here.
"""

import ast
import re
from pathlib import Path

import ranvier
from ranvier.mesh import AXES

ROOT = Path(ranvier.__file__).parent
NAMED_THERE = ("mesh.py", "tensor/", "config/", "cli/", "launch/start.py", "launch/run_function.py")
MOST_FILES = 22
"""Files elsewhere that name an axis, at most."""
_ON_A_MESH = re.compile(r"(mesh|coordinates|\bat|candidate|situation|trial|change)(\(.*\))?$")
"""Expressions whose attribute `data` is an axis: it is the only name of an axis that others have, too."""
_SIZES = {"Mesh", "at", "resized", "with_sizes"}
"""Functions whose keywords are axes."""
_NAMES = {"group", "groups", "placed", "replace"}
"""Functions whose positional arguments are axes."""


def names_an_axis(tree):
    """Lines of a file in which an attribute, a string or a keyword names an axis."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            receiver = ast.unparse(node.value)
            if (node.attr in AXES[1:] and receiver != "os") or (node.attr == AXES[0] and _ON_A_MESH.search(receiver)):
                found.add(node.lineno)
        elif isinstance(node, ast.ClassDef):
            found |= {field.lineno for field in node.body if isinstance(field, ast.AnnAssign)
                      and isinstance(field.target, ast.Name) and field.target.id in AXES[1:]}
        elif isinstance(node, ast.Constant) and node.value in AXES[1:] and id(node) not in docstrings:
            found.add(node.lineno)
        elif isinstance(node, ast.Call):
            names = {keyword.arg for keyword in node.keywords}
            function = ast.unparse(node.func).rpartition(".")[2]
            strings = {one.value for one in node.args if isinstance(one, ast.Constant)}
            of_mesh = function in _SIZES or (node.args and _ON_A_MESH.search(ast.unparse(node.args[0])))
            if names & {*AXES[1:]} or (AXES[0] in names and of_mesh) or (AXES[0] in strings and function in _NAMES):
                found.add(node.lineno)
    return sorted(found)


def files_that_name_an_axis():
    """By their path in the package, with the lines."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith(NAMED_THERE) and (lines := names_an_axis(ast.parse(path.read_text()))):
            found[name] = lines
    return found


def test_few_files_name_an_axis():
    found = files_that_name_an_axis()
    assert len(found) <= MOST_FILES, "\n".join(f"{name}: {lines}" for name, lines in found.items())


def test_what_counts():
    source = '''
"""row"""
mesh.data, run.data, tensor.data
mesh.coordinates(rank).data
entry.pipe, os.pipe()
Mesh(data=2), prepare(data=2)
mesh.groups("data"), run["data"]
axis == "col"
'''
    assert names_an_axis(ast.parse(source)) == [3, 4, 5, 6, 7, 8]
