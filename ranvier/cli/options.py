"""Options that several commands share: every field of a run as a flag, the cluster, number formats."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from typing import Any

import click
from click.shell_completion import CompletionItem

from ranvier.arguments import literal_values
from ranvier.cli.problems import ConfigProblems
from ranvier.config import aliases, read

cluster_option = click.option("--cluster", required=True,
                              help="A shipped cluster (summit, frontera, a100, h100, h200, laptop), or a TOML file.")
"""Option --cluster of commands that predict speed."""


def complete_recipe(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """Completions for a shell: the shipped recipes that begin with the given text, and files."""
    found = [CompletionItem(name) for name in read.recipe_names() if name.startswith(begun)]
    return [*found, CompletionItem(begun, type="file")]


def _values(setting: read.Setting) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """Completions for a shell: the values of a setting that begin with the given text."""
    known = ["true", "false"] if setting.is_switch else literal_values(setting.annotation)
    return lambda context, parameter, begun: [word for word in known if word.startswith(begun)]


recipe_argument = click.argument("recipe", shell_complete=complete_recipe)
"""Argument RECIPE of commands about runs."""
json_option = click.option("--json", "as_json", is_flag=True,
                           help="Print one JSON document on standard output, and all else on standard error.")
"""Option --json of commands whose result a program may read."""
quiet_option = click.option("--quiet", is_flag=True, help="Print warnings and errors only.")
"""Option --quiet of commands that write files: scripts read the exit code, or the document of --json."""
allow_code_option = click.option(
    "--allow-code", is_flag=True,
    help="Import the modules that a file names.")
"""Option --allow-code of commands that read recipes."""
NUMBER_FORMATS = click.Choice(["fp32", "bf16", "fp16", "fp64"])
"""Type of options for the number format of files."""


@contextmanager
def text_output(as_json: bool, quiet: bool = False) -> Iterator[None]:
    """Context for printing text for people: with --json on standard error, with --quiet not at all."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(
            nowhere if quiet else sys.stderr if as_json else sys.stdout):
        yield


class Switch(click.Option):
    """A boolean setting: a flag that may have a value, and its negation."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """The names, with the negation, and the help text."""
        record = super().get_help_record(ctx)
        return record and (f"{record[0]} / --no-{self.opts[0].removeprefix('--')}", record[1])


_FROM_TRANSFORMERS = "--model.from-transformers"


def _with_values(args: Sequence[str], params: Sequence[click.Parameter]) -> Iterator[str]:
    """`args` with a value for each switch: --NAME is true unless true or false follows, --no-NAME is false.

    --model.from-transformers FOLDER is the recipe FOLDER in the family that has transformers' own blocks.
    """
    options = {name: param for param in params if isinstance(param, click.Option) for name in param.opts}
    switches = {name for name, param in options.items() if isinstance(param, Switch)}
    remaining = [part for arg in args for part in (
        arg.split("=", 1) if arg.startswith(f"{_FROM_TRANSFORMERS}=") else [arg])]
    while remaining:
        arg = remaining.pop(0)
        if arg == _FROM_TRANSFORMERS and remaining:
            yield from (remaining.pop(0), "--model.family", "transformers")
        elif arg == "--":
            yield from (arg, *remaining)
            return
        elif arg in switches:
            yield f"{arg}={remaining.pop(0) if remaining[:1] in (['true'], ['false']) else 'true'}"
        elif arg.startswith("--no-") and f"--{arg.removeprefix('--no-')}" in switches:
            yield f"--{arg.removeprefix('--no-')}=false"
        else:
            yield arg
            if arg in options and not options[arg].is_flag and remaining:
                yield remaining.pop(0)  # the option's value, even if it looks like an option


COMMON = ("mesh.data", "mesh.pipe", "mesh.row", "mesh.col", "batch.global_size", "batch.microbatch_size", "train.steps",
          "train.epochs", "train.learning_rate", "train.schedule", "train.warmup_steps", "optim.clip_norm", "precision",
          "optim.algorithm", "optim.offload", "optim.shard", "memory.recompute", "model.pretrained", "model.sequence",
          "lora.rank", "data.task", "data.corpus", "data.train", "data.tokenizer", "elastic.freeze", "checkpoint.every",
          "resume", "log.every", "verbose", "run_dir")
"""Settings that --help shows, with the first sentence of each; --help-all and --help-section show the rest."""
OF_EVALUATION = ("mesh.data", "mesh.pipe", "mesh.row", "mesh.col", "batch.global_size", "batch.microbatch_size",
                 "train.eval_sequences", "precision", "data.eval", "data.corpus")
"""Settings of `evaluate`."""
OF_DATA = ("data.task", "data.corpus", "data.train", "data.eval", "data.text_column", "data.tokenizer", "data.packing",
           "data.max_bytes", "data.cache_dir", "model.vocab", "model.sequence")
"""Settings of `data prepare`."""


def _show_settings(context: click.Context, option: click.Parameter, value: str | bool | None) -> None:
    """Callback of --help-all, a flag, and --help-section."""
    if value and not context.resilient_parsing:
        context.meta[_SECTION] = _ALL if value is True else value
        click.echo(context.get_help(), color=context.color)
        context.exit()


_SECTION = "ranvier.cli.options.section"
_ALL = "all"


class SettingsCommand(click.Command):
    """A command with every field of the run as a flag. Its help lists the most common flags, all, or a section's."""

    def __init__(self, *args: Any, common: Sequence[str] = COMMON, **kwargs: Any) -> None:
        """Make the command with its options. common: the settings that --help lists."""
        super().__init__(*args, **kwargs)
        self.common = common
        for setting in read.settings().values():
            text = f"{setting.help} [{setting.expected}; default {read.as_text(setting.default) or 'empty'}]"
            kind = Switch if setting.is_switch else click.Option
            self.params.append(kind([f"--{setting.flag}", setting.name.replace(".", "__")], type=str,
                                    metavar="[true|false]" if setting.is_switch else "VALUE", help=text,
                                    shell_complete=_values(setting)))
        for name in aliases.NAMES:
            self.params.append(click.Option([f"--{read.flag(name)}", name.replace(".", "__")], type=str, hidden=True))
        self.sections = list(dict.fromkeys(_section(setting.name) for setting in read.settings().values()))
        self.params += [
            click.Option(["--help-all"], is_flag=True, expose_value=False, is_eager=True, callback=_show_settings,
                         help="Show all settings, and exit."),
            click.Option(["--help-section"], type=click.Choice(self.sections), expose_value=False, is_eager=True,
                         callback=_show_settings, metavar="NAME", help="Show the settings of one section.")]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse `args`, in which switches may have values."""
        return super().parse_args(ctx, list(_with_values(args, self.get_params(ctx))))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the command's own options and the most common settings; or all settings of a section, or of all."""
        wanted, settings = ctx.meta.get(_SECTION), read.settings()
        groups: dict[str, list[tuple[str, str]]] = {"Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            setting = settings.get((parameter.name or "").replace("__", "."))
            if record is None or not isinstance(parameter, click.Option):
                continue
            if setting is None:
                groups["Options"].append(record)
            elif wanted is None and setting.name in self.common:
                groups.setdefault("Common settings", []).append((f"--{setting.flag}", _first_sentence(setting.help)))
            elif wanted in (_ALL, _section(setting.name)):
                groups.setdefault(_section(setting.name).capitalize(), []).append(record)
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)
        if wanted is None:
            formatter.write_paragraph()
            formatter.write_text(f"{len(settings)} settings in all, in the sections {', '.join(self.sections)}: "
                                 f"{ctx.command_path} --help-section NAME, or --help-all.")


def _section(name: str) -> str:
    """The section of a setting; settings at the top level are in the section of the run."""
    return name.rpartition(".")[0] or "run"


def _first_sentence(text: str) -> str:
    """Up to the first full stop, colon or parenthesis."""
    return re.split(r"(?<=\w\w)[.:;] | \(|\.$", text, maxsplit=1)[0]


def read_recipe(recipe: str, flags: Mapping[str, str | None], *, allow_code: bool) -> tuple[str, read.Merged]:
    """The recipe's short name, and the run with the origin of each setting.

    flags: text of each flag by the name that `SettingsCommand` gives it; None if not given. allow_code: the option.
    ConfigError if the recipe cannot be read.
    """
    given = {name.replace("__", "."): text for name, text in flags.items() if text is not None}
    name, layer = read.load(recipe, keep_folder=given.get("resume") == "auto", allow_code=allow_code)
    return name, read.merge([layer, read.Layer(origin="flag", values=given, is_text=True)])


def use_fp32_on_cpu(resolved: read.Merged) -> read.Merged:
    """`resolved` in fp32 if it would run on a CPU in the bf16 of a preset or of a folder: there bf16 needs more memory,
    for additional master copies, and is slower on most CPUs."""
    import torch

    from ranvier.launch.cuda_environment import cuda_defaults

    os.environ.update(cuda_defaults(os.environ))  # CUDA reads them at its first use, which is below
    origin, run = resolved.origins["precision"], resolved.run
    if not origin.startswith(("preset ", "folder ")) or (run.launch.device != "cpu" and torch.cuda.is_available()):
        return resolved
    return replace(resolved, run=replace(run, precision="fp32"),
                   origins={**resolved.origins, "precision": f"{origin}, on a CPU"})


def read_valid_recipe(recipe: str, flags: Mapping[str, str | None], *, allow_code: bool) -> tuple[str, read.Merged]:
    """`read_recipe` that raises ConfigProblems for values that cannot be read."""
    name, resolved = read_recipe(recipe, flags, allow_code=allow_code)
    if resolved.problems:
        raise ConfigProblems(resolved.problems)
    return name, resolved
