"""Number and sizes of the products that a pair of linear layers runs at GPU sizes: counted on the meta device, with
CUDA's panels. Products are split only if something travels, and a gathered weight is multiplied once."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

from ranvier.mesh import Mesh
from ranvier.plan.cut import meta_mesh
from ranvier.plan.kernel_count import KernelCount
from ranvier.tensor.layers import Linear
from ranvier.tensor.split.layers import split_layers
from tests.tensor.split_parity import SCHEMES

HIDDEN, INNER = 8192, 32768


def products(module, tokens, width):
    """Counts of products, forward and backward, for one sequence of bf16 tokens, by the sizes of the result, smaller
    first, and the length of its sums."""
    with torch.device("meta"):
        x = torch.empty(1, tokens, width, dtype=torch.bfloat16, requires_grad=True)
    with KernelCount() as count:
        y = module.to(torch.bfloat16)(x)
        y.backward(torch.empty_like(y))
    shapes = (kernel.shape for kernel in count.kernels if kernel.kind == "product")
    return Counter((*sorted((batch * m, n)), k) for batch, m, n, k in shapes)


def on_mesh(scheme, row, col, tokens, device="cuda"):
    """The products of one rank."""
    mesh = meta_mesh(Mesh(row=row, col=col), SCHEMES[scheme], device)
    with torch.device("meta"):
        layers = split_layers(nn.Sequential(Linear(HIDDEN, INNER, bias=False, stationary="output"),
                                            Linear(INNER, HIDDEN, bias=False, stationary="input")), mesh, "layers")
    x = {"hidden": (tokens, HIDDEN // col), "sequence": (tokens // col, HIDDEN), "whole": (tokens, HIDDEN)}
    return products(layers, *x[mesh.activations.name])


@pytest.mark.parametrize("scheme", ["stationary", "stationary-sequence"])
@pytest.mark.parametrize("rows", [2, 8, 64])
def test_rows_run_the_products_of_a_whole_model(rows, scheme):
    """As FSDP, which gathers full weights: each product once, with the same sizes."""
    with torch.device("meta"):
        whole = nn.Sequential(nn.Linear(HIDDEN, INNER, bias=False), nn.Linear(INNER, HIDDEN, bias=False))
    expected = products(whole, 64, HIDDEN)
    assert on_mesh(scheme, rows, 1, 64) == expected and expected.total() == 6


@pytest.mark.parametrize(("scheme", "row", "col"), [
    (scheme, row, col) for scheme in SCHEMES if scheme != "summa" for row, col in ((1, 8), (8, 4))
    if row == 1 or SCHEMES[scheme].scheme != "megatron"])
@pytest.mark.parametrize(("tokens", "panels"), [(512, 1), (1024, 1), (4096, 2), (8192, 4)])
def test_only_what_travels_is_cut(scheme, row, col, tokens, panels):
    """For 16 MiB several panels hide less than they cost; for 64 MiB two pay off, for 128 MiB four."""
    own, bound = INNER // col, -(-tokens * HIDDEN * 2 // (64 << 20))
    gathered, beside = (1, 1) if scheme == "megatron" else (panels, bound)
    expected = Counter()
    for count, out, into in ((gathered, own, HIDDEN), (panels, HIDDEN, own),  # y of the first and the second layer
                             (gathered, own, HIDDEN), (bound, HIDDEN, own)):  # dx of the second and the first
        expected[(*sorted((tokens // count, out)), into)] += count
    for count in (gathered, beside):  # dW of the second, and of the first: x arrives together with its dx
        expected[(*sorted((own, HIDDEN)), tokens // count)] += count
    assert on_mesh(scheme, row, col, tokens) == expected


def test_a_cpu_has_as_many_as_its_cache_asks_for():
    """Panels have 4 MiB, whatever they hide: 4 panels of 1,024 tokens in bf16, and 8 of their sums in fp32."""
    assert on_mesh("sequence", 1, 8, 1024, device="cpu").total() == 4 + 8 + 2 * 4 + 8 + 4


def test_fewer_bytes_a_panel_are_more_panels():
    mesh = meta_mesh(Mesh(col=8), replace(SCHEMES["sequence"], panel_bytes=8 << 20), "cuda")
    assert len(mesh.panels(torch.empty(1, 128, HIDDEN, dtype=torch.bfloat16), exposed=True)) == 2


@pytest.mark.parametrize(("sequences", "width", "panels"), [
    (4, 6144, [(1, 4096)] * 4), (7, 6144, [(1, 4096)] * 7), (1, 24576, [(4, 256)] * 4), (3, 8192, [(1, 4096)] * 3)])
def test_panels_are_of_whole_sequences_or_of_whole_tiles(sequences, width, panels):
    """Three panels of four sequences would have 341 of the 1,024 positions of each sequence and column: products of 16
    batches with a nearly empty tile each."""
    mesh = meta_mesh(Mesh(col=4), SCHEMES["sequence"], "cuda")
    x = torch.empty(sequences, 1024, width, dtype=torch.bfloat16, device="meta")
    flat = torch.empty(sequences * 4096, width, dtype=torch.bfloat16, device="meta")
    assert [mesh.activations.rows(flat, x, panel).shape[:-1] for panel in mesh.panels(x)] == panels
