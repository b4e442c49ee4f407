"""Where and how a benchmark's result is kept: with date, commit, machine and command.

benchmarks/results keeps the newest result of each kind. The kind is the file's name before its date.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"


_DATED = re.compile(r"(?P<kind>.+)-(?P<date>\d{8}(?:-\d{4})?)(?P<rest>\D.*)")


def results_file(folder: str, name: str, *, quick: bool = False) -> Path:
    """benchmarks/results/FOLDER/NAME-DATE.json, whose folder exists; a quick run is a separate kind, quick-NAME."""
    path = RESULTS / folder / f"{'quick-' if quick else ''}{name}-{datetime.now():%Y%m%d-%H%M}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def kind_and_date(path: Path) -> tuple[str, str] | None:
    """The kind and the date in the name of a result's file; None if the name has no date.

    "overlap-20261121-1351-curve.png" belongs to the result ("overlap", "20261121-1351").
    """
    match = _DATED.fullmatch(path.name)
    return (match["kind"], match["date"]) if match else None


def remove_older(path: Path) -> list[Path]:
    """Delete the files next to `path` that are of the same kind and have an earlier date; returns them."""
    result = kind_and_date(path)
    if result is None:
        return []
    kind, date = result
    older = [file for file in sorted(path.parent.iterdir())
             if (other := kind_and_date(file)) is not None and other[0] == kind and other[1] < date]
    for file in older:
        file.unlink()
    return older


def circumstances() -> dict[str, object]:
    """The circumstances without which a figure means nothing."""
    return {"date": datetime.now().isoformat(timespec="seconds"), "commit": commit(), "machine": machine(),
            "command": command(),
            "versions": {"python": platform.python_version(), "torch": torch.__version__}}


def command() -> str:
    """The command line that runs this program again, relative to the checkout."""
    program = Path(sys.argv[0]).resolve()
    root = RESULTS.parent.parent
    module = [".".join(program.relative_to(root).with_suffix("").parts)] if program.is_relative_to(root) else []
    return shlex.join(["python", *(["-m", *module] if module else [program.name]), *sys.argv[1:]])


def write_results(path: Path, results: dict[str, object]) -> None:
    """Write `results` and their circumstances as JSON; in benchmarks/results, delete older results of the same kind."""
    path.write_text(json.dumps({**circumstances(), **results}, indent=1) + "\n")
    if path.resolve().is_relative_to(RESULTS.resolve()):
        remove_older(path)


def commit() -> str:
    """The checkout's commit, with "+" where files differ from it; "unknown" outside a checkout."""
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=RESULTS.parent, capture_output=True, text=True, check=True).stdout

    try:
        changed = git("status", "--porcelain", "-uno").strip()
        return git("rev-parse", "--short", "HEAD").strip() + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def machine() -> dict[str, object]:
    """The processor's name, the cores this process may use, the memory, and CUDA devices."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"cpu": name, "cores": cores,
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "cuda": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]}
