"""CUDA tensors: over NCCL with two devices, and what can be tested with one device and Gloo or MPI. Run with -m gpu."""

import time

import pytest
import torch

from ranvier.comm.message import Message, MessageKind
from ranvier.comm.nccl_transport import _as_foreign_memory
from ranvier.testing.ranks import run_processes
from ranvier.world import World
from tests.comm import conformance
from tests.mpi import NEEDS_MPI

HERE = "tests.comm.test_cuda"
pytestmark = pytest.mark.gpu


def devices(count: int):
    return pytest.mark.skipif(torch.cuda.device_count() < count, reason=f"needs {count} CUDA devices")


def messages(world: World) -> bool:
    """Both directions at the same time, changing sizes, messages without tensors, order kept, memory reused."""
    device = torch.device("cuda", world.rank % torch.cuda.device_count())
    transport, (other,) = conformance.everyone(world, "pipe", 1 << 16)
    sizes = [10, 1_000_000, 0, 3, 5_000_000, 100]
    for number, size in enumerate(sizes):
        tensor = torch.full((size,), float(number), device=device)
        transport.send(other, Message(MessageKind.FORWARD, 0, number, {"": tensor}, frozenset({""})))
        tensor.fill_(-1.0)
        transport.send(other, Message(MessageKind.CREDIT, 1, number))
    for number, size in enumerate(sizes):
        arrived = conformance.receive(transport)
        assert (arrived.kind, arrived.microbatch, arrived.requires_grad) == (MessageKind.FORWARD, number, {""})
        assert arrived.tensors[""].numel() == size and (size == 0 or arrived.tensors[""].is_cuda)
        assert (arrived.tensors[""] == number).all()
        assert conformance.receive(transport).kind == MessageKind.CREDIT
    assert transport.wait(0.01) is None
    transport.flush()
    return True


def collectives(world: World) -> bool:
    device = torch.device("cuda", world.rank % torch.cuda.device_count())
    group = world.backend.group("data", [range(world.size)])
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64):
        mine = torch.arange(8, device=device).to(dtype) + world.rank
        total, share, whole = mine.clone(), torch.empty(4, dtype=dtype, device=device), torch.empty(16, dtype=dtype,
                                                                                                   device=device)
        work = [group.all_reduce(total), group.reduce_scatter(share, mine), group.all_gather(whole, mine)]
        for one in work:
            one.wait()
        expected = 2 * torch.arange(8, device=device) + 1
        assert torch.equal(total, expected.to(dtype))
        assert torch.equal(share, expected.to(dtype).chunk(2)[world.rank])
        assert torch.equal(whole.view(2, 8)[world.rank], mine)
        root = mine.clone()
        group.broadcast(root, 1).wait()
        assert torch.equal(root, (torch.arange(8, device=device) + 1).to(dtype))
        traded = torch.empty_like(mine)
        group.all_to_all(traded, mine).wait()
        assert torch.equal(traded[:4] + 1, traded[4:])
    assert group.gather_objects(world.rank) == [0, 1]
    return True


def overlap(world: World) -> bool:
    """A receive is posted only when its header has arrived: a device that waits for a message continues to compute."""
    device = torch.device("cuda", world.rank % torch.cuda.device_count())
    transport, (other,) = conformance.everyone(world, "pipe", 1 << 16)
    group = world.backend.group("start", [range(2)])
    group.barrier()
    if world.rank == 0:
        time.sleep(1.0)
        transport.send(other, conformance.message(0, torch.ones(10, device=device)))
    else:
        started = time.monotonic()
        square = torch.randn(512, 512, device=device)
        (square @ square).sum().item()
        torch.cuda.synchronize(device)
        assert time.monotonic() - started < 0.9
        conformance.receive(transport)
    transport.flush()
    return True


@devices(1)
def test_the_allocator_is_not_told_what_nccl_does_with_shared_memory():
    """The allocator reuses memory only after all recorded streams have ended, and recording takes its lock."""
    device = torch.device("cuda", 0)
    side = torch.cuda.Stream(device)
    for share, told in ((lambda tensor: tensor, True), (_as_foreign_memory, False)):
        one = share(torch.empty(1 << 22, dtype=torch.uint8, device=device))
        address = one.data_ptr()
        with torch.cuda.stream(side):
            torch.cuda._sleep(500_000_000)
        one.record_stream(side)
        del one
        again = torch.empty(1 << 22, dtype=torch.uint8, device=device)
        assert (again.data_ptr() != address) is told
        side.synchronize()


@devices(2)
@pytest.mark.parametrize("program", ["messages", "collectives", "overlap"])
def test_nccl(program):
    assert run_processes(f"{HERE}:{program}", 2, "torch", device="cuda", timeout_seconds=120) == [True, True]


@devices(1)
@pytest.mark.mpi
@NEEDS_MPI
@pytest.mark.parametrize("program", ["messages", "collectives"])
def test_mpi_stages_through_pinned_memory(program):
    assert run_processes(f"{HERE}:{program}", 2, "mpi", device="cuda", timeout_seconds=120) == [True, True]
