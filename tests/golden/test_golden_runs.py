"""Golden runs: the same seed gives the same losses and gradient norms, bit by bit, before and after a change."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ranvier.mesh import STANDARD_AXES, Axis
from tests.golden.comparison import differences, machine_facts, tolerance_here
from tests.golden.record import RECORDS
from tests.golden.runs import ELASTIC_BERT, ONE_RANK, RUNS, GoldenRun, Step, prepare


@pytest.fixture(scope="module")
def records() -> dict[str, Any]:
    """The recorded numbers by run, and the facts of the machine on which they were recorded."""
    found: dict[str, Any] = json.loads(RECORDS.read_text())
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the runs train, with their data."""
    made = tmp_path_factory.mktemp("golden")
    prepare(made)
    return made


@pytest.fixture(scope="module")
def one_rank(folder: Path) -> list[Step]:
    """The steps of the run on one rank, from whose checkpoints another run resumes."""
    return ONE_RANK.start(folder)


WITH_AN_AXIS = ("row-2-col-2", "elastic-bert")
"""Runs whose numbers are compared with one more axis."""
SLOW = (*WITH_AN_AXIS, "data-2-pipe-2", "summa", "bf16-host")


@pytest.mark.parametrize("run", [
    pytest.param(run, id=run.name, marks=pytest.mark.slow if run.name in SLOW else ()) for run in RUNS])
def test_numbers_are_the_recorded_ones(
        run: GoldenRun, records: dict[str, Any], folder: Path, request: pytest.FixtureRequest) -> None:
    steps = request.getfixturevalue("one_rank") if run is ONE_RANK else run.start(folder)
    tolerance = tolerance_here(records["facts"], run.tolerance)
    assert differences(steps, records["runs"][run.name], tolerance) == []


def test_a_resumed_run_has_the_numbers_of_the_uninterrupted_one(folder: Path, one_rank: list[Step]) -> None:
    """Also if the uninterrupted run is a process, and the resumed run is not."""
    flags = {**ONE_RANK.flags, "resume": f"{ONE_RANK.name}/checkpoint/step-3"}
    resumed = GoldenRun(name="resumed", flags=flags, as_threads=True).start(folder)
    assert differences(resumed, one_rank[3:], tolerance=0.0) == []


@pytest.mark.parametrize("run", [
    pytest.param(run, id=run.name, marks=() if run.name in WITH_AN_AXIS else pytest.mark.slow)
    for run in RUNS])
def test_another_axis_with_one_rank_changes_no_bit(run: GoldenRun, records: dict[str, Any], tmp_path: Path) -> None:
    """The axis of context parallelism, which would split sequences: it is between two other axes, so it affects all
    code that counts axes."""
    prepare(tmp_path)
    context = Axis("context", "contexts", splits_sequence=True, replicates_parameters=True)
    steps = replace(run, as_threads=True).start(tmp_path, axes=(*STANDARD_AXES[:1], context, *STANDARD_AXES[1:]))
    tolerance = tolerance_here(records["facts"], run.tolerance)
    assert differences(steps, records["runs"][run.name], tolerance) == []


@pytest.mark.slow
def test_ranks_as_processes_have_the_numbers_of_ranks_as_threads(records: dict[str, Any], tmp_path: Path) -> None:
    prepare(tmp_path)
    steps = replace(ELASTIC_BERT, as_threads=False).start(tmp_path)
    tolerance = tolerance_here(records["facts"], ELASTIC_BERT.tolerance)
    assert differences(steps, records["runs"][ELASTIC_BERT.name], tolerance) == []


def test_every_record_belongs_to_a_run(records: dict[str, Any]) -> None:
    assert set(records["runs"]) == {run.name for run in RUNS}


def _step(loss: float) -> Step:
    return {"step": 1, "loss": loss.hex()}


def test_one_bit_is_a_difference() -> None:
    loss = 5.538550853729248
    near = math.nextafter(loss, math.inf)  # another last bit
    assert differences([_step(near)], [_step(loss)], tolerance=0.0) == [
        f"step 1: loss {near!r} ({near.hex()}), recorded was {loss!r} ({loss.hex()})"]
    assert differences([_step(near)], [_step(loss)], tolerance=1e-5) == []
    assert differences([_step(loss * 1.001)], [_step(loss)], tolerance=1e-5) != []


def test_missing_steps_and_numbers_are_differences() -> None:
    assert differences([], [_step(5.0)], tolerance=1e-5) == ["steps [], recorded were [1]"]
    assert differences([{"step": 1}], [_step(5.0)], tolerance=1e-5) == [
        f"step 1: loss None, recorded was 5.0 ({(5.0).hex()})"]


def test_bits_count_on_the_same_machine_only() -> None:
    assert tolerance_here(machine_facts(), 1e-5) == 0.0
    assert tolerance_here({**machine_facts(), "torch": "2.0.0"}, 1e-5) == 1e-5
