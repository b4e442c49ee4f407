"""A user's own update rules: checked, refused if they are not rules, and used for training."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from ranvier.config import effects
from ranvier.config.resolve import resolve
from ranvier.config.run import Optim, Run
from ranvier.layout import FlatGradient, Layout, Parameter, flat_order
from ranvier.mesh import Mesh
from ranvier.optim.adafactor import Adafactor
from ranvier.optim.lion import Lion
from ranvier.optim.muon import Muon
from ranvier.optim.rules import SGD, AdamW, rules_of
from ranvier.optim.tensor_update import TensorUpdate
from ranvier.plan.plan import whole_parameters
from ranvier.planner.problems import problems
from ranvier.testing.rules import check_rule
from tests.checkpoint.anywhere import on, train
from tests.errors import raises


@pytest.mark.parametrize("rule", [AdamW(Optim()), SGD(Optim()), Lion(), Muon(), Muon(scale="original"), Adafactor()],
                         ids=lambda rule: type(rule).__name__)
def test_our_rules_conform(rule):
    check_rule(rule)


def test_the_page_names_methods_that_a_tensor_update_has():
    page = (Path(__file__).parents[2] / "docs" / "optimizers.md").read_text()
    named = set(re.findall(r"`tensor\.(\w+)\(", page))
    assert named == {"gather", "part", "sum"} and all(hasattr(TensorUpdate, name) for name in named)


class Scaled(Lion):
    """Its step depends on neighbouring elements."""

    def update(self, parameters, gradients, states, **settings):
        super().update(parameters, gradients / gradients.norm() + gradients.mean(), states, **settings)


class Elsewhere(Lion):
    def update(self, parameters, gradients, states, **settings):
        parameters = parameters - gradients


class Greedy(Lion):
    def update(self, parameters, gradients, states, **settings):
        gradients.mul_(2)
        super().update(parameters, gradients, states, **settings)


class Master(Lion):
    states = ("master",)


class Local(Adafactor):
    """Ignores that a tensor has other parts."""

    def update_tensors(self, tensors):
        super().update_tensors({name: replace(one, split=None) for name, one in tensors.items()})


class Picky(Muon):
    def applies_to(self, name, shape, *, in_layer):
        return False


@pytest.mark.parametrize(("rule", "message"), [
    (Scaled(), "momentum in pieces that end at|parameters in pieces that end at"),
    (Elsewhere(), "no parameter has changed"), (Greedy(), "gradients were changed"),
    (Picky(), "applies_to refuses every tensor")])
def test_faults_of_rules_are_named(rule, message):
    with pytest.raises(AssertionError, match=message):
        check_rule(rule)


def test_a_rule_that_forgets_other_parts_is_found():
    with pytest.raises((AssertionError, RuntimeError)):
        check_rule(Local())


@pytest.fixture
def named(monkeypatch):
    """A module with the rules of this file."""
    module = ModuleType("my_rules")
    module.__dict__.update(Lion=Lion, Master=Master, Picky=Picky, Muon=Muon, nothing=object(), number=lambda: 3)
    monkeypatch.setitem(sys.modules, "my_rules", module)
    return module


@pytest.mark.parametrize(("optim", "code"), [
    (Optim(algorithm="my_rules:nothing"), "update-rule-lacks-method"),
    (Optim(algorithm="my_rules:Lino"), "name-not-in-module"),
    (Optim(algorithm="my_rules:Master"), "update-rule-state-name"),
    (Optim(algorithm="my_rules:Lion", options=("beta=1",)), "object-raised"),
    (Optim(algorithm="no_such_module:Lion"), "module-not-found")])
def test_what_is_no_rule_is_refused(named, optim, code):
    with raises(code):
        rules_of(optim)
    run = resolve(Run(optim=optim))
    assert any("optim." in problem.where for problem in problems(run)), "check lists it"


def test_an_algorithm_that_does_not_exist():
    with raises("malformed-argument"):
        Optim(algorithm="adam")


def test_a_rule_by_name_trains_like_the_shipped_one(named):
    """For an elementwise rule and for one of whole tensors; options are keyword arguments."""
    def weights(engine):
        train(engine, 2)
        return [value.detach().clone() for value in engine.named_parameters().values()]

    for ours, theirs in (({"algorithm": "lion", "betas": (0.5, 0.6)},
                          {"algorithm": "my_rules:Lion", "options": ("betas=[0.5, 0.6]",)}),
                         ({"algorithm": "muon", "momentum": 0.8, "shard": True},
                          {"algorithm": "my_rules:Muon", "options": ("momentum=0.8",), "shard": True})):
        one, other = (on(Mesh(data=2), weights, **options) for options in (ours, theirs))
        assert all(torch.equal(a, b) for mine, yours in zip(one, other, strict=True)
                   for a, b in zip(mine, yours, strict=True))


def test_parts_without_elements_are_refused():
    """A rank that holds no element of a tensor could not take part in its update."""
    boxes = {(0, 0): ((0, 1), (0, 4)), (1, 0): ((1, 1), (0, 4))}
    layout = Layout(mesh=Mesh(row=2), num_blocks=1, boundaries=(), shards={"b.w": boxes},
                    parameters=(Parameter("b.w", (1, 4), 0, "b.w"),))
    assert whole_parameters(Optim(), layout) == frozenset()
    with raises("algorithm-needs-whole-tensors", "b.w", "muon"):
        whole_parameters(Optim(algorithm="muon"), layout)


# ---------------------------------------------------------------------- what has no effect

@pytest.mark.parametrize(("algorithm", "idle"), [
    ("lion", {"momentum", "epsilon", "muon_scale", "options"}), ("muon", {"options"}),
    ("adafactor", {"betas", "epsilon", "momentum", "muon_scale", "options"}),
    ("sgd", {"betas", "epsilon", "muon_scale", "options"}), ("adamw", {"momentum", "muon_scale", "options"})])
def test_settings_of_other_optimizers_have_no_effect(algorithm, idle):
    run = resolve(Run(optim=Optim(algorithm=algorithm)))
    names = ("betas", "epsilon", "momentum", "muon_scale", "options")
    assert {name for name in names if effects.CONDITIONS[f"optim.{name}"](run)} == idle


# ---------------------------------------------------------------------- whole tensors in chunks and shares

def test_whole_tensors_have_owners():
    """Consecutive tensors, about equal numbers of elements; a tensor longer than a chunk is cut if it may be."""
    sizes = {"head": 50, "a": 12, "b": 12, "c": 4, "d": 4, "e": 30, "f": 2}
    gradients = [FlatGradient(name=name, numel=size, blocks=frozenset([len(sizes) - number]), whole=name != "head")
                 for number, (name, size) in enumerate(sizes.items())]
    shares = []
    for index in range(2):
        order = flat_order(gradients, {None: (2, index)}, 16, shard=True)
        assert len(order.chunks_of[0]) == 4, "50 elements in chunks of 16"
        assert all(len(chunks) == 1 for chunks in order.chunks_of[1:])
        assert order.chunks_of[2] == order.chunks_of[3] != order.chunks_of[4], "12 and 4 elements fill a chunk"
        shares.append([chunk.share for chunk in order.chunks])
        for chunk in order.chunks:
            assert chunk.shares is None or chunk.share == chunk.shares[index]
    assert order.size == sum(sizes.values()), "nothing is padded here"
    for number, each in enumerate(gradients):
        start, stop = order.places[number]
        assert stop - start == each.numel
        held = [sum(max(0, min(stop, last) - max(start, first)) for first, last in mine) for mine in shares]
        assert sum(held) == each.numel and (not each.whole or max(held) == each.numel)
    assert [sum(stop - start for start, stop in mine) for mine in shares] == [25 + 32] * 2
