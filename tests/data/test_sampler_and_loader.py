"""The order of samples depends on the seed alone; replicas share each global batch without loss or overlap."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ranvier.data.arrays import Tokens, open_arrays, write_tokens
from ranvier.data.lm import Sequences
from ranvier.data.loader import Loader
from ranvier.data.sampler import Sampler, microbatches, order_by_node, share
from ranvier.testing.memory import MemoryTracker
from tests.covering import examples


@given(st.integers(1, 50), st.integers(0, 5), st.integers(1, 60))
def test_every_epoch_holds_every_sequence_once(num_sequences, seed, global_size):
    sampler = Sampler(num_sequences, seed)
    steps = -(-3 * num_sequences // global_size)
    order = np.concatenate([sampler.global_batch(step, global_size) for step in range(steps)])
    for epoch in range(3):
        part = order[epoch * num_sequences:(epoch + 1) * num_sequences]
        assert sorted(part) == list(range(num_sequences))


@given(st.integers(1, 40), st.integers(1, 30), st.integers(0, 20))
def test_any_step_can_be_asked_for_first(num_sequences, global_size, step):
    walked = Sampler(num_sequences, 7)
    for earlier in range(step):
        walked.global_batch(earlier, global_size)
    fresh = Sampler(num_sequences, 7)
    assert np.array_equal(walked.global_batch(step, global_size), fresh.global_batch(step, global_size))


def test_order_changes_with_seed_and_epoch_and_is_kept_across_versions():
    orders = [Sampler(1000, seed).global_batch(epoch, 1000).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    assert Sampler(10, 0).global_batch(0, 10).tolist() == [4, 0, 2, 1, 8, 7, 6, 9, 3, 5]


def test_order_looks_random():
    order = Sampler(10_000, 3).global_batch(0, 10_000)
    assert abs(np.corrcoef(order, np.arange(10_000))[0, 1]) < 0.05
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.05
    assert (order == np.arange(10_000)).sum() < 10


@pytest.mark.parametrize("has_lengths", [False, True])
def test_an_order_is_made_in_twice_its_memory(has_lengths):
    """The order of a large corpus is the largest allocation on the host of each rank, in later epochs, too."""
    count, tracker = 500_000, MemoryTracker()
    sampler = Sampler(count, 0, lengths=np.ones(count, dtype=np.int64) if has_lengths else None)
    tracemalloc.start()
    try:
        with tracker:
            for step in range(2):
                sampler.global_batch(step * count // 8, 8)
        assert tracemalloc.get_traced_memory()[1] + tracker.peak_bytes() < 1.3 * 2 * 8 * count
    finally:
        tracemalloc.stop()


def test_without_a_seed_in_order():
    assert Sampler(5, None).global_batch(1, 3).tolist() == [3, 4, 0]


def test_a_sampler_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one sequence"):
        Sampler(0, 1)


@given(st.integers(0, 200), st.integers(1, 20))
def test_shares_are_a_partition_as_even_as_can_be(total, parts):
    shares = [share(total, parts, index) for index in range(parts)]
    assert [number for part in shares for number in range(total)[part]] == list(range(total))
    sizes = [part.stop - part.start for part in shares]
    assert sizes == sorted(sizes, reverse=True) and max(sizes) - min(sizes) <= 1


def test_ten_over_four_replicas():
    assert [share(10, 4, index) for index in range(4)] == [slice(0, 3), slice(3, 6), slice(6, 8), slice(8, 10)]
    assert [part.tolist() for part in microbatches(np.arange(7), 3)] == [[0, 1, 2], [3, 4, 5], [6]]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokens") / "train"
    with write_tokens(path, vocab=10_000, tokenizer="", corpus="") as append:
        append(range(8 * 40 + 1))
    return Tokens(open_arrays(path))


def loader(tokens, **settings):
    settings = dict(global_size=10, microbatch_size=2) | settings
    return Loader(Sequences(tokens, 8), Sampler(tokens.num_sequences(8), 5), **settings)


def test_targets_are_the_inputs_shifted_by_one(tokens):
    for batch in loader(tokens).microbatches(3):
        assert batch.inputs.dtype == batch.targets.dtype == batch.samples.dtype == torch.int64
        assert batch.inputs.shape == batch.targets.shape == (2, 8) and batch.inputs.is_contiguous()
        assert torch.equal(batch.inputs[:, 0], batch.samples * 8)
        assert torch.equal(batch.targets, batch.inputs + 1)


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("microbatch_size", [1, 2, 3, 100])
def test_replicas_take_the_same_global_batch_whatever_their_number(tokens, num_replicas, microbatch_size):
    whole = torch.cat([batch.samples for batch in loader(tokens).microbatches(6)])
    loaders = [loader(tokens, microbatch_size=microbatch_size, replica=replica, num_replicas=num_replicas)
               for replica in range(num_replicas)]
    parts = [each.microbatches(6) for each in loaders]
    for each, part in zip(loaders, parts, strict=True):
        assert all(map(torch.equal, each.samples(6), (batch.samples for batch in part)))
        assert len(each.samples(6)) == len(part)
    assert torch.equal(torch.cat([batch.samples for part in parts for batch in part]), whole)
    for part in parts:
        assert all(len(batch.samples) == microbatch_size for batch in part[:-1])
        assert len(part[-1].samples) <= microbatch_size


@pytest.mark.parametrize("num_rows", [2, 3, 4])
@pytest.mark.parametrize("microbatch_size", [4, 12])
def test_rows_share_every_microbatch(tokens, num_rows, microbatch_size):
    """Together the rows have the microbatch, padded with samples that have no target."""
    whole = loader(tokens, microbatch_size=microbatch_size).microbatches(6)
    rows = [loader(tokens, microbatch_size=microbatch_size, part=row, num_parts=num_rows).microbatches(6)
            for row in range(num_rows)]
    for parts, batch in zip(zip(*rows, strict=True), whole, strict=True):
        count = len(batch.samples)
        each = -(-count // num_rows)
        assert all(part.inputs.shape == part.targets.shape == (each, 8) for part in parts)
        assert torch.equal(torch.cat([part.inputs for part in parts])[:count], batch.inputs)
        assert torch.equal(torch.cat([part.samples for part in parts])[:count], batch.samples)
        targets = torch.cat([part.targets for part in parts])
        assert torch.equal(targets[:count], batch.targets) and (targets[count:] == -100).all()


def test_a_stage_reads_only_what_it_needs(tokens):
    full = loader(tokens).microbatches(0)
    for needs_inputs, needs_targets in ((True, False), (False, True), (False, False)):
        batches = loader(tokens, needs_inputs=needs_inputs, needs_targets=needs_targets).microbatches(0)
        assert len(batches) == len(full)
        for batch, reference in zip(batches, full, strict=True):
            assert (batch.inputs is not None, batch.targets is not None) == (needs_inputs, needs_targets)
            assert torch.equal(batch.samples, reference.samples)
            assert batch.inputs is None or torch.equal(batch.inputs, reference.inputs)


def test_more_replicas_than_samples_leave_some_without(tokens):
    loaders = [loader(tokens, global_size=2, replica=replica, num_replicas=3) for replica in range(3)]
    assert [len(each.microbatches(0)) for each in loaders] == [1, 1, 0]


# ---------------------------------------------------------------------- samples that have a home

@examples(24)
@given(st.lists(st.integers(0, 200), max_size=40, unique=True), st.lists(st.integers(0, 2), min_size=1, max_size=6))
def test_samples_come_home(samples, nodes):
    """The set of samples and the sizes of shares stay, and no replica has a foreign sample while its own is
    elsewhere."""
    samples = np.array(samples, dtype=np.int64)
    order = order_by_node(samples, nodes)
    assert sorted(order) == list(range(len(samples)))
    known = sorted(set(nodes))
    for replica in range(len(nodes)):
        mine = list(order[share(len(samples), len(nodes), replica)])
        assert mine == sorted(mine)  # they keep their order
    homes = [known[number % len(known)] for number in samples]
    placed = [(nodes[replica], homes[place]) for replica in range(len(nodes))
              for place in order[share(len(samples), len(nodes), replica)]]
    strangers = {node for node, home in placed if node != home}
    away = {home for node, home in placed if node != home}
    assert not strangers & away


def test_a_sample_is_on_one_machine_in_every_epoch(tokens):
    nodes, seen = (0, 0, 1, 1), {}
    for replica in range(4):
        reads = loader(tokens, global_size=40, microbatch_size=40, replica=replica, num_replicas=4, nodes=nodes)
        for epoch in range(3):
            for batch in reads.microbatches(epoch):
                for sample in batch.samples.tolist():
                    seen.setdefault(sample, []).append(nodes[replica])
    assert len(seen) == 40 and all(len(places) == 3 and len(set(places)) == 1 for places in seen.values())
