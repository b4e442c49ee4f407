"""Errors of settings, data, checkpoints, plans and runs that one call raises: the code, and names in the message."""

import json
import math
import socket
import time
import types
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from ranvier.checkpoint import checkpoints, files, state
from ranvier.checkpoint.hf import tokenizer_files
from ranvier.checkpoint.hf.from_pretrained import with_sizes
from ranvier.checkpoint.hf.import_model import check_equal
from ranvier.checkpoint.hf.logits import Comparison
from ranvier.cli import train
from ranvier.cli.main import run_command
from ranvier.cli.options import read_recipe
from ranvier.cli.watch import server_of
from ranvier.comm.inprocess import InProcessWorld
from ranvier.config import other_mesh, read
from ranvier.config.resolve import resolve
from ranvier.config.run import Batch, Data, Launch, Lora, MeshSettings, Optim, Run, Transformer
from ranvier.data import corpus, run_tokenizer, tables
from ranvier.data.preference import WithReference
from ranvier.data.tables import Row, open_file, text_of
from ranvier.elastic import transition
from ranvier.inference import trained
from ranvier.launch.launchers import Started
from ranvier.mesh import Mesh
from ranvier.pictures.report_page import Page
from ranvier.pipeline.engine import Engine
from ranvier.planner import auto, plan
from ranvier.planner.problems import problems
from ranvier.testing.ranks import run_ranks
from ranvier.train import caching, joining, reference_log_probs, resize, saving, setup
from ranvier.world import World
from tests.errors import check, raises, reports


def alone():
    return World(backend=InProcessWorld(1).backend(0), store=None, launcher="local", local_rank=0, local_size=1,
                 device=torch.device("cpu"))


# --- config -----------------------------------------------------------------------------------------------------------


def test_a_run_on_another_mesh_says_so():
    run, warning = other_mesh.refit(resolve(Run(mesh=Mesh(data=4))), 2, "torchrun", lambda run: [])
    assert run.mesh == Mesh(data=2)
    check(warning, "mesh-refitted", "2 ranks", "torchrun", "data 4 x pipe 1 x row 1 x col 1", where="mesh")


def test_where_a_recipe_can_be_written(tmp_path):
    with raises("recipe-not-writable", where="--out", value=str(tmp_path / "none" / "x.toml")):
        read.check_out(tmp_path / "none" / "x.toml")
    with raises("recipe-not-named-toml", tmp_path / "x.toml", value=str(tmp_path / "x.txt")):
        read.check_out(tmp_path / "x.txt")


# --- data -------------------------------------------------------------------------------------------------------------


def test_a_tokenizer_that_is_not_there():
    with raises("tokenizer-file-missing", where="data.tokenizer", value="gone.json"):
        run_tokenizer._load(Run(data=Data(tokenizer="gone.json")))


def test_texts_and_tables(tmp_path, monkeypatch):
    with raises("text-half-surrogate", where="line 3"):
        text_of(Row("line 3", {"text": "\ud800"}), "text", "data.text-column")
    monkeypatch.setattr(corpus.tables, "has_package", lambda name: False)
    check(corpus.missing_package("owner/name"), "corpus-needs-datasets", where="data.corpus", value="owner/name")
    (tmp_path / "x.csv").write_text(f"text\n{'a' * 90}\n")
    before = tables.csv.field_size_limit(20)
    monkeypatch.setattr(tables.csv, "field_size_limit", lambda size: None)
    try:
        with raises("not-separated-values", 20, where="x line 2"):
            list(open_file(tmp_path / "x.csv", "x").rows(["text"]))
    finally:
        monkeypatch.undo()
        tables.csv.field_size_limit(before)


# --- checkpoint -------------------------------------------------------------------------------------------------------


def squares(output, targets):
    return output.square().sum(), 1


def test_states_that_do_not_fit(tmp_path, monkeypatch):
    saved = types.SimpleNamespace(folder=tmp_path, tensor=lambda kind, name: types.SimpleNamespace(shape=(3,)))
    piece = types.SimpleNamespace(kind="master", name="a.b", shape=(2,), tensor=torch.zeros(2, dtype=torch.complex64))
    with raises("saved-state-shape", "master a.b", "(2,)", value=(3,)):
        state._check_shape(saved, piece)
    monkeypatch.setattr(transition.state, "pieces_held", lambda engine: [piece])
    with raises("state-on-no-rank", "master", "a.b", where="transition"):
        transition._Ranks.tensor(types.SimpleNamespace(manifest=types.SimpleNamespace(tensors={})), "master", "a.b")
    with raises("number-format-not-sent", "float32", where="master a.b", value="complex64"):
        transition.take(None)


def test_a_model_with_more_than_a_checkpoint():
    def work(world):
        engine = Engine([nn.Linear(2, 2)], world, loss=squares, optim=Optim())
        there = types.SimpleNamespace(folder="x", manifest=types.SimpleNamespace(tensors={"parameter": {}}, about={}))
        with raises("parameter-not-in-checkpoint", where="checkpoint x", value="0.weight"):
            state.check_fits(engine, there)

    run_ranks(work, 1)


def test_a_checkpoint_that_cannot_be_loaded(tmp_path, monkeypatch):
    def fails(engine, saved):
        raise ValueError("sizes differ")

    monkeypatch.setattr(checkpoints.state, "load", fails)
    loads = types.SimpleNamespace(engine=None, _ranks=types.SimpleNamespace(gather_objects=lambda mine: [mine]))
    saved = types.SimpleNamespace(folder=tmp_path, close=lambda: None)
    with raises("checkpoint-not-loadable", "ValueError: sizes differ", where=f"checkpoint {tmp_path}"):
        checkpoints.Checkpoints._load(loads, saved)


def test_a_store_that_has_gone():
    with raises("store-gone", "Connection reset"), checkpoints._shared_store():
        raise RuntimeError("Connection reset\nmore")


def test_models_that_compute_otherwise(tmp_path):
    with raises("source-computes-otherwise", "two sentences", "transformers", where=str(tmp_path), value=0.5):
        check_equal(Comparison(largest=0.5, scale=1.0, what="two sentences", peer="transformers"), tmp_path)


def test_a_vocabulary_that_adapters_would_not_train():
    there = types.SimpleNamespace(config=replace(Transformer(vocab=100), family="llama"), folder="there")
    with raises("vocab-above-pretrained", 100, where="model.vocab", value=200):
        with_sizes(Run(model=Transformer(vocab=200), lora=Lora(rank=4)), there)


def test_folders_that_cannot_be(tmp_path):
    with raises("output-unreadable", where=f"{tmp_path}/{'x' * 5000}"):
        files.check_free(tmp_path / ("x" * 5000))
    (tmp_path / "generation_config.json").write_text("[1")
    (tmp_path / "out").mkdir()
    with raises("generation-config-not-json", where=str(tmp_path / "generation_config.json")):
        tokenizer_files.export_files_beside(tmp_path / "out", tmp_path, print)
    (tmp_path / "tokenizer.json").write_text("{}")
    with raises("exported-tokenizer-unreadable", where=str(tmp_path / "tokenizer.json")):
        tokenizer_files.export_tokenizer(tmp_path / "out", tmp_path / "tokenizer.json", Transformer(family="bert"))


# --- planner, train, cli ----------------------------------------------------------------------------------------------


def test_plans_that_cannot_be(tmp_path):
    run = Run(mesh=MeshSettings(data="auto"), model=Transformer(hidden=7, heads=2))
    _, (problem,) = auto.with_plan(run, 4)
    check(problem, "not-planned-yet", where="mesh.data", value="auto")
    found = [one for one in problems(resolve(Run(resume=str(tmp_path / "none")))) if one.where == "resume"]
    check(found[0], "resume-checkpoint-missing", value=str(tmp_path / "none"))
    with raises("plan-not-writable", where="--out"):
        plan._write(Run(), tmp_path / "none" / "x.toml", {})
    with raises("plan-page-not-writable", where="--out-html", value=str(tmp_path / "none" / "x.html")):
        plan._write_page(Page(title="x", subtitle=""), tmp_path / "none" / "x.html")
    with raises("not-finite-option", where="--jitter", value=math.inf):
        plan.simulate("x", Run(), "laptop", jitter=math.inf)
    with raises("mesh-needs-ranks", 4, 3):
        plan.simulate("x", Run(mesh=Mesh(data=4)), "laptop", ranks=3)
    with raises("cluster-too-small-for-mesh", 512, "Laptop"):
        plan.simulate("x", Run(mesh=Mesh(data=512), batch=Batch(global_size=512, microbatch_size=1)), "laptop")
    with raises("malformed-slow-stage", where="--slow", value="0:x:2"):
        plan.simulate("x", Run(), "laptop", slow=["0:x:2"])


def test_a_gpu_of_which_nothing_is_known(monkeypatch):
    monkeypatch.setattr(auto, "choose_device", lambda device, count: types.SimpleNamespace(value="cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "Abacus 3000")
    with raises("cluster-needed", "Abacus 3000", where="launch.cluster"):
        auto.cluster_for(Run(launch=Launch(device="cuda")), 2, 2)


def test_samples_that_change_are_not_cached():
    data = types.SimpleNamespace(repeats=True, train=types.SimpleNamespace(
        __len__=lambda self: 4, inputs=lambda samples, epochs: torch.from_numpy(samples + epochs)))
    data.train = type("Samples", (), vars(data.train))()
    data.train.inputs = lambda samples, epochs: torch.from_numpy(np.asarray(samples + epochs))
    with raises("cache-of-changing-samples", where="elastic.cache", value=True):
        caching.check_repeats(data)


def test_the_reference_of_other_pairs(tmp_path):
    """The pairs of the previous run, a new set, and sets that have swapped names."""
    pairs = object.__new__(WithReference)
    one, other = (types.SimpleNamespace(data=pairs, fingerprint=text) for text in ("one", "other"))
    path, sets = tmp_path / "reference.json", {name: [] for name in ("", "eval-", "a", "b")}

    def data(text, **eval_sets):
        return types.SimpleNamespace(train=pairs, eval=pairs, fingerprint=text, eval_sets=eval_sets)

    for before, now in ((data("before"), data("now")), (data("same"), data("same", c=one)),
                        (data("same", a=one, b=other), data("same", b=one, a=other))):
        path.write_text(json.dumps({"data": setup.fingerprint(before), "sets": sets}))
        with raises("reference-of-other-pairs", where=str(path)):
            reference_log_probs._read(path, now)


def test_a_reference_without_two_numbers_a_pair(tmp_path, monkeypatch):
    path = tmp_path / "reference.json"
    path.write_text(json.dumps({"data": "same", "sets": {"": [[-1.0, -2.0]]}}))
    monkeypatch.setattr(reference_log_probs, "fingerprint", lambda data: "same")
    monkeypatch.setattr(reference_log_probs, "_sets", lambda data: {"": range(3)})
    with raises("damaged-reference", where=str(path), value="(1, 2)"):
        reference_log_probs._read(path, None)


def test_pairs_are_not_evaluated_without_their_reference():
    run = resolve(Run(data=Data(task="preference", train="x")))
    with raises("evaluation-of-reference", where="preference.loss", value="dpo"):
        trained.evaluate(None, run, {"x": run}, None, alone(), print)


def test_a_run_that_begins_with_adapters_has_no_reference(tmp_path):
    run = resolve(Run(data=Data(task="preference", train="x"), lora=Lora(rank=2), run_dir=tmp_path))
    data = types.SimpleNamespace(train=None, eval=None, eval_sets={})
    resumed = types.SimpleNamespace(continues=False, step=3, loaded=types.SimpleNamespace(folder="before"))
    with raises("reference-with-adapters", where="resume", value="before"):
        reference_log_probs.fill_reference(types.SimpleNamespace(run=run), data, None, resumed)


def test_a_checkpoint_of_other_classes(tmp_path):
    run = resolve(Run())
    loaded = types.SimpleNamespace(folder=tmp_path / "step-1")
    metadata = types.SimpleNamespace(values=read.flatten(run), tokenizer=None, labels=("cat", "dog"))
    started = types.SimpleNamespace(_run=run, _tokenizer=None, _labels=("cat", "emu"))
    with raises("checkpoint-of-other-classes", "'dog'", where=f"checkpoint {loaded.folder}", value=("cat", "emu")):
        saving.Saving._check_same(started, loaded, metadata)


@pytest.mark.parametrize("setting, here, there", [("mesh.data", "2", "1"), ("batch.global-size", "16", "32"),
                                                  ("model.hidden", "64", "128")])
def test_ranks_of_other_settings(monkeypatch, setting, here, there):
    run, world = resolve(Run()), types.SimpleNamespace(local_size=1, device=torch.device("cpu"))
    own = setup._settings_compared_on_ranks(run)
    name = setting.replace("-", "_")
    assert own[name] == there
    other = {"folder": "x", "text": "same", "local_size": 1, "settings": {**own, name: here}}
    ranks = types.SimpleNamespace(gather_objects=lambda mine: [mine, other])
    monkeypatch.setattr(setup, "fingerprint", lambda data: "same")
    with raises("settings-differ-between-ranks", f"{setting} {there}", where="settings of rank 1",
                value=f"{setting} {here}"):
        setup.agree_on_run(run, "x", None, ranks, world)


def test_ranks_may_differ_in_paths_and_in_what_is_of_their_machine(monkeypatch, tmp_path):
    run, world = resolve(Run()), types.SimpleNamespace(local_size=1, device=torch.device("cpu"))
    here = replace(run, launch=replace(run.launch, threads=3), elastic=replace(run.elastic, cache_dir=tmp_path),
                   data=replace(run.data, corpus=str(tmp_path)))
    other = {"folder": "x", "text": "same", "local_size": 1, "cluster": None,
             "settings": setup._settings_compared_on_ranks(here)}
    ranks = types.SimpleNamespace(gather_objects=lambda mine: [mine, other])
    monkeypatch.setattr(setup, "fingerprint", lambda data: "same")
    assert setup.agree_on_run(run, "x", None, ranks, world).mesh == run.mesh


@pytest.mark.parametrize("there, cluster", [("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA A100-SXM4-80GB", None),
                                            ("Tesla T4", None)])
def test_ranks_with_the_same_gpu_are_on_the_shipped_cluster_with_it(monkeypatch, there, cluster):
    """The cluster's links and rates determine the schedule's limits, which are the same on every rank."""
    run, world = resolve(Run()), types.SimpleNamespace(local_size=1, device=torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    other = {"folder": "x", "text": "same", "local_size": 1, "cluster": auto.shipped_cluster_with(there),
             "settings": setup._settings_compared_on_ranks(run)}
    ranks = types.SimpleNamespace(gather_objects=lambda mine: [mine, other])
    monkeypatch.setattr(setup, "fingerprint", lambda data: "same")
    assert setup.agree_on_run(run, "x", None, ranks, world).launch.cluster == cluster


def test_requests_that_have_no_answer(tmp_path, monkeypatch):
    (tmp_path / "run.toml").write_text("")
    monkeypatch.setattr(resize, "withdraw", lambda run_dir, request_id: False)
    with raises("resize-unanswered", where=f"run {tmp_path}"):
        resize.ask_and_wait(tmp_path, seconds=0.01, data=2)
    (tmp_path / "summary.json").write_text("{}")
    with raises("run-has-ended", where=f"run {tmp_path}"):
        resize.ask(tmp_path, data=2)
    with raises("resize-not-writable", where=str(resize._path(tmp_path / "none", "w"))):
        resize.write_request(tmp_path / "none", "w", {"data": 2})


def test_ctrl_c_withdraws_a_request_that_waits(tmp_path, monkeypatch):
    def press(*args):
        assert len(list(tmp_path.glob("resize-*.json"))) == 1
        raise KeyboardInterrupt

    (tmp_path / "run.toml").write_text("")
    monkeypatch.setattr(resize, "time", types.SimpleNamespace(sleep=press, monotonic=time.monotonic))
    with pytest.raises(KeyboardInterrupt):
        resize.ask_and_wait(tmp_path, seconds=60, data=2)
    assert not list(tmp_path.glob("resize-*.json"))

    monkeypatch.setenv(joining.REQUEST_ID, "w")
    monkeypatch.setattr(joining, "Newcomer", lambda *args: types.SimpleNamespace(
        await_others=lambda seconds: None, join=press))
    with pytest.raises(KeyboardInterrupt):
        joining._join(None, tmp_path, types.SimpleNamespace(rank=0, size=1), {"data": 2}, 60)
    assert not list(tmp_path.glob("resize-*.json"))


def test_pages_that_cannot_be_shown(tmp_path):
    (tmp_path / "other.txt").write_text("")
    for other in (tmp_path, tmp_path / "other.txt"):
        with raises("run-without-report", where="RUN", value=str(other)):
            server_of(other)
    (tmp_path / "report.html").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as taken, raises("port-not-usable", value=taken.getsockname()[1]):
        server_of(tmp_path, taken.getsockname()[1])


@pytest.mark.parametrize(("args", "code"), [
    (["doctor", "--out", "x.toml"], "out-without-measure"),
    (["train", "llama-3.2-1b"], "preset-without-data"), (["train", "llama-3.2-1b"], "preset-without-tokenizer")])
def test_commands_that_lack_something(capsys, args, code):
    with reports(code):
        assert run_command(args) == 2
    assert "ranvier: error: " in capsys.readouterr().err


def test_what_follows_a_killed_rank(tmp_path):
    """The message has the predicted memory, and the checkpoint from which the same command resumes."""
    run = resolve(Run(run_dir=tmp_path))
    assert "predicted memory" in train._memory_hint(run) and str(tmp_path) not in train._memory_hint(run)
    for step in (5, 10):
        (tmp_path / "checkpoint" / f"step-{step}").mkdir(parents=True)
    said = train._memory_hint(run)
    assert str(tmp_path / "checkpoint" / "step-10") in said and f"--resume auto --run-dir {tmp_path}" in said


def test_restarts_are_the_launchers():
    _, resolved = read_recipe("gpt-tiny", {"max_restarts": "2"}, allow_code=False)
    *_, warnings = train._close(resolved, Started(launcher="srun", rank=0, size=4, local_size=4), print)
    check(next(one for one in warnings if one.where == "max-restarts"), "restarts-without-effect", "srun", value=2)
