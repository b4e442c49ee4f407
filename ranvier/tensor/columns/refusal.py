"""The error for an operation that cannot be computed on a sharded tensor; it names the module and the line."""

from __future__ import annotations

import sys
from types import FrameType
from typing import NoReturn

from torch import nn

from ranvier.errors import ModelError

LOCAL_MAP = ("Compute what each column can compute from its own shards by ranvier.tensor.layers.local_map(function, x)"
             ", which gives the function plain tensors; use the layers of ranvier.tensor.layers for what crosses a dim "
             "that is sharded over columns.")
"""The remedy for what has no rule."""
_INSIDE = ("torch.", "ranvier.tensor.column", "ranvier.tensor.boundaries", "ranvier.tensor.closed_parameters",
           "ranvier.optim.torch_functions", "contextlib", "functools")
"""Modules whose lines are no place in a user's code."""


def refuse(what: str, layout: object, remedy: str, where: str | None = None) -> NoReturn:
    """Raise a ModelError for what cannot be computed from one column's shard.

    what: the fault, as a clause. layout: shapes and layouts of the operands, as text. where: the place in the model;
    None for the module and the line of the user's code that run now.
    """
    raise ModelError(what, code="not-over-columns", where=where or _running_module(), value=layout, remedy=remedy)


def _running_module() -> str:
    """The innermost running module of a split model, and the line of its code."""
    frame: FrameType | None = sys._getframe(2)
    line = name = None
    while frame is not None and (name is None or line is None):
        module = frame.f_globals.get("__name__", "")
        inside = module == "torch" or module.startswith(_INSIDE)
        if line is None and not inside:
            line = f"{frame.f_code.co_filename.rpartition('/')[2]}, line {frame.f_lineno}"
        owner = frame.f_locals.get("self")
        if name is None and isinstance(owner, nn.Module):
            name = owner.__dict__.get("_split_name")  # set by `ranvier.tensor.boundaries.named_module`
        frame = frame.f_back
    return f"{name or 'a split model'} ({line})"
