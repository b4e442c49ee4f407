"""Weights and dropout masks depend on what they are for, not on where they are drawn."""

from __future__ import annotations

import pytest
import torch

from ranvier import keyed_random
from ranvier.block import Initial, initialise
from ranvier.config.run import Transformer
from ranvier.models.gpt import gpt
from tests.errors import raises

NORMAL = Initial("normal", 0.02)


def start(shape, box=None, *, seed=1, name="layer0.mlp.fc1.weight"):
    size = shape if box is None else [stop - begin for begin, stop in box]
    parameter = torch.empty(size, dtype=torch.float64)
    initialise(parameter, name, NORMAL, seed, shape, box)
    return parameter


@pytest.mark.parametrize("box", [((0, 6), (0, 10)), ((2, 5), (0, 10)), ((0, 6), (3, 4)), ((5, 6), (9, 10)),
                                 ((1, 4), (5, 9)), ((3, 3), (0, 10))])
def test_a_slice_starts_as_that_slice_of_the_whole(box):
    whole = start((6, 10))
    (top, bottom), (left, right) = box
    assert torch.equal(start((6, 10), box), whole[top:bottom, left:right])


def test_pieces_of_a_large_parameter_fit_together():
    whole = start((1500, 2000))
    assert torch.equal(whole, keyed_random.normal(
        keyed_random.key("initial", 1, "layer0.mlp.fc1.weight"), keyed_random.global_index((1500, 2000))) * 0.02)
    assert torch.equal(start((1500, 2000), ((700, 900), (0, 2000))), whole[700:900])
    assert torch.equal(start((9,), ((4, 7),)), start((9,))[4:7])


def test_start_depends_on_seed_and_name():
    assert not torch.equal(start((4, 4)), start((4, 4), seed=2))
    assert not torch.equal(start((4, 4)), start((4, 4), name="layer1.mlp.fc1.weight"))
    assert torch.equal(start((4, 4)), start((4, 4)))


def test_normal_numbers_look_normal():
    numbers = start((1000, 1000)) / 0.02
    count = numbers.numel()
    assert abs(numbers.mean()) < 5 / count**0.5
    assert abs(numbers.var() - 1) < 5 * (2 / count) ** 0.5
    assert abs((numbers**4).mean() - 3) < 5 * (96 / count) ** 0.5
    for edge, share in ((1.0, 0.158655), (2.0, 0.0227501), (3.0, 0.0013499)):
        measured = (numbers > edge).double().mean()
        assert abs(measured - share) < 5 * (share / count) ** 0.5
    neighbours = (numbers[:, 1:] * numbers[:, :-1]).mean(), (numbers[1:] * numbers[:-1]).mean()
    assert all(abs(correlation) < 5 / count**0.5 for correlation in neighbours)


def mask(*, seed=0, step=0, samples=(0, 1, 2), block="b", site=0, shape=(40, 50), probability=0.3, **slice_):
    """The output of dropout for ones at one call site."""
    with keyed_random.scope(seed, step, torch.tensor(samples), block):
        for _ in range(site):
            keyed_random.dropout(torch.ones(len(samples), 1), 0.5, True)
        return keyed_random.dropout(torch.ones(len(samples), *shape, dtype=torch.float64), probability, True, **slice_)


def test_same_key_same_mask_in_any_batch():
    assert torch.equal(mask(), mask())
    assert torch.equal(mask(samples=(2, 0))[0], mask()[2])
    assert torch.equal(mask(samples=(7, 1))[1], mask()[1])


@pytest.mark.parametrize("other", [dict(seed=1), dict(step=1), dict(samples=(3, 4, 5)), dict(block="c"), dict(site=1)])
def test_masks_of_other_keys_are_independent(other):
    first, second = (mask(**key) == 0 for key in ({}, other))
    count = first.numel()
    both = (first & second).double().mean()
    assert abs(both - 0.09) < 5 * (0.09 * 0.91 / count) ** 0.5


def test_masks_of_samples_in_one_batch_are_independent():
    dropped = (mask(samples=tuple(range(64)), shape=(1000,)) == 0).double()
    correlation = torch.corrcoef(dropped)
    correlation.fill_diagonal_(0)
    assert correlation.abs().max() < 6 / 1000**0.5


def test_a_slice_drops_what_the_whole_drops_there():
    whole = mask()
    piece = mask(shape=(10, 20), start=(5, 30), full_shape=(40, 50))
    assert torch.equal(piece, whole[:, 5:15, 30:50])


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_keep_rate_and_scale(probability):
    values = mask(probability=probability, samples=tuple(range(50)))
    kept = values != 0
    error = 5 * (probability * (1 - probability) / values.numel()) ** 0.5
    assert abs(kept.double().mean() - (1 - probability)) < error
    torch.testing.assert_close(values[kept], torch.full_like(values[kept], 1 / (1 - probability)))


def test_dropout_is_off_outside_training_and_needs_a_scope_inside():
    x = torch.randn(2, 3)
    assert keyed_random.dropout(x, 0.5, False) is x and keyed_random.dropout(x, 0.0, True) is x
    with pytest.raises(RuntimeError, match=r"needs keyed_random\.scope"):
        keyed_random.dropout(x, 0.5, True)
    with keyed_random.scope(0, 0, torch.tensor([1])), raises("dropout-without-samples", 1):
        keyed_random.dropout(x, 0.5, True)


def run(blocks, ids, samples, step=3):
    state = ids
    for name, block in blocks.items():
        with keyed_random.scope(11, step, samples, name):
            state = block(state)
    return state


def test_a_gpt_with_dropout_does_not_care_how_its_batch_is_cut():
    config = Transformer(num_layers=2, hidden=16, heads=2, vocab=20, sequence=6, dropout=0.2)
    blocks = gpt(config, dtype=torch.float64).build()
    ids, samples = torch.randint(20, (4, 6)), torch.tensor([5, 0, 9, 2])
    whole = run(blocks, ids, samples)
    parts = [run(blocks, ids[part], samples[part]) for part in (slice(0, 1), slice(1, 4))]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-12, atol=1e-13)
    assert not torch.allclose(run(blocks, ids, samples, step=4), whole)
    blocks.eval()
    assert torch.equal(run(blocks, ids, samples), run(blocks, ids, samples, step=4))
