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
    def input_gradient(self, dy: Tensor, like: Tensor, weight: Arriving, gathered: Gathered | None = None) -> Tensor:
        """dx, in the shape of `like`. gathered: dy, on its way already."""

    @abstractmethod
    def weight_gradient(self, dy: Tensor, x: Tensor, shape: torch.Size, *, gathered: Gathered | None = None,
                        into: Tensor | None = None, summed: bool = True) -> Arriving | None:
        """dW [shape], in fp32 where operands are in half precision; it may lie in the workspace.

        gathered: what `gather_x` or `gather_dy` has returned; only the shape of that operand is used then. into: a
        gradient in the format of dW, to which that is added where no sum over ranks is needed (None is returned then).
        summed: False for this row's part of the sum over rows, [rows, *shape]; stationary products only.
        """

    @abstractmethod
    def gradients(self, dy: Tensor, x: Tensor, weight: Arriving, shape: torch.Size, *, gathered: Gathered | None,
                  into: Tensor | None, reuse: bool, summed: bool = True) -> tuple[Tensor, Arriving | None]:
        """(dx, dW), as the two above, with dx on its way while dW is computed. gathered: x, on its way already.
        reuse: dx may take the place of x in memory."""


def flat(tensor: Tensor) -> Tensor:
    """[tokens, width]."""
    return tensor.reshape(-1, tensor.shape[-1])
