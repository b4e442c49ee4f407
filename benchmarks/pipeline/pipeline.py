"""Pipelines on one machine: ours against torch's schedules, DDP, plain loops and a computed bound, in one run.

    python -m benchmarks.pipeline.pipeline                          2 and 4 ranks, 8 and 16 microbatches
    python -m benchmarks.pipeline.pipeline --quick                  2 ranks, 8 microbatches, two rounds
    python -m benchmarks.pipeline.pipeline --scenario delay slow-stage jitter --ranks 2 --microbatches 8
    python -m benchmarks.pipeline.pipeline --scenario curve --ranks 2 --microbatches 8 --only '*mpi*' ceiling torch-1f1b

benchmarks/README.md says what the columns mean. Results: JSON with every step's time, a Markdown table and a picture,
in benchmarks/results/pipeline.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import product
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from benchmarks.pipeline.case import SCENARIOS, Case, LossesDiffer, run_case
from benchmarks.pipeline.contender import Contender
from benchmarks.pipeline.picture import draw
from benchmarks.pipeline.summary import markdown
from benchmarks.pipeline.team import ALLOCATORS, Stand, TeamFailed
from benchmarks.pipeline.workload import Workload
from benchmarks.record import circumstances, results_file, write_results
from ranvier.system.machine import available_cores


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A complete run of the benchmark."""

    cases: tuple[Case, ...]
    rounds: int
    steps: int
    warmup: int
    pin: bool
    allocator: str
    kind: str
    command: str


def parse(arguments: Sequence[str]) -> Plan:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--scenario", nargs="+", choices=SCENARIOS, default=["plain"])
    parser.add_argument("--only", nargs="+", metavar="PATTERN", default=["*"],
                        help="contenders, e.g. 'torch-*' ceiling")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5, help="timed steps in each block")
    parser.add_argument("--warmup", type=int, default=3, help="steps after the start that are not timed")
    parser.add_argument("--quick", action="store_true",
                        help="at most two rounds of two steps, the first of --ranks and --microbatches only")
    parser.add_argument("--boundaries", type=int, nargs="+", metavar="BLOCK",
                        help="first block of each rank's stage after the first; default: best by measured block times")
    parser.add_argument("--in-flight", type=int, help="for all of ours; default: the engine's")
    parser.add_argument("--defer-bytes", type=int, help="for all of ours; default: the engine's")
    parser.add_argument("--untied", action="store_true",
                        help="head and token embedding are two parameters, for everyone")
    parser.add_argument("--no-pin", action="store_true", help="leave the ranks' cores to the kernel")
    parser.add_argument("--allocator", choices=sorted(ALLOCATORS), default="default",
                        help="glibc's settings, for everyone")
    for name, default in (("layers", 8), ("hidden", 256), ("heads", 8), ("vocab", 8192), ("sequence", 128),
                          ("sequences", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds, options.steps = min(2, options.rounds), min(2, options.steps)
        options.ranks, options.microbatches = options.ranks[:1], options.microbatches[:1]
    cores = available_cores()
    if any(ranks < 2 for ranks in options.ranks):
        parser.error("--ranks: a pipeline has at least 2")
    kind = "-".join([*dict.fromkeys(options.scenario), *map(str, options.ranks), "ranks",
                     *map(str, options.microbatches), "microbatches", *(["untied"] if options.untied else []),
                     *([] if options.only == ["*"] else ["selected"])])
    slowing = [name for name in options.scenario if name in ("slow-stage", "jitter")]
    if slowing and max(options.ranks) > cores:
        parser.error(f"--scenario {' '.join(slowing)} needs a core for each rank, and there are {cores}: a rank that "
                     "sleeps would lend its core to another")

    def wanted(contender: Contender) -> bool:
        return any(fnmatch(contender.name, pattern) for pattern in options.only)

    settings = tuple((name, value) for name, value in (("in_flight", options.in_flight),
                                                       ("defer_bytes", options.defer_bytes)) if value is not None)
    try:
        cases = tuple(Case(
            workload=Workload(num_layers=options.layers, hidden=options.hidden, heads=options.heads,
                              vocab=options.vocab, sequence=options.sequence, sequences=options.sequences,
                              microbatches=microbatches, tied=not options.untied),
            ranks=ranks, scenario=scenario, wanted=wanted, ours_settings=settings,
            boundaries=tuple(options.boundaries) if options.boundaries else None)
            for scenario, ranks, microbatches in product(options.scenario, options.ranks, options.microbatches))
    except ValueError as error:
        parser.error(str(error))
    return Plan(cases=cases, rounds=options.rounds, steps=options.steps, warmup=options.warmup, pin=not options.no_pin,
                allocator=options.allocator, kind=f"quick-{kind}" if options.quick else kind,
                command=shlex.join(["python", "-m", "benchmarks.pipeline.pipeline", *arguments]))


def measure(plan: Plan, path: Path) -> dict:
    """Run all cases; after each one `path` (JSON), and .md and .png files next to it, contain all results so far."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results: dict[str, Any] = {"command": plan.command, "rounds": plan.rounds, "steps_per_round": plan.steps,
               "warmup_steps": plan.warmup,
               "allocator": {"name": plan.allocator, "variables": ALLOCATORS[plan.allocator]}, "threads_per_rank": 1,
               "cases": []}
    with tempfile.TemporaryDirectory(prefix="ranvier-benchmark-") as folder:
        stand = Stand(store=store, port=store.port, folder=Path(folder), cores=available_cores(), pin=plan.pin,
                      allocator=plan.allocator, warmup=plan.warmup)
        for case in plan.cases:
            results["cases"].append(run_case(case, stand, rounds=plan.rounds, steps=plan.steps))
            path.parent.mkdir(parents=True, exist_ok=True)
            write_results(path, results)
            path.with_suffix(".md").write_text(markdown(results["cases"], _head(plan)))
            draw(results["cases"], path.with_suffix(".png"))
            print(markdown(results["cases"][-1:], ""))
    return results


def _head(plan: Plan) -> str:
    facts = circumstances()
    machine, versions = facts["machine"], facts["versions"]
    return "\n".join([
        "# Pipelines on one machine", "", f"    {plan.command}", "",
        f"{facts['date']}, commit {facts['commit']}, {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['memory_gib']} GiB, Python {versions['python']}, torch {versions['torch']}. "
        f"One thread a rank, allocator {plan.allocator}; {plan.rounds} rounds of {plan.steps} timed steps. "
        "Ratios are of speeds, formed within each round: median [least, greatest].", ""])


def main(arguments: Sequence[str]) -> None:
    plan = parse(arguments)
    path = results_file("pipeline", plan.kind)
    try:
        measure(plan, path)
    except (LossesDiffer, TeamFailed) as error:
        sys.exit(str(error))
    print(f"wrote {path}, .md and .png")


if __name__ == "__main__":
    main(sys.argv[1:])
