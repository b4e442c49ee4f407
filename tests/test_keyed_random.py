"""Random numbers that depend on their purpose: golden values, slices, distributions, masks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier import keyed_random
from ranvier.block import Initial, initialise
from tests.covering import examples
from tests.errors import raises
from tests.fake_cuda import FakeCuda

KEY = keyed_random.key("initial", 0, "a.weight")


def test_golden_values():
    """They must never change, as checkpoints and comparisons depend on them. For key 0: SplitMix64's first values."""
    first = keyed_random.bits(0, torch.arange(1, 4))
    assert [value & (1 << 64) - 1 for value in first.tolist()] == [
        0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert KEY == -638885716692698415
    assert keyed_random.key("a", 1) == keyed_random.key("a", 1) != keyed_random.key("a", 2)


def test_distributions():
    index = torch.arange(200_000)
    uniform, normal = keyed_random.uniform(KEY, index), keyed_random.normal(KEY, index)
    assert uniform.dtype == normal.dtype == torch.float64 and uniform.min() > 0.0 and uniform.max() < 1.0
    assert float(uniform.mean()) == pytest.approx(0.5, abs=4e-3)
    assert float(uniform.var()) == pytest.approx(1 / 12, abs=2e-3)
    assert float(normal.mean()) == pytest.approx(0.0, abs=1e-2) and float(normal.std()) == pytest.approx(1.0, abs=1e-2)
    assert float((normal.abs() < 1.959964).double().mean()) == pytest.approx(0.95, abs=3e-3)
    assert abs(float((uniform[1:] * uniform[:-1]).mean()) - 0.25) < 4e-3, "neighbours are independent"
    other = keyed_random.uniform(KEY + 1, index)
    assert abs(float(torch.corrcoef(torch.stack([uniform, other]))[0, 1])) < 1e-2


def test_several_keys_at_once():
    keys, index = torch.tensor([[3], [4]]), torch.arange(5)
    found = keyed_random.bits(keys, index.unsqueeze(0))
    assert torch.equal(found[1], keyed_random.bits(4, index))


@examples(20)
@given(st.lists(st.integers(0, 5), max_size=4), st.data())
def test_global_index_of_a_box(shape, data):
    box = [tuple(sorted((data.draw(st.integers(0, size)), data.draw(st.integers(0, size))))) for size in shape]
    whole = keyed_random.global_index(shape)
    assert torch.equal(whole.reshape(-1), torch.arange(whole.numel())) and list(whole.shape) == shape
    assert torch.equal(keyed_random.global_index(shape, box), whole[tuple(slice(*edge) for edge in box)])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 6), max_size=3), st.sampled_from(["normal", "constant"]), st.data())
def test_a_slice_starts_as_it_does_in_the_whole(shape, kind, data):
    box = [tuple(sorted((data.draw(st.integers(0, size)), data.draw(st.integers(0, size))))) for size in shape]
    whole = torch.empty(shape, dtype=torch.float64)
    initialise(whole, "a.weight", Initial(kind, 0.3), 7)
    part = torch.empty([stop - start for start, stop in box], dtype=torch.float64)
    initialise(part, "a.weight", Initial(kind, 0.3), 7, shape, box)
    assert torch.equal(part, whole[tuple(slice(*edge) for edge in box)])


def test_large_parameters_start_in_pieces():
    """Temporaries are bounded, and numbers are the same."""
    whole = torch.empty(300, 700, dtype=torch.float64)
    initialise(whole, "w", Initial("normal", 1.0), 1)
    key = keyed_random.key("initial", 1, "w")
    assert torch.equal(whole, keyed_random.normal(key, keyed_random.global_index((300, 700))))


# ---------------------------------------------------------------------- dropout

def masks(samples, *, seed=0, step=0, block="a", calls=1, shape=(3, 4), probability=0.5, **place):
    x = torch.ones(len(samples), *shape, dtype=torch.float64)
    with keyed_random.scope(seed, step, torch.tensor(samples), block):
        return [keyed_random.dropout(x, probability, True, **place) for _ in range(calls)]


def test_masks_follow_the_sample():
    """A sample's mask does not depend on its place in the batch."""
    (first,), (second,) = masks([5, 9, 2]), masks([2, 5])
    assert torch.equal(first[0], second[1]) and torch.equal(first[2], second[0])


def test_masks_differ_by_everything_that_keys_them():
    found = [masks([1])[0], masks([2])[0], masks([1], seed=1)[0], masks([1], step=1)[0], masks([1], block="b")[0],
             masks([1], calls=2)[1]]
    assert all(not torch.equal(one, other) for number, one in enumerate(found) for other in found[:number])
    assert torch.equal(masks([1])[0], found[0]), "masks differ by nothing else"


def test_masks_of_a_shard_are_parts_of_the_whole():
    (whole,) = masks([1, 7], shape=(6, 8))
    (part,) = masks([1, 7], shape=(2, 5), start=(3, 1), full_shape=(6, 8))
    assert torch.equal(part, whole[:, 3:5, 1:6])


@pytest.mark.parametrize("probability", [0.1, 0.5])
def test_the_share_and_the_scale_of_what_is_kept(probability):
    (found,) = masks(range(100), shape=(50, 20), probability=probability)
    assert set(found.unique().tolist()) == {0.0, 1.0 / (1.0 - probability)}
    assert float(found.mean()) == pytest.approx(1.0, abs=1e-2)


def test_no_dropout():
    x = torch.ones(2, 3)
    assert keyed_random.dropout(x, 0.5, False) is x and keyed_random.dropout(x, 0.0, True) is x


def test_scopes_nest_and_end():
    x = torch.ones(1, 4)
    with keyed_random.scope(0, 0, torch.tensor([1]), "a"):
        outer = keyed_random.dropout(x, 0.5, True)
        with keyed_random.scope(0, 0, torch.tensor([1]), "a"):
            assert torch.equal(keyed_random.dropout(x, 0.5, True), outer)
    with pytest.raises(RuntimeError, match=r"keyed dropout needs keyed_random.scope\(seed, step, samples\) around"):
        keyed_random.dropout(x, 0.5, True)


def test_other_numbers_of_samples():
    with keyed_random.scope(0, 0, torch.tensor([1])):
        with raises("dropout-without-samples", 1, 2):
            keyed_random.dropout(torch.ones(2, 3), 0.5, True)


def test_on_the_meta_device_there_are_shapes_only():
    assert keyed_random.dropout(torch.ones(2, 3, device="meta"), 0.5, True).shape == (2, 3)


@pytest.mark.parametrize("kind", ["normal", "uniform"])
def test_weights_are_drawn_on_their_device(kind):
    """No element comes from the host, and all are the CPU's."""
    expected = torch.empty(300, 70)
    initialise(expected, "a.weight", Initial(kind, 0.02), 7)
    with FakeCuda(devices=2) as cuda:
        found = torch.empty(300, 70, device="cuda:1")
        initialise(found, "a.weight", Initial(kind, 0.02), 7)
        assert not cuda.host_reads and found.is_cuda
    assert torch.equal(found, expected)


@pytest.mark.gpu
def test_a_device_draws_the_same_numbers():
    """Hashes and uniform numbers are bit-identical; normal numbers differ by roundings of the inverse distribution."""
    index = torch.arange(1 << 20)
    assert torch.equal(keyed_random.uniform(KEY, index.cuda()).cpu(), keyed_random.uniform(KEY, index))
    found, expected = (torch.empty(1 << 11, 1 << 11, device=device) for device in ("cuda", "cpu"))
    for one in (found, expected):
        initialise(one, "a.weight", Initial("normal", 0.02), 7)
    assert float((found.cpu() != expected).double().mean()) < 1e-6
    assert torch.allclose(found.cpu(), expected, rtol=2**-22, atol=0)
