"""The cost model of kernels against values worked out by hand: backwards, waves, merged chains, counted blocks."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from ranvier.block import Model
from ranvier.config.resolve import ResolvedRun
from ranvier.config.run import Batch, Launch, Memory, TensorParallel, Transformer
from ranvier.cost.cluster_files import load_cluster
from ranvier.cost.hardware import Rate
from ranvier.cost.kernels import (
    Access,
    Kernel,
    backward_of,
    fuse_chains,
    scaled,
    to_float8,
    weight_gradients_of,
    whole_waves_flops,
    with_scores,
    without_fused_loss,
    without_panels,
)
from ranvier.mesh import Mesh
from ranvier.models import families
from ranvier.pipeline.segment import Segment
from ranvier.plan.block_costs import block_costs
from ranvier.plan.cut import meta_mesh, split_model
from ranvier.plan.kernel_count import Counting, KernelCount
from ranvier.planner import work
from ranvier.planner.run_cost import run_cost
from ranvier.planner.work import Work
from ranvier.tensor.layers.rotary import _tables

X, W, Y, Z = (Access(number, size, size) for number, size in enumerate((70, 30, 42, 42)))
PRODUCT = Kernel(kind="product", flops=2 * 7 * 3 * 5, shape=(1, 7, 3, 5), reads=(X, W), writes=(Y,), weight="trains",
                 has_bias=True)
ATTENTION = Kernel(kind="attention", flops=1000, shape=(6, 8, 8, 4), reads=(X, W, Y), writes=(Z,))


def squares(outputs, targets):
    return ((outputs - targets) ** 2).sum(), len(targets)


def moved(kernels):
    return sum(kernel.moved_bytes for kernel in kernels)


def test_a_product_of_a_weight_has_two_in_its_backward():
    (of_x,) = backward_of([PRODUCT])
    assert (of_x.shape, of_x.flops, of_x.moved_bytes) == ((1, 7, 5, 3), PRODUCT.flops, PRODUCT.moved_bytes)
    of_w, of_bias = weight_gradients_of([PRODUCT], 4)
    assert (of_w.shape, of_w.flops) == ((1, 3, 5, 7), PRODUCT.flops)
    assert of_w.moved_bytes == 70 + 42 + 2 * 4 * 3 * 5  # x and dy; the gradient is read and written
    assert of_bias.moved_bytes == 42
    assert weight_gradients_of([replace(PRODUCT, weight="frozen")], 4) == ()


def test_a_gradient_that_another_kernel_adds_is_written_and_read_once_more():
    of_w, adds, of_bias = weight_gradients_of([PRODUCT], 4, 2)
    assert (of_w.shape, of_w.moved_bytes) == ((1, 3, 5, 7), 70 + 42 + 2 * 3 * 5)
    assert (adds.kind, adds.moved_bytes) == ("copy", (2 + 2 * 4) * 3 * 5) and of_bias.moved_bytes == 42


def test_a_loss_that_is_not_fused_is_a_cast_and_a_softmax_in_fp32():
    fused = Kernel(kind="pointwise", reads=(X,))
    kept, cast, softmax = without_fused_loss([PRODUCT, fused])
    assert kept is PRODUCT and (cast.kind, cast.moved_bytes, softmax.moved_bytes) == ("copy", 3 * 70, 4 * 70)
    assert [moved(kernels) for kernels in (backward_of([cast]), backward_of([softmax]))] == [3 * 70, 6 * 70]


def test_a_product_of_activations_has_both_in_its_backward():
    of_second, of_first = backward_of([replace(PRODUCT, weight="none", has_bias=False)])
    assert (of_second.shape, of_first.shape) == ((1, 7, 5, 3), (1, 5, 3, 7))
    assert weight_gradients_of([replace(PRODUCT, weight="none")], 4) == ()


def test_gradients_of_parts_of_an_output_are_put_together():
    part = Y._replace(bytes=21)
    uses = [Kernel(kind="pointwise", reads=(part,), writes=(Z,))] * 2
    assert backward_of([PRODUCT, *uses])[0] == Kernel(kind="copy", reads=(Y,), writes=(Y,))
    assert len(backward_of([PRODUCT, *uses])) == len(backward_of([PRODUCT, uses[0]])) + 2
    attention = count_gpt()
    copies = [sum(kernel.kind == "copy" for kernel in kernels) for kernels in (attention, backward_of(attention))]
    assert copies[1] == copies[0] + 1


def count_gpt():
    """Kernels of the attention of a GPT, whose queries, keys and values are parts of one output."""
    run = ResolvedRun(model=Transformer(num_layers=1, hidden=64, heads=4, vocab=64, sequence=16),
                      batch=Batch(global_size=2, microbatch_size=2), launch=Launch(device="cuda"), precision="bf16")
    return next(block.kernels for block in Work().blocks(run) if block.name.endswith("attention"))


def test_a_norms_weight_has_its_gradient_from_a_pass_of_its_own():
    """For a layer's norm, x and dy are read once more, compiled or not; for a frozen norm they are not."""
    norm = nn.LayerNorm(8, device="meta")
    counts = []
    for trains in (True, False):
        count = KernelCount({norm.weight.untyped_storage()._cdata: trains})
        with count:
            norm(torch.empty(5, 8, device="meta"))
        counts.append(count)
    assert [moved(weight_gradients_of(count.kernels, 4)) for count in counts] == [2 * 5 * 8 * 4, 0]
    outputs = {access.storage for access in counts[0].kernels[0].writes}
    assert moved(weight_gradients_of(fuse_chains(counts[0].kernels, outputs), 4)) == 2 * 5 * 8 * 4


def test_norms_and_gradients_of_biases_are_sums_over_a_dim():
    """Also in merged chains, and in backwards."""
    norm = nn.LayerNorm(64, device="meta")
    with KernelCount({norm.weight.untyped_storage()._cdata: True}) as count:
        x = norm(torch.empty(5, 64, device="meta"))
        functional.gelu(x)
        x.sum(-1)
    assert [kernel.is_reduction for kernel in count.kernels] == [True, False, True]
    assert [kernel.is_reduction for kernel in backward_of(count.kernels)] == [True, False, True]
    (merged,) = fuse_chains(count.kernels, set())
    assert merged.is_reduction
    assert [kernel.is_reduction for kernel in weight_gradients_of([*count.kernels, PRODUCT], 4)] == [True, False, True]


def test_attention_computes_its_scores_again_in_the_backward():
    (backward,) = backward_of([ATTENTION])
    assert backward.flops == 2500 and backward.is_backward
    assert backward.moved_bytes == 2 * (70 + 30 + 42) + 2 * 42


def test_pointwise_operations_read_their_inputs_again_and_copies_do_not():
    chain = Kernel(kind="pointwise", reads=(X,), writes=(Y,))
    assert moved(backward_of([chain])) == 2 * 70 + 42
    assert moved(backward_of([replace(chain, kind="copy")])) == 70 + 42


def test_attention_with_scores_writes_and_reads_them():
    first, *passes, last = with_scores([ATTENTION], 2)
    scores = 2 * 6 * 8 * 8
    assert first.flops == last.flops == 2 * 6 * 8 * 8 * 4  # in full
    assert first.moved_bytes == 70 + 30 + scores and last.moved_bytes == scores + 42 + 42
    assert len(passes) == 3 and moved(passes) == 6 * scores


def test_waves_are_whole():
    """8192 x 8192 has 4096 tiles of 128 x 128, which take 32 waves on 132 multiprocessors."""
    assert whole_waves_flops((1, 8192, 8192, 8192), 132, 128, 0.0) == 2 * 32 * 132 * 128 ** 2 * 8192
    assert whole_waves_flops((1, 8192, 8192, 8192), 132, 128, 100.0) == 2 * 32 * 132 * 128 ** 2 * 8292
    assert whole_waves_flops((1, 129, 128, 64), 2, 128, 0.0) == 2 * 2 * 128 ** 2 * 64
    assert whole_waves_flops((1, 128, 128, 4096), 4, 128, 0.0) == 2 * 4 * 128 ** 2 * 1024  # sums in four parts
    assert whole_waves_flops((1, 0, 128, 64), 4, 128, 0.0) == 0.0
    assert whole_waves_flops((4, 20, 128, 64), 2, 128, 0.0) == 2 * 2 * 128 * (32 + 128) * 64  # tiles of 32 rows


def test_a_kernel_takes_the_longer_of_computing_and_moving():
    device = replace(load_cluster("h100").device, rates={"bf16": Rate(
        peak_flops=1000.0, share=0.5, attention_share=0.25, attention_backward_share=0.2)}, memory_bandwidth=100.0,
        memory_share=0.5, operation_seconds=0.25, multiprocessors=None)
    assert device.kernel_seconds(replace(PRODUCT, flops=5000), "bf16") == 10.0 + 0.25
    assert device.kernel_seconds(PRODUCT, "bf16") == 142 / 50 + 0.25
    assert device.kernel_seconds(ATTENTION, "bf16") == 4.0 + 0.25
    assert device.kernel_seconds(backward_of([ATTENTION])[0], "bf16") == 12.5 + 0.25
    assert device.kernel_seconds(replace(PRODUCT, flops=5000), "bf16", threads=2.0) == 5.0 + 0.25
    assert device.seconds([PRODUCT, ATTENTION], "bf16") == 142 / 50 + 4.0 + 0.5
    assert device.kernel_seconds(replace(PRODUCT, flops=5000, float8=True), "bf16") == 10.25  # it has no rate for fp8
    eight = replace(device, rates={**device.rates, "fp8": Rate(peak_flops=2000.0, share=0.5)})
    assert eight.kernel_seconds(replace(PRODUCT, flops=5000, float8=True), "bf16") == 5.0 + 0.25


def test_tiles_of_a_product_take_whole_waves_of_the_device():
    device = replace(load_cluster("h100").device, multiprocessors=100, tile_start=0.0, operation_seconds=0.0)
    one, more = (device.kernel_seconds(replace(PRODUCT, shape=(1, 1280, columns, 8192)), "bf16")
                 for columns in (1280, 1281))
    assert more == pytest.approx(2 * one)


def test_chains_are_one_pass_over_what_enters_and_leaves():
    """A chain reads what enters it and writes what later kernels read; tensors within a chain are not moved."""
    a, b, c, d, e = (Access(number, 10 ** place, 10 ** place) for place, number in enumerate(range(10, 15)))
    weight = Access(20, 5, 5)
    kernels = [Kernel(kind="copy", reads=(a,), writes=(b,)), Kernel(kind="pointwise", reads=(b,), writes=(c,)),
               Kernel(kind="product", reads=(c, weight), writes=(d,)),
               Kernel(kind="pointwise", reads=(d, a), writes=(e,))]
    first, product, last = fuse_chains(kernels, {14})
    assert (first.kind, first.reads, first.writes) == ("pointwise", (a,), (c,))
    assert product == kernels[2] and (last.reads, last.writes) == ((d, a), (e,))
    assert fuse_chains(kernels, ())[-1].writes == ()  # nothing reads it


def test_parts_of_a_storage_add_up_to_the_whole_at_most():
    third, whole = Access(1, 10, 30), Access(1, 30, 30)
    one = fuse_chains([Kernel(kind="copy", reads=(third,), writes=(Access(2, 9, 9),)),
                       Kernel(kind="copy", reads=(third, Access(2, 9, 9)), writes=(Access(3, 9, 9),))], {3})
    assert [kernel.reads for kernel in one] == [(third._replace(bytes=20),)]
    more = fuse_chains([Kernel(kind="copy", reads=(each,), writes=(Access(4, 1, 1),))
                        for each in (whole, third, whole)], {4})
    assert [kernel.reads for kernel in more] == [(whole,)]


def test_panels_of_a_product_are_one_where_they_are_not_wanted():
    panel = replace(PRODUCT, reads=(X._replace(bytes=35), W), writes=(Y._replace(bytes=21),), has_bias=False)
    (whole,) = without_panels([panel, panel])
    assert whole == replace(panel, flops=2 * panel.flops, shape=(1, 14, 3, 5), reads=(X, W), writes=(Y,))
    other, copy = Access(9, 30, 30), Kernel(kind="copy", reads=(X,))
    assert without_panels([panel, copy, replace(panel, shape=(2, 7, 3, 5))]) == (
        replace(whole, shape=(1, 21, 3, 5)), copy)
    assert len(without_panels([panel, replace(panel, reads=(X, other))])) == 2


def test_a_larger_microbatch_leaves_weights_as_they_are():
    product, attention = scaled([PRODUCT, ATTENTION], 2.0)
    assert (product.flops, product.shape, product.moved_bytes) == (2 * PRODUCT.flops, (1, 14, 3, 5), 2 * 112 + 30)
    assert (attention.flops, attention.shape) == (2000, (12, 8, 8, 4))
    assert attention.moved_bytes == 2 * ATTENTION.moved_bytes


@pytest.mark.parametrize("col", [1, 4])
def test_microbatches_that_are_not_counted_are_near_to_what_they_would_be(col, monkeypatch):
    """16 samples, extrapolated from counts of 2 and 4, against counted 16."""
    run = replace(llama_run(mesh=Mesh(col=col), batch=Batch(global_size=16, microbatch_size=16)),
                  launch=Launch(device="cuda"))
    by_others = Work().blocks(run)
    monkeypatch.setattr(work, "_MOST_COUNTED", 16)
    device = load_cluster("h100").device
    counted = Work().blocks(run)
    for found, each in zip(by_others, counted, strict=True):
        for name in ("flops", "kept_bytes", "input_bytes", "output_bytes", "num_parameters"):
            assert getattr(found, name) == getattr(each, name)
    scaled_seconds, seconds = (sum(device.seconds(block.kernels, "bf16") for block in blocks)
                               for blocks in (by_others, counted))
    assert scaled_seconds == pytest.approx(seconds, rel=0.05)


def test_float8_rounds_both_operands_of_layers_that_it_can_compute():
    layer = replace(PRODUCT, shape=(1, 7, 32, 16))
    *rounding, product = to_float8([layer], 16, fuses=True)
    assert product == replace(layer, float8=True) and moved(rounding) == 5 * (7 * 16 + 32 * 16) and len(rounding) == 4
    assert to_float8([PRODUCT], 16, fuses=True) == (PRODUCT,)
    assert moved(to_float8([layer], 16, fuses=False)[:-1]) == 33 * (7 * 16 + 32 * 16)


# ---------------------------------------------------------------------- counted


class Twice(nn.Module):
    """Views, an expanded tensor, a lookup and a sum; the views and the expansion move nothing."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(1000, 4)
        self.scale = nn.Parameter(torch.ones(1, 4))

    def forward(self, x):
        ids = x.to(torch.int64)
        rows = self.table(ids).view(6, 4).t().t()
        return rows + self.scale.expand(6, 4)


def test_views_move_nothing_and_expanded_tensors_count_once():
    (cost,) = block_costs(Model(blocks={"a": Twice}, loss=squares), torch.zeros(2, 3))
    cast, lookup, total = cost.kernels
    assert cast.moved_bytes == 6 * 4 + 6 * 8
    assert lookup.moved_bytes == 6 * 16 + 6 * 8 + 6 * 16  # rows of the table, their indices, and the output
    assert total.moved_bytes == 6 * 16 + 16 + 6 * 16


class Attention(nn.Module):
    def forward(self, x):
        q, k, v = x.view(2, 8, 3, 4, 16).permute(2, 0, 3, 1, 4).unbind()
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_causal_attention_computes_what_is_below_the_diagonal():
    (cost,) = block_costs(Model(blocks={"a": Attention}, loss=squares), torch.zeros(2, 8, 3 * 4 * 16))
    (kernel,) = cost.kernels
    assert cost.flops == 2 * 2 * 2 * 4 * 8 * 8 * 16 and kernel.flops == cost.flops * (8 + 1) / (2 * 8)
    assert kernel.kind == "attention" and kernel.shape == (8, 8, 8, 16)
    (whole,) = block_costs(Model(blocks={"a": Attention}, loss=squares), torch.zeros(2, 8, 3 * 4 * 16),
                           counting=Counting(has_scores=True))
    assert sum(each.flops for each in whole.kernels) == cost.flops and len(whole.kernels) == 5


def test_frozen_weights_have_no_gradient():
    def build():
        layer = nn.Linear(3, 5)
        layer.weight.requires_grad_(False)
        return layer

    model = Model(blocks={"a": build, "b": partial(nn.Linear, 5, 2)}, loss=squares)
    frozen, trained = block_costs(model, torch.zeros(7, 3))
    assert [kernel.weight for kernel in (*frozen.kernels, *trained.kernels)] == ["frozen", "trains"]
    assert weight_gradients_of(frozen.kernels, 4) == () and len(weight_gradients_of(trained.kernels, 4)) == 2


def llama_run(**settings):
    return ResolvedRun(**{"model": Transformer(family="llama", num_layers=1, hidden=20480 // 4, heads=40, vocab=512,
                                               sequence=256), "precision": "bf16",
                          "batch": Batch(global_size=8, microbatch_size=1), **settings})


def test_a_compiled_block_moves_less_and_computes_the_same():
    run = llama_run()
    run = replace(run, launch=replace(run.launch, device="cuda"))
    plain = Work().blocks(replace(run, model=replace(run.model, compile=False)))
    for before, after in zip(plain, Work().blocks(run), strict=True):
        assert moved(after.kernels) <= moved(before.kernels) and len(after.kernels) <= len(before.kernels)
        assert sum(kernel.flops for kernel in after.kernels) == sum(kernel.flops for kernel in before.kernels)
    compiled, written = (moved(kernel for kernel in blocks[1].kernels if kernel.kind in ("pointwise", "copy"))
                         for blocks in (Work().blocks(run), plain))
    assert compiled < 0.3 * written


@pytest.mark.parametrize("tensor", [TensorParallel(sequence_sharding=True),
                                    TensorParallel(scheme="megatron", sequence_sharding=True)], ids=str)
def test_a_split_block_moves_no_more_than_its_tensors(tensor):
    """Gathered inputs are read once by each panel's product, and weights once by each product, not in their expanded
    size."""
    run = llama_run(tensor=tensor, mesh=Mesh(col=8))
    run = replace(run, launch=replace(run.launch, device="cuda"))
    whole, split = (sum(moved(block.kernels) for block in Work().blocks(each))
                    for each in (replace(run, mesh=Mesh()), run))
    assert split < 1.5 * whole


def test_a_count_does_not_depend_on_those_before():
    """Whether or not the table of angles already exists: all layers share it, so it is not part of a block."""
    run = llama_run(mesh=Mesh(col=2))
    with torch.device("meta"):
        inputs, _ = families.sample_of(run, 2)

    def counted():
        model = split_model(families.model_of(run), meta_mesh(run.mesh, run.tensor, "cpu"))
        return block_costs(model, inputs)

    _tables.cache_clear()
    assert counted() == counted()


@pytest.mark.parametrize("family, share", [("gpt", 2 / 3), ("llama", 3 / 4)])
def test_a_second_run_ends_before_the_last_product_as_in_the_engine(family, share):
    """The backward does not need the output of a segment's last product; as published it is recomputed nevertheless."""
    run = ResolvedRun(model=Transformer(family=family, num_layers=1, hidden=64, heads=4, vocab=300, sequence=32),
                      batch=Batch(global_size=2, microbatch_size=2))
    model = families.model_of(run)
    blocks = [(name, model.blocks[name]()) for name in model.layers[0]]
    counted = {block.name: block for block in Work().blocks(run) if block.name in model.layers[0]}
    first, last = counted.values()
    again = sum(kernel.flops for kernel in (*first.repeated_kernels, *last.last_repeated_kernels)
                if kernel.kind == "product")
    state = torch.randn(2, 32, 64, requires_grad=True)

    def compute(state):
        for _, block in blocks:
            state = block(state)
        return state

    def backward_flops(result):
        with FlopCounterMode(display=False) as counter:
            result.sum().backward()
        return counter.get_total_flops()

    assert backward_flops(Segment(blocks).run(compute, state)) - backward_flops(compute(state)) == again
    forward = sum(kernel.flops for block in counted.values() for kernel in block.kernels if kernel.kind == "product")
    assert again == pytest.approx(share * forward)
    recomputed = replace(run, memory=Memory(recompute=1))
    seconds = {published: run_cost(recomputed, load_cluster("h100"), Work().stages(recomputed),
                                   as_published=published).stages[0].backward_seconds for published in (False, True)}
    assert seconds[False] < seconds[True]
