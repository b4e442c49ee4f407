"""Warns of losses that are already means over the targets: dividing by the weight would divide them twice."""

from __future__ import annotations

import warnings

from torch import Tensor
from torch.autograd.graph import Node
from torch.utils._python_dispatch import _disable_current_modes

_MEAN = 1
"""`at::Reduction::Mean`, as torch's losses save it for their backward."""
_LEAST_COUNT = 8
"""Fewer elements, or a smaller divisor, may be losses of several heads instead of samples."""
_PASSED_ON = ("AddBackward", "CloneBackward", "NegBackward", "RsubBackward", "SqueezeBackward", "SubBackward",
              "ToCopyBackward", "ViewBackward")


def warn_of_mean(loss: Tensor, weight: Tensor | float) -> bool:
    """Warn if the loss is a mean, and return whether it is. On a GPU it waits for the weight."""
    if loss.grad_fn is None or loss.is_meta or not (weight > 1 and is_mean(loss, float(weight))):
        return False
    warnings.warn(f"the loss is a mean, and is divided by its weight, {float(weight):g}, again: losses and "
                  "gradients are too small by this factor. Return the sum and the number of targets: "
                  "reduction='sum', or the mean times that number", stacklevel=2)
    return True


def is_mean(loss: Tensor, weight: float) -> bool:
    """Whether the last operations of a loss divide by `weight` or more: `reduction="mean"`, `mean()`, a division by the
    weight itself. Read from the loss's graph before its backward; False if the graph does not show it, and for `weight`
    means or more, which are those of single samples."""
    waiting, means = [loss.grad_fn], 0
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        name = node.name()
        if name.startswith(_PASSED_ON) or _is_fraction(name, node):
            waiting += [source for source, _ in node.next_functions]
        else:
            means += _divides(name, node, weight)
    return 0 < means < weight


def _divides(name: str, node: Node, weight: float) -> bool:
    if name.startswith("MeanBackward"):
        averaged: int = node._saved_self_sym_numel  # type: ignore[attr-defined]
        return averaged >= _LEAST_COUNT and averaged % weight == 0
    if name.startswith("DivBackward"):
        return weight >= _LEAST_COUNT and _number(node) == weight
    return getattr(node, "_saved_reduction", 0) == _MEAN


def _is_fraction(name: str, node: Node) -> bool:
    """Whether it multiplies by a constant of magnitude 1 or less, which is not a count."""
    factor = _number(node) if name.startswith("MulBackward") else None
    return factor is not None and 0 < abs(factor) <= 1


def _number(node: Node) -> float | None:
    other = getattr(node, "_saved_other", None)
    if isinstance(other, Tensor):
        with _disable_current_modes():  # in which a number that autograd has saved is not a tensor
            return None if other.numel() != 1 else other.item()
    return other
