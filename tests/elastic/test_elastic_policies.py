"""Complete runs that freeze by a policy: when it is asked, what facts it gets, and what its answers change."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, hypot

import pytest

from ranvier.config.run import Elastic, Train
from ranvier.elastic.freezing import GradientNorm
from ranvier.mesh import Mesh
from tests.elastic.runs import AT_ONCE, IN_TWO, NUM_LAYERS, StopAfter, events, lines, losses, run_all, tiny, transitions


def frozen_after(run):
    """(step, layers) of each freezing."""
    return [(line["step"], line["frozen_layers"]) for line in transitions(run)]


@pytest.mark.slow
def test_a_dry_run_tells_and_changes_nothing(sentences, tmp_path):
    """It reports what the same policy would do, by the cap's formula for 1, 2, ... evaluations."""
    elastic = Elastic(freeze="cap", every=4)
    plain = tiny(sentences, tmp_path / "plain", mesh=Mesh(pipe=2))
    dry = replace(plain, run_dir=tmp_path / "dry", elastic=replace(elastic, dry_run=True))
    freezes = tiny(sentences, tmp_path / "freezes", mesh=Mesh(), elastic=elastic)
    for run in (plain, dry, freezes):
        run_all(run)
    assert losses(dry) == losses(plain)
    assert not transitions(dry) and {line["frozen_layers"] for line in lines(dry, "metrics.jsonl")} == {0}
    told = events(dry, "would-freeze")
    assert [(line["step"], line["layers"]) for line in told] == [(4, 2), (8, 4), (12, 5), (16, 5), (20, 6)]
    assert told[1]["text"] == "would freeze layers 0-3 (a dry run: nothing changes)"
    assert all(len(line["gradient_norms"]) == NUM_LAYERS and min(line["gradient_norms"]) > 0 for line in told)
    assert frozen_after(freezes) == [(4, 2), (8, 4), (12, 5), (20, 6)]


@pytest.mark.slow
def test_a_policy_is_asked_after_each_epoch(sentences, tmp_path, requests):
    run = tiny(sentences, tmp_path / "run", mesh=Mesh(pipe=2), elastic=Elastic(freeze="cap", alpha=0.5),
               batch=IN_TWO)
    run_all(run, trackers=[StopAfter(13, requests)])
    assert frozen_after(run) == [(12, 3)] and transitions(run)[0]["mesh"]["pipe"] == 2


def asked_for_norms(run, monkeypatch):
    """The facts that the policy gradient-norm gets in a run."""
    asked, rule = [], GradientNorm.frozen_layers
    with monkeypatch.context() as patch:
        patch.setattr(GradientNorm, "frozen_layers", lambda policy, facts: asked.append(facts) or rule(policy, facts))
        run_all(run)
    return asked


def test_depths_follow_from_the_norms_of_the_gradients(sentences, tmp_path, monkeypatch):
    elastic, train = Elastic(freeze="gradient-norm", alpha=0.5, every=2), Train(steps=8, learning_rate=3e-3)
    one = tiny(sentences, tmp_path / "one", mesh=Mesh(), elastic=elastic, train=train, batch=AT_ONCE)
    run = tiny(sentences, tmp_path / "run", mesh=Mesh(pipe=2), elastic=elastic, train=train, batch=IN_TWO)
    dry = tiny(sentences, tmp_path / "dry", mesh=Mesh(), elastic=replace(elastic, dry_run=True),
               train=train, batch=AT_ONCE)
    alone, asked = asked_for_norms(one, monkeypatch), asked_for_norms(run, monkeypatch)
    frozen, depths, steps = 0, [], lines(run, "metrics.jsonl")
    for number, (facts, other) in enumerate(zip(asked, alone, strict=True), 1):
        norms = facts.gradient_norms
        assert norms == pytest.approx(other.gradient_norms, rel=1e-6)
        assert (facts.step, facts.evaluation, facts.frozen) == (2 * number, number, frozen)
        assert not any(norms[:frozen]) and min(norms[frozen:]) > 0
        assert hypot(*norms) < steps[facts.step - 1]["grad_norm"]  # the head is in no layer
        least = min(range(frozen, NUM_LAYERS), key=norms.__getitem__)
        depth = min(frozen + ceil((NUM_LAYERS - frozen) / 2), least)
        depths += [(facts.step, depth)] if depth > frozen else []
        frozen = depth
    assert depths and frozen_after(run) == frozen_after(one) == depths
    run_all(dry)
    told = events(dry, "would-freeze")
    first = next(facts for facts in alone if facts.step == depths[0][0])  # nothing is frozen yet in either run
    assert (told[0]["step"], told[0]["layers"]) == depths[0] and told[0]["gradient_norms"] == [*first.gradient_norms]
    for line in told:
        norms = line["gradient_norms"]
        assert line["layers"] == min(NUM_LAYERS // 2, norms.index(min(norms)))
