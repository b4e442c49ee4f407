"""Features that programs for other libraries expect: outputs, full states, metrics over ranks, named parameters."""

import copy
import math
import pickle
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import ranvier
from ranvier.config.run import Optim, Pipeline
from ranvier.errors import ConfigError
from ranvier.mesh import Mesh
from ranvier.models.blocks_of import blocks_of
from ranvier.pipeline.engine import Engine
from ranvier.pipeline.microbatch import Microbatch
from ranvier.tensor import layers
from ranvier.testing.ranks import run_ranks
from ranvier.testing.reference import Reference
from tests.covering import covering, first
from tests.errors import raises
from tests.pipeline.parity import SEED, assert_close, on_mesh, points, share, small_gpt, squared, tokens
from tests.pipeline.test_unusual_blocks import Plain

SGD = partial(torch.optim.SGD, lr=0.1)
MESHES = [Mesh(), Mesh(data=2), Mesh(pipe=2), Mesh(data=2, pipe=2)]


def test_learning_rates_of_an_engine():
    def work(world):
        engine = Engine([nn.Linear(4, 4)], world, loss=squared, optim=Optim())
        for rate in (math.nan, -1.0, torch.ones(2)):
            with raises("learning-rate-range"):
                engine.learning_rate = rate
        engine.learning_rate = torch.tensor(0.5)
        assert engine.learning_rate == 0.5
        engine.close()
        with pytest.warns(UserWarning, match="learning_rate=.* has no effect"):
            Engine([nn.Linear(4, 4)], world, loss=squared, optimizer=SGD, learning_rate=0.5).close()

    run_ranks(work, 1)


def test_packages_that_programs_name_need_no_import_of_their_own():
    assert ranvier.__getattr__("testing") is ranvier.testing
    assert ranvier.__getattr__("tensor") is ranvier.tensor


@pytest.mark.parametrize("take", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_engine_and_its_world_are_not_copied(take):
    def work(world):
        engine = Engine([nn.Linear(4, 4)], world, loss=squared, optimizer=SGD)
        for one, code in ((engine, "engine-copied"), (world, "world-copied")):
            with raises(code):
                take({"engine": one} if take is copy.deepcopy else one)
        engine.close()

    run_ranks(work, 1)


def test_results_are_pickled_as_values():
    def work(engine):
        batch = share(engine, tokens([[2], [1]]))
        results = [engine.train_batch(batch, keep_outputs=True), engine.forward_backward(batch), engine.evaluate(batch)]
        for one, copied in zip(results, pickle.loads(pickle.dumps(results)), strict=True):
            for name in ("loss", "losses", "weight", "grad_norm", "stepped", "bad", "overflow"):
                assert getattr(copied, name) == getattr(one, name)
            assert (copied.outputs is None) == (one.outputs is None)

    on_mesh(small_gpt, Mesh(data=2), work, optimizer=SGD)


# ---------------------------------------------------------------------- outputs

@pytest.mark.parametrize(("mesh", "pipeline"), covering(MESHES, [Pipeline(), Pipeline(stages_per_rank=1)]), ids=str)
def test_outputs_and_losses_of_a_training_batch(mesh, pipeline):
    batch = tokens([[2, 1, 1], [1, 2]][:mesh.data], ignored=0.3)
    reference = Reference(small_gpt(), seed=SEED, dtype=torch.float64)
    expected = [reference._outputs(one).detach() for replica in batch for one in replica]
    losses = [reference._loss(output.clone(), one.targets) for output, one in zip(
        expected, (one for replica in batch for one in replica), strict=True)]

    def work(engine):
        result = engine.train_batch(share(engine, batch), keep_outputs=True)
        plain = engine.train_batch(share(engine, batch))
        assert plain.outputs is None and plain.losses is None
        return engine.coordinates.data if engine.is_last_stage else None, result.outputs, result.losses

    for replica, outputs, found in on_mesh(small_gpt, mesh, work, optimizer=SGD, pipeline=pipeline):
        if replica is None:
            assert outputs is None and found is None
            continue
        first = sum(map(len, batch[:replica]))
        for number, output in enumerate(outputs):
            total, weight = losses[first + number]
            torch.testing.assert_close(output, expected[first + number], rtol=1e-10, atol=1e-12)
            assert not output.requires_grad
            assert found[number] == pytest.approx(float(total) / float(weight), rel=1e-10)
        assert len(outputs) == len(found) == len(batch[replica])


class Ends(nn.Module):
    """Returns outputs of which columns have parts, and outputs that each column has in full."""

    def __init__(self):
        super().__init__()
        self.into, self.score = layers.Linear(6, 12, stationary="output"), layers.ClassifierHead(6, 3, token=None)

    def forward(self, x):
        y = self.into(x)
        return {"inner": y.unflatten(-1, (6, 2)), "signs": y > 0, "score": self.score(x), "x": x}


@pytest.mark.parametrize("mesh", first(
    [Mesh(pipe=2, col=2)],
    [Mesh(col=2), Mesh(pipe=2, col=2), Mesh(col=3), Mesh(row=2, col=2)]), ids=str)
def test_outputs_of_columns_are_whole(mesh):
    """With a vocabulary that no mesh divides evenly (13)."""
    batch = tokens([[2, 2]], ignored=0.3)
    rows = [Microbatch(*(part.chunk(mesh.row)[row] for part in (one.inputs, one.targets, one.samples)))
            for one in batch[0] for row in range(mesh.row)]
    reference = Reference(small_gpt(hidden=12, heads=6), seed=SEED, dtype=torch.float64)
    expected = [reference._outputs(one).detach() for one in rows]

    def work(engine):
        row = engine.coordinates.row
        mine = share(engine, [rows[row::mesh.row]])
        predicted = engine.predict(mine)
        result = engine.train_batch(mine, keep_outputs=True)
        return engine.is_last_stage, row, result.outputs, predicted, result.losses

    make = partial(small_gpt, hidden=12, heads=6)
    for has_outputs, row, outputs, predicted, losses in on_mesh(make, mesh, work, optimizer=SGD):
        assert has_outputs == (outputs is not None) == (predicted is not None)
        for found in (outputs, predicted) if has_outputs else ():
            for one, whole in zip(found, expected[row::mesh.row], strict=True):
                torch.testing.assert_close(one, whole, rtol=1e-10, atol=1e-12)
        assert not has_outputs or len(losses) == 2


def test_outputs_of_any_layout_are_whole():
    def make():
        torch.manual_seed(0)
        return [layers.Linear(4, 8, stationary="output"), layers.Linear(8, 6, stationary="input"), Ends()]

    class Whole(nn.Module):
        def __init__(self, blocks):
            super().__init__()
            self.blocks = nn.Sequential(*blocks)

    x = torch.randn(3, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = Whole(make()).double().blocks(x)

    models = [make() for _ in range(2)]

    def rank(world):
        engine = Engine(models[world.rank], world, mesh=Mesh(col=2), dtype=torch.float64,
                        loss=lambda outputs, targets: (outputs["score"].square().sum(), len(targets)))
        predicted, = engine.predict([(x, x)])
        engine.close()
        return predicted

    for predicted in run_ranks(rank, 2):
        assert set(predicted) == set(expected)
        for name, one in predicted.items():
            assert type(one) is torch.Tensor and one.dtype is expected[name].dtype
            torch.testing.assert_close(one, expected[name], rtol=1e-10, atol=1e-12)


# ---------------------------------------------------------------------- the whole state

def modules():
    torch.manual_seed(1)
    model = nn.Sequential(Plain(), nn.BatchNorm1d(4), Plain(), Plain())
    model[3].linear.weight = model[0].linear.weight
    return model


@pytest.mark.parametrize(("mesh", "optim"), covering(MESHES, [Optim(), Optim(shard=True)]), ids=str)
def test_the_whole_state_loads_into_the_module(mesh, optim):
    models = [modules() for _ in range(mesh.size)]

    def rank(world):
        engine = Engine(models[world.rank], world, mesh=mesh, loss=squared, dtype=torch.float64, optim=optim)
        for seed in range(2):
            engine.train_batch(share(engine, points([[2, 3]] * mesh.data, seed=seed)))
        held = {name: value.detach().clone() for name, value in engine.named_parameters().items()}
        return engine.full_state_dict(), held | engine.named_buffers()

    (whole, _), *others = ranks = run_ranks(rank, mesh.size)
    assert all(state is None for state, _ in others)
    fresh = modules().double()
    fresh.load_state_dict(whole)
    assert torch.equal(fresh[3].linear.weight, fresh[0].linear.weight)
    for number, (_, held) in enumerate(ranks):
        for name, value in held.items():
            assert torch.equal(whole[name], value), (number, name)


class Tied(nn.Module):
    """A module with its own forward, a shared weight, buffers, and an unused parameter."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.into, self.layers = nn.Linear(4, 4), nn.ModuleList([Plain(), nn.BatchNorm1d(4), Plain()])
        self.out = nn.Linear(4, 4, bias=False)
        self.out.weight, self.unused = self.into.weight, nn.Parameter(torch.ones(3))

    def forward(self, x):
        y = self.into(x)
        for layer in self.layers:
            y = layer(y)
        return self.out(y) + x


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(pipe=3)], ids=str)
def test_the_whole_state_loads_into_the_module_that_was_cut(mesh):
    batch = points([[2, 3]])
    models = [Tied().double() for _ in range(mesh.size)]

    def rank(world):
        engine = Engine(blocks_of(models[world.rank]), world, mesh=mesh, loss=squared, optimizer=SGD)
        engine.train_batch(share(engine, batch))
        return engine.full_state_dict(), engine.evaluate(share(engine, batch)).loss

    (whole, loss), *_ = run_ranks(rank, mesh.size)
    fresh = Tied().double().eval()
    fresh.load_state_dict(whole)
    sums = [squared(fresh(one.inputs), one.targets) for one in batch[0]]
    assert (sum(total for total, _ in sums) / sum(count for _, count in sums)).item() == pytest.approx(loss, rel=1e-12)


class Aliased(nn.Module):
    """One layer under two names, and a weight that another layer has, too."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.two, self.three = self.one, nn.Linear(4, 4)
        self.three.weight = self.one.weight

    def forward(self, x):
        return self.three(torch.tanh(self.two(x)))


def test_the_whole_state_has_all_names_within_a_block():
    models = [nn.Sequential(Aliased(), Aliased()).double() for _ in range(2)]

    def rank(world):
        engine = Engine(models[world.rank], world, mesh=Mesh(pipe=2), loss=squared, optimizer=SGD)
        engine.train_batch(share(engine, points([[2, 3]])))
        return engine.full_state_dict()

    whole, _ = run_ranks(rank, 2)
    assert set(whole) == set(models[0].state_dict())
    models[0].load_state_dict(whole)


@pytest.mark.parametrize("mesh", first([Mesh(col=2)], [Mesh(row=2), Mesh(pipe=2, row=2, col=2), Mesh(col=2)]), ids=str)
def test_the_whole_state_on_rows_and_columns(mesh):
    def work(engine):
        engine.train_batch(share(engine, tokens([[2]])) if mesh.row == 1 else share(engine, tokens([[1]])))
        return engine.full_state_dict()

    def start(engine):
        return engine.full_state_dict()

    one, *_ = on_mesh(small_gpt, Mesh(), start)
    found, *others = on_mesh(small_gpt, mesh, start)
    assert_close(found, one)
    assert all(other is None for other in others)
    trained, *_ = on_mesh(small_gpt, mesh, work, optimizer=SGD)
    assert set(trained) == set(one)


# ---------------------------------------------------------------------- ranks' values

def test_values_over_all_ranks():
    def work(world):
        table = torch.arange(6.0).view(2, 3).t() + world.rank
        total = world.all_reduce(table)
        assert torch.equal(total, 3 * table - 3 * world.rank + 3) and total.shape == (3, 2)
        assert world.all_reduce(world.rank) == 3.0 and world.all_reduce(0.5 + world.rank, "mean") == 1.5
        for dtype in (torch.bool, torch.uint8, torch.int64):  # uint8 would overflow, and bool would mean "any of them"
            ones = torch.ones(2).to(dtype) * (1 if dtype is torch.bool else 200)
            total, mean = world.all_reduce(ones), world.all_reduce(ones, "mean")
            assert torch.equal(total, 3 * ones.long()) and torch.equal(mean, ones.double())
        assert (world.all_reduce(world.rank, "min"), world.all_reduce(world.rank, "max")) == (0.0, 2.0)
        assert world.all_reduce(torch.ones(1, dtype=torch.float64) if world.rank else 1.0) == 3.0
        assert world.gather_objects({"rank": world.rank, "names": ["a"]})[2] == {"rank": 2, "names": ["a"]}
        values = {"sizes": [(world.rank, [1.5]), (), []]}
        assert world.gather_objects(values)[world.rank] == values and world.broadcast((1, [2])) == (1, [2])
        assert world.broadcast(f"from {world.rank}", source=1) == "from 1"
        assert torch.equal(world.broadcast(table, source=2), table - world.rank + 2)
        sent = world.broadcast(table.bool() if world.rank == 1 else None, source=1)  # others pass anything
        assert sent.dtype == torch.bool and torch.equal(sent, (table - world.rank + 1).bool())
        for wrong in (lambda: world.all_reduce(1.0, "product"), lambda: world.broadcast(1, source=3)):
            with pytest.raises(ConfigError):
                wrong()

    run_ranks(work, 3)


@pytest.mark.parametrize("of_rank", [(0, torch.tensor(5)), (torch.ones(2), torch.ones(2, dtype=torch.float64)),
                                     (torch.ones(2, 3), torch.ones(3, 2))], ids=["number", "dtype", "shape"])
def test_values_of_other_kinds_are_not_summed(of_rank):
    with pytest.raises(ConfigError, match="is not of the same kind on all ranks") as error:
        run_ranks(lambda world: world.all_reduce(of_rank[world.rank]), 2)
    assert error.value.code == "reduce-differs"


# ---------------------------------------------------------------------- named parameters

def by_name(named_parameters):
    named = list(named_parameters)
    return torch.optim.SGD([{"params": [(name, value) for name, value in named if name.endswith("weight")], "lr": 0.1},
                            {"params": [(name, value) for name, value in named if name.endswith("bias")], "lr": 0.0}])


def test_an_optimizer_by_names():
    def work(world):
        engine = Engine([Plain(), Plain()], world, mesh=Mesh(pipe=2), loss=squared, dtype=torch.float64,
                        optimizer=by_name)
        before = {name: value.detach().clone() for name, value in engine.named_parameters().items()}
        engine.train_batch(share(engine, points([[2, 1]])))
        return {name: torch.equal(before[name], value) for name, value in engine.named_parameters().items()}

    assert run_ranks(work, 2) == [{f"{block}.linear.weight": False, f"{block}.linear.bias": True} for block in (0, 1)]


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.norm = nn.ModuleList([Plain(), Plain()]), nn.LayerNorm(4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) * self.scale


def test_an_optimizer_has_the_names_of_the_users_module():
    """Not the names of its blocks, the last of which has the norm."""
    def rank(world):
        names = []

        def build(named_parameters):
            names.extend(name for name, _ in named_parameters)
            return torch.optim.SGD([one for _, one in named_parameters], lr=0.1)

        model = Scaled()
        Engine(blocks_of(model, ["layers.*"]), world, mesh=Mesh(pipe=2), loss=squared, optimizer=build).close()
        return names, [name for name, _ in model.named_parameters()]

    (first, expected), (last, _) = run_ranks(rank, 2)
    assert sorted(first + last) == sorted(expected) and {"scale", "norm.weight"} <= set(last)


class WithClosure(torch.optim.SGD):
    def step(self, closure):
        return super().step(closure)


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, WithClosure])
def test_an_optimizer_with_a_closure_needs_all_parameters(kind):
    """It decides by all gradients how far and how often to step."""
    def rank(mesh, world):
        engine = Engine([nn.Linear(4, 4), nn.Linear(4, 4)], world, mesh=mesh, loss=squared)
        return kind(engine.parameters(), lr=0.1)

    assert isinstance(run_ranks(partial(rank, Mesh(data=2)), 2)[0], kind)
    with raises("optimizer-needs-closure", where="optimizer", value=kind.__name__):
        run_ranks(partial(rank, Mesh(pipe=2)), 2)


@pytest.mark.parametrize(("around", "is_told"), [
    (lambda: saved_tensors_hooks(lambda tensor: tensor.half(), lambda tensor: tensor.double()), True),
    (save_on_cpu, False)], ids=["lossy", "on the host"])
def test_hooks_of_saved_tensors_around_a_batch_are_told_of_once(around, is_told):
    def work(world):
        engine = Engine([nn.Linear(4, 4)], world, loss=squared, dtype=torch.float64)
        for _ in range(2):
            with around():
                engine.forward_backward([(torch.ones(1, 4, dtype=torch.float64), torch.ones(1, 4))])
        engine.close()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(work, 1)
    assert len([one for one in caught if "saved_tensors_hooks" in str(one.message)]) == is_told
