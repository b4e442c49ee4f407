"""Threads of one process, plain and over throttled links."""

import time

import pytest
import torch

from benchmarks.slow_links import Link, slowed
from ranvier.comm.inprocess import InProcessWorld
from ranvier.errors import TransportError
from ranvier.system.memory_tracker import MemoryTracker
from ranvier.testing.ranks import run_ranks
from tests.comm import conformance
from tests.covering import covering, without
from tests.errors import raises

CASES = (*conformance.MESSAGES, *conformance.COLLECTIVES)


@pytest.mark.parametrize(("case", "size"), covering(CASES, [2, 4]))
def test_conformance(case, size):
    run_ranks(lambda world: conformance.run_cases(world, [case]), size)


@pytest.mark.parametrize("case", without(
    ["shards_of_all_sizes_under_way_at_once", "work_may_be_forgotten"],
    [case for case in CASES if case != "collectives_agree_with_plain_sums"]))
def test_conformance_throttled(case):
    link = Link(latency_seconds=1e-3, bytes_per_second=1e9, jitter_seconds=1e-3, seed=3)
    run_ranks(slowed(lambda world: conformance.run_cases(world, [case]), link), 3)


def _wait_for_a_message(world):
    transport = world.backend.transport("pipe")
    transport.connect([2], [], 100)
    transport.wait(30.0)


def _wait_for_a_collective(world):
    world.backend.group("data", [range(world.size)]).all_reduce(torch.ones(1)).wait()


def _test_for_a_collective(world):
    work = world.backend.group("data", [range(world.size)]).all_reduce(torch.ones(1))
    while not work.done():
        time.sleep(0.001)


def _keep_sending(world):
    transport = world.backend.transport("pipe")
    transport.connect([], [2], 100)
    while True:
        transport.send(2, conformance.message(0))
        time.sleep(0.001)


@pytest.mark.parametrize("wait", [_wait_for_a_message, _wait_for_a_collective, _test_for_a_collective, _keep_sending])
def test_a_failed_rank_wakes_the_others(wait):
    seen = {}

    def run(world):
        if world.rank == 2:
            time.sleep(0.05)
            raise ZeroDivisionError("mine")
        try:
            wait(world)
        except TransportError as error:
            seen[world.rank] = str(error)
            raise

    with pytest.raises(ZeroDivisionError, match="mine") as failure:
        run_ranks(run, 3)
    assert failure.value.__notes__ == ["on rank 2 of 3"]
    assert sorted(seen) == [0, 1]
    assert all("rank 2" in text and "is gone" in text for text in seen.values())


def test_calls_after_a_failure_raise_too():
    world = InProcessWorld(2)
    backend = world.backend(0)
    transport, group = backend.transport("pipe"), backend.group("data", [[0, 1]])
    transport.connect([1], [1], 100)
    world.backend(1).abort(1)
    world.abort(0)
    for use in (transport.poll, lambda: transport.wait(5.0), lambda: transport.send(1, conformance.message(0)),
                group.barrier):
        with raises("peer-gone", 1):
            use()


def test_members_that_disagree_are_told():
    def run(world):
        group = world.backend.group("data", [[0, 1]])
        with raises("collectives-differ", "data"):
            group.all_reduce(torch.ones(1 + world.rank)).wait()
        with raises("all-to-all-sizes-differ"):
            group.all_to_all(torch.empty(2), torch.empty(3), [1, 1], [1, 2]).wait()
        group.barrier()
        return True

    assert run_ranks(run, 2) == [True, True]


def test_other_purposes_on_other_ranks_are_told():
    with raises("transport-order-differs"):
        run_ranks(lambda world: world.backend.transport(f"purpose {world.rank}"), 2)


def test_collectives_end_in_call_order():
    def run(world):
        group = world.backend.group("data", [range(world.size)])
        for _ in range(500):
            work = [group.all_reduce(torch.ones(size)) for size in (10_000, 1, 100)]
            while not work[2].done():
                time.sleep(0)  # lets the other threads run
            assert work[0].done() and work[1].done()

    run_ranks(run, 3)


def test_close_is_idempotent_and_closes_what_was_made():
    def run(world):
        transport, group = world.backend.transport("pipe"), world.backend.group("data", [[0, 1]])
        world.backend.close()
        world.backend.close()
        with raises("transport-closed"):
            transport.poll()
        with raises("group-closed"):
            group.barrier()

    run_ranks(run, 2)


@pytest.mark.parametrize(("call", "sum_of_all"), [
    ("all_gather", False), ("all_to_all", False), ("all_reduce", True), ("reduce_scatter", True)])
def test_a_collective_allocates_no_more_than_with_other_backends(call, sum_of_all):
    """So that measured memory equals predicted memory; the full tensor used to be copied."""
    half = 500_000

    def rank(world):
        group = world.backend.group("own", [[0, 1]])
        own, whole, given = (torch.full((size,), float(world.rank)) for size in (half, 2 * half, 2 * half))
        with MemoryTracker() as tracker:
            match call:
                case "all_reduce":
                    group.all_reduce(whole).wait()
                case "reduce_scatter":
                    group.reduce_scatter(own, given).wait()
                case _:
                    getattr(group, call)(whole, own if call == "all_gather" else given).wait()
        found = own if call == "reduce_scatter" else whole
        assert found[::half].tolist() == ([1, 1][:len(found) // half] if sum_of_all else [0, 1])
        return tracker.peak_bytes() - (group.buffer_bytes(call, 2 * half, whole.dtype, "cpu") if sum_of_all else 0)

    assert max(run_ranks(rank, 2)) <= 0
