"""Dynamic loss scaling for fp16: small gradients are lifted over the smallest number, and overflows are found.

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
    """The scale and what decides its next value; the same on every rank, since all see the same statuses."""

    scale: float
    window: int
    good_steps: int = 0
    """Steps since the scale last changed."""
    skipped_steps: int = 0
    """Steps that were skipped for an overflow, in all."""

    @property
    def is_initial(self) -> bool:
        """Whether no step has been taken with it."""
        return not self.good_steps and not self.skipped_steps

    def lower(self, factor: float) -> None:
        """Losses are `factor` times as large as the scale was chosen for."""
        self.scale = max(self.scale / 2.0 ** math.floor(math.log2(factor)), _LEAST)

    def update(self, overflow: bool) -> None:
        """A step has ended: an overflow halves the scale, `window` good steps in a row double it."""
        if overflow:
            self.scale, self.good_steps = max(self.scale / 2, _LEAST), 0
            self.skipped_steps += 1
            return
        self.good_steps += 1
        if self.good_steps == self.window:
            self.scale, self.good_steps = min(self.scale * 2, _MOST), 0
