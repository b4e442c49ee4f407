"""Decoders with scores against transformers' classifiers: reward models, which have one label, and classifiers.
Loss, gradients and scores, on every kind of mesh."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, logsigmoid

from ranvier.checkpoint.hf.form import tensor_here, tensors_there
from ranvier.checkpoint.hf.forms import form_of
from ranvier.config.run import Transformer
from ranvier.data.arrays import Arrays
from ranvier.data.class_numbers import Accuracy
from ranvier.data.classification import LabelledAtEnd
from ranvier.data.preference import PreferenceScoring, ScoredPairs
from ranvier.data.token_samples import TokenSamples
from ranvier.mesh import Mesh
from ranvier.models.families import family_named
from ranvier.pipeline.microbatch import Microbatch
from ranvier.tensor.split.loss import IGNORED, LastTokenLoss
from ranvier.tensor.split.preference_loss import RewardLoss
from ranvier.testing.reference import Reference
from tests.covering import first
from tests.errors import raises
from tests.models.test_llama import in_fp64
from tests.tensor.split_parity import SEED, TOLERANCE, assemble, assert_close, gradients_of, on_mesh, share
from tests.tensor.test_preference_loss import MESHES, PAIRS, batches

PAD = 0
KINDS = {"llama": Transformer(family="llama", num_layers=2, hidden=16, heads=2, vocab=61, sequence=16, tied=True),
         "qwen2": Transformer(family="llama", num_layers=2, hidden=16, heads=4, kv_heads=2, vocab=61, sequence=16,
                              bias="qkv")}


def answers():
    """Tokens of the chosen and the rejected answer of each pair, alternating; lengths differ between pairs."""
    g = torch.Generator().manual_seed(0)
    return [torch.randint(1, 61, (size,), generator=g) for pair in range(PAIRS)
            for size in (2 + pair % 4, 7 - pair % 3)]


MARGINS = np.linspace(-0.5, 3, PAIRS)


def pairs(margins):
    stops = np.cumsum([len(ids) for ids in answers()])
    return ScoredPairs(TokenSamples(torch.cat(answers()).numpy(), stops - [len(ids) for ids in answers()], stops + 1,
                                    16), margins)


def model(config, head="score"):
    return family_named("llama").model(config, head, dtype=torch.float32)


def theirs_of(config, head, labels):
    """Transformers' model with our start values, and a function that converts its gradients to ours."""
    transformers = pytest.importorskip("transformers")
    form = form_of(config)
    places = form.places(config, head)
    start = Reference(model(config, head), seed=SEED, dtype=torch.float64).parameters
    with in_fp64():
        theirs = transformers.AutoModelForSequenceClassification.from_config(
            transformers.AutoConfig.for_model(**form.write(config, head) | {"pad_token_id": PAD}))
    assert theirs.num_labels == labels and type(theirs).__name__ == form.class_of[head]
    theirs.load_state_dict({there: part for ours, place in places.items() for there, part in zip(
        place.names, tensors_there(place, start[ours].detach()), strict=True)})
    found = dict(theirs.named_parameters())
    return theirs, lambda: {ours: tensor_here(place, [found[name].grad for name in place.names])
                            for ours, place in places.items()}


def padded(texts):
    ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=PAD)
    return {"input_ids": ids, "attention_mask": ids != PAD}


@cache
def plain(kind, has_margins):
    """Loss (TRL's formula), gradients and differences of rewards of transformers' model, which gets all answers
    padded."""
    theirs, gradients = theirs_of(KINDS[kind], "score", 1)
    with in_fp64():
        rewards = theirs(**padded(answers())).logits.view(-1, 2)
    differences = rewards[:, 0] - rewards[:, 1]
    loss = -logsigmoid(differences - torch.from_numpy(MARGINS) if has_margins else differences).mean()
    loss.backward()
    return loss.item(), gradients(), differences.detach()


TEXTS, CLASSES = 8, 3
SIZES = {"llama": KINDS["llama"],
         "qwen3": Transformer(family="llama", num_layers=2, hidden=16, heads=4, kv_heads=2, head_dim=8, vocab=61,
                              sequence=16, qk_norm="head"),
         "gemma2": Transformer(family="llama", num_layers=2, hidden=16, heads=2, vocab=61, sequence=16, tied=True,
                               norms="both", norm_offset=1, embedding_scale="sqrt-hidden", window=4, full_every=2,
                               activation="gelu-tanh", attention_softcap=5.0, query_pre_attn_scalar=8.0)}


def labelled():
    """Texts of different lengths, and their classes."""
    g = torch.Generator().manual_seed(1)
    texts = [torch.randint(1, 61, (1 + 3 * text % 10,), generator=g) for text in range(TEXTS)]
    return texts, torch.randint(0, CLASSES, (TEXTS,), generator=g)


def samples_at_end():
    texts, classes = labelled()
    return LabelledAtEnd(Arrays(arrays={
        "ids": padded(texts)["input_ids"].numpy(), "lengths": np.array([len(text) for text in texts]),
        "firsts": np.full(TEXTS, 16), "labels": classes.numpy()}, facts={}, digest=""))


@cache
def plain_classes(kind):
    """Loss, gradients and correct predictions of transformers' model, which gets all texts padded."""
    texts, classes = labelled()
    theirs, gradients = theirs_of(replace(SIZES[kind], num_classes=CLASSES), "classes", CLASSES)
    with in_fp64():
        found = theirs(**padded(texts), labels=classes)
    found.loss.backward()
    return found.loss.item(), gradients(), found.logits.argmax(-1) == classes


def microbatches_of(data, mesh):
    """Two microbatches for each replica: of 6 and 2 texts for one, or of 2, 4, 1 and 1 for two replicas."""
    parts = [[0, 1], [2, 3, 4, 5], [6], [7]] if mesh.data == 2 else [[0, 1, 2, 3, 4, 5], [6, 7]]
    made = [Microbatch(data.inputs(own, own, 10), data.targets(own, 10), torch.from_numpy(own))
            for own in map(np.array, parts)]
    return [made[:2], made[2:]] if mesh.data == 2 else [made]


@pytest.mark.parametrize(("kind", "mesh"), first(
    [("llama", Mesh()), ("llama", Mesh(data=2, pipe=2)), ("llama", Mesh(row=2, col=2)),
     ("gemma2", Mesh(pipe=2, col=2))],
    [*(("llama", mesh) for mesh in MESHES), ("qwen3", Mesh(row=2, col=2)), ("gemma2", Mesh(pipe=2, col=2))]), ids=str)
def test_classes_of_a_decoder_are_those_of_transformers(kind, mesh):
    loss, expected, right = plain_classes(kind)
    config, data = replace(SIZES[kind], num_classes=CLASSES), samples_at_end()

    def work(engine):
        mine, scoring = share(engine, microbatches_of(data, mesh)), Accuracy()
        engine.evaluate(mine, lambda place, output: scoring.add(output, mine[place].targets, mine[place].samples))
        result = engine.forward_backward(mine)
        part = scoring.part() if engine.is_last_stage and engine.coordinates.col == 0 else None
        return gradients_of(engine), result, part, engine.layout

    gradients, results, parts, layouts = zip(*on_mesh(lambda: model(config, "classes"), mesh, work), strict=True)
    assert_close(assemble(gradients, layouts[0]), expected)
    for result in results:
        assert result.weight == TEXTS and abs(result.loss - loss) < TOLERANCE
    scores = Accuracy().total([part for part in parts if part is not None])
    assert scores == {"eval_accuracy": float(right.double().mean()), "eval_count": TEXTS}
    assert 0 < scores["eval_accuracy"] < 1


@pytest.mark.parametrize(("kind", "mesh", "has_margins"), first(
    [("llama", Mesh(), True), ("llama", Mesh(data=2, pipe=2), True), ("llama", Mesh(col=2), True),
     ("qwen2", Mesh(row=2, col=2), False)],
    [*(("llama", mesh, True) for mesh in MESHES), ("qwen2", Mesh(row=2, col=2), False)]), ids=str)
def test_loss_gradients_and_scores_are_those_of_transformers(kind, mesh, has_margins):
    data, config = pairs(MARGINS if has_margins else None), KINDS[kind]
    loss, expected, margins = plain(kind, has_margins)

    def work(engine):
        mine, scoring = share(engine, batches(data, mesh.data, PAIRS // mesh.data // (2 if mesh.row == 1 else 1))), \
            PreferenceScoring(None)
        engine.evaluate(mine, lambda place, output: scoring.add(output, mine[place].targets, mine[place].samples))
        result = engine.forward_backward(mine)
        part = scoring.part() if engine.is_last_stage and engine.coordinates.col == 0 else None
        return gradients_of(engine), result, part, engine.layout

    gradients, results, parts, layouts = zip(*on_mesh(lambda: model(config), mesh, work), strict=True)
    assert_close(assemble(gradients, layouts[0]), expected)
    for result in results:
        assert result.weight == PAIRS and abs(result.loss - loss) < TOLERANCE
    scores = PreferenceScoring(None).total([part for part in parts if part is not None])
    assert scores["eval_accuracy"] == float((margins > 0).double().mean()) not in (0.0, 1.0)
    assert abs(scores["eval_reward_margin"] - float(margins.mean())) < TOLERANCE


def test_pairs_that_fill_up_a_row_do_not_count():
    last = torch.tensor([[1, 4], [IGNORED, IGNORED]])
    scores = torch.randn(2, 5, 1, dtype=torch.float64)
    total, count = RewardLoss()(scores, {"last": last})
    assert int(count) == 1 and torch.equal(total, -logsigmoid(scores[0, 1, 0] - scores[0, 4, 0]))
    with raises("targets-of-scores", value="Tensor"):
        RewardLoss()(scores, last)


@pytest.mark.parametrize("settings", [
    {}, {"norms": "after", "qk_norm": "all"}, {"norm_offset": 1.0, "embedding_scale": "sqrt-hidden"}], ids=[
        "llama", "olmo2", "gemma"])
def test_no_token_is_padding_without_a_tokenizer_that_says_so(settings):
    """OLMo's default in transformers is token 1, Gemma's 0."""
    transformers = pytest.importorskip("transformers")
    config = replace(KINDS["llama"], **settings)
    for head in ("classes", "score"):
        assert transformers.AutoConfig.for_model(**form_of(config).write(config, head)).pad_token_id is None


def test_texts_that_fill_up_a_row_do_not_count():
    logits = torch.randn(2, 5, 3, dtype=torch.float64)
    last, classes = torch.tensor([4, IGNORED]), torch.tensor([2, IGNORED])
    total, count = LastTokenLoss()(logits, {"last": last, "class": classes})
    assert int(count) == 1 and torch.equal(total, cross_entropy(logits[:1, 4], classes[:1]))
    half, _ = LastTokenLoss()(logits.bfloat16(), {"last": last, "class": classes})
    assert half.dtype is torch.float32
