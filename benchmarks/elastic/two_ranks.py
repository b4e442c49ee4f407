"""`none` against `all` with one core for each rank, and the possible gain on the article's eight devices.

    python -m benchmarks.elastic.two_ranks [--task sentiment | cifar10] [--seeds 0 1 2] [--pin] [--quick]

If four ranks share two cores, a rank's wait is another rank's computing time, so bubbles cost nothing and packing gains
little. Here two ranks start as pipe 2 on two cores: the run is kept on as many cores as it has ranks. With --pin each
rank has its own core; AutoPipe then assumes that there is only one core, so its choices mean less. Otherwise as
benchmarks/elastic/parts.py.

The table also has the simulation of eight devices (benchmarks/elastic/simulated.py), without any cost of messages and
with --bandwidth. Neither is a measurement.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from math import inf

from benchmarks.elastic import picture
from benchmarks.elastic.compare import COLUMNS, WANTED, lines, markdown, row
from benchmarks.elastic.contender import ENDS, contenders, named
from benchmarks.elastic.parts import bounds
from benchmarks.elastic.program import base_run, documents, epochs_parser, finish, run_all, stand_of, write
from benchmarks.elastic.simulated import SHAPES, simulate_all

SEEDS = (0, 1, 2)
RANKS = 2


def measure(options: argparse.Namespace) -> dict:
    simulated = {}
    for bandwidth in (inf, options.bandwidth):
        for shape in SHAPES:
            name = f"{shape.name}, {'free messages' if bandwidth == inf else f'{bandwidth / 1e9:g} GB/s'}"
            simulated[name] = simulate_all(shape, epochs=options.epochs, bandwidth=bandwidth)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[:RANKS])  # the ranks inherit it
    try:
        with stand_of(options, pin=options.pin) as stand:
            base = base_run(options, stand, options.seeds[0])
            outcomes = run_all(options, stand, named(contenders(base, ranks=RANKS, cut=options.cut), ENDS))
    finally:
        os.sched_setaffinity(0, cores)
    table = lines(outcomes, "none", bounds(base.model.num_layers, 1 / 3, options.epochs))
    head = (f"{options.task}: {base.model.num_layers} layers, {options.epochs} epochs of {base.data.train_samples} "
            f"samples, {RANKS} ranks on {min(RANKS, len(cores))} cores\n\n{WANTED}")
    rows = [(shape, name, f"{found['speedup']:.2f}", f"{found['bound']:.2f}", _course(found["course"]))
            for shape, all_found in simulated.items() for name, found in all_found.items()]
    text = "\n".join([markdown(head, COLUMNS, [row(line) for line in table]), markdown(
        "Simulated: 8 devices", ("shape", "contender", "x of none", "bound", "frozen: data x pipe, by epoch"), rows)])
    results = {"lines": [line.document() for line in table], "outcomes": documents(outcomes, options),
               "simulated": simulated}
    write(options, f"two-ranks-{options.task}", results, text,
          lambda path: picture.draw_parts(table, outcomes, f"{options.task}, {RANKS} ranks", path))
    return results


def _course(course: Sequence[tuple[int, int, int]]) -> str:
    """Each change once."""
    parts, before = [], None
    for frozen, data, pipe in course:
        if (frozen, data, pipe) != before:
            parts.append(f"{frozen}: {data} x {pipe}")
        before = frozen, data, pipe
    return ", ".join(parts)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    made = epochs_parser(__doc__, SEEDS)
    made.add_argument("--pin", action="store_true", help="a core for each rank")
    made.add_argument("--bandwidth", type=float, default=10e9, help="simulated: bytes a second between two devices")
    return finish(made.parse_args(arguments), SEEDS)


if __name__ == "__main__":
    measure(parse())
