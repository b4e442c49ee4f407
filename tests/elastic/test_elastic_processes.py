"""Elastic runs as real processes: the command, both transports, `ranvier resize`, idle ranks, kills and signals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ranvier.config import read
from ranvier.launch.mpiexec import mpi_available
from ranvier.mesh import Mesh
from ranvier.testing.ranks import run_processes
from ranvier.train.resize import ask
from tests.elastic.test_elastic_run import losses, run_all, sentences

__all__ = ["sentences"]  # a fixture

MPI = pytest.param("mpi", marks=[pytest.mark.mpi, pytest.mark.skipif(mpi_available() is not None, reason="no MPI")])
SLOW_MPI = pytest.param("mpi", marks=[*MPI.marks, pytest.mark.slow])
BOTH = pytest.mark.parametrize("transport", ["torch", MPI])
MOSTLY_MPI = pytest.mark.parametrize("transport", [pytest.param("torch", marks=pytest.mark.slow), MPI])
MOSTLY_TORCH = pytest.mark.parametrize("transport", ["torch", SLOW_MPI])
DEADLINE_SECONDS = 120


class Command:
    """`ranvier train` on a tiny BERT over two epochs, and what it leaves in its folder."""

    def __init__(self, sentences, folder, transport, ranks=4, manual="5:2,14:4", faults=(), inside=(), **flags):
        """inside: what runs the command, on another host."""
        self.folder, self.began = folder, time.monotonic()
        settings = {
            "model.num-layers": 6, "model.hidden": 16, "model.heads": 2, "model.vocab": 120, "model.sequence": 12,
            "batch.global-size": 8, "batch.microbatch-size": 2, "train.steps": 24, "train.learning-rate": 3e-3,
            "train.warmup-steps": 0, "train.eval-every": 0, "train.sample-tokens": 0, "precision": "fp64",
            "mesh.data": 1, "mesh.pipe": ranks, "data.task": "classification", "data.train": sentences / "train.tsv",
            "data.eval": sentences / "eval.tsv", "data.cache-dir": sentences / "cache", "comm.transport": transport,
            "comm.timeout-seconds": 20, "checkpoint.every": 0, "launch.device": "cpu", "run-dir": folder, **({
                "elastic.freeze": "manual", "elastic.manual": manual} if manual else {}), **{
                name.replace("__", ".").replace("_", "-"): value
                for name, value in flags.items()}}
        words = [str(word) for name, value in settings.items() for word in (f"--{name}", value)]
        program = ["ranvier"] if not faults else [
            "ranvier.testing.faults", *(word for fault in faults for word in ("--fault", fault)), "--"]
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COVERAGE"))}
        self.process = subprocess.Popen(
            [*inside, sys.executable, "-m", *program, "train", "gpt-tiny", *words],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ | {"OMP_NUM_THREADS": "1"})

    def lines(self, name):
        try:
            return [json.loads(line) for line in (self.folder / name).read_text().splitlines(keepends=True)
                    if line.endswith("\n")]
        except FileNotFoundError:
            return []

    @property
    def losses(self):
        return [line["loss"] for line in self.lines("metrics.jsonl")]

    @property
    def transitions(self):
        return [line for line in self.lines("events.jsonl") if line["event"] == "transition"]

    def wait_until(self, condition):
        while not condition():
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() - self.began < DEADLINE_SECONDS
            time.sleep(0.01)

    def ranks(self):
        """Process ids of the ranks, by rank."""
        found = {}
        for path in Path("/proc").iterdir():
            try:
                environ = (path / "environ").read_bytes().split(b"\0") if path.name.isdigit() else []
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1]) if environ else 0
            except OSError:
                continue
            rank = next((int(entry.partition(b"=")[2]) for entry in environ
                         if entry.startswith((b"RANVIER_LOCAL_RANK=", b"PMI_RANK=", b"OMPI_COMM_WORLD_RANK="))), None)
            if rank is not None and self._is_ours(parent):
                found[rank] = int(path.name)
        return found

    def _is_ours(self, process):
        while process > 1:
            if process == self.process.pid:
                return True
            try:
                process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                return False
        return False

    def end(self):
        """Exit code and output; no process of it is left."""
        text, _ = self.process.communicate(timeout=DEADLINE_SECONDS)
        return self.process.returncode, text


@pytest.fixture
def start(sentences, tmp_path):
    started = []

    def begin(transport="torch", **options):
        started.append(Command(sentences, options.pop("folder", tmp_path / "run"), transport, **options))
        return started[-1]

    yield begin
    for each in started:
        each.process.kill()
        each.process.communicate()


def resize(run, data, pipe, wait=60):
    return subprocess.run([sys.executable, "-m", "ranvier", "resize", str(run.folder), "--data", str(data), "--pipe",
                           str(pipe), "--wait", str(wait)], capture_output=True, text=True, timeout=DEADLINE_SECONDS,
                          check=False)


@pytest.mark.slow
@MOSTLY_MPI
def test_losses_are_those_of_one_rank_in_this_process(start, tmp_path, transport):
    run = start(transport, elastic__auto_pipe="true", elastic__auto_dp="true", elastic__cut="reference")
    code, text = run.end()
    assert code == 0, text
    there = read.merge([read.load(str(run.folder / "run.toml"))[1]]).run
    here = replace(there, mesh=Mesh(), run_dir=tmp_path / "here", pipeline=replace(there.pipeline, boundaries=None),
                   elastic=replace(there.elastic, auto_pipe=False, auto_dp=False))
    run_all(here)
    assert run.losses == pytest.approx(losses(here), rel=1e-9)
    assert [line["step"] for line in run.transitions] == [5, 14] and run.transitions[-1]["mesh"]["data"] > 1


@pytest.mark.slow
@MOSTLY_TORCH
def test_a_run_is_resized_from_outside_and_told_to_stop_while_ranks_are_idle(start, transport):
    run = start(transport, ranks=3, manual="", train__steps=10**6)
    run.wait_until(lambda: len(run.losses) > 3)
    done = resize(run, 1, 2)
    assert (done.returncode, done.stderr) == (0, "") and re.match(r"step \d+: pipe 3 -> 2; moved ", done.stdout)
    done = resize(run, 2, 2)
    assert (done.returncode, done.stdout) == (2, "") and "needs 4 stages in all, and the run was started with 3" \
        in done.stderr
    assert resize(run, 3, 1).returncode == 0
    assert resize(run, 1, 1).returncode == 0
    run.process.send_signal(signal.SIGTERM)
    code, text = run.end()
    assert code == 0 and "stopped by SIGTERM" in text, text
    steps = len(run.losses)
    again = start(transport, ranks=3, manual="", train__steps=steps + 3, resume="auto")
    code, text = again.end()
    assert code == 0, text
    assert [line["step"] for line in again.lines("metrics.jsonl")] == list(range(1, steps + 4))
    assert again.transitions[-1]["mesh"]["data"] == again.transitions[-1]["mesh"]["pipe"] == 1


@pytest.mark.slow
@BOTH
def test_an_idle_rank_that_is_killed_ends_the_run(start, transport):
    run = start(transport, ranks=2, manual="", train__steps=10**6)
    run.wait_until(lambda: run.losses)
    ask(run.folder, data=1, pipe=1)
    run.wait_until(lambda: run.transitions)
    os.kill(run.ranks()[1], signal.SIGKILL)
    code, text = run.end()
    assert code == 1 and "ranvier: rank 1 (idle) was killed by SIGKILL" in text, text
    assert "Traceback" not in text


@pytest.mark.slow
@MOSTLY_TORCH
def test_a_rank_that_is_killed_while_state_travels(start, transport):
    run = start(transport, ranks=2, manual="", train__steps=10**6, faults=["kill:rank=1,message=3,of=state"])
    run.wait_until(lambda: run.losses)
    ask(run.folder, data=2, pipe=1)
    code, text = run.end()
    assert code == 1 and "ranvier: rank 1 (data 1, pipe 0, row 0, col 0) was killed by SIGKILL" in text, text
    assert "Traceback" not in text


@pytest.mark.slow
@BOTH
def test_an_idle_rank_that_has_stopped_is_missed_at_the_next_transition(start, transport):
    run = start(transport, ranks=2, manual="", train__steps=10**6, comm__timeout_seconds=4)
    run.wait_until(lambda: run.losses)
    ask(run.folder, data=1, pipe=1)
    run.wait_until(lambda: run.transitions)
    os.kill(run.ranks()[1], signal.SIGSTOP)
    ask(run.folder, data=1, pipe=2)
    code, text = run.end()
    assert code in (1, 2) and "no heartbeat from rank 1 (data 0, pipe 1, row 0, col 0)" in text, text


@pytest.mark.slow
@BOTH
def test_an_idle_rank_notices_that_rank_0_has_stopped(start, transport):
    run = start(transport, ranks=2, manual="", train__steps=10**6, comm__timeout_seconds=4)
    run.wait_until(lambda: run.losses)
    ask(run.folder, data=1, pipe=1)
    run.wait_until(lambda: run.transitions)
    os.kill(run.ranks()[0], signal.SIGSTOP)
    code, text = run.end()
    assert code in (1, 2) and "nothing was heard from rank 0, whose commands an idle rank awaits" in text, text
    assert "[rank 1 (idle)]" in text


@pytest.mark.slow
@BOTH
def test_nothing_is_left_of_a_mesh_that_was_left(transport):
    for before, after in run_processes("tests.elastic.many_transitions:go_round", 2, transport, args=[50],
                                       timeout_seconds=300):
        # Fewer: what is left of the last mesh may still be ending when the first figures are taken.
        assert after[0] <= before[0] and after[1] <= before[1], "threads and open files"
        assert after[2] - before[2] < 32 << 20
