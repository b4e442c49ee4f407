"""`ranvier data`: the data of runs, before they start."""

from __future__ import annotations

import json
import time

import click

from ranvier.cli import options
from ranvier.cli.problems import ConfigProblems, print_warnings


@click.group()
def data() -> None:
    """Prepare the data of runs."""


@data.command(cls=options.SettingsCommand, common=options.OF_DATA, short_help="Write the token files of a recipe.")
@options.recipe_argument
@options.allow_code_option
@click.option("--processes", type=click.IntRange(min=1),
              help="Number of processes for tokenization; by default one for each core.")
@options.quiet_option
@options.json_option
def prepare(recipe: str, processes: int | None, quiet: bool, as_json: bool, allow_code: bool,
            **flags: str | None) -> int:
    """Write the token files of RECIPE into the cache, once for all runs with the same data settings.

    A run writes missing token files when it starts, in one process. This command writes them in advance, in parallel,
    and prints the share of padding.
    """
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from ranvier.data.cache import PreparationProgress, cache_folder
    from ranvier.data.prepare import prepare as prepare_data
    from ranvier.data.prepare import problems, warnings
    from ranvier.planner.auto import with_pretrained
    from ranvier.system.machine import available_cores

    _, resolved = options.read_valid_recipe(recipe, flags, allow_code=allow_code)
    run, found = with_pretrained(resolved.run)
    found = [*found, *problems(run)]
    if found:
        raise ConfigProblems(found)
    print_warnings(warnings(run))
    began, console = time.monotonic(), Console(highlight=False, markup=False, soft_wrap=True, stderr=as_json,
                                                quiet=quiet)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TextColumn("{task.completed:,.0f}"),
               TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        tasks = {}

        def advance(what: str, done: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=None)
            bar.update(tasks[what], completed=done)

        prepared = prepare_data(run, PreparationProgress(
            tell=lambda line: bar.console.print(line), processes=processes or available_cores(),
            advance=advance))
    console.print(f"{prepared.about}\n{prepared.epoch_samples:,} samples in an epoch")
    print_warnings(prepared.warnings)
    if prepared.padding:
        console.print(f"padding: {prepared.padding}")
    seconds = time.monotonic() - began
    console.print(f"in {cache_folder(run)}, after {seconds:.1f} s")
    if as_json:
        print(json.dumps({"data": prepared.about, "epoch_samples": prepared.epoch_samples, "padding": prepared.padding,
                          "cache": str(cache_folder(run)), "seconds": seconds}))
    return 0
