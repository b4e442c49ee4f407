"""A torch DataLoader on a mesh: all replicas together see each batch of rank 0's sampler once."""

from itertools import chain

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import ranvier
from ranvier.config.run import Pipeline
from ranvier.errors import ConfigError, DataError
from ranvier.mesh import Mesh
from ranvier.pipeline.engine import Engine
from ranvier.testing.ranks import run_ranks
from ranvier.testing.reference import Reference
from tests.pipeline.parity import squared
from tests.pipeline.test_unusual_blocks import Plain

INPUTS = torch.randn(13, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
DATA = TensorDataset(INPUTS, 2 * INPUTS)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(DATA)


@pytest.mark.parametrize(("mesh", "pipeline"), [
    (Mesh(), None), (Mesh(data=2), None), (Mesh(pipe=3), Pipeline(stages_per_rank=1)), (Mesh(data=2, pipe=2), None)],
    ids=["one", "data 2", "pipe 3", "data 2 x pipe 2"])
def test_training_by_a_shuffled_loader(mesh, pipeline):
    """Two epochs, with a last batch that is too small for all replicas, equal a plain loop over the same samples."""
    torch.manual_seed(0)
    blocks = [[Plain() for _ in range(4)] for _ in range(mesh.size + 1)]
    for other in blocks[1:]:
        for mine, first in zip(other, blocks[0], strict=True):
            mine.load_state_dict(first.state_dict())

    def rank(world):
        engine = Engine(blocks[world.rank], world, mesh=mesh, loss=squared, dtype=torch.float64, pipeline=pipeline,
                        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        loader = ranvier.shard_loader(DataLoader(DATA, batch_size=4, shuffle=True), world, microbatch_size=2, mesh=mesh)
        assert len(loader) == 4
        seen = []
        for _ in range(2):
            for batch in loader:
                engine.train_batch(batch)
                seen.append([number for one in batch for number in one.samples.tolist()])
        found = {name: value.detach().clone() for name, value in engine.named_parameters().items()}
        engine.close()
        return seen, found

    ranks = run_ranks(rank, mesh.size)
    first_stages = [mesh.rank(mesh.coordinates(0).replace("data", replica)) for replica in range(mesh.data)]
    batches = [list(chain(*(ranks[number][0][step] for number in first_stages))) for step in range(8)]
    epochs = [list(chain(*batches[start:start + 4])) for start in (0, 4)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(13))] * 2
    assert epochs[0] != epochs[1] and epochs[0] != list(range(13))
    reference = Reference(blocks[-1], loss=squared, dtype=torch.float64,
                          optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    for numbers in batches:
        reference.train_batch([(DATA[numbers][0], DATA[numbers][1])])
    for _, found in ranks:
        for name, value in found.items():
            torch.testing.assert_close(value, reference.parameters[name].detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("loader", "options", "error", "value"), [
    (DataLoader(Stream(), batch_size=2), {}, DataError, "Stream"),
    (DataLoader(DATA, batch_size=None), {}, DataError, "TensorDataset"),
    (DataLoader(DATA, batch_size=2), {"microbatch_size": 0}, ConfigError, 0),
    (DataLoader(DATA, batch_size=2), {"mesh": Mesh(row=2)}, ConfigError, 2),
    (DataLoader(TensorDataset(INPUTS), batch_size=2), {}, DataError, "list"),
    (DataLoader(DATA, batch_sampler=[["a"], ["b"]]), {}, DataError, "'a'"),
])
def test_what_it_cannot_share_is_refused(loader, options, error, value):
    with pytest.raises(error) as caught:
        run_ranks(lambda world: list(ranvier.shard_loader(loader, world, **{"microbatch_size": 2, **options})), 1)
    assert caught.value.value == value
