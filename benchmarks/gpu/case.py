"""What the cases of `benchmarks.gpu.suite` have in common: the device, and the shapes that fit it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

import torch

_Shape = TypeVar("_Shape")


@dataclass(frozen=True, kw_only=True)
class Options:
    """dry_run: on the CPU with tiny shapes, to see that the code runs."""

    dry_run: bool = False

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.dry_run else torch.device("cuda", 0)

    def sized(self, on_device: _Shape, dry: _Shape) -> _Shape:
        """What a case takes on the device, and in a dry run."""
        return dry if self.dry_run else on_device


def synchronize(device: torch.device) -> None:
    """Wait for what the device was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(call: Callable[[], object], device: torch.device, *, warm: int = 2, times: int = 5) -> float:
    """The median seconds of a call, by CUDA events on a device."""
    for _ in range(warm):
        call()
    found = []
    for _ in range(times):
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device)
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record(stream)
            call()
            stop.record(stream)
            stop.synchronize()
            found.append(start.elapsed_time(stop) * 1e-3)
        else:
            began = time.perf_counter()
            call()
            found.append(time.perf_counter() - began)
    return max(median(found), 1e-9)


def interleaved(calls: Sequence[Callable[[], float]], rounds: int) -> list[float]:
    """The median result of each call, taken in turns (A B, B A, ...), so that a drift of the clock meets all alike."""
    found: list[list[float]] = [[] for _ in calls]
    for turn in range(rounds):
        order = range(len(calls)) if turn % 2 == 0 else reversed(range(len(calls)))
        for place in order:
            found[place].append(calls[place]())
    return [median(values) for values in found]
