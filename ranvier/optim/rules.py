"""What one update does to one flat piece of parameters: AdamW and SGD, by PyTorch's own fused kernels.

A rule knows nothing of where states live, of buckets or of ranks. Elements do not depend on each other, so any cut into
pieces gives the same result, but for the last bit: the kernels round the few elements at a piece's end otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from ranvier.run import Optim


class Rule(Protocol):
    """Updates flat tensors of one length in place."""

    states: tuple[str, ...]
    """Names of the states beside the parameters, by torch.optim's names. All start at zero."""

    def update(self, parameters: Tensor, gradients: Tensor, states: dict[str, Tensor], *, step: int,
               learning_rate: float, weight_decay: float) -> None:
        """Update number `step` (from 1). All tensors: [n], one device."""


@dataclass(frozen=True)
class AdamW:
    """Decoupled weight decay (Loshchilov and Hutter, 2019).

    One step count serves all parameters: the moments of one that is frozen, or reached by no loss, for the first steps
    are corrected as if they were as old as the run.
    """

    optim: Optim
    states = ("exp_avg", "exp_avg_sq")

    def update(self, parameters: Tensor, gradients: Tensor, states: dict[str, Tensor], *, step: int,
               learning_rate: float, weight_decay: float) -> None:
        counted = torch.full((), step - 1, dtype=torch.float32, device=parameters.device)
        adamw([parameters], [gradients], [states["exp_avg"]], [states["exp_avg_sq"]], [], [counted], fused=True,
              amsgrad=False, beta1=self.optim.betas[0], beta2=self.optim.betas[1], lr=learning_rate,
              weight_decay=weight_decay, eps=self.optim.epsilon, maximize=False)


@dataclass(frozen=True)
class SGD:
    """Momentum without dampening (Sutskever et al., 2013); weight decay is added to the gradient."""

    optim: Optim

    @property
    def states(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.optim.momentum else ()

    def update(self, parameters: Tensor, gradients: Tensor, states: dict[str, Tensor], *, step: int,
               learning_rate: float, weight_decay: float) -> None:
        sgd([parameters], [gradients], [states.get("momentum_buffer")], fused=True, lr=learning_rate,
            weight_decay=weight_decay, momentum=self.optim.momentum, dampening=0.0,
            nesterov=False, maximize=False)


def rule_of(optim: Optim) -> Rule:
    """The rule that `optim.algorithm` names."""
    return AdamW(optim) if optim.algorithm == "adamw" else SGD(optim)
