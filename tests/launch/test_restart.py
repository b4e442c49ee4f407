"""A run that restarts automatically: how often, from where, on which mesh, and after which faults."""

import json
import os
import re
import signal
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from ranvier.config.other_mesh import refit
from ranvier.config.resolve import ResolvedRun
from ranvier.config.run import Batch, Launch, Optim, Transformer
from ranvier.errors import ConfigError, Hang, MessageTimeout, RanvierError
from ranvier.launch import failures as failure
from ranvier.launch import start as launch
from ranvier.launch import supervision as supervise
from ranvier.launch.supervision import Outcome
from ranvier.mesh import Mesh
from ranvier.system.processes import Process, descendants
from ranvier.train import restart
from ranvier.train.restart import Restarts
from tests import tiny_runs
from tests.launch.announced import LINUX

SMALL = ResolvedRun(model=Transformer(num_layers=3, hidden=16, heads=4, vocab=260, sequence=16),
                    mesh=Mesh(data=2, pipe=2), batch=Batch(global_size=16, microbatch_size=4), max_restarts=2,
                    resume="auto")


def saved(folder, step=5):
    (folder / "checkpoint" / f"step-{step}").mkdir(parents=True)


def test_so_often_and_then_no_more(tmp_path, capsys):
    restarts = Restarts(replace(SMALL, run_dir=tmp_path), ["python", "train.py"])
    assert restarts(4) == (SMALL.mesh, ["python", "train.py", "--resume", "auto"])
    saved(tmp_path)
    assert restarts(4) == (SMALL.mesh, ["python", "train.py", "--resume", "auto"])
    assert restarts(4) is None
    assert capsys.readouterr().err == (
        "ranvier: restart 1 of 2: the run starts again from its beginning, since it has no checkpoint\n"
        "ranvier: restart 2 of 2: the run starts again from its newest checkpoint\n")


def test_on_the_ranks_that_are_left(tmp_path, capsys):
    saved(tmp_path)
    mesh, _ = Restarts(replace(SMALL, run_dir=tmp_path), [])(3)
    assert mesh == Mesh(data=1, pipe=3)
    assert "on 3 of the 3 ranks that are left: data 1 x pipe 3" in capsys.readouterr().err


def test_on_fewer_where_so_many_have_no_legal_mesh(tmp_path, capsys, monkeypatch):
    """Updates in the backward need batches of one microbatch, which fewer replicas cannot make of 16 sequences."""
    run = replace(SMALL, run_dir=tmp_path, mesh=Mesh(data=4, pipe=1), optim=Optim(update_in_backward=True))
    assert Restarts(run, [])(3) is None and capsys.readouterr().err == ""

    def refused(run, num_ranks, launcher, problems):
        if num_ranks == 3:
            raise ConfigError("is odd", where="mesh", remedy="Take two.")
        return refit(run, num_ranks, launcher, problems)

    monkeypatch.setattr(restart, "refit", refused)
    assert Restarts(replace(SMALL, run_dir=tmp_path), [])(3)[0] == Mesh(data=1, pipe=2)


def test_a_run_that_began_elsewhere_begins_there_again_until_it_has_a_checkpoint_of_its_own(tmp_path):
    restarts = Restarts(replace(SMALL, run_dir=tmp_path, resume="elsewhere"), ["x"])
    assert restarts(3) == (SMALL.mesh, ["x"])
    saved(tmp_path)
    assert restarts(3) == (Mesh(data=1, pipe=3), ["x", "--resume", "auto"])


@pytest.mark.parametrize(("outcome", "starts", "code"), [
    (Outcome(code=1, num_lost=1, retryable=True), [4, 3], 0), (Outcome(code=2), [4], 2),
    (Outcome(code=2, retryable=True), [4, 4], 0), (Outcome(code=143), [4], 143), (Outcome(code=0), [4], 0)])
def test_what_is_started_again(monkeypatch, outcome, starts, code):
    outcomes, seen = [outcome, Outcome(code=0)], []

    def supervised(mesh, transport, reason, command, *more, **options):
        seen.append((mesh.size, command))
        return outcomes.pop(0)

    monkeypatch.setattr(supervise, "supervise", supervised)
    ended = launch._run_local_ranks(Mesh(pipe=4), "torch", Launch(threads=1, device="cpu"), ["first"], None, True,
                                    lambda left: (Mesh(pipe=left), ["again"]))
    assert ended == code
    assert seen == [(size, [command]) for size, command in zip(starts, ("first", "again"), strict=False)]


@pytest.mark.parametrize(("error", "lost", "again"), [
    (Hang("hangs", where="rank 1", remedy="Look."), 1, True),
    (MessageTimeout("did not come", where="a message", remedy="See."), 0, True),
    (ConfigError("cannot be", where="mesh", remedy="Set another."), 0, False),
    (RanvierError("is not a finite number", where="loss", remedy="Lower it."), 0, False), (KeyError("x"), 0, True)])
def test_what_the_first_to_fail_leaves_for_the_parent(error, lost, again):
    kept = {}

    def compare_set(key, expected, value):
        kept.setdefault(key, value)
        return kept[key].encode()

    world = SimpleNamespace(rank=1, store=SimpleNamespace(clone=lambda: SimpleNamespace(compare_set=compare_set)))
    assert failure._is_first(world, error, 2, isinstance(error, RanvierError))
    record = json.loads(kept[failure.FAILED])
    assert (record["num_lost"], record["retryable"]) == (lost, again)


# ------------------------------------------------------------------------------------------------ a real run


@LINUX
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_run_goes_on_without_the_rank_that_is_lost(start_ranks, tmp_path, number):
    run = tmp_path / "run"
    command = start_ranks(sys.executable, "-m", "ranvier", "train", "gpt-tiny", *tiny_runs.flags(
        tmp_path, mesh__data=1, mesh__pipe=2, batch__global_size=4, train__steps=80, train__sample_tokens=2,
        checkpoint__every=5, run_dir=run, comm__transport="torch", max_restarts=1, launch__stopped_seconds=2))
    deadline = time.monotonic() + 120
    while not (run / "checkpoint" / "step-5").exists() and not list(run.glob("checkpoint/step-1*")):
        assert time.monotonic() < deadline and command.process.poll() is None, command.text
        time.sleep(0.05)
    ranks = [process for process in descendants(command.process.pid) if process.variable("RANVIER_LOCAL_RANK")]
    assert len(ranks) == 2
    os.kill(ranks[1].pid, number)
    command.ranks = ranks
    assert command.process.wait(200) == 0, command.text
    command.assert_ranks_end()
    assert re.search(r"^ranvier: restart 1 of 1: the run starts again from its newest checkpoint, on 1 of the 1 ranks "
                     r"that are left: data 1 x pipe 1", command.text, re.MULTILINE), command.text
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 81))
    assert json.loads((run / "summary.json").read_text())["steps"] == 80
    assert Process.find(ranks[1].pid) != ranks[1]
