"""Errors of engines, ranks and models that one call raises: the code, and names in the message."""

import sys
import threading
import types
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from ranvier.block import as_model
from ranvier.comm import mpi_backend, mpi_transport, nccl_transport, torch_group
from ranvier.comm.inprocess import InProcessWorld
from ranvier.comm.message import Message, MessageKind
from ranvier.config.run import Data, Lora, Optim, Run, Transformer
from ranvier.errors import RanvierError
from ranvier.launch import failures, heartbeat, launchers, run_function, start
from ranvier.mesh import Mesh
from ranvier.models import families, vit
from ranvier.models.blocks_of import blocks_of
from ranvier.models.from_transformers import from_transformers
from ranvier.models.lora import with_adapters
from ranvier.pipeline import inbox
from ranvier.pipeline.carried_tensors import SharedMemory, _Refusing
from ranvier.pipeline.engine import Engine
from ranvier.pipeline.sequencer import Sequencer
from ranvier.system.lease import Lease
from ranvier.tensor import boundaries, float8, layers
from ranvier.tensor.columns import ColumnLayout, ColumnTensor
from ranvier.tensor.layer_order import LayerOrder
from ranvier.testing.ranks import run_ranks
from ranvier.world import World
from tests.errors import check, raises


def alone():
    return World(backend=InProcessWorld(1).backend(0), store=None, launcher="local", local_rank=0, local_size=1,
                 device=torch.device("cpu"))


def squares(output, targets):
    return output.square().sum(), 1


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
                         _progress_until=lambda test, seconds: False, _closed=False, _transports=[], _groups=[])
    with raises("mpi-backend-start-late", where="MPI backend of rank 3", value="2 s"):
        backend._all_are(True)
    with raises("mpi-request-late", where="subset of 2 on rank 3", value="2 s"):
        backend._await_all("subset of 2")
    with raises("mpi-close-late", where="MPI backend of rank 3"):
        backend.close()


def test_transports_that_fail():
    edges = types.SimpleNamespace(purpose="data", rank=3, closed=True)
    found = mpi_transport.MPITransport._convert_error(edges, RuntimeError("truncated"))
    check(found, "mpi-transport-failed", where="transport 'data' on rank 3", value="truncated")

    def fail():
        raise RuntimeError("no device\nmore")

    transport = types.SimpleNamespace(_device=torch.device("cpu"), _failure=None, _closed=True,
                                      _heard=threading.Event(), _host=edges)
    nccl_transport.NcclTransport._run_thread(transport, fail)
    check(transport._failure, "nccl-transport-failed", where="transport 'data' on rank 3", value="no device")


def test_calls_of_a_world():
    with raises("malformed-argument", where="World.all_reduce(op=...)", value="median"):
        alone().all_reduce(1.0, "median")
    with raises("reduce-value", value="list"):
        alone().all_reduce([1.0])
    with raises("broadcast-source", 1, value=3):
        alone().broadcast(1.0, source=3)
    for call in (alone().gather_objects, alone().broadcast):
        with raises("value-not-json", value="dict"):
            call({"gradient": torch.ones(2)})
        with raises("value-not-json", 7, "items()"):
            call([1, {"counts": {7: 0.5}}])


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
        start.check_mpi(started, 0, 1)

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
    check(heartbeat._error({}, True, 4.0), "mpi-start-late", value="more than 4 s")
    stopped = types.SimpleNamespace(pid=77)
    check(heartbeat._error({3: stopped}, False, 4.0), "rank-stopped-before-mpi", 77, where="rank 3")
    assert heartbeat._error({}, False, 4.0) is None


def test_a_rank_that_sends_no_heartbeat(monkeypatch):
    world = types.SimpleNamespace(rank=1, size=2, store=types.SimpleNamespace(
        set=lambda key, value: None, check=lambda keys: False))
    heartbeat = types.SimpleNamespace(longest_silence=lambda: (0, 9.0), timeout_seconds=5.0,
                                      find_waiting_rank=lambda: None)
    monkeypatch.setattr(failures, "CHECK_SECONDS", 0.0)
    monkeypatch.setattr(failures, "find_waiting_rank", lambda *args: None)
    with raises("heartbeat-missing", where="rank 0", value="9 s"):
        failures._await_all_ranks(world, heartbeat)


def test_a_rank_that_ends_while_another_needs_it(monkeypatch):
    monkeypatch.setattr(failures, "read_actions", lambda store, ranks: {1: (0, "a wait for step 7")})
    check(failures._ended_early(alone(), 1), "rank-ended-early", "rank 1", "step 7", where="rank 0")


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


def test_an_output_whose_layout_nobody_knows():
    layer = types.SimpleNamespace(_mesh=None, _gives="same", _entered=None, _where="layer up")
    with raises("block-output-layout", "[2, 3]", where="layer up"):
        boundaries._LayerGuard._output_layout(layer, torch.zeros(2, 3))


def test_float8_needs_a_later_torch_on_a_cpu(monkeypatch):
    monkeypatch.setattr(float8, "runs_on_cpu", lambda: False)
    with raises("float8-needs-torch", where="model.float8", value=f"torch {torch.__version__}"):
        float8.float8_layers([], 3, torch.device("cpu"))


def test_split_tensors_are_not_compiled(monkeypatch):
    x = ColumnTensor(torch.zeros(2, 3), ColumnLayout(types.SimpleNamespace(num_cols=1)))
    monkeypatch.setattr(torch.compiler, "is_dynamo_compiling", lambda: True)
    with raises("columns-under-compile"):
        x + x


def test_the_rate_of_a_users_optimizer_is_set_there():
    """The rate is also restored with that optimizer's state."""
    one, other = (run_ranks(lambda world: Engine(
        [nn.Linear(2, 2)], world, loss=lambda y, t: (y.sum(), 1), learning_rate=rate,  # noqa: B023
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rate)), 1)[0] for rate in (0.1, 0.2))  # noqa: B023
    with raises("learning-rate-of-users-optimizer", value=0.5):
        one.learning_rate = 0.5
    other.load_state_dict(one.state_dict())
    assert other.optimizer.param_groups[0]["lr"] == 0.1


def test_messages_of_another_batch():
    board = types.SimpleNamespace(name=lambda rank: f"rank {rank}")
    box = inbox.Inbox(None, board, None, 1.0, lambda message: None)
    box.begin(5, 5, 2, lambda *where: None)

    def arrives(step, microbatch):
        box._receive(Message(MessageKind.FORWARD, step, microbatch, {"": torch.zeros(1)}, source=3))

    with raises("message-of-ended-batch", "rank 3", where="train_batch"):
        arrives(3, 0)
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
    lifo = {"name": "lifo", "defers": False, "choose": max, "in_flight": max, "stored": max}
    for policy in (types.SimpleNamespace(**lifo | {"stored": 4}), type("Lifo", (), lifo)):
        with raises("policy-object-incomplete", where="Engine(policy=...)"):
            run_ranks(partial(work, blocks=[nn.Linear(2, 2)], policy=policy), 1)
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
    state["x"].register_hook(_Refusing("x", lambda: False))
    with raises("hook-on-earlier-state", '"x"'):
        torch.autograd.grad(state["x"].sum(), state["x"])


# --- models -----------------------------------------------------------------------------------------------------------


def test_families_that_are_none():
    with raises("unknown-family", where="model.family", value="rnn"):
        families.family_named("rnn")
    found, = families.problems(Run(model=Transformer(family="bert"), data=Data(task="images", train="x")))
    check(found, "family-without-task", "images", "vit", where="model.family", value="bert")
    found, = families.problems(Run(model=Transformer(family="llama", pretrained="x"), data=Data(task="qa", train="x")))
    check(found, "family-without-task", "model.pretrained", where="model.family", value="llama")
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
    """It looks like a transformers model. kind: its fault."""

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
            block.stand_ins.follow_modes()
            x = block(x)
