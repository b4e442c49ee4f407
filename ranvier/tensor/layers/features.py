"""Layers with one value for each feature, whose sharding follows from the features they cover; and learned factors, one
for each feature or a scalar.

    x + self.scale(self.fc2(...))                LayerScale (Touvron et al., 2021)
    x + self.alpha() * self.fc2(...)             ReZero (Bachlechner et al., 2020)
    (scores * self.temperature()).softmax(-1)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn

from ranvier.config.run import TensorParallel
from ranvier.errors import ModelError
from ranvier.layout import Split
from ranvier.tensor.boundaries import sharded_dim
from ranvier.tensor.mesh import TensorMesh
from ranvier.tensor.splittable import Constraint, Layer, feature_split

Over = Literal["stream", "inner", "heads"]
"""The features that a layer covers: each token's features in the residual stream [B, S, H]; each token's features
between an output- and an input-stationary Linear [B, S, F]; or the features of each head [..., heads, ..., width]."""


class OverFeatures(Layer):
    """Base of layers whose parameters have one value for each feature of the last dim.

    units: pieces of the features that columns must not cut, such as heads.
    """

    units: int | None = None

    @property
    def num_features(self) -> int:
        """Features of the whole last dim."""
        raise NotImplementedError

    def _set_over(self, over: Over) -> None:
        if over not in ("stream", "inner", "heads"):
            raise ModelError("must be stream, inner or heads", code="layer-over",
                             where=f"over of {type(self).__name__}", value=over,
                             remedy="Say what the layer is over: the residual stream, activations between two Linears, "
                                    "or the features of a head.")
        self.over = self.takes = self.gives = over

    def splits(self, settings: TensorParallel) -> dict[str, Split]:
        """Each parameter's first dim is sharded as the features are."""
        split = {"stream": feature_split(settings), "inner": Split((("col",),), summed=("row",)),
                 "heads": Split(((),), summed=("row", "col"))}[self.over]
        return {name: Split((*split.dims, *((),) * (parameter.dim() - 1)), split.summed)
                for name, parameter in self._parameters.items() if parameter is not None}

    def divisibility_constraints(self, mesh: TensorMesh) -> Iterator[Constraint]:
        """Columns divide the features, where they are sharded."""
        if self._is_sharded(mesh):
            if self.units is not None:
                yield "units", self.units, "col", mesh.num_cols
            yield "features", self.num_features, "col", mesh.num_cols

    def _is_sharded(self, mesh: TensorMesh) -> bool:
        """Whether the features are sharded over columns."""
        return sharded_dim(mesh, self.takes, 1) == 0


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

    def forward(self) -> Tensor:
        """The number, of `shape`."""
        return self.weight.view_as(self.weight)
