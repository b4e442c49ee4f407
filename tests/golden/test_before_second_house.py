"""Folders of runs that were written before the second house still resume, with the numbers of the uninterrupted run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.golden.comparison import differences, tolerance_here
from tests.golden.runs import HERE, prepare, read_steps, train_as_threads

OLD = HERE / "before_second_house"
PADDING = {"elastic-bert": {"data.padding": "maximum"}}
"""What runs were before microbatches had lengths of their own."""


@pytest.fixture(scope="module")
def records() -> dict[str, Any]:
    """The numbers of each run after its checkpoint, and the facts of the machine that they are from."""
    found: dict[str, Any] = json.loads((OLD / "records.json").read_text())
    return found


@pytest.mark.parametrize(("name", "ranks", "tolerance"), [
    ("gpt-sharded", 4, 1e-5), ("bf16-offload", 2, 1e-2), ("elastic-bert", 2, 1e-5)])
def test_an_old_run_resumes(name: str, ranks: int, tolerance: float, records: dict[str, Any], tmp_path: Path) -> None:
    prepare(tmp_path)
    shutil.copytree(OLD / name, tmp_path / name)
    expected = records["runs"][name]
    train_as_threads(name, {"resume": "auto", **PADDING.get(name, {})}, ranks, tmp_path, f"{name}/run.toml")
    steps = read_steps(tmp_path / name, after=expected[0]["step"] - 1)
    assert differences(steps, expected, tolerance_here(records["facts"], tolerance)) == []
    # A run that starts from scratch has the same losses, but measures its first steps anew.
    before = _metrics(OLD / name)
    assert _metrics(tmp_path / name)[:len(before)] == before


def _metrics(run_folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
