"""Lion (Chen et al., 2023): one state, and steps of equal size in the direction of the sign of a momentum.

This is the example of an update rule in docs/optimizers.md: copy this file to write your own.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Lion:
    """The rule. betas: share of the momentum in the direction of a step, and in the next momentum."""

    betas: tuple[float, float] = (0.9, 0.99)
    states = ("momentum",)

    def update(self, parameters: Tensor, gradients: Tensor, states: dict[str, Tensor], *, step: int,
               learning_rate: float, weight_decay: float) -> None:
        """See `ranvier.optim.rules.ElementwiseRule`."""
        momentum, (beta1, beta2) = states["momentum"], self.betas
        direction = momentum.lerp(gradients, 1 - beta1).sign_()
        parameters.mul_(1 - learning_rate * weight_decay).sub_(direction, alpha=learning_rate)
        momentum.lerp_(gradients, 1 - beta2)

    def working_bytes(self, elements: int, element_bytes: int) -> int:
        """Memory of an update of `elements` elements besides them and their states, for predictions: the direction."""
        return elements * element_bytes
