"""Ranks left behind by a failure elsewhere leave on their own, and the first one reports which rank waits for which."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from unittest import mock

import pytest
import torch
from torch.distributed import HashStore

from ranvier.comm.board import _key
from ranvier.comm.inprocess import InProcessWorld
from ranvier.comm.torch_group import WaitRegistry
from ranvier.config.run import Launch
from ranvier.errors import MessageTimeout, TransportError
from ranvier.launch import failures
from ranvier.launch.heartbeat import FAILED, FINISHED, LEAVE_CHECKS, FailureWatch
from ranvier.mesh import Mesh
from ranvier.system.processes import Process
from ranvier.world import World
from tests.errors import raises


class Neighbour:
    is_running = True


def watch(store, rank=0, lost=lambda: None):
    return FailureWatch(rank, 3, store, lost)


def until_it_leaves(one, neighbours=None):
    """(checks, cause); AssertionError if it has not left after thirty checks."""
    for number in range(30):
        cause = one.check(neighbours or {})
        if cause is not None:
            return number, cause
    raise AssertionError("stays")


def test_what_a_rank_reports_of_others(monkeypatch):
    """A stopped rank on its machine, and a collective that does not end."""
    for module, names in ((sys, ("excepthook", "exit")), (threading, ("excepthook",))):
        for name in names:
            monkeypatch.setattr(module, name, getattr(module, name))  # restores them after the test

    def report(world, error, **_):
        raise error

    world = World(backend=InProcessWorld(2).backend(0), store=HashStore(), launcher="local", local_rank=0, local_size=2,
                  device=torch.device("cpu"), mesh=Mesh(pipe=2))
    monkeypatch.setattr(sys, "stderr", mock.Mock(spec=["write", "flush"]))  # a program's own, which is not a file
    with mock.patch.multiple(failures, Heartbeat=mock.DEFAULT, EXIT_THREAD=mock.DEFAULT, atexit=mock.DEFAULT,
                             faulthandler=mock.DEFAULT, report_failure=report) as patched:
        patched["faulthandler"].is_enabled.return_value = False
        failures.install_error_handlers(world, Launch(), timeout_seconds=60)
        patched["faulthandler"].enable.assert_called_once_with(sys.__stderr__, all_threads=False)
        told = patched["Heartbeat"].call_args.kwargs
        with raises("rank-stopped", "data 0, pipe 1, row 0, col 0", value="process 7"):
            told["on_stopped"](1, mock.Mock(pid=7))
        with raises("collective-late", where="group 'data'", value="more than 60 s"):
            told["on_overdue"]("group 'data'")


def test_a_rank_stays_while_nothing_has_failed():
    one = watch(HashStore())
    assert all(one.check({1: Neighbour()}) is None for _ in range(20))


def test_a_rank_leaves_some_seconds_after_another_one_has_failed():
    """Within ten, but not before its own error or its launcher can end it; the failed rank itself never leaves."""
    store = HashStore()
    store.set(FAILED, json.dumps({"rank": 2, "code": 1}))
    checks, cause = until_it_leaves(watch(store))
    assert LEAVE_CHECKS <= checks < 9 and cause == "rank 2 has failed"
    failed = watch(store, rank=2)
    assert all(failed.check({}) is None for _ in range(20))


def test_a_process_that_is_gone_without_a_word_is_a_failure_of_its_rank():
    store, gone = HashStore(), Neighbour()
    gone.is_running = False
    checks, cause = until_it_leaves(watch(store), {1: gone})
    assert checks < 9 and cause == "rank 1 has failed"
    assert until_it_leaves(watch(store, rank=2))[1] == "rank 1 has failed"  # on another machine
    finished = HashStore()
    finished.set(f"{FINISHED}/1", "")
    one = watch(finished)
    assert all(one.check({1: gone}) is None for _ in range(20))


def test_a_broken_connection_that_only_another_thread_sees():
    waits = WaitRegistry(300.0)
    one = watch(HashStore(), lost=waits.lost_peer)
    assert one.check({}) is None
    waits.lose("rank 1 on 'pipeline': is gone")
    waits.lose("rank 2 on 'pipeline': is gone")
    assert until_it_leaves(one)[1] == "rank 1 on 'pipeline': is gone"


def test_the_first_rank_that_leaves_reports_what_all_were_doing():
    store = HashStore()
    store.set("ranvier/action/0", "3 a wait for the forward of microbatch 2 from pipe 0")
    first, second = watch(store), watch(store, rank=1)
    text = first.report("rank 2 has failed", lambda rank: f"pipe {rank}")
    assert text is not None and second.report("rank 2 has failed", str) is None
    lines = text.splitlines()
    assert lines[0] == "rank 2 has failed, and rank 0, which waits for it, leaves. Ranks were in:"
    assert lines[3] == "  rank 2 (pipe 2): not heard from" and len(lines) == 4


@pytest.mark.parametrize("watched", [False, True])
def test_the_first_rank_that_a_killed_one_brings_down_reports_it(monkeypatch, capsys, watched):
    """Whether or not the rank that watches its machine's processes has already recorded the loss."""
    store, gone = HashStore(), Neighbour()
    gone.is_running = False

    def search(store, ranks):
        os.kill(os.getpid(), signal.SIGTERM)  # as the launcher does after rank 2 has ended
        return [2]

    monkeypatch.setattr(failures, "find_silent_ranks", search)
    monkeypatch.setattr(failures, "clone_shared_store", lambda store: store)
    if watched:
        one = watch(store)
        assert [one.check({2: gone}) for _ in range(3)] == [None] * 3 and store.check([FAILED])
    for rank in (1, 0):
        world = World(backend=InProcessWorld(3).backend(rank), store=store, launcher="srun", local_rank=rank,
                      local_size=3, device=torch.device("cpu"))
        lost = TransportError("a member is gone", code="collective-failed", where="group 'data'", remedy="Look.")
        assert failures.report_failure(world, lost) == 2
    error = capsys.readouterr().err.splitlines()
    assert error[0].startswith("ranvier: error: group 'data'")
    assert error[0].endswith("[rank 1 (data 1, pipe 0, row 0, col 0)]")
    assert error[1:] == ["ranvier: no heartbeat from rank 2 (data 2, pipe 0, row 0, col 0)"]
    assert watch(store).report("rank 2 has failed", str) is None or not watched


def test_a_collective_that_is_late_says_what_each_rank_does(monkeypatch, capsys):
    monkeypatch.setattr(failures, "find_silent_ranks", lambda store, ranks: [])
    monkeypatch.setattr(failures, "clone_shared_store", lambda store: store)
    store = HashStore()
    store.set(_key("action", 1), "2 Checkpoints(...)")
    world = World(backend=InProcessWorld(2).backend(0), store=store, launcher="srun", local_rank=0, local_size=2,
                  device=torch.device("cpu"))
    late = MessageTimeout("a collective did not end", code="collective-failed", where="group 'all'", remedy="Look.")
    assert failures.report_failure(world, late) == 2
    assert capsys.readouterr().err.splitlines()[1:] == ["  rank 1: Checkpoints(...)"]


PROGRAM = textwrap.dedent("""
    import os, signal, sys, threading, time
    import ranvier
    world = ranvier.start(data=2, transport="torch", device="cpu", timeout_seconds=300.0)
    world.backend.group("all", [range(2)]).barrier()
    if world.rank == 1:
        time.sleep(3)  # until its process is known to the other
        os.kill(os.getpid(), signal.SIGKILL)
    signal.signal(signal.SIGTERM, lambda *args: None)  # as a run that saves when it is told to stop
    threading.Event().wait(600)  # as in the driver: no error of a peer gets here
""")


@pytest.mark.slow
@pytest.mark.skipif(Process.find(os.getpid()) is None, reason="needs /proc")
def test_under_torchrun_a_rank_leaves_within_ten_seconds_of_a_kill(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0",
                           "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(program)],
                          capture_output=True, text=True, timeout=300)
    assert done.returncode and "rank 1 has failed, and rank 0, which waits for it, leaves" in done.stderr, done.stderr
    assert time.monotonic() - began < 28.0  # torchrun itself kills ranks after 30
