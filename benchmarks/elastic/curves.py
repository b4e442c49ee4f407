"""Curves of quality over seconds: compared at budgets of seconds, seed by seed, as a sentence, a table and a picture.

A curve has a point for each evaluation: (seconds of training until then; score). A higher score is better: the score is
the accuracy, or minus the held-out loss of a language model, whose exponential is the perplexity.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, inf, sqrt
from pathlib import Path
from statistics import mean, stdev

from matplotlib import colormaps
from matplotlib.figure import Figure

from benchmarks.elastic.compare import markdown
from benchmarks.elastic.intervals import Interval, t_quantile
from benchmarks.elastic.outcome import Outcome

BUDGETS = 8
"""Budgets of seconds in a table."""
SEEDS_WANTED = 10
"""Seeds that a claim needs."""

Curve = Sequence[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How scores are shown. shown: score -> number; unit: text after the number; points: name of a hundredth of a
    score."""

    name: str
    shown: Callable[[float], float]
    unit: str
    points: str

    def words(self, score: float) -> str:
        """A score in words, with its unit."""
        return f"{self.number(score)}{self.unit}"

    def number(self, score: float) -> str:
        return f"{self.shown(score):.{1 if self.unit else 2}f}"


ACCURACY = Scale(name="accuracy", shown=lambda score: 100 * score, unit=" %", points="points")
PERPLEXITY = Scale(name="perplexity", shown=lambda score: exp(-score), unit="",
                   points="hundredths of a nat (about percent of the perplexity)")


def best_at(curve: Curve, seconds: float) -> float | None:
    """The best score that was reached within this many seconds; None before the first evaluation."""
    within = bisect_right([at for at, _ in curve], seconds)
    return max((score for _, score in curve[:within]), default=None)


def budgets_of(outcomes: Sequence[Outcome], references: Sequence[str], count: int = BUDGETS) -> list[float]:
    """Budgets that are evenly spread from the time when all references have a first point, in all seeds, to the last
    end."""
    first = max(one.curve[0][0] for one in outcomes if one.name in references)
    last = max(one.curve[-1][0] for one in outcomes)
    return [first + (last - first) * number / (count - 1) for number in range(count)]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One contender at one budget. reference: the best of the references at this budget, by the mean over the seeds.
    score and difference are None if the contender has no evaluation yet for some seed."""

    name: str
    seconds: float
    score: float | None
    reference: str
    difference: Interval | None

    @property
    def is_above(self) -> bool:
        """Whether the contender is above the reference by more than the half interval."""
        return self.difference is not None and self.difference.middle > self.difference.half


def cells(outcomes: Sequence[Outcome], budgets: Sequence[float], references: Sequence[str]) -> list[Cell]:
    """One cell for each contender and budget, over the seeds, which must be the same for all; also for the contenders
    of `references`, which are compared with the best of them. At each budget some reference must have been
    evaluated."""
    curves: dict[str, dict[int, Curve]] = {}
    for one in outcomes:
        curves.setdefault(one.name, {})[one.seed] = one.curve
    seeds = sorted(curves[outcomes[0].name])
    comparisons = len(budgets) * sum(name not in references for name in curves)
    found = []
    for seconds in budgets:
        reached = {name: known for name, mine in curves.items()
                   if None not in (known := [best_at(mine[seed], seconds) for seed in seeds])}
        reference = max((name for name in references if name in reached), key=lambda name: mean(reached[name]))
        for name in curves:
            mine = reached.get(name)
            found.append(Cell(name=name, seconds=seconds, score=None if mine is None else mean(mine),
                              reference=reference, difference=None if mine is None else corrected(
                                  mine, reached[reference], comparisons)))
    return found


def corrected(ours: Sequence[float], theirs: Sequence[float], comparisons: int) -> Interval:
    """The mean of ours - theirs in hundredths, seed by seed, with the half interval that holds for all `comparisons`
    together at 95 % (Student's t; Bonferroni). Infinite for one seed."""
    differences = [100.0 * (a - b) for a, b in zip(ours, theirs, strict=True)]
    if len(differences) < 2:
        return Interval(middle=differences[0], half=inf)
    quantile = t_quantile(len(differences) - 1, 1.0 - 0.025 / max(1, comparisons))
    return Interval(middle=mean(differences), half=quantile * stdev(differences) / sqrt(len(differences)))


def claim(found: Sequence[Cell], references: Sequence[str], num_seeds: int, scale: Scale = ACCURACY) -> str:
    """The claim that the curves allow, as one sentence."""
    compared = [cell for cell in found if cell.name not in references]
    above = [cell for cell in compared if cell.is_above]
    few = "" if num_seeds >= SEEDS_WANTED else (
        f" Seeds: {num_seeds}, of at least {SEEDS_WANTED} that a claim needs.")
    best = max(above or [cell for cell in compared if cell.difference is not None],
               key=lambda cell: cell.difference.middle)
    if not above:
        return ("At no budget of seconds is a curve of Ranvier's above the best of the peers and of early stopping "
                f"without freezing by more than the interval: at most {best.difference} {scale.points} ({best.name}, "
                f"{best.seconds:.0f} s).{few}")
    return (f"At {best.seconds:.0f} s, {best.name} reaches {'' if scale.unit else scale.name + ' '}"
            f"{scale.words(best.score)}, {best.difference} {scale.points} better than {best.reference}, the best of "
            f"the peers and of early stopping without freezing; {len(above)} of {len(compared)} comparisons are better "
            f"by more than the interval.{few}")


def table(found: Sequence[Cell], head: str, scale: Scale = ACCURACY) -> str:
    """Rows are contenders, columns budgets: the score, and the difference from the reference."""
    names, budgets = list(dict.fromkeys(cell.name for cell in found)), list(dict.fromkeys(
        cell.seconds for cell in found))
    by = {(cell.name, cell.seconds): cell for cell in found}
    rows = [[name, *(_words(by[name, seconds], scale) for seconds in budgets)] for name in names]
    return markdown(head, ("contender", *(f"{seconds:.0f} s" for seconds in budgets)), rows)


def _words(cell: Cell, scale: Scale) -> str:
    if cell.score is None:
        return "-"
    if cell.name == cell.reference:
        return f"{scale.number(cell.score)} (reference)"
    return f"{scale.number(cell.score)} ({cell.difference}){' above' if cell.is_above else ''}"


def draw(outcomes: Sequence[Outcome], panels: Mapping[str, Sequence[str]], references: Sequence[str], title: str,
         path: Path, scale: Scale = ACCURACY) -> None:
    """The mean curve of each contender over its seeds, with the range of one standard error. panels: names of
    contenders by heading; in each panel the others are grey. References are dashed."""
    figure = Figure(figsize=(12, 5))
    axes = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
    there = list(dict.fromkeys(one.name for one in outcomes))
    for axis, (heading, names) in zip(axes, panels.items(), strict=True):
        shown = [name for name in there if name in names]
        for name in there:
            seconds, middle, low, high = _mean_curve([one.curve for one in outcomes if one.name == name], scale)
            style = "--" if name in references else "-"
            if name not in shown:
                axis.step(seconds, middle, style, where="post", color="0.85", linewidth=0.8, zorder=0)
                continue
            colour = colormaps["tab20"](2 * shown.index(name) % 19)
            axis.step(seconds, middle, style, where="post", color=colour, marker="o", markersize=3, linewidth=1.6,
                      label=name)
            axis.fill_between(seconds, low, high, step="post", color=colour, alpha=0.12, linewidth=0)
        axis.set_title(heading, loc="left", fontsize=10)
        axis.set_xlabel("seconds of training, without evaluations")
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(fontsize=8, ncols=2, frameon=False, handlelength=3,
                    loc="lower right" if scale.unit else "upper right")
    axes[0].set_ylabel(f"best {scale.name} so far{',' if scale.unit else ''}{scale.unit}")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _mean_curve(curves: Sequence[Curve], scale: Scale) -> tuple[list[float], list[float], list[float], list[float]]:
    """Seconds, the mean of the best scores so far, and that mean minus and plus one standard error, as they are
    shown."""
    points = range(min(map(len, curves)))
    best = [[max(score for _, score in curve[:point + 1]) for curve in curves] for point in points]
    middle = [mean(values) for values in best]
    error = [stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0 for values in best]
    low, high = ([scale.shown(value + sign * half) for value, half in zip(middle, error, strict=True)]
                 for sign in (-1, 1))
    return [mean(curve[point][0] for curve in curves) for point in points], list(map(scale.shown, middle)), low, high
