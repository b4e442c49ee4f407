"""Blocks to stages: the most equal cut of those whose slowest stage is as fast as any cut allows, or equal numbers of
blocks."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise, product
from math import inf

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
    starts = [0, *boundaries, len(costs)]
    stages = [sums[stop] - sums[start] for start, stop in pairwise(starts)]
    held = [placement.stages_of(rank) for rank in range(placement.num_ranks)]
    rank_of = [placement.rank_of(stage) for stage in range(placement.num_stages)]
    ranks = [sum(map(stages.__getitem__, own)) for own in held]

    def squares() -> float:
        return sum([work * work for work in ranks]) + _LITTLE * sum([work * work for work in stages])

    moves = [(one, other, *by) for one in range(1, len(starts) - 1) for other in range(one, len(starts) - 1)
             for by in product((-1, 1), (-1, 0, 1))]
    most, least, found = max(ranks), squares(), True
    while found:
        found = False
        for one, other, by, also in moves:
            starts[one] += by
            starts[other] += also
            changed = {one - 1, one, other - 1, other}
            if all([starts[stage] < starts[stage + 1] for stage in changed]):
                before = [(stage, stages[stage]) for stage in changed], [
                    (rank, ranks[rank]) for rank in {rank_of[stage] for stage in changed}]
                for stage in changed:
                    stages[stage] = sums[starts[stage + 1]] - sums[starts[stage]]
                for rank, _ in before[1]:
                    ranks[rank] = sum(map(stages.__getitem__, held[rank]))
                # Only where no rank has more work than any had before are the others looked at.
                if all([ranks[rank] <= most for rank, _ in before[1]]) and (
                        tried := (max(ranks), squares())) < (most, least):
                    most, least = tried
                    found = True
                    continue
                for stage, work in before[0]:
                    stages[stage] = work
                for rank, work in before[1]:
                    ranks[rank] = work
            starts[one] -= by
            starts[other] -= also
    return tuple(starts[1:-1])
