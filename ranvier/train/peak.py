"""Peak FLOP/s of this rank's device: measured with a matrix product, and as its maker states it.

Model FLOPs utilisation (MFU) is against the published rate, as other programs report it. A CPU, or a device that the
table lacks, has none: there it is against the measured one, and is called a share of matrix products.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ranvier.comm.protocol import Group
from ranvier.cost.published_peaks import published_peak
from ranvier.precision import DTYPES


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


@dataclass(frozen=True)
class PeakRate:
    """FLOP/s of one rank at its best. published: by the data sheet of its device; None if there is no such figure."""

    measured: float
    published: float | None

    @property
    def reference(self) -> float:
        """The peak to which utilisation is relative."""
        return self.published or self.measured

    def facts(self) -> dict[str, Any]:
        """For summary.json: the peak to which model_flops_utilisation is relative, and both rates."""
        return {"model_flops_utilisation_of": "published peak" if self.published else "measured matrix products",
                "measured_peak_flops": self.measured, "published_peak_flops": self.published}


def peak_rate(ranks: Group, device: torch.device, precision: Literal["fp32", "bf16", "fp16", "fp64"]) -> PeakRate:
    """The rates of one of `ranks` when all of them do nothing but matrix products. Collective."""
    published = published_peak(torch.cuda.get_device_name(device), precision) if device.type == "cuda" else None
    return PeakRate(common_rate(ranks, device, DTYPES[precision]), published)


def common_rate(ranks: Group, device: torch.device, dtype: torch.dtype) -> float:
    """FLOPs a second of one of `ranks` when all of them do nothing but matrix products: the mean. Collective."""
    ranks.barrier()
    total = torch.tensor([matrix_product_rate(device, dtype)], dtype=torch.float64)
    ranks.all_reduce(total).wait()
    return float(total) / len(ranks.ranks)
