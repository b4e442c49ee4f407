"""`check_split` and `ranvier check --split`: agreement, differences, refusals, and sizes that cannot be divided."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from ranvier.cli.main import run_command
from ranvier.layout import Split
from ranvier.pipeline.microbatch import Microbatch
from ranvier.tensor import layers
from ranvier.testing import check_split
from tests.errors import raises, reports

IDS = torch.randint(0, 20, (3, 6), generator=torch.Generator().manual_seed(0))
EXAMPLES = Path(__file__).parents[2] / "examples"


class Mixed(nn.Module):
    """Each sample depends on all others of its microbatch, of which each row has only a part."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = layers.LayerNorm(12)

    def forward(self, x):
        return self.norm(x) - x.mean(0)


class Wrong(nn.Module):
    """A user's own layer, whose split form has another gradient."""

    def splits(self, settings):
        return {}

    def divisibility_constraints(self, mesh):
        return ()

    def split(self, mesh):
        return Twice()

    def forward(self, x):
        return x * 1


class Twice(nn.Module):
    def forward(self, x):
        return x + (x - x.detach())


def bare(embedding=12):
    return layers.Embedding(20, embedding)


def floats():
    """(model, sample) with floats as inputs, so that inputs have gradients."""
    return nn.Sequential(layers.Linear(12, 24, stationary="output"), nn.SiLU(),
                         layers.Linear(24, 12, stationary="input")), torch.randn(4, 6, 12)


def agreeing():
    return [bare(), layers.RMSNorm(12), layers.ClassifierHead(12, 2)], Microbatch(IDS, IDS[:, 0] % 2), \
        lambda y, t: (nn.functional.cross_entropy(y, t, reduction="sum"), len(t))


def differing():
    return [bare(), Mixed()], IDS


def number():
    return 3


def test_what_agrees():
    model, sample, loss = agreeing()
    before = [parameter.clone() for block in model for parameter in block.parameters()]
    outcomes = check_split(model, sample, loss=loss)
    assert [(one.row, one.col, one.scheme) for one in outcomes] == [
        (row, col, scheme) for row, col in ((1, 2), (2, 1), (2, 2), (2, 3))
        for scheme in ("stationary", "summa", "megatron", "stationary-sequence", "megatron-sequence")
        if (row == 1 or scheme[0] == "s") and (col > 1 or "sequence" not in scheme)]
    assert all(one.status == "agrees" and one.error < 1e-12 and one.tensor for one in outcomes)
    assert all(torch.equal(one, other) for one, other in zip(
        before, (parameter for block in model for parameter in block.parameters()), strict=True))


def test_gradients_of_inputs():
    model, sample = floats()
    assert all(one.status == "agrees" for one in check_split(model, sample))


def test_what_differs_is_named():
    with raises("split-differs", 2, 1, 8, 13) as caught:
        check_split(*differing())
    assert {one.status for one in caught.value.outcomes if one.row == 1} == {"agrees"}


class Forgetful(Wrong):
    """Its split form has lost a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(12))

    def splits(self, settings):
        return {"weight": Split(((),), summed=("row", "col"))}


def test_a_parameter_that_is_lost_is_named():
    with reports("split-parameter-missing"), raises("split-refused", "1.weight"):
        check_split([bare(), Forgetful()], IDS, meshes=[(1, 2)])


def test_a_gradient_that_differs_is_named():
    with raises("split-differs", "0.weight"):
        check_split([bare(), Wrong()], IDS, meshes=[(2, 2)])


def test_sizes_that_no_mesh_divides():
    outcomes = check_split([bare(8), layers.LayerNorm(8)], IDS)
    assert {(one.row, one.col): one.status for one in outcomes}[2, 3] == "cannot be divided"
    with raises("split-refused", 0, "mesh.col", 2):
        check_split([bare(7), layers.LayerNorm(7)], IDS, meshes=[(1, 2)], schemes=["stationary"])


@pytest.mark.parametrize(("model", "sample", "loss", "code"), [
    ([bare()], Microbatch(None, None), None, "sample-without-inputs"),
    ([bare()], IDS, lambda y, t: (y.sum(), 1), "sample-without-targets"),
    ([layers.LayerNorm(12)], torch.full((2, 3, 12), torch.inf), None, "sample-not-finite")],
    ids=["inputs", "targets", "infinite"])
def test_samples_that_do_not_fit(model, sample, loss, code):
    with raises(code):
        check_split(model, sample, loss=loss)


def command(capsys, *arguments: str) -> tuple[int, str, str]:
    code = run_command(["check", *arguments])
    return code, *capsys.readouterr()


def test_command(capsys):
    code, out, err = command(capsys, "--split", f"{__name__}:agreeing")
    assert (code, err, len(out.splitlines())) == (0, "", 13) and "2 x 3  summa                agrees: " in out
    code, out, err = command(capsys, "--split", f"{__name__}:differing", "--json")
    assert code == 2 and len(err.splitlines()) == 1 and "differs from one rank's" in err
    assert {one["status"] for one in json.loads(out)["split"]} == {"agrees", "differs"}


@pytest.mark.parametrize(("target", "error", "text"), [
    (f"{__name__}:number", "split-function-result", "'int'"),
    (f"{__name__}:missing", "name-not-in-module", "missing"),
    (f"{__name__}:command", "split-function-raised", "TypeError"),
    ("nowhere:f", "module-not-found", "nowhere")])
def test_functions_that_give_no_model(capsys, target, error, text):
    with reports(error):
        code, out, err = command(capsys, "--split", target)
    assert (code, out) == (2, "") and text in err


def test_neither_a_recipe_nor_a_model(capsys):
    code, _, err = command(capsys)
    assert code == 2 and "Missing argument 'RECIPE'" in err


def test_the_example(capsys, monkeypatch):
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.syspath_prepend(EXAMPLES)
    code, out, err = command(capsys, "--split", "own_layers:sample")
    assert (code, err) == (0, "") and out.count("agrees") == 10, out + err


class Cuts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = layers.Linear(12, 24, stationary="output")

    def forward(self, x):
        return layers.local_map(lambda own: own[..., 5:], self.up(x))


def test_a_result_that_is_not_one_columns_shard_is_named():
    with reports("split-parameter-shape"), raises("split-refused", "local_map"):
        check_split([bare(), Cuts()], IDS, meshes=[(1, 2)], schemes=["stationary"])
