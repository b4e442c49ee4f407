"""Tensors that carry their layout over the columns of a tensor mesh: what a block computes with between its layers.

    layout                 the layout of a tensor, and conversions between layouts
    tensor                 `ColumnTensor`: the tensor subclass, which has the sizes of the whole tensor
    dispatch               the closed list of functions; `rules` and `views` compute them
    local_map              a function of plain tensors on one column's shards, bypassing the rules; outputs that leave
                           the model, gathered on every column
"""

from ranvier.tensor.columns.dispatch import dispatch
from ranvier.tensor.columns.layout import ColumnLayout, own_part_of, summed_gradient
from ranvier.tensor.columns.local_map import gather_whole, local_map
from ranvier.tensor.columns.tensor import (
    ColumnTensor,
    layout_of_tensor,
    mapped,
    mark,
    on_local,
    plain,
    refuse,
    refuse_own_graph,
)

__all__ = ["ColumnLayout", "ColumnTensor", "gather_whole", "layout_of_tensor", "local_map", "mapped", "mark",
           "on_local", "own_part_of", "plain", "refuse", "refuse_own_graph", "summed_gradient"]

# The rules import the class, so the class cannot import them.
ColumnTensor.dispatch = dispatch
