"""Parameters and buffers that forwards or backwards change while other microbatches are in flight: gradients and
buffers are those of a plain loop, or the change is refused."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ranvier.config.run import Memory
from ranvier.mesh import Mesh
from ranvier.pipeline.engine import Engine
from ranvier.pipeline.microbatch import microbatches
from ranvier.testing.ranks import run_ranks
from tests.errors import raises
from tests.pipeline.parity import squared


class Teacher(nn.Module):
    """A layer and its moving average, which `move` updates in each forward."""

    def __init__(self, move, *, needs_gradient=True):
        super().__init__()
        self.layer, self.teacher = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.move, self.needs_gradient = move, needs_gradient

    def forward(self, x):
        with torch.no_grad():
            self.move(self.teacher.weight, self.layer.weight)
        return self.layer(x) - self.teacher(x if self.needs_gradient else x.detach())


def through_data(average, weight):
    average.data.mul_(0.5).add_(weight.data, alpha=0.5)


def other_data(average, weight):
    average.data = average.data * 0.5 + weight.data * 0.5


def in_place(average, weight):
    average.mul_(0.5).add_(weight, alpha=0.5)


class Scaled(nn.Module):
    """Multiplies by a buffer that each forward changes without torch noticing."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        if self.training:
            self.scale.data.mul_(0.5).add_(x.detach().abs().mean(0), alpha=0.5)
        return self.layer(x) * self.scale


class FirstData(nn.Module):
    """Initialises its scale from the first samples."""

    def __init__(self):
        super().__init__()
        self.scale, self.is_new = nn.Parameter(torch.ones(4)), True

    def forward(self, x):
        if self.is_new:
            self.scale.data.copy_(1 / x.detach().std(0))
            self.is_new = False
        return x * self.scale


class Clamped(nn.Linear):
    """late: the product uses the weight as it was before."""

    def __init__(self, late=False):
        super().__init__(4, 4)
        self.late = late

    def forward(self, x):
        y = torch.tanh(super().forward(x)) if self.late else x
        self.weight.data.clamp_(-0.2, 0.2)
        return y if self.late else super().forward(x)


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant=False, norm=nn.BatchNorm1d):
        super().__init__()
        self.layers, self.use_reentrant = nn.Sequential(nn.Linear(4, 4), norm(4)), use_reentrant

    def forward(self, x):
        return checkpoint(self.layers, x, use_reentrant=self.use_reentrant)


class Norm(nn.Module):
    """Running statistics in buffers with other names."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("variance", torch.ones(4))

    def forward(self, x):
        return normalized(x, self)


def normalized(x, norm):
    return nn.functional.batch_norm(x, norm.mean, norm.variance, training=norm.training)


class ScaledByMean(Norm):
    """Also uses the running mean itself."""

    def forward(self, x):
        return super().forward(x) * self.mean


def trained(block, mesh, **options):
    """The state of a model with this block on the first stage, after a plain loop and after the engine."""
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(4, 4), copy.deepcopy(block), nn.Linear(4, 4), nn.Linear(4, 4)).double()]
    models += [copy.deepcopy(models[0]) for _ in range(mesh.size)]
    x = torch.randn(8, 4, dtype=torch.float64)
    optimizer = torch.optim.SGD(models[0].parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        for part in x.split(2):
            (squared(models[0](part), part)[0] / x.numel()).backward()
        optimizer.step()

    def rank(world):
        engine = Engine(models[1 + world.rank], world, mesh=mesh, loss=squared, **options,
                        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        for _ in range(2):
            engine.train_batch(microbatches(x, x, size=2))
        return engine.full_state_dict()

    return models[0].state_dict(), run_ranks(rank, mesh.size)[0]


@pytest.mark.parametrize("block", [Teacher(in_place), Teacher(through_data), Teacher(other_data), Scaled(),
                                   ScaledByMean()])
def test_a_change_of_what_a_backward_needs_is_refused(block):
    """Torch would not notice a change through `data`."""
    with raises("changed-under-way", where="the backward of microbatch 0") as caught:
        trained(block, Mesh(pipe=2))
    assert "modified by an inplace operation" in str(caught.value.__cause__)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("norm, buffer", [(nn.BatchNorm1d, "num_batches_tracked"), (lambda size: Norm(), "mean")])
def test_a_buffer_that_forwards_and_backwards_change_is_refused(use_reentrant, norm, buffer):
    with raises("buffer-changed-in-backward", where=f"buffer 1.layers.1.{buffer}"):
        trained(Checkpointed(use_reentrant, norm), Mesh(pipe=2))


@pytest.mark.parametrize("block, mesh", [
    (Teacher(through_data), Mesh()), (Teacher(in_place), Mesh()), (Scaled(), Mesh()), (Checkpointed(), Mesh()),
    (Teacher(in_place, needs_gradient=False), Mesh(pipe=2)), (FirstData(), Mesh(pipe=2)), (Clamped(), Mesh(pipe=2)),
    (Teacher(through_data, needs_gradient=False), Mesh(pipe=2)), (nn.BatchNorm1d(4), Mesh(pipe=2)),
    (Norm(), Mesh(pipe=2)), (torch.fx.symbolic_trace(Norm()), Mesh(pipe=2)),
    (Checkpointed(norm=nn.LayerNorm), Mesh(pipe=2))])
def test_other_changes_give_the_values_of_a_plain_loop(block, mesh):
    expected, found = trained(block, mesh)
    for name, one in expected.items():
        torch.testing.assert_close(found[name], one, rtol=1e-12, atol=1e-14, msg=name)


@pytest.mark.parametrize("block", [Scaled(), nn.BatchNorm1d(4), Clamped()])
@pytest.mark.parametrize("mesh", [Mesh(), Mesh(pipe=2)], ids=str)
def test_a_change_that_recomputation_does_once(block, mesh):
    expected, found = trained(block, mesh, memory=Memory(recompute=1))
    for name, one in expected.items():
        torch.testing.assert_close(found[name], one, rtol=1e-12, atol=1e-14, msg=name)


@pytest.mark.parametrize("block, name", [(Teacher(through_data), "1.teacher.weight"), (Clamped(late=True), "1.weight"),
                                         (Teacher(other_data), "1.teacher.weight")])
@pytest.mark.parametrize("mesh", [Mesh(), Mesh(pipe=2)], ids=str)
def test_a_change_that_recomputation_would_do_twice_is_refused(block, name, mesh):
    with raises("recompute-parameter-changed", where=f"parameter {name}"):
        trained(block, mesh, memory=Memory(recompute=1))
