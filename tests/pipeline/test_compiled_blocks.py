"""Compiled blocks: each one graph, with raw gradients equal to those of plain PyTorch and the same deferred products.

The backend aot_eager traces forward and backward as inductor does, and compiles nothing; one slow test compiles.
"""

import copy
import time
import warnings
from functools import partial

import pytest
import torch
from torch import nn

from ranvier.block import as_model
from ranvier.config.run import Memory, Optim, Pipeline, Transformer
from ranvier.mesh import Mesh
from ranvier.models import bert, gpt, llama, vit
from ranvier.models.blocks_of import blocks_of
from ranvier.pipeline.engine import Engine
from ranvier.pipeline.microbatch import Microbatch
from ranvier.tensor import compiled, deferred_linear
from ranvier.tensor.weight_gradients import WeightGradients
from ranvier.testing.ranks import run_ranks
from ranvier.testing.reference import Reference
from tests.errors import raises
from tests.pipeline.parity import SEED, assert_parity, chain, frozen, on_mesh, points, share, squared
from tests.pipeline.test_parity import residuals
from tests.pipeline.test_recomputed_state import KEPT, linear
from tests.pipeline.test_recomputed_state import model as model_with_buffers

SIZES = dict(hidden=16, heads=4, vocab=23, dropout=0.1, num_classes=5)


@pytest.fixture(autouse=True)
def traced(monkeypatch):
    """Graphs are traced, but run without being compiled."""
    torch._dynamo.reset()
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*runs uncompiled.*")
        yield


@pytest.fixture
def graphs(monkeypatch):
    """The graphs that are made, and for each backward the number of its incoming gradients, counted by a backend that
    runs graphs as they are."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    made, tangents = [], []

    def backward(graph, inputs):
        tangents.append(sum("tangent" in node.name for node in graph.graph.nodes if node.op == "placeholder"))
        return make_boxed_func(graph.forward)

    run = aot_autograd(fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward), bw_compiler=backward)

    def backend(graph, inputs, **options):
        made.append(graph)
        return run(graph, inputs, **options)

    monkeypatch.setattr(compiled, "BACKEND", backend)
    return made, tangents


def model_of(kind, **changed):
    if kind == "vit":
        return vit.vit(Transformer(**SIZES | dict(num_layers=1, image_size=12, patch_size=4) | changed),
                       dtype=torch.float64)
    config = Transformer(**SIZES | dict(num_layers=1, sequence=12) | changed)
    if kind == "bert":
        return bert.bert(config, "classes", dtype=torch.float64)
    return (llama.llama if kind.startswith("llama") else gpt.gpt)(config, dtype=torch.float64)


def batches_of(kind, *, packed=False, replicas=1, count=2):
    generator, batches = torch.Generator().manual_seed(5), []
    for replica in range(replicas):
        batches.append([])
        for number in range(count):
            samples, length = 2 + number % 2, 12 - number if kind != "vit" else 12  # sizes differ between microbatches
            ids = torch.randint(23, (samples, length), generator=generator)
            inputs, targets = ids, torch.randint(23, (samples, length), generator=generator)
            if kind == "vit":
                inputs = torch.randn(samples, 3, 12, 12, generator=generator, dtype=torch.float64)
            if kind == "bert":
                inputs = {"ids": ids, "mask": torch.ones_like(ids), "types": torch.zeros_like(ids)}
            if kind in ("vit", "bert"):
                targets = torch.randint(5, (samples,), generator=generator)
            if packed:
                inputs = {"ids": ids, "segments": 1 + (torch.arange(length) >= length // 2).long().expand_as(ids)}
            first = 10 * (replica * count + number)
            batches[-1].append(Microbatch(inputs, targets, torch.arange(first, first + samples)))
    return batches


LLAMA = {"kv_heads": 2, "qk_norm": "head", "bias": "qkv", "norms": "both", "embedding_scale": "sqrt-hidden"}


def test_blocks_that_are_alike_share_their_graphs(graphs):
    """The first of eight blocks has inputs without a gradient. Two graphs are made for the first size and two for any
    size; a single gradient enters each backward."""
    assert_parity(residuals, points([[3, 2, 4]]), Mesh(), compile=True)
    made, tangents = graphs
    assert len(made) == 4 and set(tangents) == {1}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "changed"), [
    ("gpt", {"num_layers": 2}), ("bert", {}), ("llama", LLAMA), ("vit", {})])
def test_gradients_are_plain_pytorchs(kind, changed, graphs):
    """An operand of a product has no gradient in the graph, which would be zeros of the operand's size, added to the
    gradient."""
    assert_parity(lambda: model_of(kind, **changed), batches_of(kind), Mesh(), compile=True, run_seconds=300.0)
    made, tangents = graphs
    assert 4 <= len(made) <= 10, "equal blocks share their graphs, which are valid for any length"
    assert kind != "gpt" or set(tangents) == {1}


def test_half_precision_parameters_with_fp32_gradients():
    """Such parameters have no fake copies in torch, so a compiled block is given them without their gradients."""
    def gradients(world, compiled):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8))
        engine = Engine(model, world, loss=lambda y, t: ((y - t).square().sum(), len(t)), dtype=torch.bfloat16,
                        optim=Optim(), compile=compiled)
        engine.forward_backward([Microbatch(x, x) for x in torch.ones(2, 4, 8, dtype=torch.bfloat16)])
        return [one.grad.clone() for one in engine.parameters()]

    plain, compiled = (run_ranks(partial(gradients, compiled=how), 1)[0] for how in (False, True))
    assert {one.dtype for one in compiled} == {torch.float32}
    torch.testing.assert_close(compiled, plain, rtol=1e-2, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_packed_sequences(kind):
    assert_parity(lambda: model_of(kind), batches_of(kind, packed=True, count=1), Mesh(), compile=True,
                  run_seconds=300.0)


@pytest.mark.slow
def test_recomputation():
    assert_parity(lambda: model_of("gpt", num_layers=2), batches_of("gpt", count=1), Mesh(), compile=True,
                  memory=Memory(recompute=2), run_seconds=300.0)


@pytest.mark.slow
def test_recomputation_with_lengths_that_change():
    """The first microbatch is recomputed after graphs for the second one, of another length, were compiled."""
    assert_parity(lambda: model_of("gpt", num_layers=2), batches_of("gpt", count=3), Mesh(pipe=2), compile=True,
                  memory=Memory(recompute=1), run_seconds=300.0)


@pytest.mark.slow
def test_frozen_blocks_and_parameters():
    assert_parity(lambda: frozen(model_of("gpt", untied=True, num_layers=2), lambda name: name.startswith(
        ("embedding", "layer0.attention", "layer1.mlp.fc2"))), batches_of("gpt", count=1), Mesh(), compile=True,
                  run_seconds=300.0)


class Takes(nn.Module):
    """A state with other values besides tensors."""

    def __init__(self):
        super().__init__()
        self.linear = linear()

    def forward(self, state):
        hidden, nothing, size, dtype = state if isinstance(state, tuple) else (state, None, 2, torch.float64)
        assert nothing is None
        return torch.tanh(self.linear(hidden)).to(dtype) * size, None, size + 1, dtype


class Leaves(nn.Module):
    def forward(self, state):
        return state[0]


def test_a_state_with_none_and_numbers():
    assert_parity(partial(chain, Takes, Takes, Leaves), points([[3, 2]]), Mesh(), compile=True)


@pytest.mark.slow
def test_stages_that_defer_their_products():
    assert_parity(lambda: model_of("gpt"), batches_of("gpt", replicas=2, count=2), Mesh(data=2, pipe=2), compile=True,
                  pipeline=Pipeline(defer_bytes=1 << 30), run_seconds=300.0)


@pytest.mark.slow
def test_products_come_in_the_same_order(monkeypatch):
    """They also keep the same bytes alive, so that schedules and memory are those of uncompiled blocks."""
    orders, add = [], compiled.add_gradients

    def recorded(*operands, **options):
        orders[-1].append([tuple(one.shape) for one in operands])
        add(*operands, **options)

    for module in (deferred_linear, compiled):
        monkeypatch.setattr(module, "add_gradients", recorded)
    for how in (False, True):
        orders.append([])
        kept = on_mesh(lambda: model_of("gpt"), Mesh(), lambda engine: (engine.forward_backward(
            share(engine, batches_of("gpt", count=1))), engine._stages.first._weights.forward_bytes)[1], compile=how)
        orders[-1].append(kept)
    assert orders[0] == orders[1] and len(orders[0]) == 5


class Reads(nn.Module):
    """A block that reads a value of its input on the host, which no single graph can contain."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x) * (2.0 if float(x.detach().sum()) > -1e9 else 1.0)


class Changes(Reads):
    """A block that changes a layer's input after the layer."""

    def forward(self, x):
        x = x * 1
        y = self.linear(x)
        x += 1
        return y


@pytest.mark.parametrize(("block", "why"), [(Reads, "_local_scalar_dense"), (Changes, "changed in place")])
def test_a_block_that_cannot_be_compiled_is_named(block, why):
    """The input of a layer must stay unchanged if the layer's product may be deferred."""
    with raises("block-not-compilable", "b0", why):
        on_mesh(lambda: chain(block), Mesh(), lambda engine: engine.forward_backward(share(engine, points([[2]]))),
                pipeline=Pipeline(defer_bytes=1 << 20), compile=True)


@pytest.mark.slow
def test_evaluation_is_uncompiled_and_right():
    """The run on fake tensors that finds shapes leaves nothing behind, such as tables of rotary embeddings."""
    config = Transformer(**SIZES | LLAMA, rope_base=77.0)
    x = torch.randn(2, 12, 16, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    batches = [[Microbatch(x, x.flip(0), torch.arange(2))]]

    def work(trains, engine):
        if trains:
            engine.forward_backward(share(engine, batches))
        return engine.evaluate(share(engine, batches)).loss

    after, before = (on_mesh(lambda: chain(lambda: llama.Attention(config, torch.float64, None, True)), Mesh(),
                             partial(work, trains), compile=True, run_seconds=300.0)[0] for trains in (True, False))
    assert after == before > 0.1


class Whole(nn.Module):
    """A complete module, whose second block may change the output of the first one."""

    def __init__(self, *, in_place):
        super().__init__()
        self.first, self.second, self.third, self.in_place = linear(), linear(), linear(), in_place

    def forward(self, x):
        x = self.first(x)
        y = self.second(x.tanh())
        if self.in_place:
            x += 1
        return self.third(x + y)


@pytest.mark.slow
def test_blocks_of_a_whole_module():
    module = Whole(in_place=False).double()
    assert_parity(lambda: as_model(blocks_of(copy.deepcopy(module)), squared), points([[2, 2]]), Mesh(), compile=True)


def test_blocks_of_a_whole_module_that_change_their_input_are_refused():
    module = Whole(in_place=True)
    with raises("block-changes-input", where="block second"):
        on_mesh(lambda: as_model(blocks_of(module), squared), Mesh(),
                lambda engine: engine.forward_backward(share(engine, points([[2]]))), compile=True)


def test_with_auto_it_runs_uncompiled(monkeypatch):
    """As on CUDA, where auto compiles."""
    monkeypatch.setattr("ranvier.pipeline.parts.compiles", lambda how, device: "auto")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_parity(lambda: chain(Reads), points([[2, 3]]), Mesh())
    assert len([one for one in caught if "block b0 runs uncompiled" in str(one.message)]) == 1


def test_a_second_backward_is_refused():
    layer = nn.Linear(3, 2)
    operand = compiled._Operand()
    tap = compiled._Tap.apply(layer.weight, layer.bias, (4, 2), operand, WeightGradients(
        lambda parameters: [0], lambda chunks: None))
    operand.x = torch.ones(4, 3)
    tap.sum().backward(retain_graph=True)
    assert torch.equal(layer.weight.grad, torch.full((2, 3), 4.0))
    assert torch.equal(layer.bias.grad, torch.full((2,), 4.0))
    with pytest.raises(RuntimeError, match="cannot run its backward twice"):
        tap.sum().backward()


def test_users_errors_are_their_own():
    """A mistake in a block is not reported as a failure of the compiler."""
    with pytest.raises(RuntimeError, match="same reduction dim") as caught:
        on_mesh(lambda: chain(partial(nn.Linear, 5, 4)), Mesh(),
                lambda engine: engine.forward_backward(share(engine, points([[2]]))), compile=True)
    assert "in block b0" in str(caught.value.__notes__)


@pytest.mark.slow
def test_inductor(monkeypatch):
    """Compiled by inductor, as on CUDA."""
    monkeypatch.setattr(compiled, "BACKEND", "inductor")
    assert_parity(lambda: model_of("gpt", num_layers=1), batches_of("gpt", count=1), Mesh(), compile=True,
                  run_seconds=400.0)


def test_stages_that_compile_for_longer_than_a_message_may_take(monkeypatch):
    """They compile one after another, forward and backward."""
    from torch._dynamo.backends.debugging import aot_eager

    def slow(graph, inputs, **options):
        time.sleep(4.0)
        return aot_eager(graph, inputs, **options)

    monkeypatch.setattr(compiled, "BACKEND", slow)
    assert_parity(lambda: chain(partial(nn.Linear, 4, 4, dtype=torch.float64), partial(nn.Linear, 4, 4,
                  dtype=torch.float64)), points([[2]]), Mesh(pipe=2), compile=True, timeout_seconds=2.0,
                  run_seconds=100.0)


def test_buffers_change_once():
    """The forward on fake tensors, which finds the shapes, changes no buffer and leaves no fake tensor in its place;
    under recomputation the second forward changes none."""
    blocks = [linear, KEPT["batch norm"], KEPT["average replaced"], linear]
    make, batch = partial(model_with_buffers, *blocks), points([[3, 3]])
    reference = Reference(make(), seed=SEED, dtype=torch.float64)
    reference.forward_backward(batch[0])

    def work(engine):
        engine.forward_backward(share(engine, batch))
        return engine.gradients(), engine.named_buffers()

    (gradients, buffers), = on_mesh(make, Mesh(), work, memory=Memory(recompute=1), compile=True)
    expected = {f"{block}.{name}": buffer for block, module in reference.modules.items()
                for name, buffer in module.named_buffers()}
    for found, wanted in ((gradients, reference.gradients()), (buffers, expected)):
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12)


class Collects(nn.Module):
    """Computes with what earlier forwards have put into a list and a dict."""

    def __init__(self):
        super().__init__()
        self.linear, self.means, self.sums = nn.Linear(4, 4), [], {"all": torch.ones((), dtype=torch.float64)}
        self.parts = {"of": self.means}
        self.parts["self"] = self.parts
        with torch.inference_mode():  # its tensors have no versions
            self.parts["table"] = torch.ones(4)

    def forward(self, x):
        self.means.append(x.detach().mean())
        self.sums["all"] = self.sums["all"] + x.detach().mean()
        return self.linear(x) * (len(self.means) + self.sums["all"])


@pytest.mark.parametrize("options", [
    pytest.param({}, marks=pytest.mark.slow), {"memory": Memory(recompute=1)}], ids=["once", "recomputed"])
def test_what_is_in_attributes_changes_once(options, monkeypatch):
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    assert_parity(lambda: chain(Collects, linear), points([[2, 3]]), Mesh(), compile=True, **options)


class ChangesLater(nn.Module):
    """Makes a tensor in its first forward, and changes it in place in later ones."""

    def __init__(self):
        super().__init__()
        self.linear, self.average = nn.Linear(4, 4), None

    def forward(self, x):
        if self.average is None:
            self.average = x.detach().mean(0)
            return self.linear(x)
        y = self.linear(x) * self.average.exp()
        with torch.no_grad():
            self.average.mul_(0.9)
        return y


@pytest.mark.parametrize("block", [KEPT["average in place"], ChangesLater])
def test_a_tensor_that_changes_in_place_is_named(block):
    """Torch may save a tensor for the backward that changes afterwards: gradients would be wrong."""
    with raises("block-not-compilable", "b1", "changed in place"):
        assert_parity(lambda: model_with_buffers(linear, block, linear), points([[2, 2, 2]]), Mesh(),
                      compile=True)


class Counter(nn.Module):
    """Counts its forwards. reads: computes with the count, before or after it grows."""

    def __init__(self, reads=None):
        super().__init__()
        self.linear, self.reads = nn.Linear(4, 4), reads
        self.register_buffer("count", torch.tensor(1))

    def forward(self, x):
        y = self.linear(x) * self.count if self.reads == "before" else self.linear(x)
        self.count += 1
        return y * self.count.view(()) if self.reads == "after" else y


@pytest.mark.parametrize(("memory", "sizes"), [
    (None, [2, 3]), pytest.param(Memory(recompute=1), [2, 2], marks=pytest.mark.slow)], ids=["once", "recomputed"])
def test_a_counter_that_nothing_reads_may_change_in_place(memory, sizes):
    make, batch = partial(model_with_buffers, Counter, linear), points([sizes])
    assert_parity(make, batch, Mesh(), compile=True, memory=memory)
    (buffers,) = on_mesh(make, Mesh(), lambda engine: (engine.train_batch(share(engine, batch)),
                         engine.named_buffers())[1], compile=True, memory=memory, optimizer=torch.optim.SGD)
    assert int(buffers["b0.count"]) == 3


@pytest.mark.parametrize("reads", ["before", "after"])
def test_a_counter_that_the_block_reads_may_not_change_in_place(reads):
    with raises("block-not-compilable", "b0", "changed in place"):
        on_mesh(partial(model_with_buffers, partial(Counter, reads)), Mesh(),
                lambda engine: engine.forward_backward(share(engine, points([[2]]))), compile=True)


def test_an_input_that_changes_in_place():
    """The same holds if only the block's parameters have gradients; other inputs may change if autograd allows it."""
    class Halves(nn.Linear):
        def forward(self, x):
            y = super().forward(x) * x.exp()
            return y + x.mul_(0.5)

    with raises("block-not-compilable", "b0", "changed in place"):
        on_mesh(lambda: chain(partial(Halves, 4, 4), linear), Mesh(),
                lambda engine: engine.forward_backward(points([[2]])[0]), compile=True)
    on_mesh(lambda: chain(partial(nn.ReLU, inplace=True), linear, partial(nn.ReLU, inplace=True)), Mesh(),
            lambda engine: engine.forward_backward(points([[2]])[0]), compile=True)


def test_more_blocks_that_differ_in_a_number_than_graphs_may_share_their_code(monkeypatch):
    class Scaled(nn.Linear):
        def __init__(self, number):
            super().__init__(4, 4)
            self.number = number

        def forward(self, x):
            return super().forward(x) * (1 + 0.1 * self.number)

    monkeypatch.setattr(compiled, "BACKEND", "eager")
    assert_parity(lambda: chain(*(partial(Scaled, number) for number in range(10))), points([[2]]), Mesh(),
                  compile=True)


def test_a_block_that_computes_with_another_number_each_time(monkeypatch):
    """A single block, too, can have too many graphs."""
    class Counted(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x) * self.calls

    monkeypatch.setattr(compiled, "BACKEND", "eager")
    with raises("block-not-compilable", "b0", "each value of a number"):
        assert_parity(lambda: chain(partial(Counted, 4, 4)), points([[1] * 20]), Mesh(), compile=True)


class CompiledByItself(nn.Module):
    """A user's block that compiles its own code into one graph."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.call = torch.compile(lambda x: torch.tanh(self.linear(x)), backend="eager", fullgraph=True)

    def forward(self, x):
        return self.call(x)


def test_a_block_that_compiles_itself():
    assert_parity(lambda: chain(CompiledByItself, linear, CompiledByItself), points([[2, 2]]), Mesh(pipe=2))


def test_a_block_that_is_examined_stays_as_it_was():
    block = nn.Sequential(nn.BatchNorm1d(4))
    norm, mean = block[0], block[0].running_mean
    norm.count = 1
    with compiled._restore_block(block):
        norm.count, block.extra = 2, 3
        norm.running_mean.add_(1.0)
        norm.running_var = torch.zeros(4)
    assert norm.count == 1 and not hasattr(block, "extra")
    assert norm.running_mean is mean and mean.tolist() == [0.0] * 4 and norm.running_var.tolist() == [1.0] * 4


def blocks_and_a_loss_that_has_them():
    torch.manual_seed(SEED)
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4, dtype=torch.float64), nn.Tanh()) for _ in range(4)))
    return blocks, lambda y, t: (((y - t) ** 2).sum() * len(blocks), t.numel())


def train_whole(make, **options):
    models, batches = [make() for _ in range(2)], points([[2, 3]])

    def rank(world):
        blocks, loss = models[world.rank]
        engine = Engine(blocks, world, mesh=Mesh(pipe=2), loss=loss, compile=True, **options)
        engine.forward_backward(share(engine, batches))
        found = {name: one.clone() for name, one in engine.gradients().items()}
        engine.close()
        return found

    found = run_ranks(rank, 2)
    return found[0] | found[1]


def test_beside_a_loss_that_has_the_whole_model(graphs):
    """Such a loss is checked operation by operation; blocks that reach no others are not."""
    found = train_whole(blocks_and_a_loss_that_has_them, memory=Memory(recompute=1))
    assert graphs[0]
    blocks, loss = blocks_and_a_loss_that_has_them()
    (batch,) = points([[2, 3]])
    (sum(loss(blocks(one.inputs), one.targets)[0] for one in batch) / 20).backward()
    for name, parameter in blocks.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-10, atol=1e-12)


def test_a_block_that_reaches_parameters_of_other_stages_is_not_compiled():
    class Reads(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.own, self.held = nn.Linear(4, 4, dtype=torch.float64), [layer]

        def forward(self, x):
            return self.own(x) * self.held[0].weight.shape[0]

    def make():
        blocks, loss = blocks_and_a_loss_that_has_them()
        return nn.Sequential(*blocks, Reads(blocks[0][0])), loss

    with raises("block-not-compilable", "4", "other stages"):
        train_whole(make)
