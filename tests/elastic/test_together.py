"""Freezing, the cache, resizes, joins, lost ranks and resumes in one run: every pair of them, with the losses of
one rank."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from ranvier.config import read
from ranvier.config.run import Checkpoint, Pipeline
from ranvier.mesh import Mesh
from tests.elastic.processes import events, resize, undisturbed
from tests.elastic.runs import BY_HAND, StopAfter, Wishes, losses, read_rows, run_all, tiny, transitions
from tests.elastic.test_lost_ranks import kill, steps


@pytest.mark.slow
def test_a_run_that_freezes_caches_is_resized_and_resumes(sentences, tmp_path, in_one_process, requests):
    """The run stops between two freezes, and between two resizes."""
    run = tiny(sentences, tmp_path / "run", mesh=Mesh(pipe=2), checkpoint=Checkpoint(every=0), elastic=replace(
        BY_HAND, auto_pipe=False, auto_dp=False, cache=True, cache_from=1, cache_precision="full",
        cache_dir=tmp_path / "cache"))
    run_all(run, trackers=[Wishes(run, {7: dict(data=2, pipe=1)}), StopAfter(8, requests)])
    again = replace(run, resume="auto")
    results, _ = run_all(again, trackers=[Wishes(run, {15: dict(data=1, pipe=2), 18: dict(data=2, pipe=1)})])
    assert losses(run) == pytest.approx(in_one_process, rel=1e-9)
    assert read_rows(results) > 0
    assert [(line["frozen_layers"], line["mesh"]["data"]) for line in transitions(run)] == [
        (2, 1), (2, 2), (2, 2), (4, 2), (4, 1), (4, 2)]


@pytest.mark.slow
@pytest.mark.parametrize("late", [40, 200], ids=["freezes before a loss", "freezes after a loss"])
def test_every_pair_of_features_in_one_run(start_run, tmp_path, late):
    """Layers freeze and are cached on two ranks; two more join, and the run is resized; one rank is lost, one more
    joins, and the run is told to stop and resumes on another mesh."""
    begin, join = start_run
    run = begin(2, mesh__data=2, mesh__pipe=1, train__steps=3000, manual=f"5:2,{late}:4", checkpoint__every=0,
                elastic__cache="true", elastic__cache_from=1, elastic__cache_precision="full",
                elastic__cache_dir=tmp_path / "cache", launch__survive_losses="true", comm__timeout_seconds=60)
    run.wait_until(lambda: len(steps(run)) > 15)
    ranks = run.ranks()
    first = join(run, "--ranks", 2)
    run.wait_until(lambda: events(run, "joined"))
    run.wait_until(lambda: run.transitions and run.transitions[-1]["mesh"]["data"] == 4)
    assert resize(run, 2, 2).returncode == 0
    kill(run, ranks[1])
    second = join(run)
    run.wait_until(lambda: len(events(run, "joined")) == 2)
    run.wait_until(lambda: len(steps(run)) > late + 5)
    assert resize(run, 4, 1).returncode == 0 or run.transitions[-1]["mesh"]["data"] == 4
    run.process.send_signal(signal.SIGTERM)
    code, text = run.end()
    assert code == 0 and "stopped by SIGTERM" in text, text
    first.end(), second.end()
    done = len(steps(run))
    there = read.merge([read.load(str(run.folder / "run.toml"), keep_folder=True)[1]]).run
    again = replace(there, mesh=Mesh(pipe=2), resume="auto", pipeline=Pipeline(), run_dir=run.folder,
                    train=replace(there.train, steps=done + 20), launch=replace(there.launch, join_address=None,
                                                                                survive_losses=False))
    run_all(again)
    assert steps(run) == list(range(1, done + 21))
    assert run.losses == pytest.approx(undisturbed(run, tmp_path), rel=1e-9)
    assert {2, 4} <= {line["frozen_layers"] for line in run.transitions}
    assert len(events(run, "lost")) == 1 and [line["ranks"] for line in events(run, "joined")] == [2, 1]
