"""Speed against accuracy over alpha, the share of layers that freeze at a time (PipeTransformer's Figure 10).

    python -m benchmarks.elastic.alpha [--task sentiment | cifar10] [--alphas 1/5 1/3 2/5 1/2] [--every 1 2] [--quick]

`none` and, for each alpha, `all` as in benchmarks/elastic/parts.py, paired by seed: four ranks, ten epochs, one process
after the other, alternately forwards and backwards through the list. Nothing else changes with alpha, except the epochs
between two freezings: with --every 1 2 each alpha is tried with both.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from benchmarks.elastic import bound, picture
from benchmarks.elastic.compare import COLUMNS, lines, markdown, row
from benchmarks.elastic.contender import contenders, named
from benchmarks.elastic.program import base_run, documents, epochs_parser, finish, run_all, stand_of, write

SEEDS = (0, 1, 2)


def measure(options: argparse.Namespace) -> dict:
    with stand_of(options) as stand:
        base = base_run(options, stand, options.seeds[0])
        found = named(contenders(base, cut=options.cut), ["none"])
        epoch = base.data.train_samples // base.batch.global_size
        cases = [(alpha, every) for every in options.every for alpha in options.alphas]
        for alpha, every in cases:
            (whole,) = named(contenders(base, alpha=float(alpha), cut=options.cut,
                                        every=0 if every == 1 else every * epoch), ["all"])
            found.append(replace(whole, name=_name(alpha, every)))
        outcomes = run_all(options, stand, found)
    layers = base.model.num_layers
    limits = {_name(alpha, every): bound.speedup(layers, float(alpha), options.epochs, cache=True, every=every)
              for alpha, every in cases}
    table = lines(outcomes, "none", limits)
    head = (f"{options.task}: {layers} layers, {options.epochs} epochs of {base.data.train_samples} samples, batch "
            f"{base.batch.global_size}; all over none by alpha")
    results = {"lines": [line.document() for line in table], "bounds": limits,
               "outcomes": documents(outcomes, options),
               "frozen_by_epoch": {_name(alpha, every): bound.depths(layers, float(alpha), options.epochs, every)
                                   for alpha, every in cases}}
    every = "" if options.every == [1] else f"-every-{'-'.join(map(str, options.every))}"
    write(options, f"alpha-{options.task}{every}", results, markdown(head, COLUMNS, [row(line) for line in table]),
          lambda path: picture.draw_trade([(line.name, line) for line in table], f"{options.task}, all over none",
                                           path))
    return results


def _name(alpha: Fraction, every: int) -> str:
    return f"alpha {alpha}" if every == 1 else f"alpha {alpha} every {every} epochs"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    made = epochs_parser(__doc__, SEEDS)
    made.add_argument("--alphas", type=Fraction, nargs="+")
    made.add_argument("--every", type=int, nargs="+", default=[1], help="epochs between two freezings")
    options = finish(made.parse_args(arguments), SEEDS)
    options.alphas = options.alphas or [Fraction(text) for text in (
        ("1/3", "1/2") if options.quick else ("1/5", "1/3", "2/5", "1/2"))]
    return options


if __name__ == "__main__":
    measure(parse())
