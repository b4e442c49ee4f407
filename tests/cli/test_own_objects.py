"""Families, tasks and corpora that a recipe names as module:name: found, called with options, and refused by name."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ranvier.checkpoint.hf.export_model import model_of
from ranvier.cli.check import check
from ranvier.config import read
from ranvier.config.named_code import names_corpus
from ranvier.config.named_object import is_object_name, load_object, parse_options
from ranvier.config.run import Data, Elastic, Run, Transformer
from ranvier.data.corpus import open_corpus
from ranvier.data.prepare import prepare
from ranvier.mesh import Mesh
from ranvier.models import families
from tests.errors import raises, reports

OWN = '''
import torch
from torch import nn
from ranvier.config.task_form import TaskForm
from ranvier.data.class_numbers import Accuracy
from ranvier.data.corpus import Document
from ranvier.data.task import Prepared, Task
from ranvier.errors import DataError
from ranvier.models.family import ModelFacts, ModelFamily
from ranvier.block import Model


class Line(ModelFamily):
    def __init__(self, width=4, fault=None, layers=0, tied=False):
        self.width, self.fault, self.layers, self.is_tied = width, fault, layers, tied

    def problems(self, settings, head):
        return 1 / 0 if self.fault == "problems" else []

    def model(self, settings, head, *, dtype):
        if self.fault == "model":
            raise ValueError("no such\\nmodel")
        if self.fault == "list":
            return [nn.Linear(1, 1)]
        def block():
            if self.fault == "block":
                raise IndexError("no block")
            return nn.Linear(4, 4, dtype=dtype)
        names = [f"part{number}" for number in range(self.layers or 3)]
        layers = tuple((name,) for name in names) if self.layers else ()
        tied = (("part0.bias", f"{names[-1]}.bias"),) if self.is_tied else ()
        return Model(blocks={name: block for name in [*names, "last"]}, layers=layers, tied=tied,
                     loss=lambda y, t: (y.sum() * 0 + (t * 0).sum(), len(t)))

    def sample(self, settings, head, count):
        if self.fault:
            raise KeyError(self.fault)
        return torch.zeros(count, 4), torch.zeros(count, dtype=torch.int64)

    def flops_per_sample(self, settings, *, recomputed=False):
        return {}[self.fault] if self.fault == "flops" else 192.0

    def describe(self, settings):
        return {}[self.fault] if self.fault == "describe" else ModelFacts(text=f"line {self.width}", tokens=1)


class Half:
    def problems(self): ...
    def model(self): ...


class Points(Task):
    form = TaskForm(family="own:Line", head="points", targets="points", samples="points")

    def __init__(self, fault=None):
        self.fault = fault

    def problems(self, run, *, elsewhere):
        if self.fault == "told":
            return [DataError("is told", where="data.train", remedy="Mend it.")]
        return 1 / 0 if self.fault == "problems" else []

    def warnings(self, run):
        return 1 / 0 if self.fault == "warnings" else []

    def prepare(self, run, progress):
        return 1 / 0 if self.fault == "prepare" else None


class Formless(Points):
    form = "points"


class Pages:
    fingerprint = "pages"

    def read(self, max_bytes):
        yield Document("page", "words and words")


class Torn(Pages):
    def read(self, max_bytes):
        yield Document("page", "words")
        raise OSError("torn")


class Loose(Pages):
    def read(self, max_bytes):
        yield "words"


line = Line()
def raises(): raise KeyError("mine")
def nothing(): pass
'''


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder with the module `own`, in which the command is started."""
    load_object.cache_clear()
    families._outline.cache_clear()
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "broken.py").write_text("import json\nx = 1 +\n")
    (tmp_path / "needy.py").write_text("import no_such_thing\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in ("own", "broken", "needy"):
        sys.modules.pop(name, None)
    load_object.cache_clear()
    families._outline.cache_clear()


def run_of(family="auto", task="own:Points", options=(), task_options=(), **changed):
    return replace(Run(model=Transformer(family=family, options=options, num_layers=3),
                       data=Data(task=task, options=task_options)), **changed)


def told(run):
    """All problems, once each."""
    found = [str(problem) for problem in check(run).problems]
    assert len(set(found)) == len(found), found
    return found


def test_a_family_and_a_task_of_ones_own_are_checked(own):
    report = check(run_of(mesh=Mesh(pipe=2), options=("width=7",), family="own:Line"))
    assert report.problems == () and [row.blocks for row in report.stages.rows] == [
        ("part0", "part1"), ("part2", "last")]
    run = run_of(options=("width=7",), family="own:Line")
    assert families.text(run) == "line 7" and families.num_blocks(run) == 4 and families.head_of(run) == "points"
    assert check(run_of(family="own:line")).problems == ()
    assert families.family_of(run_of()) is families.family_of(run_of())


@pytest.mark.parametrize(("setting", "value", "error"), [
    ("model.family", "nowhere:x", ("module-not-found",)),
    ("model.family", "broken:x", ("module-not-importable", 2)),
    ("model.family", "needy:x", ("module-not-importable", 1)),
    ("model.family", "own:Lines", ("name-not-in-module",)),
    ("model.family", "own:zzz", ("name-not-in-module",)),
    ("model.family", "own:Half", ("object-lacks-attribute",)),
    ("model.family", "own:nothing", ("object-lacks-attribute",)),
    ("model.family", "own:raises", ("object-raised",)),
    ("data.task", "nowhere:x", ("module-not-found",)), ("data.task", "own:Half", ("object-lacks-attribute",)),
    ("data.task", "own:Formless", ("task-form-type",))])
def test_what_is_no_such_object_is_named(own, setting, value, error):
    run = run_of(**{"family" if setting == "model.family" else "task": value})
    (problem,) = check(run).problems
    assert problem.where == setting and problem.value == value
    with raises(*error):
        raise problem


@pytest.mark.parametrize(("fault", "code"), [
    ("problems", "object-raised"),
    ("model", "object-raised"),
    ("list", "family-model-type"),
    ("sample", "object-raised")])
def test_a_family_that_raises_is_named(own, fault, code):
    (problem,) = check(run_of("own:Line", options=(f"fault={fault}",))).problems
    with raises(code):
        raise problem


@pytest.mark.parametrize("fault", ["flops", "describe"])
def test_a_family_that_raises_later_is_named(own, fault):
    run = run_of("own:Line", options=(f"fault={fault}",))
    asked = families.flops_per_sample if fault == "flops" else families.text
    with raises("object-raised"):
        asked(run)


@pytest.mark.parametrize(("options", "code"), [
    (("width",), "malformed-option"), (("a b=1",), "malformed-option"),
    (("width=1", "width=2"), "malformed-option"), (("depth=1",), "object-raised")])
def test_options_that_cannot_be(own, options, code):
    with raises(code):
        families.family_of(run_of("own:Line", options=options))


def test_an_object_takes_no_options(own):
    with raises("object-without-options"):
        families.family_of(run_of("own:line", options=("width=1",)))


def test_options_are_read_as_toml():
    texts = ("a=5", "b = 0.5", "c=true", 'd="x y"', "e=[1]", "f=gelu", "g=x=y", "h=")
    assert parse_options(texts, "model.family") == {
        "a": 5, "b": 0.5, "c": True, "d": "x y", "e": [1], "f": "gelu", "g": "x=y", "h": ""}


def test_layers_agree_with_the_settings(own):
    with reports("num-layers-differ"):
        found = told(run_of("own:Line", options=("layers=2",)))
    assert found == [
        "model.num-layers: is not the number of layers that own:Line declares, 2 (got 3). Set --model.num-layers 2, or "
        "declare as many in Model(layers=...) as settings.num_layers."]


def test_freezing_needs_layers(own):
    freeze = {"elastic": Elastic(freeze="cap", every=1)}
    with reports("freezing-needs-layers"):
        assert "own:Line" in told(run_of("own:Line", **freeze))[0]
    for options in (("layers=3",), ("layers=3", "tied=true")):
        assert told(run_of("own:Line", options=options, **freeze)) == []


@pytest.mark.parametrize(("fault", "code", "fact"), [
    ("problems", "object-raised", "`problems`: ZeroDivisionError"), ("told", "error", "data.train: is told"),
    ("prepare", "object-raised", "`prepare`: ZeroDivisionError"), ("none", "task-prepare-result", "NoneType")])
def test_a_task_that_raises_is_named(own, fault, code, fact):
    with raises(code, fact):
        prepare(run_of(task_options=(f"fault={fault}",)))


def test_warnings_of_a_task_that_raise_are_named(own):
    with raises("object-raised"):
        check(run_of(task_options=("fault=warnings",)))


def test_pretrained_weights_are_of_a_shipped_family(own):
    run = run_of("own:Line")
    (problem,) = check(replace(run, model=replace(run.model, pretrained="minilm"))).problems
    with raises("family-without-pretrained"):
        raise problem


def test_a_shipped_family_says_which_heads_it_has(own):
    with reports("family-without-head"):
        assert "'points'" in told(run_of("gpt"))[0]


@pytest.mark.parametrize(("name", "code"), [
    ("own:Half", "object-lacks-attribute"), ("own:Torn", "object-raised"),
    ("own:Loose", "corpus-read-result"), ("own:Nothing", "name-not-in-module")])
def test_a_corpus_that_is_none_is_named(own, name, code):
    with raises(code):
        list(open_corpus(name, own, print).documents(1000))


def test_a_corpus_of_ones_own(own):
    corpus = open_corpus("own:Pages", own, print)
    assert [document.text for document in corpus.documents(5)] == ["words"] and corpus.is_path
    assert not names_corpus("imdb:plain_text"), "a data set of Hugging Face"
    Path("own:Pages").write_text("text of a file")
    assert not names_corpus("own:Pages"), "an existing file takes precedence"


def test_only_module_and_name_are_an_object():
    assert all(map(is_object_name, ("a:b", "a.b.c:D", "_a:_b")))
    assert not any(map(is_object_name, ("a", "a:", ":b", "a:b:c", "a-b:c", "a/b:c", "a..b:c", "1a:b")))


@pytest.mark.parametrize("name", ["gptt", "a b:c", "a:b:c", ":x"])
def test_other_texts_are_refused(name):
    found = read.merge([read.Layer(origin="flag", values={"model.family": name, "data.task": name}, is_text=True)])
    family, task = (problem.what for problem in found.problems)
    assert "transformers" in family and "reward" in task
    assert all(what.endswith(", or module:function") for what in (family, task))


@pytest.mark.parametrize("section", [{"model": {"family": "own:raises"}}, {"data": {"task": "own:raises"}}])
def test_a_checkpoint_names_no_code_that_is_run(own, section):
    class Saved:
        folder = own
        manifest = type("Manifest", (), {"about": json.loads(json.dumps({"run": {"model": {}, **section}}))})

    with raises("export-of-own-model"):
        model_of(Saved)
    assert "own" not in sys.modules
