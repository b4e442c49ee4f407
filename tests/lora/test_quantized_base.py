"""Frozen weights in 8 and 4 bits under adapters: the same values on every mesh, the gradients of plain PyTorch with
these values, and fewer bytes."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from torch import nn
from torch.nn import functional

from ranvier.config.resolve import ResolvedRun
from ranvier.config.run import Batch, Lora, Memory, Optim, Transformer
from ranvier.mesh import Mesh
from ranvier.models.llama import llama
from ranvier.models.lora import with_adapters
from ranvier.planner.count import laid_out
from ranvier.tensor.quantized_weight import BLOCK, QuantizedWeight, dense
from tests.covering import covering, quick
from tests.elastic.test_transition import assert_same_runs, trained
from tests.errors import raises
from tests.lora.test_lora_gradients import adapted, users_blocks
from tests.tensor.split_parity import assert_parity, on_mesh, token_batches

pytestmark = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs the package bitsandbytes")
SIZES = dict(family="llama", num_layers=1, hidden=128, heads=4, kv_heads=2, head_dim=32, intermediate=256, vocab=61,
             sequence=8, bias="all")
LORA = Lora(rank=3, alpha=5.0, targets=("attention.*", "mlp.*"), dropout=0.1, base_format="int8")


def make(lora, dtype=torch.float64):
    return adapted(llama(Transformer(**SIZES), dtype=dtype), lora)


def weight_of(weight_format, dtype=torch.float32, shape=(96, 256)):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    values[3, BLOCK:2 * BLOCK] = 0
    return values, QuantizedWeight.from_values(values, weight_format)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("weight_format", "largest"), [("int8", 0.6 / 127), ("nf4", 0.16)])
def test_its_values_are_near_and_become_the_same_codes_again(weight_format, largest, dtype):
    values, weight = weight_of(weight_format, dtype)
    errors = (weight.values() - values).float().view(-1, BLOCK)
    largest += torch.finfo(dtype).eps
    assert (errors.abs().amax(1) <= largest * values.float().view(-1, BLOCK).abs().amax(1)).all()
    again = QuantizedWeight.from_values(weight.values(), weight_format)
    assert torch.equal(again.codes, weight.codes) and torch.equal(again.scales, weight.scales)


def test_nf4_is_bitsandbytes():
    import bitsandbytes

    values, weight = weight_of("nf4")
    layer = bitsandbytes.nn.Linear4bit(256, 96, bias=False, quant_type="nf4", compute_dtype=torch.float32,
                                       compress_statistics=False)
    layer.weight = bitsandbytes.nn.Params4bit(values, requires_grad=False, quant_type="nf4", compress_statistics=False)
    layer.to("cpu")
    x = torch.randn(5, 256)
    assert torch.allclose(functional.linear(x, weight), layer(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("weight_format", ["int8", "nf4"])
def test_it_computes_as_its_values_and_keeps_none(weight_format):
    _, weight = weight_of(weight_format)
    parameter, values = nn.Parameter(weight, requires_grad=False), weight.values()
    found = []
    for each in (parameter, values):
        x, bias = torch.ones(2, 3, 256, requires_grad=True), torch.zeros(96, requires_grad=True)
        y = functional.linear(x, each, bias)
        assert each is values or not y.grad_fn.saved_tensors
        y.square().sum().backward()
        found.append((y.detach(), x.grad, bias.grad))
    assert all(map(torch.equal, *found))
    assert torch.equal(parameter + 1, values + 1)


@pytest.mark.parametrize("weight_format", ["int8", "nf4"])
def test_slices_are_views_and_copies_are_quantized(weight_format):
    _, weight = weight_of(weight_format)
    parameter, new = nn.Parameter(weight, requires_grad=False), torch.randn(32, 2 * BLOCK)
    before = parameter.values()
    assert torch.equal(dense(parameter.detach()[16:48, 10:20]), before[16:48, 10:20])
    parameter.detach()[16:48, BLOCK:3 * BLOCK].copy_(new)
    expected = before.clone()
    expected[16:48, BLOCK:3 * BLOCK] = QuantizedWeight.from_values(new, weight_format).values()
    assert torch.equal(parameter.values(), expected)
    for other in (copy.deepcopy(parameter), pickle.loads(pickle.dumps(parameter))):
        assert isinstance(other, nn.Parameter) and torch.equal(other.values(), expected)
        other.data.copy_(before)
    assert torch.equal(parameter.values(), expected)
    with raises("quantized-written-in-place"):
        parameter.data.mul_(2)


@pytest.mark.parametrize(("mesh", "scheme", "options", "method"), quick(4, covering([
    (Mesh(), "stationary", {}), (Mesh(pipe=2, data=2), "stationary", dict(memory=Memory(recompute=1))),
    (Mesh(row=2), "summa", {}), (Mesh(row=2, col=2), "stationary", {}), (Mesh(col=2, data=2), "sequence", {}),
    (Mesh(data=2, row=2), "stationary", dict(optim=Optim(shard=True, bucket_size=40)))], ["lora", "dora"])))
def test_gradients_are_those_of_plain_torch_with_its_values(mesh, scheme, options, method):
    assert_parity(partial(make, replace(LORA, method=method)), token_batches(mesh, count=2, per_row=2), mesh,
                  scheme=scheme, **options)


@pytest.mark.parametrize("weight_format", ["int8", "nf4"])
def test_values_are_the_same_on_every_mesh(weight_format):
    lora = replace(LORA, base_format=weight_format)
    name = "layer0.mlp.fc2.weight"

    def values(engine):
        parameter = engine.named_parameters()[name]
        assert isinstance(parameter, QuantizedWeight)
        return parameter.values()

    alone, = on_mesh(partial(make, lora, torch.bfloat16), Mesh(), values, dtype=torch.bfloat16)
    upper, lower = on_mesh(partial(make, lora, torch.bfloat16), Mesh(row=2), values, dtype=torch.bfloat16)
    assert torch.equal(alone, torch.cat([upper, lower]))
    left, right = on_mesh(partial(make, lora, torch.bfloat16), Mesh(col=2), values, dtype=torch.bfloat16)
    assert torch.equal(alone, torch.cat([left, right], dim=1))


def test_a_transition_moves_them():
    found, moved, _ = trained([Mesh(pipe=2), Mesh(data=2)], steps=1, size=2, model=make(LORA))
    assert all(moved)
    assert_same_runs(found, trained([Mesh()], steps=2, size=1, model=make(LORA))[0])


@pytest.mark.parametrize(("weight_format", "mesh"), quick(2, covering(
    ["int8", "nf4"], [Mesh(), Mesh(row=2, col=2), Mesh(pipe=2)])))
def test_memory_is_predicted_to_the_byte(weight_format, mesh):
    run = ResolvedRun(model=Transformer(**SIZES), batch=Batch(global_size=4, microbatch_size=2), mesh=mesh,
                      precision="bf16", lora=replace(LORA, base_format=weight_format), optim=Optim(bucket_size=100))
    _, predicted = laid_out(run)
    _, full = laid_out(replace(run, lora=replace(run.lora, base_format="precision")))
    measured = on_mesh(partial(make, run.lora, torch.bfloat16), mesh, lambda engine: engine.memory()["device"],
                       dtype=torch.bfloat16, optim=run.optim)
    for entry, before in zip(predicted, full, strict=True):
        of_stage = measured[entry.pipeline_rank * mesh.stage_size]
        assert entry.device["parameters"] == of_stage["parameters"] < 0.75 * before.device["parameters"]


def test_a_state_dict_and_new_values():
    def work(engine):
        before = engine.named_parameters()["layer0.mlp.fc2.weight"].values()
        state = copy.deepcopy(engine.state_dict())
        with torch.no_grad():
            engine.named_parameters()["layer0.mlp.fc2.weight"].zero_()
        return before, state

    with raises("quantized-written-in-place"):
        on_mesh(partial(make, LORA), Mesh(), work)

    def resumed(engine):
        parameter = engine.named_parameters()["layer0.mlp.fc2.weight"]
        state, before = copy.deepcopy(engine.state_dict()), parameter.values()
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape))
        assert not torch.equal(parameter.values(), before)
        engine.load_state_dict(state)
        return torch.equal(parameter.values(), before)

    assert on_mesh(partial(make, LORA), Mesh(), resumed) == [True]


def test_refusals(monkeypatch):
    with raises("quantized-block-split", 64):
        on_mesh(partial(make, LORA), Mesh(row=4), lambda engine: None)
    with raises("quantization-without-layer"):
        with_adapters(users_blocks(), replace(LORA, targets=("fc1",)))
    with raises("quantized-fp64"):
        on_mesh(partial(make, replace(LORA, base_format="nf4")), Mesh(), lambda engine: None)
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes.functional", None)
    with raises("bitsandbytes-missing"):
        make(replace(LORA, base_format="nf4"))
