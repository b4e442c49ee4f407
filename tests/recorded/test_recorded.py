"""Folders of runs and of a program from earlier code still load, and their next step has the recorded loss."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.golden.comparison import differences, tolerance_here
from tests.golden.runs import prepare
from tests.recorded.record import RECORDS
from tests.recorded.runs import HERE, PROGRAM, RUNS, SAVED, program, resumed

TOLERANCES = {"host": 1e-2}
REORDERED = {"tensor": 1e-7}
"""Runs -> their tolerance: the order of their sums has changed since they were recorded."""


@pytest.fixture(scope="module")
def records() -> dict[str, Any]:
    """The numbers of the step after each checkpoint, and the facts of the machine on which they were recorded."""
    found: dict[str, Any] = json.loads(RECORDS.read_text())
    return found


@pytest.mark.parametrize("name", RUNS)
def test_a_recorded_run_resumes(name: str, records: dict[str, Any], tmp_path: Path) -> None:
    prepare(tmp_path)
    shutil.copytree(HERE / name, tmp_path / name)
    steps = resumed(name, tmp_path)
    assert [step["step"] for step in steps] == [SAVED + 1]
    tolerance = max(tolerance_here(records["facts"], TOLERANCES.get(name, 1e-5)), REORDERED.get(name, 0.0))
    assert differences(steps, records["runs"][name], tolerance) == []
    before = (HERE / name / "metrics.jsonl").read_text()
    assert (tmp_path / name / "metrics.jsonl").read_text().startswith(before)


@pytest.mark.slow
def test_a_recorded_run_resumes_on_another_mesh(records: dict[str, Any], tmp_path: Path) -> None:
    prepare(tmp_path)
    shutil.copytree(HERE / "tensor", tmp_path / "tensor")
    steps = resumed("tensor", tmp_path, **{"mesh.row": 1, "mesh.col": 1, "mesh.data": 2})
    assert differences(steps, records["runs"]["tensor"], 1e-5) == []


@pytest.mark.parametrize("pipe", [2, 1])
def test_a_recorded_program_resumes(pipe: int, records: dict[str, Any], tmp_path: Path) -> None:
    shutil.copytree(HERE / PROGRAM, tmp_path / PROGRAM)
    loss, expected = program(tmp_path, load=True, pipe=pipe), float.fromhex(records["program"])
    assert math.isclose(loss, expected, rel_tol=tolerance_here(records["facts"], 1e-5) if pipe == 2 else 1e-5)


def test_the_folders_name_no_machine() -> None:
    for path in HERE.rglob("*"):
        if path.suffix in (".toml", ".json", ".jsonl"):
            assert "/tmp/" not in path.read_text() and "/home/" not in path.read_text(), path
