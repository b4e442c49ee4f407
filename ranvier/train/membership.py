"""The ranks that a run has, those of its mesh and idle ones: what all of them have in common, and how more come."""

from __future__ import annotations

from typing import Literal

import torch

from ranvier.comm.protocol import Group
from ranvier.elastic.change import MeshRequest
from ranvier.launch.devices import machine_name
from ranvier.launch.joining import Call, call_newcomers, give_verdict, grow
from ranvier.system.machine import threads_per_rank
from ranvier.train.commands import CommandChannel
from ranvier.train.joining import why_not
from ranvier.world import World


class Membership:
    """Of one run, on one rank. Methods are collective over the ranks of the world, but for `call`."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.everyone, self.commands = _connections(world)
        """A group of all ranks of the world; from rank 0 to idle ranks."""

    def connect(self) -> None:
        """Begin with the ranks that the world has now."""
        self.everyone, self.commands = _connections(self.world)

    def share_cores(self, threads: int | Literal["auto"]) -> None:
        """The ranks of each machine divide its cores, now that their number is another one. threads: as the run says.
        """
        machines = self.everyone.gather_objects(machine_name())
        if threads == "auto":
            torch.set_num_threads(threads_per_rank(machines.count(machine_name())))

    def call(self, request: MeshRequest, timeout_seconds: float) -> tuple[dict[str, object] | None, str | None]:
        """Rank 0 calls the ranks that want to join: what they are called to (`Call.document`), and why they are
        refused, if they are. Not collective. timeout_seconds: the run's limit of collectives."""
        world, wish = self.world, str(request.wish)
        problem = why_not(world, request)
        if problem is not None:
            give_verdict(world.store, wish, problem)
            return None, problem
        assert request.ranks is not None  # or there would be a problem
        call = Call(wish=wish, first=world.size, size=world.size + request.ranks, local_size=world.local_size,
                    timeout_seconds=timeout_seconds, members=list(world.members),
                    num_losses=world.num_losses)
        problem = call_newcomers(world, call)
        if problem is not None:
            give_verdict(world.store, wish, problem)
        return call.document(), problem

    def grow(self, call: Call, threads: int | Literal["auto"]) -> str | None:
        """Take the ranks of `call` into the world, or say why not. threads: as the run says."""
        problem = grow(self.world, self.everyone, call)
        if problem is None:
            self.commands.close()
            self.connect()
            self.share_cores(threads)
        return problem


def _connections(world: World) -> tuple[Group, CommandChannel]:
    return world.backend.group("everyone", [tuple(range(world.size))]), CommandChannel(world)
