"""Cores, host memory and network addresses of this machine, within affinity masks and cgroup limits.

A container on a machine of 96 cores may own 2 of them; asking the operating system alone would start 96 threads.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import sysconfig
from collections.abc import Sequence
from functools import cache
from math import ceil
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


@cache
def has_triton() -> bool:
    """Whether Triton can make kernels for a GPU. torch's builds for CUDA include it; to launch kernels it compiles C
    that includes Python's headers, and many containers have neither a compiler nor the headers."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # as Triton asks, for Debian's own
    headers = Path(sysconfig.get_path("include", scheme)) / "Python.h"
    return importlib.util.find_spec("triton") is not None and compiler is not None and headers.exists()


def available_cores(cgroup: Path = _CGROUP) -> int:
    """Cores this process may use: its affinity mask, within the cgroup's CPU quota (v1 or v2); at least 1."""
    return shared_cores([affinity()], cgroup)


def affinity() -> list[int]:
    """Indices of the cores that this process may use; all cores of the machine on systems without affinity masks."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def shared_cores(masks: Sequence[Sequence[int]], cgroup: Path = _CGROUP) -> int:
    """Number of cores that several processes may use together: the union of `masks`, within the quota; at least 1.

    masks: each process's `affinity()`. cgroup: mount point of the cgroup file system.
    """
    quota, cores = cpu_quota(cgroup), len({core for mask in masks for core in mask})
    return max(1, cores if quota is None else min(cores, ceil(quota)))


def cpu_quota(cgroup: Path = _CGROUP) -> float | None:
    """Cores that the cgroup grants (v1 or v2); None without a limit."""
    fields = _words(cgroup / "cpu.max")
    if len(fields) != 2:
        fields = _words(cgroup / "cpu/cpu.cfs_quota_us") + _words(cgroup / "cpu/cpu.cfs_period_us")
    if len(fields) != 2 or not all(field.isdigit() for field in fields) or int(fields[1]) == 0:
        return None  # "max 100000" (v2) and "-1 100000" (v1) mean no limit
    return int(fields[0]) / int(fields[1])


def memory_limit_bytes(cgroup: Path = _CGROUP) -> int | None:
    """Bytes of host memory that the cgroup grants (v1 or v2); None without a limit."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        fields = _words(cgroup / name)
        if fields and fields[0].isdigit() and int(fields[0]) < 1 << 60:  # v1 writes a huge number for "no limit"
            return int(fields[0])
    return None


def available_memory_bytes(cgroup: Path = _CGROUP) -> int:
    """Bytes of host memory that could be allocated now: free or reclaimable, within the cgroup's limit."""
    free, limit = int(psutil.virtual_memory().available), memory_limit_bytes(cgroup)
    if limit is None:
        return free
    return max(0, min(free, limit - _used_bytes(cgroup)))


def _used_bytes(cgroup: Path) -> int:
    """Bytes that the cgroup's processes use, without file pages that the kernel can reclaim."""
    used = _words(cgroup / "memory.current") or _words(cgroup / "memory/memory.usage_in_bytes") or ["0"]
    statistics = _words(cgroup / "memory.stat") or _words(cgroup / "memory/memory.stat")
    named = dict(zip(statistics[::2], statistics[1::2], strict=False))
    return max(0, int(used[0]) - int(named.get("total_inactive_file", named.get("inactive_file", "0"))))


def threads_per_rank(local_ranks: int) -> int:
    """Compute threads for each of `local_ranks` ranks that share this machine's cores."""
    return max(1, available_cores() // local_ranks)


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def address_towards(host: str) -> str | None:
    """This machine's IPv4 address on the route to `host`; None if there is no route, or it is the loopback."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing; the kernel chooses a route, and with it a local address
            address = probe.getsockname()[0]
    except OSError:
        return None
    return None if address.startswith("127.") else address


def interface_towards(host: str) -> str | None:
    """Name of the network interface on the route to `host`; None if there is no route, or it is the loopback."""
    address = address_towards(host)
    return next((name for name, found in psutil.net_if_addrs().items()
                 if any(one.address == address for one in found)), None)
