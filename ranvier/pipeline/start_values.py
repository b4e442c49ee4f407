"""Ranks that hold the same start from the same values, whatever their builders have made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torch.autograd.graph import increment_version

from ranvier.comm.protocol import Group
from ranvier.layout import Layout
from ranvier.pipeline.connections import Connections
from ranvier.tensor.quantized_weight import stored_tensors


def share_start_values(layout: Layout, blocks: Sequence[tuple[int, str, nn.Module]],
                       parameters: Mapping[str, nn.Parameter], connections: Connections) -> None:
    """Replicas take replica 0's weights and buffers, and positions of the tensor mesh that hold the same elements those
    of the first of them. Collective.

    blocks: those of this rank. parameters: theirs, by key. Ends of ties are exchanged elsewhere.
    """
    groups: dict[Tensor, Group] = {stored: connections.data for _, _, module in blocks
                                   for tensor in (*module.parameters(), *module.buffers())
                                   for stored in stored_tensors(tensor)}
    groups |= {stored: connections.sums[layout[name].summed] for name, parameter in parameters.items()
               if layout[name].summed for stored in stored_tensors(parameter)}
    tensors = {tensor: tensor.data.contiguous() for tensor in groups}  # itself, but for transposed ones and the like
    for work in [group.broadcast(tensors[tensor]) for tensor, group in groups.items() if len(group.ranks) > 1]:
        work.wait()
    for tensor, value in tensors.items():
        tensor.data.copy_(value)
        if groups[tensor].index:
            increment_version(tensor)  # `trained_elsewhere` sees by it that the values are new here
    if connections.tensor_mesh is not None:
        columns = {*layout.mesh.over(splits_features=True)}
        copies = [stored for name, parameter in parameters.items() if columns & {*layout.copy_axes(name)}
                  for stored in stored_tensors(parameter)]
        for work in [connections.tensor_mesh.over_cols.broadcast(tensor.data) for tensor in copies]:
            work.wait()
