"""The examples run as they are, under plain python with the ranks that they ask for."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ranvier.testing.trackers import check_tracker

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run_example(name, folder, *options):
    return subprocess.run([sys.executable, str(EXAMPLES / name), *options], cwd=folder, capture_output=True, text=True,
                          timeout=240)


@pytest.mark.slow
def test_own_model_learns_on_four_ranks(tmp_path):
    done = run_example("own_model.py", tmp_path)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)$", done.stdout, re.MULTILINE)]
    held_out = float(re.search(r"^held out: loss ([\d.]+)$", done.stdout, re.MULTILINE)[1])
    assert len(losses) == 4, "once each, not once a rank"
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
def test_own_checkpoints_go_on_from_two_replicas_on_three_stages(tmp_path):
    first = run_example("own_checkpoints.py", tmp_path, "--steps", "50")
    again = run_example("own_checkpoints.py", tmp_path, "--pipe", "3")
    assert (first.returncode, again.returncode) == (0, 0), first.stderr + again.stderr
    assert "from the start\n" in first.stdout and "goes on after step 50\n" in again.stdout
    said = first.stdout + again.stdout
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)$", said, re.MULTILINE)]
    assert len(losses) == 4 and losses[-1] < losses[0] / 2, said
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*")) == ["step-100", "step-75"]


@pytest.mark.slow
def test_own_tracker_tells_the_slowest_step(tmp_path):
    done = run_example("own_tracker.py", tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^slowest step: \d+, [\d.]+ s, of which \d+% waiting$", done.stdout, re.MULTILINE)) == 1
    assert [path.name for path in tmp_path.glob("runs/own-tracker-*/summary.json")] == ["summary.json"]


def test_own_tracker_conforms(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    check_tracker(importlib.import_module("own_tracker").SlowestStep)
