"""Requests for another mesh, and of ranks that want to join, while a run looks at them: taken, answered or refused.

How they come to the run is `ranvier.train.resize`; which mesh ranks that join lead to, `ranvier.train.joining`.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from ranvier.comm.protocol import Group
from ranvier.elastic.change import MeshRequest
from ranvier.launch.joining import give_verdict
from ranvier.train.events import NoteEvent
from ranvier.train.resize import ResizeRequests
from ranvier.world import World


class Requests:
    """Those of one run, on one rank. run_dir: the run's folder, on rank 0, where its requests come in; None on other
    ranks."""

    def __init__(self, world: World, run_dir: Path | None) -> None:
        self._world, self._waiting = world, None if run_dir is None else ResizeRequests(run_dir)
        self.current: MeshRequest | None = None
        """From when the run takes it until it is fulfilled or refused."""
        self._again: MeshRequest | None = None

    def are_waiting(self) -> bool:
        """Whether there is one to take. Cheap: asked after every step."""
        return self._again is not None or (self._waiting is not None and self._waiting.asked())

    def take(self, ranks: Group) -> MeshRequest | None:
        """The oldest, which is the current one from now on; None where there is none. Collective over the ranks of the
        mesh, and the same on all of them."""
        mine, self._again = self._again or (self._waiting and self._waiting.take()), None
        found = ranks.gather_objects(mine and asdict(mine))[0]
        self.current = found and MeshRequest(**found)
        return self.current

    def refuse_all(self, step: int, why: str) -> list[NoteEvent]:
        """One answer to each request that this run cannot look at any more; none on other ranks than 0."""
        return [] if self._waiting is None else [self._refusal(one, step, why) for one in self._waiting.take_all()]

    def after_loss(self, step: int) -> NoteEvent | None:
        """On rank 0: the answer to the current request, at which a loss has interrupted the run; None if none is due.
        Where ranks of it have joined all the same, the run takes it again, for the mesh of those that are left."""
        request = self.current
        if request is None:
            return None
        is_here = any(name.startswith(f"{request.wish}/") for name in self._world.members)
        if is_here:
            self._again = replace(request, has_joined=True)
        if request.has_joined:
            return None
        return (join_note(request, step, self._world.size, None) if is_here
                else self._refusal(request, step, "a rank of the run was lost meanwhile"))

    def _refusal(self, request: MeshRequest, step: int, why: str) -> NoteEvent:
        """Ranks that want to join hear of it, too."""
        if request.ranks and request.wish:
            give_verdict(self._world.store, request.wish, why)
        return NoteEvent(step=step, event="resize-refused",
                         text=f"resize request for {request} refused: {why}", fields=request.fields())


def join_note(request: MeshRequest, step: int, size: int, problem: str | None) -> NoteEvent:
    """What is told of ranks that have joined, or why they are refused. size: ranks of the run now."""
    fields = {"wish": request.wish, "ranks": request.ranks}
    if problem is not None:
        return NoteEvent(step=step, event="join-refused", fields=fields,
                         text=f"ranks that wanted to join are refused: {problem}")
    newcomers = "1 rank has" if request.ranks == 1 else f"{request.ranks} ranks have"
    return NoteEvent(step=step, event="joined", fields=fields, text=f"{newcomers} joined: the run has {size}")
