"""What every torch function computes on `ColumnTensor`s: the table of rules, and the function that applies it.

Between tensor-parallel layers a block is the user's own code, which must compute on shards what it computes on whole
tensors. `dispatch` sees each torch function that is called with a `ColumnTensor`:

    pointwise                 operands with one layout pass; replicated ones are converted (`columns.layout`)
    views, permutations       the sharded dim is followed
    along dims, norms         pass where the sharded dim is not among those dims
    products                  pass where the sharded dim is no dim that is summed over
    everything else           with a sharded operand a ModelError that names function, module, line and layout

Where no operand is sharded, every column computes the same, and all functions pass but those that draw random numbers.
A plain tensor (a mask, a constant, ids) is the same on every column. A plain tensor that requires a gradient was made
of a parameter outside its layer, and is refused: nobody would sum its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import functional

from ranvier.tensor.columns import pointwise, products, reductions, views
from ranvier.tensor.columns.calls import argument, function_name, refuse_call, refuse_local_sizes
from ranvier.tensor.columns.layout import ColumnLayout
from ranvier.tensor.columns.names import ALONG_DIMS, LAYOUT_FREE, LIKE_FIRST, POINTWISE, RANDOM, functions, getter
from ranvier.tensor.columns.tensor import Args, ColumnTensor, Func, Kwargs, mark_all, tensors_in

Rule = Callable[[Func, Args, Kwargs], Any]


def dispatch(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """`func(*args, **kwargs)`, of which an argument is a `ColumnTensor`, with results marked; or a ModelError."""
    if func in LAYOUT_FREE or (isinstance(func, torch._ops.OpOverload) and _is_below_autograd()):
        return func(*args, **kwargs)
    operands = tensors_in((*args, *kwargs.values()) if kwargs else args)
    layout: ColumnLayout | None = None
    for one in operands:
        if isinstance(one, ColumnTensor):
            if layout is None or layout.dim is None:
                layout = one.columns
        elif one.requires_grad or isinstance(one, torch.nn.Parameter):
            _refuse_parameter(func, operands)
    if layout is None or layout.dim is None:
        return _replicated(func, args, kwargs, layout)
    rule = _RULES.get(func)
    if rule is None:
        refuse_call(func, operands)
    return rule(func, args, kwargs)


def _is_below_autograd() -> bool:
    """Whether a mode of torch's dispatcher calls with what autograd has saved: the layout was handled above."""
    return torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradFunctionality)


def _refuse_parameter(func: Func, operands: Sequence[Tensor]) -> NoReturn:
    refuse_call(func, operands, "with a parameter outside of its layer, or with a tensor computed from one,",
                "Call the layer, or give a module of your own the methods of ranvier.tensor.layers.Splittable.")


def _replicated(func: Func, args: Args, kwargs: Kwargs, layout: ColumnLayout | None) -> Any:
    """The result where no operand is sharded: every column computes the same."""
    if func in RANDOM and not (function_name(func).endswith("dropout")
                               and argument(args, kwargs, 2, "training") is False):
        refuse_call(func, tensors_in(args), "draws different numbers on each rank, and")
    if func in POINTWISE:
        refuse_local_sizes(func, args, kwargs)
    result = func(*args, **kwargs)
    return result if layout is None else mark_all(result, layout)


def _rules() -> dict[Func, Rule]:
    """Function -> rule(func, args, kwargs) for operands of which at least one is sharded."""
    rules: dict[Func, Rule] = {}

    def put(names: str, rule: Rule, *spaces: object) -> None:
        rules.update(dict.fromkeys(functions(names, *spaces), rule))

    def put_view(names: str, find: views.Find, *spaces: object) -> None:
        put(names, partial(views.view, find=find), *spaces)

    rules.update(dict.fromkeys(POINTWISE, pointwise.pointwise))
    rules.update(dict.fromkeys(LIKE_FIRST, pointwise.like_first))
    put("cat concat concatenate stack", pointwise.join, torch)
    put("new_zeros new_ones new_empty new_full", pointwise.new_tensor, Tensor)
    put("size", views.size, Tensor)
    rules[getter("shape")] = views.size
    put("numel nelement", views.num_elements)
    put("__len__", views.length, Tensor)
    put("__iter__", views.iterate, Tensor)
    put("__setitem__", views.set_item, Tensor)
    put_view("view reshape", views.reshaped)
    put_view("view_as reshape_as", views.reshaped_as)
    put_view("flatten", views.flattened)
    put_view("unflatten", views.unflattened)
    put_view("expand expand_as broadcast_to", views.expanded)
    put_view("repeat", views.repeated, Tensor)
    put_view("repeat_interleave", views.repeat_interleaved)
    put_view("unsqueeze", views.unsqueezed)
    put_view("squeeze", views.squeezed)
    put_view("permute", views.permuted)
    put_view("transpose swapaxes swapdims", views.transposed)
    put_view("movedim moveaxis", views.moved)
    put_view("t", views.reversed_dims)
    for names, find in (("mT mH", views.matrix_transposed), ("T H", views.reversed_dims)):
        rules.update(dict.fromkeys(map(getter, names.split()), partial(views.view, find=find)))
    put_view("__getitem__", views.indexed, Tensor)
    put_view("select unbind", views.selected)
    put_view("narrow index_select", views.narrowed)
    put_view("split split_with_sizes chunk tensor_split", views.split)
    put_view("tril triu", views.diagonal_masked)
    put_view("flip", views.flipped)
    put_view("pad", views.padded, functional)
    for names, place, default in ALONG_DIMS:
        put(names, partial(reductions.along_dims, place=place, default=default))
    rules[torch.linalg.vector_norm] = partial(reductions.along_dims, place=2, default=None)
    put("layer_norm rms_norm", reductions.normalize)
    put("index_add index_add_ index_copy index_copy_", reductions.index_add)
    put("matmul bmm mm __matmul__ __rmatmul__", products.matmul)
    put("linear", products.linear, functional)
    put("einsum", products.einsum, torch)
    rules[functional.scaled_dot_product_attention] = products.attention
    rules[products.FUSED_ATTENTION] = products.attention
    return rules


_RULES = _rules()
