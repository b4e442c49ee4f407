"""A rank that computes without end is found by how long its earlier actions took; slow kinds of action are exempt."""

import _thread
import bdb
import queue
import re
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from torch.autograd import graph
from torch.distributed import HashStore

from ranvier.comm.board import Board, call_of_all_ranks, describe_actions, read_actions
from ranvier.comm.collectives import ChainedWork, CompletedWork
from ranvier.comm.hang import HangDetector, frames_of_threads, is_waiting
from ranvier.errors import Hang, MessageTimeout
from ranvier.mesh import Mesh
from ranvier.system.compilation import Compilations
from tests.errors import raises


def watch(seconds=None):
    told = []
    return HangDetector(seconds, told.append), told


def look(judge, action, seconds):
    judge.check(action, seconds, 1, threading.get_ident())


def test_the_limit_follows_from_the_actions_before():
    judge, _ = watch()
    assert judge.limit("forward 0") is None, "the first actions may compile"
    for seconds in (0.1, 40.0, 0.1):
        judge.record("forward 1", seconds)
        judge.record("a wait for the forward of microbatch 1 from pipe 0", 100.0)
    assert judge.limit("forward 7") == 800.0
    assert judge.limit("backward 7") is None
    assert judge.limit("a wait for the forward of microbatch 1 from pipe 0") is None
    assert judge.limit("code outside the engine") is None
    for _ in range(3):
        judge.record("backward 1", 0.001)
    assert judge.limit("backward 0") == 30.0


@pytest.mark.parametrize(("seconds", "limit"), [(4.0, 4.0), (0.0, None)])
def test_a_limit_that_is_set(seconds, limit):
    judge, told = watch(seconds)
    assert judge.limit("forward 0") == limit
    look(judge, "forward 0", 1000.0)
    assert len(told) == (limit is not None)


def test_what_hangs_is_told_once_with_its_place():
    judge, told = watch(4.0)
    judge.record("forward 0", 0.25)
    look(judge, "forward 1", 4.0)
    assert told == []
    look(judge, "forward 1", 5.0)
    look(judge, "forward 1", 6.0)
    (error,) = told
    assert isinstance(error, Hang)
    assert re.fullmatch(r"rank 1: forward 1 runs for 5 s, and none of its kind has taken more than 0.25 s: it hangs "
                        r"in frames_of_threads \(.*hang\.py:\d+\)\. Look at that line, or raise --launch.hang-.*",
                        str(error))


class _Debugger(bdb.Bdb):
    def __init__(self, halted):
        super().__init__()
        self._halted = halted

    def user_line(self, frame):
        self._halted()
        self.set_continue()


@pytest.mark.parametrize("wait", [lambda look: _Debugger(look).runcall(lambda: None),
                                  lambda look: ChainedWork(CompletedWork(), look).wait()],
                         ids=["a breakpoint", "a collective"])
def test_what_waits_does_not_hang(wait):
    """Time spent waiting does not count, and the next action has its own limit."""
    found, (judge, told) = [], watch(4.0)
    wait(lambda: found.append(is_waiting(sys._getframe())) or look(judge, "forward 1", 1000.0))
    assert found == [True] and not is_waiting(sys._getframe())
    look(judge, "forward 1", 1003.0)
    wait(lambda: look(judge, "forward 2", 3.0))
    for seconds in (1.0, 3.5, 4.0):
        look(judge, "forward 3", seconds)
    assert told == []
    look(judge, "forward 3", 5.0)
    assert len(told) == 1


def test_a_backward_on_a_device_is_judged_by_autograds_thread(monkeypatch):
    """Its hooks wait for other ranks there, while the thread of the action waits inside autograd."""
    (judge, told), action, ended = watch(4.0), threading.get_ident(), queue.SimpleQueue()
    monkeypatch.setattr(graph, "Variable", SimpleNamespace(_execution_engine=SimpleNamespace(run_backward=ended.get)))

    def backward():
        try:
            while frames_of_threads()[action].f_code.co_name != "_engine_run_backward":
                time.sleep(0.001)
            ChainedWork(CompletedWork(), lambda: judge.check("backward 1", 1000.0, 1, action)).wait()
            assert told == []
            judge.check("backward 1", 1005.0, 1, action)
        finally:
            ended.put(None)

    _thread.start_new_thread(backward, ())
    graph._engine_run_backward((True,))
    assert len(told) == 1 and "it hangs in frames_of_threads" in str(told[0])


def test_the_board_judges_and_says_for_how_long():
    """Checks are counted instead of seconds: a process that was stopped for a while has not hung."""
    judge, told = watch(0.3)
    store = HashStore()
    board = Board(store, 0, Mesh(pipe=2), interval_seconds=0.05, hang=judge)
    try:
        board.action = "backward 1"
        assert board.wait("the forward of microbatch 2", 1, lambda seconds: time.sleep(0.5) or board.action, 9.0) == (
            "a wait for the forward of microbatch 2 from pipe 1")
        assert told == [] and board.action == "backward 1"
        board.action = "forward 2"
        board._since -= 1000.0
        time.sleep(0.2)
        assert told == []
        deadline = time.monotonic() + 20
        while not told:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert "forward 2 runs for 0 s" in str(told[0])
        board._interval = 100.0
        board._checks = (board._changes, 1)
        board._publish()
        assert read_actions(store, [0])[0][1] == "forward 2 for 100 s, after backward 1"
    finally:
        board.close()


@pytest.fixture
def compilations(monkeypatch):
    """The record of a process that has compiled nothing."""
    found = Compilations()
    monkeypatch.setattr("ranvier.comm.board.COMPILATIONS", found)
    return found


def test_a_compilation_does_not_hang(compilations):
    """Nor are other actions of its kind compared with it."""
    judge, told = watch(0.3)
    board = Board(HashStore(), 0, Mesh(pipe=2), interval_seconds=0.05, hang=judge)
    try:
        board.action = "forward 1"
        compilations.begin()
        time.sleep(1.0)
        assert told == []
        compilations.end()
        board.action = "forward 2"
        assert judge._longest["forward"] < 0.5
        deadline = time.monotonic() + 20
        while not told:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        board.close()


def test_a_wait_lasts_until_others_have_compiled(compilations, monkeypatch):
    """It ends in time if they have not compiled, or if the rank that compiles is gone."""
    store, calls = HashStore(), []
    boards = [Board(store, rank, Mesh(pipe=2), interval_seconds=0.02) for rank in range(2)]

    def receive(seconds):
        calls.append(seconds)
        time.sleep(min(seconds, 0.3))
        return "message" if len(calls) == 4 else None

    try:
        assert boards[0].wait("it", 1, receive, 0.3) is None and calls == [0.3]
        compilations.begin()
        assert boards[0].wait("it", 1, receive, 0.3) == "message" and len(calls) == 4
        compilations.end()
        time.sleep(0.5)
        assert boards[0].wait("it", 1, receive, 0.3) is None and len(calls) == 5
        compilations.begin()
        time.sleep(0.2)
        boards[1].close()
        assert boards[0].wait("it", 1, receive, 0.3) is None
        assert len(calls) == 7, "a rank that no longer publishes is not waited for"
    finally:
        for board in boards:
            board.close()


def test_a_compilation_that_never_ends_does_hang(compilations):
    compilations.begin()
    assert compilations.idle_seconds() == 0
    compilations._state = 0.0, time.monotonic() - 3700, None
    assert 99 < compilations.idle_seconds() < 200


def test_a_call_of_one_rank_alone_names_itself_and_what_the_others_do():
    store = HashStore()
    boards = [Board(store, rank, Mesh(data=2), interval_seconds=0.05) for rank in range(2)]
    try:
        boards[1].action = "forward 3"
        with raises("late", "data 0 (rank 0): full_state_dict", "data 1 (rank 1): forward 3"), \
                boards[0].during("full_state_dict"):
            raise MessageTimeout("a collective did not end", code="late", where="group", remedy="Wait.")
        with boards[1].during("Checkpoints.save"):
            assert boards[1].action == "Checkpoints.save"
        assert boards[1].action == "forward 3"
        with raises("late", "shard_loader", "rank 1: forward 3"), \
                call_of_all_ranks("shard_loader", lambda: describe_actions(store, 2)):
            raise MessageTimeout("a collective did not end", code="late", where="group", remedy="Wait.")
    finally:
        for board in boards:
            board.close()
