"""Learned factors: one for each feature, and scalars.

    x + self.scale(self.fc2(...))                LayerScale (Touvron et al., 2021)
    x + self.alpha() * self.fc2(...)             ReZero (Bachlechner et al., 2020)
    (scores * self.temperature()).softmax(-1)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ranvier.config.run import TensorParallel
from ranvier.layout import Split
from ranvier.tensor.layers.over_features import Over, OverFeatures
from ranvier.tensor.mesh import TensorMesh
from ranvier.tensor.split.own_part import with_own_parts
from ranvier.tensor.splittable import Layer


class Scale(OverFeatures):
    """x times a learned factor for each feature of the last dim.

    value: of all factors at the start. over: see `Over`.
    """

    def __init__(self, features: int, value: float = 1.0, *, over: Over = "stream",
                 dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self._features = features
        self.weight = nn.Parameter(torch.full((features,), value, dtype=dtype))
        self._set_over(over)

    @property
    def num_features(self) -> int:
        """Features of the whole last dim."""
        return self._features

    def split(self, mesh: TensorMesh) -> nn.Module:
        """The same layer with this column's factors."""
        return with_own_parts(self, mesh)

    def forward(self, x: Tensor) -> Tensor:
        """x of any shape [..., features]."""
        return x * self.weight


class Scalar(Layer):
    """A learned number. Called without arguments, it returns a tensor that any operation of a block may take.

    value: at the start. shape: of the parameter `weight`; some models have (1,).
    """

    gives = "whole"

    def __init__(self, value: float = 1.0, *, shape: tuple[int, ...] = (), dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full(shape, value, dtype=dtype))

    def splits(self, settings: TensorParallel) -> dict[str, Split]:
        """Replicated; each row has the gradient of its samples, and all columns have that of a row."""
        return {"weight": Split(((),) * self.weight.dim(), summed=("row",))}

    def split(self, mesh: TensorMesh) -> nn.Module:
        """The same layer."""
        return with_own_parts(self, mesh)

    def forward(self) -> Tensor:
        """The number, of `shape`."""
        return self.weight.view_as(self.weight)
