"""The controller of elastic runs, driven with random facts; its state can go through JSON at any time."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranvier.config.resolve import ResolvedRun
from ranvier.config.run import Batch, Elastic, Train
from ranvier.elastic.change import Change, MeshRequest
from ranvier.elastic.controller import Controller, DecisionFacts, tried_microbatch_size
from ranvier.elastic.freezing import NONE_FROZEN, FrozenLayers, Manual
from ranvier.elastic.inputs import BlockFacts, PresentMesh
from ranvier.elastic.named_policy import policy_of
from ranvier.elastic.state import ElasticState, StepFigures
from ranvier.errors import CheckpointError, ConfigError
from ranvier.mesh import Mesh
from ranvier.train.saving import read_metadata
from tests.covering import examples
from tests.errors import raises

LAYERS, EPOCH, FIRST = 6, 40, 8
NAMES = (*(f"layer{number}" for number in range(LAYERS)), "head")
TOO_LARGE = ConfigError("does not fit", where="memory", remedy="Choose another mesh.")


class Answers:
    """A policy that returns these answers in order, and counts them."""

    def __init__(self, answers):
        self.answers, self.given = answers, 0

    def frozen_layers(self, facts):
        assert facts.lowest <= facts.frozen and not facts.loss < 0
        self.given += 1
        return self.answers[self.given % len(self.answers)]

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.given = state["given"]


class Course:
    """A run with numbers from `draw`. It keeps two controllers; the second gets its state through JSON each time."""

    def __init__(self, draw):
        self.draw = draw
        answers = draw(st.none() | st.lists(st.integers(0, LAYERS) | st.sets(st.integers(0, LAYERS - 1)), min_size=1,
                                            max_size=5))
        freeze, self.untrained = draw(st.sampled_from(["none", "cap", "gradient-norm", "manual"])), draw(
            st.integers(0, 1))
        elastic = Elastic(
            freeze=freeze, alpha=0.4, every=draw(st.integers(0, 3)), manual=("1:2", "4:5", "9:1"),
            auto_pipe=draw(st.booleans()), auto_dp=draw(st.booleans()), cache=draw(st.booleans()), cache_from=2,
            cut=draw(st.sampled_from(["exact", "reference"])), profile_microbatches=draw(st.booleans()),
            global_batch=draw(st.sampled_from(["keep", "grow"])))
        self.first = self.run = ResolvedRun(mesh=Mesh(pipe=4), batch=Batch(global_size=FIRST, microbatch_size=2),
                                            train=Train(steps=40), elastic=elastic)
        tied = draw(st.integers(0, 2))
        self.both = [Controller(
            self.run, policy_of(elastic) if answers is None else Answers(answers), is_own=answers is not None,
            epoch_samples=EPOCH, untrained=self.untrained, still_frozen=lambda frozen: tied if frozen >= tied else 0)
            for _ in range(2)]
        self.state, self.frozen, self.step, self.samples = self.both[0].initial(), NONE_FROZEN, 0, 0
        self.cut, self.num_ranks = (2, 4, 6), 4

    def call(self, name, *args, **options):
        """The result of a method of the controller or the state; it must be the same with the state read from JSON."""
        document = self.state.document()
        text = json.dumps(document, allow_nan=False)
        again = ElasticState.read(json.loads(text))
        assert json.dumps(again.document(), allow_nan=False) == text
        one, other = (getattr(state, name)(*args, **options) if hasattr(state, name) else
                      getattr(controller, name)(state, *args, **options)
                      for controller, state in zip(self.both, (self.state, again), strict=True))
        for found in (one, other):
            state = found if isinstance(found, ElasticState) else getattr(found, "state", None) or found[0]
            assert state.norms is None or all(norm >= 0 for norm in state.norms)
        assert repr(one) == repr(other)
        return one

    def facts(self):
        seconds = st.floats(1e-4, 1.0)
        times = BlockFacts(
            forward_seconds=tuple(self.draw(seconds) for _ in NAMES), backward_seconds=(0.01,) * len(NAMES),
            update_seconds=(1e-5,) * len(NAMES), output_bytes=(1000,) * len(NAMES), num_parameters=(500,) * len(NAMES),
            parameter_bytes=(2000,) * len(NAMES), state_bytes=(4000,) * len(NAMES), cores=None, bandwidth=1e9,
            latency_seconds=1e-5, seconds=self.draw(st.none() | seconds))
        self.full = self.draw(st.sets(st.tuples(st.integers(1, 6), st.integers(1, 4)), max_size=4))
        present = PresentMesh(mesh=self.run.mesh, boundaries=self.cut, frozen=self.frozen.prefix, cached_blocks=0,
                              global_size=self.run.batch.global_size, layers=tuple((name,) for name in NAMES[:-1]),
                              block_names=NAMES)
        return DecisionFacts(
            step=self.step, samples=self.samples, remaining_steps=self.draw(st.integers(1, 10**5)),
            num_ranks=self.num_ranks, present=present, frozen=self.frozen, blocks=lambda: times,
            problem=lambda run, frozen: TOO_LARGE if (run.mesh.data, run.mesh.pipe) in self.full else None,
            stage_memory=lambda frozen: None, caches=lambda depth: depth >= 2)

    def take_step(self):
        before, size = self.samples, self.run.batch.global_size
        self.state = self.call("evaluates_policy_after", self.step + 1, before, before + size, self.frozen)
        if self.first.elastic.profile_microbatches:
            share = -(-size // self.run.mesh.data)
            self.state, samples, _ = tried_microbatch_size(
                self.state, self.run.mesh, share, len(self.frozen), self.step + 1)
            assert 1 <= samples <= share
        self.step, self.samples = self.step + 1, before + size
        if self.state.due and self.draw(st.booleans()):  # other steps had no gradients
            self.state = self.call("with_gradients", [self.draw(st.floats(min_value=0.0)) for _ in range(LAYERS)])
        any_number = st.floats(allow_nan=True)
        self.state = self.call("with_step", self.step, self.draw(st.floats(1e-3, 10.0)), StepFigures(
            loss=abs(self.draw(any_number)), targets=8.0, learning_rate=self.draw(any_number),
            metrics={"eval_loss": self.draw(any_number)} if self.draw(st.booleans()) else {}))

    def decide(self, request=None):
        facts = self.facts()
        decision = self.call("decide", facts, request)
        lowest, self.state, change = self.both[0].lowest(self.state, self.frozen.prefix), decision.state, \
            decision.change
        assert not self.state.needs_decision
        assert len({note.text for note in decision.notes}) == len(decision.notes)
        if change is None:
            return
        assert Change.read(json.loads(json.dumps(asdict(change)))) == change and change.old_frozen == self.frozen
        there = change.apply_to(self.first)
        assert there.mesh.size <= self.num_ranks
        assert max(lowest, self.untrained) <= change.frozen.prefix <= LAYERS
        assert all(change.frozen.prefix < layer < LAYERS for layer in change.frozen.above)
        assert there.mesh == self.run.mesh or (there.mesh.data, there.mesh.pipe) not in self.full
        assert there.mesh == self.run.mesh or self.first.elastic.auto_pipe or request
        size = FIRST * there.mesh.data if self.first.elastic.global_batch == "grow" else FIRST
        assert there.batch.global_size == size and 1 <= there.batch.microbatch_size <= -(-size // there.mesh.data)
        if change.boundaries is not None:
            assert len(change.boundaries) == there.mesh.pipe - 1
            assert [0, *change.boundaries, len(NAMES)] == sorted({0, *change.boundaries, len(NAMES)})
        self.state = self.call(
            "after_change", change, step=self.step, old=self.run.mesh, new=there.mesh, moved_bytes=1000,
            seconds=self.draw(st.floats(0.0, 5.0)), remaining_steps=facts.remaining_steps)
        assert not self.state.recent and self.state.trial is None and self.state.kept == 0
        self.run, self.frozen = there, change.frozen
        pipe = there.mesh.pipe
        self.cut = change.boundaries or tuple(len(NAMES) * stage // pipe for stage in range(1, pipe))


@examples(16)
@given(st.data())
def test_decisions_hold_whatever_is_measured(data):
    """No more ranks than there are, only layers that exist, and the same with the state read from JSON."""
    course = Course(data.draw)
    course.state = course.call("begin", 0, course.frozen, LAYERS)
    if course.state.needs_decision:
        course.decide()
    for _ in range(data.draw(st.integers(4, 14))):
        course.take_step()
        if data.draw(st.integers(0, 9)) == 0:  # ranks join, or are lost
            course.num_ranks = max(course.run.mesh.size, data.draw(st.integers(1, 6)))
        if data.draw(st.integers(0, 5)) == 0:
            sizes = st.none() | st.integers(-1, 4)
            course.decide(MeshRequest(sizes={"data": data.draw(sizes), "pipe": data.draw(sizes)}, request_id="1"))
        elif course.state.needs_decision:
            course.decide()


@pytest.mark.parametrize("fits", [False, True])
def test_a_refused_request_is_added_to_the_decision_without_it(fits):
    """Layers for whose training there is no memory stay frozen, and a smaller pipeline is found for others."""
    run = ResolvedRun(mesh=Mesh(pipe=4), batch=Batch(global_size=FIRST, microbatch_size=2),
                      elastic=Elastic(freeze="manual", manual=("1:1",), auto_pipe=fits, auto_dp=True))
    controller = Controller(run, Manual(((1, 5 if fits else 1),)), epoch_samples=EPOCH)
    ones = (1.0,) * len(NAMES)
    state = replace(controller.initial(), norms=(1.0,) * LAYERS, recent=(1.0,))
    facts = DecisionFacts(
        step=1, samples=8, remaining_steps=10**5, num_ranks=4, frozen=FrozenLayers(3), blocks=lambda: BlockFacts(
            forward_seconds=ones, backward_seconds=ones, update_seconds=ones, output_bytes=(8,) * len(NAMES),
            num_parameters=(8,) * len(NAMES), parameter_bytes=(8,) * len(NAMES), state_bytes=(8,) * len(NAMES),
            cores=None, bandwidth=1e9, latency_seconds=1e-5), caches=lambda depth: False,
        present=PresentMesh(mesh=run.mesh, boundaries=(2, 4, 6), frozen=3, cached_blocks=0, global_size=FIRST,
                            layers=tuple((name,) for name in NAMES[:-1]), block_names=NAMES),
        problem=lambda run, frozen: None if fits else TOO_LARGE, stage_memory=lambda frozen: None)
    without = controller.decide(state, facts)
    assert [note.event for note in without.notes if note.event != "judged"] == ["unfreeze-refused"] * (not fits)
    assert without.change.mesh["pipe"] < 4 if fits else without.change is None
    refused = controller.decide(state, facts, MeshRequest(sizes={"data": 9, "pipe": 9}, request_id="1"))
    assert refused.notes[0].event == "resize-refused"
    assert replace(refused, notes=refused.notes[1:]) == without


def test_the_next_decision_is_where_it_is_said_to_be():
    """Also the next decision about a mesh that was chosen before a step was measured."""
    run = ResolvedRun(mesh=Mesh(pipe=2), batch=Batch(global_size=FIRST, microbatch_size=2),
                      elastic=Elastic(freeze="manual", manual=("0:1", "30:2"), auto_pipe=True))
    controller = Controller(run, Manual(((0, 1), (30, 2))), epoch_samples=EPOCH)
    state = replace(controller.initial(), unmeasured=True)
    until = controller.steps_until_evaluation(state, 0, 0, FIRST, 1)
    for step in range(1, until):
        assert not controller.evaluates_policy_after(state, step, (step - 1) * FIRST, step * FIRST,
                                                     replace(NONE_FROZEN, prefix=1)
                                                     ).due and not state.needs_decision
        state = state.with_step(step, 1.0, StepFigures())
        assert controller.steps_until_evaluation(state, step, step * FIRST, FIRST, 1) == until - step
    assert until == 9 and state.needs_decision
    state = replace(state, unmeasured=False, compares=False)
    assert controller.steps_until_evaluation(state, 9, 9 * FIRST, FIRST, 1) == 21


@pytest.mark.parametrize("changed", [
    {"evaluations": "many"}, {"norms": [{}]}, {"ledger": {"entries": [{"step": 1}]}}, {"trial": {"pipe": 1}}], ids=str)
def test_an_impossible_state_is_refused_by_the_checkpoints_name(tmp_path, changed):
    loaded = SimpleNamespace(folder=tmp_path / "step-3", about={"elastic": {**ElasticState().document(), **changed}})
    with pytest.raises(CheckpointError) as raised:
        read_metadata(loaded)
    assert "step-3" in raised.value.where and "about." in str(raised.value)


def test_a_state_from_before_a_field_was_added_is_read():
    """Earlier versions wrote None for numbers that are not finite; missing fields are as in a new run."""
    older = {"evaluations": 2, "due": False, "norms": [0.5, None], "ledger": {"entries": []}, "profile": {"trials": []},
             "progress": {"loss": 1.0, "targets": 2.0, "learning_rate": None, "metrics": {}, "similarities": None},
             "kept": 1}
    state = ElasticState.read(older)
    assert state.norms == (0.5, float("inf")) and state.inputs.learning_rate != state.inputs.learning_rate
    assert (state.evaluations, state.kept, state.unmeasured, state.refused) == (2, 1, False, frozenset())
    assert ElasticState.read({name: value for name, value in older.items() if name not in ("progress", "kept")}
                             ).inputs.targets == 0.0


def test_frozen_layers_that_the_model_does_not_have():
    run = ResolvedRun(elastic=Elastic(freeze="manual", manual=("0:1",)))
    controller = Controller(run, Manual(((0, 1),)), epoch_samples=EPOCH)
    with raises("checkpoint-frozen-layers", 5, 3, where="checkpoint"):
        controller.restore({"frozen": 5}, num_ranks=1, num_layers=3, step_samples=8, boundaries=None,
                           problem=lambda run, frozen: None)


@pytest.mark.parametrize(("had", "problem", "returns"), [
    (4, None, True), (2, None, False), (4, "is too large", False)],
    ids=["as before", "ranks that were lost are back", "it may not be"])
def test_a_resumed_run_returns_to_its_last_mesh(had, problem, returns):
    """Else it stays on the mesh with which it was started."""
    run = ResolvedRun(mesh=Mesh(pipe=4), batch=Batch(global_size=FIRST, microbatch_size=2))
    policy, last = Answers([0]), Mesh(data=2)
    controller = Controller(run, policy, epoch_samples=EPOCH)
    saved = {"frozen": 0, **{str(axis): size for axis, size in last.sizes.items()}, "boundaries": None,
             **{f"first_{axis}": size for axis, size in run.mesh.sizes.items()}, "first_size": FIRST,
             "global_size": FIRST, "num_ranks": had, **replace(controller.initial(), policy={"given": 3}).document()}
    decision = controller.restore(saved, num_ranks=4, num_layers=LAYERS, step_samples=FIRST, boundaries=None,
                                  problem=lambda run, frozen: problem)
    assert (decision.change is not None) == returns and (
        decision.change is None or decision.change.apply_to(run).mesh == last)
    assert [note.text for note in decision.notes] == ([] if problem is None else [
        "data 2 x pipe 1, the mesh before the run was interrupted: is too large"])
    assert policy.given == 3


def test_a_step_without_gradients_puts_the_policy_off():
    run = ResolvedRun(batch=Batch(global_size=FIRST, microbatch_size=2), elastic=Elastic(freeze="cap", alpha=0.5))
    controller = Controller(run, policy_of(run.elastic), epoch_samples=EPOCH)
    state = controller.evaluates_policy_after(controller.initial(), 5, EPOCH - FIRST, EPOCH, NONE_FROZEN)
    assert state.due
    state = controller.decide(state, SimpleNamespace(frozen=NONE_FROZEN)).state
    assert controller.evaluates_policy_after(state, 6, EPOCH, EPOCH + FIRST, NONE_FROZEN).due
