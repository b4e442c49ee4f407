"""What happens to a run at the same time as a transition: stops, checkpoints, bad steps, reports, ends."""

from __future__ import annotations

import gc
import math
import weakref
from dataclasses import replace

import pytest
import torch

from ranvier.config.run import Batch, Checkpoint, Elastic, Guard, Optim, Run, Train
from ranvier.elastic.controller import Controller, Decision
from ranvier.mesh import Mesh
from ranvier.train import changes, loop, runtime
from ranvier.train.elasticity import Elasticity
from ranvier.train.progress import Progress
from ranvier.train.session import Active
from tests.checkpoint.anywhere import assert_same, everything
from tests.elastic.runs import BY_HAND, IN_TWO, StopAfter, Wishes, always, lines, losses, run_all, tiny, transitions

document = Elasticity.document


def test_a_stop_at_the_step_of_a_transition(sentences, tmp_path, in_one_process, requests):
    """Ranks that this transition takes back from idleness must receive the stop request."""
    run = tiny(sentences, tmp_path / "run", elastic=replace(BY_HAND, auto_pipe=False, auto_dp=False),
               checkpoint=Checkpoint(every=0), batch=IN_TWO)
    wishes = Wishes(run, {1: dict(data=1, pipe=1), 4: dict(data=2, pipe=2)})
    results, _ = run_all(run, trackers=[wishes, StopAfter(4, requests)])
    assert all(result == results[0] for result in results) and results[0].keys() == {"stopped_after"}
    assert transitions(run)[-1]["step"] == results[0]["stopped_after"]
    assert [line["mesh"]["pipe"] for line in transitions(run)] == [1, 2]
    run_all(replace(run, resume="auto"), trackers=[StopAfter(6, requests)])
    assert losses(run) == pytest.approx(in_one_process[:len(losses(run))], rel=1e-9) and len(losses(run)) > 6


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 2])
def test_a_run_that_had_lost_ranks_uses_all_of_them_when_it_is_resumed(sentences, tmp_path, in_one_process, requests,
                                                                      monkeypatch, lost):
    """A run that lost none, and is on a smaller mesh because a user requested it, stays there."""
    run = tiny(sentences, tmp_path / "run", elastic=replace(BY_HAND, auto_pipe=False, auto_dp=False),
               checkpoint=Checkpoint(every=0), batch=IN_TWO)
    monkeypatch.setattr(Elasticity, "document", lambda elastic, *args: {
        **document(elastic, *args), "num_ranks": elastic.num_ranks - lost})
    run_all(run, trackers=[Wishes(run, {1: dict(data=2, pipe=1)}), StopAfter(4, requests)])
    monkeypatch.undo()
    assert transitions(run)[-1]["mesh"]["data"] == 2
    run_all(replace(run, resume="auto"), trackers=[StopAfter(6, requests)])
    assert losses(run) == pytest.approx(in_one_process[:len(losses(run))], rel=1e-9) and len(losses(run)) > 6
    sizes = transitions(run)[-1]["mesh"]
    assert (sizes["data"], sizes["pipe"]) == ((1, 4) if lost else (2, 1))


@pytest.mark.slow
@pytest.mark.parametrize(("every", "stop", "mesh"), [
    (5, 6, Mesh(pipe=4)), (7, 14, Mesh(pipe=2))], ids=str)
def test_a_checkpoint_of_the_step_at_which_layers_freeze_has_them_frozen(sentences, tmp_path, in_one_process,
                                                                         monkeypatch, requests, every, stop, mesh):
    always(monkeypatch)
    run = tiny(sentences, tmp_path / "run", elastic=BY_HAND, checkpoint=Checkpoint(every=every))
    monkeypatch.setattr(loop, "leave", lambda session: {"stopped_after": session.done})  # a run that is killed
    results, _ = run_all(run, trackers=[StopAfter(stop, requests)])
    assert results[0].keys() == {"stopped_after"}
    monkeypatch.undo()
    always(monkeypatch)
    run_all(replace(run, resume="auto", mesh=mesh))
    assert losses(run) == pytest.approx(in_one_process, rel=1e-9)


def test_an_idle_rank_keeps_nothing_of_its_last_mesh(sentences, tmp_path, monkeypatch):
    """Not even its weights, with a cache for frozen layers."""
    run = tiny(sentences, tmp_path / "run", mesh=Mesh(data=2), train=Train(steps=5), batch=IN_TWO, elastic=Elastic(
        freeze="manual", manual=("1:1",), cache=True, cache_from=1, cache_dir=tmp_path / "cache"))
    engines, alive, build = [], [], runtime.build_engine

    def built(*args, **options):
        engine = build(*args, **options)
        engines.append(weakref.ref(engine))
        return engine

    class Counts(Wishes):
        def event(self, event):
            super().event(event)
            if getattr(event, "step", 0) == 5 and not alive:
                gc.collect()
                alive.append(sum(engine() is not None for engine in engines))

    monkeypatch.setattr(runtime, "build_engine", built)
    run_all(run, trackers=[Counts(run, {2: dict(data=1, pipe=1)})])
    assert len(engines) == 5 and alive == [1]


@pytest.mark.slow
def test_a_memory_report_after_the_pipeline_has_packed(sentences, tmp_path, monkeypatch):
    always(monkeypatch)
    run = tiny(sentences, tmp_path / "run", elastic=BY_HAND, memory_report=True, train=Train(steps=8))
    results, text = run_all(run)
    assert transitions(run)[-1]["mesh"]["pipe"] == 2 and len(results[0]["memory"]) == 4
    report = text[text.rindex("done in "):]
    assert "predicted" in report and "stage 1" in report and "stage 2" not in report


@pytest.mark.slow
def test_the_cache_on_a_tensor_mesh_outlives_transitions(sentences, tmp_path, in_one_process):
    run = tiny(sentences, tmp_path / "run", mesh=Mesh(pipe=2, col=2), elastic=replace(
        BY_HAND, auto_pipe=False, auto_dp=False, cache=True, cache_from=1, cache_precision="full",
        cache_dir=tmp_path / "cache"))
    results, _ = run_all(run, trackers=[Wishes(run, {8: dict(data=2, pipe=1)})])
    assert len(transitions(run)) == 3 and sum(counts["hits"] for counts in results[0]["cache"] if counts) > 0
    assert losses(run) == pytest.approx(in_one_process, rel=1e-9)


def course(steps, size):
    return Progress.begin(Run(train=Train(steps=steps), batch=Batch(global_size=size, microbatch_size=1)))


def test_going_back_over_a_change_of_the_global_batch():
    progress = replace(course(24, 8), since=(5, 40), size=16)
    assert progress.steps_left(7) == 8
    assert progress.rolled_back(6, {"since": [5, 40], "global_size": 16}) == progress and progress.steps_left(6) == 9
    progress = progress.rolled_back(4, {})
    assert progress.steps_left(4) == 10 and progress.samples(6) == 64
    progress = replace(progress, since=(10, 112), size=24).rolled_back(8, {"since": [4, 32], "global_size": 16})
    assert progress.samples(8) == 96 and progress.steps_left(8) == 4


@pytest.mark.parametrize(("first", "sizes"), [(8, (16, 24)), (12, (16, 20, 28)), (6, (10, 14)), (48, (96,))])
def test_no_step_is_left_over_when_the_global_batch_grows(first, sizes):
    """The steps cover the samples of the first size, whenever the size changes."""
    for total in (24, 25, 100):
        for at in range(1, total, 7):
            progress, step, samples = course(total, first), 0, 0
            for size in (first, *sizes):
                progress = progress.with_size(step, size)
                for _ in range(at):
                    if not progress.steps_left(step):
                        break
                    left = math.ceil((total * first - samples) / size)
                    assert progress.steps_left(step) == left, (total, at, size, step)
                    step, samples = step + 1, samples + size


@pytest.fixture(scope="module")
def all_frozen(sentences, tmp_path_factory):
    """Losses of ten steps on one rank; half of the layers freeze after the second step, the others after the third."""
    run = tiny(sentences, tmp_path_factory.mktemp("frozen") / "run", mesh=Mesh(),
               train=Train(steps=10, learning_rate=3e-3), elastic=Elastic(freeze="manual", manual=("2:3", "3:6")))
    run_all(run)
    return losses(run)


@pytest.mark.slow
def test_all_layers_freeze_in_two_transitions_in_a_row_and_the_run_is_resized_before_its_last_step(
        sentences, tmp_path, all_frozen):
    run = tiny(sentences, tmp_path / "run", train=Train(steps=10, learning_rate=3e-3, eval_every=3),
               checkpoint=Checkpoint(every=3), elastic=Elastic(freeze="manual", manual=("2:3", "3:6")))
    results, _ = run_all(run, trackers=[Wishes(run, {1: dict(data=4, pipe=1), 7: dict(data=1, pipe=1)})])
    assert losses(run) == pytest.approx(all_frozen, rel=1e-9)
    told = transitions(run)
    assert [line["step"] for line in told[:2]] == [2, 3] and told[1]["frozen_layers"] == 6
    assert told[1]["mesh"]["data"] == 4 and told[-1]["step"] == 9 and told[-1]["mesh"]["data"] == 1
    assert (tmp_path / "run" / "checkpoint" / "step-9").exists() and results[3]["steps"] == 10


@pytest.mark.slow
def test_a_finished_elastic_run_is_resumed_and_one_without_its_flags_goes_on_frozen(sentences, tmp_path, all_frozen):
    flags = Elastic(freeze="manual", manual=("2:3", "3:6"))
    run = tiny(sentences, tmp_path / "run", mesh=Mesh(pipe=2), elastic=flags, train=Train(steps=6, learning_rate=3e-3))
    run_all(run)
    results, _ = run_all(replace(run, resume="auto"))
    assert results[0]["steps"] == 6 and results[0]["frozen_layers"] == 6
    results, _ = run_all(replace(run, resume="auto", elastic=Elastic(), mesh=Mesh(data=2),
                                 train=replace(run.train, steps=10)))
    assert losses(run) == pytest.approx(all_frozen, rel=1e-9) and results[0]["frozen_layers"] == 6


@pytest.mark.slow
def test_a_bad_step_after_a_transition_goes_back_over_it(sentences, tmp_path, monkeypatch):
    """The checkpoint is of another mesh, with fewer frozen layers; the guard and the data continue."""
    run = tiny(sentences, tmp_path / "run", elastic=replace(BY_HAND, auto_pipe=False, auto_dp=False),
               checkpoint=Checkpoint(every=4, keep=9), guard=Guard(bad_step="rollback"))
    broken = []

    class Breaks(Wishes):
        def event(self, event):
            super().event(event)
            if type(event).__name__ == "TransitionEvent" and event.mesh.data == 2:
                broken.append(event.step)

    step = loop.take_step

    def breaking(session, number):
        if session.run.mesh.data == 2 and number == 7 and session.active.runtime.train_data.offset == 0:
            with torch.no_grad():  # all ranks of this mesh learn of the bad step
                for parameter in session.active.engine.parameters():
                    parameter.fill_(math.nan)
        step(session, number)

    monkeypatch.setattr(loop, "take_step", breaking)
    results, _ = run_all(run, trackers=[Breaks(run, {2: dict(data=2, pipe=2)})])
    told = [line for line in lines(run, "events.jsonl") if line["event"] == "went-back"]
    assert broken and [line["to_step"] for line in told] == [4] and results[0]["steps"] == 24
    assert all(math.isfinite(loss) for loss in losses(run)[-20:]) and results[0]["frozen_layers"] == 4
    # step 5 is taken again with the layers that froze after it, and nothing freezes a second time
    steps = lines(run, "metrics.jsonl")[-20:]
    assert [(line["step"], line["frozen_layers"]) for line in steps] == [
        (step, 2 if step <= 14 else 4) for step in range(5, 25)]
    assert [line["frozen_layers"] for line in transitions(run)] == [0, 2, 4]
    before, after = (everything(run.run_dir / "checkpoint" / f"step-{step}") for step in (4, 12))
    changed = {name.partition(".")[0] for (kind, name), tensor in before.items()
               if kind == "parameter" and not torch.equal(tensor, after[kind, name])}
    assert changed == {"layer2", "layer3", "layer4", "layer5", "head"}


class Stays:
    """A policy that freezes nothing."""

    def frozen_layers(self, facts):
        return facts.frozen


def changing_nothing(monkeypatch, through):
    """Whenever its policy is asked, a run changes to the mesh and the cut that it has: directly, or `through` another
    mesh, without a step there."""
    change = changes.change_mesh

    def there_and_back(session, back, save=False):
        if through is not None:
            change(session, replace(back, mesh=through.sizes, boundaries=None))
        if isinstance(session.place, Active):  # the others are idle, and are sent the change
            change(session, back, save)

    monkeypatch.setattr(changes, "change_mesh", there_and_back)
    monkeypatch.setattr(Controller, "decide", lambda controller, state, facts, request: Decision(
        state=replace(state, norms=None, due=False), change=controller.change_to(
            facts.present.mesh, facts.frozen, facts.frozen, facts.present.boundaries or None, "nothing changes")))


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "through", "precision", "optim"), [
    (Mesh(pipe=2, data=2), None, "bf16", Optim(offload="none", shard=True, clip_norm=0.1)),
    (Mesh(pipe=2, data=2), Mesh(pipe=4), "fp64", Optim(offload="none", shard=True)),
    (Mesh(data=2), Mesh(), "fp16", Optim(offload="stream", initial_loss_scale=1024.0))],
    ids=["bf16", "fp64", "fp16"])
def test_a_transition_that_changes_nothing_leaves_a_run_as_it_was_to_the_bit(sentences, tmp_path, monkeypatch, mesh,
                                                                            through, precision, optim):
    plain, run = (replace(tiny(sentences, tmp_path / name, mesh=mesh, train=Train(steps=4, learning_rate=3e-3),
                               elastic=Elastic(freeze="none", every=2) if name == "run" else None),
                          precision=precision, optim=optim) for name in ("plain", "run"))
    run_all(plain)
    changing_nothing(monkeypatch, through)
    results, _ = run_all(run, freezing=Stays())
    there = [] if through is None else [(through.data, through.pipe)]
    told = transitions(run)
    assert [(line["mesh"]["data"], line["mesh"]["pipe"]) for line in told] == [*there, (mesh.data, mesh.pipe)]
    assert {line["step"] for line in told} == {2} and any(line["bytes_moved"] for line in told) == bool(there)
    assert all(result == results[0] for result in results)
    assert losses(run) == losses(plain)
    before, after = (everything(each.run_dir / "checkpoint" / "step-4") for each in (plain, run))
    kinds = {kind for kind, _ in before}
    assert kinds >= {"parameter", "exp_avg", "exp_avg_sq"} and ("master" in kinds) == (precision in ("bf16", "fp16"))
    assert_same(before, after)


def test_a_run_that_has_not_changed_yet_goes_on_without_a_transition(sentences, tmp_path, requests):
    run = tiny(sentences, tmp_path / "run", mesh=Mesh(pipe=2), elastic=BY_HAND, train=Train(steps=4), batch=IN_TWO)
    run_all(run, trackers=[StopAfter(1, requests)])
    run_all(replace(run, resume="auto"))
    assert not transitions(run) and len(losses(run)) == 4


@pytest.mark.slow
def test_a_run_goes_on_with_microbatches_that_its_rows_can_share(sentences, tmp_path, requests, in_one_process):
    run = tiny(sentences, tmp_path / "run", mesh=Mesh(pipe=2), elastic=replace(BY_HAND, auto_pipe=False, auto_dp=False),
               batch=Batch(global_size=8, microbatch_size=1))
    run_all(run, trackers=[StopAfter(4, requests)])
    run_all(replace(run, resume="auto", mesh=Mesh(pipe=2, row=2), batch=Batch(global_size=8, microbatch_size=2)))
    assert transitions(run)[-1]["microbatch_size"] == 2 and losses(run) == pytest.approx(in_one_process, rel=1e-9)
