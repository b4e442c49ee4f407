"""Tied parameters: who owns, who sends to whom, and that ends on any stages have one sum and one value."""

import random
from collections import defaultdict, deque
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ranvier.block import Model
from ranvier.comm.message import MessageKind, decode, encode
from ranvier.config.run import Pipeline
from ranvier.layout import Layout, Parameter, Split
from ranvier.mesh import Mesh
from ranvier.pipeline.engine import Engine
from ranvier.pipeline.ties import TiedParameters, TieMessages, gradient_specs, ties_of
from ranvier.testing.ranks import run_ranks
from ranvier.testing.reference import Reference
from tests.covering import covering, examples, quick
from tests.errors import raises
from tests.pipeline.parity import (
    SEED,
    assert_close,
    assert_parity,
    chain,
    chunks_of,
    frozen,
    generator,
    on_mesh,
    points,
    share,
    squared,
)
from tests.pipeline.test_unusual_blocks import Plain

POLICIES = ("message-driven", "1f1b", "gpipe")


def blocks(*groups, count=6):
    """Blocks b0, b1, ... of one linear layer each, with the weights of these groups of blocks tied."""
    return chain(*[Plain] * count,
                 tied=tuple(tuple(f"b{number}.linear.weight" for number in group) for group in groups))


@pytest.mark.parametrize("policy", quick(1, POLICIES))
@pytest.mark.parametrize("groups", [
    pytest.param([(0, 5)], id="first and last"), pytest.param([(5, 0)], id="owned by the last"),
    pytest.param([(0, 2, 5)], id="three ends"), pytest.param([(2, 5, 0)], id="three ends, owned by the second"),
    pytest.param([(0, 1)], id="on one stage"), pytest.param([(0, 1, 4)], id="two on one stage, one elsewhere"),
    pytest.param([(4, 0, 1, 5)], id="two on each"), pytest.param([(0, 5), (1, 4), (2, 3)], id="three ties"),
    pytest.param([(1, 4), (5, 0)], id="each stage owns what it finishes first"),
])
@pytest.mark.parametrize("mesh", quick(1, [Mesh(pipe=3), Mesh(data=2, pipe=3)]), ids=str)
def test_one_sum_of_all_ends(groups, mesh, policy):
    assert_parity(partial(blocks, *groups), points([[2, 1], [2, 2, 2]][:mesh.data]), mesh,
                  pipeline=Pipeline(policy=policy, boundaries=(2, 4)), optim=chunks_of(5))


@pytest.mark.parametrize(("groups", "mesh"), covering(
    [[(0, 3)], [(3, 0)], [(0, 1)], [(0, 3), (1, 2)]], [Mesh(pipe=4), Mesh(data=2), Mesh(), Mesh(data=2, pipe=2)]),
    ids=str)
def test_on_other_meshes(groups, mesh):
    assert_parity(partial(blocks, *groups, count=4), points([[2, 1]] * mesh.data), mesh)


def test_a_frozen_tie_is_never_sent():
    make = partial(frozen, blocks((0, 5)), lambda name: name in ("b0.linear.weight", "b5.linear.weight"))
    kinds = []

    def watch(engine):
        send = engine._connections.transport.send
        engine._connections.transport.send = lambda to, message: (kinds.append(message.kind), send(to, message))

    def work(engine):
        watch(engine)
        engine.train_batch(share(engine, points([[2, 2]])))

    assert_parity(make, points([[2, 2]]), Mesh(pipe=3), also=watch)
    on_mesh(make, Mesh(pipe=3), work, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    assert MessageKind.FORWARD in kinds
    assert MessageKind.TIED_GRADIENT not in kinds and MessageKind.TIED_VALUE not in kinds


def test_a_tie_is_sent_once_a_batch():
    kinds = []

    def watch(engine):
        send = engine._connections.transport.send
        engine._connections.transport.send = lambda to, message: (kinds.append(message.kind), send(to, message))

    assert_parity(partial(blocks, (0, 2, 5)), points([[2, 2, 2]]), Mesh(pipe=3), also=watch)
    assert kinds.count(MessageKind.TIED_GRADIENT) == 2


def test_ends_on_one_stage_are_one_parameter():
    def work(engine):
        return [(name, module.linear.weight) for _, name, module in engine._stages.blocks]

    first, second = on_mesh(partial(blocks, (0, 1, 4)), Mesh(pipe=2), work, pipeline=Pipeline(boundaries=(3,)))
    weights = dict(first)
    assert weights["b0"] is weights["b1"] and weights["b0"] is not weights["b2"]
    assert torch.equal(dict(second)["b4"], weights["b0"])


def test_ends_start_from_their_owners_value():
    """Without a seed, each end is built with its own values; the owner's values are used."""
    def make():
        built = [nn.Linear(4, 4) for _ in range(4)]
        return Model(blocks={f"b{number}": lambda module=module: module for number, module in enumerate(built)},
                     loss=squared, tied=(("b3.weight", "b0.weight"),))

    models = [make() for _ in range(2)]

    def rank(world):
        engine = Engine(models[world.rank], world, mesh=Mesh(pipe=2))
        return engine.named_parameters()["b3.weight"].clone()

    first, second = run_ranks(rank, 2)
    assert torch.equal(first, second) and torch.equal(second, models[1].blocks["b3"]().weight)


def test_who_sends_to_whom():
    """Stage 1 of 3 is the owner; checked on the ranks of replica 1."""
    mesh = Mesh(data=2, pipe=3)

    def rank(world):
        return [(tie.name, tie.owns, tie.peers) for tie in
                Engine(blocks((2, 5, 0)), world, mesh=mesh, pipeline=Pipeline(boundaries=(2, 4)))._values._ties.ties]

    ties = run_ranks(rank, mesh.size)
    assert ties[3:] == [[("b2.linear.weight", False, (4,))], [("b2.linear.weight", True, (3, 5))],
                        [("b2.linear.weight", False, (4,))]]


def test_gradients_are_added_in_stage_order_and_wait_their_turn():
    mesh = Mesh(pipe=3)
    layout = Layout(mesh=mesh, num_blocks=3, boundaries=(1, 2),
                    parameters=tuple(Parameter(f"b{number}.w", (2,), number, "b1.w") for number in range(3)))
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    (first,), (owned,), (last,) = (ties_of(layout, rank, {"b1.w": parameters[rank]}) for rank in range(3))
    waits, coming = [], deque()

    def wait(what, source):
        waits.append((what, source))
        messages.put(coming.popleft())

    def arrive(tie, value, batch):
        tie.parameter.grad = torch.full((2,), value)
        ends = TiedParameters([tie], TieMessages(),
                              lambda peer, message: coming.append(replace(message, source=tie.rank)), None)
        ends.send_gradient("b1.w", batch)
        ends.send_gradient("b1.w", batch)

    messages = TieMessages()
    owner = TiedParameters([owned], messages, None, wait)
    for tie, value, batch in [(last, 1.0, 1), (last, 7.0, 2), (first, 1e8, 1), (first, 3.0, 2)]:
        arrive(tie, value, batch)
    owned.parameter.grad = torch.full((2,), -1e8)
    assert owner.add_gradients(1) == [owned, owned]
    assert owned.parameter.grad.tolist() == [1.0, 1.0], "(-1e8 + 1e8) + 1 in fp32; in the order of arrival it is 0"
    assert waits == [("the gradient of tied parameter b1.w", 0)] * 3 and len(coming) == 1
    owned.parameter.grad = torch.zeros(2)
    owner.add_gradients(2)
    assert owned.parameter.grad.tolist() == [10.0, 10.0]


def test_a_value_that_comes_early_is_not_used_before_the_next_batch():
    """An owner's rank to which this rank sends no gradient may have finished a step that this rank still computes."""
    ranks = Ranks(tied_layout(Mesh(pipe=2, row=2), [0, 2], [Split((("row",), ())), Split(((), ()))], 0))
    for parameters in ranks.parameters[:2]:
        parameters["b0.w"].data.fill_(5.0)
    tie, = ranks.ends[3].ties
    assert {move.destination for move in tie.gradients} == {1} and {move.source for move in tie.values} == {0, 1}
    for end in ranks.ends[:2]:
        end.send_values(1, trained=True)
    ranks.wait(3, "", 0)
    assert ranks.parameters[3]["b0.w"].isnan().all()
    ranks.ends[3].send_values(1, trained=True)
    ranks.ends[3].receive_values()
    assert (ranks.parameters[3]["b0.w"] == 5.0).all()


# ---------------------------------------------------------------------- ends that are cut differently

SHAPE = (7, 5)
SPLITS = [Split(dims, summed) for dims, summed in [
    (((), ()), ()), (((), ()), ("row",)), (((), ()), ("row", "col")), ((("row",), ()), ()), (((), ("row",)), ()),
    ((("col",), ()), ()), (((), ("col",)), ("row",)), ((("row",), ("col",)), ()), ((("col",), ("row",)), ()),
    ((("row", "col"), ()), ()), ((("col", "row"), ()), ()), (((), ("col", "row")), ())]]
"""Not cut, cut by one axis or by both; on one dim, nested, or on two."""


def tied_layout(mesh, blocks, splits, owner):
    """Parameters b0.w, b1.w, ... of one group, in these blocks of two per stage, each with its own split."""
    parameters = tuple(Parameter(f"b{number}.w", SHAPE, block, f"b{owner}.w", summed=split.summed)
                       for number, (block, split) in enumerate(zip(blocks, splits, strict=True)))
    return Layout(mesh=mesh, num_blocks=2 * mesh.pipe, boundaries=tuple(range(2, 2 * mesh.pipe, 2)),
                  parameters=parameters, shards={parameter.name: split.boxes(SHAPE, mesh)
                                                 for parameter, split in zip(parameters, splits, strict=True)})


@st.composite
def tied_layouts(draw, splits):
    mesh = Mesh(data=draw(st.integers(1, 2)), pipe=draw(st.integers(1, 3)), row=draw(st.integers(1, 2)),
                col=draw(st.integers(1, 3)))
    count = draw(st.integers(1, 3))
    blocks = sorted(draw(st.lists(st.integers(0, 2 * mesh.pipe - 1), min_size=count, max_size=count)))
    return tied_layout(mesh, blocks, draw(st.lists(st.sampled_from(splits), min_size=count, max_size=count)),
                       draw(st.integers(0, count - 1)))


class Ranks:
    """All ranks of a layout; messages arrive in any order that keeps the order of each source."""

    def __init__(self, layout, seed=0, trainable=True):
        self.layout, self.mesh, self.choice = layout, layout.mesh, random.Random(seed)
        self.edges = [{source: deque() for source in range(self.mesh.size)} for _ in range(self.mesh.size)]
        self.kinds, self.parameters, self.ends = [], [], []
        self.messages = [TieMessages() for _ in range(self.mesh.size)]
        for rank in range(self.mesh.size):
            at = self.mesh.coordinates(rank)
            self.parameters.append({layout.key(one): nn.Parameter(torch.full(
                [stop - start for start, stop in layout.box(one, at.position)], torch.nan, dtype=torch.float64),
                requires_grad=trainable) for one in layout.parameters if one.block in layout.blocks(at.pipe)})
            self.ends.append(TiedParameters(ties_of(layout, rank, self.parameters[-1]), self.messages[rank],
                                            partial(self.send, rank), partial(self.wait, rank)))

    def send(self, source, destination, message):
        peers = {peer for tie in self.ends[source].ties for peer in tie.peers}
        assert destination != source and destination in peers
        assert source in {peer for tie in self.ends[destination].ties for peer in tie.peers}
        assert all(tensor.is_contiguous() and tensor.numel() for tensor in message.tensors.values())
        self.kinds.append(message.kind)
        self.edges[destination][source].append(decode(encode(message), source))

    def wait(self, rank, what, source):
        waiting = [queue for queue in self.edges[rank].values() if queue]
        self.messages[rank].put(self.choice.choice(waiting).popleft())

    def each(self, key):
        """(parameter, at, its tensor, its box) on the ranks of a (stage, key)."""
        for rank in range(self.mesh.size):
            at = self.mesh.coordinates(rank)
            if at.pipe == key[0]:
                one = next(one for one in self.layout.parameters
                           if one.block in self.layout.blocks(at.pipe) and self.layout.key(one) == key[1])
                box = self.layout.box(one, at.position)
                yield one, at, self.parameters[rank][key[1]], tuple(slice(*part) for part in box)

    def exchange_gradients(self, batch):
        """Some ends send as soon as their gradient is complete, the others last."""
        for ends in self.ends:
            for tie in ends.ties:
                if not tie.owns and self.choice.random() < 0.5:
                    ends.send_gradient(tie.name, batch)
        for ends in self.ends:  # in a run, all ranks do this at the same time
            for tie in ends.ties:
                if not tie.owns:
                    ends.send_gradient(tie.name, batch)
        return [ends.add_gradients(batch) for ends in self.ends]

    def exchange_values(self, batch):
        for ends in self.ends:
            ends.send_values(batch, trained=True)
        for ends in self.ends:
            ends.receive_values()


def ends_of(layout):
    """(stage, key) of every end in model order, and that of the owner."""
    places = list(dict.fromkeys((layout.stage_of(one.block), layout.key(one)) for one in layout.parameters))
    owner = layout[layout.parameters[0].owner]
    return places, (layout.stage_of(owner.block), owner.name)


@examples(25)
@given(tied_layouts([split for split in SPLITS if not split.summed]), st.integers(0, 99))
def test_ends_cut_in_any_way_make_one_sum_and_one_value(layout, seed):
    """Bit-identical: each element is the owner's, plus those of the ends one after another. Copies count once."""
    ranks, (places, home) = Ranks(layout, seed), ends_of(layout)
    for batch in (1, 2):
        whole = {(place, data): torch.randn(SHAPE, generator=generator(number, data, batch), dtype=torch.float64)
                 for number, place in enumerate(places) for data in range(layout.mesh.data)}
        for place in places:
            for _, at, parameter, index in ranks.each(place):
                parameter.grad = whole[place, at.data][index].clone()
        added = ranks.exchange_gradients(batch)
        for _, at, parameter, index in ranks.each(home):
            expected = whole[home, at.data].clone()
            for place in places:
                if place != home:
                    expected += whole[place, at.data]
            assert torch.equal(parameter.grad, expected[index])
        for rank, found in enumerate(added):
            owns = layout.mesh.coordinates(rank).pipe == home[0]
            assert len(found) == (len(places) - 1 if owns else 0)
            specs = gradient_specs(layout, rank, ranks.parameters[rank], defaultdict(lambda: None))
            assert [spec.remote_ends for spec in specs if not spec.sent_to_owner] == ([len(found)] if owns else [])

        value = torch.randn(SHAPE, generator=generator(batch), dtype=torch.float64)
        for _, _, parameter, index in ranks.each(home):
            parameter.data.copy_(value[index])
        ranks.exchange_values(batch)
        for place in places:
            for _, _, parameter, index in ranks.each(place):
                assert torch.equal(parameter, value[index])
    assert not any(queue for edges in ranks.edges for queue in edges.values())


@examples(50)
@given(tied_layouts(SPLITS), st.integers(0, 99))
def test_parts_of_gradients_are_added_once(layout, seed):
    """If positions have parts of a gradient each, the owner's parts sum up to the full gradient; integers are exact."""
    ranks, (places, home) = Ranks(layout, seed), ends_of(layout)

    def part(number, one, at):
        """A position's part of a gradient: a different one for each place along the summed axes."""
        return torch.randint(-99, 99, SHAPE, generator=generator(number, *along(one, at))).double()

    def along(one, at):
        return at.data, *(getattr(at, axis) for axis in one.summed)

    expected = [torch.zeros(SHAPE, dtype=torch.float64) for _ in range(layout.mesh.data)]
    for number, place in enumerate(places):
        counted = set()
        for one, at, parameter, index in ranks.each(place):
            parameter.grad = part(number, one, at)[index].clone()
            if along(one, at) not in counted:
                counted.add(along(one, at))
                expected[at.data] += part(number, one, at)
    for tie in (tie for ends in ranks.ends for tie in ends.ties if tie.owns):
        added = [(places.index((layout.mesh.coordinates(move.source).pipe, move.parameter)), move.source)
                 for move in tie.gradients]
        assert added == sorted(added), "by end in model order, then by source"
    ranks.exchange_gradients(1)
    sums = {}
    for one, at, parameter, index in ranks.each(home):
        for axis in one.summed:
            at = at.replace(axis, 0)
        sums.setdefault(at, [torch.zeros(SHAPE, dtype=torch.float64), index])[0][index] += parameter.grad
    for at, (found, index) in sums.items():
        assert torch.equal(found[index], expected[at.data][index])


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_ends_cut_alike_need_one_message_to_the_counterpart(split):
    layout = tied_layout(Mesh(data=2, pipe=2, row=2, col=2), [0, 2], [split, split], 1)
    for rank, ends in enumerate(Ranks(layout).ends):
        tie, = ends.ties
        assert tie.peers == (rank + 4 if layout.mesh.coordinates(rank).pipe == 0 else rank - 4,)
        for move, in (tie.gradients, tie.values):
            sent = tie.part(tie.parameter.data, move)
            assert sent.is_contiguous() and sent.shape == tie.parameter.shape
            assert sent.data_ptr() == tie.parameter.data_ptr(), "not copied before it is sent"


def test_an_embedding_and_a_head_on_one_stage():
    """No message is sent from a rank to itself."""
    layout = tied_layout(Mesh(row=2, col=2), [0, 1], [Split(((), ("col", "row"))), Split((("col",), ("row",)))], 0)
    ranks = Ranks(layout)
    for parameters in ranks.parameters:
        assert list(parameters) == ["b0.w", "b1.w"]
        for parameter in parameters.values():
            parameter.grad = torch.ones_like(parameter)
    ranks.exchange_gradients(1)
    assert all((parameters["b0.w"].grad == 2.0).all() for parameters in ranks.parameters)
    local = [move for ends in ranks.ends for tie in ends.ties if tie.owns for move in tie.gradients
             if move.source == move.destination]
    assert local and len(ranks.kinds) == sum(len(tie.gradients) for ends in ranks.ends for tie in ends.ties
                                             if tie.owns) - len(local)


def test_a_frozen_tie_that_is_cut_differently_moves_at_the_start_alone():
    layout = tied_layout(Mesh(pipe=2, row=2), [0, 1, 2], [Split((("row",), ())), *[Split(((), ("row",)))] * 2], 0)
    layout = replace(layout, parameters=tuple(replace(one, trainable=False) for one in layout.parameters))
    ranks = Ranks(layout, trainable=False)
    assert not any(ends.owns for ends in ranks.ends)
    for ends in ranks.ends:
        ends.send_values(0, trained=False)
    count = len(ranks.kinds)
    assert set(ranks.kinds) == {MessageKind.TIED_VALUE}
    for ends in ranks.ends:
        ends.receive_values()
        assert ends.add_gradients(1) == []
    ranks.exchange_values(1)
    assert len(ranks.kinds) == count


def apart(layout, parameter):
    """The key of `parameter`, as if no two ends on a stage were cut the same way."""
    stage = layout.blocks(layout.stage_of(parameter.block))
    ends = [one for one in layout.parameters if one.owner == parameter.owner and one.block in stage]
    return parameter.owner if parameter is min(ends, key=lambda one: not one.is_owner) else parameter.name


@pytest.mark.parametrize(("group", "mesh"), covering(
    [((0, 1),), ((1, 0),), ((2, 0, 1, 3),)], [Mesh(data=2, pipe=2), Mesh(), Mesh(data=2), Mesh(pipe=2)]), ids=str)
def test_an_engine_with_separate_ends_on_a_stage(group, mesh, monkeypatch):
    """One sum, shown under one name, and one value; weights frozen during training stay unchanged at all ends."""
    monkeypatch.setattr(Layout, "key", apart)
    make, ends = partial(blocks, group, count=4), [f"b{number}.linear.weight" for number in group]
    owner = ends[0]
    batches = [points([[2, 1]] * mesh.data, seed=seed) for seed in range(4)]
    assert_parity(make, batches[0], mesh, optim=chunks_of(5))

    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)
    reference = Reference(make(), seed=SEED, dtype=torch.float64, optimizer=optimizer)
    norms = []
    for number, batch in enumerate(batches):
        reference.parameters[owner].requires_grad_(number < 2)
        reference.train_batch([one for replica in batch for one in replica])
        norms.append(sum(float((gradient ** 2).sum()) for gradient in reference.gradients().values()) ** 0.5)

    def work(engine):
        for number, batch in enumerate(batches):
            for name, parameter in engine.named_parameters().items():
                parameter.requires_grad_(number < 2 or name not in ends)
            assert engine.train_batch(share(engine, batch)).grad_norm == pytest.approx(norms[number], rel=1e-9)
        return {f"{name}.linear.{kind}": getattr(module.linear, kind).detach().clone()
                for _, name, module in engine._stages.blocks for kind in ("weight", "bias")}

    for found in on_mesh(make, mesh, work, optimizer=optimizer):
        assert_close(found, {name: reference.parameters[owner if name in ends else name] for name in found})


# ---------------------------------------------------------------------- ties that cannot be

class Wide(Plain):
    def __init__(self):
        super().__init__()
        self.other = nn.Parameter(torch.zeros(4, 5))


@pytest.mark.parametrize(("tied", "error"), [
    ((("b0.linear.weight", "b9.weight"),), ("tied-unknown-parameter",)),
    ((("b0.other", "b1.linear.weight"),), ("tied-shapes-differ", 4, 5)),
    ((("b0.linear.weight", "b1.linear.weight"), ("b1.linear.weight", "b2.linear.weight")),
     ("tied-in-two-groups",)),
    ((("b0.linear.weight", "b0.linear.weight"),), ("tied-in-two-groups",)),
])
def test_ties_that_cannot_be(tied, error):
    with raises(*error):
        on_mesh(lambda: chain(Wide, Plain, Plain, tied=tied), Mesh(), lambda engine: None)


@pytest.mark.parametrize("end", ["b0", "b5"])
def test_freezing_one_end_is_refused(end):
    with raises("tied-one-frozen", "b0.linear.weight", where="parameter b5.linear.weight"):
        on_mesh(lambda: frozen(blocks((0, 5)), lambda name: name == f"{end}.linear.weight"), Mesh(pipe=2),
                lambda engine: None)


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(pipe=2)], ids=str)
def test_sharing_that_is_not_declared_is_refused(mesh):
    """The tie would be lost across stages, and its gradient counted twice on one stage."""
    same = nn.Linear(4, 4)
    model = Model(blocks={"a": lambda: same, "b": nn.Tanh, "c": lambda: same}, loss=squared)
    with raises("tied-undeclared", "c.weight", "a.weight"):
        on_mesh(lambda: model, mesh, lambda engine: None)


def test_a_parameter_with_two_names_in_one_block_can_be_tied():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)
            self.right.weight = self.left.weight

        def forward(self, x):
            return self.right(torch.tanh(self.left(x)))

    make = partial(chain, Plain, Both, Plain, tied=(("b0.linear.weight", "b1.left.weight"),))
    assert_parity(make, points([[2, 3]]), Mesh())
    assert_parity(make, points([[2, 3]]), Mesh(pipe=3))
