"""Copies of state that let a run continue without lost ranks, and the step from which it then continues.

    each rank       copies of its state after the last two finished steps and, with sharded optimizer states, of the
                    share of the replica before
    rank 0          what goes along with the newest of these: place in the data, evaluations, elastic state

A step is finished once its numbers are told, which needs all ranks; each of them has copied its state before it gives
its own. So whatever step is told, all ranks have the state after it, and nothing that is told is lost. A rank may be
one step ahead, hence two copies. The agreement between survivors is `ranvier.launch.lost_ranks`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from typing import Any

from ranvier.comm.protocol import Group
from ranvier.config.resolve import ResolvedRun
from ranvier.cost.memory import KEPT_STEPS
from ranvier.elastic.change import Change
from ranvier.elastic.freezing import NONE_FROZEN
from ranvier.elastic.transition import Held, take, with_states_of_neighbour
from ranvier.launch.lost_ranks import Agreement, LostRanks
from ranvier.pipeline.engine import Engine
from ranvier.train.commands import ChangeMesh, RunState
from ranvier.train.events import NoteEvent
from ranvier.train.restart import mesh_without
from ranvier.train.runtime import RankRuntime
from ranvier.world import World


class LastSteps:
    """Copies of this rank's state after the last finished steps and, where states are sharded, of those of the replica
    before."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[Held, dict[str, object]]] = {}
        """Step -> the state after it, and the part of the model's state that this is, for JSON."""
        self._engine: Engine | None = None
        self._replicas: Group | None = None

    def keep(self, step: int, runtime: RankRuntime) -> None:
        """Copy the state after `step`; earlier ones but the last are dropped, and later ones, which are taken again.
        Collective where states are sharded."""
        earlier = sorted(other for other in self._copies if other < step)[-(KEPT_STEPS - 1):]
        host_buffers = next((held for other, (held, _) in self._copies.items() if other not in earlier), None)
        self._copies = {other: self._copies[other] for other in earlier}
        mesh, at, held = runtime.run.mesh, runtime.engine.coordinates, take(runtime.engine, host_buffers)
        places = [at]
        if runtime.run.optim.shard:
            held = with_states_of_neighbour(held, self._group(runtime))
            places.append(mesh.place(replica=(at.replica - 1) % mesh.num_replicas, pipeline_rank=at.pipeline_rank,
                                     position=at.position))
        part: dict[str, object] = {"mesh": mesh.sizes, "places": [dict(place) for place in places],
                                   "replica_axes": mesh.replica_axes, "frozen": sorted(runtime.frozen.layers)}
        self._copies[step] = held, part

    def _group(self, runtime: RankRuntime) -> Group:
        """The ranks with this one's place in the other replicas. Collective where the engine is a new one."""
        if self._engine is not runtime.engine or self._replicas is None:
            self._engine = runtime.engine
            mesh = runtime.run.mesh
            self._replicas = runtime.world.backend.group("copies", mesh.groups(*mesh.replica_axes))
        return self._replicas

    @property
    def host_bytes(self) -> int:
        """Bytes of the copies."""
        return sum(piece.tensor.nbytes for held, _ in self._copies.values() for piece in held.pieces)

    def parts(self) -> dict[str, dict[str, object]]:
        """The parts that this rank has, by step, for JSON."""
        return {str(step): part for step, (_, part) in self._copies.items()}

    def state_after(self, step: int) -> Held | None:
        """The state after `step`; None on a rank that has none."""
        return self._copies[step][0] if step in self._copies else None


def missing_state(parts: Sequence[Mapping[str, Mapping[str, Any]]], step: int, *, sharded: bool) -> str | None:
    """Description of the state after `step` that no survivor has; None if nothing is missing. parts: `LastSteps.parts`
    of each. sharded: each replica has a share of the optimizer's states for itself, and a copy of another one's."""
    have = [part[str(step)] for part in parts if str(step) in part]
    missing = "no survivor has the state of the last step"
    for first in {tuple(one["mesh"].items()): one for one in have}.values():
        mesh = first["mesh"]
        axes = [axis for axis in mesh if sharded or axis not in first["replica_axes"]]
        ours = [one for one in have if one["mesh"] == mesh and one["frozen"] == have[0]["frozen"]]
        places = {tuple(place[axis] for axis in axes) for part in ours for place in part["places"]}
        gone = [place for place in product(*(range(mesh[axis]) for axis in axes)) if place not in places]
        if not gone:
            return None
        names = ", ".join(f"{axis} {number}" for axis, number in zip(axes, gone[0], strict=True) if mesh[axis] > 1)
        missing = f"no other rank has the state of {names}"
    return missing


def lost_note(agreement: Agreement, command: ChangeMesh) -> NoteEvent:
    """The note about lost ranks, and the decision to which they lead."""
    mesh = command.change.mesh
    sizes = " x ".join(f"{axis} {size}" for axis, size in mesh.items() if size > 1) or "one"
    ranks = [f"rank {rank}, which {one.how}," for rank, one in agreement.lost.items()]
    step, left = command.state.step, len(agreement.members)
    return NoteEvent(step=step, event="lost", fields={"ranks": list(agreement.lost), "left": left, "mesh": mesh},
                     text=f"{' and '.join(ranks)} {'is' if len(ranks) == 1 else 'are'} lost: the run goes on with "
                          f"{left} {'rank' if left == 1 else 'ranks'} as {sizes} from step {step}")


class Survival:
    """One rank's part in surviving lost ranks: what it keeps, and its agreements. asked: the run, before `auto` gave
    way to what its ranks have measured. on_lost_rank: as of `LostRanks`."""

    def __init__(self, asked: ResolvedRun, world: World, *, on_lost_rank: Callable[[], None]) -> None:
        self._asked, self._world, self.steps = asked, world, LastSteps()
        self.lost_ranks = LostRanks(world, timeout_seconds=asked.comm.timeout_seconds, on_lost_rank=on_lost_rank)
        self._state: RunState | None = None
        self._saves = False
        self._mesh, self._frozen, self._boundaries = asked.mesh, NONE_FROZEN, tuple[int, ...]()

    def after_step(self, runtime: RankRuntime, state: Callable[[], RunState], *, saves: bool = False) -> None:
        """The step that was kept last has been told: the run goes back no further. state: what goes along with it.
        saves: a checkpoint of this step is still to be begun."""
        if self._world.rank == 0:
            self._state, self._mesh, self._frozen = state(), runtime.run.mesh, runtime.frozen
            self._saves = saves
            self._boundaries = tuple(runtime.engine.boundaries)

    def agree(self, error: Exception, change_to: Callable[..., Change]) -> Agreement:
        """See `LostRanks.agree`; the decision is a `ChangeMesh`. change_to: as of `Controller`."""
        def decide(parts: Sequence[Mapping[str, Any]]) -> dict[str, object] | str:
            state = self._state
            assert state is not None  # rank 0 has told of a step before lost ranks are survived
            problem = missing_state(parts, state.step, sharded=self._asked.optim.shard)
            mesh = None if problem else mesh_without(replace(self._asked, mesh=self._mesh), len(parts))
            if mesh is None:
                return problem or f"no mesh of {len(parts)} ranks or fewer is legal for it"
            boundaries = self._boundaries if mesh == self._mesh else ()
            change = change_to(mesh, self._frozen, self._frozen, boundaries or None, "for lost ranks")
            return asdict(ChangeMesh(change=change, state=state, save=self._saves))

        return self.lost_ranks.agree(error, self.steps.parts(), decide)
