"""What happens to a run at the same time as a transition: stops, checkpoints, bad steps, reports, ends."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ranvier.mesh import Mesh
from ranvier.run import Checkpoint, Train
from ranvier.stop import StopRequest
from ranvier.train import loop
from ranvier.train.elasticity import Elasticity
from tests.elastic.test_elastic_run import (
    BY_HAND,
    Wishes,
    always,
    in_one_process,
    losses,
    run_all,
    sentences,
    tiny,
    transitions,
)

__all__ = ["in_one_process", "sentences"]  # fixtures


class StopAfter:
    """A tracker that has all ranks told to stop once a step has been told."""

    def __init__(self, step, requests):
        self.step, self.requests = step, requests

    def event(self, event):
        if type(event).__name__ == "StepEvent" and event.step == self.step:
            for request in self.requests:
                request.request("test")

    def close(self):
        pass


@pytest.fixture
def requests(monkeypatch):
    made = []

    def kept():
        made.append(StopRequest(signals=()))
        return made[-1]

    monkeypatch.setattr(loop, "StopRequest", kept)
    return made


def test_a_stop_at_the_step_of_a_transition(sentences, tmp_path, in_one_process, requests):
    """Ranks that come back from idleness in this transition must know of it."""
    run = tiny(sentences, tmp_path / "run", elastic=replace(BY_HAND, auto_pipe=False, auto_dp=False),
               checkpoint=Checkpoint(every=0))
    wishes = Wishes(run, {1: dict(data=1, pipe=1), 4: dict(data=2, pipe=2)})
    results, _ = run_all(run, trackers=[wishes, StopAfter(4, requests)])
    assert all(result == results[0] for result in results) and results[0].keys() == {"stopped_after"}
    assert transitions(run)[-1]["step"] == results[0]["stopped_after"]
    assert [line["mesh"]["pipe"] for line in transitions(run)] == [1, 2]
    run_all(replace(run, resume="auto"))
    assert losses(run) == pytest.approx(in_one_process, rel=1e-9)


@pytest.mark.parametrize(("every", "stop", "mesh"), [(5, 6, Mesh(pipe=4)), (7, 14, Mesh(pipe=2))], ids=str)
def test_a_checkpoint_of_the_step_at_which_layers_freeze_has_them_frozen(sentences, tmp_path, in_one_process,
                                                                         monkeypatch, requests, every, stop, mesh):
    always(monkeypatch)
    run = tiny(sentences, tmp_path / "run", elastic=BY_HAND, checkpoint=Checkpoint(every=every))
    monkeypatch.setattr(loop.Training, "leave", lambda training, step: {"stopped_after": step})  # a run that is killed
    results, _ = run_all(run, trackers=[StopAfter(stop, requests)])
    assert results[0].keys() == {"stopped_after"}
    monkeypatch.undo()
    always(monkeypatch)
    run_all(replace(run, resume="auto", mesh=mesh))
    assert losses(run) == pytest.approx(in_one_process, rel=1e-9)


def test_a_memory_report_after_the_pipeline_has_packed(sentences, tmp_path, monkeypatch):
    always(monkeypatch)
    run = tiny(sentences, tmp_path / "run", elastic=BY_HAND, memory_report=True, train=Train(steps=8))
    results, text = run_all(run)
    assert transitions(run)[-1]["mesh"]["pipe"] == 2 and len(results[0]["memory"]) == 4
    assert "stage 1: predicted" in text and "stage 2: predicted" not in text


def test_the_cache_on_a_tensor_mesh_outlives_transitions(sentences, tmp_path, in_one_process):
    run = tiny(sentences, tmp_path / "run", mesh=Mesh(pipe=2, col=2), elastic=replace(
        BY_HAND, auto_pipe=False, auto_dp=False, cache=True, cache_from=1, cache_precision="full",
        cache_dir=tmp_path / "cache"))
    results, _ = run_all(run, trackers=[Wishes(run, {8: dict(data=2, pipe=1)})])
    assert len(transitions(run)) == 3 and sum(counts["hits"] for counts in results[0]["cache"] if counts) > 0
    assert losses(run) == pytest.approx(in_one_process, rel=1e-9)


def test_going_back_over_a_change_of_the_global_batch():
    elastic = object.__new__(Elasticity)
    elastic._first = type("First", (), {"train": Train(steps=24)})
    elastic._since, elastic._ratio = (5, 5.0), 2.0
    assert elastic.left(7) == 8
    elastic.went_back(6, {"since": [5, 5.0], "ratio": 2.0})
    assert elastic.left(6) == 9
    elastic.went_back(4, {})
    assert elastic.left(4) == 10 and elastic._progress(6) == 8.0
    elastic._since, elastic._ratio = (10, 14.0), 3.0
    elastic.went_back(8, {"since": [4, 4.0], "ratio": 2.0})
    assert elastic._progress(8) == 12.0 and elastic.left(8) == 4


@pytest.mark.parametrize(("first", "sizes"), [(8, (16, 24)), (12, (16, 20, 28)), (6, (10, 14)), (48, (96,))])
def test_no_step_is_left_over_when_the_global_batch_grows(first, sizes):
    """As many steps as have the samples of the first sizes, at whatever step the size changes."""
    for total in (24, 25, 100):
        for at in range(1, total, 7):
            elastic = object.__new__(Elasticity)
            elastic._first = type("First", (), {"train": Train(steps=total)})
            elastic._since, elastic._ratio, step, samples = (0, 0.0), 1.0, 0, 0
            for size in (first, *sizes):
                ratio = size / first
                if ratio != 1.0:
                    elastic._since, elastic._ratio = (step, elastic._progress(step)), ratio
                for _ in range(at):
                    if not elastic.left(step):
                        break
                    left = math.ceil((total * first - samples) / size)
                    assert elastic.left(step) == left, (total, at, size, step)
                    step, samples = step + 1, samples + size
