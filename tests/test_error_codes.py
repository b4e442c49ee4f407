"""Every error of the package has its own code, which a test triggers, and reads well for both audiences."""

import ast
import re
from collections import defaultdict
from functools import cache
from itertools import product
from pathlib import Path

import click

from ranvier.cli.main import command
from ranvier.config.python_names import PythonNames
from ranvier.config.read import settings
from ranvier.errors import NamedSetting, RanvierError, parse
from tests.sources import ROOT, nodes

TESTS = Path(__file__).parent


@cache
def classes():
    """The names of RanvierError and of every class that inherits from it."""
    bases = {node.name: {base.id for base in node.bases if isinstance(base, ast.Name)}
             for found in nodes().values() for node in found if isinstance(node, ast.ClassDef)}
    found = {"RanvierError"}
    while more := {name for name, of in bases.items() if of & found} - found:
        found |= more
    return found


@cache
def sites():
    """(place, call) of every error that the package creates."""
    return [(f"{path.relative_to(ROOT)}:{node.lineno}", node) for path, found in nodes().items() for node in found
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in classes()
            and all(keyword.arg is not None for keyword in node.keywords)]  # an error that is restored from its texts


def argument(call, name):
    return next((keyword.value for keyword in call.keywords if keyword.arg == name), None)


def texts(node):
    """The possible values of an expression for a text, with X for each field."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=parts):
            return ["".join(texts(part)[0] if isinstance(part, ast.Constant) else "X" for part in parts)]
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return [one + other for one in texts(left) for other in texts(right)]
        case ast.IfExp(body=body, orelse=other):
            return [*texts(body), *texts(other)]
    return ["X"]


@cache
def makers():
    """Functions that create an error with the code that is their first argument."""
    return {node.name for found in nodes().values() for node in found if isinstance(node, ast.FunctionDef)
            and "code" in [argument.arg for argument in node.args.args[:2]] and not node.name.startswith("__")}


@cache
def codes():
    """Code -> (place, texts of what is wrong, texts of the remedy) of its errors."""
    found = defaultdict(list)
    for place, call in sites():
        for code in texts(argument(call, "code")) if argument(call, "code") else []:
            found[code].append((place, texts(call.args[0]), texts(argument(call, "remedy"))))
    for path, inside in nodes().items():
        for node in inside:
            if (isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant)
                    and isinstance(node.args[0].value, str)
                    and ast.unparse(node.func).rpartition(".")[2] in makers()):
                code, *others = [texts(argument) for argument in node.args]
                found[code[0]].append((f"{path.relative_to(ROOT)}:{node.lineno}",
                                       [text for one in others for text in one if " " in text], ["X."]))
    found.pop("X", None)  # the code is passed on
    return found


def test_every_error_has_a_code():
    assert [place for place, call in sites() if argument(call, "code") is None] == []
    assert [code for code in codes() if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", code)] == []


def test_two_problems_have_two_codes():
    several = {code: [place for place, *_ in found] for code, found in codes().items()
               if len({tuple(what) for _, what, _ in found}) > 1}
    assert several == {}


def test_every_code_is_in_a_test():
    named = "\n".join(path.read_text() for path in TESTS.rglob("*.py") if path != Path(__file__))
    assert codes().keys() - set(re.findall(r"(?<=[\"'])[a-z0-9-]+(?=[\"'])", named)) == set(), (
        "trigger each of these errors in a test: with raises(code) of tests/errors.py")


@cache
def known():
    """Names that a text may contain: settings as in flags, and options of the commands."""
    options = {option.removeprefix("--") for part in command.commands.values() for parameter in part.params
               for option in parameter.opts if isinstance(parameter, click.Option)}
    return {setting.flag for setting in settings().values()} | options


COMMAND = re.compile(r"`ranvier [^`]*`")
SECTIONS = sorted({name.partition(".")[0] for name in settings() if "." in name})
UNMARKED = re.compile(rf"--[a-z][a-z-]+|(?<![\w./-])(?:{'|'.join(SECTIONS)})\.[a-z]+(?:-[a-z]+)*(?![\w(=./])")


def test_messages():
    """Each message serves both audiences: its settings are marked and exist, and it ends like a sentence."""
    faults = []
    for code, found in sorted(codes().items()):
        for place, whats, remedies in found:
            for what, remedy in product(whats, remedies):
                error = RanvierError(what, where="X", remedy=remedy, code=code)
                parts = [*parse(what), *parse(remedy)]
                plain = COMMAND.sub("", "".join(part for part in parts if isinstance(part, str)))
                faults += [f"{place}: not between backticks: {name}" for name in UNMARKED.findall(plain)
                           if name.removeprefix("--") in known()]
                faults += [f"{place}: does not exist: {part.name}" for part in parts if isinstance(part, NamedSetting)
                           and "X" not in part.name and part.name not in known()]
                as_command = str(error)
                error.names = PythonNames("Engine")
                for text in (as_command, str(error)):
                    print(text)
                    if "`--" in text or not text.endswith((".", "?", "X", ")")):
                        faults.append(f"{place}: does not read well: {text}")
    assert faults == []
