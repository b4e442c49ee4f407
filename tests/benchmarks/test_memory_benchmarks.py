"""The memory benchmarks in their quick form: they run, their files are complete, bytes agree with the formulas and
losses with each other. Speed is not tested."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import memory as gpu
from benchmarks.memory.device_bytes import cases, predicted_bytes
from benchmarks.memory.overlap import covered
from ranvier.config.run import Optim

ROOT = Path(__file__).parents[2]
CIRCUMSTANCES = {"date", "commit", "machine", "versions", "command"}


def run(name: str, folder: Path, *arguments: str) -> tuple[dict, str]:
    """The results and the printed text of `python -m benchmarks.memory.NAME --quick`."""
    path = folder / f"{name}.json"
    done = subprocess.run([sys.executable, "-m", f"benchmarks.memory.{name}", "--quick", "--output", str(path),
                           *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    results = json.loads(path.read_text())
    assert results.keys() >= CIRCUMSTANCES
    assert results["command"].startswith(f"python -m benchmarks.memory.{name} --quick")
    return results, done.stdout


def assert_pictures(folder: Path, *names: str) -> None:
    assert all((folder / name).stat().st_size > 5_000 for name in names)


@pytest.mark.slow
def test_device_bytes_are_those_of_the_formulas(tmp_path):
    results, text = run("device_bytes", tmp_path)
    rows = results["rows"]
    assert len(rows) == len(text.splitlines()) - 2 == len(cases([1, 2], [1, 3]))
    assert {(row["accumulate"], row["offload"]) for row in rows} == {
        (accumulate, offload) for accumulate in ("fp32", "half") for offload in ("none", "stream", "host")}
    for row in rows:
        assert row["measured"] == pytest.approx(row["predicted"], rel=0.02), row
        assert row["phi"] > 0 and row["activations"] > 0
        if row["offload"] != "none":
            assert row["measured"] < row["without_offload"]


def test_formulas_of_device_bytes():
    sizes = {"bucket_size": 10, "buckets_in_flight": 3}
    expected = {("none", "fp32"): 18_000, ("none", "half"): 16_040, ("stream", "fp32"): 6_360,
                ("stream", "half"): 4_400, ("host", "fp32"): 6_000, ("host", "half"): 4_000}
    for (offload, accumulate), size in expected.items():
        assert predicted_bytes(Optim(offload=offload, accumulate=accumulate, **sizes), 1000) == size


@pytest.mark.slow
def test_peers_train_the_same(tmp_path):
    results, text = run("peers", tmp_path)
    assert "losses differ" not in text
    by_name = {one["name"]: one for one in results["contenders"]}
    assert len(by_name) == 7 and sum(one["ranks"] == 2 for one in by_name.values()) == 3
    for one in by_name.values():
        assert one["largest_loss_difference"] <= 1e-4
        assert one["losses"] == pytest.approx(by_name["torch AdamW"]["losses"], rel=1e-4)
        spread = one["speed_over_peer"]
        assert 0 < spread["least"] <= spread["middle"] <= spread["greatest"]
        for entry in one["rounds"]:
            assert len(entry["seconds"]) == results["steps"] and min(entry["seconds"]) > 0
            assert len(entry["state_bytes"]) == len(entry["peak_rss_bytes"]) == one["ranks"]
            assert min(entry["state_bytes"]) > 0 and min(entry["peak_rss_bytes"]) > 2**20
    states = {name: max(one["rounds"][-1]["state_bytes"]) for name, one in by_name.items()}
    assert states["ours none"] == states["ours stream"] == pytest.approx(states["torch AdamW"], rel=0.01)
    assert states["ours host"] == states["ours none"] * 3 // 2
    assert states["ours data 2 sharded"] == pytest.approx(states["ours data 2"] / 2, rel=0.01)


@pytest.mark.slow
def test_overlap(tmp_path):
    results, _ = run("overlap", tmp_path)
    assert_pictures(tmp_path, "overlap.png", "overlap-curve.png")
    assert [(row["k"], row["shard"]) for row in results["rows"]] == [
        (k, shard) for shard in (False, True) for k in (1, 4, 0)]
    assert results["bytes_per_second"] > 0
    for row in results["rows"]:
        assert row["losses"] == pytest.approx(results["rows"][0]["losses"], rel=1e-4)
        assert row["seconds"] > 0 and row["moving_ms"] > 0 and row["optimizer_ms"] > 0 and row["overlap_ms"] >= 0
        assert len(row["example"]) == 2
        moved = {name for rank in row["example"] for name, _, _ in rank["moving"]}
        assert moved == ({"reduce", "gather"} if row["shard"] else {"reduce"})
    sequential = next(row for row in results["rows"] if row["k"] == 0 and not row["shard"])
    assert all(len(rank["moving"]) == 1 for rank in sequential["example"])
    assert sequential["overlap_ms"] == pytest.approx(0.0, abs=1e-6)


def test_covered_time_counts_what_overlaps_once_and_nothing_before_zero():
    assert covered([("a", 1.0, 3.0), ("b", 2.0, 4.0), ("c", 6.0, 7.0)]) == 4.0
    assert covered([("a", -5.0, -1.0), ("b", -2.0, 2.0)]) == 2.0


@pytest.mark.slow
def test_saved(tmp_path):
    results, text = run("saved", tmp_path)
    assert_pictures(tmp_path, "saved.png", "saved-pipe.png")
    assert "losses differ" not in text
    assert [row["name"] for row in results["rows"]] == [
        "data 1 x pipe 4, none", "data 1 x pipe 4, stream", "data 2 x pipe 2, stream", "data 4 x pipe 1, stream"]
    none, stream = results["rows"][:2]
    assert none["host_bytes"] == [0, 0, 0, 0] and min(stream["host_bytes"]) > 0
    for row in results["rows"]:
        assert row["largest_loss_difference"] <= 1e-4 and row["seconds"] > 0
        assert row["phases"].keys() == {"pipeline", "reduction", "optimizer", "other"}
        assert row["phases"]["pipeline"] > 0 and row["phases"]["optimizer"] > 0
        assert min(row["device_bytes"]) > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
def test_gpu_memory_says_that_there_is_no_device(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu.memory"])
    assert gpu.main() == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 1 and "no CUDA device" in out


def small() -> tuple:
    options = gpu.parse(["--hidden", "128", "--vocab", "512", "--sequence", "32"])
    return options, gpu.config_of(2, options)


@pytest.mark.slow
def test_gpu_tries_train_on_any_device():
    _, config = small()
    for name in ("none", "stream-half-d3", "host"):
        found = gpu.try_ours(config, gpu.SETTINGS[name], torch.device("cpu"))
        assert all(0 < loss < 20 for loss in found["losses"]) and found["end_seconds"] > 0
    found = gpu.try_fsdp(config, torch.device("cpu"))
    assert all(0 < loss < 20 for loss in found["losses"]) and found["host_bytes"] == 16 * gpu.count_parameters(config)


def test_gpu_updates_are_timed_on_any_device():
    assert 0 < gpu.update_seconds(torch.device("cpu"), 1 << 10) < 1e-3


def test_gpu_search_finds_the_largest_that_fits(monkeypatch):
    options, _ = small()
    monkeypatch.setattr(gpu.Search, "run", lambda self, name, layers, deadline: self._told(
        name, layers, {"layers": layers} if layers <= 37 else None, "full"))
    best, fits, bound = gpu.Search(options, float("inf")).largest("none", 60.0)
    assert 32 <= best["layers"] <= 37 and bound == "full" and set(fits) >= {16, 32}
