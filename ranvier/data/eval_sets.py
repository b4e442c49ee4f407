"""Named evaluation sets: further held-out data of a run, each evaluated by itself."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TypeVar

from ranvier.config.run import Run
from ranvier.errors import DataError

_AnyRun = TypeVar("_AnyRun", bound=Run)
_NAME = re.compile(r"[A-Za-z]\w*")


def eval_set_runs(run: _AnyRun) -> dict[str, _AnyRun]:
    """Name -> the run with this set as its only held-out data. DataError for what is no NAME=DATA, or a name that is
    there twice."""
    found: dict[str, _AnyRun] = {}
    for entry in run.data.eval_sets:
        name, _, source = entry.partition("=")
        if not _NAME.fullmatch(name) or not source or name in found:
            raise DataError("is no NAME=DATA with a name of its own", code="malformed-eval-set", where="data.eval-sets",
                            value=entry,
                            remedy="Give for example wiki=wiki.jsonl,code=code.jsonl; names have letters, digits and "
                                   "underscores.")
        found[name] = replace(run, data=replace(run.data, eval=source, eval_sets=()))
    return found


def metric_name(name: str, metric: str) -> str:
    """Name of a metric of a named set: eval_NAME_loss for eval_loss. The set of the run itself has no name."""
    return metric if not name else f"eval_{name}_{metric.removeprefix('eval_')}"
