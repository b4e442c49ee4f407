"""What this rank's arithmetic could reach at best: the denominator of utilisation, measured rather than looked up."""

from __future__ import annotations

import time

import torch


def matrix_product_rate(device: torch.device, dtype: torch.dtype, seconds: float = 0.1) -> float:
    """FLOPs a second of this rank in a square matrix product of `dtype`: the best of those done in `seconds`.

    All ranks call it at the same time, so that ranks which share cores are measured as they will run.
    """
    size = 4096 if device.type == "cuda" else 512
    a, b = (torch.full((size, size), 0.5, device=device, dtype=dtype) for _ in range(2))
    out = torch.mm(a, b)  # the first product loads libraries; it is not counted
    best, until = float("inf"), time.monotonic() + seconds
    while best == float("inf") or time.monotonic() < until:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        torch.mm(a, b, out=out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2.0 * size**3 / best
