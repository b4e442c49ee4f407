"""Formulas of papers with which counted bytes and memory are compared: Table 1 of Xu et al., 2021 (Optimus), and the
activations of Korthikanti et al., 2022."""

from __future__ import annotations

from math import log2, sqrt
from typing import Any, Literal

from ranvier.cost.volume import Scheme, Volume, block_volume, transformer_layer

PRODUCTS = {"qkv": (1, 3), "projection": (1, 1), "fc1": (1, 4), "fc2": (4, 1)}
"""The products of a transformer layer: widths of inputs and outputs, in multiples of h."""


def layer_volume(scheme: Scheme, *, hidden: int, **sizes: Any) -> Volume:
    """Volume of one transformer layer and microbatch. sizes: as for `block_volume`."""
    return block_volume(transformer_layer(hidden), scheme, hidden=hidden, **sizes)


def product_volumes(scheme: Scheme, *, hidden: int, **sizes: Any) -> dict[str, Volume]:
    """Volume of each product."""
    return {name: block_volume([layer], scheme, hidden=hidden, **sizes)
            for name, layer in zip(PRODUCTS, transformer_layer(hidden), strict=True)}


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
    """Bytes that a rank keeps of one layer and microbatch for its backward, in half precision, with dropout.

    fused_attention: no scores [b, n, s, s] are kept. megatron keeps replicated activations, 10 s b h, on each rank.
    """
    ranks, activation = row * col, batch * sequence * hidden
    scores = 0 if fused_attention else 5 * batch * heads * sequence**2
    common = 10 if scheme == "megatron" else 0
    return common * activation + ((34 - common) * activation + scores) / ranks
