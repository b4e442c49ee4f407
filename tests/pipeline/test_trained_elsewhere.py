"""A user's modules that another rank has trained: using them causes a warning, and no engine starts with them."""

import copy
import gc
import io
import warnings
import weakref
from contextlib import closing
from functools import partial

import pytest
import torch
from torch import nn

from ranvier.checkpoint.checkpoints import Checkpoints
from ranvier.config.run import Pipeline
from ranvier.mesh import Mesh
from ranvier.models.blocks_of import blocks_of
from ranvier.pipeline.engine import Engine
from ranvier.testing.ranks import run_ranks
from tests.errors import raises
from tests.pipeline.parity import points, squared

SGD = partial(torch.optim.SGD, lr=0.1)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4, dtype=torch.float64) for _ in range(3))

    def forward(self, x):
        return self.third(self.second(self.first(x).tanh()).tanh())


def plain():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4, dtype=torch.float64) for _ in range(3)))


def whole():
    torch.manual_seed(0)
    return Two()


def engine_of(model, world, cut=1):
    blocks = model if isinstance(model, nn.Sequential) else blocks_of(model)
    return Engine(blocks, world, mesh=Mesh(pipe=2), loss=squared, optimizer=SGD,
                  pipeline=Pipeline(boundaries=(cut,)))


def told(act, *of):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        act(*of)
    return [one for one in found if "from before the training" in str(one.message)]


def hooks_of(model):
    return [hook for one in model.modules() for hooks in (
        one._forward_pre_hooks, one._state_dict_pre_hooks, one._load_state_dict_post_hooks) for hook in hooks.values()]


@pytest.mark.parametrize("make", [plain, whole])
@pytest.mark.parametrize("use", [lambda model, x: model(x), lambda model, x: model.state_dict(),
                                 lambda model, x: torch.save(model.state_dict(), io.BytesIO()),
                                 lambda model, x: torch.save(model, io.BytesIO()),
                                 lambda model, x: copy.deepcopy(model)(x)],
                         ids=["computed", "named", "saved", "saved whole", "copied"])
def test_old_values_warn_until_they_are_new(make, use):
    def work(world):
        model = make()
        engine = engine_of(model, world)
        engine.train_batch(points([[2, 2]])[0])
        full = engine.full_state_dict()
        engine.close()
        return model, full

    assert not told(use, make(), torch.ones(2, 4, dtype=torch.float64))
    (one, full), (other, _) = run_ranks(work, 2)
    x, outputs = torch.ones(2, 4, dtype=torch.float64), []
    for model in (one, other):
        assert len(told(use, model, x)) == 1 and not told(use, model, x)
        model.load_state_dict(full)
        assert not hooks_of(model), "no hook obstructs torch.compile and torch.jit"
        assert not told(use, model, x)
        outputs.append(model(x))
    assert torch.equal(*outputs)


def test_new_values_are_old_after_the_next_step():
    """A user's own hooks stay in place."""
    def work(world):
        model, mine = plain(), [lambda *_: None for _ in range(3)]
        with closing(engine_of(model, world)) as engine:
            for number in range(3):
                engine.train_batch(points([[2, 2]])[0])
                full = engine.full_state_dict()
                if world.rank == 0:
                    if number == 1:
                        model[2].register_forward_pre_hook(mine[0])
                        model[2].register_state_dict_pre_hook(mine[1])
                        model[2].register_load_state_dict_post_hook(mine[2])
                    model.load_state_dict(full)
                    assert not told(model.state_dict) and not told(model, torch.ones(2, 4, dtype=torch.float64))
            engine.train_batch(points([[2, 2]])[0])
        if world.rank == 0:  # warnings are recorded for all threads
            assert set(mine) < set(hooks_of(model)) and len(told(model.state_dict)) == 1

    run_ranks(work, 2)


def test_an_engine_does_not_begin_with_old_values(tmp_path):
    batch = points([[2, 2]])[0]

    def work(world):
        model = plain()
        engine = engine_of(model, world)
        engine.train_batch(batch)
        with closing(Checkpoints(engine, tmp_path)) as checkpoints:
            checkpoints.save()
            checkpoints.wait()
        loss = engine.evaluate(batch).loss
        engine.close()
        with closing(engine_of(model, world)) as again:
            assert again.evaluate(batch).loss == loss
        with closing(engine_of(model, world, cut=2)) as moved:
            if world.rank == 0:  # this rank has block 1 now
                with raises("parameter-trained-elsewhere"):
                    moved.evaluate(batch)
            with closing(Checkpoints(moved, tmp_path)) as checkpoints:
                checkpoints.load()
            return moved.evaluate(batch).loss == loss

    assert all(run_ranks(work, 2))


def test_an_engine_that_was_built_before_does_not_begin_with_old_values():
    def work(world):
        model, batch = plain(), points([[2, 2]])[0]
        with closing(engine_of(model, world, cut=2)) as other, closing(engine_of(model, world)) as engine:
            engine.train_batch(batch)
            if world.rank == 0:
                with raises("parameter-trained-elsewhere"):
                    other.evaluate(batch)

    run_ranks(work, 2)


def test_replicas_take_new_values_from_the_first_one():
    """If only rank 0 has loaded them, since its model is the one that is saved."""
    def work(world):
        model = plain()
        with closing(engine_of(model, world)) as engine:
            engine.train_batch(points([[2, 2]])[0])
            full, loss = engine.full_state_dict(), engine.evaluate(points([[2, 2]])[0]).loss
        if world.rank == 0:
            model.load_state_dict(full)
        with closing(Engine(model, world, mesh=Mesh(data=2), loss=squared)) as replicas:
            assert replicas.evaluate(points([[2, 2]])[0]).loss == pytest.approx(loss)
        return told(model.state_dict)

    assert run_ranks(work, 2) == [[], []]


@pytest.mark.parametrize("make", [plain, whole])
def test_what_other_ranks_train_is_not_kept(make):
    def work(world):
        model = make()
        parts = [weakref.ref(one) for one in model.modules() if isinstance(one, nn.Linear)]
        with closing(engine_of(model, world)) as engine:
            del model
            gc.collect()
            engine.train_batch(points([[2, 2]])[0])
            return sum(one() is not None for one in parts)

    assert run_ranks(work, 2) == [1, 2]
