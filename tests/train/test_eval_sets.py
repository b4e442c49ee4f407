"""Named evaluation sets: each separately, in the console, metrics, events and the summary; what is refused."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from ranvier.cli.main import run_command
from ranvier.config.run import Data, Run
from ranvier.data.prepare import _eval_set
from ranvier.data.task import Prepared, eval_set_runs, metric_name
from tests.errors import raises

WORDS = ["good", "fine", "great", "bad", "poor", "awful", "day", "film", "book", "meal"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data")
    for part in range(3):
        torch.manual_seed(part)
        lines = [" ".join(WORDS[place] for place in torch.randint(0, 10, (9,))) for _ in range(40)]
        (path / f"{part}.tsv").write_text("sentence\tlabel\n" + "".join(
            f"{line}\t{'up' if len(line) % 2 else 'down'}\n" for line in lines[part:]))
    (path / "bad.tsv").write_text("sentence\tlabel\na good day\tleft\na bad film\tright\n")
    return path


def test_each_set_is_evaluated_by_itself(data, tmp_path, capsys):
    """Each set gives the same numbers as when it is the only one."""
    args = ["--data.task", "classification", "--data.train", str(data / "0.tsv"), "--model.vocab", "120",
            "--model.num-layers", "1", "--model.hidden", "16", "--model.heads", "2", "--model.sequence", "16",
            "--train.steps", "2", "--train.eval-every", "1", "--batch.global-size", "4", "--data.cache-dir",
            str(tmp_path / "cache"), "--precision", "fp64"]
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("")
    run = tmp_path / "run"
    assert run_command(["train", str(recipe), *args, "--run-dir", str(run), "--data.eval", str(data / "1.tsv"),
                        "--data.eval-sets", f"one={data / '1.tsv'},two={data / '2.tsv'}"]) == 0
    assert "  one 0." in (shown := capsys.readouterr().out) and "  two 0." in shown
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for step in steps:
        assert step["eval_one_loss"] == step["eval_loss"] != step["eval_two_loss"]
        assert (step["eval_one_count"], step["eval_two_count"]) == (39, 38) and "eval_two_accuracy" in step
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [(event["step"], event.get("name")) for event in events if event["event"] == "eval"] == [
        (1, None), (1, "one"), (1, "two"), (2, None), (2, "one"), (2, "two")]
    assert json.loads((run / "summary.json").read_text())["eval_two_loss"] == steps[-1]["eval_two_loss"]
    assert run_command(["evaluate", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert list(found) == ["held-out", "one", "two"]
    assert found["two"]["loss"] == pytest.approx(steps[-1]["eval_two_loss"], rel=1e-12)
    assert run_command(["train", str(recipe), *args, "--run-dir", str(tmp_path / "bad"), "--data.eval",
                        str(data / "1.tsv"), "--data.eval-sets", f"bad={data / 'bad.tsv'}"]) in (1, 2)
    assert "has other classes than the run" in (said := capsys.readouterr().err) or "left" in said
    assert run_command(["check", str(recipe), *args, "--data.eval-sets", "gone=gone.tsv"]) == 2
    assert "data.eval-sets, set gone" in "".join(capsys.readouterr())


@pytest.mark.parametrize("sets", [("x",), ("a=x", "a=y"), ("1=x",), ("a=",)])
def test_sets_that_are_none(sets):
    with raises("malformed-eval-set"):
        eval_set_runs(replace(Run(), data=Data(eval_sets=sets)))


@pytest.mark.parametrize(("changed", "code"), [
    ({"class_names": ("left", "right")}, "eval-set-of-other-task"),
    ({"tokenizer": SimpleNamespace(fingerprint="b")}, "eval-set-of-other-task")])
def test_a_set_of_another_form(changed, code):
    main = Prepared(train=[], eval=[], fingerprint="", about="", weight=1.0, tokenizer=SimpleNamespace(fingerprint="a"))
    with raises(code):
        _eval_set("x", main, replace(main, **changed))


def test_names_of_metrics():
    assert metric_name("", "eval_loss") == "eval_loss" and metric_name("wiki", "eval_f1") == "eval_wiki_f1"
