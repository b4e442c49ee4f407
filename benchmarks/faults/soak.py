"""Faults of every kind under every launcher: does every run end in time, and lose nothing?

    python -m benchmarks.faults.soak --outcomes outcomes.jsonl --out table.md

Each case is one fault of a real `ranvier train` on two ranks, at a moment that its number draws (a step and a moment
after it), under plain python, torchrun or mpiexec. Every process of the run must be gone within 10 s of the fault (of
--comm.timeout-seconds after it if a rank is stopped), and `--resume auto` must take the run from its newest undamaged
checkpoint to its end: losses bit-identical to those of an undisturbed run, each step's metrics once, no process left
(`benchmarks.faults.trial`). The kinds are in `benchmarks.faults.kinds`.

The outcome of a case is appended to --outcomes as soon as it is over, one JSON object per line; a case in that file is
not run again. Faults inside ranks, other meshes and elastic runs: `benchmarks.faults.random_faults`.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path

from benchmarks.faults.kinds import KINDS
from benchmarks.faults.processes import LAUNCHERS
from benchmarks.faults.training import Training
from benchmarks.faults.trial import Case, Outcome, Trial
from ranvier.launch.mpiexec import mpi_available


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=15, help="of each kind under each launcher")
    parser.add_argument("--kinds", default=",".join(KINDS), help="separated by commas")
    parser.add_argument("--launchers", default=",".join(LAUNCHERS), help="separated by commas")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--outcomes", type=Path, default=Path("soak-outcomes.jsonl"))
    parser.add_argument("--out", type=Path, help="where the table goes as well, in Markdown")
    parser.add_argument("--limit-seconds", type=float, default=10.0, help="in which every process is gone")
    parser.add_argument("--timeout", type=float, default=5.0, help="--comm.timeout-seconds where a rank is stopped")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no further case after so long")
    parser.add_argument("--folder", type=Path, help="where runs are; a temporary folder unless given")
    given = parser.parse_args(argv)
    kinds, launchers = given.kinds.split(","), given.launchers.split(",")
    for name, there in [*((kind, KINDS) for kind in kinds), *((launcher, LAUNCHERS) for launcher in launchers)]:
        if name not in there:
            parser.error(f"{name!r} is none of {', '.join(there)}")
    if "mpiexec" in launchers and (reason := mpi_available()) is not None:
        print(f"mpiexec is left out: {reason}", file=sys.stderr)
        launchers.remove("mpiexec")
    cases = [Case(kind=kind, launcher=launcher, number=number, seed=given.seed)
             for number in range(given.cases) for kind in kinds for launcher in launchers]
    done = read_outcomes(given.outcomes)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that nothing is left behind
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ranvier-soak-") if given.folder is None else nullcontext(
            given.folder) as folder:
        training = Training(Path(folder).resolve())
        for case in cases:
            if case.key in done:
                continue
            if time.monotonic() - began > 60 * given.minutes:
                break
            trial = Trial(case, training, given.limit_seconds, given.timeout)
            done[case.key] = outcome = trial.run(KINDS[case.kind])
            with given.outcomes.open("a", encoding="utf-8") as file:
                file.write(json.dumps(outcome.to_json()) + "\n")
            print(line(outcome, len(done), len(cases)), file=sys.stderr, flush=True)
    outcomes = [done[case.key] for case in cases if case.key in done]
    text = table(outcomes, given.seed, len(cases))
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n", encoding="utf-8")
    return 0 if all(outcome.good for outcome in outcomes) and len(outcomes) == len(cases) else 1


def read_outcomes(path: Path) -> dict[tuple[str, str, int, int], Outcome]:
    """Outcomes by case. A truncated line is left out: its case is run again."""
    found = {}
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            fields = json.loads(text)
        except ValueError:
            continue
        fields.pop("good", None)
        outcome = Outcome(**fields)
        found[outcome.kind, outcome.launcher, outcome.number, outcome.seed] = outcome
    return found


def line(outcome: Outcome, number: int, count: int) -> str:
    """One case in one line, with its problems below."""
    seconds = "not ended" if outcome.seconds is None else f"ended in {outcome.seconds:.1f} s"
    wrong = [*outcome.problems, *outcome.losses, *([f"processes left: {outcome.left}"] if outcome.left else []),
             *([] if outcome.ended else [f"not within {outcome.limit_seconds:g} s"])]
    name = f"{outcome.launcher} {outcome.kind} {outcome.number}: {outcome.what}"
    return "\n".join([f"{number}/{count} {name}: {seconds}, exit codes {outcome.codes} ({outcome.case_seconds:.0f} s)",
                      *(f"     ERROR {text}" for text in wrong)])


def table(outcomes: Sequence[Outcome], seed: int, count: int) -> str:
    """Outcomes of all cases, in Markdown: a row for each kind and launcher."""
    rows = []
    for kind in KINDS:
        for launcher in LAUNCHERS:
            these = [one for one in outcomes if (one.kind, one.launcher) == (kind, launcher)]
            if these:
                rows.append(f"| {kind.replace('-', ' ')} | {launcher} | {_counts(these)} |")
    bad = [outcome for outcome in outcomes if not outcome.good]
    return "\n".join([
        f"{len(outcomes)} of {count} faults, seed {seed}: {len(bad)} went wrong.", "",
        "| fault | launcher | cases | ended in time | reached the end | lost | processes left | most seconds to end |",
        "|---|---|---|---|---|---|---|---|", *rows,
        f"| all | all | {_counts(outcomes)} |", "",
        *(f"- {one.launcher} {one.kind} {one.number} ({one.what}): "
          f"{'; '.join([*one.problems, *one.losses]) or 'not in time'}" for one in bad)])


def _counts(outcomes: Sequence[Outcome]) -> str:
    return " | ".join(map(str, (
        len(outcomes), sum(one.ended for one in outcomes), sum(one.resumed for one in outcomes),
        sum(bool(one.losses) for one in outcomes), sum(len(one.left) for one in outcomes), _worst(outcomes))))


def _worst(outcomes: Iterable[Outcome]) -> str:
    seconds = [one.seconds for one in outcomes]
    if None in seconds:
        return "never"
    return f"{max(seconds, default=0.0):.1f}"


if __name__ == "__main__":
    sys.exit(main())
