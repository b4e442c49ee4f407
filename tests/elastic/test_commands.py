"""What idle ranks receive from rank 0: complete commands or errors, also if rank 0 has stopped."""

from dataclasses import replace

from ranvier.comm.message import MessageKind
from ranvier.mesh import Mesh
from ranvier.testing.faults import faulty, parse
from ranvier.testing.ranks import run_ranks
from ranvier.train.commands import CommandChannel, EndRun
from tests.errors import raises

LONG = EndRun(summary={"text": "x" * 9000})


def order(change=lambda orders: None, fault=None, seconds=20.0):
    """The command that rank 1 receives from rank 0."""
    def work(world):
        world.mesh = Mesh()
        orders = CommandChannel(world if fault is None else faulty(world, [parse(fault)]))
        if world.rank:
            return orders.wait(seconds)
        change(orders)
        orders.send(LONG, first=1)

    return run_ranks(work, 2)[1]


def test_an_order_arrives():
    assert order() == LONG


def test_an_order_that_has_changed_on_its_way_is_none():
    with raises("invalid-message"):
        order(fault="corrupt:rank=0,message=1,of=order,bit=4242")


def test_what_is_no_order(monkeypatch):
    def change(orders):
        send = orders._transport.send
        orders._transport.send = lambda rank, message: send(rank, replace(message, kind=MessageKind.STATE))

    with raises("not-a-command"):
        order(change)


def test_rank_0_that_says_nothing_any_more_is_missed():
    with raises("rank-0-silent"):
        order(fault="drop:rank=0,message=1,of=order", seconds=0.3)
