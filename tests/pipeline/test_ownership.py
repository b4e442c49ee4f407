"""Ranks update and own what the layout says: recorded where the update rule writes, on random meshes."""

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from ranvier.config.run import Memory, Optim
from ranvier.mesh import Mesh
from tests.covering import examples
from tests.tensor.split_parity import on_mesh, share, tiny_gpt, token_batches

LAYERS = 2


class Recorder:
    """A rule that records which memory it writes."""

    def __init__(self, rule):
        self.rule, self.states, self.written = rule, rule.states, []

    def update(self, parameters, gradients, states, **settings):
        self.written.append((parameters.data_ptr(), parameters.data_ptr() + parameters.numel() * parameters.itemsize))
        self.rule.update(parameters, gradients, states, **settings)


@st.composite
def cases(draw):
    """A mesh of at most 8 ranks, with stages, ties, frozen layers and an optimizer's settings."""
    data, pipe, row, col = draw(st.sampled_from([
        (1, 1, 1, 1), (2, 1, 1, 1), (3, 1, 1, 1), (2, 2, 1, 1), (1, 3, 1, 1), (2, 1, 2, 1), (2, 1, 1, 2), (3, 1, 1, 2),
        (1, 2, 2, 1), (2, 2, 1, 2), (2, 1, 2, 2)]))
    tied = draw(st.booleans())
    in_backward = draw(st.booleans())
    return {"mesh": Mesh(data=data, pipe=pipe, row=row, col=col), "tied": tied,
            "frozen": 0 if tied else draw(st.integers(0, LAYERS - 1)),
            "memory": Memory(recompute=draw(st.sampled_from(["none", 1]))),
            "optim": Optim(shard=draw(st.booleans()), bucket_size=draw(st.sampled_from([50, 333, 100_000])),
                           chunk_buckets=draw(st.integers(1, 2)), update_in_backward=in_backward)}


def marked(shape, slices):
    """[shape] in how many of `slices` each element is."""
    counts = torch.zeros(shape, dtype=torch.int64)
    for piece in slices:
        for box in piece.boxes():
            counts[tuple(slice(*edges) for edges in box)] += 1
    return counts


def by_name(slices):
    found = {}
    for piece in slices:
        found.setdefault(piece.parameter, []).append(piece)
    return found


def intervals(engine, written):
    """Parameter -> merged ranges [start, stop) of this rank's elements that were written."""
    found = {}
    for name, parameter in engine.named_parameters().items():
        first, last = parameter.data_ptr(), parameter.data_ptr() + parameter.numel() * parameter.itemsize
        for start, stop in sorted(written):
            start, stop = max(start, first) - first, min(stop, last) - first
            if start < stop:
                _join(found.setdefault(name, []), start // parameter.itemsize, stop // parameter.itemsize)
    return found


def _join(pieces, start, stop):
    if pieces and pieces[-1][1] == start:
        start = pieces.pop()[0]
    pieces.append((start, stop))


def joined(slices):
    """The same from the layout."""
    found = {}
    for piece in sorted(slices, key=lambda piece: (piece.parameter, piece.interval)):
        if piece.size:
            _join(found.setdefault(piece.parameter, []), *piece.interval)
    return found


@examples(4)
@given(cases())
def test_ranks_update_what_the_layout_says(case):
    """They also keep its states; owners are among the ranks that update, and own every element once."""
    mesh = case["mesh"]
    batches = token_batches(mesh, count=1 if case["optim"].update_in_backward else 2, per_row=2)

    def work(engine):
        placement = engine.flat_optimizer.placement
        recorder = Recorder(placement._rules.elementwise)
        placement._rules = replace(placement._rules, elementwise=recorder)
        engine.train_batch(share(engine, batches))
        states = {}
        for part in sorted(engine.flat_optimizer.slices(), key=lambda part: (part.parameter, part.start)):
            _join(states.setdefault(part.parameter, []), part.start, part.stop)
        return intervals(engine, recorder.written), states, engine.layout

    found = on_mesh(lambda: tiny_gpt(num_layers=LAYERS, tied=case["tied"]), mesh, work, optim=case["optim"],
                    frozen=case["frozen"], memory=case["memory"])
    layout = found[0][2]
    assert all(other == layout for _, _, other in found), "every rank has the same layout"
    owners = {one.name: torch.zeros(one.shape, dtype=torch.int64) for one in layout.parameters}
    for rank, (written, states, _) in enumerate(found):
        updated, owned = layout.updated_slices(rank), by_name(layout.owned_slices(rank))
        assert written == states == joined(updated)
        for name, slices in owned.items():
            owners[name] += marked(layout[name].shape, slices)
            if layout[name].trainable:
                mine = marked(layout[name].shape, by_name(updated).get(name, []))
                assert bool((mine >= marked(layout[name].shape, slices)).all()), "owners update what they own"
    for name, counts in owners.items():
        assert bool((counts == int(layout[name].is_owner)).all()), name
