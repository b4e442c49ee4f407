"""Messages over MPI with collectives over torch.distributed, in processes that mpiexec starts."""

import threading
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu.programs import Program, losses, on_one_rank
from ranvier.comm.message import Message, MessageKind
from ranvier.comm.mixed_backend import MixedBackend
from ranvier.config.resolve import resolve
from ranvier.config.rules import problems
from ranvier.config.run import Comm, Run
from ranvier.launch.start import choose_collectives
from ranvier.testing.ranks import run_processes
from ranvier.world import World
from tests.comm import conformance
from tests.comm.test_mpi import mpi
from tests.errors import raises

HERE = "tests.comm.test_mixed"


def large_message(world: World) -> bool:
    """Rank 0 sends, then waits for a collective that rank 1 joins after the message has arrived."""
    transport, _ = conformance.everyone(world, "pipe", 1000)
    group = world.backend.group("together", [range(world.size)])
    if world.rank == 0:
        transport.send(1, Message(MessageKind.FORWARD, 1, 0, {"": torch.ones(4_000_000)}))
    else:
        assert transport.wait(20.0) is not None
    group.all_reduce(torch.ones(3)).wait()
    names = [thread.name for thread in threading.enumerate()]
    return "ranvier-mpi-progress" in names


def test_sends_advance_while_the_engines_thread_is_elsewhere():
    """Whether the message above needs this depends on MPI: within a machine a receiver may copy the message itself."""
    advanced = threading.Event()
    transport = SimpleNamespace(sends_in_flight=1, advance_sends=advanced.set)
    backend = MixedBackend(SimpleNamespace(rank=0, size=1, transport=lambda purpose, on_host: transport,
                                           close=lambda: None),
                           SimpleNamespace(rank=0, size=1, close=lambda: None, waits=None))
    assert backend.transport("pipeline") is transport
    try:
        assert advanced.wait(20.0)
    finally:
        backend.close()


def message_and_losses(world: World, program: dict) -> list:
    return [large_message(world), losses(world, program)]


@pytest.mark.slow
@mpi
def test_a_rank_that_waits_for_a_collective_still_sends_and_a_mesh_has_the_losses_of_one_rank():
    program = Program(layers=1, mesh={"pipe": 2}, microbatches=3, precision="fp64", optim={"clip_norm": 0.1})
    expected = on_one_rank(Program(**{**asdict(program), "mesh": {}}), torch.device("cpu"))
    for sent, found in run_processes(f"{HERE}:message_and_losses", 2, "mpi+torch", args=[asdict(program)],
                                     timeout_seconds=120):
        assert sent and torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=1e-6)


@pytest.mark.parametrize(("setting", "transport", "device", "value"), [
    ("auto", "torch", "cuda", "torch"), ("torch", "torch", "cpu", "torch"), ("auto", "mpi", "cuda", "torch"),
    ("auto", "mpi", "cpu", "mpi"), ("mpi", "mpi", "cuda", "mpi"), ("torch", "mpi", "cpu", "torch")])
def test_which_library_reduces(setting, transport, device, value):
    assert choose_collectives(setting, transport, device).value == value


def test_collectives_of_mpi_need_its_messages():
    with raises("mpi-collectives-alone"):
        choose_collectives("mpi", "torch", "cpu")
    run = resolve(Run(comm=Comm(transport="torch", collectives="mpi")))
    assert "needs MPI for messages" in " ".join(map(str, problems(run, num_blocks=None)))


def test_both_libraries_number_the_ranks_alike():
    with raises("mpi-numbering", 1, 2, 0):
        MixedBackend(SimpleNamespace(rank=1, size=2), SimpleNamespace(rank=0, size=2))
