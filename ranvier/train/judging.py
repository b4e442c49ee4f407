"""Which of the meshes that a run may go to it takes: the first that fits and pays. What was refused is looked at again.

Memory, measured times and what transitions cost are not what they were an epoch ago. So a mesh that did not fit or did
not pay may be taken later with the same frozen layers; until then its refusal is told once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set

from ranvier.elastic.ledger import Entry, Ledger
from ranvier.run import Run
from ranvier.train.files import mesh_text
from ranvier.train.formation import Formation
from ranvier.train.packing import Packing, Work, moved_bytes
from ranvier.train.room import Room


class Judge:
    """Of one run, on rank 0. tell: takes (step, event, text, fields)."""

    def __init__(self, first: Run, tell: Callable[[int, str, str, Mapping[str, object]], None]) -> None:
        self._first, self._tell = first, tell
        self.refused: set[tuple[int, int, int]] = set()
        """(data, pipe, frozen layers) of meshes that did not fit or did not pay, at the depth of the last refusal."""

    def refused_at(self, depth: int) -> Set[tuple[int, int]]:
        """(data, pipe) of the meshes that were refused with `depth` frozen layers."""
        return {(data, pipe) for data, pipe, frozen in self.refused if frozen == depth}

    def chosen(self, now: Formation, found: Sequence[Packing], work: Work, room: Room, *, step: int, ledger: Ledger,
               seconds: float | None, remaining_steps: int, there: Callable[[Packing], Run]
               ) -> tuple[Packing | None, Entry | None]:
        """What to take of `found` after `step`, and the entry in the ledger that it is to have; (None, None) where mesh
        and cut stay as they are.

        found: the best first, with the present mesh, whose cut may be another. Where no more layers freeze, only
        another mesh is taken. seconds: of a step now, measured; None where it was not. there: the run as it would be.
        """
        run, depth = now.run, room.frozen
        here = next((packing for packing in found if packing.mesh(run.mesh) == run.mesh), None)
        for packing in found:
            if packing.too_large and packing is not here:
                self._refuse(packing, depth, step, "dropped", self._dropped(now, packing, depth, packing.reason))
        for packing in (packing for packing in found if packing.fits):
            if packing is here and depth == now.frozen:
                break
            same = packing is here and packing.boundaries == tuple(now.engine.boundaries)
            problem = None if same else room.problem(there(packing))
            if problem is not None:
                text = self._dropped(now, packing, depth, f"{problem.where} {problem.what}")
                if packing is here:  # its present cut is what it has, and slower meshes need not be judged
                    self._tell(step, "dropped", text, {})
                    break
                self._refuse(packing, depth, step, "dropped", text)
                continue
            if packing is here or self._first.elastic.cut == "reference" or here is None or here.seconds is None:
                return packing, None
            verdict = ledger.pays(
                step=step, old=mesh_text(run.mesh), new=mesh_text(packing.mesh(run.mesh)),
                seconds_before=_scaled(seconds, here.seconds, work.seconds), model_before=here.seconds_per_sample,
                model_after=packing.seconds_per_sample, remaining_steps=remaining_steps,
                moved_bytes=moved_bytes(now, packing, work, depth))
            if verdict.pays:
                self.refused.discard((packing.data, packing.pipe, depth))
                self._tell(step, "judged", verdict.text, {"pays": True})
                return packing, verdict.entry
            self._refuse(packing, depth, step, "judged", verdict.text, {"pays": False})
        return None, None

    def _refuse(self, packing: Packing, depth: int, step: int, event: str, text: str,
                fields: Mapping[str, object] | None = None) -> None:
        key = packing.data, packing.pipe, depth
        if key not in self.refused:
            self._tell(step, event, text, fields or {})
        self.refused = {other for other in self.refused if other[2] == depth} | {key}

    @staticmethod
    def _dropped(now: Formation, packing: Packing, depth: int, why: str) -> str:
        return f"{mesh_text(packing.mesh(now.run.mesh))} with {depth} frozen layers: {why}"


def _scaled(seconds: float | None, model_now: float, model_before: float | None) -> float:
    """Of a step on the present mesh with the layers that are about to be frozen: as measured without them, scaled as
    the model is."""
    if seconds is None:
        return model_now
    return seconds * (model_now / model_before if model_before else 1.0)
