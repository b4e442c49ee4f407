"""Whole runs that transform themselves: what they tell, that they lose nothing, and that they end where others end."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest

from ranvier.data.prepare import prepare
from ranvier.elastic.ledger import Ledger
from ranvier.errors import RanvierError
from ranvier.mesh import Mesh
from ranvier.run import Batch, Checkpoint, Comm, Data, Elastic, Optim, Run, Train, Transformer
from ranvier.stop import StopRequest
from ranvier.testing.ranks import run_ranks
from ranvier.train import caching, elasticity, formation, loop, resize
from ranvier.train.course import Course
from ranvier.train.elasticity import Elasticity
from ranvier.train.events import StepEvent
from ranvier.train.loop import train

WORDS = ["the", "a", "film", "story", "actor", "scene", "plot", "music", "is", "was", "very", "quite", "good", "bad"]


packings, pays = elasticity.packings, Ledger.pays


@pytest.fixture(scope="module")
def sentences(tmp_path_factory):
    """Labelled sentences: of 96 the label is whether "good" is among them."""
    folder = tmp_path_factory.mktemp("sentences")
    for name, count, start in (("train", 96, 0), ("eval", 30, 7)):
        lines = ["label\tsentence"]
        for number in range(start, start + count):
            words = [WORDS[(number * step + step) % 12] for step in (1, 5, 7, 11)]
            lines.append(f"{number % 2}\t{' '.join([*words, WORDS[13 - number % 2]])} {number}")
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    return folder


def tiny(sentences, run_dir, *, mesh=None, elastic=None, **changes):
    """Six layers, twelve batches an epoch, two epochs, in fp64."""
    changes = {"train": Train(epochs=2, learning_rate=3e-3, eval_every=12), **changes}
    return Run(mesh=mesh or Mesh(pipe=4), batch=Batch(global_size=8, microbatch_size=2), precision="fp64",
               model=Transformer(num_layers=6, hidden=16, heads=2, vocab=120, sequence=12),
               data=Data(task="classification", train=str(sentences / "train.tsv"), eval=str(sentences / "eval.tsv"),
                         cache_dir=sentences / "cache"), optim=Optim(weight_decay=0.0, offload="none"),
               elastic=elastic or Elastic(), run_dir=run_dir, **changes)


def run_all(run, **options):
    stream = io.StringIO()
    results = run_ranks(lambda world: train(run, "tiny", world, stream=stream, **options), run.mesh.size,
                        timeout_seconds=120)
    return results, stream.getvalue()


def lines(run, name):
    return [json.loads(line) for line in (run.run_dir / name).read_text().splitlines()]


def losses(run):
    return [line["loss"] for line in lines(run, "metrics.jsonl")]


def transitions(run):
    return [line for line in lines(run, "events.jsonl") if line["event"] == "transition"]


BY_HAND = Elastic(freeze="manual", manual=("5:2", "14:4"), auto_pipe=True, auto_dp=True)


def always(monkeypatch):
    """Half the stages are always the best, and any transition pays: ranks that are threads tell nothing of time."""
    def halved(first, now, *args, **options):
        found = packings(first, now, *args, **options)
        return sorted(found, key=lambda packing: abs(packing.pipe - max(1, now.run.mesh.pipe // 2)))

    monkeypatch.setattr(elasticity, "packings", halved)
    monkeypatch.setattr(Ledger, "pays", lambda ledger, **facts: replace(pays(ledger, **facts), pays=True))


@pytest.fixture(scope="module")
def in_one_process(sentences, tmp_path_factory):
    """The run that freezes the same layers after the same steps, on one rank."""
    run = tiny(sentences, tmp_path_factory.mktemp("one") / "run", mesh=Mesh(),
               elastic=replace(BY_HAND, auto_pipe=False, auto_dp=False))
    run_all(run)
    return losses(run)


def test_a_run_that_packs_itself_is_the_run_that_does_not(sentences, tmp_path, in_one_process, monkeypatch):
    always(monkeypatch)
    run = tiny(sentences, tmp_path / "run", elastic=BY_HAND)
    results, text = run_all(run)
    assert losses(run) == pytest.approx(in_one_process, rel=1e-9)
    assert all(result == results[0] for result in results)
    told = transitions(run)
    assert [line["step"] for line in told] == [5, 14]
    assert [line["frozen_layers"] for line in told] == [2, 4]
    assert told[-1]["mesh"]["pipe"] < 4 and told[-1]["mesh"]["data"] > 1
    assert all(line["bytes_moved"] > 0 and line["seconds"] > 0 for line in told)
    steps = lines(run, "metrics.jsonl")
    assert [line["frozen_layers"] for line in steps] == [0] * 5 + [2] * 9 + [4] * 10
    assert (steps[0]["data"], steps[0]["pipe"]) == (1, 4)
    assert (steps[-1]["data"], steps[-1]["pipe"]) == (told[-1]["mesh"]["data"], told[-1]["mesh"]["pipe"])
    assert "step 5: froze layers 0-1; " in text and "step 14: froze layers 2-3; " in text
    assert results[0]["frozen_layers"] == 4 and results[0]["transitions"] == 2
    assert [entry["step"] for entry in results[0]["ledger"]] == [5, 14]
    assert all(entry["measured_cost"] > 0 and entry["measured_after"] > 0 for entry in results[0]["ledger"])
    assert results[0]["eval_count"] == 30
    evaluated = [line for line in lines(run, "metrics.jsonl") if "eval_accuracy" in line]
    assert [line["step"] for line in evaluated] == [12, 24] and all(line["eval_count"] == 30 for line in evaluated)


def test_idle_ranks_come_to_the_same_end(sentences, tmp_path, in_one_process, monkeypatch):
    always(monkeypatch)
    run = tiny(sentences, tmp_path / "run", elastic=replace(BY_HAND, auto_dp=False))
    results, _ = run_all(run)
    assert losses(run) == pytest.approx(in_one_process, rel=1e-9)
    assert results[0]["mesh"]["data"] == 1 and results[0]["mesh"]["pipe"] < 4
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("mesh", [Mesh(pipe=2, data=2), Mesh(pipe=2, col=2), Mesh(data=4)], ids=str)
def test_from_other_meshes(sentences, tmp_path, in_one_process, monkeypatch, mesh):
    always(monkeypatch)
    run = tiny(sentences, tmp_path / "run", mesh=mesh, elastic=BY_HAND)
    run_all(run)
    assert losses(run) == pytest.approx(in_one_process, rel=1e-9)


def test_the_cache_changes_nothing(sentences, tmp_path, in_one_process, monkeypatch):
    always(monkeypatch)
    for name, elastic in (("here", replace(BY_HAND, cache=True, cache_from=1, cache_precision="full")),
                          ("there", replace(BY_HAND, cache=True, cache_from=1, cache_precision="full", auto_pipe=False,
                                            auto_dp=False))):
        run = tiny(sentences, tmp_path / name, elastic=replace(elastic, cache_dir=tmp_path / f"cache-{name}"))
        results, _ = run_all(run)
        assert losses(run) == pytest.approx(in_one_process, rel=1e-9)
        assert transitions(run)[-1]["cache"]
        assert sum(counts["hits"] + counts["upgraded"] for counts in results[0]["cache"] if counts) > 0


@pytest.mark.parametrize("mesh", [Mesh(pipe=2, col=2), Mesh(pipe=2, row=2)], ids=str)
def test_the_cache_on_a_tensor_mesh_goes_through_transitions(sentences, tmp_path, in_one_process, mesh):
    elastic = replace(BY_HAND, cache=True, cache_from=1, cache_precision="full", auto_pipe=False, auto_dp=False)
    run = tiny(sentences, tmp_path / "run", mesh=mesh, elastic=replace(elastic, cache_dir=tmp_path / "cache"))
    results, _ = run_all(run)
    assert losses(run) == pytest.approx(in_one_process, rel=1e-9)
    assert [line["cache"] for line in transitions(run)] == [True, True]
    assert all(counts["hits"] > 0 and counts["upgraded"] > 0 for counts in results[0]["cache"] if counts)


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


def test_ranks_of_a_stage_judge_the_cache_together(sentences, tmp_path, in_one_process, monkeypatch):
    """One of them could write nothing, for want of room or of range, and knows no times."""
    measured, asked = caching.Caching._times, []

    def times(self, samples):
        asked.append(self._now.engine.coordinates.col)
        return measured(self, samples) if asked[-1] else None

    monkeypatch.setattr(caching.Caching, "_times", times)
    elastic = replace(BY_HAND, cache=True, cache_precision="full", auto_pipe=False, auto_dp=False)
    run = tiny(sentences, tmp_path / "run", mesh=Mesh(pipe=2, col=2), comm=Comm(timeout_seconds=10),
               elastic=replace(elastic, cache_dir=tmp_path / "cache"))
    run_all(run)
    assert set(asked) == {0, 1} and losses(run) == pytest.approx(in_one_process, rel=1e-9)


def test_half_precision_entries_change_little(sentences, tmp_path, in_one_process):
    elastic = replace(BY_HAND, cache=True, cache_from=1, cache_dir=tmp_path / "cache", auto_pipe=False, auto_dp=False)
    run = tiny(sentences, tmp_path / "run", mesh=Mesh(), elastic=elastic)
    run_all(run)
    assert losses(run) == pytest.approx(in_one_process, rel=1e-2)


def test_a_dry_run_tells_and_changes_nothing(sentences, tmp_path):
    plain, dry = tiny(sentences, tmp_path / "plain"), tiny(sentences, tmp_path / "dry", elastic=Elastic(
        freeze="gradient-norm", every=4, dry_run=True))
    run_all(plain)
    run_all(dry)
    assert losses(dry) == losses(plain)
    assert not transitions(dry)


@pytest.mark.parametrize("freeze", ["gradient-norm", "cap"])
def test_policies_freeze_after_each_epoch(sentences, tmp_path, freeze):
    run = tiny(sentences, tmp_path / "run", elastic=Elastic(freeze=freeze, alpha=0.5))
    run_all(run)
    found = [line for line in transitions(run)]
    if freeze == "cap":
        assert [(line["step"], line["frozen_layers"]) for line in found] == [(12, 3)]
    assert all(line["mesh"]["pipe"] == 4 for line in found)


def test_the_articles_rule_packs_by_sizes(sentences, tmp_path, in_one_process):
    run = tiny(sentences, tmp_path / "run", elastic=replace(BY_HAND, cut="reference"))
    run_all(run)
    assert losses(run) == pytest.approx(in_one_process, rel=1e-9)


@pytest.mark.parametrize(("grows", "rate"), [("grow", 3e-3), ("scale", 6e-3)])
def test_the_global_batch_may_grow(sentences, tmp_path, monkeypatch, grows, rate):
    always(monkeypatch)
    run = tiny(sentences, tmp_path / "run", mesh=Mesh(pipe=2), elastic=Elastic(
        freeze="manual", manual=("4:5",), auto_pipe=True, auto_dp=True, global_batch=grows))
    run_all(run)
    told, steps = transitions(run), lines(run, "metrics.jsonl")
    assert told[0]["mesh"]["data"] == 2 and told[0]["global_size"] == 16
    assert [line["tokens"] for line in steps] == [8] * 4 + [16] * 10  # two epochs of 96, no sample more or less
    assert steps[-1]["learning_rate"] == pytest.approx(rate)


class Wishes:
    """A tracker that wishes for another mesh after given steps."""

    def __init__(self, run, wishes):
        self.run, self.wishes = run, wishes

    def event(self, event):
        wish = self.wishes.get(getattr(event, "step", None))
        if wish is not None and type(event).__name__ == "StepEvent":
            resize.ask(self.run.run_dir, **wish)

    def close(self):
        pass


def test_a_run_is_resized_while_it_goes_on(sentences, tmp_path):
    plain = tiny(sentences, tmp_path / "plain", mesh=Mesh())
    run_all(plain)
    run = tiny(sentences, tmp_path / "run")
    wishes = {2: dict(data=2, pipe=2), 6: dict(data=1, pipe=2), 10: dict(data=4, pipe=1), 14: dict(data=1, pipe=1),
              18: dict(data=1, pipe=4), 21: dict(data=3, pipe=2)}
    results, _ = run_all(run, trackers=[Wishes(run, wishes)])
    assert losses(run) == pytest.approx(losses(plain), rel=1e-9)
    assert [(line["mesh"]["data"], line["mesh"]["pipe"]) for line in transitions(run)] == [
        (2, 2), (1, 2), (4, 1), (1, 1), (1, 4)]
    refused = [line for line in lines(run, "events.jsonl") if line["event"] == "resize-refused"]
    assert "needs 6 stages in all, and the run was started with 4" in refused[0]["text"]
    assert all(result == results[0] for result in results)


def test_what_cannot_be_resized(sentences, tmp_path):
    run = tiny(sentences, tmp_path / "run")

    class Bad(Wishes):
        def event(self, event):
            if type(event).__name__ == "StepEvent" and event.step in self.wishes:
                (self.run.run_dir / resize.NAME).write_text(self.wishes[event.step])

    run_all(run, trackers=[Bad(run, {2: "{", 5: '{"data": 0, "pipe": 1}', 8: '{"data": 1, "pipe": 4}', 11: "[1]",
                                     14: '{"data": true, "pipe": 1}'})])
    refused = [line["text"] for line in lines(run, "events.jsonl") if line["event"] == "resize-refused"]
    assert len(refused) == 5 and not transitions(run)
    assert sum("is no mesh" in text for text in refused) == 4 and "is the mesh that the run has" in refused[2]
    assert not (run.run_dir / resize.NAME).exists()


def test_asking_where_no_run_is(tmp_path):
    with pytest.raises(RanvierError, match="is no run's folder"):
        resize.ask(tmp_path, data=1, pipe=1)
    (tmp_path / "run.toml").write_text("")
    with pytest.raises(RanvierError, match=r"has not answered within 0\.2 s"):
        resize.ask_and_wait(tmp_path, data=1, pipe=1, seconds=0.2)
    assert not (tmp_path / resize.NAME).exists()
    assert "asked" in resize.ask_and_wait(tmp_path, data=1, pipe=1, seconds=0)


# ---------------------------------------------------------------------- stopping and going on

class StopAfter:
    """A tracker that has the run stop after a step."""

    def __init__(self, step):
        self.step = step

    def event(self, event):
        if type(event).__name__ == "StepEvent" and event.step == self.step:
            stops[-1].request("test")

    def close(self):
        pass


stops: list[StopRequest] = []


@pytest.mark.parametrize(("mesh", "stop"), [(Mesh(pipe=4), 7), (Mesh(pipe=4), 16), (Mesh(data=2), 16),
                                             (Mesh(), 16), (Mesh(pipe=2, data=2), 7)], ids=str)
def test_an_elastic_run_goes_on_anywhere(sentences, tmp_path, in_one_process, monkeypatch, mesh, stop):
    always(monkeypatch)
    first = tiny(sentences, tmp_path / "run", elastic=BY_HAND, checkpoint=Checkpoint(every=0))
    request_of = loop.StopRequest

    def kept():
        stops.append(request_of())
        return stops[-1]

    monkeypatch.setattr(loop, "StopRequest", kept)
    results, _ = run_all(first, trackers=[StopAfter(stop)])
    assert results[0].keys() == {"stopped_after"}
    again = replace(first, resume="auto", mesh=mesh)
    results, _ = run_all(again)
    assert losses(again) == pytest.approx(in_one_process, rel=1e-9)
    assert results[0]["frozen_layers"] == 4
    back = [line for line in transitions(again) if "interrupted" in line["reason"]]
    assert [line["frozen_layers"] for line in back] == [2 if stop == 7 else 4]


class OneMoreByNorms:
    """A policy of one's own that needs gradients."""

    def frozen_layers(self, facts):
        assert all(facts.gradient_norms[facts.frozen:])
        return min(facts.frozen + 1, facts.num_layers)


@pytest.mark.parametrize("elastic", [
    BY_HAND, Elastic(freeze="cap", alpha=0.4, every=5), Elastic(freeze="none", every=5)], ids=lambda each: each.freeze)
def test_what_a_checkpoint_comes_before_is_frozen_when_the_run_goes_on(sentences, tmp_path, elastic):
    """The checkpoint after step 5 is written before the policy is asked after step 5."""
    elastic = replace(elastic, auto_pipe=False, auto_dp=False)
    own = OneMoreByNorms() if elastic.freeze == "none" else None
    whole = tiny(sentences, tmp_path / "whole", mesh=Mesh(), elastic=elastic, checkpoint=Checkpoint(every=5, keep=9))
    run_all(whole, freezing=own)
    assert transitions(whole)[0]["step"] == 5
    again = replace(whole, resume=str(whole.run_dir / "checkpoint" / "step-5"), run_dir=tmp_path / "again")
    run_all(again, freezing=own)
    assert losses(again) == losses(whole)[5:]
    assert [line["frozen_layers"] for line in lines(again, "metrics.jsonl")] == [
        line["frozen_layers"] for line in lines(whole, "metrics.jsonl")][5:]


def test_depths_from_the_start(sentences, tmp_path):
    run = tiny(sentences, tmp_path / "run", mesh=Mesh(), elastic=Elastic(freeze="manual", manual=("0:2", "7:3")))
    run_all(run)
    assert [line["frozen_layers"] for line in lines(run, "metrics.jsonl")] == [2] * 7 + [3] * 17


class Overflows:
    """A tracker that has gradients of one step overflow, by the loss scale that the engine has before it."""

    def __init__(self, before):
        self.before = before

    def event(self, event):
        if type(event).__name__ == "StepEvent" and event.step == self.before:
            engines[-1].loss_scale.scale = 2.0 ** 20

    def close(self):
        pass


engines: list = []


def test_a_step_without_gradients_puts_the_policy_off(sentences, tmp_path, monkeypatch):
    build = formation.build_engine

    def kept(*args, **options):
        engines.append(build(*args, **options))
        return engines[-1]

    monkeypatch.setattr(formation, "build_engine", kept)
    run = replace(tiny(sentences, tmp_path / "run", mesh=Mesh(), elastic=Elastic(freeze="cap", alpha=0.5)),
                  precision="fp16")
    run_all(run, trackers=[Overflows(10)])
    steps = lines(run, "metrics.jsonl")
    assert 12 in [line["step"] for line in lines(run, "events.jsonl") if line["event"] == "skipped"]
    assert steps[12]["frozen_layers"] == 0 and 12 < transitions(run)[0]["step"] < 20
    assert transitions(run)[0]["frozen_layers"] == 3


def test_a_smaller_global_batch_takes_as_many_samples(sentences, tmp_path):
    """Also where a step is a third of what it was, which no float is."""
    run = replace(tiny(sentences, tmp_path / "run"), train=Train(steps=10), mesh=Mesh(data=3))
    elastic = Elasticity(run, prepare(run), tell=print)
    elastic.load(elastic.state(run, 1) | {"since": [1, 8], "size": 3})
    assert [elastic.left(step) for step in (1, 2, 24, 25)] == [24, 23, 1, 0]
    elastic.load(elastic.state(run, 1) | {"since": [0, 0], "size": 24})
    assert [elastic.left(step) for step in (0, 3, 4)] == [4, 1, 0]


def test_a_global_batch_that_changed_is_known_where_the_mesh_is_the_first_again(sentences, tmp_path):
    run = tiny(sentences, tmp_path / "run", mesh=Mesh(data=2), elastic=Elastic(global_batch="grow"))
    elastic = Elasticity(run, prepare(run), tell=print)
    assert elastic.state(run, 0) == {}
    elastic.load(elastic.state(run, 1) | {"since": [6, 36]})
    again = Elasticity(run, prepare(run), tell=print)
    again.load(elastic.state(run, 0))
    assert again.left(6) == elastic.left(6) and again.learning_rate(7) == elastic.learning_rate(7)


# ---------------------------------------------------------------------- microbatches, pictures

def test_numbers_of_microbatches_are_tried_and_the_fastest_kept(sentences, tmp_path, in_one_process):
    elastic = replace(BY_HAND, auto_pipe=False, auto_dp=False, profile_microbatches=True)
    run = tiny(sentences, tmp_path / "run", mesh=Mesh(pipe=2), elastic=elastic,
               train=Train(epochs=4, learning_rate=3e-3))
    run_all(run)
    assert losses(run)[:24] == pytest.approx(in_one_process, rel=1e-9)  # the same samples in other pieces
    told = [line for line in lines(run, "events.jsonl") if line["event"] == "microbatches"]
    assert len(told) == 1 and set(told[0]["seconds"]) == {"2", "4", "8"}
    assert str(told[0]["microbatches"]) == min(told[0]["seconds"], key=told[0]["seconds"].get)


def test_what_the_run_leaves_to_look_at(sentences, tmp_path, monkeypatch):
    always(monkeypatch)
    run = tiny(sentences, tmp_path / "run", elastic=BY_HAND)
    run_all(run)
    assert (run.run_dir / "course.png").stat().st_size > 10_000
    trace = json.loads((run.run_dir / "timeline.json").read_text())["traceEvents"]
    named = [event["name"] for event in trace if event.get("cat") == "transition"]
    assert len(named) == 2 and "froze layers 0-1" in named[0]


def test_the_picture_knows_the_run_before_it_went_on():
    course = Course()
    course.remember([{"step": 1, "tokens_per_second": 5.0},
                     {"step": 2, "tokens_per_second": 6.0, "eval_accuracy": 0.5}],
                    [{"step": 0, "event": "start", "mesh": {"pipe": 4, "data": 1}},
                     {"step": 1, "event": "transition", "frozen_layers": 2, "mesh": {"pipe": 2, "data": 2}}])
    course.event(StepEvent(step=3, loss=1.0, tokens=8.0, step_seconds=1.0, wait_seconds=0.0, bubble_fraction=0.0,
                           grad_norm=1.0, learning_rate=1.0, flops_per_second=1.0, model_flops_utilisation=0.1))
    assert course.is_elastic and course.frozen == {0: 0, 1: 2} and course.meshes == {0: (4, 1), 1: (2, 2)}
    assert course.speeds == {1: 5.0, 2: 6.0, 3: 8.0} and course.scores == {2: 0.5}
