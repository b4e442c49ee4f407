"""Python objects that a recipe names as `module:name`: imported, called if they are functions, and checked.

Installed packages and PYTHONPATH are searched first, then the current directory, on every rank and with every launcher:
a file there cannot replace a package. The name may stand for

    an object      with the attributes that the protocol requires; it takes no options
    a class        its instance is made with the options as keyword arguments
    a function     it is called in the same way, and returns the object

    family = "mixer:family"                def family(depth: int = 2, gated: bool = False) -> ModelFamily:
    options = ["depth=4", "gated=true"]        return Mixer(depth=depth, gated=gated)

Importing a module runs it; `ranvier.config.named_code` decides which sources may name one.
"""

from __future__ import annotations

import difflib
import importlib
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from ranvier.errors import ConfigError, RanvierError
from ranvier.system.untrusted_file import parse_toml

_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def is_object_name(text: str) -> bool:
    """Whether `text` has the form `module:name`."""
    return _NAME.fullmatch(text) is not None


def package_exists(text: str) -> bool:
    """Whether the package or module that `module:name` begins with can be found, or, for a folder without __init__.py,
    which has no objects itself, the module in it. Imports nothing."""
    first, *inner = text.partition(":")[0].split(".")
    try:
        spec = find_spec(first) or PathFinder.find_spec(first, [os.getcwd()])
    except ValueError:  # for __main__ of a script
        return False
    for name in inner:
        if spec is not None and spec.loader is None:
            spec = PathFinder.find_spec(name, list(spec.submodule_search_locations or ()))
    return spec is not None and spec.loader is not None and first != "__main__"  # `python -m` has a spec for it


@cache
def load_object(text: str, setting: str, attributes: Sequence[str], options: tuple[str, ...] = ()) -> object:
    """The object that `text` names, the same one each time; arguments and errors are those of `make_object`."""
    return make_object(text, setting, attributes, options)


def make_object(text: str, setting: str, attributes: Sequence[str], options: tuple[str, ...] = ()) -> object:
    """The object that `text` names; a new one each time if that is a class or a function.

    Args:
        text: `module:name`.
        setting: the setting that has this value, for messages: "model.family".
        attributes: what the object must have; those that end in "()" must be callable.
        options: NAME=VALUE, keyword arguments of the function or class (`parse_options`).

    ConfigError if the module cannot be imported or has no such name, the call fails, or the object lacks an attribute.
    """
    assert ":" in text, f"{setting} lists {text}, but no code makes its object: see CONTRIBUTING.md, How to add"
    found = _attribute(text, setting)
    keywords = parse_options(options, setting)
    if not isinstance(found, type) and (missing_attribute(found, attributes) is None or not callable(found)):
        if options:
            raise ConfigError("takes no options: it is an object, and neither a function nor a class",
                              code="object-without-options", where=setting, value=text,
                              remedy=f"Leave out `--{_options_setting(setting)}`, or name a function that takes them.")
    else:
        with blame_user_code(text, setting, "the call"):
            found = found(**keywords)
    missing = missing_attribute(found, attributes)
    if missing is not None:
        raise ConfigError(f"has no {missing}: it gives a {type(found).__name__}", code="object-lacks-attribute",
                          where=setting, value=text,
                          remedy=f"Give it {', '.join(attributes)}; docs/extending.md describes them.")
    return found


def missing_attribute(found: object, attributes: Sequence[str]) -> str | None:
    """The first of `attributes` that `found` does not have, in words; None if it has all of them."""
    for name in attributes:
        bare = name.removesuffix("()")
        if not hasattr(found, bare):
            return f"{'method' if name != bare else 'attribute'} `{bare}`"
        if name != bare and not callable(getattr(found, bare)):
            return f"method `{bare}`, but an attribute of this name"
    return None


def parse_options(options: Sequence[str], setting: str) -> Mapping[str, object]:
    """NAME=VALUE as keyword arguments. A value is read as TOML (5, 0.1, true, [1, 2], "text"), and is a string if it is
    not valid TOML. ConfigError for an option of another form, or a duplicate name."""
    where, found = _options_setting(setting), {}
    for option in options:
        name, equals, value = (part.strip() for part in option.partition("="))
        if not equals or not name.isidentifier() or name in found:
            raise ConfigError("must be NAME=VALUE, each name once", code="malformed-option", where=where, value=option,
                              remedy=f"Write for example `--{where} depth=4,gated=true`.")
        found[name] = _value(value)
    return found


@contextmanager
def blame_user_code(text: str, setting: str, doing: str) -> Iterator[None]:
    """Turn an exception of a user's object into a ConfigError with the file and line; RanvierErrors pass unchanged.

    doing: the operation, in words: "the call", "`model`".
    """
    try:
        yield
    except RanvierError:
        raise
    except Exception as error:
        raise ConfigError(f"raised in {doing}: {_first_line(error)}", code="object-raised", where=setting, value=text,
                          remedy=f"Correct it {_place(error)}.") from error


def import_named(module: str, name: str) -> Any:
    """The attribute of a module, which may be in the current directory. Raises the errors of the import, or
    AttributeError."""
    _search_current_directory()
    return getattr(importlib.import_module(module), name)


def call_named(text: str, where: str, code: str) -> Any:
    """Call the function of `module:function` without arguments and return its result. ConfigError if it cannot be
    imported, or, with this code, if the call raises; RanvierErrors pass unchanged."""
    function: Any = _attribute(text, where)
    try:
        return function()
    except RanvierError:
        raise
    except Exception as error:
        was_called = error.__traceback__ is not None and error.__traceback__.tb_next is not None
        raise ConfigError(f"cannot be called: {_first_line(error)}", code=code, where=where, value=text,
                          remedy=f"Correct it {_place(error)}." if was_called else
                          "Name a function that takes no arguments.") from error


def _attribute(text: str, setting: str) -> object:
    module, _, name = text.partition(":")
    if not is_object_name(text):
        raise ConfigError("does not have the form module:name", code="object-name-form", where=setting, value=text,
                          remedy="Name an object of a module, such as my_models:small.")
    _search_current_directory()
    try:
        imported = importlib.import_module(module)
    except RanvierError:
        raise
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{module}.".startswith(f"{missing}."):
            raise ConfigError(
                f"names the module {module}, which cannot be found", code="module-not-found", where=setting, value=text,
                remedy="Start the run in the folder of the module, or add the folder to PYTHONPATH.") from error
        raise ConfigError(f"names a module that cannot be imported: {_first_line(error)}", code="module-not-importable",
                          where=setting, value=text, remedy=f"Correct it {_place(error)}.") from error
    if not hasattr(imported, name):
        raise ConfigError(f"names something that the module {module} does not have: {name}", code="name-not-in-module",
                          where=setting, value=text, remedy=_similar(imported, name))
    found: object = getattr(imported, name)
    return found


def _similar(module: ModuleType, name: str) -> str:
    near = difflib.get_close_matches(name, [attribute for attribute in vars(module) if not attribute.startswith("_")],
                                     n=1)
    return (f"Did you mean {module.__name__}:{near[0]}?" if near else
            f"Name a function, class or object of {module.__name__}.")


def _search_current_directory() -> None:
    # The console script of an environment, unlike `python -m`, does not search it; nor do the ranks of some launchers.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # never first: a file there would replace a package of its name


def _options_setting(setting: str) -> str:
    return f"{setting.partition('.')[0]}.options"


def _value(text: str) -> object:
    try:
        return parse_toml(f"value = {text}")["value"]
    except ValueError:
        return text


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}".removesuffix(": ")


def _place(error: BaseException) -> str:
    """The line to show a user: the last line of the traceback, or the line of a syntax error."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"in {error.filename}, line {error.lineno}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
    return f"in {frames[-1].filename}, line {frames[-1].lineno}"
