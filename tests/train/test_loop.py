"""A full run on in-process ranks: its folder, its numbers on several meshes, and how it ends when it cannot
continue."""

import io
import json
import math
import tomllib
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from ranvier.config import read
from ranvier.config.resolve import resolve
from ranvier.config.run import Batch, Data, Guard, Optim, Pipeline, Run, TensorParallel, Train, Transformer
from ranvier.cost.tensor_traffic import tensor_mesh_facts
from ranvier.mesh import Mesh
from ranvier.optim.learning_rate import learning_rate
from ranvier.schedule.limits import Limits
from ranvier.testing.ranks import run_ranks
from ranvier.train import report, setup
from ranvier.train.events import EndEvent, StartEvent, StepEvent
from ranvier.train.loop import train
from tests.covering import chosen, quick
from tests.errors import raises
from tests.tiny_runs import random_texts

pytestmark = pytest.mark.pictures
STEPS = 6


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A folder that contains `texts`, a hundred small texts of few words. The cache is written next to it."""
    folder = tmp_path_factory.mktemp("corpus")
    random_texts(folder / "texts", 100, lines=30)
    return folder


def tiny(corpus, run_dir, **changed):
    run = Run(mesh=Mesh(data=2, pipe=2), batch=Batch(global_size=10, microbatch_size=2),
              train=Train(steps=STEPS, learning_rate=1e-2, warmup_steps=2, eval_every=4, eval_sequences=7,
                          sample_tokens=8),
              model=Transformer(num_layers=2, hidden=16, heads=2, vocab=300, sequence=16),
              data=Data(corpus=str(corpus / "texts"), cache_dir=corpus / "cache"), precision="fp64", run_dir=run_dir)
    return replace(run, **changed)


def run_all(run, **options):
    """Train on in-process ranks; every rank's summary and what rank 0 printed."""
    stream = io.StringIO()
    summaries = run_ranks(lambda world: train(run, "tiny", world, stream=stream, **options), run.mesh.size,
                          timeout_seconds=120)
    return summaries, stream.getvalue()


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(autouse=True)
def no_more_pictures(monkeypatch):
    """Draw no pictures: the tests that look at pictures use those of `finished`."""
    for draw in ("draw_loss", "timeline_picture"):
        monkeypatch.setattr(report, draw, lambda *args: None)


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "new" / "run"

    class Heard:
        events, closed = [], 0

        def event(self, event):
            self.events.append(event)

        def close(self):
            self.closed += 1

    heard = Heard()
    summaries, text = run_all(tiny(corpus, run_dir), trackers=[heard])
    return run_dir, summaries, text, heard


def test_the_folder_is_complete(finished):
    run_dir, *_ = finished
    assert {path.name for path in run_dir.iterdir()} == {
        "run.toml", "metrics.jsonl", "events.jsonl", "summary.json", "report.html", "timeline.json", "timeline.png",
        "loss.png", "tensorboard", "tokenizer.json", "checkpoint", ".owner.1"}
    assert list((run_dir / "tensorboard").glob("events.out.tfevents.*"))


def test_metrics_are_complete_and_in_order(finished):
    run_dir, *_ = finished
    steps = lines(run_dir / "metrics.jsonl")
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert [step["step"] for step in steps if "eval_loss" in step] == [4, STEPS]
    assert [step["learning_rate"] for step in steps[:3]] == [5e-3, 1e-2, 1e-2]
    for step in steps:
        assert step["tokens"] == 10 * 16 and step["grad_norm"] > 0
        assert step["tokens_per_second"] == pytest.approx(step["tokens"] / step["step_seconds"])
        assert 0 <= step["bubble_fraction"] <= 1 and 0 <= step["wait_seconds"] <= step["step_seconds"]
        assert step["slowest_replica"] in (0, 1) and step["slowest_replica_ratio"] >= 1
        assert step["flops_per_second"] > 0 and step["model_flops_utilisation"] > 0
    assert abs(steps[0]["loss"] - math.log(300)) < 0.3 and steps[-1]["loss"] < steps[0]["loss"]


def test_the_summary_is_the_same_everywhere(finished):
    run_dir, summaries, *_ = finished
    written = json.loads((run_dir / "summary.json").read_text())
    assert summaries == [written] * 4
    steps = lines(run_dir / "metrics.jsonl")
    assert written["final_loss"] == steps[-1]["loss"] and written["eval_loss"] == steps[-1]["eval_loss"]
    speeds = sorted(step["tokens_per_second"] for step in steps[2:])
    assert written["tokens_per_second"] == pytest.approx((speeds[1] + speeds[2]) / 2)
    assert written["mesh"] == {"data": 2, "pipe": 2, "row": 1, "col": 1} and len(written["boundaries"]) == 1
    for field in ("peak_memory_bytes", "bytes_sent"):
        assert len(written[field]) == 4 and min(written[field]) > 0
    assert written["bytes_received_by_axis"]["data"] > 0 and written["bytes_received_by_axis"]["pipe"] > 0


def test_events_tell_the_story(finished):
    run_dir, *_ = finished
    events = lines(run_dir / "events.jsonl")
    assert [(event["step"], event["event"]) for event in events] == [
        (0, "start"), (4, "eval"), (STEPS, "eval"), (STEPS, "checkpoint"), (STEPS, "end")]
    assert events[1]["tokens"] == 7 * 16, "a partial batch of held-out sequences"


@pytest.mark.parametrize(("policy", "size", "most"), [("message-driven", 8, 4), ("message-driven", 4, 2),
                                                     ("gpipe", 32, 16)])
def test_a_run_tells_of_no_more_in_flight_than_a_step_has(corpus, policy, size, most):
    """The limit is 4: reported are 4 of 4 microbatches, 2 of 2, and with gpipe all 16."""
    run = resolve(tiny(corpus, corpus, mesh=Mesh(pipe=2), batch=Batch(global_size=size, microbatch_size=2),
                       pipeline=Pipeline(policy=policy), optim=Optim(offload="none", bucket_size=1)))
    engine = SimpleNamespace(in_flight=4, limits=Limits(in_flight=4, deferred=(0, 0)),
                             layout=SimpleNamespace(parameters=()))
    world = SimpleNamespace(size=2, backend=SimpleNamespace(name="mpi"), device=torch.device("cpu"))
    text = setup.settings_text(run, engine, world, SimpleNamespace(about="", padding=""), "")["pipeline"]
    assert text == f"{policy}, at most {most} microbatches in flight"


def test_run_toml_has_everything_resolved(finished, corpus):
    run_dir, *_ = finished
    written = tomllib.loads((run_dir / "run.toml").read_text())
    assert (written["optim"]["offload"], written["optim"]["bucket_size"]) == ("none", 262_144)
    assert written["mesh"] == {"data": 2, "pipe": 2, "row": 1, "col": 1} and written["train"]["steps"] == STEPS
    assert isinstance(written["pipeline"]["in_flight"], int) and len(written["pipeline"]["boundaries"]) == 1
    assert written["launch"]["device"] == "cpu" and written["launch"]["threads"] == 1
    assert written["run_dir"] == str(run_dir)


def test_the_timeline_shows_the_first_and_the_last_steps(finished):
    run_dir, *_ = finished
    trace = json.loads((run_dir / "timeline.json").read_text())
    assert trace["otherData"]["steps"] == [1, 2, 3, 4, 5, 6]
    bars = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    for rank in range(4):
        mine = [bar["name"] for bar in bars if bar["tid"] == rank and bar["args"]["step"] == 5]
        assert {"F0", "F1", "F2", "B0", "B1", "B2"} <= set(mine), (rank, mine)


def test_every_moment_of_a_step_is_in_the_timeline(finished):
    """Only the evaluation after step 4 lies between steps, so the spans of steps 5 and 6 follow each other without
    gaps."""
    run_dir, *_ = finished
    trace = json.loads((run_dir / "timeline.json").read_text())
    bars = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    for rank in range(4):
        mine = sorted((bar["ts"], bar["dur"], bar["cat"]) for bar in bars if bar["tid"] == rank
                      and bar["args"]["step"] in (5, 6))
        for (start, lasts, _), (following, *_) in pairwise(mine):
            assert following == pytest.approx(start + lasts, abs=0.01), rank
        assert {"data", "report", "forward", "backward", "optimizer"} <= {category for *_, category in mine}


def test_the_console_is_plain_and_short(finished):
    _, _, text, _ = finished
    assert "tiny: 6 steps on mesh data 2 x pipe 2" in text and "learning rate" in text and "message-driven" not in text
    assert 2 <= sum(line.startswith("step ") and f"/{STEPS} " in line for line in text.splitlines()) <= STEPS
    assert "wrote" in text and "timeline.png" in text and "\x1b" not in text


def test_a_users_tracker_hears_everything_once(finished):
    *_, heard = finished
    kinds = [type(event) for event in heard.events]
    assert kinds[0] is StartEvent and kinds[-1] is EndEvent and kinds.count(StepEvent) == STEPS
    assert heard.closed == 1
    assert heard.events[-1].sample, "a sample of text"


def losses(run_dir):
    return [(step["loss"], step.get("eval_loss", 0.0), step["grad_norm"]) for step in lines(run_dir / "metrics.jsonl")]


@pytest.mark.parametrize("data, pipe, policy", chosen(
    [(1, 4, "1f1b")], [(1, 1), (1, 4), (4, 1)], ["message-driven", "1f1b"]))
def test_the_mesh_changes_no_number(data, pipe, policy, finished, corpus, tmp_path):
    reference, _, _, heard = finished
    run = tiny(corpus, tmp_path, mesh=Mesh(data=data, pipe=pipe), pipeline=Pipeline(policy=policy))
    run_all(run)
    for ours, theirs in zip(losses(tmp_path), losses(reference), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9)
    assert lines(tmp_path / "events.jsonl")[-1]["sample"] == heard.events[-1].sample, "the same text"


@pytest.mark.slow
@pytest.mark.parametrize("mesh, tensor", quick(1, [
    pytest.param(Mesh(row=2, col=2), TensorParallel(), marks=pytest.mark.slow),
    (Mesh(row=2, pipe=2, data=2), TensorParallel(keep_weights=True)),
    pytest.param(Mesh(row=2, col=2), TensorParallel(scheme="summa"), marks=pytest.mark.slow),
    pytest.param(Mesh(col=2), TensorParallel(scheme="megatron"), marks=pytest.mark.slow),
    (Mesh(col=2, pipe=2), TensorParallel(scheme="megatron", sequence_sharding=True))]))
def test_rows_and_columns_change_no_number(mesh, tensor, finished, corpus, tmp_path):
    """The evaluation of 7 sequences, and the last microbatch, are padded if rows must share them."""
    reference, _, _, heard = finished
    summaries, text = run_all(tiny(corpus, tmp_path, mesh=mesh, tensor=tensor))
    for ours, theirs in zip(losses(tmp_path), losses(reference), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9)
    assert lines(tmp_path / "events.jsonl")[-1]["sample"] == heard.events[-1].sample, "the same text"
    assert summaries[0]["bytes_received_by_axis"]["row" if mesh.row > 1 else "col"] > 0
    assert tensor.scheme in text


@pytest.mark.slow
def test_the_tensor_mesh_lies_on_nodes_as_it_sends_least(finished, corpus, tmp_path):
    """Two ranks a node: the bytes sent decide which of the stage's ranks share a node, and no number depends on it."""
    run = tiny(corpus, tmp_path, mesh=Mesh(row=2, col=2, data=2))
    run_ranks(lambda world: train(run, "tiny", replace(world, local_size=2), stream=io.StringIO()), run.mesh.size,
              timeout_seconds=120)
    with open(tmp_path / "run.toml", "rb") as file:
        tile = tuple(tomllib.load(file)["mesh"]["tile"])
    assert tile == tensor_mesh_facts(resolve(run), 2).tile == (2, 1), "weights are the larger part here"
    for ours, theirs in zip(losses(tmp_path), losses(finished[0]), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9)


def test_a_prompt_is_continued(corpus, tmp_path):
    run = tiny(corpus, tmp_path, mesh=Mesh())
    run_all(replace(run, train=replace(run.train, steps=1, prompt="the arrow flies over", sample_tokens=20)))
    sample = lines(tmp_path / "events.jsonl")[-1]["sample"]
    assert sample.startswith("the arrow flies over") and len(sample) > len("the arrow flies over")


def test_the_console_says_what_to_expect_of_the_sample(finished, corpus, tmp_path):
    _, summaries, text, heard = finished
    note = heard.events[-1].sample_note
    assert f"held-out loss is {summaries[0]['eval_loss']:.2f} per token" in note
    assert note in " ".join(text.split())
    run = tiny(corpus, tmp_path, mesh=Mesh())
    _, text = run_all(replace(run, train=replace(run.train, steps=1, learning_rate=1e-12, warmup_steps=0)))
    assert "sample text: expect random tokens." in text, "the model is as it was initialised"


@pytest.mark.parametrize(("mode", "error"), [
    ("none", ("loss-not-finite",)),
    ("stop", ("bad-step", 2, 0))])
def test_a_loss_that_explodes_ends_the_run_with_its_metrics(corpus, tmp_path, mode, error):
    run = tiny(corpus, tmp_path, mesh=Mesh(pipe=2), precision="fp32", guard=Guard(bad_step=mode))
    with raises(*error):
        run_all(replace(run, train=replace(run.train, learning_rate=1e30, warmup_steps=0)))
    steps = lines(tmp_path / "metrics.jsonl")
    assert steps[-1]["loss"] is None and [step["step"] for step in steps] == list(range(1, len(steps) + 1))


def test_a_folder_that_cannot_be_written_ends_the_run_at_its_start(corpus, tmp_path):
    (tmp_path / "file").write_text("")
    with raises("lease-not-writable"):
        run_all(tiny(corpus, tmp_path / "file" / "run"))


def test_ranks_with_different_text_are_refused(corpus, tmp_path, monkeypatch):
    def other_text(run, world, stream):
        run, data, model = prepared(run, world, stream)
        return run, replace(data, fingerprint="other") if world.rank == 1 else data, model

    prepared = setup.prepare_run
    monkeypatch.setattr(setup, "prepare_run", other_text)
    with raises("data-differs-between-ranks", 1):
        run_all(tiny(corpus, tmp_path, mesh=Mesh(data=2)))


def test_the_learning_rate_rises_and_stays():
    config = Train(learning_rate=1.0, warmup_steps=4)
    assert [learning_rate(config, step) for step in (1, 2, 4, 5, 100)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    assert learning_rate(Train(learning_rate=1.0), 1) == 1.0


def test_default_folders_are_free_and_named_after_the_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = read.default_folder("some/where/mine.toml")
    assert first.parent.name == "runs" and first.name.startswith("mine-")
    first.mkdir(parents=True)
    assert read.default_folder("some/where/mine.toml") != first
    assert read.default_folder("my.module:function").name.startswith("my.module-function-")


@pytest.mark.parametrize(("changed", "text"), quick(1, [
    ({}, "adamw in buckets of 262,144, states on the device"),
    ({"offload": "stream", "shard": True, "bucket_size": 1000, "buckets_in_flight": 2},
     "adamw in buckets of 1,000, states streamed from the host, 2 buckets at once, sharded over 2 replicas"),
    ({"algorithm": "sgd", "offload": "host"}, "sgd in buckets of 262,144, states and updates on the host")]))
def test_the_optimizer_in_words(corpus, tmp_path, changed, text):
    run = tiny(corpus, tmp_path / "run", optim=Optim(**changed), precision="bf16",
               train=Train(steps=1, sample_tokens=0))
    _, printed = run_all(run)
    assert text in " ".join(printed.split())
    written = tomllib.loads((tmp_path / "run" / "run.toml").read_text())
    assert written["optim"]["reduce_dtype"] == "half" and written["precision"] == "bf16"


def test_loss_scale_and_skipped_steps_are_metrics(corpus, tmp_path):
    """The first scale overflows until it has been halved often enough; a skipped step updates nothing."""
    run = tiny(corpus, tmp_path / "run", precision="fp16", train=Train(steps=4, sample_tokens=0),
               optim=Optim(initial_loss_scale=2.0**31, loss_scale_window=100))
    _, printed = run_all(run)
    steps = lines(tmp_path / "run" / "metrics.jsonl")
    skipped = [step["skipped_steps"] for step in steps]
    assert skipped[0] == 1 and skipped == sorted(skipped)
    assert [step["loss_scale"] for step in steps] == [2.0**31 / 2**count for count in skipped]
    assert "a gradient overflowed: nothing was updated, and the loss scale is now 1.07374e+09" in printed
    notes = [event for event in lines(tmp_path / "run" / "events.jsonl") if event["event"] == "skipped"]
    assert len(notes) == skipped[-1]


def test_settings_that_the_command_refuses(corpus, tmp_path):
    """A program may call `train` itself."""
    with raises("microbatch-above-share", "batch.microbatch-size"):
        run_all(tiny(corpus, tmp_path / "run", batch=Batch(global_size=2, microbatch_size=4)))
