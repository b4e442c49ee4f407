"""What a step's line says of all ranks: which replica computes longest."""

import time
from types import SimpleNamespace

import pytest
import torch

from ranvier.mesh import Mesh
from ranvier.schedule.spans import Span, Timeline
from ranvier.testing.ranks import run_ranks
from ranvier.train.metrics import Meter, slowest_replica


@pytest.mark.parametrize(("work", "found"), [
    ([[1.0, 1.5]], (1, 1.5)), ([[1.0, 2.0, 1.0, 1.1]], (1, 2.0)), ([[3.0, 2.0], [1.0, 2.0]], (1, 2.0)),
    ([[0.0, 2.0]], None), ([], None)])
def test_the_slowest_replica_is_measured_against_the_others(work, found):
    assert slowest_replica(work) == found


@pytest.mark.parametrize("sizes", [{"data": 4}, {"data": 2, "pipe": 2}, {"data": 2, "row": 2}, {"pipe": 2, "col": 2}])
def test_a_step_names_the_replica_that_computes_longest(sizes):
    """Also if that replica waits least, and the others wait for it until it has computed."""
    mesh, slow = Mesh(**sizes), Mesh(**sizes).num_replicas - 1

    def rank(world):
        timeline, group = Timeline(), world.backend.group("train", [tuple(range(world.size))])
        meter = Meter(timeline, group, torch.device("cpu"), mesh=mesh)
        start = time.monotonic_ns()
        computing = 300_000 if mesh.coordinates(world.rank).replica == slow else 100_000
        timeline.spans += [Span("forward", "F0", 1, start, start + computing),
                           Span("reduce", "chunk 0", 1, start + computing, start + 310_000)]
        while time.monotonic_ns() < start + 310_000:
            pass
        result = SimpleNamespace(loss=1.0, weight=8.0, grad_norm=1.0, stepped=True)
        event = meter.step(1, result, 0.1).event(1.0, SimpleNamespace(reference=1.0, published=None))
        return event.slowest_replica, event.slowest_replica_ratio

    expected = (slow, pytest.approx(3.0)) if mesh.num_replicas > 1 else (None, None)
    assert run_ranks(rank, 4) == [expected] * 4
