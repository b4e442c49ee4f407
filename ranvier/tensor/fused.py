"""Chains of elementwise operations of layers, which torch.compile fuses into as few kernels as it can.

A block on several rows or columns is not a single graph: its layers wait for collectives, and its own code computes on
tensors that carry their layout (`ranvier.tensor.columns`), which torch's tracer cannot follow. So a layer declares its
chains, which are functions of plain tensors without an autograd graph: forward and backward of a norm between its
collectives, of rotary embeddings, of a gated activation, of dropout with the residual sum.
"""

from __future__ import annotations

import threading
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from ranvier.errors import ModelError
from ranvier.tensor import kept_outputs

_Result = TypeVar("_Result")
BACKEND: str | Callable[..., Any] = "inductor"
"""A backend of torch.compile."""


class Fused:
    """Calls functions of plain tensors, compiled or not.

    Args:
        how: False: uncompiled; True: a function that cannot be compiled is a ModelError; "auto": it runs uncompiled,
            with a warning.
    """

    def __init__(self, how: bool | Literal["auto"]) -> None:
        self._how = how
        self.compiles = how is not False
        """Whether chains are compiled."""
        self._compiled: dict[Callable[..., Any], Callable[..., Any]] = {}
        if how is not False:
            from ranvier.system.compilation import watch  # imports torch's compiler, which takes seconds

            watch()

    @property
    def is_current(self) -> bool:
        """Whether it calls the chains of the block that is running."""
        return _current.calls is self

    def __call__(self, function: Callable[..., _Result], *args: Any) -> _Result:
        """`function(*args)`; it may change its arguments in place. A row without tokens has nothing to compile for."""
        kept_outputs.current().note_call()
        if not self.compiles or not all(arg.numel() for arg in args if isinstance(arg, Tensor)):
            return function(*args)
        if function not in self._compiled:
            self._compiled[function] = self._compile(function)
        found: _Result = self._compiled[function](*args)
        return found

    def _compile(self, function: Callable[..., _Result]) -> Callable[..., _Result]:
        own = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
        fused = torch.compile(own, fullgraph=True, dynamic=True, backend=BACKEND)

        def call(*args: Any) -> _Result:
            # detached tensors: the tracer follows a view to its base, which has a layout
            with torch._C.DisableTorchFunctionSubclass():
                args = tuple(arg.as_subclass(Tensor).data if isinstance(arg, Tensor) else arg for arg in args)
            try:
                found: _Result = fused(*args)
                return found
            except torch._dynamo.exc.TorchDynamoException as error:
                line = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
                if self._how is True:
                    raise ModelError(f"cannot be compiled: {line}", code="operations-not-compilable",
                                     where=f"{function.__module__}.{function.__name__}",
                                     remedy="Set `--model.compile false`.") from error
                warnings.warn(f"{function.__name__} runs uncompiled, because torch.compile cannot take it: {line}",
                              stacklevel=2)
                self._compiled[function] = function
                return function(*args)

        return call


class _Current(threading.local):
    """State of each thread: ranks may be threads, and recomputation runs a block in one of autograd's threads."""

    calls: Fused = Fused(False)


_current = _Current()


def current() -> Fused:
    """The `Fused` of the block that is running. A backward uses that of its forward."""
    return _current.calls


@contextmanager
def use_calls(calls: Fused) -> Iterator[None]:
    """Inside, layers call their chains by `calls`."""
    before, _current.calls = _current.calls, calls
    try:
        yield
    finally:
        _current.calls = before
