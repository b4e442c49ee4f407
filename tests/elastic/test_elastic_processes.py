"""Elastic runs as real processes: the command, both transports, `ranvier resize`, idle ranks, kills and signals."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import replace

import pytest

from ranvier.config import read
from ranvier.mesh import Mesh
from ranvier.testing.ranks import run_processes
from ranvier.train.resize import ask
from tests.elastic.processes import resize
from tests.elastic.runs import losses, run_all
from tests.mpi import MPI

SLOW_MPI = pytest.param("mpi", marks=[*MPI.marks, pytest.mark.slow])
BOTH = pytest.mark.parametrize("transport", ["torch", MPI])
MOSTLY_MPI = pytest.mark.parametrize("transport", [pytest.param("torch", marks=pytest.mark.slow), MPI])
MOSTLY_TORCH = pytest.mark.parametrize("transport", ["torch", SLOW_MPI])


@pytest.mark.slow
@MOSTLY_MPI
def test_losses_are_those_of_one_rank_in_this_process(start, tmp_path, transport):
    run = start(transport, elastic__auto_pipe="true", elastic__auto_dp="true", elastic__cut="reference")
    code, text = run.end()
    assert code == 0, text
    there = read.merge([read.load(str(run.folder / "run.toml"))[1]]).run
    here = replace(there, mesh=Mesh(), run_dir=tmp_path / "here",
                   pipeline=replace(there.pipeline, boundaries=None, deferred=None),
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
    assert (done.returncode, done.stdout) == (2, "") and "needs 4 ranks, and the run was started with 3" \
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
    run = start(transport, ranks=2, manual="", train__steps=10**6, comm__timeout_seconds=4,
                launch__stopped_seconds=0)
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
    run = start(transport, ranks=2, manual="", train__steps=10**6, comm__timeout_seconds=4,
                launch__stopped_seconds=0)
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
        # There may be fewer, as parts of the last mesh may still be ending when the first counts are taken.
        assert after[0] <= before[0] and after[1] <= before[1], "threads and open files"
        assert after[2] - before[2] < 32 << 20
