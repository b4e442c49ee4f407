"""Compiled blocks with frozen weights in 8 and 4 bits: gradients are those of plain PyTorch with the same values."""

import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch

from ranvier.config.run import Lora, Memory, Transformer
from ranvier.mesh import Mesh
from ranvier.models.llama import llama
from ranvier.tensor import compiled, quantized_weight
from ranvier.testing.reference import relative_error
from tests.errors import raises
from tests.lora.test_lora_gradients import adapted
from tests.tensor.split_parity import assert_parity, gradients_of, on_mesh, share, token_batches

SIZES = dict(family="llama", num_layers=1, hidden=64, heads=2, kv_heads=1, head_dim=32, intermediate=64, vocab=61,
             sequence=8)
LORA = Lora(rank=3, alpha=5.0, targets=("attention.*", "mlp.*"), dropout=0.1, base_format="int8")


@pytest.fixture(autouse=True)
def traced(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*runs uncompiled.*")
        yield


def make(lora):
    return adapted(llama(Transformer(**SIZES), dtype=torch.float64), lora)


@pytest.mark.slow
@pytest.mark.parametrize(("changed", "options"), [
    (dict(targets=("query", "fc2")), {}), ({}, {}), (dict(method="dora"), {}), ({}, dict(memory=Memory(recompute=1)))],
    ids=str)
def test_gradients_are_plain_pytorchs(changed, options):
    """Adapters are on a layer that shares its input with others, on a layer that does not, and on all layers."""
    mesh = Mesh()
    assert_parity(partial(make, replace(LORA, **changed)), token_batches(mesh, count=2, per_row=2), mesh,
                  compile=True, run_seconds=300.0, **options)


class Bitsandbytes:
    """The functions of bitsandbytes.functional that nf4 needs, with torch's operations.

    traceable: whether torch.compile can follow `dequantize_4bit`.
    """

    def __init__(self, traceable):
        self.traceable = traceable

    class QuantState:
        def __init__(self, absmax, shape=None, code=None, blocksize=64, quant_type="nf4", dtype=torch.float32):
            self.absmax, self.shape, self.code, self.dtype = absmax, shape, code, dtype

    def get_4bit_type(self, kind, device=None):
        return torch.linspace(-1.0, 1.0, 16, device=device)

    def quantize_4bit(self, blocks, blocksize, quant_type):
        absmax = blocks.abs().amax(1, keepdim=True).float()
        codes = (blocks.float() / absmax.clamp_min(1e-9)).unsqueeze(-1).sub(self.get_4bit_type("nf4")).abs().argmin(-1)
        packed = (codes[:, 0::2] << 4 | codes[:, 1::2]).to(torch.uint8)
        return packed.reshape(-1, 1), self.QuantState(absmax.flatten())

    def dequantize_4bit(self, codes, state):
        if not self.traceable:
            codes = torch.tensor(codes.tolist(), dtype=torch.uint8)
        halves = torch.stack([codes >> 4, codes & 15], -1).reshape(-1, 64).long()
        return (state.code[halves] * state.absmax.unsqueeze(1)).to(state.dtype).view(state.shape)


def nf4_gradients(how):
    """Gradients of a batch in fp32. how: whether blocks are compiled."""
    make_one = partial(adapted, llama(Transformer(**SIZES), dtype=torch.float32), replace(LORA, base_format="nf4"))
    return on_mesh(make_one, Mesh(), lambda engine: (engine.forward_backward(share(engine, token_batches(
        Mesh(), count=1, per_row=2))), gradients_of(engine))[1], dtype=torch.float32, compile=how, run_seconds=300.0)[0]


@pytest.mark.slow
def test_nf4_is_compiled_where_the_library_can_be(monkeypatch):
    monkeypatch.setattr(quantized_weight, "_bitsandbytes", partial(Bitsandbytes, True))
    found, expected = nf4_gradients(True), nf4_gradients(False)
    assert found.keys() == expected.keys()
    assert max(relative_error(found[name], expected[name]) for name in expected) < 1e-5


@pytest.mark.slow
def test_nf4_of_a_library_that_cannot_be_compiled_is_told(monkeypatch):
    """On CUDA `auto`, which would compile, warns; `true` is refused."""
    monkeypatch.setattr(quantized_weight, "_bitsandbytes", partial(Bitsandbytes, False))
    with raises("block-not-compilable", "layer0.attention"):
        nf4_gradients(True)
    expected = nf4_gradients(False)
    monkeypatch.setattr("ranvier.pipeline.parts.compiles", lambda how, device: "auto")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = nf4_gradients("auto")
    assert any("block layer0.attention runs uncompiled" in str(one.message) for one in caught)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
