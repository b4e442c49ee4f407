"""Kinds of torch functions, by name, and the rules of those that are neither views nor indices.

Each rule has the signature rule(func, args, kwargs) -> the function's result, marked with its layout. Functions along
dims and products need dims that are not sharded: a sum over a sharded dim would need an all-reduce over columns, which
the layers of `ranvier.tensor.layers` do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ranvier.tensor.columns import shapes
from ranvier.tensor.columns.calls import REMEDIES, argument, refuse_call, sizes_or_dims
from ranvier.tensor.columns.layout import ColumnLayout, own_part_of, summed_gradient
from ranvier.tensor.columns.tensor import (
    Args,
    ColumnTensor,
    Func,
    Kwargs,
    layout_of_tensor,
    local,
    locals_of,
    mapped,
    mark,
    mark_all,
    sharded_layout,
    tensors_in,
)


def functions(names: str, *spaces: object) -> list[Func]:
    """The functions with these names in torch, its tensor class and its functional modules."""
    return [found for name in names.split() for space in (spaces or (torch, Tensor, functional, torch.special))
            if callable(found := getattr(space, name, None))]


def getter(name: str) -> Func:
    """The function that torch passes to `__torch_function__` when the property `name` of a tensor is read."""
    accessor: Func = getattr(Tensor, name).__get__
    return accessor


_UNARY = """abs absolute neg negative positive sign sgn square sqrt rsqrt reciprocal exp exp2 expm1 log log2 log10 log1p
    sin cos tan asin arcsin acos arccos atan arctan sinh cosh tanh asinh acosh atanh sigmoid logit erf erfc erfinv
    expit floor ceil round trunc frac relu relu6 leaky_relu elu selu celu silu gelu mish softplus softsign tanhshrink
    hardtanh hardsigmoid hardswish hardshrink softshrink logsigmoid threshold clamp clip clamp_min clamp_max nan_to_num
    isnan isinf isfinite isposinf isneginf signbit logical_not bitwise_not __neg__ __pos__ __abs__ __invert__"""
_BINARY = """add sub subtract rsub mul multiply div divide true_divide floor_divide remainder fmod pow float_power atan2
    hypot maximum minimum fmax fmin lerp addcmul addcdiv where masked_fill eq ne lt le gt ge not_equal less less_equal
    greater greater_equal logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor copysign xlogy heaviside
    logaddexp logaddexp2 isclose"""
_OPERATORS = ("add", "sub", "mul", "truediv", "div", "floordiv", "mod", "pow", "and", "or", "xor")

IN_PLACE = frozenset(functions(" ".join(f"{name}_" for name in f"{_UNARY} {_BINARY} copy fill".split()), torch, Tensor,
                               functional) + functions(" ".join(f"__i{name}__" for name in _OPERATORS), Tensor))
"""Pointwise functions that change their first operand."""

POINTWISE = IN_PLACE | frozenset(functions(f"{_UNARY} {_BINARY}") + functions(
    " ".join(f"__{side}{name}__" for name in _OPERATORS for side in ("", "r"))
    + " __eq__ __ne__ __lt__ __le__ __gt__ __ge__", Tensor))
"""Functions whose every result depends on the elements at the same place of the operands."""

LIKE_FIRST = (getter("data"), *functions("""to type type_as float double half bfloat16 int long short char byte bool
    clone contiguous detach detach_ alias zeros_like ones_like empty_like full_like zero_ cpu cuda resolve_conj
    resolve_neg real __deepcopy__""", torch, Tensor))
"""Functions whose result has the layout of their first operand."""

RANDOM = frozenset(functions("""dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout
    feature_alpha_dropout dropout_ alpha_dropout_ bernoulli bernoulli_ rand_like randn_like randint_like normal normal_
    uniform_ random_ exponential_ geometric_ cauchy_ log_normal_ multinomial poisson rrelu rrelu_ gumbel_softmax
    native_dropout"""))
"""Functions that draw from torch's generator, whose state differs from rank to rank."""

_PROPERTIES = """shape ndim nbytes dtype device layout itemsize is_cuda is_cpu is_meta is_sparse is_quantized is_nested
    is_mkldnn is_xpu is_mps"""
OF_WHOLE = frozenset(functions("""dim ndimension size numel nelement __len__ is_floating_point is_complex is_signed
    element_size get_device is_same_size is_tensor __hash__""", Tensor, torch) + list(map(getter, _PROPERTIES.split())))
"""Sizes and properties that the tensor itself has: they are those of the full tensor."""

OF_LOCAL = frozenset([getter("requires_grad"), getter("is_leaf"), *functions("is_contiguous", Tensor)])
"""Properties that this column's shard has."""

ALONG_DIMS: tuple[tuple[str, int, int | None], ...] = (
    ("""sum nansum mean nanmean amax amin prod any all logsumexp softmax log_softmax softmin cumsum cumprod cummax
     cummin logcumsumexp argmax argmin var std var_mean std_mean max min count_nonzero flip narrow select""", 1, None),
    ("sort argsort glu", 1, -1), ("unbind", 1, 0), ("split split_with_sizes chunk tensor_split", 2, 0),
    ("topk kthvalue", 2, -1), ("norm", 2, None), ("normalize", 2, 1), ("roll", 2, None))
"""(names, the position of `dim` among the arguments, its default) of functions along dims."""


# ---------------------------------------------------------------------- element by element


def common_layout(func: Func, operands: Sequence[Tensor], result_dims: int) -> tuple[int, ColumnLayout]:
    """(the sharded dim counted from the right, layout) that all sharded operands have; refuses different ones.

    Dims are counted from the right because broadcasting aligns them there.
    """
    found = {layout.place(operand.dim()): layout
             for operand in operands if (layout := sharded_layout(operand)) is not None}
    if len(found) > 1:
        refuse_call(func, operands, "of tensors with different layouts over columns",
                    "Go from one to the other through the layers: Linear(stationary='output') from the residual "
                    "stream, Linear(stationary='input') back to it, ClassifierHead to a replicated tensor.")
    (from_right, *_), common = next(iter(found.items()))
    if from_right > result_dims:
        refuse_call(func, operands)
    return from_right, common


def convert(func: Func, tensor: Tensor, from_right: int, layout: ColumnLayout, operands: Sequence[Tensor]) -> Tensor:
    """This column's part of `tensor`, one of `operands` whose sharded dim is `from_right` places from the right.

    A replicated operand whose size there is 1 is broadcast; if it has the global size, each column takes its shard.
    """
    if sharded_layout(tensor) is not None:
        return local(tensor)  # type: ignore[no-any-return]
    tensor = local(tensor)
    size = tensor.size(-from_right) if tensor.dim() >= from_right else 1
    if size == 1:
        return summed_gradient(tensor, layout.mesh)
    if size != layout.size:
        refuse_call(func, operands,
                    f"of a tensor with {size} of {layout.size} elements along the dim that is sharded over columns",
                    "Make it with the size that the tensor reports (each column then takes its shard), or like another "
                    "tensor: zeros_like(x).")
    dim = tensor.dim() - from_right
    trains = torch.is_grad_enabled() and tensor.requires_grad
    return own_part_of(tensor, dim, layout) if trains else layout.shard(tensor, dim)


WHERE: tuple[Func, ...] = (torch.where, Tensor.where)
"""Pointwise functions that do something else when called with a condition alone."""


def are_alike(operands: Sequence[Tensor]) -> bool:
    """Whether they are one sharded tensor, or have the same sizes and layout: shards then need no conversion."""
    first = operands[0]
    if not isinstance(first, ColumnTensor) or first.columns.dim is None:
        return False
    for operand in operands:
        if operand is not first and not (isinstance(operand, ColumnTensor) and operand.columns == first.columns
                                         and operand.local.shape == first.local.shape):
            return False
    return True


def pointwise(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Functions whose every result depends on the elements at the same place of the operands."""
    operands = tensors_in((*args, *kwargs.values()) if kwargs else args)
    if func in WHERE and len(operands) < 2:
        refuse_call(func, operands, "of a condition alone")
    dims = max(operand.dim() for operand in operands)
    if func in IN_PLACE and (sharded_layout(args[0]) is None or args[0].dim() != dims):
        refuse_call(func, operands, "of a sharded tensor into one that is not sharded",
                    "Use the form that returns a new tensor.")
    from_right, layout = common_layout(func, operands, dims)
    if any(sharded_layout(operand) is None for operand in operands):
        own, named = mapped(lambda one: convert(func, one, from_right, layout, operands), (tuple(args), kwargs))
    else:
        own, named = locals_of(args, kwargs)
    return mark_all(func(*own, **named), layout.moved(dims - from_right), args[0] if func in IN_PLACE else None)


def join(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
    """torch.cat and torch.stack, along dims that are not sharded."""
    tensors, dim = argument(args, kwargs, 0, "tensors"), argument(args, kwargs, 1, "dim", "axis", default=0)
    stacked = func is torch.stack
    from_right, layout = common_layout(func, tensors, tensors[0].dim())
    sharded, dim = tensors[0].dim() - from_right, dim % (tensors[0].dim() + stacked)
    if not stacked and dim == sharded:
        refuse_call(func, tensors, "along the dim that is sharded over columns")
    found = func([convert(func, tensor, from_right, layout, tensors) for tensor in tensors], dim)
    return mark(found, layout.moved(sharded + (stacked and dim <= sharded)))


def like_first(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Functions whose result has the first operand's layout: copies, conversions, tensors of constants."""
    layout = layout_of_tensor(args[0])
    own, named = locals_of(args, kwargs)
    result = func(*own, **named)
    return result if layout is None else mark_all(result, layout, args[0])


def new_tensor(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
    """x.new_zeros(sizes) and the like: sizes are whole, so the tensor is replicated."""
    own, named = locals_of(args, kwargs)
    return mark(func(*own, **named), ColumnLayout(args[0].columns.mesh))


# ---------------------------------------------------------------------- along dims


def along_dims(func: Func, args: Args, kwargs: Kwargs, place: int, default: object) -> Any:
    """A function along dims that are not sharded. place: position of `dim` among the arguments; default: of `dim`."""
    operands = tensors_in((*args, *kwargs.values()))
    if len(operands) > 1 and operands[1] is argument(args, kwargs, 1, "other"):
        return pointwise(func, args, kwargs)  # torch.max(x, y)
    dims = argument(args, kwargs, place, "dim", "axis", "dims", default=default)
    if func is Tensor.flip:
        dims = sizes_or_dims(args, 1, kwargs, "dims")
    if len(operands) > 1 or dims is None or isinstance(dims, bool):
        refuse_call(func, operands, "over all dims" if dims is None else "")
    return untouched(func, args, kwargs, [dims] if isinstance(dims, int) else dims)


def untouched(func: Func, args: Args, kwargs: Kwargs, dims: list[int]) -> Any:
    """A function along `dims` that leaves the sharded dim unchanged, or a ModelError."""
    x: Tensor = args[0]
    layout, dims = sharded_layout(x), [dim % x.dim() for dim in dims]
    if layout is None or layout.dim in dims or not dims:
        refuse_call(func, tensors_in((*args, *kwargs.values())),
                    f"along dim {layout.dim}, which is sharded over columns," if layout is not None else "")
    own, named = locals_of(args, kwargs)
    try:
        result = func(*own, **named)
    except (RuntimeError, IndexError, ValueError) as error:
        refuse_call(func, [x], f"({error})")
    keeps_dims = tensors_in([result])[0].dim() == x.dim()
    sharded = layout.sharded_dim
    return mark_all(result, layout.moved(sharded if keeps_dims else shapes.without(sharded, dims)))


def diagonal_masked(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """tril and triu, along the last two dims."""
    return untouched(func, args, kwargs, [-2, -1])


def padded(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """functional.pad. Widths come in pairs, that of the last dim first."""
    widths = argument(args, kwargs, 1, "pad")
    dims = [-1 - place // 2 for place in range(0, len(widths), 2) if any(widths[place:place + 2])]
    return untouched(func, args, kwargs, dims)


def normalize(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
    """F.layer_norm and F.rms_norm over trailing dims. Weights are constants here: parameters have been refused."""
    x: Tensor = args[0]
    shape, layout = argument(args, kwargs, 1, "normalized_shape"), sharded_layout(x)
    others = tensors_in((*args[1:], *kwargs.values()))
    if layout is None or layout.sharded_dim >= x.dim() - len(shape) or any(map(sharded_layout, others)):
        refuse_call(func, [x], "over a dim that is sharded over columns")
    own, named = locals_of(args, kwargs)
    return mark(func(*own, **named), layout)


def index_add(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """index_add and index_copy: slices of `source` go to places of a dim that is not sharded."""
    x, dim = args[0], argument(args, kwargs, 1, "dim")
    source, layout = argument(args, kwargs, 3, "source"), sharded_layout(args[0])
    other = sharded_layout(source)
    if layout is None or other is None or dim % x.dim() == layout.dim or other[1:] != layout[1:]:
        refuse_call(func, tensors_in((*args, *kwargs.values())), "of tensors with different layouts over columns")
    own, named = locals_of(args, kwargs)
    return mark_all(func(*own, **named), layout, x)


# ---------------------------------------------------------------------- products

FUSED_ATTENTION: Func = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""The function that the cost count sees for attention."""


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
    from_right = {operand.dim() - own.sharded_dim
                  for operand, own in ((a, sharded_a), (b, sharded_b)) if own is not None}
    place = from_right.pop()
    batch = place > 2
    if from_right or (sharded_a and sharded_b and not (batch and sharded_a[2:] == sharded_b[2:])):
        refuse_call(func, [a, b], "of tensors with different layouts over columns")
    if not batch and place != (2 if sharded_a else 1):
        refuse_call(func, [a, b], "along the dim that is sharded over columns")
    operands = [local(operand) if own is not None else
                convert(func, operand, place, layout, [a, b]) if batch else summed_gradient(local(operand), layout.mesh)
                for operand, own in ((a, sharded_a), (b, sharded_b))]
    return mark(torch.matmul(*operands), layout.moved(dims - place))


def attention(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """F.scaled_dot_product_attention: each column attends within its heads."""
    named = ("query", "key", "value", "attn_mask", "dropout_p")
    query, key, value, mask, dropout = (argument(args, kwargs, place, name) for place, name in enumerate(named))
    if func is FUSED_ATTENTION:  # takes its mask by name only, and dropout_p in its place
        mask, dropout = kwargs.get("attn_mask"), argument(args, kwargs, 3, "dropout_p")
    operands = [query, key, value]
    if dropout:
        refuse_call(func, operands, "with dropout", REMEDIES["dropout"])
    layouts = [layout for operand in operands if (layout := sharded_layout(operand)) is not None]
    places = {operand.dim() - layout.sharded_dim
              for operand in operands if (layout := sharded_layout(operand)) is not None}
    # Counted attention has already been checked for support of such groups.
    grouped = func is FUSED_ATTENTION or argument(args, kwargs, 7, "enable_gqa", default=False)
    if len(layouts) < 3 or len(places) > 1 or min(places) < 3 or not all(layout.is_even for layout in layouts) \
            or len({layout.blocks for layout in layouts}) > 1 \
            or (len({layout.size for layout in layouts}) > 1 and not (grouped and layouts[0].blocks == 1)):
        refuse_call(func, operands, "of tensors with different layouts over columns",
                    "Shard the heads over columns: unflatten(-1, (-1, width)) and transpose(1, 2) of what "
                    "Linear(stationary='output', units=heads) returns, in the same way for queries, keys and values.")
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
    layouts = [sharded_layout(operand) for operand in operands]
    shared = {(names[layout.sharded_dim], layout.size, layout.blocks)
              for names, layout in zip(inputs, layouts, strict=True) if layout is not None}
    label, layout = next(iter(shared))[0], next(layout for layout in layouts if layout is not None)
    if len(shared) > 1 or label not in output or any(names.count(label) > 1 for names in inputs):
        refuse_call(func, operands, f"{args[0]!r} along a dim that is sharded over columns")
    given = [local(operand) if own is not None else
             convert(func, operand, len(names) - names.index(label), layout, operands) if label in names
             else summed_gradient(local(operand), layout.mesh)
             for operand, names, own in zip(operands, inputs, layouts, strict=True)]
    return mark(func(args[0], *given), layout.moved(output.index(label)))
