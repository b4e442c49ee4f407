"""What this rank's arithmetic can reach: measured with a matrix product, and as the device's maker states it.

Utilisation during the run is against the measured rate, which exists for every device. The summary also states the
utilisation against the published rate, which other programs report.
"""

from __future__ import annotations

import time
from typing import Any, Literal

import torch

from ranvier.comm.protocol import Group
from ranvier.cost.published_peaks import published_peak


def matrix_product_rate(device: torch.device, dtype: torch.dtype, seconds: float = 0.1) -> float:
    """FLOPs a second of this rank in a square matrix product of `dtype`: the best of those done in `seconds`.

    The operands are random: on constants a device needs less power, and runs up to 13 % faster. All ranks call it at
    the same time, so that ranks which share cores are measured as they will run.
    """
    size = 8192 if device.type == "cuda" else 512
    places = torch.arange(size, device=device, dtype=torch.float32)
    # A hash instead of a generator, whose state belongs to the run.
    a, b = (torch.frac(torch.sin(torch.outer(places, places) * 12.9898 + shift) * 43758.5453).to(dtype)
            for shift in (0.0, 1.0))
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


def common_rate(ranks: Group, device: torch.device, dtype: torch.dtype) -> float:
    """FLOPs a second of one of `ranks` when all of them do nothing but matrix products: the mean. Collective."""
    ranks.barrier()
    total = torch.tensor([matrix_product_rate(device, dtype)], dtype=torch.float64)
    ranks.all_reduce(total).wait()
    return float(total) / len(ranks.ranks)


def peak_facts(device: torch.device, precision: Literal["fp32", "bf16", "fp16", "fp64"], measured: float,
               utilisation: float) -> dict[str, Any]:
    """What the summary says of a CUDA device's peak, in FLOP/s of one rank; nothing on a CPU, which has no such figure.

    measured: of one rank. utilisation: of the model's FLOPs, against `measured`.
    """
    if device.type != "cuda":
        return {}
    published = published_peak(torch.cuda.get_device_name(device), precision)
    return {"measured_peak_flops": measured, "published_peak_flops": published,
            "model_flops_utilisation_of_published_peak": None if published is None
            else utilisation * measured / published}
