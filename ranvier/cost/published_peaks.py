"""The published peak rates of devices: dense products, without structured sparsity, from their makers' data sheets.

Checked on 2026-11-24 against public copies of the data sheets' tables. Blackwell Ultra (B300, GB300) has almost no
fp64. Data sheets of devices without fp64 tensor cores (A40, A10, L40, L4, T4, RTX) do not state fp64: it is 1/64 of
fp32, 1/32 on T4.

Utilisation is usually stated relative to these numbers, so it can be compared between programs. A product on the device
reaches less (measured by `ranvier.train.metrics`), because of power limits and the dtype's real throughput.
"""

from __future__ import annotations

import re
from typing import Literal

_HALF, _FP32, _FP64 = 0, 1, 2
_PEAKS: tuple[tuple[str, tuple[float, float, float]], ...] = (
    (r"GB200", (2_500e12, 80e12, 40e12)),
    (r"GB300", (2_500e12, 80e12, 1.25e12)),
    (r"B300", (2_250e12, 75e12, 1.25e12)),
    (r"B200", (2_250e12, 75e12, 37e12)),
    (r"H100.*PCIe", (756e12, 51e12, 51e12)),
    (r"H100 NVL", (835e12, 60e12, 60e12)),
    (r"H100|H200|GH200", (989.4e12, 67e12, 67e12)),
    (r"H800", (989.4e12, 67e12, 1e12)),
    (r"H20\b", (148e12, 44e12, 1e12)),
    (r"A100|A800", (312e12, 19.5e12, 19.5e12)),
    (r"A30\b", (165e12, 10.3e12, 10.3e12)),
    (r"A40\b", (149.7e12, 37.4e12, 0.58e12)),
    (r"A10G", (70e12, 35e12, 0.55e12)),
    (r"A10\b", (125e12, 31.2e12, 0.49e12)),
    (r"L40S", (362e12, 91.6e12, 1.4e12)),
    (r"L40\b", (181e12, 90.5e12, 1.4e12)),
    (r"L4\b", (121e12, 30.3e12, 0.47e12)),
    (r"V100S", (130e12, 16.4e12, 8.2e12)),
    (r"V100.*PCIE", (112e12, 14e12, 7e12)),
    (r"V100", (125e12, 15.7e12, 7.8e12)),
    (r"T4\b", (65e12, 8.1e12, 0.25e12)),
    (r"RTX 4090", (165.2e12, 82.6e12, 1.3e12)),
    (r"RTX 3090", (71e12, 35.6e12, 0.56e12)))
"""Pattern of torch's name of the device -> FLOP/s in half precision (with sums in fp32), fp32 and fp64. The first match
counts, so more exact names come first. fp32 is without TF32, which torch does not use by default."""


def published_peak(name: str, precision: Literal["fp32", "bf16", "fp16", "fp64"]) -> float | None:
    """FLOP/s of the device that torch calls `name`; None if it is not in the table."""
    column = {"fp32": _FP32, "fp64": _FP64}.get(precision, _HALF)
    return next((rates[column] for pattern, rates in _PEAKS if re.search(pattern, name)), None)
