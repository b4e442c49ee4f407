"""Norms over the last dim: of the residual stream, of activations inside a sublayer, or of each head."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ranvier.tensor.layers.over_features import Over, OverFeatures
from ranvier.tensor.mesh import TensorMesh
from ranvier.tensor.split.norms import SplitNorm
from ranvier.tensor.split.own_part import with_own_parts


class _Norm(OverFeatures):
    """What norms over the last dim share."""

    normalized_shape: tuple[int, ...]

    @property
    def num_features(self) -> int:
        """Features of the whole last dim."""
        return self.normalized_shape[-1]


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
