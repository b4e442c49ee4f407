"""Complete elastic runs: what they report, that they lose nothing, and that they compute what other runs compute."""

from __future__ import annotations

import os
import tomllib
from dataclasses import replace

import pytest

from ranvier.config.run import Checkpoint, Elastic, Pipeline
from ranvier.mesh import Mesh
from ranvier.optim.learning_rate import learning_rate
from ranvier.train import resize
from ranvier.train.events import StepEvent
from ranvier.train.history import History
from tests.covering import quick
from tests.elastic.runs import (
    AT_ONCE,
    BY_HAND,
    IN_TWO,
    NUM_STEPS,
    TRAIN,
    StopAfter,
    Wishes,
    always,
    events,
    lines,
    losses,
    read_rows,
    run_all,
    tiny,
    transitions,
)
from tests.errors import raises


def assert_rates(run, places=range(1, NUM_STEPS + 1), factors=(1.0,) * NUM_STEPS):
    """The learning rates of `run` are the schedule's at these places, counted in steps of the first size."""
    schedule = replace(TRAIN, steps=NUM_STEPS)
    expected = [learning_rate(schedule, place) * factor for place, factor in zip(places, factors, strict=False)]
    assert [line["learning_rate"] for line in lines(run, "metrics.jsonl")] == pytest.approx(expected, rel=1e-12)


def test_a_run_that_packs_itself_is_the_run_that_does_not(sentences, tmp_path, in_one_process, monkeypatch):
    always(monkeypatch)
    run = tiny(sentences, tmp_path / "run", elastic=BY_HAND)
    results, text = run_all(run)
    assert losses(run) == pytest.approx(in_one_process, rel=1e-9)
    assert_rates(run)
    assert all(result == results[0] for result in results)
    told = transitions(run)
    assert [line["step"] for line in told] == [5, 14]
    assert [line["frozen_layers"] for line in told] == [2, 4]
    assert told[-1]["mesh"]["pipe"] < 4 and told[-1]["mesh"]["data"] > 1
    assert all(line["bytes_moved"] > 0 and line["seconds"] > 0 for line in told)
    steps = lines(run, "metrics.jsonl")
    assert [line["frozen_layers"] for line in steps] == [0] * 5 + [2] * 9 + [4] * 10
    assert [(line["step"] - 1, line["transition_bytes"], line["transition_seconds"]) for line in steps
            if "transition_bytes" in line] == [(line["step"], line["bytes_moved"], line["seconds"]) for line in told]
    assert (steps[0]["data"], steps[0]["pipe"]) == (1, 4)
    work = [line["flops_per_second"] * line["step_seconds"] / line["tokens"] for line in steps]
    # six equal layers, and a head that is small in comparison: a third of a frozen layer's work is left
    assert [work[step] / work[0] for step in (8, 20)] == pytest.approx([1 - 2 / 3 * 2 / 6, 1 - 2 / 3 * 4 / 6], rel=0.02)
    assert (steps[-1]["data"], steps[-1]["pipe"]) == (told[-1]["mesh"]["data"], told[-1]["mesh"]["pipe"])
    assert "step 5: froze layers 0-1; " in text and "step 14: froze layers 2-3; " in text
    assert results[0]["frozen_layers"] == 4 and results[0]["transitions"] == 2
    assert [entry["step"] for entry in results[0]["ledger"]] == [5, 14]
    assert all(entry["measured_cost"] > 0 and entry["measured_after"] > 0 for entry in results[0]["ledger"])
    assert [(entry["moved_bytes"], entry["measured_cost"]) for entry in results[0]["ledger"]] == [
        (line["bytes_moved"], pytest.approx(line["seconds"])) for line in told]
    assert results[0]["eval_count"] == 30
    evaluated = [line for line in lines(run, "metrics.jsonl") if "eval_accuracy" in line]
    assert [line["step"] for line in evaluated] == [12, 24] and all(line["eval_count"] == 30 for line in evaluated)


@pytest.mark.slow
@pytest.mark.parametrize(("placement", "packs"), [
    ("v-shape", False), ("interleaved", True)])
def test_several_stages_on_a_rank(sentences, tmp_path, in_one_process, monkeypatch, placement, packs):
    """Three stages on each of two ranks or, packed, one on each of two replicas. The first stage caches its own frozen
    blocks, and not those of the rank's other stages."""
    always(monkeypatch)
    pipeline = Pipeline(stages_per_rank=3, placement=placement, boundaries=(3, 4, 5, 7, 10))
    run = tiny(sentences, tmp_path / "run", mesh=Mesh(pipe=2), pipeline=pipeline, batch=IN_TWO,
               elastic=replace(BY_HAND, auto_pipe=packs, auto_dp=packs, cache=True, cache_from=1,
                               cache_precision="full", cache_dir=tmp_path / "cache"))
    results, _ = run_all(run)
    assert losses(run) == pytest.approx(in_one_process, rel=1e-9)
    assert [line["frozen_layers"] for line in transitions(run)] == [2, 4]
    assert transitions(run)[-1]["mesh"]["data"] == 1 + packs
    assert read_rows(results) > 0 and all(result == results[0] for result in results)


@pytest.mark.slow
def test_a_run_with_several_stages_on_a_rank_is_resized_and_resumes_with_another_number(
        sentences, tmp_path, plain_losses, requests):
    """There are 14 blocks; a request for a mesh with more stages is refused with a reason."""
    run = tiny(sentences, tmp_path / "run", mesh=Mesh(data=2, pipe=2), checkpoint=Checkpoint(every=10, keep=9),
               pipeline=Pipeline(stages_per_rank=4, memory=None))
    wishes = {2: dict(data=1, pipe=4), 4: dict(data=4, pipe=1), 7: dict(data=1, pipe=2)}
    run_all(run, trackers=[Wishes(run, wishes), StopAfter(10, requests)])
    assert [(line["mesh"]["data"], line["mesh"]["pipe"]) for line in transitions(run)] == [(4, 1), (1, 2)]
    refused, = events(run, "resize-refused")
    assert "makes 16 stages on 4 ranks, more than the 14 blocks" in refused["text"]
    assert losses(run) == pytest.approx(plain_losses[:len(losses(run))], rel=1e-9) and len(losses(run)) > 10
    again = replace(run, run_dir=tmp_path / "again", resume=str(run.run_dir / "checkpoint/step-10"),
                    pipeline=Pipeline(stages_per_rank=2, placement="interleaved"))
    run_all(again, trackers=[StopAfter(12, requests)])
    steps = lines(again, "metrics.jsonl")
    assert {(line["data"], line["pipe"]) for line in steps} == {(1, 2)} and len(steps) > 2
    assert len(tomllib.loads((again.run_dir / "run.toml").read_text())["pipeline"]["boundaries"]) == 3
    assert losses(again) == pytest.approx(plain_losses[10:10 + len(steps)], rel=1e-9)


@pytest.mark.slow
def test_idle_ranks_come_to_the_same_end(sentences, tmp_path, in_one_process, monkeypatch):
    always(monkeypatch)
    run = tiny(sentences, tmp_path / "run", elastic=replace(BY_HAND, auto_dp=False))
    results, _ = run_all(run)
    assert losses(run) == pytest.approx(in_one_process, rel=1e-9)
    assert results[0]["mesh"]["data"] == 1 and results[0]["mesh"]["pipe"] < 4
    assert all(result == results[0] for result in results)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [Mesh(pipe=2, data=2), Mesh(pipe=2, col=2), Mesh(data=4)], ids=str)
def test_from_other_meshes(sentences, tmp_path, in_one_process, monkeypatch, mesh):
    always(monkeypatch)
    run = tiny(sentences, tmp_path / "run", mesh=mesh, elastic=BY_HAND)
    run_all(run)
    assert losses(run) == pytest.approx(in_one_process, rel=1e-9)


@pytest.mark.slow
def test_the_cache_changes_nothing(sentences, tmp_path, in_one_process, monkeypatch):
    always(monkeypatch)
    for name, elastic in (("here", replace(BY_HAND, cache=True, cache_from=1, cache_precision="full")),
                          ("there", replace(BY_HAND, cache=True, cache_from=1, cache_precision="full", auto_pipe=False,
                                            auto_dp=False))):
        run = tiny(sentences, tmp_path / name, elastic=replace(elastic, cache_dir=tmp_path / f"cache-{name}"))
        results, _ = run_all(run)
        assert losses(run) == pytest.approx(in_one_process, rel=1e-9)
        assert transitions(run)[-1]["cache"] and read_rows(results) > 0


def test_half_precision_entries_change_little(sentences, tmp_path, in_one_process):
    elastic = replace(BY_HAND, cache=True, cache_from=1, cache_dir=tmp_path / "cache", auto_pipe=False, auto_dp=False)
    run = tiny(sentences, tmp_path / "run", mesh=Mesh(), elastic=elastic, batch=AT_ONCE)
    results, _ = run_all(run)
    assert read_rows(results) > 0
    assert losses(run) == pytest.approx(in_one_process, rel=1e-2)
    assert losses(run) != pytest.approx(in_one_process, rel=1e-9)  # eleven significant bits instead of 53


@pytest.mark.slow
def test_the_articles_rule_packs_by_sizes(sentences, tmp_path, in_one_process):
    """Of 22,162 parameters the largest of four stages has 6,866. With two layers frozen, which weigh a sixth, the
    larger of two stages would have 9,026; with four layers frozen it has 5,746."""
    run = tiny(sentences, tmp_path / "run", elastic=replace(BY_HAND, cut="reference"))
    run_all(run)
    assert losses(run) == pytest.approx(in_one_process, rel=1e-9)
    assert [(line["mesh"]["pipe"], line["mesh"]["data"]) for line in transitions(run)] == [(4, 1), (2, 2)]


@pytest.mark.parametrize(("grows", "factor"), quick(1, [("grow", 1.0), ("scale", 2.0)]))
def test_the_global_batch_may_grow(sentences, tmp_path, monkeypatch, grows, factor):
    always(monkeypatch)
    run = tiny(sentences, tmp_path / "run", mesh=Mesh(pipe=2), batch=IN_TWO, elastic=Elastic(
        freeze="manual", manual=("4:5",), auto_pipe=True, auto_dp=True, global_batch=grows))
    run_all(run)
    told, steps = transitions(run), lines(run, "metrics.jsonl")
    assert told[0]["mesh"]["data"] == 2 and told[0]["global_size"] == 16
    assert [line["tokens"] for line in steps] == [8] * 4 + [16] * 10  # exactly two epochs of 96 samples
    assert_rates(run, places=[1, 2, 3, 4, *range(6, 25, 2)], factors=[1.0] * 4 + [factor] * 10)


def test_a_run_is_resized_while_it_goes_on_and_answers_every_request_once(sentences, tmp_path, plain_losses):
    """Also if several are made at the same time, if one is withdrawn, cannot be read or is a FIFO, which must not stop
    the run, and if the run has not begun or ends before it has looked at a request."""
    run = tiny(sentences, tmp_path / "run", batch=IN_TWO)
    asked, withdrawn = [], []
    wishes = {2: [(2, 2), (3, 2), (1, 2)], 11: [(2, 1)], 14: [(1, 1)], 18: [(1, 4)], NUM_STEPS: [(1, 1)]}
    files = {8: '{"data": 0, "pipe": 1}', 21: '{"data": 1, "pipe": 4}'}

    class Requests:
        def event(self, event):
            step = event.step if type(event).__name__ == "StepEvent" else None
            asked.extend(resize.ask(run.run_dir, data=data, pipe=pipe) for data, pipe in wishes.get(step, ()))
            if step in files:
                (run.run_dir / resize.NAME).write_text(files[step])
            if step == 13:
                withdrawn.append(resize.ask(run.run_dir, data=1, pipe=1))
                (run.run_dir / f"resize-{withdrawn[0]}.json").unlink()
            if step == 16:
                os.mkfifo(run.run_dir / resize.NAME)

        def close(self):
            pass

    run.run_dir.mkdir(parents=True)
    (run.run_dir / "run.toml").touch()
    asked.append(resize.ask(run.run_dir, data=1, pipe=3))
    results, _ = run_all(run, trackers=[Requests()])
    assert losses(run) == pytest.approx(plain_losses, rel=1e-9)
    assert_rates(run)
    assert all(result == results[0] for result in results), "ranks that were idle have the same results"
    assert [(line["mesh"]["data"], line["mesh"]["pipe"]) for line in transitions(run)] == [
        (2, 2), (1, 2), (2, 1), (1, 1), (1, 4)]
    answers = {}
    for line in events(run, "transition") + events(run, "resize-refused"):
        answers.setdefault(line.get("request_id"), []).append(line["text"])
    unreadable = answers.pop(None)
    assert sorted(answers) == sorted(asked) and all(len(texts) == 1 for texts in answers.values())
    assert "it was made before the run began" in answers[asked[0]][0] and "the run ends" in answers[asked[-1]][0]
    assert "needs 6 ranks, and the run was started with 4" in answers[asked[2]][0]
    assert [("is not a mesh" in text, "is the mesh that the run has" in text) for text in unreadable] == [
        (True, False), (False, False), (False, True)]
    assert "cannot be read: is not a regular file" in unreadable[1]
    assert not list(run.run_dir.glob("*resize*"))


def odd_file(path, kind):
    """A file named like a request that no run should read or wait for."""
    if kind == "a FIFO":
        os.mkfifo(path)
    elif kind == "a link":
        path.with_name("other.json").write_text('{"data": 1, "pipe": 1}')
        path.symlink_to("other.json")
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    elif kind == "a folder":
        path.mkdir()
        (path / "file").touch()
    elif kind == "a long one":
        path.write_text('{"data": 1, "pipe": 1}' + " " * 5000)
    elif kind == "nested":
        path.write_text("[" * 4000)
    elif kind == "bytes":
        path.write_bytes(b"\xff\0" * 50)
    else:
        path.write_text({"no JSON": "{", "a list": "[1]", "no numbers": '{"data": true, "pipe": "1"}'}[kind])


@pytest.mark.parametrize("kind", ["a FIFO", "a link", "a device", "a folder", "a long one", "nested", "bytes",
                                  "no JSON", "a list", "no numbers", "of another user"])
def test_a_request_that_is_no_plain_file_of_the_runs_user_is_refused(tmp_path, monkeypatch, kind):
    if kind == "of another user":
        (tmp_path / resize.NAME).write_text('{"data": 1, "pipe": 1}')
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    else:
        odd_file(tmp_path / resize.NAME, kind)
    assert resize.is_waiting(tmp_path)
    found = resize.take_oldest(tmp_path)
    assert (found.sizes, found.request_id) == ({"data": None, "pipe": None}, None)
    problem = {"a FIFO": "is not a regular file", "a folder": "is not a regular file",
               "of another user": "to another user",
               "a link": "is a symbolic link", "a device": "is a symbolic link"}.get(kind)
    assert (problem in found.problem) if problem else found.problem is None
    assert not resize.is_waiting(tmp_path) and resize.take_oldest(tmp_path) is None
    odd_file(tmp_path / resize.NAME, "a folder")
    assert resize.take_oldest(tmp_path) is not None and not resize.is_waiting(tmp_path)


def test_asking_where_no_run_is(tmp_path):
    with raises("not-a-run-folder"):
        resize.ask(tmp_path, data=1, pipe=1)
    (tmp_path / "run.toml").write_text("")
    with raises("resize-late", "0.2"):
        resize.ask_and_wait(tmp_path, data=1, pipe=1, seconds=0.2)
    assert not list(tmp_path.glob("*resize*"))
    assert "asked" in resize.ask_and_wait(tmp_path, data=1, pipe=1, seconds=0)


# ---------------------------------------------------------------------- stopping and resuming

@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "stop"), [
    (Mesh(pipe=2, data=2), 7), (Mesh(pipe=4), 16), (Mesh(pipe=4), 7), (Mesh(data=2), 16), (Mesh(), 16)], ids=str)
def test_an_elastic_run_goes_on_anywhere(sentences, tmp_path, in_one_process, requests, monkeypatch, mesh, stop):
    always(monkeypatch)
    first = tiny(sentences, tmp_path / "run", elastic=BY_HAND, checkpoint=Checkpoint(every=0))
    results, _ = run_all(first, trackers=[StopAfter(stop, requests)])
    assert results[0].keys() == {"stopped_after"}
    again = replace(first, resume="auto", mesh=mesh)
    results, _ = run_all(again)
    assert losses(again) == pytest.approx(in_one_process, rel=1e-9)
    assert_rates(again)
    assert results[0]["frozen_layers"] == 4
    back = [line for line in transitions(again) if "interrupted" in line["reason"]]
    assert [line["frozen_layers"] for line in back] == [2 if stop == 7 else 4]


# ---------------------------------------------------------------------- microbatches, pictures

@pytest.mark.slow
def test_numbers_of_microbatches_are_tried_and_the_fastest_kept(sentences, tmp_path):
    elastic = replace(BY_HAND, auto_pipe=False, auto_dp=False)
    plain, run = (tiny(sentences, tmp_path / name, mesh=mesh, train=replace(TRAIN, epochs=4), elastic=replace(
        elastic, profile_microbatches=name == "run")) for name, mesh in (("plain", Mesh()), ("run", Mesh(pipe=2))))
    run_all(plain)
    run_all(run)
    assert losses(run) == pytest.approx(losses(plain), rel=1e-9)  # the same samples in other microbatches
    told = events(run, "microbatches")
    assert len(told) == 1 and set(told[0]["seconds"]) == {"2", "4", "8"}
    assert str(told[0]["microbatches"]) == min(told[0]["seconds"], key=told[0]["seconds"].get)


def test_the_picture_knows_the_run_before_it_went_on():
    history = History()
    history.remember([{"step": 1, "tokens_per_second": 5.0},
                     {"step": 2, "tokens_per_second": 6.0, "eval_accuracy": 0.5}],
                    [{"step": 0, "event": "start", "mesh": {"pipe": 4, "data": 1}},
                     {"step": 1, "event": "transition", "frozen_layers": 2, "mesh": {"pipe": 2, "data": 2}}])
    history.event(StepEvent(step=3, loss=1.0, tokens=8.0, step_seconds=1.0, wait_seconds=0.0, bubble_fraction=0.0,
                           grad_norm=1.0, learning_rate=1.0, flops_per_second=1.0, model_flops_utilisation=0.1))
    assert history.frozen == {0: 0, 1: 2} and history.meshes == {0: (4, 1), 1: (2, 2)}
    assert history.column("tokens_per_second") == {1: 5.0, 2: 6.0, 3: 8.0} and history.accuracies == {2: 0.5}
