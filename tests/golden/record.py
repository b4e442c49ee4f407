"""Write the records that the golden tests compare with: `python -m tests.golden.record [NAME ...]`.

Do this only for a change that is meant to change numbers (another order of summation, another default, a corrected
formula), in a commit that says which numbers changed and why, and never to make a failing test pass: a refactoring
leaves every record as it is. A new golden run is recorded by its name. All records come from one machine; recording
some of them on another one is refused.

Each run is trained twice and must give the same bits both times.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.golden.comparison import differences, machine_facts
from tests.golden.runs import HERE, RUNS, GoldenRun, Step, prepare, select

RECORDS = HERE / "records.json"


def record(run: GoldenRun) -> list[Step]:
    """The steps of `run`. Raises SystemExit if a second run gives other numbers."""
    first, second = _train(run), _train(run)
    if problems := differences(second, first, tolerance=0.0):
        sys.exit(f"{run.name} is not reproducible and cannot be a golden run:\n" + "\n".join(problems))
    return first


def _train(run: GoldenRun) -> list[Step]:
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name))
        return run.start(Path(name))


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the golden records; read the module's docstring first.")
    parser.add_argument("names", nargs="*", metavar="NAME",
                        help=f"runs to record, by default all: {', '.join(run.name for run in RUNS)}")
    names = parser.parse_args().names
    if unknown := set(names) - {run.name for run in RUNS}:
        parser.error(f"no golden run is called {', '.join(sorted(unknown))}")
    found: dict[str, Any] = {"facts": machine_facts(), "runs": {}}
    if RECORDS.exists() and names:
        found = json.loads(RECORDS.read_text())
    if found["facts"] != machine_facts():
        sys.exit(f"the other records are from another machine ({found['facts']}): record all of them")
    for run in select(names):
        found["runs"][run.name] = record(run)
        print(f"recorded {run.name}", flush=True)
        RECORDS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
