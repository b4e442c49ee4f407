"""Low-rank adapters of linear layers: LoRA (Hu et al., 2021) and DoRA (Liu et al., 2024).

    LoRA   y = W x + b + s B A x
    DoRA   y = m / |W + s B A| * (W + s B A) x + b      |.|: norm of each row, a constant in the backward

W and b belong to the layer, and are usually frozen; A [rank, in], B [out, rank] and m [out] are the adapter's. s is
alpha / rank. The adapter is a child of the layer, `lora`, and a forward hook adds its output, so parameters of the
layer keep their names.

On a row x col mesh, A is sharded like the layer's input and B like its output, and rows hold copies. Only u = A x, with
`rank` features, is communicated (`ranvier.tensor.mesh.exchange`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ranvier.config.run import TensorParallel
from ranvier.layout import Split, index_of, whole_box
from ranvier.tensor import keyed_dropout
from ranvier.tensor.mesh import Sharded, TensorMesh, exchange
from ranvier.tensor.splittable import ActivationKind, Layer, SplitHook, Splittable, feature_split, own_part

Base = Callable[[], tuple[Tensor, Tensor | None]]
"""The rows of the layer's weight and bias that belong to an adapter's output."""


@dataclass(frozen=True, kw_only=True)
class AdapterForm:
    """Form of an adapter's computation.

    scale: s. dropout: probability that an element of the adapter's input is zeroed in training. magnitude: whether the
    form is DoRA's.
    """

    rank: int
    scale: float
    dropout: float = 0.0
    magnitude: bool = False


class Adapter(Layer):
    """The adapter of one output of a linear layer.

    takes, gives: as in the layer. units: number of pieces of the output that are never divided; every column holds all
    of them if the columns do not divide their number (as in `SharedInputLinear`).

    A and B have no values until `models/lora` sets A to uniform random numbers and B to zero. `magnitude_change` is
    what training adds to |W|, so that m starts as |W| whatever weights are loaded.
    """

    magnitude_change: nn.Parameter | None

    def __init__(self, like: Tensor, in_features: int, out_features: int, form: AdapterForm, *, takes: ActivationKind,
                 gives: ActivationKind, units: int | None = None) -> None:
        super().__init__()
        self.form, self.takes, self.gives, self.units = form, takes, gives, units
        self.in_features, self.out_features = in_features, out_features
        self.A = nn.Parameter(like.new_empty(form.rank, in_features))
        self.B = nn.Parameter(like.new_empty(out_features, form.rank))
        self.register_parameter("magnitude_change", nn.Parameter(like.new_empty(out_features)) if form.magnitude
                                else None)

    def splits(self, settings: TensorParallel) -> dict[str, Split]:
        """A is split like the layer's input, B and the magnitude like its output."""
        features = feature_split(settings)
        replicated = Split(((),), summed=("row",))
        enter = {"stream": features, "inner": Split((("col",),), summed=("row",))}.get(self.takes, replicated)
        leave = {"stream": features, "inner": Split((("col",),), summed=("row",), units=self.units)}.get(
            self.gives, replicated)
        found = {"A": Split(((), *enter.dims), enter.summed), "B": Split((*leave.dims, ()), leave.summed, leave.units)}
        return found | ({} if self.magnitude_change is None else {"magnitude_change": leave})

    def forward(self, y: Tensor, x: Tensor, base: Base, rows: slice = slice(None)) -> Tensor:
        """y, the layer's output for x, with the adapter's part added. rows: the rows of the output that y has."""
        u = self.exchange(functional.linear(self.drop_input(x), self.A))
        if self.magnitude_change is None:
            return self._add_product(y, u, rows)
        weight, bias = base()
        before, after = (norm[rows] for norm in self.norms(weight.detach()))
        factor = ((before + self.magnitude_change[rows]) / after).to(y.dtype)
        if bias is None:
            return self._add_product(y, u, rows) * factor
        return self._add_product(y - bias[rows], u, rows) * factor + bias[rows]

    def _add_product(self, y: Tensor, u: Tensor, rows: slice) -> Tensor:
        """y + s B u, as one product."""
        flat = torch.addmm(y.reshape(-1, y.shape[-1]), u.reshape(-1, u.shape[-1]), self.B[rows].t(),
                           alpha=self.form.scale)
        return flat.view(y.shape)

    def drop_input(self, x: Tensor) -> Tensor:
        """The layer's input after the adapter's dropout."""
        return keyed_dropout.dropout(x, self.form.dropout, self.training)

    def exchange(self, u: Tensor) -> Tensor:
        """u in the layout that B takes: u itself on one rank."""
        return u

    @torch.no_grad()
    def norms(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """(|W|, |W + s B A|) [out] in fp32 or wider."""
        squares = self._squares(weight)
        return squares[0].sqrt(), squares[1].sqrt()

    @torch.no_grad()
    def weight_norms(self, weight: Tensor) -> Tensor:
        """|W| of all rows of the output [out], in fp32 or wider; on a mesh, a collective over the ranks of a stage."""
        return self._squares(weight)[0].sqrt()

    def _squares(self, weight: Tensor) -> Tensor:
        return squared_norms(weight, self.A, self.B, self.form.scale)

    def split(self, mesh: TensorMesh) -> nn.Module:
        """Raises NotImplementedError: the layer's split form splits its adapters (`split_adapters`)."""
        raise NotImplementedError


def squared_norms(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """[|W|^2, |W + s B A|^2] of each row, [2, out], without a tensor of the weight's size:
    |w|^2 + 2 s b (A w) + s^2 b (A A^T) b. Sums over parts of the columns may be added."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    alone = torch.linalg.vector_norm(weight, dim=1, dtype=wide).square()
    a, b = a.to(wide), b.to(wide)
    crossed = (b * weight.to(a.dtype).mm(a.t())).sum(1) if weight.dtype is wide else (
        b * weight.mm(a.t().to(weight.dtype)).to(wide)).sum(1)
    own = (b.mm(a.mm(a.t())) * b).sum(1)
    return torch.stack([alone, alone + 2 * scale * crossed + scale * scale * own])


class SplitAdapter(Adapter):
    """An adapter on the mesh. weight: how the layer's weight (the rows of this output) is split."""

    def __init__(self, adapter: Adapter, mesh: TensorMesh, weight: Split) -> None:
        nn.Module.__init__(self)
        self.form, self.takes, self.gives, self.units = adapter.form, adapter.takes, adapter.gives, adapter.units
        self.in_features, self.out_features = adapter.in_features, adapter.out_features
        self._mesh, self._weight = mesh, weight.for_cols(mesh.num_cols)
        self._splits = {name: split.for_cols(mesh.num_cols) for name, split in adapter.splits(mesh.settings).items()}
        for name, parameter in adapter._parameters.items():
            self.register_parameter(name, None if parameter is None else own_part(
                parameter, self._splits[name], mesh))

    def drop_input(self, x: Tensor) -> Tensor:
        sizes = list(x.shape[1:])
        start, full = [0] * len(sizes), list(sizes)
        if (sharded := self._sharding_of(self.takes)) != "none":
            place = len(sizes) - 1 if sharded == "features" else 0
            start[place], full[place] = self._mesh.col * sizes[place], self._mesh.num_cols * sizes[place]
        return keyed_dropout.dropout(x, self.form.dropout, self.training, start=start, full_shape=full)

    def exchange(self, u: Tensor) -> Tensor:
        """See the top of the file."""
        if self._mesh.num_cols == 1:
            return u
        return exchange(u, self._mesh, self._sharding_of(self.takes), self._sharding_of(self.gives))

    def _sharding_of(self, kind: ActivationKind) -> Sharded:
        if kind == "inner" or (kind == "stream" and self._mesh.activations.name == "hidden"):
            return "features"
        return "tokens" if kind == "stream" and self._mesh.activations.name == "sequence" else "none"

    @torch.no_grad()
    def norms(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Norms of this rank's rows of the output."""
        first, last = self._splits["B"].box((self.out_features, self.form.rank), (
            self._mesh.num_rows, self._mesh.num_cols), (self._mesh.row, self._mesh.col))[0]
        squares = self._squares(weight)
        return squares[0, first:last].sqrt(), squares[1, first:last].sqrt()

    def _squares(self, weight: Tensor) -> Tensor:
        """Squared norms of all rows. Small tensors are summed over the mesh: A, B, and two numbers for each row."""
        sizes, at = (self._mesh.num_rows, self._mesh.num_cols), (self._mesh.row, self._mesh.col)
        a, b = self._gather_whole(self.A, "A", (self.form.rank, self.in_features)), self._gather_whole(
            self.B, "B", (self.out_features, self.form.rank))
        rows, columns = self._weight.box((self.out_features, self.in_features), sizes, at)
        own = squared_norms(weight, a[:, slice(*columns)], b[slice(*rows)], self.form.scale)
        squares = own.new_zeros(2, self.out_features)
        squares[:, slice(*rows)] = own
        return self._sum(squares, self._weight)

    def _gather_whole(self, own: Tensor, name: str, shape: tuple[int, ...]) -> Tensor:
        """A parameter that is sharded over columns, as the sum of shards padded with zeros; x + 0 is exact."""
        split = self._splits[name]
        found = own.new_zeros(shape)
        box = split.box(shape, (self._mesh.num_rows, self._mesh.num_cols), (self._mesh.row, self._mesh.col))
        found[index_of(box, whole_box(shape))] = own
        return self._sum(found, split)

    def _sum(self, tensor: Tensor, split: Split) -> Tensor:
        """The sum over the axes along which ranks have different parts."""
        axes = {axis for dim in split.dims for axis in dim}
        for axis, group in (("row", self._mesh.over_rows), ("col", self._mesh.over_cols)):
            if axis in axes and len(group.ranks) > 1:
                group.all_reduce(tensor).wait()
        return tensor


# ---------------------------------------------------------------------- in a layer


class _AddAdapters(SplitHook):
    """The forward hook of a layer with adapters."""

    def __init__(self, part_width: int = 0) -> None:
        self.part_width = part_width
        """Features of one part of one unit, of a layer with `parts`."""

    def __call__(self, layer: Any, args: tuple[Any, ...], y: Tensor) -> Tensor:
        weight, bias, width = layer.weight, layer.bias, self.part_width
        if "lora" in layer._modules:
            adapted: Tensor = layer.lora(y, args[0], lambda: (weight, bias))
            return adapted
        parts: tuple[str, ...] = layer.parts
        found = list(y.unflatten(-1, (-1, len(parts), width)).unbind(-2))
        for number, name in enumerate(parts):
            if (holder := layer._modules.get(name)) is not None:
                def base(number: int = number) -> tuple[Tensor, Tensor | None]:
                    rows = partial(_rows_of_part, number=number, count=len(parts), width=width)
                    return rows(weight), None if bias is None else rows(bias)

                found[number] = holder.lora(found[number].flatten(-2), args[0], base).unflatten(-1, (-1, width))
        return torch.stack(found, -2).flatten(-3)


def _rows_of_part(tensor: Tensor, *, number: int, count: int, width: int) -> Tensor:
    """The rows of one part of a weight or bias that has `count` parts."""
    parts: Tensor = tensor.unflatten(0, (-1, count, width))
    return parts[:, number].flatten(0, 1)


def adapters_in(block: Any) -> Iterator[tuple[str, Adapter, Tensor]]:
    """Yields (name of the layer or its part, adapter, the adapter's rows of the weight) of a block, which may be
    split."""
    for path, adapter in block.named_modules():
        if isinstance(adapter, Adapter):
            target = path.rpartition(".")[0]
            holder = block.get_submodule(target)
            if isinstance(holder._parameters.get("weight"), Tensor):
                yield target, adapter, holder.weight
                continue
            path, _, part = target.rpartition(".")
            layer = block.get_submodule(path)
            hooks = *layer._forward_hooks.values(), *getattr(layer.forward, "hooks", ())
            hook = next(hook for hook in hooks if isinstance(hook, _AddAdapters))
            yield target, adapter, _rows_of_part(layer.weight, number=layer.parts.index(part), count=len(layer.parts),
                                                 width=hook.part_width)


def add_adapter(layer: nn.Module, adapter: Adapter, part: str = "") -> None:
    """Make `adapter` a child of a linear layer. part: the one of the layer's `parts` that the adapter belongs to."""
    parts: tuple[str, ...] = getattr(layer, "parts", ())
    if part:
        layer.add_module(part, nn.Module())
    layer.get_submodule(part).add_module("lora", adapter)
    units: int | None = getattr(layer, "units", None)
    features: Any = layer.out_features
    _register(layer, features // (units or 1) // max(1, len(parts)))
    if getattr(layer, "reuse_input", False):
        setattr(layer, "reuse_input", False)  # noqa: B010 - the adapter needs the input in its backward


def _register(layer: nn.Module, part_width: int) -> None:
    if not any(isinstance(hook, _AddAdapters) for hook in layer._forward_hooks.values()):
        layer.register_forward_hook(_AddAdapters(part_width))


def split_adapters(layer: Splittable, split: nn.Module, mesh: TensorMesh) -> None:
    """Give the split form of a layer the parts of the layer's adapters."""
    if not isinstance(layer, Layer):
        return
    for path, adapter in layer.named_modules():
        if not isinstance(adapter, Adapter):
            continue
        output, splits = path.rpartition(".")[0], layer.splits(mesh.settings)
        shared = "weight" in splits  # by all outputs of a `Linear`
        if shared and output:
            split.add_module(output, nn.Module())
            setattr(split, "parts", getattr(layer, "parts"))  # noqa: B009, B010
        split.get_submodule(output).add_module("lora", SplitAdapter(
            adapter, mesh, splits["weight" if shared else f"{output}.weight"]))
        if shared:
            hook = next(hook for hook in layer._forward_hooks.values() if isinstance(hook, _AddAdapters))
            _register(split, hook.part_width)
