"""Torch functions on `ColumnTensor`s: the table of rules, and the function that applies it.

Between tensor-parallel layers a block is the user's own code, which must compute on shards what it computes on full
tensors. `dispatch` sees each torch function that is called with a `ColumnTensor`, and computes it on shards:

    sizes, types              those of the full tensor
    pointwise                 operands with one layout pass; replicated ones are converted (`columns.layout`)
    views, permutations       the sharded dim is followed
    along dims, norms         pass if the sharded dim is not among those dims
    products                  pass if the sharded dim is not summed over
    everything else           with a sharded operand, a ModelError that names function, module, line and layout

If no operand is sharded, every column computes the same, and all functions pass except those that draw random numbers.
A plain tensor (a mask, a constant, ids) is the same on every column. A plain tensor that requires a gradient was made
from a parameter outside its layer, and is refused: its gradient would not be summed over columns.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ranvier.tensor.columns import rules, views
from ranvier.tensor.columns.calls import argument, function_name, refuse_call
from ranvier.tensor.columns.layout import ColumnLayout
from ranvier.tensor.columns.rules import functions, getter
from ranvier.tensor.columns.tensor import (
    Args,
    ColumnTensor,
    Func,
    Kwargs,
    locals_of,
    mark_all,
    refuse_own_graph,
    tensors_in,
)

Rule = Callable[[Func, Args, Kwargs], Any]


def dispatch(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """`func(*args, **kwargs)` for a call with a `ColumnTensor` argument, with results marked; or a ModelError."""
    if func in rules.OF_WHOLE:
        return func(*args, **kwargs)
    operands = tensors_in((*args, *kwargs.values()) if kwargs else args)
    layout: ColumnLayout | None = None
    for operand in operands:
        if isinstance(operand, ColumnTensor):
            if operand.grad_fn is not None:
                refuse_own_graph(operand)
            if layout is None or layout.dim is None:
                layout = operand.columns
        elif operand.requires_grad or (type(operand) is not Tensor and isinstance(operand, torch.nn.Parameter)):
            refuse_call(func, operands, "with a parameter outside of its layer, or with a tensor computed from one,",
                        "Call the layer, or give a module of your own the methods of ranvier.tensor.layers.Splittable.")
    if func in rules.OF_LOCAL:
        return func(args[0].local, *args[1:], **kwargs)
    if layout is None or kwargs.get("out") is not None or getattr(func, "__name__", "") == "__set__":
        refuse_call(func, operands)
    if layout.dim is None:
        return _call_replicated(func, args, kwargs, layout)
    rule = _RULES.get(func)
    if rule is None:
        refuse_call(func, operands)
    if rule is rules.pointwise and rules.are_alike(operands) and func not in rules.WHERE:
        own, named = locals_of(args, kwargs)
        return mark_all(func(*own, **named), layout, args[0] if func in rules.IN_PLACE else None)
    return rule(func, args, kwargs)


def _call_replicated(func: Func, args: Args, kwargs: Kwargs, layout: ColumnLayout) -> Any:
    """The result when no operand is sharded: every column computes the same."""
    if func in rules.RANDOM and not (function_name(func).endswith("dropout")
                                     and argument(args, kwargs, 2, "training") is False):
        refuse_call(func, tensors_in(args), "draws different numbers on each rank, and")
    own, named = locals_of(args, kwargs)
    return mark_all(func(*own, **named), layout, args[0] if args else None)


def _rules() -> dict[Func, Rule]:
    """Function -> rule(func, args, kwargs) for calls with at least one sharded operand."""
    found: dict[Func, Rule] = {}

    def put(names: str, rule: Rule, *spaces: object) -> None:
        found.update(dict.fromkeys(functions(names, *spaces), rule))

    def put_placed(names: str, place: views.Place, *spaces: object) -> None:
        put(names, partial(views.placed, place=place), *spaces)

    found.update(dict.fromkeys(rules.POINTWISE, rules.pointwise))
    found.update(dict.fromkeys(rules.LIKE_FIRST, rules.like_first))
    put("cat concat concatenate stack", rules.join, torch)
    put("new_zeros new_ones new_empty new_full", rules.new_tensor, Tensor)
    put("__iter__", views.iterate, Tensor)
    put("__setitem__", views.set_item, Tensor)
    put("view reshape view_as reshape_as flatten unflatten", views.reshaped)
    put("expand expand_as broadcast_to", views.expanded)
    put("repeat_interleave", views.repeat_interleaved)
    put("squeeze", views.squeezed)
    put_placed("unsqueeze", views.unsqueezed)
    put_placed("permute", views.permuted)
    put_placed("transpose swapaxes swapdims", views.transposed)
    put_placed("t", views.reversed_dims)
    put_placed("__getitem__", views.indexed, Tensor)
    found[getter("mT")] = partial(views.placed, place=views.matrix_transposed)
    found[getter("T")] = partial(views.placed, place=views.reversed_dims)
    put("tril triu", rules.diagonal_masked)
    put("pad", rules.padded, functional)
    for names, place, default in rules.ALONG_DIMS:
        put(names, partial(rules.along_dims, place=place, default=default))
    found[torch.linalg.vector_norm] = partial(rules.along_dims, place=2, default=None)
    put("layer_norm rms_norm", rules.normalize)
    put("index_add index_add_ index_copy index_copy_", rules.index_add)
    put("matmul bmm mm __matmul__ __rmatmul__", rules.matmul)
    put("einsum", rules.einsum, torch)
    found[functional.scaled_dot_product_attention] = rules.attention
    found[rules.FUSED_ATTENTION] = rules.attention
    return found


_RULES = _rules()
