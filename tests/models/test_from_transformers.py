"""transformers models as blocks have the models' outputs and gradients; models that cannot be cut are refused."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import ranvier
from ranvier.mesh import Mesh
from ranvier.models.from_transformers import from_transformers
from ranvier.pipeline.engine import Engine
from ranvier.pipeline.microbatch import Microbatch
from ranvier.testing.ranks import run_ranks
from tests.covering import without
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
    """(inputs, targets) of two samples each; for BERT with a padding mask."""
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
    """Gradients of the summed loss over its weight, computed by the unchanged model."""
    model = built(name).train()
    total, weight = torch.zeros(()), 0
    for inputs, targets in data:
        logits = model(**inputs).logits if isinstance(inputs, dict) else model(inputs).logits
        total = total + nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")
        weight += int((targets != -100).sum())
    (total / weight).backward()
    return {id_: parameter.grad for id_, parameter in enumerate(model.parameters())}, float(total.detach() / weight)


@pytest.mark.parametrize("name", without(["GPT2", "Llama", "ViT", "Dinov2"], MODELS))
def test_gradients_on_replicas_and_stages(name):
    data = microbatches(name, 4)
    expected, loss = reference(name, data)
    mesh = Mesh(data=2, pipe=2)
    whole = built(name)  # not built by the ranks, which are threads and would share torch's generator

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


@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_labels_as_transformers_shifts_them_itself(stages):
    """They cause a warning, and the targets of its remedy give the model's own loss."""
    models = [built("Llama") for _ in range(stages)]
    ids = torch.randint(1, 61, (4, 9), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(9) < torch.tensor([[9], [6], [9], [4]])).long()
    labels = torch.where(mask.bool(), ids, -100)
    inputs, shifted = {"input_ids": ids, "attention_mask": mask}, nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    expected = models[0](**inputs, labels=labels).loss.item()

    def rank(world):
        engine = Engine(from_transformers(models[world.rank], inputs), world, mesh=Mesh(pipe=stages))
        found = [engine.evaluate(ranvier.microbatches(inputs, targets, 2)).loss for targets in given]
        engine.close()
        return found[0]

    given = [shifted]  # transformers computes the loss of fp32 logits
    assert run_ranks(rank, stages) == [pytest.approx(expected, rel=1e-6)] * stages
    given = [labels, labels]
    with pytest.warns(UserWarning, match="inputs of their own positions") as told:
        run_ranks(rank, stages)
    assert len(told) == stages, "once on each rank"


@pytest.mark.parametrize(("name", "first"), [("Llama", "padded"), ("Llama", "whole"), ("Bert", "padded")])
def test_microbatches_may_be_padded_or_not(name, first):
    """Whatever the sample: transformers creates no mask if its padding mask hides nothing."""
    model = built(name)
    ids = torch.randint(1, 61, (4, 9), generator=torch.Generator().manual_seed(0))
    masks = {"whole": torch.ones(4, 9, dtype=torch.int64), "padded": (torch.arange(9) < torch.tensor(
        [[9], [6], [9], [4]])).long()}
    cut = ranvier.from_transformers(model, {"input_ids": ids, "attention_mask": masks[first]})
    blocks = [build() for build in cut.blocks.values()]
    for mask in masks.values():
        state = {"input_ids": ids, "attention_mask": mask}
        expected = model(**state).logits
        for block in blocks:
            state = block(state)
        counts = mask > 0 if state.dim() == 3 else slice(None)
        torch.testing.assert_close(state[counts], expected[counts], rtol=1e-5, atol=1e-6)


def test_sequences_on_both_sides_of_a_window():
    """transformers creates its mask only for sequences as long as the window, unless attention is eager."""
    window = transformers.Starcoder2Config(**TEXT, num_key_value_heads=2, sliding_window=9, pad_token_id=0)
    for kind in ("sdpa", "eager"):
        window._attn_implementation = kind
        model = transformers.Starcoder2ForCausalLM(window).eval()
        blocks, ids = [build() for build in ranvier.from_transformers(model).blocks.values()], torch.arange(12)[None]
        with raises("layer-tensors-differ", "eager") if kind == "sdpa" else nullcontext():
            state = ids
            for block in blocks:
                state = block(state)
            torch.testing.assert_close(state, model(ids).logits)


def test_layers_ties_and_modes():
    model = built("Llama").eval()
    cut = ranvier.from_transformers(model)
    assert list(cut.blocks) == ["embedding", "layer0", "layer1", "layer2", "head"]
    assert cut.layers == (("layer0",), ("layer1",), ("layer2",))
    assert cut.tied == (("embedding.model.model.embed_tokens.weight", "head.model.lm_head.weight"),)
    assert not model.training
    held = {id(parameter) for build in cut.blocks.values() for parameter in build().parameters()}
    assert held == {id(parameter) for parameter in model.parameters()}


# A ViT's head reads the number format of its first block.
@pytest.mark.parametrize("name", without(["Llama", "Bert"], ["Llama", "Bert", "ViT"]))
def test_the_whole_state_loads_into_the_model(name):
    models = [built(name) for _ in range(2)]

    def rank(world):
        engine = Engine(from_transformers(models[world.rank], microbatches(name, 1)[0][0]), world, mesh=Mesh(pipe=2),
                        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        engine.train_batch(microbatches(name, 2))
        return engine.full_state_dict(), [one.clone() for one in engine.parameters()]

    (whole, held), _ = run_ranks(rank, 2)
    fresh = built(name)
    fresh.load_state_dict(whole)
    assert all(any(torch.equal(one, other) for other in fresh.parameters()) for one in held)


def test_a_language_model_inside_of_another():
    """Its vocabulary and cache are in the configuration of its text model."""
    torch.manual_seed(0)
    model = transformers.FuyuForCausalLM(transformers.FuyuConfig(
        text_config=TEXT | dict(model_type="persimmon", num_key_value_heads=6), patch_size=2)).double()
    cut = ranvier.from_transformers(model)
    state = tokens = torch.arange(12).view(2, 6)
    for build in cut.blocks.values():
        state = build()(state)
    torch.testing.assert_close(state, model(tokens).logits, rtol=1e-12, atol=1e-14)


class Masked(transformers.LlamaPreTrainedModel):
    """Reads its own parameter before the layers, only in training, as models with masked inputs do."""

    def __init__(self, config):
        super().__init__(config)
        self.model, self.mask = transformers.LlamaModel(config), nn.Parameter(torch.ones(config.hidden_size))
        self.post_init()

    def forward(self, input_ids, use_cache=None):
        states = self.model.embed_tokens(input_ids)
        states = states * self.mask if self.training else states
        return self.model(inputs_embeds=states, use_cache=use_cache).last_hidden_state


def test_a_parameter_that_training_alone_reads_in_two_blocks():
    cut = from_transformers(Masked(built("Llama").config), loss=lambda outputs, targets: (outputs.sum(), 1))
    state = torch.arange(12).view(2, 6)
    *first, head = [build().train() for build in cut.blocks.values()]
    for block in first:
        state = block(state)
    with raises("block-cannot-run-alone", "mask", where="block head"):
        head(state)


def test_a_configuration_of_several_texts():
    model = built("Llama")
    model.config.text_encoder, model.config.decoder = transformers.LlamaConfig(), transformers.LlamaConfig()
    with pytest.raises(ValueError, match="ambiguous"):
        model.config.get_text_config()
    assert len(from_transformers(model).blocks) == len(from_transformers(built("Llama")).blocks)


class OwnHead(transformers.LlamaPreTrainedModel):
    """A user's model whose forward has no argument to disable the cache."""

    def __init__(self, config):
        super().__init__(config)
        self.model, self.head = transformers.LlamaModel(config), nn.Linear(config.hidden_size, 3)
        self.post_init()

    def forward(self, input_ids):
        return self.head(self.model(input_ids).last_hidden_state.mean(1))


def test_a_model_that_takes_no_use_cache():
    model = OwnHead(built("Llama").config).double()
    with raises("layer-value-differs", "use_cache", where="layer0"):
        from_transformers(model, loss=lambda outputs, targets: (outputs.sum(), 1))
    model.config.use_cache = False
    cut = from_transformers(model, loss=lambda outputs, targets: (outputs.sum(), 1))
    state = tokens = torch.arange(12).view(2, 6)
    for build in cut.blocks.values():
        state = build()(state)
    torch.testing.assert_close(state, model(tokens), rtol=1e-12, atol=1e-14)


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
    """A model whose loop runs other code between two layers."""

    main_input_name = "x"

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.embed, self.norm, self.skip = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4, bias=False)
        nn.init.zeros_(self.skip.weight)
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
        x = x + self.skip(first) if self.kind == "skips once trained" else x
        return self.norm(x + first if self.kind == "skips" else x)


@pytest.mark.parametrize(("kind", "error"), [
    ("changes", ("hidden-states-changed-between-layers", 1)),
    ("shared", ("module-in-two-blocks",)),
    ("twice", ("layers-not-in-order", 0, 1, 2)),
    ("skips", ("blocks-compute-otherwise",)),
    ("skips once trained", ("blocks-compute-otherwise",)),
    ("fails", ("model-cannot-run-on-sample",)),
])
def test_what_cannot_be_cut(kind, error):
    with raises(*error):
        from_transformers(Between(kind), torch.randn(2, 3, 4), loss=lambda output, targets: (output.sum(), 1))


def test_a_head_that_reads_floating_point_labels():
    """Also if the sample's labels are zeros, as any stand-in's might be; integer labels do reach the head."""
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**TEXT, num_labels=1))
    sample = {"input_ids": torch.arange(10).view(2, 5), "labels": torch.zeros(2)}
    with raises("blocks-compute-otherwise"):
        from_transformers(model, sample, loss=lambda loss, targets: (loss, 1), output=lambda found: found.loss)
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**TEXT, num_labels=2))
    from_transformers(model, sample | {"labels": torch.tensor([0, 1])}, loss=lambda loss, targets: (loss, 1),
                      output=lambda found: found.loss)


def test_plain_modules_with_a_list_of_layers():
    cut = from_transformers(Between("plain"), torch.randn(2, 3, 4), loss=lambda output, targets: (output.sum(), 1))
    assert list(cut.blocks) == ["embedding", "layer0", "layer1", "layer2", "head"]


class Part(nn.Module):
    """A layer, or an embedding, with its own method and buffer."""

    def __init__(self, kind):
        super().__init__()
        self.linear, self.kind = nn.Linear(4, 4), kind
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x, factor=1, shift=0):
        return x + factor * torch.tanh(self.linear(x)) + shift if self.kind != "numbers" else (
            self.linear(x), x.shape[1])

    def back(self, x):
        return nn.functional.linear(x, self.linear.weight.T) * self.scale


class Reads(nn.Module):
    """A model whose code around the layers reads parts of other blocks."""

    main_input_name = "x"

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.embed, self.after = Part(kind), Part("plain")
        if kind == "places":
            self.places, self.pairs, self.wide = nn.Embedding(8, 4), nn.Embedding(8, 4), nn.Linear(4, 8)
        self.layers = nn.ModuleList(Part("whole") for _ in range(3))

    def at(self, length):
        """Embeddings of positions, and a bias for each pair of positions."""
        place = torch.arange(length)
        return self.places(place) + self.pairs((place[:, None] - place).abs()).expand(length, length, 4).sum(1)

    def forward(self, x):
        first, length = self.embed(x) if self.kind == "numbers" else (self.embed(x), x.shape[1])
        if self.kind == "after":
            first = self.after.back(first)
        hidden = first + self.at(length) + self.wide(first).reshape(len(x), length, 4, 2).sum(
            3) if self.kind == "places" else first
        length = first.new_tensor(length) if self.kind == "one tensor twice" else length
        for layer in self.layers:
            if self.kind == "length":
                hidden = layer(hidden, x.shape[1])
            elif self.kind == "one tensor twice":
                hidden = layer(hidden, length, length if bool(x.detach().max() < 9) else length + 1)
            elif self.kind == "flag":
                hidden = layer(hidden, factor=2 if bool(x.detach().max() > 9) else 1)
            else:
                hidden = layer(hidden, 2 if layer.kind == "whole" else 1)
        if self.kind == "layer":
            hidden = hidden * self.layers[0].linear.weight.mean()
        if self.kind in ("numbers", "sizes"):
            hidden = hidden / length
        return self.after(self.embed.back(hidden) if self.kind == "method" else hidden)


def summed_squares(output, targets):
    return ((output - targets) ** 2).sum(), targets.numel()


@pytest.mark.parametrize("kind", ["method", "after", "sizes", "places"])
def test_what_another_block_has_is_tied(kind):
    """The embedding's weights that the head used through a method kept their initial values, and their gradient was
    lost on another stage; sizes of floats, of positions and of other features were those of the sample."""
    torch.manual_seed(0)
    whole = Reads(kind).double()
    batch = [(torch.randn(2, length, 4, dtype=torch.float64), torch.randn(2, length, 4, dtype=torch.float64))
             for length in (3, 3, 5)]
    reference = copy.deepcopy(whole)
    (sum(summed_squares(reference(x), t)[0] for x, t in batch) / sum(t.numel() for _, t in batch)).backward()
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}

    def rank(world):
        model = copy.deepcopy(whole)
        engine = Engine(from_transformers(model, torch.randn(2, 3, 4, dtype=torch.float64), loss=summed_squares), world,
                        mesh=Mesh(pipe=2), dtype=torch.float64)
        engine.forward_backward(batch)
        own = {id(parameter) for parameter in engine.parameters()}
        found = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if id(parameter) in own}
        engine.close()
        return found

    found = {name: gradient for each in run_ranks(rank, 2) for name, gradient in each.items()}
    assert set(found) == set(expected)
    assert all((found[name] - right).norm() <= 1e-10 * right.norm() for name, right in expected.items())


@pytest.mark.parametrize(("kind", "where", "code"), [
    ("layer", "layers.0.linear", "attribute-of-another-block"), ("numbers", "embed", "number-beside-tensors")])
def test_what_another_block_alone_knows(kind, where, code):
    with raises(code, where=where):
        from_transformers(Reads(kind), torch.randn(2, 3, 4), loss=summed_squares)


@pytest.mark.parametrize(("kind", "x", "value"), [
    ("length", torch.zeros(2, 5, 4), "5, and 3 for the sample"),
    ("flag", torch.full((2, 3, 4), 10.0), "2, and 1 for the sample")])
def test_layers_that_are_called_with_other_values_than_for_the_sample(kind, x, value):
    """As in Longformer: they were called with the sample's values."""
    cut = from_transformers(Reads(kind), torch.zeros(2, 3, 4), loss=summed_squares)
    first = next(iter(cut.blocks.values()))()
    first(torch.zeros(4, 3, 4))
    with raises("layer-value-differs", where="layer0", value=value):
        first(x)


def test_two_tensors_that_are_one_for_the_sample():
    """Both tensors would be the last one."""
    cut = from_transformers(Reads("one tensor twice"), torch.zeros(2, 3, 4), loss=summed_squares)
    first = cut.blocks["embedding"]()
    first(torch.zeros(4, 5, 4))
    with raises("layer-tensors-one-for-sample", where="layer0"):
        first(torch.full((2, 3, 4), 10.0))


def test_classes_of_which_a_sample_has_several_have_no_loss_of_their_own():
    """transformers uses other losses for them: cross-entropy would be wrong, and with one class would train nothing."""
    for labels in (dict(num_labels=3, problem_type="multi_label_classification"), dict(num_labels=1)):
        model = transformers.BertForSequenceClassification(transformers.BertConfig(**TEXT, **labels))
        with raises("loss-missing"):
            from_transformers(model)
        assert from_transformers(model, loss=summed_squares).loss is summed_squares


@pytest.mark.parametrize(("model", "code"), [
    (lambda: transformers.T5Model(transformers.T5Config(vocab_size=61, d_model=24, d_ff=40, num_layers=2, num_heads=3,
                                                        d_kv=8)), "model-cannot-run-on-sample"),
    (lambda: nn.Sequential(nn.Linear(3, 3)), "no-sample-of-input"),
])
def test_models_without_one_list(model, code):
    with raises(code):
        from_transformers(model(), loss=lambda output, targets: (output.sum(), 1))


def test_a_missing_loss_and_output_are_said():
    with raises("loss-missing"):
        from_transformers(transformers.BertModel(transformers.BertConfig(**TEXT)))
    with raises("model-output-unknown"):
        from_transformers(_Named(transformers.BertModel(transformers.BertConfig(**TEXT))), torch.arange(10).view(2, 5),
                          loss=lambda output, targets: (output.sum(), 1))


class _Named(nn.Module):
    """Returns a dict without any known name."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, input_ids):
        return {"other": self.inner(input_ids).last_hidden_state}
