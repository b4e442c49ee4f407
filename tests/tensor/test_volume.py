"""Bytes received per rank: the paper's table and algorithms step by step, the better products, numbers by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.tensor.paper_volumes import (
    PRODUCTS,
    activation_bytes,
    layer_volume,
    paper_elements,
    product_volumes,
)
from ranvier.cost.volume import Bytes, embedding_volume, head_volume

SHAPES = st.fixed_dictionaries({"row": st.integers(1, 6), "col": st.integers(1, 6), "batch": st.integers(1, 8),
                                "sequence": st.integers(1, 64), "hidden": st.integers(1, 64),
                                "itemsize": st.sampled_from([2, 4, 8])})


def units(row, col, batch, sequence, hidden, itemsize):
    """Bytes of the activations A and of the weights W."""
    return (batch * sequence * hidden / row * (col - 1) / col * itemsize,
            hidden**2 / col * (row - 1) / row * itemsize)


def close(found, a, w, shape):
    bytes_a, bytes_w = units(**shape)
    assert found.activations == pytest.approx(a * bytes_a) and found.weights == pytest.approx(w * bytes_w)
    assert found.total == found.activations + found.weights


@given(SHAPES)
def test_volumes_of_a_layer_on_a_mesh(shape):
    for scheme, recompute, last, forward, backward in (
            ("summa", "none", True, (7, 12), (14, 24)), ("summa", "again", False, (7, 12), (21, 36)),
            ("summa", "again", True, (7, 12), (17, 32)), ("summa", "kept", True, (7, 12), (14, 24)),
            ("stationary", "none", True, (4, 12), (6, 24)), ("stationary", "kept", True, (4, 12), (7, 24)),
            ("stationary", "kept", False, (4, 12), (8, 24)), ("stationary", "again", True, (4, 12), (9, 32)),
            ("stationary", "again", False, (4, 12), (10, 36))):
        found = layer_volume(scheme, **shape, recompute=recompute, last=last)
        close(found.forward, *forward, shape)
        close(found.backward, *backward, shape)
        assert found.total == found.forward.total + found.backward.total
        products = product_volumes(scheme, **shape, recompute=recompute, last=last)
        for part in ("forward", "backward"):
            assert sum(getattr(each, part).total for each in products.values()) == pytest.approx(
                getattr(found, part).total)


@given(SHAPES)
def test_volumes_of_a_layer_of_megatron(shape):
    shape["row"] = 1
    for scheme, recompute, last, forward, backward in (
            ("megatron", "none", True, 4, 4), ("megatron", "again", False, 4, 8), ("megatron", "again", True, 4, 6),
            ("megatron", "kept", True, 4, 6), ("megatron-sequence", "none", True, 4, 6),
            ("megatron-sequence", "kept", True, 4, 7), ("megatron-sequence", "kept", False, 4, 8),
            ("megatron-sequence", "again", True, 4, 9)):
        found = layer_volume(scheme, **shape, recompute=recompute, last=last)
        close(found.forward, forward, 0, shape)
        close(found.backward, backward, 0, shape)


@given(SHAPES, st.sampled_from(["none", "kept", "again"]), st.booleans())
def test_one_row_is_megatron_with_sequence_sharding(shape, recompute, last):
    shape["row"] = 1
    assert layer_volume("megatron-sequence", **shape, recompute=recompute, last=last) == layer_volume(
        "stationary", **shape, recompute=recompute, last=last)


def panels(received, mesh, axis, kind, size):
    """Send a panel of `size` bytes from each member of each line of the mesh along `axis` to all, or reduce to each."""
    for line in range(mesh[1 - axis]):
        for root in range(mesh[axis]):
            for member in range(mesh[axis]):
                # A broadcast visits all ranks from the root on; a reduction is a chain that begins after the root.
                starts = root if kind == "broadcast" else (root + 1) % mesh[axis]
                if member != starts:
                    received[(member, line) if axis == 0 else (line, member)] += size


@given(SHAPES)
def test_the_papers_algorithms_step_by_step(shape):
    """Algorithms 1 to 3, on meshes that need not be square: axis 0 sends down columns, axis 1 along rows."""
    mesh = shape["row"], shape["col"]
    block = shape["itemsize"] / (mesh[0] * mesh[1])
    x, weight = shape["batch"] * shape["sequence"] * shape["hidden"] * block, shape["hidden"]**2 * block
    found = product_volumes("summa", **shape)
    for name, (into, out) in PRODUCTS.items():
        ranks = {(row, col): 0.0 for row in range(mesh[0]) for col in range(mesh[1])}
        forward, backward = dict(ranks), dict(ranks)
        panels(forward, mesh, 1, "broadcast", into * x)
        panels(forward, mesh, 0, "broadcast", into * out * weight)
        panels(backward, mesh, 0, "broadcast", into * out * weight)  # C = A B^T, for the gradient of x
        panels(backward, mesh, 1, "reduce", into * x)
        panels(backward, mesh, 1, "broadcast", into * x)  # C = A^T B, for the gradient of the weight
        panels(backward, mesh, 0, "reduce", into * out * weight)
        assert forward == pytest.approx(dict.fromkeys(ranks, found[name].forward.total))
        assert backward == pytest.approx(dict.fromkeys(ranks, found[name].backward.total))


@pytest.mark.parametrize(("name", "forward", "backward"), [
    ("qkv", (18, 24), (36, 48)), ("projection", (18, 8), (18, 16)), ("fc1", (18, 32), (36, 64)),
    ("fc2", (18, 32), (18, 64))])
def test_stationary_products_by_hand(name, forward, backward):
    """2 x 4 ranks, x [2, 3, 8], 1 byte: a rank lacks 18 of a row's 24 elements of x, 8 of a column's 16 of a weight."""
    found = product_volumes("stationary", row=2, col=4, batch=2, sequence=3, hidden=8, itemsize=1)[name]
    assert (found.forward, found.backward) == (Bytes(*forward), Bytes(*backward))


def test_the_embedding_by_hand():
    """4 x 2 ranks, x [4, 8, 16], V 40, 2 bytes."""
    shape = {"row": 4, "col": 2, "batch": 4, "sequence": 8, "hidden": 16, "vocab": 40, "itemsize": 2}
    own = embedding_volume("stationary", **shape)
    assert own.forward == own.backward == Bytes(activations=8 * 8 * 3 / 4 * 2)
    paper = embedding_volume("summa", **shape)
    assert paper.forward == paper.backward == Bytes(weights=10 * 8 * 3 * 2)
    shape |= {"row": 1, "col": 4}
    assert embedding_volume("megatron", **shape).forward.activations == 2 * 4 * 8 * 16 * 3 / 4 * 2
    assert embedding_volume("megatron", **shape).backward == Bytes()
    sequence = embedding_volume("megatron-sequence", **shape)
    assert sequence.forward == sequence.backward == Bytes(activations=4 * 8 * 16 * 3 / 4 * 2)


def test_the_head_by_hand():
    """4 x 2 ranks, x [4, 8, 16], V 40, 2 bytes: a rank lacks 64 elements of a row's x, 240 of its V / col columns."""
    shape = {"row": 4, "col": 2, "batch": 4, "sequence": 8, "hidden": 16, "vocab": 40, "itemsize": 2}
    own = head_volume("stationary", **shape)
    assert own.forward == Bytes(2 * 64, 2 * 240) and own.backward == Bytes(4 * 64, 4 * 240)
    paper = head_volume("summa", **shape)
    assert paper.forward == Bytes(activations=2 * 8 * 40 / 2, weights=2 * 10 * 8 * 3)
    assert paper.backward == Bytes(activations=4 * 8 * 40 / 2, weights=4 * 10 * 8 * 3)
    shape |= {"row": 1, "col": 4}
    part = 2 * 4 * 8 * 16 * 3 / 4
    plain, sequence = head_volume("megatron", **shape), head_volume("megatron-sequence", **shape)
    assert (plain.forward, plain.backward) == (Bytes(), Bytes(activations=2 * part))
    assert (sequence.forward, sequence.backward) == (Bytes(activations=part), Bytes(activations=2 * part))


def test_table_1_of_the_paper():
    """16 ranks, b s h = 8, h^2 = 16: log2(4) / 4 = 1 / 2 of each sum."""
    assert paper_elements("summa", ranks=16, batch=1, sequence=2, hidden=4) == (124, 372)
    assert paper_elements("megatron", ranks=16, batch=1, sequence=2, hidden=4) == (30, 60)
    assert paper_elements("summa", ranks=4, batch=1, sequence=1, hidden=1) == (9.5, 28.5)
    assert paper_elements("summa", ranks=1, batch=1, sequence=2, hidden=4) == (0, 0)


def test_the_papers_largest_case():
    """64 ranks, b s = 24 h, in h^2 per layer with its backward: trees 270, rings 79, stationary 33, Megatron 284."""
    hidden, mesh = 8192, {"row": 8, "col": 8, "batch": 384, "sequence": 512, "hidden": 8192, "itemsize": 1}
    total = {scheme: sum(paper_elements(scheme, ranks=64, batch=384, sequence=512, hidden=hidden)) / hidden**2
             for scheme in ("summa", "megatron")}
    assert total == pytest.approx({"summa": 270, "megatron": 283.5})
    assert layer_volume("summa", **mesh, recompute="again", last=False).total / hidden**2 == pytest.approx(78.75)
    assert layer_volume("stationary", **mesh, recompute="kept").total / hidden**2 == pytest.approx(32.8125)
    one_row = mesh | {"row": 1, "col": 64}
    assert layer_volume("megatron", **one_row, recompute="again", last=False).total / hidden**2 == 283.5


def test_activation_bytes():
    shape = {"batch": 2, "sequence": 8, "hidden": 16, "heads": 4}
    assert activation_bytes("stationary", row=2, col=2, **shape, fused_attention=True) == 34 * 256 / 4
    assert activation_bytes("summa", row=2, col=2, **shape, fused_attention=False) == (34 * 256 + 5 * 8 * 64) / 4
    assert activation_bytes("megatron-sequence", row=1, col=4, **shape, fused_attention=True) == 34 * 256 / 4
    assert activation_bytes("megatron", row=1, col=4, **shape, fused_attention=True) == 16 * 256
    assert activation_bytes("megatron", row=1, col=4, **shape, fused_attention=False) == 16 * 256 + 5 * 8 * 64 / 4


@pytest.mark.parametrize("scheme", ["megatron", "megatron-sequence"])
def test_megatron_has_one_row(scheme):
    with pytest.raises(ValueError, match=f"{scheme} takes one row, not 2"):
        layer_volume(scheme, row=2, col=2, batch=2, sequence=2, hidden=4, itemsize=2)
