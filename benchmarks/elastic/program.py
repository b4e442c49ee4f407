"""Shared by the programs of this folder: their options, the run of all contenders, and where results go."""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path

from benchmarks.elastic.contender import Contender
from benchmarks.elastic.kept import Kept
from benchmarks.elastic.outcome import Outcome
from benchmarks.elastic.rounds import Stand, in_turn, run_one
from benchmarks.elastic.task import task_run
from benchmarks.record import results_file, write_results
from ranvier.config.run import Run

TASKS = ("sentiment", "cifar10")
_MARGIN = 1.15
"""Factor on the expected seconds of a case."""


def parser(doc: str, tasks: Sequence[str] = TASKS) -> argparse.ArgumentParser:
    """A parser with the options that all of these programs have."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--task", choices=tasks, default=tasks[0])
    made.add_argument("--samples", type=int, help="training samples of an epoch")
    made.add_argument("--eval-samples", type=int, help="held-out samples of an evaluation")
    made.add_argument("--dropout", type=float, help="instead of the recipe's")
    made.add_argument("--transport", choices=["auto", "torch", "mpi"], default="auto",
                      help="of ours; the peer has Gloo")
    made.add_argument("--quick", action="store_true", help="a tiny model on generated data, ranks as threads: does it "
                                                           "work? (times mean nothing)")
    made.add_argument("--processes", action="store_true", help="--quick with real ranks")
    made.add_argument("--output", type=Path, help="the file of results; by default in benchmarks/results/elastic")
    made.add_argument("--outcomes", type=Path, help="a file that each run is added to at once; runs that are in it are "
                                                    "not repeated")
    made.add_argument("--keep", type=Path, help="folder for what the runs leave, which then stays")
    return made


def epochs_parser(doc: str, seeds: Sequence[int], tasks: Sequence[str] = TASKS) -> argparse.ArgumentParser:
    """Like `parser`, for programs that train for epochs and compare accuracies."""
    made = parser(doc, tasks)
    made.set_defaults(data=None, eval_data=None)
    made.add_argument("--seeds", type=int, nargs="+", help=f"default: {' '.join(map(str, seeds))}")
    made.add_argument("--epochs", type=int, help="default: 10")
    made.add_argument("--eval-epochs", type=int, default=0, help="epochs between evaluations; 0: one at the end")
    made.add_argument("--cut", choices=["exact", "reference"], default="exact", help="how AutoPipe packs")
    return made


def finish(options: argparse.Namespace, seeds: Sequence[int]) -> argparse.Namespace:
    """Fill in what --quick changes."""
    if options.quick:
        options.task = "quick-decoder" if options.task == "decoder" else "quick"
    if hasattr(options, "seeds"):
        options.seeds = options.seeds or ([0] if options.quick else list(seeds))
        options.epochs = options.epochs or (3 if options.quick else 10)
    return options


@contextmanager
def stand_of(options: argparse.Namespace, pin: bool = False):
    """The stand, in a folder that is removed at the end unless --keep names one."""
    threads = options.quick and not options.processes
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
        yield Stand(folder=options.keep, threads=threads, pin=pin)
        return
    with tempfile.TemporaryDirectory(prefix="elastic-") as folder:
        yield Stand(folder=Path(folder), threads=threads, pin=pin)


def base_run(options: argparse.Namespace, stand: Stand, seed: int) -> Run:
    """The task's run, as the options of `epochs_parser` change it."""
    return task_run(options.task, stand.folder / "data", seed=seed, epochs=options.epochs, samples=options.samples,
                    eval_samples=options.eval_samples, eval_epochs=options.eval_epochs, dropout=options.dropout,
                    transport=options.transport, data=options.data, eval_data=options.eval_data)


def run_all(options: argparse.Namespace, stand: Stand, found: Sequence[Contender], few: Sequence[int] | None = None,
            ends: Sequence[str] = (), minutes: float | None = None) -> list[Outcome]:
    """Run every contender for its seeds, one after the other; each is reported when it is over.

    minutes: time from now within which a case must end, as estimated from earlier cases. The first case that would not
    is not started, nor is any later one; kept outcomes are returned in any case.
    """
    began, outcomes, kept, left_out = time.monotonic(), [], Kept(options.outcomes), 0
    for seed, contender in in_turn(options.seeds, found, few, ends):
        base = base_run(options, stand, seed)
        outcome = kept.get(contender, base, stand)
        if outcome is None:
            spent = time.monotonic() - began
            if left_out or (minutes is not None and spent + expected_seconds(contender.name, outcomes) > 60 * minutes):
                left_out += 1
                continue
            outcome = run_one(contender, base, stand)
            kept.add(contender, base, stand, outcome)
            print(told(outcome), flush=True)
        outcomes.append(outcome)
    if left_out:
        rest = left_out * sum(one.process_seconds for one in outcomes) / max(1, len(outcomes)) / 60
        print(f"{len(outcomes)} of {len(outcomes) + left_out} cases are done, the others take about {rest:.0f} minutes",
              flush=True)
    return sorted(outcomes, key=lambda one: [each.name for each in found].index(one.name))


def told(outcome: Outcome) -> str:
    """A case in one line."""
    accuracy = "" if outcome.accuracy is None else f", {100 * outcome.accuracy:.1f} % of {outcome.count}"
    return (f"seed {outcome.seed}, {outcome.name}: {outcome.seconds:.1f} s ({outcome.process_seconds:.0f} s in all), "
            f"{outcome.samples_per_second:.1f} {'samples' if outcome.accuracy is not None else 'targets'}/s, "
            f"{len(outcome.course) - 1} transitions{accuracy}")


def expected_seconds(name: str, outcomes: Sequence[Outcome]) -> float:
    """Expected seconds of the next case of this contender, with some margin: its longest case so far, otherwise the
    longest of any contender; 0 if there is no case."""
    own = [one.process_seconds for one in outcomes if one.name == name]
    return _MARGIN * max(own or [one.process_seconds for one in outcomes], default=0.0)


def write(options: argparse.Namespace, name: str, results: Mapping[str, object], table: str,
          draw: Callable[[Path], None]) -> Path:
    """Write the JSON file of results, and next to it the table and the picture; also print the table."""
    path = options.output or results_file("elastic", name, quick=options.quick)
    write_results(path, _plain({"options": vars(options), **results}))
    path.with_suffix(".md").write_text(table)
    draw(path.with_suffix(".png"))
    print(f"\n{table}\nwrote {path}")
    return path


def documents(outcomes: Sequence[Outcome], options: argparse.Namespace) -> list[dict]:
    """Each outcome as a dict; without values for each step if a file of outcomes has them."""
    found = [asdict(one) | {"seconds": one.seconds, "samples_per_second": one.samples_per_second} for one in outcomes]
    if options.outcomes is not None:
        for one in found:
            del one["losses"], one["step_seconds"]
    return found


def _plain(value):
    """`value` as JSON can represent it, which has no infinity, NaN, path or fraction."""
    if isinstance(value, (Path, Fraction)):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
