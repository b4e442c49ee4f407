"""The ranks of a run, those of its mesh and idle ones; what it tells others that join it, and which mesh it takes then.

The agreement itself is `ranvier.launch.joining`; the process that joins is `ranvier.train.newcomer`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch

from ranvier.comm.protocol import Group
from ranvier.config import read
from ranvier.config.resolve import Facts, ResolvedRun, resolve
from ranvier.data.task import Prepared
from ranvier.elastic.change import MeshRequest
from ranvier.launch.contact import write_contact
from ranvier.launch.devices import machine_name
from ranvier.launch.joining import Call, call_newcomers, give_verdict, grow
from ranvier.mesh import Mesh
from ranvier.system.machine import threads_per_rank
from ranvier.train.commands import CommandChannel
from ranvier.train.peak import PeakRate
from ranvier.train.setup import fingerprint
from ranvier.world import World

RUN = "ranvier/join/run"
"""Store key of what `invite` says of the run."""
_MOST_RANKS = 1 << 12


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Facts that stay the same in a run, for a rank that joins it. run: before `auto` gave way to what its ranks have
    measured, as each change of mesh begins. origin: `Saving.origin`."""

    run: ResolvedRun
    recipe: str
    data: Prepared
    peak: PeakRate
    origin: str


def invite(world: World, facts: RunFacts) -> None:
    """On rank 0: let ranks join from now on. OSError where the run's folder cannot be written."""
    assert world.joins is not None and facts.run.run_dir is not None
    run = facts.run
    world.store.set(RUN, json.dumps({
        "run": read.document(run), "tile": run.mesh.tile, "recipe": facts.recipe, "data": fingerprint(facts.data),
        "peak": asdict(facts.peak), "origin": facts.origin,
        "torch": torch.__version__.partition("+")[0]}))
    write_contact(facts.run.run_dir, world.joins)


def read_run(said: Mapping[str, Any], run_dir: Path) -> ResolvedRun:
    """The run that `invite` has told of, with its folder as it is seen here."""
    layer = replace(read.from_dict(said["run"], "the run"), code="allowed")  # signed by a run that the user started
    asked = read.merge([layer]).run
    run = resolve(asked, Facts(tile=said["tile"] and tuple(said["tile"])))
    return replace(run, run_dir=run_dir)


def why_not(world: World, request: MeshRequest) -> str | None:
    """Why the ranks of a request cannot join, by the request alone; None where they may."""
    if world.joins is None:
        return "the run was started without --launch.join-address"
    if request.problem is not None or request.wish is None:
        return request.problem or "their request has no ID"
    if request.ranks is None or not 1 <= request.ranks <= _MOST_RANKS:
        return f"their number must be from 1 to {_MOST_RANKS:,}"
    return None


def wanted_mesh(request: MeshRequest, mesh: Mesh, num_ranks: int) -> MeshRequest:
    """The request for another mesh that `request`, of ranks that have joined, comes to: what it leaves out of `mesh`
    stays, but for as many replicas as `num_ranks` ranks have room for."""
    sizes = {axis: request.sizes.get(axis) or size for axis, size in mesh.sizes.items()}
    taken = prod(size for axis, size in sizes.items() if axis not in mesh.replica_axes)
    sizes |= {axis: request.sizes.get(axis) or max(1, num_ranks // taken) for axis in mesh.replica_axes}
    return MeshRequest(sizes=sizes, wish=request.wish, reason="for ranks that have joined")


class Membership:
    """Membership of one run's ranks, on one rank. Methods are collective over the ranks of the world, but for
    `call`."""

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
