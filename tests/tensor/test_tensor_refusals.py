"""Models that cannot be split are refused by name, with a remedy."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from ranvier.block import Model
from ranvier.mesh import Mesh
from ranvier.pipeline.engine import Engine
from ranvier.tensor import layers
from ranvier.testing.ranks import run_ranks
from tests.covering import quick
from tests.errors import raises
from tests.pipeline.parity import small_gpt, squared
from tests.tensor.split_parity import legal, on_mesh, share, tiny_gpt, token_batches


def refused(make, rows, cols, scheme, code, *facts, **options):
    with raises(code, *facts):
        on_mesh(make, Mesh(row=rows, col=cols), lambda engine: None, scheme=scheme, flags=True, **options)


@pytest.mark.parametrize(("rows", "cols", "scheme"), legal([(1, 5), (2, 5)]))
def test_heads_that_columns_cannot_share(rows, cols, scheme):
    refused(partial(tiny_gpt, hidden=40, heads=4), rows, cols, scheme, "layer-not-divisible",
            "layer0.attention.qkv", "--mesh.col", 5, 4)


@pytest.mark.parametrize(("rows", "cols", "scheme"), legal([(1, 5)]))
def test_features_that_columns_cannot_share(rows, cols, scheme):
    facts = ("embedding.token", 36) if scheme in ("stationary", "summa") else ("layer0.attention.qkv", 12)
    refused(tiny_gpt, rows, cols, scheme, "layer-not-divisible", "--mesh.col", 5, *facts)


def test_features_that_rows_cannot_share():
    for cols, features in ((1, 36), (2, 18)):
        refused(tiny_gpt, 5, cols, "stationary", "layer-not-divisible", "embedding.token", cols, "mesh.row", features)


class Sublayer(nn.Module):
    """One layer alone."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)


def alone(build):
    return lambda: Model(blocks={"b": lambda: Sublayer(build())}, loss=squared)


@pytest.mark.parametrize(("build", "rows", "cols", "scheme", "size"), [
    (partial(layers.Linear, 6, 10, stationary="output"), 1, 4, "megatron", 10),
    (partial(layers.Linear, 10, 6, stationary="input"), 1, 4, "sequence", 10),
    (partial(layers.Linear, 6, 8, stationary="output"), 4, 1, "stationary", 6),
    (partial(layers.Linear, 8, 6, stationary="input"), 4, 1, "stationary", 6),
    (partial(layers.Linear, 6, 8, stationary="output"), 1, 4, "stationary", 6),
    (partial(layers.Linear, 8, 6, stationary="input"), 2, 4, "summa", 6),
    (partial(layers.LayerNorm, 6), 1, 4, "summa", 6),
    (partial(layers.PositionEmbedding, 5, 6), 1, 4, "stationary", 6),
    (partial(layers.ClassifierHead, 6, 2), 1, 4, "stationary", 6),
    (partial(layers.VocabularyLinear, 6, 20), 4, 1, "stationary", 6),
    (partial(layers.VocabularyLinear, 8, 3), 4, 1, "summa", 3),
    (partial(layers.Embedding, 3, 8), 1, 4, "megatron", 3),
    (partial(layers.Embedding, 2, 8), 3, 1, "summa", 2),
], ids=str)
def test_sizes(build, rows, cols, scheme, size):
    axis, extent = ("mesh.row", rows) if cols == 1 else ("mesh.col", cols)
    refused(alone(build), rows, cols, scheme, "layer-not-divisible", "b.layer", axis, extent, size)


@pytest.mark.parametrize(("rows", "cols", "scheme"), quick(4, legal([(1, 4), (4, 1), (4, 3)])))
def test_a_vocabulary_smaller_than_the_mesh(rows, cols, scheme):
    axis, size = ("col", cols) if cols == 4 else ("row", rows)
    refused(partial(tiny_gpt, vocab=3), rows, cols, scheme, "layer-not-divisible", f"--mesh.{axis}", size, 3)


@pytest.mark.parametrize("sharded", ["megatron", "sequence"])
@pytest.mark.parametrize(("rows", "cols"), [(2, 1), (2, 2), (3, 2)])
def test_megatron_has_no_rows(rows, cols, sharded):
    refused(tiny_gpt, rows, cols, sharded, "megatron-with-rows", rows, f"--mesh.col {rows * cols}")


@pytest.mark.parametrize("ready", [False, True])
@pytest.mark.parametrize(("build", "error"), [
    (partial(nn.Linear, 4, 4), ("layer-cannot-be-split", "b.layer.weight", "Linear", "ClassifierHead")),
    (partial(nn.LayerNorm, 4), ("layer-cannot-be-split", "b.layer.weight")),
    (partial(nn.Embedding, 4, 4), ("layer-cannot-be-split", "Embedding", "PositionEmbedding", "BiasTable")),
    (partial(nn.Conv1d, 4, 4, 1), ("layer-cannot-be-split", "b.layer.weight")),
    (partial(nn.BatchNorm1d, 4), ("layer-cannot-be-split", "b.layer.weight")),
    (partial(nn.Dropout, 0.1), ("random-layer-on-columns", "b.layer", "nn.Dropout", 0.1)),
], ids=str)
@pytest.mark.parametrize(("rows", "cols"), [(2, 2), (1, 2), (2, 1)])
def test_layers_that_are_not_ours(rows, cols, build, error, ready):
    def make():
        module = Sublayer(build())
        return Model(blocks={"b": lambda: module}, loss=squared)

    refused(make if ready else alone(build), rows, cols, "stationary", *error)


def test_a_parameter_of_the_blocks_own():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return x * self.scale

    refused(alone(Scaled), 1, 2, "stationary", "layer-cannot-be-split", "b.layer.scale", "Scale", "Scalar", "BiasTable")


@pytest.mark.parametrize("build", [partial(nn.Dropout1d, 0.1), partial(nn.AlphaDropout, 0.1)],
                         ids=["Dropout1d", "AlphaDropout"])
def test_other_kinds_of_dropout(build):
    refused(alone(build), 1, 2, "stationary", "random-layer-on-columns", "b.layer")


@pytest.mark.parametrize("length", [7, 5])
def test_a_sequence_that_columns_cannot_share(length):
    mesh = Mesh(col=2)
    with raises("sequence-not-shared-by-columns", 2, "--tensor.sequence-sharding", value=length):
        on_mesh(tiny_gpt, mesh, lambda engine: engine.evaluate(share(engine, token_batches(mesh, length=length))),
                scheme="sequence", flags=True)


def test_a_sample_tells_of_a_sequence_that_columns_cannot_share_at_the_start():
    mesh = Mesh(col=2)
    refused(tiny_gpt, 1, 2, "sequence", "sequence-not-shared-by-columns", 2, 7,
            sample=token_batches(mesh, length=7)[0][0])


@pytest.mark.parametrize("rows", [1, 2])
def test_all_ranks_refuse_alike(rows):
    """No rank is left waiting for a rank that has refused."""
    def rank(world):
        with raises("layer-not-divisible", "layer0.attention.qkv") as caught:
            Engine(small_gpt(), world, mesh=Mesh(row=rows, col=4), dtype=torch.float64)
        return str(caught.value)

    assert len(set(run_ranks(rank, 4 * rows))) == 1


def test_a_loss_that_does_not_know_of_columns():
    from ranvier.tensor.split.loss import next_token_loss

    refused(lambda: replace(tiny_gpt(), loss=next_token_loss), 1, 2, "stationary",
            "loss-needs-whole-vocab", "next_token_loss")


class OwnForward(layers.Linear):
    def forward(self, x):
        return super().forward(x) + 1


def hooked():
    layer = layers.LayerNorm(8)
    layer.register_forward_hook(lambda *_: None)
    return layer


@pytest.mark.parametrize(("build", "fact"), [
    (partial(OwnForward, 8, 8, stationary="output"), "forward"), (hooked, "hooks"),
    (partial(layers.Embedding, 8, 8, max_norm=1.0), "max_norm"),
    (partial(layers.Embedding, 8, 8, scale_grad_by_freq=True), "scale_grad_by_freq"),
    (partial(layers.LayerNorm, (2, 8)), "normalized")])
def test_more_than_the_split_layer_knows_of(build, fact):
    refused(alone(build), 1, 2, "stationary", "layer-state-lost", "b.layer", fact)


def test_a_parameter_that_two_layers_of_a_block_share():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = (layers.Linear(8, 8, stationary="output") for _ in range(2))
            self.other.weight = self.one.weight

        def forward(self, x):
            return self.other(self.one(x))

    refused(alone(Shared), 1, 2, "stationary", "parameter-shared-by-layers", "weight")
