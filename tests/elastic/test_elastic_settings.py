"""Elastic runs where two things meet: checkpoints and freezing, small batches and rows, caches and columns."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from ranvier.config.resolve import resolve
from ranvier.config.run import Batch, Checkpoint, Comm, Elastic, Optim, TensorParallel, Train
from ranvier.data.prepare import prepare
from ranvier.elastic.cache import AutoCache
from ranvier.elastic.cache_profile import Times
from ranvier.elastic.freezing import NONE_FROZEN, FrozenLayers
from ranvier.elastic.ledger import Ledger
from ranvier.inference import evaluation
from ranvier.mesh import Mesh
from ranvier.planner.count import laid_out
from ranvier.train import memory, runtime
from ranvier.train.elasticity import Elasticity
from ranvier.train.progress import Progress
from tests.covering import quick
from tests.elastic.runs import AT_ONCE, BY_HAND, IN_TWO, always, lines, losses, run_all, tiny, transitions
from tests.errors import raises


@pytest.mark.parametrize("mesh", quick(1, [
    Mesh(data=3), Mesh(data=2, row=2), *(pytest.param(each, marks=pytest.mark.slow)
                                         for each in (Mesh(data=4), Mesh(pipe=2, col=2)))]), ids=str)
def test_each_held_out_sample_counts_once_on_every_mesh(sentences, tmp_path, monkeypatch, mesh):
    """Evaluated 8 at a time; the last piece has 6, so rows must be padded with samples."""
    found = []
    for name, shape in (("one", Mesh()), ("many", mesh)):
        run = tiny(sentences, tmp_path / name, mesh=shape, train=Train(steps=2))
        run_all(run)
        found.append(next(line for line in lines(run, "events.jsonl") if line["event"] == "eval"))
        monkeypatch.setattr(evaluation, "SAMPLES_AT_ONCE", 1)
    one, many = found
    assert many["eval_count"] == many["tokens"] == 30 and many["eval_accuracy"] == one["eval_accuracy"]
    assert many["loss"] == pytest.approx(one["loss"], rel=1e-12) and 0.5 < one["loss"] < 1


@pytest.mark.slow
def test_the_cache_is_on_from_as_many_frozen_layers_as_are_asked_for(sentences, tmp_path):
    for least, on in ((2, [True, True]), (3, [False, True])):
        run = tiny(sentences, tmp_path / f"{least}", mesh=Mesh(), elastic=replace(
            BY_HAND, auto_pipe=False, auto_dp=False, cache=True, cache_from=least, cache_dir=tmp_path / "cache"))
        run_all(run)
        assert [line["cache"] for line in transitions(run)] == on


def test_a_cache_of_other_data_is_not_read(sentences, tmp_path):
    """The weights are the same, as they freeze before the first step; only the samples' inputs differ."""
    frozen = Elastic(freeze="manual", manual=("0:2",))
    cached = replace(frozen, cache=True, cache_from=1, cache_precision="full", cache_dir=tmp_path / "cache")
    swapped = [line.partition("\t") for line in (sentences / "train.tsv").read_text().splitlines()]
    texts = [text for _, _, text in swapped[1:]]
    other = tmp_path / "other.tsv"
    other.write_text("\n".join(["label\tsentence", *(f"{label}\t{text}" for (label, _, _), text in
                                                    zip(swapped[1:], reversed(texts), strict=True))]))
    first = tiny(sentences, tmp_path / "first", mesh=Mesh(), elastic=cached, train=Train(steps=3), batch=AT_ONCE)
    run_all(first)
    found = []
    for name, elastic in (("plain", frozen), ("cached", cached)):
        run = replace(first, run_dir=tmp_path / name, elastic=elastic)
        run = replace(run, data=replace(run.data, train=str(other)))
        run_all(run)
        found.append(losses(run))
    assert found[0] == found[1] != losses(first)


def test_a_cache_of_parts_of_the_sequence_changes_no_order(sentences, tmp_path):
    """These microbatches are padded to the maximum, but have the same samples as those padded to their longest."""
    run = tiny(sentences, tmp_path / "one", mesh=Mesh(), elastic=Elastic(
        freeze="manual", manual=("0:1",), cache=True, cache_from=1, cache_dir=tmp_path / "cache"), train=Train(steps=2))
    run = replace(run, model=replace(run.model, num_layers=2))
    cut = replace(run, run_dir=tmp_path / "two", mesh=Mesh(col=2),
                  tensor=TensorParallel(scheme="megatron", sequence_sharding=True))
    for one in (run, cut):
        run_all(one)
    assert losses(cut) == pytest.approx(losses(run), rel=1e-4)


def test_a_transition_that_does_not_pay_is_not_made(sentences, tmp_path, monkeypatch):
    always(monkeypatch)
    judge = Ledger.decide
    monkeypatch.setattr(Ledger, "decide", lambda ledger, **facts: replace(judge(ledger, **facts), pays=False))
    run = tiny(sentences, tmp_path / "run", mesh=Mesh(pipe=2), train=Train(steps=5), batch=IN_TWO,
               elastic=replace(BY_HAND, manual=("2:2", "3:4")))
    results, _ = run_all(run)
    assert [line["mesh"]["pipe"] for line in transitions(run)] == [2, 2]
    assert [entry["expected_cost"] for entry in results[0]["ledger"]] == [None, None]
    assert not any(line["pays"] for line in lines(run, "events.jsonl") if line["event"] == "judged")


@pytest.mark.parametrize(("times", "pays"), [pytest.param(Times(compute=1.0, read=1e-6, write=1e-6), True,
                                                          marks=pytest.mark.slow),
                                             (Times(compute=1e-6, read=1.0, write=1e-6), False)])
def test_the_cache_stays_on_where_it_pays(sentences, tmp_path, monkeypatch, times, pays):
    monkeypatch.setattr(AutoCache, "times", lambda self, samples: times)
    run = tiny(sentences, tmp_path / "run", mesh=Mesh(), batch=AT_ONCE, elastic=Elastic(
        freeze="manual", manual=("5:2",), cache=True, cache_dir=tmp_path / "cache"))
    results, text = run_all(run)
    assert (results[0]["cache"][0]["hits"] > 0) == pays and ("cache off: reading takes no less" in text) != pays


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [Mesh(pipe=2, col=2), Mesh(pipe=2, row=2)], ids=str)
def test_the_cache_on_a_tensor_mesh_goes_through_transitions(sentences, tmp_path, in_one_process, mesh):
    elastic = replace(BY_HAND, cache=True, cache_from=1, cache_precision="full", auto_pipe=False, auto_dp=False)
    run = tiny(sentences, tmp_path / "run", mesh=mesh, elastic=replace(elastic, cache_dir=tmp_path / "cache"))
    results, _ = run_all(run)
    assert losses(run) == pytest.approx(in_one_process, rel=1e-9)
    assert [line["cache"] for line in transitions(run)] == [True, True]
    assert all(counts["hits"] > 0 and counts["upgraded"] > 0 for counts in results[0]["cache"] if counts)


@pytest.mark.slow
@pytest.mark.parametrize("cut", ["exact", "reference"])
def test_a_mesh_that_the_settings_forbid_is_passed_over(sentences, tmp_path, monkeypatch, cut):
    """Two replicas of two rows would have microbatches of one sample."""
    always(monkeypatch)
    run = replace(tiny(sentences, tmp_path / "run", mesh=Mesh(pipe=2, row=2), train=Train(steps=6),
                       elastic=replace(BY_HAND, cut=cut, manual=("2:5",))),
                  batch=Batch(global_size=2, microbatch_size=2))
    run_all(run)
    assert [line["mesh"]["data"] for line in transitions(run)] == [1]
    assert [line["frozen_layers"] for line in transitions(run)] == [5]
    dropped = [line["text"] for line in lines(run, "events.jsonl") if line["event"] == "dropped"]
    assert dropped and all("mesh.row does not divide" in text for text in dropped)


@pytest.mark.slow
def test_ranks_of_a_stage_judge_the_cache_together(sentences, tmp_path, in_one_process, monkeypatch):
    """One of the ranks could write nothing, for lack of space or range, and has measured no times."""
    measured, asked = AutoCache.times, []

    def times(self, samples):
        asked.append(int("col 1 of 2" in self._part))
        return measured(self, samples) if asked[-1] else None

    monkeypatch.setattr(AutoCache, "times", times)
    elastic = replace(BY_HAND, cache=True, cache_precision="full", auto_pipe=False, auto_dp=False)
    run = tiny(sentences, tmp_path / "run", mesh=Mesh(pipe=2, col=2), comm=Comm(timeout_seconds=10),
               elastic=replace(elastic, cache_dir=tmp_path / "cache"))
    run_all(run)
    assert set(asked) == {0, 1} and losses(run) == pytest.approx(in_one_process, rel=1e-9)


class OneMoreByNorms:
    """A custom policy that needs gradients."""

    def frozen_layers(self, facts):
        assert all(facts.gradient_norms[facts.frozen:])
        return min(facts.frozen + 1, facts.num_layers)


@pytest.mark.parametrize("elastic", quick(1, [
    replace(BY_HAND, manual=("5:2", "9:4")), Elastic(freeze="cap", alpha=0.4, every=5),
    Elastic(freeze="none", every=5)]), ids=lambda each: each.freeze)
def test_what_a_checkpoint_comes_before_is_frozen_when_the_run_goes_on(sentences, tmp_path, elastic):
    """The checkpoint after step 5 is written before the policy is asked after step 5."""
    elastic = replace(elastic, auto_pipe=False, auto_dp=False)
    own = OneMoreByNorms() if elastic.freeze == "none" else None
    whole = tiny(sentences, tmp_path / "whole", mesh=Mesh(), elastic=elastic, checkpoint=Checkpoint(every=5, keep=9),
                 train=Train(steps=12), batch=AT_ONCE)
    run_all(whole, freezing=own)
    assert transitions(whole)[0]["step"] == 5
    again = replace(whole, resume=str(whole.run_dir / "checkpoint" / "step-5"), run_dir=tmp_path / "again")
    run_all(again, freezing=own)
    assert losses(again) == losses(whole)[5:]
    assert [line["frozen_layers"] for line in lines(again, "metrics.jsonl")] == [
        line["frozen_layers"] for line in lines(whole, "metrics.jsonl")][5:]


class EverySecond:
    """A custom policy that remembers whether it froze a layer when it was last asked."""

    def __init__(self):
        self.rests = False

    def frozen_layers(self, facts):
        self.rests = not self.rests
        return facts.frozen + self.rests

    def state_dict(self):
        return {"rests": self.rests}

    def load_state_dict(self, state):
        self.rests = state["rests"]


def test_an_average_with_a_policy_of_ones_own(sentences, tmp_path):
    run = tiny(sentences, tmp_path / "run", mesh=Mesh(), elastic=Elastic(every=4), batch=AT_ONCE)
    with raises("ema-with-freezing"):
        run_all(replace(run, optim=Optim(ema=0.9)), freezing=EverySecond())


@pytest.mark.slow
def test_what_a_policy_of_ones_own_remembers_comes_back_with_a_checkpoint(sentences, tmp_path):
    """The policy is asked after steps 4, 8, 12 ..., and freezes a layer after 4 and 12; the run resumes from step 6."""
    whole = tiny(sentences, tmp_path / "whole", mesh=Mesh(), elastic=Elastic(every=4),
                 checkpoint=Checkpoint(every=6, keep=9), train=Train(steps=14), batch=AT_ONCE)
    run_all(whole, freezing=EverySecond())
    again = replace(whole, resume=str(whole.run_dir / "checkpoint" / "step-6"), run_dir=tmp_path / "again")
    run_all(again, freezing=EverySecond())
    assert [line["step"] for line in transitions(whole)] == [4, 12]
    assert [line["step"] for line in transitions(again)] == [6, 12]  # the first restores the frozen layers
    assert losses(again) == losses(whole)[6:]


def test_the_cache_reads_a_step_ahead_and_looks_again_each_epoch(sentences, tmp_path, monkeypatch):
    """Two epochs of twelve steps of two microbatches of four, frozen from the first step on."""
    named, looked = [], []
    prefetch, check_weights = AutoCache.prefetch, AutoCache.check_weights

    def noted(cache, samples):
        named.append([each.tolist() for each in samples])
        prefetch(cache, samples)

    monkeypatch.setattr(AutoCache, "prefetch", noted)
    monkeypatch.setattr(AutoCache, "check_weights", lambda cache: (looked.append(1), check_weights(cache)))
    run = tiny(sentences, tmp_path / "run", mesh=Mesh(), batch=Batch(global_size=8, microbatch_size=4), elastic=Elastic(
        freeze="manual", manual=("0:2",), cache=True, cache_from=1, cache_dir=tmp_path / "cache"))
    results, _ = run_all(run)
    assert len(named) == 24 and [len(each) for each in named] == [4] * 23 + [2]
    assert all(now[2:] == following[:2] for now, following in pairwise(named))
    assert len(looked) == 2 and results[0]["cache"][0]["hits"] == 96


@pytest.mark.slow
def test_another_batch_that_is_asked_for_is_taken(sentences, tmp_path):
    """A run with frozen layers resumes with another batch."""
    first = tiny(sentences, tmp_path / "run", mesh=Mesh(pipe=2), elastic=replace(BY_HAND, auto_pipe=False,
                                                                                 auto_dp=False))
    run_all(first)
    again = replace(first, resume="auto", train=Train(steps=27), batch=Batch(global_size=16, microbatch_size=4))
    run_all(again)
    assert [line["tokens"] for line in lines(again, "metrics.jsonl")] == [8] * 24 + [16] * 3
    assert lines(again, "events.jsonl")[-1]["event"] == "end" and transitions(again)[-1]["frozen_layers"] == 4
    assert transitions(again)[-1]["global_size"] == 16


def test_depths_from_the_start(sentences, tmp_path):
    run = tiny(sentences, tmp_path / "run", mesh=Mesh(), batch=AT_ONCE, train=Train(steps=10),
               elastic=Elastic(freeze="manual", manual=("0:2", "7:3")))
    run_all(run)
    assert [line["frozen_layers"] for line in lines(run, "metrics.jsonl")] == [2] * 7 + [3] * 3
    # if a run resumes with depths that it did not have before, they apply immediately; a dry run reports each once
    for dry, asked in ((False, [True, False]), (True, [False, False])):
        elastic = Elasticity(resolve(replace(run, elastic=replace(run.elastic, dry_run=dry))), prepare(run), tell=print)
        assert [elastic.evaluates_policy_after(9, 0, 0, FrozenLayers(depth)) for depth in (3, 2)] == asked[::-1]


class Overflows:
    """A tracker that makes the gradients of a step overflow, by the loss scale that it sets after the step before."""

    def __init__(self, before):
        self.before = before

    def event(self, event):
        if type(event).__name__ == "StepEvent" and event.step == self.before:
            engines[-1].loss_scale.scale = 2.0 ** 20

    def close(self):
        pass


engines: list = []


@pytest.mark.slow
def test_a_step_without_gradients_puts_the_policy_off(sentences, tmp_path, monkeypatch):
    build = runtime.build_engine

    def kept(*args, **options):
        engines.append(build(*args, **options))
        return engines[-1]

    monkeypatch.setattr(runtime, "build_engine", kept)
    run = replace(tiny(sentences, tmp_path / "run", mesh=Mesh(), elastic=Elastic(freeze="cap", alpha=0.5),
                       batch=AT_ONCE), precision="fp16")
    run_all(run, trackers=[Overflows(10)])
    steps = lines(run, "metrics.jsonl")
    assert 12 in [line["step"] for line in lines(run, "events.jsonl") if line["event"] == "skipped"]
    assert steps[12]["frozen_layers"] == 0 and 12 < transitions(run)[0]["step"] < 20
    assert transitions(run)[0]["frozen_layers"] == 3


def test_a_smaller_global_batch_takes_as_many_samples(sentences, tmp_path):
    """Also if a step has a third of the samples, which is not exact in floating point."""
    run = replace(tiny(sentences, tmp_path / "run"), train=Train(steps=10), mesh=Mesh(data=3))
    progress = Progress.begin(resolve(run))
    smaller = progress.restore(progress.state() | {"since": [1, 8], "size": 3})
    assert [smaller.steps_left(step) for step in (1, 2, 24, 25)] == [24, 23, 1, 0]
    larger = progress.restore(progress.state() | {"since": [0, 0], "size": 24})
    assert [larger.steps_left(step) for step in (0, 3, 4)] == [4, 1, 0]


def test_a_global_batch_that_changed_is_known_where_the_mesh_is_the_first_again(sentences, tmp_path):
    run = tiny(sentences, tmp_path / "run", mesh=Mesh(data=2), elastic=Elastic(global_batch="grow"))
    elastic, progress = Elasticity(resolve(run), prepare(run), tell=print), Progress.begin(resolve(run))
    assert elastic.checkpoint_document(run, NONE_FROZEN, progress) == {}
    saved = elastic.checkpoint_document(run, NONE_FROZEN, replace(progress, since=(6, 36)))
    assert progress.restore(saved) == replace(progress, since=(6, 36))


@pytest.mark.parametrize(("more", "fits"), [(0, True), (-1, False)])
def test_a_mesh_fits_where_all_its_ranks_do(sentences, tmp_path, monkeypatch, more, fits):
    """All ranks together, each counted once, must fit the free memory plus that of the run's first mesh."""
    run = resolve(tiny(sentences, tmp_path / "run"))
    there = replace(run, mesh=Mesh(data=4))
    first, second = (sum(entry.ranks * (entry.device_bytes + entry.host_bytes) for entry in laid_out(each)[1])
                     for each in (run, there))
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: second - first + more)
    problem = memory.MemoryBudget(first=run, frozen=NONE_FROZEN).problem(there)
    assert (problem is None) == fits
    assert fits or "4 ranks here need" in str(problem)
