"""A loss that is NaN in a user's loop: nothing is updated from it, and it is reported."""

from functools import partial

import pytest
import torch
from torch import nn

from ranvier.config.run import Guard, Optim
from ranvier.mesh import Mesh
from tests.errors import raises
from tests.pipeline.parity import chain, on_mesh, points, share

MODEL = partial(chain, *[partial(nn.Linear, 4, 4)] * 3)


def with_nan():
    batch = points([[2, 1], [2]])
    batch[1][0].inputs[0, 0] = float("nan")
    return batch


def values(engine):
    return {name: value.detach().clone() for name, value in engine.named_parameters().items()}


@pytest.mark.parametrize("options", [
    {"optim": Optim()}, {"optim": Optim(clip_norm=1.0)}, {"optim": Optim(shard=True)},
    {"optimizer": partial(torch.optim.SGD, lr=0.1)}], ids=str)
def test_it_is_refused_with_what_it_began_with(options):
    """It is refused on every rank, and the engine continues with the next batch."""
    def work(engine):
        engine.train_batch(share(engine, points([[2, 1], [2]])))
        before = values(engine)
        with raises("step-refused", 2, 0, 1):
            engine.train_batch(share(engine, with_nan()))
        assert all(torch.equal(value, before[name]) for name, value in values(engine).items())
        assert engine.train_batch(share(engine, points([[2, 1], [2]]))).stepped
        assert any(not torch.equal(value, before[name]) for name, value in values(engine).items())

    on_mesh(MODEL, Mesh(data=2, pipe=2), work, **options)


def test_updates_in_the_backward_are_held_back_too():
    def work(engine):
        before = values(engine)
        with raises("step-refused", 1):
            engine.train_batch(with_nan()[1])
        assert all(torch.equal(value, before[name]) for name, value in values(engine).items())

    on_mesh(MODEL, Mesh(), work, optim=Optim(update_in_backward=True))


def test_a_step_from_its_gradients_is_refused():
    """forward_backward reports it, so that the gradients can be inspected."""
    def work(engine):
        before, result = values(engine), engine.forward_backward(share(engine, with_nan()))
        assert result.bad == "loss is nan" and not result.stepped
        with raises("step-refused", 1):
            engine.step(result)
        assert all(torch.equal(value, before[name]) for name, value in values(engine).items())

    on_mesh(MODEL, Mesh(data=2), work, optim=Optim())


@pytest.mark.parametrize(("guard", "bad"), [("skip", "loss is nan"), ("none", None)])
def test_a_guard_says_what_else_to_do(guard, bad):
    def work(engine):
        before, result = values(engine), engine.train_batch(share(engine, with_nan()))
        assert result.bad == bad
        changed = any(not torch.equal(value, before[name]) for name, value in values(engine).items())
        assert changed == (guard == "none")

    on_mesh(MODEL, Mesh(data=2), work, optim=Optim(), guard=Guard(bad_step=guard))
