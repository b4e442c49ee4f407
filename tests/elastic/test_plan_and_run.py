"""A run and its plan take the same decisions on depth and mesh at each step if both have the same facts."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from ranvier.config.resolve import ResolvedRun, resolve
from ranvier.config.run import Batch, Data, Elastic, Launch, Run, Train, Transformer
from ranvier.cost import transition
from ranvier.cost.cluster_files import load_cluster
from ranvier.elastic.change import Change
from ranvier.elastic.controller import Controller
from ranvier.elastic.inputs import EvaluationSchedule
from ranvier.elastic.state import ElasticState
from ranvier.mesh import Mesh
from ranvier.planner.elastic_plan import Course, course, predicted_blocks
from ranvier.planner.work import Work
from ranvier.train import elasticity
from ranvier.train.elasticity import Elasticity
from ranvier.train.measured_blocks import present_mesh
from tests.covering import quick
from tests.elastic.runs import lines, run_all, tiny

STEPS = 18
SLOW = load_cluster("laptop")
CLUSTER = replace(SLOW, device=replace(SLOW.device, cores=4.0, rates={"fp64": replace(
    SLOW.device.rates["fp32"], peak_flops=SLOW.device.rates["fp32"].peak_flops / 100)}))
"""Four slow cores, so that the mesh matters."""


def planned(sentences, run: Run) -> Course:
    """The plan of a run, with the numbers that the run reads from its data."""
    known = replace(run, data=replace(run.data, train_samples=96), model=replace(run.model, num_classes=2))
    found = course(resolve(replace(known, launch=replace(known.launch, device="cpu"))), CLUSTER, Work())
    assert found is not None
    return found


def stated_facts(monkeypatch, plan: Course) -> None:
    """The run's ranks measure what the plan predicts: seconds of blocks, of steps and of transitions."""
    def facts(now, measured, profile=None):
        return predicted_blocks(replace(now.run, launch=replace(now.run.launch, device="cpu")), CLUSTER, Work(),
                                present_mesh(now), profile)

    def step_seconds(step: int) -> float:
        return next(period.step_seconds for period in plan.periods
                    if period.first_step < step <= period.first_step + period.steps)

    saw, enter = Elasticity.add_step, Elasticity.enter
    monkeypatch.setattr(elasticity, "measured_blocks", facts)
    monkeypatch.setattr(Elasticity, "add_step", lambda self, event: saw(
        self, replace(event, step_seconds=step_seconds(event.step))))

    def entered(self, now, saved, change, old, moved, seconds, step, progress):
        cost = ElasticState.read(saved).ledger.expected_cost(moved)
        return enter(self, now, saved, change, old, moved, cost, step, progress)

    monkeypatch.setattr(Elasticity, "enter", entered)


def told_changes(monkeypatch) -> dict[int, Change]:
    """Step -> the change after it, in every run and plan from now on."""
    told, entered = {}, Controller.after_change

    def noting(controller, state, change, *, step, **facts):
        told[step] = change
        return entered(controller, state, change, step=step, **facts)

    monkeypatch.setattr(Controller, "after_change", noting)
    return told


def decisions(found: list[tuple[int, int, tuple[int, ...]]]) -> list[tuple[int, int, tuple[int, ...]]]:
    """(steps done, frozen layers, data and pipe) of each change."""
    return [found[0], *(after for before, after in pairwise(found) if before[1:] != after[1:])]


@pytest.mark.parametrize("elastic", quick(1, [
    Elastic(freeze="manual", manual=("5:2", "14:4"), auto_pipe=True, auto_dp=True),
    Elastic(freeze="cap", alpha=0.4, every=6, auto_pipe=True, auto_dp=True),
    Elastic(freeze="cap", alpha=0.5, auto_pipe=True),
    Elastic(freeze="cap", alpha=0.5, every=8, auto_pipe=True, auto_dp=True, global_batch="grow"),
    Elastic(freeze="manual", manual=("0:2", "12:5"), auto_pipe=True, auto_dp=True, cut="reference"),
    Elastic(freeze="manual", manual=("4:3",)),
]), ids=["by hand", "cap", "epochs without replicas", "a batch that grows", "the article's rule", "freezing alone"])
@pytest.mark.parametrize("prior_seconds", quick(1, [1e-9, 1e6]), ids=["free", "never pays"])
def test_a_run_and_its_plan_take_the_same_decisions(sentences, tmp_path, monkeypatch, elastic,
                                                    prior_seconds):
    monkeypatch.setattr(transition, "PRIOR_SECONDS", prior_seconds)
    monkeypatch.setattr(transition, "PRIOR_BYTES_PER_SECOND", 1e15)
    run = tiny(sentences, tmp_path / "run", mesh=Mesh(pipe=4), elastic=elastic, train=Train(steps=STEPS))
    told = told_changes(monkeypatch)
    plan = planned(sentences, run)
    in_plan = dict(told)
    told.clear()
    stated_facts(monkeypatch, plan)
    run_all(run)
    assert told == in_plan
    steps = lines(run, "metrics.jsonl")
    happened = [(line["step"] - 1, line["frozen_layers"], (line["data"], line["pipe"]))
                for line in steps if "frozen_layers" in line]
    if happened[0][0]:
        happened = [(0, 0, (1, 4)), *happened]
    expected = [(period.first_step, period.frozen, period.mesh.shape[:2]) for period in plan.periods]
    assert decisions(happened) == decisions(expected)
    assert len(steps) == sum(period.steps for period in plan.periods)
    taken = {each[2] for each in decisions(expected)}
    assert (len(taken) > 1) == (elastic.auto_dp and (prior_seconds < 1 or elastic.cut == "reference"))


@pytest.mark.parametrize(("schedule", "size"), [
    (EvaluationSchedule(every=0, epoch_samples=96), 8), (EvaluationSchedule(every=0, epoch_samples=100), 24),
    (EvaluationSchedule(every=7, epoch_samples=96), 8), (EvaluationSchedule(every=0, epoch_samples=5), 8),
    (EvaluationSchedule(every=0, epoch_samples=96, depths=((0, 1), (5, 2), (6, 4), (30, 5))), 8)], ids=str)
def test_the_next_evaluation_is_the_first_step_at_which_the_policy_is_asked(schedule, size):
    def depth(step):
        return max((layers for at, layers in schedule.depths or () if at <= step), default=0)

    def is_asked(step):
        if schedule.depths:
            return step in dict(schedule.depths)
        return step % schedule.every == 0 if schedule.every else (
            step * size // schedule.epoch_samples > (step - 1) * size // schedule.epoch_samples)

    for start in range(40):
        until = schedule.steps_until_due(start, start * size, size, depth(start))
        due = next((step - start for step in range(start + 1, start + 200) if is_asked(step)), None)
        assert until == due, start
        assert schedule.is_due(start + 1, start * size, (start + 1) * size, depth(start)) == is_asked(start + 1)


def test_all_settings_of_elastic_runs_are_in_the_plan(monkeypatch):
    """Each setting that changes what a run does changes what its plan predicts."""
    monkeypatch.setattr(transition, "PRIOR_SECONDS", 1e-9)
    run = ResolvedRun(mesh=Mesh(pipe=4), precision="fp64", train=Train(steps=40), launch=Launch(device="cpu"),
              batch=Batch(global_size=16, microbatch_size=2), data=Data(task="classification", train="sentiment",
                                                                        train_samples=96),
              model=Transformer(num_layers=6, hidden=32, heads=2, vocab=120, sequence=32, num_classes=2))
    packs = Elastic(freeze="cap", alpha=0.3, every=7, auto_pipe=True, auto_dp=True)
    caches = Elastic(freeze="cap", alpha=0.3, every=7, cache=True, cache_from=2, frozen_dropout=False)
    work = Work()
    for base, changes in (
            (packs, [{"alpha": 0.2}, {"every": 10}, {"freeze": "gradient-norm"},
                     {"freeze": "manual", "manual": ("9:3",)}, {"auto_pipe": False}, {"auto_dp": False},
                     {"cut": "reference"}, {"global_batch": "grow"}, {"profile_microbatches": True}]),
            (caches, [{"cache": False}, {"cache_from": 5}, {"cache_bytes": 1000}, {"cache_precision": "full"}])):
        usual = course(replace(run, elastic=base), CLUSTER, work)
        same = [changed for changed in changes if course(
            replace(run, elastic=replace(base, **changed)), CLUSTER, work).periods == usual.periods]
        assert not same
