"""Slow links: messages are never early, in order and repeatable, and waiting ranks sleep."""

import math
import time

import pytest
import torch

from benchmarks.slow_links import Link, _LinkClock, slowed, throttled
from ranvier.comm.message import encoded_bytes
from ranvier.testing.ranks import run_ranks
from tests.comm.conformance import everyone, message, receive

MS = 1_000_000


def arrivals(link: Link, sends: list[tuple[int, int]]) -> list[int]:
    lane = _LinkClock(link, 0, 1, "pipe")
    return [lane.arrival(sent, num_bytes) for sent, num_bytes in sends]


def test_one_load_after_another():
    link = Link(latency_seconds=0.010, bytes_per_second=1e6)
    assert arrivals(link, [(0, 1000), (0, 2000), (2 * MS, 1000), (50 * MS, 0)]) == [11 * MS, 13 * MS, 14 * MS, 60 * MS]


def test_a_link_without_limits_adds_nothing():
    assert arrivals(Link(), [(5, 10**9), (7, 1)]) == [5, 7]


def test_jitter_is_bounded_keeps_order_and_repeats():
    sends = [(number * MS, 100) for number in range(200)]
    first = arrivals(Link(jitter_seconds=0.005, seed=1), sends)
    assert first == arrivals(Link(jitter_seconds=0.005, seed=1), sends)
    assert first != arrivals(Link(jitter_seconds=0.005, seed=2), sends)
    assert first == sorted(first)
    assert all(sent <= arrival <= sent + 5 * MS for (sent, _), arrival in zip(sends, first, strict=True))
    assert len({arrival - sent for (sent, _), arrival in zip(sends, first, strict=True)}) > 50


def test_messages_take_as_long_as_the_link_says():
    link = Link(latency_seconds=0.05, bytes_per_second=1e6)
    sent = [message(number, torch.ones(5000)) for number in range(4)]
    began = {}  # by rank: a rank may begin before the one that receives from it

    def run(world):
        transport, others = everyone(world, "pipe", 100_000)
        began[world.rank] = time.monotonic()
        for one in sent:
            transport.send(others[0], one)
        assert transport.poll() == [] and transport.wait(0.01) is None
        arrived = []
        for one in sent:
            assert receive(transport).microbatch == one.microbatch
            arrived.append(time.monotonic() - began[others[0]])
        return arrived

    for arrived in run_ranks(slowed(run, link), 2):
        least = 0.05
        for one, seconds in zip(sent, arrived, strict=True):
            least += encoded_bytes(one) / 1e6
            assert seconds >= least - 0.01


def test_links_may_differ_by_edge():
    slow = Link(latency_seconds=0.3)

    def run(world):
        transport, others = everyone(world, "pipe")
        if world.rank == 2:
            started = time.monotonic()
            order = [receive(transport).source for _ in others]
            return order, time.monotonic() - started
        transport.send(2, message(0))
        transport.flush()
        return None

    *_, (order, seconds) = run_ranks(slowed(run, lambda source, destination: slow if source == 0 else Link()), 3)
    assert order == [1, 0] and seconds > 0.2


def test_collectives_take_as_long_as_a_ring():
    """An all-reduce of 400 kB takes two latencies and 400 kB, from the last member's call; collectives run one after
    another."""
    link = Link(latency_seconds=0.05, bytes_per_second=4e6)

    def run(world):
        group = world.backend.group("data", [range(2)])
        tensor, whole = torch.ones(100_000), torch.empty(200_000)
        group.barrier()
        if world.rank == 1:
            time.sleep(0.1)
        called = time.monotonic()
        first, second = group.all_reduce(tensor), group.all_gather(whole, tensor.clone())
        assert time.monotonic() - called < 0.05
        assert not first.done() and not second.done()
        second.wait()
        assert first.done()
        waited = time.monotonic()
        first.wait()
        assert time.monotonic() - waited < 0.05
        assert (tensor == 2).all()
        return waited - called, group.bytes_received

    (early, received), (late, _) = run_ranks(slowed(run, link), 2)
    needed = 0.1 + 0.1 + 0.05
    assert late >= needed - 0.01 and early >= needed + 0.1 - 0.02
    assert received == 400_000 + 400_000


def test_waiting_is_not_busy():
    def run(world):
        transport, others = everyone(world, "pipe")
        group = world.backend.group("data", [range(2)])
        transport.send(others[0], message(0))
        cpu = time.thread_time()
        receive(transport)
        group.all_reduce(torch.ones(1)).wait()
        return time.thread_time() - cpu

    assert max(run_ranks(slowed(run, Link(latency_seconds=0.2)), 2)) < 0.1


def test_a_rank_can_be_delayed_at_random():
    def run(world):
        backend = throttled(world.backend, Link(), rank_delay_seconds=0.05, seed=world.rank)
        transport = backend.transport("pipe")
        transport.connect([1 - world.rank], [1 - world.rank], 1000)
        started = time.monotonic()
        for number in range(10):
            transport.send(1 - world.rank, message(number))
        delay = time.monotonic() - started
        assert [receive(transport).microbatch for _ in range(10)] == list(range(10))
        return delay

    assert all(0.01 < delay < 5 for delay in run_ranks(run, 2))


@pytest.mark.parametrize("wrong", [
    dict(latency_seconds=-1.0), dict(bytes_per_second=0.0), dict(jitter_seconds=math.nan)])
def test_impossible_links_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Link(**wrong)
