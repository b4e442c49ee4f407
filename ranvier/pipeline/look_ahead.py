"""Limits how far the host runs ahead of its CUDA device.

The host chooses an action when it launches it, which may be long before the device gets there, and from the messages
that have arrived by then. Where times vary, a later choice is better. `benchmarks/gpu/models/run_ahead.py` simulates 8
stages and 32 microbatches: with a jitter of 0.5 the efficiency is 0.66 with one action of look-ahead, 0.65 at
completion and 0.63 without a bound; without jitter 0.81, 0.77 and 0.82.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

import torch

AUTO = 1
"""Launched actions that may be unfinished when the next one is chosen."""


class LookAhead:
    """Holds the host back until the device has finished all but the last launched actions.

    limit: `pipeline.look_ahead`; auto is AUTO on a pipeline of several stages, and no bound on one stage, where there
    is nothing to choose. On a CPU an action has ended when it returns, and this does nothing.
    """

    def __init__(self, limit: int | Literal["auto"], *, device: torch.device, num_stages: int) -> None:
        self._device = device
        self._limit = (AUTO if num_stages > 1 else None) if limit == "auto" else limit
        self._launched: deque[torch.cuda.Event] = deque()

    def launched(self) -> None:
        """An action has been launched; returns when few enough are unfinished."""
        if self._device.type != "cuda" or self._limit is None:
            return
        event = torch.cuda.Event(blocking=True)  # other threads need the core: they post sends and receives
        event.record(torch.cuda.current_stream(self._device))
        self._launched.append(event)
        while len(self._launched) > self._limit:
            self._launched.popleft().synchronize()
