"""Parameters that a block or a loss uses without owning them: their gradient is right or refused, never lost."""

from functools import partial

import pytest
import torch
from torch import nn

from ranvier.config.run import Optim, Pipeline
from ranvier.mesh import Mesh
from ranvier.pipeline.engine import Engine
from ranvier.testing.ranks import run_ranks
from tests.errors import raises
from tests.pipeline.parity import points, share, squared


class Reads(nn.Module):
    """Multiplies by the weight of a layer that it has in a list, which torch does not see."""

    def __init__(self, layer):
        super().__init__()
        self.held = [layer]

    def forward(self, x):
        return torch.tanh(x @ self.held[0].weight)


def linear():
    return nn.Linear(4, 4, dtype=torch.float64)


def chain_of(reader, read):
    """Four blocks, one of which reads another one's weight, and a loss."""
    torch.manual_seed(0)
    blocks = [linear() for _ in range(4)]
    blocks[reader] = Reads(blocks[read])
    return blocks, squared


def decayed():
    """A loss that reads the weights of all blocks."""
    torch.manual_seed(0)
    blocks = [linear() for _ in range(4)]
    return blocks, lambda outputs, targets: (
        ((outputs - targets) ** 2).sum() + sum(block.weight.square().sum() for block in blocks), targets.numel())


CASES = {"a later block": lambda: chain_of(3, 0), "an earlier block": lambda: chain_of(0, 3), "the loss": decayed}
SMALL = Optim(bucket_size=4, chunk_buckets=1)


def gradients_of(make, mesh, **options):
    batches, models = points([[2, 3]] * mesh.data), [make() for _ in range(mesh.size)]

    def rank(world):
        blocks, loss = models[world.rank]
        engine = Engine(blocks, world, mesh=mesh, loss=loss, **options)
        engine.forward_backward(share(engine, batches))
        found = {name: gradient.clone() for name, gradient in engine.gradients().items()}
        engine.close()
        return found

    return {name: gradient for found in run_ranks(rank, mesh.size) for name, gradient in found.items()}


@pytest.mark.parametrize(("case", "mesh", "options"), [
    ("a later block", Mesh(), {}), ("a later block", Mesh(data=2), {}), ("an earlier block", Mesh(), {}),
    ("an earlier block", Mesh(), {"pipeline": Pipeline(defer_bytes=1 << 20)}), ("the loss", Mesh(), {}),
    ("the loss", Mesh(data=2), {"optim": SMALL})], ids=str)
def test_gradients_are_those_of_a_plain_loop(case, mesh, options):
    blocks, loss = CASES[case]()
    batches = points([[2, 3]] * mesh.data)
    for one in (one for batch in batches for one in batch):
        y = one.inputs
        for block in blocks:
            y = block(y)
        (loss(y, one.targets)[0] / (20 * mesh.data)).backward()
    found = gradients_of(CASES[case], mesh, **options)
    for number, block in enumerate(blocks):
        for name, parameter in block.named_parameters():
            torch.testing.assert_close(found[f"{number}.{name}"], parameter.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("case", "name", "mesh", "options"), [
    ("a later block", "0.weight", Mesh(pipe=2), {}),
    ("an earlier block", "3.weight", Mesh(pipe=2), {"pipeline": Pipeline(defer_bytes=0)}),
    ("an earlier block", "3.weight", Mesh(data=2), {"optim": SMALL}), ("the loss", "0.weight", Mesh(pipe=2), {})],
    ids=str)
def test_a_gradient_that_would_be_lost_is_refused(case, name, mesh, options):
    """It belongs to another rank's parameter, or comes after the sum over replicas has begun."""
    with raises("parameter-used-from-outside", where=f"parameter {name}"):
        gradients_of(CASES[case], mesh, **options)


def test_updates_in_the_backward_come_too_early_for_it():
    def rank(world):
        blocks, loss = chain_of(0, 3)
        engine = Engine(blocks, world, loss=loss, optim=Optim(update_in_backward=True))
        engine.train_batch(points([[4]])[0])

    with raises("parameter-used-from-outside", where="parameter 3.weight"):
        run_ranks(rank, 1)


# ---------------------------------------------------------------------- values, without a gradient

class Uses(nn.Module):
    """Uses a layer that it has in a list, from its second forward on."""

    def __init__(self, layer, use):
        super().__init__()
        self.own, self.held, self.use, self.forwards = linear(), [layer], use, 0

    def forward(self, x):
        self.forwards += 1
        return torch.tanh(self.own(x)) * (1.0 if self.forwards == 1 else self.use(self.held[0]))


def writes(layer):
    with torch.no_grad():
        layer.weight.mul_(0.99)
    return 1.0


def writes_data(layer):
    layer.weight.data.clamp_(-0.1, 0.1)
    return 1.0


def writes_out(layer):
    with torch.no_grad():
        torch.mul(torch.ones_like(layer.weight), 0.5, out=layer.weight)
    return 1.0


def writes_in_a_list(layer):
    with torch.no_grad():
        torch._foreach_mul_([torch.zeros(4), layer.weight], 0.5)
    return 1.0


def replaces_data(layer):
    nn.utils.vector_to_parameters(torch.zeros(20, dtype=torch.float64), layer.parameters())
    return 1.0


def freezes(layer):
    layer.weight.requires_grad_(False)
    return 1.0


def form(layer):
    """Uses shapes only, not values."""
    return layer.weight.shape[0] + torch.zeros_like(layer.weight).sum() + sum(one.numel() for one in layer.parameters())


def norm(layer):
    return layer.weight.detach().norm()


def state_after(use, pipeline=None, plain=False, freeze=False, user=3, used=0, evaluates=False):
    """All parameters after three steps of one microbatch; with `plain`, of plain PyTorch."""
    def make():
        torch.manual_seed(0)
        blocks = [linear() for _ in range(4)]
        blocks[used].requires_grad_(not freeze)
        blocks[user] = Uses(blocks[used], use)
        return nn.Sequential(*blocks)

    batches, sgd = [points([[2]], seed=seed) for seed in range(3)], lambda found: torch.optim.SGD(found, lr=0.1)
    if plain:
        model = make()
        optimizer = sgd([one for one in model.parameters() if one.requires_grad])
        for (one,), in batches:
            optimizer.zero_grad()
            loss, weight = squared(model(one.inputs), one.targets)
            (loss / weight).backward()
            optimizer.step()
        return {name: one.detach() for name, one in model.named_parameters()}

    models = [make() for _ in range(2)]

    def rank(world):
        engine = Engine(models[world.rank], world, mesh=Mesh(pipe=2), loss=squared, optimizer=sgd,
                        pipeline=pipeline or Pipeline())
        for batch in batches:
            if evaluates:
                engine.evaluate(share(engine, batch))
            else:
                engine.train_batch(share(engine, batch))
        found = engine.full_state_dict()
        engine.close()
        return found

    return run_ranks(rank, 2)[0]


VIRTUAL = Pipeline(stages_per_rank=2)


@pytest.mark.parametrize(("use", "pipeline", "options"), [
    (norm, None, {}), (writes, None, {}), (writes_data, None, {}), (norm, VIRTUAL, {"user": 1}),
    (writes, VIRTUAL, {}), (writes_out, VIRTUAL, {}), (writes_in_a_list, VIRTUAL, {}),
    (replaces_data, VIRTUAL, {}), (replaces_data, None, {}), (freezes, None, {}),
    (writes, None, {"freeze": True})])
def test_a_value_of_another_stage_is_neither_read_nor_written(use, pipeline, options):
    """Another rank's value is old whenever it is read; one of this rank is written when the schedule decides."""
    with raises("parameter-used-from-outside", where=f"parameter {options.get('used', 0)}.weight"):
        state_after(use, pipeline, **options)


@pytest.mark.parametrize(("use", "pipeline", "options"), [
    (form, None, {}), (norm, None, {"freeze": True}), (norm, VIRTUAL, {})])
def test_what_is_the_same_on_all_ranks_may_be_read(use, pipeline, options):
    """A shape, a frozen value, a value of the same rank."""
    found, expected = state_after(use, pipeline, **options), state_after(use, plain=True, **options)
    for name, one in expected.items():
        torch.testing.assert_close(found[name], one, rtol=1e-10, atol=1e-12)


class HasValues(nn.Module):
    """Has a tensor over the values of a layer's weight, not the weight."""

    def __init__(self, layer):
        super().__init__()
        self.values = [layer.weight.detach()[1:]]

    def forward(self, x):
        return x + self.values[0].sum()


def test_values_over_the_memory_of_another_stages_parameter_are_refused():
    blocks = [[linear(), linear(), linear()] for _ in range(2)]

    def rank(world):
        mine = blocks[world.rank]
        engine = Engine([*mine, HasValues(mine[0])], world, mesh=Mesh(pipe=2), loss=squared)
        engine.forward_backward(share(engine, points([[2]])))

    with raises("parameter-used-from-outside", where="parameter 0.weight"):
        run_ranks(rank, 2)


def test_running_statistics_of_another_stage_are_refused():
    """Their kernels leave no trace of a change, but the count of batches does."""
    class Shifts(nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.own, self.norm = linear(), [norm]

        def forward(self, x):
            return self.own(x) - self.norm[0].running_mean

    norms = [nn.BatchNorm1d(4, dtype=torch.float64) for _ in range(2)]

    def rank(world):
        norm = norms[world.rank]
        engine = Engine([linear(), norm, linear(), Shifts(norm)], world, mesh=Mesh(pipe=2), loss=squared)
        engine.forward_backward(share(engine, points([[2]])))

    with raises("shared-container-changes", where="attribute 1.num_batches_tracked"):
        run_ranks(rank, 2)


def test_before_the_training_a_value_is_not_old():
    assert state_after(norm, evaluates=True)


@pytest.mark.parametrize("place", ["block", "loss", "loss, later"])
def test_a_parameter_of_no_block_that_the_optimizer_has_is_refused(place):
    """Its gradient would be that of a loss sum of this rank alone. Without a gradient the parameter is ignored."""
    later = place == "loss, later"

    def rank(is_used, world):
        scale = nn.Parameter(torch.ones((), dtype=torch.float64))

        def loss(outputs, targets):
            return squared(outputs * scale if is_used and place != "block" else outputs, targets)

        model = nn.Sequential(linear(), linear())
        if is_used and place == "block":
            model[1].register_forward_hook(lambda module, _, output: output * scale)
        engine = Engine(model, world, mesh=Mesh(data=2), loss=loss,
                        optimizer=lambda parameters: torch.optim.SGD([*parameters, *[scale][later:]], lr=0.1))
        if later:
            engine.train_batch(share(engine, points([[2], [2]])))
            engine.optimizer.add_param_group({"params": [scale]})
        engine.train_batch(share(engine, points([[2], [2]])))

    run_ranks(partial(rank, False), 2)
    with raises("parameter-of-no-block", where="optimizer", value=()):
        run_ranks(partial(rank, True), 2)
