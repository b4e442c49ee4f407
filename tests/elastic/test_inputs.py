"""All invalid settings of an elastic run are reported together before it starts."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from ranvier.cli.check import check
from ranvier.cli.main import run_command
from ranvier.config import rules
from ranvier.config.resolve import ResolvedRun
from ranvier.config.run import Data, Elastic, Optim, Transformer
from ranvier.launch.contact import has_ended
from ranvier.mesh import Mesh
from ranvier.planner.problems import warnings
from ranvier.system.lease import Lease, Owner, heartbeat_content
from tests.errors import raises

BERT = ResolvedRun(model=Transformer(num_layers=4, hidden=16, heads=2, vocab=100, sequence=8),
                   data=Data(task="classification", train="sentiment"))
VIT = ResolvedRun(model=Transformer(num_layers=4, hidden=16, heads=2), data=Data(task="images", train="cifar10"))


@pytest.mark.parametrize(("run", "where", "error"), [
    (replace(BERT, elastic=Elastic(freeze="manual")), "elastic.freeze", ("manual-freeze-missing",)),
    (replace(BERT, elastic=Elastic(freeze="manual", manual=("3:5",))), "elastic.manual", ("manual-freeze-layers", 4)),
    (ResolvedRun(elastic=Elastic(freeze="untrained")), "elastic.freeze", ("nothing-to-freeze",)),
    (replace(BERT, model=replace(BERT.model, num_layers=1), elastic=Elastic(freeze="gradient-norm")), "elastic.freeze",
     ("freeze-one-layer",)),
    (replace(BERT, model=replace(BERT.model, dropout=0.1), elastic=Elastic(freeze="cap", cache=True)), "elastic.cache",
     ("cache-with-dropout",)),
    (replace(VIT, data=replace(VIT.data, augment="flip-crop"), elastic=Elastic(freeze="cap", cache=True)),
     "elastic.cache", ("cache-with-augmentation",)),
    (replace(BERT, optim=Optim(update_in_backward=True), elastic=Elastic(profile_microbatches=True)),
     "elastic.profile-microbatches", ("in-backward-profile",)),
    (replace(BERT, optim=Optim(update_in_backward=True), elastic=Elastic(global_batch="grow")), "elastic.global-batch",
     ("in-backward-growing-batch",)),
])
def test_contradictions_are_found(run, where, error):
    (problem,) = [problem for problem in check(run).problems if problem.where == where]
    assert problem.remedy
    with raises(*error):
        raise problem


@pytest.mark.parametrize("run", [
    replace(BERT, elastic=Elastic(freeze="cap", cache=True)),
    replace(BERT, model=replace(BERT.model, dropout=0.1), elastic=Elastic(freeze="cap", cache=True,
                                                                         frozen_dropout=False)),
    replace(VIT, data=replace(VIT.data, augment="flip-crop", augment_repeats=True),
            elastic=Elastic(freeze="gradient-norm", cache=True)),
    replace(BERT, mesh=Mesh(pipe=2), elastic=Elastic(freeze="manual", manual=("3:2", "5:4"), auto_pipe=True,
                                                  auto_dp=True)), ResolvedRun()])
def test_what_may_be_asked(run):
    assert list(rules.elastic_problems(run)) == [] and list(warnings(run)) == []


@pytest.mark.parametrize(("elastic", "where"), [
    (Elastic(auto_pipe=True), "elastic.auto-pipe"), (Elastic(cache=True), "elastic.cache"),
    (Elastic(cut="reference"), "elastic.cut"), (Elastic(frozen_dropout=False), "elastic.frozen-dropout"),
    (Elastic(every=5), "elastic.every"), (Elastic(dry_run=True), "elastic.dry-run"),
    (Elastic(freeze="cap", auto_dp=True), "elastic.auto-dp"), (Elastic(freeze="cap", cut="reference"), "elastic.cut"),
    (Elastic(freeze="cap", cache_from=3), "elastic.cache-from"),
    (Elastic(freeze="cap", cache_dir=Path("x")), "elastic.cache-dir"), (Elastic(alpha=0.5), "elastic.alpha")])
def test_settings_without_effect_are_told(elastic, where):
    assert [warning.where for warning in warnings(replace(BERT, mesh=Mesh(pipe=2), elastic=elastic))] == [where]


def test_resize_says_what_is_wrong(tmp_path, capsys):
    assert run_command(["resize", str(tmp_path), "--data", "1", "--pipe", "2"]) == 2
    assert "is not a run's folder: it has no run.toml" in capsys.readouterr().err
    (tmp_path / "run.toml").write_text("")
    assert run_command(["resize", str(tmp_path), "--data", "0", "--pipe", "2"]) == 2
    assert run_command(["resize", str(tmp_path), "--data", "1", "--pipe", "2", "--wait", "0.1"]) == 2
    assert "has not answered within 0.1 s" in capsys.readouterr().err
    assert run_command(["resize", str(tmp_path), "--data", "1", "--pipe", "2", "--wait", "0"]) == 0
    assert "asked" in capsys.readouterr().out
    lease = Lease.acquire([tmp_path])
    assert run_command(["resize", str(tmp_path), "--data", "1", "--pipe", "2", "--wait", "0"]) == 0
    lease.release()  # the run was stopped
    assert run_command(["resize", str(tmp_path), "--data", "1", "--pipe", "2"]) == 2
    assert "has ended" in capsys.readouterr().err
    with subprocess.Popen(["true"]) as killed:
        owner = replace(Owner.this_process(), pid=killed.pid)
    Lease.acquire([tmp_path], owner=owner).release()
    (tmp_path / ".owner.2").write_bytes(heartbeat_content(3, owner))
    assert run_command(["resize", str(tmp_path), "--data", "1", "--pipe", "2"]) == 2
    assert "has ended" in capsys.readouterr().err
    (tmp_path / ".owner.2").write_bytes(heartbeat_content(3, replace(owner, machine="another")))
    assert not has_ended(tmp_path)
    (tmp_path / "summary.json").write_text("{}")
    assert run_command(["resize", str(tmp_path), "--data", "1", "--pipe", "2"]) == 2
    assert "has ended" in capsys.readouterr().err
