"""Tied parameters: who owns, who sends to whom, and that ends on any stages make one sum and one value."""

from functools import partial

import pytest
import torch
from torch import nn

from ranvier.comm.message import Kind, Message
from ranvier.errors import ModelError
from ranvier.mesh import Mesh
from ranvier.models.block import Model
from ranvier.pipeline.engine import Engine
from ranvier.pipeline.ties import TiedGradients, TiedParameters, ties_of
from ranvier.testing.ranks import run_ranks
from tests.pipeline.parity import assert_parity, chain, chunks_of, frozen, on_mesh, points, share, squared
from tests.pipeline.test_unusual_blocks import Plain

POLICIES = ("message-driven", "1f1b", "gpipe")


def blocks(*groups, count=6):
    """Blocks b0 .. of a linear layer each, with the weights of these groups of blocks tied."""
    return chain(*[Plain] * count,
                 tied=tuple(tuple(f"b{number}.linear.weight" for number in group) for group in groups))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("groups", [
    pytest.param([(0, 5)], id="first and last"), pytest.param([(5, 0)], id="owned by the last"),
    pytest.param([(0, 2, 5)], id="three ends"), pytest.param([(2, 5, 0)], id="three ends, owned by the second"),
    pytest.param([(0, 1)], id="on one stage"), pytest.param([(0, 1, 4)], id="two on one stage, one elsewhere"),
    pytest.param([(4, 0, 1, 5)], id="two on each"), pytest.param([(0, 5), (1, 4), (2, 3)], id="three ties"),
])
@pytest.mark.parametrize("mesh", [Mesh(pipe=3), Mesh(data=2, pipe=3)], ids=str)
def test_one_sum_of_all_ends(groups, mesh, policy):
    assert_parity(partial(blocks, *groups), points([[2, 1], [2, 2, 2]][:mesh.data]), mesh, policy=policy,
                  boundaries=(2, 4), optim=chunks_of(5))


@pytest.mark.parametrize("groups", [[(0, 3)], [(3, 0)], [(0, 1)], [(0, 3), (1, 2)]], ids=str)
@pytest.mark.parametrize("mesh", [Mesh(), Mesh(data=2), Mesh(pipe=4), Mesh(data=2, pipe=2)], ids=str)
def test_on_other_meshes(groups, mesh):
    assert_parity(partial(blocks, *groups, count=4), points([[2, 1]] * mesh.data), mesh)


def test_a_frozen_tie_is_never_sent():
    make = partial(frozen, blocks((0, 5)), lambda name: name in ("b0.linear.weight", "b5.linear.weight"))
    kinds = []

    def watch(engine):
        send = engine._transport.send
        engine._transport.send = lambda to, message: (kinds.append(message.kind), send(to, message))

    def work(engine):
        watch(engine)
        engine.train_batch(share(engine, points([[2, 2]])))

    assert_parity(make, points([[2, 2]]), Mesh(pipe=3), also=watch)
    on_mesh(make, Mesh(pipe=3), work, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    assert Kind.FORWARD in kinds and Kind.TIED_GRADIENT not in kinds and Kind.TIED_VALUE not in kinds


def test_a_tie_is_sent_once_a_batch():
    kinds = []

    def watch(engine):
        send = engine._transport.send
        engine._transport.send = lambda to, message: (kinds.append(message.kind), send(to, message))

    assert_parity(partial(blocks, (0, 2, 5)), points([[2, 2, 2]]), Mesh(pipe=3), also=watch)
    assert kinds.count(Kind.TIED_GRADIENT) == 2


def test_ends_on_one_stage_are_one_parameter():
    def work(engine):
        return [(name, module.linear.weight) for _, name, module in engine._stage.blocks]

    first, second = on_mesh(partial(blocks, (0, 1, 4)), Mesh(pipe=2), work, boundaries=(3,))
    weights = dict(first)
    assert weights["b0"] is weights["b1"] and weights["b0"] is not weights["b2"]
    assert torch.equal(dict(second)["b4"], weights["b0"])


def test_ends_start_from_their_owners_value():
    """Where nobody seeds, each end is built with values of its own; the owner's count."""
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
    """Stage 1 of 3 owns; ranks of replica 1."""
    mesh = Mesh(data=2, pipe=3)

    def rank(world):
        return [(tie.name, tie.owns, tie.peers) for tie in
                Engine(blocks((2, 5, 0)), world, mesh=mesh, boundaries=(2, 4))._ties.ties]

    ties = run_ranks(rank, mesh.size)
    assert ties[3:] == [[("b2.linear.weight", False, (4,))], [("b2.linear.weight", True, (3, 5))],
                        [("b2.linear.weight", False, (4,))]]


def test_gradients_are_added_in_stage_order_and_wait_their_turn():
    def rank(world):
        engine = Engine(blocks((2, 5, 0)), world, mesh=Mesh(pipe=3), boundaries=(2, 4))
        return ties_of(engine.layout, engine.mesh, world.rank, engine._parameters)

    ties = run_ranks(rank, 3)
    arrivals, (owned,) = TiedGradients(ties[1]), ties[1]
    owned.parameter.grad = torch.zeros_like(owned.parameter)
    values = {0: 1.0, 2: 10.0}

    def arrive(source, factor):
        ties[source][0].parameter.grad = torch.full_like(owned.parameter, factor * values[source])
        sent = []
        ends = TiedParameters(ties[source], lambda peer, message: sent.append((peer, message)), None)
        ends.send_gradient(owned.name, 1)
        (peer, message), = sent
        assert peer == 1
        arrivals.receive(Message(message.kind, message.step, 0, message.tensors, source=source))

    assert arrivals.missing() == (owned.name, 0)
    arrive(2, 1.0)
    arrive(2, 3.0)  # of the next batch
    assert arrivals.missing() == (owned.name, 0)
    arrive(0, 1.0)
    assert arrivals.missing() is None
    assert arrivals.add() == [owned, owned]
    assert owned.parameter.grad[0, 0] == 11.0 and arrivals.missing() == (owned.name, 0)


# ---------------------------------------------------------------------- ties that cannot be

class Wide(Plain):
    def __init__(self):
        super().__init__()
        self.other = nn.Parameter(torch.zeros(4, 5))


@pytest.mark.parametrize(("tied", "says"), [
    ((("b0.linear.weight", "b9.weight"),), r"model.tied: is declared as tied but is no parameter of the model "
                                           r"\(got 'b9.weight'\). Name parameters as 'block.parameter'."),
    ((("b0.other", "b1.linear.weight"),), r"parameter b1.linear.weight: is tied to b0.other of shape \(4, 5\) "
                                          r"\(got \(4, 4\)\). Tie parameters of one shape."),
    ((("b0.linear.weight", "b1.linear.weight"), ("b1.linear.weight", "b2.linear.weight")),
     r"model.tied: is in two groups \(got 'b1.linear.weight'\). Put all names of one parameter into one group,"),
    ((("b0.linear.weight", "b0.linear.weight"),), "model.tied: is in two groups"),
])
def test_ties_that_cannot_be(tied, says):
    with pytest.raises(ModelError, match=says):
        on_mesh(lambda: chain(Wide, Plain, Plain, tied=tied), Mesh(), lambda engine: None)


@pytest.mark.parametrize("end", ["b0", "b5"])
def test_freezing_one_end_is_refused(end):
    says = r"parameter b5.linear.weight: is tied to b0.linear.weight, and only one of the two is frozen "
    with pytest.raises(ModelError, match=says + r"\(got 'requires_grad=(True|False)'\). Untie them, or freeze both."):
        on_mesh(lambda: frozen(blocks((0, 5)), lambda name: name == f"{end}.linear.weight"), Mesh(pipe=2),
                lambda engine: None)


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(pipe=2)], ids=str)
def test_sharing_that_is_not_declared_is_refused(mesh):
    """It would be lost across stages, and counted twice on one."""
    same = nn.Linear(4, 4)
    model = Model(blocks={"a": lambda: same, "b": nn.Tanh, "c": lambda: same}, loss=squared)
    with pytest.raises(ModelError, match=r"parameter c.weight: is a.weight under another name \(got 'c.weight'\). "
                                         r"Declare them as tied"):
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
