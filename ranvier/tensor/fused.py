"""Chains of elementwise operations of split layers, each compiled into as few kernels as torch.compile makes of it.

A block on several rows or columns is no graph: its layers wait for collectives, and its own code computes on tensors
that carry their layout by a change of class (`ranvier.tensor.columns`), which torch's tracer cannot follow. So a layer
names the chains between its collectives, which are functions of plain tensors without a graph of their own.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from ranvier.errors import ModelError

_Result = TypeVar("_Result")
BACKEND: str | Callable[..., Any] = "inductor"
"""Of torch.compile."""


class Fused:
    """Calls functions of plain tensors, compiled or not.

    Args:
        how: False: as they are; True: what cannot be compiled is a ModelError; "auto": it runs as it is, with a
            warning.
    """

    def __init__(self, how: bool | Literal["auto"]) -> None:
        self._how = how
        self._compiled: dict[Callable[..., Any], Callable[..., Any]] = {}
        if how is not False:
            from ranvier.system.compilation import watch  # imports torch's compiler, which takes seconds

            watch()

    def __call__(self, function: Callable[..., _Result], *args: Any) -> _Result:
        """`function(*args)`; it may change its arguments in place."""
        if self._how is False:
            return function(*args)
        if function not in self._compiled:
            self._compiled[function] = self._compile(function)
        found: _Result = self._compiled[function](*args)
        return found

    def _compile(self, function: Callable[..., _Result]) -> Callable[..., _Result]:

        own = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
        fused = torch.compile(own, fullgraph=True, dynamic=True, backend=BACKEND)

        def call(*args: Any) -> _Result:
            # tensors of their own: the tracer follows a view to its base, which has a layout
            with torch._C.DisableTorchFunctionSubclass():
                args = tuple(one.as_subclass(Tensor).data if isinstance(one, Tensor) else one for one in args)
            try:
                found: _Result = fused(*args)
                return found
            except torch._dynamo.exc.TorchDynamoException as error:
                line = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
                if self._how is True:
                    raise ModelError(f"cannot be compiled: {line}", where=f"{function.__module__}.{function.__name__}",
                                     remedy="Set --model.compile false.") from error
                warnings.warn(f"{function.__name__} runs uncompiled, because torch.compile cannot take it: {line}",
                              stacklevel=2)
                self._compiled[function] = function
                return function(*args)

        return call
