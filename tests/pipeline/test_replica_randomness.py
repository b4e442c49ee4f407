"""Dropout of plain modules differs between replicas with the same seed, and is reproducible with that seed."""

import threading
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import nn

import ranvier.pipeline.parts as parts_file
from ranvier.comm.inprocess import InProcessBackend
from ranvier.mesh import Mesh
from ranvier.pipeline.engine import Engine
from ranvier.pipeline.replica_randomness import ReplicaRandomness
from ranvier.testing.ranks import run_processes
from tests.pipeline.parity import SEED, chain, on_mesh, points, share

CPU = torch.device("cpu")


def drawn(randomness, count=4):
    with randomness.batch():
        return torch.rand(count)


def test_the_first_replica_draws_from_the_generator_of_the_user():
    torch.manual_seed(3)
    expected = torch.rand(8)
    torch.manual_seed(3)
    first = ReplicaRandomness(0, 0, CPU)
    assert torch.equal(torch.cat([drawn(first), drawn(first)]), expected)


def test_others_draw_their_own_numbers_which_repeat():
    def run(replica, seed=0):
        torch.manual_seed(3)
        randomness = ReplicaRandomness(replica, seed, CPU)
        return torch.cat([drawn(randomness), drawn(randomness)]), torch.rand(2)

    runs = [run(0), run(1), run(2), run(1, seed=1)]
    numbers = {tuple(half.tolist()) for found, _ in runs for half in found.split(4)}
    assert len(numbers) == 8
    for one, two in zip(run(1), runs[1], strict=True):
        assert torch.equal(one, two)


def test_code_outside_of_batches_goes_on_with_the_generator_of_the_user():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with ReplicaRandomness(1, 0, CPU).batch():
        pass
    assert torch.equal(torch.rand(2), expected)
    torch.manual_seed(3)
    try:
        with ReplicaRandomness(1, 0, CPU).batch():
            torch.rand(7)
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert not torch.equal(torch.rand(2), expected) and torch.initial_seed() == 3


@pytest.mark.parametrize("replica", [0, 1])
def test_what_is_drawn_has_a_number(replica):
    """0 if nothing is drawn; the same for the same numbers, another if the seed or the count differs."""
    def number(seed, count):
        torch.manual_seed(seed)
        randomness = ReplicaRandomness(replica, 0, CPU)
        randomness.is_compared = True
        with randomness.batch():
            torch.rand(count)
            return randomness.state_hash()

    assert number(3, 0) == number(4, 0) == 0
    assert number(3, 5) == number(3, 5) != number(4, 5)
    assert number(3, 6) not in (0, number(3, 5))


class Masks(nn.Module):
    """Keeps the masks that it has drawn."""

    def __init__(self):
        super().__init__()
        self.linear, self.masks = nn.Linear(1, 1), []

    def forward(self, x):
        self.masks.append(nn.functional.dropout(torch.ones(16), 0.5, self.training).bool().tolist())
        return self.linear(x)


@pytest.mark.parametrize("mesh, replicas", [(Mesh(data=2), [0, 1]), (Mesh(data=2, pipe=2), [0, 0, 1, 1])])
def test_each_batch_draws_as_its_replica(monkeypatch, mesh, replicas):
    made = []

    class Recorder(ReplicaRandomness):
        def __init__(self, replica, seed, device):
            super().__init__(0, seed, device)
            made.append((threading.current_thread().name, replica, seed))

        @contextmanager
        def batch(self):
            inside.append(threading.current_thread().name)
            yield

    def work(engine):
        for run in (engine.forward_backward, engine.evaluate, engine.predict):
            run(share(engine, batches))

    batches, inside = points([[2]] * mesh.data), []
    monkeypatch.setattr(parts_file, "ReplicaRandomness", Recorder)
    on_mesh(partial(chain, *[partial(nn.Linear, 4, 4)] * 2), mesh, work)
    assert {replica for _, replica, _ in made} == {0}  # ranks of one process share the generator
    made.clear()
    inside.clear()
    monkeypatch.setattr(InProcessBackend, "name", property(lambda backend: "torch"))
    on_mesh(partial(chain, *[partial(nn.Linear, 4, 4)] * 2), mesh, work)
    assert sorted(made) == [(f"rank {rank}", replica, SEED) for rank, replica in enumerate(replicas)]
    assert sorted(inside) == sorted(f"rank {rank}" for rank in range(mesh.size) for _ in range(3))


def masks_of(world, pipe):
    torch.manual_seed(3)
    blocks = [Masks() for _ in range(pipe)]
    engine = Engine(blocks, world, mesh=Mesh(data=world.size // pipe, pipe=pipe),
                    loss=lambda y, _: (y.sum(), len(y)), optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1))
    batch = [(torch.ones(2, 1), torch.ones(2))] * 2
    torch.manual_seed(5)
    for _ in range(2):
        engine.train_batch(batch)
    torch.manual_seed(5)
    engine.forward_backward(batch)
    engine.close()
    world.backend.close()
    return [mask for block in blocks for mask in block.masks]


@pytest.mark.slow
def test_masks_of_replicas_differ():
    first, second = run_processes("tests.pipeline.test_replica_randomness:masks_of", 2, "torch", args=[1],
                                  timeout_seconds=60)
    torch.manual_seed(5)
    plain = [nn.functional.dropout(torch.ones(16), 0.5).bool().tolist() for _ in range(4)]
    assert first[:4] == plain and first[4:] == plain[:2]
    assert len({str(mask) for mask in (*first[:4], *second[:4])}) == 8
    assert second[4:] == second[:2]
