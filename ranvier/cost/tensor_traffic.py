"""Bytes that the ranks of a tensor mesh receive for one layer, and the part that crosses between nodes: for `ranvier
check` and for the placement of a run's ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ranvier.config.resolve import ResolvedRun
from ranvier.cost.node_placement import best_tile, bytes_between_nodes
from ranvier.cost.volume import block_volume, layer_transfers, transformer_layer, volume_scheme
from ranvier.precision import DTYPES, sum_dtype


@dataclass(frozen=True, kw_only=True)
class TensorMeshFacts:
    """Bytes that a rank of the tensor mesh receives for one layer and one microbatch, forward and backward.

    exposed_bytes: those that are received, on a CUDA device, while no product is computed (`exposed_layer_bytes`); None
    elsewhere. tile: rows and columns of the tensor mesh on one node. node_bytes: bytes that enter a node, and the same
    with ranks numbered row by row. The last three are None if the mesh is on one node, or nodes are not known.
    """

    row: int
    col: int
    scheme: str
    layer_bytes: int
    exposed_bytes: int | None = None
    tile: tuple[int, int] | None = None
    node_bytes: int | None = None
    node_bytes_row_by_row: int | None = None

    def __str__(self) -> str:
        text = (f"tensor mesh {self.row} x {self.col}, {self.scheme}: a rank receives {self.layer_bytes / 2**20:,.2f} "
                f"MiB per layer and microbatch, forward and backward")
        if self.exposed_bytes is not None:
            text += f", of which {self.exposed_bytes / 2**20:,.2f} MiB while no product is computed"
        if self.tile is None or self.node_bytes is None or self.node_bytes_row_by_row is None:
            return text
        other = "" if self.node_bytes == self.node_bytes_row_by_row else (
            f" ({self.node_bytes_row_by_row / 2**20:,.2f} with ranks numbered row by row)")
        return (f"{text}\nplacement: {self.tile[0]} x {self.tile[1]} of the tensor mesh on each node, which "
                f"{self.node_bytes / 2**20:,.2f} MiB a layer and microbatch enter{other}")


def exposed_layer_bytes(run: ResolvedRun) -> int | None:
    """Bytes of a layer that are sent while no product is computed (`layer_transfers`). None for SUMMA, whose broadcasts
    depend on the rank."""
    mesh, model, scheme = run.mesh, run.model, volume_scheme(run.tensor)
    if scheme == "summa":
        return None
    transfers = [layer_transfers(
        layer, scheme, row=mesh.row, col=mesh.col, itemsize=DTYPES[run.precision].itemsize,
        elements=run.batch.microbatch_size * model.sequence * model.hidden, sum_itemsize=_sum_itemsize(run),
        panel_bytes=run.tensor.panel_bytes, recomputed=run.memory.recompute not in ("none", "selective"))
        for layer in transformer_layer(1)]
    return round(sum(each.exposed for each in transfers))


def _sum_itemsize(run: ResolvedRun) -> int:
    """Bytes of an element of activations that are summed over columns."""
    return sum_dtype(run.tensor, DTYPES[run.precision], run.device_type).itemsize


def tensor_mesh_facts(run: ResolvedRun, ranks_per_node: int | None) -> TensorMeshFacts | None:
    """The facts for a run; None for stages of one rank, and if rows or columns do not divide the sizes."""
    mesh, model = run.mesh, run.model
    if mesh.stage_size == 1:
        return None
    try:
        volume = block_volume(transformer_layer(model.hidden), volume_scheme(run.tensor), row=mesh.row, col=mesh.col,
                              batch=run.batch.microbatch_size, sequence=model.sequence, hidden=model.hidden,
                              itemsize=DTYPES[run.precision].itemsize, sum_itemsize=_sum_itemsize(run))
    except ValueError:
        return None
    facts = TensorMeshFacts(row=mesh.row, col=mesh.col, scheme=volume_scheme(run.tensor),
                            layer_bytes=round(volume.total),
                            exposed_bytes=exposed_layer_bytes(run) if run.launch.device == "cuda" else None)
    if ranks_per_node is None or ranks_per_node >= mesh.stage_size:
        return facts
    received = {"along_row_bytes": volume.forward.weights + volume.backward.weights,
                "along_col_bytes": volume.forward.activations + volume.backward.activations}
    tile = mesh.tile or best_tile(mesh.row, mesh.col, ranks_per_node, **received)
    by_row = (max(1, ranks_per_node // mesh.col), min(mesh.col, ranks_per_node))
    return replace(facts, tile=tile, node_bytes=round(bytes_between_nodes(mesh.row, mesh.col, tile, **received)),
                   node_bytes_row_by_row=round(bytes_between_nodes(mesh.row, mesh.col, by_row, **received)))
