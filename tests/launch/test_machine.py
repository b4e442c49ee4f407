"""Cores and memory within a container's limits."""

import os

import pytest
from torch.distributed import HashStore

from ranvier.launch import start as launch
from ranvier.launch.launchers import Started
from ranvier.system import machine
from ranvier.system.machine import available_cores, cpu_quota, interface_towards, memory_limit_bytes, threads_per_rank


@pytest.mark.parametrize(("files", "quota"), [
    ({"cpu.max": "150000 100000\n"}, 1.5), ({"cpu.max": "max 100000\n"}, None), ({}, None),
    ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4.0),
    ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None)])
def test_cpu_quota(tmp_path, files, quota):
    _write(tmp_path, files)
    assert cpu_quota(tmp_path) == quota


def test_cores_are_the_smaller_of_mask_and_quota(tmp_path):
    mask = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert available_cores(tmp_path) == mask
    _write(tmp_path, {"cpu.max": "50000 100000"})
    assert available_cores(tmp_path) == 1


@pytest.mark.parametrize(("files", "limit"), [
    ({"memory.max": "1073741824\n"}, 1 << 30), ({"memory.max": "max\n"}, None), ({}, None),
    ({"memory/memory.limit_in_bytes": "2048\n"}, 2048),
    ({"memory/memory.limit_in_bytes": "9223372036854771712\n"}, None)])
def test_memory_limit(tmp_path, files, limit):
    _write(tmp_path, files)
    assert memory_limit_bytes(tmp_path) == limit


def test_ranks_share_the_cores_and_each_has_one():
    assert threads_per_rank(1) == available_cores()
    assert threads_per_rank(10_000) == 1


def _write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def test_no_interface_leads_to_the_machine_itself_or_to_nowhere():
    assert interface_towards("127.0.0.1") is None and interface_towards("no-such-host.invalid") is None


def test_an_interface_is_named_by_its_address(monkeypatch):
    class Probe:
        def __init__(self, *args): pass
        def __enter__(self): return self
        def __exit__(self, *args): pass
        def connect(self, place): assert place[0] == "node0"
        def getsockname(self): return ("10.0.0.2", 12345)

    address = type("address", (), {})
    found = {}
    for name, text in [("lo", "127.0.0.1"), ("eth3", "10.0.0.2"), ("ib0", "10.9.0.2")]:
        found[name] = [address()]
        found[name][0].address = text
    monkeypatch.setattr("ranvier.system.machine.socket.socket", Probe)
    monkeypatch.setattr("ranvier.system.machine.psutil.net_if_addrs", lambda: found)
    assert interface_towards("node0") == "eth3"


def test_the_interface_of_rank_0s_machine_leads_to_the_others(monkeypatch):
    """On that machine its own name often means the loopback."""
    store, chosen = HashStore(), {}
    store.set("address/1", "")
    for rank in (2, 3, 0, 1):  # one after another, so ranks with an address come first
        with monkeypatch.context() as patch:
            patch.setattr(launch.os, "environ", {})
            patch.setattr(launch, "address_towards", lambda host, rank=rank: None if rank < 2 else "10.0.0.2")
            patch.setattr(launch, "interface_towards", lambda host: {"first": "eth1", "10.0.0.2": "eth0"}[host])
            launch._choose_interface(Started(launcher="torchrun", rank=rank, size=4, local_rank=rank % 2, local_size=2,
                                             master=("first", 1)), store)
            chosen[rank] = launch.os.environ.get("GLOO_SOCKET_IFNAME")
    assert chosen == {0: "eth0", 1: "eth0", 2: "eth1", 3: "eth1"}


@pytest.mark.parametrize("lacks", ["triton", "compiler", "headers", None])
def test_kernels_need_triton_a_compiler_and_pythons_headers(lacks, monkeypatch, tmp_path):
    """If one of them is missing, torch's operations compute."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None if lacks == "triton" else name)
    monkeypatch.setattr(machine.shutil, "which", lambda name: None if lacks == "compiler" else f"/bin/{name}")
    monkeypatch.setattr(machine.sysconfig, "get_path", lambda name, scheme: str(tmp_path))
    if lacks != "headers":
        (tmp_path / "Python.h").touch()
    assert machine.has_triton.__wrapped__() is (lacks is None)
