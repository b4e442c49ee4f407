"""A torch DataLoader on a mesh: all replicas together see each batch of rank 0's sampler once."""

from itertools import chain, count, islice

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    TensorDataset,
)

import ranvier
from ranvier.config.run import Pipeline
from ranvier.data import shard_loader
from ranvier.layout import part
from ranvier.mesh import Mesh
from ranvier.pipeline.engine import Engine
from ranvier.tensor import layers
from ranvier.testing.ranks import run_ranks
from ranvier.testing.reference import Reference
from tests.errors import raises
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


def of_row(mesh, batch, rank):
    """Samples that a rank has of each microbatch of 3 in its replica's share."""
    at = mesh.coordinates(rank)
    mine = batch[len(batch) * at.data // mesh.data:len(batch) * (at.data + 1) // mesh.data]
    whole = [mine[start:start + 3] for start in range(0, len(mine), 3)]
    return [one[slice(*part(len(one), mesh.row, at.row))] for one in whole]


@pytest.mark.parametrize("mesh", [Mesh(row=2), Mesh(data=2, row=2, col=2), Mesh(pipe=3, row=3)], ids=str)
def test_rows_have_parts_of_each_microbatch(mesh):
    """With 13 samples in batches of 5, some rows have no sample of a microbatch, or of a batch."""
    def rank(world):
        loader = ranvier.shard_loader(DataLoader(DATA, batch_size=5), world, microbatch_size=3, mesh=mesh)
        return list(loader)

    for number, batches in enumerate(run_ranks(rank, mesh.size)):
        expected = [of_row(mesh, list(range(13))[start:start + 5], number) for start in (0, 5, 10)]
        assert [[one.samples.tolist() for one in batch] for batch in batches] == expected
        for one in (one for batch in batches for one in batch):
            if mesh.coordinates(number).pipe == 1:
                assert one.inputs is None and one.targets is None
            else:
                assert torch.equal(one.inputs, INPUTS[one.samples])
                assert torch.equal(one.targets, 2 * one.inputs)
                assert one.inputs.shape[1:] == (4,)


@pytest.mark.parametrize("mesh", [Mesh(row=2), Mesh(data=2, row=2)], ids=str)
def test_training_on_rows(mesh):
    def make():
        torch.manual_seed(0)
        return [layers.Linear(4, 8, stationary="output"), layers.Linear(8, 4, stationary="input")]

    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=0.1)

    models = [make() for _ in range(mesh.size)]

    def rank(world):
        engine = Engine(models[world.rank], world, mesh=mesh, loss=squared, dtype=torch.float64, optimizer=sgd)
        for batch in ranvier.shard_loader(DataLoader(DATA, batch_size=5), world, microbatch_size=3, mesh=mesh):
            engine.train_batch(batch)
        found = engine.full_state_dict()
        engine.close()
        return found

    reference = Reference(make(), loss=squared, dtype=torch.float64, optimizer=sgd)
    for start in range(0, 13, 5):
        reference.train_batch([(INPUTS[start:start + 5], 2 * INPUTS[start:start + 5])])
    found, *_ = run_ranks(rank, mesh.size)
    for name, value in found.items():
        torch.testing.assert_close(value, reference.parameters[name].detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("own", [False, True])
def test_one_rank_draws_the_random_numbers_of_the_loader_itself(own):
    """The order, the workers' seed, and what is drawn afterwards are those of a plain loop over the DataLoader."""
    def drawn(wrap):
        torch.manual_seed(5)
        generator = torch.Generator().manual_seed(6) if own else None
        loader = wrap(DataLoader(TensorDataset(torch.arange(13), torch.arange(13)), batch_size=5, shuffle=True,
                                 generator=generator))
        orders = [torch.cat([batch[0].inputs if isinstance(batch[0], ranvier.Microbatch) else batch[0]
                             for batch in loader]) for _ in range(2)]
        return torch.cat([*orders, torch.randint(1 << 60, (1,)), torch.randint(1 << 60, (1,), generator=generator)])

    found, = run_ranks(lambda world: drawn(lambda loader: ranvier.shard_loader(loader, world, microbatch_size=5)), 1)
    assert torch.equal(found, drawn(lambda loader: loader))


class Endless(Sampler):
    def __iter__(self):
        return (number // 2 % 13 + number % 2 for number in count())


class WithoutLength(Dataset):
    """A dataset whose __len__ raises."""

    def __getitem__(self, number):
        return DATA[number]

    def __len__(self):
        raise TypeError


@pytest.mark.parametrize("loader", [
    lambda: DataLoader(DATA, batch_sampler=([number % 13, (number + 1) % 13] for number in count())),
    lambda: DataLoader(WithoutLength(), sampler=Endless(), batch_size=2)])
def test_an_endless_sampler(monkeypatch, loader):
    """Batches are drawn and sent a few at a time; a loop may end anywhere, at the same place on all ranks."""
    monkeypatch.setattr(shard_loader, "_BATCHES_AT_ONCE", 3)

    def rank(world):
        batches = islice(ranvier.shard_loader(loader(), world, microbatch_size=1, mesh=Mesh(data=2)), 8)
        return [one.samples.item() for batch in batches for one in batch]

    assert run_ranks(rank, 2) == [[0, 1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 7, 8]]


@pytest.mark.parametrize("size", [5, 6, 7])
def test_an_epoch_of_several_pieces(monkeypatch, size):
    monkeypatch.setattr(shard_loader, "_BATCHES_AT_ONCE", 3)

    def rank(world):
        loader = DataLoader(DATA, sampler=torch.arange(size))  # yields tensors, with which torch can index, too
        return [[one.samples.item() for batch in batches for one in batch] for batches in [
            ranvier.shard_loader(loader, world, microbatch_size=1)] * 2]

    assert run_ranks(rank, 1) == [[list(range(size))] * 2]


class WithPlace(Sampler):
    """Resumes where it was, as a checkpoint's objects do."""

    def __init__(self, place=0):
        self.place = place

    def __iter__(self):
        while self.place < len(DATA):
            self.place += 1
            yield self.place - 1

    def state_dict(self):
        return {"place": self.place}


class BatchesWithPlace(WithPlace):
    def __iter__(self):
        return iter(BatchSampler(super().__iter__(), 4, drop_last=False))


@pytest.mark.parametrize("options", [{"batch_size": 4, "sampler": WithPlace}, {"batch_sampler": BatchesWithPlace}])
def test_a_sampler_with_a_state_is_not_ahead_of_the_batches(options):
    def rank(world):
        made = {key: value() if isinstance(value, type) else value for key, value in options.items()}
        loader = ranvier.shard_loader(DataLoader(DATA, **made), world, microbatch_size=2, mesh=Mesh(data=2))
        sampler = made.get("sampler", made.get("batch_sampler"))
        return [sampler.place for _ in loader]

    assert run_ranks(rank, 2)[0] == [4, 8, 12, 13]


class Doubled(DataLoader):
    def __iter__(self):
        return ((2 * inputs, targets) for inputs, targets in super().__iter__())


PART = DistributedSampler(DATA, num_replicas=2, rank=0)


@pytest.mark.parametrize(("loader", "options", "code", "value"), [
    (Doubled(DATA, batch_size=2), {}, "loader-of-another-kind", "Doubled"),
    ([DATA[:2]], {}, "loader-of-another-kind", "list"),
    (DataLoader(DATA, batch_size=2, sampler=PART), {}, "sampler-of-a-part", "DistributedSampler"),
    (DataLoader(DATA, batch_sampler=BatchSampler(PART, 2, False)), {}, "sampler-of-a-part", "DistributedSampler"),
    (DataLoader(Stream(), batch_size=2), {}, "loader-without-samples", "Stream"),
    (DataLoader(DATA, batch_size=None), {}, "loader-without-samples", "TensorDataset"),
    (DataLoader(DATA, batch_size=2), {"microbatch_size": 0}, "malformed-argument", 0),
    (DataLoader(TensorDataset(INPUTS), batch_size=2), {}, "loader-not-pairs", "list"),
    (DataLoader(DATA, batch_sampler=[["a"], ["b"]]), {}, "sampler-not-numbers", "['a']"),
    (DataLoader(DATA, batch_sampler=[[0, None]]), {}, "sampler-not-numbers", "[0, None]"),
])
def test_what_it_cannot_share_is_refused(loader, options, code, value):
    with raises(code, value=value):
        run_ranks(lambda world: list(ranvier.shard_loader(loader, world, **{"microbatch_size": 2, **options})), 1)


def of_each_rank(kind, rank):
    """Data that differs between two ranks, each of which loads its own."""
    datasets = pytest.importorskip("datasets") if kind != "tensors" else None
    if datasets is None:
        return TensorDataset(*(one[rank:] for one in DATA.tensors))
    whole = datasets.Dataset.from_dict({"x": list(range(12))})
    return whole.shard(2, rank) if kind == "shards" else whole.with_transform(lambda rows: {
        "x": rows["x"], "y": [rank] * len(rows["x"])})


@pytest.mark.parametrize("kind", ["tensors", "shards"])
def test_each_rank_with_a_part_of_the_data_is_refused(kind):
    with raises("data-sets-differ"):
        run_ranks(lambda world: list(ranvier.shard_loader(
            DataLoader(of_each_rank(kind, world.rank), batch_size=2), world, microbatch_size=1)), 2)


def test_transforms_may_differ_between_ranks():
    def rank(world):
        loader = DataLoader(of_each_rank("transforms", world.rank), batch_size=4, collate_fn=lambda rows: (
            torch.tensor([row["x"] for row in rows]), torch.tensor([row["y"] for row in rows])))
        loader = ranvier.shard_loader(loader, world, microbatch_size=1)
        return [[one.inputs.item() for one in batch] for batch in loader]

    assert run_ranks(rank, 2) == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10, 11]]]
