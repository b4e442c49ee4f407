"""One rank of a contender: a process that computes when the driver says so.

    python -m benchmarks.tensor.rank PORT PREFIX [RANK]       without RANK if mpiexec numbers the ranks

It sets itself up, runs one step whose results are compared, and then sleeps until there is a command in the driver's
store. A command is a number of steps; one more step is run before them and not timed.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import sys
import time
from pathlib import Path

import psutil
from torch import Tensor

from benchmarks.pipeline.rank import enter, load_libraries, peak_bytes, place_of
from benchmarks.tensor.contender import Contender, Stack, builder
from benchmarks.tensor.stem import Stem, figures


def main(port: int, prefix: str, rank: int | None) -> None:
    control, job, rank = enter(port, prefix, rank)
    stem, contender = Stem(**job["workload"]), Contender(**job["contender"])
    build = builder(contender)
    load_libraries()
    imports_bytes = psutil.Process().memory_info().rss
    with build(stem, contender, place_of(port, prefix, rank, contender.ranks)) as stack:
        x, dy = (stack.share(whole) for whole in (stem.inputs(), stem.output_gradients()))
        found = checked(stack, x, dy)  # a `Team` adds these up over the ranks and calls them losses
        control.set(f"ready/{rank}", json.dumps({"losses": found if rank == 0 else [None],
                                                 "report": {"saved_bytes": stack.saved_bytes(x)}}))
        command = 0
        while (steps := json.loads(control.get(f"command/{command}"))) > 0:
            control.set(f"done/{command}/{rank}", json.dumps(timed(stack, x, dy, steps, imports_bytes)))
            command += 1


def checked(stack: Stack, x: Tensor, dy: Tensor) -> list[float]:
    """The results of one step, as `figures`."""
    y, dx = stack.forward(x), stack.backward(dy)
    stack.finish()
    found = figures(stack.assemble(y), stack.assemble(dx), stack.gradients())
    stack.clear()
    return found


def timed(stack: Stack, x: Tensor, dy: Tensor, steps: int, imports_bytes: int) -> dict:
    """Run `steps` + 1 steps, the first untimed. spans: of each step, start and end of forward, backward and finish on
    the machine's clock; all ranks begin each of them together."""
    trim()
    peak_is_new, rest_bytes = reset_peak(), psutil.Process().memory_info().rss
    spans: list[list[tuple[float, float]]] = []
    cpu_started = 0.0
    for number in range(steps + 1):
        if number == 1:
            cpu_started = time.process_time()
        stack.clear()
        phases = []
        for phase in (lambda: stack.forward(x), lambda: stack.backward(dy), stack.finish):
            stack.wait()
            started = time.monotonic()
            phase()
            phases.append((started, time.monotonic()))
        spans.append(phases)
    cpu_seconds = time.process_time() - cpu_started
    highest = peak_bytes()
    stack.clear()
    return {"spans": spans[1:], "cpu_seconds": cpu_seconds, "peak_bytes": highest, "peak_is_new": peak_is_new,
            "peak_above_imports_bytes": highest - imports_bytes, "peak_above_rest_bytes": highest - rest_bytes}


def trim() -> None:
    """Give back memory that earlier blocks and the check have freed, so that the peak is that of the steps."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def reset_peak() -> bool:
    """Reset the peak of resident memory; returns False if the system cannot."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else None)
