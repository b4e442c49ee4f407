"""What this machine offers one process: cores and host memory, after affinity masks and cgroup limits.

A container on a machine of 96 cores may own 2 of them; asking the operating system alone would start 96 threads.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from math import ceil
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def available_cores(cgroup: Path = _CGROUP) -> int:
    """Cores this process may use: its affinity mask, within the cgroup's CPU quota (v1 or v2); at least 1."""
    return shared_cores([affinity()], cgroup)


def affinity() -> list[int]:
    """The numbers of the cores that this process may use; all of the machine's where that cannot be said."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def shared_cores(masks: Sequence[Sequence[int]], cgroup: Path = _CGROUP) -> int:
    """Cores that processes of this machine have together: those of any one's mask, within the quota; at least 1."""
    quota, cores = cpu_quota(cgroup), len({core for mask in masks for core in mask})
    return max(1, cores if quota is None else min(cores, ceil(quota)))


def cpu_quota(cgroup: Path = _CGROUP) -> float | None:
    """Cores that the cgroup grants, or None where it sets no limit."""
    fields = _words(cgroup / "cpu.max")
    if len(fields) != 2:
        fields = _words(cgroup / "cpu/cpu.cfs_quota_us") + _words(cgroup / "cpu/cpu.cfs_period_us")
    if len(fields) != 2 or not all(field.isdigit() for field in fields) or int(fields[1]) == 0:
        return None  # "max 100000" and "-1 100000" are no limit
    return int(fields[0]) / int(fields[1])


def memory_limit_bytes(cgroup: Path = _CGROUP) -> int | None:
    """Host memory that the cgroup grants, or None where it sets no limit."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        fields = _words(cgroup / name)
        if fields and fields[0].isdigit() and int(fields[0]) < 1 << 60:  # v1 writes a huge number for "no limit"
            return int(fields[0])
    return None


def available_memory_bytes(cgroup: Path = _CGROUP) -> int:
    """Host memory that could be allocated now: what is free or can be freed, within the cgroup's limit."""
    free, limit = psutil.virtual_memory().available, memory_limit_bytes(cgroup)
    if limit is None:
        return free
    return max(0, min(free, limit - _used_bytes(cgroup)))


def _used_bytes(cgroup: Path) -> int:
    """What the cgroup's processes hold, without file pages that the kernel can drop."""
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
    """This machine's address on the way to `host`; None where that is not known, or is the loopback's."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing: the kernel picks the way, and with it an address of ours
            address = probe.getsockname()[0]
    except OSError:
        return None
    return None if address.startswith("127.") else address


def interface_towards(host: str) -> str | None:
    """The network interface through which this machine reaches `host`, by name; None where that is not known, or is the
    machine itself by its loopback address."""
    address = address_towards(host)
    return next((name for name, found in psutil.net_if_addrs().items()
                 if any(one.address == address for one in found)), None)
