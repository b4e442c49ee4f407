"""The family llama against transformers: logits and raw gradients in fp64; its parameters, FLOPs and settings."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ranvier.block import initialise
from ranvier.checkpoint.hf.forms import form_of
from ranvier.checkpoint.hf.from_pretrained import with_model
from ranvier.checkpoint.hf.pretrained import Pretrained
from ranvier.config.run import Run, Transformer
from ranvier.models.llama import LLAMA, flops_per_sequence, head_dim, llama, problems
from ranvier.plan.block_costs import block_costs
from ranvier.tensor.layers import Rotary
from ranvier.testing.families import check_family
from ranvier.testing.memory import MemoryTracker
from tests.errors import raises
from tests.hf_peers import assert_gradients, blocks_of, forward, gradients_as_ours, peer, relative, saved

SIZES = dict(vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=6,
             num_key_value_heads=2, max_position_embeddings=32)
MODELS = {
    "llama2": ("LlamaForCausalLM", dict(num_key_value_heads=6, rms_norm_eps=1e-5)),
    "llama3": ("LlamaForCausalLM", dict(tie_word_embeddings=True, head_dim=8, rope_parameters=dict(
        rope_type="llama3", rope_theta=500.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=8))),
    "biased": ("LlamaForCausalLM", dict(attention_bias=True, mlp_bias=True, hidden_act="gelu", rope_parameters=dict(
        rope_type="linear", rope_theta=10000.0, factor=4.0))),
    "dynamic": ("LlamaForCausalLM", dict(
        max_position_embeddings=8, original_max_position_embeddings=4, rope_parameters=dict(
            rope_type="dynamic", rope_theta=10000.0, factor=2.0))),
    "mistral": ("MistralForCausalLM", dict(sliding_window=5)),
    "phi3": ("Phi3ForCausalLM", dict(sliding_window=5, pad_token_id=0, bos_token_id=1, eos_token_id=2)),
    "phi4": ("Phi3ForCausalLM", dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, rope_parameters=dict(
        rope_type="default", rope_theta=250000.0, partial_rotary_factor=1.0))),
    "qwen2": ("Qwen2ForCausalLM", dict(rope_parameters=dict(
        rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=8))),
    "qwen2-window": ("Qwen2ForCausalLM", dict(use_sliding_window=True, sliding_window=4, max_window_layers=0)),
    "qwen2-first": ("Qwen2ForCausalLM", dict(use_sliding_window=True, sliding_window=4, max_window_layers=2)),
    "qwen3": ("Qwen3ForCausalLM", dict(head_dim=6, tie_word_embeddings=True)),
    "qwen3-first": ("Qwen3ForCausalLM", dict(head_dim=6, use_sliding_window=True, sliding_window=4,
                                             max_window_layers=1)),
    "smollm3": ("SmolLM3ForCausalLM", dict(no_rope_layers=[1, 0, 1], pad_token_id=0, eos_token_id=1, bos_token_id=2)),
    "smollm3-window": ("SmolLM3ForCausalLM", dict(
        no_rope_layer_interval=2, use_sliding_window=True, sliding_window=4, pad_token_id=0, eos_token_id=1,
        bos_token_id=2)),
    "granite": ("GraniteForCausalLM", dict(embedding_multiplier=12.0, attention_multiplier=0.07, logits_scaling=7.0,
                                           residual_multiplier=0.22, tie_word_embeddings=True)),
    "olmo2": ("Olmo2ForCausalLM", dict(rope_parameters=dict(rope_theta=500.0, rope_type="default"))),
    "gemma": ("GemmaForCausalLM", dict(head_dim=6)),
    "gemma2": ("Gemma2ForCausalLM", dict(head_dim=6, sliding_window=5, query_pre_attn_scalar=9,
                                         attn_logit_softcapping=5.0, final_logit_softcapping=3.0)),
    "gemma3": ("Gemma3ForCausalLM", dict(head_dim=6, sliding_window=5, query_pre_attn_scalar=9, layer_types=[
        "sliding_attention", "sliding_attention", "full_attention"], rope_parameters=dict(
            full_attention=dict(rope_type="linear", rope_theta=5000.0, factor=8.0),
            sliding_attention=dict(rope_type="default", rope_theta=100.0)))),
    "olmo3": ("Olmo3ForCausalLM", dict(sliding_window=5, layer_types=[
        "sliding_attention", "full_attention", "sliding_attention"], rope_parameters=dict(
            full_attention=dict(rope_type="yarn", rope_theta=500.0, factor=4.0, original_max_position_embeddings=8),
            sliding_attention=dict(rope_type="default", rope_theta=500.0)))),
}


class _Wide(TorchFunctionMode):
    """Computes norms and angles in fp64, which transformers computes in fp32 whatever the model's format."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        if func is Tensor.float:
            func = Tensor.double
        if func is Tensor.to:
            args = tuple(torch.float64 if one is torch.float32 else one for one in args)
        return func(*args, **kwargs)


@contextmanager
def in_fp64():
    torch.set_default_dtype(torch.float64)
    try:
        with _Wide():
            yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Name -> (transformers' model, the folder that it is saved in), built once."""
    found = {}

    def model(name):
        if name not in found:
            kind, settings = MODELS[name]
            with in_fp64():
                theirs = peer(kind, dtype=torch.float64, **SIZES | settings)
            found[name] = theirs, saved(theirs, tmp_path_factory.mktemp(name))
        return found[name]

    return model


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_of_transformers(models, name):
    theirs, folder = models(name)
    theirs.zero_grad()
    # Tokens 0 and 1 are padding in Gemma and OLMo 2, whose embeddings get no gradient in transformers.
    ids = torch.randint(2, 61, (2, 17), generator=torch.Generator().manual_seed(3))
    with in_fp64():
        expected = theirs(ids[:, :-1]).logits
        torch.nn.functional.cross_entropy(expected.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").backward()
    pretrained = Pretrained(folder)
    model = llama(pretrained.config, dtype=torch.float64)
    blocks = blocks_of(model, pretrained)
    found = forward(blocks, ids[:, :-1])
    assert relative(found, expected) < 1e-10
    model.loss(found, ids[:, 1:])[0].backward()
    if pretrained.config.tied:
        ends = blocks["head"].projection.weight, blocks["embedding"].token.weight
        ends[1].grad += ends[0].grad
        ends[0].grad = None
        del blocks["head"].projection._parameters["weight"]
    assert_gradients(blocks, gradients_as_ours(theirs, folder.parent / f"{name}-gradients"))


def test_settings_are_read_back(models):
    """An exported model is read as the same model."""
    for name in MODELS:
        pretrained = Pretrained(models(name)[1])
        form = form_of(pretrained.config)
        again, _ = form.read(form.write(pretrained.config, "tokens"))
        wanted, found = (replace(one, max_positions=None, sequence=8, head_dim=head_dim(one))
                         for one in (pretrained.config, again))
        assert found == wanted


def test_a_run_takes_all_that_its_folder_says(models):
    for name in MODELS:
        pretrained = Pretrained(models(name)[1])
        run = with_model(Run(model=Transformer(family="llama", sequence=8)), pretrained)
        assert run.model == replace(pretrained.config, sequence=8), name


# ---------------------------------------------------------------------- counts

SMALL = dict(family="llama", num_layers=2, hidden=24, heads=6, kv_heads=2, intermediate=40, vocab=61, sequence=12)
VARIANTS = [{}, dict(kv_heads=6), dict(head_dim=8, tied=True, qk_norm="head"), dict(bias="all", qk_norm="all"),
            dict(norms="both", window=4, full_every=2), dict(norms="after", norm_offset=1)]


@pytest.mark.parametrize("changed", VARIANTS, ids=str)
def test_flops(changed):
    """The formula is three times torch's count of a forward; with recomputation, the layers count once more."""
    config = Transformer(**SMALL | changed)
    counts = {cost.name: cost.flops for cost in block_costs(llama(config), torch.zeros(1, 12, dtype=torch.int64))}
    assert flops_per_sequence(config) == 3 * sum(counts.values())
    layers = sum(count for name, count in counts.items() if name.startswith("layer"))
    assert flops_per_sequence(config, recomputed=True) == 3 * sum(counts.values()) + layers


@pytest.mark.parametrize(("changed", "head"), [
    (VARIANTS[2], "tokens"), (VARIANTS[4], "tokens"), (VARIANTS[4], "score")], ids=str)
def test_keeps_the_protocol(changed, head):
    check_family(LLAMA, Transformer(**SMALL | changed), head)


def test_counting_a_long_sequence_allocates_nothing():
    """Neither its activations nor its tables of angles."""
    class Largest(TorchDispatchMode):
        bytes = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **kwargs or {})
            self.bytes = max(self.bytes, *(one.untyped_storage().nbytes() for one in tree_leaves(result) if isinstance(
                one, Tensor) and not one.is_meta), 0)
            return result

    ids = torch.empty(1, 10**6 + 7, dtype=torch.int64, device="meta")
    with Largest() as largest:
        block_costs(llama(Transformer(**SMALL)), ids, ids)
    assert largest.bytes < 10**5


def test_starts_and_first_loss():
    """Projections into the residual stream start smaller, norms are one, and the first loss is that of guessing."""
    config = Transformer(**SMALL | dict(hidden=96, head_dim=16, bias="all", qk_norm="head"))
    model = llama(config)
    blocks = {name: build() for name, build in model.blocks.items()}
    for name, block in blocks.items():
        for inner, parameter in block.named_parameters():
            initialise(parameter, f"{name}.{inner}", model.initial(f"{name}.{inner}"), seed=1)
    layer = blocks["layer0.attention"]
    assert float(layer.qkv.query.weight.detach().std()) == pytest.approx(0.02, rel=0.1)
    assert float(layer.projection.weight.detach().std()) == pytest.approx(0.01, rel=0.1)
    assert bool((layer.norm.weight == 1).all()) and bool((layer.key_norm.weight == 1).all())
    assert not layer.qkv.key.bias.any()
    ids = torch.randint(61, (8, 13), generator=torch.Generator().manual_seed(0))
    loss, weight = model.loss(forward(blocks, ids[:, :-1]), ids[:, 1:])
    assert float(loss / weight) == pytest.approx(torch.log(torch.tensor(61.0)).item(), abs=0.2)


@pytest.mark.parametrize(("changed", "error"), [
    (dict(heads=5, kv_heads=None), ("heads-do-not-divide-hidden", 24, 5, 4)),
    (dict(heads=8, kv_heads=None), ("head-dim-odd", 4)),
    (dict(kv_heads=4), ("kv-heads-do-not-divide", 6, 4, 3)),
    (dict(rope_scaling="yarn"), ("rope-positions-missing",)),
    (dict(rope_limits=(4, 1)), ("rope-limits-order",)),
])
def test_settings_that_no_llama_can_have(changed, error):
    config = Transformer(**SMALL | changed)
    assert len(problems(config)) == 1
    with raises(*error):
        llama(config)


def test_a_rotation_keeps_positions_and_no_angles():
    """Angles at the positions of packed samples would be kept by each layer, twice, and no prediction has them."""
    rotary, positions = Rotary(width=16), torch.arange(8).repeat(2, 1)
    x = torch.randn(2, 4, 8, 16, generator=torch.Generator().manual_seed(0), requires_grad=True)
    plain = rotary(x)
    with MemoryTracker() as tracker:
        y = rotary(x, positions)
        assert tracker.live == {("device", "activations"): y.nbytes}
    assert torch.equal(y, plain)
    gradients = [torch.autograd.grad(end, x, torch.ones_like(end))[0] for end in (y, plain)]
    assert torch.equal(*gradients)
