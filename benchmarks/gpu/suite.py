"""Everything that one CUDA device can show, row by row: what works, how fast, with how much memory.

    python -m benchmarks.gpu.suite --part 1            does it train, the CPU's numbers, speed against plain torch
    python -m benchmarks.gpu.suite --part 2            ranks that share the device, failures, repeated runs, host waits
    python -m benchmarks.gpu.suite --part 3            memory, offload, the largest models, kernels
    python -m benchmarks.gpu.suite --only facts kill   these rows; --list shows all
    python -m benchmarks.gpu.suite --dry-run           all rows on the CPU, with tiny shapes

Each row is a separate process with its own time limit, and a part ends within nine minutes; part 4 needs 141 GB. The
findings of a row are in OUTPUT/results.jsonl immediately, one line of JSON each, and its output is in OUTPUT/log.txt,
with the stacks of its threads if it exceeds its limit, so that a row that hangs or crashes costs only its limit. A line
of kind `status` says how a row has ended: 124 after its limit, 77 if the part had no time left. At the end all lines
are repeated in short form, the most important last. Exit code 1 if a row failed.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import torch

from benchmarks.gpu.case import Finding, Options, failure
from benchmarks.gpu.rows import CASES, ROWS, Row
from benchmarks.record import circumstances
from ranvier.launch.cuda_environment import cuda_defaults

ROOT = Path(__file__).parents[2]
PART_SECONDS = 525.0
_LEAST_SECONDS = 15.0
"""A row is not started with less time left."""
_GRACE_SECONDS = 15.0
"""Time in which a row that gets a signal to end may end its own processes, and then the time to end itself."""
_ENDED_LATE, _NOT_BEGUN = 124, 77
"""Exit codes."""


def run_row(name: str, options: Options, results: Path) -> bool:
    """Run a row in this process, and append its findings to `results` immediately. Returns whether all are good."""
    row, well = ROWS[name], True
    try:
        for finding in CASES[row.case](options, *row.arguments):
            append(results, {"kind": row.case, "row": name, **finding})
            well = well and bool(finding.get("ok", True))
    except Exception as error:
        append(results, {"kind": row.case, "row": name, "arguments": list(row.arguments), **failure(error)})
        well = False
    return well


def append(results: Path, line: Finding) -> None:
    """Write a line of results to the file, and print it."""
    text = json.dumps(line)
    print(text, flush=True)
    with results.open("a") as file:
        file.write(text + "\n")


@dataclass(kw_only=True)
class Suite:
    """Runs rows in separate processes. output: the folder of their findings. limit_seconds: time limit of all rows
    together."""

    options: Options
    output: Path
    limit_seconds: float
    began: float = field(default_factory=time.monotonic)

    @property
    def results(self) -> Path:
        """The file of all lines; lines of earlier calls stay."""
        return self.output / "results.jsonl"

    @property
    def log(self) -> Path:
        """The file of the output of rows, one after the other."""
        return self.output / "log.txt"

    def run(self, names: Sequence[str]) -> list[Finding]:
        """Run these rows; returns all lines of results."""
        self.output.mkdir(parents=True, exist_ok=True)
        before = self.results.stat().st_size if self.results.exists() else 0
        append(self.results, {"kind": "circumstances", **circumstances()})
        with tempfile.TemporaryDirectory(prefix="ranvier-suite-") as folder:
            for name in names:
                self._run_one(name, ROWS[name], Path(folder))
        return [json.loads(line) for line in self.results.read_text()[before:].splitlines()]

    def _run_one(self, name: str, row: Row, folder: Path) -> None:
        began = time.monotonic()
        left = self.limit_seconds - (began - self.began)
        code, printed = _NOT_BEGUN, b""
        if left >= _LEAST_SECONDS:
            seconds = self.options.sized(row.seconds, 10 * row.seconds)  # a dry run may run next to other work
            with self.log.open("ab+") as file:
                file.write(f"=== {name}\n".encode())
                file.flush()
                start = file.tell()
                code = run_process(self._command(name, row, folder), min(seconds, left), file, self._environment(row))
                file.seek(start)
                printed = file.read()
        append(self.results, {"kind": "status", "name": name, "rc": code, "seconds": round(time.monotonic() - began),
                              "at": round(time.monotonic() - self.began)})
        if code not in (0, _NOT_BEGUN):
            print("\n".join(printed.decode(errors="replace").splitlines()[-6:]), flush=True)

    def _command(self, name: str, row: Row, folder: Path) -> Sequence[str]:
        if row.command is not None:
            return row.command(self.options, folder)
        return [sys.executable, "-m", "benchmarks.gpu.suite", "--one", name, "--output", str(self.output),
                *(["--dry-run"] if self.options.dry_run else [])]

    def _environment(self, row: Row) -> dict[str, str]:
        """The variables that a run sets for its ranks; kernels are loaded at their first use unless the row is
        `eager`."""
        found = {**os.environ, **cuda_defaults(os.environ), "PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(
            [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
        if not row.eager and "CUDA_MODULE_LOADING" not in os.environ:
            del found["CUDA_MODULE_LOADING"]
        if self.options.dry_run:
            found["OMP_NUM_THREADS"] = "1"
        return found


def run_process(command: Sequence[str], seconds: float, output: IO[bytes], environ: dict[str, str]) -> int:
    """The exit code of a command; `_ENDED_LATE` if it has not ended after this many seconds. It is then interrupted, so
    that pytest reports what has failed so far, and its process group is killed if it does not end."""
    started = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env=environ,
                               start_new_session=True)
    try:
        return started.wait(seconds)
    except subprocess.TimeoutExpired:
        started.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            started.wait(_GRACE_SECONDS)
        return _ENDED_LATE
    finally:
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # the driver may hold it
            started.wait(_GRACE_SECONDS)


def summary(findings: Sequence[Finding]) -> list[str]:
    """Lines in short form, the most important rows last."""
    lines: dict[str, list[str]] = {}
    for finding in findings:
        if "row" in finding:
            shown = {key: value for key, value in finding.items() if key not in ("row", "trace", "nvidia_smi", "top")}
            lines.setdefault(finding["row"], []).append(json.dumps(shown)[:300])
        elif finding["kind"] == "status":
            code, expected = finding["rc"], ROWS[finding["name"]].expected
            ended = {0: "ok", _NOT_BEGUN: "NOT RUN, no time was left"}.get(code, f"FAILED ({code})")
            lines.setdefault(finding["name"], []).append(
                f"{finding['name']}: {ended} in {finding['seconds']} s{expected and f'   [expected: {expected}]'}")
    return [line for name in reversed(lines) for line in lines[name]]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--part", type=int, choices=(1, 2, 3, 4))
    made.add_argument("--only", nargs="+", choices=list(ROWS), metavar="ROW")
    made.add_argument("--output", type=Path, default=Path("runs/gpu-suite"), help="a folder for results and the log")
    made.add_argument("--dry-run", action="store_true", help="on the CPU, with tiny shapes")
    made.add_argument("--list", action="store_true", help="the names of all rows, and what is expected of them")
    made.add_argument("--one", choices=list(ROWS), metavar="ROW", help="one row, in this process")
    return made.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    asked = parse(arguments)
    options = Options(dry_run=asked.dry_run)
    if asked.list:
        for name, row in ROWS.items():
            print(f"{name:20} {'part ' + ', '.join(map(str, row.parts)) if row.parts else '':16} {row.expected}")
        return 0
    if not asked.dry_run and not torch.cuda.is_available():
        print("benchmarks.gpu.suite: this machine has no CUDA device; --dry-run runs the rows on the CPU")
        return 0
    output = asked.output.resolve()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background processes ignore it
    if asked.one:
        faulthandler.register(signal.SIGINT, file=sys.__stderr__, chain=True)  # immediately, also inside of C code
        output.mkdir(parents=True, exist_ok=True)
        return int(not run_row(asked.one, options, output / "results.jsonl"))
    names = asked.only or [name for name, row in ROWS.items() if asked.part is None or asked.part in row.parts]
    limit = PART_SECONDS if asked.part else math.inf
    suite = Suite(options=options, output=output, limit_seconds=options.sized(limit, math.inf))
    findings = suite.run(names)
    print("\n" + "\n".join(summary(findings)))
    return int(any(one["rc"] not in (0, _NOT_BEGUN) for one in findings if one["kind"] == "status"))


if __name__ == "__main__":
    sys.exit(main())
