"""Parametrised layers are left to autograd, and each weight is computed as often as plain torch computes it."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from ranvier.block import Model
from ranvier.config.run import Memory, Pipeline
from ranvier.mesh import Mesh
from tests.pipeline.parity import assert_parity, on_mesh, points, share, squared


class Counted(nn.Module):
    """A parametrization that counts its evaluations."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, weight):
        self.calls += 1
        return weight * 1.5


def parametrized(make, name="weight", how=Counted):
    module = make()
    parametrize.register_parametrization(module, name, how(), unsafe=True)
    return module


linear = partial(nn.Linear, 4, 4)


def model(*blocks):
    torch.manual_seed(0)
    return Model(blocks={f"b{number}": lambda module=module: module for number, module in enumerate(
        block() for block in blocks)}, loss=squared)


@pytest.mark.parametrize("with_sample", [False, True])
def test_each_forward_evaluates_once(with_sample):
    """A linear layer, by weight and by bias, and a table; counting costs on a sample reads no real weight."""
    layers = [parametrized(linear), parametrized(linear, "bias"), parametrized(partial(nn.Embedding, 200, 4)), linear()]
    counts = []

    class Looks(nn.Module):
        def __init__(self, table):
            super().__init__()
            self.table = table

        def forward(self, x):
            return x + self.table(x[:, 0].abs().long())

    blocks = [layers[0], layers[1], Looks(layers[2]), layers[3]]
    counted = [layers[0].parametrizations.weight[0], layers[1].parametrizations.bias[0],
               layers[2].parametrizations.weight[0]]
    batches = points([[2, 3, 1]])

    def work(engine):
        for _ in range(2):
            for one in counted:
                one.calls = 0
            engine.forward_backward(share(engine, batches))
            counts.append([one.calls for one in counted])

    on_mesh(lambda: Model(blocks={f"b{number}": lambda block=block: block for number, block in enumerate(blocks)},
                          loss=squared), Mesh(), work, sample=batches[0][0] if with_sample else None,
            pipeline=Pipeline(defer_bytes=1 << 20))
    assert counts == [[3, 3, 3]] * 2


@pytest.mark.parametrize("recompute", ["none", 1, 2])
def test_gradients_with_a_sample(recompute):
    """Spectral norm iterates once for each forward, from the same start: counting costs is not a forward."""
    blocks = [linear, lambda: parametrizations.spectral_norm(linear()), lambda: parametrizations.weight_norm(linear()),
              lambda: parametrizations.spectral_norm(linear())]
    batches = points([[2, 3, 1]])
    assert_parity(partial(model, *blocks), batches, Mesh(), sample=batches[0][0],
                  memory=Memory(recompute=recompute))
