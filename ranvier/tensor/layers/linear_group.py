"""Several linear layers of one input, such as queries, keys and values, or a gated MLP. On rows and columns they are
one product: the input is gathered once.

A rank multiplies with its rows of all weights together, which are copied next to each other for each product. If the
columns do not divide the units of an output, such as key heads that several query heads share, every column holds that
output's full weight and multiplies with the units that its part of the first output needs.

B batch, S sequence, H hidden width, F features of one output.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from ranvier.config.run import TensorParallel
from ranvier.errors import ModelError
from ranvier.layout import Split, part
from ranvier.tensor.mesh import TensorMesh
from ranvier.tensor.quantized_weight import dense
from ranvier.tensor.split.linear import SplitLinear
from ranvier.tensor.split.products import Product
from ranvier.tensor.split.stationary import OutputStationary
from ranvier.tensor.split.summa import SummaProduct
from ranvier.tensor.splittable import ActivationKind, Constraint, Layer, hidden_constraint, own_part


class SharedInputLinear(Layer):
    """Output-stationary linear layers of the residual stream x_BSH, which a mesh gathers once for all of them.

        self.qkv = tensor.SharedInputLinear(hidden, {"query": 32 * 64, "key": 8 * 64, "value": 8 * 64},
                                            units={"query": 32, "key": 8, "value": 8}, bias=False)
        query, key, value = self.qkv(x_BSH)

    It returns a tuple of [B, S, F], one for each output, in their order. Columns divide the units of the first output.
    If they do not divide those of another output, such as key heads that several query heads share, every column holds
    that weight in full, and computes the units that its part of the first output needs: units that several columns
    need are computed by each of them, and if the groups have other sizes than on one rank, a unit is repeated for each
    unit of the first output.

    outputs: name -> features. units: name -> pieces that are never divided, such as heads; the features by default. The
        first output's number of units is a multiple of every other's.
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
        """Weights [out / col, in / row]; [out, in / row] for outputs whose units the columns do not divide."""
        found = {}
        for name, units in self.units.items():
            for kind, _ in self.get_submodule(name).named_parameters(recurse=False):
                found[f"{name}.{kind}"] = Split((("col",), ("row",)), units=units) if kind == "weight" else Split(
                    (("col",),), summed=("row",), units=units)
        return found

    def divisibility_constraints(self, mesh: TensorMesh) -> Iterator[Constraint]:
        """Columns divide the units of the first output, and the residual stream's features; rows divide the latter,
        except with SUMMA."""
        yield "units", next(iter(self.units.values())), "col", mesh.num_cols
        yield from hidden_constraint(mesh, self.in_features, "features of the residual stream")
        if mesh.settings.scheme != "summa":
            yield "features of the residual stream", self.in_features, "row", mesh.num_rows

    def split(self, mesh: TensorMesh) -> nn.Module:
        """A `SplitLinearGroup` with the scheme's product."""
        product: Product = SummaProduct(mesh) if mesh.settings.scheme == "summa" else OutputStationary(mesh)
        leading = next(iter(self.units.values()))
        owned = {name: own_units(features, self.units[name], leading, mesh) for name, features in self.outputs.items()}
        return SplitLinearGroup(self, mesh, product, self.splits(mesh.settings), owned)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """x_BSH to [B, S, F] for each output."""
        return tuple(self.get_submodule(name)(x) for name in self.outputs)


@dataclass(frozen=True, kw_only=True)
class OwnUnits:
    """The units of one output that a column computes.

    rows: the rows of the column's weight that it multiplies with. order: the unit to take for each unit of the first
    output, counted from the first row's unit; None if units keep their order.
    """

    rows: slice
    order: tuple[int, ...] | None = None


def own_units(features: int, units: int, leading: int, mesh: TensorMesh) -> OwnUnits:
    """This rank's units of an output with these features and units, next to a first output of `leading` units."""
    columns, width = mesh.num_cols, features // units
    if units % columns == 0:
        return OwnUnits(rows=slice(0, features // columns))
    group = leading // units
    start, stop = part(leading, columns, mesh.col)
    needed = [unit // group for unit in range(start, stop)]
    first, count = needed[0], needed[-1] - needed[0] + 1
    order = tuple(unit - first for unit in needed)
    shared = len(needed) // count
    is_even = len(needed) % count == 0 and order == tuple(place // shared for place in range(len(needed)))
    return OwnUnits(rows=slice(first * width, (first + count) * width), order=None if is_even else order)


class SplitLinearGroup(SplitLinear):
    """A `SharedInputLinear` on the mesh.

    splits: the split of each parameter of the layer, by name. owned: the units of each output that this column
        computes.
    """

    def __init__(self, layer: Layer, mesh: TensorMesh, product: Product, splits: Mapping[str, Split],
                 owned: Mapping[str, OwnUnits]) -> None:
        super().__init__(layer, mesh, product)
        self._has_one_weight = False
        self._owned = dict(owned)
        for name in owned:
            whole, part = layer.get_submodule(name), nn.Module()
            for kind, parameter in whole.named_parameters(recurse=False):
                part.register_parameter(kind, own_part(parameter, splits[f"{name}.{kind}"], mesh))
            self.add_module(name, part)

    @property
    def weights(self) -> tuple[nn.Parameter, ...]:
        """The weights, one for each output."""
        return self._parameters_of("weight")

    @property
    def biases(self) -> tuple[nn.Parameter, ...]:
        """The biases, one for each output, or none."""
        return self._parameters_of("bias")

    def _parameters_of(self, kind: str) -> tuple[nn.Parameter, ...]:
        found = (self.get_submodule(name)._parameters.get(kind) for name in self._owned)
        return tuple(one for one in found if one is not None)

    @cached_property
    def own_shape(self) -> torch.Size:
        """[out, in] of the rows that this rank multiplies with."""
        features = sum(own.rows.stop - own.rows.start for own in self._owned.values())
        return torch.Size((features, self.weights[0].shape[1]))

    def own_weight(self, buffer: int = 0) -> Tensor:
        """The rows of all weights that this column multiplies with, in the workspace."""
        owned = self._owned.values()
        rows = [self.mesh.cast(dense(weight.detach()[own.rows]))
                for weight, own in zip(self.weights, owned, strict=True)]
        name, workspace = "weights of one input", self.mesh.workspace
        weight = (workspace.take(name, self.weight_shape, rows[0]) if self.mesh.num_rows == 1
                  else workspace.take_one(buffer, name, self.weight_shape, rows[0]))
        if self._product.transposes_weight:
            return torch.cat([row.t() for row in rows], dim=1, out=weight)
        return torch.cat(rows, out=weight)

    def own_bias(self) -> Tensor | None:
        """The bias of the same features, without a graph."""
        biases = [self.mesh.cast(bias.detach()[own.rows])
                  for bias, own in zip(self.biases, self._owned.values(), strict=True)] if self.biases else []
        return torch.cat(biases) if biases else None

    def shares(self, gradient: Tensor) -> list[Tensor]:
        """Each parameter's share of a gradient; zeros for rows that other columns multiply with."""
        found, gradient = [], super().shares(gradient)[0]
        sizes = [own.rows.stop - own.rows.start for own in self._owned.values()]
        for one, weight, own in zip(gradient.split(sizes), self.weights, self._owned.values(), strict=True):
            if len(one) == len(weight):
                found.append(one)
            else:
                found.append(gradient.new_zeros(len(weight), *one.shape[1:]))
                found[-1][own.rows] = one
        return found

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]  # one tensor for each output
        """This column's part of each output [B, S, F_j], in order."""
        y = super().forward(x)
        outputs = y.split([own.rows.stop - own.rows.start for own in self._owned.values()], dim=-1)
        return tuple(_reorder_units(self._add_adapter(name, output, x), own.order)
                     for (name, own), output in zip(self._owned.items(), outputs, strict=True))

    def _add_adapter(self, name: str, y: Tensor, x: Tensor) -> Tensor:
        """One output, with that of its adapter added if it has one (`ranvier.tensor.adapters`)."""
        output = self.get_submodule(name)
        adapter = output._modules.get("lora")
        if adapter is None:
            return y
        adapted: Tensor = adapter(y, x, lambda: (output.weight, output._parameters.get("bias")), self._owned[name].rows)
        return adapted


def _reorder_units(y: Tensor, order: tuple[int, ...] | None) -> Tensor:
    """y [..., units x width] with its units in this order, in which a unit may occur several times."""
    if order is None:
        return y
    places = torch.tensor(order, device=y.device)
    by_units: Tensor = y.unflatten(-1, (max(order) + 1, -1))
    return by_units.index_select(-2, places).flatten(-2)
