"""The family llama on every mesh: raw gradients, losses and norms are those of plain PyTorch, in fp64 to 1e-10."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from ranvier.config.run import Memory, Pipeline, TensorParallel, Transformer
from ranvier.mesh import Mesh
from ranvier.models.llama import llama
from tests.covering import without
from tests.errors import raises
from tests.pipeline.parity import frozen
from tests.tensor.split_parity import assert_parity, assert_predictions, legal, on_mesh, token_batches

SIZES = dict(family="llama", hidden=36, heads=12, kv_heads=4, intermediate=48, vocab=61, sequence=8)
KINDS = {
    "llama": dict(kv_heads=2, rope_scaling="llama3", rope_factor=4.0, rope_positions=4, head_dim=4),
    "mistral": dict(kv_heads=6, window=3, head_dim=6, dropout=0.1),
    "qwen3": dict(kv_heads=4, qk_norm="head", head_dim=4, tied=True, bias="qkv"),
    "olmo2": dict(kv_heads=12, qk_norm="all", norms="after", head_dim=2, rope_scaling="yarn", rope_factor=4.0,
                  rope_positions=4),
    "gemma2": dict(kv_heads=6, norms="both", norm_offset=1, activation="gelu-tanh", embedding_scale="sqrt-hidden",
                   tied=True, window=3, full_every=2, attention_softcap=5.0, logit_softcap=3.0,
                   query_pre_attn_scalar=9.0, head_dim=4),
    "gemma3": dict(kv_heads=6, norms="both", norm_offset=1, qk_norm="head", activation="gelu-tanh", tied=True,
                   embedding_scale="sqrt-hidden", window=3, full_every=2, window_rope_base=77.0,
                   rope_scaling="linear", rope_factor=8.0, head_dim=4),
    "olmo3": dict(kv_heads=12, qk_norm="all", norms="after", window=3, full_every=2, window_rope_base=77.0, head_dim=2),
    "granite": dict(kv_heads=4, head_dim=4, tied=True, embedding_scale=12.0, residual_multiplier=0.22,
                    logits_scaling=7.0, query_pre_attn_scalar=9.0),
    "smollm3": dict(kv_heads=4, head_dim=4, nope_layers=(0,), window=3, full_layers=(1,)),
    "biased": dict(kv_heads=1, bias="all", activation="gelu", head_dim=2, rope_scaling="linear", rope_factor=2.0),
}


def make(kind, **changed):
    """A tiny model in fp64 that every mesh of this folder can split."""
    return llama(Transformer(**SIZES | dict(num_layers=1) | KINDS[kind] | changed), dtype=torch.float64)


def assert_as_one_process(kind, mesh, *, count=2, change=lambda model: model, **options):
    layers = 1 if mesh.pipe == 1 else 2
    return assert_parity(lambda: change(make(kind, num_layers=layers)), token_batches(mesh, count=count, per_row=2),
                         mesh, **options)


@pytest.mark.parametrize(("rows", "cols", "scheme", "pipe", "data", "kind"), without([
    (2, 4, "summa", 1, 1, "gemma2"), (1, 2, "sequence", 2, 2, "mistral"), (1, 4, "sequence", 1, 1, "biased"),
    (2, 2, "summa", 1, 1, "granite"), (1, 2, "sequence", 1, 1, "granite"), (2, 2, "stationary", 1, 1, "granite")], [
    (1, 2, "stationary", 1, 1, "qwen3"), (2, 1, "stationary", 2, 1, "biased"), (2, 2, "stationary", 1, 1, "gemma3"),
    (1, 4, "stationary", 1, 1, "llama"),  # two columns share each head of keys
    (1, 4, "megatron", 1, 1, "mistral"),  # columns have uneven numbers of heads of keys
    (2, 2, "summa", 1, 1, "olmo3"), (2, 4, "summa", 1, 1, "gemma2"),
    (1, 2, "sequence", 2, 2, "mistral"), (1, 4, "sequence", 1, 1, "biased"), (1, 1, "stationary", 3, 2, "gemma2"),
    (1, 2, "megatron", 2, 1, "granite"), (2, 2, "summa", 1, 1, "granite"), (1, 2, "sequence", 1, 1, "granite"),
    (2, 2, "stationary", 1, 1, "granite"), (1, 2, "stationary", 2, 1, "smollm3")]))
def test_on_meshes(rows, cols, scheme, pipe, data, kind):
    assert_as_one_process(kind, Mesh(row=rows, col=cols, pipe=pipe, data=data), scheme=scheme)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "cols", "scheme"), [one for one in legal() if one != (1, 3, "sequence")])
def test_on_all_tensor_meshes(rows, cols, scheme, kind):
    assert_as_one_process(kind, Mesh(row=rows, col=cols), scheme=scheme, count=3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("mesh", "scheme"), [
    (Mesh(data=2, pipe=2, row=2, col=2), "stationary"), (Mesh(pipe=2, row=2, col=2), "summa"),
    (Mesh(data=2, pipe=2, col=2), "sequence"), (Mesh(pipe=3, col=2), "megatron"), (Mesh(data=2, pipe=3), "stationary"),
    (Mesh(data=8), "stationary"), (Mesh(pipe=5), "stationary"), (Mesh(pipe=2, col=4), "stationary")], ids=str)
def test_on_all_axes(mesh, scheme, kind):
    assert_as_one_process(kind, mesh, scheme=scheme)
    assert_as_one_process(kind, mesh, scheme=scheme, count=1)


@pytest.mark.parametrize(("rows", "cols", "scheme", "kind", "options"), [
    pytest.param(2, 2, "stationary", "qwen3", dict(memory=Memory(recompute=1)), marks=pytest.mark.slow),
    pytest.param(1, 4, "megatron", "llama", dict(memory=Memory(recompute=1)), marks=pytest.mark.slow),
    pytest.param(2, 2, "stationary", "olmo2", dict(memory=Memory(recompute="selective")), marks=pytest.mark.slow),
    (1, 2, "sequence", "mistral", dict(memory=Memory(recompute="selective"))),
    pytest.param(1, 4, "megatron", "llama", dict(memory=Memory(recompute="selective")), marks=pytest.mark.slow),
    pytest.param(2, 2, "summa", "biased", dict(memory=Memory(recompute="selective")), marks=pytest.mark.slow),
    pytest.param(1, 4, "stationary", "mistral", dict(pipeline=Pipeline(defer_bytes=1 << 40)), marks=pytest.mark.slow),
    pytest.param(2, 2, "summa", "biased", dict(pipeline=Pipeline(defer_bytes=1 << 40)), marks=pytest.mark.slow),
    (1, 1, "stationary", "gemma2", dict(memory=Memory(recompute=1), pipeline=Pipeline(defer_bytes=1 << 40))),
    (2, 2, "stationary", "olmo2", dict(settings=TensorParallel(keep_weights=True))),
])
def test_recomputed_deferred_and_kept(rows, cols, scheme, kind, options):
    assert_as_one_process(kind, Mesh(pipe=2, row=rows, col=cols), scheme=scheme, **options)


@pytest.mark.parametrize(("cols", "kind"), [(1, "gemma2"), (4, "llama")])
def test_one_microbatch(cols, kind):
    assert_as_one_process(kind, Mesh(col=cols), count=1)


@pytest.mark.parametrize(("mesh", "scheme", "kind"), [
    pytest.param(Mesh(pipe=2, col=4), "stationary", "llama", marks=pytest.mark.slow),
    (Mesh(row=2, col=2), "summa", "gemma2")], ids=str)
def test_a_frozen_prefix(mesh, scheme, kind):
    change = partial(frozen, is_frozen=lambda name: name.startswith(("embedding.", "layer0.")))
    if kind == "gemma2":  # its head is tied to the embedding
        change = partial(frozen, is_frozen=lambda name: name.startswith("layer0.attention.qkv.key"))
    outcome = assert_as_one_process(kind, mesh, scheme=scheme, change=change)
    assert not any(name.startswith("layer0.attention.qkv.key") for name in outcome.gradients) and outcome.gradients


@pytest.mark.parametrize(("rows", "cols", "scheme", "kind"), [
    pytest.param(2, 2, "stationary", "gemma2", marks=pytest.mark.slow), (1, 4, "sequence", "llama")])
def test_predictions_are_whole(rows, cols, scheme, kind):
    mesh = Mesh(pipe=2, row=rows, col=cols)
    batches = token_batches(mesh, count=2, per_row=2)
    assert_predictions(partial(make, kind, num_layers=2), batches, mesh, scheme)


@pytest.mark.parametrize(("mesh", "kind", "error"), [
    (Mesh(col=8), "llama", ("layer-not-divisible", 8, 12)),
    (Mesh(col=3), "olmo2", ("layer-not-divisible", 3, 4))])
def test_what_cannot_be_cut_is_named(mesh, kind, error):
    with raises(*error):
        on_mesh(partial(make, kind, hidden=24, **(dict(kv_heads=4) if kind.startswith("olmo") else {})), mesh,
                lambda engine: None)
