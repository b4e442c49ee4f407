"""The trial before a run: which plans are run, and which is chosen for made-up times. Nothing here asserts speed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ranvier.cli.main import run_command
from ranvier.config.resolve import ResolvedRun
from ranvier.config.run import Batch, Data, Launch, MeshSettings, Run, Train, Transformer
from ranvier.errors import LaunchError
from ranvier.mesh import Mesh, mesh_text
from ranvier.planner import trial
from ranvier.planner.auto import with_plan
from ranvier.planner.elastic_plan import known_steps
from ranvier.planner.trial import StartTrial

WORDPIECE = Path(__file__).parents[1] / "golden/data/wordpiece.json"
OPEN = Run(mesh=MeshSettings(data="auto", pipe="auto"), batch=Batch(global_size=16, microbatch_size="auto"),
           model=Transformer(num_layers=4, hidden=64, heads=4, vocab=512, sequence=32),
           train=Train(steps=1_000_000), launch=Launch(device="cpu", trial=3))


def chosen(run, seconds_of, ranks=2):
    """The plan that is chosen for two cores, the meshes that were tried, and the messages."""
    tried, told = [], []

    def measure(found):
        assert isinstance(found, ResolvedRun)
        tried.append(found.mesh)
        seconds = seconds_of(found)
        if seconds is None:
            raise LaunchError("could not be measured", where="mesh", value=str(found.mesh), remedy="")
        return seconds

    found, problems = with_plan(run, ranks, trial=StartTrial(told.append, measure, read=lambda run, tell: None))
    assert problems == []
    return found, tried, told


@pytest.mark.parametrize("fastest", [Mesh(data=2), Mesh(pipe=2), Mesh()])
def test_the_fastest_of_the_best_plans_and_of_one_rank(fastest):
    """Each mesh is tried once, with its best microbatch; the slowest by prediction may be the fastest."""
    found, tried, told = chosen(OPEN, lambda run: 1.0 if run.mesh == fastest else 2.0)
    assert found.mesh == fastest
    assert {str(mesh) for mesh in tried} == {str(mesh) for mesh in (Mesh(data=2), Mesh(pipe=2), Mesh())}
    assert tried[0] == Mesh(data=2), "the best by prediction for two cores"
    assert len(told) == 4 and all(line.startswith("trial of data ") and "predicted" in line for line in told[:3])
    assert told[-1] == f"chosen: data {fastest.data} x pipe {fastest.pipe}, microbatches of " \
                       f"{found.batch.microbatch_size}"


def test_two_trials_are_the_best_plan_and_one_rank():
    _, tried, _ = chosen(replace(OPEN, launch=Launch(device="cpu", trial=2)), lambda run: 1.0)
    assert tried == [Mesh(data=2), Mesh()]


def test_times_that_are_alike_leave_the_best_prediction():
    found, _, _ = chosen(OPEN, lambda run: 1.0 if run.mesh == Mesh() else 1.02)
    assert found.mesh == Mesh(data=2)


def test_what_is_given_stays():
    found, tried, _ = chosen(replace(OPEN, mesh=MeshSettings(data=2)), lambda run: float(run.batch.microbatch_size))
    assert {str(mesh) for mesh in tried} == {str(Mesh(data=2))} and len(tried) == 3, "microbatches are tried"
    assert found.mesh == Mesh(data=2)
    found, tried, _ = chosen(replace(OPEN, mesh=MeshSettings(data="auto", pipe=2)), lambda run: 1.0)
    assert found.mesh == Mesh(pipe=2)
    assert {mesh.pipe for mesh in tried} == {2}, "one rank cannot be a pipeline of two"


def test_a_plan_that_cannot_be_run_is_left_out():
    found, _, told = chosen(OPEN, lambda run: None if run.mesh == Mesh(data=2) else 1.0 + (run.mesh.pipe == 2))
    assert found.mesh == Mesh()
    assert any("could not be measured" in line for line in told)
    found, _, told = chosen(OPEN, lambda run: None)
    assert found.mesh == Mesh(data=2), "the best by prediction"


def test_short_runs_have_no_trial():
    """The trial would take longer than it is likely to save."""
    found, tried, told = chosen(replace(OPEN, train=Train(steps=20)), lambda run: 1.0)
    assert tried == [] and found.mesh == Mesh(data=2)
    assert told[0].startswith("no trial of meshes: 3 would take about ")
    with_samples = replace(OPEN, train=Train(epochs=2), data=Data(task="classification", train_samples=40))
    assert known_steps(with_samples) == 5
    assert known_steps(replace(with_samples, data=Data(train_samples=40))) is None  # a text's number is unknown


def test_no_trial_where_none_is_asked_for():
    _, tried, told = chosen(replace(OPEN, launch=Launch(device="cpu")), lambda run: 1.0)
    assert tried == [] and told == []


def test_where_gpus_plan_no_rank_is_alone():
    _, tried, _ = chosen(replace(OPEN, launch=Launch(cluster="h100", trial=2)), lambda run: 1.0)
    assert len(tried) == 2 and all(mesh.size == 2 for mesh in tried)


def test_a_run_is_told_what_was_tried_and_keeps_it(tmp_path, monkeypatch, capfd):
    """The run of one rank really trains; times are made up. A resumed run uses the plan in its folder, without a
    trial."""
    measured, times = [], iter((1.0, 0.5))

    def measure(run):
        assert run.mesh.size > 1 or trial.step_seconds(run, tmp_path / "trial", steps=2, warmup=0) > 0
        measured.append(run.mesh)
        return next(times)

    class Here(StartTrial):
        def __init__(self, tell):
            super().__init__(tell, measure)

    monkeypatch.setattr(trial, "StartTrial", Here)
    monkeypatch.setattr(trial, "_LARGEST_SHARE", 1e9)
    monkeypatch.setattr("ranvier.launch.start.available_cores", lambda: 2)
    flags = ["gpt-tiny", "--mesh.data", "auto", "--mesh.pipe", "auto", "--batch.microbatch-size", "auto",
             "--launch.trial", "2", "--model.num-layers", "1", "--model.hidden", "16", "--model.heads", "2",
             "--model.sequence", "16", "--batch.global-size", "4", "--data.max-bytes", "20000", "--model.vocab", "300",
             "--train.sample-tokens", "0", "--run-dir", str(tmp_path / "run")]
    run_command(["train", *flags, "--train.steps", "3", "--checkpoint.every", "3"])
    said = capfd.readouterr().out
    assert [mesh.size for mesh in measured] == [2, 1] and f"trial of {mesh_text(measured[0])}" in said
    assert "chosen: data 1 x pipe 1, microbatches of 4" in said
    run_command(["train", *flags, "--train.steps", "4", "--resume", "auto"])
    assert len(measured) == 2
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 4


def test_data_that_cannot_be_read_is_one_error_before_any_trial(tmp_path, monkeypatch, capfd):
    """Its first lines are valid, so that only reading all of it finds the error."""
    class Here(StartTrial):
        def __init__(self, tell):
            super().__init__(tell, measure=lambda run: pytest.fail("a trial without data"))

    monkeypatch.setattr(trial, "StartTrial", Here)
    monkeypatch.setattr(trial, "_LARGEST_SHARE", 1e9)
    monkeypatch.setattr("ranvier.launch.start.available_cores", lambda: 2)
    table = tmp_path / "train.tsv"
    table.write_text("label\tsentence\n" + "0\tbad\n1\tgood\n" * 20 + "no tab in this line\n")
    assert run_command(["train", "bert-sentiment", "--data.train", str(table), "--data.cache-dir",
                        str(tmp_path / "cache"), "--run-dir", str(tmp_path / "run"), "--model.pretrained", "none",
                        "--data.tokenizer", str(WORDPIECE), "--model.vocab", "120"]) == 2
    said = capfd.readouterr()
    assert said.err.count("train.tsv line 42: ") == 1 and "trial of" not in said.out + said.err
    assert not (tmp_path / "run").exists()


def test_a_trial_of_nothing_has_no_effect():
    from ranvier.cli.check import check

    run = replace(OPEN, mesh=Mesh(data=2), batch=Batch(global_size=16))
    warning, = [str(one) for one in check(run, 2, chosen={"launch.trial"}).warnings if one.where == "launch.trial"]
    assert "neither the mesh nor the batch is auto" in warning
