"""The meshes to which a run may change when layers freeze, each with its cut and predicted seconds; and the selection
of one of them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from ranvier.config.other_mesh import microbatch_size, on_mesh
from ranvier.config.resolve import ResolvedRun, stage_placement
from ranvier.cost.transition import moved_bytes
from ranvier.elastic.auto_pipe import Situation, StageBytes, best_cut, compress, greedy, stage_sizes
from ranvier.elastic.inputs import BlockFacts, ElasticRules, PresentMesh
from ranvier.elastic.microbatch_profile import MicrobatchProfile, microbatch_counts, size_of
from ranvier.elastic.state import ElasticState
from ranvier.mesh import Mesh, divisors, mesh_text
from ranvier.plan.limits import schedules
from ranvier.schedule.policies import policy_named


@dataclass(frozen=True, kw_only=True)
class MeshCandidate:
    """A mesh to which the run could change, and its cut."""

    mesh: Mesh
    boundaries: tuple[int, ...]
    """First block of each stage after the first."""
    samples: int
    """Samples of a step."""
    seconds: float | None
    """Predicted seconds of a step; None if the mesh is impossible or its time is not known."""
    fits: bool
    reason: str
    """The bottleneck that determines its time, or why the mesh is impossible."""
    too_large: bool = False
    """Whether it is impossible because no cut fits the ranks' devices."""

    @property
    def seconds_per_sample(self) -> float:
        """Seconds per sample, by which candidates are compared; infinite if the time is unknown."""
        return inf if self.seconds is None else self.seconds / self.samples


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Memory into which cuts must fit, if each rank has its own device."""

    limit_bytes: int | None
    """Most bytes that a rank may need."""
    needed: Callable[[ResolvedRun], StageBytes | None]
    """Returns the bytes that a rank of each stage of a run needs; None if memory is not judged stage by stage, or the
    run is impossible."""


def mesh_candidates(rules: ElasticRules, present: PresentMesh, depth: int, facts: BlockFacts, *, num_ranks: int,
                    cached: int, profile: MicrobatchProfile | None = None, memory: StageMemory | None = None,
                    among: Collection[tuple[int, int]] | None = None) -> list[MeshCandidate]:
    """The meshes to which the run may change with `depth` frozen layers, best first, including the present mesh.

    Args:
        num_ranks: present number of ranks, including idle ones: some may have been lost, and others may have joined.
        cached: frozen blocks whose outputs the first stage will read (`ElasticRules.cached_blocks`).
        profile: measured times by number of microbatches, if the run uses them. among: (replicas, ranks of a pipeline)
        of the meshes to consider, in addition to the present mesh; None considers all.
    """
    frozen, first, here = present.frozen_blocks(depth), rules.run.mesh, present.mesh
    here.require_known_axes("the choice of a mesh")
    if rules.run.elastic.cut == "reference":
        return [_reference(rules, present, frozen, facts, num_ranks)]
    ranks = num_ranks // here.stage_size  # each stage keeps its number of ranks
    if rules.run.elastic.auto_dp:
        shapes = [(ranks // length, length) for length in divisors(ranks)]
    else:
        shapes = [(here.num_replicas, length) for length in divisors(first.pipeline_size)
                  if here.num_replicas * length <= ranks]
    wanted = {shape for shape in shapes if among is None or shape in among} | {shape_of(here)}
    found = [mesh_candidate(rules, facts, frozen, mesh=here.shaped(num_replicas=replicas, pipeline_size=length),
                            samples=rules.step_samples(replicas), cached=cached, profile=profile,
                            memory=memory) for replicas, length in wanted]
    return sorted(found, key=lambda candidate: (not candidate.fits, candidate.seconds_per_sample,
                                                -candidate.mesh.pipeline_size))


def shape_of(mesh: Mesh) -> tuple[int, int]:
    """(replicas, ranks of a pipeline) of a mesh, in which candidates differ."""
    return mesh.num_replicas, mesh.pipeline_size


def with_present_seconds(facts: BlockFacts, rules: ElasticRules, present: PresentMesh,
                         profile: MicrobatchProfile | None = None) -> BlockFacts:
    """The facts with the predicted seconds of a step on the present mesh."""
    here = mesh_candidate(rules, facts, present.frozen_blocks(present.frozen), mesh=present.mesh,
                          samples=present.global_size, cached=present.cached_blocks, profile=profile)
    return replace(facts, seconds=here.seconds)


def mesh_candidate(rules: ElasticRules, facts: BlockFacts, frozen: int, *, mesh: Mesh, samples: int, cached: int,
                   profile: MicrobatchProfile | None = None, memory: StageMemory | None = None) -> MeshCandidate:
    """`mesh` with its exact cut, for the run's schedule and the size of microbatches on this mesh. frozen, cached:
    numbers of blocks."""
    run, data, pipe = rules.run, mesh.num_replicas, mesh.pipeline_size
    share, size, in_flight = -(-samples // data), run.batch.microbatch_size, run.pipeline.in_flight
    count = -(-share // min(share, size))
    size = microbatch_size(size, global_size=samples, mesh=mesh)
    best = None if profile is None else profile.best_count(pipe, data, microbatch_counts(pipe, share))
    if best is not None:
        count, size = best, size_of(share, best, mesh.microbatch_parts)
    holders, placement = data if run.optim.shard else 1, stage_placement(pipe, run.pipeline)
    if placement.per_rank > 1:
        memory = None  # a rank's stages share it, so `select` judges the memory of the entire mesh
    needed = None
    if memory is not None:  # with the schedule that needs the least memory
        there = on_mesh(replace(run, batch=replace(run.batch, global_size=samples)), mesh)
        needed = memory.needed(schedules(replace(there, batch=replace(there.batch, microbatch_size=size),
                                                 pipeline=replace(there.pipeline, boundaries=None)))[-1])
    cut = best_cut(Situation(
        facts=replace(facts, update_seconds=tuple(seconds / holders for seconds in facts.update_seconds)),
        num_replicas=data, placement=placement, samples=samples, microbatches=count, frozen=frozen,
        cached=min(cached, frozen), policy=policy_named(run.pipeline.policy),
        in_flight=None if in_flight == "auto" else in_flight, memory_bytes=needed,
        limit_bytes=None if memory is None else memory.limit_bytes))
    return MeshCandidate(mesh=mesh, boundaries=cut.boundaries, samples=samples, seconds=cut.seconds,
                         fits=cut.seconds is not None, reason=cut.reason, too_large=cut.too_large)


def candidate_moved_bytes(rules: ElasticRules, present: PresentMesh, candidate: MeshCandidate, facts: BlockFacts,
                          depth: int) -> int:
    """Approximate bytes that ranks send each other in a transition to `candidate` with `depth` frozen layers."""
    return moved_bytes(old=present.mesh, old_boundaries=present.boundaries, new=candidate.mesh,
                       new_boundaries=candidate.boundaries, parameter_bytes=facts.parameter_bytes,
                       state_bytes=facts.state_bytes, frozen_blocks=present.frozen_blocks(depth),
                       sharded=rules.run.optim.shard, pipeline=rules.run.pipeline)


def _reference(rules: ElasticRules, present: PresentMesh, frozen: int, facts: BlockFacts, num_ranks: int
               ) -> MeshCandidate:
    """PipeTransformer's rule (He et al., 2021, Algorithm 1 and section 3.2): by parameters alone."""
    first, ranks = rules.run.mesh, num_ranks // present.mesh.stage_size
    sizes = [count / 1e6 for count in facts.num_parameters]
    largest = max(stage_sizes(sizes, greedy(sizes, first.pipeline_size)))
    pipe = compress(sizes, present.mesh.pipeline_size, frozen, largest)
    data = ranks // pipe if rules.run.elastic.auto_dp else present.mesh.num_replicas
    counts = greedy(sizes, pipe, frozen)
    boundaries = tuple(sum(counts[:stage]) for stage in range(1, pipe))
    return MeshCandidate(mesh=present.mesh.shaped(num_replicas=data, pipeline_size=pipe), boundaries=boundaries,
                         samples=rules.step_samples(data), seconds=None, fits=True, reason="the article's rule")


# --- the choice -------------------------------------------------------------------------------------------------------

# Selects the mesh to which a run changes: the first candidate that fits and pays. Rejected candidates are checked
# again.
#
# Memory, measured times and the cost of transitions change from epoch to epoch. So a mesh that did not fit or did
# not pay may be taken later with the same frozen layers; until then its refusal is reported once.


@dataclass(frozen=True, kw_only=True)
class Note:
    """Something for the run to report, as an event of this name."""

    event: str
    text: str
    fields: Mapping[str, object] = field(default_factory=dict)


def select(rules: ElasticRules, state: ElasticState, present: PresentMesh, candidates: Sequence[MeshCandidate],
           facts: BlockFacts, *, depth: int, step: int, remaining_steps: int,
           problem_of: Callable[[MeshCandidate], str | None]
           ) -> tuple[ElasticState, MeshCandidate | None, tuple[Note, ...]]:
    """Select the mesh and cut to which the run changes after `step`; None if both stay.

    Args:
        candidates: best first, including the present mesh, perhaps with another cut. If no more layers freeze, only
            another mesh is selected.
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
    current = next((each for each in candidates if each.mesh == present.mesh), None)
    for candidate in candidates:
        if candidate.too_large and candidate is not current:
            refuse(candidate, "dropped", _drop_reason(candidate, depth, candidate.reason))
    for candidate in (candidate for candidate in candidates if candidate.fits):
        if candidate is current and depth == present.frozen:
            break
        same = candidate is current and candidate.boundaries == tuple(present.boundaries)
        problem = None if same else problem_of(candidate)
        if problem is not None:
            text = _drop_reason(candidate, depth, problem)
            if candidate is current:  # it keeps its present cut, and slower meshes need not be judged
                notes.append(Note(event="dropped", text=text))
                break
            refuse(candidate, "dropped", text)
            continue
        if candidate is current or rules.run.elastic.cut == "reference" or current is None or current.seconds is None:
            chosen = candidate
            break
        # seconds of a step on this mesh once the layers are frozen: the measured time, scaled by the model's ratio
        now = current.seconds if state.seconds is None else \
            state.seconds * (current.seconds / facts.seconds if facts.seconds else 1.0)
        decision = ledger.decide(
            step=step, old=mesh_text(present.mesh), new=mesh_text(candidate.mesh),
            seconds_before=now, model_before=current.seconds_per_sample,
            model_after=candidate.seconds_per_sample, remaining_steps=remaining_steps,
            moved_bytes=candidate_moved_bytes(rules, present, candidate, facts, depth))
        if decision.pays:
            refused -= {(*shape_of(candidate.mesh), depth)}
            notes.append(Note(event="judged", text=decision.text, fields={"pays": True}))
            chosen, ledger = candidate, ledger.with_entry(decision.entry)
            break
        refuse(candidate, "judged", decision.text, {"pays": False})
    return replace(state, ledger=ledger, refused=refused), chosen, tuple(notes)


def _drop_reason(candidate: MeshCandidate, depth: int, why: str) -> str:
    return f"{mesh_text(candidate.mesh)} with {depth} frozen layers: {why}"
