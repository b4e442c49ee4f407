"""Cuts of blocks into stages: the most equal of the cuts whose slowest stage is as fast as possible, or equal numbers
of blocks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise, product
from math import inf

from ranvier.errors import ConfigError
from ranvier.mesh import StagePlacement

_ROUNDING = 1e-9
"""Relative difference that rounding may cause between sums of the same blocks' costs."""


def partition(costs: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """First block of each stage after the first, such that the slowest stage costs as little as any cut allows, and the
    other stages are as equal as possible.

    The same as `ranvier.schedule.partition.cut` if a stage's cost is the sum of its blocks' costs, none below 0, in
    num_stages x num_blocks steps. Raises ConfigError if there are more stages than blocks.
    """
    num_blocks = len(costs)
    if num_stages > num_blocks:
        raise ConfigError(f"is more than the model's {num_blocks} blocks", code="more-stages-than-blocks",
                          where="mesh.pipe", value=num_stages,
                          remedy=f"Set `--mesh.pipe {num_blocks}` or less, use a deeper model, or cut it at more "
                                 "submodules (ranvier.blocks_of(model, cut=[...])).")
    sums = list(accumulate(costs, initial=0.0))
    slowest = [sums[-1] - begun for begun in sums]  # of blocks first.. in the stages considered so far, from the back
    for behind in range(1, num_stages):
        longer, start, last = [inf] * num_blocks, 1, num_blocks - behind
        for first in range(last):
            # This stage's cost rises with the next one's first block, and that of the slowest other one falls. The
            # place where they meet is no earlier for a later first block.
            begun, start = sums[first], max(start, first + 1)
            while start <= last and sums[start] - begun < slowest[start]:
                start += 1
            longer[first] = min(sums[start] - begun if start <= last else inf,
                                slowest[start - 1] if start > first + 1 else inf)
        slowest = longer
    return _most_equal(sums, num_stages, most=slowest[0] * (1 + _ROUNDING))


def _most_equal(sums: Sequence[float], num_stages: int, most: float) -> tuple[int, ...]:
    """The cut with the least sum of squares of the stages' costs, among cuts whose stages cost at most `most`; among
    equal ones, the cut with more blocks in earlier stages. sums: costs of the blocks before each."""
    num_blocks, latest = len(sums) - 1, [0]
    for stage in range(1, num_stages):  # the last place where each stage can begin
        reached = bisect_right(sums, most, latest[-1] + 1, key=lambda cost: cost - sums[latest[-1]]) - 1
        latest.append(min(reached, num_blocks - num_stages + stage))
    behind: dict[int, tuple[float, tuple[int, ...]]] = {num_blocks: (0.0, (num_blocks,))}
    # where the later stages begin -> their sum of squares, and where each of them begins and the last one ends
    for stage in range(num_stages - 1, -1, -1):
        here: dict[int, tuple[float, tuple[int, ...]]] = {}
        first, end = latest[stage], max(behind)
        while first >= stage:
            stops = range(max(first + 1, min(behind)), end + 1)
            options = [((sums[stop] - sums[first]) ** 2 + behind[stop][0], -stop) for stop in stops
                       if sums[stop] - sums[first] <= most]
            if not options and here:  # nor has any place before it
                break
            if options:
                squares, negative = min(options)
                end = -negative  # of a stage that begins earlier, the best end is no later
                here[first] = squares, (first, *behind[end][1])
            first -= 1
        behind = here
    return behind[0][1][1:-1]


def uniform(num_blocks: int, num_stages: int) -> tuple[int, ...]:
    """The cut into equal numbers of blocks, the first stages taking one more if it does not divide."""
    return partition([1.0] * num_blocks, num_stages) if num_stages > num_blocks else tuple(
        stage * (num_blocks // num_stages) + min(stage, num_blocks % num_stages) for stage in range(1, num_stages))


_LITTLE = 0.01
"""Weight of equal stages among cuts whose ranks are equal."""


def partition_for(costs: Sequence[float], placement: StagePlacement) -> tuple[int, ...]:
    """Boundaries as from `partition`, for ranks with several stages: the rank with most work has as little as a local
    search finds.

    The search starts from the most equal stages: it moves one boundary, or two, by one block (or one by two) while that
    makes the ranks' work more equal, by its largest value or the sum of its squares.
    """
    boundaries = partition(costs, placement.num_stages)
    if placement.per_rank == 1:
        return boundaries
    return _with_equal_ranks(list(accumulate(costs, initial=0.0)), boundaries, placement)


def _with_equal_ranks(sums: Sequence[float], boundaries: Sequence[int], placement: StagePlacement) -> tuple[int, ...]:
    """The local search. Boundaries between stages of different ranks change the ranks' work independently of each
    other: for most pairs, the single moves show that the pair improves nothing."""
    starts = [0, *boundaries, len(sums) - 1]
    stages = [sums[stop] - sums[start] for start, stop in pairwise(starts)]
    held = [placement.stages_of(rank) for rank in range(placement.num_ranks)]
    rank_of = [placement.rank_of(stage) for stage in range(placement.num_stages)]
    ranks = [sum(map(stages.__getitem__, own)) for own in held]

    def moved(*shifts: tuple[int, int]) -> tuple[list[float], dict[int, float]] | None:
        """All stages' work after boundaries have moved, and the work of the ranks that it changes; None if a stage has
        no block, or a rank more work than any has now."""
        for place, by in shifts:
            starts[place] += by
        changed = {stage for place, _ in shifts for stage in (place - 1, place)}
        work = stages.copy()
        is_possible = all([starts[stage] < starts[stage + 1] for stage in changed])
        for stage in changed if is_possible else ():
            work[stage] = sums[starts[stage + 1]] - sums[starts[stage]]
        for place, by in shifts:
            starts[place] -= by
        of_ranks = {rank: sum(map(work.__getitem__, held[rank])) for rank in {rank_of[stage] for stage in changed}}
        return (work, of_ranks) if is_possible and max(of_ranks.values()) <= most else None

    def squares(ranks: Sequence[float], stages: Sequence[float]) -> float:
        return sum([work * work for work in ranks]) + _LITTLE * sum([work * work for work in stages])

    def effect(shift: tuple[int, int]) -> tuple[float, int] | None:
        """What one move alone adds to the squares, and how many of the ranks with most work it relieves."""
        if (made := moved(shift)) is None:
            return None
        works = [(ranks[rank], work) for rank, work in made[1].items()]
        beside = slice(shift[0] - 1, shift[0] + 1)
        added = squares([new for _, new in works], made[0][beside]) - squares([old for old, _ in works], stages[beside])
        return added, sum(new < old == most for old, new in works)

    most, least, found = max(ranks), squares(ranks, stages), True
    alone: dict[tuple[int, int], tuple[float, int] | None] = {}
    num_most = ranks.count(most)
    places = range(1, len(starts) - 1)
    near = {place: {rank_of[place - 1], rank_of[place]} for place in places}
    pairs = [(one, other, near[one].isdisjoint(near[other])) for one in places for other in places[one - 1:]]
    while found:
        found = False
        for (one, other, is_independent), (by, also) in product(pairs, tuple(product((-1, 1), (-1, 0, 1)))):
            shifts = (one, by), (other, also)
            if is_independent:
                first, second = [alone[shift] if shift in alone else alone.setdefault(shift, effect(shift))
                                 for shift in shifts]
                if first is None or second is None or (
                        first[0] + second[0] > _ROUNDING * least and first[1] + second[1] < num_most):
                    continue
            if (made := moved(*shifts)) is None:
                continue
            tried = [made[1].get(rank, work) for rank, work in enumerate(ranks)]
            if (better := (max(tried), squares(tried, made[0]))) < (most, least):
                (most, least), stages, ranks, found = better, made[0], tried, True
                num_most = ranks.count(most)
                starts[one] += by
                starts[other] += also
                alone.clear()
    return tuple(starts[1:-1])
