"""Ranks that make different calls of the engine for one batch: refused before anything is updated."""

import copy

import pytest
import torch

from ranvier.config.run import Guard, Optim, Pipeline
from ranvier.errors import ConfigError
from ranvier.mesh import Mesh
from ranvier.pipeline.engine import Engine
from ranvier.testing.ranks import run_ranks
from tests.covering import covering, pairwise
from tests.errors import raises
from tests.pipeline.parity import chain, points, squared


@pytest.mark.parametrize(("mesh", "other"), covering(
    [Mesh(data=2), Mesh(pipe=2), Mesh(data=2, pipe=2)], ["evaluate", "predict", "forward_backward"]), ids=str)
def test_one_rank_is_in_another_call_while_others_train(mesh, other):
    def work(world):
        engine = Engine(chain(*[lambda: torch.nn.Linear(4, 4)] * 2, loss=squared), world, mesh=mesh,
                        dtype=torch.float64, optim=Optim(), timeout_seconds=5)
        batch = points([[2, 2]] * mesh.data)[engine.coordinates.data]
        engine.train_batch(batch)
        before = [parameter.clone() for parameter in engine.parameters()]
        try:
            if world.rank == 0:
                found = getattr(engine, other)(batch)
                found = found and found.loss if other == "evaluate" else found
            engine.train_batch(batch)
        finally:
            assert all(map(torch.equal, before, engine.parameters()))

    with raises("calls-differ"):
        run_ranks(work, mesh.size)


@pytest.mark.parametrize("mesh", [Mesh(data=2), Mesh(pipe=2)], ids=str)
def test_one_rank_predicts_while_another_evaluates(mesh):
    """The predicting rank's part of the loss would be missing."""
    def work(world):
        engine = Engine(chain(*[lambda: torch.nn.Linear(4, 4)] * 2, loss=squared), world, mesh=mesh,
                        dtype=torch.float64, optim=Optim(), timeout_seconds=5)
        batch = points([[2, 2]] * mesh.data)[engine.coordinates.data]
        return engine.predict(batch) if world.rank else engine.evaluate(batch).loss

    with raises("calls-differ", "predict", "evaluate"):
        run_ranks(work, mesh.size)


@pytest.mark.parametrize("call", ["step", "zero_grad"])
def test_one_replica_alone_ends_a_step(call):
    """Neither call needs other ranks, so the next batch is the first to detect it."""
    def work(world):
        engine = Engine(chain(lambda: torch.nn.Linear(4, 4), loss=squared), world, mesh=Mesh(data=2),
                        dtype=torch.float64, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3))
        batch = points([[2, 2]] * 2)[world.rank]
        result = engine.forward_backward(batch)
        if world.rank == 0:
            engine.step(result) if call == "step" else engine.zero_grad()
        engine.train_batch(batch)

    with raises("calls-differ"):
        run_ranks(work, 2)


@pytest.mark.parametrize("mesh", [Mesh(data=2), Mesh(pipe=2)], ids=str)
def test_one_rank_alone_leaves_out_a_step(mesh):
    """As after a look at its own gradients. Both calls end the step, so only the number of updates differs."""
    def work(world):
        engine = Engine([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)], world, mesh=mesh, loss=squared,
                        dtype=torch.float64, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3))
        batch, state = points([[2, 2]] * mesh.data)[engine.coordinates.data], copy.deepcopy(engine.state_dict())
        for loads in (True, False):
            result = engine.forward_backward(batch)
            if world.rank:
                engine.step(result)
            else:
                engine.zero_grad()
            if loads:  # after loading, all ranks are in the same state again
                engine.load_state_dict(state)
                engine.train_batch(batch)
        before = [parameter.clone() for parameter in engine.parameters()]
        try:
            engine.train_batch(batch)
        finally:
            assert all(map(torch.equal, before, engine.parameters()))

    with raises("calls-differ"):
        run_ranks(work, mesh.size)


@pytest.mark.parametrize(("mesh", "own", "apart"), pairwise(
    [Mesh(data=2), Mesh(data=3), Mesh(data=2, pipe=2)], [True, False], [True, False]), ids=str)
def test_a_learning_rate_of_one_replica_is_refused(mesh, own, apart):
    """The learning rate of the last replica, set after the first step."""
    def work(world):
        how = {"optim": Optim()} if own else {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=1e-3)}
        engine = Engine(chain(*[lambda: torch.nn.Linear(4, 4)] * 2, loss=squared), world, mesh=mesh,
                        dtype=torch.float64, timeout_seconds=5, **how)
        batch = points([[2, 2]] * mesh.data)[engine.coordinates.data]
        for rate in (2e-3, 1e-3 * (engine.coordinates.data + 1)):
            if own:
                engine.learning_rate = rate
            else:
                engine.optimizer.param_groups[0]["lr"] = rate
            before = [parameter.detach().clone() for parameter in engine.parameters()]
            try:
                if apart:
                    engine.step(engine.forward_backward(batch))
                else:
                    engine.train_batch(batch)
            except ConfigError:
                assert all(map(torch.equal, before, engine.parameters()))
                raise

    with raises("learning-rates-differ"):
        run_ranks(work, mesh.size)


@pytest.mark.parametrize(("setting", "value", "shown"), [
    ("weight_decay", 0.1, ("0.01", "0.1")), ("betas", (0.8, 0.999), ("(0.9, 0.999)", "(0.8, 0.999)"))])
def test_another_setting_of_one_replicas_optimizer_is_named_alone(setting, value, shown):
    """The setting of one group among several, on the second stage."""
    mesh = Mesh(data=2, pipe=2)

    def work(world):
        def optimizer(parameters):
            return torch.optim.AdamW([{"params": [one], "lr": 1e-3 * (1 + place)}
                                      for place, one in enumerate(parameters)])
        engine = Engine([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)], world, mesh=mesh, loss=squared,
                        dtype=torch.float64, timeout_seconds=5, optimizer=optimizer)
        batch = points([[2, 2]] * 2)[engine.coordinates.data]
        engine.train_batch(batch)
        if engine.coordinates.data and engine.coordinates.pipe:
            engine.optimizer.param_groups[1][setting] = value
        engine.train_batch(batch)

    with raises("learning-rates-differ",
                value=f"{setting} {shown[0]} on rank 1, {shown[1]} on rank 3, in 1 of 2 groups of parameters"):
        run_ranks(work, mesh.size)


def test_replicas_with_other_numbers_of_groups_are_refused():
    def work(world):
        engine = Engine([torch.nn.Linear(4, 4)], world, mesh=Mesh(data=2), loss=squared, dtype=torch.float64,
                        timeout_seconds=5, optimizer=lambda parameters: torch.optim.SGD(
                            [{"params": [one]} for one in parameters] if world.rank else parameters, lr=0.1))
        engine.train_batch(points([[2, 2]] * 2)[engine.coordinates.data])

    with raises("learning-rates-differ", 1, 2):
        run_ranks(work, 2)


@pytest.mark.parametrize("mesh", [Mesh(data=2, pipe=2)], ids=str)
def test_stages_may_have_rates_of_their_own_in_a_users_optimizer(mesh):
    def work(world):
        def optimizer(parameters):
            return torch.optim.SGD(parameters, lr=1e-3 * (1 + engine_at.pipe))
        engine_at = mesh.coordinates(world.rank)
        engine = Engine(chain(*[lambda: torch.nn.Linear(4, 4)] * 2, loss=squared), world, mesh=mesh,
                        dtype=torch.float64, timeout_seconds=5, optimizer=optimizer)
        engine.train_batch(points([[2, 2]] * mesh.data)[engine.coordinates.data])

    run_ranks(work, mesh.size)


@pytest.mark.parametrize(("where", "options"), [
    ("Optim(weight_decay=...)", {"optim": lambda rank: Optim(weight_decay=0.1 * rank)}),
    ("Guard(loss_spike_factor=...)", {"optim": lambda rank: Optim(),
                                      "guard": lambda rank: Guard(bad_step="skip", loss_spike_factor=2.0 + rank)}),
    ("Engine(nominal_weight=...)", {"nominal_weight": lambda rank: 1.0 + rank})])
def test_settings_of_one_rank_are_refused(where, options):
    def work(world):
        Engine(chain(lambda: torch.nn.Linear(4, 4), loss=squared), world, mesh=Mesh(data=2), dtype=torch.float64,
               **{name: make(world.rank) for name, make in options.items()})

    with raises("settings-differ", 0, 1, where=where):
        run_ranks(work, 2)


@pytest.mark.parametrize(("where", "options"), [
    ("Pipeline(boundaries=...)", {"pipeline": lambda rank: Pipeline(boundaries=(1 + rank,))}),
    ("Pipeline(stages_per_rank=...)", {"pipeline": lambda rank: Pipeline(stages_per_rank=1 + rank)}),
    ("Engine(model=...)", {"model": lambda rank: [torch.nn.Linear(4, 4).requires_grad_(not rank)]}),
    ("mesh", {"mesh": lambda rank: Mesh(pipe=2) if rank else Mesh(data=2)})])
def test_plans_of_one_rank_are_refused(where, options):
    """A block would be on no stage and not train, or be on two stages and train twice."""
    def work(world):
        given = {"mesh": Mesh(pipe=2)} | {name: make(world.rank) for name, make in options.items()}
        blocks = [torch.nn.Linear(4, 4) for _ in range(3)] + given.pop("model", [torch.nn.Linear(4, 4)])
        Engine(blocks, world, loss=squared, dtype=torch.float64, **given)

    with raises("settings-differ", 0, 1, where=where):
        run_ranks(work, 2)


def test_where_states_are_is_each_ranks_own():
    def work(world):
        engine = Engine(chain(lambda: torch.nn.Linear(4, 4), loss=squared), world, mesh=Mesh(data=2),
                        dtype=torch.float64, optim=Optim(offload="host" if world.rank else "none"))
        return engine.train_batch(points([[2, 2]] * 2)[world.rank]).loss

    first, second = run_ranks(work, 2)
    assert first == second
