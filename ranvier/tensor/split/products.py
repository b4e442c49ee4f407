"""The products of a split Linear behind one interface: collectives differ from scheme to scheme, results do not.

    y = x W^T + b       forward, of x and W as they are sharded over the mesh
    dx, dW              gradients, together or one at a time

x is in the layout of the residual stream or [.., in_j], y in the other one; see `stationary` and `summa`. The weight is
[rows, out, in] of a column, or transposed, on its way or here already; for SUMMA it is this rank's block, [1, out, in].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from ranvier.tensor.mesh import TensorMesh
from ranvier.tensor.overlapped_transfers import Arriving

Gathered = Sequence[Arriving]
"""The panels of a gathered tensor, each in memory of its own."""


class Product(ABC):
    """One kind of product on one mesh."""

    gathers_weight = True
    """Whether the weight of a column is gathered, as a whole."""
    transposes_weight = False
    """Whether it travels transposed, [rows, in_i, out_j], so that the rows' parts are one matrix; so does its
    gradient."""

    def __init__(self, mesh: TensorMesh) -> None:
        self._mesh = mesh

    @abstractmethod
    def out_shape(self, x: Tensor, features: int) -> tuple[int, ...]:
        """The shape of y on this rank. features: rows of the weight."""

    def gather_x(self, x: Tensor) -> Gathered | None:
        """Start gathering x into memory of its own; None where x does not travel."""
        return None

    def gather_dy(self, dy: Tensor) -> Gathered | None:
        """Start gathering dy into memory of its own; None where dy does not travel."""
        return None

    @abstractmethod
    def forward(self, x: Tensor, weight: Arriving, bias: Tensor | None, gathered: Gathered | None) -> Tensor:
        """y. gathered: x, on its way already."""

    @abstractmethod
    def gradients(self, dy: Tensor, x: Tensor, weight: Arriving | None, shape: torch.Size | None, *,
                  gathered: Gathered | None = None, into: Tensor | None = None, reuse: bool = False,
                  summed: bool = True) -> tuple[Tensor | None, Arriving | None]:
        """(dx, dW); of both, dx is on its way while dW is computed.

        weight: None where dx is not wanted. shape: of dW, None where that is not wanted; without dW only the shape of x
        is used. dW is in fp32 where operands are in half precision, and may lie in the workspace. gathered: what
        `gather_x` or `gather_dy` has returned; only the shape of that operand is used then. into: a gradient in the
        format of dW, to which that is added where no sum over ranks is needed (None is returned then). reuse: dx may
        take the place of x in memory. summed: False for this row's part of dW's sum over rows, [rows, *shape];
        stationary products only.
        """


def flat(tensor: Tensor) -> Tensor:
    """[tokens, width]."""
    return tensor.reshape(-1, tensor.shape[-1])
