"""Dropout whose masks do not depend on the mesh."""

from __future__ import annotations

from torch import Tensor, nn

from ranvier.tensor import keyed_dropout
from ranvier.tensor.mesh import TensorMesh
from ranvier.tensor.split.dropout import SplitDropout
from ranvier.tensor.split.own_part import with_own_parts
from ranvier.tensor.splittable import Layer


class Dropout(Layer):
    """Dropout of the residual stream, or of what is added to it. Masks are keyed by place: the same on any mesh.

    probability: of an element to be zeroed. whole: the input is replicated, such as what a `ClassifierHead` returns.
    """

    def __init__(self, probability: float, *, whole: bool = False) -> None:
        super().__init__()
        self.probability, self.whole = probability, whole
        self.takes = self.gives = "whole" if whole else "stream"

    def split(self, mesh: TensorMesh) -> nn.Module:
        """A `SplitDropout`, or of a replicated input the same layer."""
        return with_own_parts(self, mesh) if self.whole else SplitDropout(self, mesh, self.probability)

    def forward(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """x of any shape [B, ...], with elements zeroed and the others scaled while training.

        onto: a tensor of the same shape to which that is added, such as the residual stream; where chains are compiled
        (`tensor/fused`) one kernel does both.
        """
        y = keyed_dropout.dropout(x, self.probability, self.training)
        return y if onto is None else onto + y
