"""The number of frozen layers from which the cache is faster than recomputing them (PipeTransformer's Figure 12).

    python -m benchmarks.elastic.cache_depth [--task sentiment | cifar10] [--rounds 3] [--depths 1 2 4] [--quick]

One rank with all cores freezes the given number of layers after its first step, with the cache enabled from one layer
on, and without it. The first two epochs write the cache; steps of later epochs count. Runs with and without the cache
are separate, one after the other; their ratio is formed within a round. Times are those of complete training steps: the
layers that are still trained are the same in both. `hits` is the number of samples that were read completely.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from benchmarks.elastic import picture
from benchmarks.elastic.compare import markdown
from benchmarks.elastic.contender import Contender
from benchmarks.elastic.outcome import Outcome
from benchmarks.elastic.program import finish, parser, stand_of, write
from benchmarks.elastic.rounds import run_one
from benchmarks.elastic.task import task_run
from benchmarks.memory.program import ratios
from ranvier.config.run import Elastic, Run

_WRITING = 2
SAMPLES = {"sentiment": 128, "cifar10": 128, "quick": 32}


def contender(depth: int, cache: bool) -> Contender:
    elastic = Elastic(freeze="manual", manual=(f"1:{depth}",), frozen_dropout=False, cache=cache)
    return Contender(name=f"{depth} frozen, {'cache' if cache else 'computed'}", pipe=1, microbatch_size=8,
                     elastic=replace(elastic, cache_from=1) if cache else elastic)


def seconds_per_sample(outcome: Outcome, base: Run) -> float:
    """Seconds per sample of a step after the epochs that write."""
    first = _WRITING * base.data.train_samples // base.batch.global_size
    return median(outcome.step_seconds[first:]) / base.batch.global_size


def measure(options: argparse.Namespace) -> dict:
    with stand_of(options) as stand:
        base = task_run(options.task, stand.folder / "data", samples=options.samples or SAMPLES[options.task],
                        epochs=_WRITING + options.epochs, eval_samples=options.eval_samples or 8,
                        dropout=options.dropout, transport=options.transport)
        layers = base.model.num_layers
        depths = options.depths or ([2, 4] if options.quick else range(1, layers + 1))
        taken: dict[tuple[int, bool], list[float]] = {}
        hits = {}
        for number in range(options.rounds):
            for depth in depths if number % 2 == 0 else reversed(depths):
                for cache in (False, True) if number % 2 == 0 else (True, False):
                    outcome = run_one(contender(depth, cache), replace(base, seed=number), stand)
                    taken.setdefault((depth, cache), []).append(seconds_per_sample(outcome, base))
                    if cache:
                        hits[depth] = sum(counts["hits"] for counts in outcome.cache)
                    print(f"round {number}, {outcome.name}: {1e3 * taken[depth, cache][-1]:.2f} ms a sample",
                          flush=True)
    rows = []
    for depth in depths:
        gain = ratios(taken[depth, False], taken[depth, True])
        rows.append({"frozen": depth, "computed": taken[depth, False], "cached": taken[depth, True],
                     "hits": hits[depth], "gain": [gain.least, gain.middle, gain.greatest], "shown": str(gain)})
    pays = next((row["frozen"] for place, row in enumerate(rows)
                 if all(later["gain"][1] > 1.0 for later in rows[place:])), None)
    head = (f"{options.task}: {layers} layers, batch {base.batch.global_size}, one rank; the cache pays "
            + (f"from {pays} frozen layers on" if pays else "at none of these depths"))
    curves = {name: [(row["frozen"], *(1e3 * one(row[key]) for one in (min, median, max))) for row in rows]
              for name, key in (("computed again", "computed"), ("read from the cache", "cached"))}
    results = {"rows": rows, "pays_from": pays}
    write(options, f"cache-depth-{options.task}", results, markdown(
        head, ("frozen layers", "ms a sample, computed", "with the cache", "computed over cached", "hits"),
        [(row["frozen"], f"{1e3 * median(row['computed']):.2f}", f"{1e3 * median(row['cached']):.2f}", row["shown"],
          row["hits"]) for row in rows]),
        lambda path: picture.draw_curves(curves, head, "frozen layers", "milliseconds a sample", path,
                                         {"read from the cache": pays}))
    return results


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--rounds", type=int)
    made.add_argument("--epochs", type=int, help="that count, after those that write")
    made.add_argument("--depths", type=int, nargs="+", help="default: every number of layers")
    options = finish(made.parse_args(arguments), ())
    options.rounds = options.rounds or (1 if options.quick else 3)
    options.epochs = options.epochs or (1 if options.quick else 3)
    return options


if __name__ == "__main__":
    measure(parse())
