"""The search finds what brute force finds, and no bound exceeds what it bounds."""

from dataclasses import replace
from functools import lru_cache
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier.config.resolve import Facts, ResolvedRun, resolve
from ranvier.config.run import Batch, Memory, TensorParallel, Transformer
from ranvier.cost.cluster_files import load_cluster
from ranvier.errors import RanvierError
from ranvier.mesh import Mesh, StagePlacement
from ranvier.planner import candidates
from ranvier.planner import search as search_module
from ranvier.planner.candidates import memory_saving_variants, on_cluster, predict, stage_variants, variants
from ranvier.planner.run_cost import (
    least_bytes_of_any_cut,
    least_device_bytes,
    least_run_seconds,
    run_cost,
    sample_step,
    unlimited_limits,
)
from ranvier.planner.search import search
from ranvier.planner.work import Work
from ranvier.schedule.policies import MessageDriven
from ranvier.schedule.simulator import StageTimes, predict_batch_time

SMALL = ResolvedRun(model=Transformer(num_layers=2, hidden=64, heads=4, vocab=300, sequence=32), precision="fp32",
                    batch=Batch(global_size=8, microbatch_size=2))
WORK = Work()  # counted once for all examples
SEARCHED = ("mesh", "microbatch", "recompute", "offload", "shard")


def cluster_of(name, *, free_bytes=None, latency=1.0, flops=1.0):
    """A shipped cluster with `free_bytes` of free memory on a device, and scaled latency and FLOPs."""
    cluster = load_cluster(name)
    device = replace(cluster.device, rates={each: replace(rate, peak_flops=flops * rate.peak_flops)
                                            for each, rate in cluster.device.rates.items()})
    if free_bytes is not None:
        device = replace(device, memory_bytes=device.reserved_bytes + free_bytes)
    inside = replace(cluster.inside, latency_seconds=latency * cluster.inside.latency_seconds)
    return replace(cluster, device=device, inside=inside)


def every(run, cluster, ranks, searched):
    """All configurations, each predicted separately."""
    for first in variants(on_cluster(run, cluster), cluster, ranks, searched):
        for each in (first, *memory_saving_variants(first, cluster, searched)):
            try:
                yield predict(each, cluster, WORK)
            except RanvierError:  # it cannot be cut
                continue


@settings(deadline=None, max_examples=2, derandomize=True)
@given(name=st.sampled_from(["h100", "a100"]), kilobytes=st.sampled_from([1500, 2000, 4000, 1_000_000]),
       latency=st.sampled_from([0.1, 1.0, 30.0]), flops=st.sampled_from([1.0, 1e-3]),
       policy=st.sampled_from(["message-driven", "1f1b"]), ranks=st.sampled_from([2, 3]))
def test_the_search_finds_what_brute_force_finds(name, kilobytes, latency, flops, policy, ranks):
    """Whatever the memory: of 112 configurations eleven fit in 1.5 MB."""
    cluster = cluster_of(name, free_bytes=kilobytes * 1000, latency=latency, flops=flops)
    run = replace(SMALL, pipeline=replace(SMALL.pipeline, policy=policy))
    least = min((found.cost.seconds for found in every(run, cluster, ranks, SEARCHED) if found.fits), default=inf)
    try:
        found = search(run, cluster, ranks, SEARCHED, work=WORK).best[0]
    except RanvierError:
        assert least == inf
        return
    assert found.cost.seconds <= least * (1 + 1e-3)


def test_selective_recomputation_is_searched():
    """It is faster than recomputing layers if the run does not fit without recomputation."""
    best = search(SMALL, cluster_of("h100", free_bytes=2_300_000), 2, SEARCHED, work=WORK).best[0]
    assert best.run.memory.recompute == "selective"
    assert not predict(replace(best.run, memory=Memory()), cluster_of("h100", free_bytes=2_300_000), WORK).fits


@settings(deadline=None, max_examples=8, derandomize=True)
@given(st.data())
def test_bounds_are_no_longer_than_what_they_bound(data):
    """Bounds of operations and messages, of counted blocks, of the schedule within its limits, and of memory."""
    name = data.draw(st.sampled_from(["h100", "summit", "laptop"]))
    cluster = cluster_of(name, flops=data.draw(st.sampled_from([1.0, 1e-4])))
    scheme, by_sequence = data.draw(st.sampled_from([
        ("stationary", False), ("stationary", True), ("summa", False), ("megatron", False), ("megatron", True)]))
    ranks = data.draw(st.sampled_from([1, 4]))
    run = data.draw(st.sampled_from(_variants(name, scheme, by_sequence, ranks)))
    alone = resolve(run, Facts(mesh=Mesh(), microbatch_size=1))
    stages, sample = WORK.stages(run), sample_step(alone, WORK.blocks(alone))
    bound, recomputing = least_run_seconds(run, cluster, sample)
    counted = run_cost(run, cluster, stages, exact=False, limits=unlimited_limits(run)).seconds
    limited, simulated = (run_cost(run, cluster, stages, exact=exact) for exact in (False, True))
    assert 0 < bound <= counted * (1 + 1e-9) and counted <= simulated.seconds * 1.01, "extrapolated from two short ones"
    assert limited.seconds <= simulated.seconds * 1.01
    again = replace(run, memory=Memory(recompute="auto"))
    assert recomputing <= run_cost(again, cluster, WORK.stages(again), exact=False).seconds * (1 + 1e-9)
    if name != "laptop":
        for saving in (run, *memory_saving_variants(run, cluster, SEARCHED)):
            saving = replace(saving, optim=replace(saving.optim, offload_share=0.5))
            bytes_, states = least_device_bytes(saving, stages)
            assert bytes_ - states * (saving.optim.offload == "hybrid") / 2 <= max(
                entry.device_bytes for entry in WORK.memory(saving, cluster=cluster))
            assert least_bytes_of_any_cut(saving, sample.stages[0].blocks) <= max(
                entry.device_bytes for entry in WORK.memory(saving, cluster=cluster))


@pytest.mark.parametrize(("mesh", "stages_per_rank"), [(Mesh(data=2), 1), (Mesh(data=2, pipe=2), 1),
                                                       (Mesh(data=2, pipe=2), 2)], ids=str)
def test_sums_beside_the_backward_make_no_bound_longer(mesh, stages_per_rank):
    """Small chunks on links on which sums take as long as the backward: whether products are deferred decides how many
    are hidden."""
    cluster = cluster_of("h100", flops=1e-3)
    run = replace(SMALL, mesh=mesh, optim=replace(SMALL.optim, bucket_size=256, chunk_buckets=1),
                  pipeline=replace(SMALL.pipeline, stages_per_rank=stages_per_rank))
    for bandwidth in (1e11, 1e9, 1e7):
        slow = replace(cluster, inside=replace(cluster.inside, bandwidth=bandwidth), chunk_seconds=0.0)
        stages = WORK.stages(run)
        bound = run_cost(run, slow, stages, exact=False, limits=unlimited_limits(run)).seconds
        assert bound <= run_cost(run, slow, stages).seconds * (1 + 1e-9)


@settings(deadline=None, max_examples=20, derandomize=True)
@given(st.data())
def test_the_bound_of_several_stages_on_each_rank(data):
    """Uneven stages, with or without deferred weight gradients: no limits are faster than ranks without idle time."""
    placement = StagePlacement(num_ranks=data.draw(st.integers(2, 4)), per_rank=data.draw(st.integers(2, 3)),
                               how=data.draw(st.sampled_from(["v-shape", "interleaved"])))
    times = st.floats(0.1, 3.0)
    waits = data.draw(st.booleans())
    stages = [StageTimes(forward=data.draw(times), backward=data.draw(times), weight=data.draw(times) if waits else 0.0,
                         alive_bytes=1 if waits else 0) for _ in range(placement.num_stages)]
    count = data.draw(st.integers(1, 12))
    least, found = (predict_batch_time(stages, count, MessageDriven(), 3 * placement.num_stages, exact=exact,
                                       placement=placement)
                    for exact in (False, True))
    assert least.seconds <= found.seconds * (1 + 1e-9)


@settings(deadline=None, max_examples=4, derandomize=True)
@given(layers=st.integers(3, 4), size=st.just(4), pipe=st.sampled_from([2, 3]),
       flops=st.sampled_from([1.0, 1e-3]))
def test_stages_per_rank_are_searched(layers, size, pipe, flops):
    """For one mesh the search finds the best number of stages per rank, to half a percent."""
    cluster = cluster_of("h100", flops=flops)
    run = replace(SMALL, mesh=Mesh(pipe=pipe), model=replace(SMALL.model, num_layers=layers),
                  batch=Batch(global_size=size, microbatch_size=1))
    found = search(run, cluster, pipe, ("stages-per-rank",), work=WORK).best[0]
    every = [predict(one, cluster, WORK).cost.seconds for one in (run, *stage_variants(run))]
    assert min(every) <= found.cost.seconds <= min(every) / 0.995


@lru_cache
def _variants(name, scheme, by_sequence, ranks):
    run = replace(SMALL, tensor=TensorParallel(scheme=scheme, sequence_sharding=by_sequence))
    return list(variants(on_cluster(run, load_cluster(name)), load_cluster(name), ranks))


@pytest.mark.parametrize("interruptible", [True, False])
def test_an_interrupted_search_gives_the_best_so_far(monkeypatch, interruptible):
    look, seen = search_module._Queue.next, []

    def interrupted(queue):
        known, found, is_first = look(queue)
        if seen:
            raise KeyboardInterrupt
        if found is not None and found.fits:
            seen.append(found)
        return known, found, is_first

    monkeypatch.setattr(search_module._Queue, "next", interrupted)
    told = []
    if not interruptible:
        with pytest.raises(KeyboardInterrupt):
            search(SMALL, load_cluster("h100"), 4, SEARCHED, work=WORK)
        return
    plan = search(SMALL, load_cluster("h100"), 4, SEARCHED, work=WORK, progress=told.append, interruptible=True)
    assert [found.run.mesh for found in plan.best] == [found.run.mesh for found in seen]
    assert "interrupted" in told[-1]


def test_a_search_that_is_interrupted_among_several_stages_per_rank_keeps_the_best_so_far(monkeypatch):
    def interrupted(run):
        raise KeyboardInterrupt

    monkeypatch.setattr(candidates, "stage_variants", interrupted)
    plan = search(SMALL, load_cluster("h100"), 4, (*SEARCHED, "stages-per-rank"), work=WORK, interruptible=True)
    assert plan.interrupted and len(plan.best) >= 12
