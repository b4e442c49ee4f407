"""The products of a split linear layer against plain matrix products, their traffic and their memory."""

from functools import partial

import pytest
import torch

from ranvier.layout import part
from ranvier.tensor.overlapped_transfers import Arriving
from ranvier.tensor.split import summa
from ranvier.tensor.split.stationary import InputStationary, OutputStationary
from ranvier.tensor.split.summa import SummaProduct, SummaVocabulary
from ranvier.testing.memory import MemoryTracker
from ranvier.testing.reference import relative_error
from tests.covering import covering, pairwise, quick
from tests.tensor.split_parity import SCHEMES, SHAPES, inner_part, legal, on_tensor_mesh, own, random, stream_part

TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2e-2}
SEQUENCE, HIDDEN, INNER, VOCAB = 12, 12, 24, 13
SMALL = 400
"""Bytes of a panel of a few tokens, whose number does not divide a row's."""
KINDS = [(rows, cols, scheme, kind) for rows, cols, scheme in legal()
         for kind in (("output", "input") if scheme != "summa" else ("output", "vocabulary"))]


def operands(rows, kind):
    """Full x [B, S, in], W [out, in], bias and dy."""
    width, out = {"output": (HIDDEN, INNER), "input": (INNER, HIDDEN), "vocabulary": (HIDDEN, VOCAB)}[kind]
    return (random(2 * rows, SEQUENCE, width, seed=1), random(out, width, seed=2), random(out, seed=3),
            random(2 * rows, SEQUENCE, out, seed=4))


def expected_of(x, weight, bias, dy, has_bias):
    """y, dx, dW by plain products."""
    y = x @ weight.t() + (bias if has_bias else 0.0)
    return y, dy @ weight, dy.flatten(0, 1).t() @ x.flatten(0, 1)


def split(mesh, scheme, kind, x, weight, bias, dy):
    """The product, this rank's parts of its operands, and the functions that cut inputs, outputs and the weight."""
    product = {"output": OutputStationary, "input": InputStationary}.get(kind)
    enter, leave = (inner_part, stream_part) if kind == "input" else (stream_part, inner_part)
    if kind == "vocabulary":
        start, stop = part(VOCAB, mesh.num_cols, mesh.col)
        product, axes = partial(SummaVocabulary, vocab=VOCAB, own=stop - start), ("row", "col")
    elif scheme == "summa":
        product, axes = SummaProduct, ("col", "row")
    else:
        axes = ("col", "row") if kind == "output" else ("row", "col")

    transposes = kind == "output" and scheme != "summa" and mesh.num_rows > 1

    def of_weight(whole):
        mine = own(mesh, own(mesh, whole, 0, axes[0]), 1, axes[1])
        return (mine.t() if transposes else mine).contiguous()

    cut_bias = kind == "output" or mesh.activations.name == "hidden"
    has_bias = kind != "vocabulary"
    bias = (own(mesh, bias, 0, "col") if cut_bias else bias).contiguous() if has_bias else None
    return (product(mesh), enter(mesh, x).contiguous(), of_weight(weight), bias, leave(mesh, dy).contiguous(), enter,
            leave, of_weight)


def column_weight(mesh, product, weight):
    """The weight as the layer passes it to a product."""
    if not product.gathers_weight or mesh.num_rows == 1:
        return Arriving(weight.unsqueeze(0))
    slabs = mesh.workspace.take("weight", (mesh.num_rows, *weight.shape), weight)
    return Arriving(slabs, mesh.over_rows.all_gather(slabs, weight))


@pytest.mark.parametrize(("rows", "cols", "scheme", "kind", "dtype", "panels"), quick(45, covering([
    (*kind, dtype) for dtype in TOLERANCE for kind in KINDS
    if dtype is torch.float64 or kind[:2] in [(1, 2), (2, 2), (2, 3)]], ["one panel", "panels", "hiding"])))
def test_products_are_plain_ones(monkeypatch, rows, cols, scheme, kind, dtype, panels):
    """Gradients together, one at a time, from gathered operands, and added to an existing gradient."""
    monkeypatch.setattr("ranvier.layout.panels.PANEL_COST_BYTES", 200)
    whole = [tensor.to(dtype) for tensor in operands(rows, kind)]
    expected_y, expected_dx, expected_dw = expected_of(*(tensor.double() for tensor in whole), kind != "vocabulary")

    def work(mesh):
        mesh._hides = panels == "hiding"
        product, x, weight, bias, dy, enter, leave, of_weight = split(mesh, scheme, kind, *whole)
        right = leave(mesh, expected_y), enter(mesh, expected_dx), of_weight(expected_dw)
        gather, shape = partial(column_weight, mesh, product, weight), weight.shape
        like_x, like_dy = (tensor.new_empty(()).expand(tensor.shape) for tensor in (x, dy))
        found = {"y": (product.forward(x, gather(), bias, None), right[0])}
        dx, dw = product.gradients(dy, x, gather(), shape, gathered=None, into=None, reuse=False)
        found |= {"dx": (dx, right[1]), "dW": (dw.wait().clone(), right[2])}
        found["dx alone"] = product.gradients(dy, like_x, gather(), None)[0], right[1]
        found["dW alone"] = product.gradients(dy, x, None, shape)[1].wait().clone(), right[2]
        gathered_x, gathered_dy = product.gather_x(x), product.gather_dy(dy)
        if gathered_x is not None:
            found["y of gathered"] = product.forward(x, gather(), bias, gathered_x), right[0]
            dw = product.gradients(dy, like_x, None, shape, gathered=gathered_x)[1]
            found["dW of gathered x"] = dw.wait().clone(), right[2]
            dx, dw = product.gradients(dy, like_x, gather(), shape, gathered=gathered_x, into=None, reuse=False)
            found |= {"dx beside gathered x": (dx, right[1]), "dW beside it": (dw.wait().clone(), right[2])}
        if gathered_dy is not None:
            dx, _ = product.gradients(dy, like_x, gather(), None, gathered=gathered_dy)
            found["dx of gathered dy"] = dx, right[1]
            dw = product.gradients(like_dy, x, None, shape, gathered=gathered_dy)[1]
            found["dW of gathered dy"] = dw.wait().clone(), right[2]
        if rows == 1:
            into = torch.ones_like(weight)
            added = product.gradients(dy, x, None, shape, into=into)[1]
            found["dW added"] = into if added is None else into + added.wait(), right[2] + 1
        return {name: relative_error(value.double(), right) if value.shape == right.shape else value.shape
                for name, (value, right) in found.items()}

    panel_bytes = None if panels == "one panel" else SMALL
    for errors in on_tensor_mesh(rows, cols, SCHEMES[scheme], work, panel_bytes=panel_bytes):
        assert all(error <= TOLERANCE[dtype] for error in errors.values()), errors


@pytest.mark.parametrize(("rows", "cols", "width", "n", "flip"), pairwise(
    SHAPES, [(13, 11), (12, 12), (5, 4)], [False, True]))
def test_summas_three_products_of_dims_that_nothing_divides(rows, cols, width, n, flip):
    """The autograd gradients of each product are the other two products."""
    a, b = random(3 * rows, width, seed=1).requires_grad_(), random(width, n, seed=2).requires_grad_()
    gradient = random(3 * rows, n, seed=3)
    c = a @ b
    c.backward(gradient)

    def cut(mesh, whole):
        return own(mesh, own(mesh, whole.detach(), 0, "row"), 1, "col").contiguous()

    def work(mesh):
        mine, theirs, dc = cut(mesh, a), cut(mesh, b), cut(mesh, gradient)
        if flip:
            theirs = theirs.t().contiguous().t()
        return [relative_error(summa.ab(mesh, mine, theirs, width, flip=flip), cut(mesh, c)),
                relative_error(summa.abt(mesh, dc, theirs, width, flip=flip), cut(mesh, a.grad)),
                relative_error(summa.atb(mesh, mine, dc, width, flip=flip), cut(mesh, b.grad))]

    for errors in on_tensor_mesh(rows, cols, SCHEMES["summa"], work):
        assert max(errors) < 1e-13


@pytest.mark.parametrize("one", [torch.ones(3, 4)[:1, 2:3], torch.ones(1, 4).t()[:1]])
def test_one_element_of_something_wider_can_be_sent(one):
    """torch calls one element contiguous, whatever its strides are."""
    def work(mesh):
        mine = one.as_strided(one.shape, one.stride()).fill_(1.0) if mesh.col == 0 else torch.zeros(1, 1)
        mesh.over_cols.broadcast(mine).wait()
        return float(mine)

    assert one.is_contiguous()
    assert on_tensor_mesh(1, 2, SCHEMES["summa"], work) == [1.0, 1.0]


@pytest.mark.parametrize(("rows", "cols", "scheme", "kind"), quick(10, KINDS))
def test_panels_send_what_one_piece_sends(rows, cols, scheme, kind):
    def work(mesh):
        product, x, weight, bias, dy, *_ = split(mesh, scheme, kind, *operands(rows, kind))
        product.forward(x, column_weight(mesh, product, weight), bias, None)
        weight = column_weight(mesh, product, weight)
        product.gradients(dy, x, weight, weight.tensor.shape[1:], gathered=None, into=None, reuse=False)[1].wait()
        return mesh.over_rows.bytes_received, mesh.over_cols.bytes_received

    one, many = (on_tensor_mesh(rows, cols, SCHEMES[scheme], work, panel_bytes=size) for size in (1 << 30, SMALL))
    assert one == many
    assert all((over_rows > 0) == (rows > 1) and (over_cols > 0) == (cols > 1) for over_rows, over_cols in one)


@pytest.mark.parametrize(("rows", "cols", "scheme", "kind"), quick(10, (one for one in KINDS if one[0] * one[1] == 4)))
def test_a_workspace_is_allocated_once(rows, cols, scheme, kind):
    """Its memory is the same in every step, and results are not in it. What is gathered needs no other memory."""
    def work(mesh):
        product, x, weight, bias, dy, *_ = split(mesh, scheme, kind, *operands(rows, kind))
        seen, results = [], []
        for _ in range(3):
            y = product.forward(x, column_weight(mesh, product, weight), bias, None)
            dx, dw = product.gradients(dy, x, column_weight(mesh, product, weight), weight.shape, gathered=None,
                                       into=None, reuse=False)
            dw.wait()
            seen.append((sum(mesh.workspace.sizes().values()), {key: buffer.data_ptr() for key, buffer
                                                    in mesh.workspace._buffers.items()}))
            results += [y, dx]
        arriving, tracker = column_weight(mesh, product, weight), MemoryTracker()
        arriving.wait()
        tracker.tag(mesh.workspace.buffers(), "workspace")
        with tracker:
            y = product.forward(x, arriving, bias, None)
        if kind == "output" and mesh.activations.name != "sequence":  # whose panels are copied, and sent by pieces
            assert tracker.at_peak().get("activations") == y.nbytes
        ours = {buffer.untyped_storage().data_ptr() for buffer in mesh.workspace._buffers.values()}
        assert ours.isdisjoint(tensor.untyped_storage().data_ptr() for tensor in results)
        return seen

    for seen in on_tensor_mesh(rows, cols, SCHEMES[scheme], work, panel_bytes=SMALL):
        assert seen[0] == seen[1] == seen[2]
        assert (seen[0][0] > 0) == bool(seen[0][1])


@pytest.mark.parametrize(("rows", "cols", "scheme"), quick(
    6, legal(schemes=("stationary", "megatron", "sequence"))))
def test_panels_bound_the_memory_of_activations(rows, cols, scheme):
    """Ten times the tokens hardly need more workspace."""
    def work(mesh, factor):
        x, weight, _, dy = operands(rows, "output")
        x, dy = x.repeat(factor, 1, 1), dy.repeat(factor, 1, 1)
        product, x, weight, _, dy, *_ = split(mesh, scheme, "output", x, weight, random(INNER), dy)
        product.forward(x, column_weight(mesh, product, weight), None, None)
        product.gradients(dy, x, column_weight(mesh, product, weight), weight.shape, gathered=None, into=None,
                          reuse=False)[1].wait()
        return sum(mesh.workspace.sizes().values())

    few, many = (on_tensor_mesh(rows, cols, SCHEMES[scheme], partial(work, factor=factor), panel_bytes=2400)
                 for factor in (2, 20))
    assert all(after <= 1.5 * before for before, after in zip(few, many, strict=True))


class Spy:
    """A group that records the addresses that it sends from."""

    def __init__(self, group):
        self._group, self.sent = group, []

    def __getattr__(self, name):
        return getattr(self._group, name)

    def broadcast(self, tensor, root=0):
        if root == self._group.index:
            self.sent.append((tensor.data_ptr(), tensor.numel()))
        return self._group.broadcast(tensor, root)

    def all_gather(self, output, tensor):
        self.sent.append((tensor.data_ptr(), tensor.numel()))
        return self._group.all_gather(output, tensor)


@pytest.mark.parametrize("kind", ["output", "vocabulary"])
@pytest.mark.parametrize("side", [2, 3])
def test_on_a_square_mesh_summas_roots_send_from_where_operands_are(side, kind):
    """Each operand is broadcast once in a product, in one piece and without a copy."""
    def work(mesh):
        product, x, weight, bias, dy, *_ = split(mesh, "summa", kind, *operands(side, kind))
        mesh.over_rows, mesh.over_cols = Spy(mesh.over_rows), Spy(mesh.over_cols)
        of_weight, of_x, of_dy = ((tensor.data_ptr(), tensor.numel()) for tensor in (weight, x, dy))
        block = column_weight(mesh, product, weight)
        product.forward(x, block, bias, None)
        assert mesh.over_rows.sent == [of_weight]
        product.gradients(dy, x, block, None)
        assert mesh.over_rows.sent == [of_weight] * 2
        product.gradients(dy, x, None, weight.shape)
        assert mesh.over_rows.sent == [of_weight] * 2
        assert mesh.over_cols.sent == ([of_x] * 2 if kind == "output" else [of_dy] * 2)

    on_tensor_mesh(side, side, SCHEMES["summa"], work)
