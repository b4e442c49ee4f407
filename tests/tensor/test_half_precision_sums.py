"""In half precision every mesh has the rounding error of one product, and gathered operands are multiplied once."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ranvier.config.run import TensorParallel as Settings
from ranvier.mesh import Mesh
from ranvier.plan.cut import meta_mesh
from ranvier.tensor import layers
from ranvier.tensor.split.layers import split_layers
from ranvier.testing.reference import relative_error
from tests.covering import first
from tests.tensor.split_parity import SCHEMES, inner_part, on_tensor_mesh, own, row_part, stream_part

BATCH, SEQUENCE, HIDDEN, INNER = 8, 64, 32, 64


def operands(kind: str, dtype: torch.dtype):
    """Full x, W, bias and dy in half precision; their y, dx and dW exactly, and by one product each."""
    into, out = (INNER, HIDDEN) if kind == "input" else (HIDDEN, INNER)
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(BATCH, SEQUENCE, width, generator=generator).to(dtype) for width in (into, out))
    weight, bias = (torch.randn(out, into, generator=generator) / 4).to(dtype), torch.randn(out, generator=generator)
    bias = None if kind == "vocabulary" else bias.to(dtype)

    def products(dtype: torch.dtype):
        a, w, d = x.to(dtype), weight.to(dtype), dy.to(dtype)
        y = nn.functional.linear(a, w, None if bias is None else bias.to(dtype))
        return {"y": y, "dx": d @ w, "dW": d.flatten(0, 1).t() @ a.flatten(0, 1)}

    return x, weight, bias, dy, products(torch.float64), products(dtype)


LAYERS = {"output": lambda dtype: layers.Linear(HIDDEN, INNER, stationary="output", dtype=dtype),
          "input": lambda dtype: layers.Linear(INNER, HIDDEN, stationary="input", dtype=dtype),
          "vocabulary": lambda dtype: layers.VocabularyLinear(HIDDEN, INNER, dtype=dtype)}


def worst_errors(kind: str, rows: int, cols: int, settings: Settings, panel_bytes: int | None, dtype: torch.dtype):
    """Largest errors of y, dx and dW over the parts of all ranks, in units of one product's error in that part."""
    x, weight, bias, dy, exact, one = operands(kind, dtype)
    enter, leave = (inner_part, stream_part) if kind == "input" else (stream_part, inner_part)

    def work(mesh):
        whole = LAYERS[kind](dtype)
        with torch.no_grad():
            whole.weight.copy_(weight)
            if bias is not None:
                whole.bias.copy_(bias)
        layer = split_layers(whole, mesh, "layer")
        mine = enter(mesh, x).contiguous().requires_grad_()
        y = layer(mine)
        y.backward(leave(mesh, dy).contiguous())
        box = whole.splits(settings)["weight"].box(weight.shape, (rows, cols), (mesh.row, mesh.col))
        part_of = {"y": lambda value: leave(mesh, value), "dx": lambda value: enter(mesh, value),
                   "dW": lambda value: value[tuple(slice(*edges) for edges in box)]}
        found = {"y": y.detach(), "dx": mine.grad, "dW": layer.weight.grad}
        return {name: relative_error(value.double(), right) / relative_error(part_of[name](one[name]).double(), right)
                for name, value in found.items() for right in [part_of[name](exact[name])]}

    ranks = on_tensor_mesh(rows, cols, settings, work, panel_bytes=panel_bytes)
    return {name: max(errors[name] for errors in ranks) for name in one}


CASES = [(rows, cols, scheme) for rows, cols in [(1, 2), (1, 8), (8, 1), (2, 2), (2, 4)] for scheme in SCHEMES
         if rows == 1 or SCHEMES[scheme].scheme != "megatron"]


@pytest.mark.parametrize("kind", list(LAYERS))
@pytest.mark.parametrize(("rows", "cols", "scheme"), first(
    [*(one for one in CASES if one[:2] in [(1, 2), (2, 2)]), (1, 8, "megatron"), (8, 1, "stationary")], CASES))
def test_the_error_is_that_of_one_product(rows, cols, scheme, kind):
    """Sums over 64 panels or slabs in half precision had up to 5.8 times the error."""
    errors = worst_errors(kind, rows, cols, SCHEMES[scheme], 1 << 10, torch.bfloat16)
    assert all(error <= 1.1 for error in errors.values()), errors


def test_fp16_and_whole_panels():
    for dtype, panel_bytes in ((torch.float16, 1 << 10), (torch.bfloat16, None)):
        for kind in LAYERS:
            errors = worst_errors(kind, 2, 2, Settings(), panel_bytes, dtype)
            assert all(error <= 1.1 for error in errors.values()), errors


def test_sums_in_half_precision_round_each_columns_part():
    """Half the bytes, and more error: of the parts, of their sum, and of the bias. Weight gradients do not change."""
    errors = worst_errors("input", 2, 4, Settings(reduce_dtype="half"), None, torch.bfloat16)
    assert 1.3 < errors["y"] < 2.0 and errors["dx"] <= 1.1 and errors["dW"] <= 1.1


def test_classifier_scores_are_rounded_once():
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((64, 4, 32), (48, 32), (48,)))
    exact = nn.functional.linear(x[:, 0].double(), weight.double(), bias.double())

    def work(mesh):
        whole = layers.ClassifierHead(32, 48, dtype=torch.bfloat16)
        with torch.no_grad():
            whole.weight.copy_(weight)
            whole.bias.copy_(bias)
        return relative_error(split_layers(whole, mesh, "head")(own(mesh, x, -1, "col")).double(), exact)

    one = relative_error(nn.functional.linear(x[:, 0], weight, bias).double(), exact)
    assert max(on_tensor_mesh(1, 8, Settings(), work)) <= 1.1 * one


def test_a_tables_gradient_is_rounded_once():
    """256 tokens of the same two entries, whose gradients are summed in fp32."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, (4, 64), generator=generator)
    dx = torch.randn(4, 64, HIDDEN, generator=generator).bfloat16()
    exact = torch.zeros(4, HIDDEN, dtype=torch.float64).index_add_(0, ids.flatten(), dx.double().flatten(0, 1))

    def work(mesh):
        table = split_layers(layers.Embedding(4, HIDDEN, dtype=torch.bfloat16), mesh, "table")
        table(row_part(mesh, ids)).backward(stream_part(mesh, dx).contiguous())
        right = exact
        for dim, axis in ((0, "row"), (1, "col")) if mesh.settings.scheme == "summa" else ((0, "col"),):
            right = own(mesh, right, dim, axis)
        return relative_error(table.weight.grad.double(), right)

    for rows, cols, scheme in ((2, 2, "summa"), (1, 2, "megatron")):
        assert min(on_tensor_mesh(rows, cols, SCHEMES[scheme], work)) < 3e-3


class Products(TorchDispatchMode):
    """The sizes (m, k, n) of all matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[int, int, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if name in ("mm", "bmm", "addmm", "baddbmm", "addmm_", "baddbmm_"):
            a, b = args[1:3] if "add" in name else args[:2]
            self.sizes.append((a.shape[:-1].numel(), a.shape[-1], b.shape[-1]))
        return func(*args, **(kwargs or {}))


WIDTH, TOKENS = 8192, 4096


def products_of(rows: int, cols: int, settings: Settings):
    """(forward, backward) products of an MLP at a GPU's sizes on one rank."""
    mesh = meta_mesh(Mesh(row=rows, col=cols), settings, "cuda")
    with torch.device("meta"):
        mlp = nn.Sequential(layers.Linear(WIDTH, 4 * WIDTH, stationary="output"),
                            layers.Linear(4 * WIDTH, WIDTH, stationary="input")).bfloat16()
        mlp = nn.Sequential(*(split_layers(layer, mesh, "layer") for layer in mlp))
        shape = [1, TOKENS, WIDTH]
        for dim in mesh.activations.cut_dims:
            shape[dim + 1] //= cols
        x = torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)
    with Products() as forward:
        y = mlp(x)
    with Products() as backward:
        y.backward(torch.empty_like(y))
    return forward.sizes, backward.sizes


@pytest.mark.parametrize("rows", [1, 2, 64])
def test_rows_multiply_whole_weights_once(rows):
    """The same products as with FSDP, whatever the number of rows."""
    forward, backward = products_of(rows, 1, Settings())
    assert sorted(forward) == sorted([(TOKENS, WIDTH, 4 * WIDTH), (TOKENS, 4 * WIDTH, WIDTH)])
    assert len(backward) == 4 and all(m * k * n == 4 * TOKENS * WIDTH ** 2 for m, k, n in backward)


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_columns_cut_products_by_panels_of_tokens_alone(rows):
    for scheme in ("stationary-sequence",) if rows > 1 else ("stationary-sequence", "sequence", "megatron"):
        forward, backward = products_of(rows, 8, SCHEMES[scheme])
        inner = 4 * WIDTH // 8
        assert {(k, n) for _, k, n in forward} == {(WIDTH, inner), (inner, WIDTH)}
        if scheme == "megatron":  # nothing is gathered before the first product, nor before the gradients of the last
            assert forward[0] == (TOKENS, WIDTH, inner)
            assert (TOKENS, WIDTH, inner) in backward
        assert sum(m * k * n for m, k, n in forward) == 2 * TOKENS * WIDTH * inner
        assert sum(m * k * n for m, k, n in backward) == 4 * TOKENS * WIDTH * inner
