"""benchmarks/results keeps the newest result of each kind, and documents refer to results that exist."""

import json
import re
from collections import defaultdict
from pathlib import Path

import pytest

from benchmarks import record
from benchmarks.pipeline import pipeline
from benchmarks.tensor import run as tensor_run

ROOT = Path(__file__).parents[2]


def _results() -> list[Path]:
    return [path for path in sorted((ROOT / "benchmarks" / "results").rglob("*")) if path.is_file()]


@pytest.mark.parametrize(("name", "expected"), [
    ("stall-20261121-2101.json", ("stall", "20261121-2101")),
    ("overlap-20261121-1351-curve.png", ("overlap", "20261121-1351")),
    ("parts-cifar10-20261122-0532.md", ("parts-cifar10", "20261122-0532")),
    ("simulate-gpt-12b-20261122.png", ("simulate-gpt-12b", "20261122")),
    ("outcomes-sentiment.jsonl", None),
])
def test_kind_and_date_come_from_the_name(name: str, expected: tuple[str, str] | None) -> None:
    assert record.kind_and_date(Path(name)) == expected


def test_writing_a_result_removes_older_results_of_its_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    kept = ["overlap-curve-20200101-0000.json", "quick-overlap-20200101-0000.json", "outcomes.jsonl",
            "overlap-29990101-0000.json"]
    old = ["overlap-20200101-0000.json", "overlap-20200101-0000-curve.png", "overlap-20200101.md"]
    path = record.results_file("memory", "overlap")
    for name in kept + old:
        (path.parent / name).write_text("")
    record.write_results(path, {"rows": []})
    record.write_results(path, {"rows": [1]})
    assert sorted(file.name for file in path.parent.iterdir()) == sorted([*kept, path.name])
    assert json.loads(path.read_text())["rows"] == [1]


def test_a_quick_run_is_a_kind_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    result = record.kind_and_date(record.results_file("memory", "overlap", quick=True))
    assert result is not None and result[0] == "quick-overlap"


def test_a_file_elsewhere_removes_nothing(tmp_path: Path) -> None:
    (tmp_path / "overlap-20200101-0000.json").write_text("")
    record.write_results(tmp_path / "overlap-20990101-0000.json", {})
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(("arguments", "kind"), [
    ([], "plain-2-4-ranks-8-16-microbatches"),
    (["--ranks", "2", "--microbatches", "8", "--untied", "--only", "torch-1f1b"],
     "plain-2-ranks-8-microbatches-untied-selected"),
    (["--scenario", "delay", "--ranks", "2", "--quick"], "quick-delay-2-ranks-8-microbatches"),
])
def test_the_kind_of_a_pipeline_result_names_its_workload(arguments: list[str], kind: str) -> None:
    assert pipeline.parse(arguments).kind == kind


def test_the_kind_of_a_tensor_result_names_its_width() -> None:
    assert tensor_run.kind(tensor_run.parse(["--hidden", "128"])) == "stem-hidden-128"
    assert tensor_run.kind(tensor_run.parse(["--only", "dtensor*"])) == "stem-hidden-512-selected"


def test_one_result_of_each_kind_is_kept() -> None:
    dates: dict[tuple[str, str], set[str]] = defaultdict(set)
    for path in _results():
        if (result := record.kind_and_date(path)) is not None:
            dates[path.parent.name, result[0]].add(result[1])
    several = {kind: sorted(found) for kind, found in dates.items() if len(found) > 1}
    assert dates and not several, f"delete all but the newest of {several}"


def test_documents_refer_to_results_that_exist() -> None:
    missing = []
    for document in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "benchmarks" / "README.md"]:
        for name in re.findall(r"benchmarks/results/[\w./-]*\w\.\w+", document.read_text()):
            if not (ROOT / name).exists():
                missing.append((document.name, name))
    assert not missing
