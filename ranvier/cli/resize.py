"""`ranvier resize`: reshard a run in progress to another mesh."""

from __future__ import annotations

import json
from pathlib import Path

import click

from ranvier.cli.options import json_option, quiet_option, text_output


@click.command(short_help="Reshard a run in progress to another mesh.")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--data", type=click.IntRange(min=1), required=True, help="New number of data parallel replicas.")
@click.option("--pipe", type=click.IntRange(min=1), required=True, help="New number of pipeline stages.")
@click.option("--row", type=click.IntRange(min=1), help="New number of rows; unchanged without this option.")
@click.option("--col", type=click.IntRange(min=1), help="New number of columns; unchanged without this option.")
@click.option("--wait", type=click.FloatRange(min=0), default=60.0, show_default=True,
              help="Seconds to wait for the run's answer; 0 sends the request and exits.")
@quiet_option
@json_option
def resize(run: Path, data: int, pipe: int, row: int | None, col: int | None, wait: float, quiet: bool,
           as_json: bool) -> int:
    """Reshard the run in progress in folder RUN to other numbers of replicas, stages, rows and columns.

    The run changes its mesh between two steps, without a restart. The new mesh may use at most the run's ranks,
    including those that have joined; unused ranks are idle, and later requests can use them again.
    """
    from ranvier.train.resize import ask_and_wait

    answer = ask_and_wait(run, data=data, pipe=pipe, row=row, col=col, seconds=wait)
    with text_output(as_json, quiet):
        print(answer)
    if as_json:
        print(json.dumps({"run": str(run), "answer": answer}))
    return 0
