"""Adam's step count of a parameter counts the parameter's own updates: steps that left it unchanged do not count."""

from functools import partial

import pytest
import torch
from torch import nn

from ranvier.checkpoint.checkpoints import Checkpoints
from ranvier.config.run import Optim
from ranvier.elastic.transition import hand_over, take
from ranvier.mesh import Mesh
from ranvier.pipeline.engine import Engine
from ranvier.testing.ranks import run_ranks
from ranvier.testing.reference import Reference
from tests.covering import covering, quick
from tests.optim.test_optimizer import OFFLOADS, gradients_like, make, parameters_of
from tests.pipeline.parity import SEED, assert_close, chain, merge, on_mesh, points, share
from tests.pipeline.test_unusual_blocks import Plain

OPTIM = Optim(weight_decay=0.0, bucket_size=5, chunk_buckets=1)
ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.0)


class Experts(nn.Module):
    """A linear layer for inputs with a positive sum, and one for the others."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return x + (self.first if x.sum() > 0 else self.second)(x)


experts = partial(chain, Plain, Experts, Plain, Experts)
BATCHES = [points([[1], [1]], seed=seed) for seed in range(6)]


def trained(reference):
    """The reference's parameters after each batch."""
    found = []
    for batch in BATCHES:
        reference.train_batch([one for replica in batch for one in replica])
        found.append({name: parameter.detach().clone() for name, parameter in reference.parameters.items()})
    return found


def replicas(batch, mesh):
    """The batch on this mesh: all samples on one replica, or one on each of two."""
    return batch if mesh.data == 2 else [[one for replica in batch for one in replica]]


def values(engine):
    return {name: parameter.detach().clone() for name, parameter in engine.named_parameters().items()}


@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_parameter_counts_its_own_updates(offload, dtype):
    ours, theirs = parameters_of(((3, 5), (7,), (4, 2)), dtype), parameters_of(((3, 5), (7,), (4, 2)), dtype)
    gradients, optimizer = make(ours, offload=offload, weight_decay=0.0)
    torch_s = ADAMW(theirs, fused=True)
    for number in range(8):
        reached = {parameter for place, parameter in enumerate(ours) if place == 0 or number % (place + 1) == place}
        gradients.begin()
        for mine, other, value in zip(ours, theirs, gradients_like(theirs, number), strict=True):
            other.grad = value.to(dtype) if mine in reached else None
            if mine in reached:
                mine.grad.add_(value.to(dtype))
        gradients.all_passed()
        optimizer.prefetch()
        optimizer.begin(1e-2)
        for chunk in gradients.reduced_chunks():
            list(optimizer.update(chunk, 1.0))
        torch_s.step()
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=2e-6 if dtype is torch.float32 else 1e-12, atol=1e-7)
    assert optimizer.steps == 8 and optimizer.missed_updates == {"1": 4, "2": 6}


def test_a_step_that_the_device_skips_is_no_missed_one():
    parameters = parameters_of(((3,), (2,)))
    gradients, optimizer = make(parameters)
    for skips in (False, True, True, False):
        gradients.begin()
        parameters[0].grad.add_(1.0)
        gradients.all_passed()
        optimizer.prefetch()
        optimizer.begin(1e-2, skip=torch.tensor(float(skips)), undecided=lambda skips=skips: not skips)
        for chunk in gradients.reduced_chunks():
            list(optimizer.update(chunk, 1.0))
    assert optimizer.steps == 2 and optimizer.missed_updates == {"1": 2}


@pytest.mark.parametrize(("mesh", "shard"), quick(2, covering(
    [Mesh(), Mesh(data=2), Mesh(pipe=2), Mesh(data=2, pipe=2)], [False, True])), ids=str)
def test_experts_that_are_reached_now_and_then(mesh, shard):
    expected = trained(Reference(experts(), seed=SEED, dtype=torch.float64, optimizer=ADAMW))

    def work(engine):
        found = []
        for batch in BATCHES:
            engine.train_batch(share(engine, replicas(batch, mesh)))
            found.append(values(engine))
        return found

    ranks = on_mesh(experts, mesh, work, learning_rate=1e-2, optim=Optim(
        weight_decay=0.0, bucket_size=5, chunk_buckets=1, shard=shard))
    for number, parameters in enumerate(expected):
        assert_close(merge([found[number] for found in ranks], mesh), parameters)


@pytest.mark.parametrize(("how", "shard"), covering(["state_dict", "checkpoint", "transition"], [False, True]))
def test_counts_are_kept(how, shard, tmp_path):
    """On another mesh, if that is possible."""
    expected = trained(Reference(experts(), seed=SEED, dtype=torch.float64, optimizer=ADAMW))
    before = Mesh(data=2, pipe=2)
    after = before if how == "state_dict" else Mesh(data=2) if how == "checkpoint" else Mesh(pipe=4)
    optim = Optim(weight_decay=0.0, bucket_size=5, chunk_buckets=1, shard=shard)

    def train(engine, batches):
        for batch in batches:
            engine.train_batch(share(engine, replicas(batch, engine.mesh)))

    def build(world, mesh, seed=SEED):
        return Engine(experts(), world, mesh=mesh, seed=seed, dtype=torch.float64, optim=optim,
                      learning_rate=1e-2)

    def first(world):
        engine = build(world, before)
        train(engine, BATCHES[:4])
        if how == "checkpoint":
            checkpoints = Checkpoints(engine, tmp_path)
            checkpoints.save()
            assert not [one.error for one in checkpoints.wait() if one.error]
            checkpoints.close()
            return None
        if how == "state_dict":
            state = engine.state_dict()
            return second(world, lambda engine: engine.load_state_dict(state))
        held = take(engine)
        return second(world, lambda engine: hand_over(held, engine, world.backend, timeout_seconds=60))

    def second(world, restore):
        engine = build(world, after, seed=SEED + 1)
        restore(engine)
        train(engine, BATCHES[4:])
        return values(engine)

    ranks = run_ranks(first, before.size)
    if how == "checkpoint":
        ranks = run_ranks(lambda world: second(world, lambda engine: Checkpoints(engine, tmp_path).load()), after.size)
    assert_close(merge(ranks, after), expected[-1])


def test_layers_that_are_unfrozen_late():
    """By `requires_grad_`, and then frozen and unfrozen again."""
    frozen_at = [True, True, True, False, True, False]
    model = experts()
    reference = Reference(model, seed=SEED, dtype=torch.float64, optimizer=ADAMW)
    for batch, frozen in zip(BATCHES, frozen_at, strict=True):
        reference.modules["b0"].requires_grad_(not frozen)
        reference.train_batch([one for replica in batch for one in replica])

    def work(engine):
        for batch, frozen in zip(BATCHES, frozen_at, strict=True):
            for block in engine.blocks.values() if engine.is_first_stage else ():
                if block is engine.blocks.get("b0"):
                    block.requires_grad_(not frozen)
            engine.train_batch(share(engine, replicas(batch, engine.mesh)))
        return values(engine)

    mesh = Mesh(pipe=2)
    ranks = on_mesh(experts, mesh, work, learning_rate=1e-2, optim=Optim(weight_decay=0.0))
    assert_close(merge(ranks, mesh), {name: value.detach() for name, value in reference.parameters.items()})
