"""`ranvier train`: start the ranks of a run, or train as one of them."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import click

from ranvier.cli import options
from ranvier.cli.problems import ConfigProblems, missing_data, print_warnings
from ranvier.cli.ranks import work_as_rank
from ranvier.config import read
from ranvier.config.resolve import Facts, resolve
from ranvier.config.run import Run
from ranvier.errors import ConfigError, RanvierError
from ranvier.mesh import AXES, Mesh

if TYPE_CHECKING:
    from ranvier.config.resolve import ResolvedRun
    from ranvier.launch.launchers import Started
    from ranvier.world import World

_PLANNED = (*(f"mesh.{axis}" for axis in AXES), "batch.microbatch_size")


@click.command(cls=options.SettingsCommand, short_help="Train a recipe.")
@options.recipe_argument
@options.allow_code_option
@options.quiet_option
@options.json_option
@click.option("--planned", hidden=True, default="", help="Settings whose flags `auto` chose, on ranks started by this.")
@click.pass_context
def train(context: click.Context, /, recipe: str, allow_code: bool, quiet: bool, as_json: bool, planned: str,
          **flags: str | None) -> int:
    """Train RECIPE: the name of a shipped recipe or preset, a folder in Hugging Face format, the folder of a run to
    continue, a TOML file, or module:function. In its place, --model.from-transformers FOLDER takes a folder of any
    other causal language model of transformers.

    Under plain python this command starts the local ranks; under torchrun, mpiexec or srun this process is one of them.
    """
    name, resolved = options.read_recipe(recipe, flags, allow_code=allow_code)  # before torch, which takes seconds
    from ranvier.launch import start as launch
    from ranvier.launch.launchers import detect
    from ranvier.planner.problems import warnings as warnings_of
    from ranvier.system.lease import check_usable
    from ranvier.train.restart import Restarts

    resolved = options.use_fp32_on_cpu(resolved)
    started = detect(os.environ, resolved.run.launch.launcher)
    # open until the process ends, since its end may still print
    stream = open(os.devnull, "w", encoding="utf-8") if quiet else sys.stderr if as_json else sys.stdout  # noqa: SIM115

    def say(line: str) -> None:
        print(line, file=stream, flush=True)

    asked, run, warnings = _close(resolved, started, tell=say)
    run_dir = run.run_dir or read.default_folder(name)
    run = dataclasses.replace(run, run_dir=run_dir)
    if started is None:
        check_folder(run_dir, run.resume)
        check_usable([run_dir, run.checkpoint.dir or run_dir / "checkpoint"], tell=say)
    if started is None or (started.launcher != "local" and started.rank == 0):
        print_warnings([*warnings, *warnings_of(run, resolved.chosen, asked)])
    if _planned_flags(asked, run) and (started is None or started.rank == 0):
        say(f"auto is {run.mesh}, microbatches of {run.batch.microbatch_size}")
    rerun = None if started is not None else [*launch.rerun_command(), "--run-dir", str(run_dir),
                                              *_planned_flags(asked, run)]
    world = launch.start_ranks(run.mesh, run.comm, run.launch, rerun=rerun, explain_kill=lambda: _memory_hint(run),
                               saves_on_stop=True, stream=stream, explain_stop=lambda: _newest(run),
                               restart=Restarts(run, rerun) if rerun and run.max_restarts else None)
    origins = {**resolved.origins, **dict.fromkeys(filter(None, planned.split(",")), "auto")}
    return _train_as_rank(run, run_dir, name, world, context.obj, stream, as_json, origins)


def _close(resolved: read.Merged, started: Started | None, tell: Callable[[str], None]
           ) -> tuple[Run, ResolvedRun, list[RanvierError]]:
    """The run with the sizes of its pretrained model, the run without any `auto`, and warnings.

    started: this rank; None before ranks are started. tell: receives lines about a trial.

    ConfigProblems if the run cannot work. With `--resume auto` and another number of ranks than the mesh needs, the run
    gets another mesh.
    """
    from ranvier.checkpoint.hf.from_pretrained import missing_weights
    from ranvier.config.other_mesh import refit
    from ranvier.data.prepare import unwritable_cache
    from ranvier.launch.start import local_devices
    from ranvier.planner.auto import open_axes_of, with_plan, with_pretrained
    from ranvier.planner.problems import problems as find_problems
    from ranvier.planner.trial import StartTrial
    from ranvier.train.experiment_trackers import tracker_problems

    asked, problems = with_pretrained(resolved.run)
    ranks = local_devices(asked.launch.device) if started is None else started.size
    before = None if started is not None else _plan_before(asked, ranks)
    trial = StartTrial(tell) if started is None and asked.launch.trial and not (
        problems or resolved.problems) else None
    run, open_problems = (before, []) if before is not None else with_plan(
        asked, ranks if open_axes_of(asked) or started is not None else None,
        None if started is None else started.local_size, trial=trial)
    warnings: list[RanvierError] = []
    problems = [*resolved.problems, *missing_data(resolved), *problems, *missing_weights(run),
                *find_problems(run, elsewhere=started is not None), *tracker_problems(run.log)]
    if started is not None and started.size != run.mesh.size and run.resume == "auto" and not problems:
        run, warning = refit(run, started.size, started.launcher, find_problems)
        warnings.append(warning)
        open_problems = []
    if started is None and not problems:
        problems += unwritable_cache(run)
    if open_problems or problems:
        raise ConfigProblems([*open_problems, *problems])
    if started is not None and started.launcher != "local" and run.max_restarts:
        warnings.append(ConfigError(f"has no effect under {started.launcher}", code="restarts-without-effect",
                                    where="max-restarts", value=run.max_restarts,
                                    remedy="Let the launcher restart the run (docs/faults.md), with `--resume auto`."))
    return asked, dataclasses.replace(run, launch=dataclasses.replace(run.launch, trial=0)), warnings


def _plan_before(asked: Run, ranks: int) -> ResolvedRun | None:
    """The run with the plan of the run that it resumes, if all given settings agree with that plan and it needs at most
    `ranks` ranks; else None."""
    from ranvier.planner.auto import open_axes_of

    path = None if asked.run_dir is None else asked.run_dir / "run.toml"
    size = asked.batch.microbatch_size
    if asked.resume != "auto" or path is None or not path.is_file() or not (open_axes_of(asked) or size == "auto"):
        return None
    layer = read.load(str(path))[1]
    merged = read.merge([dataclasses.replace(layer, values={
        name: value for name, value in layer.values.items() if name.startswith(("mesh.", "batch."))})])
    before = merged.run
    found = before.batch.microbatch_size
    if merged.problems or open_axes_of(before) or found == "auto":
        return None
    mesh = before.mesh if isinstance(before.mesh, Mesh) else before.mesh.with_sizes()
    same = all(getattr(asked.mesh, axis) in ("auto", getattr(mesh, axis)) for axis in AXES)
    if not same or mesh.size > ranks or before.batch.global_size != asked.batch.global_size:
        return None
    return resolve(asked, Facts(mesh=mesh, microbatch_size=found if size == "auto" else size))


def _planned_flags(before: Run, after: ResolvedRun) -> list[str]:
    """Flags with the values chosen for `auto`, so that ranks need not plan again."""
    values, old = read.flatten(after), read.flatten(before)
    names = [name for name in _PLANNED if values[name] != old[name]]
    flags = [word for name in names for word in (f"--{read.settings()[name].flag}", read.as_text(values[name]))]
    return [*flags, "--planned", ",".join(names)] if names else []


def _memory_hint(run: ResolvedRun) -> str:
    """The predicted memory, since the kernel may have killed a rank for lack of memory, and how to continue."""
    from ranvier.train.memory import prediction_text

    return f"{prediction_text(run)}\n{_newest(run)}"


def _newest(run: ResolvedRun) -> str:
    """How to continue the run."""
    from ranvier.checkpoint.manifest import checkpoints
    from ranvier.train.saving import checkpoint_folder

    newest = next(iter(checkpoints(checkpoint_folder(run))), None)
    return ("There is no checkpoint yet." if newest is None else
            f"The newest checkpoint is {newest}; the same command with --resume auto --run-dir {run.run_dir} resumes "
            "from it.")


def _train_as_rank(run: ResolvedRun, run_dir: Path, name: str, world: World,
                   change_world: Callable[[World], World] | None, stream: TextIO, as_json: bool,
                   origins: Mapping[str, str]) -> int:
    from ranvier.train.loop import train as train_loop

    def work() -> None:
        if world.rank == 0:  # only here, since an exit of rank 0 before `start` would leave the other ranks waiting
            check_folder(run_dir, run.resume)
        try:
            summary = train_loop(run, name, world, stream=stream, origins=origins)
        except KeyboardInterrupt as error:
            if world.is_whole_run and not error.args:  # not saved; otherwise the supervisor or launcher reports it
                print(f"ranvier: interrupted\n{_newest(run)}", file=sys.stderr)
            raise
        if as_json and world.rank == 0:
            print(json.dumps({"run_dir": str(run_dir), **summary}), flush=True)

    world = world if change_world is None else change_world(world)
    return work_as_rank(world, work)


def check_folder(run_dir: Path, resume: str) -> None:
    """ConfigError if `run_dir` contains the results of a run that this one, with its setting `resume`, does not resume;
    OwnershipError if that run is in progress on this machine."""
    from ranvier.system.lease import check_usable

    resumes = resume == "auto" or (resume != "none" and resume == read.origin(run_dir))
    if os.path.exists(run_dir / "run.toml") and not resumes:
        check_usable([run_dir], wait_seconds=0)
        raise ConfigError("contains the results of another run", code="run-folder-used", where="run-dir",
                          value=str(run_dir),
                          remedy="Choose another folder with `--run-dir`, resume with `--resume auto`, or remove that "
                                 "folder.")
