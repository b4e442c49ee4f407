"""Ranks of one replica that were given other samples: refused on every rank, before anything is updated."""

import pytest
import torch

from ranvier.config.run import Optim, Pipeline
from ranvier.mesh import Mesh, StagePlacement
from ranvier.pipeline.microbatch import Microbatch
from ranvier.pipeline.same_targets import SameTargets
from tests.errors import raises
from tests.pipeline.parity import on_mesh, share, small_gpt, tokens

MESHES = [Mesh(pipe=2), Mesh(data=2, pipe=3), Mesh(col=2), Mesh(pipe=2, col=2)]


def drawn(engine, seed):
    """Whole microbatches of this replica, as a program draws them that gives each rank both."""
    return tokens([[2, 1]] * engine.mesh.data, seed=seed)[engine.coordinates.data]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_samples_that_differ_within_a_replica_are_refused(mesh):
    def work(engine):
        last = engine.world.rank == mesh.size - 1
        engine.train_batch(drawn(engine, 0))
        engine.evaluate(drawn(engine, 1))
        before = [parameter.clone() for parameter in engine.parameters()]
        result = engine.evaluate(drawn(engine, 2 if last else 1))
        with raises("targets-differ"):
            assert result.loss
        with raises("targets-differ"):
            engine.train_batch(drawn(engine, 3 if last else 2))
        return all(map(torch.equal, before, engine.parameters()))

    assert all(on_mesh(small_gpt, mesh, work, optim=Optim()))


@pytest.mark.parametrize(("mesh", "pipeline"), [
    (Mesh(data=2), None), (Mesh(data=2, pipe=2), None), (Mesh(pipe=2), Pipeline(stages_per_rank=2))], ids=str)
def test_what_no_loss_depends_on_may_differ(mesh, pipeline):
    """Other samples on other replicas, targets of ranks between the ends, and ranks that were given none."""
    def work(engine):
        batch = [Microbatch(one.inputs, one.targets if engine.is_last_stage else None, one.samples)
                 for one in drawn(engine, 0)]
        return engine.train_batch(batch).loss, engine.train_batch(share(engine, tokens([[2, 1]] * mesh.data))).loss

    on_mesh(small_gpt, mesh, work, optim=Optim(), pipeline=pipeline)


@pytest.mark.parametrize("kind", [torch.float64, torch.float16, torch.bool, torch.complex128, torch.uint8], ids=str)
def test_numbers_of_all_kinds_of_targets_differ(kind):
    mesh = Mesh(pipe=2)
    first, last = (SameTargets(mesh.coordinates(rank), StagePlacement(num_ranks=2)) for rank in range(2))
    one, other = (torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)).gt(0).to(kind) for seed in range(2))
    batches = [[Microbatch(None, {"a": one.T, "b": [value], "c": 3}), Microbatch(None, value)]
               for value in (one, other)]
    sums = first.numbers(batches[0]) + last.numbers(batches[0])
    first.check(sums)
    assert sums.tolist() == [0, 2]
    with raises("targets-differ"):
        first.check(first.numbers(batches[0]) + last.numbers(batches[1]))
