"""The values that `auto` resolves to, and settings that cannot work here."""

import os
import sys
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
import torch

import ranvier
from ranvier.launch import start as launch
from ranvier.launch.launchers import Started, local_variables
from ranvier.mesh import Mesh
from tests.errors import raises

TORCHRUN = Started(launcher="torchrun", rank=0, size=2, local_rank=0, local_size=2)
MPIEXEC = Started(launcher="mpiexec", rank=0, size=2, local_rank=0, local_size=2, mpi=True)


@pytest.fixture
def with_mpi(monkeypatch):
    monkeypatch.setattr(launch, "mpi_available", lambda: None)
    monkeypatch.setattr(launch, "find_spec", lambda name: object())


@pytest.fixture
def without_mpi(monkeypatch):
    monkeypatch.setattr(launch, "mpi_available", lambda: "no mpiexec found")
    monkeypatch.setattr(launch, "find_spec", lambda name: None)


@pytest.mark.parametrize(("started", "device", "value", "reason"), [
    (None, "cpu", "mpi", "30 to 100 times"), (MPIEXEC, "cpu", "mpi", "30 to 100 times"),
    (TORCHRUN, "cpu", "torch", "each rank's MPI would see only itself"), (None, "cuda", "torch", "NCCL")])
def test_auto_transport_with_mpi(with_mpi, started, device, value, reason):
    choice = launch.choose_transport("auto", started, device)
    assert choice.value == value
    assert reason in choice.reason


@pytest.mark.parametrize(("started", "reason"), [(None, "no mpiexec found"), (MPIEXEC, "mpi4py is not installed")])
def test_auto_transport_without_mpi(without_mpi, started, reason):
    choice = launch.choose_transport("auto", started, "cpu")
    assert choice.value == "torch"
    assert reason in choice.reason


def test_our_own_ranks_take_what_their_parent_chose(without_mpi):
    started = Started(launcher="local", rank=1, size=2, mpi=True, reason="because")
    assert launch.choose_transport("auto", started, "cpu") == launch.Choice(value="mpi", reason="because")


def test_mpi_under_torchrun(with_mpi):
    with raises("mpi-under-launcher"):
        launch.choose_transport("mpi", TORCHRUN, "cpu")


def test_mpi_that_is_not_there(without_mpi):
    with raises("mpi-not-usable"):
        launch.choose_transport("mpi", None, "cpu")


@pytest.mark.parametrize(("devices", "ranks", "value"), [(0, 1, "cpu"), (1, 2, "cpu"), (2, 2, "cuda")])
def test_auto_device(monkeypatch, devices, ranks, value):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    assert launch.choose_device("auto", ranks).value == value
    assert launch.choose_device("cpu", ranks).value == "cpu"


def test_too_few_cuda_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with raises("too-few-local-devices", 2):
        launch.choose_device("cuda", 2)


@pytest.mark.parametrize(("arguments", "main", "expected"), [
    (["/usr/bin/python", "-O", "train.py", "--x", "1"], "train.py", ["-O", "train.py", "--x", "1"]),
    (["python", "-m", "my.package", "a b"], "/somewhere/my/package.py", ["-m", "my.package", "a b"]),
    (["python", "-c", "import ranvier"], None, ["-c", "import ranvier"])])
def test_rerun_command(monkeypatch, arguments, main, expected):
    _pretend(monkeypatch, arguments, main)
    assert launch.rerun_command() == [sys.executable, *expected]


@pytest.mark.parametrize(("arguments", "file", "name", "path", "expected"), [
    (["sub/t.py"], "/a/sub/t.py", None, "/a/sub", "/a"), (["./t.py"], "/a/t.py", None, "/a", "/a"),
    (["/a/t.py", "--entry", "t.py"], "/a/t.py", None, "/a", None), (["-c", "t"], None, None, "", None),
    (["sub/app"], "/a/sub/app/__main__.py", "__main__", "/a/sub/app", "/a"),
    (["app.pyz"], "/a/app.pyz/__main__.py", "__main__", "/a/app.pyz", "/a"),
    (["-m", "sub.t"], "/a/sub/t.py", "sub.t", "/a", "/a"), (["-m", "sub.t"], "/a/sub/t.py", "sub.t", "/b", None),
    (["-m", "sub.t"], "/a/sub/t.py", "sub.t", "/a", None)])
def test_the_folder_in_which_a_program_was_started(monkeypatch, arguments, file, name, path, expected):
    """The last program, started elsewhere, has put its own folder first among those of modules."""
    main = ModuleType("__main__")
    main.__spec__ = None if name is None else ModuleSpec(name, None)
    if file is not None:
        main.__file__ = file
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "orig_argv", ["python", *arguments])
    monkeypatch.setattr(sys, "path", [path, *([] if expected else [os.getcwd()])])
    assert launch._first_folder() == (None if expected is None else Path(expected))


@pytest.mark.parametrize(("arguments", "main", "prompt", "code"), [
    (["python"], None, False, "start-from-prompt"), (["python", "x.py"], "x.py", True, "start-from-prompt"),
    (["python", "-"], "<stdin>", False, "start-from-standard-input")], ids=["no script", "prompt", "standard input"])
def test_nothing_to_run_again(monkeypatch, arguments, main, prompt, code):
    _pretend(monkeypatch, arguments, main)
    if prompt:
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with raises(code) as error:
        launch.rerun_command()
    assert ("python file.py" if "-" in arguments else "ranvier.run(") in error.value.remedy


def test_a_notebook_has_nothing_to_run_again(monkeypatch):
    _pretend(monkeypatch, ["python", "-m", "ipykernel_launcher"], "ipykernel_launcher.py")
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    with raises("start-from-prompt"):
        launch.rerun_command()


def test_the_launchers_ranks_must_be_the_meshs(monkeypatch):
    for name in ("excepthook", "exit"):
        monkeypatch.setattr(sys, name, getattr(sys, name))
    for name, value in {"PMI_RANK": "0", "PMI_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    with raises("launcher-started-other-number", 4, 3):
        launch.start(Mesh(data=2, pipe=2))


@pytest.mark.parametrize("call", [launch.start, partial(ranvier.run, print)])
def test_sizes_beside_a_mesh_are_refused(call, monkeypatch):
    for name in ("excepthook", "exit"):
        monkeypatch.setattr(sys, name, getattr(sys, name))
    with raises("size-beside-mesh", value=4):
        call(mesh=Mesh(pipe=2), data=4)


@pytest.mark.parametrize(("mesh", "command"), [
    (Mesh(data=4, pipe=2), "torchrun --nproc-per-node 4 "), (Mesh(pipe=3), None)])
def test_torchrun_starts_as_many_ranks_on_each_node(mesh, command):
    """The number in its command is that of one node."""
    started = launch.Started(launcher="torchrun", rank=0, size=4, local_rank=0, local_size=2)
    with raises("launcher-started-other-number", mesh.size, 4) as caught:
        launch._check_size(mesh, started)
    assert ("torchrun --nproc-per-node" in caught.value.remedy) == bool(command)
    assert (command or "--mesh.data") in caught.value.remedy


def test_a_second_start_of_a_program_has_the_ranks_of_the_first(monkeypatch):
    for name in ("excepthook", "exit"):
        monkeypatch.setattr(sys, name, getattr(sys, name))
    for name, value in local_variables(0, 2, ("127.0.0.1", 1), "torch", "").items():
        monkeypatch.setenv(name, value)
    with raises("second-start", 4, 2):
        launch.start(Mesh(data=2, pipe=2))


def _pretend(monkeypatch, arguments, main):
    module = ModuleType("__main__")
    if main is not None:
        module.__file__ = main
    monkeypatch.setitem(sys.modules, "__main__", module)
    monkeypatch.setattr(sys, "orig_argv", arguments)
    monkeypatch.delattr(sys, "ps1", raising=False)
