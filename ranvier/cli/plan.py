"""`ranvier plan`: the fastest configuration of a recipe on a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from ranvier.cli import options
from ranvier.cli.problems import missing_data, print_warnings
from ranvier.errors import ConfigError


def _single_value(context: click.Context, parameter: click.Parameter, values: tuple[Any, ...]) -> Any:
    """The single value of an option that applies to all clusters; ConfigError if it is repeated."""
    if len(values) > 1:
        raise ConfigError("is given more than once, but applies to all clusters", code="repeated-option",
                          where=f"--{parameter.name}", value=", ".join(map(str, values)),
                          remedy="Give it once, or set `nodes` and `price_per_hour` in a file for each cluster.")
    return values[0] if values else None


@click.command(cls=options.SettingsCommand, short_help="Find the fastest configuration on a cluster.")
@options.recipe_argument
@options.allow_code_option
@click.option("--cluster", "clusters", required=True, multiple=True, metavar="NAME",
              help="A shipped cluster, or a TOML file; repeat it to compare several.")
@click.option("--nodes", type=click.IntRange(min=1), multiple=True, callback=_single_value, metavar="N",
              help="Number of nodes, instead of the file's.")
@click.option("--price", type=click.FloatRange(min=0, min_open=True, max=1_000_000_000), multiple=True,
              callback=_single_value, metavar="DOLLARS", help="Price of a device-hour.")
@click.option("--ranks", type=click.IntRange(min=1), metavar="N",
              help="Devices; by default the recipe's, or all.")
@click.option("--search", "searched", metavar="NAMES",
              help="What may change, by default all but precision: mesh, microbatch, in-flight, recompute, offload, "
                   "shard, chunks, elastic, scheme, stages-per-rank, precision.")
@click.option("--measure", type=click.IntRange(min=1), default=None, metavar="N",
              help="Run the best N here, rank by measured time.")
@click.option("--tokens", metavar="N", help="Tokens of the training, as 300B: adds days and cost.")
@click.option("--deadline", type=click.FloatRange(min=0, min_open=True), metavar="DAYS",
              help="Fewest devices that finish --tokens in time.")
@click.option("--budget", metavar="DOLLARS", help="Maximum cost of --tokens, such as 2M.")
@click.option("--mtbf-hours", type=click.FloatRange(min=0, min_open=True), metavar="HOURS",
              help="Mean time between failures of a device.")
@click.option("--what-if", multiple=True, metavar="KEY=FACTOR",
              help="Compare with a number of the cluster multiplied.")
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="Write the best plan as a run file.")
@click.option("--out-html", type=click.Path(path_type=Path), metavar="FILE",
              help="Write a page with the best plan and the others.")
@click.option("--launcher", type=click.Choice(["slurm", "torchrun", "kubernetes"]), metavar="NAME",
              help="With --out, a job file: slurm, torchrun, kubernetes.")
@click.option("--explain", is_flag=True, help="More on the bottleneck, and on memory against speed.")
@options.json_option
def plan(recipe: str, clusters: Sequence[str], tokens: str | None, deadline: float | None, budget: str | None,
         mtbf_hours: float | None, as_json: bool, allow_code: bool, **flags: Any) -> int:
    """Find the fastest configuration of RECIPE on a cluster, before anything is started there."""
    asked = {name: flags.pop(name) for name in (
        "ranks", "nodes", "price", "searched", "what_if", "out", "out_html", "launcher", "explain")}
    measure = flags.pop("measure") or 0
    name, resolved = options.read_valid_recipe(recipe, flags, allow_code=allow_code)
    from ranvier.checkpoint.hf.from_pretrained import missing_weights
    from ranvier.planner import plan as planner
    from ranvier.planner.training import dollars_of, goal_of

    goal = goal_of(tokens, deadline, None if budget is None else dollars_of(budget), mtbf_hours,
                   flags=[setting for setting, origin in resolved.origins.items() if origin == "flag"],
                   keeps_interval="checkpoint.every" in resolved.chosen)
    planner.plan(name, resolved.run, clusters, planner.Request(
        goal=goal, measure=measure, as_json=as_json,
        takes_bf16=resolved.origins["precision"] == "default", origins=resolved.origins, **asked))
    if asked["out"] is not None:
        print_warnings([*missing_data(resolved), *missing_weights(resolved.run)])
    return 0
