"""Tensors of one carried state that share memory, such as {"hidden": y, "residual": y}.

Within a stage a change of one in place changes the others; the next stage has each by itself. So that the cut decides
nothing, a block that changes such a tensor in place is refused, wherever the model is cut.

    block 0 -> {"a": y, "b": y} -> | {"a": y, "b": y, a note of both} | -> block 1: a.add_(1)      refused
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ranvier.errors import ModelError


def sharing(state: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors whose memory, from the first to the last element, overlaps that of another."""
    if len(state) < 2:
        return []
    places = {name: _Place.of(tensor) for name, tensor in state.items() if tensor.layout is torch.strided}
    return [name for name, one in places.items()
            if any(one.overlaps(two) for other, two in places.items() if other != name)]


class _Place(NamedTuple):
    """The bytes of a storage between which a tensor lies."""

    storage: int
    start: int
    stop: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Place:
        steps = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
        start, size = int(tensor.storage_offset()), tensor.element_size()
        return cls(tensor.untyped_storage()._cdata, start * size,
                   (start + 1 + int(steps)) * size if tensor.numel() else start * size)

    def overlaps(self, other: _Place) -> bool:
        return self.storage == other.storage and self.start < other.stop and other.start < self.stop


class SharedMemory:
    """Watches tensors that share memory while the blocks of a stage run on one microbatch."""

    def __init__(self) -> None:
        self._watched: list[tuple[str, Tensor, int]] = []

    def watch(self, state: Mapping[str, Tensor], names: Sequence[str]) -> None:
        """Notice changes in place of these."""
        self._watched += [(name, state[name], state[name]._version) for name in names
                          if not state[name].is_inference()]

    def names_in(self, state: Mapping[str, Tensor]) -> list[str]:
        """Names of the tensors of what leaves a stage that share memory, or have shared it before an earlier stage."""
        if not self._watched:
            return sharing(state)
        watched = [_Place.of(tensor) for _, tensor, _ in self._watched]
        return sorted({*sharing(state), *(name for name, tensor in state.items()
                                          if any(map(_Place.of(tensor).overlaps, watched)))})

    def check(self) -> None:
        """ModelError where one has been changed; those watched so far are let go."""
        watched, self._watched = self._watched, []
        for name, tensor, version in watched:
            if tensor._version != version:
                raise ModelError("is changed in place, and shares its memory with another tensor of the carried state, "
                                 "which a next stage has by itself", code="shared-state-changed",
                                 where=f'tensor "{name}" of the carried state',
                                 remedy="Write the operation out of place, or let the block before clone it.")
