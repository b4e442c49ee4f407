"""Selects the mesh that a run changes to: the first candidate that fits and pays. Rejected ones are checked again.

Memory, measured times and the cost of transitions change from epoch to epoch. So a mesh that did not fit or did
not pay may be taken later with the same frozen layers; until then its refusal is reported once. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ranvier.elastic.inputs import BlockFacts, ElasticRules, PresentMesh
from ranvier.elastic.mesh_candidates import MeshCandidate, candidate_moved_bytes, shape_of
from ranvier.elastic.state import ElasticState
from ranvier.mesh import mesh_text


@dataclass(frozen=True, kw_only=True)
class Note:
    """Something that the run reports, as an event of this name."""

    event: str
    text: str
    fields: Mapping[str, object] = field(default_factory=dict)


def select(rules: ElasticRules, state: ElasticState, present: PresentMesh, candidates: Sequence[MeshCandidate],
           facts: BlockFacts, *, depth: int, step: int, remaining_steps: int,
           problem_of: Callable[[MeshCandidate], str | None]
           ) -> tuple[ElasticState, MeshCandidate | None, tuple[Note, ...]]:
    """Select the mesh and cut that the run changes to after `step`; None where both stay as they are.

    Args:
        candidates: the best first, with the present mesh, whose cut may be another. Where no more layers freeze,
            only another mesh is taken.
        depth: frozen layers from now on.
        problem_of: why the run cannot continue on a candidate, or None.
    """
    notes, ledger, refused = list[Note](), state.ledger, state.refused

    def refuse(candidate: MeshCandidate, event: str, text: str, fields: Mapping[str, object] | None = None) -> None:
        nonlocal refused
        key = *shape_of(candidate.mesh), depth
        if key not in refused:
            notes.append(Note(event=event, text=text, fields=fields or {}))
        refused = frozenset(other for other in refused if other[2] == depth) | {key}

    chosen = None
    here = next((each for each in candidates if each.mesh == present.mesh), None)
    for candidate in candidates:
        if candidate.too_large and candidate is not here:
            refuse(candidate, "dropped", _dropped(candidate, depth, candidate.reason))
    for candidate in (candidate for candidate in candidates if candidate.fits):
        if candidate is here and depth == present.frozen:
            break
        same = candidate is here and candidate.boundaries == tuple(present.boundaries)
        problem = None if same else problem_of(candidate)
        if problem is not None:
            text = _dropped(candidate, depth, problem)
            if candidate is here:  # its present cut is what it has, and slower meshes need not be judged
                notes.append(Note(event="dropped", text=text))
                break
            refuse(candidate, "dropped", text)
            continue
        if candidate is here or rules.run.elastic.cut == "reference" or here is None or here.seconds is None:
            chosen = candidate
            break
        # of a step here with the layers that are about to freeze: as measured without them, scaled as the model is
        now = here.seconds if state.seconds is None else \
            state.seconds * (here.seconds / facts.seconds if facts.seconds else 1.0)
        decision = ledger.pays(
            step=step, old=mesh_text(present.mesh), new=mesh_text(candidate.mesh),
            seconds_before=now, model_before=here.seconds_per_sample,
            model_after=candidate.seconds_per_sample, remaining_steps=remaining_steps,
            moved_bytes=candidate_moved_bytes(rules, present, candidate, facts, depth))
        if decision.pays:
            refused -= {(*shape_of(candidate.mesh), depth)}
            notes.append(Note(event="judged", text=decision.text, fields={"pays": True}))
            chosen, ledger = candidate, ledger.with_entry(decision.entry)
            break
        refuse(candidate, "judged", decision.text, {"pays": False})
    return replace(state, ledger=ledger, refused=refused), chosen, tuple(notes)


def _dropped(candidate: MeshCandidate, depth: int, why: str) -> str:
    return f"{mesh_text(candidate.mesh)} with {depth} frozen layers: {why}"
