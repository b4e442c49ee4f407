"""Tensors that share memory: two parameters, which are refused, and a user's views of a parameter, which follow it.

    self.weight_t = self.linear.weight.data.t()
    self.register_buffer("start", self.linear.weight.detach()[0])

In plain PyTorch they have the parameter's values after any update. So they move when an engine moves the parameter:

    views = ViewsOfParameters(parameters)
    ...                                       the parameters get other memory, contiguous and with the same values
    views.follow()
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from itertools import islice, pairwise
from typing import Generic, TypeVar
from weakref import finalize, ref

import torch
from torch import Tensor, nn

from ranvier.errors import ModelError

_IS_ENGINES = "ranvier_flat_parameters"
_Key = TypeVar("_Key")


def storage_of(tensor: Tensor) -> int:
    """The address of its storage; 0 if it has none, and for subclasses, which may have several."""
    if type(tensor) not in (Tensor, nn.Parameter):
        return 0
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # a sparse one, or one inside a transform of functions
        return 0


def extent(tensor: Tensor) -> tuple[int, int]:
    """Addresses of the first byte of its elements and of the byte after the last."""
    start, sizes = tensor.data_ptr(), zip(tensor.shape, tensor.stride(), strict=True)
    return start, start + tensor.itemsize * (1 + sum((size - 1) * step for size, step in sizes)) * bool(tensor.numel())


def overlaps(tensor: Tensor, other: Tensor) -> bool:
    """Whether both, in one storage, overlap in memory, or one is between the elements of the other."""
    (start, stop), (first, last) = extent(tensor), extent(other)
    return start < last and first < stop


def refuse_parameters_over_one_memory(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise ModelError if a trainable parameter shares elements with another parameter: an update of one changes both
    while they are on the same stage, and neither gradient is that of both."""
    places: dict[int, list[tuple[int, int, str, nn.Parameter]]] = {}
    for name, parameter in parameters.items():
        if (type(parameter) is not nn.Parameter or parameter.is_meta or parameter.layout is not torch.strided
                or not parameter.numel()):
            continue
        start = parameter.data_ptr()
        is_dense = parameter.numel() == 1 + sum((n - 1) * step
                                                for n, step in zip(parameter.shape, parameter.stride(), strict=True))
        stop = start + (parameter.nbytes if is_dense else 1)
        places.setdefault(parameter.untyped_storage()._cdata, []).append((start, stop, name, parameter))
    for group in places.values():
        group.sort(key=lambda place: place[0])
        for number, (_, stop, other, two) in enumerate(group):
            for start, _, name, parameter in islice(group, number + 1, None):
                if start >= stop:
                    break
                if two is not parameter and (parameter.requires_grad or two.requires_grad):
                    raise ModelError(f"has its values in the memory of {other}, and is a separate parameter",
                                     code="parameters-over-one-memory", where=f"parameter {name}",
                                     value=tuple(parameter.shape),
                                     remedy="Tie them as one parameter (one.weight = other.weight), or give each its "
                                            "own memory: nn.Parameter(other.weight.detach().clone()).")


def copies_of(tensors: Iterable[Tensor]) -> dict[int, Tensor]:
    """The identity of each tensor -> its copy. Copies of views of each other are views of each other if
    they have one dtype."""
    groups: dict[int, dict[int, Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(storage_of(tensor) or -id(tensor), {})[id(tensor)] = tensor
    found: dict[int, Tensor] = {}
    for group in groups.values():
        first, *others = group.values()
        extents = sorted(map(extent, group.values())) if others else []
        if not any(stop > start for (_, stop), (start, _) in pairwise(extents)) or any(
                one.dtype != first.dtype or one.requires_grad for one in group.values()):
            found |= {number: tensor.clone() for number, tensor in group.items()}
            continue
        start, stop = extents[0][0], max(stop for _, stop in extents)
        before = first.storage_offset() - (first.data_ptr() - start) // first.itemsize
        whole = first.new_empty(0).set_(first.untyped_storage(), before, [(stop - start) // first.itemsize], [1])
        memory = whole.clone()
        for number, tensor in group.items():
            view = memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset() - before)
            view = view.conj() if tensor.is_conj() else view
            found[number] = torch._neg_view(view) if tensor.is_neg() else view
    return found


class ByMemory(Generic[_Key]):
    """Tensors by their memory. keyed: (key, tensor); keys may repeat. Tensors without a storage are left out."""

    def __init__(self, keyed: Iterable[tuple[_Key, Tensor]]) -> None:
        self._of_storage: dict[int, list[tuple[_Key, Tensor]]] = {}
        for key, tensor in keyed:
            self._of_storage.setdefault(storage_of(tensor), []).append((key, tensor))
        self._of_storage.pop(0, None)

    def __bool__(self) -> bool:
        return bool(self._of_storage)

    def overlapping(self, tensor: Tensor) -> list[_Key]:
        """The keys of the tensors that overlap with a tensor in memory."""
        return [key for key, other in self._of_storage.get(storage_of(tensor), ()) if overlaps(tensor, other)]


def mark_as_engines(tensor: Tensor) -> None:
    """Mark `tensor` as an engine's buffer, of which parameters are views, instead of a user's tensor."""
    setattr(tensor, _IS_ENGINES, True)


class ViewsOfParameters:
    """All tensors of the program that share the memory of `parameters`, wherever they are referenced.

    The reference count of a storage shows whether there are any; only then are all objects searched.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._following: list[tuple[Tensor, nn.Parameter, int]] = []
        """View, parameter, and the offset of the view in elements."""
        self.left: list[ref[Tensor]] = []
        """Tensors that cannot follow, because they share the memory of several parameters, of other values too, or of a
        parameter whose elements are not in order."""
        self.has_arrays = False
        """Whether NumPy arrays may be over the memory; they cannot follow."""
        shared: dict[int, list[nn.Parameter]] = {}
        for parameter in parameters:
            if start := storage_of(parameter):
                shared.setdefault(start, []).append(parameter)
        shared = {start: group for start, group in shared.items() if _num_references(group[0]) > len(group)}
        if shared:
            self.has_arrays = not all(group[0].untyped_storage().resizable() for group in shared.values())
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
        """Move the views after the parameters have moved to memory in which their elements are in order."""
        for tensor, parameter, before in self._following:
            if not (memory := tensor.untyped_storage()).resizable():
                finalize(tensor, id, memory)  # a NumPy array over the memory keeps only the tensor alive
            tensor.data = parameter.data.as_strided(tensor.shape, tensor.stride(), parameter.storage_offset() + before)
        self._following = []


def _all_tensors() -> list[Tensor]:
    """All tensors of the program. They are found by their type, to which each object refers.

    A list of all objects would also refer to tuples that other threads are filling, which would then fail there.
    """
    return [tensor for tensor in gc.get_referrers(Tensor, nn.Parameter) if type(tensor) in (Tensor, nn.Parameter)]


def _num_references(tensor: Tensor) -> int:
    """The number of tensors that use this tensor's storage."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) - 1
