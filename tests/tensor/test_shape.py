"""The shape of the tensor mesh: the legal shape with the fewest bytes, or an error if there is none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.tensor.paper_volumes import layer_volume
from ranvier.cost.mesh_shape import best_shape
from ranvier.errors import ConfigError

PAPER = {"batch": 384, "sequence": 512, "hidden": 8192}
"""Xu et al., 2021, Table 2, 64 ranks: b s / h = 24."""


def volume(shape, recompute="kept", **sizes):
    """Bytes per layer in units of h^2, forward and backward."""
    return layer_volume("stationary", row=shape[0], col=shape[1], **sizes, itemsize=1, recompute=recompute
                        ).total / sizes["hidden"]**2


def test_the_papers_largest_case():
    assert best_shape(64, **PAPER, heads=128, scheme="stationary", recompute="kept") == (16, 4)
    assert volume((16, 4), **PAPER) == pytest.approx(20.8125) and volume((8, 8), **PAPER) == pytest.approx(32.8125)
    assert min(volume((row, 64 // row), **PAPER) for row in (1, 2, 4, 8, 16, 32, 64)) == volume((16, 4), **PAPER)


@given(st.integers(0, 6), st.integers(0, 8), st.integers(0, 8), st.integers(8, 11),
       st.sampled_from([("none", 10, 36), ("kept", 11, 36), ("again", 13, 44)]))
def test_rows_to_columns_are_as_batch_times_sequence_to_hidden(ranks, batch, sequence, hidden, volumes):
    """With powers of two, row / col is within a factor of 2 of the best real number, which is near b s / (3 h)."""
    ranks, batch, sequence, hidden = 2**ranks, 2**(batch + 6), 2**sequence, 2**hidden
    recompute, activations, weights = volumes
    row, col = best_shape(ranks, batch=batch, sequence=sequence, hidden=hidden, heads=64, scheme="stationary",
                          recompute=recompute)
    best = activations * batch * sequence / (weights * hidden)
    best = min(max(best, 1 / ranks), ranks)
    assert best / 2 <= row / col <= best * 2
    assert 1 / 3.7 < activations / weights < 1 / 3


@given(st.integers(1, 24), st.integers(1, 12), st.integers(1, 8), st.integers(1, 6), st.integers(1, 12),
       st.sampled_from(["stationary", "summa", "megatron", "megatron-sequence"]))
def test_the_best_of_all_legal_shapes(ranks, batch, sequence, width, heads, scheme):
    sizes = {"batch": batch, "sequence": sequence, "hidden": width * heads}
    legal = {}
    for row in range(1, ranks + 1):
        col = ranks // row
        may = {"megatron": row == 1, "megatron-sequence": row == 1 and sequence % col == 0}
        if may.get(scheme, True) and row * col == ranks and batch % row == heads % col == sizes["hidden"] % ranks == 0:
            legal[row, col] = layer_volume(scheme, row=row, col=col, **sizes, itemsize=1).total
    if legal:
        assert legal[best_shape(ranks, **sizes, heads=heads, scheme=scheme)] == min(legal.values())
        return
    with pytest.raises(ConfigError) as refused:
        best_shape(ranks, **sizes, heads=heads, scheme=scheme)
    nearest = int(refused.value.remedy.removeprefix("Use ").removesuffix(" ranks per stage."))
    row, col = best_shape(nearest, **sizes, heads=heads, scheme=scheme)
    assert row * col == nearest != ranks


@pytest.mark.parametrize(("ranks", "scheme", "sizes", "what", "nearest"), [
    (7, "stationary", {}, "does not divide the hidden size 64", 8),
    (16, "stationary", {"batch": 3}, "is not a product of rows, which divide the 3 sequences of a microbatch, and "
                                     "columns, which divide the 8 heads", 8),
    (16, "megatron", {}, "does not divide the 8 heads", 8),
    (8, "megatron-sequence", {"sequence": 12}, "does not divide the sequence length 12", 4)])
def test_without_a_legal_shape(ranks, scheme, sizes, what, nearest):
    with pytest.raises(ConfigError) as refused:
        best_shape(ranks, **{"batch": 8, "sequence": 16, "hidden": 64, "heads": 8, **sizes}, scheme=scheme)
    assert str(refused.value) == f"tensor mesh: {what} (got '{ranks} ranks'). Use {nearest} ranks per stage."
