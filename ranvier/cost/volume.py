"""Bytes that a rank of the row x col tensor mesh receives for a layer, the embedding and the head, by arithmetic.

    x [b, s, h]: row i has b / row of the sequences, column j has h / col of the hidden dim
    A = (b s h / row) (col - 1) / col      to gather, or sum and scatter, x along the axis `col`
    W = (h^2 / col) (row - 1) / row        to gather, or sum and scatter, an [h, h] weight along the axis `row`

A product i h -> o h of a scheme receives:

    scheme              products          forward        backward             which is
    summa               all               i A + i o W    2 i A + 2 i o W      A B; then A B^T and A^T B
    stationary          qkv, fc1          i A + i o W    2 i A + 2 i o W      output-stationary
                        projection, fc2   o A + i o W      o A + 2 i o W      input-stationary
    megatron            qkv, fc1          0              2 i A                one row, x whole on every rank
                        projection, fc2   2 o A          0
    stationary-sequence as stationary                                         s cut over col between products, not h
    megatron-sequence   as stationary, with one row                           the same

Ring conventions: of a tensor of P bytes, an all-gather or reduce-scatter over m members receives P (m - 1) / m, an
all-reduce twice that. Of m panels, one per member, the broadcasts receive what an all-gather of all of them does, the
reductions what a reduce-scatter does, since one panel passes all members but one. Summa is Xu et al., 2021 (Optimus),
megatron Shoeybi et al., 2019, megatron-sequence and the activation bytes Korthikanti et al., 2022. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from ranvier.config.run import TensorParallel
from ranvier.layout.panels import panels_on_gpu

Scheme = Literal["summa", "stationary", "megatron", "stationary-sequence", "megatron-sequence"]
Recompute = Literal["none", "kept", "again"]
"""Recomputation within a layer: none; with the gathered operands kept for the backward; or with the backward gathering
them again. Without recomputation, the backward gathers again, too."""


def volume_scheme(tensor: TensorParallel) -> Scheme:
    """The name of the settings' scheme in the tables of volumes."""
    if not tensor.shards_sequence:
        return tensor.scheme
    return "megatron-sequence" if tensor.scheme == "megatron" else "stationary-sequence"


@dataclass(frozen=True)
class SplitLayer:
    """The properties of a layer, split over the tensor mesh, on which its messages depend.

    kind: output or input: a linear layer that is output- or input-stationary in the stationary scheme. embedding: of
    tokens. vocabulary: the product to logits. inputs, outputs: features; for an embedding the rows of its table, and
    features. ends_layer: it is the last product of a transformer layer, so a recomputation stops before it.
    """

    kind: Literal["output", "input", "embedding", "vocabulary"]
    inputs: int
    outputs: int
    ends_layer: bool = False


def transformer_layer(hidden: int) -> tuple[SplitLayer, ...]:
    """The products of a transformer layer of this width: qkv, projection, fc1, fc2."""
    return (SplitLayer("output", hidden, 3 * hidden), SplitLayer("input", hidden, hidden),
            SplitLayer("output", hidden, 4 * hidden), SplitLayer("input", 4 * hidden, hidden, ends_layer=True))


@dataclass(frozen=True)
class Bytes:
    """Bytes that one rank receives, of activations and their gradients, and of weights and theirs."""

    activations: float = 0.0
    weights: float = 0.0

    @property
    def total(self) -> float:
        """Bytes of both."""
        return self.activations + self.weights

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.activations + other.activations, self.weights + other.weights)


@dataclass(frozen=True, kw_only=True)
class Volume:
    """Bytes that one rank receives in a forward and in its backward, recomputation included."""

    forward: Bytes
    backward: Bytes

    @property
    def total(self) -> float:
        """Bytes of both."""
        return self.forward.total + self.backward.total


class _ProductBytes(NamedTuple):
    """Bytes received by one way of multiplying, as multiples of (A, W)."""

    gathers: tuple[float, float]
    """Operands of the forward; its backward needs them too."""
    sums: tuple[float, float]
    """The output."""
    gradients: tuple[float, float]
    """Gradients of the output, which the backward gathers."""
    gradient_sums: tuple[float, float]
    """Gradients of the operands, which the backward sums."""


def _output_stationary(into: float, out: float) -> _ProductBytes:
    return _ProductBytes(gathers=(into, into * out), sums=(0, 0), gradients=(0, 0), gradient_sums=(into, into * out))


def _input_stationary(into: float, out: float) -> _ProductBytes:
    return _ProductBytes(gathers=(0, into * out), sums=(out, 0), gradients=(out, 0), gradient_sums=(0, into * out))


def _all_reduced_gradient(into: float, out: float) -> _ProductBytes:
    return _ProductBytes(gathers=(0, 0), sums=(0, 0), gradients=(0, 0), gradient_sums=(2 * into, 0))


def _all_reduced_output(into: float, out: float) -> _ProductBytes:
    return _ProductBytes(gathers=(0, 0), sums=(2 * out, 0), gradients=(0, 0), gradient_sums=(0, 0))


_WAYS = {"summa": (_output_stationary, _output_stationary), "stationary": (_output_stationary, _input_stationary),
         "megatron": (_all_reduced_gradient, _all_reduced_output),
         "stationary-sequence": (_output_stationary, _input_stationary),
         "megatron-sequence": (_output_stationary, _input_stationary)}
"""Ways of qkv and fc1, and of projection and fc2. Summa's three products receive the same bytes as an output-stationary
product."""


_GRADIENT_ITEMSIZE = 4
"""Smallest bytes of an element of a weight's gradient that is summed over rows: fp32."""


class _Units(NamedTuple):
    """A and W in bytes, and the factors by which they are larger in a sum."""

    a: float
    w: float
    widened_a: float
    widened_w: float

    def bytes(self, multiples: tuple[float, float]) -> Bytes:
        return Bytes(self.a * multiples[0], self.w * multiples[1])

    def summed(self, multiples: tuple[float, float]) -> Bytes:
        return self.bytes((multiples[0] * self.widened_a, multiples[1] * self.widened_w))


def _units(scheme: Scheme, row: int, col: int, batch: int, sequence: int, hidden: int, itemsize: int,
           sum_itemsize: int | None) -> _Units:
    if scheme.startswith("megatron") and row != 1:
        raise ValueError(f"{scheme} takes one row, not {row}")
    return _Units(a=batch * sequence * hidden * itemsize * (col - 1) / (row * col),
                  w=hidden * hidden * itemsize * (row - 1) / (row * col),
                  widened_a=1.0 if sum_itemsize is None else sum_itemsize / itemsize,
                  widened_w=1.0 if sum_itemsize is None else max(itemsize, _GRADIENT_ITEMSIZE) / itemsize)


def _product_volume(units: _Units, way: _ProductBytes, recompute: Recompute) -> Volume:
    gathers, sums = units.bytes(way.gathers), units.summed(way.sums)
    backward = units.bytes(way.gradients) + units.summed(way.gradient_sums)
    if recompute != "none":
        backward += gathers + sums
    if recompute != "kept":
        backward += gathers
    return Volume(forward=gathers + sums, backward=backward)


def block_volume(layers: Sequence[SplitLayer], scheme: Scheme, *, row: int, col: int, batch: int, sequence: int,
                 hidden: int, itemsize: int, sum_itemsize: int | None = None, recompute: Recompute = "none",
                 last: bool = True, weights_kept_for: int | None = None, gradient_itemsize: int | None = None
                 ) -> Volume:
    """Volume of a block with these layers, for one microbatch; the few bytes of other layers are left out.

    Args:
        batch: sequences of the microbatch.
        hidden: the unit in which features are counted, which affects the result only by rounding.
        itemsize: bytes of an element. sum_itemsize: of an element of summed activations; sums of weight gradients are
            then sent in at least fp32. None counts all elements equally.
        last: the product that ends a layer is the last of its recomputed segment, so it is not recomputed. Optimus and
            Megatron as published recompute it: again, with last=False.
        weights_kept_for: number of microbatches for which gathered weights of products stay (`tensor.keep_weights`);
            None if each microbatch gathers them, and again for the backward. Gradients of kept weights are summed once,
            too.
        gradient_itemsize: bytes of an element of a gradient that is summed for several microbatches together; None for
            the format in which those of one microbatch are summed.
    """
    units = _units(scheme, row, col, batch, sequence, hidden, itemsize, sum_itemsize)
    sizes: dict[str, Any] = {"row": row, "col": col, "batch": batch, "sequence": sequence, "itemsize": itemsize,
                             "sum_itemsize": sum_itemsize}
    forward, backward = Bytes(), Bytes()
    for layer in layers:
        if layer.kind not in ("output", "input"):
            continue
        way = _WAYS[scheme][layer.kind == "input"](layer.inputs / hidden, layer.outputs / hidden)
        product = _product_volume(units, way, "none" if last and layer.ends_layer else recompute)
        forward, backward = forward + product.forward, backward + product.backward
    if weights_kept_for is not None:
        summed = itemsize * units.widened_w
        wider = (gradient_itemsize or summed) / summed if weights_kept_for > 1 else 1.0
        sums = max(0.0, backward.weights - forward.weights) * wider
        backward = replace(backward, weights=sums / weights_kept_for)
        forward = replace(forward, weights=forward.weights / weights_kept_for)
    for layer in layers:
        if layer.kind == "embedding":
            other = embedding_volume(scheme, vocab=layer.inputs, hidden=layer.outputs, **sizes)
        elif layer.kind == "vocabulary":
            other = head_volume(scheme, vocab=layer.outputs, hidden=layer.inputs, **sizes)
        else:
            continue
        forward, backward = forward + other.forward, backward + other.backward
    return Volume(forward=forward, backward=backward)


class Transfer(NamedTuple):
    """Bytes that a rank receives in one collective of a layer, cut into panels. alone: those of a panel during which
    nothing is computed. beside: the share of the layer's products (y, dX, dW) that is computed during the rest, where
    each panel of a product hides a panel."""

    bytes: float
    alone: float
    beside: tuple[float, float, float] = (0.0, 0.0, 0.0)


class LayerTransfers(NamedTuple):
    """The transfers of one layer and microbatch, in its forward and its backward, recomputation included; weight: in
    its weight's gradient, if that is deferred."""

    forward: tuple[Transfer, ...] = ()
    backward: tuple[Transfer, ...] = ()
    weight: tuple[Transfer, ...] = ()

    @property
    def exposed(self) -> float:
        """Bytes that are received while nothing is computed."""
        return sum(transfer.alone for transfer in (*self.forward, *self.backward))


def layer_transfers(layer: SplitLayer, scheme: Scheme, *, row: int, col: int, elements: int, itemsize: int,
                    sum_itemsize: int, panel_bytes: int | Literal["auto"], recomputed: bool, trains: bool = True,
                    waits: bool = False) -> LayerTransfers:
    """Transfers of a layer's activations, on devices that compute while they transfer.

    For output-stationary products the forward gathers inputs; for input-stationary products it sums outputs, and the
    backward gathers their gradients: the first panel that a product gathers, or the last one that it sums, overlaps no
    computation. The backward of output-stationary products gathers inputs during dX, and sums dX during dW; if dW is
    deferred, each product overlaps its own panels. Embeddings have no product. `benchmarks/tensor/exposed.py` counts
    the same by running layers.

    Args:
        elements: of one of the layer's features, on all ranks together. itemsize, sum_itemsize: as in `block_volume`.
            panel_bytes: as in `tensor.panel_bytes`. recomputed: the backward repeats the forward, except for the sum
            that ends a layer. trains: whether dW is computed; waits: after the backward.
    """
    if layer.kind == "embedding":
        whole = embedding_volume(scheme, row=row, col=col, batch=1, sequence=1, hidden=elements * layer.outputs,
                                 vocab=layer.inputs, itemsize=itemsize, sum_itemsize=sum_itemsize)
        return LayerTransfers(*((Transfer(size, size),) if size else ()
                                for size in (whole.forward.activations, whole.backward.activations)))
    is_output, share = layer.kind != "input", (col - 1) / col
    features = layer.inputs if is_output else layer.outputs
    gathered, summed = (elements * features // row * size for size in (itemsize, sum_itemsize))
    if scheme == "megatron":  # an all-reduce of full tensors receives twice as much as a reduce-scatter
        gathered, share = 0, 2 * share

    def transfer(size: int, *beside: float) -> tuple[Transfer, ...]:
        received = size * share
        alone = received / panels_on_gpu(size, panel_bytes, hides=True)
        return (Transfer(received, alone, (beside[0], beside[1], beside[2])),) if received else ()

    forward = transfer(gathered if is_output else summed, 1.0, 0.0, 0.0)
    repeated = forward if recomputed and not layer.ends_layer else ()
    if not is_output:
        return LayerTransfers(forward, repeated + transfer(gathered, 0.0, 1.0, float(trains and not waits)))
    if waits:
        return LayerTransfers(forward, transfer(summed, 0.0, 1.0, 0.0), transfer(gathered, 0.0, 0.0, 1.0))
    again = gathered if trains and not recomputed else 0
    panels = panels_on_gpu(again, panel_bytes, hides=False)
    if panels > 1:  # all but the first panel of x are sent after dX, during dW of the previous one
        backward = [Transfer((again + summed) * share, 0.0, (0.0, 1.0, 1.0 - 1.0 / panels))]
    else:
        backward = [Transfer(again * share, 0.0, (0.0, 1.0, 0.0)),
                    Transfer(summed * share, 0.0, (0.0, 0.0, float(trains)))]
    return LayerTransfers(forward, repeated + tuple(transfer for transfer in backward if transfer.bytes))


def embedding_volume(scheme: Scheme, *, row: int, col: int, batch: int, sequence: int, hidden: int, vocab: int,
                     itemsize: int, sum_itemsize: int | None = None) -> Volume:
    """Volume of the token embedding.

    stationary: each rank has all V rows of h / (row col) hidden elements, and gets the other elements of its column by
    one all-to-all along `row`; with sequence sharding another all-to-all along `col` exchanges features for tokens.
    summa: blocks [V / row, h / col], broadcast along `row`, their gradients reduced. megatron: rows of the table over
    col, their sum all-reduced, or with sequence sharding reduce-scattered.
    """
    units = _units(scheme, row, col, batch, sequence, hidden, itemsize, sum_itemsize)
    match scheme:
        case "megatron":
            return Volume(forward=units.summed((2, 0)), backward=Bytes())
        case "megatron-sequence":
            return Volume(forward=units.summed((1, 0)), backward=units.bytes((1, 0)))
        case "stationary" | "stationary-sequence":
            along_row = batch * sequence * hidden * itemsize * (row - 1) / (row * col) / row
            each = Bytes(activations=along_row + (units.a / col if scheme == "stationary-sequence" else 0.0))
            return Volume(forward=each, backward=each)
        case "summa":
            table = (0, vocab / hidden)
            return Volume(forward=units.bytes(table), backward=units.summed(table))


def head_volume(scheme: Scheme, *, row: int, col: int, batch: int, sequence: int, hidden: int, vocab: int,
                itemsize: int, sum_itemsize: int | None = None) -> Volume:
    """Volume of the product to [b, s, V] logits.

    summa: A B^T with the embedding's blocks [V / row, h / col] broadcast along `row` and logits [b s / row, V / col]
    reduced along `col`; in the backward both of its gradients broadcast those of the logits. Others: like fc1.
    """
    units = _units(scheme, row, col, batch, sequence, hidden, itemsize, sum_itemsize)
    out = vocab / hidden
    way = _WAYS[scheme][0](1, out)
    if scheme == "summa":
        way = _ProductBytes(gathers=(0, out), sums=(out, 0), gradients=(2 * out, 0), gradient_sums=(0, out))
    return _product_volume(units, way, "none")
