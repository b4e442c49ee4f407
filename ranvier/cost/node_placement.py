"""Placement of the tensor mesh's rows and columns on nodes, so that the fewest bytes cross between nodes.

    node = 1 x 4 ranks of 4 x 4            node = 2 x 2
    a a a a                                a a b b
    b b b b    all 4 columns cross,        a a b b    2 rows and 2 columns cross,
    c c c c    each through 4 nodes        c c d d    each through 2 nodes
    d d d d                                c c d d

Xu et al., 2021 (Optimus), Figure 8. The count is of bytes that must enter a node: each panel of a row or column that a
member there lacks, once. Broadcasts of single panels and node-aware collectives achieve this. A ring collective over m
members, t of them on the node, sends the node its own panels again: m - 1 panels instead of the m - t from elsewhere;
with rings, and equal bytes along both axes, 1 x 4 and 2 x 2 above are equal. Pure.
"""

from __future__ import annotations

from ranvier.mesh import divisors


def bytes_between_nodes(row: int, col: int, tile: tuple[int, int], *, along_row_bytes: float, along_col_bytes: float
                        ) -> float:
    """Bytes that enter a node, which holds a `tile` (rows, columns) of the row x col mesh.

    along_row_bytes, along_col_bytes: bytes that one rank receives along that axis of the mesh, from
    `ranvier.cost.volume`: weights along `row`, from the other ranks of its column; activations along `col`.
    """
    rows, cols = tile
    return rows * _entering(along_col_bytes, col, cols) + cols * _entering(along_row_bytes, row, rows)


def _entering(received_bytes: float, members: int, together: int) -> float:
    """Bytes that enter a node with `together` of the `members`, out of those that each receives from all others."""
    return received_bytes * (members - together) / (members - 1) if members > 1 else 0.0


def best_tile(row: int, col: int, ranks_per_node: int, *, along_row_bytes: float, along_col_bytes: float
              ) -> tuple[int, int]:
    """The (rows, columns) of the mesh that a node should hold, for `Mesh.tile`; the squarest if several are equal.

    The full mesh if it fits on a node. A node whose number of ranks does not tile the mesh holds several tiles, of the
    largest divisor that does; (1, 1), as a last resort, is the order row by row. Bytes as above.
    """
    if row * col <= ranks_per_node:
        return row, col

    def cost(tile: tuple[int, int]) -> tuple[float, int]:
        return (bytes_between_nodes(row, col, tile, along_row_bytes=along_row_bytes, along_col_bytes=along_col_bytes),
                abs(tile[0] - tile[1]))

    tiles = ([(rows, size // rows) for rows in divisors(size) if row % rows == 0 and col % (size // rows) == 0]
             for size in reversed(divisors(ranks_per_node)))
    return min(next(filter(None, tiles)), key=cost)
