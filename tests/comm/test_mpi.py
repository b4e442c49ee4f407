"""MPI through mpi4py, in processes that mpiexec starts; and what can be tested without starting it."""

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ranvier.comm.mixed_backend import MixedBackend
from ranvier.errors import LaunchError
from ranvier.launch import mpiexec
from ranvier.testing.ranks import RanksFailed, run_processes
from ranvier.world import World
from tests.comm import conformance
from tests.covering import quick
from tests.errors import raises
from tests.mpi import NEEDS_MPI

HERE = "tests.comm.test_mpi"
MIXED = ["edges_are_fifo", "objects_and_barriers"]


def mpi(function):
    """A test that starts ranks with mpiexec."""
    return pytest.mark.mpi(NEEDS_MPI(function))


def told_by_rank(world: World, cases: list, mixed: list) -> list:
    """The number of cases that hold, the same with torch's collectives, the largest error of a gradient on columns,
    whether MPI shuts down in order, and shared memory that would outlive a killed rank."""
    from tests.tensor.test_tensor_real_processes import errors

    assert isinstance(world.backend, MixedBackend)
    plain = replace(world, backend=world.backend._messages)
    maps = Path("/proc/self/maps")
    named = [line for line in maps.read_text().splitlines() if "/mpich_shm_" in line and "(deleted)" not in line]
    return [conformance.run_cases(plain, cases), conformance.run_cases(world, mixed),
            *errors(plain, 1, world.size, "stationary"), leave_messages_behind(world), named]


@mpi
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_conformance_gradients_and_an_orderly_shutdown(size):
    """All cases run in one start; the error names the case that fails."""
    cases = [*conformance.MESSAGES, *conformance.COLLECTIVES]
    mixed = MIXED if size == 2 else cases
    for count, mixed_count, error, finalized, named in run_processes(
            f"{HERE}:told_by_rank", size, "mpi+torch", args=[cases, mixed], timeout_seconds=240):
        assert (count, mixed_count, finalized, named) == (len(cases), len(mixed), True, []) and error < 1e-10


def longest_gap(world: World) -> float:
    transport, _ = conformance.everyone(world, "pipe", 8_000_000)
    group = world.backend.group("together", [range(world.size)])
    group.barrier()
    time.sleep(0.3)
    assert transport.poll() == [] and transport.longest_gap_seconds == 0.0, "no message was in flight"
    if world.rank == 0:
        transport.send(1, conformance.message(0, conformance.torch.ones(1_000_000)))
        time.sleep(0.2)
        transport.flush()
    else:
        conformance.receive(transport)
    return transport.longest_gap_seconds


def leave_messages_behind(world: World) -> bool:
    conformance.leave_messages_behind(world)
    from mpi4py import MPI
    return MPI.Is_finalized()


@pytest.mark.slow
@mpi
def test_orderly_shutdown_of_one_rank():
    assert run_processes(f"{HERE}:leave_messages_behind", 1, "mpi") == [True]


def raise_on_one(world: World) -> None:
    transport, _ = conformance.everyone(world, "pipe")
    print(f"printed by {world.rank}")
    if world.rank == 1:
        raise ZeroDivisionError("mine")
    transport.wait(100.0)


@mpi
@pytest.mark.slow
def test_a_failed_rank_ends_all():
    started = time.monotonic()
    with pytest.raises(RanksFailed, match="ZeroDivisionError: mine") as failure:
        run_processes(f"{HERE}:raise_on_one", 2, "mpi")
    assert not failure.value.hung and "printed by 1" in str(failure.value)
    assert time.monotonic() - started < 50


def late_collective(world: World) -> str:
    from ranvier.comm.mpi_backend import MPIGroup
    from ranvier.errors import MessageTimeout

    group = world.backend.group("data", [range(world.size)])
    assert isinstance(group, MPIGroup)
    group.timeout_seconds = 0.2
    text = ""
    if world.rank == 0:
        work = group.all_reduce(conformance.torch.ones(1))
        with pytest.raises(MessageTimeout, match="a collective did not end") as late:
            work.wait()
        text = str(late.value)
        world.store.set("late", "")
        group.timeout_seconds = 30.0
        work.wait()
    else:
        world.store.get("late")
        group.timeout_seconds = 30.0
        group.all_reduce(conformance.torch.ones(1)).wait()
    return text


def gap_and_late_collective(world: World, *arguments: object) -> list:
    told = [world.rank, world.size, world.backend.name, world.launcher, *arguments]
    return [told, longest_gap(world), late_collective(world)]


@pytest.mark.slow
@mpi
def test_the_longest_gap_and_a_collective_that_does_not_end():
    """The gap counts while a message is in flight; arguments and results are JSON."""
    arguments = [1, "two", [3.5, None]]
    ranks = run_processes(f"{HERE}:gap_and_late_collective", 2, "mpi", args=arguments)
    assert [told for told, _, _ in ranks] == [[rank, 2, "mpi", "run_processes", *arguments] for rank in range(2)]
    _, sender, text = ranks[0]
    assert 0.19 < sender < 5.0 and "group 'data' of ranks [0, 1]" in text


SCRIPTS = {
    "the user's stays": """
from mpi4py import MPI
import torch
from ranvier.comm.mpi_backend import MPIBackend
backend = MPIBackend(torch.device("cpu"))
backend.close()
assert not MPI.Is_finalized()
print("fine")
""",
    "a second one is refused": """
import torch
from ranvier.comm.mpi_backend import MPIBackend
from ranvier.comm.mixed_backend import MixedBackend
from ranvier.comm.torch_backend import TorchBackend
from ranvier.errors import LaunchError
MPIBackend(torch.device("cpu")).close()
try:
    MPIBackend(torch.device("cpu"))
except LaunchError as error:
    assert error.code == "mpi-finalised"
    print("fine")
""",
    "nothing here initialises MPI": """
import sys
from ranvier.launch.mpiexec import mpi_available, mpiexec_command
import ranvier.comm.mpi_backend
assert mpi_available() is None
mpiexec_command(2, ["true"])
assert "mpi4py" not in sys.modules
print("fine")
""",
}


@mpi
@pytest.mark.parametrize("script", quick(1, SCRIPTS))
def test_who_initialises_finalises(script):
    done = subprocess.run([sys.executable, "-c", SCRIPTS[script]], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr


VERSIONS = {
    "HYDRA build details:\n    Version:    5.0.2": "mpich", "MPICH Version: 5.0.2": "mpich",
    "mpiexec (Open MPI) 5.0.11": "open-mpi", "Open MPI v5.0.11, package": "open-mpi",
    "mpirun (PRRTE) 3": "open-mpi", "Intel(R) MPI Library": "mpich", "other": "unknown",
}


@pytest.mark.parametrize("text", VERSIONS)
def test_flavours(text):
    assert mpiexec.flavour(text) == VERSIONS[text]


@pytest.fixture
def pretend(monkeypatch, tmp_path):
    """Writes an mpiexec with the given --version text, by default next to the interpreter."""
    def make(version: str, folder: Path = tmp_path) -> str:
        path = folder / "mpiexec"
        path.write_text(f"#!/bin/sh\necho '{version}'\n")
        path.chmod(0o755)
        return str(path)
    monkeypatch.setattr(mpiexec.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    return make


def test_mpich_is_started_plainly(pretend):
    path = pretend("HYDRA build details:")
    assert mpiexec.mpiexec_command(64, ["a", "b"]) == [path, "-n", "64", "a", "b"]


def test_open_mpi_is_told_what_it_may(pretend, monkeypatch):
    path = pretend("mpiexec (Open MPI) 5.0.11")
    monkeypatch.setattr(mpiexec, "affinity", lambda: [0, 1])
    monkeypatch.setattr(mpiexec.os, "geteuid", lambda: 1000)
    assert mpiexec.mpiexec_command(2, ["a"]) == [path, "-n", "2", "--bind-to", "none", "a"]
    monkeypatch.setattr(mpiexec.os, "geteuid", lambda: 0)
    assert mpiexec.mpiexec_command(3, ["a"]) == [
        path, "-n", "3", "--bind-to", "none", "--allow-run-as-root", "--oversubscribe", "a"]


def test_the_interpreters_own_mpiexec_comes_first(pretend, monkeypatch, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    other = pretend("HYDRA", elsewhere)
    monkeypatch.setenv("PATH", str(elsewhere))
    assert mpiexec.find_mpiexec() == other
    assert mpiexec.find_mpiexec() != pretend("HYDRA") == mpiexec.find_mpiexec()


def test_a_missing_mpiexec_is_named(pretend):
    with raises("mpiexec-missing"):
        mpiexec.mpiexec_command(2, ["a"])
    assert "no mpiexec" in mpiexec.mpi_available() or "mpi4py is not installed" in mpiexec.mpi_available()


def test_reasons(pretend, monkeypatch):
    pretend("mpiexec (Open MPI) 5.0.11")
    monkeypatch.setattr(mpiexec.importlib.util, "find_spec", lambda name: None)
    assert mpiexec.mpi_available().startswith("mpi4py is not installed")
    monkeypatch.setattr(mpiexec.importlib.util, "find_spec", lambda name: name)
    real = mpiexec._output
    monkeypatch.setattr(mpiexec, "_output", lambda *command: "MPICH 5" if "-c" in command else real(*command))
    assert "is open-mpi's but mpi4py loads mpich's library" in mpiexec.mpi_available()

    def fail(*command):
        raise LaunchError("fails", where="python", value="cannot load MPI library", remedy="Reinstall it.")
    monkeypatch.setattr(mpiexec, "_output", fail)
    assert "cannot load MPI library" in mpiexec.mpi_available()
    monkeypatch.setattr(mpiexec, "_output", real)
    with raises("mpiexec-not-runnable"):
        real("/no/such/program")
    with raises("mpiexec-fails"):
        real("false")
    with raises("mpiexec-fails", where="mpi4py"):
        real("false", mpiexec._VERSION_PROGRAM)
