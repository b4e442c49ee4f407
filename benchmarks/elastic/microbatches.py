"""Samples per second over the number of microbatches, by pipeline length (PipeTransformer's Figure 11).

    python -m benchmarks.elastic.microbatches [--task sentiment | cifar10] [--rounds 3] [--quick]

Four ranks as pipe 4 x data 1, 2 x 2 and 1 x 4, nothing frozen; for K stages every number of microbatches between K and
6 K that divides a replica's share of the batch about evenly (ranvier.elastic.microbatch_profile). Each is a separate
run of --steps steps, of which the first three do not count; all take turns, alternately forwards and backwards through
the list. The table shows the median of each round's median step, with the range over the rounds; a star marks the best
number.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from benchmarks.elastic import picture
from benchmarks.elastic.compare import markdown
from benchmarks.elastic.contender import Contender
from benchmarks.elastic.program import finish, parser, stand_of, write
from benchmarks.elastic.rounds import in_turn, run_one
from benchmarks.elastic.task import task_run
from ranvier.config.run import Run
from ranvier.elastic.microbatch_profile import microbatch_counts

RANKS = 4
_WARMUP = 3


def cases(base: Run) -> dict[str, tuple[int, int, Contender]]:
    """Name -> pipeline length, number of microbatches, contender."""
    found = {}
    for pipe in (4, 2, 1):
        share = base.batch.global_size * pipe // RANKS
        for count in microbatch_counts(pipe, share):
            name = f"pipe {pipe}, {count} microbatches"
            found[name] = pipe, count, Contender(name=name, data=RANKS // pipe, pipe=pipe,
                                                 microbatch_size=-(-share // count))
    return found


def measure(options: argparse.Namespace) -> dict:
    with stand_of(options) as stand:
        base = task_run(options.task, stand.folder / "data", samples=options.samples, dropout=options.dropout,
                        eval_samples=options.eval_samples or 8, transport=options.transport)
        base = replace(base, train=replace(base.train, epochs=None, steps=options.steps, warmup_steps=0))
        found = cases(base)
        rates: dict[str, list[float]] = {name: [] for name in found}
        for seed, contender in in_turn(range(options.rounds), [one for *_, one in found.values()]):
            outcome = run_one(contender, replace(base, seed=seed), stand)
            rates[contender.name].append(base.batch.global_size / median(outcome.step_seconds[_WARMUP:]))
            print(f"round {seed}, {contender.name}: {rates[contender.name][-1]:.1f} samples/s", flush=True)
    curves, best = {}, {}
    for pipe in (4, 2, 1):
        mine = [(count, min(rates[name]), median(rates[name]), max(rates[name]))
                for name, (length, count, _) in found.items() if length == pipe]
        best[pipe] = max(mine, key=lambda point: point[2])[0]
        curves[f"pipe {pipe} x data {RANKS // pipe}"] = mine
    rows = [(f"{pipe} x {RANKS // pipe}", count, contender.microbatch_size, f"{median(rates[name]):.1f}",
             f"[{min(rates[name]):.1f}, {max(rates[name]):.1f}]", "best" if best[pipe] == count else "")
            for name, (pipe, count, contender) in found.items()]
    head = f"{options.task}: batch {base.batch.global_size}, {options.rounds} rounds of {options.steps} steps"
    results = {"rows": [{"pipe": pipe, "microbatches": count, "samples_per_second": rates[name]}
                        for name, (pipe, count, _) in found.items()], "best": best}
    write(options, f"microbatches-{options.task}", results,
          markdown(head, ("pipe x data", "microbatches", "samples each", "samples/s", "range", ""), rows),
          lambda path: picture.draw_curves(curves, head, "microbatches of a replica", "samples a second", path,
                                           dict(zip(curves, best.values(), strict=True))))
    return results


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--rounds", type=int)
    made.add_argument("--steps", type=int, help="of each run in a round")
    options = finish(made.parse_args(arguments), ())
    options.rounds = options.rounds or (1 if options.quick else 3)
    options.steps = options.steps or (_WARMUP + 2 if options.quick else _WARMUP + 9)
    return options


if __name__ == "__main__":
    measure(parse())
