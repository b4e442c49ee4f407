"""examples/whole_modules: the same losses in one process, with Ranvier and with torch.distributed.pipelining; the
counts of lines in docs/own-model.md."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import python_path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "whole_modules"
CUTS = dict(re.findall(r"^\| `(\w+)` \| `([\w.]+)` \|", (ROOT / "docs" / "own-model.md").read_text(), re.MULTILINE))


def losses(*command):
    """The loss that a program prints for each step."""
    done = subprocess.run([sys.executable, *command], cwd=FOLDER, capture_output=True, text=True, timeout=200,
                          env={**os.environ, "PYTHONPATH": python_path(ROOT), "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"^step \d+: loss ([\d.]+)$", done.stdout, re.MULTILINE)
    assert len(found) == 6, done.stdout
    return [float(loss) for loss in found]


@pytest.fixture
def changed_lines(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("changed_lines")


def test_the_page_has_the_counts_and_ours_are_fewer(changed_lines):
    page = (ROOT / "docs" / "own-model.md").read_text()
    rows = changed_lines.table()
    assert [model for model, *_ in rows] == list(CUTS) and len(rows) == 4
    for model, ours, theirs in rows:
        assert f"| `{model}` | `{CUTS[model]}` | {ours} | {theirs} |" in page
        assert 0 < ours <= theirs


@pytest.mark.slow
@pytest.mark.parametrize("model", CUTS)
def test_programs_print_the_same_losses(model, changed_lines):
    expected = losses("plain.py", model)
    assert losses("with_ranvier.py", model, CUTS[model]) == pytest.approx(expected, abs=2e-4)
    program, theirs = changed_lines.PIPELINING.get(model, ("with_pipelining", model))
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert losses(*torchrun, f"{program}.py", theirs, CUTS[model]) == pytest.approx(expected, abs=2e-4)
