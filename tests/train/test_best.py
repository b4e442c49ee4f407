"""The best checkpoint and early stopping: what is kept and marked, what can use it, and a resumed run that continues
the count."""

import io
import json
import math
from pathlib import Path

import pytest
import torch

from ranvier.checkpoint import files
from ranvier.cli.main import run_command
from ranvier.mesh import Mesh
from ranvier.testing.ranks import run_ranks
from ranvier.train import loop
from ranvier.train import step as step_of_run
from ranvier.train.best import BestEvaluation
from tests.errors import raises

WORDS = ["good", "fine", "great", "bad", "poor", "awful", "day", "film", "book", "meal"]


def seen(best, *values):
    return [best.add(step, {best.metric: value}) for step, value in enumerate(values, start=1)]


def test_the_best_by_mode_of_the_metric():
    loss, accuracy = BestEvaluation("eval_loss"), BestEvaluation("eval_accuracy")
    assert seen(loss, 3.0, math.nan, 2.5, 2.5, 2.9) == [True, False, True, False, False]
    assert seen(accuracy, 0.3, math.nan, 0.5, 0.5, 0.4) == [True, False, True, False, False]
    assert (loss.value, loss.step, accuracy.value, accuracy.step) == (2.5, 3, 0.5, 3) and not loss.should_stop


def test_patience_counts_evaluations_without_enough_improvement():
    best = BestEvaluation("eval_loss", patience=2, delta=0.1)
    assert seen(best, 3.0, 2.95) == [True, True] and not best.should_stop  # better, but not by more than the delta
    resumed = BestEvaluation("eval_loss", patience=2, delta=0.1)
    resumed.load(json.loads(json.dumps(best.state())))
    assert seen(resumed, 2.92) == [True] and resumed.should_stop
    assert resumed.reason == ("early stopping: eval_loss has not improved by more than 0.1 in 2 evaluations; the best "
                              "is 2.92, after step 1")
    assert seen(best, 2.8) == [True] and not best.should_stop
    worse = BestEvaluation("eval_accuracy", patience=1)
    worse.load(best.state())
    assert worse.value is None and seen(worse, math.nan) == [False] and worse.should_stop
    with raises("unknown-metric", "eval_loss"):
        worse.add(1, {"eval_loss": 1.0})


@pytest.fixture
def settings(tmp_path):
    torch.manual_seed(0)
    lines = [" ".join(WORDS[place] for place in torch.randint(0, 10, (9,))) for _ in range(40)]
    (tmp_path / "x.tsv").write_text("sentence\tlabel\n" + "".join(
        f"{line}\t{'up' if len(line) % 2 else 'down'}\n" for line in lines))
    (tmp_path / "recipe.toml").write_text("")
    return [str(tmp_path / "recipe.toml"), "--data.task", "classification", "--data.train", str(tmp_path / "x.tsv"),
            "--data.eval", str(tmp_path / "x.tsv"), "--model.vocab", "120", "--model.num-layers", "1",
            "--model.hidden", "16", "--model.heads", "2", "--model.sequence", "16", "--batch.global-size", "4",
            "--train.eval-every", "1", "--data.cache-dir", str(tmp_path / "cache"), "--checkpoint.every", "1",
            "--checkpoint.keep", "1"]


def scripted(monkeypatch, losses):
    """Evaluations after step 1, 2, ... return these losses, slightly different on each rank."""
    real = step_of_run.evaluate

    def evaluate(runtime, data, step):
        from dataclasses import replace

        return [replace(event, loss=losses[step - 1] + 1e-9 * runtime.world.rank) for event in real(
            runtime, data, step)]

    monkeypatch.setattr(step_of_run, "evaluate", evaluate)


def checkpoints(folder):
    return sorted(path.name for path in Path(folder).glob("step-*"))


def test_a_run_keeps_and_marks_its_best_and_ends_early(settings, tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    args = [*settings, "--run-dir", str(run), "--checkpoint.best", "eval_loss", "--train.early-stopping", "3"]
    scripted(monkeypatch, [3.0, 2.0, 2.5, 2.6, 2.7, 1.0])
    assert run_command(["train", *args, "--train.steps", "4"]) == 0  # ends before the patience does
    assert checkpoints(run / "checkpoint") == ["step-2", "step-4"]
    assert (run / "checkpoint" / "best").resolve().name == "step-2"
    capsys.readouterr()
    assert run_command(["train", *args, "--train.steps", "9", "--resume", "auto"]) == 0
    assert "early stopping: eval_loss has not improved in 3 evaluations; the best is 2, after step 2" in (
        capsys.readouterr().out)
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["best_step"], summary["best_value"], summary["steps"]) == (2, 2.0, 5)
    assert summary["ended_by"].startswith("early stopping") and checkpoints(run / "checkpoint") == ["step-2", "step-5"]
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events[-2:]] != [] and events[-1]["event"] == "end"
    assert run_command(["train", str(run), "--train.steps", "9"]) == 0, "and there is nothing left"
    assert json.loads((run / "events.jsonl").read_text().splitlines()[-2])["event"] == "early-stopping"
    assert checkpoints(run / "checkpoint") == ["step-2", "step-5"]
    for command in (["export", str(run / "best"), str(tmp_path / "out")], ["evaluate", str(run / "checkpoint/best")],
                    ["train", *settings, "--run-dir", str(tmp_path / "second"), "--resume", str(run / "best"),
                     "--train.steps", "3"]):
        capsys.readouterr()
        assert run_command(command) == 0, capsys.readouterr().err
    assert "step-2" in (tmp_path / "second" / "events.jsonl").read_text()


def test_a_better_one_replaces_the_best(settings, tmp_path, monkeypatch):
    run = tmp_path / "run"
    scripted(monkeypatch, [3.0, 2.0, 2.5, 1.0, 1.5, 1.6])
    assert run_command(["train", *settings, "--checkpoint.every", "3", "--run-dir", str(run), "--checkpoint.best",
                        "eval_loss", "--train.steps", "6"]) == 0
    assert checkpoints(run / "checkpoint") == ["step-4", "step-6"], "step 4 is saved only because it is the best"
    assert (run / "checkpoint" / "best").resolve().name == "step-4"


def test_the_best_before_stays_where_a_better_one_cannot_be_written(settings, tmp_path, monkeypatch):
    run, publish = tmp_path / "run", files.publish

    def fails(temporary, final, *rest, **more):
        if final.name == "step-3":
            raise OSError("No space left on device")
        publish(temporary, final, *rest, **more)

    monkeypatch.setattr(files, "publish", fails)
    scripted(monkeypatch, [3.0, 2.0, 1.0, 1.5, 1.6])
    assert run_command(["train", *settings, "--run-dir", str(run), "--checkpoint.best", "eval_loss", "--train.steps",
                        "5"]) == 0
    assert checkpoints(run / "checkpoint") == ["step-2", "step-5"]
    assert (run / "checkpoint" / "best").resolve().name == "step-2"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["best_step"] == 3 and Path(summary["best_checkpoint"]).name == "step-2"


def test_the_mark_that_a_killed_run_did_not_set_is_set_when_it_resumes(settings, tmp_path, monkeypatch):
    run, mark = tmp_path / "run", files.mark_best
    scripted(monkeypatch, [3.0, 2.0, 1.0, 1.5])
    args = ["train", *settings, "--run-dir", str(run), "--checkpoint.best", "eval_loss"]
    for steps, fails_at, marked, kept in ((3, "step-3", "step-2", ["step-2", "step-3"]),
                                          (3, "none", "step-3", ["step-2", "step-3"]),
                                          (4, "none", "step-3", ["step-3", "step-4"])):
        monkeypatch.setattr(files, "mark_best", lambda final, at=fails_at: mark(final) if final.name != at else None)
        assert run_command([*args, "--train.steps", str(steps), "--resume", "auto"]) == 0
        assert ((run / "checkpoint" / "best").resolve().name, checkpoints(run / "checkpoint")) == (marked, kept)
        assert Path(json.loads((run / "summary.json").read_text())["best_checkpoint"]).name == marked


def test_all_ranks_stop_together(settings, tmp_path, monkeypatch):
    from ranvier.cli.options import read_valid_recipe
    from ranvier.config.resolve import resolve

    scripted(monkeypatch, [2.0, 2.0, 2.0, 1.0])
    flags = {name.removeprefix("--").replace("-", "_").replace(".", "__"): value
             for name, value in zip(settings[1::2], settings[2::2], strict=True)}
    _, merged = read_valid_recipe(settings[0], flags | {
        "mesh__data": "2", "mesh__pipe": "2", "run_dir": str(tmp_path / "run"), "train__early_stopping": "2",
        "train__steps": "9", "batch__microbatch_size": "2"}, allow_code=False)
    summaries = run_ranks(lambda world: loop.train(resolve(merged.run), "x", world, stream=io.StringIO()), 4)
    assert merged.run.mesh == Mesh(data=2, pipe=2) and [one["steps"] for one in summaries] == [3] * 4


def test_a_metric_that_is_none(settings, tmp_path, capsys):
    assert run_command(["train", *settings, "--run-dir", str(tmp_path / "run"), "--checkpoint.best", "eval_f1"]) in (
        1, 2)
    assert "checkpoint.best: is not a metric of this run's evaluations" in (said := capsys.readouterr().err)
    assert "eval_loss, eval_accuracy, eval_count" in said
