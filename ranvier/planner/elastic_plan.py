"""Prediction of a run whose layers freeze: the mesh and the time at each depth, the transitions, and the entire run.

The same controller as in a run (`ranvier.elastic.controller`) decides, from facts predicted by a cluster's constants
instead of measured ones. The policy is evaluated with gradients that decrease towards the output: `gradient-norm`,
whose norms are not known yet, then freezes as much as it may. A transition costs what the ledger expects. Cached
outputs of frozen layers are read from the host's memory after the epoch that follows their freezing, as far as
`elastic.cache-bytes` holds them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ranvier.config.resolve import ResolvedRun
from ranvier.config.run import Run
from ranvier.config.task_form import form_of
from ranvier.cost.blocks import BlockCost
from ranvier.cost.device_overhead import usable_bytes
from ranvier.cost.hardware import Cluster
from ranvier.cost.kernels import Access, Kernel, backward_of, weight_gradients_of
from ranvier.cost.stage_messages import rank_threads
from ranvier.cost.step import update_seconds
from ranvier.elastic.auto_pipe import StageBytes
from ranvier.elastic.cache_profile import Times
from ranvier.elastic.cache_profile import decide as decide_cache
from ranvier.elastic.controller import DecisionFacts, fastest_count, tried_microbatch_size
from ranvier.elastic.freezing import NONE_FROZEN, Cap, GradientNorm, Manual, NoFreezing
from ranvier.elastic.inputs import LINKS, BlockFacts, ElasticRules, PresentMesh
from ranvier.elastic.mesh_candidates import MeshCandidate, StageMemory, candidate_moved_bytes, with_present_seconds
from ranvier.elastic.microbatch_profile import MicrobatchProfile, size_of
from ranvier.elastic.named_policy import controller_of, policy_of
from ranvier.elastic.state import RECENT_STEPS, StepFigures
from ranvier.errors import RanvierError
from ranvier.mesh import Mesh
from ranvier.models import families
from ranvier.planner.problems import problems
from ranvier.planner.run_cost import run_cost, step_of
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
        """Seconds of all steps and of the transition before them."""
        return self.steps * self.step_seconds + self.transition_seconds


@dataclass(frozen=True, kw_only=True)
class Course:
    """An entire run, compared with the same run without freezing."""

    periods: tuple[Period, ...]
    unfrozen_seconds: float

    @property
    def seconds(self) -> float:
        """Seconds of the entire run."""
        return sum(period.seconds for period in self.periods)

    @property
    def speedup(self) -> float:
        """Speedup of the run over one without freezing."""
        return self.unfrozen_seconds / self.seconds


def course(run: ResolvedRun, cluster: Cluster, work: Work) -> Course | None:
    """The course of a configuration that a search has chosen. None if the run freezes nothing, if freezing depends on
    what the layers compute, or if the run counts in epochs whose number of steps is unknown before the data is read.
    RanvierError for an invalid run (for example without data): it would be invalid on any other mesh, too, so its
    present mesh would seem to be the best."""
    for problem in problems(run):
        raise problem
    steps, samples = known_steps(run), _epoch_samples(run)
    if run.elastic.freeze == "none" or run.elastic.dry_run or steps is None:
        return None
    policy = policy_of(run.elastic)
    if not isinstance(policy, (Cap, GradientNorm, Manual, NoFreezing)):
        return None
    if not isinstance(policy, (Manual, NoFreezing)) and not run.elastic.every and samples is None:
        return None
    whole = run_cost(run, cluster, work.stages(run)).seconds
    predicted = _PredictedRun(run, cluster, work, steps, samples or steps * run.batch.global_size)
    return Course(periods=predicted.periods(), unfrozen_seconds=whole * steps)


def elastic_variants(run: ResolvedRun) -> list[ResolvedRun]:
    """Variants of a run whose layers freeze: its mesh stays, or packs and replicates; outputs are cached or not.
    Accuracy is the same for all, except for the rounding of cached outputs, and if the global batch grows with the
    replicas."""
    found = [run]
    for packs in (False, True):
        for cache in (False, True):
            other = replace(run, elastic=replace(run.elastic, auto_pipe=packs, auto_dp=packs, cache=cache))
            if other not in found and not problems(other):
                found.append(other)
    return found


def _epoch_samples(run: Run) -> int | None:
    """Samples of an epoch; None for text, whose number of sequences is not known in advance."""
    return None if "data.train_samples" in form_of(run.data).unused else run.data.train_samples


def known_steps(run: Run) -> int | None:
    """Steps of the run, in batches of the present size; None if only its data determines the number."""
    samples = _epoch_samples(run)
    if run.train.epochs is None:
        return run.train.steps
    return None if samples is None else -(-samples * run.train.epochs // run.batch.global_size)


class _PredictedRun:
    """A simulated run: the controller decides, from predicted facts."""

    def __init__(self, run: ResolvedRun, cluster: Cluster, work: Work, steps: int, epoch: int) -> None:
        self.first, self.cluster, self.work = run, cluster, work
        self.controller = controller_of(run, epoch)
        self.state, self.frozen = self.controller.initial(), NONE_FROZEN
        self.rules, self.total_samples, self.epoch_samples = self.controller.rules, run.samples_of(steps), epoch
        self.run = replace(run, pipeline=replace(run.pipeline, boundaries=work.boundaries(run) or None))
        self.step = self.samples = 0
        self.unseen: float | None = None
        """Seconds of the last step, whose numbers are known during the next step."""
        self.costed: tuple[object, object, object, float] = (None, None, None, 0.0)
        """(run, frozen layers, cached layers, seconds) of the last steps."""
        self.cached = 0
        """Number of frozen layers whose outputs have been written, and are read."""
        self.refused_at = 0
        """Number of frozen layers at which the cache did not save time."""
        self.found: list[Period] = []
        self.written_at = 0
        """Step at which all outputs of the frozen layers have been written."""
        self.transition = 0.0
        """Seconds of a transition with which the next period begins."""

    # ------------------------------------------------------------------ the course of the run

    @property
    def size(self) -> int:
        """Samples of a step."""
        return self.run.batch.global_size

    @property
    def depth(self) -> int:
        """Frozen layers."""
        return self.frozen.prefix

    @property
    def steps_left(self) -> int:
        """Remaining steps."""
        return max(0, -(-(self.total_samples - self.samples) // self.size))

    def periods(self) -> tuple[Period, ...]:
        """All periods of the run, in order."""
        num_layers = self.run.model.num_layers
        # gradients decrease towards the output
        norms = tuple(float(num_layers - layer) for layer in range(num_layers))
        self.state = self.controller.begin(self.state, 0, self.frozen, num_layers)
        if self.state.needs_decision:
            self._decide()
        while self.steps_left:
            until = self.controller.steps_until_evaluation(self.state, self.step, self.samples, self.size, self.depth)
            before = self.samples
            self._advance(self.steps_left if until is None else min(until, self.steps_left))
            if self.steps_left:
                last = max(before, self.samples - self.size)
                self.state = self.controller.evaluates_policy_after(self.state, self.step, last, self.samples,
                                                                    self.frozen)
                if self.state.due:
                    self.state = self.state.with_gradients(norms)
                self._record_step(None)
                if self.state.needs_decision:
                    self._decide()
        return tuple(self.found)

    def _advance(self, steps: int) -> None:
        """Take `steps` steps on the present mesh: first trials of microbatches, then an epoch that writes the cache."""
        run = self.run
        while steps:
            run = self._with_microbatches(self.step + 1)
            if self.state.trial is None:
                break
            self._take(1, run, self.cached)
            steps -= 1
        if steps and not (self.depth and self._caches(run)):
            self._take(steps, run, min(self.cached, self.depth))
        elif steps:
            writes = min(steps, max(0, self.written_at - self.step))
            self._take(writes, run, self.cached)
            if self.step >= self.written_at:
                self.cached = self.depth
            self._take(steps - writes, run, self.cached)

    def _with_microbatches(self, step: int) -> ResolvedRun:
        """The run with the microbatches of `step`."""
        if not self.first.elastic.profile_microbatches:
            return self.run
        self.state, size, _ = tried_microbatch_size(
            self.state, self.run.mesh, self.run.replica_batch_size, self.depth, step)
        return replace(self.run, batch=replace(self.run.batch, microbatch_size=size))

    def _take(self, steps: int, run: ResolvedRun, cached: int) -> None:
        """Take steps of one kind; they extend the last period if nothing has changed."""
        if not steps:
            return
        key = run, self.depth, cached
        if self.costed[:-1] != key:
            self.costed = *key, self._seconds(run, self.depth, cached)
        seconds = self.costed[-1]
        period = Period(first_step=self.step, steps=steps, global_size=self.size, frozen=self.depth, mesh=run.mesh,
                        microbatch_size=run.batch.microbatch_size, step_seconds=seconds,
                        transition_seconds=self.transition)
        last = self.found[-1] if self.found and not self.transition else None
        if last is not None and replace(last, first_step=self.step, steps=steps, transition_seconds=0.0) == period:
            self.found[-1] = replace(last, steps=last.steps + steps)
        else:
            self.found.append(period)
        self.transition = 0.0
        self._record_step(seconds)
        for step in range(max(self.step + 1, self.step + steps - RECENT_STEPS), self.step + steps):
            self.state = self.state.with_step(step, seconds, StepFigures())
        self.step, self.samples = self.step + steps, self.samples + steps * self.size

    def _record_step(self, seconds: float | None) -> None:
        """Record the numbers of the last finished step; a step that takes `seconds` follows."""
        if self.unseen is not None:
            self.state = self.state.with_step(self.step, self.unseen, StepFigures())
        self.unseen = seconds

    # ------------------------------------------------------------------ decisions

    def _decide(self) -> None:
        """Make the change that the controller decides, if any."""
        present = self._present()
        blocks = functools.cache(lambda: predicted_blocks(self._usual(), self.cluster, self.work, present,
                                                self.controller.profile(self.state)))
        decision = self.controller.decide(self.state, DecisionFacts(
            step=self.step, samples=self.samples, remaining_steps=self.steps_left, num_ranks=self.first.mesh.size,
            present=present, frozen=self.frozen, blocks=blocks,
            problem=lambda run, frozen: next(
                iter(problems(run)), None) or self.work.problem(run, self.cluster, frozen.prefix),
            stage_memory=lambda frozen: self._stage_memory(frozen.prefix),
            caches=lambda depth: self.rules.caches(depth, self.refused_at)))
        self.state, change = decision.state, decision.change
        if change is None:
            return
        there, depth, left = change.apply_to(self.first), change.frozen.prefix, self.steps_left
        candidate = MeshCandidate(mesh=there.mesh, boundaries=change.boundaries or (), samples=change.global_size,
                                  seconds=None, fits=True, reason="")
        moved = candidate_moved_bytes(self.rules, present, candidate, blocks(), depth)
        self.transition = self.state.ledger.expected_cost(moved)
        self.state = self.controller.after_change(
            self.state, change, step=self.step, old=self.run.mesh, new=there.mesh, moved_bytes=moved,
            seconds=self.transition, remaining_steps=left)
        deeper, self.run, self.frozen = depth > self.depth, there, change.frozen
        self.cached = min(self.cached, depth)  # layers that train again have other outputs
        if deeper:
            self.written_at = self.step + -(-self.epoch_samples // self.size)

    def _usual(self) -> ResolvedRun:
        """The run with the fastest microbatch size tried so far."""
        if self.controller.profile(self.state) is None:
            return self.run
        share = self.run.replica_batch_size
        best = fastest_count(self.state, self.run.mesh, share, self.depth)
        size = size_of(share, best, self.run.mesh.microbatch_parts)
        return replace(self.run, batch=replace(self.run.batch, microbatch_size=size))

    def _present(self) -> PresentMesh:
        names = tuple(block.name for block in self.work.blocks(self.run, self.depth))
        present = PresentMesh(mesh=self.run.mesh, boundaries=tuple(self.run.pipeline.boundaries or ()),
                              frozen=self.depth, cached_blocks=0, global_size=self.size,
                              layers=families.layers_of(self.run), block_names=names)
        first = present.boundaries[0] if present.boundaries else len(names)
        return replace(present, cached_blocks=min(first, present.frozen_blocks(min(self.cached, self.depth))))

    def _stage_memory(self, depth: int) -> StageMemory | None:
        """Memory into which cuts must fit, if each rank has its own device."""
        device = self.cluster.device
        if device.cores is not None:
            return None

        def needed(there: ResolvedRun) -> StageBytes | None:
            try:
                return None if problems(there) else self.work.stage_bytes(there, depth)
            except RanvierError:
                return None

        return StageMemory(limit_bytes=usable_bytes(device), needed=needed)

    # ------------------------------------------------------------------ the cache

    def _caches(self, run: ResolvedRun) -> bool:
        """Whether outputs of the frozen layers are cached from now on: as set, or if reading is faster."""
        if not self.rules.caches(self.depth, self.refused_at):
            return False
        if self.first.elastic.cache_from != "auto" or self.cached >= self.depth:
            return True
        reads = self.steps_left * self.size // self.run.mesh.num_replicas
        decision = decide_cache(self._cache_times(run), frozen_layers=self.depth, remaining_reads=reads,
                                num_samples=min(self.epoch_samples, reads))
        if not decision.pays and not self.cached:
            self.refused_at = self.depth
        return decision.pays

    def _cache_times(self, run: ResolvedRun) -> Times:
        """Seconds of one sample on a rank of the first stage."""
        blocks, known = self._first_stage(run, self.depth, self.depth)
        before = self._first_stage(run, self.depth, min(self.cached, self.depth))[1]
        device, size = self.cluster.device, run.batch.microbatch_size
        work = blocks[before:known]
        computed = sum(device.seconds(block.kernels, self.run.precision) for block in work)
        moved = self.cluster.host_link.seconds(self._entry_bytes(blocks, known)) if known else 0.0
        return Times(compute=(computed + (moved if before else 0.0)) / size, read=moved / size, write=moved / size)

    def _first_stage(self, run: ResolvedRun, frozen: int, cached: int) -> tuple[list[BlockCost], int]:
        """The blocks of the first stage, and how many of them belong to the `cached` frozen layers."""
        stages = self.work.stages(run, frozen)
        names = [block.name for blocks in stages for block in blocks]
        present = PresentMesh(mesh=run.mesh, boundaries=(), frozen=frozen, cached_blocks=0, global_size=1,
                              layers=families.layers_of(run), block_names=tuple(names))
        return stages[0], min(present.frozen_blocks(cached), len(stages[0]))

    def _entry_bytes(self, blocks: list[BlockCost], known: int) -> float:
        """Bytes of a microbatch's entries in the cache, in its number format."""
        half = self.first.elastic.cache_precision == "half"
        share = _HALVED[self.run.precision] if half else 1.0
        return blocks[known - 1].output_bytes * share

    def _seconds(self, run: ResolvedRun, frozen: int, cached: int) -> float:
        """Seconds of a step with `frozen` frozen layers, of which the outputs of `cached` are read."""
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
"""Size of an entry in half precision, relative to its full size."""


def _nothing(block: BlockCost) -> BlockCost:
    return replace(block, flops=0, written_bytes=0, forward_bytes=0, backward_bytes=0, kernels=(), kept_bytes=0)


# --- facts of blocks --------------------------------------------------------------------------------------------------

# The facts on which the choice of a mesh depends, predicted from a cluster's constants; those that a run measures
# instead are in `ranvier.train.measured_blocks`.


def predicted_blocks(run: ResolvedRun, cluster: Cluster, work: Work, present: PresentMesh,
                     profile: MicrobatchProfile | None = None) -> BlockFacts:
    """Facts of the blocks of `run` on its present mesh: seconds of one sample in each block on one rank, and bytes.

    Links are the nominal ones that a run uses for decisions (`ranvier.elastic.inputs.LINKS`), not the cluster's.
    """
    mesh, size = run.mesh, run.batch.microbatch_size
    stages = work.stages(run, present.frozen)
    step = step_of(run, stages, cluster)
    threads, local = rank_threads(cluster, mesh), min(cluster.devices_per_node, mesh.size)
    blocks = [block for blocks in stages for block in blocks]
    known = {id(block.kernels): [cluster.device.seconds(kernels, run.precision, threads) / size for kernels in (
        block.kernels, backward_of(block.kernels), weight_gradients_of(block.kernels, step.bytes.gradient),
        block.repeated_kernels, block.last_repeated_kernels)]
        for block in {id(block.kernels): block for block in blocks}.values()}
    forward, backward, weight, repeated, last = zip(*(known[id(block.kernels)] for block in blocks), strict=True)
    again = [0.0 if place not in stage.recomputed else ended if place in stage.ends else inside
             for (stage, place), inside, ended in zip(
                 ((stage, place) for stage in step.stages for place in range(len(stage.blocks))), repeated, last,
                 strict=True)]
    outputs = [block.output_bytes for block in blocks]
    alone = replace(run, mesh=Mesh(), batch=replace(run.batch, microbatch_size=1))
    parameters = tuple(block.num_owned for block in work.blocks(alone))
    update = 0.0 if run.optim.update_in_backward else update_seconds(
        step, cluster, max(1, sum(parameters)) / mesh.stage_size, local=local, threads=threads
    ) / max(1, sum(parameters))
    cores, nodes = cluster.device.cores, -(-mesh.size // cluster.devices_per_node)
    usual = "torch" if cores is None else "mpi"
    bandwidth, latency = LINKS[usual if run.comm.transport == "auto" else run.comm.transport]
    facts = BlockFacts(
        forward_seconds=forward,
        backward_seconds=tuple(of_inputs + of_weights * (block.num_trainable > 0) + second_run
                               for block, of_inputs, of_weights, second_run in zip(
                                   blocks, backward, weight, again, strict=True)),
        update_seconds=tuple(update * count for count in parameters),
        output_bytes=tuple(-(-sent // max(1, size // mesh.microbatch_parts)) for sent in outputs),
        num_parameters=parameters,
        parameter_bytes=tuple(step.bytes.parameter * count for count in parameters),
        state_bytes=tuple(round(step.bytes.state * step.num_states) * count for count in parameters),
        cores=None if cores is None else cores * nodes / threads / mesh.stage_size, bandwidth=bandwidth,
        latency_seconds=latency)
    return with_present_seconds(facts, ElasticRules(run), present, profile)
