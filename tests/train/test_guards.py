"""What a run does about bad steps and replicas that differ: stop, skip, roll back; as decisions, and in full runs."""

import io
import json
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from ranvier import keyed_random
from ranvier.config.resolve import resolve
from ranvier.config.run import Batch, Checkpoint, Data, Guard, Optim, Run, Train, Transformer
from ranvier.data.loader import Loader
from ranvier.data.sampler import Sampler
from ranvier.errors import RanvierError
from ranvier.mesh import Mesh
from ranvier.models import families
from ranvier.models.gpt import gpt
from ranvier.pipeline.examine import Cause
from ranvier.planner.problems import problems
from ranvier.testing.ranks import run_ranks
from ranvier.train import runtime
from ranvier.train.guards import Guards
from ranvier.train.loop import train
from tests.covering import quick
from tests.errors import raises
from tests.tiny_runs import random_texts

# ---------------------------------------------------------------------- the decisions alone


class Engine:
    """The part of an engine that the guard uses; `differs` is the error that the comparison of replicas raises."""

    learning_rate = 0.5
    differs = None

    def __init__(self, cause):
        self.cause, self.compared = cause, 0

    def examine(self, microbatches):
        return self.cause

    def compare_replicas(self):
        self.compared += 1
        if self.differs:
            raise self.differs


CAUSE = Cause(kind="output", text="block b, microbatch 2 of replica 0: its output has nan", block="b", microbatch=2,
              replica=0, rank=3)


def result(bad=None, loss=1.0, norm=1.0):
    return SimpleNamespace(bad=bad, loss=loss, grad_norm=norm)


BAD = result("loss is nan", float("nan"), float("nan"))


class Case:
    """A guard, and the names of its events and calls in order."""

    def __init__(self, *, cause=CAUSE, checkpoints=(), **settings):
        self.told, self.notes, self.engine = [], [], Engine(cause)
        self.checkpoints = list(checkpoints)
        self.guards = Guards(Guard(**settings), self.engine, tell=self._tell,
                             barrier=lambda: self.told.append("barrier"))

    def _tell(self, event):
        self.told.append(event.event)
        self.notes.append(event)

    def _go_back(self):
        self.told.append("load")
        return self.checkpoints.pop(0) if self.checkpoints else None

    def step(self, number, outcome=None):
        return self.guards.after_step(number, outcome or result(), [], publish=lambda: self.told.append("publish"),
                                      rollback=self._go_back)

    def fails(self, number, outcome=BAD):
        with pytest.raises(RanvierError) as told:
            self.step(number, outcome)
        return str(told.value)


def test_good_steps_say_nothing():
    case = Case()
    assert [case.step(number) for number in (1, 2)] == [1, 2]
    assert case.told == [] and case.engine.compared == 0


def test_stop_names_step_loss_block_and_microbatch():
    case = Case()
    assert case.fails(7) == (
        "step 7: loss is nan; nothing was updated. Block b, microbatch 2 of replica 0: its output has nan. Lower "
        "--train.learning-rate (it was 0.5 at this step) or raise --train.warmup-steps; --guard.bad-step skip or "
        "rollback continues without such steps.")
    assert case.told == ["bad-step", "publish", "barrier"], "the step is written before the run ends"
    assert case.notes[0].fields == {"cause": "output", "block": "b", "microbatch": 2, "replica": 0, "rank": 3}


@pytest.mark.parametrize(("cause", "remedy"), [
    (Cause(kind="inputs", text="microbatch 0: its inputs have nan"), "Look at the data of this microbatch"),
    (Cause(kind="parameter", text="parameter p is not finite"), "Resume from a checkpoint of an earlier step"),
    (Cause(kind="gradient", text="block b, microbatch 0"), "Lower --train.learning-rate")])
def test_the_remedy_fits_the_cause(cause, remedy):
    assert remedy in Case(cause=cause).fails(1)


def test_what_does_not_come_again_is_called_odd():
    largest = Cause(kind="largest loss", text="microbatch 0 of replica 0: its loss is the largest, 2")
    text = Case(cause=largest).fails(1)
    assert "It did not come again when the same batch ran a second time" in text and "largest" not in text
    exploded = Case(cause=largest).fails(1, result("loss is 9, more than 2 times 3", 9.0, 4.0))
    assert "Microbatch 0 of replica 0: its loss is the largest, 2" in exploded


def test_skip_goes_on_until_too_many_in_a_row():
    case = Case(bad_step="skip", max_bad_steps=3)
    assert [case.step(number, BAD) for number in (1, 2)] == [1, 2]
    assert case.told == ["bad-step"] * 2, "the step's numbers are published later, in their usual place"
    assert case.step(3) == 3
    assert [case.step(number, BAD) for number in (4, 5)] == [4, 5]
    text = case.fails(6)
    assert text.startswith("step 6: loss is nan, bad step 3 in a row; nothing was updated. ")
    assert "--guard.bad-step" not in text


def test_back_returns_to_the_checkpoint():
    case = Case(bad_step="rollback", checkpoints=[4])
    assert case.step(6, BAD) == 4
    assert case.told == ["bad-step", "publish", "load", "went-back"]
    assert case.notes[1].text == ("rolled back to the checkpoint of step 4; the data continues after the batch of this "
                                  "step")
    assert case.notes[1].fields == {"to_step": 4}


def test_back_without_a_checkpoint_stops():
    case = Case(bad_step="rollback")
    assert "step 2: loss is nan, and there is no checkpoint to go back to; nothing was updated" in case.fails(2)
    assert case.told.count("publish") == 1


def test_a_run_that_gets_no_further_ends():
    """Repeated steps are good, but the run never gets past the same bad step."""
    case = Case(bad_step="rollback", max_bad_steps=3, checkpoints=[4, 4, 4])
    for number in (5, 6, 7, 5, 6, 7):
        assert case.step(number, BAD if number == 7 else None) == (4 if number == 7 else number)
    assert [case.step(number) for number in (5, 6)] == [5, 6]
    assert "bad step 3 in a row" in case.fails(7)


def test_a_run_that_gets_further_goes_on():
    case = Case(bad_step="rollback", max_bad_steps=2, checkpoints=[4, 8, 8])
    for number, reached in ((7, 4), (9, 8), ):
        assert case.step(number, BAD) == reached
        for after in range(reached + 1, number + 2):
            case.step(after)


def test_replicas_are_compared_every_so_many_steps():
    case = Case(compare_every=3)
    for number in range(1, 8):
        case.step(number)
    assert case.engine.compared == 2
    case.engine.differs = RanvierError("differs", where="parameter p", remedy="Go back.")
    assert case.fails(9, result()) == "parameter p: differs. Go back."
    assert case.told == ["replicas-differ", "publish", "barrier"]


# ---------------------------------------------------------------------- full runs

@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    random_texts(folder / "texts", 40, lines=30)
    return folder


def run_of(corpus, run_dir, **changed):
    run = Run(mesh=Mesh(data=2, pipe=2), batch=Batch(global_size=8, microbatch_size=2),
              train=Train(steps=6, learning_rate=1e-2, sample_tokens=0, eval_sequences=2),
              model=Transformer(num_layers=1, hidden=8, heads=2, vocab=300, sequence=8), run_dir=run_dir,
              data=Data(corpus=str(corpus / "texts"), cache_dir=corpus / "cache"), precision="fp64")
    return replace(run, **changed)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def break_data(monkeypatch, *bad_batches, size=8):
    """One sample of each of these batches (from 0, in the data's order), in microbatch 1 of replica 0, makes the MLP
    return nan. Returns a list to which the batches that rank 0 takes are added, in order."""
    taken, bad = [], set()
    batch_of, loaders_of = Loader.microbatches, runtime._loaders

    def microbatches(self, step):
        if threading.current_thread().name == "rank 0" and self.sampler.seed is not None:
            taken.append(step + self.offset // size)
        return batch_of(self, step)

    def loaders(*args):
        train_data, eval_data = loaders_of(*args)
        bad.update(int(train_data.sampler.global_batch(batch, size)[3]) for batch in bad_batches)
        return train_data, eval_data

    def hook(module, args, output):
        here = keyed_random._current.scope
        return output * torch.nan if here is not None and bad & set(here.samples.tolist()) else output

    def broken(run, dtype=torch.float32):
        model = gpt(run.model, dtype=dtype)

        def build():
            module = model.blocks["layer0.mlp"]()
            module.register_forward_hook(hook)
            return module

        return replace(model, blocks={**model.blocks, "layer0.mlp": build})

    monkeypatch.setattr(Loader, "microbatches", microbatches)
    monkeypatch.setattr(runtime, "_loaders", loaders)
    monkeypatch.setattr(families, "model_of", broken)
    return taken


def run_all(run):
    stream = io.StringIO()
    run_ranks(lambda world: train(run, "tiny", world, stream=stream), run.mesh.size, timeout_seconds=120)
    return stream.getvalue()


WHERE = "Block layer0.mlp, microbatch 1 of replica 0: its output has nan"


@pytest.mark.parametrize("mesh", quick(1, [Mesh(), Mesh(data=2, pipe=2), Mesh(row=2, col=2)]), ids=str)
def test_a_run_stops_with_the_block_named(corpus, tmp_path, monkeypatch, mesh):
    break_data(monkeypatch, 2)
    with raises("bad-step", 3, WHERE):
        run_all(run_of(corpus, tmp_path, mesh=mesh))
    assert [step["loss"] is None for step in lines(tmp_path / "metrics.jsonl")] == [False, False, True]
    *_, told, failed = lines(tmp_path / "events.jsonl")
    assert told["event"] == "bad-step"
    assert failed["event"] == "failed" and failed["code"] == "bad-step" and WHERE in failed["text"]  # for watchers
    assert "failed" in (tmp_path / "report.html").read_text()


def test_a_run_skips(corpus, tmp_path, monkeypatch):
    """The step keeps its number; the next one takes the next batch, and the run ends well."""
    taken = break_data(monkeypatch, 2)
    text = run_all(run_of(corpus, tmp_path, guard=Guard(bad_step="skip", compare_every=1)))
    assert taken == [0, 1, 2, 3, 4, 5]
    assert f"step 3: loss is nan; nothing was updated. {WHERE}" in text and "no valid target" not in text
    steps = lines(tmp_path / "metrics.jsonl")
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    assert [step["loss"] is None for step in steps] == [False, False, True, False, False, False]
    notes = [event for event in lines(tmp_path / "events.jsonl") if event["event"] == "bad-step"]
    assert [(note["step"], note["block"], note["microbatch"], note["replica"]) for note in notes] == [
        (3, "layer0.mlp", 1, 0)]


@pytest.mark.parametrize("mesh", [Mesh(data=2, pipe=2), pytest.param(Mesh(row=2, col=2), marks=pytest.mark.slow)],
                         ids=str)
def test_a_run_goes_back(corpus, tmp_path, monkeypatch, mesh):
    """To the checkpoint of step 2: from there on, losses are those of a run that never had the skipped batches. A run
    that resumes from this one continues at its place in the data."""
    taken = break_data(monkeypatch, 3)
    guarded = run_of(corpus, tmp_path / "run", mesh=mesh, guard=Guard(bad_step="rollback"),
                     checkpoint=Checkpoint(every=2), train=Train(steps=5, sample_tokens=0, eval_sequences=2))
    text = run_all(guarded)
    assert taken == [0, 1, 2, 3, 4, 5, 6]
    steps = lines(tmp_path / "run" / "metrics.jsonl")
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 3, 4, 5]
    assert "step 4: rolled back to the checkpoint of step 2" in text
    events = [event["event"] for event in lines(tmp_path / "run" / "events.jsonl")]
    assert [event for event in events if event != "checkpoint"] == ["start", "bad-step", "went-back", "eval", "end"]

    monkeypatch.undo()
    global_batch = Sampler.global_batch
    monkeypatch.setattr(Sampler, "global_batch", lambda self, step, size, offset=0: global_batch(
        self, step, size, offset + (2 * size if self.seed is not None and step >= 2 else 0)))
    run_all(replace(guarded, run_dir=tmp_path / "other", guard=Guard()))
    never = lines(tmp_path / "other" / "metrics.jsonl")
    assert [step["loss"] for step in steps[-3:]] == [step["loss"] for step in never[-3:]], "bit-identical"
    monkeypatch.undo()

    taken = break_data(monkeypatch)
    run_all(replace(guarded, resume="auto", train=replace(guarded.train, steps=7)))
    assert taken == [7, 8]


def test_a_run_without_a_checkpoint_cannot_go_back(corpus, tmp_path, monkeypatch):
    break_data(monkeypatch, 1)
    with raises("bad-step", 2):
        run_all(run_of(corpus, tmp_path, guard=Guard(bad_step="rollback")))
    assert [step["step"] for step in lines(tmp_path / "metrics.jsonl")] == [1, 2]


@pytest.mark.parametrize(("mode", "saved"), [("skip", ["step-6"]), ("none", [])])
def test_a_last_step_that_was_skipped_is_saved(corpus, tmp_path, monkeypatch, mode, saved):
    """A skipped step leaves good parameters; parameters to which a bad step was applied are not saved."""
    break_data(monkeypatch, 5)
    run = run_of(corpus, tmp_path, guard=Guard(bad_step=mode), mesh=Mesh(pipe=2))
    if mode == "skip":
        run_all(run)
    else:
        with raises("loss-not-finite", 6):
            run_all(run)
    assert [path.name for path in (tmp_path / "checkpoint").glob("step-*")] == saved


def test_replicas_that_differ_end_the_run(corpus, tmp_path, monkeypatch):
    after_step = Guards.after_step

    def flips(self, step, *rest, **calls):
        if step == 3 and self._engine.world.rank == 2:
            parameter = self._engine.named_parameters()["layer0.attention.qkv.weight"]
            with torch.no_grad():
                parameter.view(-1).view(torch.int64)[5] ^= 1 << 45
        return after_step(self, step, *rest, **calls)

    monkeypatch.setattr(Guards, "after_step", flips)
    with raises("replicas-differ", "layer0.attention.qkv.weight", 2):
        run_all(run_of(corpus, tmp_path, mesh=Mesh(data=3), guard=Guard(compare_every=2)))
    assert [step["step"] for step in lines(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    assert [event["event"] for event in lines(tmp_path / "events.jsonl")[-2:]] == ["replicas-differ", "failed"]


def test_check_tells_what_cannot_be_guarded():
    run = resolve(Run(optim=Optim(update_in_backward=True), batch=Batch(global_size=4), mesh=Mesh()))
    assert problems(run) == [], "the default `stop` means `none` here"
    problem, = problems(replace(run, guard=Guard(bad_step="rollback")))
    assert str(problem) == (
        "guard.bad-step: cannot check a step before blocks are updated: optim.update-in-backward is set (got "
        "'rollback'). Set --guard.bad-step stop, or leave --optim.update-in-backward out.")
    problem, = problems(replace(run, guard=Guard(loss_spike_factor=3.0)))
    assert problem.where == "guard.loss-spike-factor"
