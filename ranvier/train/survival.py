"""Copies of state that let a run continue without lost ranks, and the step from which it then continues.

    each rank       copies of its state after the last two finished steps and, with sharded optimizer states, of the
                    share of the preceding replica
    rank 0          the run's state with the newest copy: position in the data, evaluations, elastic state

A step is finished once its numbers are reported, which needs all ranks; each rank copies its state before it
contributes its numbers. So all ranks have the state after any reported step, and no reported step is lost. A rank may
be one step ahead, hence two copies. The agreement between survivors is `ranvier.launch.lost_ranks`.
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
from ranvier.errors import counted
from ranvier.launch.lost_ranks import Agreement, LostRanks
from ranvier.pipeline.engine import Engine
from ranvier.train.commands import ChangeMesh, RunState
from ranvier.train.events import NoteEvent
from ranvier.train.restart import mesh_without
from ranvier.train.runtime import RankRuntime
from ranvier.world import World


class LastSteps:
    """Copies of this rank's state after the last finished steps and, if states are sharded, of those of the preceding
    replica."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[Held, dict[str, object]]] = {}
        """Step -> the state after it, and which part of the model's state it is, for JSON."""
        self._engine: Engine | None = None
        self._replicas: Group | None = None

    def keep(self, step: int, runtime: RankRuntime) -> None:
        """Copy the state after `step`. Drops earlier copies except the last, and later ones, whose steps are taken
        again. Collective if states are sharded."""
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
        """The ranks with this rank's place in the other replicas. Collective if the engine is new."""
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
        """The parts of the model's state that this rank has, by step, for JSON."""
        return {str(step): part for step, (_, part) in self._copies.items()}

    def state_after(self, step: int) -> Held | None:
        """The state after `step`; None on a rank without it."""
        return self._copies[step][0] if step in self._copies else None


def missing_state(parts: Sequence[Mapping[str, Mapping[str, Any]]], step: int, *, sharded: bool) -> str | None:
    """Description of the state after `step` that no survivor has; None if nothing is missing. parts: `LastSteps.parts`
    of each survivor. sharded: whether each replica has only its share of the optimizer's states, and a copy of
    another's."""
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
    """The note about lost ranks, and the resulting decision."""
    mesh = command.change.mesh
    sizes = " x ".join(f"{axis} {size}" for axis, size in mesh.items() if size > 1) or "one"
    ranks = [f"rank {rank}, which {one.how}," for rank, one in agreement.lost.items()]
    step, left = command.state.step, len(agreement.members)
    return NoteEvent(step=step, event="lost", fields={"ranks": list(agreement.lost), "left": left, "mesh": mesh},
                     text=f"{' and '.join(ranks)} {'is' if len(ranks) == 1 else 'are'} lost: the run goes on with "
                          f"{counted(left, 'rank')} as {sizes} from step {step}")


class Survival:
    """One rank's part in surviving lost ranks: its copies, and its agreements. asked: the run before the ranks'
    measurements replaced `auto`. on_lost_rank: see `LostRanks`."""

    def __init__(self, asked: ResolvedRun, world: World, *, on_lost_rank: Callable[[], None]) -> None:
        self._asked, self._world, self.steps = asked, world, LastSteps()
        self.lost_ranks = LostRanks(world, timeout_seconds=asked.comm.timeout_seconds, on_lost_rank=on_lost_rank)
        self._state: RunState | None = None
        self._saves = False
        self._mesh, self._frozen, self._boundaries = asked.mesh, NONE_FROZEN, tuple[int, ...]()

    def after_step(self, runtime: RankRuntime, state: Callable[[], RunState], *, saves: bool = False) -> None:
        """Keep `state` with the last copied step, which has been reported: the run will not return to an earlier step.
        saves: a checkpoint of this step is still to be begun."""
        if self._world.rank == 0:
            self._state, self._mesh, self._frozen = state(), runtime.run.mesh, runtime.frozen
            self._saves = saves
            self._boundaries = tuple(runtime.engine.boundaries)

    def agree(self, error: Exception, change_to: Callable[..., Change]) -> Agreement:
        """See `LostRanks.agree`; the decision is a `ChangeMesh`. change_to: see `Controller`."""
        def decide(parts: Sequence[Mapping[str, Any]]) -> dict[str, object] | str:
            state = self._state
            assert state is not None  # rank 0 has reported a step before survival begins
            problem = missing_state(parts, state.step, sharded=self._asked.optim.shard)
            mesh = None if problem else mesh_without(replace(self._asked, mesh=self._mesh), len(parts))
            if mesh is None:
                return problem or f"no mesh of {len(parts)} ranks or fewer is legal for the run"
            boundaries = self._boundaries if mesh == self._mesh else ()
            change = change_to(mesh, self._frozen, self._frozen, boundaries or None, "for lost ranks")
            return asdict(ChangeMesh(change=change, state=state, save=self._saves))

        return self.lost_ranks.agree(error, self.steps.parts(), decide)
