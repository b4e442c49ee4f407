"""Guarantees that run_ranks and run_processes give to tests."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ranvier.system import child
from ranvier.testing.ranks import RanksFailed, run_processes, run_ranks
from ranvier.world import World
from tests.errors import raises
from tests.mpi import UNUSABLE

HERE = "tests.comm.test_ranks"


def test_results_come_in_rank_order_and_the_world_is_complete():
    def run(world: World):
        time.sleep(0.01 * (3 - world.rank))
        world.store.set(f"{world.rank}", "here")
        assert world.store.get(f"{(world.rank + 1) % 3}") == b"here"
        return world.rank, world.size, world.launcher, world.local_rank, world.local_size, str(world.device)

    assert run_ranks(run, 3) == [(rank, 3, "in-process", rank, 3, "cpu") for rank in range(3)]


def test_ranks_that_do_not_end_are_shown_with_their_stacks():
    release = threading.Event()

    def run(world: World):
        if world.rank == 1:
            a_place_to_find(release)

    with pytest.raises(RanksFailed, match="rank 1 of 3 had not ended after") as failure:
        run_ranks(run, 3, timeout_seconds=0.3)
    release.set()
    assert failure.value.hung and "a_place_to_find" in str(failure.value) and "rank 0:" not in str(failure.value)


def a_place_to_find(release: threading.Event) -> None:
    release.wait(30.0)


def test_the_first_failure_is_raised_even_when_others_are_stuck():
    release = threading.Event()

    def run(world: World):
        if world.rank == 1:
            raise KeyError("first")
        a_place_to_find(release)

    with pytest.raises(KeyError, match="first") as failure:
        run_ranks(run, 2, timeout_seconds=0.3)
    release.set()
    assert failure.value.__notes__[0] == "on rank 1 of 2" and "a_place_to_find" in failure.value.__notes__[1]


def write_pids(world: World, path: str) -> None:
    with open(f"{path}.{world.rank}", "w") as file:
        file.write(str(os.getpid()))
    time.sleep(300.0)


def _are_killed(transport: str, folder: Path) -> None:
    with pytest.raises(RanksFailed, match=r"rank 0, 1 of 2 .* had not ended after 30 s") as failure:
        run_processes(f"{HERE}:write_pids", 2, transport, args=[str(folder / transport)], timeout_seconds=30)
    assert failure.value.hung
    for rank in range(2):
        process = int((folder / f"{transport}.{rank}").read_text())
        deadline = time.monotonic() + 10
        while os.path.exists(f"/proc/{process}") and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not os.path.exists(f"/proc/{process}")


@pytest.mark.slow
def test_processes_that_do_not_end_are_killed(tmp_path):
    """Both transports at the same time, since the test mostly waits; on loaded cores a start takes ten seconds."""
    transports = ["torch", "mpi"] if UNUSABLE is None else ["torch"]
    with ThreadPoolExecutor() as pool:
        for done in [pool.submit(_are_killed, transport, tmp_path) for transport in transports]:
            done.result()


def test_processes_end_with_the_one_that_started_them(monkeypatch):
    """A suite kills a row that hangs; its ranks would keep their device's memory."""
    given = []

    def start(command, **named):
        given.append(named.get("end_signal", signal.SIGKILL))
        raise OSError

    monkeypatch.setattr(child, "start", start)
    with pytest.raises(OSError):
        run_processes(f"{HERE}:write_pids", 2, "torch")
    assert given == [signal.SIGKILL]


def test_mpi_without_mpiexec_is_named(monkeypatch):
    monkeypatch.setattr("ranvier.launch.mpiexec.find_mpiexec", lambda: None)
    with raises("mpiexec-missing"):
        run_processes(f"{HERE}:write_pids", 2, "mpi")
