"""Largest speed-up of freezing by compute alone: layers' forwards and backwards are counted, everything else is free.

A layer's forward is 1 unit and its backward 2. Embedding and head are 0: their products are below 1 % of a layer's.
Optimizer, messages, waits, transitions, and reading the cache are also 0. They can make a ratio larger than this bound:
once the first layer is frozen there is no update of the embedding, which for BERT's vocabulary is the largest; and a
packed pipeline has fewer bubbles than the run it is compared with.

    unit cost of an epoch with f of L layers frozen                                      L + 2 (L - f)
    with a cache that has the outputs of the g layers frozen in the epoch before         L - g + 2 (L - f)
"""

from __future__ import annotations

from collections.abc import Sequence

from ranvier.elastic.freezing import Cap, Facts


def depths(layers: int, alpha: float, epochs: int, every: int = 1) -> list[int]:
    """Frozen layers in each epoch by the cap, which is evaluated after every `every` epochs."""
    found = [0]
    for epoch in range(1, epochs):
        evaluation, rest = divmod(epoch, every)
        if rest:
            found.append(found[-1])
            continue
        facts = Facts(step=evaluation, evaluation=evaluation, frozen=found[-1], num_layers=layers,
                      gradient_norms=(0.0,) * layers)
        found.append(Cap(alpha).frozen_layers(facts))
    return found


def units(layers: int, frozen: Sequence[int], *, cache: bool) -> int:
    """Units of all epochs, with these numbers of frozen layers."""
    known = [0, *frozen[:-1]] if cache else [0] * len(frozen)
    return sum(layers - there + 2 * (layers - deep) for deep, there in zip(frozen, known, strict=True))


def speedup(layers: int, alpha: float, epochs: int, *, cache: bool, every: int = 1) -> float:
    """The bound of the speed-up over training all layers in all epochs."""
    return 3 * layers * epochs / units(layers, depths(layers, alpha, epochs, every), cache=cache)
