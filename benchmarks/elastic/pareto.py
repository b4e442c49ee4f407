"""Accuracy against seconds, as curves: freezing, adapters and caches against early stopping and the peers.

    python -m benchmarks.elastic.pareto --outcomes FILE [--task sentiment | cifar10]
                                        [--seeds 0 1 ... 9] [--epochs 6] [--only NAME ...]

Every contender starts from the same weights, sees the same samples in the same order, and is evaluated after each
epoch; a point of its curve is (seconds of training until then, without evaluations; best accuracy so far). To stop
after any epoch is therefore part of every curve, for the peers and for training without freezing, too. The learning
rate's schedule is that of all epochs; `--epochs` sets another one.

    plain      transformers' model in one process on all cores, batches padded to their longest sample: a peer
    ddp        the same under torch's DDP, a rank for each of two cores: a peer
    none       Ranvier on two replicas, no freezing: early stopping
    static-k   the first k layers frozen from the start, with the cache
    gradient-norm, cap, plasticity   the policies on two replicas, with the cache
    stage-balance                    on two stages
    packed     cap on two stages that pack, with replicas and cache (PipeTransformer)
    lora, lora-cache                 adapters in the upper half of the layers, without and with the cache

At each budget of seconds the contenders of Ranvier are compared with the best of the peers and of `none` there, seed
by seed. A difference counts if it is larger than its half interval (Student's t), which is corrected for the number of
comparisons in the table (Bonferroni). With fewer than ten seeds the program says so. It takes hours: with --outcomes
each run is kept at once, and another start goes on with what is missing.
"""

from __future__ import annotations

import argparse
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, sqrt
from pathlib import Path
from statistics import mean, stdev

from matplotlib import colormaps
from matplotlib.figure import Figure

from benchmarks.elastic.compare import markdown
from benchmarks.elastic.contender import Contender, named
from benchmarks.elastic.intervals import Interval, t_quantile
from benchmarks.elastic.outcome import Outcome
from benchmarks.elastic.program import base_run, documents, epochs_parser, finish, run_all, stand_of, write
from ranvier.config.run import Elastic, Lora, Run

SEEDS = tuple(range(10))
EPOCHS = 6
BUDGETS = 8
"""Budgets of seconds in the table."""
REFERENCES = ("plain", "ddp", "none")
"""What the others must be above."""


def pareto_contenders(base: Run) -> list[Contender]:
    """All of them, in the order of the table."""
    share, layers = base.batch.global_size // 2, base.model.num_layers
    cached = Elastic(cache=True, frozen_dropout=False)
    upper = Lora(rank=8, targets=tuple(f"layer{layer}.*" for layer in range(layers // 2, layers)))
    untrained = replace(cached, freeze="untrained")

    def replicas(name: str, elastic: Elastic, **changes: object) -> Contender:
        return Contender(name=name, data=2, pipe=1, microbatch_size=share, elastic=elastic, **changes)

    return [
        Contender(name="plain", pipe=1, microbatch_size=2 * share, peer=True),
        Contender(name="ddp", data=2, pipe=1, microbatch_size=share, peer=True),
        replicas("none", Elastic()),
        *(replicas(f"static-{depth}", replace(cached, freeze="manual", manual=(f"0:{depth}",)))
          for depth in (layers // 3, 2 * layers // 3)),
        *(replicas(policy, replace(cached, freeze=policy)) for policy in ("gradient-norm", "cap", "plasticity")),
        Contender(name="stage-balance", pipe=2, elastic=Elastic(freeze="stage-balance", frozen_dropout=False)),
        Contender(name="packed", pipe=2, elastic=replace(cached, freeze="cap", auto_pipe=True, auto_dp=True)),
        replicas("lora", replace(untrained, cache=False), lora=upper, learning_rate=10 * base.train.learning_rate),
        replicas("lora-cache", untrained, lora=upper, learning_rate=10 * base.train.learning_rate),
    ]


# ---------------------------------------------------------------------- curves


def best_at(curve: Sequence[tuple[float, float]], seconds: float) -> float:
    """The best accuracy that was reached within so many seconds; 0 before the first evaluation."""
    within = bisect_right([at for at, _ in curve], seconds)
    return max((accuracy for _, accuracy in curve[:within]), default=0.0)


def budgets_of(outcomes: Sequence[Outcome], count: int = BUDGETS) -> list[float]:
    """Evenly spread from when all peers and `none` have a first point, in all seeds, to the last end."""
    first = max(one.curve[0][0] for one in outcomes if one.name in REFERENCES)
    last = max(one.curve[-1][0] for one in outcomes)
    return [first + (last - first) * number / (count - 1) for number in range(count)]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One contender at one budget. reference: the best of the peers and `none` there, by the mean over the seeds."""

    name: str
    seconds: float
    accuracy: float
    reference: str
    difference: Interval

    @property
    def is_above(self) -> bool:
        """Whether it is above the reference by more than the half interval."""
        return self.difference.middle > self.difference.half


def cells(outcomes: Sequence[Outcome], budgets: Sequence[float]) -> list[Cell]:
    """One for each contender and budget; those of `REFERENCES` too, which are compared with the best of them."""
    curves: dict[str, dict[int, Sequence[tuple[float, float]]]] = {}
    for one in outcomes:
        curves.setdefault(one.name, {})[one.seed] = one.curve
    seeds = sorted(set.intersection(*(set(found) for found in curves.values())))
    comparisons = len(budgets) * sum(name not in REFERENCES for name in curves)
    found = []
    for seconds in budgets:
        reached = {name: [best_at(mine[seed], seconds) for seed in seeds] for name, mine in curves.items()}
        reference = max((name for name in REFERENCES if name in reached), key=lambda name: mean(reached[name]))
        found += [Cell(name=name, seconds=seconds, accuracy=mean(mine), reference=reference,
                       difference=corrected(mine, reached[reference], comparisons)) for name, mine in reached.items()]
    return found


def corrected(ours: Sequence[float], theirs: Sequence[float], comparisons: int) -> Interval:
    """The mean of ours - theirs in points, seed by seed, with the half interval that holds for all of so many
    comparisons together at 95 %. Infinite for one seed."""
    differences = [100.0 * (a - b) for a, b in zip(ours, theirs, strict=True)]
    if len(differences) < 2:
        return Interval(middle=differences[0], half=inf)
    quantile = t_quantile(len(differences) - 1, 1.0 - 0.025 / max(1, comparisons))
    return Interval(middle=mean(differences), half=quantile * stdev(differences) / sqrt(len(differences)))


def claim(found: Sequence[Cell], num_seeds: int) -> str:
    """The one sentence that the curves allow."""
    above = [cell for cell in found if cell.name not in REFERENCES and cell.is_above]
    few = f" These are {num_seeds} seeds, of at least ten that a claim needs." if num_seeds < len(SEEDS) else ""
    if not above:
        return ("At no budget of seconds is a curve of Ranvier's above the best of the peers and of early stopping "
                f"without freezing by more than the interval.{few}")
    best = max(above, key=lambda cell: cell.difference.middle)
    return (f"At {best.seconds:.0f} s, {best.name} reaches {100 * best.accuracy:.1f} %, {best.difference} points above "
            f"{best.reference}, the best of the peers and of early stopping without freezing; {len(above)} of "
            f"{sum(cell.name not in REFERENCES for cell in found)} comparisons are above by more than the interval."
            f"{few}")


def table(found: Sequence[Cell], head: str) -> str:
    """Rows are contenders, columns budgets: accuracy in percent, and the difference from the reference in points."""
    names, budgets = list(dict.fromkeys(cell.name for cell in found)), list(dict.fromkeys(
        cell.seconds for cell in found))
    by = {(cell.name, cell.seconds): cell for cell in found}
    rows = [[name, *(_words(by[name, seconds]) for seconds in budgets)] for name in names]
    return markdown(head, ("contender", *(f"{seconds:.0f} s" for seconds in budgets)), rows)


def _words(cell: Cell) -> str:
    text = f"{100 * cell.accuracy:.1f}"
    if cell.name == cell.reference:
        return f"{text} (reference)"
    return f"{text} ({cell.difference}){' above' if cell.is_above else ''}"


def draw(outcomes: Sequence[Outcome], title: str, path: Path) -> None:
    """The mean curve of each contender over the seeds, with the range of one standard error."""
    figure = Figure(figsize=(9, 5.5))
    axes = figure.subplots()
    for number, name in enumerate(dict.fromkeys(one.name for one in outcomes)):
        mine = [one.curve for one in outcomes if one.name == name]
        points = range(min(map(len, mine)))
        seconds = [mean(curve[point][0] for curve in mine) for point in points]
        best = [[100 * best_at(curve, curve[point][0]) for curve in mine] for point in points]
        middle = [mean(values) for values in best]
        error = [stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0 for values in best]
        style = "--" if name in REFERENCES else "-"
        colour = colormaps["tab20"](number)
        axes.step(seconds, middle, style, where="post", color=colour, marker="o", markersize=3, linewidth=1.6,
                  label=name)
        axes.fill_between(seconds, [a - b for a, b in zip(middle, error, strict=True)],
                          [a + b for a, b in zip(middle, error, strict=True)], step="post", color=colour, alpha=0.12,
                          linewidth=0)
    axes.set_xlabel("seconds of training, without evaluations")
    axes.set_ylabel("best accuracy so far, %")
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, ncols=2, frameon=False, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


# ---------------------------------------------------------------------- the program


def measure(options: argparse.Namespace) -> dict:
    with stand_of(options) as stand:
        base = base_run(options, stand, options.seeds[0])
        chosen = pareto_contenders(base)
        if options.only is not None:
            chosen = named(chosen, [*REFERENCES, *options.only])
        outcomes = run_all(options, stand, chosen)
    found = cells(outcomes, budgets_of(outcomes))
    text = claim(found, len(options.seeds))
    head = (f"{options.task}: {base.model.num_layers} layers, {options.epochs} epochs of {base.data.train_samples} "
            f"samples, {len(options.seeds)} seeds; best accuracy so far in percent (difference from the best of "
            f"{', '.join(REFERENCES)} in points, with an interval for all comparisons together)\n\n{text}")
    results = {"claim": text, "cells": [{**vars(cell), "difference": vars(cell.difference), "is_above": cell.is_above}
                                        for cell in found], "outcomes": documents(outcomes, options)}
    name = f"pareto-{options.task}{'-selected' if options.only is not None else ''}"
    write(options, name, results, table(found, head), lambda path: draw(
        outcomes, f"{options.task}, {len(options.seeds)} seeds", path))
    return results


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    made = epochs_parser(__doc__, SEEDS)
    made.set_defaults(eval_epochs=1)
    made.add_argument("--only", nargs="+", metavar="NAME", help=f"these contenders, and {', '.join(REFERENCES)}")
    options = made.parse_args(arguments)
    options.epochs = options.epochs or (None if options.quick else EPOCHS)
    if options.eval_epochs != 1:
        made.error("--eval-epochs must be 1: curves have a point for each epoch")
    return finish(options, SEEDS)


if __name__ == "__main__":
    measure(parse())
