"""`ranvier simulate`: one step of a recipe on a cluster that need not exist."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from ranvier.cli import options


@click.command(cls=options.SettingsCommand, short_help="Simulate a step on a cluster, with noise and faults.")
@options.recipe_argument
@options.allow_code_option
@options.cluster_option
@click.option("--ranks", type=click.IntRange(min=1), help="Number of devices, if the mesh is auto.")
@click.option("--jitter", type=click.FloatRange(min=0, max=3), default=0.0, show_default=True,
              help="Standard deviation of an action's time on one rank, as a fraction of its mean.")
@click.option("--slow", multiple=True, help="A straggler: a slow stage of one replica, as REPLICA:STAGE:FACTOR; may "
                                            "be repeated.")
@click.option("--mtbf-hours", type=click.FloatRange(min=0, min_open=True),
              help="Mean hours between two failures of one rank; prints the fraction of time left for training.")
@click.option("--draw", type=click.Path(path_type=Path),
              help="Write a picture: each stage's actions, and each policy's bubble over depth, in-flight limit and "
                   "jitter.")
@click.option("--as-published", is_flag=True,
              help="As AxoNN, Megatron-LM and DeepSpeed were published: products have no panels, and except in AxoNN's "
                   "schedule a stage does not compute while it sends or receives.")
@options.json_option
def simulate(recipe: str, cluster: str, ranks: int | None, jitter: float, slow: Sequence[str], mtbf_hours: float | None,
             draw: Path | None, as_published: bool, as_json: bool, allow_code: bool, **flags: str | None) -> int:
    """Simulate the schedule of RECIPE on a cluster: the engine's own policies with simulated times."""
    name, resolved = options.read_valid_recipe(recipe, flags, allow_code=allow_code)
    from ranvier.planner import plan as planner

    planner.simulate(name, resolved.run, cluster, ranks=ranks, jitter=jitter, slow=slow, mtbf_hours=mtbf_hours,
                     draw=draw, as_json=as_json, as_published=as_published)
    return 0
