"""Child processes: no file of the current folder takes the place of a package, and none outlives its deadline."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

import ranvier
from ranvier.data.worker_processes import map_in_order
from ranvier.launch import mpiexec
from ranvier.launch.start import rerun_command
from ranvier.system import child

POISON = "open('executed', 'a').write(__name__ + '\\n')\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with files that are named like packages."""
    for name in ("click", "rich", "datasets", "mpi4py", "multiprocessing", "torch"):
        (tmp_path / f"{name}.py").write_text(POISON)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def executed(folder):
    path = folder / "executed"
    return path.read_text().split() if path.exists() else []


def test_the_command_imports_nothing_from_the_current_folder(folder):
    done = subprocess.run([sys.executable, "-m", "ranvier", "train", "--help"], capture_output=True, text=True,
                          timeout=60, env=child.environment())
    assert done.returncode == 0, done.stderr
    assert not executed(folder)


def test_our_interpreters_import_nothing_from_the_current_folder(folder):
    done = child.run(child.python("-c", "import click, rich, ranvier; print(ranvier.__file__)"), seconds=60, check=True)
    assert done.stdout.strip() == ranvier.__file__ and not executed(folder)


def test_the_version_of_mpi_comes_from_the_package(folder, monkeypatch):
    monkeypatch.setattr(mpiexec, "find_mpiexec", lambda: "true")
    monkeypatch.setattr(mpiexec.importlib.util, "find_spec", lambda name: object())
    mpiexec.mpi_available()
    assert not executed(folder)


def test_processes_of_multiprocessing_import_nothing_from_the_current_folder(folder):
    assert list(map_in_order(abs, [-1, 2, -3], 2)) == [1, 2, 3]
    assert not executed(folder) and "PYTHONSAFEPATH" not in os.environ


def test_ranks_of_the_command_run_safely_and_those_of_a_program_as_the_program(monkeypatch):
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    for file, command, is_own in (("/env/bin/ranvier", ["/env/bin/ranvier", "train", "x"], True),
                                  ("/home/me/train.py", ["train.py"], False)):
        main.__file__ = file
        monkeypatch.setattr(sys, "orig_argv", ["python", *command])
        assert rerun_command() == [sys.executable, *(["-P"] if is_own else []), *command]


def test_only_ranks_inherit_the_secret(monkeypatch):
    monkeypatch.setenv("RANVIER_SECRET", "abc")
    assert "RANVIER_SECRET" not in child.environment() and child.environment(A="b")["A"] == "b"
    assert child.run([sys.executable, "-c", "import os; print(os.environ.get('RANVIER_SECRET'))"],
                     seconds=60).stdout == "None\n"


def runs(state):
    """Whether the process of this /proc/PID/stat exists and has not ended."""
    try:
        return state.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_command_and_what_it_has_started_end_at_the_deadline(tmp_path):
    began = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        child.run(["sh", "-c", "sleep 100 & echo $! > pid; wait"], seconds=0.5, folder=tmp_path)
    assert time.monotonic() - began < 30
    state = Path(f"/proc/{int((tmp_path / 'pid').read_text())}/stat")
    while time.monotonic() - began < 30 and runs(state):  # a killed process takes a moment
        time.sleep(0.05)
    assert not runs(state)


def test_a_failure_is_raised_on_request_and_nothing_is_read(tmp_path):
    assert child.run(["cat"], seconds=60).stdout == "", "standard input is empty"
    assert child.run(["false"], seconds=60).returncode == 1
    with pytest.raises(subprocess.CalledProcessError):
        child.run(["false"], seconds=60, check=True)


def test_a_process_ends_when_its_parent_does(tmp_path):
    program = ("import sys; from ranvier.system import child\n"
               f"print(child.start(['sleep', '100'], end_signal={int(signal.SIGKILL)}).pid, flush=True)")
    pid = int(child.run(child.python("-c", program), seconds=60).stdout)
    deadline = time.monotonic() + 30
    state = Path(f"/proc/{pid}/stat")
    while state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.02)
