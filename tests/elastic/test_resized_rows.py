"""Requests for other rows and columns during a run: the same losses, frozen layers, the cache, a resumed run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ranvier.config.run import Checkpoint, Elastic, TensorParallel, Train
from ranvier.mesh import Mesh
from ranvier.train import resize
from tests.elastic.runs import (
    AT_ONCE,
    BY_HAND,
    IN_TWO,
    NUM_STEPS,
    StopAfter,
    Wishes,
    always,
    events,
    losses,
    read_rows,
    run_all,
    tiny,
    transitions,
    write_sentences,
)

PLASTICITY = "examples.published_freezing:Plasticity"


def mesh_of(line):
    return tuple(line["mesh"][axis] for axis in ("data", "pipe", "row", "col"))


@pytest.mark.parametrize(("first", "wishes", "stop", "meshes", "ranks", "told"), [
    (Mesh(pipe=2), {1: dict(data=1, pipe=1, row=2), 2: dict(data=1, pipe=1, row=2, col=3),
                    3: dict(data=1, pipe=1, row=1, col=2)}, 5, [(1, 1, 2, 1), (1, 1, 1, 2)], [6],
     "pipe 2 -> 1, row 1 -> 2"),
    pytest.param(Mesh(pipe=4), {
        2: dict(data=1, pipe=1, row=2, col=2), 5: dict(data=1, pipe=2, row=1), 8: dict(data=2, pipe=1, row=1, col=1),
        11: dict(data=1, pipe=2, row=2), 14: dict(data=1, pipe=1, row=2, col=3), 16: dict(data=2, pipe=2, row=2),
        18: dict(data=1, pipe=4, row=1, col=1)}, None, [
            (1, 1, 2, 2), (1, 2, 1, 2), (2, 1, 1, 1), (1, 2, 2, 1), (1, 4, 1, 1)], [6, 8],
        "pipe 4 -> 1, row 1 -> 2, col 1 -> 2", marks=pytest.mark.slow)], ids=["two", "five"])
def test_rows_and_columns_change_while_a_run_goes_on(sentences, tmp_path, plain_losses, requests, first, wishes, stop,
                                                     meshes, ranks, told):
    """AdamW's states move too; sizes that a request does not name stay. stop: the step after which the run is told to
    stop. ranks: needed by the requests that are refused."""
    run = tiny(sentences, tmp_path / "run", mesh=first, batch=IN_TWO)
    results, text = run_all(run, trackers=[Wishes(run, wishes), StopAfter(stop, requests)])
    found = losses(run)
    assert found == pytest.approx(plain_losses[:len(found)], rel=1e-9) and len(found) > (stop or NUM_STEPS - 1)
    assert [mesh_of(line) for line in transitions(run)] == meshes
    refused = [line["text"] for line in events(run, "resize-refused")]
    assert [f"needs {size} ranks, and the run was started with {first.size}" in line
            for size, line in zip(ranks, refused, strict=True)] == [True] * len(ranks)
    assert "resize request for data 1 x pipe 1 x row 2 x col 3 refused" in refused[0]
    assert told in text
    assert all(result == results[0] for result in results)


def test_a_tensor_mesh_that_the_model_does_not_divide_into_is_refused(sentences, tmp_path):
    """Two heads on three columns, and rows that are not a number."""
    run = tiny(sentences, tmp_path / "run", mesh=Mesh(pipe=3), train=Train(steps=6), batch=IN_TWO)

    class Asks(Wishes):
        def event(self, event):
            super().event(event)
            if type(event).__name__ == "StepEvent" and event.step == 3:
                (self.run.run_dir / resize.NAME).write_text('{"data": 1, "pipe": 1, "row": "two"}')

    run_all(run, trackers=[Asks(run, {1: dict(data=1, pipe=1, col=3)})])
    refused = [line["text"] for line in events(run, "resize-refused")]
    assert "mesh.col: does not divide model.heads 2 (got 3)" in refused[0] and "is not a mesh" in refused[1]
    assert not transitions(run)


def test_rows_with_too_few_held_out_samples_for_the_policy_are_refused(sentences, tmp_path):
    run = tiny(sentences, tmp_path / "run", mesh=Mesh(pipe=2), train=Train(steps=6),
               elastic=Elastic(freeze=PLASTICITY), batch=IN_TWO)
    run = replace(run, data=replace(run.data, eval_samples=3))
    run_all(run, trackers=[Wishes(run, {2: dict(data=1, pipe=1, row=2)})])
    text, = [line["text"] for line in events(run, "resize-refused")]
    assert f"leaves rows with fewer than two of the 3 held-out samples, which {PLASTICITY} compares" in text
    assert not transitions(run)


@pytest.mark.slow
def test_freezing_packing_and_the_cache_go_on_with_other_rows_and_columns(sentences, tmp_path, in_one_process,
                                                                          monkeypatch):
    """Cache entries of full outputs are not read as parts of outputs."""
    always(monkeypatch)
    run = tiny(sentences, tmp_path / "run", elastic=replace(
        BY_HAND, cache=True, cache_from=1, cache_precision="full", cache_dir=tmp_path / "cache"))
    results, _ = run_all(run, trackers=[Wishes(run, {6: dict(data=1, pipe=1, col=2)})])
    assert losses(run) == pytest.approx(in_one_process, rel=1e-9)
    meshes = [mesh_of(line) for line in transitions(run)]
    assert (1, 1, 1, 2) in meshes
    assert all(line["cache"] for line in transitions(run)) and read_rows(results) > 0
    assert all(data * pipe * row * col <= 4 for data, pipe, row, col in meshes)


FROZEN = Elastic(freeze="manual", manual=("1:1",))


def two_layers(folder, run_dir, mesh, elastic, **changes):
    """A run of two layers on the sentences in `folder`."""
    run = tiny(folder, run_dir, mesh=mesh, elastic=elastic, **changes)
    return replace(run, model=replace(run.model, num_layers=2))


@pytest.fixture(scope="module")
def forty(tmp_path_factory):
    """A folder of forty sentences, and the losses of one rank on them."""
    folder = tmp_path_factory.mktemp("forty")
    write_sentences(folder, train=40)
    run = two_layers(folder, folder / "one", Mesh(), FROZEN, batch=AT_ONCE)
    run_all(run)
    return folder, losses(run)


@pytest.mark.parametrize(("mesh", "wishes", "reads"), [
    (Mesh(row=2), {}, 16), (Mesh(pipe=2), {2: dict(data=1, pipe=1, col=2)}, 4)], ids=["rows", "columns"])
def test_the_cache_of_rows_and_columns(forty, tmp_path, mesh, wishes, reads):
    """A row has other samples in each epoch. Of the 40 of the second epoch 32 have been written, and are read if both
    samples of a microbatch are among them; entries of full outputs are not read as parts of columns."""
    folder, expected = forty
    run = two_layers(folder, tmp_path / "run", mesh, replace(
        FROZEN, cache=True, cache_from=1, cache_precision="full", cache_dir=tmp_path / "cached"))
    results, _ = run_all(run, trackers=[Wishes(run, wishes)])
    assert [mesh_of(line) for line in transitions(run)][1:] == [(1, 1, 1, 2)] * len(wishes)
    assert read_rows(results) >= reads
    assert losses(run) == pytest.approx(expected, rel=1e-9)


@pytest.mark.slow
def test_a_run_whose_settings_do_not_allow_its_last_mesh_stays_on_its_first(sentences, tmp_path, requests):
    """The settings with which the run resumes split blocks over columns only."""
    run = tiny(sentences, tmp_path / "run", mesh=Mesh(data=2), checkpoint=Checkpoint(every=0),
               train=Train(steps=5, learning_rate=3e-3), batch=IN_TWO)
    run_all(run, trackers=[Wishes(run, {1: dict(data=1, pipe=1, row=2)}), StopAfter(3, requests)])
    assert [mesh_of(line) for line in transitions(run)] == [(1, 1, 2, 1)]
    results, _ = run_all(replace(run, resume="auto", tensor=TensorParallel(scheme="megatron"),
                                 train=replace(run.train, steps=7)))
    (dropped,) = events(run, "dropped")
    assert dropped["text"].startswith("data 1 x pipe 1 x row 2 x col 1, the mesh before the run was interrupted: ")
    assert results[0]["steps"] == len(losses(run)) == 7 and len(transitions(run)) == 1


@pytest.mark.slow
def test_a_run_resumes_on_the_rows_and_columns_that_it_had(sentences, tmp_path, plain_losses, requests):
    run = tiny(sentences, tmp_path / "run", checkpoint=Checkpoint(every=0))
    wishes = Wishes(run, {2: dict(data=1, pipe=1, row=2, col=2)})
    results, _ = run_all(run, trackers=[wishes, StopAfter(8, requests)])
    assert results[0].keys() == {"stopped_after"}
    run_all(replace(run, resume="auto"))
    assert losses(run) == pytest.approx(plain_losses, rel=1e-9)
    assert [mesh_of(line) for line in transitions(run)] == [(1, 1, 2, 2)] * 2
