"""Tensors that blocks leave in attributes for the loss, which on another stage does not see them."""

from functools import partial

import pytest
import torch
from torch import nn

from ranvier.mesh import Mesh
from ranvier.pipeline.engine import Engine
from ranvier.testing.ranks import run_ranks
from tests.errors import raises
from tests.pipeline.parity import points, share, squared


class Expert(nn.Linear):
    """Leaves a balancing loss, and what it has seen."""

    def __init__(self, detached=False):
        super().__init__(4, 4, dtype=torch.float64)
        self.detached, self.kept = detached, {}

    def forward(self, x):
        y = super().forward(x)
        self.kept["aux"] = y.detach().square().sum() if self.detached else y.square().sum()
        return y


def balanced(blocks):
    return sum(block.kept.get("aux", 0.0) for block in blocks if isinstance(block, Expert))


class Trainer:
    def __init__(self, blocks):
        self.blocks = blocks

    def loss(self, outputs, targets):
        return squared(outputs, targets)[0] + balanced(self.blocks), targets.numel()


def by_closure(blocks):
    def aux():
        return balanced(blocks)
    return lambda outputs, targets: (squared(outputs, targets)[0] + aux(), targets.numel())


def by_method(blocks):
    return Trainer(blocks).loss


def by_argument(blocks):
    return partial(lambda blocks, outputs, targets: Trainer(blocks).loss(outputs, targets), nn.ModuleList(blocks))


def trained(mesh, loss_of, *blocks):
    def rank(world):
        torch.manual_seed(0)
        made = [build() for build in blocks]
        engine = Engine(made, world, mesh=mesh, loss=loss_of(made))
        result = engine.forward_backward(share(engine, points([[2, 3]] * mesh.data)))
        engine.close()
        return result.loss

    return run_ranks(rank, mesh.size)[0]


PLAIN = partial(nn.Linear, 4, 4, dtype=torch.float64)


@pytest.mark.parametrize("loss_of", [by_closure, by_method, by_argument])
def test_a_loss_on_another_stage_does_not_read_them(loss_of):
    assert trained(Mesh(), loss_of, Expert, PLAIN) > trained(Mesh(), loss_of, PLAIN, PLAIN) + 0.1
    with raises("loss-reads-attribute", where="0.kept"):
        trained(Mesh(pipe=2), loss_of, Expert, PLAIN)


def test_what_is_no_loss_is_taken():
    """On the loss's own stage, detached, or where the loss does not have the module."""
    for loss_of, *blocks in ((by_closure, PLAIN, Expert), (by_closure, partial(Expert, True), PLAIN),
                             (lambda blocks: squared, Expert, PLAIN)):
        trained(Mesh(pipe=2), loss_of, *blocks)
