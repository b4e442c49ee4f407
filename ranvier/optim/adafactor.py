"""Adafactor (Shazeer and Stern, 2018): keeps only means over rows and columns of a matrix's second moments.

Like `torch.optim.Adafactor`, with its default constants. The learning rate is relative to the root mean square of each
parameter, and updates are clipped by their own root mean square. There is no first moment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from ranvier.optim.tensor_update import TensorUpdate


@dataclass(frozen=True)
class Adafactor:
    """The rule. beta2_decay: exponent of the step number in the decay rate. smallest_scale: lower bound on a
    parameter's root mean square. clip: largest root mean square of an update before the learning rate."""

    beta2_decay: float = -0.8
    smallest_scale: float = 1e-3
    clip: float = 1.0

    def applies_to(self, name: str, shape: tuple[int, ...], *, in_layer: bool) -> bool:
        """See `ranvier.optim.rules.TensorRule`."""
        return prod(shape) > 0

    def state_shapes(self, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...] | None]:
        """See `ranvier.optim.rules.TensorRule`."""
        if len(shape) < 2:
            return {"variance": None}
        return {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}

    def update_tensors(self, tensors: Mapping[str, TensorUpdate]) -> None:
        """See `ranvier.optim.rules.TensorRule`."""
        for tensor in tensors.values():
            self._update(tensor)

    def working_bytes(self, shape: tuple[int, ...], part: tuple[int, ...], element_bytes: int) -> int:
        """Memory of the update of a tensor of which this rank has a part, besides the part and its states, for
        predictions: squares of the gradient, two estimates of them, and sums over rows and columns."""
        return element_bytes * (3 * prod(part) + 4 * sum(prod(shape) // size for size in shape[-2:]))

    def _update(self, tensor: TensorUpdate) -> None:
        numel, epsilon = prod(tensor.shape), torch.finfo(tensor.parameter.dtype).eps
        scale = (tensor.sum(tensor.parameter.square()) / numel).sqrt().clamp(min=self.smallest_scale)
        tensor.parameter.mul_(1 - tensor.learning_rate * tensor.weight_decay)
        update = self._variance(tensor, epsilon).clamp(min=epsilon ** 2).rsqrt_().mul_(tensor.gradient)
        clipped = ((tensor.sum(update.square()) / numel).sqrt() / self.clip).clamp(min=1.0)
        rate = min(tensor.learning_rate, tensor.step ** -0.5)
        tensor.parameter.sub_(update.mul_(rate * scale / clipped))

    def _variance(self, tensor: TensorUpdate, epsilon: float) -> Tensor:
        """The estimate of the second moment of each element on this rank."""
        share, squares = tensor.step ** self.beta2_decay, tensor.gradient.square()
        if "variance" in tensor.states:
            return tensor.states["variance"].lerp_(squares, share)
        row, column = tensor.states["row_var"], tensor.states["col_var"]
        row.lerp_(tensor.sum(squares, -1) / tensor.shape[-1], share)
        column.lerp_(tensor.sum(squares, -2) / tensor.shape[-2], share)
        mean = row.mean(dim=-2, keepdim=True).clamp(min=epsilon)
        return tensor.part(row) @ tensor.part(column) / tensor.part(mean)
