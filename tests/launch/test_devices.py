"""The devices of ranks: all ranks choose them together, from what each rank sees."""

import ast
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

import ranvier
from benchmarks.gpu.models.devices import JOBS, ranks
from ranvier.config.run import Comm, Launch
from ranvier.errors import ConfigError, LaunchError
from ranvier.launch import start as launch
from ranvier.launch.cuda_environment import cuda_defaults
from ranvier.launch.devices import choose_devices, exchange, visible_devices
from ranvier.launch.launchers import Started
from ranvier.mesh import Mesh
from tests.errors import raises
from tests.fake_cuda import BareCall, FakeCuda

BY_NAME = {job.name: ranks(job) for job in JOBS}
TORCHRUN, GPUS_PER_TASK = BY_NAME["torchrun, 4 ranks, 4 devices"], BY_NAME["srun --gpus-per-task=1, 4 tasks a node"]


def test_each_rank_has_a_device_of_its_own():
    assert choose_devices(TORCHRUN).devices == (0, 1, 2, 3)
    assert choose_devices(GPUS_PER_TASK).devices == (0, 0, 0, 0)


def test_ranks_that_see_overlapping_devices():
    """Rank 0 sees both devices and rank 1 only the first, so rank 0 takes the second."""
    two = [replace(TORCHRUN[0], devices=("a", "b"), local_size=2), replace(TORCHRUN[1], devices=("a",), local_size=2)]
    assert choose_devices(two).devices == (1, 0)


def test_machines_without_devices():
    """Every rank of every machine has an entry, even if machines have different numbers of ranks."""
    machines = [replace(TORCHRUN[rank], machine="first" if rank < 1 else "second", devices=()) for rank in range(4)]
    assert choose_devices(machines).devices == (None,) * 4
    assert choose_devices(machines).reason == "no CUDA device found"


def test_a_machine_without_devices_among_others_is_an_error_on_every_rank():
    with raises("devices-differ-by-machine", 2, 3, 0, 1):
        choose_devices(BY_NAME["2 nodes, one with a broken driver"])


def test_cuda_that_is_set_and_not_there():
    with raises("too-few-devices", 4, 2):
        choose_devices([replace(seen, setting="cuda") for seen in BY_NAME["4 ranks, 2 devices"]])


@pytest.mark.parametrize(("field", "value", "kind", "error"), [
    ("setting", "cpu", ConfigError, ("ranks-differ-in-setting", 2)),
    ("transport", "mpi", ConfigError, ("ranks-differ-in-setting", 2)),
    ("torch", "2.13.0", LaunchError, ("ranks-differ-in-version", 2)),
    ("nccl", "2.20.0", LaunchError, ("ranks-differ-in-version", 2))])
def test_what_differs_is_named(field, value, kind, error):
    with raises(*error):
        choose_devices([*TORCHRUN[:2], replace(TORCHRUN[2], **{field: value}), TORCHRUN[3]])


def test_sights_travel_over_the_store():
    store, found = HashStore(), {}

    def rank(number):
        found[number] = exchange(TORCHRUN[number], 4, store)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert all(found[number] == TORCHRUN for number in range(4))


def test_a_rank_that_never_starts_is_named(monkeypatch):
    from datetime import timedelta

    monkeypatch.setattr("ranvier.launch.devices.TELL_SECONDS", 0.1)
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.2))
    with raises("devices-not-reported", 1):
        exchange(TORCHRUN[0], 2, store)


def test_what_a_process_sees():
    with FakeCuda(devices=2):
        found = visible_devices(rank=3, local_rank=1, local_size=2, setting="auto", transport="auto")
        assert found.devices == ("GPU-0", "GPU-1")
        assert not visible_devices(rank=3, local_rank=1, local_size=2, setting="cpu", transport="auto").devices
    assert not visible_devices(rank=3, local_rank=1, local_size=2, setting="auto", transport="auto").devices


def test_a_rank_takes_its_device_before_it_connects(monkeypatch):
    """Rank 1 of 2 computes on device 1 from the start, even if a library names no device."""
    monkeypatch.setattr(launch, "open_store", lambda started, seconds: (None, HashStore()))
    monkeypatch.setattr(launch, "exchange", lambda seen, size, store: [
        replace(seen, rank=0, local_rank=0), seen])
    connected = []
    monkeypatch.setattr(launch, "_connect", lambda started, transport, collectives, place, *rest: connected.append(
        (transport, place, torch.cuda.current_device())) or (type("Backend", (), {"rank": 1, "size": 2})(), None))
    monkeypatch.setattr(launch.os, "environ", dict(os.environ))
    started = Started(launcher="torchrun", rank=1, size=2, local_rank=1, local_size=2)
    with FakeCuda(devices=2):
        world = launch._connect_rank(Mesh(data=2), started, Comm(), Launch(threads=1), None)
    assert connected == [("torch", torch.device("cuda", 1), 1)]
    assert world.device == torch.device("cuda", 1)
    assert launch.os.environ["CUDA_MODULE_LOADING"] == "EAGER"


@pytest.mark.parametrize(("local_rank", "machines", "neighbours"), [
    (2, "aaaa", (0, 1, 2, 3)),  # Open MPI 5 numbers ranks 0 to 3 of a machine 0, 2, 1, 3
    (0, "abab", (1, 3)),        # srun --distribution=cyclic
    (1, "aabb", (0, 1))])
def test_a_rank_finds_the_ranks_of_its_machine_in_any_order(monkeypatch, local_rank, machines, neighbours):
    def exchange(seen, size, store):
        mine = machines[seen.rank]
        return [replace(seen, rank=rank, machine=seen.machine if machine == mine else machine)
                for rank, machine in enumerate(machines)]

    monkeypatch.setattr(launch, "open_store", lambda started, seconds: (None, HashStore()))
    monkeypatch.setattr(launch, "exchange", exchange)
    monkeypatch.setattr(launch, "_connect", lambda *args: (type("Backend", (), {"rank": 1, "size": 4})(), None))
    monkeypatch.setattr(launch.os, "environ", dict(os.environ))
    started = Started(launcher="torchrun", rank=1, size=4, local_rank=local_rank,
                      local_size=machines.count(machines[1]))
    world = launch._connect_rank(Mesh(data=2, pipe=2), started, Comm(transport="torch"),
                                 Launch(threads=1, device="cpu"), None)
    assert world.local_ranks == neighbours


def test_defaults_of_the_environment_give_way_to_the_users():
    assert cuda_defaults({}) == {"CUDA_MODULE_LOADING": "EAGER",
                                 "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert cuda_defaults({"CUDA_MODULE_LOADING": "LAZY", "PYTORCH_ALLOC_CONF": "x"}) == {}


def test_our_own_ranks_start_with_the_defaults(monkeypatch):
    """The supervisor gives them to its ranks, whose torch may read them when it is imported."""
    from ranvier.launch import supervision

    given = []
    monkeypatch.setattr(supervision, "supervise", lambda mesh, transport, reason, command, variables, *rest, **more: (
        given.append(variables) or supervision.Outcome(code=0)))
    for name in ("CUDA_MODULE_LOADING", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    settings = Launch(threads=1, device="cpu")
    assert launch._run_local_ranks(Mesh(data=2), "torch", settings, ["x"], None, False, None) == 0
    assert given[0]["CUDA_MODULE_LOADING"] == "EAGER" and "expandable" in given[0]["PYTORCH_CUDA_ALLOC_CONF"]


# ---------------------------------------------------------------------- named devices

NEED_A_DEVICE = {"synchronize", "current_stream", "default_stream", "mem_get_info", "memory_allocated",
                 "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_stats", "get_device_name",
                 "reset_peak_memory_stats", "get_device_properties", "get_rng_state", "set_rng_state", "Stream",
                 "get_device_capability"}
ROOT = Path(ranvier.__file__).parent


def bare_calls(path):
    """Calls of these functions without a device, and references to these functions that are passed on."""
    source = path.read_text()
    if "torch.cuda" not in source:
        return []
    tree = ast.parse(source)
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    handed = {id(arg) for node in ast.walk(tree) if isinstance(node, ast.Call) and len(node.args) > 1
              for arg in node.args[:1] if getattr(node.func, "id", "") == "partial"}
    annotations = {id(part) for node in ast.walk(tree) for field in ("annotation", "returns", "slice")
                   if isinstance(getattr(node, field, None), ast.AST) for part in ast.walk(getattr(node, field))}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in NEED_A_DEVICE and ast.unparse(node.value) == "torch.cuda":
            call = called.get(id(node))
            needed = 2 if node.attr == "set_rng_state" else 1
            if call is None and id(node) not in handed | annotations:
                found.append(f"{path.name}:{node.lineno} {node.attr}")
            elif call is not None and len(call.args) + len(call.keywords) < needed:
                found.append(f"{path.name}:{node.lineno} {node.attr}()")
    return found


@pytest.mark.parametrize("folder", [ROOT, ROOT.parent / "benchmarks"], ids=lambda folder: folder.name)
def test_every_call_names_its_device(folder):
    assert [call for path in sorted(folder.rglob("*.py")) for call in bare_calls(path)] == []


def test_bare_calls_are_noticed(tmp_path):
    path = tmp_path / "bad.py"
    path.write_text("import torch\ntorch.cuda.synchronize()\nf = torch.cuda.current_stream\ntorch.cuda.Stream(d)\n"
                    "def g(s: torch.cuda.Stream) -> None: ...\n")
    assert sorted(bare_calls(path)) == ["bad.py:2 synchronize()", "bad.py:3 current_stream"]
    with FakeCuda():
        for call in (torch.cuda.synchronize, torch.cuda.current_stream, torch.cuda.Stream, torch.cuda.mem_get_info):
            with pytest.raises(BareCall):
                call()


def test_a_checkpoints_copies_wait_for_the_tensors_device():
    from ranvier.checkpoint.files import host_copies

    with FakeCuda(devices=2) as cuda:
        (copy,) = host_copies([torch.arange(3.0, device="cuda:1")], [])
        assert copy.tolist() == [0.0, 1.0, 2.0] and not copy.is_cuda
        assert cuda.calls["current_stream", 1] == 1 and not cuda.calls["current_stream", 0]
