"""How many bytes a rank of the row x col tensor mesh receives for a layer, the embedding and the head, by arithmetic.

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
    megatron-sequence   as stationary, with one row                           s cut over col between products

Ring conventions: of a tensor of P bytes, an all-gather or reduce-scatter over m members receives P (m - 1) / m, an
all-reduce twice that. Of m panels, one per member, the broadcasts receive what an all-gather of all of them does, the
reductions what a reduce-scatter does, since one panel passes all members but one. Summa is Xu et al., 2021 (Optimus),
megatron Shoeybi et al., 2019, megatron-sequence and the activation bytes Korthikanti et al., 2022. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log2, sqrt
from typing import Literal, NamedTuple

Scheme = Literal["summa", "stationary", "megatron", "megatron-sequence"]
Recompute = Literal["none", "kept", "again"]
"""Of a layer's insides: nothing is recomputed; it is, and the operands that it gathers are kept for the backward; it
is, and the backward gathers them again. Without recomputing too, the backward gathers again."""
Product = Literal["qkv", "projection", "fc1", "fc2"]
PRODUCTS: Mapping[Product, tuple[int, int]] = {"qkv": (1, 3), "projection": (1, 1), "fc1": (1, 4), "fc2": (4, 1)}
"""Widths of what goes in and comes out, in multiples of h."""


@dataclass(frozen=True)
class Bytes:
    """Bytes that one rank receives, of activations and their gradients, and of weights and theirs."""

    activations: float = 0.0
    weights: float = 0.0

    @property
    def total(self) -> float:
        return self.activations + self.weights

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.activations + other.activations, self.weights + other.weights)


@dataclass(frozen=True, kw_only=True)
class Volume:
    """What one rank receives in a forward and in its backward, what the backward recomputes included."""

    forward: Bytes
    backward: Bytes

    @property
    def total(self) -> float:
        """Bytes of both."""
        return self.forward.total + self.backward.total


@dataclass(frozen=True, kw_only=True)
class LayerVolume(Volume):
    """A transformer layer's, and each product's own."""

    products: Mapping[Product, Volume]


class _Way(NamedTuple):
    """What a way to multiply receives, as multiples of (A, W)."""

    gathers: tuple[float, float]
    """Operands of the forward; its backward needs them too."""
    sums: tuple[float, float]
    """The output."""
    gradients: tuple[float, float]
    """Of the output, which the backward gathers."""
    gradient_sums: tuple[float, float]
    """Of the operands, which it sums."""


def _output_stationary(into: float, out: float) -> _Way:
    return _Way(gathers=(into, into * out), sums=(0, 0), gradients=(0, 0), gradient_sums=(into, into * out))


def _input_stationary(into: float, out: float) -> _Way:
    return _Way(gathers=(0, into * out), sums=(out, 0), gradients=(out, 0), gradient_sums=(0, into * out))


def _all_reduced_gradient(into: float, out: float) -> _Way:
    return _Way(gathers=(0, 0), sums=(0, 0), gradients=(0, 0), gradient_sums=(2 * into, 0))


def _all_reduced_output(into: float, out: float) -> _Way:
    return _Way(gathers=(0, 0), sums=(2 * out, 0), gradients=(0, 0), gradient_sums=(0, 0))


_WAYS = {"summa": (_output_stationary, _output_stationary), "stationary": (_output_stationary, _input_stationary),
         "megatron": (_all_reduced_gradient, _all_reduced_output),
         "megatron-sequence": (_output_stationary, _input_stationary)}
"""Of qkv and fc1, and of projection and fc2. Summa's three products receive as much as an output-stationary one."""


class _Units(NamedTuple):
    """A and W in bytes, and how many times as many they take in a sum."""

    a: float
    w: float
    widened: float

    def bytes(self, multiples: tuple[float, float]) -> Bytes:
        return Bytes(self.a * multiples[0], self.w * multiples[1])

    def summed(self, multiples: tuple[float, float]) -> Bytes:
        return self.bytes((multiples[0] * self.widened, multiples[1] * self.widened))


def _units(scheme: Scheme, row: int, col: int, batch: int, sequence: int, hidden: int, itemsize: int,
           sum_itemsize: int | None) -> _Units:
    if scheme.startswith("megatron") and row != 1:
        raise ValueError(f"{scheme} takes one row, not {row}")
    return _Units(a=batch * sequence * hidden * itemsize * (col - 1) / (row * col),
                  w=hidden * hidden * itemsize * (row - 1) / (row * col),
                  widened=1.0 if sum_itemsize is None else sum_itemsize / itemsize)


def layer_volume(scheme: Scheme, *, row: int, col: int, batch: int, sequence: int, hidden: int, itemsize: int,
                 sum_itemsize: int | None = None, recompute: Recompute = "none", last: bool = True) -> LayerVolume:
    """Of one layer and microbatch. batch: sequences of the microbatch. itemsize: bytes of an element; sum_itemsize:
    where sums travel in another format.

    last: the layer is its recomputed segment's last one, so that the output of fc2 is not computed again. Optimus and
    Megatron as published recompute it: again, with last=False.
    """
    units = _units(scheme, row, col, batch, sequence, hidden, itemsize, sum_itemsize)
    products: dict[Product, Volume] = {}
    for name, widths in PRODUCTS.items():
        way = _WAYS[scheme][name in ("projection", "fc2")](*widths)
        gathers, sums = units.bytes(way.gathers), units.summed(way.sums)
        recomputed = recompute != "none" and not (last and name == "fc2")
        backward = units.bytes(way.gradients) + units.summed(way.gradient_sums)
        if recomputed:
            backward += gathers + sums
        if not (recomputed and recompute == "kept"):
            backward += gathers
        products[name] = Volume(forward=gathers + sums, backward=backward)
    return LayerVolume(products=products, forward=sum((each.forward for each in products.values()), Bytes()),
                       backward=sum((each.backward for each in products.values()), Bytes()))


def embedding_volume(scheme: Scheme, *, row: int, col: int, batch: int, sequence: int, hidden: int, vocab: int,
                     itemsize: int, sum_itemsize: int | None = None) -> Volume:
    """Of the token embedding.

    stationary: each rank has all V rows of h / (row col) hidden elements, and gets the others of its column by one
    all-to-all along `row`. summa: blocks [V / row, h / col], broadcast along `row`, their gradients reduced. megatron:
    rows of the table over col, their sum all-reduced, or with sequence sharding reduced and scattered.
    """
    units = _units(scheme, row, col, batch, sequence, hidden, itemsize, sum_itemsize)
    match scheme:
        case "megatron":
            return Volume(forward=units.summed((2, 0)), backward=Bytes())
        case "megatron-sequence":
            return Volume(forward=units.summed((1, 0)), backward=units.bytes((1, 0)))
        case "stationary":
            each = Bytes(activations=batch * sequence * hidden * itemsize * (row - 1) / (row * col) / row)
            return Volume(forward=each, backward=each)
        case "summa":
            table = (0, vocab / hidden)
            return Volume(forward=units.bytes(table), backward=units.summed(table))


def head_volume(scheme: Scheme, *, row: int, col: int, batch: int, sequence: int, hidden: int, vocab: int,
                itemsize: int, sum_itemsize: int | None = None) -> Volume:
    """Of the product to [b, s, V] logits.

    summa: A B^T with the embedding's blocks [V / row, h / col] broadcast along `row` and logits [b s / row, V / col]
    reduced along `col`; in the backward both of its gradients broadcast those of the logits. Others: as fc1.
    """
    units = _units(scheme, row, col, batch, sequence, hidden, itemsize, sum_itemsize)
    out = vocab / hidden
    way = _WAYS[scheme][0](1, out)
    if scheme == "summa":
        way = _Way(gathers=(0, out), sums=(out, 0), gradients=(2 * out, 0), gradient_sums=(0, out))
    gathers = units.bytes(way.gathers)
    return Volume(forward=gathers + units.summed(way.sums),
                  backward=gathers + units.bytes(way.gradients) + units.summed(way.gradient_sums))


def paper_elements(scheme: Literal["summa", "megatron"], *, ranks: int, batch: int, sequence: int, hidden: int
                   ) -> tuple[float, float]:
    """Elements per layer in the forward and in the backward with its recomputation: Table 1 of Xu et al., 2021.

    summa on a square mesh, broadcasts and reductions as trees of log2(sqrt(ranks)) steps; megatron with rings.
    """
    activation, weight = batch * sequence * hidden, hidden * hidden
    if scheme == "megatron":
        share = (ranks - 1) / ranks
        return 4 * share * activation, 8 * share * activation
    share = log2(ranks) / (2 * sqrt(ranks))
    return share * (7 * activation + 12 * weight), share * (21 * activation + 36 * weight)


def activation_bytes(scheme: Scheme, *, row: int, col: int, batch: int, sequence: int, hidden: int, heads: int,
                     fused_attention: bool) -> float:
    """What a rank keeps of one layer and microbatch for its backward, in half precision, with dropout.

    fused_attention: no scores [b, n, s, s] are kept. megatron keeps what its ranks hold in common, 10 s b h, on each.
    """
    ranks, activation = row * col, batch * sequence * hidden
    scores = 0 if fused_attention else 5 * batch * heads * sequence**2
    common = 10 if scheme == "megatron" else 0
    return common * activation + ((34 - common) * activation + scores) / ranks
