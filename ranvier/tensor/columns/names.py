"""Which torch functions are of which kind, by name: pointwise, random, copies, and those that need no rule."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ranvier.tensor.columns.tensor import Func


def functions(names: str, *spaces: object) -> list[Func]:
    """The functions of these names, as torch, its tensors and its functional forms have them."""
    return [found for name in names.split() for space in (spaces or (torch, Tensor, functional, torch.special))
            if callable(found := getattr(space, name, None))]


def getter(name: str) -> Func:
    """The function that torch calls `__torch_function__` with when the property `name` of a tensor is read."""
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
"""Sizes and properties, which the tensor itself has: they are those of the whole tensor."""

OF_LOCAL = frozenset([getter("requires_grad"), getter("is_leaf"), *functions("is_contiguous", Tensor)])
"""Properties that this column's shard has."""

ALONG_DIMS: tuple[tuple[str, int, int | None], ...] = (
    ("""sum nansum mean nanmean amax amin prod any all logsumexp softmax log_softmax softmin cumsum cumprod cummax
     cummin logcumsumexp argmax argmin var std var_mean std_mean max min count_nonzero flip narrow select""", 1, None),
    ("sort argsort glu", 1, -1), ("unbind", 1, 0), ("split split_with_sizes chunk tensor_split", 2, 0),
    ("topk kthvalue", 2, -1), ("norm", 2, None), ("normalize", 2, 1), ("roll", 2, None))
"""(names, the place of `dim` among the arguments, its default) of functions along dims."""
