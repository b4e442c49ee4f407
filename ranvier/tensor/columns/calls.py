"""Arguments of torch functions, and the refusal of a call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

from torch import Tensor

from ranvier.tensor.columns.tensor import LOCAL_MAP, Args, Func, Kwargs, layouts_text, refuse, sharded_layout

_NORM_OR_SCORES = "Use ranvier.tensor.layers.RMSNorm or LayerNorm for a norm, and ClassifierHead for scores of tokens."
REMEDIES = {
    "rms_norm": "Use ranvier.tensor.layers.RMSNorm, with over='inner' between an output- and an input-stationary "
                "Linear.",
    "layer_norm": "Use ranvier.tensor.layers.LayerNorm, with over='inner' between an output- and an input-stationary "
                  "Linear.",
    "dropout": "Use ranvier.tensor.layers.Dropout, whose masks are keyed by place.",
    "mean": _NORM_OR_SCORES,
    "sum": _NORM_OR_SCORES,
    "linear": "Use ranvier.tensor.layers.Linear or ClassifierHead.",
}
"""Name of a torch function -> what to use instead of it on sharded tensors."""


def argument(args: Args, kwargs: Kwargs, place: int, *names: str, default: object = None) -> Any:
    """The argument at `place`, or given by one of `names`."""
    for name in names:
        if name in kwargs:
            return kwargs[name]
    return args[place] if len(args) > place else default


def sizes_or_dims(args: Args, place: int, kwargs: Kwargs, *names: str) -> list[Any]:
    """Sizes or dims that a call gives as one sequence, or one after another from `place` on."""
    given = argument(args, kwargs, place, *names)
    if isinstance(given, (list, tuple)):
        return list(given)
    if given is None:
        return []
    return [given] if any(name in kwargs for name in names) else list(args[place:])


def refuse_call(func: Func, operands: Iterable[Tensor], what: str = "", remedy: str = "") -> NoReturn:
    """Raise a ModelError that names the function, the operands' layouts and what to use instead."""
    name, operands = function_name(func), list(operands)
    remedy = remedy or REMEDIES.get(name.rpartition(".")[2], LOCAL_MAP)
    if any(map(_shards_tokens, operands)):
        remedy = f"Compute over tokens between two Linears, or set `--tensor.sequence-sharding false`. {remedy}"
    refuse(f"{f'{name} {what}'.strip()} cannot be computed from one column's shard", layouts_text(operands), remedy)


def _shards_tokens(x: Tensor) -> bool:
    """Whether x is a residual stream whose tokens are sharded over columns: [B, S, H], or [B x S, H] when flattened."""
    layout = sharded_layout(x)
    return (layout is not None and layout.mesh.activations.name == "sequence" and x.dim() in (2, 3)
            and layout.dim == x.dim() - 2)


def function_name(func: Func) -> str:
    """A torch function's name for messages: sum, Tensor.T, torch.nn.functional.gelu."""
    name: str = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):  # a property's accessor, bound to the property
        return f"Tensor.{getattr(func, '__self__').__name__}"  # noqa: B009
    module = getattr(func, "__module__", None)
    return f"{module}.{name}" if module in ("torch.nn.functional", "torch.functional") else name
