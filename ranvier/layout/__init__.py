"""Placement of parameters: the slice of each parameter that each rank holds, and the rank that owns it.

A slice is a box of the parameter, (start, stop) per dim, or a flat interval of the box in row-major order: shares of
optimizer states cut through parameters. A flat interval of a box is itself a few boxes, so everything here is
arithmetic on boxes.

    boxes     boxes, slices, the cut of a size into equal parts, and moves after which every rank has what it needs
    split     how a parameter lies on the row x col mesh
    chunks    the order of a rank's gradients in one flat buffer, and its cut into chunks and shares
    layout    parameters -> slices -> ranks: which rank holds, updates and owns each
    panels    the cut of activations that are transferred while others are multiplied

Pure: no process group, no clock, no I/O.
"""

from ranvier.layout.boxes import Box, Move, Places, Slice, box_size, index_of, intersection, part, plan_moves, whole_box
from ranvier.layout.chunks import ChunkCut, FlatGradient, FlatOrder, flat_order
from ranvier.layout.layout import Chunking, Layout, Parameter, frozen_blocks
from ranvier.layout.split import Split, TensorAxis

__all__ = ["Box", "ChunkCut", "Chunking", "FlatGradient", "FlatOrder", "Layout", "Move", "Parameter", "Places", "Slice",
           "Split", "TensorAxis", "box_size", "flat_order", "frozen_blocks", "index_of", "intersection", "part",
           "plan_moves", "whole_box"]
