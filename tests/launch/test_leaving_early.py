"""A rank that ends its program without an error while others need it: all ranks end within seconds, and it is named."""

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ranvier import Engine
from ranvier.comm.board import Board, find_waiting_rank, read_engine_calls
from ranvier.launch.heartbeat import Heartbeat
from ranvier.mesh import Mesh
from ranvier.testing.ranks import run_ranks
from tests.covering import quick

SCRIPT = Path(__file__).parent / "leaver.py"
TRANSPORTS = ["torch", pytest.param("mpi", marks=pytest.mark.slow)]


def leave(where, transport):
    started = time.monotonic()
    done = subprocess.run([sys.executable, str(SCRIPT), where, transport], capture_output=True, text=True, timeout=120)
    return done.returncode, done.stderr, time.monotonic() - started


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("where", "says"), quick(1, [
    ("forward", "error: block 1, forward of microbatch 0: ends the program of this rank while the others wait for it "
                "(got 'sys.exit(0)')"),
    ("loop", "error: rank 1: ended its program while rank 0 (data 0, pipe 0, row 0, col 0) needs it"),
    ("raise", "error: rank 1: ended its program while rank 0 (data 0, pipe 0, row 0, col 0) needs it")]))
def test_the_others_end_and_the_culprit_is_named(where, says, transport):
    """They would wait 300 seconds for its messages otherwise."""
    code, errors, seconds = leave(where, transport)
    assert code == 2 and says in errors and errors.count("error:") == 1, errors
    assert seconds < 100.0


@pytest.mark.slow
def test_ranks_that_have_made_the_same_calls_may_leave_one_by_one():
    code, errors, _ = leave("end", "torch")
    assert code == 0 and not errors, errors


def test_who_needs_whom():
    """No rank needs a rank of another engine, such as one that the run has lost, or a rank without an engine."""
    store = dist.HashStore()
    assert read_engine_calls(store, 0) == ("", 0) and find_waiting_rank(store, 1, range(4)) is None
    boards = [Board(store, rank, Mesh(pipe=2)) for rank in range(3)]
    for board, calls, engine in zip(boards, (4, 3, 9), ("after", "after", "before"), strict=True):
        board.calls, board.engine = calls, engine
        board.close()
    assert read_engine_calls(store, 2) == ("before", 9)
    assert [find_waiting_rank(store, rank, range(4)) for rank in range(4)] == [None, 0, None, None]


@pytest.mark.parametrize(("calls", "found"), [(4, None), (3, 0), (1, 0)])
def test_who_needs_a_rank_outside_of_batches(calls, found):
    """By ranks whose heartbeat reports more calls of the world, of Checkpoints or of Engine constructors."""
    heartbeat = SimpleNamespace(_heard={0: ("9 4", 0), 1: ("9 1", 3), 2: ("", 5)},
                                _world=SimpleNamespace(num_calls=calls))
    assert Heartbeat.find_waiting_rank(heartbeat) == found


def test_calls_of_the_world_are_counted():
    def program(world):
        world.gather_objects(world.rank)
        world.all_reduce(1.0)
        engine = Engine([nn.Linear(2, 2)], world, loss=lambda output, targets: (output.sum(), 2.0),
                        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        before = world.num_calls
        engine.full_state_dict()
        return before, world.num_calls

    assert run_ranks(program, 2) == [(3, 4)] * 2
