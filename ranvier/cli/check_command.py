"""`ranvier check`: the command. The problems and the report come from `ranvier.cli.check`."""

from __future__ import annotations

import dataclasses
import json
import sys

import click

from ranvier.cli import options
from ranvier.cli.problems import missing_data, print_problems
from ranvier.config import named_code, read


@click.command(cls=options.SettingsCommand, short_help="List all problems of a recipe, with the memory of each rank.")
@click.argument("recipe", required=False, shell_complete=options.complete_recipe)
@options.allow_code_option
@click.option("--split", metavar="MODULE:FUNCTION",
              help="Compare a model of your own under tensor parallelism, in every scheme, with the same model on one "
                   "rank. The function takes no arguments and returns (model, sample) or (model, sample, loss), as for "
                   "ranvier.testing.check_split. No RECIPE is needed.")
@click.option("--ranks", type=click.IntRange(min=1), help="Number of ranks of the run.")
@click.option("--cluster",
              help="Compare the prediction with the memory of this cluster, a name as for `plan` or a TOML file.")
@click.option("--ranks-per-node", type=click.IntRange(min=1),
              help="Ranks on each machine, for their placement.")
@click.option("--all", "everything", is_flag=True,
              help="Show all settings, each stage, its memory by category, and other limits of the schedule.")
@options.json_option
def check(recipe: str | None, allow_code: bool, split: str | None, ranks: int | None, cluster: str | None,
          ranks_per_node: int | None, everything: bool, as_json: bool, **flags: str | None) -> int:
    """List every problem of RECIPE at once, for any number of ranks, with its stages, memory and settings.

    No rank is started, and no weights are allocated.
    """
    if split is not None:
        # Imported here because ranvier.testing is a tool above the command, not part of it.
        from ranvier.testing.split import SplitError, check_named

        try:
            check_named(split, as_json=as_json)
        except SplitError as error:  # its outcomes are printed
            print_problems([error])
            return 2
    if recipe is None:
        if split is None:
            raise click.UsageError("Missing argument 'RECIPE'.")
        return 0
    from ranvier.cli.check import check as check_run
    from ranvier.cli.check import print_report
    from ranvier.launch.start import local_devices
    from ranvier.planner.auto import open_axes_of, with_pretrained

    name, resolved = options.read_recipe(recipe, flags, allow_code=allow_code)
    if cluster is None and ranks is None and resolved.run.launch.cluster is None:
        resolved = options.use_fp32_on_cpu(resolved)
    values, origins = read.flatten(resolved.run), dict(resolved.origins)
    for setting, code in named_code.objects_of(values):  # before the import, which may run any code
        print(f"imports {code} for {read.flag(setting)}, from {origins[setting]}", flush=True,
              file=sys.stderr if as_json else sys.stdout)
    if ranks is None and cluster is None and open_axes_of(resolved.run):
        ranks = local_devices(resolved.run.launch.device)  # as many as `train` would start
    report = check_run(resolved.run, ranks, ranks_per_node, chosen=resolved.chosen,
                       cluster=cluster)
    report = dataclasses.replace(report, problems=(*resolved.problems, *report.problems),
                                 warnings=(*report.warnings, *missing_data(resolved)))  # a problem when it starts
    for setting, value in read.flatten(with_pretrained(resolved.run)[0]).items():
        if value != values[setting]:  # sizes taken from the weights
            values[setting], origins[setting] = value, "model.pretrained"
    if resolved.run.train.epochs is not None:
        values["train.steps"] = "by train.epochs"
    rows = [(setting.flag, read.as_text(values[setting.name]), origins[setting.name])
            for setting in read.settings().values()]
    if as_json:
        mesh = {name.removeprefix("mesh."): value for name, value in values.items() if name.startswith("mesh.")}
        listed = [{"name": flag, "value": value, "origin": origin} for flag, value, origin in rows]
        print(json.dumps({"recipe": name, "ranks": ranks, "mesh": mesh,
                          **report.document(), "values": listed}, indent=1))
    else:
        print_report(report, rows, everything=everything)
    return 2 if report.problems else 0
