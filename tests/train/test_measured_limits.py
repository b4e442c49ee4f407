"""The schedule's limits by measured times: which are chosen, reported and kept. Results do not depend on them."""

import io
import json
import tomllib
from dataclasses import replace

import pytest

from ranvier.config.resolve import resolve
from ranvier.config.rules import problems
from ranvier.config.run import Batch, Checkpoint, Data, Elastic, Memory, Optim, Pipeline, Run, Train, Transformer
from ranvier.mesh import Mesh
from ranvier.pipeline.engine import Engine
from ranvier.plan.limits import MeasuredChoice, expected_seconds, measured_choice, measured_factors, run_limits
from ranvier.planner.count import laid_out, recomputed_runs
from ranvier.schedule.limits import Limits
from ranvier.testing.ranks import run_ranks
from ranvier.train import measured_limits, resize, setup
from ranvier.train.loop import train
from tests.errors import raises
from tests.pipeline.parity import small_gpt
from tests.tiny_runs import random_texts

RUN = resolve(Run(model=Transformer(num_layers=4, hidden=32, heads=4, vocab=512, sequence=16), mesh=Mesh(pipe=2),
                  batch=Batch(global_size=16, microbatch_size=2), pipeline=Pipeline(boundaries=(5,))))
STEPS = measured_limits.MEASURED_STEPS


@pytest.fixture(scope="module")
def stages():
    return laid_out(RUN)[0].stage_costs()


@pytest.fixture(scope="module")
def present(stages):
    return run_limits(RUN, stages)


def test_ranks_that_take_longer_than_counted_have_other_limits(stages, present):
    """Rank 0 takes a tenth longer than rank 1: more microbatches in flight hide that. The same times in another unit
    change nothing. If rank 1 is far slower, or if the times are as counted, the limits stay as they are."""
    slow = measured_choice(RUN, stages, present, [(1.1, 2.2), (1.0, 2.0)])
    assert slow.limits.in_flight > present.in_flight
    assert slow.bubble_fraction < 0.5 * slow.counted_fraction
    assert slow.limits == measured_choice(RUN, stages, present, [(110.0, 220.0), (100.0, 200.0)]).limits
    behind = measured_choice(RUN, stages, present, [(1.0, 2.0), (3.0, 6.0)])
    assert behind.limits == present and behind.bubble_fraction == behind.counted_fraction
    counted = [[sum(block.weight("cpu") for block in blocks)] * 2 for blocks in stages]
    assert measured_choice(RUN, stages, present, [(one, 2 * two) for one, two in counted]).limits == present


def test_a_limit_that_was_asked_for_stays(stages, present):
    run = replace(RUN, pipeline=replace(RUN.pipeline, in_flight=5))
    assert measured_choice(run, stages, present, [(3.0, 6.0), (1.0, 2.0)]).limits.in_flight in (5, present.in_flight)


@pytest.mark.parametrize("run", [
    replace(RUN, memory_report=True), replace(RUN, mesh=Mesh()),
    *(replace(RUN, pipeline=replace(RUN.pipeline, **changed)) for changed in (
        {"memory": None}, {"defer_bytes": 0}, {"deferred": (1, 1)}, {"policy": "1f1b"}))])
def test_where_nothing_is_simulated_nothing_is_measured(stages, present, run):
    assert measured_choice(run, stages, present, [(3.0, 6.0), (1.0, 2.0)]) is None


def test_nothing_is_chosen_without_times(stages, present):
    assert measured_choice(RUN, stages, present, [(3.0, 6.0), (0.0, 0.0)]) is None
    assert measured_choice(RUN, stages, present, [(3.0, 0.0), (1.0, 2.0)]) is None


def test_recomputation_is_part_of_the_backward():
    """Recomputation makes a rank's backward longer by a forward without its last product, and this time cannot be
    deferred with the layers' weight gradients; slower ranks are found as without recomputation."""
    run = replace(RUN, memory=Memory(recompute=1))
    stages = laid_out(run)[0].stage_costs()
    again = recomputed_runs(run, stages)
    assert [len(segments) for segments in again] == [2, 2]
    present = run_limits(run, stages, again)
    slow = measured_choice(run, stages, present, [(1.1, 3.3), (1.0, 3.0)], again)
    assert slow.limits.in_flight > present.in_flight and slow.bubble_fraction < slow.counted_fraction
    ratio = [backward / forward for forward, backward in expected_seconds(run, stages, [(1.0, 1.0)] * 10, again)]
    plain = [backward / forward for forward, backward in expected_seconds(RUN, stages, [(1.0, 1.0)] * 10)]
    assert all(0.4 < more - less < 0.8 for more, less in zip(ratio, plain, strict=True)), "not embedding and head"


def test_times_of_blocks_go_to_other_stages(stages):
    """For the measured cut, times are those of its stages; for another cut, their sum is the same. Cached blocks get
    the factor of the others, and take no time."""
    seconds = [(3.0, 7.0), (1.0, 2.0)]
    factors = measured_factors(RUN, stages, seconds)
    assert expected_seconds(RUN, stages, factors) == [pytest.approx(each) for each in seconds]
    other = [(*stages[0], stages[1][0]), stages[1][1:]]
    moved = expected_seconds(RUN, other, factors)
    assert moved[0][0] > 3.0 and moved[1][1] < 2.0
    assert [sum(each) for each in zip(*moved, strict=True)] == pytest.approx([4.0, 9.0])
    assert measured_factors(RUN, stages, [(3.0, 7.0), (0.0, 0.0)])[-1] == pytest.approx(
        measured_factors(RUN, stages, [(3.0, 7.0), (0.0, 0.0)])[-2]), "a rank without times"
    assert measured_factors(RUN, stages, [(3.0, 0.0), (1.0, 0.0)]) is None
    cached = measured_factors(RUN, stages, seconds, cached=2)
    assert cached[0][0] == cached[3][0] > factors[0][0]
    assert expected_seconds(RUN, stages, cached, cached=2)[0] == pytest.approx(seconds[0])


# ---------------------------------------------------------------------- limits of ranks as a setting

def test_deferred_microbatches_are_a_setting(stages, present):
    run = replace(RUN, pipeline=replace(RUN.pipeline, deferred=(3, 1)))
    assert run_limits(run, stages) == replace(present, deferred=(3, 1), last=None)
    assert run_limits(replace(run, pipeline=replace(run.pipeline, memory=None)), stages).deferred == (3, 1)
    last = replace(RUN, pipeline=replace(RUN.pipeline, defer_last=4))
    assert run_limits(last, stages) == replace(present, last=4), "the other limits are as without `last`"
    both = replace(RUN, pipeline=replace(RUN.pipeline, deferred=(3, 1), defer_last=4))
    assert run_limits(both, stages) == replace(present, deferred=(3, 1), last=4)
    bytes_ = [[entry.device["deferred"] for entry in laid_out(replace(run, pipeline=replace(
        run.pipeline, **settings)))[1]] for settings in (
            {}, {"deferred": (0, 2)}, {"in_flight": 2, "deferred": (3, 3), "defer_last": 2})]
    assert bytes_[0][0] > bytes_[1][0] == 0 and bytes_[1][1] > bytes_[0][1] > 0
    assert bytes_[2] == [0, bytes_[0][1]], "of the last two microbatches, rank 0 stores both, rank 1 one"


def test_one_number_for_each_rank():
    found = list(problems(replace(RUN, pipeline=replace(RUN.pipeline, deferred=(1,))), 2, num_blocks=10))
    assert [problem.where for problem in found] == ["pipeline.deferred"]
    assert found[0].code == "deferred-count"
    with raises("deferred-count", 3, 2):
        run_ranks(lambda world: Engine(small_gpt(), world, mesh=Mesh(pipe=2), optim=Optim(),
                                       pipeline=Pipeline(deferred=(1, 1, 1))), 2)


# ---------------------------------------------------------------------- a run

@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("measured")
    random_texts(folder / "texts", 40, words=200)
    return Run(mesh=Mesh(pipe=2), batch=Batch(global_size=8, microbatch_size=1),
               train=Train(steps=STEPS + 3, sample_tokens=0, eval_sequences=4),
               model=Transformer(num_layers=2, hidden=16, heads=2, vocab=300, sequence=16), seed=1,
               data=Data(corpus=str(folder / "texts"), cache_dir=folder / "cache"), checkpoint=Checkpoint(every=0))


def trained(run, folder, size=2, trackers=()):
    run, stream = replace(run, run_dir=folder), io.StringIO()
    summary = run_ranks(lambda world: train(run, "tiny", world, stream=stream, trackers=trackers if world.rank == 0
                                            else ()), size)[0]
    lines = {name: [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
             for name in ("metrics", "events")}
    return summary, lines, stream.getvalue()


def given(monkeypatch, *limits):
    """Make choices return these limits in turn, then always the last ones, whatever was measured; None: the present
    ones."""
    asked = []

    def chosen(run, stages, present, seconds, segments, conditions):
        asked.append((run, seconds))
        choice = (len(asked) - 1) // run.mesh.pipe  # all ranks make each choice
        return MeasuredChoice(limits=limits[min(choice, len(limits) - 1)] or present, bubble_fraction=0.1,
                              counted_fraction=0.2)

    monkeypatch.setattr(measured_limits, "measured_choice", chosen)
    return asked


def test_a_run_takes_the_limits_and_loses_nothing(run, tmp_path, monkeypatch):
    """Losses are bit-identical; the choice is reported, in run.toml, and with its outcome in the summary. A run from
    that file has these limits from the start, and measures no others; on other GPUs its cluster is another one."""
    monkeypatch.setattr(setup, "_cluster_of_device", lambda world: "h100")
    plain = trained(replace(run, pipeline=Pipeline(memory=None)), tmp_path / "plain")
    assert "limits" not in plain[0]
    asked = given(monkeypatch, Limits(in_flight=4, deferred=(2, 3), last=3))
    summary, lines, text = trained(run, tmp_path / "run")
    assert [line["loss"] for line in lines["metrics"]] == [line["loss"] for line in plain[1]["metrics"]]
    assert len(asked) == 2 and asked[0] == asked[1] and all(min(each) > 0 for each in asked[0][1])
    assert (asked[0][0].pipeline.in_flight, asked[0][0].pipeline.deferred) == ("auto", None)
    told, = [line for line in lines["events"] if line["event"] == "limits"]
    assert told["step"] == STEPS and told["in_flight"] == 4 and told["deferred"] == [2, 3]
    assert "a predicted bubble of 10.0% instead of 20.0%" in told["text"] and told["text"] not in text
    assert 0 <= summary["limits"].pop("bubble_fraction") < 1
    assert summary["limits"].pop("messages") >= 0 and 0 <= summary["limits"].pop("variation") <= 0.3
    assert summary["limits"] == {"step": STEPS, "in_flight": 4, "deferred": [2, 3], "defer_last": 3,
                                 "alternating": False, "predicted_bubble_fraction": 0.1}
    kept = tomllib.loads((tmp_path / "run" / "run.toml").read_text())
    assert "cluster" not in kept["launch"]
    kept = kept["pipeline"]
    assert (kept["in_flight"], kept["deferred"], kept["defer_last"]) == (4, [2, 3], 3)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "wishes"), [
    pytest.param(Mesh(data=2), [(1, 2)], marks=pytest.mark.slow), (Mesh(pipe=2), [(2, 1), (1, 2)])], ids=str)
def test_each_mesh_is_measured_and_what_is_kept_is_about_the_first(run, tmp_path, monkeypatch, mesh, wishes):
    """All values that were resolved at the start stay resolved in the run's file."""
    asked = given(monkeypatch, Limits(in_flight=3, deferred=(0, 1)))

    class Asks:
        def event(self, event):
            if getattr(event, "loss", None) is not None and event.step in (2, 5) and wishes:
                data, pipe = wishes.pop(0)
                resize.ask(tmp_path / "run", data=data, pipe=pipe)

        def close(self):
            pass

    first = replace(run, mesh=mesh, train=replace(run.train, steps=STEPS + 10))
    summary, lines, _ = trained(first, tmp_path / "run", trackers=[Asks()])
    assert not wishes
    moved = [line for line in lines["events"] if line["event"] == "transition"]
    told, = [line for line in lines["events"] if line["event"] == "limits"]
    assert told["step"] == moved[-1]["step"] + STEPS == summary["limits"]["step"] and len(asked) == 2
    kept = tomllib.loads((tmp_path / "run" / "run.toml").read_text())
    assert kept["optim"]["offload"] == "none" and kept["mesh"]["pipe"] == mesh.pipe
    assert (kept["pipeline"]["in_flight"], kept["pipeline"].get("deferred")) == (
        (3, [0, 1]) if mesh.pipe == 2 else (1, None))


@pytest.mark.slow
def test_a_run_that_freezes_chooses_at_once_by_what_its_blocks_have_taken(run, tmp_path, monkeypatch):
    """Immediately after a transition, and once more by times of its own steps. Losses are bit-identical; the run's file
    has the limits of its beginning."""
    run = replace(run, elastic=Elastic(freeze="manual", manual=(f"{STEPS + 2}:1",)), memory=Memory(recompute=1),
                  train=replace(run.train, steps=2 * STEPS + 4))
    plain = trained(replace(run, pipeline=Pipeline(memory=None)), tmp_path / "plain")
    wanted = [Limits(in_flight=4, deferred=(2, 3)), Limits(in_flight=3, deferred=(0, 1)), Limits(
        in_flight=3, deferred=(0, 2))]
    asked = given(monkeypatch, *wanted)
    summary, lines, _ = trained(run, tmp_path / "run")
    assert [line["loss"] for line in lines["metrics"]] == [line["loss"] for line in plain[1]["metrics"]]
    told = [line for line in lines["events"] if line["event"] == "limits"]
    assert [(line["step"], line["in_flight"], line["deferred"]) for line in told] == [
        (step, one.in_flight, list(one.deferred)) for step, one in zip(
            (STEPS, STEPS + 2, 2 * STEPS + 2), wanted, strict=True)]
    assert "by the times before the transition" in told[1]["text"] and f"of {STEPS} steps" in told[2]["text"]
    assert asked[2] == asked[3] and asked[2][1] != asked[0][1], "the ranks agree, on times of more steps"
    assert summary["limits"]["step"] == 2 * STEPS + 2
    kept = tomllib.loads((tmp_path / "run" / "run.toml").read_text())["pipeline"]
    assert (kept["in_flight"], kept["deferred"]) == (4, [2, 3])


def test_ranks_that_come_back_know_the_times(run, tmp_path, monkeypatch):
    asked, wishes = given(monkeypatch, Limits(in_flight=3, deferred=(0, 1))), [(1, 1), (1, 2)]

    class Asks:
        def event(self, event):
            if getattr(event, "loss", None) is not None and event.step in (STEPS, STEPS + 3) and wishes:
                data, pipe = wishes.pop(0)
                resize.ask(tmp_path / "run", data=data, pipe=pipe)

        def close(self):
            pass

    _, lines, _ = trained(replace(run, train=replace(run.train, steps=STEPS + 8)), tmp_path / "run", trackers=[Asks()])
    moved = [line for line in lines["events"] if line["event"] == "transition"]
    assert not wishes and [line["step"] for line in moved][1] < 2 * STEPS, "too few steps on one rank to be measured"
    told = [line["step"] for line in lines["events"] if line["event"] == "limits"]
    assert told == [STEPS, moved[-1]["step"]]
    assert len(asked) == 4 and asked[2] == asked[3]


def test_limits_that_stay_are_told(run, tmp_path, monkeypatch):
    given(monkeypatch, None)
    summary, lines, text = trained(run, tmp_path / "run")
    told, = [line for line in lines["events"] if line["event"] == "limits"]
    assert told["step"] == STEPS and "the schedule's limits stay: " in told["text"] and told["text"] not in text
    assert told["text"].endswith("; predicted bubble 10.0%")
    assert told["in_flight"] == summary["limits"]["in_flight"] == tomllib.loads(
        (tmp_path / "run" / "run.toml").read_text())["pipeline"]["in_flight"]


def test_limits_that_are_given_are_not_measured(run, tmp_path, monkeypatch):
    used = []
    monkeypatch.setattr(Engine, "use_limits", lambda engine, limits: used.append(limits))
    summary, _, _ = trained(replace(run, pipeline=Pipeline(in_flight=2, deferred=(0, 1))), tmp_path / "run")
    assert "limits" not in summary and not used
