"""From a run's configuration to its data: each task has a module that knows how."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType

import platformdirs

from ranvier.data.publish import Progress
from ranvier.data.task import Prepared
from ranvier.errors import RanvierError
from ranvier.run import Run


def problems(run: Run) -> list[RanvierError]:
    """What is wrong with the data settings, as far as it shows without reading anything."""
    return _task(run).problems(run)


def prepare(run: Run, progress: Progress = lambda line: None) -> Prepared:
    """The samples of this run, made unless they are in the cache.

    Safe to call on every rank at once: one of those that share a cache does the work and the others wait. `progress`
    takes lines about what is going on. DataError when something is missing, damaged, or too small.
    """
    for problem in problems(run):
        raise problem
    return _task(run).prepare(run, progress)


def cache_folder(run: Run) -> Path:
    """Where fetched files, tokenizers and prepared samples are kept."""
    return run.data.cache_dir.expanduser() if run.data.cache_dir else Path(platformdirs.user_cache_dir("ranvier"))


def _task(run: Run) -> ModuleType:
    return import_module(f"ranvier.data.{run.data.task}")
