"""Tensors that share the memory of parameters and were made before the engine: they keep the parameters' values, as in
plain PyTorch, or are refused."""

import sys
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from ranvier.config.run import Optim
from ranvier.mesh import Mesh
from ranvier.originals.same_memory import ViewsOfParameters, _all_tensors
from ranvier.pipeline.engine import Engine
from ranvier.testing.ranks import run_ranks
from tests.errors import raises
from tests.pipeline.parity import TOLERANCE, points, share, squared

OURS = {"optim": Optim(algorithm="sgd", momentum=0.0, weight_decay=0.0), "learning_rate": 0.1}
SGD = partial(torch.optim.SGD, lr=0.1)


class Holds(nn.Module):
    """Computes with its weight under several names."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.transposed = self.linear.weight.data.t()
        self.trained = self.linear.weight.view(-1)
        self.listed = [self.linear.weight.detach()[1:3]]
        self.one = self.linear.bias.data[2].expand(4)
        self.register_buffer("kept", self.linear.weight.detach())
        self.register_buffer("rows", self.linear.weight.detach()[::2], persistent=False)
        frozen = nn.Parameter(self.linear.bias.data, requires_grad=False)
        self.function = lambda x: x * frozen

    def forward(self, x):
        y = torch.tanh(self.linear(x)) + x @ self.transposed + x @ self.trained.view(4, 4) + self.one
        return self.function(y) + x[:, :2] @ self.listed[0] + x @ self.kept + x[:, :2] @ self.rows


class InOnePiece(nn.Module):
    """Two parameters in one memory, which it also has as one tensor if `has_all` is set."""

    def __init__(self, *, has_all):
        super().__init__()
        memory = torch.linspace(-1, 1, 32, dtype=torch.float64)
        self.first, self.second = nn.Parameter(memory[:16].view(4, 4)), nn.Parameter(memory[16:].view(4, 4))
        self.all = [memory] if has_all else []
        everything.append(memory)

    def forward(self, x):
        return torch.tanh(x @ self.first) @ self.second + sum(one.mean() for one in self.all)


everything = []


def made(make):
    torch.manual_seed(0)
    return nn.Sequential(make(), make())


def by_torch(make, batches):
    model = made(make)
    optimizer = SGD(model.parameters())
    for batch in batches:
        optimizer.zero_grad()
        outcomes = [squared(model(one.inputs), one.targets) for replica in batch for one in replica]
        (sum(loss for loss, _ in outcomes) / sum(count for _, count in outcomes)).backward()
        optimizer.step()
    return model.state_dict()


BATCHES = [points([[2, 3], [4, 1]], seed=seed) for seed in range(3)]


def assert_trained(make, mesh, num_engines=1, **options):
    models = [made(make) for _ in range(mesh.size)]

    def rank(world):
        engines = [Engine(models[world.rank], world, mesh=mesh, loss=squared, **options) for _ in range(num_engines)]
        for number, batch in enumerate(BATCHES):
            engine = engines[number % num_engines]
            whole = batch if mesh.data == 2 else [[one for replica in batch for one in replica]]
            engine.train_batch(share(engine, whole))
        return engine.full_state_dict()

    found, expected = run_ranks(rank, mesh.size)[0], by_torch(make, BATCHES)
    assert found.keys() == expected.keys()
    assert all((found[name] - one).abs().max() < TOLERANCE for name, one in expected.items())


@pytest.mark.parametrize("mesh, options", [
    (Mesh(), OURS), (Mesh(data=2), OURS), (Mesh(data=2), {"optimizer": SGD}), (Mesh(pipe=2), OURS),
], ids=["ours", "ours-replicas", "torchs-replicas", "ours-stages"])
def test_views_of_a_parameter_have_its_values(mesh, options):
    assert_trained(Holds, mesh, **options)


def test_views_follow_each_engine_of_a_module():
    assert_trained(Holds, Mesh(), num_engines=2, **OURS)


@pytest.mark.parametrize("has_all, options", [(False, OURS), (True, {"optimizer": SGD})], ids=["ours", "torchs"])
def test_parameters_in_one_memory_are_taken(has_all, options):
    assert_trained(partial(InOnePiece, has_all=has_all), Mesh(), **options)


def test_a_tensor_over_several_parameters_that_move_is_refused():
    with raises("tensor-over-parameters", where="tensor 0.all[0]", value=(32,)):
        assert_trained(partial(InOnePiece, has_all=True), Mesh(), **OURS)


class HasAnArray(nn.Module):
    """Computes with its weight, and with a NumPy array over a part of it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.array = self.linear.weight.detach().numpy()[1:, :2]

    def forward(self, x):
        return torch.tanh(self.linear(x)) * float((self.array ** 2).sum())


def test_an_array_over_a_parameter_has_its_values_or_is_refused_where_parameters_move():
    assert_trained(HasAnArray, Mesh(), optimizer=SGD)
    with raises("array-over-parameter", where="array 0.array", value=(3, 2)):
        assert_trained(HasAnArray, Mesh(), **OURS)


def test_a_buffer_over_the_parameter_of_another_stage_is_refused():
    def rank(world):
        layer, has_values = nn.Linear(4, 4, dtype=torch.float64), nn.BatchNorm1d(4, affine=False, dtype=torch.float64)
        has_values.running_mean = layer.weight.detach()[0]
        model = nn.Sequential(layer, nn.Linear(4, 4, dtype=torch.float64), has_values.eval())
        engine = Engine(model, world, mesh=Mesh(pipe=2), loss=squared, optimizer=SGD)
        engine.train_batch(share(engine, points([[2]])))

    with raises("parameter-used-from-outside", where="parameter 0.weight"):
        run_ranks(rank, 2)


def test_parameters_of_one_memory_lead_to_no_false_alarm():
    """A stage's buffer shares a memory with another stage's parameters, without overlapping them."""
    def rank(world):
        memory = torch.linspace(-1, 1, 40, dtype=torch.float64)
        layers = [nn.Linear(4, 4, bias=False, dtype=torch.float64) for _ in range(2)]
        for number, layer in enumerate(layers):
            layer.weight = nn.Parameter(memory[16 * number:16 * number + 16].view(4, 4))
        layers[1].register_buffer("scale", memory[32:36])
        layers[1].register_forward_hook(lambda module, _, output: output * module.scale)
        engine = Engine(nn.Sequential(*layers), world, mesh=Mesh(pipe=2), loss=squared, optimizer=SGD)
        return [engine.train_batch(share(engine, batch)).loss for batch in (points([[2]]), points([[2]]))]

    first, second = run_ranks(rank, 2)[0]
    assert first != second


def test_values_that_a_program_gives_by_parts_of_one_vector():
    """They are written before each step; the parts remain parts of the vector that the program writes."""
    def trained(step, model):
        vector = torch.zeros(20, dtype=torch.float64)
        parts = vector.split([16, 4])
        for number in range(3):
            vector.copy_(torch.linspace(-1, number, 20))
            for parameter, part in zip(model.parameters(), parts, strict=True):
                parameter.data = part.view_as(parameter)
            step(BATCHES[number][0])
        return [one.detach().clone() for one in model.parameters()]

    def rank(world):
        model = nn.Linear(4, 4, dtype=torch.float64)
        engine = Engine([model], world, loss=squared, **OURS)
        return trained(engine.train_batch, model)

    model = nn.Linear(4, 4, dtype=torch.float64)
    optimizer = SGD(model.parameters())

    def step(batch):
        outcomes = [squared(model(one.inputs), one.targets) for one in batch]
        optimizer.zero_grad()
        (sum(loss for loss, _ in outcomes) / sum(count for _, count in outcomes)).backward()
        optimizer.step()

    for found, expected in zip(run_ranks(rank, 1)[0], trained(step, model), strict=True):
        assert (found - expected).abs().max() < TOLERANCE


def test_nothing_is_looked_for_where_no_view_is(monkeypatch):
    monkeypatch.setattr("ranvier.originals.same_memory._all_tensors", None)
    model = nn.LSTM(4, 4)
    assert not ViewsOfParameters(model.parameters()).left
    held = model.weight_ih_l0.detach()
    with pytest.raises(TypeError):
        ViewsOfParameters(model.parameters())
    del held


def test_a_search_refers_to_no_object_afterwards():
    """Another thread may be filling a tuple, which nobody else may refer to then."""
    young, tensor = [1], torch.zeros(2)
    before = sys.getrefcount(young)
    assert any(one is tensor for one in _all_tensors())
    assert sys.getrefcount(young) == before


def test_the_memory_of_a_numpy_array_outlives_a_tensor_that_moves():
    """The array refers only to the tensor, and would otherwise be over freed memory."""
    def rank(world):
        model = nn.Linear(300, 300)
        array = model.weight.detach().numpy()
        before = array.copy()
        for _ in range(2):
            Engine([model], world, loss=squared, **OURS).close()
            others = [torch.full((300, 300), 7.0) for _ in range(30)]  # would get the freed memory
            assert np.array_equal(array, before)
            del others

    run_ranks(rank, 1)


class _Compared(type):
    def __eq__(cls, other):
        raise AssertionError


def test_objects_that_are_none_of_ours_are_passed_over():
    """A class that has no hash, and a tensor without memory of its own."""
    one, model, inside = _Compared("Class", (), {})(), nn.Linear(2, 2), []
    torch.func.vmap(lambda x: inside.append(x) or x)(torch.ones(2))
    held = [one, model.weight.detach()]
    views = ViewsOfParameters(model.parameters())
    model.weight.data = model.weight.detach().clone()
    views.follow()
    assert held[1].data_ptr() == model.weight.data_ptr()
