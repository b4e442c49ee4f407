"""Resumed runs: the same numbers as without the break, one folder that describes both parts, and what is refused."""

import io
import json
import re
import shutil
import time
import tomllib
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner

from ranvier.checkpoint import files
from ranvier.checkpoint.checkpoints import Checkpoints
from ranvier.checkpoint.manifest import Saved
from ranvier.cli import main as cli
from ranvier.cli.options import read_recipe
from ranvier.cli.train import check_folder
from ranvier.config.run import Batch, Checkpoint, Data, Guard, Optim, Run, Train, Transformer
from ranvier.errors import CheckpointError, ConfigError
from ranvier.launch import failures as failure
from ranvier.launch.stop import FINISHED_RUN, STOP_SIGNALS, StopRequest
from ranvier.mesh import Mesh
from ranvier.system import atomic_file
from ranvier.system.lease import Lease, Owner
from ranvier.testing.ranks import run_ranks
from ranvier.train import loop, report, setup
from ranvier.train.loop import train
from ranvier.train.saving import differences
from tests.checkpoint.anywhere import everything, write_manifest
from tests.covering import quick
from tests.errors import raises
from tests.tiny_runs import random_texts


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    random_texts(folder / "texts", 60, words=300)
    return folder


def tiny(text, run_dir, steps=8, mesh=None, **changed):
    return Run(mesh=mesh or Mesh(data=2), batch=Batch(global_size=8, microbatch_size=2),
               train=Train(steps=steps, learning_rate=1e-2, sample_tokens=0, eval_every=4, eval_sequences=4),
               model=Transformer(num_layers=2, hidden=16, heads=2, vocab=300, sequence=16, dropout=0.1),
               data=Data(corpus=str(text / "texts"), cache_dir=text / "cache"), run_dir=run_dir,
               **{"checkpoint": Checkpoint(every=2), **changed})


def run_all(run, *, dies_after=None):
    """The summary and the printed text; with `dies_after` every rank ends without notice after that step."""
    stream = io.StringIO()

    class Dies:
        def event(self, event):
            if dies_after is not None and getattr(event, "loss", None) is not None and event.step > dies_after:
                raise KeyboardInterrupt

        def close(self):
            pass

    try:
        return run_ranks(lambda world: train(run, "tiny", world, stream=stream, trackers=[Dies()]), run.mesh.size,
                         timeout_seconds=120)[0], stream.getvalue()
    except KeyboardInterrupt:
        return None, stream.getvalue()


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(run_dir):
    return {line["step"]: line["loss"] for line in lines(run_dir / "metrics.jsonl")}


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory):
    """Folder of the run without a break."""
    run_dir = tmp_path_factory.mktemp("whole")
    run_all(tiny(text, run_dir))
    return run_dir


@pytest.fixture(scope="module")
def done_folder(text, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("done")
    run_all(tiny(text, run_dir, steps=4))
    return run_dir


@pytest.fixture
def done(done_folder, tmp_path):
    """Folder of a run that has completed four steps."""
    return shutil.copytree(done_folder, tmp_path / "done")


def test_no_checkpoint_is_there_before_its_steps_numbers_are_told(text, tmp_path):
    """A run that dies in between would resume after that step, and metrics.jsonl would never contain it."""
    seen = []

    class Looks:
        def event(self, event):
            if getattr(event, "grad_norm", None) is not None and event.step % 2 == 0:
                time.sleep(0.3)  # longer than the checkpoint takes
                seen.append((event.step, (tmp_path / "checkpoint" / f"step-{event.step}").exists()))

        def close(self):
            pass

    run = tiny(text, tmp_path, steps=4)
    run_ranks(lambda world: train(run, "tiny", world, stream=io.StringIO(), trackers=[Looks()]), 2, timeout_seconds=120)
    assert seen == [(2, False), (4, False)]
    assert (tmp_path / "checkpoint" / "step-4").exists()


def test_the_metrics_tell_what_checkpoints_cost(whole):
    stalled = {line["step"]: line.get("checkpoint_stall_seconds") for line in lines(whole / "metrics.jsonl")}
    assert [step for step, seconds in stalled.items() if seconds is not None] == [2, 4, 6, 8]
    assert all(seconds > 0 for seconds in stalled.values() if seconds is not None)
    saved = [event for event in lines(whole / "events.jsonl") if event["event"] == "checkpoint"]
    assert [event["step"] for event in saved] == [2, 4, 6, 8]
    assert all(event["bytes"] > 0 and event["seconds"] > 0 for event in saved)
    assert sorted(path.name for path in (whole / "checkpoint").glob("step-*")) == ["step-4", "step-6", "step-8"]


@pytest.mark.parametrize("mesh", quick(1, [
    Mesh(data=2), Mesh(pipe=3), pytest.param(Mesh(row=2, col=2), marks=pytest.mark.slow)]), ids=str)
def test_a_run_that_dies_goes_on(text, whole, tmp_path, mesh):
    run_all(tiny(text, tmp_path), dies_after=5)
    assert not (tmp_path / "summary.json").exists()
    summary, said = run_all(tiny(text, tmp_path, mesh=mesh, resume="auto",
                                 optim=Optim(offload="stream", shard=True)))
    resumed = next(event for event in lines(tmp_path / "events.jsonl") if event["event"] == "resume")
    assert resumed["step"] in (2, 4, 6) and f"step {resumed['step']}: resumes from {tmp_path}" in said
    assert ("written on" in resumed["text"]) == (mesh != Mesh(data=2))
    expected = losses(whole)
    if mesh == Mesh(data=2):
        assert losses(tmp_path) == expected
    else:
        assert losses(tmp_path) == pytest.approx(expected, rel=1e-4)
    assert summary["steps"] == 8 and summary["eval_loss"] == pytest.approx(
        json.loads((whole / "summary.json").read_text())["eval_loss"], rel=1e-4)
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == list(range(1, 9))
    assert tomllib.loads((tmp_path / "run.toml").read_text())["resume"] == "none"


@pytest.mark.parametrize("about", [{"samples": -1}, {"samples": "many"}, {"run": 3}, {"guard": {"losses": ["x"]}}])
def test_what_a_stranger_says_of_a_run(text, whole, tmp_path, about):
    folder = shutil.copytree(whole / "checkpoint" / "step-8", tmp_path / "step-8")
    document = json.loads((folder / "manifest.json").read_text())
    write_manifest(folder, {**document, "about": {**document["about"], **about}})
    with raises("checkpoint-about-malformed", "step-8", f"about.{next(iter(about))}"):
        run_all(tiny(text, tmp_path / "run", steps=9, resume=str(folder)))


def test_the_guard_goes_on_with_the_losses_that_it_knows(text, tmp_path):
    explode = Guard(loss_spike_factor=50.0)
    run_all(tiny(text, tmp_path, steps=4, guard=explode))
    about = Saved(tmp_path / "checkpoint" / "step-4").manifest.about
    assert about["guard"]["losses"] == list(losses(tmp_path).values())
    run_all(tiny(text, tmp_path, steps=6, guard=explode, resume="auto"))
    assert len(Saved(tmp_path / "checkpoint" / "step-6").manifest.about["guard"]["losses"]) == 6


def test_a_run_that_goes_on_is_not_done(text, done):
    run_all(tiny(text, done, steps=8, resume="auto"), dies_after=5)
    assert not (done / "summary.json").exists()


def test_a_run_that_is_done_stays_done(text, done):
    first = json.loads((done / "summary.json").read_text())
    again, said = run_all(tiny(text, done, steps=4, resume="auto"))
    assert again["final_loss"] == first["final_loss"] and "step 4: resumes" in said
    assert len(losses(done)) == 4


def test_in_another_folder_and_with_another_batch(text, whole, tmp_path):
    """The place in the data is counted in samples: 6 steps of 8 samples, then steps of 4 from sample 48 on."""
    run = tiny(text, tmp_path, steps=10, resume=str(whole / "checkpoint" / "step-6"))
    summary, said = run_all(replace(run, batch=Batch(global_size=4, microbatch_size=2)))
    assert list(losses(tmp_path)) == [7, 8, 9, 10] and summary["steps"] == 4
    assert "batch.global-size was 8 and is 4 now" in said
    about = json.loads((tmp_path / "checkpoint" / "step-10" / "manifest.json").read_text())["about"]
    assert about["samples"] == 6 * 8 + 4 * 4


@pytest.mark.slow
def test_a_run_that_began_elsewhere_and_died_at_once(text, whole, tmp_path):
    """Before its first checkpoint: with auto it resumes from where it began, and so does the same command again."""
    elsewhere = str(whole / "checkpoint" / "step-6")
    for resume in ("auto", elsewhere):
        run_dir = tmp_path / resume.replace("/", "-")
        first = tiny(text, run_dir, steps=9, resume=elsewhere, checkpoint=Checkpoint(every=0))
        run_all(first, dies_after=7)
        assert tomllib.loads((run_dir / "run.toml").read_text())["resume"] == elsewhere
        assert not list(run_dir.glob("checkpoint/step-*"))
        check_folder(first.run_dir, resume)
        _, said = run_all(replace(first, resume=resume))
        assert "resumes from" in said and list(losses(run_dir)) == [7, 8, 9]
        assert tomllib.loads((run_dir / "run.toml").read_text())["resume"] == elsewhere
        _, said = run_all(replace(first, resume=resume, train=replace(first.train, steps=10)))
        assert f"resumes from {run_dir}/checkpoint/step-9" in said
    with raises("run-folder-used", where="run-dir"):
        check_folder(first.run_dir, str(whole / "checkpoint" / "step-8"))


def test_fewer_steps_than_the_checkpoint_has(text, done):
    _, said = run_all(tiny(text, done, steps=3, resume="auto"))
    assert "has taken more steps than train.steps, 3: nothing is left to do" in said


def test_from_the_start_where_there_is_none(text, tmp_path):
    _, said = run_all(tiny(text, tmp_path, steps=2, resume="auto"))
    assert f"step 0: no checkpoint in {tmp_path}/checkpoint: starting over" in said
    assert list(losses(tmp_path)) == [1, 2]


def test_a_folder_whose_checkpoints_are_gone_is_not_begun_anew(text, done):
    """For example because their disk is not mounted. The logs of the steps so far stay."""
    (done / "checkpoint").rename(done / "elsewhere")
    with raises("checkpoints-gone", where="checkpoint.dir"):
        run_all(tiny(text, done, steps=6, resume="auto"))
    assert list(losses(done)) == [1, 2, 3, 4]
    shutil.rmtree(done / "checkpoint")
    (done / "elsewhere").rename(done / "checkpoint")
    (done / f".report.html.{'0a' * 6}").touch()  # left by a writer that was killed
    run_all(tiny(text, done, steps=6, resume="auto"))
    assert list(losses(done)) == [1, 2, 3, 4, 5, 6]
    assert [path.name for path in done.glob(".*") if not path.name.startswith(".owner")] == []


def test_a_damaged_one_is_named(text, done):
    """Lines of later steps, the last of which is cut off, are left out."""
    (done / "checkpoint" / "step-4" / "part-00001.safetensors").write_bytes(b"")
    with (done / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "loss": 1.0}\n{"step": 6, "lo')
    _, said = run_all(tiny(text, done, steps=6, resume="auto"))
    assert "step-4: part-00001.safetensors should have" in said and "resumes from" in said
    assert [line["step"] for line in lines(done / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6] and losses(done)[5] != 1.0


# ---------------------------------------------------------------------- logs

DAMAGE = (b'{"step": 3, "event": "start", "mesh": null}\n', b'{"step": 2, "loss": {"a": [1, {"b": null}]}}\n',
          b'{"step": null}\n', b"[" * 100_000 + b"\n", b'\xff\xfe{"step": 2\n', b"\0" * 100 + b"\n",
          b'{"step": 2, "event": "' + b"x" * 3_000_000 + b'"}\n', b'{"step": 2, "event": "transition", "mes')


@pytest.mark.parametrize("name", quick(1, ["events.jsonl", "metrics.jsonl"]))
def test_no_run_depends_on_its_logs(text, whole, done, name):
    """Whatever the logs contain, the run resumes from its checkpoint with the same numbers, and reports damaged lines
    once."""
    content = (done / name).read_bytes().replace(b'"event": "start"', b'"efent": "start"')
    (done / name).write_bytes(DAMAGE[0] + content + b"".join(DAMAGE[1:]))
    summary, said = run_all(tiny(text, done, steps=8, resume="auto"))
    count = 9 if name == "events.jsonl" else 8
    assert f"left out {count} damaged lines of {name}: line 1: " in said
    assert losses(done) == losses(whole) and summary["steps"] == 8
    _, said = run_all(tiny(text, done, steps=8, resume="auto"))
    assert "damaged" not in said
    told = [line for line in lines(done / "events.jsonl") if line["event"] == "log-damaged"]
    assert len(told) == 1 and told[0]["step"] == 4


@pytest.mark.parametrize("lost", quick(1, ["removed", "a folder of its own"]))
def test_a_run_that_is_done_and_has_no_logs(text, whole, tmp_path, lost, monkeypatch):
    """Only the checkpoint is left: the run ends normally, and its summary says that no step was taken."""
    drawn = []
    monkeypatch.setattr(report, "draw_loss", lambda path, losses, *args: drawn.append(len(losses)))
    run = tiny(text, tmp_path, steps=2, resume="auto", checkpoint=Checkpoint(dir=tmp_path / "checkpoints", every=2))
    run_all(run)
    if lost == "removed":
        for name in ("events.jsonl", "metrics.jsonl", "summary.json", "run.toml"):
            (tmp_path / name).unlink()
    else:
        run = replace(run, run_dir=tmp_path / "new")
    summary, said = run_all(run)
    assert summary["final_loss"] is None and summary["steps"] == 0 and "done in" in said
    assert json.loads((run.run_dir / "summary.json").read_text())["final_loss"] is None
    assert lines(run.run_dir / "events.jsonl")[-1]["event"] == "end" and drawn == [2], "no later loss is known"


@pytest.mark.parametrize("name", quick(1, ["run.toml", "summary.json", "tokenizer.json"]))
def test_documents_are_there_whole_or_as_they_were(text, done, monkeypatch, name):
    """The run dies while it writes one of these files again."""
    before = {path.name: path.read_bytes() for path in done.glob("*.*") if path.suffix in (".toml", ".json")}

    class Died(BaseException):
        pass

    def dies(path):
        if path.name == name:
            raise Died

    written = atomic_file.replace_atomically

    @contextmanager
    def half(path, **options):
        with written(path, **options) as file:
            yield file
            file.truncate(file.tell() // 2)
            dies(path)

    monkeypatch.setattr(atomic_file, "replace_atomically", half)
    with pytest.raises(Died):
        run_all(tiny(text, done, steps=5, resume="auto"))
    if name != "summary.json":  # the summary of the previous run is removed when this one begins
        assert (done / name).read_bytes() == before[name]
    else:
        assert not (done / name).exists()


def test_other_text_is_told(text, whole, tmp_path):
    (tmp_path / "other").mkdir()
    for path in (text / "texts").iterdir():
        (tmp_path / "other" / path.name).write_text(path.read_text() + " more")
    run = tiny(text, tmp_path / "run", steps=9, resume=str(whole))
    run = replace(run, seed=1, data=replace(run.data, corpus=str(tmp_path / "other")))
    with raises("checkpoint-of-other-tokenizer", "step-8", f"{whole}/tokenizer.json"):
        run_all(run)
    _, said = run_all(replace(run, data=replace(run.data, tokenizer=str(whole / "tokenizer.json"))))
    assert "the text has changed" in said and "seed was 0 and is 1 now" in said


def test_every_setting_that_changed_is_told(text, whole, tmp_path):
    """With its old and its new value, unless it only decides where and how fast the run computes."""
    run = tiny(text, tmp_path / "run", steps=9, mesh=Mesh(pipe=2), resume=str(whole / "checkpoint"))
    optim = Optim(betas=(0.8, 0.9), weight_decay=0.1, clip_norm=1.0, groups=("*.bias:1:0",), shard=True)
    _, said = run_all(replace(run, optim=optim, batch=Batch(global_size=8, microbatch_size=4),
                              train=replace(run.train, schedule="cosine", warmup_steps=3, final_learning_rate=1e-4)))
    told = re.findall(r"step 8: (\S+ was .* now)", said)
    assert told == [
        "train.steps was 8 and is 9 now", "train.warmup-steps was 0 and is 3 now",
        "train.schedule was constant and is cosine now", "train.final-learning-rate was 0.0 and is 0.0001 now",
        "optim.betas was 0.9,0.999 and is 0.8,0.9 now", "optim.weight-decay was 0.01 and is 0.1 now",
        "optim.groups was  and is *.bias:1:0 now", "optim.clip-norm was 0.0 and is 1.0 now"]
    resumed = replace(run, run_dir=tmp_path / "again", mesh=Mesh(data=2), train=replace(run.train, steps=9))
    _, said = run_all(resumed)
    assert re.findall(r"step 8: (\S+ was .* now)", said) == ["train.steps was 8 and is 9 now"]


def test_settings_that_were_none_and_settings_of_an_import():
    now = {"seed": 0, "model.intermediate": 64, "train.epochs": None, "run_dir": "x", "optim.betas": (0.9, 0.99)}
    assert list(differences({"seed": 0, "optim.betas": [0.9, 0.99], "train.epochs": 3}, now)) == [
        ("model.intermediate", None), ("train.epochs", 3)]
    assert list(differences({"optim.betas": [0.9, 0.95]}, now)) == [("optim.betas", (0.9, 0.95))]


@pytest.mark.parametrize(("changes", "error", "message"), [
    ({"checkpoint": "own"}, ConfigError, ("checkpoints-of-another-run",)),
    ({"resume": "step-6", "checkpoint": "own"}, ConfigError, ("checkpoint-older-than-newest",)),
    ({"resume": "step-8", "checkpoint": "others"}, ConfigError, ("checkpoints-of-another-run",)),
    ({"resume": "step-8"}, ConfigError, ("nothing-left-to-train", 8)),
    ({"resume": "nothing"}, CheckpointError, ("not-a-checkpoint",)),
    ({"resume": "step-8", "model": Transformer(num_layers=2, hidden=32, heads=2, vocab=300, sequence=16)},
     CheckpointError, ("checkpoint-shape",)),
    ({"resume": "step-8", "model": Transformer(num_layers=2, hidden=16, heads=4, vocab=300, sequence=16)},
     CheckpointError, ("checkpoint-of-other-heads", 2, 4)),
    ({"resume": "step-8", "model": Transformer(num_layers=2, hidden=16, heads=2, vocab=300, sequence=16, dropout=0.1,
                                               norm_epsilon=0.1), "train": Train(steps=9)},
     CheckpointError, ("checkpoint-of-other-setting",))])
def test_what_is_refused(text, whole, tmp_path, changes, error, message):
    changes = dict(changes)
    if changes.get("checkpoint") == "others":
        shutil.copytree(whole / "checkpoint", tmp_path / "others")
        changes["checkpoint"] = Checkpoint(dir=tmp_path / "others")
    elif "checkpoint" in changes:
        changes["checkpoint"] = Checkpoint(dir=whole / "checkpoint")
    if "resume" in changes:
        changes["resume"] = str(whole / "checkpoint" / changes["resume"])
    with raises(*message):
        run_all(replace(tiny(text, tmp_path), **changes))
    assert not (tmp_path / "run.toml").exists()


@pytest.mark.parametrize("on_error", quick(1, ["continue", "stop"]))
def test_checkpoints_that_cannot_be_written(text, whole, tmp_path, monkeypatch, on_error):
    """A run is done only when its last checkpoint is on the disk."""
    def full(path, tensors):
        raise OSError(28, "No space left on device")

    run = tiny(text, tmp_path, steps=4, checkpoint=Checkpoint(every=2, on_error=on_error))
    with monkeypatch.context() as patch:
        patch.setattr(files, "write_part", full)
        if on_error == "continue":  # to the end, where the last checkpoint is missing
            with raises("unsaved", f"{tmp_path}/checkpoint/step-4", 0) as caught:
                run_all(run)
            assert failure.exit_code(caught.value) == 1
        else:
            with raises("checkpoint-not-written", "No space left"):
                run_all(run)
    told = [event["event"] for event in lines(tmp_path / "events.jsonl")]
    assert told.count("checkpoint-failed") == (2 if on_error == "continue" else 1)
    assert not (tmp_path / "summary.json").exists() and told[-1] != "end"
    run_all(replace(run, resume="auto"))
    assert list(losses(tmp_path).items()) == list(losses(whole).items())[:4] and (tmp_path / "summary.json").exists()


@pytest.mark.parametrize(("damage", "reason"), [
    (lambda folder: (folder / "part-00001.safetensors").write_bytes(b""), "part-00001.safetensors is cut off"),
    (lambda folder: shutil.rmtree(folder), "cannot be read: manifest.json: No such file or directory")],
    ids=["cut off", "gone"])
def test_a_run_whose_last_checkpoint_went_before_it_ended_is_not_done(text, tmp_path, monkeypatch, damage, reason):
    wait = Checkpoints.wait

    def damaged(self):
        told = wait(self)
        if told and told[-1].step == 4 and self._rank == 0:
            damage(told[-1].folder)
        return told

    monkeypatch.setattr(Checkpoints, "wait", damaged)
    with raises("unsaved", "step-4", reason, tmp_path):
        run_all(tiny(text, tmp_path, steps=4))
    assert not (tmp_path / "summary.json").exists()


def test_a_save_that_failed_is_tried_again_by_a_run_that_is_told_to_stop(text, tmp_path, monkeypatch):
    """The checkpoint of the step after which the run stops could not be written at first."""
    def told(session, step):
        if step == 3 and session.world.rank == 0:
            session.stop.request("SIGTERM")
        return step_of_loop(session, step)

    def fails_once(path, tensors):
        if ".step-4." in str(path) and not failed:
            failed.append(path)
            raise OSError(28, "No space left on device")
        return write(path, tensors)

    step_of_loop, write, failed = loop.take_step, files.write_part, []
    monkeypatch.setattr(loop, "take_step", told)
    monkeypatch.setattr(files, "write_part", fails_once)
    summary, _ = run_all(tiny(text, tmp_path))
    assert summary == {"stopped_after": 4} and failed
    assert Saved(tmp_path / "checkpoint" / "step-4").manifest.step == 4


# ---------------------------------------------------------------------- whose folder it is

def elsewhere(number):
    return Owner(host=f"host{number}", machine=f"machine{number}", pid=number, started="1")


@pytest.mark.parametrize("folder", quick(1, ["run", "checkpoints"]))
def test_a_second_start_is_refused(text, tmp_path, folder):
    """Whichever of its folders another run holds, also a run on another machine."""
    run = tiny(text, tmp_path / "run", steps=2, resume="auto",
               checkpoint=Checkpoint(dir=tmp_path / "checkpoints", every=2))
    theirs = Lease.acquire([tmp_path / folder], owner=elsewhere(1), heartbeat_seconds=0.05)
    with raises("folder-in-use", f"{tmp_path}/{folder}", 1, "host1"):
        run_all(run)
    assert not (tmp_path / "run" / "run.toml").exists()
    theirs.release()
    run_all(run)
    assert sorted(losses(tmp_path / "run")) == [1, 2]


def test_a_run_whose_folder_another_one_has_taken_ends(text, whole, tmp_path):
    """The run was suspended for so long that it counted as gone; the other run resumes as if it were alone."""
    run = tiny(text, tmp_path, steps=40, checkpoint=Checkpoint(every=2, keep=30))
    second: dict[str, object] = {}

    class Takes:
        def event(self, event):
            if getattr(event, "grad_norm", None) is not None and event.step == 5:
                second["summary"], _ = run_all(tiny(text, tmp_path, resume="auto"))

        def close(self):
            pass

    with raises("folder-lost", 1):
        run_ranks(lambda world: train(run, "tiny", world, stream=io.StringIO(), trackers=[Takes()]), 2,
                  timeout_seconds=120)
    assert second["summary"]["steps"] == 8 and losses(tmp_path) == losses(whole)
    assert sorted(path.name for path in tmp_path.glob("checkpoint/step-*")) == ["step-4", "step-6", "step-8"]
    assert json.loads((tmp_path / "summary.json").read_text()) == json.loads(json.dumps(second["summary"]))
    assert ", written " in (page := (tmp_path / "report.html").read_text()) and "ended by an error" not in page


def test_a_run_whose_folder_is_removed_ends(text, tmp_path):
    class Removes:
        def event(self, event):
            if getattr(event, "grad_norm", None) is not None and event.step == 3:
                (tmp_path / "run").rename(tmp_path / "gone")  # immediately, whatever is being written

        def close(self):
            pass

    run = tiny(text, tmp_path / "run", steps=8)
    with raises("folder-lost"):
        run_ranks(lambda world: train(run, "tiny", world, stream=io.StringIO(), trackers=[Removes()]), 2,
                  timeout_seconds=120)
    assert not (tmp_path / "run").exists()


def test_what_comes_of_a_loss_that_is_no_number_is_not_kept(text, tmp_path):
    """Without a guard the step is applied before the loss is looked at."""
    run = tiny(text, tmp_path, guard=Guard(bad_step="none"))
    broken = replace(run, train=replace(run.train, learning_rate=1e30))
    with raises("loss-not-finite"):
        run_all(broken)
    assert [path.name for path in tmp_path.glob("checkpoint/step-*")] in ([], ["step-2"])
    for path in tmp_path.glob("checkpoint/step-*"):
        assert all(torch.isfinite(tensor).all() for tensor in everything(path).values())


@pytest.mark.parametrize(("rank", "at"), [pytest.param(0, 5, marks=pytest.mark.slow), (1, 3)])
def test_a_run_that_is_told_to_stop_saves(text, whole, tmp_path, monkeypatch, rank, at):
    """Whichever rank gets the signal, at any moment: all stop after the next step, and the resumed run continues
    exactly."""
    def told(session, step):
        if step == at and session.world.rank == rank:
            session.stop.request("SIGUSR1")
        return step_of_loop(session, step)

    step_of_loop = loop.take_step
    with monkeypatch.context() as patch:
        patch.setattr(loop, "take_step", told)
        summary, said = run_all(tiny(text, tmp_path, checkpoint=Checkpoint(every=0)))
    assert summary == {"stopped_after": at + 1} and not (tmp_path / "summary.json").exists()
    command = f"ranvier train {tmp_path / 'run.toml'} --resume auto --run-dir {tmp_path}"
    assert f"step {at + 1}: stopped by SIGUSR1; resume with: {command}" in said
    flags = {"resume": "auto", "run_dir": str(tmp_path)}
    pasted = read_recipe(command.split()[2], flags, allow_code=False)[1]
    assert not pasted.problems and (pasted.run.resume, pasted.run.run_dir) == ("auto", tmp_path)
    assert lines(tmp_path / "events.jsonl")[-1]["event"] == "stopped"
    run_all(tiny(text, tmp_path, resume="auto"))
    assert losses(tmp_path) == losses(whole)


@pytest.mark.parametrize(("launched", "steps"), [(False, 3), (True, 3), (True, 2)])
def test_ctrl_c_on_a_rank_without_others_interrupts_its_caller_once_it_has_saved(text, tmp_path, monkeypatch, launched,
                                                                                 steps):
    """If a launcher or our supervisor has started the rank, they report the stop. After the last step it is too late.
    """
    def told(session, step):
        assert session.stop.announces != launched
        session.stop.request("SIGINT")
        return step_of_loop(session, step)

    step_of_loop = loop.take_step
    monkeypatch.setattr(loop, "take_step", told)

    def rank(world):
        world.launcher, world.launched = "local", launched
        world.store.set(FINISHED_RUN, "")  # as set by an earlier run of the program
        summary = train(tiny(text, tmp_path, mesh=Mesh(), steps=steps, checkpoint=Checkpoint(every=0)), "tiny", world,
                        stream=io.StringIO())
        return summary, world.store.check([FINISHED_RUN])

    if not launched:
        with pytest.raises(KeyboardInterrupt, match="after step 2, which is saved"):
            run_ranks(rank, 1)
    else:
        [(summary, finished)] = run_ranks(rank, 1)
        assert (summary.get("stopped_after"), finished) == ((None, True) if steps == 2 else (2, False))
    if steps == 2:
        return
    assert lines(tmp_path / "events.jsonl")[-1]["reason"] == "SIGINT"
    assert Saved(tmp_path / "checkpoint" / "step-2").manifest.step == 2


def test_signals_end_a_run_at_once_that_has_not_begun(text, tmp_path, monkeypatch):
    """Signals are requests to stop once there is something to save, but not while data and ranks are prepared."""
    order, prepare_run, step, install = [], setup.prepare_run, loop.take_step, StopRequest.install
    monkeypatch.setattr(StopRequest, "install", lambda stop, signals=STOP_SIGNALS: (
        order.append("signals") if signals else None, install(stop, signals)))
    monkeypatch.setattr(setup, "prepare_run", lambda *args: (order.append("data"), prepare_run(*args))[1])
    monkeypatch.setattr(loop, "take_step", lambda session, number: (
        order.append("step"), step(session, number))[1])
    run_all(tiny(text, tmp_path, mesh=Mesh(), steps=1))
    assert order == ["data", "signals", "step"]


@pytest.mark.parametrize(("flags", "message"), [
    (["--resume", ""], "resume: is not an existing checkpoint (got '')"),
    (["--resume", "nowhere"], "resume: is not an existing checkpoint (got 'nowhere')"),
    (["--run-dir", "runs/\udcffbad"], "run-dir: cannot be written as text")])
def test_paths_that_cannot_be(flags, message):
    done = CliRunner().invoke(cli.command, ["check", "gpt-tiny", "--ranks", "4", "--json", *flags])
    problems = json.loads(done.output)["problems"]
    assert any(f"{one['where']}: {one['message']}" in message or message.startswith(f"{one['where']}: {one['message']}")
               for one in problems), problems


def test_auto_needs_a_folder():
    done = CliRunner().invoke(cli.command, ["check", "gpt-tiny", "--ranks", "4", "--resume", "auto"])
    assert done.exit_code in (0, 2) and "resume: needs a folder to look for checkpoints in" in " ".join(
        done.output.split())
