"""The ranks of a run, in its mesh or idle; what it publishes for joining ranks, and the mesh that it takes with them.

The agreement itself is `ranvier.launch.joining`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Literal, TextIO

import torch

from ranvier.comm.inprocess import InProcessWorld
from ranvier.comm.protocol import Group
from ranvier.comm.signed_store import SharedStore, sign_store
from ranvier.config import read
from ranvier.config.resolve import Facts, ResolvedRun, resolve
from ranvier.data.task import Prepared
from ranvier.elastic.change import MeshRequest
from ranvier.errors import ConfigError, DataError, LaunchError
from ranvier.launch.contact import connect, write_contact
from ranvier.launch.devices import claim_device, machine_name, visible_devices
from ranvier.launch.failures import install_error_handlers, install_start_error_handlers
from ranvier.launch.heartbeat import exit_with_launcher
from ranvier.launch.joining import REQUEST_ID, Call, Newcomer, call_newcomers, give_verdict, grow
from ranvier.launch.launchers import Started
from ranvier.launch.start import use_interface_towards
from ranvier.mesh import Mesh
from ranvier.system.machine import threads_per_rank
from ranvier.train.commands import CommandChannel
from ranvier.train.metrics import PeakRate
from ranvier.train.resize import withdraw, write_request
from ranvier.train.setup import fingerprint, prepare_run
from ranvier.world import JoinPoint, World

RUN = "ranvier/join/run"
"""Store key of the facts that `invite` publishes."""
_MOST_RANKS = 1 << 12


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Facts that stay the same during a run, for a rank that joins it. run: the settings before the ranks' measurements
    replaced `auto`, from which each change of mesh begins. origin: `Saving.origin`."""

    run: ResolvedRun
    recipe: str
    data: Prepared
    peak: PeakRate
    origin: str


def invite(world: World, facts: RunFacts) -> None:
    """On rank 0: let ranks join from now on. OSError if the run's folder cannot be written."""
    assert world.joins is not None and facts.run.run_dir is not None
    run = facts.run
    world.store.set(RUN, json.dumps({
        "run": read.document(run), "tile": run.mesh.tile, "recipe": facts.recipe, "data": fingerprint(facts.data),
        "peak": asdict(facts.peak), "origin": facts.origin,
        "torch": torch.__version__.partition("+")[0]}))
    write_contact(facts.run.run_dir, world.joins)


def read_run(facts: Mapping[str, Any], run_dir: Path) -> ResolvedRun:
    """The run that `invite` has published, with the path of its folder on this machine."""
    layer = replace(read.from_dict(facts["run"], "the run"), code="allowed")  # signed by a run that the user started
    asked = read.merge([layer]).run
    run = resolve(asked, Facts(tile=facts["tile"] and tuple(facts["tile"])))
    return replace(run, run_dir=run_dir)


def join_problem(world: World, request: MeshRequest) -> str | None:
    """Why the ranks of a request cannot join, judging by the request alone; None if they may."""
    if world.joins is None:
        return "the run was started without --launch.join-address"
    if request.problem is not None or request.request_id is None:
        return request.problem or "their request has no ID"
    if request.ranks is None or not 1 <= request.ranks <= _MOST_RANKS:
        return f"their number must be from 1 to {_MOST_RANKS:,}"
    return None


def wanted_mesh(request: MeshRequest, mesh: Mesh, num_ranks: int) -> MeshRequest:
    """The request for another mesh that follows from `request` of ranks that have joined: axes that it omits keep their
    size in `mesh`, except for the replicas, which grow to use `num_ranks` ranks."""
    sizes = {axis: request.sizes.get(axis) or size for axis, size in mesh.sizes.items()}
    taken = prod(size for axis, size in sizes.items() if axis not in mesh.replica_axes)
    sizes |= {axis: request.sizes.get(axis) or max(1, num_ranks // taken) for axis in mesh.replica_axes}
    return MeshRequest(sizes=sizes, request_id=request.request_id, reason="for ranks that have joined")


class Membership:
    """Membership of one run's ranks, on one rank. Methods are collective over the ranks of the world, but for
    `call`."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.everyone, self.commands = _connections(world)
        """A group of all ranks of the world, and the channel from rank 0 to idle ranks."""

    def connect(self) -> None:
        """Connect the ranks that the world has now."""
        self.everyone, self.commands = _connections(self.world)

    def share_cores(self, threads: int | Literal["auto"]) -> None:
        """Divide each machine's cores among its ranks, after their number has changed. threads: the run's setting."""
        machines = self.everyone.gather_objects(machine_name())
        if threads == "auto":
            torch.set_num_threads(threads_per_rank(machines.count(machine_name())))

    def call(self, request: MeshRequest, timeout_seconds: float) -> tuple[dict[str, object] | None, str | None]:
        """Call the ranks that want to join, on rank 0: returns the call as a dict, and why they are refused, if they
        are. Not collective. timeout_seconds: the run's limit for collectives."""
        world, request_id = self.world, str(request.request_id)
        problem = join_problem(world, request)
        if problem is not None:
            give_verdict(world.store, request_id, problem)
            return None, problem
        assert request.ranks is not None  # else `join_problem` has found a problem
        call = Call(request_id=request_id, first=world.size, size=world.size + request.ranks,
                    local_size=world.local_size, timeout_seconds=timeout_seconds, members=list(world.members),
                    num_lost_ranks=world.num_lost_ranks)
        problem = call_newcomers(world, call)
        if problem is not None:
            give_verdict(world.store, request_id, problem)
        return asdict(call), problem

    def grow(self, call: Call, threads: int | Literal["auto"]) -> str | None:
        """Admit the ranks of `call` to the world, or return why not. threads: the run's setting."""
        problem = grow(self.world, self.everyone, call)
        if problem is None:
            self.commands.close()
            self.connect()
            self.share_cores(threads)
        return problem


def _connections(world: World) -> tuple[Group, CommandChannel]:
    return world.backend.group("everyone", [tuple(range(world.size))]), CommandChannel(world)


# --- a process that joins ---------------------------------------------------------------------------------------------

# One process that joins a running run (`ranvier join`): from the run's folder to its place among the ranks.
#
#     folder -> store -> the run's published facts -> the same data -> request -> call -> connections -> verdict
#
# The process takes its settings from the run, and prepares all it can before it sends the request, so that the run
# waits only for connections.


def join_run(run_dir: Path, started: Started, sizes: Mapping[str, int], *, seconds: float, stream: TextIO
             ) -> tuple[World, RunFacts]:
    """Make this process a rank of the run in `run_dir`; returns its world, connected to all other ranks, and the run.

    started: this process among those that join together. sizes: requested sizes of the mesh's axes. seconds: how long
    to wait for the run's answer. stream: where the first joining rank prints.

    RanvierError if the run cannot be reached, has other versions or data, refuses, or does not answer within `seconds`.
    """
    exit_with_launcher(started)
    install_start_error_handlers(started.local_rank)
    assert started.master is not None and started.secret is not None, "our own supervisor gives them"
    point = JoinPoint(address=started.master[0], port=started.master[1], secret=started.secret)
    torch_store, store = sign_store(connect(point), point.secret)
    facts = _read_facts(store, run_dir)
    run = read_run(facts, run_dir)
    use_interface_towards(point.address)
    threads = run.launch.threads
    torch.set_num_threads(threads_per_rank(started.size) if threads == "auto" else threads)
    world = World(backend=InProcessWorld(1).backend(0), store=store, launcher="local", local_rank=started.rank,
                  local_size=started.size, device=_device(run.launch.device, started, store), mesh=run.mesh,
                  joins=point, torch_store=torch_store)
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        _, data, _ = prepare_run(run, world, nowhere if started.rank else stream)
    if fingerprint(data) != facts["data"]:
        raise DataError(f"differs from the run's ({facts['data']})", code="join-other-data", where="data",
                        value=fingerprint(data),
                        remedy="Give this machine the same files and versions, or one shared `--data.cache-dir`; start "
                               "the command in the folder in which the run was started.")
    world = _join(world, run_dir, started, sizes, seconds)
    install_error_handlers(world, run.launch, timeout_seconds=run.comm.timeout_seconds)
    if started.rank == 0:
        print(f"joined {run_dir}: rank {world.rank}" + (f" to {world.size - 1}" if started.size > 1 else "")
              + f" of {world.size}", file=stream, flush=True)
    return world, RunFacts(run=run, recipe=facts["recipe"], data=data, origin=facts["origin"],
                            peak=PeakRate(**facts["peak"]))


def run_to_join(contact: JoinPoint, run_dir: Path) -> ResolvedRun:
    """The settings of the run in `run_dir`, for the process that starts the joining ranks. RanvierError if the run
    cannot be reached, or has another version of torch."""
    return read_run(_read_facts(sign_store(connect(contact), contact.secret)[1], run_dir), run_dir)


def _read_facts(store: SharedStore, run_dir: Path) -> dict[str, Any]:
    """The facts that the run has published."""
    if not store.check([RUN]):
        raise LaunchError("has not published its settings yet", code="join-run-silent", where=f"run {run_dir}",
                          remedy="Join after its first step.")
    facts: dict[str, Any] = json.loads(store.get(RUN))
    own = torch.__version__.partition("+")[0]
    if facts["torch"] != own:
        raise LaunchError(f"runs with torch {facts['torch']}", code="join-other-torch", where=f"run {run_dir}",
                          value=own, remedy="Install the same version of torch here.")
    return facts


def _device(setting: str, started: Started, store: SharedStore) -> torch.device:
    """The device of this process: of the run's kind, and not used by another rank."""
    if setting != "cuda":
        return torch.device("cpu")
    seen = visible_devices(rank=started.rank, local_rank=started.rank, local_size=started.size, setting=setting,
                           transport="torch")
    number = claim_device(seen, store)
    if number is None:
        raise ConfigError("needs a device for each rank that joins, apart from those of the run's ranks here",
                          code="join-needs-device", where="launch.device", value=f"{len(seen.devices)} visible",
                          remedy="Join with fewer ranks, or from a machine with free devices.")
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def _join(world: World, run_dir: Path, started: Started, sizes: Mapping[str, int], seconds: float) -> World:
    request_id = os.environ[REQUEST_ID]
    newcomer = Newcomer(world, request_id, started.rank, started.size)
    newcomer.await_others(seconds)
    if started.rank:
        return newcomer.join(seconds)
    write_request(run_dir, request_id, {**sizes, "ranks": started.size})
    try:
        return newcomer.join(seconds)
    except BaseException:  # including Ctrl-C: the run would wait for ranks that are gone
        withdraw(run_dir, request_id)
        raise
