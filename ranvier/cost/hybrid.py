"""Share of the optimizer states that a device has memory for, where the others are streamed from the host (offload
hybrid).

    needed, no states on the host  |-- parameters, gradients, activations --|------------ states ------------|
    free                           |----------------------------------------------------------|
    share in host memory                                                                       |------------|

Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil

from ranvier.config.resolve import Facts, ResolvedRun, auto_offload_share, resolve
from ranvier.cost.memory import RankMemory

_LEAST = 1e-6
"""A share of one bucket: the room through which buckets pass is there."""


def with_offload_share(
    run: ResolvedRun, predict: Callable[[ResolvedRun], Sequence[RankMemory]], free_bytes: int, *,
    fits_without: bool | None = None
) -> ResolvedRun:
    """`run` with the share of its states in host memory, where that is auto: the smallest with which the rank that
    needs most fits in `free_bytes` of its device. predict: the memory of ranks. fits_without: whether it fits with no
    states there, where that is known."""
    if run.optim.offload != "hybrid" or run.optim.offload_share != "auto":
        return run

    def needed(share: float) -> int:
        there = replace(run, optim=replace(run.optim, offload_share=share))
        return max(entry.device_bytes for entry in predict(there))

    if run.launch.device != "cuda" or (needed(0.0) <= free_bytes if fits_without is None else fits_without):
        return resolve(run, Facts(offload_share=auto_offload_share(run.launch.device, 0, 1, free_bytes)))
    least = needed(_LEAST)
    leaves = max(1, least - needed(1.0))
    share = auto_offload_share("cuda", least, leaves, free_bytes)
    while share < 1.0 and (missing := needed(share) - free_bytes) > 0:  # states differ between buckets
        share = min(1.0, share + ceil(1000 * missing / leaves) / 1000)
    return resolve(run, Facts(offload_share=share))
