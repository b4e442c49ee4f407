"""The tensors that a block computes with on several columns: each carries how it lies over them.

Between split layers a block is the user's own code, which must give on parts of tensors what it gives on whole ones.
A `ColumnTensor` sees each torch function that is called with it, and the rules in this file say what comes out:

    point by point            operands cut alike pass; replicated ones are converted (`columns`)
    views, permutations       the cut dim is followed
    along dims, norms         pass where the cut dim is not among those dims
    products                  pass where the cut dim is no dim that is summed over
    everything else           on a cut tensor a ModelError that names function, module, line and layout

Where no operand is cut, every column computes the same, and all functions pass but those that draw random numbers. A
plain tensor (a mask, a constant, ids) is the same on every column; a plain one that requires a gradient was made of a
parameter outside its layer, and is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_map

from ranvier.tensor import column_shapes as shapes
from ranvier.tensor.columns import ColumnLayout, LocalSize, own_part_of, refuse, summed_gradient

if TYPE_CHECKING:
    from ranvier.tensor.mesh import TensorMesh

_untracked = torch._C.DisableTorchFunctionSubclass


class ColumnTensor(Tensor):
    """A tensor of a split model on one of several columns; see above. `mark` makes one, `plain` is the inverse."""

    columns: ColumnLayout

    @classmethod
    def __torch_function__(cls, func: Callable, types: Iterable[type], args: Sequence = (), kwargs: dict | None = None):
        kwargs = kwargs or {}
        with _untracked():
            if func in _PASSES or (isinstance(func, torch._ops.OpOverload) and _is_below_autograd()):
                return func(*args, **kwargs)
            operands = _tensors((*args, *kwargs.values()))
            layout = mesh = None
            for one in operands:
                if isinstance(one, ColumnTensor):
                    mesh = one.columns.mesh
                    if one.columns.dim is not None:
                        layout = one.columns
                        break
            _check_plain(func, operands, mesh)
            if layout is None:
                return _replicated(func, args, kwargs, mesh)
            rule = _RULES.get(func)
            if rule is None:
                _refuse(func, operands)
            return rule(func, args, kwargs)


def _is_below_autograd() -> bool:
    """Whether a mode of torch's dispatcher calls with what autograd has saved: the layout has been seen to before."""
    return torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradFunctionality)


def mark(x: Tensor, layout: ColumnLayout) -> Tensor:
    """`x`, which knows from now how it lies over the columns. Its storage, its graph and its identity stay."""
    if type(x) is Tensor:
        x.__class__ = ColumnTensor
    if isinstance(x, ColumnTensor):
        x.columns = layout
    return x


def plain(x: object) -> object:
    """Tensors without their layout, in a tree of them: what layers and the runtime compute with."""
    if isinstance(x, ColumnTensor):
        with _untracked():
            return x.as_subclass(Tensor)
    return x if isinstance(x, Tensor) else tree_map(lambda leaf: plain(leaf) if isinstance(leaf, Tensor) else leaf, x)


def layout_of_tensor(x: Tensor) -> ColumnLayout | None:
    """None for a plain one."""
    return x.columns if isinstance(x, ColumnTensor) else None


def _tensors(values: Iterable) -> list[Tensor]:
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return found


def _name(func: Callable) -> str:
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        return f"Tensor.{func.__self__.__name__}"
    module = getattr(func, "__module__", None)
    return f"{module}.{name}" if module in ("torch.nn.functional", "torch.functional") else name


def _shown(operands: Iterable[Tensor]) -> str:
    return " and ".join(one.columns.text(tuple(one.size())) if isinstance(one, ColumnTensor)
                        else f"{list(one.size())} without a layout" for one in operands)


def _refuse(func: Callable, operands: Sequence[Tensor], what: str = "", remedy: str = "") -> None:
    tried = f"{_name(func)} {what}".strip()
    refuse(f"{tried} cannot be computed from one column's part", _shown(operands),
           remedy or _REMEDIES.get(_name(func).rpartition(".")[2], _ANY_REMEDY))


def _check_plain(func: Callable, operands: Sequence[Tensor], mesh: TensorMesh) -> None:
    for one in operands:
        if not isinstance(one, ColumnTensor) and (one.requires_grad or isinstance(one, torch.nn.Parameter)):
            _refuse(func, operands, "with a parameter outside of its layer, or with what was made of one,",
                    "Call the layer, or give a module of your own the methods of ranvier.tensor.layers.Splittable.")


def _replicated(func: Callable, args: Sequence, kwargs: dict, mesh: TensorMesh) -> object:
    """No operand is cut: every column computes the same."""
    if func in _RANDOM and not (_name(func).endswith("dropout") and _argument(args, kwargs, 2, "training") is False):
        _refuse(func, _tensors(args), "draws other numbers on each rank, and")
    if func in _POINTWISE:
        _check_numbers(func, args, kwargs)
    return _all_marked(func(*args, **kwargs), lambda one: ColumnLayout(mesh))


def _all_marked(result: object, layout: Callable[[Tensor], ColumnLayout]) -> object:
    if isinstance(result, Tensor):
        return mark(result, layout(result))
    if isinstance(result, (list, tuple)):
        for one in result:
            _all_marked(one, layout)
    return result


def _argument(args: Sequence, kwargs: dict, place: int, *names: str, default: object = None) -> object:
    for name in names:
        if name in kwargs:
            return kwargs[name]
    return args[place] if len(args) > place else default


def _numbers(args: Sequence, place: int, kwargs: dict, *names: str) -> list:
    """Sizes or dims that are given as one sequence or one after another."""
    given = _argument(args, kwargs, place, *names)
    if isinstance(given, (list, tuple)):
        return list(given)
    return [] if given is None else ([given] if names and any(name in kwargs for name in names) else list(args[place:]))


def _check_numbers(func: Callable, args: Sequence, kwargs: dict) -> None:
    for one in (*args, *kwargs.values()):
        if isinstance(one, LocalSize):
            refuse(f"{_name(func)} takes the size of a dim that columns share for that of the whole",
                   f"{int(one)} of {one.whole}", "Take the number from the model's settings.")


# ---------------------------------------------------------------------- point by point


def _cut_of(x: Tensor) -> ColumnLayout | None:
    layout = layout_of_tensor(x)
    return None if layout is None or layout.dim is None else layout


def _aligned(func: Callable, operands: Sequence[Tensor], result_dims: int) -> tuple[int, ColumnLayout]:
    """(the cut dim counted from the right, layout) that all cut operands have."""
    found = {(one.dim() - cut.dim, cut.size): cut for one in operands if (cut := _cut_of(one)) is not None}
    if len(found) > 1:
        _refuse(func, operands, "of tensors that lie on columns in different ways",
                "Go from one to the other through the layers: Linear(stationary='output') from the residual stream, "
                "Linear(stationary='input') back to it, TokenLinear to what every column has.")
    (from_right, _), layout = next(iter(found.items()))
    if from_right > result_dims:
        _refuse(func, operands)
    return from_right, layout


def _converted(func: Callable, one: Tensor, from_right: int, layout: ColumnLayout,
               operands: Sequence[Tensor]) -> Tensor:
    """`one` as an operand beside others whose cut dim is `from_right` places from the right."""
    if _cut_of(one) is not None:
        return one
    one = plain(one)
    size = one.size(-from_right) if one.dim() >= from_right else 1
    if size == 1:
        return summed_gradient(one, layout.mesh)
    if size != layout.size:
        _refuse(func, operands, f"of a tensor that has {size} of {layout.size} places of the dim that columns share",
                "Make it for the whole dim (each column then takes its part), or like another tensor: zeros_like(x).")
    return own_part_of(one, one.dim() - from_right, layout)


def _pointwise(func: Callable, args: Sequence, kwargs: dict) -> object:
    """Every element of the result depends on the same place of each operand."""
    operands = _tensors((*args, *kwargs.values()))
    if "out" in kwargs:
        _refuse(func, operands, "into memory of the caller's", "Leave out= away.")
    _check_numbers(func, args, kwargs)
    if func in (torch.where, Tensor.where) and len(operands) < 2:
        _refuse(func, operands, "of a condition alone")
    dims = max(one.dim() for one in operands)
    if func in _CHANGES_FIRST and (_cut_of(args[0]) is None or args[0].dim() != dims):
        _refuse(func, operands, "of a cut tensor into one that is not cut", "Use the form that returns a new tensor.")
    from_right, layout = _aligned(func, operands, dims)
    args, kwargs = tree_map(lambda one: _converted(func, one, from_right, layout, operands)
                            if isinstance(one, Tensor) else one, (tuple(args), dict(kwargs)))
    return _all_marked(func(*args, **kwargs), lambda one: layout.moved(one.dim() - from_right))


def _joined(func: Callable, args: Sequence, kwargs: dict) -> object:
    """torch.cat and torch.stack."""
    tensors, dim = _argument(args, kwargs, 0, "tensors"), _argument(args, kwargs, 1, "dim", "axis", default=0)
    dims = tensors[0].dim() + (func is torch.stack)
    from_right, layout = _aligned(func, tensors, tensors[0].dim())
    cut, dim = tensors[0].dim() - from_right, dim % dims
    if func is not torch.stack and dim == cut:
        _refuse(func, tensors, "along the dim that columns share")
    found = func([_converted(func, one, from_right, layout, tensors) for one in tensors], dim)
    return mark(found, layout.moved(cut + (func is torch.stack and dim <= cut)))


def _like(func: Callable, args: Sequence, kwargs: dict) -> object:
    """The result lies as the first operand: copies, conversions, tensors of constants."""
    layout = layout_of_tensor(args[0])
    result = func(*args, **kwargs)
    return result if layout is None else mark(result, layout)


def _new(func: Callable, args: Sequence, kwargs: dict) -> object:
    """x.new_zeros(sizes) and the like: cut where a size was read from a cut dim."""
    sizes = _numbers(args, 1, kwargs, "size")
    cut = [dim for dim, size in enumerate(sizes) if isinstance(size, LocalSize)]
    result = func(*args, **kwargs)
    mesh = args[0].columns.mesh
    return mark(result, ColumnLayout(mesh, cut[0], sizes[cut[0]].whole) if len(cut) == 1 else ColumnLayout(mesh))


# ---------------------------------------------------------------------- shapes


def _shape(func: Callable, args: Sequence, kwargs: dict) -> object:
    """x.shape, x.size(): the cut dim's is a `LocalSize`."""
    layout, sizes = args[0].columns, list(args[0].size())
    sizes[layout.dim] = LocalSize(sizes[layout.dim], layout.size)
    dim = _argument(args, kwargs, 1, "dim")
    return torch.Size(sizes) if dim is None else sizes[dim]


def _len(func: Callable, args: Sequence, kwargs: dict) -> int:
    x = args[0]
    if x.columns.dim == 0:
        _refuse(func, [x])
    return x.size(0)


def _numel(func: Callable, args: Sequence, kwargs: dict) -> int:
    x = args[0]
    count, local = x.numel(), x.size(x.columns.dim)
    return LocalSize(count, count // local * x.columns.size if local else 0)


def _viewed(func: Callable, args: Sequence, kwargs: dict, find: Callable) -> object:
    """find(x, its cut dim, args, kwargs, result) -> the new dim, or (dim, factor of its size); None refuses."""
    x = args[0]
    layout = _cut_of(x)
    if layout is None:
        _refuse(func, _tensors(args))
    try:
        result = func(*args, **kwargs)
    except (RuntimeError, IndexError, ValueError) as error:  # where it would have worked with the whole
        _refuse(func, [x], f"({error})")
    place = find(x, layout.dim, args, kwargs, result)
    dim, factor = place if isinstance(place, tuple) else (place, 1)
    if dim is None or (factor != 1 and not layout.is_even) or (layout.size * factor) % 1:
        _refuse(func, [x], f"with {', '.join(map(str, args[1:]))}" if args[1:] else "",
                "Read the size of the dim that columns share from the tensor, or leave it as -1, and keep the dim in "
                "front of what it is merged with: unflatten(-1, (-1, width)).")
    return _all_marked(result, lambda one: layout.moved(dim, int(layout.size * factor)))


def _reshaped(x: Tensor, cut: int, args: Sequence, kwargs: dict, result: Tensor) -> shapes.Place:
    sizes = _numbers(args, 1, kwargs, "shape", "size")
    if sizes and not all(isinstance(size, int) for size in sizes):
        return None  # view(dtype)
    return shapes.reshape(tuple(x.size()), cut, sizes, tuple(result.size()))


def _reshaped_as(x: Tensor, cut: int, args: Sequence, kwargs: dict, result: Tensor) -> shapes.Place:
    other = _argument(args, kwargs, 1, "other")
    sizes = _shape(None, (other,), {}) if _cut_of(other) is not None else ()
    return shapes.reshape(tuple(x.size()), cut, sizes, tuple(result.size()))


def _flattened(x: Tensor, cut: int, args: Sequence, kwargs: dict, result: Tensor) -> shapes.Place:
    return shapes.flatten(tuple(x.size()), cut, _argument(args, kwargs, 1, "start_dim", default=0),
                          _argument(args, kwargs, 2, "end_dim", default=-1))


def _unflattened(x: Tensor, cut: int, args: Sequence, kwargs: dict, result: Tensor) -> shapes.Place:
    return shapes.unflatten(cut, _argument(args, kwargs, 1, "dim") % x.dim(), _argument(args, kwargs, 2, "sizes"))


def _expanded(x: Tensor, cut: int, args: Sequence, kwargs: dict, result: Tensor) -> int | None:
    other = _argument(args, kwargs, 1, "other", "size", "shape")
    sizes = (_shape(None, (other,), {}) if _cut_of(other) is not None else other.size()) \
        if isinstance(other, Tensor) else _numbers(args, 1, kwargs, "size", "shape")
    return shapes.expanded(tuple(x.size()), cut, sizes)


def _repeated(x: Tensor, cut: int, args: Sequence, kwargs: dict, result: Tensor) -> int | None:
    counts = _numbers(args, 1, kwargs, "repeats")
    place = cut + len(counts) - x.dim()
    return place if counts[place] == 1 else None


def _interleaved(x: Tensor, cut: int, args: Sequence, kwargs: dict, result: Tensor) -> shapes.Place | int | None:
    count, dim = _argument(args, kwargs, 1, "repeats"), _argument(args, kwargs, 2, "dim")
    if dim is None or not isinstance(count, int) or isinstance(count, LocalSize):
        return None
    return (cut, count) if dim % x.dim() == cut else cut


def _unsqueezed(x: Tensor, cut: int, args: Sequence, kwargs: dict, result: Tensor) -> int:
    return cut + (_argument(args, kwargs, 1, "dim") % (x.dim() + 1) <= cut)


def _squeezed(x: Tensor, cut: int, args: Sequence, kwargs: dict, result: Tensor) -> int | None:
    dims = _argument(args, kwargs, 1, "dim")
    dims = range(x.dim()) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = [dim % x.dim() for dim in dims if x.size(dim) == 1]
    return None if cut in gone else shapes.without(cut, gone)


def _taken(x: Tensor, cut: int, args: Sequence, kwargs: dict, result: object, *, removes: bool) -> int | None:
    """select, unbind, narrow, split, ...: some places of one dim."""
    default = 0
    dim = _argument(args, kwargs, 1, "dim", default=default) % x.dim()
    return None if dim == cut else shapes.without(cut, [dim] if removes else [])


def _split(x: Tensor, cut: int, args: Sequence, kwargs: dict, result: object) -> int | None:
    return None if _argument(args, kwargs, 2, "dim", default=0) % x.dim() == cut else cut


def _indexed(x: Tensor, cut: int, args: Sequence, kwargs: dict, result: object) -> int | None:
    if any(_cut_of(one) is not None for one in _tensors(args[1:])):
        return None
    return shapes.indexed(tuple(x.size()), cut, args[1])


def _set_item(func: Callable, args: Sequence, kwargs: dict) -> None:
    x, index, value = args
    layout = _cut_of(x)
    place = None if layout is None else _indexed(x, layout.dim, args[:2], {}, None)
    if place is None:
        _refuse(func, _tensors(args))
    if isinstance(value, Tensor):
        dims = x[index].dim()
        from_right, other = dims - place, _cut_of(value)
        if other is not None and (value.dim() - other.dim, other.size) != (from_right, layout.size):
            _refuse(func, _tensors(args))
        value = _converted(func, value, from_right, layout, _tensors(args))
    func(x, index, value)


def _iterated(func: Callable, args: Sequence, kwargs: dict) -> object:
    return iter(_viewed(torch.unbind, args, kwargs, partial(_taken, removes=True)))


# ---------------------------------------------------------------------- along dims


def _along(func: Callable, args: Sequence, kwargs: dict, place: int, default: object) -> object:
    """Reductions, softmax, cumulative sums, sorting: along dims that columns do not share."""
    x = args[0]
    layout, operands = _cut_of(x), _tensors((*args, *kwargs.values()))
    if len(operands) > 1 and operands[1] is _argument(args, kwargs, 1, "other"):
        return _pointwise(func, args, kwargs)  # torch.max(x, y)
    dims = _argument(args, kwargs, place, "dim", "axis", "dims", default=default)
    if layout is None or len(operands) > 1 or dims is None or isinstance(dims, bool):
        _refuse(func, operands, "over all dims" if dims is None else "")
    dims = [dim % x.dim() for dim in ([dims] if isinstance(dims, int) else dims)]
    if layout.dim in dims or not dims:
        _refuse(func, operands, f"along dim {layout.dim}, which columns share,")
    result = func(*args, **kwargs)
    shorter = shapes.without(layout.dim, dims)
    return _all_marked(result, lambda one: layout.moved(layout.dim if one.dim() == x.dim() else shorter))


def _flipped(x: Tensor, cut: int, args: Sequence, kwargs: dict, result: Tensor) -> int | None:
    return None if cut in [dim % x.dim() for dim in _numbers(args, 1, kwargs, "dims")] else cut


def _normalised(func: Callable, args: Sequence, kwargs: dict) -> object:
    """F.layer_norm and F.rms_norm over trailing dims; weights are constants here."""
    x = args[0]
    shape, layout = _argument(args, kwargs, 1, "normalized_shape"), _cut_of(x)
    others = _tensors((*args[1:], *kwargs.values()))
    if layout is None or layout.dim >= x.dim() - len(shape) or any(map(_cut_of, others)):
        _refuse(func, [x], "over a dim that columns share")
    return mark(func(*args, **kwargs), layout)


def _triangle(x: Tensor, cut: int, args: Sequence, kwargs: dict, result: Tensor) -> int | None:
    return cut if cut < x.dim() - 2 else None


def _padded(x: Tensor, cut: int, args: Sequence, kwargs: dict, result: Tensor) -> int | None:
    widths = _argument(args, kwargs, 1, "pad")
    place = 2 * (x.dim() - 1 - cut)
    return None if any(widths[place:place + 2]) else cut


def _index_add(func: Callable, args: Sequence, kwargs: dict) -> object:
    """index_add and index_copy: rows of `source` go to places of a dim that columns do not share."""
    x, dim = args[0], _argument(args, kwargs, 1, "dim")
    source, layout = _argument(args, kwargs, 3, "source"), _cut_of(args[0])
    theirs = _cut_of(source)
    if layout is None or theirs is None or dim % x.dim() == layout.dim or theirs[1:] != layout[1:]:
        _refuse(func, _tensors((*args, *kwargs.values())), "of tensors that lie on columns in different ways")
    return mark(func(*args, **kwargs), layout)


# ---------------------------------------------------------------------- products


def _matmul(func: Callable, args: Sequence, kwargs: dict) -> object:
    a, b = _argument(args, kwargs, 0, "input", "mat1"), _argument(args, kwargs, 1, "other", "mat2", "tensor2")
    if func is Tensor.__rmatmul__:
        a, b = b, a
    cut_a, cut_b = _cut_of(a), _cut_of(b)
    dims = max(a.dim(), b.dim())
    if min(a.dim(), b.dim()) < 2 or len(kwargs.keys() - {"input", "other", "mat1", "mat2", "tensor2"}):
        _refuse(func, [a, b])
    from_right = {one.dim() - cut.dim for one, cut in ((a, cut_a), (b, cut_b)) if cut is not None}
    place = from_right.pop()
    layout = cut_a or cut_b
    batch = place > 2
    if from_right or (cut_a and cut_b and not (batch and cut_a.size == cut_b.size)):
        _refuse(func, [a, b], "of tensors that lie on columns in different ways")
    if not batch and not (place == 2 if cut_a else place == 1):
        _refuse(func, [a, b], "along the dim that columns share")
    operands = [one if cut is not None else
                _converted(func, one, place, layout, [a, b]) if batch else summed_gradient(plain(one), layout.mesh)
                for one, cut in ((a, cut_a), (b, cut_b))]
    return mark(torch.matmul(*operands), layout.moved(dims - place))


def _linear(func: Callable, args: Sequence, kwargs: dict) -> object:
    x, weight = args[0], _argument(args, kwargs, 1, "weight")
    bias, layout = _argument(args, kwargs, 2, "bias"), _cut_of(args[0])
    if layout is None or layout.dim == x.dim() - 1 or _cut_of(weight) or (bias is not None and _cut_of(bias)):
        _refuse(func, _tensors((*args, *kwargs.values())), "along the dim that columns share")
    others = [None if one is None else summed_gradient(plain(one), layout.mesh) for one in (weight, bias)]
    return mark(func(x, *others), layout)


def _attention(func: Callable, args: Sequence, kwargs: dict) -> object:
    """Each column attends within its heads."""
    named = ("query", "key", "value", "attn_mask", "dropout_p")
    query, key, value, mask, dropped = (_argument(args, kwargs, place, name) for place, name in enumerate(named))
    if func is _FUSED_ATTENTION:  # which has its mask by name only, and dropout_p in its place
        mask, dropped = kwargs.get("attn_mask"), _argument(args, kwargs, 3, "dropout_p")
    if dropped:
        _refuse(func, [query, key, value], "with dropout", _REMEDIES["dropout"])
    layouts = [_cut_of(one) for one in (query, key, value)]
    places = {one.dim() - cut.dim for one, cut in zip((query, key, value), layouts, strict=True) if cut is not None}
    grouped = _argument(args, kwargs, 7, "enable_gqa", default=False)
    if None in layouts or len(places) > 1 or min(places) < 3 or not all(one.is_even for one in layouts) \
            or (len({one.size for one in layouts}) > 1 and not grouped):
        _refuse(func, [query, key, value], "of tensors that lie on columns in different ways",
                "Let the columns share the heads: unflatten(-1, (-1, width)) and transpose(1, 2) of what "
                "Linear(stationary='output', units=heads) returns, for queries, keys and values alike.")
    place = places.pop()
    if isinstance(mask, Tensor):
        if (other := _cut_of(mask)) is not None and (mask.dim() - other.dim, other.size) != (place, layouts[0].size):
            _refuse(func, [query, mask], "of tensors that lie on columns in different ways")
        mask = _converted(func, mask, place, layouts[0], [query, mask])
        if "attn_mask" in kwargs:
            kwargs = kwargs | {"attn_mask": mask}
        else:
            args = (*args[:3], mask, *args[4:])
    return _all_marked(func(*args, **kwargs), lambda one: layouts[0].moved(query.dim() - place))


def _einsum(func: Callable, args: Sequence, kwargs: dict) -> object:
    operands = list(args[1]) if len(args) == 2 and isinstance(args[1], (list, tuple)) else list(args[1:])
    labels = shapes.einsum_labels(args[0]) if isinstance(args[0], str) else None
    if labels is None:
        _refuse(func, _tensors(operands), "with an ellipsis", "Name every dim in the equation.")
    inputs, output = labels
    cuts = [_cut_of(one) for one in operands]
    shared = {(names[cut.dim], cut.size) for names, cut in zip(inputs, cuts, strict=True) if cut is not None}
    label, layout = next(iter(shared))[0], next(filter(None, cuts))
    if len(shared) > 1 or label not in output or any(names.count(label) > 1 for names in inputs):
        _refuse(func, operands, f"{args[0]!r} along a dim that columns share")
    given = [one if cut is not None else
             _converted(func, one, len(names) - names.index(label), layout, operands) if label in names
             else summed_gradient(plain(one), layout.mesh) for one, names, cut in zip(operands, inputs, cuts,
                                                                                      strict=True)]
    return mark(func(args[0], *given), layout.moved(output.index(label)))


# ---------------------------------------------------------------------- which function has which rule


def _of(names: str, *spaces: object) -> list[Callable]:
    """The functions of these names, as torch, its tensors and its functional forms have them."""
    return [found for name in names.split() for space in (spaces or (torch, Tensor, functional, torch.special))
            if callable(found := getattr(space, name, None))]


_UNARY = """abs absolute neg negative positive sign sgn square sqrt rsqrt reciprocal exp exp2 expm1 log log2 log10 log1p
    sin cos tan asin arcsin acos arccos atan arctan sinh cosh tanh asinh acosh atanh sigmoid logit erf erfc erfinv
    expit floor ceil round trunc frac relu relu6 leaky_relu elu selu celu silu gelu mish softplus softsign tanhshrink
    hardtanh hardsigmoid hardswish hardshrink softshrink logsigmoid threshold clamp clip clamp_min clamp_max nan_to_num
    isnan isinf isfinite isposinf isneginf signbit logical_not bitwise_not __neg__ __pos__ __abs__ __invert__"""
_BINARY = """add sub subtract rsub mul multiply div divide true_divide floor_divide remainder fmod pow float_power atan2
    hypot maximum minimum fmax fmin lerp addcmul addcdiv where masked_fill eq ne lt le gt ge not_equal less less_equal
    greater greater_equal logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor copysign xlogy heaviside
    logaddexp logaddexp2 isclose"""
_SIGNS = "add sub mul truediv div floordiv mod pow and or xor"
_CHANGES_FIRST = frozenset(_of(" ".join(f"{name}_" for name in f"{_UNARY} {_BINARY} copy fill".split()), torch, Tensor,
                               functional) + _of(" ".join(f"__i{name}__" for name in _SIGNS.split()), Tensor))
_POINTWISE = _CHANGES_FIRST | frozenset(_of(f"{_UNARY} {_BINARY}") + _of(
    " ".join(f"__{side}{name}__" for name in _SIGNS.split() for side in ("", "r"))
    + " __eq__ __ne__ __lt__ __le__ __gt__ __ge__", Tensor))
_LIKE = (Tensor.data.__get__, *_of("""to type type_as float double half bfloat16 int long short char byte bool clone
    contiguous detach detach_ alias zeros_like ones_like empty_like full_like zero_ cpu cuda resolve_conj resolve_neg
    real __deepcopy__""", torch, Tensor))
_RANDOM = frozenset(_of("""dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout feature_alpha_dropout
    dropout_ alpha_dropout_ bernoulli bernoulli_ rand_like randn_like randint_like normal normal_ uniform_ random_
    exponential_ geometric_ cauchy_ log_normal_ multinomial poisson rrelu rrelu_ gumbel_softmax native_dropout"""))
_PROPERTIES = """dtype device requires_grad is_leaf grad_fn ndim is_cuda is_cpu is_meta is_sparse is_quantized is_nested
    layout _version output_nr grad itemsize _base _backward_hooks grad_dtype is_mkldnn is_xpu is_mps
    retains_grad name"""
_PASSES = frozenset(_of("""dim ndimension stride storage_offset is_contiguous is_floating_point is_complex is_signed
    element_size get_device data_ptr untyped_storage register_hook retain_grad register_post_accumulate_grad_hook
    requires_grad_ is_pinned is_same_size __hash__ __repr__ __str__ __format__ is_tensor is_inference _is_view
    _typed_storage""", Tensor, torch) + [
        getattr(Tensor, name).__get__ for name in _PROPERTIES.split() if hasattr(Tensor, name)] + [
        getattr(Tensor, name).__set__ for name in ("requires_grad", "grad", "_backward_hooks")])


def _rules() -> dict[Callable, Callable]:
    """Function -> rule(func, args, kwargs) for operands of which at least one is cut."""
    rules: dict[Callable, Callable] = {}

    def put(names: str, rule: Callable, *spaces: object) -> None:
        rules.update(dict.fromkeys(_of(names, *spaces), rule))

    def views(names: str, find: Callable, *spaces: object) -> None:
        put(names, partial(_viewed, find=find), *spaces)

    rules.update(dict.fromkeys(_POINTWISE, _pointwise))
    rules.update(dict.fromkeys(_LIKE, _like))
    put("cat concat concatenate stack", _joined, torch)
    put("new_zeros new_ones new_empty new_full", _new, Tensor)
    put("size", _shape, Tensor)
    rules[Tensor.shape.__get__] = _shape
    put("numel nelement", _numel)
    put("__len__", _len, Tensor)
    put("__iter__", _iterated, Tensor)
    put("__setitem__", _set_item, Tensor)
    views("view reshape", _reshaped)
    views("view_as reshape_as", _reshaped_as)
    views("flatten", _flattened)
    views("unflatten", _unflattened)
    views("expand expand_as broadcast_to", _expanded)
    views("repeat", _repeated, Tensor)
    views("repeat_interleave", _interleaved)
    views("unsqueeze", _unsqueezed)
    views("squeeze", _squeezed)
    views("__getitem__", _indexed, Tensor)
    views("select unbind", partial(_taken, removes=True))
    views("narrow index_select", partial(_taken, removes=False))
    views("split split_with_sizes chunk tensor_split", _split)
    views("tril triu", _triangle)
    views("flip", _flipped)
    views("pad", _padded, functional)
    views("permute", lambda x, cut, args, kwargs, result: shapes.permuted(
        x.dim(), cut, _numbers(args, 1, kwargs, "dims")))
    views("transpose swapaxes swapdims", lambda x, cut, args, kwargs, result: shapes.transposed(
        x.dim(), cut, _argument(args, kwargs, 1, "dim0", "axis0"), _argument(args, kwargs, 2, "dim1", "axis1")))
    views("movedim moveaxis", lambda x, cut, args, kwargs, result: shapes.moved(
        x.dim(), cut, _argument(args, kwargs, 1, "source"), _argument(args, kwargs, 2, "destination")))
    views("t", lambda x, cut, args, kwargs, result: x.dim() - 1 - cut)
    for func, pair in ((Tensor.mT, (-2, -1)), (Tensor.mH, (-2, -1))):
        rules[func.__get__] = partial(_viewed, find=lambda x, cut, args, kwargs, result, pair=pair: shapes.transposed(
            x.dim(), cut, *pair))
    for func in (Tensor.T, Tensor.H):
        rules[func.__get__] = partial(_viewed, find=lambda x, cut, args, kwargs, result: x.dim() - 1 - cut)
    for names, place, default in _ALONG:
        put(names, partial(_along, place=place, default=default))
    rules[torch.linalg.vector_norm] = partial(_along, place=2, default=None)
    put("layer_norm rms_norm", _normalised)
    put("index_add index_add_ index_copy index_copy_", _index_add)
    put("matmul bmm mm __matmul__ __rmatmul__", _matmul)
    put("linear", _linear, functional)
    put("einsum", _einsum, torch)
    rules[functional.scaled_dot_product_attention] = _attention
    rules[_FUSED_ATTENTION] = _attention
    return rules


_FUSED_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""What `pipeline.partition` counts attention as."""
_ALONG = (("""sum nansum mean nanmean amax amin prod any all logsumexp softmax log_softmax softmin cumsum cumprod cummax
    cummin logcumsumexp argmax argmin var std var_mean std_mean max min count_nonzero""", 1, None),
          ("sort argsort glu", 1, -1), ("topk kthvalue", 2, -1), ("norm", 2, None), ("normalize", 2, 1),
          ("roll", 2, None))
"""Names, the place of their dim among the arguments, and its default."""
_ANY_REMEDY = "Use the layers of ranvier.tensor.layers for what crosses a dim that columns share."
_REMEDIES = {
    "rms_norm": "Use ranvier.tensor.layers.RMSNorm, with over='inner' between an output- and an input-stationary "
                "Linear.",
    "layer_norm": "Use ranvier.tensor.layers.LayerNorm, with over='inner' between an output- and an input-stationary "
                  "Linear.",
    "dropout": "Use ranvier.tensor.layers.Dropout, whose masks are keyed by place.",
    "mean": "Use ranvier.tensor.layers.RMSNorm or LayerNorm for a norm, and TokenLinear for scores of tokens.",
    "sum": "Use ranvier.tensor.layers.RMSNorm or LayerNorm for a norm, and TokenLinear for scores of tokens.",
    "linear": "Use ranvier.tensor.layers.Linear or TokenLinear.",
}
_RULES = _rules()
