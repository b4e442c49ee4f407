"""The cut of blocks into stages whose slowest stage is fastest: exact, whatever a stage's cost is made of.

Pure: costs are numbers that somebody has counted (`ranvier.plan.block_costs`) or measured (`ranvier.elastic`).
"""

from __future__ import annotations

from collections.abc import Callable


def cut(num_blocks: int, num_stages: int, cost: Callable[[int, int, int], float]) -> tuple[int, ...]:
    """First block of each stage after the first, such that the slowest stage is as fast as any cut allows.

    cost: (stage, start, stop) -> what that stage costs with blocks start .. stop - 1; infinite where it cannot have
    them. Dynamic programming over (stage, first block), num_stages x num_blocks^2 / 2 costs; ties go to the cut with
    fewer blocks in later stages. Every stage gets at least one block.
    """
    assert 1 <= num_stages <= num_blocks
    last = num_stages - 1
    # best[first] = (slowest stage, cuts) of blocks first.. in the stages considered so far, from the back
    best: list[tuple[float, tuple[int, ...]] | None] = [
        (cost(last, first, num_blocks), ()) if first >= last else None for first in range(num_blocks)]
    for stage in range(last - 1, -1, -1):
        longer: list[tuple[float, tuple[int, ...]] | None] = [None] * num_blocks
        for first in range(stage, num_blocks - last + stage if stage else 1):
            for start in range(first + 1, num_blocks - last + stage + 1):
                rest = best[start]
                if rest is not None:
                    slowest = max(cost(stage, first, start), rest[0])
                    found = longer[first]
                    if found is None or slowest <= found[0]:
                        longer[first] = slowest, (start, *rest[1])
        best = longer
    assert best[0] is not None
    return best[0][1]
