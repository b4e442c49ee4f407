"""Layers with parameters for each feature, whose sharding follows from the features they cover: learned factors, one
for each feature or a scalar, and convolutions over tokens.

    x + self.scale(self.fc2(...))                LayerScale (Touvron et al., 2021)
    x + self.alpha() * self.fc2(...)             ReZero (Bachlechner et al., 2020)
    (scores * self.temperature()).softmax(-1)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from ranvier.config.run import TensorParallel
from ranvier.errors import ModelError
from ranvier.layout import Split
from ranvier.tensor.boundaries import sharded_dim
from ranvier.tensor.mesh import TensorMesh, transpose_shards
from ranvier.tensor.splittable import Constraint, Layer, SplitLayer, feature_split

Over = Literal["stream", "inner", "heads"]
"""The features that a layer covers: each token's features in the residual stream [B, S, H]; each token's features
between an output- and an input-stationary Linear [B, S, F]; or the features of each head [..., heads, ..., width]."""


class OverFeatures(Layer):
    """Base of layers whose parameters have one value for each feature of the last dim.

    units: pieces of the features that columns must not cut, such as heads.
    """

    units: int | None = None

    def _set_over(self, over: Over, num_features: int) -> None:
        """Set what the layer is over. num_features: of the full last dim."""
        if over not in ("stream", "inner", "heads"):
            raise ModelError("must be stream, inner or heads", code="layer-over",
                             where=f"over of {type(self).__name__}", value=over,
                             remedy="Say what the layer is over: the residual stream, activations between two Linears, "
                                    "or the features of a head.")
        self.over = self.takes = self.gives = over
        self._num_features = num_features

    def splits(self, settings: TensorParallel) -> dict[str, Split]:
        """Each parameter's first dim is sharded as the features are."""
        split = {"stream": feature_split(settings), "inner": Split((("col",),), summed=("row",)),
                 "heads": Split(((),), summed=("row", "col"))}[self.over]
        return {name: Split((*split.dims, *((),) * (parameter.dim() - 1)), split.summed)
                for name, parameter in self._parameters.items() if parameter is not None}

    def divisibility_constraints(self, mesh: TensorMesh) -> Iterator[Constraint]:
        """Columns divide the features if they are sharded."""
        if self._is_sharded(mesh):
            if self.units is not None:
                yield "units", self.units, "col", mesh.num_cols
            yield "features", self._num_features, "col", mesh.num_cols

    def _is_sharded(self, mesh: TensorMesh) -> bool:
        """Whether the features are sharded over columns."""
        return sharded_dim(mesh, self.takes, 1) == 0


class Scale(OverFeatures):
    """x times a learned factor for each feature of the last dim.

    value: initial value of all factors. over: see `Over`.
    """

    def __init__(self, features: int, value: float = 1.0, *, over: Over = "stream",
                 dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((features,), value, dtype=dtype))
        self._set_over(over, features)

    def forward(self, x: Tensor) -> Tensor:
        """x of any shape [..., features]."""
        return x * self.weight


class Scalar(Layer):
    """A learned number. Called without arguments, it returns a tensor that any operation of a block may take.

    value: initial value. shape: of the parameter `weight`; some models have (1,).
    """

    gives = "whole"

    def __init__(self, value: float = 1.0, *, shape: tuple[int, ...] = (), dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full(shape, value, dtype=dtype))

    def splits(self, settings: TensorParallel) -> dict[str, Split]:
        """Replicated; each row has the gradient of its samples, and all columns have the gradient of their row."""
        return {"weight": Split(((),) * self.weight.dim(), summed=("row",))}

    def forward(self) -> Tensor:
        """The number, of `shape`."""
        return self.weight.view_as(self.weight)


# --- convolutions -----------------------------------------------------------------------------------------------------

# Depthwise convolutions over tokens. If the tokens are sharded over columns, each column convolves all tokens of its
# features:
#
#     [B, S / c, F]  --all-to-all-->  [B, S, F / c]  --convolution-->  [B, S, F / c]  --all-to-all-->  [B, S / c, F]


class DepthwiseConv1d(OverFeatures):
    """y[b, t, f] = bias[f] + sum over k of weight[f, 0, k] x[b, t + k - offset, f], with zeros around the sequence.

    With the parameters of nn.Conv1d(features, features, kernel_size, groups=features), on tensors [B, S, F].

    causal: offset is kernel_size - 1, so that a token sees no later token; otherwise (kernel_size - 1) // 2.
    over: inner, between an output- and an input-stationary Linear, or stream. In the stream, with a sharded sequence,
        columns exchange tokens for features and back.
    """

    bias: nn.Parameter | None

    def __init__(self, features: int, kernel_size: int, bias: bool = True, *, causal: bool = True,
                 over: Literal["inner", "stream"] = "inner", dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.kernel_size, self.causal = kernel_size, causal
        self.weight = nn.Parameter(torch.empty(features, 1, kernel_size, dtype=dtype))
        self.register_parameter("bias", nn.Parameter(torch.empty(features, dtype=dtype)) if bias else None)
        bound = kernel_size ** -0.5
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)
        if over not in ("inner", "stream"):
            raise ModelError("must be inner or stream", code="convolution-over", where="over of DepthwiseConv1d",
                             value=over, remedy="Flatten the heads first: the features of all heads are inner.")
        self._set_over(over, features)

    def split(self, mesh: TensorMesh) -> nn.Module:
        """The same layer with this column's features; a `SplitStreamConv1d` if tokens are sharded over columns."""
        if self._shares_tokens(mesh):
            return SplitStreamConv1d(self, mesh, causal=self.causal)
        return super().split(mesh)

    def forward(self, x: Tensor) -> Tensor:
        """x_BSF to [B, S, F]."""
        return depthwise(x, self.weight, self.bias, causal=self.causal)

    def divisibility_constraints(self, mesh: TensorMesh) -> Iterator[Constraint]:
        """Columns divide the features."""
        yield from super().divisibility_constraints(mesh)
        if self._shares_tokens(mesh):
            yield "features", self._num_features, "col", mesh.num_cols

    def _shares_tokens(self, mesh: TensorMesh) -> bool:
        return self.over == "stream" and mesh.activations.name == "sequence" and mesh.num_cols > 1


class SplitStreamConv1d(SplitLayer):
    """A `DepthwiseConv1d` of the residual stream with a sharded sequence. Each column has all weights, and gradients
    of the weights of its features."""

    def __init__(self, layer: Layer, mesh: TensorMesh, *, causal: bool) -> None:
        super().__init__(layer, mesh)
        self._causal = causal

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S / c, F] to [B, S / c, F]."""
        own = x.shape[-1] // self.mesh.num_cols
        features = slice(self.mesh.col * own, (self.mesh.col + 1) * own)
        bias = None if self.bias is None else self.bias[features]
        y = depthwise(transpose_shards(x, 2, 1, self.mesh), self.weight[features], bias, causal=self._causal)
        return transpose_shards(y, 1, 2, self.mesh)


def depthwise(x: Tensor, weight: Tensor, bias: Tensor | None, *, causal: bool) -> Tensor:
    """x [B, S, F] convolved with weight [F, 1, K], with zeros around the sequence: [B, S, F]."""
    size = weight.shape[-1]
    before = size - 1 if causal else (size - 1) // 2
    padded = functional.pad(x.transpose(1, 2), (before, size - 1 - before))
    return functional.conv1d(padded, weight, bias, groups=len(weight)).transpose(1, 2)
