"""Sections of the configuration: frozen dataclasses whose values are checked, with errors for Python's callers.

    @section
    class Pipeline: ...

    Pipeline(in_flight=0)       ConfigError: Pipeline(in_flight=...): must be a whole number of at least 1, or auto

The words for what a value must be are also those of `ranvier.config.read`, which reads flags and recipes.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, dataclass_transform, get_args, get_origin, get_type_hints

import annotated_types
from pydantic import ConfigDict, ValidationError
from pydantic.dataclasses import dataclass

from ranvier.errors import ConfigError

Section = TypeVar("Section")


@dataclass_transform(kw_only_default=True, frozen_default=True)
def section(cls: type[Section]) -> type[Section]:
    """Make a class a frozen, keyword-only dataclass that checks its fields. A value that does not fit, and a name that
    is no field, is a ConfigError that names the argument; so is one in `dataclasses.replace`."""
    config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    made: Any = dataclass(frozen=True, kw_only=True, config=config)(cls)
    made.__init__ = _checked(made.__init__)
    found: type[Section] = made
    return found


def _checked(construct: Callable[..., None]) -> Callable[..., None]:
    @wraps(construct)
    def init(self: Any, *args: Any, **values: Any) -> None:
        try:
            construct(self, *args, **values)
        except ValidationError as error:
            raise _refusal(type(self), error) from None

    return init


def _refusal(cls: type, error: ValidationError) -> ConfigError:
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0]) if first["loc"] else ""
    annotation = get_type_hints(cls, include_extras=True).get(name)
    argument = f"{cls.__name__}({name}=...)"
    if annotation is None:
        return ConfigError(f"is not an argument of {cls.__name__}", code="unknown-argument", where=argument,
                           value=first["input"],
                           remedy=f"Choose among {', '.join(field.name for field in fields(cls))}.")
    return ConfigError(f"must be {describe(annotation)}", code="malformed-argument", where=argument,
                       value=first["input"],
                       remedy=f"Give a value of this form, or leave it out for {getattr(cls, name)!r}.")


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """The types that a field may have: those of a union, or the one type."""
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def bare(annotation: Any) -> Any:
    """A type without its bounds: int for Annotated[int, Ge(1)]."""
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def words(annotation: Any) -> list[str]:
    """The words that a field, or an item of its list, may have, of those that are listed: "fp32", "bf16", "fp16"."""
    kinds = [kind for one in map(bare, alternatives(annotation))
             for kind in (map(bare, get_args(one)) if get_origin(one) is tuple else [one])]
    return [str(word) for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]


def describe(annotation: Any) -> str:
    """Description of valid values: "a whole number of at least 1, or auto"."""
    return ", or ".join(map(_describe_one, alternatives(annotation)))


def _describe_one(annotation: Any) -> str:
    kind, bounds = bare(annotation), annotation.__metadata__ if get_origin(annotation) is Annotated else ()
    if get_origin(kind) is Literal:
        *most, last = map(str, get_args(kind))
        return f"{', '.join(most)} or {last}" if most else last
    if kind is str and bounds:
        return "a metric such as eval_loss" if "eval" in str(bounds) else "module:function"
    if get_origin(kind) is tuple:
        items = get_args(kind)
        one = _describe_one(items[0])
        return f"a list, each {one}" if items[-1] is Ellipsis else f"{len(items)} values, each {one}"
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false", Path: "a path",
             types.NoneType: "none"}
    if kind not in names:
        return f"a {kind.__name__}"
    limits = [f"{word} {getattr(bound, key):g}" for bound in bounds for limit, word, key in (
        (annotated_types.Ge, "of at least", "ge"), (annotated_types.Gt, "above", "gt"),
        (annotated_types.Le, "of at most", "le"), (annotated_types.Lt, "below", "lt")) if isinstance(bound, limit)]
    return " ".join([names[kind], " and ".join(limits)]).strip()
