"""Our optimizer against torch's: every placement, cut, sharding and number format; where it keeps which states."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ranvier.config.parameter_groups import parse, problems
from ranvier.config.run import Optim
from ranvier.optim.buckets import Bucket, Segment, buckets_of, split_by_share, within
from ranvier.optim.chunks import GradientSpec
from ranvier.optim.gradients import Gradients
from ranvier.optim.optimizer import FlatOptimizer, storage_bytes, tensors_by_category
from ranvier.optim.rules import rules_of
from ranvier.testing.memory import MemoryTracker
from ranvier.testing.ranks import run_ranks
from tests.covering import examples, pairwise
from tests.errors import raises

OFFLOADS = ("none", "stream", "host", "hybrid")
SHAPES = ((3, 5), (7,), (), (2, 2, 2), (1,), (40, 3))


class Alone:
    """A group of one."""

    ranks, index = (0,), 0


def parameters_of(shapes, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def make(parameters, group=None, *, chunk=None, accumulate=None, offload="none", bucket_size=7, **options):
    group = group or Alone()
    options.setdefault("offload_share", 0.4)
    rules = rules_of(Optim(**options))
    specs = [GradientSpec(name=str(number), numel=parameter.numel(), parameter=parameter, blocks=frozenset([number]),
                          whole=rules.needs_whole(str(number), tuple(parameter.shape), in_layer=True))
             for number, parameter in enumerate(parameters)]
    gradients = Gradients(specs, group, chunk or 2 * bucket_size, lambda spec: None, dtype=accumulate,
                          shard=options.get("shard", False))
    optimizer = FlatOptimizer(Optim(**options), gradients, offload=offload, bucket_size=bucket_size)
    return gradients, optimizer


def step(gradients, optimizer, values, *, factor=1.0, learning_rate=1e-2):
    """One update from these gradients, one tensor for each parameter."""
    gradients.begin(scatter=optimizer.scatters)
    for spec, value in zip(gradients.owned_specs(), values, strict=True):
        spec.parameter.grad.add_(value)
    gradients.all_passed()
    optimizer.prefetch()
    optimizer.begin(learning_rate)
    for chunk in gradients.reduced_chunks():
        for _ in optimizer.update(chunk, factor):
            pass
    optimizer.finish()


def gradients_like(parameters, number, rank=0):
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return [torch.randn(parameter.shape, generator=generator) for parameter in parameters]


TORCH = {"adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, fused=True),
         "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, weight_decay=0.1, momentum=0.9, fused=True)}


@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("algorithm", TORCH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_torch(algorithm, offload, dtype):
    """Up to rounding: torch's kernel has other elements than ours, which is cut elsewhere, in its vectors' tails."""
    ours, theirs = parameters_of(SHAPES, dtype), parameters_of(SHAPES, dtype)
    gradients, optimizer = make(ours, offload=offload, algorithm=algorithm, weight_decay=0.1)
    reference = TORCH[algorithm](theirs)
    for number in range(5):
        values = gradients_like(ours, number)
        step(gradients, optimizer, [value.to(dtype) for value in values])
        for parameter, value in zip(theirs, values, strict=True):
            parameter.grad = value.to(dtype)
        reference.step()
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6 if dtype is torch.float32 else 1e-14, atol=0.0)


@pytest.mark.parametrize("algorithm", [*TORCH, "lion", "muon", "adafactor"])
@pytest.mark.parametrize("dtype", [
    torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_placements_and_cuts_agree_to_the_bit_where_the_kernel_does(algorithm, dtype):
    """The placement of states changes nothing; buckets of multiples of 16 elements cut no vector."""
    outcomes = []
    for offload, bucket_size, in_flight in [("none", 16, 1), ("stream", 16, 1), ("stream", 16, 3), ("stream", 16, 100),
                                            ("host", 16, 1), ("host", 16, 4), ("none", 32, 1), ("stream", 1600, 2),
                                            ("hybrid", 16, 1), ("hybrid", 16, 3), ("hybrid", 1600, 2)]:
        parameters = parameters_of(SHAPES, dtype)
        gradients, optimizer = make(parameters, offload=offload, bucket_size=bucket_size, chunk=1 << 20,
                                    buckets_in_flight=in_flight, algorithm=algorithm,
                                    accumulate=torch.float32 if dtype is torch.bfloat16 else None)
        for number in range(4):
            step(gradients, optimizer, gradients_like(parameters, number), factor=0.5)
        outcomes.append([parameter.detach().clone() for parameter in parameters])
    for other in outcomes[1:]:
        assert all(torch.equal(one, two) for one, two in zip(outcomes[0], other, strict=True))


@pytest.mark.parametrize("offload", OFFLOADS)
def test_half_precision_parameters_follow_fp32_master_copies(offload):
    """Steps far below a half-precision parameter's resolution add up in its master copy."""
    parameter = nn.Parameter(torch.full((5,), 256.0, dtype=torch.bfloat16))
    gradients, optimizer = make([parameter], offload=offload, algorithm="sgd", momentum=0.0, weight_decay=0.0,
                                accumulate=torch.float32)
    for _ in range(100):
        step(gradients, optimizer, [torch.ones(5)], learning_rate=0.1)
    master = torch.cat([part.states["master"] for part in optimizer.slices()])
    assert master.dtype is torch.float32
    torch.testing.assert_close(master, torch.full((5,), 246.0), rtol=1e-5, atol=0.0)
    assert parameter.tolist() == [246.0] * 5


def test_fp32_sums_of_half_precision_gradients_lose_no_bits():
    for accumulate, expected in [(torch.float32, 1000.0), (None, 256.0)]:
        parameter = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        gradients, _ = make([parameter], accumulate=accumulate)
        gradients.begin()
        for _ in range(1000):
            (parameter * torch.ones(3, dtype=torch.bfloat16)).sum().backward()
        assert gradients.flat.tolist() == [expected] * 3, "bf16 stops at 256 + 1"


@pytest.mark.parametrize("offload", OFFLOADS)
def test_matrices_alone_decay(offload):
    shapes = ((4, 4), (6,), (3, 3), ())
    parameters = parameters_of(shapes)
    before = [parameter.detach().clone() for parameter in parameters]
    gradients, optimizer = make(parameters, offload=offload, decay="matrices", weight_decay=0.5)
    step(gradients, optimizer, [torch.zeros(shape) for shape in shapes], learning_rate=0.1)
    for parameter, old in zip(parameters, before, strict=True):
        torch.testing.assert_close(parameter.detach(), old * (0.95 if old.dim() > 1 else 1.0))


@pytest.mark.parametrize("algorithm", TORCH)
def test_groups_are_torchs_parameter_groups(algorithm):
    """Names are numbers here: 0 and 1 have a group each, 2 and 3 are in the last group, the rest in none."""
    ours, theirs = parameters_of(SHAPES), parameters_of(SHAPES)
    gradients, optimizer = make(ours, algorithm=algorithm, weight_decay=0.1,
                                groups=("0:0.5:0.3", " 1:2:0", "[23]:0:1"))
    kinds = {"adamw": torch.optim.AdamW, "sgd": partial(torch.optim.SGD, momentum=0.9)}
    reference = kinds[algorithm]([{"params": [theirs[0]], "lr": 0.005, "weight_decay": 0.3},
                                  {"params": [theirs[1]], "lr": 0.02, "weight_decay": 0.0},
                                  {"params": theirs[2:4], "lr": 0.0, "weight_decay": 1.0},
                                  {"params": theirs[4:], "lr": 0.01, "weight_decay": 0.1}], fused=True)
    for number in range(3):
        values = gradients_like(ours, number)
        step(gradients, optimizer, values)
        for parameter, value in zip(theirs, values, strict=True):
            parameter.grad = value
        reference.step()
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("text", ["*.bias", "*.bias:1", ":1:0", "a:x:0", "a:1:-1", "a:inf:0", "", "a:1:nan"])
def test_groups_that_cannot_be_read(text):
    with raises("malformed-parameter-group"):
        parse(text)
    assert [problem.value for problem in problems(Optim(groups=(text, "b:1:0")))] == [text]


def test_a_group_that_fits_nothing():
    (problem,) = problems(Optim(groups=("head.*:1:0", "x:y:1:0")), ["head.weight", "body.weight"])
    assert str(problem) == ("optim.groups: fits no parameter of the model (got 'x:y:1:0'). The nearest names are "
                            "body.weight, head.weight.")


@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_frozen_later_stays_as_it_is(offload, dtype):
    parameters = parameters_of(SHAPES, dtype)
    gradients, optimizer = make(parameters, offload=offload, weight_decay=0.5)
    step(gradients, optimizer, gradients_like(parameters, 0))
    parameters[1].requires_grad_(False)
    kept = parameters[1].detach().clone()
    for number in (1, 2):
        step(gradients, optimizer, gradients_like(parameters, number))
    assert torch.equal(parameters[1], kept) and not torch.equal(parameters[0], parameters_of(SHAPES, dtype)[0])


@given(st.lists(st.sampled_from([(), (1,), (2,), (3, 5), (4, 0), (33,), (2, 3, 4)]), max_size=6), st.integers(1, 40),
       st.integers(1, 60), st.sampled_from(OFFLOADS), st.integers(1, 4),
       st.sampled_from([torch.float32, torch.bfloat16]))
@examples(24)
def test_any_shapes_and_sizes(shapes, bucket_size, chunk, offload, in_flight, dtype):
    """The flat buffer holds any set of shapes, and every element is updated once."""
    parameters = parameters_of(shapes, dtype)
    before = [parameter.detach().clone() for parameter in parameters]
    gradients, optimizer = make(parameters, offload=offload, bucket_size=bucket_size, chunk=chunk, algorithm="sgd",
                                momentum=0.0, weight_decay=0.0, buckets_in_flight=in_flight)
    assert all(torch.equal(one, two) for one, two in zip(parameters, before, strict=True))
    step(gradients, optimizer, [torch.ones(shape) for shape in shapes], learning_rate=1.0)
    for parameter, old in zip(parameters, before, strict=True):
        torch.testing.assert_close(parameter.detach(), (old.float() - 1.0).to(dtype))


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 20)), max_size=5), st.integers(1, 12))
def test_buckets_cover_shares_once(lengths, size):
    starts = list(itertools.accumulate((gap + length for gap, length in lengths), initial=0))
    shares = [(start + gap, start + gap + length) for start, (gap, length) in zip(starts, lengths, strict=False)]
    groups = buckets_of(shares, size)
    flat = [bucket for group in groups for bucket in group]
    assert [bucket.number for bucket in flat] == list(range(len(flat)))
    assert [bucket.state for bucket in flat] == [0, *itertools.accumulate(map(len, flat))][:len(flat)]
    for (start, stop), group in zip(shares, groups, strict=True):
        assert [place for bucket in group for place in range(bucket.start, bucket.stop)] == list(range(start, stop))
        assert all(0 < len(bucket) <= size for bucket in group)


@given(st.lists(st.integers(1, 30), max_size=20), st.floats(0, 1))
def test_a_share_of_the_states_is_in_host_memory(sizes, share):
    """At any time at least that share of the updated elements, and less than a bucket more."""
    starts = [0, *itertools.accumulate(sizes)]
    buckets = [Bucket(number, start, start + size, 0)
               for number, (start, size) in enumerate(zip(starts, sizes, strict=False))]
    on_device, on_host = split_by_share(buckets, share)
    both = sorted([*on_device, *on_host], key=lambda bucket: bucket.number)
    assert [replace(bucket, state=0) for bucket in both] == buckets
    for home in (on_device, on_host):
        assert [bucket.state for bucket in home] == [0, *itertools.accumulate(map(len, home))][:len(home)]
    for stop in starts[1:]:
        there = sum(len(bucket) for bucket in on_host if bucket.stop <= stop)
        assert share * stop <= there <= share * stop + 30


def test_states_of_a_hybrid_placement_are_on_both_sides():
    """40 % of the states are in host memory, in pieces spread over all buckets; three buckets are in flight."""
    parameter = nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))
    gradients, optimizer = make([parameter], offload="hybrid", bucket_size=100, accumulate=torch.float32)
    found = tensors_by_category([parameter], gradients, optimizer)
    sizes = {place: {name: storage_bytes(tensors) for name, tensors in found[place].items()} for place in found}
    assert sizes["device"] == {"parameters": 2000, "gradients": 4000, "master": 2400, "moments": 4800, "buckets": 3600,
                               "reduction": 0}
    assert sizes["host"] == {"master": 1600, "moments": 3200, "staging": 0}
    assert [bucket.number for bucket in optimizer._homes[1]] == [0, 2, 5, 7]


def test_neighbours_that_are_alike_are_one_segment():
    segments = [Segment(0, 3, 1, 0.1), Segment(3, 8, 1, 0.1), Segment(8, 9, 1, 0), Segment(12, 14, 1, 0),
                Segment(14, 15, 2, 0)]
    assert within(segments, 1, 20) == [Segment(1, 8, 1, 0.1), Segment(8, 9, 1, 0), Segment(12, 14, 1, 0),
                                       Segment(14, 15, 2, 0)]
    assert within(segments, 9, 12) == [] and len(Bucket(0, 4, 9, 0)) == 5


# ---------------------------------------------------------------------- several replicas

def replica(world, *, shapes, offload, shard, dtype, steps=3, chunk=None, options=None):
    group = world.backend.group("data", [list(range(world.size))])
    parameters = parameters_of(shapes, dtype)
    gradients, optimizer = make(parameters, group, offload=offload, shard=shard, bucket_size=16, chunk=chunk or 48,
                                accumulate=torch.promote_types(dtype, torch.float32), **(options or {}))
    for number in range(steps):
        step(gradients, optimizer, gradients_like(parameters, number, world.rank), factor=1 / world.size)
    states = sum(state.numel() for _, home in optimizer.placement.homes() for state in home.values())
    return [parameter.detach().clone() for parameter in parameters], states


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("algorithm", "offload"), [("muon", "stream"), ("adafactor", "none"), ("adafactor", "host")])
def test_sharded_whole_tensors(algorithm, offload, dtype):
    """Each tensor is updated by one replica; every element of a state is on one replica."""
    work = partial(replica, shapes=SHAPES, offload=offload, dtype=dtype, options={"algorithm": algorithm})
    (expected, _), *_ = run_ranks(partial(work, shard=False), 3)
    for parameters, _ in run_ranks(partial(work, shard=True), 3):
        for one, other in zip(parameters, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5 if dtype is torch.float32 else 0.02, atol=1e-6)


@pytest.mark.parametrize(("size", "offload", "dtype"), pairwise(
    [2, 3], list(OFFLOADS), [torch.float32, torch.bfloat16]))
def test_sharded_equals_unsharded(offload, size, dtype):
    """Each replica has its own gradients; all end with the same parameters, and each holds a share of the states."""
    work = partial(replica, shapes=SHAPES, offload=offload, dtype=dtype)
    expected, plain = run_ranks(partial(work, shard=False), size)[0]
    for parameters, states in run_ranks(partial(work, shard=True), size):
        for one, other in zip(parameters, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6 if dtype is torch.float32 else 0.01, atol=1e-7)
        assert states * size == plain


@pytest.mark.parametrize("shapes", [((1,),), ((),), ((2,), (1,)), ()])
def test_fewer_parameters_than_replicas(shapes):
    outcomes = run_ranks(partial(replica, shapes=shapes, offload="stream", shard=True, dtype=torch.float32), 4)
    expected = run_ranks(partial(replica, shapes=shapes, offload="none", shard=False, dtype=torch.float32), 4)
    for (one, _), (other, _) in zip(outcomes, expected, strict=True):
        for mine, theirs in zip(one, other, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=0.0)


# ---------------------------------------------------------------------- where the bytes are

def test_building_needs_no_more_than_training():
    """Parameters exist twice while they are moved, which is before gradients are allocated."""
    parameters = parameters_of([(100, 10)] * 10, torch.bfloat16)
    specs = [GradientSpec(name=str(number), numel=parameter.numel(), parameter=parameter, blocks=frozenset([number]))
             for number, parameter in enumerate(parameters)]
    with MemoryTracker() as tracker:
        tracker.tag(parameters, "parameters")
        gradients = Gradients(specs, Alone(), 700, lambda spec: None, allocate=False)
        optimizer = FlatOptimizer(Optim(), gradients, offload="none", bucket_size=700)
        gradients.allocate()
    phi = 10_000
    assert optimizer.steps == 0 and tracker.peak_bytes() == (2 + 2 + 12) * phi


@pytest.mark.parametrize(("accumulate", "offload", "in_flight", "per_parameter", "per_bucket"), [
    ("half", "stream", 1, 4, 16), ("half", "stream", 3, 4, 40), ("fp32", "stream", 1, 6, 12),
    ("fp32", "stream", 3, 6, 36),
    ("fp32", "none", 3, 18, 0), ("half", "none", 3, 16, 4), ("half", "host", 3, 4, 0), ("fp32", "host", 3, 6, 0)])
def test_device_bytes_are_those_of_the_formulas(accumulate, offload, in_flight, per_parameter, per_bucket):
    """4 phi + (12 d + 4) bsize with half-precision sums, 6 phi + 12 d bsize with fp32 sums (AxoNN, section V-B)."""
    phi, bsize = 10_000, 700
    parameter = nn.Parameter(torch.zeros(phi, dtype=torch.bfloat16))
    gradients, optimizer = make([parameter], offload=offload, bucket_size=bsize, buckets_in_flight=in_flight,
                                accumulate=torch.float32 if accumulate == "fp32" else None)
    step(gradients, optimizer, [torch.ones(phi)])
    found = {place: {category: storage_bytes(tensors) for category, tensors in categories.items()}
             for place, categories in tensors_by_category([parameter], gradients, optimizer).items()}
    assert sum(found["device"].values()) == per_parameter * phi + per_bucket * bsize
    assert sum(found["host"].values()) - found["host"]["staging"] == (0 if offload == "none" else 12 * phi)
