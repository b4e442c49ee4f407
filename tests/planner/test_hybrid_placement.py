"""Optimizer states on both sides of the host's link: how many fit on the device, and the plan that results."""

from dataclasses import replace

import pytest

from ranvier.config.resolve import ResolvedRun
from ranvier.config.run import Batch, Checkpoint, Data, Guard, Launch, Memory, Optim, Transformer
from ranvier.cost.cluster_files import load_cluster
from ranvier.cost.device_overhead import with_overhead
from ranvier.cost.memory import too_large, with_offload_share
from ranvier.planner.candidates import predict
from ranvier.planner.count import laid_out
from ranvier.planner.report import describe
from ranvier.planner.search import search
from tests.errors import raises

LARGE = ResolvedRun(
    model=Transformer(num_layers=39, hidden=6144, heads=48, vocab=50304, sequence=2048), precision="bf16",
    data=Data(corpus="nowhere"), batch=Batch(global_size=8, microbatch_size=1), guard=Guard(bad_step="none"),
    optim=Optim(update_in_backward=True), checkpoint=Checkpoint(background=False))
"""18 billion parameters."""
SMALL = ResolvedRun(
    model=Transformer(num_layers=4, hidden=64, heads=2, vocab=300, sequence=64), data=Data(corpus="nowhere"),
    batch=Batch(global_size=4, microbatch_size=4), precision="bf16", launch=Launch(device="cuda"),
    optim=Optim(offload="hybrid", bucket_size=5000))


def memory(run):
    return laid_out(run)[1]


def states(entry):
    return sum(home.get(name, 0) for home in (entry.device, entry.host) for name in ("master", "moments"))


@pytest.mark.slow
def test_18_billion_parameters_on_one_device():
    """One H200 with 128 GiB of host memory. 12 bytes a parameter fit on neither side, but on both together."""
    cluster = load_cluster("h200")
    found = search(LARGE, cluster, 1).best[0]
    run, (entry,) = found.run, found.memory
    parameters = entry.device["parameters"] // 2
    assert 17.9e9 < parameters < 18.1e9 and run.optim.offload == "hybrid" and 0 < run.optim.offload_share < 1
    assert f"offload hybrid {run.optim.offload_share:.1%}" in describe(run)
    assert states(entry) == 12 * parameters
    assert entry.host["master"] + entry.host["moments"] == pytest.approx(
        run.optim.offload_share * 12 * parameters, abs=12 * 4_194_304
    )
    assert entry.device["buckets"] == 3 * 12 * 4_194_304 and entry.device["gradients"] < 0.1 * 4 * parameters
    assert with_overhead(entry).device_bytes <= cluster.device.memory_bytes - cluster.device.reserved_bytes
    assert entry.host_bytes < cluster.host.memory_bytes
    for other in ("none", "stream", "host"):
        assert not predict(replace(run, optim=replace(run.optim, offload=other)), cluster).fits
    assert not predict(replace(run, optim=replace(run.optim, update_in_backward=False)), cluster).fits
    assert not predict(replace(run, checkpoint=Checkpoint()), cluster).fits


def test_what_does_not_fit_is_told_what_would():
    cluster = load_cluster("h200")
    for fault, offload, remedies in (
            (0, "none", ("set --optim.offload hybrid", "set --optim.update-in-backward true")),
            (1, "stream", ("set --optim.offload hybrid", "set --checkpoint.background false"))):
        run = replace(LARGE, optim=Optim(offload=offload, update_in_backward=bool(fault)), launch=Launch(device="cuda"),
                      checkpoint=Checkpoint(), batch=Batch(global_size=1, microbatch_size=1))
        (entry,) = memory(run)
        problem = too_large([entry], place=("device", "host")[fault], processes=1, run=run, available_bytes=1 << 37)
        assert all(remedy in str(problem) for remedy in remedies)
        assert ("host " in str(problem.what)) == bool(fault)  # only the parts of the sum
    run = replace(run, memory=Memory(recompute="selective"))
    problem = too_large(memory(run), place="device", processes=1, run=run, available_bytes=1)
    assert "--memory.recompute auto" in str(problem)
    with raises("nothing-fits"):
        search(replace(LARGE, checkpoint=Checkpoint()), cluster, 1)


@pytest.mark.parametrize("short", [1, 100_000, 1_000_000])
def test_as_much_stays_on_the_device_as_has_room(short):
    """One more bucket would not fit."""
    none = max(entry.device_bytes for entry in memory(replace(SMALL, optim=Optim(bucket_size=5000))))
    found = with_offload_share(SMALL, memory, none - short)
    share = found.optim.offload_share
    assert max(entry.device_bytes for entry in memory(found)) <= none - short
    less = replace(found, optim=replace(found.optim, offload_share=max(0.0, share - 0.04)))
    assert max(entry.device_bytes for entry in memory(less)) > none - short


def test_with_room_for_all_nothing_is_streamed():
    found = with_offload_share(SMALL, memory, 1 << 40)
    assert found.optim.offload_share == 0.0
    assert memory(found) == memory(replace(SMALL, optim=Optim(bucket_size=5000, offload="hybrid", offload_share=0.0)))
    assert with_offload_share(SMALL, memory, 0).optim.offload_share == 1.0
    on_cpu = replace(SMALL, launch=Launch(device="cpu"))
    assert with_offload_share(on_cpu, memory, 0).optim.offload_share == 0.5
    asked = replace(SMALL, optim=replace(SMALL.optim, offload_share=0.25))
    assert with_offload_share(asked, memory, 0) is asked


def test_an_update_takes_the_time_of_the_share_that_moves():
    cluster = load_cluster("h200")
    seconds = {
        share: predict(
            replace(
                LARGE, optim=Optim(offload="hybrid", offload_share=share), batch=Batch(global_size=1, microbatch_size=1)
            ),
            cluster,
        ).cost.update_seconds
        for share in (0.4, 0.8)
    }
    assert seconds[0.8] == pytest.approx(2 * seconds[0.4], rel=0.01)


def test_an_update_in_host_memory_waits_for_the_link():
    cluster = load_cluster("h200")
    slow = replace(cluster, host_link=replace(cluster.host_link, bandwidth=1e8))
    seconds = {
        precision: predict(
            replace(
                LARGE, precision=precision, optim=Optim(offload="host", accumulate="half"),
                batch=Batch(global_size=1, microbatch_size=1)
            ),
            slow,
        ).cost.update_seconds
        for precision in ("bf16", "fp32")
    }
    assert seconds["fp32"] == pytest.approx(2 * seconds["bf16"], rel=0.01)
