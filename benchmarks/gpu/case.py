"""Shared by the cases of `benchmarks.gpu.suite`: the device, its clock, and the form of findings.

A case is a generator: each finding is a dict that JSON can represent, which the suite writes immediately, so that a
case that hangs or crashes later loses nothing. `ok` is False if a check has failed; `says` is for people.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

import torch

_Shape = TypeVar("_Shape")

Finding = dict[str, Any]
Findings = Iterator[Finding]
"""Findings of a case; `kind` names a finding if it differs from the case's name."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """dry_run: on the CPU with tiny shapes, to see that the code runs."""

    dry_run: bool = False

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.dry_run else torch.device("cuda", 0)

    def sized(self, on_device: _Shape, dry: _Shape) -> _Shape:
        """The value of a case on the device, or in a dry run."""
        return dry if self.dry_run else on_device


def failure(error: BaseException) -> Finding:
    """The finding of an error."""
    lines = traceback.format_exception(error)
    return {"ok": False, "error": f"{type(error).__name__}: {error}"[:1500],
            "trace": "".join(lines).splitlines()[-14:]}


def attempt(measure: Callable[[], Finding]) -> Finding:
    """The finding of `measure`, or why it failed: other findings of its case do not depend on it."""
    try:
        return measure()
    except Exception as error:
        return failure(error)
    finally:
        gc.collect()  # frees what an error's frames have held


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peaks(device: torch.device) -> Finding:
    """The most that this process has allocated and reserved on the device, in GiB."""
    if device.type != "cuda":
        return {}
    return {"allocated_gib": torch.cuda.max_memory_allocated(device) / 2**30,
            "reserved_gib": torch.cuda.max_memory_reserved(device) / 2**30}


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
    """The median result of each call, taken in turns (A B, B A, ...), so that a drift of the clock affects all
    equally."""
    found: list[list[float]] = [[] for _ in calls]
    for turn in range(rounds):
        order = range(len(calls)) if turn % 2 == 0 else reversed(range(len(calls)))
        for place in order:
            found[place].append(calls[place]())
    return [median(values) for values in found]
