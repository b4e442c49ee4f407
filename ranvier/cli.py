"""The command: `ranvier train | check | plan | simulate | resize | doctor | export | import`. Every field of the run is
a flag; --help imports nothing heavy.

Exit codes: 0 done, 1 the run failed, 2 an error of the user's, each in one line on standard error, 130 Ctrl-C.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from ranvier import __version__, resolve
from ranvier.errors import ConfigError, RanvierError
from ranvier.run import Run

if TYPE_CHECKING:
    from ranvier.world import World


class Refused(Exception):
    """Problems of a configuration, to be printed one a line."""

    def __init__(self, problems: Sequence[RanvierError]) -> None:
        super().__init__(*problems)
        self.problems = problems


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command line `args` (by default this process's) and exit."""
    sys.exit(run_command(args))


def run_command(args: Sequence[str] | None = None, *, change_world: Callable[[World], World] | None = None) -> int:
    """The exit code of the command line `args`; errors are printed.

    change_world: what `train` does with each rank's world before it uses it, for faults on purpose.
    """
    try:
        return command.main(args=args, prog_name="ranvier", standalone_mode=False, obj=change_world) or 0
    except Refused as refused:
        return _refuse(refused.problems)
    except RanvierError as error:
        return _refuse([error])
    except click.exceptions.UsageError as error:
        if not sys.argv[1:] and args is None:
            error.show()
        else:
            _complain(error.format_message())
        return 2
    except (click.Abort, KeyboardInterrupt):
        return 130


def _refuse(problems: Sequence[RanvierError]) -> int:
    """One line each, on the first rank of a machine: before ranks are connected, all meet the same problems."""
    from ranvier.launchers import detect

    try:
        started = detect(os.environ)
    except ConfigError:
        started = None
    if started is None or not started.local_rank:
        for problem in problems:
            _complain(str(problem))
    return 2


def _complain(text: str) -> None:
    sys.stderr.write("ranvier: error: " + " ".join(text.split()) + "\n")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="ranvier")
def command() -> None:
    """Train neural networks that are too large, or too slow, for one device."""


class _Switch(click.Option):
    """A yes/no setting: a flag that may have a value, and its negation."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        record = super().get_help_record(ctx)
        return record and (f"{record[0]} / --no-{self.opts[0].removeprefix('--')}", record[1])


def _with_values(args: Sequence[str], params: Sequence[click.Parameter]) -> Iterator[str]:
    """`args` with a value for every switch: --NAME is true unless true or false follows, --no-NAME is false."""
    options = {name: param for param in params if isinstance(param, click.Option) for name in param.opts}
    switches = {name for name, param in options.items() if isinstance(param, _Switch)}
    left = list(args)
    while left:
        arg = left.pop(0)
        if arg == "--":
            yield from (arg, *left)
            return
        if arg in switches:
            yield f"{arg}={left.pop(0) if left[:1] in (['true'], ['false']) else 'true'}"
        elif arg.startswith("--no-") and f"--{arg.removeprefix('--no-')}" in switches:
            yield f"--{arg.removeprefix('--no-')}=false"
        else:
            yield arg
            if arg in options and not options[arg].is_flag and left:
                yield left.pop(0)  # its value, whatever that looks like


class _WithSettings(click.Command):
    """A command that takes every field of the run as a flag, listed by section."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for setting in resolve.settings().values():
            text = f"{setting.help} [{setting.expected}; default {resolve.as_text(setting.default)}]"
            kind = _Switch if setting.is_yes_no else click.Option
            self.params.append(kind([f"--{setting.flag}", setting.name.replace(".", "__")], type=str,
                                    metavar="[true|false]" if setting.is_yes_no else "VALUE", help=text))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, list(_with_values(args, self.get_params(ctx))))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record and isinstance(parameter, click.Option):
                section = parameter.name.rpartition("__")[0] if "__" in (parameter.name or "") else ""
                groups.setdefault(section, []).append(record)
        for section, records in groups.items():
            with formatter.section(section.capitalize() if section else "Options"):
                formatter.write_dl(records)


def _resolve(recipe: str, flags: Mapping[str, str | None]) -> tuple[str, resolve.Resolved]:
    """The recipe's short name, and the run with its origins. ConfigError when the recipe cannot be read."""
    given = {name.replace("__", "."): text for name, text in flags.items() if text is not None}
    name, layer = resolve.load(recipe, keep_folder=given.get("resume") == "auto")
    return name, resolve.resolve([layer, resolve.Layer(origin="flag", values=given, is_text=True)])


@command.command(cls=_WithSettings)
@click.argument("recipe")
@click.pass_obj
def train(change_world: Callable[[World], World] | None, recipe: str, **flags: str | None) -> int:
    """Train RECIPE: a shipped recipe's name, a TOML file, or module:function.

    Under plain python the local ranks are started for you; under torchrun, mpiexec or srun this is one of them.
    """
    name, resolved = _resolve(recipe, flags)
    from ranvier import check, launch
    from ranvier.launchers import detect
    from ranvier.refit import refit
    from ranvier.restart import Restarts

    started = detect(os.environ, resolved.run.launch.launcher)
    settled, unsettled = check.with_pretrained(resolved.run)
    ranks = launch.local_devices(settled.launch.device) if started is None else started.size
    run, open_problems = check.with_plan(settled, ranks if settled.mesh.is_open or started is not None else None,
                                         None if started is None else started.local_size)
    warnings, problems = [], [*resolved.problems, *unsettled, *check.problems(run)]
    if started is not None and started.size != run.mesh.size and run.resume == "auto" and not problems:
        run, warning = refit(run, started.size, started.launcher)
        warnings, open_problems = [warning], []
    if open_problems or problems:
        raise Refused([*open_problems, *problems])
    if started is not None and started.launcher != "local" and run.max_restarts:
        warnings.append(ConfigError(f"does nothing under {started.launcher}", where="max-restarts",
                                    value=run.max_restarts, remedy="Have the launcher start the run again "
                                                                   "(docs/faults.md), with --resume auto."))
    run = dataclasses.replace(run, run_dir=run.run_dir or resolve.default_folder(name))
    if started is None:
        _check_folder(run)
    if started is None or (started.launcher != "local" and started.rank == 0):
        for warning in (*warnings, *check.warnings(run, resolved.chosen, settled)):
            print(f"ranvier: warning: {warning}", file=sys.stderr)
    rerun = None if started is not None else [*launch.rerun_command(), "--run-dir", str(run.run_dir),
                                              *_planned_flags(settled, run)]
    world = launch.start(run.mesh, transport=run.comm.transport, launcher=run.launch.launcher,
                         threads=run.launch.threads, device=run.launch.device,
                         timeout_seconds=run.comm.timeout_seconds, rerun=rerun,
                         explain_kill=lambda: _memory_text(run), saves_on_stop=True,
                         stopped_seconds=run.launch.stopped_seconds, hang_seconds=run.launch.hang_seconds,
                         restart=Restarts(run, rerun) if rerun and run.max_restarts else None, flags=True)
    return _train_as_rank(run, name, world, change_world)


def _planned_flags(before: Run, after: Run) -> list[str]:
    """What was auto, as flags, so that ranks need not plan again."""
    values, old = resolve.flatten(after), resolve.flatten(before)
    names = ["mesh.data", "mesh.pipe", "mesh.row", "mesh.col", "batch.microbatch_size"]
    return [word for name in names if values[name] != old[name]
            for word in (f"--{resolve.settings()[name].flag}", resolve.as_text(values[name]))]


def _memory_text(run: Run) -> str:
    from ranvier.train.memory import prediction_text

    return prediction_text(run)


def _train_as_rank(run: Run, name: str, world: World, change_world: Callable[[World], World] | None) -> int:
    from ranvier import failure
    from ranvier.train.loop import train as train_loop

    try:
        world = world if change_world is None else change_world(world)
        if world.rank == 0:  # not before `start`: the other ranks would wait there for one that has gone
            _check_folder(run)
        train_loop(run, name, world)
        world.backend.close()
    except BaseException as error:
        code = failure.failed(world, world.mesh or run.mesh, error)
        if world.size > 1:
            failure.leave(world, code)
        return code
    return 0


def _check_folder(run: Run) -> None:
    """ConfigError when a run has left its results in the folder of one that does not go on from there."""
    goes_on = run.resume == "auto" or (run.resume != "none" and run.resume == resolve.origin(run.run_dir))
    if os.path.exists(run.run_dir / "run.toml") and not goes_on:
        raise ConfigError("holds the results of another run", where="run-dir", value=str(run.run_dir),
                          remedy="Choose another folder with --run-dir, go on with --resume auto, or remove that one.")


@command.command(cls=_WithSettings)
@click.argument("recipe", required=False)
@click.option("--split", metavar="MODULE:FUNCTION",
              help="Compare a model of your own on rows and columns, in every scheme, with the same on one rank. The "
                   "function takes nothing and returns (model, sample) or (model, sample, loss), as for "
                   "ranvier.testing.check_split. No RECIPE is needed.")
@click.option("--ranks", type=click.IntRange(min=1), help="Number of ranks that the run is meant for.")
@click.option("--ranks-per-node", type=click.IntRange(min=1), help="Ranks on each machine, for their placement.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def check(recipe: str | None, split: str | None, ranks: int | None, ranks_per_node: int | None, as_json: bool,
          **flags: str | None) -> int:
    """Find every problem of RECIPE at once, for any number of ranks; show its stages, memory and settings.

    Nothing is started, and no weight is built.
    """
    if split is not None:
        from ranvier.testing.split import check_named

        check_named(split, as_json=as_json)
    if recipe is None:
        if split is None:
            raise click.UsageError("Missing argument 'RECIPE'.")
        return 0
    name, resolved = _resolve(recipe, flags)
    from ranvier.check import check as check_run
    from ranvier.check import print_report

    report = check_run(resolved.run, ranks, ranks_per_node, chosen=resolved.chosen)
    report = dataclasses.replace(report, problems=(*resolved.problems, *report.problems))
    values = resolve.flatten(resolved.run)
    if resolved.run.train.epochs is not None:
        values["train.steps"] = "by train.epochs"
    rows = [(setting.flag, resolve.as_text(values[setting.name]), resolved.origins[setting.name])
            for setting in resolve.settings().values()]
    if as_json:
        listed = [{"name": flag, "value": value, "origin": origin} for flag, value, origin in rows]
        print(json.dumps({"recipe": name, "ranks": ranks, "mesh": dataclasses.asdict(resolved.run.mesh),
                          **report.document(), "values": listed}, indent=1))
    else:
        print_report(report, rows)
    return 2 if report.problems else 0


_CLUSTER = click.option("--cluster", required=True,
                        help="A shipped cluster (summit, frontera, a100, h100, h200, laptop), or a TOML file.")


@command.command(cls=_WithSettings)
@click.argument("recipe")
@_CLUSTER
@click.option("--ranks", type=click.IntRange(min=1),
              help="Devices to plan for; by default as many as the recipe's mesh has ranks, all where it has one.")
@click.option("--search", "searched",
              help="What may change, comma-separated: mesh, microbatch, in-flight, checkpoint, offload, shard, chunks, "
                   "elastic (all of these by default), scheme, precision.")
@click.option("--measure", type=click.IntRange(min=1), default=None,
              help="Run so many of the best for some steps each on this machine, and order the plan by that.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the best as a run file for `ranvier train`.")
@click.option("--explain", is_flag=True, help="Say what binds.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def plan(recipe: str, cluster: str, ranks: int | None, searched: str | None, measure: int | None, out: Path | None,
         explain: bool, as_json: bool, **flags: str | None) -> int:
    """Find the fastest configuration of RECIPE on a cluster, before anything is started there."""
    name, resolved = _resolve(recipe, flags)
    if resolved.problems:
        raise Refused(resolved.problems)
    from ranvier.planner import plan as planner

    planner.plan(name, resolved.run, cluster, ranks=ranks, searched=searched, measure=measure or 0, out=out,
                 explain=explain, as_json=as_json)
    return 0


@command.command(cls=_WithSettings)
@click.argument("recipe")
@_CLUSTER
@click.option("--ranks", type=click.IntRange(min=1), help="Devices, where the mesh is auto.")
@click.option("--jitter", type=click.FloatRange(min=0, max=3), default=0.0, show_default=True,
              help="Deviation of an action's time on one rank, as a share of its mean.")
@click.option("--slow", multiple=True, help="A slow stage of one replica, as REPLICA:STAGE:FACTOR; may be repeated.")
@click.option("--mtbf-hours", type=click.FloatRange(min=0, min_open=True),
              help="Mean hours between two failures of one rank: how much of the time is left.")
@click.option("--draw", type=click.Path(path_type=Path),
              help="Write a picture: each stage's actions, and each policy's bubble over depth, in flight, jitter.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def simulate(recipe: str, cluster: str, ranks: int | None, jitter: float, slow: Sequence[str], mtbf_hours: float | None,
             draw: Path | None, as_json: bool, **flags: str | None) -> int:
    """Run RECIPE's schedule on a cluster that exists on paper only: the engine's own policies on a simulated clock."""
    name, resolved = _resolve(recipe, flags)
    if resolved.problems:
        raise Refused(resolved.problems)
    from ranvier.planner import plan as planner

    planner.simulate(name, resolved.run, cluster, ranks=ranks, jitter=jitter, slow=slow, mtbf_hours=mtbf_hours,
                     draw=draw, as_json=as_json)
    return 0


_FORMATS = click.Choice(["fp32", "bf16", "fp16", "fp64"])


@command.command("export")
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--dtype", type=_FORMATS, help="Number format of the files; by default the checkpoint's own, of its fp32 "
                                             "master copies where it has them.")
@click.option("--shard-bytes", type=click.IntRange(min=1), default=1_000_000_000, show_default=True,
              help="Largest file of tensors, unless one tensor is larger.")
@click.option("--tokenizer", type=click.Path(path_type=Path), help="A tokenizer.json; by default the run's own.")
def export_run(run: Path, out: Path, dtype: str | None, shard_bytes: int, tokenizer: Path | None) -> int:
    """Write a checkpoint of RUN to the new folder OUT in Hugging Face's form, which transformers loads.

    RUN is a run's folder (its newest whole checkpoint), a folder of checkpoints, or one of them. At the end the logits
    of OUT are compared with the checkpoint's.
    """
    from ranvier.checkpoint.hf_export import export

    export(run, out, dtype=dtype, shard_bytes=shard_bytes, tokenizer=tokenizer)
    print(f"written to {out}")
    return 0


@command.command("import")
@click.argument("model", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--precision", type=_FORMATS, help="Number format of the parameters; by default that of MODEL's files.")
def import_model(model: Path, out: Path, precision: str | None) -> int:
    """Make a checkpoint in the new folder OUT of the model (GPT-2, BERT, ViT, DINOv2) in the folder MODEL, which is in
    Hugging Face's form.

    MODEL has config.json and model.safetensors (or shards with their index, or pytorch_model.bin). At the end the
    logits of OUT are compared with MODEL's; `ranvier train OUT/run.toml --resume OUT` goes on from there.
    """
    from ranvier.checkpoint.hf_import import flags
    from ranvier.checkpoint.hf_import import import_model as make

    recipe = make(model, out, precision=precision)
    print(f"written to {out}; its settings: {' '.join(flags(recipe))}")
    print(f"to go on from it: ranvier train {out / 'run.toml'} --resume {out}")
    return 0


@command.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--data", type=click.IntRange(min=1), required=True, help="Replicas that the run is to have.")
@click.option("--pipe", type=click.IntRange(min=1), required=True, help="Stages that it is to have.")
@click.option("--wait", type=click.FloatRange(min=0), default=60.0, show_default=True,
              help="Seconds to wait for the run's answer; 0 asks and ends.")
def resize(run: Path, data: int, pipe: int, wait: float) -> int:
    """Have the run in folder RUN, which is under way, go on with other numbers of replicas and stages.

    It changes between two steps, without a restart. Together they take at most the ranks that it was started with;
    what is left over is idle, and can be taken again.
    """
    from ranvier.train.resize import ask_and_wait

    print(ask_and_wait(run, data=data, pipe=pipe, seconds=wait))
    return 0


@command.command()
@click.option("--measure", is_flag=True, help="Measure this machine for `ranvier plan`; takes less than a minute.")
@click.option("--out", type=click.Path(path_type=Path), help="Where what is measured goes; by default cluster.toml.")
def doctor(measure: bool, out: Path | None) -> int:
    """Show what this machine has, and what every `auto` comes to on it."""
    if out is not None and not measure:
        raise ConfigError("is for what is measured", where="--out", value=str(out), remedy="Add --measure.")
    from ranvier.doctor import examine, measure_to, print_table

    findings = examine()
    print_table(findings)
    if measure:
        measure_to(out or Path("cluster.toml"))
    return 2 if any(finding.remedy for finding in findings) else 0
