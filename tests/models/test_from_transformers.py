"""Models of transformers as blocks: outputs and gradients are the models' own; what cannot be cut is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import ranvier
from ranvier.errors import ModelError
from ranvier.mesh import Mesh
from ranvier.models.from_transformers import from_transformers
from ranvier.pipeline.engine import Engine
from ranvier.pipeline.microbatch import Microbatch
from ranvier.testing.ranks import run_ranks
from tests.errors import raises

transformers = pytest.importorskip("transformers")
TEXT = dict(vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=6,
            max_position_embeddings=32)
IMAGES = dict(hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=6, image_size=16,
              patch_size=4)
DROPS = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
MODELS = {
    "Llama": ("LlamaForCausalLM", "LlamaConfig", TEXT | dict(num_key_value_heads=2, tie_word_embeddings=True)),
    "Gemma2": ("Gemma2ForCausalLM", "Gemma2Config", TEXT | dict(num_key_value_heads=2, head_dim=4, sliding_window=4)),
    "GPT2": ("GPT2LMHeadModel", "GPT2Config", dict(
        n_embd=24, n_layer=3, n_head=3, vocab_size=61, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0)),
    "Bert": ("BertForSequenceClassification", "BertConfig", TEXT | DROPS | dict(num_labels=5)),
    "ViT": ("ViTForImageClassification", "ViTConfig", IMAGES | DROPS | dict(num_labels=5)),
    "Dinov2": ("Dinov2ForImageClassification", "Dinov2Config", IMAGES | DROPS | dict(num_labels=5)),
}


def built(name):
    kind, config, settings = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**settings)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def microbatches(name, count):
    """(inputs, targets) of two samples each; of BERT with a padding mask."""
    found = []
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        ids, classes = torch.randint(1, 61, (2, 9), generator=generator), torch.tensor([number % 5, -100])
        if name in ("ViT", "Dinov2"):
            found.append((torch.randn(2, 3, 16, 16, generator=generator, dtype=torch.float64), classes))
        elif name == "Bert":
            mask = (torch.arange(9) < torch.tensor([[9], [6]])).long()
            found.append(({"input_ids": ids, "attention_mask": mask}, classes))
        else:
            found.append((ids[:, :-1], ids[:, 1:]))
    return found


def reference(name, data):
    """Gradients of the summed loss over its weight, by the model as it is."""
    model = built(name).train()
    total, weight = torch.zeros(()), 0
    for inputs, targets in data:
        logits = model(**inputs).logits if isinstance(inputs, dict) else model(inputs).logits
        total = total + nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")
        weight += int((targets != -100).sum())
    (total / weight).backward()
    return {id_: parameter.grad for id_, parameter in enumerate(model.parameters())}, float(total.detach() / weight)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_on_replicas_and_stages(name):
    data = microbatches(name, 4)
    expected, loss = reference(name, data)
    mesh = Mesh(data=2, pipe=2)
    whole = built(name)  # not by the ranks, which are threads and would share torch's generator

    def rank(world):
        model = copy.deepcopy(whole)
        sample = None if name != "Bert" else data[0][0]
        cut = from_transformers(model, sample)
        numbers = {id(parameter): number for number, parameter in enumerate(model.parameters())}
        number_of = {f"{block}.{inner}": numbers[id(parameter)] for block, build in cut.blocks.items()
                     for inner, parameter in build().named_parameters()}
        engine = Engine(cut, world, mesh=mesh, dtype=torch.float64)
        own = data[engine.coordinates.data * 2:][:2]
        result = engine.forward_backward([
            Microbatch(inputs if engine.is_first_stage else None, targets if engine.is_last_stage else None,
                       torch.arange(2) + 2 * place) for place, (inputs, targets) in enumerate(own)])
        found = {number_of[full]: gradient.clone() for full, gradient in engine.gradients().items()}
        engine.close()
        return found, result.loss

    seen = set()
    for found, ours in run_ranks(rank, mesh.size):
        assert ours is None or ours == pytest.approx(loss, rel=1e-10)
        for number, gradient in found.items():
            wanted = expected[number]
            wanted = torch.zeros_like(gradient) if wanted is None else wanted
            assert (gradient - wanted).norm() <= 1e-9 * max(float(wanted.norm()), 1e-3), number
            seen.add(number)
    assert {number for number, gradient in expected.items() if gradient is not None} <= seen


def test_layers_ties_and_modes():
    model = built("Llama").eval()
    cut = ranvier.from_transformers(model)
    assert list(cut.blocks) == ["embedding", "layer0", "layer1", "layer2", "head"]
    assert cut.layers == (("layer0",), ("layer1",), ("layer2",))
    assert cut.tied == (("embedding.model.model.embed_tokens.weight", "head.model.lm_head.weight"),)
    assert not model.training
    held = {id(parameter) for build in cut.blocks.values() for parameter in build().parameters()}
    assert held == {id(parameter) for parameter in model.parameters()}


def test_an_output_of_ones_own():
    model = transformers.BertForQuestionAnswering(transformers.BertConfig(**TEXT)).eval()
    cut = from_transformers(model, loss=lambda output, targets: (output["start_logits"].sum(), 1))
    state = torch.arange(10).view(2, 5)
    expected = model(state)
    for build in cut.blocks.values():
        state = build().eval()(state)
    assert set(state) == {"start_logits", "end_logits"}
    assert torch.allclose(state["end_logits"], expected.end_logits, atol=1e-6)
    pooled = from_transformers(model.bert, loss=lambda output, targets: (output.sum(), 1),
                               output=lambda found: found.last_hidden_state[:, 0])
    assert list(pooled.blocks)[-1] == "head"


class Between(nn.Module):
    """A model whose loop does something of its own between two layers."""

    main_input_name = "x"

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.embed, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        if self.kind == "fails":
            raise ValueError("no such shape")
        x = first = self.embed(x)
        for layer in self.layers:
            if self.kind == "changes":
                x = 2 * x
            if self.kind == "shared":
                x = self.embed(x)
            x = layer(x)
            if self.kind == "twice":
                x = layer(x)
        return self.norm(x + first if self.kind == "skips" else x)


@pytest.mark.parametrize(("kind", "message"), [
    ("changes", r"layer 1: changes its hidden states between two layers"),
    ("shared", r"embed: runs before and between the layers, and a block is in one place"),
    ("twice", r"layers: does not run its layers once each, in order, but \[0, 0, 1, 1, 2, 2\]"),
    ("skips", r"Between: computes something else in blocks than as a whole; the largest difference is"),
    ("fails", r"the sample: cannot be run on the sample: no such shape"),
])
def test_what_cannot_be_cut(kind, message):
    with pytest.raises(ModelError, match=message):
        from_transformers(Between(kind), torch.randn(2, 3, 4), loss=lambda output, targets: (output.sum(), 1))


def test_plain_modules_with_a_list_of_layers():
    cut = from_transformers(Between("plain"), torch.randn(2, 3, 4), loss=lambda output, targets: (output.sum(), 1))
    assert list(cut.blocks) == ["embedding", "layer0", "layer1", "layer2", "head"]


@pytest.mark.parametrize(("model", "message"), [
    (lambda: transformers.T5Model(transformers.T5Config(vocab_size=61, d_model=24, d_ff=40, num_layers=2, num_heads=3,
                                                        d_kv=8)), r"cannot be run on the sample"),
    (lambda: nn.Sequential(nn.Linear(3, 3)), r"takes input_ids, of which no sample can be made"),
])
def test_models_without_one_list(model, message):
    with pytest.raises(ModelError, match=message):
        from_transformers(model(), loss=lambda output, targets: (output.sum(), 1))


def test_a_missing_loss_and_output_are_said():
    with raises("loss-missing"):
        from_transformers(transformers.BertModel(transformers.BertConfig(**TEXT)))
    with raises("model-output-unknown"):
        from_transformers(_Named(transformers.BertModel(transformers.BertConfig(**TEXT))), torch.arange(10).view(2, 5),
                          loss=lambda output, targets: (output.sum(), 1))


class _Named(nn.Module):
    """Returns a dict without any of the names that are known."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, input_ids):
        return {"other": self.inner(input_ids).last_hidden_state}
