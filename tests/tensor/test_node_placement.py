"""Tiles of the tensor mesh on nodes: the paper's figure, and bytes between nodes, counted rank by rank."""

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranvier.cost.node_placement import best_tile, bytes_between_nodes
from ranvier.mesh import Mesh

SIZES = st.integers(1, 6)
BYTES = st.sampled_from([0, 1, 2, 3, 10])


def crossing(mesh, ranks_per_node, along_row_bytes, along_col_bytes):
    """node -> bytes of the panels that its ranks need from other nodes, each counted once."""
    entered = {}
    for axis, size, received in (("row", mesh.row, along_row_bytes), ("col", mesh.col, along_col_bytes)):
        for group in mesh.groups(axis):
            for owner in group:
                for node in {rank // ranks_per_node for rank in group} - {owner // ranks_per_node}:
                    entered[node] = entered.get(node, 0) + received / (size - 1)
    return [entered.get(node, 0) for node in range(-(-mesh.size // ranks_per_node))]


@given(SIZES, SIZES, SIZES, SIZES, BYTES, BYTES)
def test_bytes_between_nodes_are_those_of_all_ranks(rows, cols, down, across, along_row, along_col):
    mesh = Mesh(row=rows * down, col=cols * across, tile=(rows, cols))
    found = bytes_between_nodes(mesh.row, mesh.col, mesh.tile, along_row_bytes=along_row, along_col_bytes=along_col)
    assert crossing(mesh, rows * cols, along_row, along_col) == pytest.approx([found] * down * across)


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 12), BYTES, BYTES)
def test_the_best_tile_is_the_best_of_all_of_its_size(row, col, ranks_per_node, along_row, along_col):
    tile = best_tile(row, col, ranks_per_node, along_row_bytes=along_row, along_col_bytes=along_col)
    rows, cols = tile
    tiled = Mesh(row=row, col=col, tile=tile)
    if row * col <= ranks_per_node:
        assert tile == (row, col)
        return
    assert ranks_per_node % (rows * cols) == 0
    sizes = {a * b for a in range(1, row + 1) for b in range(1, col + 1) if row % a == col % b == 0
             and ranks_per_node % (a * b) == 0}
    assert rows * cols == max(sizes)
    least = min(max(crossing(Mesh(row=row, col=col, tile=(a, b)), a * b, along_row, along_col))
                for a in range(1, row + 1) for b in range(1, col + 1)
                if a * b == rows * cols and row % a == col % b == 0)
    assert max(crossing(tiled, rows * cols, along_row, along_col)) == pytest.approx(least)


def test_figure_8():
    """4 nodes of 4 ranks: 3/4 of 4 columns against 1/2 of 2 rows and 2 columns; a rank receives 3/4 of each."""
    line = {"along_row_bytes": 3.0, "along_col_bytes": 3.0}
    assert best_tile(4, 4, 4, **line) == (2, 2)
    assert [bytes_between_nodes(4, 4, tile, **line) for tile in ((1, 4), (2, 2), (4, 1))] == [12, 8, 12]
    row_by_row, tiled = Mesh(row=4, col=4), Mesh(row=4, col=4, tile=(2, 2))

    def nodes(mesh):
        """On how many nodes a row and a column have members."""
        return tuple(len(list(groupby(mesh.group(0, axis), lambda rank: rank // 4))) for axis in ("col", "row"))

    assert nodes(row_by_row) == (1, 4) and nodes(tiled) == (2, 2)


@pytest.mark.parametrize(("row", "col", "ranks_per_node", "along_row", "along_col", "tile"), [
    (8, 8, 8, 1, 1, (2, 4)), (8, 8, 8, 5, 1, (8, 1)), (8, 8, 8, 1, 5, (1, 8)), (16, 4, 4, 1, 1, (2, 2)),
    (2, 2, 8, 1, 1, (2, 2)), (4, 4, 6, 1, 1, (1, 2)), (5, 7, 4, 1, 1, (1, 1)), (1, 8, 4, 0, 1, (1, 4)),
    (6, 6, 6, 1, 1, (2, 3))])
def test_tiles_by_hand(row, col, ranks_per_node, along_row, along_col, tile):
    assert best_tile(row, col, ranks_per_node, along_row_bytes=along_row, along_col_bytes=along_col) == tile
