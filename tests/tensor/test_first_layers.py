"""Factors of features, scalars, tables of biases, convolutions over tokens: on every mesh, and against torch's."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from ranvier.block import Model
from ranvier.config.run import Memory, TensorParallel
from ranvier.errors import DivisibilityError, ModelError
from ranvier.mesh import Mesh
from ranvier.pipeline.microbatch import Microbatch
from ranvier.plan.cut import meta_mesh
from ranvier.tensor import layers
from ranvier.tensor.split.layers import split_layers
from ranvier.testing import check_split
from ranvier.testing.reference import Reference
from ranvier.testing.split import MESHES
from tests.covering import first
from tests.tensor.split_parity import SEED, assert_close, gradients_on, legal

HIDDEN, HEADS, LENGTH = 24, 12, 12


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = layers.Embedding(20, HIDDEN)

    def forward(self, ids):
        return self.token(ids)


class Attention(nn.Module):
    """T5's attention, whose scores have a bias by the distance of tokens; with a learned temperature and LayerScale."""

    def __init__(self):
        super().__init__()
        self.norm = layers.RMSNorm(HIDDEN)
        self.qkv = nn.ModuleList(layers.Linear(HIDDEN, HIDDEN, stationary="output", units=HEADS) for _ in range(3))
        self.head = layers.Scale(HIDDEN // HEADS, over="heads")
        self.table, self.temperature = layers.BiasTable(5, HEADS), layers.Scalar(1.2)
        self.back = layers.Linear(HIDDEN, HIDDEN, stationary="input", units=HEADS)
        self.scale = layers.Scale(HIDDEN, 0.3)

    def forward(self, x):
        y = self.norm(x)
        q, k, v = (one(y).unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2) for one in self.qkv)
        places = torch.arange(LENGTH)
        bias = self.table((places[:, None] - places).clamp(-2, 2) + 2).permute(2, 0, 1).unsqueeze(0)
        scores = self.head(q) @ k.transpose(-1, -2) * self.temperature() + bias
        return x + self.scale(self.back((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)))


class Mixer(nn.Module):
    """A convolution over tokens between two products, with ReZero, and a scalar of shape (1,) on the stream."""

    def __init__(self, kernel=3, causal=True):
        super().__init__()
        self.norm = layers.LayerNorm(HIDDEN)
        self.into = layers.Linear(HIDDEN, 2 * HIDDEN, stationary="output")
        self.conv = layers.DepthwiseConv1d(2 * HIDDEN, kernel, causal=causal)
        self.inner = layers.Scale(2 * HIDDEN, over="inner")
        self.out = layers.Linear(2 * HIDDEN, HIDDEN, stationary="input")
        self.alpha, self.beta = layers.Scalar(0.1), layers.Scalar(0.9, shape=(1,))

    def forward(self, x):
        y = self.inner(functional.silu(self.conv(self.into(self.norm(x)))))
        return x * self.beta() + torch.tanh(self.alpha()) * self.out(y)


class Stream(nn.Module):
    """Convolutions of the residual stream."""

    def __init__(self, features=HIDDEN):
        super().__init__()
        self.conv = layers.DepthwiseConv1d(features, 4, causal=False, over="stream", bias=False)
        self.causal = layers.DepthwiseConv1d(features, 3, over="stream")

    def forward(self, x):
        return x + self.conv(x) * self.causal(x)


class Classes(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.scale = layers.ClassifierHead(HIDDEN, 3), layers.Scalar(2.0)

    def forward(self, x):
        return self.head(x) * self.scale()


def class_loss(scores, targets):
    return functional.cross_entropy(scores, targets, reduction="sum"), len(targets)


IDS = torch.randint(20, (4, LENGTH), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("meshes", "least"), [
    ([(2, 2)], 3), pytest.param(MESHES, 11, marks=pytest.mark.slow)], ids=["2 x 2", "all"])
def test_every_mesh_and_scheme(meshes, least):
    blocks = [Words(), Attention(), Mixer(), Mixer(kernel=4, causal=False), Classes()]
    outcomes = check_split(blocks, (IDS, IDS[:, 0] % 3), loss=class_loss, meshes=meshes)
    assert {outcome.status for outcome in outcomes} == {"agrees"} and len(outcomes) >= least


def test_a_convolution_of_the_stream():
    """Columns that share the sequence exchange tokens for features, and back."""
    outcomes = check_split([Words(), Stream()], IDS)
    assert {outcome.status for outcome in outcomes} == {"agrees"} and len(outcomes) > 10


def test_a_row_without_samples():
    outcomes = check_split([Words(), Attention(), Mixer(), Classes()], (IDS[:1], IDS[:1, 0] % 3), loss=class_loss,
                           meshes=[(2, 1), (2, 2)], schemes=["stationary"])
    assert {outcome.status for outcome in outcomes} == {"agrees"}


def model() -> Model:
    blocks = {"words": Words(), "attention": Attention(), "mixer": Mixer(), "classes": Classes()}
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in nn.ModuleList(blocks.values()).double().parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)
    return Model(blocks={name: partial(copy.deepcopy, block) for name, block in blocks.items()}, loss=class_loss)


@pytest.mark.parametrize(("rows", "cols", "scheme"), first(
    [(1, 2, "sequence")], legal([(2, 2), (1, 2), (3, 1)], ["stationary", "summa", "sequence"])))
def test_gradients_in_the_engine(rows, cols, scheme):
    batches = [[Microbatch(ids, ids[:, 0] % 3, torch.arange(2 * rows) + 10 * number) for number, ids in enumerate(
        torch.randint(20, (3, 2 * rows, LENGTH), generator=torch.Generator().manual_seed(2)))]]
    reference = Reference(model(), seed=SEED, dtype=torch.float64)
    reference.forward_backward(batches[0])
    mesh, options = Mesh(pipe=2, row=rows, col=cols), {"memory": Memory(recompute=1)} if rows == 2 else {}
    outcome = gradients_on(model, batches, mesh, scheme=scheme, **options)
    assert_close(outcome.gradients, reference.gradients(), least=1e-3)  # the gradient of the keys' bias is zero


def test_they_equal_torchs():
    x, kernel = torch.randn(2, LENGTH, HIDDEN), 4
    for causal in (True, False):
        ours = layers.DepthwiseConv1d(HIDDEN, kernel, causal=causal)
        theirs = nn.Conv1d(HIDDEN, HIDDEN, kernel, groups=HIDDEN, padding=kernel - 1 if causal else "same")
        theirs.load_state_dict(ours.state_dict())
        torch.testing.assert_close(ours(x), theirs(x.transpose(1, 2))[..., :LENGTH].transpose(1, 2))
    scale = layers.Scale(HIDDEN, 1e-5)
    assert torch.equal(scale(x), x * 1e-5) and scale.weight.shape == (HIDDEN,)
    assert layers.Scalar(0.5)().shape == () and layers.Scalar(0.5, shape=(1,))().shape == (1,)
    table, theirs = layers.BiasTable(5, HEADS), nn.Embedding(5, HEADS)
    theirs.load_state_dict(table.state_dict())
    assert torch.equal(table(IDS % 5), theirs(IDS % 5))


def test_what_cannot_be_split_is_named():
    mesh = meta_mesh(Mesh(col=2), TensorParallel(scheme="megatron", sequence_sharding=True), "cpu")
    with pytest.raises(DivisibilityError) as caught:
        split_layers(Stream(5), mesh, "block")
    assert (caught.value.where, caught.value.value) == ("block.conv", 5)
    with pytest.raises(ModelError):
        layers.DepthwiseConv1d(HIDDEN, 3, over="heads")
    with pytest.raises(DivisibilityError) as caught:
        split_layers(layers.BiasTable(5, 3), mesh, "block.table")
    assert (caught.value.where, caught.value.value) == ("block.table", 3)
