"""Whatever started the ranks is killed: the ranks end on their own, within seconds."""

import errno
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ranvier.launch.heartbeat import exit_with_launcher
from ranvier.launch.launchers import Started
from ranvier.launch.mpiexec import find_mpiexec
from ranvier.system.processes import Process, ancestors_with, descendants
from tests.launch.announced import LIMIT_SECONDS, LINUX, torchrun
from tests.mpi import NEEDS_MPI

SCRIPT = str(Path(__file__).parent / "script.py")
SHELL = ["bash", "-c", '"$@"; true', "-"]
"""A shell between the launcher and its ranks, so that they are not the launcher's children."""
BETWEEN = pytest.mark.parametrize("between", [SHELL, pytest.param([], marks=pytest.mark.slow)],
                                  ids=["shell", "nothing"])


@LINUX
@BETWEEN
def test_torchruns_agent_is_killed(start_ranks, between):
    """By then the ranks have chosen the launcher's transport."""
    each = start_ranks(*torchrun("--no-python", *between, sys.executable, SCRIPT, "hang", "auto"))
    each.wait_for_ranks()
    assert re.findall(r"^rank \d pid \d+ (\w+ \w+)", each.text, re.MULTILINE) == ["torchrun torch"] * 2
    assert each.text.count("transport torch: torchrun started the ranks") == 1
    each.process.kill()
    each.assert_ranks_end()
    assert re.search(r"^ranvier: rank \d ends: (torchrun's agent is gone \(process \d+\)|the store that "
                     r"torchrun's agent hosts is gone)", each.text, re.MULTILINE), each.text


@LINUX
@pytest.mark.mpi
@NEEDS_MPI
@BETWEEN
def test_mpiexecs_proxy_is_killed(start_ranks, between):
    each = start_ranks(find_mpiexec(), "-n", 2, *between, sys.executable, SCRIPT, "hang", "auto")
    each.wait_for_ranks()
    assert re.findall(r"^rank \d pid \d+ (\w+ \w+)", each.text, re.MULTILINE) == ["mpiexec mpi"] * 2
    above = each.ranks[0].handle.parents()
    proxy = above[1] if between else above[0]
    assert proxy.ppid() == each.process.pid
    os.kill(proxy.pid, signal.SIGKILL)
    each.assert_ranks_end()


@LINUX
@pytest.mark.mpi
@NEEDS_MPI
@pytest.mark.slow
def test_mpiexec_of_our_own_starter_is_killed(start_ranks):
    started = [start_ranks(sys.executable, SCRIPT, "hang", "mpi") for _ in range(2)]
    for each, number in zip(started, (1, 2), strict=True):
        each.wait_for_ranks()
        os.kill(each.ranks[0].handle.parents()[1 if number == 1 else 0].pid, signal.SIGKILL)
    for each in started:
        each.assert_ranks_end()
        assert each.process.wait(LIMIT_SECONDS) == 1


def slurm(rank):
    return {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank), "SLURM_NTASKS": "2",
            "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0", "SLURM_TASKS_PER_NODE": "2",
            "SLURM_STEP_NODELIST": "localhost"}


@LINUX
@pytest.mark.parametrize(("how", "code"), [("hang", 1), pytest.param("collective", 2, marks=pytest.mark.slow)])
def test_the_store_goes_with_rank_0_under_srun(start_ranks, how, code):
    """Tasks of srun do not know of each other, and Slurm leaves the remaining ones running. In a collective, rank 1
    gets the library's error first."""
    first, second = (start_ranks(sys.executable, SCRIPT, how, "torch", environ=slurm(rank)) for rank in range(2))
    for each in (first, second):
        each.wait_for_ranks(1)
    if how == "hang":
        second.wait_for_text("past the barrier")
    first.process.kill()
    second.assert_ranks_end()
    assert re.search(r"^ranvier: rank 1 ends: the store that rank 0 hosts is gone \(", second.text, re.MULTILINE)
    assert second.process.wait() == code


@LINUX
@BETWEEN
def test_slurms_step_daemon_is_killed(tmp_path, between):
    """A script starts tasks in place of the daemon."""
    program = ("import subprocess, sys, os, time\n"
               f"environ = os.environ | {slurm(0)!r}\n"
               "subprocess.Popen(sys.argv[1:], env=environ)\n"
               "time.sleep(100)\n")
    task = ("import os, sys, time\nfrom ranvier.launch.launchers import detect\n"
            "from ranvier.launch.heartbeat import exit_with_launcher\n"
            "exit_with_launcher(detect(os.environ))\nopen(sys.argv[1], 'w').write(str(os.getpid()))\ntime.sleep(100)\n")
    daemon = subprocess.Popen([sys.executable, "-c", program, *between, sys.executable, "-c", task,
                               str(tmp_path / "pid")])
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        pid = int((tmp_path / "pid").read_text())
        rank = Process.find(pid)
        assert rank in descendants(daemon.pid)
    finally:
        daemon.kill()
        daemon.wait()
    while rank.is_running:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_launcher_that_lives_ends_nothing(monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "0")
    exit_with_launcher(Started(launcher="srun", rank=0, size=2))
    time.sleep(1.2)


def test_a_process_that_cannot_be_seen_runs():
    """This process has no free file descriptor to look at its launcher, which has not ended for that reason."""
    process, (soft, hard) = Process.find(os.getppid()), resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        runs, is_stopped = process.is_running, process.is_stopped
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert runs and not is_stopped


@LINUX
def test_a_process_runs_until_it_has_ended_and_may_be_stopped():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    process = Process.find(child.pid)
    try:
        assert process.is_running and not process.is_stopped
        assert process in descendants(os.getpid()) and process == Process.find(child.pid) != Process.find(os.getpid())
        child.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 10
        while not process.is_stopped:
            assert time.monotonic() < deadline
    finally:
        child.kill()
    while process.is_running:
        assert time.monotonic() < deadline + 20
    assert not process.is_running, "a zombie does not run"
    child.wait()
    assert Process.find(child.pid) is None and process.num_threads is None and process.variable("PATH") is None


def test_ancestors_end_with_the_first_without_the_variable():
    found = ancestors_with("NOBODY_HAS_THIS_VARIABLE")
    assert [process.pid for process in found] == [os.getppid()]


@LINUX
def test_a_process_that_may_not_be_read_hides_no_other(monkeypatch):
    """A process of another user under hidepid=1: its entry in /proc is listed but cannot be opened."""
    child, ancestors = Process.find(os.getpid()), psutil.Process().parents()
    read = psutil._pslinux.open_binary

    def refused(name):
        if str(name).startswith(f"/proc/{ancestors[-1].pid}/"):
            raise PermissionError(errno.EPERM, "not permitted", name)
        return read(name)

    monkeypatch.setattr(psutil._pslinux, "open_binary", refused)
    assert child in descendants(os.getppid())
    assert [process.pid for process in ancestors_with("PATH")][:1] == [os.getppid()]
