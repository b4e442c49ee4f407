"""The command `ranvier` and its subcommands; --help imports no large package.

Exit codes: 0 success, 1 the run failed, 2 a user error, 130 Ctrl-C. User errors are printed on standard error, one line
each; with --json they are also the document on standard output.
"""

from __future__ import annotations

import atexit
import errno
import gc
import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

import click

from ranvier import __version__
from ranvier.cli.check_command import check
from ranvier.cli.data import data
from ranvier.cli.doctor import doctor
from ranvier.cli.evaluate import evaluate
from ranvier.cli.export import export_run
from ranvier.cli.generate import generate
from ranvier.cli.import_ import import_model
from ranvier.cli.join import join
from ranvier.cli.plan import plan
from ranvier.cli.problems import ConfigProblems, print_error, print_problems
from ranvier.cli.resize import resize
from ranvier.cli.simulate import simulate
from ranvier.cli.train import train
from ranvier.cli.watch import watch
from ranvier.errors import RanvierError
from ranvier.system.terminal import outlive_readers

if TYPE_CHECKING:
    from ranvier.world import World

_CONNECT_THREAD = "ranvier-connect"
"""Name of threads that wait in torch's C++ code for another rank (launch/stores, comm/torch_backend)."""


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command line `args` (None for that of this process) and exit."""
    outlive_readers()
    # Imports, and counting a model, create very many persistent objects and few cycles: with Python's own thresholds
    # collections take a fifth of the time of `check`. Ranks restore the thresholds (`work_as_rank`).
    gc.set_threshold(200_000, 20, 100)
    atexit.register(gc.freeze)  # so that the final collections, half a CPU second, skip torch's objects
    code = run_command(args)
    if any(thread.name == _CONNECT_THREAD for thread in threading.enumerate()):
        # Its return from C++ while the interpreter ends would abort the process.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def run_command(args: Sequence[str] | None = None, *, change_world: Callable[[World], World] | None = None) -> int:
    """Run the command line `args` (None for that of this process); returns the exit code. Errors are printed.

    change_world: applied by `train` to the world of each rank before its use; for fault injection.
    """
    words = sys.argv[1:] if args is None else args
    as_json = "--json" in words
    try:
        _check_characters(words)
        return command.main(args=args, prog_name="ranvier", standalone_mode=False, obj=change_world) or 0
    except ConfigProblems as error:
        print_problems(error.problems, as_json=as_json)
        return 2
    except RanvierError as error:
        print_problems([error], as_json=as_json)
        return 2
    except OSError as error:  # for a path that cannot even be looked up, from `Path.is_file` and similar calls
        if error.filename is None or error.errno not in (errno.EACCES, errno.ENAMETOOLONG):
            raise
        print_problems([RanvierError(f"cannot be used: {error.strerror}", code="path-unusable",
                                     where=os.fsdecode(error.filename),
                                     remedy="Name a path that this user may access.")], as_json=as_json)
        return 2
    except click.exceptions.UsageError as error:
        text = _usage_text(error)
        if type(error).__name__ == "NoArgsIsHelpError":  # the help of a group; click 8.1 prints it itself
            error.show()
        else:
            print_error(text)
            if as_json:
                print(json.dumps({"errors": [{"what": text}]}))
        return 2
    except (click.Abort, KeyboardInterrupt):
        return 130


def _check_characters(words: Sequence[str]) -> None:
    """UsageError for a word that cannot be passed to a process, such as one with a null character."""
    for word in words:
        try:
            is_possible = b"\0" not in os.fsencode(word)
        except UnicodeEncodeError:
            is_possible = False
        if not is_possible:
            raise click.UsageError(f"no command line can contain the word {word!a:.80}")


def _usage_text(error: click.exceptions.UsageError) -> str:
    """The message for a wrong command line. It names the setting for another program's name of it, and the possible
    values of a missing RECIPE."""
    from ranvier.config.aliases import NAMES
    from ranvier.config.read import flag, name_elsewhere, recipe_names

    if isinstance(error, click.exceptions.NoSuchOption):
        if (setting := name_elsewhere(error.option_name.removeprefix("--"))) is not None:
            return f"No such option '{error.option_name}'. Did you mean '--{flag(setting)}'?"
        known = [name for name in error.possibilities or () if name.removeprefix("--") not in NAMES]
        return click.exceptions.NoSuchOption(error.option_name, possibilities=known, ctx=error.ctx).format_message()
    if (isinstance(error, click.exceptions.MissingParameter) and error.param is not None
            and error.param.name == "recipe"):
        return (f"Missing argument 'RECIPE': one of {', '.join(recipe_names())}; a preset (docs/models.md); a folder "
                "in Hugging Face format; a .toml file; or module:function.")
    return error.format_message().replace("integer range", "whole number").replace("float range", "number")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="ranvier")
def command() -> None:
    """Train neural networks that are too large, or too slow, for one device.

    \b
    Examples:
      ranvier train gpt-tiny --train.steps 20 --run-dir runs/first
      ranvier train gpt-tiny --mesh.data 2 --mesh.pipe 2 --run-dir runs/second
      ranvier generate runs/first --prompt "def "
      ranvier check gpt-12b --ranks 48
      ranvier plan gpt2-small --cluster h100 --ranks 16 --explain

    `ranvier COMMAND --help` describes a command.
    """


for _subcommand in (train, check, plan, simulate, generate, evaluate, export_run, import_model, resize, join, watch,
                    data, doctor):
    command.add_command(_subcommand)
