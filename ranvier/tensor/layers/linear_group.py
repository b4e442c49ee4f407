"""Several linear layers of one input, such as those of queries, keys and values, or of a gated MLP.

B batch, S sequence, H hidden width, F features of one output.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from ranvier.config.run import TensorParallel
from ranvier.errors import ModelError
from ranvier.layout import Split
from ranvier.tensor.mesh import TensorMesh
from ranvier.tensor.split.linear_group import SplitLinearGroup, own_units
from ranvier.tensor.split.products import OutputStationary, Product, SummaProduct
from ranvier.tensor.splittable import ActivationKind, Constraint, Layer, hidden_constraint


class SharedInputLinear(Layer):
    """Output-stationary linear layers of the residual stream x_BSH, which a mesh gathers once for all of them.

        self.qkv = tensor.SharedInputLinear(hidden, {"query": 32 * 64, "key": 8 * 64, "value": 8 * 64},
                                            units={"query": 32, "key": 8, "value": 8}, bias=False)
        query, key, value = self.qkv(x_BSH)

    It returns a tuple of [B, S, F], one for each output, in their order. Columns divide the units of the first output.
    Where they do not divide those of another, such as heads of keys that several heads of queries share, every column
    holds that weight whole, and computes the units that its part of the first output needs: units that several columns
    need are computed by each of them, and in groups of other sizes than on one rank a unit is repeated for each unit of
    the first output.

    outputs: name -> features. units: name -> pieces that are never divided, such as heads; the features by default.
        Those of the first output are a multiple of each other's.
    """

    takes: ActivationKind = "stream"
    gives: ActivationKind = "inner"

    def __init__(self, in_features: int, outputs: Mapping[str, int], *, units: Mapping[str, int] | None = None,
                 bias: bool = True, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.in_features, self.outputs = in_features, dict(outputs)
        self.units = {name: (units or {}).get(name, features) for name, features in outputs.items()}
        leading = next(iter(self.units.values()))
        for name, count in self.units.items():
            if outputs[name] % count or leading % count:
                raise ModelError(f"does not divide its features {outputs[name]} and the units {leading} of the first "
                                 "output", code="linear-group-units", where=f"units of {name} in SharedInputLinear",
                                 value=count,
                                 remedy="Give every output whole units, and the first a multiple of the others'.")
            self.add_module(name, nn.Linear(in_features, outputs[name], bias, dtype=dtype))

    def splits(self, settings: TensorParallel) -> dict[str, Split]:
        """Weights [out / col, in / row]; of outputs whose units columns do not divide [out, in / row]."""
        found = {}
        for name, units in self.units.items():
            for kind, _ in self.get_submodule(name).named_parameters(recurse=False):
                found[f"{name}.{kind}"] = Split((("col",), ("row",)), units=units) if kind == "weight" else Split(
                    (("col",),), summed=("row",), units=units)
        return found

    def divisibility_constraints(self, mesh: TensorMesh) -> Iterator[Constraint]:
        """Columns divide the units of the first output, and the residual stream's features; rows divide the latter,
        but for SUMMA."""
        yield "units", next(iter(self.units.values())), "col", mesh.num_cols
        yield from hidden_constraint(mesh, self.in_features, "features of the residual stream")
        if mesh.settings.scheme != "summa":
            yield "features of the residual stream", self.in_features, "row", mesh.num_rows

    def split(self, mesh: TensorMesh) -> nn.Module:
        """A `SplitLinearGroup` with the scheme's product."""
        product: Product = SummaProduct(mesh) if mesh.settings.scheme == "summa" else OutputStationary(mesh)
        leading = next(iter(self.units.values()))
        owned = {name: own_units(features, self.units[name], leading, mesh) for name, features in self.outputs.items()}
        return SplitLinearGroup(self, mesh, product, self.splits(mesh.settings), owned, self.units)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """x_BSH to [B, S, F] of each output."""
        return tuple(self.get_submodule(name)(x) for name in self.outputs)
