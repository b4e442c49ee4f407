"""`ranvier join`: add ranks to a run in progress."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click


@click.command(short_help="Add ranks to a run in progress.")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--ranks", type=click.IntRange(min=1), default=1, show_default=True,
              help="Number of ranks that this command starts on this machine.")
@click.option("--data", type=click.IntRange(min=1), help="New number of data parallel replicas; by default as many as "
                                                         "there are ranks for.")
@click.option("--pipe", type=click.IntRange(min=1), help="New number of pipeline stages; by default unchanged.")
@click.option("--row", type=click.IntRange(min=1), help="New number of rows; by default unchanged.")
@click.option("--col", type=click.IntRange(min=1), help="New number of columns; by default unchanged.")
@click.option("--wait", type=click.FloatRange(min=0), default=300.0, show_default=True,
              help="Seconds to wait for the run's answer.")
def join(run: Path, ranks: int, data: int | None, pipe: int | None, row: int | None, col: int | None,
         wait: float) -> int:
    """Start ranks on this machine that join the run in progress in folder RUN, which was started with
    --launch.join-address, and take part in it until it ends.

    The run adds them between two steps, without a restart, and changes to a mesh with more replicas, or to the
    requested one. Ranks that the mesh does not use are idle; `ranvier resize` can use them. Settings are the run's. On
    another machine, RUN is the run's folder on a file system that both machines share; its path may differ.
    """
    from ranvier.errors import ConfigError
    from ranvier.launch.launchers import detect

    sizes = {axis: size for axis, size in (("data", data), ("pipe", pipe), ("row", row), ("col", col))
             if size is not None}
    given = os.environ if "TORCHELASTIC_RUN_ID" in os.environ else {
        name: value for name, value in os.environ.items() if name != "RANK"}  # a shell or container may have set RANK
    started = detect(given)
    if started is None:
        return _start(run, ranks)
    if started.launcher != "local":
        raise ConfigError(f"starts its ranks itself, but {started.launcher} has started this process",
                          code="join-under-launcher", where="ranvier join",
                          remedy=f"Run ranvier join outside of {started.launcher}.")

    from ranvier.cli.ranks import work_as_rank
    from ranvier.train.joining import join_run
    from ranvier.train.loop import train_as_newcomer

    world, joined = join_run(run.absolute(), started, sizes, seconds=wait, stream=sys.stdout)

    return work_as_rank(world, lambda: train_as_newcomer(joined, world))


def _start(run: Path, ranks: int) -> int:
    """Start the ranks, and wait for their end; returns the exit code."""
    from ranvier.launch.contact import read_contact
    from ranvier.launch.joining import REQUEST_ID
    from ranvier.launch.start import rank_variables, rerun_command
    from ranvier.launch.supervision import supervise
    from ranvier.mesh import Mesh
    from ranvier.train.joining import run_to_join
    from ranvier.train.resize import new_request_id

    contact = read_contact(run)
    asked = run_to_join(contact, run)
    variables = {**rank_variables(ranks, "auto", survive_losses=True), REQUEST_ID: new_request_id()}
    return supervise(Mesh(data=ranks), "torch", "that of the run", rerun_command(), variables, saves_on_stop=True,
                     stopped_seconds=asked.launch.stopped_seconds, joins=contact).code
