"""Several engines of one module take turns: no engine's step uses gradients or old values of another engine."""

from contextlib import closing
from functools import partial
from io import BytesIO

import pytest
import torch
from torch import nn

from ranvier.config.run import Optim, Pipeline
from ranvier.mesh import Mesh
from ranvier.pipeline.engine import Engine
from ranvier.testing.ranks import run_ranks
from tests.errors import raises
from tests.pipeline.parity import assert_close, points, share, squared

SGD = partial(torch.optim.SGD, lr=0.1)
ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
OTHER = "gradient-of-another-engine"


def plain():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4, dtype=torch.float64), nn.Tanh()) for _ in range(3)))


def size(outputs, targets):
    return outputs.abs().sum(), targets.numel()


def on_two(mesh, work, *, how=None, **other):
    """`work(one, two, batch, make)` on each rank, with two engines of one module; `make` makes the second again."""
    models = [plain() for _ in range(mesh.size)]
    batch = points([[2, 3]] * mesh.data)

    def rank(world):
        make = partial(Engine, models[world.rank], world, mesh=mesh, loss=size, **(other or {"optimizer": SGD}))
        one = Engine(models[world.rank], world, mesh=mesh, loss=squared, **(how or {"optimizer": ADAMW}))
        two = make()
        found = work(one, two, share(one, batch), make)
        one.close()
        two.close()
        return found

    return run_ranks(rank, mesh.size)


def take_turns(one, two, batch, make):
    for _ in range(2):
        result = one.forward_backward(batch)
        one.evaluate(batch)
        two.evaluate(batch)
        one.step(result)
        two.train_batch(batch)
    return one.full_state_dict()


@pytest.mark.parametrize(("mesh", "how", "other"), [
    (Mesh(data=2), {}, {}), (Mesh(pipe=2), {}, {}),
    (Mesh(pipe=2), {"optim": Optim(weight_decay=0.1), "learning_rate": 1e-2}, {
        "optim": Optim(algorithm="sgd", momentum=0.0, weight_decay=0.0), "learning_rate": 0.1})],
    ids=["replicas", "stages", "ranvier's optimizers"])
def test_in_turns_they_are_two_optimizers_of_a_plain_loop(mesh, how, other):
    found, *_ = on_two(mesh, take_turns, how=how, **other)
    model = plain()
    optimizers = (ADAMW(model.parameters()), squared), (SGD(model.parameters()), size)
    batch = [one for replica in points([[2, 3]] * mesh.data) for one in replica]
    for _ in range(2):
        for optimizer, loss in optimizers:
            optimizer.zero_grad()
            sums = [loss(model(one.inputs), one.targets) for one in batch]
            (sum(total for total, _ in sums) / sum(int(count) for _, count in sums)).backward()
            optimizer.step()
    assert_close(found, model.state_dict())


def begin_another(one, two, batch, make):
    result = one.forward_backward(batch)
    with raises(OTHER):
        two.train_batch(batch)
    with raises(OTHER):
        two.forward_backward(batch)
    one.step(result)  # as if the other engine had not been called
    two.train_batch(batch)


def make_another(one, two, batch, make):
    """As when a notebook's cell is run again: the new engine trains, and the first one has no gradients any more."""
    result = one.forward_backward(batch)
    another = make()
    for call in (one.gradients, partial(one.step, result)):
        with raises(OTHER):
            call()
    another.train_batch(batch)
    another.close()


def step_with_others_gradients(one, two, batch, make):
    result = one.forward_backward(batch)
    for parameter in one.parameters():
        parameter.grad = None
    two.forward_backward(batch)
    for call in (one.gradients, partial(one.clip_grad_norm_, 1.0), partial(one.step, result)):
        with raises(OTHER):
            call()
    two.zero_grad()


def let_gradients_go(one, two, batch, make):
    """A program that updates by hand ends a step as it would with a single engine."""
    def none(parameters):
        for parameter in parameters:
            parameter.grad = None

    def zero(parameters):
        for parameter in parameters:
            parameter.grad.zero_()

    for engine, end in ((one, lambda _: one.zero_grad()), (two, none), (one, zero), (two, none)):
        engine.forward_backward(batch)
        end(engine.parameters())


@pytest.mark.parametrize("work", [begin_another, make_another, step_with_others_gradients, let_gradients_go])
@pytest.mark.parametrize("mesh", [Mesh(data=2), Mesh(pipe=2)], ids=str)
def test_a_step_is_of_one_engine(mesh, work):
    on_two(mesh, work)


def test_gradients_of_another_model_may_be_taken():
    def work(world):
        one, two = (Engine(plain(), world, loss=squared, optimizer=SGD) for _ in range(2))
        with closing(one), closing(two):
            batch, = points([[2, 3]])
            result = one.forward_backward(batch)
            two.forward_backward(batch)
            for mine, others in zip(one.parameters(), two.parameters(), strict=True):
                mine.grad = others.grad
            one.step(result)
            two.step(result)
            assert_close(one.full_state_dict(), two.full_state_dict())

    run_ranks(work, 1)


def test_gradients_may_be_saved():
    """The engine that they belong to is not saved with them."""
    def work(world):
        with closing(Engine(plain(), world, loss=squared)) as engine:
            engine.forward_backward(*points([[2]]))
            file = BytesIO()
            torch.save(engine.gradients(), file)
            file.seek(0)
            assert_close(torch.load(file), engine.gradients())

    run_ranks(work, 1)


def test_values_that_another_rank_trains_meanwhile_are_refused():
    """Even by an engine that has computed before."""
    def work(one, two, batch, make):
        two.evaluate(batch)
        one.train_batch(batch)
        two.train_batch(batch)

    with raises("parameter-trained-elsewhere"):
        on_two(Mesh(pipe=2), work, how={"optimizer": ADAMW, "pipeline": Pipeline(boundaries=(2,))}, optimizer=SGD,
               pipeline=Pipeline(boundaries=(1,)))
