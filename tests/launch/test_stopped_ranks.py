"""A rank that is stopped (SIGSTOP), or leaves early: the others end soon, it is named, and no process is left."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ranvier.launch import supervision
from ranvier.launch.mpiexec import find_mpiexec
from ranvier.launch.stopped_ranks import StoppedRankDetector, find_rank_processes, kill_stopped_ranks, read_pids
from ranvier.mesh import Mesh
from ranvier.system.processes import Process
from tests.covering import quick
from tests.launch.announced import LIMIT_SECONDS, LINUX, torchrun
from tests.mpi import MPI, NEEDS_MPI

SCRIPT = str(Path(__file__).parent / "ending.py")
RANK_1 = r"rank 1 \(data 0, pipe 1, row 0, col 0\)"


def stop_and_wait(started, seconds, rank=1):
    for each in started:
        each.wait_for_ranks()
        os.kill(each.ranks[rank].pid, signal.SIGSTOP)
    for each in started:
        each.process.wait(seconds)
        each.assert_ranks_end()


@pytest.mark.slow
@LINUX
@pytest.mark.parametrize("transport", quick(1, ["torch", MPI]))
def test_a_rank_that_is_stopped_while_the_run_ends(start_ranks, transport):
    each = start_ranks(sys.executable, SCRIPT, "end", transport, 2, 300)
    stop_and_wait([each], 2 + 3 + LIMIT_SECONDS)
    assert each.process.returncode == 1
    assert re.search(rf"^ranvier: {RANK_1} was stopped by SIGSTOP, and killed", each.text, re.MULTILINE), each.text


@pytest.mark.slow
@LINUX
@pytest.mark.mpi
@NEEDS_MPI
@pytest.mark.parametrize("launcher", ["mpiexec", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_a_rank_that_is_stopped_under_another_launcher(start_ranks, launcher):
    each = (start_ranks(find_mpiexec(), "-n", 2, sys.executable, SCRIPT, "meet", "mpi", 2, 300)
            if launcher == "mpiexec" else start_ranks(*torchrun(SCRIPT, "meet", "torch", 2, 300)))
    stop_and_wait([each], 40)  # torchrun's agent asks a rank that still runs to end before it kills it
    assert each.process.returncode != 0
    assert re.search(rf"ranvier: error: {RANK_1}: is stopped \(SIGSTOP\) while all others wait for it", each.text)


@LINUX
@pytest.mark.mpi
@NEEDS_MPI
def test_the_host_of_the_store_is_stopped(start_ranks):
    """Its store does not answer, so a rank that queries the store first never gets to look for stopped ranks."""
    each = start_ranks(find_mpiexec(), "-n", 2, sys.executable, SCRIPT, "meet", "torch", 2, 300)
    stop_and_wait([each], 40, rank=0)
    assert each.process.returncode != 0
    assert re.search(r"error: rank 0 \(data 0, pipe 0, row 0, col 0\): is stopped \(SIGSTOP\)", each.text), each.text


@pytest.mark.slow
@LINUX
def test_a_rank_that_is_stopped_before_it_is_connected(start_ranks):
    """torchrun's agent would wait half a minute for it after the other rank has failed."""
    each = start_ranks(*torchrun(SCRIPT, "begin-1", "torch", 2, 3))
    each.wait_for_ranks()
    each.process.wait(30)
    each.assert_ranks_end()
    assert each.process.returncode != 0, each.text
    assert re.search("ranvier: error: rank 1: did not (say|start) in time", each.text), each.text


@LINUX
@pytest.mark.mpi
@NEEDS_MPI
@pytest.mark.parametrize(("stopped_seconds", "timeout_seconds", "cause"), [
    (2, 300, r"rank 0: is stopped \(SIGSTOP\) while all others wait for it to start MPI"),
    pytest.param(0, 4, r"MPI: has not started on all ranks \(got 'more than 4 s'\)", marks=pytest.mark.slow)])
def test_a_rank_that_is_stopped_before_mpi_has_started(start_ranks, stopped_seconds, timeout_seconds, cause):
    """MPI_Init waits without a limit, and mpi4py holds the GIL during the wait."""
    each = start_ranks(find_mpiexec(), "-n", 2, sys.executable, SCRIPT, "begin-0", "mpi", stopped_seconds,
                       timeout_seconds)
    each.wait_for_ranks()
    assert each.process.wait(30) != 0
    each.assert_ranks_end()
    assert re.search(f"ranvier: error: {cause}", each.text), each.text


@LINUX
@pytest.mark.slow
@pytest.mark.parametrize("transport", ["torch", MPI])
def test_the_time_limit_ends_what_nobody_looks_for(start_ranks, transport):
    started = [start_ranks(sys.executable, SCRIPT, how, transport, 0, 4) for how in ("end", "meet")]
    stop_and_wait(started, 4 + 10 + LIMIT_SECONDS)
    assert [each.process.returncode for each in started] == [2, 2]
    assert "rank 1: sends no heartbeat, and the run waits for it to end" in started[0].text
    assert "a collective did not end" in started[1].text


@LINUX
@pytest.mark.slow
def test_a_rank_that_leaves_with_exit_code_0(start_ranks):
    each = start_ranks(sys.executable, SCRIPT, "leave", "torch", 0, 300)
    each.wait_for_ranks()
    assert each.process.wait(3 + LIMIT_SECONDS) == 1
    assert re.search(rf"^ranvier: {RANK_1} exited with code 0 before the run had ended", each.text, re.MULTILINE)


@LINUX
@pytest.mark.slow
def test_a_rank_that_computes_without_end(start_ranks, tmp_path):
    script = tmp_path / "looping.py"
    script.write_text(
        "import os, torch, ranvier\n"
        "from torch import nn\n"
        "class Loops(nn.Linear):\n"
        "    count = 0\n"
        "    def forward(self, x):\n"
        "        self.count += 1\n"
        "        while rank == 1 and self.count == 40:\n"
        "            pass\n"
        "        return super().forward(x)\n"
        "world = ranvier.start(pipe=2, transport='torch', device='cpu', threads=1, hang_seconds=3.0)\n"
        "rank = world.rank\n"
        "print('rank', rank, 'pid', os.getpid(), flush=True)\n"
        "engine = ranvier.Engine([Loops(4, 4) for _ in range(4)], world, mesh=ranvier.Mesh(pipe=2),\n"
        "    loss=lambda x, target: (((x - target) ** 2).sum(), x.numel()),\n"
        "    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01))\n"
        "for _ in range(100):\n"
        "    engine.train_batch([(torch.ones(2, 4), torch.ones(2, 4))] * 2)\n")
    each = start_ranks(sys.executable, script)
    each.wait_for_ranks()
    assert each.process.wait(60) == 2, each.text
    each.assert_ranks_end()
    assert re.search(rf"ranvier: error: rank 1: forward \d runs for \d s, .*: it hangs in forward \(.*looping.py:.*"
                     rf"\[{RANK_1}\]", each.text), each.text


# ------------------------------------------------------------------------------------------------ the parts


@pytest.fixture
def child():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"],
                               env=os.environ | {"A_RANK_OF_THIS_TEST": "0"})
    yield process
    process.kill()
    process.wait()


def until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Store(dict):
    def check(self, keys):
        return all(key in self for key in keys)

    def get(self, key):
        return self[key].encode()


@LINUX
def test_process_ids_in_the_store_are_believed_of_own_descendants_only(child):
    """Any user of the machine may have written them."""
    stranger = os.getppid()
    store = Store({"ranvier/pid/0": str(child.pid), "ranvier/pid/1": str(stranger), "ranvier/pid/2": "-1",
                   "ranvier/pid/3": "1", "ranvier/pid/4": "x", "ranvier/pid/5": "0", "ranvier/pid/7": "\u00b2"})
    assert find_rank_processes(store, 8, Process.find(os.getpid())) == {0: Process.find(child.pid)}
    assert read_pids(store, 8) == {child.pid: 0, stranger: 1, 1: 3, 0: 5}


@LINUX
def test_looks_are_counted_not_seconds(child):
    watch, ranks = StoppedRankDetector(3), {1: Process.find(child.pid)}
    until(lambda: not ranks[1].is_stopped)
    assert [watch.check(ranks) for _ in range(4)] == [[]] * 4
    child.send_signal(signal.SIGSTOP)
    until(lambda: ranks[1].is_stopped)
    assert [watch.check(ranks) for _ in range(4)] == [[], [], [1], [1]]
    child.send_signal(signal.SIGCONT)
    until(lambda: not ranks[1].is_stopped)
    assert watch.check(ranks) == []
    child.send_signal(signal.SIGSTOP)
    until(lambda: ranks[1].is_stopped)
    assert watch.check(ranks) == [], "the count starts again"
    off = StoppedRankDetector(0)
    assert [off.check(ranks) for _ in range(3)] == [[]] * 3


@LINUX
def test_stopped_ranks_are_killed_and_others_are_not(child):
    me = Process.find(os.getpid())
    kill_stopped_ranks(me, "A_RANK_OF_THIS_TEST")
    child.send_signal(signal.SIGSTOP)
    stopped = Process.find(child.pid)
    until(lambda: stopped.is_stopped)
    kill_stopped_ranks(me, "ANOTHER_VARIABLE")
    assert stopped.is_running
    kill_stopped_ranks(me, "A_RANK_OF_THIS_TEST")
    assert child.wait(20) == -signal.SIGKILL


@LINUX
def test_mpiexec_itself_is_stopped(monkeypatch, child):
    """Its ranks then wait for it when they end."""
    monkeypatch.setattr(supervision, "CHECK_SECONDS", 0.05)
    children = supervision._Children(2, StoppedRankDetector(1.0), supervision.LOOPBACK, None)
    children.started = [supervision._Child(None, child)]
    child.send_signal(signal.SIGSTOP)
    end = supervision._first_failure(children, [], lambda end: supervision._continues_without(children, Mesh(data=2),
                                                                                              None, end))
    assert end == supervision._RankEnd(None, -signal.SIGSTOP) and end.describe(Mesh(data=2)).startswith(
        "ranvier: mpiexec was stopped by SIGSTOP")
