"""The device of each rank, on which all ranks agree over the store before they connect.

    each rank    publishes what it sees: its CUDA devices by UUID, and the versions of torch and NCCL
    all ranks    read what every rank has published, and make the same choice or raise the same error

No rank can choose alone. Slurm's `--gpus-per-task=1` shows each task one device, so four tasks with one device each
look like four tasks that share one: only the UUIDs tell them apart. A node with a broken driver would compute on its
CPU while the others wait for it in NCCL.
"""

from __future__ import annotations

import json
import platform
import secrets
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count, takewhile
from pathlib import Path

import torch

from ranvier.comm.signed_store import SharedStore, await_keys
from ranvier.errors import ConfigError, LaunchError, counted
from ranvier.launch.stores import TELL_SECONDS, print_missing

DEVICES_KEY = "ranvier/devices/"
"""Prefix of the store key under which each rank publishes what it sees."""


@dataclass(frozen=True, kw_only=True)
class RankDevices:
    """Devices that one rank sees.

    machine: identifier of the rank's machine. devices: UUIDs of the CUDA devices that the rank may use, by number.
    setting: its `launch.device`. transport: its `comm.transport`. nccl: version of NCCL; "" without CUDA.
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
    """The number of each rank's CUDA device, in rank order; None for the CPU. reason: for the user."""

    devices: tuple[int | None, ...]
    reason: str


def visible_devices(*, rank: int, local_rank: int, local_size: int, setting: str, transport: str) -> RankDevices:
    """Devices that this process sees. With the setting cpu no device is touched, since that would use its memory."""
    count = torch.cuda.device_count() if setting != "cpu" and torch.cuda.is_available() else 0
    devices = tuple(str(getattr(torch.cuda.get_device_properties(number), "uuid", number)) for number in range(count))
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if count and torch.distributed.is_nccl_available() else ""
    return RankDevices(rank=rank, local_rank=local_rank, local_size=local_size, machine=machine_name(), devices=devices,
                 setting=setting, transport=transport, torch=torch.__version__.partition("+")[0], nccl=nccl)


def exchange(devices: RankDevices, size: int, store: SharedStore) -> list[RankDevices]:
    """Devices that each rank sees, in rank order. LaunchError if a rank has not published them within the store's time
    limit."""
    store.set(f"{DEVICES_KEY}{devices.rank}", json.dumps(asdict(devices)))
    keys = [f"{DEVICES_KEY}{rank}" for rank in range(size)]
    if devices.rank == 0 and not await_keys(store, keys, TELL_SECONDS):
        print_missing([rank for rank, key in enumerate(keys) if not store.check([key])], size)
    ranks = []
    for rank in range(size):
        try:
            ranks.append(_read(store, rank))
        except (RuntimeError, ValueError) as error:
            raise LaunchError("did not report its devices in time", code="devices-not-reported",
                              where=f"rank {rank}", value=str(error).partition("\n")[0],
                              remedy="Check why that rank has not started, or raise `--comm.timeout-seconds`."
                              ) from error
    return ranks


def _read(store: SharedStore, rank: int) -> RankDevices:
    row = json.loads(store.get(f"{DEVICES_KEY}{rank}"))
    return RankDevices(**{**row, "devices": tuple(row["devices"])})


def choose_devices(ranks: Sequence[RankDevices]) -> DeviceChoice:
    """The device of each rank. Every rank computes the choice from the same data, so all get the same result.

    ConfigError if ranks have different settings, if CUDA is set and a rank has no device of its own, or if only some
    machines have devices; LaunchError if versions differ.
    """
    _check_equal(ranks, "launch.device", lambda seen: seen.setting)
    _check_equal(ranks, "comm.transport", lambda seen: seen.transport)
    _check_version(ranks, "torch", lambda seen: seen.torch)
    setting = ranks[0].setting
    if setting == "cpu":
        return DeviceChoice(devices=(None,) * len(ranks), reason="as set")
    machines: dict[str, list[RankDevices]] = defaultdict(list)
    for seen in ranks:
        machines[seen.machine].append(seen)
    found: dict[int, int] = {}
    without: list[list[RankDevices]] = []
    for local_ranks in machines.values():
        own = _own_devices(local_ranks)
        if own is None:
            without.append(local_ranks)
        else:
            found |= own
    if setting == "auto" and len(without) == len(machines):
        return DeviceChoice(devices=(None,) * len(ranks), reason=_too_few(without[0]))
    if without:
        raise _mismatch(without, found, setting)
    _check_version(ranks, "NCCL", lambda seen: seen.nccl)
    counts = {len(seen.devices) for seen in ranks}
    reason = f"{counts.pop()} CUDA devices found" if len(counts) == 1 else "each rank has a CUDA device"
    return DeviceChoice(devices=tuple(found[seen.rank] for seen in ranks),
                        reason="as set" if setting == "cuda" else reason)


def claim_device(devices: RankDevices, store: SharedStore) -> int | None:
    """The number of a CUDA device for a rank that joins a run: a device that no initial rank of the run has, and that
    no other joining rank has claimed. None if there is no such device."""
    published = takewhile(lambda number: store.check([f"{DEVICES_KEY}{number}"]), count())
    neighbours = [rank for rank in (_read(store, number) for number in published) if rank.machine == devices.machine]
    taken = {rank.devices[number] for rank, number in zip(neighbours, choose_devices(neighbours).devices, strict=True)
             if number is not None} if neighbours else set()
    for number, uuid in enumerate(devices.devices):
        own = secrets.token_hex(8)
        if uuid not in taken and store.compare_set(
                f"{DEVICES_KEY}{devices.machine}/{uuid}", "", own).decode() == own:
            return number
    return None


def _own_devices(ranks: Sequence[RankDevices]) -> dict[int, int] | None:
    """rank -> number of its own device, for ranks of one machine; None if there are not enough devices.

    The device with a rank's local number is tried first, so that ranks that see all devices take them in order.
    """
    taken: dict[str, RankDevices] = {}

    def take(seen: RankDevices, tried: set[str]) -> bool:
        order = sorted(range(len(seen.devices)), key=lambda number: (number - seen.local_rank) % len(seen.devices))
        for uuid in (seen.devices[number] for number in order):
            if uuid not in tried:
                tried.add(uuid)
                if uuid not in taken or take(taken[uuid], tried):
                    taken[uuid] = seen
                    return True
        return False

    if not all(take(seen, set()) for seen in sorted(ranks, key=lambda seen: seen.local_rank)):
        return None
    return {seen.rank: seen.devices.index(uuid) for uuid, seen in taken.items()}


def _too_few(ranks: Sequence[RankDevices]) -> str:
    devices = {uuid for seen in ranks for uuid in seen.devices}
    if not devices:
        return "no CUDA device found"
    return f"{counted(len(devices), 'CUDA device')} for {counted(len(ranks), 'rank')}"


def _mismatch(without: Sequence[Sequence[RankDevices]], found: Mapping[int, int], setting: str) -> ConfigError:
    ranks = without[0]
    devices = {uuid for seen in ranks for uuid in seen.devices}
    numbers = ", ".join(str(seen.rank) for seen in ranks)
    if setting == "cuda":
        return ConfigError(f"needs a device for each of the {len(ranks)} ranks of this machine, which has "
                           f"{len(devices)} (ranks {numbers})", code="too-few-devices", where="launch.device",
                           value=setting, remedy="Start fewer ranks per machine, or set `--launch.device cpu`.")
    others = ", ".join(map(str, sorted(found)))
    return ConfigError(f"differs between ranks: {_too_few(ranks)} on the machine of ranks {numbers}, while ranks "
                       f"{others} have a device each", code="devices-differ-by-machine", where="launch.device",
                       value=setting,
                       remedy="Check the driver there (nvidia-smi), leave that machine out, or set `--launch.device "
                              "cpu` for all.")


def _check_equal(ranks: Sequence[RankDevices], where: str, value: Callable[[RankDevices], str]) -> None:
    if (other := _different(ranks, value)) is not None:
        raise ConfigError(f"differs between ranks: {value(ranks[0])} on rank 0, {value(other)} on rank {other.rank}",
                          code="ranks-differ-in-setting", where=where,
                          remedy="Start all ranks with the same command line.")


def _check_version(ranks: Sequence[RankDevices], name: str, value: Callable[[RankDevices], str]) -> None:
    if (other := _different(ranks, value)) is not None:
        raise LaunchError(f"ranks have different versions of {name}: {value(ranks[0]) or 'none'} on rank 0, "
                          f"{value(other) or 'none'} on rank {other.rank}", code="ranks-differ-in-version",
                          where="launch", remedy=f"Install the same version of {name} on all machines.")


def _different(ranks: Sequence[RankDevices], value: Callable[[RankDevices], str]) -> RankDevices | None:
    """The first rank whose value is not that of rank 0."""
    return next((seen for seen in ranks if value(seen) != value(ranks[0])), None)


def machine_name() -> str:
    """Identifier of a machine, shared by its ranks: its kernel's boot ID and the host name (in a container its own)."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{boot.read_text().strip() if boot.exists() else ''} {platform.node()}"
