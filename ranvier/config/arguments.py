"""Errors for those who call Ranvier from Python: settings by the arguments that have them, rather than by flags.

    pipeline.in-flight                              Pipeline(in_flight=...)
    Set --optim.clip-norm 0                         Set Optim(clip_norm=0)

Settings are checked in one place, whoever has made them; their errors speak of flags until they leave `ranvier.start`
or the engine.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Concatenate, ParamSpec, TypeVar

from ranvier.errors import RanvierError

_CALLS = {"mesh": "Mesh", "tensor": "TensorParallel", "optim": "Optim", "guard": "Guard", "pipeline": "Pipeline",
          "memory": "Memory", "launch": "ranvier.start", "comm": "ranvier.start"}
"""Section of a run's settings -> what takes its fields as arguments."""
_PHRASES = {"--resume auto": "Checkpoints.load()", "--resume PATH": "Checkpoints.load(path)",
            "--precision bf16": "Engine(dtype=torch.bfloat16)", "--precision": "Engine(dtype=...)",
            "--model.float8 false": "Engine(float8=False)", "model.float8": "Engine(float8=...)",
            "--train.learning-rate": "Engine(learning_rate=...)",
            "--batch.microbatch-size": "the size of microbatches"}
_WORDS = ("none", "auto", "cpu", "cuda", "torch", "mpi", "local", "stationary", "summa", "megatron", "stop", "skip",
          "rollback", "fp32", "half", "adamw", "sgd", "lion", "muon", "adafactor")
_FLAG = re.compile(rf"--({'|'.join(_CALLS)})\.([a-z]+(?:-[a-z]+)*)(?: (\d+|true|false|{'|'.join(_WORDS)})\b)?")
_SETTING = re.compile(rf"({'|'.join(_CALLS)})\.([a-z]+(?:-[a-z]+)*)")
_TWICE = re.compile(r"\b([\w.]+)\(([^()]+)\) \1\(")

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
AnEngine = TypeVar("AnEngine")


def in_python(text: str, *, caller: str) -> str:
    """`text` with arguments in the place of flags, and of a setting where that is all of it. caller: the function that
    has failed, which takes those that several take."""
    for flag, phrase in _PHRASES.items():
        text = text.replace(flag, phrase)
    if setting := _SETTING.fullmatch(text):
        return _argument(setting[1], setting[2], None, caller)
    return _TWICE.sub(r"\1(\2, ", _FLAG.sub(lambda found: _argument(found[1], found[2], found[3], caller), text))


def _argument(section: str, field: str, value: str | None, caller: str) -> str:
    call = caller if field == "timeout-seconds" else _CALLS[section]
    if value is not None and not value.isdigit():
        value = {"true": "True", "false": "False"}.get(value, repr(value))
    return f"{call}({field.replace('-', '_')}={value or '...'})"


@contextmanager
def told_in_python(caller: str, *, unless: bool = False) -> Iterator[None]:
    """Errors that leave this block name arguments. unless: the command called, whose user knows flags."""
    try:
        yield
    except RanvierError as error:
        if not unless:
            error.reword(functools.partial(in_python, caller=caller))
        raise


def of_engine(method: Callable[Concatenate[AnEngine, Parameters], Result]
              ) -> Callable[Concatenate[AnEngine, Parameters], Result]:
    """A method of an engine whose errors name arguments, unless the engine has `flags`."""
    @functools.wraps(method)
    def call(engine: AnEngine, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with told_in_python("Engine", unless=bool(kwargs.get("flags", getattr(engine, "flags", False)))):
            return method(engine, *args, **kwargs)

    return call


def of_function(caller: str) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Of a function: its errors name arguments, unless it is called with `flags`."""
    def decorate(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        @functools.wraps(function)
        def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            with told_in_python(caller, unless=bool(kwargs.get("flags"))):
                return function(*args, **kwargs)

        return call

    return decorate
