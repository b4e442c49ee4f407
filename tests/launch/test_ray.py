"""examples/ray_ranks.py: each actor's rank is one of torchrun's; and four ranks on Ray's own local cluster."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from ranvier.launch.launchers import detect

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/ray_ranks.py"


@pytest.fixture
def example(monkeypatch):
    """The example's names, with a module in the place of Ray that starts nothing."""
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


@pytest.mark.slow
def test_four_ranks_on_a_local_cluster(tmp_path):
    pytest.importorskip("ray")
    done = subprocess.run(
        [sys.executable, EXAMPLE, "--ranks", "4", "gpt-tiny", "--mesh.data", "2", "--mesh.pipe", "2", "--train.steps",
         "6", "--train.warmup-steps", "2", "--train.sample-tokens", "0", "--run-dir", tmp_path / "run"],
        env={**os.environ, "RAY_OVERRIDE_RESOURCES": '{"CPU": 4}'}, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0 and (tmp_path / "run/summary.json").is_file(), done.stdout + done.stderr
