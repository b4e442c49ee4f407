"""Every reason why a run cannot work: by its settings, its model family, its data settings and the disk.

`ranvier.config.rules` checks settings alone; here the model family and the task are checked, too.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path

from ranvier.checkpoint.manifest import find
from ranvier.config import effects, rules
from ranvier.config.named_object import is_object_name, load_object
from ranvier.config.resolve import ResolvedRun
from ranvier.config.run import Run
from ranvier.data.prepare import problems as data_problems
from ranvier.data.prepare import warnings as data_warnings
from ranvier.elastic.named_policy import POLICY_METHODS
from ranvier.errors import ConfigError, RanvierError
from ranvier.models import families
from ranvier.optim.rules import rules_of

PREVENT_A_CUT = ("model.", "lora.", "mesh.", "tensor.", "pipeline.boundaries", "pipeline.deferred", "optim.groups",
                 "optim.algorithm", "optim.options", "data.task", "data.options")
"""Prefixes of settings whose problems leave no model to cut into stages."""
TOO_LARGE = (RuntimeError, OverflowError, MemoryError, ValueError, TypeError)
"""Errors that torch raises for impossible tensor sizes."""


def problems(run: ResolvedRun, num_ranks: int | None = None, *, elsewhere: bool = True) -> list[RanvierError]:
    """All problems that are known before anything is built. num_ranks: number of started ranks, if known. elsewhere:
    whether the run may be for another machine, which may have data that is missing here."""
    return [*families.problems(run), *_update_rule(run), *_freeze_policy(run),
            *rules.problems(run, num_ranks, num_blocks=_num_blocks(run)), *data_problems(run, elsewhere=elsewhere),
            *_missing_checkpoint(run)]


def warnings(run: ResolvedRun, chosen: Collection[str] | None = None, asked: Run | None = None
             ) -> Iterator[RanvierError]:
    """Settings that have no effect, or not the intended one. chosen, asked: see `ranvier.config.effects`."""
    yield from effects.warnings(run, chosen, asked)
    yield from data_warnings(run)
    yield from rules.warnings(run)


def cannot_be_laid_out(error: Exception) -> ConfigError:
    """The error for a model with impossible tensor sizes, from torch's error."""
    return ConfigError(f"cannot be laid out: {str(error).partition(chr(10))[0]}", code="model-not-laid-out",
                       where="model", remedy="Choose smaller sizes: a tensor of the model is larger than any can be.")


def _num_blocks(run: Run) -> int | None:
    """Number of blocks of the run's model; None if it cannot be built, which is a problem of the model or the task."""
    if run.model.num_layers > rules.MAX_LAYERS:
        return None
    try:
        return families.num_blocks(run)
    except RanvierError:
        return None


def _update_rule(run: Run) -> Iterator[RanvierError]:
    """Errors of a user's update rule that cannot be loaded."""
    try:
        rules_of(run.optim)
    except RanvierError as error:
        yield error


def _freeze_policy(run: Run) -> Iterator[RanvierError]:
    """Errors of a user's freeze policy that cannot be loaded."""
    if is_object_name(run.elastic.freeze):
        try:
            load_object(run.elastic.freeze, "elastic.freeze", POLICY_METHODS, run.elastic.options)
        except RanvierError as error:
            yield error


def _missing_checkpoint(run: Run) -> Iterator[ConfigError]:
    there = run.resume and (os.path.exists(run.resume) or find(Path(run.resume)))
    if run.resume not in ("auto", "none") and not there:
        yield ConfigError("is not an existing checkpoint", code="resume-checkpoint-missing", where="resume",
                          value=run.resume,
                          remedy="Name a folder such as RUN/checkpoint/step-100, RUN/checkpoint, or RUN.")
