"""Who is where: ranks and coordinates, groups, stages, neighbours."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranvier.errors import ConfigError
from ranvier.mesh import AXES, Coordinates, Mesh

meshes = st.builds(Mesh, data=st.integers(1, 4), pipe=st.integers(1, 4), row=st.integers(1, 3), col=st.integers(1, 3))


@given(meshes)
def test_ranks_and_coordinates_are_inverse(mesh):
    found = [mesh.coordinates(rank) for rank in range(mesh.size)]
    assert len(set(found)) == mesh.size == mesh.data * mesh.pipe * mesh.stage_size
    assert [mesh.rank(at) for at in found] == list(range(mesh.size))
    assert found == sorted(found), "col varies fastest, data slowest"


@given(meshes, st.sampled_from(AXES))
def test_groups_partition_the_ranks(mesh, axis):
    groups = mesh.groups(axis)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
    for group in groups:
        for place, rank in enumerate(group):
            assert mesh.group(rank, axis) == group and getattr(mesh.coordinates(rank), axis) == place
            assert {mesh.coordinates(rank).replace(axis, 0)} == {mesh.coordinates(group[0])}


@given(meshes)
def test_stages_and_neighbours(mesh):
    for rank in range(mesh.size):
        at, stage = mesh.coordinates(rank), mesh.stage_ranks(rank)
        assert rank in stage and len(stage) == mesh.stage_size
        assert stage[0] == mesh.rank(at.replace("row", 0).replace("col", 0))
        before, after = mesh.neighbour(rank, -1), mesh.neighbour(rank, 1)
        assert (before is None) == (at.pipe == 0) and (after is None) == (at.pipe == mesh.pipe - 1)
        assert after is None or (mesh.neighbour(after, -1) == rank and after - rank == mesh.stage_size)


def test_a_small_mesh_by_hand():
    mesh = Mesh(data=2, pipe=3, row=1, col=2)
    assert mesh.shape == (2, 3, 1, 2) and str(mesh) == "data 2 x pipe 3 x row 1 x col 2"
    assert mesh.coordinates(9) == Coordinates(data=1, pipe=1, col=1)
    assert str(mesh.coordinates(9)) == "data 1, pipe 1, row 0, col 1"
    assert mesh.group(9, "data") == (3, 9) and mesh.group(9, "pipe") == (7, 9, 11) and mesh.stage_ranks(9) == (8, 9)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("size", [0, -1, 1.5, True, "2"])
def test_sizes_that_cannot_be(axis, size):
    with pytest.raises(ConfigError, match=rf"^mesh.{axis}: must be a whole number of at least 1 \(got .*\). "
                                          rf"Set --mesh.{axis} 1 to leave this axis unused.$"):
        Mesh(**{axis: size})


def test_places_that_are_not_on_the_mesh():
    with pytest.raises(IndexError, match="rank 4 is not on a mesh of 4 ranks"):
        Mesh(pipe=4).coordinates(4)
    with pytest.raises(IndexError, match="pipe 4 is not on a mesh of data 1 x pipe 4"):
        Mesh(pipe=4).rank(Coordinates(pipe=4))


def test_groups_over_several_axes_are_a_partition():
    mesh = Mesh(data=2, pipe=1, row=2, col=2)
    assert mesh.groups("data", "row") == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert mesh.groups("row", "col") == ((0, 1, 2, 3), (4, 5, 6, 7))
