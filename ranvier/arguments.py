"""Checks arguments of public functions by their annotations, and describes valid values.

    def blocks_of(module: nn.Module, cut: Sequence[str] | Literal["auto"] = "auto") -> dict[str, nn.Module]:
        check_arguments(blocks_of, locals())

    blocks_of(module, cut=3)        ConfigError: blocks_of(cut=...): must be a list, each text, or auto (got 3)

Settings in flags and recipes have the same descriptions (`ranvier.config.read`).
"""

from __future__ import annotations

import inspect
import operator
import sys
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import annotated_types

from ranvier.errors import ConfigError


def check_arguments(function: Callable[..., object], given: Mapping[str, object], *, but: Collection[str] = ()) -> None:
    """Raise ConfigError for the first argument that does not fit its annotation.

    function: a function, or a dataclass. given: its `locals()`, or its fields. but: arguments that the function checks
    itself.
    """
    for name, annotation in _annotations(function).items():
        if name not in but and not fits(given[name], annotation):
            owner = function.__qualname__.removesuffix(".__init__")
            default = inspect.signature(function).parameters[name].default
            raise malformed_argument_error(f"{owner}({name}=...)", annotation, given[name], default)


def malformed_argument_error(where: str, annotation: Any, value: object, default: object) -> ConfigError:
    """The error for a value that does not fit. default: `inspect.Parameter.empty` if there is none."""
    left_out = "" if default is inspect.Parameter.empty else f", or leave it out for {default!r}"
    text = repr(value)
    return ConfigError(f"must be {describe(annotation)}", code="malformed-argument", where=where,
                       value=text if value is None else value if len(text) < 100 and "\n" not in text
                       else type(value).__name__, remedy=f"Give a value of this form{left_out}.")


@cache
def _annotations(function: Callable[..., object]) -> Mapping[str, Any]:
    """Annotations of the arguments whose types exist at run time, and not only for type checkers."""
    plain, found = inspect.unwrap(function), dict[str, Any]()
    for name, annotation in inspect.get_annotations(plain).items():
        with suppress(NameError):
            found |= get_type_hints(types.SimpleNamespace(__annotations__={name: annotation}),
                                    globalns=vars(sys.modules[plain.__module__]), include_extras=True)
    found.pop("return", None)
    return found


# --- whether a value fits ---------------------------------------------------------------------------------------------


def fits(value: Any, annotation: Any) -> bool:
    """Whether `value` fits the annotation, or counts as fitting: NumPy's numbers, and tensors of one number."""
    return any([_fits_one(value, *alternative) for alternative in _read(annotation)])


@cache
def _read(annotation: Any) -> list[tuple[Any, Any, tuple[Any, ...], tuple[Any, ...]]]:
    """For each type of a union: the type without its bounds, its origin, its arguments, and the bounds."""
    return [(kind, get_origin(kind), get_args(kind), getattr(alternative, "__metadata__", ()))
            for alternative in alternatives(annotation) for kind in [without_bounds(alternative)]]


def _fits_one(value: Any, kind: Any, origin: Any, items: tuple[Any, ...], bounds: tuple[Any, ...]) -> bool:
    if kind is str:
        return isinstance(value, str)
    if kind is Any:
        return True
    if kind in (int, float):
        number = _number(value, kind)
        return number is not None and all(holds(number, getattr(bound, key)) for bound in bounds
                                          for limit, key, holds, _ in _LIMITS if isinstance(bound, limit))
    if kind is bool:
        return type(value).__name__ in ("bool", "bool_")  # the latter are NumPy's
    if kind is Path:
        return isinstance(value, (str, Path)) or hasattr(value, "__fspath__")
    if origin is Literal:
        return any(type(value) is type(word) and value == word for word in items)
    if origin is tuple and items[-1] is not Ellipsis:
        return isinstance(value, (tuple, list)) and len(value) == len(items) and all(map(fits, value, items))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return isinstance(value, Mapping) and all(fits(key, items[0]) and fits(value[key], items[1]) for key in value)
    if isinstance(origin, type) and issubclass(origin, Iterable):
        return (isinstance(value, Collection) and not isinstance(value, (str, bytes, Mapping))
                and getattr(value, "ndim", 1) > 0 and all(fits(item, items[0]) for item in value))
    if Callable in (kind, origin):
        return callable(value)
    kind = origin or kind
    return not isinstance(kind, type) or getattr(kind, "_is_protocol", False) or isinstance(value, kind)


def _number(value: Any, kind: type) -> int | float | None:
    """The number that a value is, or None."""
    if isinstance(value, bool) or not hasattr(type(value), "__index__" if kind is int else "__float__"):
        return None
    try:
        found: int | float = value.__index__() if kind is int else float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # tensors of several numbers, or on meta
        return None
    return found if found == found else None  # NaN


_LIMITS = ((annotated_types.Ge, "ge", operator.ge, "of at least"), (annotated_types.Gt, "gt", operator.gt, "above"),
           (annotated_types.Le, "le", operator.le, "of at most"), (annotated_types.Lt, "lt", operator.lt, "below"))
"""Bounds of a number: the attribute, the comparison and the description of each."""


# --- words ------------------------------------------------------------------------------------------------------------


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """The types that a field may have: those of a union, or the one type."""
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def without_bounds(annotation: Any) -> Any:
    """A type without its bounds: int for Annotated[int, Ge(1)]."""
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def literal_values(annotation: Any) -> list[str]:
    """The literal values that a field, or an item of its list, may have: "fp32", "bf16", "fp16"."""
    kinds = [kind for alternative in map(without_bounds, alternatives(annotation))
             for kind in (map(without_bounds, get_args(alternative)) if get_origin(alternative) is tuple
                          else [alternative])]
    return [str(word) for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]


def describe(annotation: Any) -> str:
    """Description of valid values: "a whole number of at least 1, or auto"."""
    return ", or ".join(map(_describe_one, alternatives(annotation)))


def _describe_one(annotation: Any) -> str:
    kind, bounds = without_bounds(annotation), annotation.__metadata__ if get_origin(annotation) is Annotated else ()
    if get_origin(kind) is Literal:
        *most, last = map(str, get_args(kind))
        return f"{', '.join(most)} or {last}" if most else last
    if kind is str and bounds:
        return "a metric such as eval_loss" if "eval" in str(bounds) else "module:function"
    if isinstance(origin := get_origin(kind), type) and issubclass(origin, Iterable):
        *items, last = get_args(kind)
        if issubclass(origin, Mapping):
            return "a dict"
        one = _describe_one((items or [last])[0])
        return f"{len(items) + 1} values, each {one}" if items and last is not Ellipsis else f"a list, each {one}"
    if Callable in (kind, origin):
        return "a function"
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false", Path: "a path",
             types.NoneType: "none"}
    if kind not in names:
        return f"a{'n' if kind.__name__[0] in 'AEIOU' else ''} {kind.__name__}"
    limits = [f"{word} {getattr(bound, key):g}" for bound in bounds for limit, key, _, word in _LIMITS
              if isinstance(bound, limit)]
    return " ".join([names[kind], " and ".join(limits)]).strip()
