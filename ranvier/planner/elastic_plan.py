"""What freezing would make of a run: the mesh and the time of each depth, the transitions, and the run as a whole.

Decisions are those of the run, by the same functions (`ranvier.elastic`), with facts that a cluster's constants predict
in place of measured ones. The policy is asked with gradients that are smaller the nearer they are to the output:
`gradient-norm`, whose norms nobody knows yet, then freezes as much as it may. A transition costs what the ledger
expects of it. Frozen layers whose outputs are cached are read from the host's memory after the epoch that follows their
freezing, as far as `elastic.cache-bytes` holds them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ranvier.block import untrained_layers
from ranvier.config.other_mesh import on_mesh
from ranvier.config.resolve import ResolvedRun
from ranvier.config.task_form import form_of
from ranvier.cost.blocks import BlockCost
from ranvier.cost.device_overhead import usable_bytes
from ranvier.cost.hardware import Cluster
from ranvier.cost.kernels import Access, Kernel
from ranvier.cost.run_cost import run_cost
from ranvier.elastic.auto_pipe import CandidateStage
from ranvier.elastic.cache_profile import Times
from ranvier.elastic.cache_profile import decide as decide_cache
from ranvier.elastic.freezing import Cap, Facts, FreezePolicy, GradientNorm, Manual, NoFreezing, decide
from ranvier.elastic.ledger import Entry, Ledger
from ranvier.elastic.mesh_candidates import MeshCandidate, StageMemory, candidate_moved_bytes, mesh_candidates
from ranvier.elastic.microbatch_profile import TRIAL_STEPS, MicrobatchProfile, microbatch_counts, size_of
from ranvier.elastic.named_policy import policy_of
from ranvier.elastic.rules import ElasticRules, EvaluationSchedule, PresentMesh
from ranvier.elastic.transition_selector import TransitionSelector, mesh_text
from ranvier.errors import RanvierError
from ranvier.mesh import Mesh
from ranvier.models import families
from ranvier.plan.fitting import first_that_fits, schedules
from ranvier.planner.predicted_blocks import predicted_blocks
from ranvier.planner.problems import problems
from ranvier.planner.work import Work


@dataclass(frozen=True, kw_only=True)
class Period:
    """Steps with one depth, mesh, global size and microbatch. transition_seconds: of the transition that begins it."""

    first_step: int
    steps: int
    global_size: int
    microbatch_size: int
    frozen: int
    mesh: Mesh
    step_seconds: float
    transition_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Of all its steps and the transition before them."""
        return self.steps * self.step_seconds + self.transition_seconds


@dataclass(frozen=True, kw_only=True)
class Course:
    """A whole run, and the same run without freezing."""

    periods: tuple[Period, ...]
    unfrozen_seconds: float

    @property
    def seconds(self) -> float:
        """Of the whole run."""
        return sum(period.seconds for period in self.periods)

    @property
    def speedup(self) -> float:
        """How many times as fast the run is as without freezing."""
        return self.unfrozen_seconds / self.seconds


def course(run: ResolvedRun, cluster: Cluster, work: Work) -> Course | None:
    """Of a configuration that a search has chosen; None where the run freezes nothing, where what freezes depends on
    what the layers compute, and where it takes or freezes with epochs of which nobody knows how many steps they have
    before the data is read. RanvierError for a run that cannot be as it is (without data, say): neither could it be on
    any other mesh, and it would seem to be best where it is."""
    for problem in problems(run):
        raise problem
    steps, samples = _steps(run), _epoch_samples(run)
    if run.elastic.freeze == "none" or run.elastic.dry_run or steps is None:
        return None
    policy = policy_of(run.elastic)
    if not isinstance(policy, (Cap, GradientNorm, Manual, NoFreezing)):
        return None
    if not isinstance(policy, (Manual, NoFreezing)) and not run.elastic.every and samples is None:
        return None
    whole = run_cost(run, cluster, work.stages(run)).seconds
    predicted = _PredictedRun(run, cluster, work, policy, steps, samples or steps * run.batch.global_size)
    return Course(periods=predicted.periods(), unfrozen_seconds=whole * steps)


def elastic_variants(run: ResolvedRun) -> list[ResolvedRun]:
    """A run whose layers freeze, as it is and with what may be made of it: the mesh stays or packs and replicates,
    outputs are cached or not. Accuracy is the same for all, but for the rounding of what is cached, and where the
    global batch grows with the replicas."""
    found = [run]
    for packs in (False, True):
        for cache in (False, True):
            other = replace(run, elastic=replace(run.elastic, auto_pipe=packs, auto_dp=packs, cache=cache))
            if other not in found and not problems(other):
                found.append(other)
    return found


def _epoch_samples(run: ResolvedRun) -> int | None:
    """Of texts nobody says how many sequences they have."""
    return None if "data.train_samples" in form_of(run.data).unused else run.data.train_samples


def _steps(run: ResolvedRun) -> int | None:
    """Of the whole run, in batches of the size that it has now."""
    samples = _epoch_samples(run)
    if run.train.epochs is None:
        return run.train.steps
    return None if samples is None else -(-samples * run.train.epochs // run.batch.global_size)


class _PredictedRun:
    """A run on its way through its data: the state that `ranvier.train.elasticity` has, without clocks."""

    def __init__(self, run: ResolvedRun, cluster: Cluster, work: Work, policy: FreezePolicy, steps: int, epoch: int
                 ) -> None:
        self.first, self.cluster, self.work, self.policy = run, cluster, work, policy
        self.total_steps, self.epoch_samples = steps, epoch
        self.rules, self.ledger, self.profile = ElasticRules(run), Ledger(), MicrobatchProfile()
        self.selector = TransitionSelector(self.rules, lambda step, event, text, fields: None)
        self.schedule = EvaluationSchedule(every=run.elastic.every, epoch_samples=epoch,
                                           depths=policy.depths if isinstance(policy, Manual) else None)
        self.run = replace(run, pipeline=replace(run.pipeline, boundaries=work.boundaries(run) or None))
        self.step = self.samples = self.frozen = self.evaluations = 0
        self.floor = untrained_layers(families.model_of(run))
        """Layers in which nothing trains, which are frozen from the start."""
        self.cached = 0
        """Frozen layers whose outputs have been written, and are read."""
        self.refused_at = 0
        """Frozen layers at which the cache did not pay."""
        self.found: list[Period] = []
        self.written_at = 0
        """Step at which all outputs of the frozen layers have been written."""
        self.transition = 0.0
        """Seconds of a transition that the next period begins with."""

    # ------------------------------------------------------------------ the course of the run

    @property
    def size(self) -> int:
        """Samples of a step."""
        return self.run.batch.global_size

    @property
    def left(self) -> int:
        """Steps that are left."""
        return self.rules.remaining_steps(self.total_steps, self.samples, self.size)

    def periods(self) -> tuple[Period, ...]:
        """All of them, in order."""
        by_hand = self.schedule.depths is not None and self.schedule.is_due(0, 0, 0, 0, self.floor)
        if by_hand or self.floor:
            self._evaluate(asks=by_hand)
        while self.left:
            due = self.schedule.steps_until_due(self.step, self.samples, self.size, self.frozen, self.floor)
            self._advance(self.left if due is None else min(due, self.left))
            if self.left:
                self._evaluate()
        return tuple(self.found)

    def _advance(self, steps: int) -> None:
        """So many steps on the present mesh: trials of microbatches first, then an epoch that writes the cache."""
        for count, length in self._trials(steps):
            size = size_of(self.run.replica_batch_size, count, self.run.mesh.row)
            self._take(length, self._with_microbatches(size), self.cached)
            steps -= length
        run = self._with_microbatches(self._microbatch_size())
        if not (self.frozen and self._caches()):
            self._take(steps, run, min(self.cached, self.frozen))
            return
        writes = min(steps, max(0, self.written_at - self.step))
        self._take(writes, run, self.cached)
        if self.step >= self.written_at:
            self.cached = self.frozen
        self._take(steps - writes, run, self.cached)

    def _take(self, steps: int, run: ResolvedRun, cached: int) -> None:
        """Steps of one kind; they lengthen the last period where nothing has changed."""
        if not steps:
            return
        seconds = self._seconds(run, self.frozen, cached)
        period = Period(first_step=self.step, steps=steps, global_size=self.size, frozen=self.frozen, mesh=run.mesh,
                        microbatch_size=run.batch.microbatch_size, step_seconds=seconds,
                        transition_seconds=self.transition)
        last = self.found[-1] if self.found and not self.transition else None
        if last is not None and replace(last, first_step=self.step, steps=steps, transition_seconds=0.0) == period:
            self.found[-1] = replace(last, steps=last.steps + steps)
        else:
            self.found.append(period)
        self.transition = 0.0
        self.step, self.samples = self.step + steps, self.samples + steps * self.size

    # ------------------------------------------------------------------ decisions

    def _evaluate(self, *, asks: bool = True) -> None:
        """Ask the policy, and go where its answer leads; without `asks` freeze only layers in which nothing trains."""
        layers, depth = self.run.model.num_layers, self.frozen
        if asks:
            self.evaluations += 1
            norms = tuple(float(layers - layer) for layer in range(layers))
            depth = decide(self.policy, Facts(step=self.step, evaluation=self.evaluations, frozen=self.frozen,
                                              num_layers=layers, gradient_norms=norms)).prefix
        depth = max(depth, self.floor)
        moves, again = depth != self.frozen, self.selector.refused_at(depth)
        if not moves and not (self.first.elastic.auto_pipe and again):
            return
        present, profile = self._present(), self.profile if self.first.elastic.profile_microbatches else None
        now = self._with_microbatches(self._microbatch_size())
        facts = predicted_blocks(now, self.cluster, self.work, present, profile)
        chosen, entry = None, None
        if self.first.elastic.auto_pipe:
            candidates = mesh_candidates(
                self.rules, present, depth, facts, num_ranks=self.first.mesh.size,
                cached=self._cached_blocks(present, depth), profile=profile, memory=self._stage_memory(depth),
                among=None if moves else again)
            chosen, entry = self.selector.select(
                present, candidates, facts, depth=depth, step=self.step, ledger=self.ledger,
                seconds=self._seconds(now, self.frozen, min(self.cached, self.frozen)), remaining_steps=self.left,
                problem_of=lambda candidate: self._fitted(candidate, depth)[1] or None)
        if chosen is None and not moves:
            return
        here = MeshCandidate(data=present.mesh.data, pipe=present.mesh.pipe, boundaries=present.boundaries,
                             samples=self.size, seconds=None, fits=True, reason="")
        self._move(chosen or here, entry, present, candidate_moved_bytes(
            self.rules, present, chosen or here, facts, depth), depth)

    def _cached_blocks(self, present: PresentMesh, depth: int) -> int:
        """Frozen blocks that the next steps will read."""
        if not self.rules.caches(depth, self.refused_at):
            return 0
        due = self.schedule.steps_until_due(self.step, self.samples, self.size, depth, self.floor)
        return self.rules.cached_blocks(present, depth, epoch_samples=self.epoch_samples,
                                        asked_after=self.left if due is None else min(due, self.left))

    def _move(self, candidate: MeshCandidate, entry: Entry | None, present: PresentMesh, moved: int, depth: int
              ) -> None:
        """Make the transition, which costs what is expected of it."""
        self.transition = self.ledger.expected_cost(moved)
        self.run = self._fitted(candidate, depth)[0]
        self.ledger = self.ledger.with_entry(entry or Entry(
            step=self.step, old=mesh_text(present.mesh), new=mesh_text(self.run.mesh), moved_bytes=moved,
            remaining_steps=self.left)).with_measured(cost=self.transition, moved_bytes=moved)
        deeper, self.frozen = depth > self.frozen, depth
        self.cached = min(self.cached, depth)  # layers that train again have other outputs
        if deeper:
            self.written_at = self.step + -(-self.epoch_samples // self.size)

    def _present(self) -> PresentMesh:
        names = tuple(block.name for block in self.work.blocks(self.run, self.frozen))
        present = PresentMesh(mesh=self.run.mesh, boundaries=tuple(self.run.pipeline.boundaries or ()),
                              frozen=self.frozen, cached_blocks=0, global_size=self.size,
                              layers=families.layers_of(self.run), block_names=names)
        first = present.boundaries[0] if present.boundaries else len(names)
        return replace(present, cached_blocks=min(first, present.frozen_blocks(min(self.cached, self.frozen))))

    def _on(self, candidate: MeshCandidate) -> ResolvedRun:
        """The run as it would be on a candidate."""
        batch = replace(self.first.batch, global_size=self.rules.step_samples(candidate.data))
        there = on_mesh(replace(self.first, batch=batch), candidate.mesh(self.first.mesh))
        return replace(there, pipeline=replace(there.pipeline, boundaries=candidate.boundaries or None))

    def _fitted(self, candidate: MeshCandidate, depth: int) -> tuple[ResolvedRun, str]:
        """The same with the first of its schedules that fits, and what does not fit; empty where all does."""
        there = self._on(candidate)
        if found := problems(there):
            return there, str(found[0])
        return first_that_fits(there, lambda run: self.work.excess(run, self.cluster, depth),
                               lambda run, excess: not excess)

    def _stage_memory(self, depth: int) -> StageMemory | None:
        """What cuts must fit into, where each rank has a device of its own."""
        device = self.cluster.device
        if device.cores is not None:
            return None

        def needed(mesh: Mesh, samples: int, microbatch_size: int) -> Callable[[CandidateStage], int] | None:
            there = on_mesh(replace(self.first, batch=replace(self.first.batch, global_size=samples)), mesh)
            there = replace(there, batch=replace(there.batch, microbatch_size=microbatch_size),
                            pipeline=replace(there.pipeline, boundaries=None))
            if problems(there):
                return None
            try:
                found = self.work.stage_bytes(schedules(there)[-1], depth)
            except RanvierError:
                return None

            def of(place: CandidateStage) -> int:
                return found(place.stage, place.start, place.stop)
            return of

        return StageMemory(limit_bytes=usable_bytes(device), needed=needed)

    # ------------------------------------------------------------------ microbatches

    def _with_microbatches(self, size: int) -> ResolvedRun:
        return replace(self.run, batch=replace(self.run.batch, microbatch_size=size))

    def _counts(self) -> tuple[int, ...]:
        return microbatch_counts(self.run.mesh.pipe, self.run.replica_batch_size)

    def _microbatch_size(self) -> int:
        """Samples of a microbatch: the run's or, where numbers of them are profiled, of the fastest one."""
        if not self.first.elastic.profile_microbatches:
            return self.run.batch.microbatch_size
        mesh = self.run.mesh
        best = self.profile.best(mesh.pipe, mesh.data, self.frozen, self._counts())
        return size_of(self.run.replica_batch_size, best, mesh.row)

    def _trials(self, steps: int) -> list[tuple[int, int]]:
        """(count, steps) of the numbers of microbatches that are tried in the next `steps` steps; each takes one more
        step than it is measured for, since a step is measured while the next one is under way."""
        found: list[tuple[int, int]] = []
        pipe, data, row = self.run.mesh.pipe, self.run.mesh.data, self.run.mesh.row
        while self.first.elastic.profile_microbatches and steps > TRIAL_STEPS:
            count = self.profile.next_count(pipe, data, self.frozen, self._counts())
            if count is None:
                break
            size = size_of(self.run.replica_batch_size, count, row)
            seconds = self._seconds(self._with_microbatches(size), self.frozen, min(self.cached, self.frozen))
            self.profile = self.profile.measured(pipe, data, self.frozen, count, seconds)
            found.append((count, TRIAL_STEPS + 1))
            steps -= TRIAL_STEPS + 1
        return found

    # ------------------------------------------------------------------ the cache

    def _caches(self) -> bool:
        """Whether outputs of the frozen layers are cached from now on: as asked for, or where reading pays."""
        if not self.rules.caches(self.frozen, self.refused_at):
            return False
        if self.first.elastic.cache_from != "auto" or self.cached >= self.frozen:
            return True
        reads = self.left * self.size // self.run.mesh.data
        decision = decide_cache("auto", frozen_layers=self.frozen, times=self._cache_times(), remaining_reads=reads,
                               num_samples=min(self.epoch_samples, reads))
        if not decision.pays and not self.cached:
            self.refused_at = self.frozen
        return decision.pays

    def _cache_times(self) -> Times:
        """Seconds of one sample on a rank of the first stage."""
        blocks, known = self._first_stage(self.run, self.frozen, self.frozen)
        before = self._first_stage(self.run, self.frozen, min(self.cached, self.frozen))[1]
        device, size = self.cluster.device, self.run.batch.microbatch_size
        work = blocks[before:known]
        computed = sum(device.seconds(block.kernels, self.run.precision) for block in work)
        moved = self.cluster.host_link.seconds(self._entry_bytes(blocks, known)) if known else 0.0
        return Times(compute=(computed + (moved if before else 0.0)) / size, read=moved / size, write=moved / size)

    def _first_stage(self, run: ResolvedRun, frozen: int, cached: int) -> tuple[list[BlockCost], int]:
        """The blocks of the first stage, and how many of them `cached` frozen layers are."""
        stages = self.work.stages(run, frozen)
        names = [block.name for blocks in stages for block in blocks]
        present = PresentMesh(mesh=run.mesh, boundaries=(), frozen=frozen, cached_blocks=0, global_size=1,
                              layers=families.layers_of(run), block_names=tuple(names))
        return stages[0], min(present.frozen_blocks(cached), len(stages[0]))

    def _entry_bytes(self, blocks: list[BlockCost], known: int) -> float:
        """Of a microbatch's entries in the cache, in its number format."""
        half = self.first.elastic.cache_precision == "half"
        share = _HALVED[self.run.precision] if half else 1.0
        return blocks[known - 1].output_bytes * share

    def _seconds(self, run: ResolvedRun, frozen: int, cached: int) -> float:
        """Of a step with so many frozen layers, where outputs of `cached` of them are read."""
        stages = self.work.stages(run, frozen)
        plain = run_cost(run, self.cluster, stages).seconds
        blocks, known = self._first_stage(run, frozen, cached)
        if not known:
            return plain
        device, entry = self.cluster.device, self._entry_bytes(blocks, known)
        read = self.cluster.host_link.seconds(entry)  # as bytes of the device's memory
        read_bytes = round(read * device.memory_bandwidth * device.memory_share)
        stages[0] = [_nothing(block) for block in blocks[:known - 1]] + [
            replace(_nothing(blocks[known - 1]), kernels=(Kernel(kind="copy", reads=(
                Access(0, read_bytes, read_bytes),)),))] + blocks[known:]
        reading = run_cost(run, self.cluster, stages).seconds
        needed = entry / run.batch.microbatch_size * self.epoch_samples * run.mesh.stage_size
        held = min(1.0, self.first.elastic.cache_bytes / needed) if needed else 1.0
        return reading if held == 1.0 else held * reading + (1.0 - held) * plain


_HALVED: Mapping[str, float] = {"fp64": 0.25, "fp32": 0.5, "bf16": 1.0, "fp16": 1.0}
"""What half precision takes of an entry's bytes."""


def _nothing(block: BlockCost) -> BlockCost:
    return replace(block, flops=0, written_bytes=0, allocated_bytes=0, kernels=(), kept_bytes=0)
