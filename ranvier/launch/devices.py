"""The device of each rank, on which all ranks agree over the store before they connect.

    each rank    publishes what it sees: its CUDA devices by UUID, and the versions of torch and NCCL
    all ranks    read what every rank has published, and come to the same choice or to the same error

No rank can choose for itself. Slurm's `--gpus-per-task=1` shows each task one device, so that four tasks with a device
each look like four tasks that share one: only the UUIDs tell. A node with a broken driver would compute on its CPU
while the others wait for it in NCCL.
"""

from __future__ import annotations

import json
import platform
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ranvier.comm.signed_store import SharedStore
from ranvier.errors import ConfigError, LaunchError

SIGHT = "ranvier/sight/"
"""Prefix of the store key under which each rank publishes what it sees."""


@dataclass(frozen=True, kw_only=True)
class Sight:
    """What one rank sees.

    machine: what ranks on one machine have in common. devices: UUIDs of the CUDA devices that the rank may use, by
    number. setting: its `launch.device`. transport: its `comm.transport`. nccl: version of NCCL; "" without CUDA.
    """

    rank: int
    local_rank: int
    local_size: int
    machine: str
    devices: tuple[str, ...]
    setting: str
    transport: str
    torch: str
    nccl: str = ""


@dataclass(frozen=True, kw_only=True)
class DeviceChoice:
    """The number of each rank's CUDA device, in rank order; None for the CPU. The reason is for a person."""

    devices: tuple[int | None, ...]
    reason: str


def see(*, rank: int, local_rank: int, local_size: int, setting: str, transport: str) -> Sight:
    """What this process sees. A setting of cpu looks at no device, which would take memory on it."""
    count = torch.cuda.device_count() if setting != "cpu" and torch.cuda.is_available() else 0
    devices = tuple(str(getattr(torch.cuda.get_device_properties(number), "uuid", number)) for number in range(count))
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if count and torch.distributed.is_nccl_available() else ""
    return Sight(rank=rank, local_rank=local_rank, local_size=local_size, machine=_machine(), devices=devices,
                 setting=setting, transport=transport, torch=torch.__version__.partition("+")[0], nccl=nccl)


def exchange(sight: Sight, size: int, store: SharedStore) -> list[Sight]:
    """What all ranks see, in rank order. LaunchError if a rank has not published it within the store's time limit."""
    store.set(f"{SIGHT}{sight.rank}", json.dumps(asdict(sight)))
    sights = []
    for rank in range(size):
        try:
            row = json.loads(store.get(f"{SIGHT}{rank}"))
        except (RuntimeError, ValueError) as error:
            raise LaunchError("did not say in time which devices it has", where=f"rank {rank}",
                              value=str(error).partition("\n")[0],
                              remedy="See why that rank has not started, or raise --comm.timeout-seconds.") from error
        sights.append(Sight(**{**row, "devices": tuple(row["devices"])}))
    return sights


def choose_devices(sights: Sequence[Sight]) -> DeviceChoice:
    """The device of each rank. Every rank computes it from the same sights, so all come to the same result.

    ConfigError if ranks have different settings, if CUDA is set and a rank has no device of its own, or if some
    machines have devices and others have not; LaunchError if versions differ.
    """
    _check_equal(sights, "launch.device", lambda sight: sight.setting)
    _check_equal(sights, "comm.transport", lambda sight: sight.transport)
    _check_version(sights, "torch", lambda sight: sight.torch)
    setting = sights[0].setting
    if setting == "cpu":
        return DeviceChoice(devices=(None,) * len(sights), reason="as set")
    machines: dict[str, list[Sight]] = defaultdict(list)
    for sight in sights:
        machines[sight.machine].append(sight)
    found: dict[int, int] = {}
    without: list[list[Sight]] = []
    for ranks in machines.values():
        own = _own_devices(ranks)
        if own is None:
            without.append(ranks)
        else:
            found |= own
    if setting == "auto" and len(without) == len(machines):
        return DeviceChoice(devices=(None,) * len(sights), reason=_too_few(without[0]))
    if without:
        raise _mismatch(without, found, setting)
    _check_version(sights, "NCCL", lambda sight: sight.nccl)
    counts = {len(sight.devices) for sight in sights}
    reason = f"{counts.pop()} CUDA devices found" if len(counts) == 1 else "each rank has a CUDA device"
    return DeviceChoice(devices=tuple(found[sight.rank] for sight in sights),
                        reason="as set" if setting == "cuda" else reason)


def _own_devices(ranks: Sequence[Sight]) -> dict[int, int] | None:
    """rank -> number of a device that no other of these ranks of one machine has; None if there is no such choice.

    The device with a rank's local number comes first, so that ranks which see all devices take them in order.
    """
    taken: dict[str, Sight] = {}

    def take(sight: Sight, tried: set[str]) -> bool:
        order = sorted(range(len(sight.devices)), key=lambda number: (number - sight.local_rank) % len(sight.devices))
        for uuid in (sight.devices[number] for number in order):
            if uuid not in tried:
                tried.add(uuid)
                if uuid not in taken or take(taken[uuid], tried):
                    taken[uuid] = sight
                    return True
        return False

    if not all(take(sight, set()) for sight in sorted(ranks, key=lambda sight: sight.local_rank)):
        return None
    return {sight.rank: sight.devices.index(uuid) for uuid, sight in taken.items()}


def _too_few(ranks: Sequence[Sight]) -> str:
    devices = {uuid for sight in ranks for uuid in sight.devices}
    if not devices:
        return "no CUDA device found"
    return f"{len(devices)} CUDA device{'s' if len(devices) > 1 else ''} for {len(ranks)} ranks"


def _mismatch(without: Sequence[Sequence[Sight]], found: Mapping[int, int], setting: str) -> ConfigError:
    ranks = without[0]
    devices = {uuid for sight in ranks for uuid in sight.devices}
    numbers = ", ".join(str(sight.rank) for sight in ranks)
    if setting == "cuda":
        return ConfigError(f"needs a device for each of the {len(ranks)} ranks of this machine, which has "
                           f"{len(devices)} (ranks {numbers})", where="launch.device", value=setting,
                           remedy="Start fewer ranks per machine, or set --launch.device cpu.")
    others = ", ".join(map(str, sorted(found)))
    return ConfigError(f"differs between ranks: {_too_few(ranks)} on the machine of ranks {numbers}, while ranks "
                       f"{others} have a device each", where="launch.device", value=setting,
                       remedy="Look at the driver there (nvidia-smi), leave that machine out, or set "
                              "--launch.device cpu for all.")


def _check_equal(sights: Sequence[Sight], where: str, value: Callable[[Sight], str]) -> None:
    other = next((sight for sight in sights if value(sight) != value(sights[0])), None)
    if other is not None:
        raise ConfigError(f"differs between ranks: {value(sights[0])} on rank 0, {value(other)} on rank {other.rank}",
                          where=where, remedy="Start all ranks with the same command line.")


def _check_version(sights: Sequence[Sight], name: str, value: Callable[[Sight], str]) -> None:
    other = next((sight for sight in sights if value(sight) != value(sights[0])), None)
    if other is not None:
        raise LaunchError(f"ranks have different versions of {name}: {value(sights[0]) or 'none'} on rank 0, "
                          f"{value(other) or 'none'} on rank {other.rank}", where="launch",
                          remedy=f"Install the same version of {name} on all machines.")


def _machine() -> str:
    """What ranks on one machine have in common: a boot of one kernel, and a host name (a container's own)."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{boot.read_text().strip() if boot.exists() else ''} {platform.node()}"
