"""Optimizers whose update needs more than a rank holds are refused if ranks hold less; others are not."""

from functools import partial

import pytest
import torch
from torch import nn

from ranvier.mesh import Mesh
from ranvier.optim.elementwise import refuse_coupled
from ranvier.pipeline.engine import Engine
from ranvier.testing.ranks import run_ranks
from tests.errors import raises
from tests.pipeline.parity import small_gpt, squared

WHOLE, COUPLED = "optimizer-needs-whole-parameters", "optimizer-couples-parameters"


class Scaled(torch.optim.Optimizer):
    """SGD with the gradients of a parameter, or of all, divided by their norm."""

    def __init__(self, params, lr=0.1, over_all=False):
        super().__init__(params, {"lr": lr})
        self.over_all = over_all

    @torch.no_grad()
    def step(self, closure=None):
        found = [one for group in self.param_groups for one in group["params"] if one.grad is not None]
        norm = sum(one.grad.norm().item() ** 2 for one in found) ** 0.5
        for one in found:
            one.sub_(one.grad, alpha=0.1 / (norm if self.over_all else one.grad.norm().item()))


class Noisy(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for one in self.param_groups[0]["params"]:
            one.add_(torch.randn_like(one))


class OfAModel(Scaled):
    """The check does not copy a model in order to try an optimizer."""

    def __init__(self, params, kept=None):
        super().__init__(params, over_all=True)
        self.models = [nn.Linear(2, 2) if kept is None else kept]


class Sign(torch.optim.Optimizer):
    """With its own state, its own settings, and tensors made from its parameters."""

    def __init__(self, params, lr=0.0):
        super().__init__(params, {"lr": lr})
        self.start = [one.detach().clone() for group in self.param_groups for one in group["params"]]
        self.count = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            for one in group["params"]:
                momentum = self.state[one].setdefault("momentum", torch.zeros_like(one))
                one.sub_(momentum.lerp_(one.grad, 0.1).sign(), alpha=group["lr"] / self.count)


class Decorated(torch.optim.AdamW):
    """torch's step also calls hooks of the program."""

    def step(self, closure=None):
        return super().step(closure)


class Bound(Scaled):
    """Its update is a bound method that it stores."""

    def __init__(self, params):
        super().__init__(params, over_all=True)
        self.update = super().step

    def step(self, closure=None):
        self.update()


class Distance(torch.optim.Optimizer):
    """The rate grows with the distance that all parameters have gone along their gradients, as in Prodigy."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1.0})
        self.rate = 1e-6

    @torch.no_grad()
    def step(self, closure=None):
        found = [one for group in self.param_groups for one in group["params"]]
        gone = sum(float((self.state[one].setdefault("start", one.clone()) - one).mul(one.grad).sum()) for one in found)
        self.rate = max(self.rate, gone / sum(float(one.grad.abs().sum()) for one in found))
        for one in found:
            one.sub_(one.grad.sign(), alpha=3 * self.rate * self.param_groups[0]["lr"])


OPTIM = torch.optim
ELEMENTWISE = [OPTIM.SGD, partial(OPTIM.SGD, momentum=0.9, nesterov=True), OPTIM.Adam, OPTIM.AdamW, OPTIM.NAdam,
               OPTIM.RAdam, OPTIM.Adamax, OPTIM.Adagrad, OPTIM.Adadelta, OPTIM.RMSprop, OPTIM.Rprop, OPTIM.ASGD,
               partial(OPTIM.AdamW, fused=True), partial(OPTIM.Adam, amsgrad=True, foreach=False), Sign, Noisy,
               Decorated, OfAModel, partial(OfAModel, kept=torch.empty(1025, 1024)), OPTIM.SparseAdam, OPTIM.LBFGS]


@pytest.mark.parametrize(("make", "code", "splits", "cuts"), [
    *((make, None, True, True) for make in ELEMENTWISE),
    (OPTIM.Adafactor, WHOLE, True, False), (OPTIM.Adafactor, None, False, True),
    (OPTIM.Muon, WHOLE, True, False), (OPTIM.Muon, None, False, True),
    (Scaled, WHOLE, True, False), (Scaled, None, False, True),
    (partial(Scaled, over_all=True), WHOLE, True, False), (partial(Scaled, over_all=True), COUPLED, False, True),
    (Bound, COUPLED, False, True), (Distance, COUPLED, False, True),
    (partial(OPTIM.Adafactor, lr=torch.tensor(0.0)), WHOLE, True, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_what_an_update_depends_on(make, code, splits, cuts, dtype):
    parameters = [nn.Parameter(torch.randn(5, 3).to(dtype)) for _ in range(2)]
    optimizer = make(parameters)
    before, drawn = [one.detach().clone() for one in parameters], torch.get_rng_state()
    called, states = [], str(optimizer.state_dict())
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    if code is None:
        refuse_coupled(optimizer, splits=splits, cuts=cuts)
    else:
        with raises(code, where="optimizer", value=type(optimizer).__name__):
            refuse_coupled(optimizer, splits=splits, cuts=cuts)
    assert not called and str(optimizer.state_dict()) == states and torch.equal(drawn, torch.get_rng_state())
    assert all(torch.equal(*pair) for pair in zip(before, parameters, strict=True))
    assert getattr(optimizer, "count", 0) == 0


def test_one_group_of_several():
    """Biases are trained by SGD, and matrices by normalised gradients."""
    class Both(Scaled):
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for one in group["params"]:
                    one.sub_(one.grad / one.grad.norm() if group["matrices"] else one.grad, alpha=group["lr"])

    groups = [{"params": [nn.Parameter(torch.ones(3))], "matrices": False},
              {"params": [], "matrices": False},
              {"params": [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, 3))], "matrices": True}]
    with raises(WHOLE):
        refuse_coupled(Both(groups), splits=True, cuts=False)


@pytest.mark.parametrize(("mesh", "optimizer", "code"), [
    (Mesh(col=2), OPTIM.Adafactor, WHOLE), (Mesh(row=2), Scaled, WHOLE),
    (Mesh(pipe=2), partial(Scaled, over_all=True), COUPLED), (Mesh(pipe=2), Scaled, None),
    (Mesh(data=2), partial(Scaled, over_all=True), None)], ids=str)
def test_engines_refuse_them(mesh, optimizer, code):
    def rank(world):
        Engine(small_gpt(1), world, mesh=mesh, dtype=torch.float64, optimizer=optimizer).close()

    if code is None:
        run_ranks(rank, mesh.size)
    else:
        with raises(code, where="optimizer"):
            run_ranks(rank, mesh.size)


def test_a_stage_that_trains_alone_may_couple_its_parameters():
    def rank(world):
        blocks = [nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)]
        Engine(blocks, world, mesh=Mesh(pipe=2), loss=squared, optimizer=partial(Scaled, over_all=True)).close()

    run_ranks(rank, 2)
