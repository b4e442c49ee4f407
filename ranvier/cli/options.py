"""Options that several commands share: every field of a run as a flag, the cluster, number formats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

from ranvier.cli.problems import ConfigProblems, print_warnings
from ranvier.config import aliases, read

cluster_option = click.option("--cluster", required=True,
                              help="A shipped cluster (summit, frontera, a100, h100, h200, laptop), or a TOML file.")
"""Option --cluster of commands that predict speed."""
NUMBER_FORMATS = click.Choice(["fp32", "bf16", "fp16", "fp64"])
"""Type of options for the number format of files."""


class Switch(click.Option):
    """A boolean setting: a flag that may have a value, and its negation."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """The names, with the negation, and the help text."""
        record = super().get_help_record(ctx)
        return record and (f"{record[0]} / --no-{self.opts[0].removeprefix('--')}", record[1])


def _with_values(args: Sequence[str], params: Sequence[click.Parameter]) -> Iterator[str]:
    """`args` with a value for each switch: --NAME is true unless true or false follows, --no-NAME is false."""
    options = {name: param for param in params if isinstance(param, click.Option) for name in param.opts}
    switches = {name for name, param in options.items() if isinstance(param, Switch)}
    remaining = list(args)
    while remaining:
        arg = remaining.pop(0)
        if arg == "--":
            yield from (arg, *remaining)
            return
        if arg in switches:
            yield f"{arg}={remaining.pop(0) if remaining[:1] in (['true'], ['false']) else 'true'}"
        elif arg.startswith("--no-") and f"--{arg.removeprefix('--no-')}" in switches:
            yield f"--{arg.removeprefix('--no-')}=false"
        else:
            yield arg
            if arg in options and not options[arg].is_flag and remaining:
                yield remaining.pop(0)  # the option's value, even if it looks like an option


class SettingsCommand(click.Command):
    """A command with every field of the run as a flag. Its help lists flags by section."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for setting in read.settings().values():
            text = f"{setting.help} [{setting.expected}; default {read.as_text(setting.default)}]"
            kind = Switch if setting.is_yes_no else click.Option
            self.params.append(kind([f"--{setting.flag}", setting.name.replace(".", "__")], type=str,
                                    metavar="[true|false]" if setting.is_yes_no else "VALUE", help=text))
        for name in aliases.old_names():
            self.params.append(click.Option([f"--{read.flag(name)}", name.replace(".", "__")], type=str, hidden=True))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse `args`, in which switches may have values."""
        return super().parse_args(ctx, list(_with_values(args, self.get_params(ctx))))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help of all options, by section."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record and isinstance(parameter, click.Option):
                section = parameter.name.rpartition("__")[0] if "__" in (parameter.name or "") else ""
                groups.setdefault(section, []).append(record)
        for section, records in groups.items():
            with formatter.section(section.capitalize() if section else "Options"):
                formatter.write_dl(records)


def read_recipe(recipe: str, flags: Mapping[str, str | None]) -> tuple[str, read.Merged]:
    """The recipe's short name, and the run with the origin of each setting.

    flags: text of each flag by the name that `SettingsCommand` gives it; None if not given. ConfigError if the recipe
    cannot be read.
    """
    given = {name.replace("__", "."): text for name, text in flags.items() if text is not None}
    name, layer = read.load(recipe, keep_folder=given.get("resume") == "auto")
    return name, read.merge([layer, read.Layer(origin="flag", values=given, is_text=True)])


def read_valid_recipe(recipe: str, flags: Mapping[str, str | None]) -> tuple[str, read.Merged]:
    """`read_recipe` that prints warnings, and raises ConfigProblems for values that cannot be read."""
    name, resolved = read_recipe(recipe, flags)
    if resolved.problems:
        raise ConfigProblems(resolved.problems)
    print_warnings(resolved.warnings)
    return name, resolved
