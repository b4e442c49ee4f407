"""Room for what a run may become: what its ranks would need of devices and of the machine, against what there is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ranvier.check import problems
from ranvier.elastic.auto_pipe import Place
from ranvier.errors import RanvierError
from ranvier.machine import available_memory_bytes
from ranvier.planner.memory import device_bytes_of_stages, laid_out, too_large
from ranvier.run import Run


def device_bytes(device: torch.device) -> int | None:
    """What this process could use of its device: what is free, and what it holds already, which a transition frees.
    None where device and host are the same memory."""
    if device.type != "cuda":
        return None
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)


@dataclass(frozen=True, kw_only=True)
class Room:
    """For a run that was started as `first`, with its first `frozen` layers frozen.

    device_bytes: what each rank may need of its device; None where device and host are the same memory.
    """

    first: Run
    frozen: int
    device_bytes: int | None = None

    def problem(self, run: Run) -> RanvierError | None:
        """Why it cannot go on as `run`: a setting; a rank, alone on its device; all ranks together on this machine,
        were they all here."""
        if found := problems(run):
            return found[0]
        on_cuda = self.device_bytes is not None
        try:
            memory = laid_out(run, self.frozen)[1]
        except RanvierError as problem:
            return problem
        if on_cuda:
            problem = too_large(memory, place="device", processes=1, run=run, available_bytes=self.device_bytes)
            if problem is not None:
                return problem
        ranks = [entry for entry in memory for _ in range(entry.ranks)]
        before = sum(entry.host_bytes + (0 if on_cuda else entry.device_bytes)
                     for entry in laid_out(self.first)[1] for _ in range(entry.ranks))
        return too_large(ranks, place="host" if on_cuda else "both", processes=len(ranks), run=run,
                         available_bytes=available_memory_bytes() + before)

    def stage_bytes(self, run: Run) -> Callable[[Place], int] | None:
        """What a rank of a stage that might be would need of its device. None where ranks are judged together, which
        hardly depends on the cut, and where `run` cannot be at all."""
        if self.device_bytes is None or problems(run):
            return None
        try:
            needed = device_bytes_of_stages(run, self.frozen)
        except RanvierError:
            return None
        return lambda place: needed(place.stage, place.start, place.stop)
