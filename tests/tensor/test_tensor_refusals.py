"""What cannot be split is refused by name, with what helps."""

import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from ranvier.block import Model
from ranvier.errors import ConfigError, ModelError
from ranvier.mesh import Mesh
from ranvier.pipeline.engine import Engine
from ranvier.tensor import layers
from ranvier.testing.ranks import run_ranks
from tests.errors import raises
from tests.pipeline.parity import small_gpt, squared
from tests.tensor.split_parity import legal, on_mesh, share, tiny_gpt, token_batches


def refused(make, rows, cols, scheme, error, text, **options):
    with pytest.raises(error, match=re.escape(text)):
        on_mesh(make, Mesh(row=rows, col=cols), lambda engine: None, scheme=scheme, flags=True, **options)


@pytest.mark.parametrize(("rows", "cols", "scheme"), legal([(1, 5), (2, 5)]))
def test_heads_that_columns_cannot_share(rows, cols, scheme):
    refused(partial(tiny_gpt, hidden=40, heads=4), rows, cols, scheme, ModelError,
            "block layer0.attention.qkv: units cannot be divided by mesh.col 5 (got 4). "
            "Set --mesh.col to a divisor, or change the model's size.")


@pytest.mark.parametrize(("rows", "cols", "scheme"), legal([(1, 5)]))
def test_features_that_columns_cannot_share(rows, cols, scheme):
    hidden = {"stationary": "block embedding.token: features", "summa": "block embedding.token: features"}
    refused(tiny_gpt, rows, cols, scheme, ModelError,
            f"{hidden[scheme]} cannot be divided by mesh.col 5 (got 36). Set --mesh.col to a divisor"
            if scheme in hidden else "block layer0.attention.qkv: units cannot be divided by mesh.col 5 (got 12)")


def test_features_that_rows_cannot_share():
    refused(tiny_gpt, 5, 1, "stationary", ModelError,
            "block embedding.token: features of one of 1 columns cannot be divided by mesh.row 5 (got 36). "
            "Set --mesh.row to a divisor, or change the model's size.")
    refused(tiny_gpt, 5, 2, "stationary", ModelError,
            "block embedding.token: features of one of 2 columns cannot be divided by mesh.row 5 (got 18)")


class Sublayer(nn.Module):
    """One layer alone."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)


def alone(build):
    return lambda: Model(blocks={"b": lambda: Sublayer(build())}, loss=squared)


@pytest.mark.parametrize(("build", "rows", "cols", "scheme", "text"), [
    (partial(layers.Linear, 6, 10, stationary="output"), 1, 4, "megatron",
     "features cannot be divided by mesh.col 4 (got 10)"),
    (partial(layers.Linear, 10, 6, stationary="input"), 1, 4, "sequence",
     "features cannot be divided by mesh.col 4 (got 10)"),
    (partial(layers.Linear, 6, 8, stationary="output"), 4, 1, "stationary",
     "features of the residual stream cannot be divided by mesh.row 4 (got 6)"),
    (partial(layers.Linear, 8, 6, stationary="input"), 4, 1, "stationary",
     "features of the residual stream cannot be divided by mesh.row 4 (got 6)"),
    (partial(layers.Linear, 6, 8, stationary="output"), 1, 4, "stationary",
     "features of the residual stream cannot be divided by mesh.col 4 (got 6)"),
    (partial(layers.Linear, 8, 6, stationary="input"), 2, 4, "summa",
     "features of the residual stream cannot be divided by mesh.col 4 (got 6)"),
    (partial(layers.LayerNorm, 6), 1, 4, "summa", "features cannot be divided by mesh.col 4 (got 6)"),
    (partial(layers.PositionEmbedding, 5, 6), 1, 4, "stationary", "features cannot be divided by mesh.col 4 (got 6)"),
    (partial(layers.ClassifierHead, 6, 2), 1, 4, "stationary", "features cannot be divided by mesh.col 4 (got 6)"),
    (partial(layers.VocabularyLinear, 6, 20), 4, 1, "stationary",
     "features of the residual stream cannot be divided by mesh.row 4 (got 6)"),
    (partial(layers.VocabularyLinear, 8, 3), 4, 1, "summa", "vocabulary is smaller than mesh.row 4 (got 3)"),
    (partial(layers.Embedding, 3, 8), 1, 4, "megatron", "vocabulary is smaller than mesh.col 4 (got 3)"),
    (partial(layers.Embedding, 2, 8), 3, 1, "summa", "vocabulary is smaller than mesh.row 3 (got 2)"),
], ids=str)
def test_sizes(build, rows, cols, scheme, text):
    refused(alone(build), rows, cols, scheme, ModelError, f"block b.layer: {text}. Set --mesh.")


@pytest.mark.parametrize(("rows", "cols", "scheme"), legal([(1, 4), (4, 1), (4, 3)]))
def test_a_vocabulary_smaller_than_the_mesh(rows, cols, scheme):
    axis, size = ("col", cols) if cols == 4 else ("row", rows)
    refused(partial(tiny_gpt, vocab=3), rows, cols, scheme, ModelError,
            f"vocabulary is smaller than mesh.{axis} {size} (got 3). Set --mesh.{axis} to a divisor")


@pytest.mark.parametrize("sharded", ["megatron", "sequence"])
@pytest.mark.parametrize(("rows", "cols"), [(2, 1), (2, 2), (3, 2)])
def test_megatron_has_no_rows(rows, cols, sharded):
    refused(tiny_gpt, rows, cols, sharded, ConfigError,
            f"tensor.scheme: splits blocks over columns only, and mesh.row is {rows} (got 'megatron'). "
            f"Set --mesh.row 1 --mesh.col {rows * cols}, or --tensor.scheme stationary.")


@pytest.mark.parametrize("ready", [False, True])
@pytest.mark.parametrize(("build", "text"), [
    (partial(nn.Linear, 4, 4), "parameter b.layer.weight: belongs to a layer that cannot be split over rows and "
                               "columns (got 'Sublayer'). Use Linear or ClassifierHead of ranvier.tensor.layers in its "
                               "place, or set --mesh.row 1 --mesh.col 1."),
    (partial(nn.LayerNorm, 4), "parameter b.layer.weight: belongs to a layer that cannot be split"),
    (partial(nn.Embedding, 4, 4), "Use Embedding, PositionEmbedding or BiasTable of ranvier.tensor.layers"),
    (partial(nn.Conv1d, 4, 4, 1), "parameter b.layer.weight: belongs to a layer that cannot be split"),
    (partial(nn.BatchNorm1d, 4), "parameter b.layer.weight: belongs to a layer that cannot be split"),
    (partial(nn.Dropout, 0.1), "block b.layer (nn.Dropout): draws different random numbers on each rank (got 0.1). "
                               "Use ranvier.tensor.layers.Dropout, whose masks are keyed by place."),
], ids=str)
@pytest.mark.parametrize(("rows", "cols"), [(2, 2), (1, 2), (2, 1)])
def test_layers_that_are_not_ours(rows, cols, build, text, ready):
    def make():
        module = Sublayer(build())
        return Model(blocks={"b": lambda: module}, loss=squared)

    refused(make if ready else alone(build), rows, cols, "stationary", ModelError, text)


def test_a_parameter_of_the_blocks_own():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return x * self.scale

    refused(alone(Scaled), 1, 2, "stationary", ModelError,
            "parameter b.layer.scale: belongs to a layer that cannot be split over rows and columns (got 'Sublayer'). "
            "Use Scale, Scalar or BiasTable of ranvier.tensor.layers")


@pytest.mark.parametrize("build", [partial(nn.Dropout1d, 0.1), partial(nn.AlphaDropout, 0.1)],
                         ids=["Dropout1d", "AlphaDropout"])
def test_other_kinds_of_dropout(build):
    refused(alone(build), 1, 2, "stationary", ModelError, "draws different random numbers on each rank")


@pytest.mark.parametrize("length", [7, 5])
def test_a_sequence_that_columns_cannot_share(length):
    mesh = Mesh(col=2)
    with pytest.raises(ModelError, match=re.escape(
            f"sequence of the inputs: cannot be shared by 2 columns (got {length}). Feed sequences whose length "
            f"mesh.col divides, or set --tensor.sequence-sharding false.")):
        on_mesh(tiny_gpt, mesh, lambda engine: engine.evaluate(share(engine, token_batches(mesh, length=length))),
                scheme="sequence", flags=True)


def test_a_sample_tells_of_a_sequence_that_columns_cannot_share_at_the_start():
    mesh = Mesh(col=2)
    refused(tiny_gpt, 1, 2, "sequence", ModelError, "sequence of the inputs: cannot be shared by 2 columns (got 7)",
            sample=token_batches(mesh, length=7)[0][0])


@pytest.mark.parametrize("rows", [1, 2])
def test_all_ranks_refuse_alike(rows):
    """Nobody is left waiting for a rank that has refused."""
    def rank(world):
        with raises("layer-not-divisible", "layer0.attention.qkv") as caught:
            Engine(small_gpt(), world, mesh=Mesh(row=rows, col=4), dtype=torch.float64)
        return str(caught.value)

    assert len(set(run_ranks(rank, 4 * rows))) == 1


def test_a_loss_that_does_not_know_of_columns():
    from ranvier.tensor.split.loss import next_token_loss

    refused(lambda: replace(tiny_gpt(), loss=next_token_loss), 1, 2, "stationary", ModelError,
            "loss: cannot take logits whose vocabulary is split over columns (got 'next_token_loss')")


class OwnForward(layers.Linear):
    def forward(self, x):
        return super().forward(x) + 1


def hooked():
    layer = layers.LayerNorm(8)
    layer.register_forward_hook(lambda *_: None)
    return layer


@pytest.mark.parametrize(("build", "text"), [
    (partial(OwnForward, 8, 8, stationary="output"), "has a forward of its own"), (hooked, "has hooks"),
    (partial(layers.Embedding, 8, 8, max_norm=1.0), "has max_norm"),
    (partial(layers.Embedding, 8, 8, scale_grad_by_freq=True), "has scale_grad_by_freq"),
    (partial(layers.LayerNorm, (2, 8)), "has several normalized dims")])
def test_more_than_the_split_layer_knows_of(build, text):
    refused(alone(build), 1, 2, "stationary", ModelError, text)


def test_a_parameter_that_two_layers_of_a_block_share():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = (layers.Linear(8, 8, stationary="output") for _ in range(2))
            self.other.weight = self.one.weight

        def forward(self, x):
            return self.other(self.one(x))

    refused(alone(Shared), 1, 2, "stationary", ModelError, "is shared by two layers of a block")
