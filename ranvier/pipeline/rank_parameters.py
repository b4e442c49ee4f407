"""The parameters that one rank updates, as a list that notices when torch clips them by their norm alone."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator

from torch import nn


class RankParameters(list[nn.Parameter]):
    """Warns when `torch.nn.utils.clip_grad_norm_` reads it, which knows the gradients of this rank only."""

    def __iter__(self) -> Iterator[nn.Parameter]:
        caller = sys._getframe(1)
        name = caller.f_globals.get("__name__"), caller.f_code.co_name
        if name == ("torch.nn.utils.clip_grad", "clip_grad_norm_"):
            warnings.warn("torch.nn.utils.clip_grad_norm_ clips the parameters of this rank by their own norm, not by "
                          "that of the whole model. Call engine.clip_grad_norm_(max_norm) on all ranks.", stacklevel=5)
        return super().__iter__()
