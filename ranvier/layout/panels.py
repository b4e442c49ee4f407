"""The panels in which the activations of a product are transferred, each while another one is multiplied.

A panel costs a start of its collective and a product with fewer full tiles, so there are only as many panels as hide
more time than they cost. They are equal, and of whole sequences or of a power of two: sequences whose length is a power
of two are cut into whole tiles, and equal panels need no copies.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Literal

PANEL_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}
"""Kind of device -> bytes of the largest gathered panel of activations: one that stays in a CPU's cache, or occupies a
GPU with one product."""

PANEL_COST_BYTES = 16 << 20
"""Bytes of a gathered tensor that are transferred between GPUs of a node in the time that one more panel costs."""


def panel_count(size: int, panel_bytes: int, *, hides: bool) -> int:
    """Number of panels in which a tensor of `size` bytes (gathered) is sent.

    panel_bytes: of the largest one. hides: whether one panel is transferred while nothing is computed, and the others
    during products, on devices that compute while they transfer.
    """
    count = max(1, -(-size // panel_bytes))
    # Twice as many panels hide `size / 2 count` more bytes, and are `count` more panels.
    while hides and size >= 2 * count ** 2 * PANEL_COST_BYTES:
        count *= 2
    return count


def panels_on_gpu(size: int, panel_bytes: int | Literal["auto"], *, hides: bool) -> int:
    """`panel_count` on a GPU, as a power of two. panel_bytes: as `tensor.panel_bytes`."""
    return power_of_two(panel_count(size, PANEL_BYTES["cuda"] if panel_bytes == "auto" else panel_bytes, hides=hides))


def power_of_two(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


@lru_cache(maxsize=256)  # each product calls it, with few different sizes
def equal_runs(num_units: int, count: int) -> tuple[slice, ...]:
    """`count` runs of units, as equal as possible; fewer if there are fewer units."""
    count = min(num_units, count)
    return tuple(slice(start, stop) for start, stop in pairwise(num_units * number // count
                                                                for number in range(count + 1)))
