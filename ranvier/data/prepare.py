"""Prepares a run's data from its configuration, by the run's task."""

from __future__ import annotations

import importlib
import os
from dataclasses import replace
from pathlib import Path

from ranvier.config.named_object import blame_user_code, load_object
from ranvier.config.run import Run
from ranvier.config.task_form import SHIPPED, TASK_ATTRIBUTES, form_of
from ranvier.data.cache import CacheOnly, NotInCache, Progress, cache_folder
from ranvier.data.class_numbers import with_labels
from ranvier.data.corpus import HUB, on_hub
from ranvier.data.named_files import is_data_set
from ranvier.data.task import EvalSet, Prepared, Task, eval_set_runs
from ranvier.errors import ConfigError, DataError, RanvierError
from ranvier.system.atomic_file import folder_problem

_MODULES = {"reward": "preference"}
"""Shipped task -> its module, if the module has another name."""


def task_of(run: Run) -> Task:
    """The run's task, imported on first use. ConfigError if a user's object is not a task."""
    name = run.data.task
    if name in SHIPPED:
        module = importlib.import_module(f"ranvier.data.{_MODULES.get(name, name)}")
        shipped: Task = getattr(module, name.upper())
        return shipped
    form_of(run.data)  # checks it against the protocol
    found: Task = load_object(run.data.task, "data.task", TASK_ATTRIBUTES, run.data.options)  # type: ignore[assignment]
    return found


def problems(run: Run, *, elsewhere: bool = False) -> list[RanvierError]:
    """Problems of the data settings that can be found without reading much. elsewhere: for another machine."""
    try:
        task = task_of(run)
        with blame_user_code(run.data.task, "data.task", "`problems`"):
            found = list(task.problems(run, elsewhere=elsewhere))
            for name, other in ({} if found else eval_set_runs(run)).items():
                found += [_name_set(name, problem) for problem in task.problems(other, elsewhere=elsewhere)]
            return found
    except RanvierError as problem:
        return [problem]


def warnings(run: Run) -> list[RanvierError]:
    """Warnings about data settings that work, but probably not as the user means. None if the task is unknown."""
    try:
        task = task_of(run)
    except RanvierError:  # one of the problems
        return []
    with blame_user_code(run.data.task, "data.task", "`warnings`"):
        return list(task.warnings(run))


def hub_names(run: Run) -> list[tuple[str, str]]:
    """(setting, name) of each corpus and table that is not a file here, and would be read from the Hugging Face hub."""
    data, is_text = run.data, run.data.task == "lm"
    if data.task not in ("lm", "chat", "preference", "reward", "classification"):
        return []  # other tasks read none
    sources = {"data.corpus": (data.corpus if is_text and not data.mixture else None,), "data.train": (data.train,),
               "data.mixture": [entry.rpartition("=")[0] or entry for entry in data.mixture], "data.eval": (data.eval,),
               "data.eval-sets": [entry.partition("=")[2] for entry in data.eval_sets]}
    return [(setting, name) for setting, names in sources.items() for name in names
            if name and name not in HUB and (on_hub if is_text else is_data_set)(name)]


def load_cached(run: Run) -> Prepared | None:
    """The data of a run if it is in the cache, else None; nothing is made or fetched. None also for plain text, which
    has nothing to report, and for data sets on the hub."""
    data = run.data
    names = [name for name in (data.train, data.eval, *data.mixture, data.packing and data.corpus) if name]
    is_plain_text = data.task == "lm" and not data.packing
    is_fetched = run.model.pretrained is not None and not Path(os.path.expanduser(run.model.pretrained)).is_dir()
    if data.task not in SHIPPED or is_plain_text or is_fetched or any(is_data_set(name) for name in names):
        return None
    try:
        return prepare(run, CacheOnly())
    except (NotInCache, RanvierError, OSError):
        return None


def unwritable_cache(run: Run) -> list[DataError]:
    """The problem of a cache folder that is not writable and lacks data of the run, which the ranks would write
    there."""
    folder = cache_folder(run)
    if (problem := folder_problem(folder)) is not None:
        try:
            for each in (run, *eval_set_runs(run).values()):
                task_of(each).prepare(each, CacheOnly())
        except NotInCache:
            return [DataError(f"lacks data of the run, and cannot be written: {problem}", code="cache-not-writable",
                              where=f"cache {folder}", remedy="Choose another folder with `--data.cache-dir`.")]
        except Exception:  # the ranks report it
            pass
    return []


def prepare(run: Run, progress: Progress = lambda line: None, labels: tuple[str, ...] = ()) -> Prepared:
    """The samples of this run, made unless they are in the cache. labels: names of classes, whose numbers the data gets
    if it has no other classes.

    Safe to call on all ranks at the same time: of the ranks that share a cache, one does the work and the others wait.
    `progress` takes lines about the progress. DataError when something is missing, damaged, or too small.
    """
    for problem in problems(run):
        raise problem
    prepared = _prepare(run, progress, labels)
    sets = {name: _eval_set(name, prepared, _prepare(other, progress, labels))
            for name, other in eval_set_runs(run).items()}
    count, size = prepared.epoch_samples, run.batch.global_size
    unit = "packed sequences" if run.data.packing else "samples"
    few = () if count >= size else (DataError(
        f"is larger than the training data, {count:,} {unit}: each is taken {size / count:.1f} times on average",
        code="batch-beyond-data", where="batch.global-size", value=size,
        remedy=f"Set `--batch.global-size {count}` or less, or give more data."),)
    return replace(prepared, eval_sets=sets, warnings=(*prepared.warnings, *few))


def _prepare(run: Run, progress: Progress, labels: tuple[str, ...]) -> Prepared:
    with blame_user_code(run.data.task, "data.task", "`prepare`"):
        prepared = task_of(run).prepare(run, progress)
    if not isinstance(prepared, Prepared):
        raise ConfigError(f"has a `prepare` that returns a {type(prepared).__name__}", code="task-prepare-result",
                          where="data.task", value=run.data.task, remedy="Return a ranvier.data.task.Prepared.")
    return (with_labels(prepared, labels) if prepared.class_names else None) or prepared


def _eval_set(name: str, main: Prepared, prepared: Prepared) -> EvalSet:
    """The evaluation set of a run that differs only in its held-out data. DataError if it has other classes or another
    tokenizer."""
    own, other = (None if one.tokenizer is None else one.tokenizer.fingerprint for one in (main, prepared))
    for what, is_same in (("classes", main.class_names == prepared.class_names), ("tokens", own == other)):
        if not is_same:
            raise DataError(f"has other {what} than the run", code="eval-set-of-other-task",
                            where=f"data.eval-sets, set {name}",
                            value=list(prepared.class_names[:20]) if what == "classes" else None,
                            remedy="Give data of the same form as the training data.")
    return EvalSet(data=prepared.eval, scoring=prepared.scoring, fingerprint=prepared.fingerprint)


def _name_set(name: str, problem: RanvierError) -> RanvierError:
    """A problem of the run with a named set, reported for that set."""
    texts = problem.texts
    return DataError(f"{texts['where']} {texts['what']}", code=problem.code, where=f"data.eval-sets, set {name}",
                     value=problem.value, remedy=texts["remedy"])
