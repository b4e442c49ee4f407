"""Texts of a decoder on any mesh are those of the full model without a cache, and of transformers."""

from dataclasses import replace

import pytest
import torch

from ranvier.config.run import TensorParallel, Transformer
from ranvier.inference.generate import generate
from ranvier.inference.trained import LanguageModel, build_language_engine
from ranvier.keyed_random import scope
from ranvier.mesh import Mesh
from ranvier.models.families import family_named
from ranvier.models.token_sampling import Sampling
from ranvier.testing.ranks import run_ranks
from tests.covering import first
from tests.errors import raises

PROMPTS = [[5, 9, 1, 30, 2], [7], [11, 3, 3, 8, 2, 19, 4, 6]]
MODELS = {
    "gpt": Transformer(family="gpt", num_layers=3, hidden=24, heads=6, vocab=36, sequence=24),
    "llama": Transformer(family="llama", num_layers=3, hidden=24, heads=6, kv_heads=2, vocab=36, sequence=24,
                         intermediate=30, qk_norm="head"),
    "windows and caps": Transformer(family="llama", num_layers=3, hidden=24, heads=6, vocab=36, sequence=24,
                                    window=4, full_every=3, attention_softcap=5.0, logit_softcap=3.0,
                                    norms="both", nope_layers=(1,), embedding_scale=3.0, residual_multiplier=0.5,
                                    logits_scaling=0.5, query_pre_attn_scalar=7.0),
}
GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    """A model with random parameters, and its greedy texts from full sequences in one process."""
    config = MODELS[request.param]
    built = family_named(config.family).model(config, "tokens", dtype=torch.float64)
    torch.manual_seed(1)
    blocks = {name: build() for name, build in built.blocks.items()}
    values = {}
    for name, block in blocks.items():
        for inner, parameter in block.named_parameters():
            with torch.no_grad():
                parameter.copy_(torch.randn_like(parameter) * 0.3 + parameter.mean().clamp(0, 1))
            values[f"{name}.{inner}"] = parameter.detach()
    for owner, *others in built.tied:
        for other in others:
            values[other].copy_(values[owner])

    @torch.no_grad()
    def write(prompt, count):
        tokens = list(prompt)
        for _ in range(count):
            state = torch.tensor([tokens])
            with scope(0, 0, torch.zeros(1, dtype=torch.int64)):
                for block in blocks.values():
                    state = block.eval()(state)
            tokens.append(int(state[0, -1].argmax()))
        return tokens[len(prompt):]

    return (LanguageModel(config=config, read=lambda name: values[name], tokenizer=None, origin="x"),
            [write(prompt, 6) for prompt in PROMPTS])


def texts(model, mesh, sampling=GREEDY, scheme="stationary", prompts=PROMPTS, **options):
    """(tokens, reason) of each prompt, the same on all ranks."""
    def on_rank(world):
        engine = build_language_engine(model, world, mesh, tensor=TensorParallel(scheme=scheme), dtype=torch.float64)
        ranks = world.backend.group("generate", [tuple(range(world.size))])
        found = {text.number: text for active in generate(
            engine, ranks, prompts, sampling, **{"max_tokens": 6, "longest": 24, "vocab": 36, **options})
            for text in active}
        engine.close()
        return [(found[number].written, found[number].reason) for number in range(len(prompts))]

    results = run_ranks(on_rank, mesh.size)
    assert all(found == results[0] for found in results)
    return results[0]


@pytest.mark.parametrize(("mesh", "scheme"), first([(Mesh(col=2), "megatron")], [
    (Mesh(), "stationary"), (Mesh(pipe=3), "stationary"), (Mesh(data=4), "stationary"), (Mesh(col=2), "megatron"),
    (Mesh(row=2, col=2), "stationary"), (Mesh(row=2, col=3), "summa"), (Mesh(data=2, pipe=2, col=2), "stationary")]),
    ids=str)
def test_greedy_texts_are_those_of_whole_sequences(model, mesh, scheme):
    model, expected = model
    assert texts(model, mesh, scheme=scheme) == [(written, "length") for written in expected]


def test_a_rank_that_only_writes_has_no_memory_for_gradients(model):
    def on_rank(world):
        engine = build_language_engine(model[0], world, Mesh(pipe=2), tensor=TensorParallel(), dtype=torch.float64)
        found = engine.memory()["device"]
        engine.close()
        return found["parameters"] > 0, found["gradients"]

    assert run_ranks(on_rank, 2) == [(True, 0)] * 2


def test_draws_are_the_same_on_every_mesh(model):
    drawn = Sampling(temperature=0.9, top_k=12, top_p=0.95, seed=3)
    assert texts(model[0], Mesh(), drawn) == texts(model[0], Mesh(data=2, pipe=2), drawn) != texts(model[0], Mesh())


def test_texts_end(model):
    """At the end token, at a stop word, or at the model's longest sequence; other texts continue."""
    model, expected = model
    first, *_ = texts(model, Mesh(pipe=2), ends={expected[0][3], 99})
    assert first == (expected[0][:expected[0].index(expected[0][3])], "end")
    stopped = texts(model, Mesh(data=2), is_stopped=lambda written: len(written) == 2)
    assert stopped == [(written[:2], "stop") for written in expected]
    assert texts(model, Mesh(), longest=9)[2] == (expected[2][:1], "length")


@pytest.mark.parametrize(("prompt", "error"), [([], ("prompt-length", 2)), ([1] * 24, ("prompt-length", 2))])
def test_prompts_that_cannot_be_continued(model, prompt, error):
    with raises(*error):
        texts(model[0], Mesh(), prompts=[[1], prompt])


def test_weights_that_are_not_finite_write_nothing(model):
    model, _ = model
    with raises("export-not-finite", "x"):
        texts(replace(model, read=lambda name: model.read(name) * torch.nan), Mesh())
