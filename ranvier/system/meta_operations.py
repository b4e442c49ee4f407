"""Operations on the meta device, each computed once for every form of its arguments.

torch computes the form of many results in Python there, which takes up to a millisecond, compared to 25 us for a
product; counts on that device repeat a few forms thousands of times.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


class _Form(NamedTuple):
    """Form of a plain tensor on the meta device."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def new(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
_MOST = 4096
_known: dict[Hashable, Hashable] = {}
"""Forms of results, the last `_MOST` of them; None if a result is not entirely new memory."""


def run_on_meta(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return `func(*args, **kwargs)` for an operation that a dispatch mode is given: new tensors of the same form if it
    has run with such arguments before. Operations that write or return their arguments or are not torch's own, and
    arguments that are neither plain values nor plain tensors on the meta device, are left to torch, as is everything
    under another mode."""
    if not _is_functional(func) or torch._C._len_torch_dispatch_stack():
        return func(*args, **kwargs)
    try:
        key = func, torch.get_default_dtype(), _form_of(args), _form_of(kwargs)
        found = _known.get(key)
    except TypeError:  # another argument
        return func(*args, **kwargs)
    if found is not None:
        return _made(found)
    result = func(*args, **kwargs)
    if key not in _known:
        while len(_known) >= _MOST:
            _known.pop(next(iter(_known)), None)  # ranks that are threads share it
        _known[key] = _form_of_new(result, (args, kwargs))
    return result


@cache
def _is_functional(func: Any) -> bool:
    return isinstance(func, torch._ops.OpOverload) and func.namespace == "aten" and all(
        each.alias_info is None for each in (*func._schema.arguments, *func._schema.returns))


def _form_of(value: Any) -> Hashable:
    """A key that is equal for values for which an operation makes results of the same form. Raises TypeError if that is
    not known."""
    if isinstance(value, Tensor):
        if type(value) not in (Tensor, nn.Parameter) or not value.is_meta or value.layout is not torch.strided:
            raise TypeError
        return _Form(tuple(value.shape), value.stride(), value.dtype)
    if isinstance(value, (tuple, list)):
        return type(value), *map(_form_of, value)
    if isinstance(value, Mapping):
        return type(value), *((key, _form_of(each)) for key, each in value.items())
    if type(value) not in _PLAIN:
        raise TypeError
    return type(value), value  # 1, 1.0 and True are equal


def _made(form: Any) -> Any:
    """Make new tensors of such a form."""
    if isinstance(form, _Form):
        return form.new()
    kind, *values = form
    return kind(map(_made, values)) if kind in (tuple, list) else values[0]


def _form_of_new(result: Any, given: Any) -> Hashable:
    """The form of what an operation returns; None if that is not entirely new memory, whatever its schema says."""
    made = _tensors(result)
    if not made or type(result) not in (Tensor, tuple, list):
        return None
    try:
        form = _form_of(result)
    except TypeError:
        return None
    storages = [leaf.untyped_storage() for leaf in made]
    own = {storage._cdata for storage in storages}
    others = {leaf.untyped_storage()._cdata for leaf in _tensors(given)}
    is_whole = all(leaf.storage_offset() == 0 and storage.nbytes() == like.untyped_storage().nbytes()
                   for leaf, storage, like in zip(made, storages, _tensors(_made(form)), strict=True))
    return form if is_whole and len(own) == len(made) and not own & others else None


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
