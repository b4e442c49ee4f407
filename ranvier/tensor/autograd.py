"""`torch.autograd.Function` with a typed `apply`: torch leaves it without annotations.

Every function of this room returns one tensor. Its `ctx` is `Any`, because torch lets a function set attributes on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

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


def apply_outside_transforms(function: type[Function]) -> Callable[..., Tensor]:
    """`function.apply` for callers that know that no transform of torch.func is active, no argument is a tensor of a
    transform that has ended, and torch.compile does not trace: one call into torch, whereas `apply` checks all this in
    Python. Likewise, autograd calls `function.backward` directly."""
    function._backward_cls.apply = function.backward  # type: ignore[attr-defined]
    return cast(Callable[..., Tensor], getattr(super(torch.autograd.Function, function), "apply"))  # noqa: B009
