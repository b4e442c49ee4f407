"""The sbatch script of docs/slurm.md on a Slurm that really preempts, requeues, signals, cancels and loses tasks."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.slurm.cluster import cluster, missing
from tests.processes import processes_with

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.skipif(bool(missing()), reason=missing())]
SCRIPT = Path(__file__).parents[3] / "examples/slurm/train.sbatch"
STEPS = 120
RECIPE = ["gpt-tiny", "--mesh.data", "2", "--mesh.pipe", "2", "--model.num-layers", "2", "--model.hidden", "32",
          "--model.heads", "2", "--batch.global-size", "8", "--batch.microbatch-size", "2", "--train.warmup-steps", "2",
          "--train.sample-tokens", "0", "--train.eval-sequences", "8", "--checkpoint.every", "1000",
          "--train.steps", str(STEPS)]


@pytest.fixture(scope="module")
def slurm():
    with cluster() as found:
        found.environment["PATH"] = f"{Path(sys.executable).parent}:{found.environment['PATH']}"
        yield found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The losses of the same run without interruption and without Slurm."""
    folder = tmp_path_factory.mktemp("undisturbed")
    subprocess.run([sys.executable, "-m", "ranvier", "train", *RECIPE, "--run-dir", folder / "run"], check=True,
                   capture_output=True, timeout=300)
    return losses(folder / "run")


def losses(run_dir):
    """Step -> its loss; the last one, if the step was run again."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def steps_of(run_dir):
    return len(losses(run_dir)) if (run_dir / "metrics.jsonl").is_file() else 0


def submit(slurm, folder, *options):
    return slurm.submit("--cpus-per-task=1", *options, f"--output={folder}/job.out", str(SCRIPT), str(folder / "run"),
                        *RECIPE)


def under_way(slurm, folder, steps, seconds=240):
    """Return once the run has completed this many steps."""
    end = time.monotonic() + seconds
    while steps_of(folder / "run") < steps:
        assert time.monotonic() < end, (folder / "job.out").read_text() + slurm.logs()
        time.sleep(0.1)


def checkpoints(folder):
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "run/checkpoint").glob("step-*"))


def assert_finished(slurm, number, folder, undisturbed, starts):
    job = slurm.wait(number, "COMPLETED", "FAILED", "TIMEOUT", "NODE_FAIL", "CANCELLED")
    text = (folder / "job.out").read_text()
    assert job["JobState"] == "COMPLETED", text
    assert job["Restarts"] == str(starts - 1) and text.count("ranks          4 over torch") == starts, text
    found = losses(folder / "run")
    assert found.keys() == undisturbed.keys()
    assert all(found[step] == pytest.approx(loss, rel=1e-6) for step, loss in undisturbed.items())
    assert (folder / "run/summary.json").is_file()


def test_a_preempted_job_saves_goes_back_into_the_queue_and_resumes(slurm, tmp_path, undisturbed):
    number = submit(slurm, tmp_path, "--partition=low")
    under_way(slurm, tmp_path, 10)
    urgent = slurm.submit("--partition=high", "--nodes=2", "--exclusive", f"--output={tmp_path}/urgent.out", "--wrap",
                          "sleep 3")
    slurm.wait(urgent, "COMPLETED")
    assert checkpoints(tmp_path) and 10 <= checkpoints(tmp_path)[0] < STEPS
    assert_finished(slurm, number, tmp_path, undisturbed, starts=2)


def test_a_job_before_its_time_limit_saves_and_continues_as_the_same_job(slurm, tmp_path, undisturbed):
    """Slurm sends USR1 whole minutes before the limit; sending the same signal by hand is faster."""
    number = submit(slurm, tmp_path, "--partition=low")
    for steps in (10, 30):
        under_way(slurm, tmp_path, steps)
        slurm.run("scancel", "--signal=USR1", number)
        before = len(checkpoints(tmp_path))
        slurm.wait(number, "PENDING", "COMPLETED")
        assert len(checkpoints(tmp_path)) >= max(1, before)
        slurm.wait(number, "RUNNING", "COMPLETED")
    assert_finished(slurm, number, tmp_path, undisturbed, starts=3)


def test_a_lost_task_ends_the_job_with_its_report(slurm, tmp_path):
    """No checkpoint, so no progress: the job is not put back into the queue."""
    number = submit(slurm, tmp_path, "--partition=low")
    under_way(slurm, tmp_path, 5)
    ranks = {int(process.environ()["SLURM_PROCID"]): process.pid for process in _ranks(tmp_path)}
    assert sorted(ranks) == [0, 1, 2, 3]
    os.kill(ranks[2], signal.SIGKILL)
    job = slurm.wait(number, "FAILED", "COMPLETED", "CANCELLED", "TIMEOUT")
    text = (tmp_path / "job.out").read_text()
    assert job["JobState"] == "FAILED" and "not put back into the queue" in text, text
    assert re.search(r"task 2: Killed$", text, re.MULTILINE) and not re.search(r"task [013]: Killed", text), text
    assert "Traceback" not in text, text
    assert slurm.run("squeue", "--noheader") == ""


def _ranks(folder):
    """Processes of tasks, found by srun's task number in their environment."""
    return [process for process in processes_with(folder / "run", "SLURM_PROCID") if "python" in process.exe()]


def test_scancel_ends_the_job_for_good(slurm, tmp_path):
    number = submit(slurm, tmp_path, "--partition=low")
    under_way(slurm, tmp_path, 5)
    slurm.run("scancel", number)
    assert slurm.wait(number, "CANCELLED", "COMPLETED")["JobState"] == "CANCELLED"
    end = time.monotonic() + 30
    while _ranks(tmp_path):
        assert time.monotonic() < end, "ranks are still running"
        time.sleep(0.2)
