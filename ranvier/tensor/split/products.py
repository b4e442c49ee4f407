"""The products of a split Linear behind one interface: collectives differ between schemes, results do not.

    y = x W^T + b       forward, for x and W as they are sharded over the mesh
    dx, dW              gradients, together or one at a time

x is in the layout of the residual stream or [.., in_j], y in the other layout; see `stationary` and `summa`. The weight
is [rows, out, in] of a column, or transposed, arrived or arriving; for SUMMA it is this rank's block, [1, out, in].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from ranvier.tensor.mesh import TensorMesh
from ranvier.tensor.overlapped_transfers import Arriving

Gathered = Sequence[Arriving]
"""The panels of a gathered tensor, each in separate memory."""


class Product(ABC):
    """One kind of product on one mesh."""

    gathers_weight = True
    """Whether the full weight of a column is gathered."""
    transposes_weight = False
    """Whether the weight and its gradient are sent transposed, [rows, in_i, out_j], so that the rows' parts are one
    matrix."""

    def __init__(self, mesh: TensorMesh) -> None:
        self._mesh = mesh

    @abstractmethod
    def out_shape(self, x: Tensor, features: int) -> tuple[int, ...]:
        """The shape of y on this rank. features: rows of the weight."""

    def gather_x(self, x: Tensor) -> Gathered | None:
        """Start gathering x into new memory; None if x is not sent."""
        return None

    def gather_dy(self, dy: Tensor) -> Gathered | None:
        """Start gathering dy into new memory; None if dy is not sent."""
        return None

    @abstractmethod
    def forward(self, x: Tensor, weight: Arriving, bias: Tensor | None, gathered: Gathered | None) -> Tensor:
        """y. gathered: x, if its gather has been started."""

    @abstractmethod
    def gradients(self, dy: Tensor, x: Tensor, weight: Arriving | None, shape: torch.Size | None, *,
                  gathered: Gathered | None = None, into: Tensor | None = None, reuse: bool = False,
                  summed: bool = True) -> tuple[Tensor | None, Arriving | None]:
        """(dx, dW); if both are needed, dx is sent while dW is computed.

        weight: None if dx is not needed. shape: of dW, None if dW is not needed; without dW only the shape of x is
        used. dW is in fp32 if operands are in half precision, and may be in the workspace. gathered: the result of
        `gather_x` or `gather_dy`; only the shape of that operand is then used. into: a gradient in the format of dW, to
        which dW is added if no sum over ranks is needed (None is then returned). reuse: dx may overwrite x in memory.
        summed: False for this row's part of dW's sum over rows, [rows, *shape]; stationary products only.
        """


def flat(tensor: Tensor) -> Tensor:
    """[tokens, width]."""
    return tensor.reshape(-1, tensor.shape[-1])
