"""Products in float8: equal to a few lines of reference code, on every mesh, deferred, recomputed and compiled."""

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn import functional

from ranvier.config.resolve import ResolvedRun, resolve
from ranvier.config.rules import problems
from ranvier.config.run import Batch, Lora, Memory, Optim, Pipeline, Run, Transformer
from ranvier.errors import ConfigError
from ranvier.mesh import Mesh
from ranvier.pipeline.engine import Engine
from ranvier.pipeline.microbatch import Microbatch
from ranvier.planner.count import laid_out
from ranvier.system.memory_tracker import MemoryTracker
from ranvier.tensor import compiled, float8
from ranvier.testing.ranks import run_ranks
from tests.errors import raises

on_a_cpu = pytest.mark.skipif(not float8.runs_on_cpu(), reason="this torch has no products in float8 on a CPU")


def rounded(x, dtype):
    """x rounded to the grid of `dtype`, which is scaled to x's largest value."""
    scale = x.abs().max() / torch.finfo(dtype).max
    return (x / scale).to(dtype).float() * scale


class Reference(torch.autograd.Function):
    """A linear layer in fp32 whose three products have rounded operands."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return rounded(x, torch.float8_e4m3fn) @ rounded(weight, torch.float8_e4m3fn).t() + bias

    @staticmethod
    def backward(ctx, dy):
        (x, weight), dy8 = ctx.saved_tensors, rounded(dy, torch.float8_e5m2)
        dw = dy8.flatten(0, -2).t() @ rounded(x, torch.float8_e4m3fn).flatten(0, -2)
        return dy8 @ rounded(weight, torch.float8_e4m3fn), dw, dy.flatten(0, -2).sum(0)


class Block(nn.Module):
    """Two linear layers; the first has `width` outputs."""

    def __init__(self, width=32):
        super().__init__()
        self.up, self.down = nn.Linear(16, width), nn.Linear(width, 16)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(x)))


WIDTHS, FEW = (32, 32, 24, 32, 32), (32, 32, 32)
"""The first, the last and an odd block stay as they are: four of the ten layers are in float8, or two of six."""


def chain(widths=WIDTHS):
    torch.manual_seed(3)
    return nn.Sequential(*map(Block, widths))


def batches(replicas, count=3):
    """Microbatches of 2, 3 and 4 samples of 5 tokens: 10, 15 and 20 rows, none divisible by 16."""
    torch.manual_seed(7)
    return [[Microbatch(torch.randn(2 + number, 5, 16), torch.randn(2 + number, 5, 16)) for number in range(count)]
            for _ in range(replicas)]


def loss(y, targets):
    return (y - targets).square().sum(), targets.shape[0]


def expected(replicas, widths=WIDTHS):
    """Gradients of the reference, by plain PyTorch on one process."""
    blocks = chain(widths)
    for number in range(1, len(widths) - 1, 2):
        for layer in (blocks[number].up, blocks[number].down):
            layer.forward = lambda x, layer=layer: Reference.apply(x, layer.weight, layer.bias)
    weight = 0
    for batch in batches(replicas):
        for one in batch:
            total, count = loss(blocks(one.inputs), one.targets)
            total.backward()
            weight += count
    return {name: parameter.grad / weight for name, parameter in blocks.named_parameters()}


def gradients(mesh, widths=WIDTHS, **settings):
    blocks, given = chain(widths), batches(mesh.data)  # ranks are threads, which share torch's generator

    def on_rank(world):
        engine = Engine(deepcopy(blocks), world, mesh=mesh, loss=loss, float8=True,
                        optim=Optim(offload="none"), **settings)
        engine.forward_backward(given[engine.coordinates.data])
        found = {name: grad.clone() for name, grad in engine.gradients().items()}
        engine.close()
        return found

    found = {}
    for ours in run_ranks(on_rank, mesh.size, timeout_seconds=300.0):
        found.update(ours)
    return found


COMPILED = {"compile": True, "memory": Memory(recompute=1)}


@on_a_cpu
@pytest.mark.parametrize(("mesh", "settings", "backend"), [
    (Mesh(), {}, None),
    (Mesh(pipe=2), {"pipeline": Pipeline(boundaries=(3,))}, None),
    (Mesh(data=2, pipe=2), {"pipeline": Pipeline(policy="1f1b")}, None),
    (Mesh(), {"memory": Memory(recompute=1)}, None),
    (Mesh(), COMPILED, "eager"),
    pytest.param(Mesh(), COMPILED, "aot_eager", marks=pytest.mark.slow),
    pytest.param(Mesh(), {"compile": True}, "aot_eager", marks=pytest.mark.slow),
], ids=["one rank", "pipe", "data and pipe", "recomputed", "traced, recomputed", "compiled, recomputed", "compiled"])
def test_gradients_are_those_of_rounded_operands(mesh, settings, backend, monkeypatch):
    monkeypatch.setattr(compiled, "BACKEND", backend)
    widths = FEW if "compile" in settings else WIDTHS  # each graph takes a second
    found, wanted = gradients(mesh, widths, **settings), expected(mesh.data, widths)
    assert len(found) == len(wanted) == 4 * len(widths)
    for name, grad in wanted.items():
        torch.testing.assert_close(found[name], grad, rtol=0, atol=2e-6 * float(grad.abs().max()), msg=name)


class Chosen(Block):
    """Its layers are called with some rows, with none, and without a gradient; one has a hook."""

    def __init__(self):
        super().__init__()
        self.up.weight.register_hook(lambda gradient: 2 * gradient)

    def forward(self, x):
        with torch.no_grad():
            scale = self.up(x).mean()
        for rows in (x, x[:0]):
            y = self.down(functional.gelu(self.up(rows)))
        return scale * x + super().forward(x) + y.sum()


@on_a_cpu
@pytest.mark.parametrize("settings", [{}, pytest.param({"compile": True}, marks=pytest.mark.slow),
                                      {"memory": Memory(recompute=1)}], ids=str)
def test_rows_hooks_and_modes(settings, monkeypatch):
    monkeypatch.setattr(compiled, "BACKEND", "eager")

    def model():
        torch.manual_seed(3)
        return nn.Sequential(Block(), Chosen(), Block())

    blocks = model()
    for layer in (blocks[1].up, blocks[1].down):
        layer.forward = lambda x, layer=layer: Reference.apply(x, layer.weight, layer.bias) if (
            len(x) and torch.is_grad_enabled()) else functional.linear(x, layer.weight, layer.bias)
    (batch,) = batches(1)
    sum(loss(blocks(one.inputs), one.targets)[0] / 9 for one in batch).backward()

    def on_rank(world):
        engine = Engine(model(), world, loss=loss, float8=True, optim=Optim(offload="none"), **settings)
        engine.forward_backward(batch)
        return {name: grad.clone() for name, grad in engine.gradients().items()}

    found, = run_ranks(on_rank, 1, timeout_seconds=300.0)
    for name, one in blocks.named_parameters():
        torch.testing.assert_close(found[name], one.grad, rtol=0, atol=4e-6 * float(one.grad.abs().max()), msg=name)


@on_a_cpu
def test_policies_give_the_same_bits():
    one, other = (gradients(Mesh(pipe=2), pipeline=Pipeline(policy=policy)) for policy in ("message-driven", "gpipe"))
    assert all(torch.equal(one[name], other[name]) for name in one)


@on_a_cpu
def test_only_suitable_layers_of_inner_blocks_in_training():
    found = float8.float8_layers([(number, str(number), block) for number, block in enumerate(chain())], 5,
                                 torch.device("cpu"))
    blocks = chain()
    assert len(found) == 4 and all(layer.out_features % 16 == 0 for layer in found)

    def on_rank(world):
        engine = Engine(blocks, world, loss=loss, optim=Optim(offload="none"), float8=True)
        return engine.evaluate(batches(1)[0]).loss

    plain = chain()
    wanted = sum(loss(plain(one.inputs), one.targets)[0].item() for one in batches(1)[0]) / 9
    assert run_ranks(on_rank, 1)[0] == pytest.approx(wanted, rel=1e-6)  # rounding costs 1e-3


@on_a_cpu
def test_values_that_are_not_finite_are_not_hidden():
    for bad in (float("nan"), float("inf")):
        x = torch.ones(4, 16)
        x[2, 3] = bad
        assert not float8.forward_product(x, torch.ones(16, 16), None).isfinite().any()
    assert float8.forward_product(torch.zeros(4, 16), torch.ones(16, 16), None).eq(0).all()


@pytest.mark.parametrize(("changed", "words"), [
    ({"precision": "fp64"}, "would round the products of an fp64 run to 8 bits"),
    ({"mesh": Mesh(col=2)}, "is for layers that are not split, and 2 ranks split them"),
    ({"lora": Lora(rank=2)}, "is for layers that train"),
    ({"model": Transformer(float8=True, hidden=40)}, "needs a hidden size that 16 divides"),
])
def test_what_cannot_be_is_refused(changed, words):
    run = resolve(Run(**{"model": Transformer(float8=True), **changed}))
    (problem,) = [one for one in problems(run, num_blocks=10) if one.where == "model.float8"]
    assert words in str(problem)


def test_an_engine_refuses_it_in_its_own_words():
    def on_rank(world):
        with raises("float8-in-fp64", "Engine"):
            Engine(chain(), world, loss=loss, dtype=torch.float64, float8=True)

    run_ranks(on_rank, 1)


@on_a_cpu
def test_modules_in_fp64_are_in_fp32_beside_it():
    def on_rank(world):
        engine = Engine([block.double() for block in chain()], world, loss=loss, optim=Optim(), float8=True)
        return {parameter.dtype for parameter in engine.parameters()}

    assert run_ranks(on_rank, 1) == [{torch.float32}]


def test_a_torch_without_these_products_on_a_cpu_is_named(monkeypatch):
    def lacking(*operands, **named):
        raise NotImplementedError("Could not run 'aten::_scaled_mm_v2' with arguments from the 'CPU' backend")

    def on_rank(world):
        with pytest.raises(ConfigError) as caught:
            Engine(chain(), world, loss=loss, optim=Optim(offload="none"), float8=True)
        return caught.value

    monkeypatch.setattr(functional, "scaled_mm", lacking)
    (error,) = run_ranks(on_rank, 1)
    assert "float8" in error.where and error.value == f"torch {torch.__version__}"
    assert "Engine(float8=False)" in error.remedy


def test_an_old_gpu_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with raises("float8-needs-gpu", "A100"):
        float8.float8_layers([], 3, torch.device("cuda", 0))


@on_a_cpu
@pytest.mark.parametrize(("tokens", "inputs", "outputs"), [(64, 128, 32), (16, 32, 256), (256, 64, 64), (48, 64, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bytes_that_products_work_in(tokens, inputs, outputs, dtype):
    """At most the predicted bytes, and nearly as many."""
    x, weight = torch.randn(tokens, inputs, dtype=dtype), torch.randn(outputs, inputs, dtype=dtype)
    dy, tracker = torch.randn(tokens, outputs, dtype=dtype), MemoryTracker()
    with tracker:
        float8.forward_product(x, weight, weight[:, 0])
        float8.input_gradient(dy, weight)
        float8.weight_gradient(x, dy, dtype)
    predicted = float8.working_bytes(tokens, inputs, outputs, dtype.itemsize)
    assert 0.75 * predicted < tracker.peak_bytes() <= predicted + 64  # and some scalars


def test_blocks_know_them():
    """The largest linear layer of a block counts, except in the model's first and last blocks."""
    def run(**changed):
        return ResolvedRun(mesh=Mesh(), precision="bf16", batch=Batch(microbatch_size=2), model=Transformer(
            num_layers=2, hidden=32, heads=2, vocab=300, sequence=24, **changed))

    more, less = (laid_out(run(float8=each))[1][0].device["workspace"] for each in (True, False))
    assert more - less == max(float8.working_bytes(48, *sizes, 2) for sizes in ((32, 128), (128, 32)))
