"""The pipeline benchmark from the command line's plan to the files: real processes, a tiny model."""

import json
import re

import psutil
import pytest

from benchmarks.pipeline.pipeline import measure, parse
from benchmarks.pipeline.team import TeamFailed

TINY = ["--layers", "1", "--hidden", "16", "--heads", "2", "--vocab", "32", "--sequence", "8", "--sequences", "4",
        "--ranks", "2", "--microbatches", "2", "--quick", "--warmup", "2"]


def _run(folder, *arguments: str) -> tuple[dict, str]:
    path = folder / "result.json"
    measure(parse([*TINY, *arguments]), path)
    assert path.with_suffix(".png").stat().st_size > 5_000
    return json.loads(path.read_text()), path.with_suffix(".md").read_text()


@pytest.mark.slow
def test_results_are_complete(tmp_path, capsys):
    result, table = _run(tmp_path, "--only", "torch-1f1b", "ours-message-driven-gloo")
    assert {"date", "commit", "machine", "versions", "command", "allocator", "rounds", "cases"} <= result.keys()
    assert result["machine"]["cores"] >= 1 and result["versions"]["torch"]
    assert result["command"].startswith("python -m benchmarks.pipeline.pipeline --layers 1 ")
    (case,) = result["cases"]
    assert len(case["block_times"]) == 2
    assert [one["name"] for one in case["contenders"]] == ["torch-1f1b", "ours-message-driven-gloo"]
    for one in case["contenders"]:
        assert one["losses"] == pytest.approx(case["contenders"][0]["losses"], rel=1e-5)
        assert len(one["losses"]) == 2
        for entry in one["rounds"]:
            assert len(entry["step_seconds"]) == 2 and min(entry["step_seconds"]) > 0
            assert entry["bound_seconds"] > 0 and entry["cpu_seconds"] > 0
            assert len(entry["peak_bytes"]) == len(entry["peak_above_imports_bytes"]) == one["ranks"]
            assert all(0 < above < peak for above, peak in zip(entry["peak_above_imports_bytes"], entry["peak_bytes"],
                                                               strict=True))
    ours = case["contenders"][-1]
    assert {"forward", "backward"} <= ours["rounds"][0]["seconds_by_category"][0].keys()
    assert ours["settings"]["boundaries"] == case["contenders"][0]["settings"]["boundaries"]
    lines = [line for line in table.splitlines() if line.startswith("| ") and "---" not in line]
    assert len(lines) == 1 + 2 and all(len(line.split("|")) == 16 for line in lines)
    assert re.search(r"\| ours-message-driven-gloo +\| 2 +\| 2 ", table)
    assert "plain: 2 ranks, 2 microbatches" in capsys.readouterr().out
    assert not psutil.Process().children(recursive=True)


@pytest.mark.slow
def test_a_contender_that_fails_is_told_with_its_output_and_leaves_nothing_behind(tmp_path):
    with pytest.raises(TeamFailed, match=r"(?s)torch-1f1b has ended.*greater than or equal to the number of st"):
        measure(parse([*TINY, "--microbatches", "1", "--only", "torch-1f1b"]), tmp_path / "result.json")
    assert not psutil.Process().children(recursive=True)


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("scenario", ["delay", "slow-stage", "jitter"])
def test_scenarios_over_mpi(tmp_path, scenario):
    result, _ = _run(tmp_path, "--scenario", scenario, "--only", "ours-*-mpi")
    (case,) = result["cases"]
    assert [one["name"] for one in case["contenders"]] == ["ours-message-driven-mpi", "ours-1f1b-mpi", "ours-gpipe-mpi"]
    setting = "latency_seconds" if scenario == "delay" else "slowness"
    assert all(one["settings"][setting] for one in case["contenders"])


@pytest.mark.slow
def test_the_curve(tmp_path):
    result, _ = _run(tmp_path, "--scenario", "curve", "--only", "torch-1f1b", "ours-message-driven-gloo f[23] *")
    settings = [one["settings"] for one in result["cases"][0]["contenders"] if one["kind"] == "ours"]
    assert {one["in_flight"] for one in settings} == {2, 3}
    assert len({one["defer_bytes"] for one in settings}) == 4
