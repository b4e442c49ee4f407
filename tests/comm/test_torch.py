"""torch.distributed over Gloo, in processes of its own."""

import dataclasses
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from benchmarks.gpu.programs import Program, engine_of
from ranvier.comm import torch_backend
from ranvier.comm.torch_backend import PeerSockets, TorchBackend, torch_generation
from ranvier.comm.torch_group import WaitRegistry
from ranvier.errors import TransportError
from ranvier.testing.ranks import run_processes, run_ranks
from ranvier.train.commands import CommandChannel
from ranvier.world import World
from tests.comm import conformance
from tests.comm.test_wire import OPERATIONS, over_sockets
from tests.errors import raises

HERE = "tests.comm.test_torch"
SLOW = pytest.mark.slow


CASES = [*conformance.MESSAGES, *conformance.COLLECTIVES]
ARGUMENTS = [1, "two", [3.5, None]]


def told_by_rank(world: World, cases: list, arguments: list) -> dict:
    world.store.set(f"rank {world.rank}", "here")
    return {"world": [world.rank, world.size, world.backend.name, world.launcher], "arguments": arguments,
            "store": type(world.store).__name__, "cases": conformance.run_cases(world, cases),
            "wire": over_sockets(world) if sys.platform == "linux" else [], "own": use_the_users_own(world)}


@pytest.fixture(scope="module")
def two() -> list[dict]:
    """Results of each of two processes after all cases; the error names the case that fails."""
    return run_processes(f"{HERE}:told_by_rank", 2, "torch", args=[CASES, ARGUMENTS], timeout_seconds=240)


def test_conformance(two):
    assert [told["cases"] for told in two] == [len(CASES)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, 4])
def test_conformance_of_other_sizes(size):
    assert run_processes("tests.comm.conformance:run_cases", size, "torch", args=[CASES],
                         timeout_seconds=240) == [len(CASES)] * size


def test_processes_return_json_and_have_a_signed_store(two):
    assert [told["world"] for told in two] == [[rank, 2, "torch", "run_processes"] for rank in range(2)]
    assert all(told["arguments"] == ARGUMENTS and told["store"] == "SignedStore" for told in two)


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux's sockets")
def test_gloo_moves_what_is_counted(two):
    for told in two:
        assert len(told["wire"]) == 3 * len(OPERATIONS)
        for name, counted, arrived in told["wire"]:
            assert arrived == pytest.approx(counted, rel=0.02), name


def lose_a_peer(world: World, how: str) -> list:
    transport = world.backend.transport("pipe")
    lost = world.size - 1
    others = [rank for rank in range(world.size) if rank != world.rank]
    transport.connect(others, others, 4096)
    group = world.backend.group("data", [range(world.size)])
    group.barrier()
    if world.rank == lost:
        os._exit(7)
    started = time.monotonic()
    try:
        if how == "wait":
            transport.wait(30.0)
        elif how == "poll":
            while time.monotonic() < started + 30:
                transport.poll()
                time.sleep(0.01)
        elif how == "collective":
            group.barrier()
        elif how == "send":
            while time.monotonic() < started + 30:
                transport.send(lost, conformance.message(0))
                time.sleep(0.01)
        text = "nothing was raised"
    except TransportError as error:
        text = str(error)
    seconds = time.monotonic() - started
    if how == "collective":  # The other rank may wait for this rank, and learns of the loss when this rank closes.
        return [text, seconds]
    world.store.set(f"seen {world.rank}", text)
    for other in range(lost):
        world.store.get(f"seen {other}")
    return [text, seconds]


@pytest.mark.slow
@pytest.mark.parametrize(("how", "size"), [("wait", 2), *((how, 3) for how in ("wait", "poll", "send", "collective"))])
def test_a_lost_process_is_named(how, size):
    *results, lost = run_processes(f"{HERE}:lose_a_peer", size, "torch", args=[how], may_fail=[size - 1])
    assert lost is None
    for text, seconds in results:
        assert ("member is gone" if how == "collective" else f"rank {size - 1} on 'pipe': is gone") in text
        assert seconds < 20


def connected_pair(seconds: float) -> tuple[dist.Store, TorchBackend, TorchBackend]:
    """Two ranks of this process, and the store over which they have found each other."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with ThreadPoolExecutor(2) as pool:
        return store, *pool.map(lambda rank: torch_generation(
            "few", rank, 2, store, torch.device("cpu"), seconds, connect_seconds=20.0), range(2))


def test_a_lost_peer_is_named():
    """The sockets end, as when a process dies; in `make test`, tests/elastic and tests/launch lose real processes."""
    _, *both = connected_pair(20.0)
    with ThreadPoolExecutor(2) as pool:
        transports = list(pool.map(lambda backend: backend.transport("pipe"), both))
        for rank, transport in enumerate(transports):
            transport.connect([1 - rank], [1 - rank], 4096)
        waiting = pool.submit(transports[0].wait, 30.0)
        assert both[1].sockets.sever() > 0
        with raises("peer-gone", "pipe", where="rank 1 on 'pipe'"):
            waiting.result()
    for backend in both:
        backend.close()


def leave_messages_behind(world: World) -> bool:
    conformance.leave_messages_behind(world)
    return dist.is_initialized()


@pytest.mark.slow
def test_orderly_shutdown_of_one_rank():
    """The shutdown of two ranks is tested below."""
    assert run_processes(f"{HERE}:leave_messages_behind", 1, "torch") == [False]


def use_the_users_own(world: World) -> list:
    from ranvier.comm.torch_backend import TorchBackend

    bound, dist.group.WORLD.bound_device_id = torch.device("cuda", 1), torch.device("cuda", 1)
    second = TorchBackend(world.rank, world.size, world.store, world.device, 30.0)
    conformance.run_cases(dataclasses.replace(world, backend=second), ["edges_are_fifo", "objects_and_barriers"])
    made = [*second._groups, second.transport("bound")]
    devices = [dist.group.WORLD.bound_device_id, *{one._process_group.bound_device_id for one in made}]
    second.close()
    still = dist.is_initialized() and devices == [bound, None]
    with raises("torch-distributed-other-rank"):
        TorchBackend((world.rank + 1) % world.size, world.size, world.store, world.device, 30.0)
    return [still, leave_messages_behind(world)]


def test_a_process_group_that_is_there_is_used_and_left(two):
    """Its device is bound to none of our groups. The ranks' own process group ends although messages are in flight."""
    assert [told["own"] for told in two] == [[True, False]] * 2


def test_a_rank_that_does_not_answer_while_groups_are_made(monkeypatch):
    """Torch's store reports the timeout by its own type of error."""
    def gone(*args, **options):
        raise dist.DistStoreError("[source.cpp:1] wait timeout after 8000ms. More.")

    backend = TorchBackend.__new__(TorchBackend)
    backend.rank, backend.size, backend._timeout, backend._kinds = 1, 2, timedelta(seconds=8), "gloo"
    backend.sockets = PeerSockets()
    monkeypatch.setattr(dist, "new_group", gone)
    monkeypatch.setattr(torch_backend, "_unbound", nullcontext)
    with raises("group-not-connected", "checkpoint", 1, "8000ms"):
        backend.group("checkpoint", [[0, 1]])


def test_messages_of_the_host_alone_connect_no_devices(monkeypatch):
    kinds, backend = [], TorchBackend.__new__(TorchBackend)
    backend.rank, backend.size, backend._timeout, backend.waits = 0, 2, timedelta(seconds=8), WaitRegistry(8.0)
    backend._device, backend._transports, backend._nccl_groups = torch.device("cuda", 0), [], []
    monkeypatch.setattr(backend, "_new_group", lambda purpose, members, timeout, kind: kinds.append(kind) or kinds)
    backend.transport("commands", on_host=True)
    assert kinds == ["gloo"]
    backend.transport("pipeline")
    assert kinds == ["gloo", "gloo", "nccl", "nccl"]


def test_only_the_pipelines_messages_may_be_of_devices():
    def rank(world):
        asked, make = {}, world.backend.transport

        def transport(purpose, *, on_host=False):
            asked[purpose] = on_host
            return make(purpose, on_host=on_host)

        world.backend.transport = transport
        with engine_of(Program(layers=1, mesh={"col": 2}), world):
            CommandChannel(world).close()
        return asked

    assert run_ranks(rank, 2) == [{"pipeline": False, "stage order": True, "commands": True}] * 2


def test_a_transport_whose_other_rank_does_not_come():
    """Waiting for messages has no limit of its own, but connecting has."""
    _, backend, other = connected_pair(2.0)
    with raises("group-not-connected", "pipe", 0):
        backend.transport("pipe")
    backend.close()
    other.close()
