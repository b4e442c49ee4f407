"""`ranvier evaluate`: the loss and the scores of a trained model on held-out data, and in lm-evaluation-harness."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ranvier.cli.options import OF_EVALUATION, SettingsCommand, json_option
from ranvier.cli.problems import ConfigProblems
from ranvier.cli.ranks import print_once, work_as_rank
from ranvier.config import read
from ranvier.errors import ConfigError
from ranvier.system.terminal import TextTable, print_stderr

if TYPE_CHECKING:
    from ranvier.config.resolve import ResolvedRun
    from ranvier.inference.trained import Results, Trained


@click.command(cls=SettingsCommand, common=OF_EVALUATION, short_help="Measure loss and scores of a trained model.")
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--data", "sets", multiple=True, metavar="[NAME=]DATA",
              help="Held-out data of the model's task; may be given several times. By default that of the run.")
@click.option("--lm-eval", "harness", help="Tasks of lm-evaluation-harness, separated by commas (the extra lm-eval).")
@click.option("--lm-eval-path", type=click.Path(path_type=Path, exists=True, file_okay=False),
              help="A folder with further tasks of lm-evaluation-harness.")
@click.option("--lm-eval-limit", type=click.IntRange(min=1), help="Samples of each of these tasks; by default all.")
@click.option("--lm-eval-shots", type=click.IntRange(min=0), help="Examples in the prompt; by default the task's own.")
@click.option("--ema", is_flag=True,
              help="Evaluate the moving average of the parameters (optim.ema) instead of the parameters.")
@json_option
def evaluate(model: Path, sets: tuple[str, ...], harness: str | None, lm_eval_path: Path | None,
             lm_eval_limit: int | None, lm_eval_shots: int | None, ema: bool, as_json: bool,
             **flags: str | None) -> int:
    """Evaluate MODEL: a run's folder, a checkpoint, a Hugging Face folder, a GGUF file, OWNER/NAME of the Hugging Face
    hub, or a name that --model.pretrained takes.

    The mesh may be any, whatever the model was trained on. The settings of the model and its data are those of the run;
    flags change them.
    """
    from ranvier.config.run import Comm, Launch
    from ranvier.inference.lm_eval_tasks import HarnessTasks
    from ranvier.inference.trained import evaluate as results_of
    from ranvier.inference.trained import open_trained
    from ranvier.launch import start as launch

    for option, value in (("path", lm_eval_path), ("limit", lm_eval_limit), ("shots", lm_eval_shots)):
        if harness is None and value is not None:
            raise ConfigError("has no effect without `--lm-eval TASKS`", code="lm-eval-option-alone",
                              where=f"--lm-eval-{option}", value=str(value), remedy="Name the tasks, or leave it out.")
    trained = open_trained(model, print_once, ema=ema)
    tasks = None if harness is None else HarnessTasks(
        names=tuple(harness.split(",")), path=lm_eval_path, limit=lm_eval_limit, shots=lm_eval_shots)
    named = _name_datasets(sets)
    reads_data = bool(named) or tasks is None
    run = _run(trained, {name.replace("__", "."): text for name, text in flags.items() if text is not None}, reads_data)
    if trained.pretrained is not None and not named and run.data.eval is None and tasks is None:
        raise ConfigError("is missing: a folder in Hugging Face's format names none", code="evaluation-data-missing",
                          where="data", value=str(model),
                          remedy="Give `--data DATA` or `--lm-eval TASKS`.")
    runs = _runs_by_dataset(run, trained, named) if reads_data else {}
    comm, asked = run.comm, run.launch
    world = launch.start_ranks(
        run.mesh, Comm(transport=comm.transport, timeout_seconds=comm.timeout_seconds),
        Launch(launcher=asked.launcher, threads=asked.threads, device=asked.device), stream=sys.stderr)

    def work() -> None:
        results = results_of(trained, run, runs, tasks, world, print_stderr)
        if world.rank == 0:
            _print(trained, run, results, as_json)

    return work_as_rank(world, work)


def _name_datasets(given: Sequence[str]) -> dict[str, str]:
    """NAME=DATA by name; data without a name gets the name of its file. ConfigError for a repeated name."""
    found: dict[str, str] = {}
    for text in given:
        name, equals, data = text.partition("=")
        name, data = (name, data) if equals else (Path(text).stem, text)
        if name in found or not name or not data:
            raise ConfigError("is not NAME=DATA with a different name for each", code="malformed-evaluation-data",
                              where="data", value=text, remedy="Give each data set a different name.")
        found[name] = data
    return found


def _run(trained: Trained, flags: Mapping[str, str], reads_data: bool) -> ResolvedRun:
    """The run of the evaluation. reads_data: whether the run's data settings are used. ConfigProblems for invalid
    settings."""
    from ranvier.config.resolve import resolve
    from ranvier.planner.problems import problems

    if reads_data and (unnamed := trained.check_places(flags)):
        raise ConfigProblems(unnamed)
    merged = read.merge([trained.layer(), read.Layer(origin="flag", values=flags, is_text=True)])
    if merged.problems:
        raise ConfigProblems(merged.problems)
    run = resolve(trained.with_model_sizes(merged.run))
    found = [problem for problem in problems(run) if problem.where.startswith(("mesh", "model", "tensor", "batch"))]
    if found:
        raise ConfigProblems(found)
    if "train.eval_sequences" not in flags:
        run = replace(run, train=replace(run.train, eval_sequences=1 << 40))
    return run


def _runs_by_dataset(run: ResolvedRun, trained: Trained, named: Mapping[str, str]) -> dict[str, ResolvedRun]:
    """The run with each data set as its held-out data."""
    from ranvier.config.task_form import form_of
    from ranvier.data.task import eval_set_runs

    if not named:
        return {"held-out": replace(run, data=replace(run.data, eval_sets=())), **eval_set_runs(run)}
    takes_corpus = "data.corpus" not in form_of(run.data).unused

    def with_data(name: str) -> ResolvedRun:
        data = replace(run.data, eval=name, eval_sets=())
        if trained.pretrained is not None and data.train is None and not takes_corpus:
            data = replace(data, train=name)
        if trained.pretrained is not None and takes_corpus:
            data = replace(data, corpus=name, mixture=())
        return replace(run, data=data)

    return {name: with_data(data) for name, data in named.items()}


def _print(trained: Trained, run: ResolvedRun, results: Results, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"model": str(trained.origin), "task": run.data.task, "mesh": str(run.mesh), "results": {
            name: {metric: value if math.isfinite(value) else None for metric, value in scores.items()}
            for name, scores in results.items()}}), flush=True)
        return
    from ranvier.config.task_form import form_of

    targets = form_of(run.data).targets
    rows = [(name, f"loss, nats per {targets.removesuffix('s')}" if metric == "loss" else metric,
             f"{value:,.0f}" if metric == targets else f"{value:.6g}")
            for name, scores in results.items() for metric, value in scores.items()]
    print(TextTable(header=("data", "metric", "value"), rows=rows, words=(0, 1), keys=2), flush=True)
