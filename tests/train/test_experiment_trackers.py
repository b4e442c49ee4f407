"""Weights & Biases, MLflow and Aim: offline, in a local store, and by Aim's documented interface; what is missing."""

import types
from pathlib import Path

import pytest

from ranvier.cli.main import run_command
from ranvier.config.run import Log
from ranvier.testing.trackers import check_tracker, example_run
from ranvier.train import experiment_trackers as trackers
from ranvier.train.events import StartEvent
from tests.errors import raises


def feed(tracker, events):
    for event in events:
        tracker.event(event)
    tracker.close()


@pytest.fixture
def aim(monkeypatch):
    """Stands for `aim.Run` as its documentation describes it."""
    runs = {}

    class Run:
        def __init__(self, run_hash=None, *, repo=None, experiment=None):
            self.hash = run_hash or f"hash-{len(runs)}"
            self.repo, self.experiment = repo, experiment
            self.values, self.tracked, self.closed = runs.get(self.hash, ({}, [], False))
            runs[self.hash] = self.values, self.tracked, self

        def __setitem__(self, name, value):
            self.values[name] = value

        def track(self, value, name=None, step=None, epoch=None, *, context=None):
            self.tracked.append((name, step, value))

        def close(self):
            self.closed = True

    monkeypatch.setattr(trackers, "import_module", lambda name: types.SimpleNamespace(Run=Run))
    return runs


def test_aim(aim, tmp_path):
    make = lambda continues=False: trackers.Aim(Log(store="repo"), tmp_path, continues=continues)  # noqa: E731
    check_tracker(make, tmp_path)
    aim.clear()
    feed(make(), example_run(tmp_path))
    feed(make(continues=True), example_run(tmp_path)[:2])
    (values, tracked, run), = aim.values()
    assert run.closed and run.repo == "repo" and values["hparams"]["policy"] == "message-driven"
    assert ("train/loss", 1, 7.9) in tracked and ("eval/code/loss", 4, 6.5) in tracked
    assert not any(name == "train/loss" and step == 2 for name, step, _ in tracked), "a loss that is not a number"
    assert values["summary"]["final_loss"] == 7.6 and values["finished"] is False, "the second run has not ended"


@pytest.mark.filterwarnings("error::UserWarning")
def test_aim_in_a_local_repository(tmp_path):
    pytest.importorskip("aim")
    feed(trackers.Aim(Log(store=str(tmp_path), project="mine"), tmp_path / "run"), example_run(tmp_path / "run"))
    number = (tmp_path / "run" / "aim.id").read_text().strip()
    assert (tmp_path / ".aim" / "meta" / "chunks" / number).is_dir()


def test_mlflow_in_a_local_store(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    log = Log(store=f"file:{tmp_path / 'mlruns'}", project="mine")
    check_tracker(lambda: trackers.MLflow(log, tmp_path / "run"), tmp_path / "run")
    run_dir = tmp_path / "second"
    feed(trackers.MLflow(log, run_dir), example_run(run_dir)[:3])
    client = mlflow.MlflowClient(tracking_uri=log.store)
    number = (run_dir / "mlflow.id").read_text().strip()
    assert client.get_run(number).info.status == "FAILED"
    feed(trackers.MLflow(log, run_dir, continues=True), example_run(run_dir))
    found = client.get_run(number)
    assert found.info.status == "FINISHED" and found.info.run_name == "second"
    assert found.data.params["policy"] == "message-driven" and found.data.metrics["eval/code/loss"] == 6.5
    assert [one.step for one in client.get_metric_history(number, "eval/loss")] == [4]
    assert found.data.tags["sample"] == "once upon a [time]"


def test_wandb_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    log = Log(offline=True, project="mine")
    feed(trackers.WeightsAndBiases(log, tmp_path), example_run(tmp_path))
    folder, = (tmp_path / "wandb").glob("offline-run-*")
    number = (tmp_path / "wandb.id").read_text().strip()
    written = (folder / f"run-{number}.wandb").read_bytes()
    for text in (b"train/loss", b"eval/code/loss", b"message-driven", b"once upon a [time]"):
        assert text in written, text


def test_a_server_that_is_away_ends_tracking_alone(aim, tmp_path, monkeypatch):
    tracker = trackers.Aim(Log(), tmp_path)
    start, *rest = example_run(tmp_path)
    tracker.event(start)
    monkeypatch.setattr(tracker, "_track", lambda values, step: 1 / 0)
    with pytest.warns(UserWarning, match="aim tracks this run no more: ZeroDivisionError"):
        for event in rest:
            tracker.event(event)
    tracker.close()
    failing = trackers.Aim(Log(), tmp_path / "file")
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="aim tracks this run no more"):
        failing.event(StartEvent(**{**start.__dict__, "run_dir": Path("x")}))


@pytest.mark.parametrize("name", ["wandb", "mlflow", "aim"])
def test_a_missing_package_is_named_before_the_start(name, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    says = f"needs the package {name}, which is not installed"
    with raises("tracker-missing", name):
        trackers.experiment_trackers(Log(tracker=(name,)), tmp_path, continues=False)
    assert run_command(["train", "gpt-tiny", "--log.tracker", name, "--run-dir", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert f"log.tracker: {says}" in said and f"pip install 'ranvier[{name}]'" in said
    assert not (tmp_path / "run").exists()


def test_a_run_is_tracked(tmp_path, aim, monkeypatch):
    monkeypatch.setattr(trackers, "find_spec", lambda name: name)
    (tmp_path / "x.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    assert run_command([
        "train", "gpt-tiny", "--log.tracker", "aim", "--run-dir", str(tmp_path / "run"), "--train.steps", "2",
        "--train.sample-tokens", "0", "--model.sequence", "16", "--model.vocab", "280", "--model.num-layers", "1",
        "--model.hidden", "16", "--model.heads", "2", "--mesh.data", "1",
        "--mesh.pipe", "1", "--data.corpus", str(tmp_path / "x.txt"), "--data.cache-dir", str(tmp_path),
        "--batch.microbatch-size", "2", "--batch.global-size", "2"]) == 0
    (values, tracked, _), = aim.values()
    assert [step for name, step, _ in tracked if name == "train/loss"] == [1, 2] and values["finished"] is True
