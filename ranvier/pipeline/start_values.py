"""Ranks that hold the same start from the same values, whatever their builders have made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from ranvier.comm.protocol import Group
from ranvier.layout import Layout
from ranvier.pipeline.connections import Connections


def share_start_values(layout: Layout, blocks: Sequence[tuple[int, str, nn.Module]],
                       parameters: Mapping[str, nn.Parameter], connections: Connections) -> None:
    """Replicas take replica 0's weights and buffers, and positions of the tensor mesh that hold the same elements those
    of the first of them. Collective.

    blocks: those of this rank. parameters: theirs, by key. Ends of ties are exchanged elsewhere.
    """
    groups: dict[Tensor, Group] = {tensor: connections.data for _, _, module in blocks
                                   for tensor in (*module.parameters(), *module.buffers())}
    groups |= {parameter: connections.sums[layout[name].summed]
               for name, parameter in parameters.items() if layout[name].summed}
    tensors = {tensor: tensor.data.contiguous() for tensor in groups}  # itself, but for transposed ones and the like
    for work in [group.broadcast(tensors[tensor]) for tensor, group in groups.items() if len(group.ranks) > 1]:
        work.wait()
    for tensor, value in tensors.items():
        tensor.data.copy_(value)
    if connections.tensor_mesh is not None:
        copies = [parameter for name, parameter in parameters.items() if "col" in layout.copy_axes(name)]
        for work in [connections.tensor_mesh.over_cols.broadcast(parameter.data) for parameter in copies]:
            work.wait()
