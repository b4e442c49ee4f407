"""Samples of different lengths: their order, their microbatches on any mesh, gradients, and mixtures."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier.config.resolve import resolve
from ranvier.config.run import Data, Run, Transformer
from ranvier.data.loader import Loader
from ranvier.data.prepare import prepare, problems
from ranvier.data.sampler import GROUP, Sampler, group_by_length
from ranvier.data.subset import Joined, Source, shares, sources_of, spread
from ranvier.data.task import Share
from ranvier.data.token_samples import TokenSamples
from ranvier.inference.evaluation import length_multiple, lengths_of, padded_lengths
from ranvier.mesh import Mesh
from ranvier.models.bert import bert
from ranvier.pipeline.microbatch import Microbatch
from ranvier.testing.reference import Reference
from tests.errors import raises
from tests.tensor.split_parity import SCHEMES, SEED, assert_close, gradients_on

NUM, LONGEST, GLOBAL = 90, 12, 12


class Texts:
    """Samples for BERT: number, length and class follow from the sample's number."""

    sample_lengths = np.random.default_rng(0).integers(3, LONGEST + 1, NUM)

    def __len__(self):
        return NUM

    def inputs(self, samples, epochs, length=None):
        length = length or LONGEST
        ids = (samples[:, None] * 31 + np.arange(length) * 7) % 50
        mask = np.arange(length) < self.sample_lengths[samples, None]
        return {name: torch.from_numpy(np.ascontiguousarray(value)).long() for name, value in
                (("ids", ids * mask), ("mask", mask), ("types", mask & (np.arange(length) > 2)))}

    def targets(self, samples, length=None):
        return torch.from_numpy(samples % 3)


def loader(replica=0, num_replicas=1, part=0, num_parts=1, own=True, **options):
    lengths = Texts.sample_lengths if own else None
    options = {"global_size": GLOBAL, "microbatch_size": 3} | options
    return Loader(Texts(), Sampler(NUM, 5, lengths=lengths), replica=replica, num_replicas=num_replicas, part=part,
                  num_parts=num_parts, lengths=lengths, **options)


def seen(step, num_replicas, offset, **options):
    """Numbers of the samples of a step on all replicas."""
    found = []
    for replica in range(num_replicas):
        one = loader(replica, num_replicas, **options)
        one.offset = offset
        found += [sample for part in one.microbatches(step) for sample in part.samples.tolist()]
    return found


# ---------------------------------------------------------------------- the order

@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5000), st.integers(0, 3), st.integers(0, 3))
def test_a_grouped_order_has_every_number_once_and_depends_on_the_seed(count, seed, epoch):
    lengths = np.random.default_rng(1).integers(1, 100, count)
    order = np.random.default_rng(2).permutation(count)
    found = group_by_length(order.copy(), lengths, seed, epoch)
    assert sorted(found) == list(range(count))
    assert (group_by_length(order, lengths, seed, epoch) == found).all()


@pytest.mark.parametrize(("count", "most"), [(1000, 0.04), (2500, 0.03)])
def test_a_batch_has_whole_groups_in_every_epoch(count, most):
    """For any number of samples: otherwise every batch after the first incomplete group would have parts of two groups,
    and a fifth of the positions would be padding. Lengths are equally likely from 1 to 256."""
    lengths = np.random.default_rng(0).integers(1, 257, count)
    sampler, valid, positions, mixed = Sampler(count, 1, lengths=lengths), 0, 0, 0
    for step in range(3 * count // GROUP):
        batch = lengths[sampler.global_batch(step, GROUP)]
        valid, positions = valid + batch.sum(), positions + GROUP * batch.max()
        mixed += np.ptp(batch) > 24
    assert 1 - valid / positions < most
    assert mixed <= 2, "only where an epoch ends"


def test_groups_have_similar_lengths_and_random_places():
    lengths = np.random.default_rng(1).integers(1, 100, 4096)
    order = Sampler(4096, 0, lengths=lengths).global_batch(0, 4096)
    spread = [np.ptp(lengths[order[start:start + GROUP]]) for start in range(0, 4096, GROUP)]
    assert np.median(spread) <= 3
    means = [lengths[order[start:start + GROUP]].mean() for start in range(0, 2048, GROUP)]
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.4
    other = Sampler(4096, 1, lengths=lengths).global_batch(0, 4096)
    assert (order != other).mean() > 0.9


# ---------------------------------------------------------------------- microbatches

@pytest.mark.parametrize("change_at", [None, 3])
def test_every_sample_exactly_once_an_epoch_on_any_mesh_also_when_resumed(change_at):
    """Data parallel 1, 2 and 3; after a few steps the run resumes with another number of replicas, and with another
    batch size."""
    order = Sampler(NUM, 5, lengths=Texts.sample_lengths).global_batch(0, 2 * NUM)
    assert sorted(order[:NUM]) == sorted(order[NUM:]) == list(range(NUM))
    for mesh, later, size in ((1, 2, 12), (2, 3, 6), (3, 1, 4)):
        at = 0
        while at < 2 * NUM:
            if change_at is not None and at == change_at * GLOBAL:
                mesh = later
            global_size = GLOBAL if change_at is None or at < change_at * GLOBAL else size
            number, offset = divmod(at, global_size)
            assert sorted(seen(number, mesh, offset, global_size=global_size, microbatch_size=2)) == sorted(
                order[at:at + global_size])
            at += global_size


@pytest.mark.parametrize(("num_replicas", "num_rows"), [(1, 1), (2, 1), (3, 1), (2, 2), (1, 3)])
def test_all_ranks_of_a_replica_agree_on_shapes_and_replicas_on_sizes(num_replicas, num_rows):
    """Stages and rows compute the length of each microbatch from the index alone."""
    lengths = Texts.sample_lengths
    for step in range(4):
        by_replica = []
        for replica in range(num_replicas):
            rows = [loader(replica, num_replicas, row, num_rows) for row in range(num_rows)]
            parts = [one.microbatches(step) for one in rows]
            shapes = [[part.inputs["ids"].shape for part in row] for row in parts]
            assert all(one == shapes[0] for one in shapes)
            for places in zip(*parts, strict=True):
                longest = max(int(lengths[sample]) for part in places for sample in part.samples.tolist())
                assert places[0].inputs["ids"].shape[1] == longest
            assert all(map(torch.equal, rows[0].samples(step), (part.samples for part in parts[0])))
            by_replica.append([shape[1] for shape in shapes[0]])
        assert all(len(one) == len(by_replica[0]) for one in by_replica)
        assert max(abs(one - other) for each in by_replica for one, other in zip(
            each, by_replica[0], strict=True)) <= 3
        assert by_replica[0] == sorted(by_replica[0], reverse=True)


def test_lengths_are_rounded_up_to_what_the_columns_divide():
    shapes = [one.inputs["ids"].shape[1] for one in loader(length_multiple=4).microbatches(0)]
    assert set(shapes) <= {4, 8, 12}
    run = resolve(Run(mesh=Mesh(col=2), tensor=SCHEMES["sequence"]))
    assert length_multiple(run) == 2 and length_multiple(resolve(Run())) == 1
    assert padded_lengths(run, Texts()) is lengths_of(run, Texts()) is Texts.sample_lengths
    assert lengths_of(replace(run, data=Data(padding="maximum")), Texts()) is None
    cached = replace(run, elastic=replace(run.elastic, cache=True))
    assert padded_lengths(cached, Texts()) is None and lengths_of(cached, Texts()) is Texts.sample_lengths


@pytest.mark.parametrize(("mesh", "scheme"), [
    (Mesh(data=2, pipe=2), "stationary"), (Mesh(row=2, col=2), "stationary"), (Mesh(pipe=2, col=2), "sequence")])
def test_gradients_are_those_of_the_padded_run(mesh, scheme):
    config = Transformer(vocab=50, sequence=LONGEST, num_layers=1, hidden=12, heads=4, num_classes=3)

    def model():
        return bert(config, "classes", dtype=torch.float64)

    multiple = mesh.col if scheme == "sequence" else 1
    own = [loader(replica, mesh.data, microbatch_size=4, length_multiple=multiple).microbatches(1)
           for replica in range(mesh.data)]
    assert len({one.inputs["ids"].shape[1] for part in own for one in part}) > 1
    numbers = np.array([sample for part in own for one in part for sample in one.samples.tolist()])
    reference = Reference(model(), seed=SEED, dtype=torch.float64)
    loss = reference.forward_backward([Microbatch(Texts().inputs(numbers, None), Texts().targets(numbers),
                                                  torch.from_numpy(numbers))])
    outcome = gradients_on(model, own, mesh, scheme=scheme)
    assert all(abs(found - loss) < 1e-10 for found in outcome.losses)
    assert_close(outcome.gradients, {name: gradient for name, gradient in reference.gradients().items()}, least=1e-6)


# ---------------------------------------------------------------------- mixtures

def rows(first, lengths):
    stops = np.cumsum(np.array(lengths) + 1)
    return TokenSamples(np.arange(first, first + stops[-1]), stops - np.array(lengths) - 1, stops, max(lengths))


def test_joined_datasets_keep_the_order_of_what_was_asked_for():
    parts = [rows(0, [2, 4, 3]), rows(100, [4, 1])]
    both = Joined(parts)
    assert len(both) == 5 and both.sample_lengths.tolist() == [2, 4, 3, 4, 1]
    numbers = np.array([4, 0, 3, 0])
    found = both.inputs(numbers, np.zeros(4, dtype=np.int64), 4)
    assert found[:, 0].tolist() == [105, 0, 100, 0] and found.shape == (4, 4)
    assert both.targets(numbers, 4)[2].tolist() == [101, 102, 103, 104]
    mixed = spread(parts)
    assert mixed.sample_lengths.tolist() == [2, 4, 4, 1, 3]
    assert mixed.inputs(np.arange(3), np.zeros(3, dtype=np.int64), 4)[:, 0].tolist() == [0, 100, 3]


def test_weights_are_shares_of_an_epoch_and_nothing_is_taken_twice_before_all_is_taken():
    found = shares([Source(name="a", weight=3), Source(name="b", weight=1)], [300, 1000])
    assert found == (Share(first=0, count=300, taken=300), Share(first=300, count=1000, taken=100))
    sampler = Sampler(1300, 7, shares=found)
    epochs = [sampler.global_batch(epoch, 400) for epoch in range(10)]
    for order in epochs:
        assert sorted(order[order < 300]) == list(range(300))
    assert sorted(np.concatenate([order[order >= 300] for order in epochs])) == list(range(300, 1300))
    counts = [int((epochs[0][start:start + 40] < 300).sum()) for start in range(0, 400, 40)]
    assert min(counts) >= 20
    assert shares([Source(name="a")], [10]) == ()
    both = shares([Source(name="a"), Source(name="b")], [30, 20])
    assert [share.taken for share in both] == [30, 20]
    assert sorted(Sampler(50, 1, shares=both).global_batch(0, 50)) == list(range(50))


@pytest.mark.parametrize(("mixture", "code"), [
    (("a=0",), "malformed-mixture"), (("a=x",), "malformed-mixture"), (("=1",), "malformed-mixture"),
    (("a=1", "b"), "mixture-partly-weighted"), (("a=1", "a=2"), "mixture-source-twice")])
def test_mixtures_that_cannot_be(mixture, code):
    with raises(code, where="data.mixture", value=", ".join(mixture)):
        sources_of(Data(mixture=mixture), "x")
    assert problems(Run(data=Data(mixture=mixture)))[0].code == code


def test_a_mixture_of_corpora_is_one_data_set(tmp_path):
    for name, words in (("one", "alpha beta gamma\n"), ("two", "delta epsilon\n")):
        (tmp_path / f"{name}.txt").write_text(words * 400)
    run = Run(model=Transformer(vocab=300, sequence=16), data=Data(
        mixture=(f"{tmp_path}/one.txt=1", f"{tmp_path}/two.txt=2"), cache_dir=tmp_path / "cache"))
    assert not problems(run)
    data = prepare(run)
    alone = [prepare(replace(run, data=replace(run.data, mixture=(f"{tmp_path}/{name}.txt",)))) for name in (
        "one", "two")]
    assert data.shares[1].taken == pytest.approx(2 * data.shares[0].taken, rel=0.05)
    assert data.epoch_samples == sum(share.taken for share in data.shares) <= len(data.train)
    assert "one.txt" in data.about and "two.txt" in data.about and len(alone) == 2
    text = data.tokenizer.decode(data.train.inputs(np.array([len(data.train) - 1]), np.zeros(1, dtype=np.int64))[0])
    assert "delta" in text and "alpha" not in text
