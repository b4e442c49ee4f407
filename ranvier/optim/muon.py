"""Muon (Jordan et al., 2024): the momentum of each hidden matrix is orthogonalised before it is applied.

Like `torch.optim.Muon`, with Nesterov momentum and five Newton-Schulz steps. Only matrices of layers are updated this
way; embeddings, heads, biases and norms are left to AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
from torch import Tensor

from ranvier.optim.tensor_update import TensorUpdate

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic polynomial, whose slope at zero is as large as convergence allows."""
STEPS = 5
_EPSILON = 1e-7


@dataclass(frozen=True)
class Muon:
    """The rule. scale: factor on the learning rate of a matrix, like torch's `adjust_lr_fn`. compute_dtype: dtype of
    the Newton-Schulz steps; None for that of the momentum."""

    momentum: float = 0.95
    scale: Literal["match-rms-adamw", "original"] = "match-rms-adamw"
    compute_dtype: torch.dtype | None = None

    def applies_to(self, name: str, shape: tuple[int, ...], *, in_layer: bool) -> bool:
        """See `ranvier.optim.rules.TensorRule`."""
        return in_layer and len(shape) == 2 and min(shape) > 0

    def state_shapes(self, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...] | None]:
        """See `ranvier.optim.rules.TensorRule`."""
        return {"momentum_buffer": None}

    def update_tensors(self, tensors: Mapping[str, TensorUpdate]) -> None:
        """See `ranvier.optim.rules.TensorRule`."""
        for tensor in tensors.values():
            self._update(tensor)

    def _update(self, tensor: TensorUpdate) -> None:
        momentum = tensor.states["momentum_buffer"]
        momentum.lerp_(tensor.gradient, 1 - self.momentum)
        update = tensor.gradient.lerp(momentum, self.momentum).to(self.compute_dtype or momentum.dtype)
        direction = tensor.part(orthogonalised(tensor.gather(update)))
        tensor.parameter.mul_(1 - tensor.learning_rate * tensor.weight_decay)
        tensor.parameter.add_(direction, alpha=-tensor.learning_rate * self._factor(tensor.shape))

    def flops(self, shape: tuple[int, ...]) -> float:
        """Floating-point operations of one update of a whole matrix, for predictions: its Newton-Schulz steps."""
        short, long = sorted(shape)
        return STEPS * (4.0 * short ** 2 * long + 2.0 * short ** 3)

    def working_bytes(self, shape: tuple[int, ...], part: tuple[int, ...], element_bytes: int) -> int:
        """Memory of the update of a matrix of which this rank has a part, besides the part and its states, for
        predictions: that of a Newton-Schulz step, or the momentum before it is rounded."""
        size, square = prod(shape), min(shape) ** 2
        whole = 0 if shape == part else prod(part)
        each = element_bytes if self.compute_dtype is None else self.compute_dtype.itemsize
        return max(each * (whole + 3 * size + 2 * square), prod(part) * (element_bytes + each))

    def _factor(self, shape: tuple[int, ...]) -> float:
        rows, columns = shape
        if self.scale == "original":
            return math.sqrt(max(1.0, rows / columns))
        return 0.2 * math.sqrt(max(rows, columns))  # an update then has the size of AdamW's (Liu et al., 2025)


def orthogonalised(matrix: Tensor) -> Tensor:
    """[m, n], approximately the nearest matrix with orthonormal rows or columns: its singular values are 0.5 to 1.5."""
    a, b, c = COEFFICIENTS
    found = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    found = found / found.norm().clamp(min=_EPSILON)
    for _ in range(STEPS):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.T if matrix.shape[0] > matrix.shape[1] else found
