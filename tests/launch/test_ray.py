"""examples/ray_ranks.py: each actor's rank counts as torchrun's; and four ranks on Ray's own local cluster."""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from ranvier.checkpoint.manifest import checkpoints
from ranvier.launch.launchers import detect
from tests.launch.scratch_environment import scratch_python, settings, started, wait_for
from tests.processes import processes_with

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/ray_ranks.py"


@pytest.fixture
def example(monkeypatch):
    """The example's names, with a module in place of Ray that starts nothing."""
    for name in ("ray", "ray.util", "ray.util.placement_group", "ray.util.scheduling_strategies"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["ray"].remote = lambda **options: lambda actor: actor
    sys.modules["ray"].util = SimpleNamespace(get_node_ip_address=lambda: "10.0.0.1")
    for name in ("placement_group", "remove_placement_group"):
        setattr(sys.modules["ray.util.placement_group"], name, None)
    sys.modules["ray.util.scheduling_strategies"].PlacementGroupSchedulingStrategy = None
    return runpy.run_path(str(EXAMPLE))


def test_actors_ranks_are_torchruns(example):
    nodes = [("10.0.0.1", 4000), ("10.0.0.2", 4001), ("10.0.0.1", 4002), ("10.0.0.1", 4003)]
    ranks = [detect(variables) for variables in example["variables_of"](nodes, "secret")]
    assert [(rank.launcher, rank.rank, rank.size, rank.local_rank, rank.local_size) for rank in ranks] == [
        ("torchrun", 0, 4, 0, 3), ("torchrun", 1, 4, 0, 1), ("torchrun", 2, 4, 1, 3), ("torchrun", 3, 4, 2, 3)]
    assert {(rank.master, rank.agent_store, rank.secret) for rank in ranks} == {(("10.0.0.1", 4000), False, "secret")}
    address, port = example["Rank"]().node()
    assert address == "10.0.0.1" and 1024 <= port < 65536


def test_an_actor_gives_its_ranks_exit_code(example, capfd):
    assert example["Rank"]().train(["no-such-recipe"], {"RANK": "0"}) == 2
    assert "no-such-recipe" in capfd.readouterr().err


@pytest.fixture(scope="module")
def ray_python(tmp_path_factory):
    """An interpreter that has Ray."""
    if importlib.util.find_spec("ray"):
        return Path(sys.executable)
    return scratch_python(tmp_path_factory.mktemp("ray") / "environment", "ray")


@pytest.mark.slow
def test_four_ranks_on_a_local_cluster(ray_python, tmp_path):
    done = subprocess.run(
        [ray_python, EXAMPLE, "--ranks", "4", "gpt-tiny", "--mesh.data", "2", "--mesh.pipe", "2", "--train.steps",
         "6", "--train.warmup-steps", "2", "--train.sample-tokens", "0", "--run-dir", tmp_path / "run"],
        env={**os.environ, "RAY_OVERRIDE_RESOURCES": '{"CPU": 4}'}, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0 and (tmp_path / "run/summary.json").is_file(), done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_a_run_whose_actor_is_killed_reaches_its_end(ray_python, tmp_path):
    run_dir, output, steps = tmp_path / "run", tmp_path / "output.txt", 1000
    process = started([ray_python, EXAMPLE, "--ranks", "2", *settings(tmp_path, steps)], output,
                      RAY_OVERRIDE_RESOURCES='{"CPU": 2}', OMP_NUM_THREADS="1")
    try:
        wait_for(lambda: checkpoints(run_dir / "checkpoint"), process, output)
        wait_for(lambda: processes_with(run_dir, "RANK=1"), process, output)[0].parent().kill()
        code = process.wait(280)
    finally:
        process.terminate()  # the driver ends its cluster of Ray
        process.wait(60)
    text = output.read_text(errors="replace")
    assert code == 0 and "lost a rank" in text and "attempt 1 has failed" in text, text
    assert "attempt 2" not in text, text
    done = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert done == list(range(1, steps + 1)), "no step is missing or doubled"
    assert "resumes from" in (run_dir / "events.jsonl").read_text()
