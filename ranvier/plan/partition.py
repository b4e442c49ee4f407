"""Blocks to stages: the most equal cut of those whose slowest stage is as fast as any cut allows, or equal numbers of
blocks."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, product
from math import inf
from operator import sub

from ranvier.errors import ConfigError
from ranvier.mesh import StagePlacement

_ROUNDING = 1e-9
"""Part of a stage's cost by which sums of the same blocks may differ."""


def partition(costs: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """First block of each stage after the first, such that the slowest stage costs as little as any cut allows, and
    the stages are as equal as they can be beside it.

    As `ranvier.schedule.partition.cut` where a stage costs what its blocks do together, and not below 0: bisection
    takes num_stages x num_blocks x log(num_blocks). ConfigError when there are more stages than blocks.
    """
    num_blocks = len(costs)
    if num_stages > num_blocks:
        raise ConfigError(f"is more than the model's {num_blocks} blocks", code="more-stages-than-blocks",
                          where="mesh.pipe", value=num_stages,
                          remedy=f"Set `--mesh.pipe {num_blocks}` or less, or use a deeper model.")
    sums = list(accumulate(costs, initial=0.0))
    slowest = [sums[-1] - begun for begun in sums]  # of blocks first.. in the stages considered so far, from the back
    for behind in range(1, num_stages):
        longer = [inf] * num_blocks
        for first in range(num_blocks - behind):
            options, begun = range(first + 1, num_blocks - behind + 1), sums[first]
            # This stage's cost rises with the next one's first block, and that of the slowest other one falls.
            crossing = bisect_left(options, True, key=lambda start: sums[start] - begun >= slowest[start])
            longer[first] = min([sums[start] - begun for start in options[crossing:crossing + 1]]
                                + [slowest[start] for start in options[max(0, crossing - 1):crossing]])
        slowest = longer
    return _most_equal(sums, num_stages, most=slowest[0] * (1 + _ROUNDING))


def _most_equal(sums: Sequence[float], num_stages: int, most: float) -> tuple[int, ...]:
    """The cut with the least sum of squares of the stages' costs, of those whose stages cost at most `most`; of equal
    ones that with more blocks in front. sums: costs of the blocks before each."""
    num_blocks, latest = len(sums) - 1, [0]
    for stage in range(1, num_stages):  # the last place where each stage can begin
        reached = bisect_right(sums, most, latest[-1] + 1, key=lambda cost: cost - sums[latest[-1]]) - 1
        latest.append(min(reached, num_blocks - num_stages + stage))
    behind: dict[int, tuple[float, tuple[int, ...]]] = {num_blocks: (0.0, (num_blocks,))}
    # where the stages behind begin -> their sum of squares, and where each of them begins and the last one ends
    for stage in range(num_stages - 1, -1, -1):
        here: dict[int, tuple[float, tuple[int, ...]]] = {}
        first, end = latest[stage], max(behind)
        while first >= stage:
            stops = range(max(first + 1, min(behind)), end + 1)
            options = [((sums[stop] - sums[first]) ** 2 + behind[stop][0], -stop) for stop in stops
                       if sums[stop] - sums[first] <= most]
            if not options and here:  # nor does any place before it
                break
            if options:
                squares, negative = min(options)
                end = -negative  # of a stage that begins earlier, the best end is no later
                here[first] = squares, (first, *behind[end][1])
            first -= 1
        behind = here
    return behind[0][1][1:-1]


def uniform(num_blocks: int, num_stages: int) -> tuple[int, ...]:
    """The cut into equal numbers of blocks, the first stages taking one more where it does not divide."""
    return partition([1.0] * num_blocks, num_stages) if num_stages > num_blocks else tuple(
        stage * (num_blocks // num_stages) + min(stage, num_blocks % num_stages) for stage in range(1, num_stages))


_LITTLE = 0.01
"""Weight of equal stages among cuts whose ranks are equal."""


def partition_for(costs: Sequence[float], placement: StagePlacement) -> tuple[int, ...]:
    """Boundaries as of `partition`, where a rank has several stages: the rank with most work has as little as can be
    found.

    A local search from the stages that are most equal: it moves one boundary, or two, by one block while that makes
    the ranks' work more equal, by its largest value or the sum of its squares.
    """
    boundaries = partition(costs, placement.num_stages)
    if placement.per_rank == 1:
        return boundaries
    sums = list(accumulate(costs, initial=0.0))
    held = [placement.stages_of(rank) for rank in range(placement.num_ranks)]

    def work_of(chosen: tuple[int, ...]) -> tuple[float, float]:
        if min(map(sub, (*chosen, len(costs)), (0, *chosen))) < 1:
            return inf, inf
        ends = [sums[start] for start in chosen]
        stages = list(map(sub, (*ends, sums[-1]), (0.0, *ends)))
        ranks = [sum(map(stages.__getitem__, own)) for own in held]
        return max(ranks), sum([work * work for work in ranks]) + _LITTLE * sum([work * work for work in stages])

    moves = [(one, other, *by) for one in range(len(boundaries)) for other in range(one, len(boundaries))
             for by in product((-1, 1), (-1, 0, 1))]
    best, found, seen = work_of(boundaries), True, {boundaries}  # none of these is better than the best
    while found:
        found = False
        for one, other, by, also in moves:
            tried = list(boundaries)
            tried[one] += by
            tried[other] += also
            if (chosen := tuple(tried)) not in seen and (cost := work_of(chosen)) < best:
                best, boundaries, found = cost, chosen, True
            seen.add(chosen)
    return boundaries
