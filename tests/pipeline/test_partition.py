"""Costs of blocks, and the cut whose slowest stage is fastest."""

from dataclasses import replace
from functools import partial
from itertools import accumulate, combinations, combinations_with_replacement, pairwise, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.modules import module

from ranvier.block import Model
from ranvier.config.rules import check_boundaries
from ranvier.config.run import Transformer
from ranvier.cost.blocks import BlockCost
from ranvier.cost.kernels import Access, Kernel
from ranvier.mesh import StagePlacement
from ranvier.models.gpt import flops_per_sequence, gpt
from ranvier.plan.block_costs import FusedAttention, KeptBytes, block_costs, loss_parts
from ranvier.plan.kernel_count import Counting
from ranvier.plan.partition import partition, partition_for, uniform
from ranvier.schedule.partition import cut
from tests.covering import examples
from tests.errors import raises
from tests.pipeline.parity import FP64_SUMS, chain, small_gpt, squared


def dearest(costs, boundaries):
    return max(sum(costs[start:stop]) for start, stop in pairwise((0, *boundaries, len(costs))))


def squares(costs, boundaries):
    return sum(sum(costs[start:stop]) ** 2 for start, stop in pairwise((0, *boundaries, len(costs))))


@examples(80)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=9), st.data())
def test_partition_is_exact(costs, data):
    stages = data.draw(st.integers(1, len(costs)))
    boundaries = partition(costs, stages)
    assert check_boundaries(boundaries, len(costs), stages) == boundaries
    ways = list(combinations(range(1, len(costs)), stages - 1))
    best = min(dearest(costs, edges) for edges in ways)
    assert dearest(costs, boundaries) == best
    assert squares(costs, boundaries) == min(squares(costs, edges) for edges in ways if dearest(costs, edges) == best)
    sums = [0, *accumulate(costs)]  # the same for any costs
    by_any_cost = cut(len(costs), stages, lambda stage, start, stop: sums[stop] - sums[start])
    assert (dearest(costs, by_any_cost), squares(costs, by_any_cost)) == (best, squares(costs, boundaries))


def test_stages_are_equal_beside_the_slowest_one():
    """Of equally good cuts, the one with more blocks in front is taken."""
    assert partition([1, 1, 1, 1, 1], 2) == (3,)
    assert partition([4, 1, 1, 1, 1], 2) == (1,)
    assert partition([1] * 12 + [5], 4) == (4, 8, 12)
    assert partition([2, 1, 0, 1, 0, 0, 9], 3) == (1, 6)
    assert partition([5.0], 1) == ()


@pytest.mark.parametrize(("blocks", "stages", "expected"), [
    (8, 4, (2, 4, 6)), (30, 4, (8, 16, 23)), (7, 3, (3, 5)), (3, 3, (1, 2)), (5, 1, ())])
def test_uniform(blocks, stages, expected):
    assert uniform(blocks, stages) == expected


@pytest.mark.parametrize("cut_into", [partition, lambda costs, stages: uniform(len(costs), stages)])
def test_more_stages_than_blocks(cut_into):
    with raises("more-stages-than-blocks", 2, 3):
        cut_into([1.0, 1.0], 3)


@pytest.mark.parametrize(("boundaries", "error"), [
    ((1,), ("boundaries-count", 1, 3)),
    *((numbers, ("boundaries-not-rising",)) for numbers in ((2, 2), (0, 2), (3, 5), (4, 2), (-1, 2)))])
def test_boundaries_that_do_not_cut(boundaries, error):
    with raises(*error, 2, 4, where="pipeline.boundaries", value=boundaries):
        check_boundaries(boundaries, 5, 3)


# ---------------------------------------------------------------------- costs

def test_costs_of_a_chain_of_linear_layers():
    """2 x in x out operations for each row; the output is written and sent on. A kernel reads inputs, weights and bias,
    and writes the output; the loss's kernels are on 14 numbers and their flags, and it keeps errors and flags. Besides
    what is kept, a forward has the output, and a backward the gradients of output and input (and of its root)."""
    model = chain(partial(nn.Linear, 3, 5), partial(nn.Linear, 5, 2, bias=False))
    inputs = torch.zeros(7, 3)
    first, second = block_costs(model, inputs, torch.zeros(7, 2), torch.float32, Counting(is_live=True))
    assert [replace(cost, kernels=(), num_repeated=None) for cost in (first, second)] == [
        BlockCost(name="b0", flops=2 * 7 * 3 * 5, written_bytes=7 * 5 * 4, forward_bytes=7 * 5 * 4,
                  backward_bytes=7 * 5 * 4 + 8,
                  num_trainable=20, num_owned=20, weight_elements=15, plain_elements=15,
                  output_bytes=7 * 5 * 4, num_parameters=20, kept_bytes=7 * 3 * 4, operand_bytes=7 * 3 * 4,
                  input_bytes=7 * 3 * 4),
        BlockCost(name="b1", flops=2 * 7 * 5 * 2, written_bytes=7 * 2 * 4, forward_bytes=7 * 2 * 4,
                  backward_bytes=7 * 2 * 4 + 7 * 5 * 4 + 8, loss_bytes=14 * 4 + 14, loss_forward_bytes=3 * 14 * 4,
                  loss_backward_bytes=4 * 14 * 4 - 14 + 8, target_bytes=7 * 2 * 4,
                  num_trainable=10, num_owned=10, weight_elements=10, plain_elements=10,
                  output_bytes=7 * 2 * 4, num_parameters=10,
                  kept_bytes=7 * 5 * 4, operand_bytes=7 * 5 * 4, input_bytes=7 * 5 * 4)]
    (product,) = first.kernels
    assert (product.flops, product.shape) == (2 * 7 * 3 * 5, (1, 7, 5, 3))
    assert product.moved_bytes == 4 * (7 * 3 + 3 * 5 + 5 + 7 * 5)
    product, *of_loss = second.kernels
    assert product.moved_bytes == 4 * (7 * 5 + 5 * 2 + 7 * 2)
    assert len(of_loss) == 6 and sum(kernel.moved_bytes for kernel in of_loss) == 558


def test_products_of_linear_layers_alone_may_wait():
    """A convolution's weight gradient is a part of the backward."""
    model = chain(partial(nn.Conv1d, 3, 3, 1), partial(nn.Linear, 5, 2))
    assert [cost.defers for cost in block_costs(model, torch.zeros(7, 3, 5))] == [False, True]


class _ByValue(torch.autograd.Function):
    """Its backward reads a value, which tensors on the meta device do not have."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float(gradient.sum())


def test_a_backward_that_needs_values_counts_as_all_that_the_forward_writes():
    class Reads(nn.Linear):
        def forward(self, x):
            return _ByValue.apply(super().forward(x))

    (cost,) = block_costs(chain(partial(Reads, 3, 5)), torch.zeros(7, 3), None, torch.float32, Counting(is_live=True))
    assert cost.forward_bytes == cost.backward_bytes == 2 * 7 * 5 * 4


def test_costs_in_fp64_and_with_dropout():
    ids = torch.zeros(2, 6, dtype=torch.int64)
    once = block_costs(small_gpt(), ids, dtype=torch.float32)
    twice = block_costs(small_gpt(dropout=0.5), ids, dtype=torch.float64)
    assert [cost.flops for cost in once] == [cost.flops for cost in twice]
    assert [2 * cost.output_bytes for cost in once] == [cost.output_bytes for cost in twice]


@pytest.mark.parametrize("sizes", [dict(num_layers=2, hidden=16, heads=2, vocab=50, sequence=8),
                                   dict(num_layers=3, hidden=8, heads=4, vocab=300, sequence=5)], ids=str)
def test_flops_of_a_gpt_are_the_formula(sizes):
    config = Transformer(**sizes)
    costs = block_costs(gpt(config), torch.zeros(3, config.sequence, dtype=torch.int64))
    assert 3 * sum(cost.flops for cost in costs) == pytest.approx(3 * flops_per_sequence(config))
    assert [cost.output_bytes for cost in costs][:-1] == [4 * 3 * config.sequence * config.hidden] * (len(costs) - 1)


def test_weights_count_written_bytes_and_on_gpus_the_longer_of_a_kernels_two_times():
    kernels = (Kernel(kind="product", flops=6000, reads=(Access(0, 20, 20),)),
               Kernel(kind="pointwise", reads=(Access(0, 20, 20),), writes=(Access(1, 10, 10),)))
    cost = BlockCost(name="a", flops=100, written_bytes=10, forward_bytes=10, backward_bytes=10, output_bytes=0,
                     num_parameters=0, kept_bytes=0, input_bytes=0, num_trainable=0, num_owned=0, kernels=kernels,
                     number_bytes=2)
    assert cost.weight("cpu") == 140.0 and cost.weight("xpu") == 140.0
    assert cost.weight("cuda") == 6000 + 250 * 30
    assert replace(cost, number_bytes=4).weight("cuda") == 6000 + 20 * 30


def test_counting_leaves_ready_made_modules_alone():
    torch.manual_seed(0)
    norm, linear = nn.BatchNorm1d(3), nn.Linear(3, 3)
    shared = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    shared[1].weight = shared[0].weight
    tensors = (*norm.buffers(), *linear.parameters())
    before = [tensor.clone() for tensor in tensors]
    model = Model(blocks={"a": lambda: norm, "b": lambda: linear, "c": lambda: shared}, loss=squared)
    costs = block_costs(model, torch.zeros(4, 3), torch.zeros(4, 3))
    assert [cost.num_parameters for cost in costs] == [6, 12, 15]
    assert all(torch.equal(one, kept) for one, kept in zip(tensors, before, strict=True))


class Dict(nn.Module):
    def forward(self, state):
        return {"x": state, "mask": torch.ones(state.shape[0], dtype=torch.bool, device=state.device)}


class Named(nn.Module):
    def forward(self, state):
        return state, "a"


def test_costs_of_named_tensors():
    first, = block_costs(Model(blocks={"a": Dict}, loss=squared), torch.zeros(4, 3))
    assert first.output_bytes == 4 * 3 * 4 + 4


# ---------------------------------------------------------------------- chains that do not fit

@pytest.mark.parametrize(("blocks", "error"), [
    ([partial(nn.Linear, 4, 4)], ("block-refuses-input",)),
    ([partial(nn.Linear, 3, 5), partial(nn.Linear, 4, 2)],
     ("block-refuses-input",)),
    ([Dict, partial(nn.Linear, 3, 3)], ("block-refuses-input",)),
    ([lambda: nn.LSTM(3, 3), partial(nn.Linear, 3, 3)],
     ("block-refuses-input",)),
    ([Named], ("block-output-type", 1)),
])
def test_blocks_that_do_not_fit(blocks, error):
    with raises(*error):
        block_costs(chain(*blocks), torch.zeros(4, 3), torch.zeros(4, 3))


@pytest.mark.parametrize(("loss", "error"), [
    (lambda outputs, targets: ((outputs - targets) ** 2).mean(), ("loss-result",)),
    (lambda outputs, targets: (outputs - targets) ** 2, ("loss-result", 4, 3)),
    (lambda outputs, targets: (outputs.sum(), None), ("loss-result",)),
    (lambda outputs, targets: (1.0, 4), ("loss-result", "float", "int")),
    (lambda outputs, targets: outputs.sum().item(), ("loss-refuses-output",)),
    (lambda outputs: outputs.sum(), ("loss-refuses-output",)),
    (lambda outputs, targets: (outputs.to(torch.complex64).sum(), 4), ("loss-complex",)),
    (lambda outputs, targets: (outputs.sum(), outputs.to(torch.complex64).sum()), ("loss-complex",)),
])
def test_losses_that_do_not_fit(loss, error):
    with raises(*error):
        block_costs(chain(partial(nn.Linear, 3, 3), loss=loss), torch.zeros(4, 3), torch.zeros(4, 3))


def test_a_loss_may_overwrite_the_outputs():
    """It may do so if they are not leaves; it keeps their errors, in their memory."""
    model = chain(partial(nn.Linear, 3, 3), loss=lambda outputs, targets: (outputs.sub_(targets).square().sum(), 4))
    assert block_costs(model, torch.zeros(4, 3), torch.zeros(4, 3))[-1].loss_bytes == 4 * 3 * 4


@pytest.mark.parametrize("result", [(torch.ones(()), 3), (torch.ones(1), 2.5), (torch.ones(()), torch.ones(()))])
def test_loss_parts(result):
    total, weight = loss_parts(result)
    assert total is result[0] and weight is result[1]


def test_a_weight_that_trains_is_refused():
    """Its gradient would be left out."""
    with raises("loss-weight-trains", where="loss"):
        loss_parts((torch.ones(()), torch.ones((), requires_grad=True)))


MASK = torch.ones(128, 128, dtype=torch.bool).tril()


@pytest.mark.parametrize(("kv_heads", "args", "options"), [
    (8, (), {}), (8, (), {"is_causal": True}), (8, (None, 0.0, True), {}), (8, (MASK, 0.0, False), {}),
    (8, (), {"attn_mask": MASK.float(), "scale": 0.1}), (2, (), {"is_causal": True, "enable_gqa": True}),
    (1, (MASK,), {"enable_gqa": True}), (8, (), {"dropout_p": 0.1})])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float64, marks=FP64_SUMS)])
def test_attention_keeps_what_is_counted(kv_heads, args, options, dtype):
    """In all forms of its arguments: grouped queries, masks of both kinds, by name and by position."""
    def kept(device):
        def on_device(value):
            if not isinstance(value, torch.Tensor):
                return value
            return value.to(device, dtype if value.is_floating_point() else None)

        query, key, value = (torch.ones(2, heads, 128, 16, dtype=dtype, device=device, requires_grad=True)
                             for heads in (8, kv_heads, kv_heads))
        given = [on_device(arg) for arg in args]
        named = {name: on_device(option) for name, option in options.items()}
        counted = KeptBytes([])
        with counted, FusedAttention() if device == "meta" else torch.enable_grad():
            torch.nn.functional.scaled_dot_product_attention(query, key, value, *given, **named)
        return counted.count

    assert kept("meta") == kept("cpu")


class SeesGlobalHooks(nn.Linear):
    def forward(self, x):
        seen.append(len(module._global_forward_hooks) + len(module._global_forward_pre_hooks))
        return super().forward(x)


seen: list[int] = []


def test_counting_leaves_forwards_of_other_threads_alone():
    """Ranks may be threads: one counts while another already trains, and the hooks of torch's counter are global."""
    block_costs(chain(partial(SeesGlobalHooks, 4, 4)), torch.zeros(2, 4), None, torch.float32)
    assert seen == [0]


@given(st.lists(st.integers(1, 30), min_size=8, max_size=24), st.sampled_from(["v-shape", "interleaved"]))
def test_ranks_with_several_stages_have_equal_work(costs, how):
    """At least as equal as by cutting into equal stages, and within one block of the optimum."""
    placement = StagePlacement(num_ranks=2, per_rank=2, how=how)

    def largest(boundaries):
        stages = [sum(costs[start:stop]) for start, stop in pairwise((0, *boundaries, len(costs)))]
        return max(sum(stages[stage] for stage in placement.stages_of(rank)) for rank in range(2))

    found = partition_for(costs, placement)
    check_boundaries(found, len(costs), 4)
    assert largest(found) <= largest(partition(costs, 4))
    assert largest(found) <= sum(costs) / 2 + max(costs)


@examples(60)
@given(st.lists(st.sampled_from([0.0, 0.1, 1.0, 3.0, 7.3]) | st.floats(0.0, 1e12), min_size=12, max_size=30),
       st.sampled_from([(2, 2), (3, 2), (2, 4), (4, 3), (6, 2)]), st.sampled_from(["v-shape", "interleaved"]))
def test_the_local_search_is_that_which_looks_at_every_move(costs, sizes, how):
    placement = StagePlacement(num_ranks=sizes[0], per_rank=sizes[1], how=how)
    assert partition_for(costs, placement) == plain_search(costs, placement)


def plain_search(costs, placement):
    """Take the first improvement among all moves of one or two boundaries by one block, until there is none."""
    best, sums = partition(costs, placement.num_stages), [0.0, *accumulate(costs)]
    moves = list(product(combinations_with_replacement(range(len(best)), 2), product((-1, 1), (-1, 0, 1))))

    def work(chosen):
        stages = [sums[stop] - sums[start] for start, stop in pairwise((0, *chosen, len(costs)))]
        ranks = [sum(stages[stage] for stage in placement.stages_of(rank)) for rank in range(placement.num_ranks)]
        return max(ranks), sum(each * each for each in ranks) + 0.01 * sum(each * each for each in stages)

    before = None
    while before != best:
        before = best
        for (one, other), (by, also) in moves:
            tried = list(best)
            tried[one] += by
            tried[other] += also
            if all(start < stop for start, stop in pairwise((0, *tried, len(costs)))) and work(tried) < work(best):
                best = tuple(tried)
    return best
