"""The GPT against transformers' GPT-2: logits, loss and raw gradients; and how it is built and initialised."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ranvier.block import Initial, initialise
from ranvier.checkpoint.hf import form as hf
from ranvier.checkpoint.hf import gpt2 as hf_gpt2
from ranvier.config.run import Transformer
from ranvier.models.family import heads_problem, text_transformer_in_words
from ranvier.models.gpt import flops_per_sequence, gpt
from ranvier.tensor.split.loss import next_token_loss
from tests.errors import raises

SIZES = [
    Transformer(num_layers=1, hidden=8, heads=1, vocab=11, sequence=5),
    Transformer(num_layers=2, hidden=24, heads=3, vocab=50, sequence=16),
    Transformer(num_layers=3, hidden=32, heads=8, vocab=37, sequence=9),
]


def build(config: Transformer, dtype=torch.float64, seed=1) -> nn.ModuleDict:
    """All blocks, initialised by name, with ties as shared parameters."""
    model = gpt(config, dtype=dtype)
    blocks = model.build()
    for name, parameter in parameters(blocks).items():
        initialise(parameter, name, model.initial(name), seed)
    blocks["head"].projection.weight = blocks["embedding"].token.weight
    return blocks


def parameters(blocks: nn.ModuleDict) -> dict[str, nn.Parameter]:
    """Parameters by full name; tied parameters have both names."""
    return {f"{block.replace('__', '.')}.{name}": parameter for block, inner in blocks.items()
            for name, parameter in inner.named_parameters()}


def forward(blocks: nn.ModuleDict, ids: torch.Tensor) -> torch.Tensor:
    state = ids
    for block in blocks.values():
        state = block(state)
    return state


def to_hf(tensors, config):
    """Parameters, or gradients, in Hugging Face's form."""
    found = {}
    for ours, place in hf_gpt2.places(config).items():
        found |= zip(place.names, hf.tensors_there(place, tensors[ours]), strict=True)
    return found


def from_hf(tensors, config):
    found = {ours: hf.tensor_here(place, [tensors[name] for name in place.names])
             for ours, place in hf_gpt2.places(config).items()}
    return found | {ours: found[owner] for ours, owner in hf_gpt2.GPT2.tied(config).items()}


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm().clamp_min(1e-30)).item()


@pytest.mark.parametrize("config", SIZES, ids=lambda config: f"{config.num_layers}x{config.hidden}x{config.heads}")
def test_equals_transformers_gpt2(config):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**hf_gpt2.write(config))).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    blocks = build(config)
    with torch.no_grad():
        for name, value in from_hf(theirs.state_dict(), config).items():
            parameters(blocks)[name].copy_(value)

    ids = torch.randint(config.vocab, (3, config.sequence), generator=generator)
    targets = torch.randint(config.vocab, ids.shape, generator=generator)
    targets[0, :3] = targets[2, -1] = -100
    logits = forward(blocks, ids)
    expected = theirs(ids).logits
    assert relative(logits, expected) < 1e-10

    total, weight = next_token_loss(logits, targets)
    expected_loss = nn.functional.cross_entropy(expected.flatten(0, 1), targets.flatten(), reduction="sum")
    assert weight == 3 * config.sequence - 4
    assert relative(total, expected_loss) < 1e-12
    (total / weight).backward()
    (expected_loss / weight).backward()
    ours = to_hf({name: parameter.grad for name, parameter in parameters(blocks).items()}, config)
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    assert gradients.keys() <= ours.keys()
    scale = max(gradient.norm() for gradient in gradients.values())
    for name, gradient in gradients.items():
        assert (ours[name] - gradient).norm() < 1e-10 * max(gradient.norm(), 1e-3 * scale), name


def test_names_travel_to_hugging_face_and_back():
    config = SIZES[1]
    values = {name: torch.randn(parameter.shape) for name, parameter in parameters(build(config)).items()}
    values["head.projection.weight"] = values["embedding.token.weight"]
    there = to_hf(values, config)
    assert all(tuple(there[name].shape) == shape for place in hf_gpt2.places(config).values()
               for name, shape in zip(place.names, place.shapes, strict=True))
    back = from_hf(there, config)
    assert list(back) == list(values)
    assert all(torch.equal(back[name], values[name]) for name in values)


def test_blocks_layers_and_tie_are_as_declared():
    model = gpt(SIZES[1])
    assert list(model.blocks) == ["embedding", "layer0.attention", "layer0.mlp", "layer1.attention", "layer1.mlp",
                                  "head"]
    assert model.layers == (("layer0.attention", "layer0.mlp"), ("layer1.attention", "layer1.mlp"))
    owner, other = model.tied[0]
    shapes = {name: parameter.shape for name, parameter in parameters(model.build()).items()}
    assert shapes[owner] == shapes[other] == (50, 24)
    assert model.blocks["head"]().projection.bias is None


def test_builds_on_meta_in_any_dtype():
    config = Transformer(num_layers=48, hidden=4512, heads=24, vocab=51200, sequence=512)
    model = gpt(config, dtype=torch.bfloat16)
    with torch.device("meta"):
        mlp = model.blocks["layer47.mlp"]()
    assert all(parameter.device.type == "meta" and parameter.dtype == torch.bfloat16 for parameter in mlp.parameters())
    assert mlp.fc1.weight.shape == (4 * 4512, 4512)


def test_causal_and_position_dependent():
    config = SIZES[1]
    blocks = build(config)
    ids = torch.arange(config.sequence).unsqueeze(0)
    changed = ids.clone()
    changed[0, 9] = 40
    before, after = forward(blocks, ids)[0], forward(blocks, changed)[0]
    assert torch.equal(before[:9], after[:9])
    assert all(not torch.allclose(before[place], after[place]) for place in range(9, config.sequence))
    same = forward(blocks, torch.full((1, 4), 7))[0]
    assert not torch.allclose(same[0], same[1])


def test_shorter_sequences_run_and_longer_ones_are_refused():
    blocks = build(SIZES[0])
    assert forward(blocks, torch.zeros(2, 3, dtype=torch.int64)).shape == (2, 3, 11)
    with raises("sequence-beyond-positions", 6):
        forward(blocks, torch.zeros(1, 6, dtype=torch.int64))


def test_heads_must_divide_hidden():
    config = Transformer(hidden=128, heads=5)
    assert heads_problem(Transformer()) == []
    assert [problem.where for problem in heads_problem(config)] == ["model.heads"]
    with raises("heads-do-not-divide-hidden", 128, 5, 4):
        gpt(config)


def test_initial_weights_have_gpt2s_scale():
    config = Transformer(num_layers=8, hidden=64, heads=4, vocab=512, sequence=64)
    model = gpt(config)
    for name, parameter in parameters(build(config, seed=5)).items():
        start = model.initial(name)
        if start.kind == "constant":
            assert torch.all(parameter == (1.0 if name.endswith("weight") else 0.0)), name
            assert name.endswith(".bias") or ".norm." in name
            continue
        expected = 0.02 / math.sqrt(16) if name.split(".", 2)[2:] in (["projection.weight"], ["fc2.weight"]) else 0.02
        assert start == Initial("normal", expected), name
        error = expected / math.sqrt(parameter.numel())
        assert abs(parameter.mean()) < 5 * error, name
        assert abs(parameter.std() - expected) < 5 * error, name


def test_flops_are_the_papers_formula():
    config = Transformer(num_layers=48, hidden=4512, heads=24, vocab=51200, sequence=512)
    s, layers, h, v = 512, 48, 4512, 51200
    assert flops_per_sequence(config) == pytest.approx(
        72 * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h)))
    assert flops_per_sequence(config, recomputed=True) == pytest.approx(
        96 * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h)))


def test_flops_count_the_models_products():
    config = Transformer(num_layers=3, hidden=48, heads=4, vocab=80, sequence=20)
    with FlopCounterMode(display=False) as counter:
        total, _ = next_token_loss(forward(build(config, torch.float32), torch.zeros(1, 20, dtype=torch.int64)),
                                   torch.zeros(1, 20, dtype=torch.int64))
        total.backward()
    # The counter does not support the CPU attention kernel, so its sum lacks 12 s^2 h a layer.
    attention = 12 * config.num_layers * config.sequence**2 * config.hidden
    assert counter.get_total_flops() in (flops_per_sequence(config), flops_per_sequence(config) - attention)


def test_one_layer_in_words():
    assert text_transformer_in_words("gpt", Transformer(num_layers=1, heads=2, vocab=9)).startswith(
        "gpt, 1 layer, hidden 128, 2 heads, vocabulary 9")
