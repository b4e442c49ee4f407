"""Tensors that carry their layout over the columns of a tensor mesh: what a block computes with between its layers.

    layout, local_size     the layout of a tensor, conversions between layouts, sizes of sharded dims
    tensor                 `ColumnTensor`: the tensor subclass
    dispatch               the table of rules; pointwise, views, reductions and products have the rules
    local_map              a function of plain tensors on one column's shards, past the rules
"""

from ranvier.tensor.columns.dispatch import dispatch
from ranvier.tensor.columns.layout import ColumnLayout, own_part_of, summed_gradient
from ranvier.tensor.columns.local_map import local_map
from ranvier.tensor.columns.local_size import LocalSize
from ranvier.tensor.columns.refusal import refuse
from ranvier.tensor.columns.tensor import ColumnTensor, layout_of_tensor, mapped, mark, plain

__all__ = ["ColumnLayout", "ColumnTensor", "LocalSize", "layout_of_tensor", "local_map", "mapped", "mark",
           "own_part_of", "plain", "refuse", "summed_gradient"]

# The rules import the class, so the class cannot import them.
ColumnTensor.dispatch = dispatch
