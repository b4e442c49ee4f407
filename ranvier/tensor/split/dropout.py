"""Dropout on a row x col mesh: masks of this rank's part of the residual stream."""

from __future__ import annotations

from torch import Tensor

from ranvier.tensor import keyed_dropout
from ranvier.tensor.mesh import TensorMesh
from ranvier.tensor.split.own_part import SplitLayer
from ranvier.tensor.splittable import Layer


class SplitDropout(SplitLayer):
    """Drops what the unsplit layer drops: masks are keyed by the sample and the place in it."""

    def __init__(self, layer: Layer, mesh: TensorMesh, probability: float) -> None:
        super().__init__(layer, mesh)
        self._probability = probability

    def forward(self, x: Tensor) -> Tensor:
        """x, this rank's part of x_BSH."""
        sizes = list(x.shape[1:])
        start, full = [0] * len(sizes), list(sizes)
        for dim in self.mesh.activations.cut_dims:
            place = dim - 2  # of (S, H)
            start[place], full[place] = self.mesh.col * sizes[place], self.mesh.num_cols * sizes[place]
        return keyed_dropout.dropout(x, self._probability, self.training, start=start, full_shape=full)
