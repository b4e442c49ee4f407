"""Real processes under every available launcher: they start, agree, fail, and leave nothing behind."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ranvier.launch.mpiexec import find_mpiexec
from ranvier.system.processes import Process
from tests.mpi import MPI, NEEDS_MPI, UNUSABLE

SCRIPT = str(Path(__file__).parent / "script.py")
DEADLINE_SECONDS = 120
SLOW_MPI = pytest.param("mpi", marks=[*MPI.marks, pytest.mark.slow])
HERE = ["torch"] if UNUSABLE else ["torch", "mpi"]
"""The transports of this machine. Tests that mostly wait run over all of them at the same time."""
MOSTLY_TORCH = pytest.mark.parametrize("transport", ["torch", SLOW_MPI])
RANK_1 = "rank 1 (data 0, pipe 1, row 0, col 0)"


class Started:
    """A command under test, its output so far, and the pids that its ranks have announced."""

    def __init__(self, *command):
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COVERAGE"))}
        # Tests that run in the background may ignore Ctrl-C, which children inherit.
        self.process = subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                        env=environ | {"TORCH_CPP_LOG_LEVEL": "ERROR"},
                                        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
        self.stdout = ""

    def wait_for_ranks(self, count=2):
        while len(self.pids) < count:
            line = self.process.stdout.readline()
            assert line, f"ended before all ranks were there: {self.stdout}\n{self.process.stderr.read()}"
            self.stdout += line
        return self

    def finish(self):
        """Exit code, standard output, standard error; fails if a rank is left running."""
        out, err = self.process.communicate(timeout=DEADLINE_SECONDS)
        self.stdout += out
        self.assert_all_gone()
        return self.process.returncode, self.stdout, err

    def assert_all_gone(self):
        deadline = time.monotonic() + DEADLINE_SECONDS
        while left := [pid for pid in self.pids if Process.find(pid) is not None]:
            assert time.monotonic() < deadline, f"left behind: {left}"
            time.sleep(0.05)

    @property
    def pids(self):
        return [int(pid) for pid in re.findall(r"pid (\d+)", self.stdout)]


@pytest.fixture
def start():
    started = []

    def begin(*command):
        started.append(Started(*command))
        return started[-1]

    yield begin
    for each in started:
        each.process.kill()
        each.process.communicate()


def ranks_in(text):
    return sorted(re.findall(r"^rank (\d) pid \d+ (\w+) (\w+) threads \d+$", text, re.MULTILINE))


@pytest.mark.slow
@MOSTLY_TORCH
@pytest.mark.parametrize("how", ["succeed", "late"])
def test_plain_python_starts_the_ranks_and_ends_with_them(start, transport, how):
    code, out, err = start(sys.executable, SCRIPT, how, transport).finish()
    assert (code, err) == (0, "")
    assert ranks_in(out) == [("0", "local", transport), ("1", "local", transport)]


@pytest.mark.slow
def test_auto_says_what_it_chose_and_why(start):
    code, out, _ = start(sys.executable, SCRIPT, "succeed", "auto").finish()
    assert code == 0
    name = "torch" if UNUSABLE else "mpi"
    assert ranks_in(out) == [("0", "local", name), ("1", "local", name)]
    assert len(re.findall(rf"^transport {name}.*: .*MPI|^transport {name}.*faster than Gloo", out, re.MULTILINE)) == 1
    assert len(re.findall(r"^device cpu: .* threads for each of 2 ranks on \d+ cores: \d", out, re.MULTILINE)) == 1


@pytest.mark.parametrize("command", [["sub/gone.py"], pytest.param(["-m", "sub.gone"], marks=pytest.mark.slow)])
def test_ranks_start_where_a_program_was_started_that_has_left_the_folder(tmp_path, command):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/gone.py").write_text(
        "import os, sys\nsys.stderr.write(os.getcwd() + chr(10))\nos.chdir('sub')\nimport ranvier\n"
        "ranvier.start(data=2, transport='torch')\n")
    done = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, sorted(done.stderr.split())) == (0, [str(tmp_path)] * 3)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raise", pytest.param("thread", marks=pytest.mark.slow)])
def test_a_rank_that_raises(start, how):
    for started in [start(sys.executable, SCRIPT, how, transport) for transport in HERE]:
        code, _, err = started.finish()
        assert code == 1
        assert err.count("Traceback (most recent call last)") == 1
        assert err.count(f"{RANK_1} failed:\n") == 1
        assert err.count("ValueError: the user's own fault" if how == "raise" else "KeyError: 'nothing'") == 1
        assert err.splitlines()[-1] == f"ranvier: {RANK_1} exited with code 1; the other ranks were terminated"


@pytest.mark.slow
@MOSTLY_TORCH
def test_a_rank_that_refuses_its_settings(start, transport):
    code, _, err = start(sys.executable, SCRIPT, "refuse", transport).finish()
    assert (code, err) == (2, f"ranvier: error: batch.global-size: cannot be (got 3). Set another. [{RANK_1}]\n")


@pytest.mark.slow
@MOSTLY_TORCH
def test_a_rank_that_exits_early(start, transport):
    code, _, err = start(sys.executable, SCRIPT, "exit", transport).finish()
    assert (code, err) == (1, f"ranvier: {RANK_1} exited with code 5; the other ranks were terminated\n")


@pytest.mark.slow
def test_a_rank_that_is_killed(start):
    for started in [start(sys.executable, SCRIPT, "kill", transport) for transport in HERE]:
        code, _, err = started.finish()
        assert code == 1
        assert f"ranvier: {RANK_1} was killed by SIGKILL" in err.splitlines()[-1]
        assert "BAD TERMINATION" not in err


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code", "text"), [
    (signal.SIGINT, 130, "interrupted"),
    pytest.param(signal.SIGTERM, 143, "stopped by SIGTERM", marks=pytest.mark.slow)])
def test_stopping_the_command_stops_its_ranks(start, number, code, text):
    for started in [start(sys.executable, SCRIPT, "hang", transport) for transport in HERE]:
        started.wait_for_ranks().process.send_signal(number)
        assert started.finish()[::2] == (code, f"ranvier: {text}\n")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel")
def test_killing_the_command_outright_ends_its_ranks(start):
    for started in [start(sys.executable, SCRIPT, "hang", transport) for transport in HERE]:
        started.wait_for_ranks().process.kill()
        started.assert_all_gone()


def torchrun(num_ranks, *command):
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", num_ranks, *command]


@pytest.mark.slow
def test_torchrun(start):
    code, out, _ = start(*torchrun(2, SCRIPT, "succeed", "auto")).finish()
    assert code == 0
    assert ranks_in(out) == [("0", "torchrun", "torch"), ("1", "torchrun", "torch")]
    assert out.count("transport torch: torchrun started the ranks") == 1


@pytest.mark.slow
def test_a_rank_that_raises_under_torchrun(start):
    code, _, err = start(*torchrun(2, SCRIPT, "raise", "auto")).finish()
    assert code != 0
    assert err.count(f"{RANK_1} failed:\n") == 1
    assert err.count("ValueError: the user's own fault") == 1


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "transport", "message"), [
    pytest.param(2, "mpi", r"start\(transport=\.\.\.\): cannot work under torchrun", marks=pytest.mark.slow),
    (3, "torch", "needs 2 ranks .* but torchrun started 3")])
def test_settings_that_torchrun_cannot_serve_are_told_once(start, num_ranks, transport, message):
    code, _, err = start(*torchrun(num_ranks, SCRIPT, "succeed", transport)).finish()
    assert code != 0
    assert len(re.findall(rf"^ranvier: error: .*{message}", err, re.MULTILINE)) == 1
    assert "ConfigError" not in err


@pytest.mark.mpi
@NEEDS_MPI
@pytest.mark.parametrize(("transport", "backend"), [
    pytest.param("auto", "mpi", marks=pytest.mark.slow), pytest.param("torch", "torch", marks=pytest.mark.slow)])
def test_mpiexec(start, transport, backend):
    code, out, err = start(find_mpiexec(), "-n", 2, sys.executable, SCRIPT, "succeed", transport).finish()
    assert (code, err) == (0, "")
    assert all(f"rank {rank}" in out for rank in (0, 1))
    assert out.count(f"mpiexec {backend} threads") == 2


@pytest.mark.mpi
@NEEDS_MPI
@pytest.mark.parametrize(("how", "expected"), [
    ("raise", 1), pytest.param("refuse", 2, marks=pytest.mark.slow)])
def test_a_rank_that_fails_under_mpiexec(start, how, expected):
    code, _, err = start(find_mpiexec(), "-n", 2, sys.executable, SCRIPT, how, "mpi").finish()
    assert code == expected
    assert err.count(RANK_1) == 1


def test_a_program_on_standard_input_has_one_rank_without_a_second_process(tmp_path):
    program = ("import os, ranvier\n"
               "try:\n"
               "    ranvier.start(pipe=2)\n"
               "except ranvier.LaunchError as error:\n"
               "    print(error)\n"
               "world = ranvier.start()\n"
               "print(world.rank, world.size, world.mesh, os.getppid())\n"
               "raise ranvier.DataError('is empty', where='text', remedy='Write some.')\n")
    done = subprocess.run([sys.executable, "-"], input=program, text=True, capture_output=True,
                          timeout=DEADLINE_SECONDS, cwd=tmp_path)
    refused, alone = done.stdout.splitlines()
    assert refused.startswith("launch: cannot start ranks from ")
    assert alone == f"0 1 data 1 x pipe 1 x row 1 x col 1 {os.getpid()}"
    assert (done.returncode, done.stderr) == (2, "ranvier: error: text: is empty. Write some.\n")


@pytest.mark.slow
@pytest.mark.mpi
@NEEDS_MPI
def test_a_folder_that_holds_a_run_is_refused_under_mpiexec(start, tmp_path):
    (tmp_path / "run.toml").write_text("")
    command = [sys.executable, "-m", "ranvier", "train", "gpt-tiny", "--mesh.pipe", "1", "--run-dir", tmp_path]
    code, _, err = start(find_mpiexec(), "-n", 2, *command).finish()
    assert code == 2
    assert err.count("run-dir: contains the results of another run") == 1
