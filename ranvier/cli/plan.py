"""`ranvier plan`: the fastest configuration of a recipe on a cluster."""

from __future__ import annotations

from pathlib import Path

import click

from ranvier.cli.options import (
    SettingsCommand,
    allow_code_option,
    cluster_option,
    json_option,
    read_valid_recipe,
    recipe_argument,
)


@click.command(cls=SettingsCommand, short_help="Find the fastest configuration on a cluster.")
@recipe_argument
@allow_code_option
@cluster_option
@click.option("--ranks", type=click.IntRange(min=1),
              help="Devices to plan for; by default as many as the recipe's mesh has ranks, or all for an auto mesh.")
@click.option("--search", "searched",
              help="What may change, comma-separated: mesh, microbatch, in-flight, recompute, offload, shard, chunks, "
                   "elastic (all of these by default), scheme, precision.")
@click.option("--measure", type=click.IntRange(min=1), default=None,
              help="Run this many of the best configurations for a few steps each on this machine, and rank them by "
                   "measured speed.")
@click.option("--out", type=click.Path(path_type=Path),
              help="Write the best configuration as a run file for `ranvier train`.")
@click.option("--out-html", type=click.Path(path_type=Path),
              help="Write a page with the best configuration and why the others lost.")
@click.option("--explain", is_flag=True,
              help="Name the bottleneck, and show memory against speed for the best configuration.")
@json_option
def plan(recipe: str, cluster: str, ranks: int | None, searched: str | None, measure: int | None, out: Path | None,
         out_html: Path | None, explain: bool, as_json: bool, allow_code: bool, **flags: str | None) -> int:
    """Find the fastest configuration of RECIPE on a cluster, before anything is started there."""
    name, resolved = read_valid_recipe(recipe, flags, allow_code=allow_code)
    from ranvier.planner import plan as planner

    planner.plan(name, resolved.run, cluster, ranks=ranks, searched=searched, measure=measure or 0, out=out,
                 out_html=out_html, explain=explain, as_json=as_json)
    return 0
