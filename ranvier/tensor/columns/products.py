"""Rules of products: matmul, linear, einsum, attention. The dim that is summed over must not be sharded.

Such a product would need an all-reduce over columns, which the layers of `ranvier.tensor.layers` do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ranvier.tensor.columns import shapes
from ranvier.tensor.columns.calls import REMEDIES, argument, refuse_call
from ranvier.tensor.columns.layout import summed_gradient
from ranvier.tensor.columns.pointwise import convert
from ranvier.tensor.columns.tensor import (
    Args,
    Func,
    Kwargs,
    local,
    locals_of,
    mark,
    mark_all,
    sharded_layout,
    tensors_in,
)

FUSED_ATTENTION: Func = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""What `pipeline.partition` counts attention as."""


def matmul(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
    """a @ b, sharded in a batch dim, in a's rows or in b's columns."""
    a, b = argument(args, kwargs, 0, "input", "mat1"), argument(args, kwargs, 1, "other", "mat2", "tensor2")
    if func is Tensor.__rmatmul__:
        a, b = b, a
    sharded_a, sharded_b = sharded_layout(a), sharded_layout(b)
    dims = max(a.dim(), b.dim())
    layout = sharded_a or sharded_b
    if layout is None or min(a.dim(), b.dim()) < 2 or kwargs.keys() - {"input", "other", "mat1", "mat2", "tensor2"}:
        refuse_call(func, [a, b])
    from_right = {one.dim() - own.sharded_dim for one, own in ((a, sharded_a), (b, sharded_b)) if own is not None}
    place = from_right.pop()
    batch = place > 2
    if from_right or (sharded_a and sharded_b and not (batch and sharded_a[2:] == sharded_b[2:])):
        refuse_call(func, [a, b], "of tensors with different layouts over columns")
    if not batch and place != (2 if sharded_a else 1):
        refuse_call(func, [a, b], "along the dim that is sharded over columns")
    operands = [local(one) if own is not None else
                convert(func, one, place, layout, [a, b]) if batch else summed_gradient(local(one), layout.mesh)
                for one, own in ((a, sharded_a), (b, sharded_b))]
    return mark(torch.matmul(*operands), layout.moved(dims - place))


def linear(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
    """F.linear with a replicated weight, of features that are not sharded."""
    x, weight = args[0], argument(args, kwargs, 1, "weight")
    bias, layout = argument(args, kwargs, 2, "bias"), sharded_layout(args[0])
    if layout is None or layout.dim == x.dim() - 1 or sharded_layout(weight) \
            or (bias is not None and sharded_layout(bias)):
        refuse_call(func, tensors_in((*args, *kwargs.values())), "along the dim that is sharded over columns")
    others = [None if one is None else summed_gradient(local(one), layout.mesh) for one in (weight, bias)]
    return mark(func(local(x), *others), layout)


def attention(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """F.scaled_dot_product_attention: each column attends within its heads."""
    named = ("query", "key", "value", "attn_mask", "dropout_p")
    query, key, value, mask, dropout = (argument(args, kwargs, place, name) for place, name in enumerate(named))
    if func is FUSED_ATTENTION:  # takes its mask by name only, and dropout_p in its place
        mask, dropout = kwargs.get("attn_mask"), argument(args, kwargs, 3, "dropout_p")
    operands = [query, key, value]
    if dropout:
        refuse_call(func, operands, "with dropout", REMEDIES["dropout"])
    layouts = [layout for one in operands if (layout := sharded_layout(one)) is not None]
    places = {one.dim() - layout.sharded_dim for one in operands if (layout := sharded_layout(one)) is not None}
    # Attention that is counted has been asked whether it takes such groups.
    grouped = func is FUSED_ATTENTION or argument(args, kwargs, 7, "enable_gqa", default=False)
    if len(layouts) < 3 or len(places) > 1 or min(places) < 3 or not all(one.is_even for one in layouts) \
            or len({one.blocks for one in layouts}) > 1 \
            or (len({one.size for one in layouts}) > 1 and not (grouped and layouts[0].blocks == 1)):
        refuse_call(func, operands, "of tensors with different layouts over columns",
                    "Shard the heads over columns: unflatten(-1, (-1, width)) and transpose(1, 2) of what "
                    "Linear(stationary='output', units=heads) returns, for queries, keys and values alike.")
    place, layout_of_query = places.pop(), layouts[0]
    if isinstance(mask, Tensor):
        other = sharded_layout(mask)
        if other is not None and other.place(mask.dim()) != layout_of_query.place(query.dim()):
            refuse_call(func, [query, mask], "of tensors with different layouts over columns")
        mask = convert(func, mask, place, layout_of_query, [query, mask])
        if "attn_mask" in kwargs:
            kwargs = kwargs | {"attn_mask": mask}
        else:
            args = (*args[:3], mask, *args[4:])
    own, named_own = locals_of(args, kwargs)
    return mark_all(func(*own, **named_own), layout_of_query.moved(query.dim() - place))


def einsum(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
    """einsum whose sharded label is in the output, once in each operand that has it."""
    operands = list(args[1]) if len(args) == 2 and isinstance(args[1], (list, tuple)) else list(args[1:])
    labels = shapes.einsum_labels(args[0]) if isinstance(args[0], str) else None
    if labels is None:
        refuse_call(func, tensors_in(operands), "with an ellipsis", "Name every dim in the equation.")
    inputs, output = labels
    layouts = [sharded_layout(one) for one in operands]
    shared = {(names[one.sharded_dim], one.size, one.blocks)
              for names, one in zip(inputs, layouts, strict=True) if one is not None}
    label, layout = next(iter(shared))[0], next(one for one in layouts if one is not None)
    if len(shared) > 1 or label not in output or any(names.count(label) > 1 for names in inputs):
        refuse_call(func, operands, f"{args[0]!r} along a dim that is sharded over columns")
    given = [local(one) if own is not None else
             convert(func, one, len(names) - names.index(label), layout, operands) if label in names
             else summed_gradient(local(one), layout.mesh)
             for one, names, own in zip(operands, inputs, layouts, strict=True)]
    return mark(func(args[0], *given), layout.moved(output.index(label)))
