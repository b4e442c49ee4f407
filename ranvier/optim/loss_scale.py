"""Dynamic loss scaling for fp16: keeps small gradients above fp16's smallest number, and detects overflows.

    loss * scale -> backward -> gradients * scale -> overflow anywhere?  skip the step, scale / 2
                                                  -> none for `window` steps: scale * 2

(Micikevicius et al., 2018.) bf16 has fp32's range and needs none of this.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_LEAST, _MOST = 2.0**-14, 2.0**32


@dataclass(kw_only=True)
class LossScale:
    """The scale and the counters that decide its next value; the same on all ranks, which see the same statuses."""

    scale: float
    window: int
    good_steps: int = 0
    """Steps since the scale last changed."""
    skipped_steps: int = 0
    """Total number of steps that were skipped because of an overflow."""

    @property
    def is_initial(self) -> bool:
        """Whether no step has been taken with it."""
        return not self.good_steps and not self.skipped_steps

    def lower(self, factor: float) -> None:
        """Lower the scale: losses are `factor` times as large as those it was chosen for."""
        self.scale = max(self.scale / 2.0 ** math.floor(math.log2(factor)), _LEAST)

    def update(self, overflow: bool) -> None:
        """Update the scale after a step: an overflow halves it, `window` good steps in a row double it."""
        if overflow:
            self.scale, self.good_steps = max(self.scale / 2, _LEAST), 0
            self.skipped_steps += 1
            return
        self.good_steps += 1
        if self.good_steps == self.window:
            self.scale, self.good_steps = min(self.scale * 2, _MOST), 0
