"""The `ranvier` command with injected faults (`ranvier.testing.faults`), to see how a run handles them.

    python -m ranvier.cli.faults --fault kill:rank=1,call=200 -- train gpt-tiny --run-dir runs/killed
"""

from __future__ import annotations

from collections.abc import Sequence

import click

from ranvier.cli.main import run_command
from ranvier.errors import ConfigError
from ranvier.testing.faults import faulty, parse


@click.command()
@click.option("--fault", "texts", multiple=True, metavar="FAULT",
              help="KIND:rank=R,call=N (or message=N, or seconds=T), for slow with for=SECONDS; may be repeated.")
@click.argument("args", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def command(context: click.Context, texts: Sequence[str], args: Sequence[str]) -> None:
    """Run the ranvier command with ARGS (put -- before them) and inject faults."""
    try:
        faults = [parse(text) for text in texts]
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    context.exit(run_command(args, change_world=lambda world: faulty(world, faults)))


if __name__ == "__main__":
    command(prog_name="python -m ranvier.cli.faults")
