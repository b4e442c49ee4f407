"""The errors with which a command ends when a configuration has problems, and how errors are printed."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from math import isfinite
from typing import TYPE_CHECKING

from ranvier.errors import ConfigError, RanvierError

if TYPE_CHECKING:
    from ranvier.config import read


class ConfigProblems(Exception):
    """All problems of a configuration, to be printed one per line."""

    def __init__(self, problems: Sequence[RanvierError]) -> None:
        super().__init__(*problems)
        self.problems = problems


def print_problems(problems: Sequence[RanvierError], *, as_json: bool = False) -> None:
    """Print one line for each problem, on local rank 0 only: before ranks are connected, all find the same problems.
    as_json: also print them as a document on standard output."""
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
                                          "value": _json_value(problem.value), "remedy": problem.remedy,
                                          "set": settings_of(problem)} for problem in problems]}, default=str))


def _json_value(value: object) -> object:
    """`value` for JSON, which has no NaN and no infinity."""
    return str(value) if isinstance(value, float) and not isfinite(value) else value


def missing_data(resolved: read.Merged) -> list[ConfigError]:
    """Problems of a model without a recipe: it needs data, and a preset needs the tokenizer for its vocabulary."""
    run, origins = resolved.run, resolved.origins
    is_preset = run.model.preset is not None and run.model.pretrained is None
    if not is_preset and not origins["model.pretrained"].startswith("folder "):
        return []
    problems = []
    if run.data.task == "lm" and origins["data.corpus"] == origins["data.mixture"] == "default":
        problems.append(ConfigError(
            "has no data of its own", code="preset-without-data", where="recipe",
            value=run.model.preset or run.model.pretrained,
            remedy="Give text with `--data.corpus PATH`, or samples with `--data.train FILE` and their task: "
                   "`--data.task chat`, or preference, reward, ..."))
    if is_preset and origins["data.tokenizer"] == "default" and run.data.task == "lm":
        problems.append(ConfigError(
            "has no tokenizer of its own", code="preset-without-tokenizer", where="recipe", value=run.model.preset,
            remedy="Give the model's own with `--data.tokenizer PATH/tokenizer.json`, or train one on the corpus with "
                   "`--data.tokenizer bpe`."))
    return problems


def settings_of(problem: RanvierError) -> dict[str, object]:
    """Settings that the remedy changes, for JSON: null for any value other than the present one."""
    return {name: None if value is ... else value for name, value in problem.settings.items()}


def print_error(text: str) -> None:
    """Print `text` as one line on standard error."""
    sys.stderr.write("ranvier: error: " + " ".join(text.split()) + "\n")


def print_warnings(warnings: Iterable[RanvierError]) -> None:
    """Print one line for each warning on standard error."""
    for warning in warnings:
        print(f"ranvier: warning: {warning}", file=sys.stderr)
