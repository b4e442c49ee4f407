"""The panels in which the activations of a product travel, one while another one is multiplied.

Units are tokens, or what `tensor.activations` counts in. Between devices that compute while they transfer, panels grow
from a small one, which nothing hides, or shrink towards it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

FIRST_SHARE = 0.045
"""Share of a tensor in the smallest panel, beside which nothing is computed."""
SMALLEST_BYTES = 1 << 20
"""Of a panel, gathered: what travels in about the time that the start of a collective takes, so that smaller panels
gain nothing."""
GROWTH = 1.25
"""Of a panel over the one before: a product takes longer than the transfer of its panel, so a larger one can travel."""


@lru_cache(maxsize=256)  # each product asks, and sizes are few
def equal_panels(num_units: int, unit_bytes: int, panel_bytes: int) -> tuple[slice, ...]:
    """Runs of units, as equal as possible, of at most `panel_bytes` each (but of one unit at least)."""
    count = min(num_units, max(1, -(-num_units * unit_bytes // panel_bytes)))
    return _runs([num_units * number // count for number in range(count + 1)] if count else [0])


def first_panel_bytes(all_bytes: float) -> float:
    """Of a tensor of so many bytes, gathered."""
    return min(all_bytes, max(FIRST_SHARE * all_bytes, SMALLEST_BYTES))


@lru_cache(maxsize=256)
def growing_panels(num_units: int, unit_bytes: int, panel_bytes: int) -> tuple[slice, ...]:
    """Runs of units of which the first, which nothing hides, is small. Each of the others is larger than the one before
    by `GROWTH`, up to `panel_bytes`."""
    size, edges = first_panel_bytes(num_units * unit_bytes) / max(1, unit_bytes), [0]
    largest = max(1, panel_bytes // max(1, unit_bytes))
    while edges[-1] < num_units:
        edges.append(min(num_units, edges[-1] + max(1, min(round(size), largest))))
        size *= GROWTH
    return _runs(edges)


def _runs(edges: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in pairwise(edges))
