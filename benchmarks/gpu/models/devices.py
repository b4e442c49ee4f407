"""Which device each rank of a job chooses if launchers and drivers show ranks different devices.

    python -m benchmarks.gpu.models.devices

The ranks publish the devices that they see, and each computes `launch.devices.choose_devices` from them. What a rank
sees follows from the launcher: CUDA_VISIBLE_DEVICES hides devices from a process (CUDA programming guide, "CUDA
Environment Variables"), and Slurm sets it for each task if a job asks for `--gpus-per-task` (srun's manual). No device
is needed.

    chosen      the device of each rank, in rank order, by its physical number on the node, or "error" if all refuse
    wanted      what fits the job: cuda if every rank has a device, error if ranks differ
    as wanted   whether every rank has the wanted device type, and no two ranks share a device
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.memory.program import table
from ranvier.errors import RanvierError
from ranvier.launch.devices import RankDevices, choose_devices


@dataclass(frozen=True, kw_only=True)
class Job:
    """visible: the physical devices that each rank sees. local_size: ranks on a node. wanted: the type that fits."""

    name: str
    visible: Sequence[Sequence[int]]
    local_size: int
    wanted: str
    setting: str = "auto"


JOBS = (
    Job(name="torchrun, 4 ranks, 4 devices", visible=((0, 1, 2, 3),) * 4, local_size=4, wanted="cuda"),
    Job(name="4 ranks, no device", visible=((),) * 4, local_size=4, wanted="cpu"),
    Job(name="4 ranks, 2 devices", visible=((0, 1),) * 4, local_size=4, wanted="cpu"),
    Job(name="srun --gpus-per-task=1, 4 tasks a node", visible=((0,), (1,), (2,), (3,)), local_size=4, wanted="cuda"),
    Job(name="the same with --launch.device cuda", visible=((0,), (1,), (2,), (3,)), local_size=4, wanted="cuda",
        setting="cuda"),
    Job(name="4 ranks see the same device", visible=((2,),) * 4, local_size=4, wanted="cpu"),
    Job(name="2 nodes, one with a broken driver", visible=((0, 1), (0, 1), (), ()), local_size=2, wanted="error"))


def ranks(job: Job) -> list[RankDevices]:
    """The devices that the ranks of `job` see."""
    return [RankDevices(rank=rank, local_rank=rank % job.local_size, local_size=job.local_size,
                  machine=f"node {rank // job.local_size}", setting=job.setting, transport="auto", torch="2.11.0",
                  nccl="2.27.5", devices=tuple(f"GPU-{number}" for number in visible))
            for rank, visible in enumerate(job.visible)]


def choices(job: Job) -> list[str]:
    """The device of each rank: its UUID, "cpu", or "error"."""
    seen = ranks(job)
    try:
        chosen = choose_devices(seen).devices
    except RanvierError:
        return ["error"] * len(seen)
    return ["cpu" if number is None else sight.devices[number] for sight, number in zip(seen, chosen, strict=True)]


def fits(job: Job, found: Sequence[str]) -> bool:
    """Whether the choice is as wanted."""
    if job.wanted != "cuda":
        return set(found) == {job.wanted}
    places = [(rank // job.local_size, one) for rank, one in enumerate(found)]
    return len(set(places)) == len(found) and not {"cpu", "error"} & set(found)


def main() -> int:
    rows = [[job.name, " ".join(found), job.wanted, "yes" if fits(job, found) else "NO"]
            for job in JOBS for found in [choices(job)]]
    print(table(["job", "chosen", "wanted", "as wanted"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
