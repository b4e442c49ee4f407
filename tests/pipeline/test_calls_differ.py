"""Ranks that are in different calls of the engine with one batch: refused before anything is updated."""

import pytest
import torch

from ranvier.config.run import Optim
from ranvier.mesh import Mesh
from ranvier.pipeline.engine import Engine
from ranvier.testing.ranks import run_ranks
from tests.errors import raises
from tests.pipeline.parity import chain, points, squared


@pytest.mark.parametrize("mesh", [Mesh(data=2), Mesh(pipe=2), Mesh(data=2, pipe=2)], ids=str)
@pytest.mark.parametrize("other", ["evaluate", "predict", "forward_backward"])
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
