"""Polling for MPI, whose blocking calls spin and take the core from the ranks that they wait for."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

_YIELD_SECONDS = 100e-6
_SLEEP_SECONDS = 200e-6


def poll_rounds(timeout_seconds: float, yield_seconds: float = _YIELD_SECONDS) -> Iterator[None]:
    """Iterations of a polling loop until the time is over; at least one.

    For the first `yield_seconds` the core is offered to other processes between iterations. After that each sleep is a
    quarter of the time waited so far, at most 200 us: short waits end soon after they could, and long ones cost little.
    """
    started = time.monotonic()
    while True:
        yield
        waited = time.monotonic() - started
        if waited >= timeout_seconds:
            return
        if waited < yield_seconds:
            os.sched_yield()
        else:
            time.sleep(min(timeout_seconds - waited, waited / 4, _SLEEP_SECONDS))
