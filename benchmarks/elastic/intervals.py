"""95 % intervals of differences in accuracy: over seeds (Student's t), and of the counts (binomial)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gamma, inf, pi, sqrt
from statistics import mean, stdev

_NORMAL = 1.959964


@dataclass(frozen=True, kw_only=True)
class Interval:
    """An interval in points of accuracy; half is infinite if the spread is unknown."""

    middle: float
    half: float

    def __str__(self) -> str:
        return f"{self.middle:+.2f}" + ("" if self.half == inf else f" +- {self.half:.2f}")


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """The mean of ours - theirs, seed by seed, with its t interval over the seeds. Takes shares and returns points."""
    differences = [100.0 * (a - b) for a, b in zip(ours, theirs, strict=True)]
    if len(differences) < 2:
        return Interval(middle=differences[0], half=inf)
    half = t_quantile(len(differences) - 1) * stdev(differences) / sqrt(len(differences))
    return Interval(middle=mean(differences), half=half)


def binomial(ours: float, theirs: float, count: int) -> Interval:
    """The difference of two shares, each of `count` answers, taken as independent (they answer the same questions, so
    this is wider than necessary). count: answers of all seeds."""
    variance = (ours * (1 - ours) + theirs * (1 - theirs)) / count if count else inf
    return Interval(middle=100.0 * (ours - theirs), half=100.0 * _NORMAL * sqrt(variance))


def t_quantile(freedom: int, probability: float = 0.975) -> float:
    """Quantile of Student's t with `freedom` degrees of freedom, by Simpson's rule and bisection."""
    scale = gamma((freedom + 1) / 2) / (sqrt(freedom * pi) * gamma(freedom / 2))

    def below(limit: float, pieces: int = 2000) -> float:
        width = limit / pieces
        values = [scale * (1 + (number * width) ** 2 / freedom) ** (-(freedom + 1) / 2) for number in range(pieces + 1)]
        return 0.5 + width / 3 * (values[0] + values[-1] + 4 * sum(values[1:-1:2]) + 2 * sum(values[2:-1:2]))

    low, high = 0.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < probability else (low, middle)
    return low
