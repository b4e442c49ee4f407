"""Positions of ranks: coordinates, groups, stages, neighbours, tiles."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranvier.config import read
from ranvier.mesh import AXES, Mesh
from tests.errors import raises

meshes = st.builds(Mesh, data=st.integers(1, 4), pipe=st.integers(1, 4), row=st.integers(1, 3), col=st.integers(1, 3))


@st.composite
def tiled(draw):
    rows, cols, down, across = (draw(st.integers(1, 4)) for _ in range(4))
    return Mesh(data=draw(st.integers(1, 2)), pipe=draw(st.integers(1, 3)), row=rows * down, col=cols * across,
                tile=(rows, cols))


@given(meshes)
def test_ranks_and_coordinates_are_inverse(mesh):
    found = [mesh.coordinates(rank) for rank in range(mesh.size)]
    assert len(set(found)) == mesh.size == mesh.data * mesh.pipe * mesh.stage_size
    assert [mesh.rank(at) for at in found] == list(range(mesh.size))
    assert found == sorted(found), "col varies fastest, data slowest"


@given(st.one_of(meshes, tiled()), st.sampled_from(AXES))
def test_groups_partition_the_ranks(mesh, axis):
    groups = mesh.groups(axis)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
    for group in groups:
        assert list(group) == sorted(group), "collectives use ascending ranks, and each rank the share of its index"
        for place, rank in enumerate(group):
            assert mesh.group(rank, axis) == group and mesh.coordinates(rank)[axis] == place
            assert {mesh.coordinates(rank).replace(axis, 0)} == {mesh.coordinates(group[0])}


@given(st.one_of(meshes, tiled()))
def test_stages_and_neighbours(mesh):
    for rank in range(mesh.size):
        at, stage = mesh.coordinates(rank), mesh.stage_ranks(rank)
        assert rank in stage and len(stage) == mesh.stage_size and list(stage) == sorted(stage)
        assert stage[0] == mesh.rank(at.replace("row", 0).replace("col", 0))
        if at.pipe < mesh.pipe - 1:
            after = mesh.rank(at.replace("pipe", at.pipe + 1))
            assert mesh.coordinates(after).replace("pipe", at.pipe) == at and after - rank == mesh.stage_size


def test_a_small_mesh_by_hand():
    mesh = Mesh(data=2, pipe=3, row=1, col=2)
    assert mesh.shape == (2, 3, 1, 2) and str(mesh) == "data 2 x pipe 3 x row 1 x col 2"
    assert mesh.coordinates(9) == mesh.at(data=1, pipe=1, col=1)
    assert str(mesh.coordinates(9)) == "data 1, pipe 1, row 0, col 1"
    assert mesh.group(9, "data") == (3, 9) and mesh.group(9, "pipe") == (7, 9, 11) and mesh.stage_ranks(9) == (8, 9)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("size", [0, -1, 1.5, True, "2"])
def test_sizes_that_cannot_be(axis, size):
    with raises("mesh-axis-size", axis):
        Mesh(**{axis: size})


def test_places_that_are_not_on_the_mesh():
    with pytest.raises(IndexError, match="rank 4 is not on a mesh of 4 ranks"):
        Mesh(pipe=4).coordinates(4)
    with pytest.raises(IndexError, match="pipe 4 is not on a mesh of data 1 x pipe 4"):
        Mesh(pipe=4).rank(Mesh(pipe=4).at(pipe=4))
    for ask in (Mesh(pipe=4).coordinates, Mesh(pipe=4).stage_ranks, Mesh(pipe=4).group):
        with pytest.raises(IndexError, match="rank 'a' is not on a mesh of 4 ranks"):
            ask("a")
    with pytest.raises(KeyError, match="row's is not an axis"):
        Mesh(pipe=4).groups("row's")


def test_groups_over_several_axes_are_a_partition():
    mesh = Mesh(data=2, pipe=1, row=2, col=2)
    assert mesh.groups("data", "row") == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert mesh.groups("row", "col") == ((0, 1, 2, 3), (4, 5, 6, 7))


@given(tiled())
def test_tiles_are_runs_of_consecutive_ranks(mesh):
    found = [mesh.coordinates(rank) for rank in range(mesh.size)]
    assert [mesh.rank(at) for at in found] == list(range(mesh.size)) and len(set(found)) == mesh.size
    rows, cols = mesh.tile
    tiles = [found[start:start + rows * cols] for start in range(0, mesh.size, rows * cols)]
    for tile in tiles:
        assert len({(at.data, at.pipe, at.row // rows, at.col // cols) for at in tile}) == 1
        assert tile == sorted(tile), "row by row inside a tile"
    assert [tile[0] for tile in tiles] == sorted(tile[0] for tile in tiles), "tiles are row by row too"


@given(meshes)
def test_a_tile_of_one_row_of_all_columns_or_of_all_ranks_changes_nothing(mesh):
    for tile in ((1, mesh.col), (mesh.row, mesh.col), (1, 1)):
        same = Mesh(data=mesh.data, pipe=mesh.pipe, row=mesh.row, col=mesh.col, tile=tile)
        assert [same.coordinates(rank) for rank in range(mesh.size)] == [
            mesh.coordinates(rank) for rank in range(mesh.size)]


def test_tiles_by_hand():
    """Figure 8 (b) of the paper: 4 nodes of 4 ranks."""
    mesh = Mesh(row=4, col=4, tile=(2, 2))
    assert [[mesh.rank(mesh.at(row=row, col=col)) for col in range(4)] for row in range(4)] == [
        [0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]
    assert mesh.group(6, "col") == (2, 3, 6, 7) and mesh.group(6, "row") == (4, 6, 12, 14)
    assert hash(mesh) == hash(Mesh(row=4, col=4, tile=(2, 2))) and mesh != Mesh(row=4, col=4)


@pytest.mark.parametrize("tile", [(2,), (2, 2, 2), (0, 1), (1, True), (1.0, 2), [2, 2], 4])
def test_tiles_that_cannot_be(tile):
    with raises("mesh-tile-form"):
        Mesh(row=2, col=2, tile=tile)


@pytest.mark.parametrize("tile", [(4, 1), (3, 2), (2, 4), (1, 3)])
def test_tiles_that_do_not_divide_the_mesh(tile):
    with raises("mesh-tile-does-not-divide", 2):
        Mesh(row=2, col=2, tile=tile)
    one_rank = Mesh(data=2, tile=tile)
    assert one_rank.coordinates(1) == one_rank.at(data=1), "a tile has no effect on stages of one rank"


@pytest.mark.parametrize(("text", "tile"), [("2,2", (2, 2)), ("none", None), ("4, 1", (4, 1))])
def test_a_tile_as_a_flag(text, tile):
    found = read.merge([read.Layer(origin="flag", is_text=True, values={
        "mesh.row": "4", "mesh.col": "2", "mesh.tile": text})])
    assert not found.problems and found.run.mesh == Mesh(row=4, col=2, tile=tile)
