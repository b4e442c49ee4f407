"""The machine's clock is set while a run waits: time limits use the monotonic clock, and still hold."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.announced import LIMIT_SECONDS, LINUX
from tests.mpi import NEEDS_MPI

HERE = Path(__file__).parent
MPI = pytest.param("mpi", marks=[pytest.mark.mpi, NEEDS_MPI, pytest.mark.slow])


@pytest.fixture(scope="module")
def preloaded(tmp_path_factory):
    """The environment of a program whose wall clock jumps."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    library = tmp_path_factory.mktemp("clock") / "wall_clock.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, HERE / "wall_clock.c", "-ldl"], check=True,
                   timeout=60)
    return lambda jump, after: {"LD_PRELOAD": str(library), "WALL_CLOCK_JUMP": str(jump),
                                "WALL_CLOCK_AFTER": str(after)}


@LINUX
def test_the_library_sets_the_wall_clock_and_no_other(preloaded):
    program = ("import sys, time; wall, steady = float(sys.argv[1]), time.monotonic(); time.sleep(1.5)\n"
               "print(time.time() - wall, time.monotonic() - steady)")
    done = subprocess.run([sys.executable, "-c", program, str(time.time())], env=os.environ | preloaded(1000, 1),
                          text=True, capture_output=True, timeout=60)
    wall, steady = map(float, done.stdout.split())
    assert 1000 < wall < 1060 and 1 < steady < 60, done


@LINUX
@pytest.mark.slow
@pytest.mark.parametrize("jump", [7 * 86400, -7 * 86400])
@pytest.mark.parametrize("transport", ["torch", MPI])
def test_a_wait_ends_at_its_limit_when_the_clock_is_set(start_ranks, preloaded, jump, transport):
    """The clock jumps while the ranks start, and again while one rank waits for the other, which is stopped."""
    started = [start_ranks(sys.executable, HERE / "ending.py", how, transport, 0, 4, environ=preloaded(jump, after))
               for how, after in (("meet", 2), ("end", 0))]
    for each in started:
        each.wait_for_ranks()
        os.kill(each.ranks[1].pid, signal.SIGSTOP)
    for each in started:
        assert each.process.wait(4 + 10 + LIMIT_SECONDS) == 2, each.text
        each.assert_ranks_end()
