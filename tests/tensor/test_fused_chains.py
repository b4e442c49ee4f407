"""`--model.compile` on rows and columns: chains of elementwise operations are compiled, and gradients do not change.

The tests' backend runs the graphs unchanged and generates no code.
"""

import warnings
from collections import Counter
from threading import RLock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ranvier import keyed_random
from ranvier.config.run import Memory, Transformer
from ranvier.mesh import Mesh
from ranvier.models import bert, gpt
from ranvier.plan.cut import meta_mesh
from ranvier.tensor import fused
from ranvier.tensor.fused import Fused, use_calls
from ranvier.tensor.split.layers import split_layers
from tests.errors import raises
from tests.tensor.split_parity import SCHEMES, SEED, assert_parity, random, samples_of, tiny_gpt, token_batches
from tests.tensor.test_llama_gradients import assert_as_one_process, make

NORM = {f"layers.norms.{name}" for name in ("_statistics", "_normalize", "_gradients", "_input_gradient")}
DROPOUT = {"layers.dropout._drop"}
ROTARY = {"layers.rotary._rotate", "layers.rotary._turned_back"}
CAP = {"layers.elementwise._cap", "layers.elementwise._capped_gradient"}
GATE = {"layers.elementwise._gate", "layers.elementwise._gated_gradients"}


@pytest.fixture
def chains(monkeypatch):
    """The names of chains that are compiled, once for all ranks of this process, by a backend that runs their graphs
    unchanged."""
    torch._dynamo.reset()
    graphs, found, known, lock, compile_one = [], set(), {}, RLock(), Fused._compile

    def backend(graph, inputs, **options):
        graphs.append(graph)
        return graph.forward

    def compiled(self, function):
        found.add(f"{function.__module__.removeprefix('ranvier.tensor.')}.{function.__name__}")
        one = known.setdefault(function, compile_one(self, function))

        def call(*args):
            with lock:  # torch also locks each compilation, but then compiles again for the thread that waited
                return one(*args)

        return call

    monkeypatch.setattr(fused, "BACKEND", backend)
    monkeypatch.setattr(Fused, "_compile", compiled)
    yield found
    assert len(graphs) >= len(found)


@pytest.mark.parametrize(("kind", "mesh", "scheme", "expected"), [
    ("mistral", Mesh(col=2), "stationary", NORM | DROPOUT | ROTARY | GATE),
    pytest.param("gpt", Mesh(row=2, col=2), "stationary", NORM | DROPOUT, marks=pytest.mark.slow),
    pytest.param("mistral", Mesh(col=2), "megatron", DROPOUT | ROTARY | GATE, marks=pytest.mark.slow),
    pytest.param("qwen3", Mesh(row=2), "stationary", NORM | ROTARY | GATE, marks=pytest.mark.slow),
    pytest.param("mistral", Mesh(col=2), "sequence", DROPOUT | ROTARY | GATE, marks=pytest.mark.slow),
    pytest.param("gemma2", Mesh(col=2), "stationary", NORM | ROTARY | GATE | CAP, marks=pytest.mark.slow),
    pytest.param("gpt", Mesh(row=2, col=2), "summa", NORM | DROPOUT, marks=pytest.mark.slow),
    pytest.param("mistral", Mesh(col=2, pipe=2), "stationary", NORM | DROPOUT | ROTARY | GATE, marks=pytest.mark.slow),
    pytest.param("qwen3", Mesh(row=2, col=2), "stationary", NORM | ROTARY | GATE, marks=pytest.mark.slow)])
def test_gradients_are_plain_pytorchs(kind, mesh, scheme, expected, chains):
    """Recomputation included. Norms of sharded features have chains; for full features torch's norm is already one
    kernel."""
    options = dict(scheme=scheme, compile=True, memory=Memory(recompute=1), run_seconds=400.0)
    if kind == "gpt":
        assert_parity(tiny_gpt, token_batches(mesh, count=2), mesh, **options)
    else:
        assert_as_one_process(kind, mesh, **options)
    assert chains == expected


class Chains(Fused):
    """Calls chains uncompiled, and notes when one runs."""

    def __init__(self):
        super().__init__(False)
        self.compiles, self.inside = True, False

    def __call__(self, function, *args):
        self.inside = True
        try:
            return function(*args)
        finally:
            self.inside = False


class Elementwise(TorchDispatchMode):
    """Counts elementwise operations on activations, such as [B, S, F], that belong to no chain."""

    def __init__(self, chains):
        super().__init__()
        self.chains, self.found = chains, Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if torch.Tag.pointwise in func.tags and not getattr(self.chains, "inside", False) and result.dim() > 2:
            self.found[func.overloadpacket.__name__] += 1
        return result


SIZES = dict(hidden=48, heads=12, vocab=61, sequence=8, dropout=0.1)
BLOCKS = {
    "gpt attention": lambda: gpt.Attention(Transformer(**SIZES), torch.float64),
    "gpt MLP": lambda: gpt.MLP(Transformer(**SIZES), torch.float64),
    "bert MLP": lambda: bert.MLP(Transformer(**SIZES), torch.float64),
    "llama attention": lambda: make("mistral", window=None).blocks["layer0.attention"](),
    "llama MLP": lambda: make("mistral").blocks["layer0.mlp"](),
    "gemma MLP": lambda: make("gemma2", dropout=0.1).blocks["layer0.mlp"](),
}


def elementwise(block, scheme, calls):
    """(forward, backward): operations on activations outside of chains."""
    mesh = meta_mesh(Mesh(row=2, col=2) if scheme == "stationary" else Mesh(col=2), SCHEMES[scheme], "cpu")
    block = split_layers(block, mesh, "block")
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter)
    width = next(iter(block.modules())).norm.weight.numel()
    x = random(1, 8 // (mesh.num_cols if scheme == "sequence" else 1), width).requires_grad_()
    state = {"hidden": x, "mask": torch.ones(1, 8, dtype=torch.bool)} if isinstance(block, bert.MLP) else x
    with keyed_random.scope(SEED, 1, samples_of(1), "block"), use_calls(calls), Elementwise(calls) as forward:
        y = block(state)
    y = y["hidden"] if isinstance(y, dict) else y
    with Elementwise(calls) as backward:
        y.backward(torch.ones_like(y))
    return dict(forward.found), dict(backward.found)


SUMMED = ("stationary", "sequence", "megatron")
# Attention's copies for products are not arithmetic. Full RMS norms are one kernel on CUDA, but not here.
@pytest.mark.parametrize(("kind", "schemes", "left", "left_backward"), [
    ("gpt attention", SUMMED, {}, {}), ("gpt MLP", SUMMED, {"gelu": 1}, {}), ("bert MLP", SUMMED, {"gelu": 1}, {}),
    ("llama attention", ("stationary",), {"clone": 1}, {"clone": 2}), ("llama MLP", ("stationary",), {}, {}),
    ("gemma MLP", ("stationary",), {}, {})])
def test_what_is_left_uncompiled(kind, schemes, left, left_backward):
    """Single operations between products or collectives: the bias that is added after a sum over columns, before it is
    rounded; GELU; and in the backward the sum of both gradients of the residual stream."""
    for scheme in schemes:
        uncompiled = elementwise(BLOCKS[kind](), scheme, Fused(False))
        forward, backward = elementwise(BLOCKS[kind](), scheme, Chains())
        forward.pop("add", None)  # the bias, which is an activation of several dims only in some schemes
        assert forward == left and backward == left_backward | {"add": 1}
        assert sum(uncompiled[0].values()) > 15 + sum(forward.values())


def chain(x):
    """Reads a number of its input, so it cannot be a single graph."""
    return x * (2.0 if float(x.sum()) > -1e9 else 1.0)


def test_a_chain_that_cannot_be_compiled():
    torch._dynamo.reset()
    x = torch.ones(3)
    with raises("operations-not-compilable"):
        Fused(True)(chain, x)
    calls = Fused("auto")
    with pytest.warns(UserWarning, match="chain runs uncompiled"):
        assert torch.equal(calls(chain, x), 2 * x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calls(chain, x)


def test_nothing_is_compiled_for_a_row_without_tokens(chains):
    assert torch.equal(Fused(True)(torch.neg, torch.ones(0, 3)), torch.ones(0, 3)) and not chains
