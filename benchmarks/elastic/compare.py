"""From outcomes to the lines of a table: speed-ups as ratios formed within a seed, accuracies paired by seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import nan
from statistics import mean, median

from benchmarks.elastic.intervals import Interval, binomial, paired
from benchmarks.elastic.outcome import Outcome
from benchmarks.memory.program import ratios
from benchmarks.pipeline.summary import Spread

WANTED = "wanted: all at 2.83 times none, with accuracy no more than 0.5 points lower"


@dataclass(frozen=True, kw_only=True)
class Line:
    """One contender over its seeds. speedup: by seconds without evaluations; with_eval: with them. bound: by compute
    alone."""

    name: str
    seeds: tuple[int, ...]
    seconds: float
    samples_per_second: float
    speedup: Spread
    with_eval: Spread
    accuracy: float
    count: int
    by_seed: Interval | None
    by_count: Interval | None
    bound: float | None
    decided_seconds: float
    """Seconds that belong neither to a step nor to a transition."""
    transitions: tuple[str, ...]
    """Transitions of the first seed."""

    def document(self) -> dict[str, object]:
        return asdict(self)


def lines(outcomes: Sequence[Outcome], base: str, bounds: dict[str, float]) -> list[Line]:
    """One line for each name, in the order of their first appearance; all are compared with `base`."""
    by_name: dict[str, dict[int, Outcome]] = {}
    for one in outcomes:
        by_name.setdefault(one.name, {})[one.seed] = one
    return [_line(name, mine, by_name[base], bounds.get(name)) for name, mine in by_name.items()]


def _line(name: str, mine: dict[int, Outcome], base: dict[int, Outcome], bound: float | None) -> Line:
    seeds = [seed for seed in mine if seed in base]
    pairs = [(base[seed], mine[seed]) for seed in seeds]
    known = [(theirs, ours) for theirs, ours in pairs if theirs.accuracy is not None and ours.accuracy is not None]
    shares = [[one.accuracy for one in side] for side in zip(*known, strict=True)] if known else None
    count = sum(ours.count for _, ours in known)
    first = mine[seeds[0]]
    return Line(
        name=name, seeds=tuple(seeds), seconds=median(one.seconds for one in mine.values()),
        samples_per_second=median(one.samples_per_second for one in mine.values()),
        speedup=ratios([theirs.seconds for theirs, _ in pairs], [ours.seconds for _, ours in pairs]),
        with_eval=ratios([theirs.wall_seconds for theirs, _ in pairs], [ours.wall_seconds for _, ours in pairs]),
        accuracy=mean(shares[1]) if shares else nan, count=count,
        by_seed=paired(shares[1], shares[0]) if shares else None,
        by_count=binomial(mean(shares[1]), mean(shares[0]), count) if shares else None, bound=bound,
        decided_seconds=median(one.seconds - one.counted_seconds for one in mine.values()),
        transitions=tuple(f"{at['step']}: {at['frozen']} frozen, {at['data']} x {at['pipe']}"
                          f"{', cache' if at['cache'] else ''}" for at in first.course[1:]))


def markdown(head: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A heading and a table, with columns as wide as their cells need."""
    cells = [list(map(str, columns)), *(list(map(str, row)) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(columns))]

    def line(row: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"

    return "\n".join([head, "", line(cells[0]), line(["-" * width for width in widths]), *map(line, cells[1:])]) + "\n"


COLUMNS = ("contender", "seeds", "s", "samples/s", "speed-up", "with evaluations", "bound", "accuracy %", "count",
           "points, t over seeds", "points, binomial", "other s", "transitions (step: frozen, data x pipe)")


def row(line: Line) -> list[object]:
    """The cells of COLUMNS."""
    return [line.name, len(line.seeds), f"{line.seconds:.1f}", f"{line.samples_per_second:.1f}", line.speedup,
            line.with_eval, "-" if line.bound is None else f"{line.bound:.2f}", f"{100 * line.accuracy:.2f}",
            line.count, line.by_seed or "-", line.by_count or "-", f"{line.decided_seconds:.1f}",
            "; ".join(line.transitions) or "-"]
