"""The order of the rooms: no import upwards, no import cycles, and few files at the root; see docs/architecture.md.

Imports inside functions and under TYPE_CHECKING also count: a named type is a dependency.
"""

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.sources import ROOT, nodes

ROOMS = ("errors", "arguments", "mesh", "keyed_random", "layout", "sent_values", "block", "originals", "system",
         "config", "precision", "schedule", "cost", "comm", "world", "launch", "tensor", "optim", "plan", "pictures",
         "pipeline", "models", "data", "checkpoint", "inference", "elastic", "planner", "train", "testing", "cli")
"""A room imports only from the rooms before it."""
LOOSE = {"__init__", "__main__", "arguments", "block", "errors", "keyed_random", "layout", "mesh", "precision",
         "sent_values", "world"}


@cache
def modules():
    """Every file of the package by its module name without `ranvier.`; a package has its own name."""
    found = {}
    for path in nodes():
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    found.pop("")
    found.pop("__main__")
    return found


@cache
def imported(name, *, for_types=True):
    """The modules of the package that a file imports anywhere. for_types: also under TYPE_CHECKING."""
    names, inside = set(), nodes()[modules()[name]]
    skipped = set() if for_types else {
        id(node) for top in inside[0].body if isinstance(top, ast.If) and "TYPE_CHECKING" in ast.dump(top.test)
        for node in ast.walk(top)}
    for node in inside:
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    ours = {one.removeprefix("ranvier.") for one in names if one.startswith("ranvier.")}
    return {found for found in map(_module, ours) if found not in (None, name)}


def _module(name):
    """The module that `name` is or is in; None for a name of the package itself."""
    while name and name not in modules():
        name = name.rpartition(".")[0]
    return name or None


def place(name):
    """A module's room; None if it is in no room."""
    room = name.partition(".")[0]
    return room if room in ROOMS else None


def test_no_import_upwards():
    assert [name for name in modules() if place(name) is None] == [], "are in no room"
    upwards = [f"{name} imports {other}" for name in modules() for other in sorted(imported(name))
               if ROOMS.index(place(other)) > ROOMS.index(place(name))]
    assert not upwards, "\n".join(upwards)


def test_no_circle_of_files():
    """Only imports that run count: a file may name a type of a file that calls it."""
    try:
        TopologicalSorter({name: imported(name, for_types=False) for name in modules()}).prepare()
    except CycleError as circle:
        pytest.fail(" -> ".join(circle.args[1]))


def test_few_files_at_the_root():
    assert {path.stem for path in ROOT.glob("*.py")} <= LOOSE
