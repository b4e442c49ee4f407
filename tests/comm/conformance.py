"""Requirements on backends: cases that take a World and raise if one is not met. Run by test_*.py of this folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from ranvier.comm.message import Message, MessageKind, encoded_bytes
from ranvier.comm.protocol import Transport
from ranvier.comm.sum_algorithms import ring_bytes
from ranvier.errors import TransportError
from ranvier.world import World
from tests.errors import raises

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16,
          torch.int8, torch.uint8, torch.bool)


def a_subset_is_a_world_of_its_own(world: World) -> None:
    """Subsets of several sizes are created one after another, while groups of all ranks continue to work."""
    backend, rank = world.backend, world.rank
    whole = backend.group("whole", [range(world.size)])
    for count in (world.size, 1, world.size - 1, world.size):
        part = backend.subset(count)
        assert (part is None) == (rank >= count)
        if part is not None:
            assert (part.rank, part.size, part.name) == (rank, count, backend.name)
            group, alone = part.group("all", [range(count)]), part.group("alone", [[each] for each in range(count)])
            transport, others = part.transport("edges"), [other for other in range(count) if other != rank]
            transport.connect(others, others, 256)
            for other in others:
                transport.send(other, message(rank, random(rank, torch.float32, 1000)))
            for _ in others:
                arrived = receive(transport)
                same(arrived.tensors["t0"], random(arrived.source, torch.float32, 1000))
            total = torch.ones(3)
            group.all_reduce(total).wait()
            same(total, torch.full((3,), float(count)))
            value = torch.full((2,), float(rank))
            group.broadcast(value, root=count - 1).wait()
            same(value, torch.full((2,), float(count - 1)))
            assert alone.gather_objects(rank) == [rank]
            pairs = part.group("pairs", [[0], list(range(1, count))] if count > 1 else [[0]])
            assert pairs.gather_objects(rank) == list(pairs.ranks)
            part.close()
        assert whole.gather_objects(rank) == list(range(world.size))
    for wrong in (0, world.size + 1):
        with raises("subset-size", 1, world.size):
            backend.subset(wrong)


def run_cases(world: World, names: Sequence[str]) -> int:
    """Run these cases one after another; the error names the case that fails."""
    for name in names:
        try:
            globals()[name](world)
        except BaseException as error:
            error.add_note(f"in conformance case {name}")
            raise
    return len(names)


def message(number: int, *tensors: Tensor, kind: MessageKind = MessageKind.FORWARD, step: int = 0) -> Message:
    return Message(kind, step, number, {f"t{place}": tensor for place, tensor in enumerate(tensors)})


def everyone(world: World, purpose: str, capacity_bytes: int = 4096) -> tuple[Transport, list[int]]:
    """A transport with edges to and from all other ranks."""
    others = [rank for rank in range(world.size) if rank != world.rank]
    transport = world.backend.transport(purpose)
    transport.connect(others, others, capacity_bytes)
    return transport, others


def receive(transport: Transport) -> Message:
    arrived = transport.wait(30.0)
    assert arrived is not None, "no message arrived within 30 s"
    return arrived


def same(actual: Tensor, expected: Tensor) -> None:
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    assert torch.equal(actual, expected), f"{actual} is not {expected}"


def random(seed: int, dtype: torch.dtype, *shape: int) -> Tensor:
    """Small integers, whose sums are exact in every dtype."""
    return torch.randint(0, 5, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# Messages.

def edges_are_fifo(world: World) -> None:
    transport, others = everyone(world, "fifo")
    for number in range(100):
        for other in others:
            transport.send(other, message(number, torch.tensor([world.rank, number])))
    seen = dict.fromkeys(others, 0)
    for _ in range(100 * len(others)):
        arrived = receive(transport)
        assert arrived.microbatch == seen[arrived.source]
        same(arrived.tensors["t0"], torch.tensor([arrived.source, arrived.microbatch]))
        seen[arrived.source] += 1
    assert transport.poll() == []


def whichever_arrives_first(world: World) -> None:
    """The last rank sends immediately, the others only after rank 0 has told them that it has that message."""
    transport, others = everyone(world, "any source")
    if world.rank == 0:
        assert receive(transport).source == world.size - 1
        for other in others[:-1]:
            transport.send(other, message(1))
        assert {receive(transport).source for _ in others[:-1]} == set(others[:-1])
    else:
        if world.rank != world.size - 1:
            assert receive(transport).source == 0
        transport.send(0, message(0))
    transport.flush()


def all_kinds_of_tensors(world: World) -> None:
    transport, others = everyone(world, "tensors")
    tensors = [random(7, dtype, 3, 5) for dtype in DTYPES] + [
        torch.tensor(1.5), torch.empty(0), torch.empty(2, 0, 3, dtype=torch.bfloat16), torch.tensor(True),
        torch.arange(24.0).view(4, 6).t(), torch.arange(20.0)[::3], torch.ones((), dtype=torch.bfloat16)]
    sent = Message(MessageKind.BACKWARD, 3, 4, {"": torch.ones(1), **{f"t{i}": t for i, t in enumerate(tensors)}},
                   frozenset({"t2", ""}))
    for other in others:
        transport.send(other, sent)
        transport.send(other, Message(MessageKind.CREDIT, 2**31 - 1, 2**31 - 1))
    before = time.monotonic_ns()
    arrived = {other: [] for other in others}
    for _ in range(2 * len(others)):
        one = receive(transport)
        arrived[one.source].append(one)
    for one, credit in arrived.values():
        assert (one.kind, one.step, one.microbatch) == (MessageKind.BACKWARD, 3, 4)
        assert one.requires_grad == sent.requires_grad
        assert list(one.tensors) == list(sent.tensors) and one.sent_ns > 0
        for name, tensor in sent.tensors.items():
            same(one.tensors[name], tensor)
        assert (credit.kind, credit.tensors) == (MessageKind.CREDIT, {})
        assert (credit.step, credit.microbatch) == (2**31 - 1, 2**31 - 1)
        assert one.sent_ns <= credit.sent_ns <= time.monotonic_ns() and before - one.sent_ns < 60e9


def shapes_change_and_outgrow_the_capacity(world: World) -> None:
    """Both directions at once, sizes that rise and fall around the capacity of 2000 bytes, all sent before any read."""
    transport, others = everyone(world, "capacity", 2000)
    sizes = [0, 1, 300, 600, 10, 1_000_000, 5, 400_000, 1_500_000, 1_000_000, 3, 499, 500, 501, 1]
    for number, size in enumerate(sizes):
        for other in others:
            transport.send(other, message(number, torch.arange(size, dtype=torch.int32) + world.rank))
    for _ in range(len(sizes) * len(others)):
        arrived = receive(transport)
        same(arrived.tensors["t0"], torch.arange(sizes[arrived.microbatch], dtype=torch.int32) + arrived.source)
    transport.flush()


def sends_never_block(world: World) -> None:
    transport, others = everyone(world, "far ahead")
    count = 600
    for number in range(count):
        for other in others:
            transport.send(other, message(number, torch.full((300,), float(number))))
    for number in range(5):
        for other in others:
            transport.send(other, message(count + number, torch.full((300_000,), float(count + number))))
    world.backend.group("all have sent", [range(world.size)]).barrier()
    for _ in range((count + 5) * len(others)):
        arrived = receive(transport)
        assert (arrived.tensors["t0"] == arrived.microbatch).all()


def tensors_may_change_after_send(world: World) -> None:
    transport, others = everyone(world, "reuse")
    for size in (10, 100_000, 3_000_000):
        tensor = torch.full((size,), 7.0)
        for other in others:
            transport.send(other, message(0, tensor))
        tensor.fill_(-1.0)
        kept = [receive(transport) for _ in others]
        world.backend.group(f"all have {size}", [range(world.size)]).barrier()
        assert all((one.tensors["t0"] == 7.0).all() for one in kept)


def received_tensors_stay(world: World) -> None:
    """A message's tensors are not overwritten by later messages."""
    transport, others = everyone(world, "kept", 4096)
    for number in range(50):
        for other in others:
            transport.send(other, message(number, torch.full((20 if number % 2 else 800,), float(number))))
    kept = [receive(transport) for _ in range(50 * len(others))]
    for one in kept:
        assert (one.tensors["t0"] == one.microbatch).all()
        one.tensors["t0"].fill_(-1.0)
    assert all((one.tensors["t0"] == -1.0).all() for one in kept)


def bytes_are_counted(world: World) -> None:
    transport, others = everyone(world, "bytes")
    assert transport.bytes_sent == 0 and transport.longest_gap_seconds == 0.0
    sent = [message(0), message(1, torch.ones(100)), message(2, torch.ones(10_000), torch.ones(3, dtype=torch.bool))]
    for one in sent:
        for other in others:
            transport.send(other, one)
    assert transport.bytes_sent == len(others) * sum(encoded_bytes(one) for one in sent)
    assert transport.bytes_sent > len(others) * sum(one.payload_bytes for one in sent)
    for _ in range(len(sent) * len(others)):
        receive(transport)


def waiting_ends_and_sleeps(world: World) -> None:
    transport, others = everyone(world, "patience")
    assert transport.poll() == [] and transport.wait(0.0) is None
    started, cpu = time.monotonic(), time.thread_time()
    assert transport.wait(0.3) is None
    assert time.monotonic() - started >= 0.29
    assert time.thread_time() - cpu < 0.15, "waiting spins"
    transport.progress()
    world.backend.group("patience is over", [range(world.size)]).barrier()
    for other in others:
        transport.send(other, message(0))
    assert len({receive(transport).source for _ in others}) == len(others)


def poll_returns_all(world: World) -> None:
    transport, others = everyone(world, "poll")
    for number in range(20):
        for other in others:
            transport.send(other, message(number, torch.ones(number * 100)))
    got, deadline = [], time.monotonic() + 30
    while len(got) < 20 * len(others) and time.monotonic() < deadline:
        got += transport.poll()
        time.sleep(0.001)
    assert len(got) == 20 * len(others)
    for other in others:
        assert [one.microbatch for one in got if one.source == other] == list(range(20))


def edges_can_be_added(world: World) -> None:
    """First a ring, then the other direction; a message for an edge that is not open yet waits until it is."""
    transport = world.backend.transport("late edges")
    after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    transport.connect([before], [after], 1000)
    transport.send(after, message(1))
    assert receive(transport).source == before
    transport.connect([], [before], 1000)
    transport.send(before, message(2))
    if world.size > 2:
        assert transport.wait(0.05) is None
    transport.connect([after, before], [before, after], 1000)
    assert (receive(transport).source, transport.poll()) == (after, [])
    transport.flush()


def purposes_do_not_mix(world: World) -> None:
    first, others = everyone(world, "one")
    second, _ = everyone(world, "two")
    for other in others:
        second.send(other, message(2))
    for other in others:
        first.send(other, message(1))
    assert [receive(first).microbatch for _ in others] == [1] * len(others)
    assert [receive(second).microbatch for _ in others] == [2] * len(others)


def misuse_is_named(world: World) -> None:
    transport = world.backend.transport("misuse")
    other = (world.rank + 1) % world.size
    with pytest.raises(TransportError, match=f"edge {world.rank} -> {other} of 'misuse': is not connected"):
        transport.send(other, message(0))
    for wrong in (world.rank, world.size, -1):
        with raises("peer-not-another-rank", world.size):
            transport.connect([wrong], [], 100)
    transport.connect([(world.rank - 1) % world.size], [other], 100)
    with pytest.raises(TransportError, match=r"dtype that messages cannot carry .*complex32"):
        transport.send(other, message(0, torch.ones(1, dtype=torch.complex32)))
    transport.close()
    transport.close()
    for use in (lambda: transport.send(other, message(0)), transport.poll, lambda: transport.wait(1.0),
                lambda: transport.connect([other], [], 100)):
        with pytest.raises(TransportError, match=r"transport 'misuse' on rank .* is closed"):
            use()


# Collectives.

def partitions(size: int) -> list[list[list[int]]]:
    """All ranks, one rank each, every other rank, and uneven groups that are not in rank order."""
    made = [[list(range(size))], [[rank] for rank in range(size)]]
    if size > 2:
        made += [[list(range(0, size, 2)), list(range(1, size, 2))], [list(range(1, size)), [0]]]
    return made


def collectives_agree_with_plain_sums(world: World) -> None:
    for number, partition in enumerate(partitions(world.size)):
        group = world.backend.group(f"plain {number}", partition)
        assert world.rank == group.ranks[group.index] and list(group.ranks) in partition
        for dtype in DTYPES:
            for size in (0, 1, 3, 1000):
                _check_collectives(group, dtype, size)
        group.close()
        group.close()


def _check_collectives(group, dtype: torch.dtype, size: int) -> None:
    members = len(group.ranks)
    brought = [random(rank, dtype, members * size, 2) for rank in group.ranks]
    stacked = torch.stack(brought)
    summed = stacked.to(torch.float64).sum(0).to(dtype)
    for op, expected in (("sum", summed), ("max", _extreme(stacked, "amax")), ("min", _extreme(stacked, "amin"))):
        mine = brought[group.index].clone()
        group.all_reduce(mine, op).wait()
        same(mine, expected)
    mine, share = brought[group.index].clone(), torch.empty(size, 2, dtype=dtype)
    group.reduce_scatter(share, mine).wait()
    same(share, summed.view(members, size, 2)[group.index])
    same(mine, brought[group.index])
    whole = torch.empty(members * members * size, 2, dtype=dtype)
    group.all_gather(whole, mine).wait()
    same(whole, torch.cat(brought))
    _check_along_a_dim(group, brought, summed, size)
    for root in range(members):
        copy = brought[group.index].clone()
        group.broadcast(copy, root).wait()
        same(copy, brought[root])
        total = brought[group.index].clone()
        group.reduce(total, root).wait()
        if group.index == root:
            same(total, summed)
    traded = torch.empty_like(mine)
    group.all_to_all(traded, mine).wait()
    same(traded, torch.cat([one.view(members, size, 2)[group.index] for one in brought]))


def _check_along_a_dim(group, brought: list[Tensor], summed: Tensor, size: int) -> None:
    """Gathers and divides along the second of three dims, so that pieces are not contiguous in the full tensor."""
    members = len(group.ranks)
    mine = brought[group.index].view(size, members, 2).movedim(0, 2).contiguous()  # [members, 2, size]
    for buffer in (None, mine.new_empty(members * mine.numel())):
        whole = mine.new_empty(members, members * 2, size)
        group.all_gather(whole, mine, 1, buffer).wait()
        same(whole, torch.cat([one.view(size, members, 2).movedim(0, 2) for one in brought], 1))
    total = summed.view(size, members, 2).permute(2, 1, 0)  # [2, members, size]
    for buffer in (None, torch.empty_like(mine)):
        own = mine.new_empty(2, 1, size)
        group.reduce_scatter(own, mine.transpose(0, 1).contiguous(), buffer, 1).wait()
        same(own, total[:, group.index:group.index + 1])


def large_pieces_along_a_dim(world: World) -> None:
    """Pieces that a backend may send and receive in place, instead of packing them."""
    group, size = world.backend.group("large pieces", [range(world.size)]), 40_000
    for dtype in (torch.float64, torch.bfloat16):
        brought = [random(rank, dtype, world.size * size, 2) for rank in group.ranks]
        _check_along_a_dim(group, brought, torch.stack(brought).to(torch.float64).sum(0).to(dtype), size)


def _extreme(stacked: Tensor, name: str) -> Tensor:
    return getattr(stacked.to(torch.float64), name)(0).to(stacked.dtype) if stacked.numel() else stacked[0]


def zero_dim_tensors_reduce(world: World) -> None:
    group = world.backend.group("0-dim", [range(world.size)])
    total, truth = torch.tensor(float(world.rank)), torch.tensor(world.rank == 1)
    group.all_reduce(total).wait()
    group.all_reduce(truth).wait()
    assert total.item() == sum(range(world.size)) and truth.item() is True
    copy = torch.tensor(float(world.rank))
    group.broadcast(copy, world.size - 1).wait()
    assert copy.item() == world.size - 1
    everything = torch.empty(world.size)
    group.all_gather(everything, copy + world.rank).wait()
    assert everything.tolist() == [world.size - 1.0 + rank for rank in range(world.size)]


def half_sums_accumulate_in_fp32(world: World) -> None:
    """256 + 1 + 1 + ... in bfloat16 stays 256 when each partial sum is rounded."""
    group = world.backend.group("half", [range(world.size)])
    one = 256.0 if world.rank == 0 else 1.0
    expected = torch.full((4,), 255.0 + world.size).bfloat16()
    assert world.size < 4 or expected[0].item() > 256.0
    mine, share = torch.full((4,), one, dtype=torch.bfloat16), torch.empty(4, dtype=torch.bfloat16)
    group.reduce_scatter(share, mine.repeat(world.size)).wait()
    group.all_reduce(mine).wait()
    same(mine, expected)
    same(share, expected)


def results_are_the_same_to_the_bit(world: World) -> None:
    group = world.backend.group("bits", [range(world.size)])
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for size in (1, 7, 1000, 70_000):
            tensor = torch.randn(size, generator=torch.Generator().manual_seed(world.rank)).to(dtype)
            group.all_reduce(tensor).wait()
            everyones = torch.empty(world.size * size, dtype=dtype)
            group.all_gather(everyones, tensor).wait()
            for one in everyones.view(world.size, size):
                same(one, tensor)


def uneven_all_to_all(world: World) -> None:
    """Member i sends (i + j) % size rows to member j, so one member gets none."""
    group = world.backend.group("uneven", [range(world.size)])
    sent = [(world.rank + other) % world.size for other in range(world.size)]
    received = [(world.rank + other) % world.size for other in range(world.size)]
    tensor = torch.cat([torch.full((rows, 3), 10 * world.rank + other, dtype=torch.int16)
                        for other, rows in enumerate(sent)])
    output = torch.empty(sum(received), 3, dtype=torch.int16)
    group.all_to_all(output, tensor, received, sent).wait()
    same(output, torch.cat([torch.full((rows, 3), 10 * other + world.rank, dtype=torch.int16)
                            for other, rows in enumerate(received)]))


def many_under_way_at_once(world: World) -> None:
    """Two groups interleaved, twenty rounds of collectives, waited for in reverse call order."""
    first = world.backend.group("first", [range(world.size)])
    second = world.backend.group("second", [list(range(world.size))])
    work, checks = [], []
    for number in range(20):
        size = [1, 1000, 100_000][number % 3]
        mine = torch.full((size,), float(world.rank + number))
        half = torch.full((world.size * size,), float(world.rank), dtype=torch.bfloat16)
        share = torch.empty(size, dtype=torch.bfloat16)
        everything = torch.empty(world.size, dtype=torch.int64)
        work.append(first.all_reduce(mine))
        work.append(second.reduce_scatter(share, half))
        work.append(first.all_gather(everything, torch.tensor([world.rank * number])))
        checks.append((number, mine, share, everything))
    ranks = sum(range(world.size))
    deadline = time.monotonic() + 30
    while not work[0].done():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    for one in reversed(work):
        one.wait()
        one.wait()
        assert one.done()
    for number, mine, share, everything in checks:
        assert (mine == ranks + number * world.size).all() and (share == ranks).all()
        assert everything.tolist() == [rank * number for rank in range(world.size)]


def shards_of_all_sizes_under_way_at_once(world: World) -> None:
    """From small sizes to those sent to one member at a time, each twice, with and without a buffer of the caller."""
    group = world.backend.group("sizes", [range(world.size)])
    work, checks = [], []
    for number, size in enumerate(2 * [1000, 500_000, 30_000, 100_000]):
        brought = [random(10 * number + rank, torch.float32, world.size * size) for rank in range(world.size)]
        mine, share = brought[world.rank], torch.empty(size)
        everything, buffer = torch.empty(world.size * size), torch.empty_like(mine) if number % 3 else None
        work.append(group.reduce_scatter(share, mine, buffer))
        work.append(group.all_gather(everything, mine[:size]))
        checks.append((share, sum(brought).view(world.size, -1)[world.rank],
                       everything, torch.cat([one[:size] for one in brought])))
    for one in reversed(work):
        one.wait()
    for share, total, everything, expected in checks:
        same(share, total)
        same(everything, expected)


def work_may_be_forgotten(world: World) -> None:
    """A collective whose work and tensor the caller drops still completes, and does not write into reused memory."""
    group = world.backend.group("forgotten", [range(world.size)])
    others = []
    for _ in range(300):
        group.all_reduce(torch.full((4,), 3.0))
        group.all_reduce(torch.full((1,), 5, dtype=torch.int32), "max")
        others += [torch.full((4,), 7.0), torch.full((1,), 9, dtype=torch.int32)]
    group.barrier()
    for floats, number in zip(others[::2], others[1::2], strict=True):
        same(floats, torch.full((4,), 7.0))
        same(number, torch.full((1,), 9, dtype=torch.int32))


def collectives_return_at_once(world: World) -> None:
    """Rank 0's call returns, with work that is not done, before the others have called."""
    group = world.backend.group("asynchronous", [range(world.size)])
    transport, others = everyone(world, "go")
    tensor = torch.ones(10)
    if world.rank == 0:
        work = group.all_reduce(tensor)
        assert not work.done()
        for other in others:
            transport.send(other, message(0))
    else:
        receive(transport)
        work = group.all_reduce(tensor)
    started, cpu = time.monotonic(), time.thread_time()
    if world.rank == world.size - 1:
        time.sleep(0.3)
        another = group.all_reduce(tensor.clone())
    else:
        another = group.all_reduce(tensor.clone())
        another.wait()
        assert time.thread_time() - cpu < 0.25 or time.monotonic() - started > 5, "waiting spins"
    another.wait()
    work.wait()
    assert (tensor == world.size).all()


def volumes_are_counted(world: World) -> None:
    """In the format that is sent, whatever its size; tests/comm/test_wire.py counts bytes on the wire."""
    group, n = world.backend.group("volume", [range(world.size)]), world.size
    alone = world.backend.group("alone", [[rank] for rank in range(n)])
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int16):
        for elements in (100, 100_000):
            whole, share = torch.zeros(n * elements, dtype=dtype), torch.zeros(elements, dtype=dtype)
            calls = {"all_reduce": [lambda t=whole: group.all_reduce(t)],
                     "reduce_scatter": [lambda t=whole, s=share: group.reduce_scatter(s, t)],
                     "all_gather": [lambda t=whole, s=share: group.all_gather(t, s)],
                     "all_to_all": [lambda t=whole: group.all_to_all(t.clone(), t)],
                     "broadcast": [lambda t=whole: group.broadcast(t)],
                     "reduce": [lambda t=whole, root=root: group.reduce(t, root) for root in range(n)]}
            others = (n - 1) * share.nbytes
            expected = dict.fromkeys(calls, others) | {
                "all_reduce": (n - 1) * whole.nbytes if whole.nbytes <= 64 << 10 else 2 * others,
                "reduce": n * others, "broadcast": 0 if world.rank == 0 else whole.nbytes}
            for operation, starts in calls.items():
                before = group.bytes_received
                for start in starts:
                    start().wait()
                assert group.bytes_received - before == expected[operation], f"{operation} of {whole.nbytes} bytes"
            alone.all_reduce(whole).wait()
    assert alone.bytes_received == 0
    assert ring_bytes("all_reduce", 4, 400) == 600 and ring_bytes("all_gather", 4, 400) == 300


def objects_and_barriers(world: World) -> None:
    group = world.backend.group("objects", [range(world.size)])
    values = group.gather_objects({"rank": world.rank, "text": "ä" * world.rank, "list": [None, 1.5]})
    assert [value["rank"] for value in values] == list(range(world.size))
    assert [len(value["text"]) for value in values] == list(range(world.size))
    with torch.device("meta"):  # whatever the default device of a program is, they are over host memory
        group.barrier()
        assert group.gather_objects(None) == [None] * world.size
        before = group.bytes_received
        assert group.gather_number(world.rank - (1 << 40)) == [rank - (1 << 40) for rank in range(world.size)]
        assert group.bytes_received == before and world.all_reduce(1.0) == world.size


def wrong_tensors_are_named(world: World) -> None:
    group = world.backend.group("wrong", [range(world.size)])
    n = world.size
    square = torch.zeros(4 * n, 4)
    wrong: list[tuple[Callable[[], object], str]] = [
        (lambda: group.all_reduce(square.t()), "collective-not-contiguous"),
        (lambda: group.all_reduce(torch.zeros(2, dtype=torch.complex32)), "dtype-not-reduced"),
        (lambda: group.reduce_scatter(torch.zeros(3), torch.zeros(3 * n + 1)), "collective-sizes"),
        (lambda: group.all_gather(torch.zeros(3 * n), torch.zeros(3, dtype=torch.float64)), "collective-dtypes-differ"),
        (lambda: group.broadcast(square, n), "collective-root"),
        (lambda: group.reduce(square, -1), "collective-root"),
        (lambda: group.all_to_all(square.clone(), square, [4 * n] * n), "all-to-all-splits"),
        (lambda: group.all_to_all(torch.zeros(n + 1), torch.zeros(n + 1)), "all-to-all-splits"),
        (lambda: world.backend.group("bad", [[0]]), "partition-not-of-all-ranks"),
        (lambda: world.backend.group("bad", [list(reversed(range(n)))]), "partition-not-of-all-ranks"),
    ]
    for call, code in wrong:
        with raises(code):
            call()
    group.close()
    with pytest.raises(TransportError, match="the group is closed"):
        group.barrier()


MESSAGES = ("edges_are_fifo", "whichever_arrives_first", "all_kinds_of_tensors",
            "shapes_change_and_outgrow_the_capacity", "sends_never_block", "tensors_may_change_after_send",
            "received_tensors_stay", "bytes_are_counted", "waiting_ends_and_sleeps", "poll_returns_all",
            "edges_can_be_added", "purposes_do_not_mix", "misuse_is_named")
COLLECTIVES = ("collectives_agree_with_plain_sums", "zero_dim_tensors_reduce", "half_sums_accumulate_in_fp32",
               "results_are_the_same_to_the_bit", "uneven_all_to_all", "large_pieces_along_a_dim",
               "many_under_way_at_once", "shards_of_all_sizes_under_way_at_once",
               "collectives_return_at_once", "work_may_be_forgotten", "volumes_are_counted", "objects_and_barriers",
               "wrong_tensors_are_named", "a_subset_is_a_world_of_its_own")


def leave_messages_behind(world):
    """Large messages that are never read, and a transport closed before: closing the backend works, also twice."""
    transport, others = everyone(world, "pipe", 100)
    early, _ = everyone(world, "closed early")
    for other in others:
        transport.send(other, message(0, torch.ones(300_000)))
    early.close()
    world.backend.close()
    world.backend.close()
