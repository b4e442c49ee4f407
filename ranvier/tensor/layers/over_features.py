"""What layers with one value for each feature share: over which features they are, and so how they are sharded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from ranvier.config.run import TensorParallel
from ranvier.errors import ModelError
from ranvier.layout import Split
from ranvier.tensor.boundaries import sharded_dim
from ranvier.tensor.mesh import TensorMesh
from ranvier.tensor.splittable import Constraint, Layer, feature_split

Over = Literal["stream", "inner", "heads"]
"""What a layer is over: each token's features in the residual stream [B, S, H]; each token's features between an
output- and an input-stationary Linear [B, S, F]; or the features of each head [..., heads, ..., width]."""


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
