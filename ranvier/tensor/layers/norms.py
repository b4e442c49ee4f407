"""Norms over the last dim: of the residual stream, of activations inside a sublayer, or of each head."""

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
from ranvier.tensor.mesh import TensorMesh
from ranvier.tensor.split.norms import SplitNorm
from ranvier.tensor.split.own_part import with_own_parts
from ranvier.tensor.splittable import Constraint, Layer, feature_split

Over = Literal["stream", "inner", "heads"]
"""What a norm is over: each token's features in the residual stream [B, S, H]; each token's features between an output-
and an input-stationary Linear [B, S, F]; or the features of each head [..., heads, ..., width]."""


class _Norm(Layer):
    """What norms over the last dim share."""

    normalized_shape: tuple[int, ...]
    units: int | None = None
    """Pieces of the features that columns must not cut, such as heads."""

    def _set_over(self, over: Over) -> None:
        if over not in ("stream", "inner", "heads"):
            raise ModelError("must be stream, inner or heads", where=f"over of {type(self).__name__}", value=over,
                             remedy="Say what the norm is over: the residual stream, activations between two Linears, "
                                    "or the features of a head.")
        self.over = self.takes = self.gives = over

    def splits(self, settings: TensorParallel) -> dict[str, Split]:
        """Weight and bias are sharded as the features are."""
        split = {"stream": feature_split(settings), "inner": Split((("col",),), summed=("row",)),
                 "heads": Split(((),), summed=("row", "col"))}[self.over]
        return {name: split for name, parameter in self._parameters.items() if parameter is not None}

    def divisibility_constraints(self, mesh: TensorMesh) -> Iterator[Constraint]:
        """Columns divide the features, where they are sharded."""
        if self._is_sharded(mesh):
            if self.units is not None:
                yield "units", self.units, "col", mesh.num_cols
            yield "features", self.normalized_shape[-1], "col", mesh.num_cols

    def _is_sharded(self, mesh: TensorMesh) -> bool:
        """Whether the dim that is normalized is sharded over columns."""
        return sharded_dim(mesh, self.takes, 1) == 0


class LayerNorm(_Norm, nn.LayerNorm):
    """Layer norm over the last dim (Ba et al., 2016). over: see `Over`."""

    def __init__(self, normalized_shape: int | tuple[int, ...], eps: float = 1e-5, elementwise_affine: bool = True,
                 bias: bool = True, *, over: Over = "stream", dtype: torch.dtype | None = None) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, dtype=dtype)
        self._set_over(over)

    def split(self, mesh: TensorMesh) -> nn.Module:
        """A `SplitNorm` where the features are sharded, else the same layer."""
        return SplitNorm(self, mesh, self.eps, centred=True) if self._is_sharded(mesh) else with_own_parts(self, mesh)


class RMSNorm(_Norm, nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) over the last dim, times a weight (Zhang and Sennrich, 2019).

    over: see `Over`. A norm of queries and keys is over "inner" where it is over all heads together, over "heads" where
    each head is normalized by itself. offset: what is added to the weight, such as 1 in Gemma, whose weights start from
    0. units: pieces of the features that are never divided, such as heads.
    """

    def __init__(self, normalized_shape: int | tuple[int, ...], eps: float = 1e-6, elementwise_affine: bool = True, *,
                 over: Over = "stream", offset: float = 0.0, units: int | None = None,
                 dtype: torch.dtype | None = None) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, dtype=dtype)
        self._set_over(over)
        self.offset, self.units = offset, units

    def forward(self, x: Tensor) -> Tensor:
        """The norm, in fp32 at least where the weight has an offset: 1 + weight would lose digits in half precision."""
        if not self.offset:
            return functional.rms_norm(x, self.normalized_shape, self.weight, self.eps)
        wide = torch.promote_types(x.dtype, torch.float32)
        return functional.rms_norm(x.to(wide), self.normalized_shape, self.weight.to(wide) + self.offset, self.eps
                                   ).to(x.dtype)

    def split(self, mesh: TensorMesh) -> nn.Module:
        """A `SplitNorm` where the features are sharded, else the same layer."""
        return SplitNorm(self, mesh, self.eps, centred=False, offset=self.offset) if self._is_sharded(mesh) \
            else with_own_parts(self, mesh)
