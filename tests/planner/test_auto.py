"""`auto` in a run: what a plan chooses for it, and what a plan leaves unchanged."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from ranvier.cli import check
from ranvier.cli.main import run_command
from ranvier.config import read
from ranvier.config.resolve import ResolvedRun, resolve
from ranvier.config.run import Batch, Launch, MeshSettings, Run, Transformer
from ranvier.cost.cluster_files import load_cluster
from ranvier.mesh import Mesh
from ranvier.planner import auto
from ranvier.planner.auto import cluster_for, plan_run, with_plan
from ranvier.planner.problems import problems as problems_of
from ranvier.planner.run_cost import run_cost
from ranvier.planner.work import Work
from tests.errors import raises

OPEN = Run(mesh=MeshSettings(data="auto", pipe="auto"), batch=Batch(global_size=16, microbatch_size="auto"),
           model=Transformer(num_layers=4, hidden=64, heads=4, vocab=512, sequence=32),
           launch=Launch(cluster="h100", device="cuda"))


def seconds(run):
    return run_cost(run, load_cluster("h100"), Work().stages(run)).seconds


@pytest.mark.slow
def test_the_fastest_of_all_that_is_open():
    run = plan_run(OPEN, 4)
    assert isinstance(run, ResolvedRun) and run.mesh.size == 4 and run.mesh.stage_size == 1
    assert run == resolve(replace(OPEN, mesh=run.mesh, batch=run.batch))
    others = [replace(run, mesh=Mesh(data=4 // pipe, pipe=pipe), batch=replace(run.batch, microbatch_size=size))
              for pipe in (1, 2, 4) for size in (1, 2, 4, 8, 16) if size * (4 // pipe) <= 16]
    assert seconds(run) == min(map(seconds, others))


@pytest.mark.parametrize(("mesh", "ranks", "expected"), [
    pytest.param(MeshSettings(data="auto", pipe=2), 4, (2, 2, 1, 1), marks=pytest.mark.slow),
    (MeshSettings(pipe="auto"), 3, (1, 3, 1, 1)),
    pytest.param(MeshSettings(data="auto", col=2), 4, (2, 1, 1, 2), marks=pytest.mark.slow),
    (MeshSettings(data="auto", row="auto", col=2, tile=(2, 1)), 4, (1, 1, 2, 2))])
def test_what_is_given_stays(mesh, ranks, expected):
    run = replace(OPEN, mesh=mesh, batch=replace(OPEN.batch, microbatch_size=2))
    found = plan_run(run, ranks)
    assert found.mesh.shape == expected and found.batch.microbatch_size == 2 and found.mesh.tile == mesh.tile


def test_the_microbatch_alone():
    run, problems = with_plan(replace(OPEN, mesh=Mesh(pipe=2)), None)
    assert not problems and run.mesh == Mesh(pipe=2)
    assert seconds(run) == min(seconds(replace(run, batch=replace(run.batch, microbatch_size=size)))
                               for size in (1, 2, 4, 8, 16))


@pytest.mark.parametrize(("mesh", "largest"), [(Mesh(), True), (Mesh(pipe=4), False)], ids=str)
def test_recipes_of_fine_tuning_leave_their_microbatches_to_the_mesh(mesh, largest):
    """One rank takes the full batch as one microbatch; a pipeline needs several microbatches."""
    asked = read.merge([read.load("bert-sentiment")[1]]).run
    asked = replace(asked, mesh=mesh, model=replace(asked.model, pretrained=None), launch=Launch(device="cpu"))
    run, problems = with_plan(asked, None)
    assert not problems and (run.batch.microbatch_size == asked.batch.global_size) == largest
    assert run.num_microbatches >= (1 if largest else mesh.pipe)


def test_a_given_mesh_is_planned_for_its_own_ranks():
    """Whatever the number of started ranks: a difference is another error, or the run resumes on another mesh."""
    asked = replace(OPEN, mesh=Mesh(pipe=2))
    assert with_plan(asked, 3) == with_plan(asked, 2) == with_plan(asked, None)
    problems = check.check(asked, 3).problems
    assert [(problem.code, problem.where) for problem in problems] == [("mesh-needs-ranks", "mesh")]


@pytest.mark.parametrize(("mesh", "ranks", "error"), [
    (MeshSettings(data="auto"), None,
     ("number-of-ranks-unknown",)),
    (MeshSettings(data="auto", pipe=2), 5,
     ("no-mesh", 5, 2, 1, 4, 6)),
    (MeshSettings(pipe="auto"), 11,
     ("no-mesh", 11, 1, 10)),
    (MeshSettings(pipe="auto"), 100_000, ("ranks-above-cluster",))])
def test_what_cannot_be_planned(mesh, ranks, error):
    run, (problem,) = with_plan(replace(OPEN, mesh=mesh), ranks)
    assert isinstance(run, ResolvedRun) and run.batch.microbatch_size == 1
    with raises(*error):
        raise problem
    assert str(problem) in {str(other) for other in check.check(replace(OPEN, mesh=mesh), ranks).problems}


def test_problems_of_the_model_come_first():
    report = check.check(replace(OPEN, model=replace(OPEN.model, heads=3)), 4)
    assert [problem.where for problem in report.problems] == ["mesh.data", "model.heads"]
    assert str(report.problems[0]) == ("mesh.data: cannot be planned yet (got 'auto'). "
                                       "Fix the other errors first, or give a number.")


def test_nominal_figures_of_the_devices_here(monkeypatch):
    here = cluster_for(replace(OPEN, launch=Launch(device="cpu")), 6, 2)
    assert (here.nodes, here.devices_per_node) == (3, 2) and here.device.cores >= 1
    monkeypatch.setattr(auto, "choose_device", lambda setting, count: type("Choice", (), {"value": "cuda"}))
    monkeypatch.setattr(auto.torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(auto.torch.cuda, "get_device_properties", lambda number: SimpleNamespace(
        total_memory=150_754_820_096))
    there = cluster_for(replace(OPEN, launch=Launch()), 8, 4)
    assert there.device == replace(load_cluster("h200").device, memory_bytes=150_754_820_096)
    assert there.num_devices == 8 and there.nodes == 2
    for name, shipped in (("Tesla V100-SXM2-16GB", "summit"), ("Quadro RTX 5000", "frontera"),
                          ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA A100-SXM4-80GB", "a100")):
        monkeypatch.setattr(auto.torch.cuda, "get_device_name", lambda device, name=name: name)
        assert cluster_for(replace(OPEN, launch=Launch()), 8, 4).device.name == load_cluster(shipped).device.name
    monkeypatch.setattr(auto.torch.cuda, "get_device_name", lambda device: "Voodoo 2")
    assert not with_plan(replace(OPEN, mesh=Mesh(pipe=2), launch=Launch()), 2)[1]  # only microbatches are planned
    _, (problem,) = with_plan(replace(OPEN, launch=Launch()), 4)
    assert str(problem) == (
        "launch.cluster: is not set, and no shipped cluster has a Voodoo 2. Measure this machine: `ranvier doctor "
        "--measure --out here.toml`; then set --launch.cluster here.toml.")


def test_check_says_what_auto_is(capsys):
    words = ["check", "gpt-tiny", "--ranks", "4", "--mesh.pipe", "auto", "--mesh.data", "2", "--json"]
    assert run_command(words) == 0
    planned = json.loads(capsys.readouterr().out)["planned"]
    assert planned.startswith("data 2 x pipe 2 x row 1 x col 1, microbatches of ")
    assert run_command(words[:-1]) == 0 and "\nauto is data 2 x pipe 2 x row 1" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_plans_itself_and_its_ranks_take_the_plan(tmp_path):
    """With plain python, ranks are started for all devices here; torchrun and mpiexec give the number."""
    import os
    import subprocess
    import sys
    import tomllib

    command = [sys.executable, "-m", "ranvier", "train", "gpt-tiny", "--mesh.data", "auto", "--mesh.pipe", "auto",
               "--batch.microbatch-size", "auto", "--train.steps", "1", "--train.sample-tokens", "0", "--launch.device",
               "cpu", "--run-dir", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env={**os.environ})
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("auto is data ")
    found = tomllib.loads((tmp_path / "run" / "run.toml").read_text())
    shape = [found["mesh"][axis] for axis in ("data", "pipe", "row", "col")]
    assert all(isinstance(size, int) for size in (*shape, found["batch"]["microbatch_size"]))
    from ranvier.system.machine import available_cores

    assert shape[0] * shape[1] == available_cores() and shape[2:] == [1, 1]


def test_a_problem_of_the_data_is_told_once(tmp_path):
    """The checks of the run report it; the search, which finds it too, does not report it again."""
    asked = {"question": "Who?", "id": "a", "answers": [], "is_impossible": True}
    document = {"data": [{"paragraphs": [{"context": "No one.", "qas": [asked]}]}]}
    (tmp_path / "squad.json").write_text(json.dumps(document))
    run = replace(OPEN, data=replace(OPEN.data, task="qa", train=str(tmp_path / "squad.json")),
                  model=replace(OPEN.model, family="bert"))
    found, more = with_plan(run, 2)
    assert more == [] and [problem.code for problem in problems_of(found)] == ["question-without-answer"]


def test_a_corpus_that_is_not_on_this_machine_is_a_warning_of_check(tmp_path):
    run = Run(model=OPEN.model, data=replace(OPEN.data, corpus=str(tmp_path / "none.txt")), launch=Launch(device="cpu"))
    report = check.check(run)
    assert not report.problems and "corpus-missing" in [warning.code for warning in report.warnings]
