"""Trainable tensors of no block cause a warning: their gradients are not those of the batch."""

import warnings

import pytest
import torch
from torch import nn

from ranvier.mesh import Mesh
from ranvier.pipeline.engine import Engine
from ranvier.testing.ranks import run_ranks
from tests.pipeline.parity import points, share, squared


class Scaled(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 4, dtype=torch.float64), [scale] if scale is not None else []

    def forward(self, x):
        return self.layer(x) * self.scale[0] if self.scale else self.layer(x)


def outside(**options):
    return torch.ones((), dtype=torch.float64, requires_grad=True)


def in_loss(scale):
    return lambda outputs, targets: squared(outputs * scale, targets)


def penalty(outputs, targets):
    """A loss with its own leaf, whose gradient it computes itself."""
    inner = outputs.detach().requires_grad_()
    slope, = torch.autograd.grad((inner ** 2).sum(), inner, create_graph=True)
    total, weight = squared(outputs, targets)
    return total + (slope ** 2).sum(), weight


class Learned(nn.Module):
    """A loss that is a module is a block like others."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, outputs, targets):
        return squared(outputs * self.scale, targets)


CASES = {
    "in a block": (lambda: Scaled(outside()), lambda: squared, True),
    "in the loss": (lambda: Scaled(None), lambda: in_loss(outside()), True),
    "a parameter": (lambda: Scaled(None), lambda: in_loss(nn.Parameter(outside().detach())), True),
    "without a gradient": (lambda: Scaled(outside().detach()), lambda: squared, False),
    "of one forward": (lambda: Scaled(None), lambda: penalty, False),
    "of a loss": (lambda: Scaled(None), Learned, False),
}


@pytest.mark.parametrize("mesh", [Mesh(data=2), Mesh(pipe=2)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_a_trainable_tensor_of_no_block_is_told(case, mesh):
    block, loss, is_told = CASES[case]

    def rank(world):
        engine = Engine([block(), block()], world, mesh=mesh, loss=loss())
        for _ in range(3):
            engine.forward_backward(share(engine, points([[2], [3]][:mesh.data])))
        engine.close()

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run_ranks(rank, 2)
    assert bool(sum("outside all blocks" in str(one.message) for one in told)) == is_told
