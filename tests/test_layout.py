"""Which rank holds what: boxes and intervals against numpy, one owner for every element, moves that arrive."""

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranvier.layout import (
    Chunking,
    Layout,
    Move,
    Parameter,
    Slice,
    Split,
    box_size,
    intersection,
    part,
    plan_moves,
    whole_box,
)
from ranvier.mesh import Mesh
from tests.covering import examples
from tests.errors import raises


def index(box):
    """A box as numpy's index."""
    return tuple(slice(start, stop) for start, stop in box)


@st.composite
def boxes(draw, shape):
    edges = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
    return tuple((start, stop) for start, stop in edges)


shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)


# ---------------------------------------------------------------------- boxes

@examples(80)
@given(shapes, st.data())
def test_intervals_are_boxes(shape, data):
    box = data.draw(boxes(shape))
    size = box_size(box)
    start, stop = sorted((data.draw(st.integers(0, size)), data.draw(st.integers(0, size))))
    piece = Slice("p", box, (start, stop))
    values = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    found = [values[index(part)].reshape(-1) for part in piece.boxes()]
    expected = values[index(box)].reshape(-1)[start:stop]
    assert np.array_equal(np.concatenate([np.zeros(0, int), *found]), expected)
    assert piece.size == len(expected) and all(len(part) for part in found)
    assert len(found) <= max(1, 2 * len(shape) - 1)


@examples(40)
@given(shapes, st.data())
def test_intersections(shape, data):
    first, second = data.draw(boxes(shape)), data.draw(boxes(shape))
    inside = np.zeros(shape, int)
    inside[index(first)] += 1
    inside[index(second)] += 1
    common = intersection(first, second)
    if common is None:
        assert (inside < 2).all()
    else:
        assert box_size(common) == (inside == 2).sum() > 0 and (inside[index(common)] == 2).all()


def test_scalars_and_wholes():
    assert whole_box((2, 3)) == ((0, 2), (0, 3)) and whole_box(()) == () and box_size(()) == 1
    assert Slice("p", ()).boxes() == Slice("p", (), (0, 1)).boxes() == [()] and Slice("p", (), (0, 0)).boxes() == []
    assert intersection((), ()) == ()
    assert Slice("p", ((0, 4), (0, 3)), (2, 11)).boxes() == [((0, 1), (2, 3)), ((1, 3), (0, 3)), ((3, 4), (0, 2))]


@pytest.mark.parametrize(("box", "flat", "says"), [
    (((3, 2),), None, r"box \(\(3, 2\),\) of p runs backwards"),
    (((-1, 2),), None, "runs backwards"),
    (((0, 2), (0, 2)), (0, 5), r"interval \(0, 5\) of p leaves its box of 4"),
    (((0, 2),), (2, 1), "leaves its box"), (((0, 2),), (-1, 1), "leaves its box"),
])
def test_slices_that_cannot_be(box, flat, says):
    with pytest.raises(ValueError, match=says):
        Slice("p", box, flat)


# ---------------------------------------------------------------------- layouts

def cuts(size, parts):
    """`size` cut into `parts` unequal pieces, some of which may be empty."""
    edges = [size * (k * k) // (parts * parts) for k in range(parts + 1)]
    return list(pairwise(edges))


def shard(shape, mesh, how):
    """(row, col) -> box of a parameter that is replicated, or cut along rows, columns or both."""
    rows = cuts(shape[0], mesh.row) if how in ("row", "both") else [(0, shape[0])] * mesh.row
    if len(shape) == 1:
        cols = None
    else:
        cols = cuts(shape[1], mesh.col) if how in ("col", "both") else [(0, shape[1])] * mesh.col
    return {(row, col): (rows[row],) if cols is None else (rows[row], cols[col])
            for row in range(mesh.row) for col in range(mesh.col)}


MODEL = [("b0.w", (5, 7), 0, "row"), ("b0.bias", (7,), 0, "row"), ("b1.w", (4, 6), 1, "both"),
         ("b2.w", (3, 9), 2, "col"), ("b2.scalar", (), 2, None), ("b3.empty", (0, 3), 3, None),
         ("b3.w", (6, 2), 3, "col"), ("b4.head", (5, 7), 4, "both")]


def layout(mesh, boundaries, *, sharded=True, chunking=None, tied=True, frozen=0):
    """The model above; b4.head is tied to b0.w, and on a tensor mesh each end has its own cut."""
    parameters = tuple(Parameter(name, shape, block, "b0.w" if tied and name == "b4.head" else name,
                                 trainable=block >= frozen or (tied and name == "b4.head"))
                       for name, shape, block, _ in MODEL)
    shards = {name: shard(shape, mesh, how) for name, shape, _, how in MODEL if how} if sharded else None
    return Layout(mesh=mesh, num_blocks=5, boundaries=boundaries, parameters=parameters, shards=shards,
                  chunking=chunking)


def places(one, of):
    """Name -> (rank, box) of its parts, as `of` returns them."""
    found = {}
    for rank in range(one.mesh.size):
        for piece in of(rank):
            found.setdefault(piece.parameter, []).extend((rank, box) for box in piece.boxes())
    return found


def moves_of(old, new, *, state=False):
    return plan_moves(places(old, old.owned_slices if state else old.held_slices),
                      places(new, new.owned_slices if state else new.held_slices))


@st.composite
def layouts(draw):
    mesh = Mesh(data=draw(st.integers(1, 3)), pipe=draw(st.integers(1, 4)), row=draw(st.integers(1, 2)),
                col=draw(st.integers(1, 3)))
    boundaries = tuple(sorted(draw(st.sets(st.integers(1, 4), min_size=mesh.pipe - 1, max_size=mesh.pipe - 1))))
    return layout(mesh, boundaries, sharded=draw(st.booleans()),
                  chunking=draw(st.sampled_from([None, Chunking(chunk_size=10), Chunking(chunk_size=7, shard=True),
                                                 Chunking(chunk_size=100, shard=True)])))


def numbers(one):
    """The values of every parameter; each element has another number."""
    return {parameter.name: 1000 * (k + 1) + np.arange(parameter.numel).reshape(parameter.shape)
            for k, parameter in enumerate(one.parameters)}


def memories(one, of, values):
    """rank -> parameter -> array, NaN where the rank has nothing."""
    found = []
    for rank in range(one.mesh.size):
        mine = {}
        for piece in of(rank):
            kept = mine.setdefault(piece.parameter, np.full(one[piece.parameter].shape, np.nan))
            for box in piece.boxes():
                kept[index(box)] = values[piece.parameter][index(box)]
        found.append(mine)
    return found


@examples(24)
@given(layouts())
def test_every_element_has_one_owner_and_holders_of_its_stage(one):
    one.check()
    counts = {parameter.name: np.zeros(parameter.shape, int) for parameter in one.parameters}
    for rank in range(one.mesh.size):
        held = memories(one, one.held_slices, numbers(one))[rank]
        for piece in one.owned_slices(rank):
            for box in piece.boxes():
                counts[piece.parameter][index(box)] += 1
                assert not np.isnan(held[piece.parameter][index(box)]).any(), "owners hold what they own"
        stage = one.mesh.coordinates(rank).pipe
        assert set(held) == {p.name for p in one.parameters if p.block in one.blocks(stage)}
    for parameter in one.parameters:
        assert (counts[parameter.name] == (1 if parameter.is_owner else 0)).all(), parameter.name


@examples(32)
@given(layouts(), layouts(), st.booleans())
def test_moves_arrive_at_the_new_layout(old, new, state):
    """Applied to simulated memories, moves give every rank exactly what it needs, each element once, and from the rank
    itself if it has the element."""
    values = numbers(old)
    have = memories(old, old.owned_slices if state else old.held_slices, values)
    need = memories(new, new.owned_slices if state else new.held_slices, values)
    got = [{name: np.full(array.shape, np.nan) for name, array in mine.items()} for mine in need]
    for move in moves_of(old, new, state=state):
        part = have[move.source][move.parameter][index(move.box)]
        assert part.size and not np.isnan(part).any(), "the source has what it sends"
        target = got[move.destination][move.parameter]
        assert np.isnan(target[index(move.box)]).all(), "nothing arrives twice"
        target[index(move.box)] = part
        before = have[move.destination] if move.destination < len(have) else {}
        if move.source != move.destination and move.parameter in before:
            assert np.isnan(before[move.parameter][index(move.box)]).all(), "a rank receives nothing that it has"
    for rank, mine in enumerate(need):
        for name, array in mine.items():
            assert np.array_equal(got[rank][name], array, equal_nan=True), (rank, name)


def test_moves_of_the_same_layout_are_local():
    one = layout(Mesh(data=2, pipe=2, col=2), (2,))
    assert all(move.source == move.destination for move in moves_of(one, one))
    assert {move.box for move in moves_of(one, one) if move.parameter == "b2.scalar"} == {()}


def test_growing_from_one_rank_to_two_replicas():
    """Rank 0 keeps its parts; ranks of the second stage and of the new replica get theirs from the lowest holder."""
    old, new = layout(Mesh(), (), sharded=False), layout(Mesh(data=2, pipe=2), (3,), sharded=False)
    found = moves_of(old, new)
    assert {move.source for move in found} == {0}
    assert Move("b0.w", ((0, 5), (0, 7)), 0, 2) in found and Move("b3.w", ((0, 6), (0, 2)), 0, 3) in found
    assert not any(move.parameter.startswith("b3") for move in found if move.destination in (0, 2))


def test_shares_cut_through_parameters():
    """Replicas evenly share the ownership of parameters that all of them update. Shards are shares of chunks, here
    elements 20..40 and 76..92 of a buffer of 108 that begins with b3.w."""
    one = layout(Mesh(data=3), (), sharded=False)
    assert [piece for piece in one.owned_slices(1) if piece.parameter == "b0.w"] == [
        Slice("b0.w", ((0, 5), (0, 7)), (12, 24))]
    assert [piece.parameter for piece in one.owned_slices(0) if one[piece.parameter].numel <= 1] == [
        "b2.scalar", "b3.empty"]
    assert not any(piece.parameter == "b4.head" for rank in range(3) for piece in one.owned_slices(rank))
    one = layout(Mesh(data=3), (), sharded=False, chunking=Chunking(chunk_size=60, shard=True))
    assert one.updated_slices(1) == [Slice("b2.w", ((0, 3), (0, 9)), (7, 27)), Slice("b0.w", ((0, 5), (0, 7)), (5, 21))]
    assert sorted(one.owned_slices(1)) == sorted(one.updated_slices(1))
    assert len(one.owned_slices(0)) == 7, "one of them is empty"


def test_blocks_and_stages():
    one = layout(Mesh(pipe=3), (1, 4))
    assert [list(one.blocks(stage)) for stage in range(3)] == [[0], [1, 2, 3], [4]]
    assert [one.stage_of(block) for block in range(5)] == [0, 1, 1, 1, 2]
    assert one["b4.head"].owner == "b0.w" and not one["b4.head"].is_owner and one["b1.w"].numel == 24


# ---------------------------------------------------------------------- mistakes

@pytest.mark.parametrize("boundaries", [(), (1, 2), (0,), (5,), (-1,)])
def test_boundaries_that_do_not_cut(boundaries):
    with raises("boundaries-do-not-cut", 5, 2):
        layout(Mesh(pipe=2), boundaries)


def plain(*parameters, mesh=None, shards=None):
    return Layout(mesh=mesh or Mesh(), num_blocks=1, boundaries=(), parameters=parameters, shards=shards)


def test_two_parameters_of_one_name():
    with raises("parameter-names-repeat", "a"):
        plain(Parameter("a", (1,), 0, "a"), Parameter("a", (2,), 0, "a"))


@pytest.mark.parametrize("boxes", [
    pytest.param([((0, 2),), ((0, 2),)], id="a part is held by nobody"),
    pytest.param([((0, 3),), ((2, 4),)], id="overlap"),
    pytest.param([((0, 2),), ((2, 5),)], id="beyond the parameter"),
])
def test_shards_that_do_not_cover(boxes):
    one = plain(Parameter("a", (4,), 0, "a"), mesh=Mesh(col=2), shards={"a": {(0, 0): boxes[0], (0, 1): boxes[1]}})
    with raises("parameter-not-owned-once"):
        one.check()


def test_moves_of_what_nobody_has():
    one, other = Parameter("a", (4,), 0, "a"), Parameter("b", (2,), 0, "b")
    with raises("element-held-nowhere", 0, 2):
        moves_of(plain(one), plain(one, other))


def test_owner_of_a_group_whose_first_member_is_on_another_stage():
    """The tied end on stage 1 owns nothing, whatever the mesh."""
    for mesh, chunking in product([Mesh(pipe=2), Mesh(data=2, pipe=2)], (None, Chunking(chunk_size=9, shard=True))):
        one = layout(mesh, (3,), sharded=False, chunking=chunking)
        assert not any(piece.parameter == "b4.head" for rank in range(mesh.size) for piece in one.owned_slices(rank))


@pytest.mark.parametrize("dims", [((), ()), (("row",), ("col",)), (("col",), ("row",)), ((), ("col", "row"))])
def test_a_split_covers_its_parameter_exactly(dims):
    mesh, shape = Mesh(row=2, col=3), (7, 18)
    boxes = Split(dims).boxes(shape, mesh)
    distinct = set(boxes.values())
    assert sum(map(box_size, distinct)) == 7 * 18
    assert all(intersection(a, b) is None for a in distinct for b in distinct if a != b)
    layout = Layout(mesh=mesh, num_blocks=1, boundaries=(), parameters=(Parameter("a.w", shape, 0, "a.w"),),
                    shards={"a.w": boxes})
    layout.check()


def test_ends_that_are_cut_alike_have_one_key():
    """They have the owner's key; other cuts on a stage have their own keys. Axes with one rank cut nothing."""
    rows, cols, inner = Split((("row",), ())), Split(((), ("row",))), Split(((), ("row", "col")), ("col",))
    mesh = Mesh(pipe=2, row=2)
    cuts = {"a": (0, rows), "b": (0, cols), "c": (0, inner), "d": (1, cols), "e": (1, rows), "f": (1, cols),
            "g": (1, Split(((), ()), ("row",))), "h": (1, Split(((), ())))}
    for owner, keys in [("a", "abbaeagh"), ("b", "abbbebgh"), ("e", "ebbdedgh")]:
        one = Layout(mesh=mesh, num_blocks=2, boundaries=(1,),
                     parameters=tuple(Parameter(name, (4, 4), block, owner, summed=split.summed)
                                      for name, (block, split) in cuts.items()),
                     shards={name: split.boxes((4, 4), mesh) for name, (_, split) in cuts.items()})
        assert "".join(map(one.key, one.parameters)) == keys, owner
    whole_ones = plain(Parameter("a", (1,), 0, "b"), Parameter("b", (1,), 0, "b"), Parameter("c", (1,), 0, "c"))
    assert [whole_ones.key(parameter) for parameter in whole_ones.parameters] == ["b", "b", "c"]


def test_pieces_differ_by_one_element_at_most():
    assert [part(7, 3, index) for index in range(3)] == [(0, 3), (3, 5), (5, 7)]
