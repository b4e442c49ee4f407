"""Names of settings in errors for callers from Python: the arguments that take the settings.

    pipeline.in-flight                              Pipeline(in_flight=...)
    --optim.clip-norm 0                             Optim(clip_norm=0)

Settings are checked in one place, for commands and Python; errors name them as flags until they leave `ranvier.start`
or the engine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from itertools import groupby
from types import NoneType
from typing import Concatenate, ParamSpec, TypeVar, get_type_hints

from ranvier.arguments import alternatives
from ranvier.config.run import Run
from ranvier.errors import NamedSetting, RanvierError, command_names

_CALLS = {"mesh": "Mesh", "tensor": "TensorParallel", "optim": "Optim", "guard": "Guard", "pipeline": "Pipeline",
          "memory": "Memory", "launch": "ranvier.start", "comm": "ranvier.start"}
"""Section of a run's settings -> the callable that takes its fields as arguments."""
_ARGUMENTS = {"precision": "dtype", "model.float8": "float8", "model.compile": "compile",
              "train.learning-rate": "learning_rate"}
"""Settings -> the engine's arguments for them."""
_DTYPES = {"fp64": "torch.float64", "fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
AnEngine = TypeVar("AnEngine")


@dataclass(frozen=True)
class PythonNames:
    """Names settings as arguments. caller: the function that has failed, named for an argument that several functions
    take."""

    caller: str

    def __call__(self, parts: Sequence[str | NamedSetting]) -> str:
        """The text of `parts`; adjacent settings of the same call become one call: Mesh(row=1, col=4)."""
        found = [self._call(part) if isinstance(part, NamedSetting) else ("", part) for part in parts]
        joined = [one for place, one in enumerate(found)
                  if not (one == ("", " ") and 0 < place < len(found) - 1
                          and found[place - 1][0] and found[place - 1][0] == found[place + 1][0])]
        return "".join(f"{call}({', '.join(text for _, text in group)})" if call else "".join(text for _, text in group)
                       for call, group in groupby(joined, key=lambda one: one[0]))

    def _call(self, setting: NamedSetting) -> tuple[str, str]:
        """The callable that takes a setting, and the argument; "" and a phrase if no argument does."""
        if setting.name == "batch.microbatch-size":
            return "", "the size of microbatches"
        if setting.name == "resume" and setting.is_flag:
            return "", "Checkpoints.load()" if setting.text == "auto" else "Checkpoints.load(path)"
        if setting.name in _ARGUMENTS:
            return "Engine", f"{_ARGUMENTS[setting.name]}={_DTYPES.get(setting.text) or _as_python(setting.value)}"
        section, _, field = setting.name.partition(".")
        if section not in _CALLS or not field.replace("-", "").isalpha():
            return "", str(setting)
        call = self.caller if field == "timeout-seconds" else _CALLS[section]
        value = None if setting.text == "none" and setting.name in _optional() else setting.value
        return call, f"{field.replace('-', '_')}={_as_python(value)}"


@functools.cache
def _optional() -> frozenset[str]:
    """The settings whose `none` is None in Python, and not a string."""
    sections = get_type_hints(Run)
    return frozenset(f"{name}.{field.replace('_', '-')}" for name in _CALLS for section in alternatives(sections[name])
                     if is_dataclass(section) for field, kind in get_type_hints(section).items()
                     if NoneType in alternatives(kind))


def _as_python(value: object) -> str:
    return "..." if value is ... else repr(value)


@contextmanager
def naming_arguments(caller: str, *, unless: bool = False) -> Iterator[None]:
    """A context in which errors name arguments. unless: the caller is a command, whose user knows flags."""
    try:
        yield
    except RanvierError as error:
        if not unless and error.names is command_names:
            error.names = PythonNames(caller)
        raise


def engine_method(method: Callable[Concatenate[AnEngine, Parameters], Result]
                  ) -> Callable[Concatenate[AnEngine, Parameters], Result]:
    """Decorate an engine's method so that its errors name arguments, unless the engine has `flags`."""
    @functools.wraps(method)
    def call(engine: AnEngine, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with naming_arguments("Engine", unless=bool(kwargs.get("flags", getattr(engine, "flags", False)))):
            return method(engine, *args, **kwargs)

    return call
