"""Selects the mesh that a run changes to: the first candidate that fits and pays. Rejected ones are checked again.

Memory, measured times and the cost of transitions change from epoch to epoch. So a mesh that did not fit or did
not pay may be taken later with the same frozen layers; until then its refusal is reported once. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set

from ranvier.elastic.ledger import Entry, Ledger
from ranvier.elastic.mesh_candidates import MeshCandidate, candidate_moved_bytes
from ranvier.elastic.rules import BlockFacts, ElasticRules, PresentMesh
from ranvier.mesh import Mesh


class TransitionSelector:
    """Of one run, on rank 0. tell: takes (step, event, text, fields)."""

    def __init__(self, rules: ElasticRules, tell: Callable[[int, str, str, Mapping[str, object]], None]) -> None:
        self._rules, self._tell = rules, tell
        self.refused: set[tuple[int, int, int]] = set()
        """(data, pipe, frozen layers) of meshes that did not fit or did not pay, at the depth of the last refusal."""

    def refused_at(self, depth: int) -> Set[tuple[int, int]]:
        """(data, pipe) of the meshes that were refused with `depth` frozen layers."""
        return {(data, pipe) for data, pipe, frozen in self.refused if frozen == depth}

    def select(self, present: PresentMesh, candidates: Sequence[MeshCandidate], facts: BlockFacts, *, depth: int,
               step: int, ledger: Ledger, seconds: float | None, remaining_steps: int,
               problem_of: Callable[[MeshCandidate], str | None]) -> tuple[MeshCandidate | None, Entry | None]:
        """What to take of `candidates` after `step`, and the entry in the ledger that it is to have; (None, None) where
        mesh and cut stay as they are.

        Args:
            candidates: the best first, with the present mesh, whose cut may be another. Where no more layers freeze,
                only another mesh is taken.
            depth: frozen layers from now on.
            seconds: of a step now, measured; None where it was not.
            problem_of: why the run cannot continue on a candidate, or None.
        """
        here = next((each for each in candidates if each.mesh(present.mesh) == present.mesh), None)
        for candidate in candidates:
            if candidate.too_large and candidate is not here:
                self._refuse(candidate, depth, step, "dropped", _dropped(present, candidate, depth, candidate.reason))
        for candidate in (candidate for candidate in candidates if candidate.fits):
            if candidate is here and depth == present.frozen:
                break
            same = candidate is here and candidate.boundaries == tuple(present.boundaries)
            problem = None if same else problem_of(candidate)
            if problem is not None:
                text = _dropped(present, candidate, depth, problem)
                if candidate is here:  # its present cut is what it has, and slower meshes need not be judged
                    self._tell(step, "dropped", text, {})
                    break
                self._refuse(candidate, depth, step, "dropped", text)
                continue
            if candidate is here or self._rules.run.elastic.cut == "reference" or here is None or here.seconds is None:
                return candidate, None
            decision = ledger.pays(
                step=step, old=mesh_text(present.mesh), new=mesh_text(candidate.mesh(present.mesh)),
                seconds_before=_scaled(seconds, here.seconds, facts.seconds), model_before=here.seconds_per_sample,
                model_after=candidate.seconds_per_sample, remaining_steps=remaining_steps,
                moved_bytes=candidate_moved_bytes(self._rules, present, candidate, facts, depth))
            if decision.pays:
                self.refused.discard((candidate.data, candidate.pipe, depth))
                self._tell(step, "judged", decision.text, {"pays": True})
                return candidate, decision.entry
            self._refuse(candidate, depth, step, "judged", decision.text, {"pays": False})
        return None, None

    def _refuse(self, candidate: MeshCandidate, depth: int, step: int, event: str, text: str,
                fields: Mapping[str, object] | None = None) -> None:
        key = candidate.data, candidate.pipe, depth
        if key not in self.refused:
            self._tell(step, event, text, fields or {})
        self.refused = {other for other in self.refused if other[2] == depth} | {key}


def mesh_text(mesh: Mesh) -> str:
    """The mesh in words: axes of a stage only where they are used."""
    left_out = mesh.stage_axes if mesh.stage_size == 1 else ()
    return " x ".join(f"{axis} {size}" for axis, size in mesh.items() if axis not in left_out)


def _dropped(present: PresentMesh, candidate: MeshCandidate, depth: int, why: str) -> str:
    return f"{mesh_text(candidate.mesh(present.mesh))} with {depth} frozen layers: {why}"


def _scaled(seconds: float | None, model_now: float, model_before: float | None) -> float:
    """Seconds of a step on the present mesh with the layers that are about to be frozen: as measured without them,
    scaled as the model is."""
    if seconds is None:
        return model_now
    return seconds * (model_now / model_before if model_before else 1.0)
