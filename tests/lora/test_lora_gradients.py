"""Only adapters have gradients, which on every mesh are those of plain PyTorch, in fp64 to 1e-10."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

import ranvier
from ranvier.block import Initial
from ranvier.config.run import Lora, Memory, Optim, Pipeline, Transformer
from ranvier.errors import RanvierError
from ranvier.mesh import Mesh
from ranvier.models.llama import llama
from ranvier.models.lora import is_adapter, with_adapters
from ranvier.pipeline.engine import Engine
from ranvier.pipeline.microbatch import Microbatch
from ranvier.testing.ranks import run_ranks
from ranvier.testing.reference import Reference
from tests.errors import raises
from tests.tensor import test_families_gradients as families
from tests.tensor.split_parity import (
    SEED,
    assert_close,
    assert_parity,
    gradients_on,
    legal,
    on_mesh,
    tiny_gpt,
    token_batches,
)

SIZES = dict(family="llama", hidden=36, heads=12, kv_heads=4, head_dim=4, intermediate=48, vocab=61, sequence=8,
             bias="all")
LORA = Lora(rank=3, alpha=5.0, targets=("attention.*", "mlp.*"), dropout=0.1)
DORA = replace(LORA, method="dora")
SOME = replace(DORA, targets=("query", "value", "fc2"))


def adapted(model, lora=LORA):
    """`model` with adapters that all have an effect from the start."""
    model = with_adapters(model, lora)

    def initial(name):
        return Initial("normal", 0.3) if is_adapter(name) else model.initial(name)

    return replace(model, initial=initial)


def make(family, lora, **changed):
    if family == "gpt":
        return adapted(tiny_gpt(tied=True, **changed), lora)
    if family == "llama":
        return adapted(llama(Transformer(**SIZES | changed), dtype=torch.float64), lora)
    return adapted(families.make(family, **changed), replace(lora, train_head=True))


def batches(family, mesh):
    if family in ("gpt", "llama"):
        return token_batches(mesh, count=2, per_row=2)
    return families.batches_of(family, mesh)


def assert_as_one_process(family, mesh, lora=LORA, **options):
    outcome = assert_parity(partial(make, family, lora, num_layers=1 if mesh.pipe == 1 else 2), batches(family, mesh),
                            mesh, least=1e-3 if family == "span" else 0.0, **options)
    head = () if family in ("gpt", "llama") else ("head.",)
    assert all(is_adapter(name) or name.startswith(head) for name in outcome.gradients)
    assert all(float(gradient.norm()) > 0 for gradient in outcome.gradients.values())


@pytest.mark.parametrize(("rows", "cols", "scheme", "pipe", "data", "family", "lora"), [
    (1, 1, "stationary", 2, 2, "gpt", LORA),
    pytest.param(2, 2, "stationary", 1, 1, "gpt", DORA, marks=pytest.mark.slow),
    (2, 3, "stationary", 1, 1, "llama", DORA), (2, 2, "summa", 1, 1, "llama", LORA),
    (1, 3, "megatron", 1, 1, "llama", DORA), (1, 2, "sequence", 1, 2, "gpt", LORA),
    pytest.param(1, 4, "sequence", 1, 1, "llama", SOME, marks=pytest.mark.slow),
    (1, 2, "stationary", 2, 1, "classes", LORA),
    pytest.param(2, 2, "stationary", 1, 1, "images", SOME, marks=pytest.mark.slow)])
def test_on_meshes(rows, cols, scheme, pipe, data, family, lora):
    assert_as_one_process(family, Mesh(row=rows, col=cols, pipe=pipe, data=data), lora, scheme=scheme)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [LORA, DORA])
@pytest.mark.parametrize("family", ["gpt", "llama", "classes", "images"])
@pytest.mark.parametrize(("rows", "cols", "scheme"), legal([(1, 2), (2, 1), (2, 2), (1, 4), (2, 3)]))
def test_on_all_tensor_meshes(rows, cols, scheme, family, lora):
    if (scheme, family) == ("sequence", "images") and 10 % cols:
        pytest.skip("columns do not divide the tokens of an image")
    assert_as_one_process(family, Mesh(row=rows, col=cols), lora, scheme=scheme)


@pytest.mark.parametrize(("mesh", "scheme", "lora", "options"), [
    (Mesh(row=2, col=2), "stationary", DORA, dict(memory=Memory(recompute=1))),
    pytest.param(Mesh(pipe=2, col=2), "sequence", LORA, dict(memory=Memory(recompute=1)), marks=pytest.mark.slow),
    (Mesh(pipe=2, col=2), "summa", LORA, dict(pipeline=Pipeline(defer_bytes=1 << 40))),
    (Mesh(data=2, row=2), "stationary", LORA, dict(optim=Optim(shard=True, bucket_size=40))),
    (Mesh(pipe=2), "stationary", DORA, dict(optim=Optim(offload="host"))),
    (Mesh(data=2, pipe=2), "stationary", LORA, dict(frozen=1))])
def test_with_other_features(mesh, scheme, lora, options):
    if "frozen" in options:  # adapters of frozen layers do not train either
        outcome = gradients_on(partial(make, "llama", lora, num_layers=2), batches("llama", mesh), mesh, **options)
        assert {name.split(".")[0] for name in outcome.gradients} == {"layer1"}
    else:
        assert_as_one_process("llama", mesh, lora, scheme=scheme, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_half_precision(dtype):
    mesh = Mesh(col=2)
    tokens = batches("llama", mesh)
    reference = Reference(make("llama", DORA), seed=SEED, dtype=torch.float64)
    reference.forward_backward(tokens[0])
    outcome = gradients_on(partial(make, "llama", DORA), tokens, mesh, dtype=dtype, optim=Optim())
    for name, gradient in reference.gradients().items():
        assert (outcome.gradients[name].double() - gradient).norm() < 0.2 * gradient.norm(), name


class Sublayer(nn.Module):
    """A user's block with torch's own layers."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 10, dtype=torch.float64), nn.Linear(10, 6, dtype=torch.float64)

    def forward(self, x):
        return x + self.fc2(functional.gelu(self.fc1(x)))


def users_blocks(*, seed=0):
    """Existing modules with their own initial weights."""
    torch.manual_seed(seed)
    blocks = [nn.Linear(4, 6, dtype=torch.float64), Sublayer(), Sublayer(), nn.Linear(6, 3, dtype=torch.float64)]
    return with_adapters(blocks, replace(LORA, targets=("fc1", "fc2", "0"), train_head=True), seed=5,
                         loss=lambda y, target: (functional.mse_loss(y, target, reduction="sum"), y.numel()))


def test_users_blocks():
    models = [users_blocks() for _ in range(4)]  # built here, since ranks are threads and torch has one generator
    reference_model, generator = users_blocks(), torch.Generator().manual_seed(0)
    batch = [[Microbatch(torch.randn(3, 4, dtype=torch.float64, generator=generator),
                         torch.ones(3, 3, dtype=torch.float64), torch.arange(3) + 6 * replica + 3 * number)
              for number in range(2)] for replica in range(2)]
    mesh, made = Mesh(data=2, pipe=2), iter([reference_model, *models])
    outcome = assert_parity(lambda: next(made), batch, mesh)
    assert set(outcome.gradients) == {f"{layer}.lora.{kind}" for layer in ("0", "1.fc1", "1.fc2", "2.fc1", "2.fc2")
                                      for kind in "AB"} | {"3.weight", "3.bias"}


def test_initial_values_are_pefts_and_the_same_on_every_mesh():
    lora = Lora(rank=4, method="dora")

    def values(mesh):
        return on_mesh(lambda: with_adapters(tiny_gpt(), lora), mesh, lambda engine: {
            name: value.detach().clone() for name, value in engine.named_parameters().items() if is_adapter(name)})

    alone, = values(Mesh())
    a = alone["layer0.attention.qkv.lora.A"]
    assert set(alone) == {f"layer0.attention.qkv.lora.{kind}" for kind in ("A", "B", "magnitude_change")}
    assert not any(value.any() for name, value in alone.items() if not name.endswith(".A"))
    bound = 36 ** -0.5
    assert a.shape == (4, 36) and 0.9 * bound < a.abs().max() < bound
    assert abs(float(a.var() * 3 / bound ** 2) - 1) < 0.3
    for rank, found in enumerate(values(Mesh(row=2, col=2))):
        part = found["layer0.attention.qkv.lora.A"]
        assert torch.equal(part, a[:, 18 * (rank % 2):18 * (rank % 2 + 1)])


@pytest.mark.parametrize("optim", [Optim(), Optim(update_in_backward=True)])
def test_frozen_parameters_have_neither_gradients_nor_states(optim):
    def work(engine):
        trained = {name for name, parameter in engine.named_parameters().items() if parameter.requires_grad}
        assert engine.flat_optimizer is not None
        updated = {part.parameter for part in engine.flat_optimizer.slices()}
        frozen = {name: value.detach().clone() for name, value in engine.named_parameters().items()
                  if name not in trained}
        engine.train_batch([Microbatch(torch.zeros(2, 8, dtype=torch.int64), torch.ones(2, 8, dtype=torch.int64),
                                       torch.arange(2))])
        now = engine.named_parameters()
        assert all(torch.equal(now[name], value) and now[name].grad is None for name, value in frozen.items())
        return trained, updated

    (trained, updated), = on_mesh(partial(make, "gpt", LORA), Mesh(), work, optim=optim)
    assert trained == updated and trained and all(map(is_adapter, trained))


@pytest.mark.parametrize(("lora", "where", "text"), [
    (Lora(), "lora.rank", "must be at least 1"),
    (Lora(rank=2, targets=("querry",)), "lora.targets", "matches no linear layer"),
    (Lora(rank=2, targets=()), "lora.targets", "names no layer"),
    (Lora(rank=2, train_head=True), "parameter head.projection.weight", "is tied to")])
def test_refusals(lora, where, text):
    with pytest.raises(RanvierError) as refused:
        with_adapters(tiny_gpt(tied=True), lora)
    assert refused.value.where == where and text in refused.value.what


@pytest.mark.parametrize(("theirs", "ours"), [("k_proj", "key"), ("v_proj", "value"), ("gate_proj", "gate")])
def test_names_of_peft(theirs, ours):
    config = Transformer(family="llama", num_layers=1, hidden=8, heads=2, vocab=11, sequence=4)
    found, expected = ({*dict(with_adapters(llama(config), Lora(rank=1, targets=(name,))).build().named_parameters())}
                       for name in (theirs, ours))
    assert found == expected and any(f".{ours}.lora.A" in name for name in found)


def test_a_head_without_linear_layers_is_refused():
    with raises("head-without-linear"):
        with_adapters([nn.Linear(2, 2), nn.Tanh()], Lora(rank=1, targets=("0",), train_head=True),
                      loss=lambda y, target: (y, 1))


def test_a_model_of_transformers():
    transformers = pytest.importorskip("transformers")
    from ranvier.models.from_transformers import from_transformers

    def build():
        transformers.set_seed(3)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
            hidden_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=40,
            vocab_size=61, max_position_embeddings=12, attn_implementation="sdpa")).double()
        return with_adapters(from_transformers(model), replace(LORA, targets=("q_proj", "down_proj")), seed=1)

    made = iter([build() for _ in range(3)])  # since ranks are threads and torch has one generator
    mesh, reference = Mesh(pipe=2), Reference(next(made), seed=SEED, dtype=torch.float64)
    tokens = token_batches(mesh, count=2, per_row=2)
    reference.forward_backward(tokens[0])
    outcome = gradients_on(lambda: next(made), tokens, mesh)
    assert_close(outcome.gradients, reference.gradients(), tolerance=1e-6)  # transformers computes norms in fp32
    assert len(outcome.gradients) == 2 * 2 * 2 and all(map(is_adapter, outcome.gradients))


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_names_of_adapters_are_those_of_the_users_module(method):
    """The module's own state_dict has them once the engine has built the blocks."""
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2))

    models = [make(), make()]

    def rank(world):
        blocks = ranvier.blocks_of(models[world.rank], ["1", "2"])
        adapted = with_adapters(blocks, Lora(rank=2, alpha=2, targets=("1.*", "2"), method=method),
                                loss=lambda outputs, targets: (outputs.square().sum(), len(outputs)))
        engine = Engine(adapted, world, mesh=Mesh(pipe=2), optim=Optim())
        state = engine.full_state_dict()
        engine.close()
        return state

    state, _ = run_ranks(rank, 2)
    assert "1.0.lora.B" in state and ("2.lora.magnitude_change" in state) == (method == "dora")
    assert set(state) == {name for model in models for name in model.state_dict()}
