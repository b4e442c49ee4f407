"""Runs whose layers freeze and train again, manually and by policies that use more than gradients."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from examples.published_freezing import Plasticity
from ranvier.config.resolve import resolve
from ranvier.config.run import Checkpoint, Elastic, Guard, Train
from ranvier.elastic import named_policy
from ranvier.elastic.freezing import Facts, decide
from ranvier.elastic.similarity import normalised, products, similarity_loss
from ranvier.errors import ConfigError
from ranvier.mesh import Mesh
from ranvier.planner.problems import problems
from ranvier.train import loop
from ranvier.train.memory import MemoryBudget
from tests.checkpoint.anywhere import everything
from tests.elastic.runs import (
    AT_ONCE,
    IN_TWO,
    NUM_LAYERS,
    StopAfter,
    always,
    events,
    lines,
    losses,
    losses_of_one_rank,
    read_rows,
    run_all,
    tiny,
    transitions,
    write_sentences,
)
from tests.errors import raises

FALLING = Elastic(freeze="manual", manual=("4:4", "10:1", "16:3"))
CACHED = replace(FALLING, auto_pipe=True, auto_dp=True, cache=True, cache_from=1, cache_precision="full")
PLASTICITY = "examples.published_freezing:Plasticity"


@pytest.fixture(scope="module")
def in_one_process(sentences, tmp_path_factory):
    """Losses of the run that freezes and trains the same layers, on one rank. tests/elastic/test_freezing_ties.py
    compares such a run with plain PyTorch."""
    return losses_of_one_rank(sentences, tmp_path_factory, FALLING)


@pytest.mark.slow
def test_layers_that_train_again_on_a_mesh_that_changes(sentences, tmp_path, in_one_process, monkeypatch):
    """Outputs cached for four layers cannot be used for the three that freeze later, with other weights."""
    always(monkeypatch)
    run = tiny(sentences, tmp_path / "run", elastic=replace(CACHED, cache_dir=tmp_path / "cache"))
    results, text = run_all(run)
    assert losses(run) == pytest.approx(in_one_process, rel=1e-9)
    assert [line["frozen_layers"] for line in transitions(run)] == [4, 1, 3]
    assert [line["frozen_layers"] for line in lines(run, "metrics.jsonl")] == [0] * 4 + [4] * 6 + [1] * 6 + [3] * 8
    assert "step 10: unfroze layers 1-3; " in text and read_rows(results) > 0


@pytest.mark.slow
def test_a_run_goes_on_after_layers_train_again(sentences, tmp_path, in_one_process, requests):
    """Layers that train again have missed updates, and the checkpoint says so."""
    first = tiny(sentences, tmp_path / "run", mesh=Mesh(pipe=2), elastic=FALLING,
                 checkpoint=Checkpoint(every=12, keep=2))
    run_all(first, trackers=[StopAfter(11, requests)])
    folder = first.run_dir / "checkpoint" / "step-12"
    again = replace(first, resume=str(folder), run_dir=tmp_path / "again", mesh=Mesh(data=2))
    run_all(again)
    assert '"missed_updates":{"layer1.' in (folder / "manifest.json").read_text()
    assert losses(again) == pytest.approx(in_one_process[12:], rel=1e-9)


class Thaws:
    """A policy that freezes four layers at its first evaluation, and has three of them train again at the second."""

    def frozen_layers(self, facts):
        return {1: 4, 2: 1}.get(facts.evaluation, facts.frozen)


def test_layers_train_on_after_a_rollback_to_when_they_were_frozen(sentences, tmp_path, monkeypatch):
    """The checkpoint is that of step 4, with four frozen layers; the bad step is the seventh, with one."""
    run = tiny(sentences, tmp_path / "run", mesh=Mesh(pipe=2), train=Train(steps=8, learning_rate=3e-3),
               elastic=Elastic(every=3), checkpoint=Checkpoint(every=4, keep=9), guard=Guard(bad_step="rollback"),
               batch=IN_TWO)
    step = loop.take_step

    def breaking(session, number):
        if number == 7 and session.active.runtime.train_data.offset == 0:
            with torch.no_grad():
                for parameter in session.active.engine.parameters():
                    parameter.fill_(math.nan)
        step(session, number)

    monkeypatch.setattr(loop, "take_step", breaking)
    run_all(run, freezing=Thaws())
    assert [line["to_step"] for line in events(run, "went-back")] == [4]
    steps = lines(run, "metrics.jsonl")[-4:]
    assert [(line["step"], line["frozen_layers"]) for line in steps] == [(step, 1) for step in range(5, 9)]
    before, after = (everything(run.run_dir / "checkpoint" / f"step-{step}") for step in (4, 8))
    changed = {name.partition(".")[0] for (kind, name), tensor in before.items()
               if kind == "parameter" and not torch.equal(tensor, after[kind, name])}
    assert changed == {"layer1", "layer2", "layer3", "layer4", "layer5", "head"}


def test_layers_for_whose_training_there_is_no_memory_stay_frozen(sentences, tmp_path, monkeypatch):
    problem = MemoryBudget.problem
    monkeypatch.setattr(MemoryBudget, "problem", lambda budget, run: ConfigError(
        "is too large", where="memory", value=1, remedy="Wait.") if len(budget.frozen) == 1 else problem(budget, run))
    run = tiny(sentences, tmp_path / "run", mesh=Mesh(), train=Train(steps=12), batch=AT_ONCE, elastic=replace(
        FALLING, manual=("4:4", "10:1")))
    run_all(run)
    assert [line["frozen_layers"] for line in transitions(run)] == [4]
    assert [line["text"] for line in events(run, "unfreeze-refused")] == [
        "layers 1-3 stay frozen: memory: is too large (got 1). Wait."]


# ---------------------------------------------------------------------- layers above the first that trains


class Sets:
    """A policy that freezes other layers at each evaluation."""

    answers = ({1, 3}, {0, 1, 3}, {0, 4}, 2)

    def frozen_layers(self, facts):
        return self.answers[facts.evaluation - 1]


SETS_TRAIN = Train(steps=10, learning_rate=3e-3)


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """A folder of sentences with epochs of three batches."""
    folder = tmp_path_factory.mktemp("few")
    write_sentences(folder, train=24)
    return folder


@pytest.fixture(scope="module")
def sets_in_one_process(few, tmp_path_factory):
    run = tiny(few, tmp_path_factory.mktemp("sets") / "run", mesh=Mesh(), elastic=Elastic(every=2), train=SETS_TRAIN,
               batch=AT_ONCE)
    run_all(run, freezing=Sets())
    return losses(run)


def test_sets_of_layers_on_a_mesh_that_changes(few, tmp_path, sets_in_one_process, monkeypatch):
    """The run also resumes from a checkpoint. tests/elastic/test_freezing_ties.py compares with plain PyTorch."""
    always(monkeypatch)
    run = tiny(few, tmp_path / "run", mesh=Mesh(pipe=2), train=SETS_TRAIN, batch=IN_TWO,
               checkpoint=Checkpoint(every=7, keep=3), elastic=replace(
                   CACHED, freeze="none", manual=(), every=2, cache_dir=tmp_path / "cache"))
    results, text = run_all(run, freezing=Sets())
    assert losses(run) == pytest.approx(sets_in_one_process, rel=1e-9)
    assert [line["frozen_layers"] for line in transitions(run)] == [2, 3, 2, 2]
    assert transitions(run)[-1]["mesh"]["data"] == 2 and read_rows(results) > 0
    for told in ("step 2: froze layers 1 and 3; ", "step 4: froze layer 0; ",
                 "step 6: froze layer 4; unfroze layers 1 and 3; ", "step 8: froze layer 1; unfroze layer 4; "):
        assert told in text
    folder = run.run_dir / "checkpoint" / "step-7"
    again = replace(run, resume=str(folder), run_dir=tmp_path / "again", mesh=Mesh(data=2))
    run_all(again, freezing=Sets())
    # layers that train again have missed updates
    assert '"missed_updates":{"layer1.' in (folder / "manifest.json").read_text()
    assert losses(again) == pytest.approx(sets_in_one_process[7:], rel=1e-9)


@pytest.mark.slow
def test_a_run_that_balances_its_stages(sentences, tmp_path):
    run = tiny(sentences, tmp_path / "run", mesh=Mesh(pipe=2), train=Train(steps=13, learning_rate=3e-3),
               elastic=Elastic(freeze="examples.published_freezing:StageBalance", every=4))
    run_all(run)
    depths = [line["frozen_layers"] for line in transitions(run)]
    assert depths[0] == 2 and depths == sorted(set(depths)) and depths[-1] <= 5  # fewer if a stage has none left


# ---------------------------------------------------------------------- the facts that policies get


class Told:
    """Freezes nothing, and keeps the facts that it gets. needs_activations: whether it needs the change of outputs."""

    def __init__(self, needs_activations=True):
        self.needs_activations, self.facts = needs_activations, []

    def frozen_layers(self, facts):
        self.facts.append(facts)
        return facts.frozen


def told(sentences, run_dir, mesh, every=6, **changes):
    policy = Told()
    run = tiny(sentences, run_dir, mesh=mesh, elastic=Elastic(every=every), **changes)
    run_all(run, freezing=policy)
    return run, policy.facts


SHORT = Train(steps=7, learning_rate=3e-3)


def test_facts(sentences, tmp_path):
    run, facts = told(sentences, tmp_path / "run", Mesh(), batch=AT_ONCE)
    steps, evaluated = lines(run, "metrics.jsonl"), events(run, "eval")
    assert [each.step for each in facts] == [6, 12, 18]
    assert all(each.stages == (0,) * NUM_LAYERS and each.stage_seconds[0] > 0 for each in facts)
    for number, each in enumerate(facts):
        past = steps[6 * number:6 * number + 6]
        assert each.loss == pytest.approx(sum(line["loss"] for line in past) / 6, rel=1e-12)
        assert each.learning_rate == past[-1]["learning_rate"] and each.lowest == 0
    assert not facts[0].metrics  # step 12 is the first that is evaluated, before the policy is asked
    assert facts[1].metrics["eval_loss"] == facts[2].metrics["eval_loss"] == evaluated[0]["loss"]
    assert facts[1].metrics["eval_accuracy"] == evaluated[0]["eval_accuracy"]
    assert all(math.isnan(change) for change in facts[0].activation_change)
    assert all(0 < change < 1 for each in facts[1:] for change in each.activation_change)


@pytest.mark.parametrize("mesh", [Mesh(data=2, pipe=2), pytest.param(Mesh(pipe=2, col=2), marks=pytest.mark.slow)],
                         ids=str)
def test_outputs_change_alike_on_every_mesh(sentences, tmp_path, mesh):
    """Also with microbatches of another size, which are padded in the same way."""
    train = replace(SHORT, steps=5)
    _, expected = told(sentences, tmp_path / "one", Mesh(), every=2, train=train, batch=AT_ONCE)
    _, found = told(sentences, tmp_path / "many", mesh, every=2, train=train, batch=IN_TWO)
    for one, many in zip(expected[1:], found[1:], strict=True):
        assert many.activation_change == pytest.approx(one.activation_change, rel=1e-3)  # outputs are kept in fp32


@pytest.mark.slow
def test_rows_compare_their_own_samples(sentences, tmp_path):
    _, found = told(sentences, tmp_path / "rows", Mesh(row=2), every=3, train=SHORT)
    assert all(0 < change < 1 for each in found[1:] for change in each.activation_change)


def test_too_few_samples_to_compare(sentences, tmp_path):
    lone = tmp_path / "lone.tsv"
    lone.write_text("\n".join((sentences / "eval.tsv").read_text().splitlines()[:2]) + "\n")
    run = tiny(sentences, tmp_path / "run", mesh=Mesh(), elastic=Elastic(freeze=PLASTICITY))
    with raises("too-few-held-out-samples", 2, 1, PLASTICITY):
        run_all(replace(run, data=replace(run.data, eval=str(lone))))


def test_a_resumed_run_is_told_the_same(sentences, tmp_path):
    """Also the numbers of the step and the evaluation that were pending when the checkpoint was written."""
    run = tiny(sentences, tmp_path / "run", mesh=Mesh(), elastic=Elastic(every=7), batch=AT_ONCE,
               train=Train(steps=15, learning_rate=3e-3, eval_every=12), checkpoint=Checkpoint(every=4, keep=9))
    whole = Told()
    run_all(run, freezing=whole)
    rest = Told()
    run_all(replace(run, resume=str(run.run_dir / "checkpoint" / "step-12"), run_dir=tmp_path / "again"), freezing=rest)
    for now, before in zip(rest.facts, whole.facts[1:], strict=True):
        assert replace(now, stage_seconds=()) == replace(before, stage_seconds=()) and now.metrics


def test_similarity_loss():
    outputs = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0))
    whole = normalised(products(outputs))
    parts = normalised(products(outputs[..., :2]) + products(outputs[..., 2:]))
    assert similarity_loss([whole], [parts]) == pytest.approx(0.0, abs=1e-12)
    assert similarity_loss([whole], [normalised(products(7 * outputs))]) == pytest.approx(0.0, abs=1e-12)
    other, one = outputs.flatten(1), torch.eye(4)
    gram = torch.nn.functional.normalize((other @ other.T).double(), dim=1)
    assert similarity_loss([normalised(one.double())], [whole]) == pytest.approx(
        float((gram - one).square().sum()) / 16, rel=1e-6)


# ---------------------------------------------------------------------- Egeria's rule


def asked(policy, changes, rates=None, layers=4):
    """Frozen layers after each evaluation."""
    frozen, found = 0, []
    for number, change in enumerate(changes):
        frozen = decide(policy, Facts(
            step=number, evaluation=number + 1, frozen=frozen, num_layers=layers, gradient_norms=(1.0,) * layers,
            learning_rate=1.0 if rates is None else rates[number], activation_change=tuple(change), lowest=0)).prefix
        found.append(frozen)
    return found


def test_layers_freeze_in_order_when_they_have_settled():
    """With a window of 1 the change itself is used. The second layer settles first, and waits for the first."""
    steep, settled = [1.0, 0.5, 0.2, 0.1, 0.09, 0.085, 0.084, 0.084], [1.0, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01]
    busy = [1.0, 0.5, 0.9, 0.4, 0.8, 0.3, 0.7, 0.2]
    found = asked(Plasticity(0.9, window=1, patience=2), zip(steep, settled, busy, busy, strict=True))
    assert found == [0, 0, 0, 0, 2, 2, 2, 2]
    assert asked(Plasticity(0.2, window=1, patience=2), zip(steep, settled, busy, busy, strict=True)) == [
        0, 0, 0, 0, 1, 2, 2, 2]
    assert asked(Plasticity(0.9, window=3, patience=2), zip(steep, settled, busy, busy, strict=True))[-1] == 2


def test_all_layers_train_again_when_the_learning_rate_has_dropped():
    changes = [(1.0, 1.0, 1.0, 1.0)] + [(0.5, 0.5, 0.5, 0.5)] * 9
    rates = [1.0] * 6 + [0.1] * 4
    assert asked(Plasticity(0.25, window=1, patience=1), changes, rates)[4:8] == [3, 4, 0, 0]


@pytest.mark.slow
def test_a_run_freezes_what_has_settled(sentences, tmp_path):
    """The learning rate is so small that nothing changes: everything but the head freezes, layer by layer, and does so
    too in a run that resumes from a checkpoint on another mesh."""
    elastic = Elastic(freeze=PLASTICITY, options=("alpha=0.1",), every=2)
    run = tiny(sentences, tmp_path / "run", mesh=Mesh(), train=Train(steps=18, learning_rate=1e-12), elastic=elastic,
               checkpoint=Checkpoint(every=13, keep=9), batch=AT_ONCE)
    _, text = run_all(run)
    depths = {line["step"]: line["frozen_layers"] for line in transitions(run)}
    assert len(depths) >= 3 and [*depths.values()] == list(range(1, len(depths) + 1)) and len(depths) <= NUM_LAYERS
    assert f"({PLASTICITY}, evaluation " in text
    again = replace(run, resume=str(run.run_dir / "checkpoint" / "step-13"), run_dir=tmp_path / "again",
                    mesh=Mesh(pipe=2))
    run_all(again)
    later = {line["step"]: line["frozen_layers"] for line in transitions(again)}
    assert {step: depth for step, depth in later.items() if step > 13} == {
        step: depth for step, depth in depths.items() if step > 13}


# ---------------------------------------------------------------------- a custom policy, by flag


def test_a_policy_by_its_name(sentences, tmp_path, monkeypatch):
    (tmp_path / "my_policies.py").write_text(
        "class Every:\n    def __init__(self, layers=1):\n        self.layers, self.asked = layers, 0\n"
        "    def frozen_layers(self, facts):\n        self.asked += 1\n"
        "        return min(facts.num_layers, self.asked * self.layers)\n"
        "    def state_dict(self):\n        return {'asked': self.asked}\n"
        "    def load_state_dict(self, state):\n        self.asked = state['asked']\n\nnone = 3\n")
    monkeypatch.chdir(tmp_path)
    elastic = Elastic(freeze="my_policies:Every", options=("layers=2",), every=3)
    run = tiny(sentences, tmp_path / "run", mesh=Mesh(pipe=2), elastic=elastic, train=Train(steps=8), batch=IN_TWO)
    _, text = run_all(run)
    assert [line["frozen_layers"] for line in transitions(run)] == [2, 4]
    assert "step 3: froze layers 0-1; " in text and "(my_policies:Every, evaluation 1)" in text
    assert named_policy.policy_of(elastic).asked == 0, "each run has its own policy"
    with raises("object-lacks-attribute", "elastic.freeze", "frozen_layers"):
        named_policy.policy_of(Elastic(freeze="my_policies:none"))
    with raises("freezing-object-incomplete", "freezing", "frozen_layers", value="object"):
        named_policy.controller_of(resolve(run), 8, policy=object())
    wrong = resolve(replace(run, elastic=replace(elastic, options=("depth=2",))))
    assert ("object-raised", "elastic.freeze") in [(problem.code, problem.where) for problem in problems(wrong)]
