"""`ranvier plan`: the fastest configuration of a recipe on a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from ranvier.cli.options import (
    SettingsCommand,
    allow_code_option,
    json_option,
    read_valid_recipe,
    recipe_argument,
)


@click.command(cls=SettingsCommand, short_help="Find the fastest configuration on a cluster.")
@recipe_argument
@allow_code_option
@click.option("--cluster", "clusters", required=True, multiple=True,
              help="A shipped cluster (summit, frontera, a100, h100, h200, laptop), or a TOML file; several are "
                   "compared.")
@click.option("--nodes", type=click.IntRange(min=1), help="Nodes that the cluster has, instead of its file's number.")
@click.option("--ranks", type=click.IntRange(min=1),
              help="Devices to plan for; by default as many as the recipe's mesh has ranks, or all for an auto mesh.")
@click.option("--search", "searched",
              help="What may change, comma-separated: mesh, microbatch, in-flight, recompute, offload, shard, chunks, "
                   "elastic (all of these by default), scheme, precision.")
@click.option("--measure", type=click.IntRange(min=1), default=None,
              help="Run this many of the best configurations for a few steps each on this machine, and rank them by "
                   "measured speed.")
@click.option("--tokens",
              help="Tokens of the whole training, such as 300B: adds its days, device hours, dollars and kWh.")
@click.option("--deadline", type=click.FloatRange(min=0, min_open=True),
              help="Days for these tokens: plans for the fewest devices that are in time.")
@click.option("--budget", type=click.FloatRange(min=0, min_open=True),
              help="Dollars for these tokens, by the price_per_hour of a device in the cluster's file.")
@click.option("--mtbf-hours", type=click.FloatRange(min=0, min_open=True),
              help="Mean hours between two failures of one rank: the days include what they cost.")
@click.option("--what-if", multiple=True, metavar="KEY=FACTOR",
              help="Plan again with a number of the cluster's file multiplied, such as between.bandwidth=2, and "
                   "compare; may be repeated.")
@click.option("--out", type=click.Path(path_type=Path),
              help="Write the best configuration as a run file for `ranvier train`.")
@click.option("--out-html", type=click.Path(path_type=Path),
              help="Write a page with the best configuration and why the others lost.")
@click.option("--launcher", type=click.Choice(["slurm", "torchrun", "kubernetes"]),
              help="With --out: also write the job's file that starts the run there.")
@click.option("--explain", is_flag=True,
              help="Name the bottleneck, and show memory against speed for the best configuration.")
@json_option
def plan(recipe: str, clusters: Sequence[str], tokens: str | None, deadline: float | None, budget: float | None,
         mtbf_hours: float | None, as_json: bool, allow_code: bool, **options: Any) -> int:
    """Find the fastest configuration of RECIPE on a cluster, before anything is started there."""
    asked = {name: options.pop(name) for name in (
        "ranks", "nodes", "searched", "what_if", "out", "out_html", "launcher", "explain")}
    measure = options.pop("measure") or 0
    name, resolved = read_valid_recipe(recipe, options, allow_code=allow_code)
    from ranvier.planner import plan as planner
    from ranvier.planner.training import goal_of

    planner.plan(name, resolved.run, clusters, planner.Request(
        goal=goal_of(tokens, deadline, budget, mtbf_hours), measure=measure, as_json=as_json, **asked))
    return 0
