"""Write the folders of recorded runs: `python -m tests.recorded.record`, once, with the code that they are named after.

The folders are never written again: later code has to read what this code wrote, and cannot write it again.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.golden.comparison import machine_facts
from tests.golden.runs import prepare
from tests.recorded.runs import HERE, PROGRAM, RUNS, SAVED, first, program, trim

RECORDS = HERE / "records.json"


def main() -> None:
    if RECORDS.exists():
        sys.exit(f"{RECORDS} exists: the recorded folders are never written again")
    found: dict[str, Any] = {"facts": machine_facts(), "runs": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        for run in RUNS:
            found["runs"][run] = first(run, folder)
            trim(folder / run, lambda line: json.loads(line).get("step", 0) <= SAVED)
            shutil.copytree(folder / run, HERE / run)
        found["program"] = program(folder, load=False).hex()
        shutil.copytree(folder / PROGRAM, HERE / PROGRAM, ignore=shutil.ignore_patterns(".owner*"))
    RECORDS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
