"""The errors with which a command ends when a configuration has problems, and how errors are printed."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence

from ranvier.errors import ConfigError, RanvierError


class ConfigProblems(Exception):
    """All problems of a configuration, to be printed one per line."""

    def __init__(self, problems: Sequence[RanvierError]) -> None:
        super().__init__(*problems)
        self.problems = problems


def print_problems(problems: Sequence[RanvierError], *, as_json: bool = False) -> None:
    """Print one line each, on local rank 0 only: before ranks are connected, all of them find the same problems.
    as_json: print them as a document on standard output, too."""
    from ranvier.launch.launchers import detect

    try:
        started = detect(os.environ)
    except ConfigError:
        started = None
    if started is None or not started.local_rank:
        for problem in problems:
            print_error(str(problem))
        if as_json and (started is None or started.rank == 0):
            print(json.dumps({"errors": [{"code": problem.code, "where": problem.where, "what": problem.what,
                                          "value": problem.value, "remedy": problem.remedy,
                                          "set": settings_of(problem)} for problem in problems]}, default=str))


def settings_of(problem: RanvierError) -> dict[str, object]:
    """What the remedy sets, as JSON has it: null for any other value than now."""
    return {name: None if value is ... else value for name, value in problem.settings.items()}


def print_error(text: str) -> None:
    """Print `text` as one line on standard error."""
    sys.stderr.write("ranvier: error: " + " ".join(text.split()) + "\n")


def print_warnings(warnings: Iterable[RanvierError]) -> None:
    """Print one line each on standard error."""
    for warning in warnings:
        print(f"ranvier: warning: {warning}", file=sys.stderr)
