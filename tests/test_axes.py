"""Which files name an axis: callers ask a mesh for roles, so that a new axis does not change them.

Axes are named in `mesh`, in the tensor layers that define a scheme, in the settings, in the command, and in launch's
public arguments. Other files that name an axis are counted here.
"""

import ast
import re

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import ranvier
from ranvier.block import as_model
from ranvier.config.other_mesh import fallback_meshes, refit, resized
from ranvier.config.resolve import ResolvedRun
from ranvier.config.rules import problems
from ranvier.cost.cluster_files import load_cluster
from ranvier.data.shard_loader import shard_loader
from ranvier.elastic.inputs import ElasticRules, PresentMesh
from ranvier.elastic.mesh_candidates import mesh_candidates
from ranvier.errors import ConfigError
from ranvier.layout import Layout
from ranvier.mesh import AXES, STANDARD_AXES, Axis, Mesh
from ranvier.pipeline.engine import Engine
from ranvier.plan.plan import make
from ranvier.planner.candidates import variants
from ranvier.planner.search import search
from ranvier.testing.ranks import run_ranks
from tests.sources import ROOT, nodes

NAMED_THERE = ("mesh.py", "tensor/", "config/", "cli/", "launch/start.py", "launch/run_function.py")
MOST_FILES = 16
"""Maximum number of other files that name an axis."""
_ON_A_MESH = re.compile(r"(mesh|coordinates|\bat|candidate|situation|trial|change)(\(.*\))?$")
"""Expressions whose attribute `data` is an axis; it is the only axis name that other things have too."""
_SIZES = {"Mesh", "at", "resized", "with_sizes"}
"""Functions whose keywords are axes."""
_NAMES = {"group", "groups", "place_groups", "replace"}
"""Functions whose positional arguments are axes."""


def names_an_axis(inside):
    """Lines of a file in which an attribute, a string or a keyword names an axis."""
    docstrings = {id(node.value) for node in inside if isinstance(node, ast.Expr)}
    found = set()
    for node in inside:
        if isinstance(node, ast.Attribute) and node.attr in AXES:
            receiver = ast.unparse(node.value)
            if (node.attr in AXES[1:] and receiver != "os") or (node.attr == AXES[0] and _ON_A_MESH.search(receiver)):
                found.add(node.lineno)
        elif isinstance(node, ast.ClassDef):
            found |= {field.lineno for field in node.body if isinstance(field, ast.AnnAssign)
                      and isinstance(field.target, ast.Name) and field.target.id in AXES[1:]}
        elif isinstance(node, ast.Constant) and node.value in AXES[1:] and id(node) not in docstrings:
            found.add(node.lineno)
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(isinstance(side, ast.Constant) and side.value == AXES[0] for side in sides) and "axis" in map(
                    ast.unparse, sides):
                found.add(node.lineno)
        elif isinstance(node, ast.Call):
            names = {keyword.arg for keyword in node.keywords}
            strings = {one.value for one in node.args if isinstance(one, ast.Constant)}
            if not names.union(strings).intersection(AXES):
                continue
            function = ast.unparse(node.func).rpartition(".")[2]
            of_mesh = function in _SIZES or (node.args and _ON_A_MESH.search(ast.unparse(node.args[0])))
            if names & {*AXES[1:]} or (AXES[0] in names and of_mesh) or (AXES[0] in strings and function in _NAMES):
                found.add(node.lineno)
    return sorted(found)


def files_that_name_an_axis():
    """Path in the package -> the lines that name an axis."""
    found = {}
    for path, inside in nodes().items():
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith(NAMED_THERE) and (lines := names_an_axis(inside)):
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
axis != "data", kind == "data"
'''
    assert names_an_axis(list(ast.walk(ast.parse(source)))) == [3, 4, 5, 6, 7, 8, 9]


# --- an axis at run time ---------------------------------------------------------------------------------------------

CONTEXT = Axis("context", "contexts", splits_sequence=True, replicates_parameters=True)
AXES_WITH_CONTEXT = (*STANDARD_AXES[:1], CONTEXT, *STANDARD_AXES[1:])


def test_questions_by_role_count_another_axis():
    mesh = Mesh(axes=AXES_WITH_CONTEXT, data=2, context=3, pipe=2, row=2)
    assert mesh.size == 24 and mesh.num_replicas == 6 and mesh.batch_shares == 2 and mesh.pipeline_size == 2
    assert mesh.over(splits_sequence=True) == ("context",) and mesh.replica_axes == ("data", "context")
    assert [mesh.rank(mesh.coordinates(rank)) for rank in range(24)] == list(range(24))
    for rank in range(24):
        at = mesh.coordinates(rank)
        assert mesh.place(replica=at.replica, pipeline_rank=at.pipeline_rank, position=at.position) == at
    assert mesh.group(0, *mesh.replica_axes) == (0, 4, 8, 12, 16, 20)


def test_names_that_are_no_axes():
    with pytest.raises(KeyError, match="expert is not an axis: data, pipe"):
        Mesh(data=2).coordinates(1)["expert"]
    with pytest.raises(TypeError, match="context is not an axis"):
        Mesh(context=2)
    with pytest.raises(TypeError, match="size is a name that every mesh has"):
        Mesh(axes=(*STANDARD_AXES, Axis("size", "sizes")))


def _present():
    return PresentMesh(mesh=UNKNOWN, boundaries=(), frozen=0, cached_blocks=0, global_size=8, layers=(("a",),),
                       block_names=("a",))


UNKNOWN = Mesh(axes=AXES_WITH_CONTEXT, context=2)
RUN = ResolvedRun(mesh=UNKNOWN)
MODEL = nn.Sequential(nn.Linear(2, 2))


@pytest.mark.parametrize("enter", [
    pytest.param(lambda: ranvier.start(UNKNOWN), id="start"),
    pytest.param(lambda: run_ranks(lambda world: Engine(MODEL, world, mesh=UNKNOWN, loss=mse_loss), 2), id="engine"),
    pytest.param(lambda: make(as_model(MODEL, mse_loss), UNKNOWN), id="plan"),
    pytest.param(lambda: _raise(problems(RUN, num_blocks=None)), id="settings"),
    pytest.param(lambda: refit(RUN, 2, "torchrun", lambda run: []), id="resume"),
    pytest.param(lambda: list(fallback_meshes(UNKNOWN, 4)), id="fallback"),
    pytest.param(lambda: resized(UNKNOWN, data=2), id="change"),
    pytest.param(lambda: mesh_candidates(ElasticRules(RUN), _present(), 0, None, num_ranks=2, cached=0),
                 id="candidates"),
    pytest.param(lambda: list(variants(RUN, load_cluster("a100"), 2)), id="planner"),
    pytest.param(lambda: search(RUN, load_cluster("a100"), 2), id="search"),
    pytest.param(lambda: Layout(mesh=UNKNOWN, num_blocks=1, boundaries=(), parameters=()), id="layout, checkpoint"),
    pytest.param(lambda: run_ranks(lambda world: shard_loader(_loader(), world, microbatch_size=2, mesh=UNKNOWN), 2),
                 id="data")])
def test_ranks_along_another_axis_are_refused_by_name(enter):
    with pytest.raises(ConfigError) as caught:
        enter()
    assert (caught.value.code, caught.value.value) == ("mesh-axis-unknown", 2)
    assert caught.value.where in ("mesh.context", "Mesh(context=...)"), "as the user writes it"


def _raise(found):
    raise next(iter(found))


def _loader():
    return DataLoader(TensorDataset(torch.zeros(4, 2), torch.zeros(4, 2)), batch_size=2)
