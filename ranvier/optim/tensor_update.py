"""One tensor that a `TensorRule` updates, with access to the parts of it on other ranks.

    gather(x)   | x00 x01 |     all ranks of the stage gather the parts     part(x)    the part of this rank
                | x10 x11 |
    sum(x)      the sum of all parts' elements, or of their rows or columns

On a rank that holds the full tensor these are free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ranvier.comm.protocol import Group
from ranvier.layout import Box, box_size, index_of, whole_box


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorSplit:
    """Sharding of a tensor over the row x col ranks of a stage.

    boxes: the part that each member of `group` holds. device: on which the group communicates.
    """

    group: Group
    boxes: Sequence[Box]
    device: torch.device

    @property
    def own_box(self) -> Box:
        """The box that this rank holds."""
        return self.boxes[self.group.index]


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorUpdate:
    """A tensor with the data that its update needs.

    shape: of the full tensor. parameter, gradient: this rank's part of it; all of it without rows and columns.
    states: those of `TensorRule.state_shapes`, in their shapes. step: of the update, from 1.
    """

    shape: tuple[int, ...]
    parameter: Tensor
    gradient: Tensor
    states: Mapping[str, Tensor]
    step: int
    learning_rate: float
    weight_decay: float
    split: TensorSplit | None = None

    def gather(self, part: Tensor) -> Tensor:
        """The full tensor, from each rank's part. Collective over the ranks that share the tensor."""
        if self.split is None:
            return part
        boxes, group = self.split.boxes, self.split.group
        largest = max(map(box_size, boxes))
        sent = part.new_zeros(largest, device=self.split.device)
        sent[:part.numel()].copy_(part.reshape(-1))
        arrived = sent.new_empty(largest * len(boxes))
        group.all_gather(arrived, sent).wait()
        found = part.new_empty(self.shape)
        for box, values in zip(boxes, arrived.view(len(boxes), largest), strict=True):
            place = found[index_of(box, whole_box(self.shape))]
            place.copy_(values[:box_size(box)].view(place.shape))
        return found

    def part(self, tensor: Tensor) -> Tensor:
        """This rank's part of a full tensor. Dims of size 1, which were summed over, stay."""
        if self.split is None:
            return tensor
        return tensor[tuple(slice(None) if size == 1 else slice(*edges)
                            for size, edges in zip(tensor.shape, self.split.own_box, strict=True))]

    def sum(self, part: Tensor, dim: int | None = None) -> Tensor:
        """The sum of a tensor, from each rank's part, over all elements (dim None) or along one dim, which stays with
        size 1. Collective over the ranks that share the tensor."""
        found = part.sum() if dim is None else part.sum(dim, keepdim=True)
        if self.split is None:
            return found
        if dim is not None:
            shape = list(self.shape)
            shape[dim] = 1
            placed = found.new_zeros(shape)
            self.part(placed).copy_(found)
            found = placed
        sent = found.to(self.split.device, copy=True).contiguous()
        self.split.group.all_reduce(sent).wait()
        return sent.to(found.device)
