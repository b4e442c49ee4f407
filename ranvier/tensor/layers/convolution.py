"""Convolutions over tokens in which each feature stays by itself."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from ranvier.errors import ModelError
from ranvier.tensor.layers.over_features import OverFeatures
from ranvier.tensor.mesh import TensorMesh
from ranvier.tensor.split.own_part import with_own_parts


class DepthwiseConv1d(OverFeatures):
    """y[b, t, f] = bias[f] + sum over k of weight[f, 0, k] x[b, t + k - offset, f], with zeros beside the sequence.

    With parameters as of nn.Conv1d(features, features, kernel_size, groups=features), on tensors [B, S, F].

    causal: offset is kernel_size - 1, so that a token sees none after it; else (kernel_size - 1) // 2.
    over: inner, between an output- and an input-stationary Linear, or stream; there a column must have all tokens, so
        not with sequence sharding.
    """

    def __init__(self, features: int, kernel_size: int, bias: bool = True, *, causal: bool = True,
                 over: Literal["inner", "stream"] = "inner", dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self._features, self.kernel_size, self.causal = features, kernel_size, causal
        self.weight = nn.Parameter(torch.empty(features, 1, kernel_size, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(features, dtype=dtype)) if bias else None
        bound = kernel_size ** -0.5
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)
        if over not in ("inner", "stream"):
            raise ModelError("must be inner or stream", where="over of DepthwiseConv1d", value=over,
                             remedy="Flatten the heads first: the features of all heads are inner.")
        self._set_over(over)

    @property
    def num_features(self) -> int:
        """Features of the whole last dim."""
        return self._features

    def split(self, mesh: TensorMesh) -> nn.Module:
        """The same layer with this column's features. ModelError where columns share the tokens."""
        if self.over == "stream" and mesh.activations.name == "sequence" and mesh.num_cols > 1:
            raise ModelError("needs all tokens of a sequence, which the columns share", where="DepthwiseConv1d",
                             value="over='stream'", remedy="Put it between two Linears (over='inner'), or set "
                                                           "--tensor.sequence-sharding false.")
        return with_own_parts(self, mesh)

    def forward(self, x: Tensor) -> Tensor:
        """x_BSF to [B, S, F]."""
        before = self.kernel_size - 1 if self.causal else (self.kernel_size - 1) // 2
        padded = functional.pad(x.transpose(1, 2), (before, self.kernel_size - 1 - before))
        return functional.conv1d(padded, self.weight, self.bias, groups=len(self.weight)).transpose(1, 2)
