"""What the ranks of a tensor mesh receive for one layer, and how much of it crosses between nodes: for `ranvier check`
and for the placement of a run's ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ranvier.config.resolve import ResolvedRun
from ranvier.cost.placement import best_tile, bytes_between_nodes
from ranvier.cost.volume import layer_volume, volume_scheme
from ranvier.precision import DTYPES, reduce_dtype


@dataclass(frozen=True, kw_only=True)
class TensorMeshFacts:
    """Bytes that a rank of the tensor mesh receives for one layer and one microbatch, forward and backward.

    tile: rows and columns of the tensor mesh on one node. node_bytes: what enters a node, and the same with ranks
    numbered row by row. All three are None where the mesh is on one node, or nodes are not known.
    """

    row: int
    col: int
    scheme: str
    layer_bytes: int
    tile: tuple[int, int] | None = None
    node_bytes: int | None = None
    node_bytes_row_by_row: int | None = None

    def __str__(self) -> str:
        text = (f"tensor mesh {self.row} x {self.col}, {self.scheme}: a rank receives {self.layer_bytes / 2**20:,.2f} "
                f"MiB a layer and microbatch, forward and backward")
        if self.tile is None or self.node_bytes is None or self.node_bytes_row_by_row is None:
            return text
        return (f"{text}\nplacement: {self.tile[0]} x {self.tile[1]} of it on each node; "
                f"{self.node_bytes / 2**20:,.2f} MiB of that enter a node (row by row: "
                f"{self.node_bytes_row_by_row / 2**20:,.2f})")


def tensor_mesh_facts(run: ResolvedRun, ranks_per_node: int | None) -> TensorMeshFacts | None:
    """None on stages of one rank, and where rows or columns do not divide the sizes."""
    mesh, model = run.mesh, run.model
    if mesh.stage_size == 1:
        return None
    try:
        volume = layer_volume(volume_scheme(run.tensor), row=mesh.row, col=mesh.col, batch=run.batch.microbatch_size,
                              sequence=model.sequence, hidden=model.hidden, itemsize=DTYPES[run.precision].itemsize,
                              sum_itemsize=reduce_dtype(run.tensor, DTYPES[run.precision]).itemsize)
    except ValueError:
        return None
    facts = TensorMeshFacts(row=mesh.row, col=mesh.col, scheme=volume_scheme(run.tensor),
                            layer_bytes=round(volume.total))
    if ranks_per_node is None or ranks_per_node >= mesh.stage_size:
        return facts
    received = {"along_row_bytes": volume.forward.weights + volume.backward.weights,
                "along_col_bytes": volume.forward.activations + volume.backward.activations}
    tile = mesh.tile or best_tile(mesh.row, mesh.col, ranks_per_node, **received)
    by_row = (max(1, ranks_per_node // mesh.col), min(mesh.col, ranks_per_node))
    return replace(facts, tile=tile, node_bytes=round(bytes_between_nodes(mesh.row, mesh.col, tile, **received)),
                   node_bytes_row_by_row=round(bytes_between_nodes(mesh.row, mesh.col, by_row, **received)))
