"""The cut of blocks into stages that makes the slowest stage fastest: exact, for any cost function.

If one block takes longer than an equal share, as a head with a large vocabulary does, very many cuts have the same
slowest stage. The most equal of these is best: counted costs are not a device's times, and a stage of many blocks
stores much.

Pure: costs are numbers that were counted (`ranvier.plan.block_costs`) or measured (`ranvier.elastic`).
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from operator import add


def cut(num_blocks: int, num_stages: int, cost: Callable[[int, int, int], float]) -> tuple[int, ...]:
    """First block of each stage after the first, such that the slowest stage is as fast as any cut allows, and the
    stages as equal as they then can be, by the sum of their squared costs.

    cost: (stage, start, stop) -> cost of that stage with blocks start .. stop - 1; infinite if it cannot have them.
    Ties go to the cut with fewer blocks in later stages. Every stage gets at least one block.
    """
    assert 1 <= num_stages <= num_blocks
    slowest, _ = _least_cost(num_blocks, num_stages, cost, max)

    def squared(stage: int, start: int, stop: int) -> float:
        own = cost(stage, start, stop)
        return own * own if own <= slowest else inf

    return _least_cost(num_blocks, num_stages, squared, add)[1]


def _least_cost(num_blocks: int, num_stages: int, cost: Callable[[int, int, int], float],
                join: Callable[[float, float], float]) -> tuple[float, tuple[int, ...]]:
    """The least joined cost of all stages, and its cut. Dynamic programming over (stage, first block): num_stages x
    num_blocks^2 / 2 costs."""
    last = num_stages - 1
    # best[first] = (joined, cuts) of blocks first.. in the stages considered so far, from the back
    best: list[tuple[float, tuple[int, ...]] | None] = [
        (cost(last, first, num_blocks), ()) if first >= last else None for first in range(num_blocks)]
    for stage in range(last - 1, -1, -1):
        longer: list[tuple[float, tuple[int, ...]] | None] = [None] * num_blocks
        for first in range(stage, num_blocks - last + stage if stage else 1):
            for start in range(first + 1, num_blocks - last + stage + 1):
                rest = best[start]
                if rest is not None:
                    joined = join(cost(stage, first, start), rest[0])
                    found = longer[first]
                    if found is None or joined <= found[0]:
                        longer[first] = joined, (start, *rest[1])
        best = longer
    assert best[0] is not None
    return best[0]
