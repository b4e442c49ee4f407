"""Reward models against transformers' classifiers with one label: loss, gradients and scores, on every kind of mesh."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from ranvier.checkpoint.hf.form import tensor_here, tensors_there
from ranvier.checkpoint.hf.forms import form_of
from ranvier.config.run import Transformer
from ranvier.data.preference_pairs import PreferenceScoring, ScoredPairs
from ranvier.data.token_samples import TokenSamples
from ranvier.mesh import Mesh
from ranvier.models.families import family_named
from ranvier.tensor.split.loss import IGNORED
from ranvier.tensor.split.preference_loss import RewardLoss
from ranvier.testing.reference import Reference
from tests.errors import raises
from tests.models.test_llama import in_fp64
from tests.tensor.split_parity import SEED, TOLERANCE, assemble, assert_close, gradients_of, on_mesh, share
from tests.tensor.test_preference_loss import MESHES, PAIRS, batches

PAD = 0
KINDS = {"llama": Transformer(family="llama", num_layers=2, hidden=16, heads=2, vocab=61, sequence=16, tied=True),
         "qwen2": Transformer(family="llama", num_layers=2, hidden=16, heads=4, kv_heads=2, vocab=61, sequence=16,
                              bias="qkv")}


def answers():
    """Tokens of the chosen and of the rejected answer of each pair, in turn: other lengths in every pair."""
    g = torch.Generator().manual_seed(0)
    return [torch.randint(1, 61, (size,), generator=g) for pair in range(PAIRS)
            for size in (2 + pair % 4, 7 - pair % 3)]


def pairs():
    stops = np.cumsum([len(ids) for ids in answers()])
    return ScoredPairs(TokenSamples(torch.cat(answers()).numpy(), stops - [len(ids) for ids in answers()], stops + 1,
                                    16))


def model(config):
    return family_named("llama").model(config, "score", dtype=torch.float32)


@cache
def plain(kind):
    """Loss, gradients and margins of transformers' model with our start values, which has all answers padded."""
    transformers = pytest.importorskip("transformers")
    config = KINDS[kind]
    form = form_of(config)
    places = form.places(config, "score")
    start = Reference(model(config), seed=SEED, dtype=torch.float64).parameters
    with in_fp64():
        theirs = transformers.AutoModelForSequenceClassification.from_config(
            transformers.AutoConfig.for_model(**form.write(config, "score") | {"pad_token_id": PAD}))
    assert theirs.num_labels == 1 and type(theirs).__name__ == form.class_of["score"]
    theirs.load_state_dict({there: part for ours, place in places.items() for there, part in zip(
        place.names, tensors_there(place, start[ours].detach()), strict=True)})
    ids = torch.nn.utils.rnn.pad_sequence(answers(), batch_first=True, padding_value=PAD)
    with in_fp64():
        rewards = theirs(ids, attention_mask=ids != PAD).logits.view(-1, 2)
    margins = rewards[:, 0] - rewards[:, 1]
    loss = -logsigmoid(margins).mean()
    loss.backward()
    gradients = dict(theirs.named_parameters())
    return loss.item(), {ours: tensor_here(place, [gradients[name].grad for name in place.names])
                         for ours, place in places.items()}, margins.detach()


@pytest.mark.parametrize(("kind", "mesh"), [*(("llama", mesh) for mesh in MESHES), ("qwen2", Mesh(row=2, col=2))],
                         ids=str)
def test_loss_gradients_and_scores_are_those_of_transformers(kind, mesh):
    data, config = pairs(), KINDS[kind]
    loss, expected, margins = plain(kind)

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
