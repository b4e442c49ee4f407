"""Permission to name Python objects in settings: importing a module runs it, so a user must allow it.

    flags, recipes as module:function, shipped recipes    may name objects
    TOML files                                            with --allow-code, or if a flag names the object again
    checkpoints                                           never: a flag must name the object again

`ranvier.config.read.merge` refuses the value of any other layer, so that no command gets it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Literal

from ranvier.config.named_object import is_object_name, package_exists
from ranvier.errors import ConfigError

Permission = Literal["allowed", "on request", "never"]
"""Whether values of a layer may name objects; on request: with --allow-code."""

OBJECTS = ("model.family", "data.task", "data.form", "optim.algorithm", "elastic.freeze")
"""Settings whose value is an object whenever it has the form module:name."""
CORPORA = ("data.corpus", "data.mixture", "data.eval", "data.eval_sets")
"""Settings whose values may be objects, or data sets of the form NAME:CONFIGURATION."""


def objects_in(name: str, value: object) -> list[str]:
    """The objects that a value of the setting `name` names. Nothing is imported."""
    if name not in (*OBJECTS, *CORPORA):
        return []
    entries = value if isinstance(value, (list, tuple)) else (value,)
    words = [word for entry in entries if isinstance(entry, str) for word in entry.split("=") if is_object_name(word)]
    return words if name in OBJECTS else [word for word in words if names_corpus(word)]


def names_corpus(text: str) -> bool:
    """Whether `text` is an object: it has the form module:name, its package can be found, and no file has this name.
    Data sets of Hugging Face have names of the same form, as NAME:CONFIGURATION."""
    return is_object_name(text) and not os.path.exists(text) and package_exists(text)


def objects_of(values: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """(setting, object) for each object that the settings name; values: by dotted name."""
    for name in (*OBJECTS, *CORPORA):
        for found in objects_in(name, values.get(name)):
            yield name, found


def problem(name: str, value: object, origin: str, permission: Permission) -> ConfigError | None:
    """The error for a value from `origin` that names objects without permission; None if it is allowed."""
    if permission == "allowed" or not objects_in(name, value):
        return None
    flag = name.replace("_", "-")
    text = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    switch = ", or pass `--allow-code`, for all code that the file names" if permission == "on request" else ""
    return ConfigError(f"names code, but {origin} has no permission for that", code="code-not-allowed", where=flag,
                       value=text, remedy=f"If you trust it, name it yourself: `--{flag} {text}`{switch}.")
