"""The examples run unchanged, under plain python with the number of ranks that they ask for."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ranvier.config import read
from ranvier.config.run import Run, Transformer
from ranvier.testing.corpora import check_corpus
from ranvier.testing.families import check_family
from ranvier.testing.freezing import check_freeze_policy
from ranvier.testing.rules import check_rule
from ranvier.testing.tasks import check_task
from ranvier.testing.trackers import check_tracker

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run_command(folder, *arguments):
    """`ranvier` with these arguments, in a folder that contains the example, with the package installed."""
    done = subprocess.run([sys.executable, "-m", "ranvier", *arguments], cwd=folder, capture_output=True, text=True,
                          timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def run_example(name, folder, *options):
    return subprocess.run([sys.executable, str(EXAMPLES / name), *options], cwd=folder, capture_output=True, text=True,
                          timeout=240)


@pytest.mark.slow
def test_own_model_learns_on_four_ranks(tmp_path):
    done = run_example("own_model.py", tmp_path)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)$", done.stdout, re.MULTILINE)]
    held_out = float(re.search(r"^held out: loss ([\d.]+)$", done.stdout, re.MULTILINE)[1])
    assert len(losses) == 4, "each once, not once per rank"
    assert held_out < losses[0] / 3


@pytest.mark.slow
def test_own_layers_learn_on_two_rows_and_columns(tmp_path):
    done = run_example("own_layers.py", tmp_path)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)$", done.stdout, re.MULTILINE)]
    held_out = float(re.search(r"^held out: loss ([\d.]+)$", done.stdout, re.MULTILINE)[1])
    assert len(losses) == 4
    assert held_out < losses[0] / 3


@pytest.mark.slow
def test_a_model_of_transformers_learns_on_four_ranks(tmp_path):
    pytest.importorskip("transformers")
    done = run_example("transformers_model.py", tmp_path)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)$", done.stdout, re.MULTILINE)]
    held_out = float(re.search(r"^held out: loss ([\d.]+)$", done.stdout, re.MULTILINE)[1])
    assert len(losses) == 4 and held_out < losses[0] / 3


@pytest.mark.slow
def test_own_checkpoints_go_on_from_two_replicas_on_three_stages(tmp_path):
    first = run_example("own_checkpoints.py", tmp_path, "--steps", "50")
    again = run_example("own_checkpoints.py", tmp_path, "--pipe", "3")
    assert (first.returncode, again.returncode) == (0, 0), first.stderr + again.stderr
    assert "from the start\n" in first.stdout and "goes on after step 50\n" in again.stdout
    said = first.stdout + again.stdout
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)$", said, re.MULTILINE)]
    assert len(losses) == 4 and losses[-1] < losses[0] / 2, said
    assert sorted(path.name for path in (tmp_path / "runs/own-checkpoints").glob("step-*")) == ["step-100", "step-75"]


@pytest.mark.slow
def test_own_tracker_tells_the_slowest_step(tmp_path):
    done = run_example("own_tracker.py", tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^slowest step: \d+, [\d.]+ s, of which \d+% waiting$", done.stdout, re.MULTILINE)) == 1
    assert [path.name for path in tmp_path.glob("runs/own-tracker-*/summary.json")] == ["summary.json"]


def test_own_tracker_conforms(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    check_tracker(importlib.import_module("own_tracker").SlowestStep)


@pytest.mark.parametrize("name", ["own_freezing:GradientChange", "published_freezing:Plasticity",
                                  "published_freezing:StageBalance"])
def test_own_freezing_conforms(name, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    module, _, policy = name.partition(":")
    check_freeze_policy(getattr(importlib.import_module(module), policy))


@pytest.mark.parametrize("options", [{}, {"kernel": 1}, {"kernel": 8, "gated": True}])
def test_own_family_conforms(options, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    settings = Transformer(num_layers=2, hidden=16, vocab=30, sequence=8)
    check_family(importlib.import_module("own_family").Convolutional(**options), settings, "tokens")


def test_own_task_conforms(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    task = importlib.import_module("own_task").LargeSums(count=30)
    run = Run(model=Transformer(vocab=10, sequence=8))
    data = check_task(task, run, lambda targets: torch.nn.functional.one_hot(targets, 2).float())
    assert len(data.train) == 30


def test_own_corpus_conforms(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    check_corpus(importlib.import_module("own_corpus").Sums())


@pytest.fixture
def own(tmp_path):
    """A folder with the examples as files outside of any package, and text for `lm`."""
    (tmp_path / "examples").mkdir()
    for path in EXAMPLES.glob("own_*.py"):
        (tmp_path / "examples" / path.name).write_text(path.read_text())
    (tmp_path / "text.txt").write_text("the arrow flies over green fields and waits\n" * 2000)
    return tmp_path


@pytest.mark.slow
def test_own_family_is_checked_planned_trained_on_four_ranks_and_resumed(own):
    recipe, data = "examples.own_family:recipe", ("--data.corpus", "text.txt", "--data.cache-dir", "cache")
    assert "no problems found" in run_command(own, "check", recipe, "--ranks", "4", *data)
    assert "data x pipe" in run_command(own, "plan", recipe, "--cluster", "laptop", "--ranks", "2", *data)
    assert "a step takes" in run_command(own, "simulate", recipe, "--cluster", "laptop", *data)
    run_command(own, "train", recipe, "--train.steps", "6", "--run-dir", "run", *data)
    said = run_command(own, "train", recipe, "--train.steps", "9", "--mesh.data", "1", "--resume", "auto", "--run-dir",
                       "run", *data)
    assert "resumes from" in said and "written on data 2 x pipe 2" in said
    steps = [json.loads(line) for line in (own / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(1, 10)) and steps[-1]["loss"] < steps[0]["loss"] - 0.5
    told = read.load(str(own / "run" / "run.toml"))[1].values
    assert told["model.family"] == "examples.own_family:Convolutional"
    assert told["model.options"] == ["kernel=6", "gated=true"]


@pytest.mark.slow
def test_own_family_freezes_and_packs(own):
    said = run_command(own, "train", "examples.own_family:recipe", "--train.steps", "12", "--elastic.freeze", "cap",
                       "--elastic.every", "4", "--elastic.auto-pipe", "--elastic.auto-dp", "--elastic.cut", "reference",
                       "--run-dir", "run", "--data.corpus", "text.txt", "--data.cache-dir", "cache")
    assert "step 4: froze layer 0" in said and "step 8: froze layer 1" in said


@pytest.mark.slow
def test_own_family_under_torchrun(own):
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "ranvier", "train",
         "examples.own_family:recipe", "--mesh.data", "1", "--train.steps", "3", "--run-dir", "run", "--data.corpus",
         "text.txt", "--data.cache-dir", "cache", "--comm.transport", "torch"], cwd=own, capture_output=True, text=True,
        timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((own / "run" / "summary.json").read_text())["final_loss"] > 0


@pytest.mark.slow
def test_own_task_is_learnt(own):
    said = run_command(own, "train", "examples.own_task:recipe", "--run-dir", "run")
    assert float(re.search(r"accuracy ([\d.]+)% of 200", said)[1]) > 75
    assert "rows/s" in said


@pytest.mark.slow
def test_own_corpus_is_trained_on(own):
    said = run_command(own, "train", "gpt-tiny", "--data.corpus", "examples.own_corpus:Sums", "--model.num-layers", "1",
                       "--mesh.data", "1", "--train.steps", "3", "--run-dir", "run", "--data.cache-dir", "cache")
    assert "examples.own_corpus:Sums: " in said


def test_own_optimizer_conforms(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    check_rule(importlib.import_module("own_optimizer").Adagrad(epsilon=1e-8))
