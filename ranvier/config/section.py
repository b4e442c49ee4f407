"""Sections of the configuration: frozen dataclasses whose values are checked, with errors for Python's callers.

    @section
    class Pipeline: ...

    Pipeline(in_flight=0)       ConfigError: Pipeline(in_flight=...): must be a whole number of at least 1, or auto
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, dataclass_transform, get_type_hints

from pydantic import ConfigDict, ValidationError
from pydantic.dataclasses import dataclass

from ranvier.arguments import malformed_argument_error
from ranvier.errors import ConfigError

Section = TypeVar("Section")


@dataclass_transform(kw_only_default=True, frozen_default=True)
def section(cls: type[Section]) -> type[Section]:
    """Make a class a frozen, keyword-only dataclass that checks its fields. An invalid value, or a name that is not a
    field, is a ConfigError that names the argument, also in `dataclasses.replace`."""
    config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False)
    made: Any = dataclass(frozen=True, kw_only=True, config=config)(cls)
    made.__init__ = _check_values(made.__init__)
    found: type[Section] = made
    return found


def _check_values(construct: Callable[..., None]) -> Callable[..., None]:
    @wraps(construct)
    def init(self: Any, *args: Any, **values: Any) -> None:
        try:
            construct(self, *args, **values)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise _refusal(type(self), str(first["loc"][0]) if first["loc"] else "", first["input"]) from None
        for name, value in values.items():  # pydantic accepts them as 1, 0 and the current directory
            kind = type(getattr(self, name, value))
            if (isinstance(value, bool) and kind is not bool) or (value == "" and issubclass(kind, Path)):
                raise _refusal(type(self), name, value)

    return init


def _refusal(cls: type, name: str, value: object) -> ConfigError:
    annotation = get_type_hints(cls, include_extras=True).get(name)
    argument = f"{cls.__name__}({name}=...)"
    if annotation is None:
        return ConfigError(f"is not an argument of {cls.__name__}", code="unknown-argument", where=argument,
                           value=value, remedy=f"Choose among {', '.join(field.name for field in fields(cls))}.")
    return malformed_argument_error(argument, annotation, value, getattr(cls, name))
