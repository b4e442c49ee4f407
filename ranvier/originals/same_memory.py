"""Tensors of a user's that lie over the memory of parameters, such as views made before there is an engine.

    self.weight_t = self.linear.weight.data.t()
    self.register_buffer("start", self.linear.weight.detach()[0])

In plain PyTorch they have the parameter's values, whatever updates it. So they move when an engine moves the parameter:

    views = ViewsOfParameters(parameters)
    ...                                       the parameters get other memory, contiguous and with the same values
    views.follow()
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from itertools import chain, compress, tee
from typing import Any, Generic, TypeVar
from weakref import finalize, ref

import torch
from torch import Tensor, nn

_IS_ENGINES = "ranvier_flat_parameters"
_Key = TypeVar("_Key")


def storage_of(tensor: Tensor) -> int:
    """Where its storage begins; 0 where it has none, and for subclasses, which may have several."""
    if type(tensor) not in (Tensor, nn.Parameter):
        return 0
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # a sparse one, or one inside a transform of functions
        return 0


def extent(tensor: Tensor) -> tuple[int, int]:
    """Addresses of the first byte of its elements and of that behind the last one."""
    start, sizes = tensor.data_ptr(), zip(tensor.shape, tensor.stride(), strict=True)
    return start, start + tensor.itemsize * (1 + sum((size - 1) * step for size, step in sizes)) * bool(tensor.numel())


def overlaps(tensor: Tensor, other: Tensor) -> bool:
    """Whether both, of one storage, lie over the same memory, or one between the elements of the other."""
    (start, stop), (first, last) = extent(tensor), extent(other)
    return start < last and first < stop


class ByMemory(Generic[_Key]):
    """Tensors by their memory. keyed: a key of each, which need not differ. Those without a storage are left out."""

    def __init__(self, keyed: Iterable[tuple[_Key, Tensor]]) -> None:
        self._of_storage: dict[int, list[tuple[_Key, Tensor]]] = {}
        for key, tensor in keyed:
            self._of_storage.setdefault(storage_of(tensor), []).append((key, tensor))
        self._of_storage.pop(0, None)

    def __bool__(self) -> bool:
        return bool(self._of_storage)

    def overlapping(self, tensor: Tensor) -> list[_Key]:
        """The keys of those that lie over the same memory as a tensor."""
        return [key for key, other in self._of_storage.get(storage_of(tensor), ()) if overlaps(tensor, other)]


def mark_as_engines(tensor: Tensor) -> None:
    """Parameters of an engine are views of `tensor`, which is nothing of a user's."""
    setattr(tensor, _IS_ENGINES, True)


class ViewsOfParameters:
    """All tensors of the program over the memory of `parameters`, whoever holds them.

    Whether there are any, the count of references to a storage tells; only then is each object looked at.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._following: list[tuple[Tensor, nn.Parameter, int]] = []
        """View, parameter, and the number of elements between the beginnings of both."""
        self.left: list[ref[Tensor]] = []
        """Tensors that cannot follow: over several parameters, over other values too, or over one whose elements are
        not in order."""
        shared: dict[int, list[nn.Parameter]] = {}
        for parameter in parameters:
            if start := storage_of(parameter):
                shared.setdefault(start, []).append(parameter)
        shared = {start: group for start, group in shared.items() if _num_references(group[0]) > len(group)}
        if shared:
            for tensor in _all_tensors():
                if (group := shared.get(storage_of(tensor))) is not None:
                    self._add(tensor, group)

    def _add(self, tensor: Tensor, parameters: list[nn.Parameter]) -> None:
        if hasattr(tensor, _IS_ENGINES) or hasattr(tensor._base, _IS_ENGINES):
            return
        start, stop = extent(tensor)
        for parameter in parameters:
            first, last = extent(parameter)
            if parameter is tensor or stop <= first or last <= start:
                continue
            if first <= start and stop <= last and parameter.is_contiguous() and parameter.dtype == tensor.dtype:
                self._following.append((tensor, parameter, (start - first) // parameter.itemsize))
            else:
                self.left.append(ref(tensor))

    def follow(self) -> None:
        """The parameters have other memory, in which their elements are in order."""
        for tensor, parameter, before in self._following:
            if not (memory := tensor.untyped_storage()).resizable():
                finalize(tensor, id, memory)  # a NumPy array over the memory keeps the tensor alone
            tensor.data = parameter.data.as_strided(tensor.shape, tensor.stride(), parameter.storage_offset() + before)
        self._following = []


def _all_tensors() -> list[Tensor]:
    """Of the whole program.

    All objects go through one call of C code, which refers to none but tensors when it ends, and calls nothing of a
    user's. Another thread that goes on would fail where somebody else referred to a tuple that it is just filling.
    """
    return list(_with_types(*tee(chain.from_iterable(map(gc.get_objects, (None,))))))


def _with_types(objects: Iterator[Any], same: Iterator[Any]) -> Iterator[Any]:
    """Those of `objects` that are tensors. By identity: a class may have a comparison of its own, and no hash."""
    return compress(objects, map({id(Tensor), id(nn.Parameter)}.__contains__, map(id, map(type, same))))


def _num_references(tensor: Tensor) -> int:
    """How many tensors there are over the storage of this one."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) - 1
