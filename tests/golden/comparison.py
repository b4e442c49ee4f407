"""How a run's numbers are compared with recorded ones.

Matrix products and reductions round as the CPU's kernels do, which differ between CPU models and torch versions. So a
record names the machine that made it. On a machine with the same facts every number must be bit-identical; on any other
one it must agree within a tolerance.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from tests.golden.runs import NUMBERS, Step


def machine_facts() -> dict[str, str]:
    """Facts that decide how results are rounded on this machine. Runs compute with one thread per rank."""
    model = next((line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")),
                 platform.processor())
    return {"cpu": model, "vector_instructions": torch.backends.cpu.get_cpu_capability(),
            "torch": torch.__version__, "threads_per_rank": "1"}


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def differences(steps: Sequence[Step], recorded: Sequence[Step], tolerance: float) -> list[str]:
    """One line for each number that differs. tolerance: relative; 0 compares bit by bit."""
    if [step["step"] for step in steps] != [step["step"] for step in recorded]:
        return [f"steps {[step['step'] for step in steps]}, recorded were {[step['step'] for step in recorded]}"]
    found = []
    for step, expected in zip(steps, recorded, strict=True):
        for name in NUMBERS:
            here, there = step.get(name), expected.get(name)
            if here != there and not (tolerance and _close(here, there, tolerance)):
                found.append(f"step {step['step']}: {name} {_decimal(here)}, recorded was {_decimal(there)}")
    return found


def tolerance_here(facts: Mapping[str, str], elsewhere: float) -> float:
    """The tolerance for a record made on a machine with `facts`: 0 if they are this machine's, otherwise
    `elsewhere`."""
    return 0.0 if facts == machine_facts() else elsewhere


def _close(here: int | str | None, there: int | str | None, tolerance: float) -> bool:
    if not isinstance(here, str) or not isinstance(there, str):
        return False
    return math.isclose(float.fromhex(here), float.fromhex(there), rel_tol=tolerance)


def _decimal(number: int | str | None) -> str:
    return f"{float.fromhex(number)!r} ({number})" if isinstance(number, str) else str(number)
