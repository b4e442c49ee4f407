"""Errors that one call raises, in the order of rooms: the code, and what the message names."""

import json
import math
import socket
import sys
import threading
import types
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from ranvier.block import as_model
from ranvier.checkpoint import checkpoints, new_folder, state
from ranvier.checkpoint.hf import tokenizer_files
from ranvier.checkpoint.hf.from_pretrained import with_sizes
from ranvier.checkpoint.hf.logits import Comparison
from ranvier.checkpoint.hf.source_check import check_equal
from ranvier.cli.main import run_command
from ranvier.cli.watch import server_of
from ranvier.comm import mpi_backend, torch_group
from ranvier.comm.inprocess import InProcessWorld
from ranvier.comm.message import Message, MessageKind
from ranvier.config import other_mesh, read
from ranvier.config.resolve import resolve
from ranvier.config.run import Batch, Data, Launch, Lora, MeshSettings, Optim, Run, Transformer
from ranvier.data import corpus, run_tokenizer, tables
from ranvier.data.tables import Row, open_file, text_of
from ranvier.elastic import transition
from ranvier.errors import RanvierError
from ranvier.inference import model_evaluation
from ranvier.launch import failures, launchers, mpi_start_watch, run_function, start
from ranvier.mesh import Mesh
from ranvier.models import families, vit
from ranvier.models.blocks_of import blocks_of
from ranvier.models.from_transformers import from_transformers
from ranvier.models.lora import with_adapters
from ranvier.pipeline import hooked_states, inbox
from ranvier.pipeline.engine import Engine
from ranvier.pipeline.sequencer import Sequencer
from ranvier.pipeline.shared_memory import SharedMemory
from ranvier.planner import auto, plan
from ranvier.planner.problems import problems
from ranvier.system.lease import Lease
from ranvier.tensor import float8, layers
from ranvier.tensor.columns import ColumnLayout, ColumnTensor
from ranvier.tensor.layer_order import LayerOrder
from ranvier.testing.ranks import run_ranks
from ranvier.train import caching, reference, resize, saving, setup
from ranvier.world import World
from tests.errors import check, raises, reports


def alone():
    return World(backend=InProcessWorld(1).backend(0), store=None, launcher="local", local_rank=0, local_size=1,
                 device=torch.device("cpu"))


# --- comm, world ------------------------------------------------------------------------------------------------------


def test_a_single_member_receives_what_it_sends():
    group = InProcessWorld(1).backend(0).group("x", [range(1)])
    with raises("all-to-all-of-one-member", "all_to_all", value=([4], [8])):
        group.all_to_all(torch.zeros(1), torch.zeros(2))


@pytest.mark.parametrize(("cause", "code"), [("Timed out after 3 s", "torch-collective-late"),
                                             ("Connection closed by peer", "collective-failed")])
def test_what_torch_says_of_a_collective(monkeypatch, cause, code):
    def fail(*args, **more):
        raise RuntimeError(cause)

    monkeypatch.setattr(torch_group.dist, "all_to_all_single", fail)
    group = torch_group.TorchGroup(None, "data", [0, 3], 0, torch_group.WaitRegistry(1.0))
    with raises(code, "[0, 3]", where="group 'data' of ranks [0, 3]"):
        group.all_reduce(torch.zeros(2))


def test_an_mpi4py_that_is_missing(monkeypatch):
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with raises("mpi4py-not-loadable", where="comm.transport mpi: mpi4py"):
        mpi_backend.MPIBackend(torch.device("cpu"), 1.0)


def test_what_other_ranks_do_not_begin_with_mpi():
    request = types.SimpleNamespace(Test=lambda: False)
    world = types.SimpleNamespace(Ibarrier=lambda: request, Iallreduce=lambda *args: request)
    backend = mpi_backend.MPIBackend.__new__(mpi_backend.MPIBackend)
    vars(backend).update(rank=3, _timeout=2.0, _world=world, _mpi=types.SimpleNamespace(IN_PLACE=0, MIN=1),
                         _until=lambda test, seconds: False, _closed=False, _transports=[], _groups=[])
    with raises("mpi-backend-start-late", where="MPI backend of rank 3", value="2 s"):
        backend._all_are(True)
    with raises("mpi-request-late", where="subset of 2 on rank 3", value="2 s"):
        backend._await_all("subset of 2")
    with raises("mpi-close-late", where="MPI backend of rank 3"):
        backend.close()


def test_calls_of_a_world():
    with raises("reduce-op", value="median"):
        alone().all_reduce(1.0, "median")
    with raises("broadcast-source", 1, value=3):
        alone().broadcast(1.0, source=3)


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


# --- launch -----------------------------------------------------------------------------------------------------------


def test_what_launchers_lack(monkeypatch):
    with raises("secret-empty", where="RANVIER_SECRET", value=" "):
        launchers.detect({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2",
                          "MASTER_ADDR": "localhost", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x",
                          "RANVIER_SECRET": " "})
    started = launchers.Started(launcher="srun", rank=0, size=2)
    with raises("local-size-unknown", "srun"):
        start._with_local_rank(started)
    with raises("mpi-contradicts-launcher", "rank 0 of 2", "rank 0 of 1"):
        start._check_mpi(started, 0, 1)

    def fail(*args):
        raise RuntimeError("no route to host\nmore")

    monkeypatch.setattr(start, "_choose_interface", fail)
    with raises("gloo-cannot-connect", "no route to host"):
        start._connect_torch(started, torch.device("cpu"), 1.0, None)


def test_ranks_start_from_the_main_thread_alone(monkeypatch):
    found = []

    def work():
        try:
            start.start(Mesh(data=2), rerun=["true"])
        except RanvierError as error:
            found.append(error)

    monkeypatch.delenv("RANK", raising=False)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    check(found[0], "start-from-thread")


def test_a_start_of_mpi_that_does_not_come():
    check(mpi_start_watch._error({}, True, 4.0), "mpi-start-late", value="more than 4 s")
    stopped = types.SimpleNamespace(pid=77)
    check(mpi_start_watch._error({3: stopped}, False, 4.0), "rank-stopped-before-mpi", 77, where="rank 3")
    assert mpi_start_watch._error({}, False, 4.0) is None


def test_a_rank_that_ends_while_another_needs_it(monkeypatch):
    monkeypatch.setattr(failures, "read_actions", lambda store, ranks: {1: (0, "a wait for step 7")})
    check(failures._ended_early(alone(), Mesh(data=2), 1), "rank-ended-early", "rank 1", "step 7", where="rank 0")


def test_how_ranks_of_a_function_failed(tmp_path):
    check(run_function._failure(tmp_path, -9), "function-ranks-ended", "SIGKILL")
    check(run_function._failure(tmp_path, 3), "function-ranks-ended", 3)
    (tmp_path / "7.error").write_text("rank 1 of 2\nValueError: no such number.")
    check(run_function._failure(tmp_path, 1), "function-failed", "ValueError: no such number", where="rank 1 of 2")


def test_a_lease_after_which_none_can_come(tmp_path):
    (tmp_path / ".owner.999999999999").write_text("")
    with raises("lease-unknown", where=f"folder {tmp_path}", value=".owner.999999999999"):
        Lease.acquire([tmp_path], expiry_seconds=0.1)


# --- tensor, pipeline -------------------------------------------------------------------------------------------------


def test_layers_refuse_sizes_and_places():
    with raises("convolution-over", value="heads"):
        layers.DepthwiseConv1d(8, 3, over="heads")
    with raises("linear-group-units", 9, 4, value=2, where="units of k in SharedInputLinear"):
        layers.SharedInputLinear(8, {"q": 8, "k": 9}, units={"q": 4, "k": 2})


def test_float8_needs_a_later_torch_on_a_cpu(monkeypatch):
    monkeypatch.setattr(float8, "runs_on_cpu", lambda: False)
    with raises("float8-needs-torch", where="model.float8", value=f"torch {torch.__version__}"):
        float8.float8_layers([], 3, torch.device("cpu"))


def test_split_tensors_are_not_compiled(monkeypatch):
    x = ColumnTensor(torch.zeros(2, 3), ColumnLayout(types.SimpleNamespace(num_cols=1)))
    monkeypatch.setattr(torch.compiler, "is_dynamo_compiling", lambda: True)
    with raises("columns-under-compile"):
        x + x


def test_messages_of_another_batch():
    board = types.SimpleNamespace(name=lambda rank: f"rank {rank}")
    box = inbox.Inbox(None, board, None, 1.0, lambda message: None)
    box.begin(5, 5, 2, lambda *where: None)

    def arrives(step, microbatch):
        box._receive(Message(MessageKind.FORWARD, step, microbatch, {"": torch.zeros(1)}, source=3))

    with raises("message-of-ended-batch", "rank 3", where="train_batch"):
        arrives(4, 0)
    with raises("microbatch-counts-differ", "rank 3", "number 2", where="train_batch"):
        arrives(5, 2)


def test_an_announcement_that_does_not_come():
    board = types.SimpleNamespace(name=lambda rank: f"rank {rank}", wait=lambda *call: None,
                                  report=lambda what, rank, seconds: f"rank {rank} computes")
    peer = types.SimpleNamespace(_board=board, _leader=4, _transport=types.SimpleNamespace(wait=None), _timeout=2.0)
    with raises("announcement-late", "rank 4 computes", value=2.0):
        Sequencer.next(peer, 0)


def test_tensors_that_share_memory():
    state, shared = {"x": torch.zeros(2)}, SharedMemory()
    shared.watch(state, ["x"])
    state["x"] += 1
    with raises("shared-state-changed", '"x"'):
        shared.check()


def test_engines_of_what_cannot_be():
    def work(world, blocks, **more):
        Engine(blocks, world, loss=squares, optim=Optim(), **more)

    with raises("policy-object-is-a-name", value="gpipe"):
        run_ranks(lambda world: work(world, [nn.Linear(2, 2)], policy="gpipe"), 1)
    with raises("complex-parameter", where="parameter 0.weight"):
        run_ranks(lambda world: work(world, [nn.Linear(2, 2, dtype=torch.complex64)]), 1)


@pytest.mark.parametrize("code", ["columns-draw-differently", "layer-order-differs"])
def test_columns_that_do_not_agree(code):
    def work(world):
        alone, both = (world.backend.group(name, ranks) for name, ranks in (("rows", [[0], [1]]), ("cols", [[0, 1]])))
        order = LayerOrder(alone, both)
        if code == "columns-draw-differently":
            order.drawn = lambda: world.rank
        for layer in ("up", "down") if world.rank or code == "columns-draw-differently" else ("down", "up"):
            order.record(layer, "forward")
        order.end()

    with raises(code):
        run_ranks(work, 2)


def test_a_hook_of_an_earlier_block():
    state = {"x": torch.zeros(2, requires_grad=True)}
    state["x"].register_hook(hooked_states._Refusing("x", lambda: False))
    with raises("hook-on-earlier-state", '"x"'):
        torch.autograd.grad(state["x"].sum(), state["x"])


# --- models -----------------------------------------------------------------------------------------------------------


def test_families_that_are_none():
    with raises("unknown-family", where="model.family", value="rnn"):
        families.family_named("rnn")
    found, = families.problems(Run(model=Transformer(family="bert"), data=Data(task="images", train="x")))
    check(found, "family-without-task", "images", "vit", where="model.family", value="bert")
    found, = vit.problems(Transformer(image_size=30, patch_size=7))
    check(found, "image-size-not-patches", 7, 28, where="model.image_size", value=30)


def test_adapters_that_find_no_place():
    blocks = [nn.Linear(4, 4), nn.Linear(4, 4)]
    with raises("lora-rank", where="lora.rank", value=0):
        with_adapters(blocks, Lora(rank=0), loss=lambda output, targets: (output.sum(), 1))
    with raises("lora-targets-without-match", where="lora.targets", value="attention.*"):
        with_adapters(blocks, Lora(rank=2, targets=("attention.*",)), loss=lambda output, targets: (output.sum(), 1))
    model = as_model({"embed": nn.Embedding(5, 4), "middle": nn.Linear(4, 4), "head": nn.Linear(4, 5, bias=False)},
                     lambda output, targets: (output.sum(), 1))
    with raises("head-tied-to-frozen", "embed.weight", where="parameter head.weight"):
        with_adapters(replace(model, tied=(("embed.weight", "head.weight"),)),
                      Lora(rank=2, targets=("middle",), train_head=True))


class Decoder(nn.Module):
    """With the marks of a model of transformers. kind: what is wrong with it."""

    main_input_name = "x"

    def __init__(self, kind):
        super().__init__()
        self.config, self.kind = types.SimpleNamespace(), kind
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.before, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, more=None):
        if self.kind == "none":
            return self.other(x)
        if self.kind == "early":
            x = x * (1 // int(self.before(x).abs().sum() > 0))
        if self.kind == "late" and x.abs().sum() > 99:
            x = self.other(x)
        if self.kind == "skips" and x.abs().sum() > 99:
            return x
        given = {} if more is None else {"more": more}
        if self.kind == "number" and x.abs().sum() > 99:
            given = {"more": 1.0}
        for layer in self.layers:
            x = layer(x, **given)
        return self.other(x)


class Layer(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)

    def forward(self, x, more=0.0):
        return super().forward(x) + more


@pytest.mark.parametrize(("kind", "code", "sample", "inputs"), [
    ("early", "block-cannot-run-alone", torch.ones(2, 4), None),
    ("late", "other-order-than-sample", torch.ones(2, 4), torch.full((2, 4), 99.0)),
    ("none", "no-list-of-layers", torch.ones(2, 4), None),
    ("skips", "layers-not-called", torch.ones(2, 4), torch.full((2, 4), 99.0)),
    ("more", "layer-arguments-differ", torch.ones(2, 4), {"x": torch.ones(2, 4), "more": torch.ones(2, 4)}),
    ("number", "layer-tensors-differ", {"x": torch.ones(2, 4), "more": torch.ones(2, 4)},
     {"x": torch.full((2, 4), 99.0), "more": torch.ones(2, 4)})])
def test_decoders_that_cannot_be_cut(kind, code, sample, inputs):
    with raises(code):
        cut = from_transformers(Decoder(kind), sample, loss=lambda output, targets: (output.sum(), 1))
        next(iter(cut.blocks.values()))()(inputs)


class Doubles(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.b(self.a(x))
        return 2 * x if self.training else x


def test_a_part_in_another_mode_than_the_code_around_it():
    whole = nn.Sequential(Doubles(), nn.Linear(4, 4))
    blocks = blocks_of(whole, cut=["0.b"])
    whole[0].eval()
    with raises("submodule-in-other-mode", where="submodule 0", value="training=False"):
        x = torch.ones(2, 4)
        for block in blocks.values():
            block.stand_in_modes.follow()
            x = block(x)


# --- data -------------------------------------------------------------------------------------------------------------


def test_a_tokenizer_that_is_not_there():
    with raises("tokenizer-file-missing", where="data.tokenizer", value="gone.json"):
        run_tokenizer._load(Run(data=Data(tokenizer="gone.json")))


def test_texts_and_tables(tmp_path, monkeypatch):
    with raises("text-half-surrogate", where="line 3"):
        text_of(Row("line 3", {"text": "\ud800"}), "text", "data.text-column")
    monkeypatch.setattr(corpus, "has_package", lambda name: False)
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
        new_folder.check_free(tmp_path / ("x" * 5000))
    (tmp_path / "generation_config.json").write_text("[1")
    (tmp_path / "out").mkdir()
    with raises("generation-config-not-json", where=str(tmp_path / "generation_config.json")):
        tokenizer_files.export_files_beside(tmp_path / "out", tmp_path / "tokenizer.json", print)
    (tmp_path / "tokenizer.json").write_text("{}")
    with raises("exported-tokenizer-unreadable", where=str(tmp_path / "tokenizer.json")):
        tokenizer_files.export_tokenizer(tmp_path / "out", tmp_path / "tokenizer.json", Transformer(family="bert"))


# --- planner, train, cli ----------------------------------------------------------------------------------------------


def test_plans_that_cannot_be(tmp_path, monkeypatch):
    run = Run(mesh=MeshSettings(data="auto"), model=Transformer(hidden=7, heads=2))
    _, (problem,) = auto.with_plan(run, 4)
    check(problem, "not-planned-yet", where="mesh.data", value="auto")
    found = [one for one in problems(resolve(Run(resume=str(tmp_path / "none")))) if one.where == "resume"]
    check(found[0], "resume-checkpoint-missing", value=str(tmp_path / "none"))
    with raises("plan-not-writable", where="--out"):
        plan._write(Run(), tmp_path / "none" / "x.toml")
    monkeypatch.setattr(plan, "page_of", lambda found, name: types.SimpleNamespace(html=str))
    with raises("plan-page-not-writable", where="--out-html", value=str(tmp_path / "none" / "x.html")):
        plan._write_page(None, "x", tmp_path / "none" / "x.html")
    with raises("not-finite-option", where="--jitter", value=math.inf):
        plan.simulate("x", Run(), "laptop", jitter=math.inf)
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
    data = types.SimpleNamespace(train=None, eval=None, eval_sets={}, fingerprint="now", tokenizer=None)
    (tmp_path / "reference.json").write_text(json.dumps({"data": "before", "sets": {}}))
    with raises("reference-of-other-pairs", where=str(tmp_path / "reference.json")):
        reference._read(tmp_path / "reference.json", data)


def test_a_reference_without_two_numbers_a_pair(tmp_path, monkeypatch):
    path = tmp_path / "reference.json"
    path.write_text(json.dumps({"data": "same", "sets": {"": [[-1.0, -2.0]]}}))
    monkeypatch.setattr(reference, "fingerprint", lambda data: "same")
    monkeypatch.setattr(reference, "_sets", lambda data: {"": range(3)})
    with raises("damaged-reference", where=str(path), value="(1, 2)"):
        reference._read(path, None)


def test_pairs_are_not_evaluated_without_their_reference():
    run = resolve(Run(data=Data(task="preference", train="x")))
    with raises("evaluation-of-reference", where="preference.loss", value="dpo"):
        model_evaluation.evaluate(None, run, {"x": run}, {}, None, alone(), print)


def test_a_run_that_begins_with_adapters_has_no_reference(tmp_path):
    run = resolve(Run(data=Data(task="preference", train="x"), lora=Lora(rank=2), run_dir=tmp_path))
    data = types.SimpleNamespace(train=None, eval=None, eval_sets={})
    resumed = types.SimpleNamespace(continues=False, step=3, loaded=types.SimpleNamespace(folder="before"))
    with raises("reference-with-adapters", where="resume", value="before"):
        reference.fill_reference(types.SimpleNamespace(run=run), data, None, resumed)


def test_a_checkpoint_of_other_classes(tmp_path):
    run = resolve(Run())
    loaded = types.SimpleNamespace(folder=tmp_path / "step-1")
    metadata = types.SimpleNamespace(values=read.flatten(run), tokenizer=None, labels=("cat", "dog"))
    started = types.SimpleNamespace(_run=run, _tokenizer=None, _labels=("cat", "emu"))
    with raises("checkpoint-of-other-classes", "'dog'", where=f"checkpoint {loaded.folder}", value=("cat", "emu")):
        saving.Saving._check_same(started, loaded, metadata)


def test_ranks_of_other_meshes(monkeypatch):
    run, world = resolve(Run()), types.SimpleNamespace(local_size=1)
    other = {"folder": "x", "text": "same", "local_size": 1, "plan": "data 2"}
    ranks = types.SimpleNamespace(gather_objects=lambda mine: [mine, other])
    monkeypatch.setattr(setup, "fingerprint", lambda data: "same")
    with raises("mesh-differs-between-ranks", run.mesh, where="mesh of rank 1", value="data 2"):
        setup.agree_on_run(run, "x", None, ranks, world)


def test_requests_that_have_no_answer(tmp_path, monkeypatch):
    (tmp_path / "run.toml").write_text("")
    monkeypatch.setattr(resize, "withdraw", lambda run_dir, wish: False)
    with raises("resize-unanswered", where=f"run {tmp_path}"):
        resize.ask_and_wait(tmp_path, seconds=0.01, data=2)
    (tmp_path / "summary.json").write_text("{}")
    with raises("resize-ended-run", where=f"run {tmp_path}"):
        resize.ask(tmp_path, data=2)
    with raises("resize-not-writable", where=str(resize._path(tmp_path / "none", "w"))):
        resize.leave(tmp_path / "none", "w", {"data": 2})


def test_pages_that_cannot_be_shown(tmp_path):
    with raises("run-without-report", where="RUN", value=str(tmp_path)):
        server_of(tmp_path)
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
