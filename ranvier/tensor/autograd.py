"""`torch.autograd.Function` with a typed `apply`: torch leaves it without annotations.

Every function of this room returns one tensor. Its `ctx` is `Any`, because torch lets a function set attributes on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    class Function(torch.autograd.Function):
        """See `torch.autograd.Function`."""

        @classmethod
        def apply(cls, *args: Any, **kwargs: Any) -> Tensor:
            """The output of `forward(ctx, *args)`, with `backward` in the autograd graph."""
else:
    Function = torch.autograd.Function
