"""Every cross-field problem and warning, and what is predicted for a run without any."""

import dataclasses

import pytest

from ranvier import check, resolve
from ranvier.run import Run


def run_with(**flags):
    found = resolve.resolve([resolve.Layer(origin="flag", is_text=True, values={
        name.replace("__", "."): text for name, text in flags.items()})])
    assert not found.problems
    return found.run


@pytest.mark.parametrize(("flags", "where", "message"), [
    ({"mesh__row": "2"}, "mesh.row", "must be 1: this version does not split blocks over a tensor mesh"),
    ({"mesh__col": "3"}, "mesh.col", "must be 1: this version does not split blocks over a tensor mesh"),
    ({"mesh__pipe": "11"}, "mesh.pipe", "is more than the 10 blocks of the model"),
    ({"mesh__data": "33"}, "batch.global-size", "leaves replicas without a sequence: mesh.data is 33"),
    ({"batch__global_size": "10", "mesh__data": "3", "batch__microbatch_size": "5"}, "batch.microbatch-size",
     "is more than a replica's share of the batch, 4 of 10 sequences"),
    ({"model__heads": "3"}, "model.heads", "does not divide model.hidden 128"),
    ({"model__vocab": "256"}, "model.vocab", "is less than a byte-level tokenizer has: 257"),
    ({"data__tokenizer": "gpt2"}, "model.vocab", "is less than GPT-2's tokenizer has: 50257"),
    ({"model__num_layers": "10001"}, "model.num-layers", "is more than 10000, the most that can be cut into stages"),
    ({"mesh__pipe": "3", "pipeline__boundaries": "5,2"}, "pipeline.boundaries",
     "does not rise, or leaves a stage without blocks"),
    ({"mesh__pipe": "3", "pipeline__boundaries": "2"}, "pipeline.boundaries", "has 1 numbers for 3 stages"),
    ({"mesh__pipe": "2", "pipeline__boundaries": "10"}, "pipeline.boundaries",
     "does not rise, or leaves a stage without blocks"),
    ({"model__hidden": str(2**40), "model__vocab": str(2**40)}, "model", "cannot be laid out: ")])
def test_problems(flags, where, message):
    report = check.check(run_with(**flags))
    assert [problem.where for problem in report.problems] == [where]
    assert message in report.problems[0].what
    assert report.problems[0].remedy
    assert report.stages is None or where.startswith(("mesh.", "batch."))


def test_ranks_that_are_not_the_meshs():
    report = check.check(run_with(mesh__data="2", mesh__pipe="2"), 6)
    assert [str(problem) for problem in report.problems] == [
        "mesh: needs 4 ranks, not 6 (got 'data 2 x pipe 2 x row 1 x col 1'). Change --mesh.data and --mesh.pipe so "
        "that their product is 6, or start 4 ranks."]


def test_all_problems_at_once():
    report = check.check(run_with(mesh__row="2", model__heads="3", model__vocab="2", batch__microbatch_size="64"), 7)
    assert {problem.where for problem in report.problems} == {
        "mesh", "mesh.row", "model.heads", "model.vocab", "batch.microbatch-size"}


@pytest.mark.parametrize(("flags", "where"), [
    ({"pipeline__policy": "gpipe", "pipeline__in_flight": "2"}, "pipeline.in-flight"),
    ({"pipeline__in_flight": "1", "mesh__pipe": "2"}, "pipeline.in-flight"),
    ({"pipeline__policy": "1f1b", "pipeline__defer_bytes": "10"}, "pipeline.defer-bytes"),
    ({"pipeline__boundaries": "3", "pipeline__partition": "uniform", "mesh__pipe": "2"}, "pipeline.partition"),
    ({"train__warmup_steps": "100"}, "train.warmup-steps")])
def test_warnings(flags, where):
    report = check.check(run_with(**flags))
    assert [warning.where for warning in report.warnings] == [where]
    assert report.problems == ()


def test_stages_and_memory():
    run = run_with(mesh__data="2", mesh__pipe="2", precision="fp64")
    report = check.check(run, 4)
    assert (report.problems, report.warnings) == ((), ())
    assert [block for row in report.stages.rows for block in row.blocks] == [
        "embedding", *(f"layer{i}.{part}" for i in range(4) for part in ("attention", "mlp")), "head"]
    tied = run.model.vocab * run.model.hidden
    for row, entry in zip(report.stages.rows, report.memory, strict=True):
        owned = row.num_parameters - (tied if row.stage == 1 else 0)
        assert (entry.pipe, entry.ranks) == (row.stage, 2)
        assert entry.device["parameters"] == entry.device["gradients"] == 8 * row.num_parameters
        assert (entry.device["moments"], entry.device["master"]) == (16 * owned, 0), "the first stage owns the tied one"
        assert entry.device_bytes > 16 * row.num_parameters + 16 * owned


def test_memory_follows_the_microbatches_in_flight():
    def activations(**flags):
        return [entry.device["activations"] for entry in check.check(run_with(mesh__pipe="4", **flags)).memory]

    one = activations(pipeline__in_flight="1")
    assert activations(pipeline__policy="gpipe") == [8 * size for size in one]
    assert activations(pipeline__policy="1f1b") == [(4 - stage) * size for stage, size in enumerate(one)]
    assert activations() == [4 * size for size in one[:3]] + one[3:]
    assert activations(batch__global_size="8") == [2 * size for size in one[:3]] + one[3:]


def test_any_number_of_ranks_on_a_laptop():
    found = resolve.resolve([resolve.load("gpt-100b")[1]])
    run = dataclasses.replace(found.run, mesh=dataclasses.replace(found.run.mesh, data=4096))
    report = check.check(run, run.mesh.size)
    assert report.problems == ()
    total = sum(row.num_parameters for row in report.stages.rows)
    assert 95e9 < total < 110e9
    assert len(report.memory) == run.mesh.pipe


def test_the_default_run_is_fine():
    assert check.problems(Run()) == []
    assert list(check.warnings(Run())) == []
