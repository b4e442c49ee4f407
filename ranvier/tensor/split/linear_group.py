"""Several linear layers of one input on a row x col mesh, as one product: the input is gathered once.

A rank multiplies with its rows of all weights together, which are copied next to each other for each product. Where the
columns do not divide the units of an output, such as heads of keys that several heads of queries share, every column
holds all of its weight and multiplies with the units that its part of the first output needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from ranvier.layout import Split, part
from ranvier.tensor.mesh import TensorMesh
from ranvier.tensor.quantized_weight import dense
from ranvier.tensor.split.linear import SplitLinear
from ranvier.tensor.split.own_part import own_part
from ranvier.tensor.split.products import Product
from ranvier.tensor.splittable import Layer


@dataclass(frozen=True, kw_only=True)
class OwnUnits:
    """The units of one output that a column computes.

    rows: of the weight that the column holds, those that it multiplies with. order: the unit to take for each unit of
    the first output, counted from the first row's; None where units are taken as they are.
    """

    rows: slice
    order: tuple[int, ...] | None = None


def own_units(features: int, units: int, leading: int, mesh: TensorMesh) -> OwnUnits:
    """Of an output with so many features and units, next to a first output of `leading` units."""
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

    splits: of each parameter of the layer, by its name. owned: of each output, what this column computes. units: of
    each output.
    """

    def __init__(self, layer: Layer, mesh: TensorMesh, product: Product, splits: Mapping[str, Split],
                 owned: Mapping[str, OwnUnits], units: Mapping[str, int]) -> None:
        super().__init__(layer, mesh, product)
        self._has_one_weight = False
        self._owned, self._units = dict(owned), dict(units)
        for name in owned:
            whole, mine = layer.get_submodule(name), nn.Module()
            for kind, parameter in whole.named_parameters(recurse=False):
                mine.register_parameter(kind, own_part(parameter, splits[f"{name}.{kind}"], mesh))
            self.add_module(name, mine)

    @property
    def weights(self) -> tuple[nn.Parameter, ...]:
        """One for each output."""
        return self._of_outputs("weight")

    @property
    def biases(self) -> tuple[nn.Parameter, ...]:
        """One for each output, or none."""
        return self._of_outputs("bias")

    def _of_outputs(self, kind: str) -> tuple[nn.Parameter, ...]:
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
            return torch.cat([one.t() for one in rows], dim=1, out=weight)
        return torch.cat(rows, out=weight)

    def own_bias(self) -> Tensor | None:
        """Of the same features, without a graph."""
        biases = [self.mesh.cast(bias.detach()[own.rows])
                  for bias, own in zip(self.biases, self._owned.values(), strict=True)] if self.biases else []
        return torch.cat(biases) if biases else None

    def shares(self, gradient: Tensor) -> list[Tensor]:
        """Of rows that other columns multiply with, zeros."""
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
        return tuple(_in_order(self._adapted(name, one, x), own.order)
                     for (name, own), one in zip(self._owned.items(), outputs, strict=True))

    def _adapted(self, name: str, y: Tensor, x: Tensor) -> Tensor:
        """One output with its adapter's, where it has one (`ranvier.tensor.adapters`)."""
        output = self.get_submodule(name)
        adapter = output._modules.get("lora")
        if adapter is None:
            return y
        adapted: Tensor = adapter(y, x, lambda: (output.weight, output._parameters.get("bias")), self._owned[name].rows)
        return adapted


def _in_order(y: Tensor, order: tuple[int, ...] | None) -> Tensor:
    """y [..., units x width] with its units in this order, in which one may come several times."""
    if order is None:
        return y
    places = torch.tensor(order, device=y.device)
    by_units: Tensor = y.unflatten(-1, (max(order) + 1, -1))
    return by_units.index_select(-2, places).flatten(-2)
