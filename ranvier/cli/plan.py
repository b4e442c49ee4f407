"""`ranvier plan`: the fastest configuration of a recipe on a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from ranvier.cli import options
from ranvier.cli.problems import missing_data, print_warnings


@click.command(cls=options.SettingsCommand, short_help="Find the fastest configuration on a cluster.")
@options.recipe_argument
@options.allow_code_option
@click.option("--cluster", "clusters", required=True, multiple=True, metavar="NAME",
              help="A shipped cluster, or a TOML file; several are compared.")
@click.option("--nodes", type=click.IntRange(min=1), metavar="N", help="Number of nodes, instead of the file's.")
@click.option("--price", type=click.FloatRange(min=0, min_open=True), metavar="DOLLARS",
              help="Price of a device and hour, instead of the file's.")
@click.option("--ranks", type=click.IntRange(min=1), metavar="N",
              help="Number of devices; by default that of the recipe's mesh, or all.")
@click.option("--search", "searched", metavar="NAMES",
              help="What may change, by default all but precision: mesh, microbatch, in-flight, recompute, offload, "
                   "shard, chunks, elastic, scheme, stages-per-rank, precision.")
@click.option("--measure", type=click.IntRange(min=1), default=None, metavar="N",
              help="Run the best N here, and rank them by measured time.")
@click.option("--tokens", metavar="N", help="Tokens of a whole training, such as 300B: adds its steps, days and cost.")
@click.option("--deadline", type=click.FloatRange(min=0, min_open=True), metavar="DAYS",
              help="Find the fewest devices that finish --tokens in this time.")
@click.option("--budget", type=click.FloatRange(min=0, min_open=True), metavar="DOLLARS",
              help="Maximum cost of --tokens.")
@click.option("--mtbf-hours", type=click.FloatRange(min=0, min_open=True), metavar="HOURS",
              help="Mean time between failures of a device: adds their cost.")
@click.option("--what-if", multiple=True, metavar="KEY=FACTOR",
              help="Compare with the plan for a multiple of a number in the cluster file.")
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="Write the best plan as a run file.")
@click.option("--out-html", type=click.Path(path_type=Path), metavar="FILE",
              help="Write a page with the best plan, and why the others lost.")
@click.option("--launcher", type=click.Choice(["slurm", "torchrun", "kubernetes"]), metavar="NAME",
              help="With --out: write a job file, too, for slurm, torchrun or kubernetes.")
@click.option("--explain", is_flag=True, help="Say more about the bottleneck, and about memory against speed.")
@options.json_option
@options.rare_collections()
def plan(recipe: str, clusters: Sequence[str], tokens: str | None, deadline: float | None, budget: float | None,
         mtbf_hours: float | None, as_json: bool, allow_code: bool, **flags: Any) -> int:
    """Find the fastest configuration of RECIPE on a cluster, before anything is started there."""
    asked = {name: flags.pop(name) for name in (
        "ranks", "nodes", "price", "searched", "what_if", "out", "out_html", "launcher", "explain")}
    measure = flags.pop("measure") or 0
    name, resolved = options.read_valid_recipe(recipe, flags, allow_code=allow_code)
    from ranvier.planner import plan as planner
    from ranvier.planner.training import goal_of

    planner.plan(name, resolved.run, clusters, planner.Request(
        goal=goal_of(tokens, deadline, budget, mtbf_hours), measure=measure, as_json=as_json,
        takes_bf16=resolved.origins["precision"] == "default", origins=resolved.origins, **asked))
    if asked["out"] is not None:
        print_warnings(missing_data(resolved))
    return 0
