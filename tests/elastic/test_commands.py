"""What idle ranks receive from rank 0: complete commands or errors, also if rank 0 has stopped."""

from dataclasses import replace

from ranvier.comm.message import MessageKind
from ranvier.mesh import Mesh
from ranvier.testing.faults import faulty, parse
from ranvier.testing.ranks import run_ranks
from ranvier.train.commands import CommandChannel, EndRun
from tests.errors import raises

LONG = EndRun(summary={"text": "x" * 9000})


def received_command(change=lambda commands: None, fault=None, seconds=20.0):
    """The command that rank 1 receives from rank 0."""
    def work(world):
        world.mesh = Mesh()
        commands = CommandChannel(world if fault is None else faulty(world, [parse(fault)]))
        if world.rank:
            return commands.wait(seconds)
        change(commands)
        commands.send(LONG, first=1)

    return run_ranks(work, 2)[1]


def test_a_command_arrives():
    assert received_command() == LONG


def test_a_command_that_has_changed_on_its_way_is_refused():
    with raises("invalid-message"):
        received_command(fault="corrupt:rank=0,message=1,of=command,bit=4242")


def test_a_message_of_another_kind_is_refused(monkeypatch):
    def change(commands):
        send = commands._transport.send
        commands._transport.send = lambda rank, message: send(rank, replace(message, kind=MessageKind.STATE))

    with raises("not-a-command"):
        received_command(change)


def test_a_silent_rank_0_is_an_error():
    with raises("rank-0-silent"):
        received_command(fault="drop:rank=0,message=1,of=command", seconds=0.3)
