"""Decides when layers freeze, on which mesh a run continues, and how many microbatches it tries. Pure.

    state, facts -> state, change or None

A run passes facts that its ranks have measured (`ranvier.train.elasticity`), a plan passes facts predicted from a
cluster's constants (`ranvier.planner.elastic_plan`). So both make the same decisions from the same facts:

    steps        evaluates_policy_after: is the policy to be evaluated?      tried_microbatch_size: of the next step
    decisions    decide: freeze by the policy, then change to the mesh that pays, or to the requested one
                 after_change: what a change has cost            restore: back to a checkpoint's mesh and layers
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import nan, prod
from typing import Any

from ranvier.config.other_mesh import microbatch_size, resized
from ranvier.config.resolve import ResolvedRun
from ranvier.elastic.change import Change, MeshRequest
from ranvier.elastic.freezing import (
    NONE_FROZEN,
    Facts,
    FreezePolicy,
    FrozenLayers,
    Manual,
    StatefulPolicy,
    decide,
    frozen_layers,
    layers_text,
)
from ranvier.elastic.inputs import BlockFacts, ElasticRules, EvaluationSchedule, PresentMesh
from ranvier.elastic.ledger import Entry
from ranvier.elastic.mesh_candidates import MeshCandidate, Note, StageMemory, mesh_candidates, select
from ranvier.elastic.microbatch_profile import MicrobatchProfile, microbatch_counts, size_of
from ranvier.elastic.state import RECENT_STEPS, ElasticState, MicrobatchTrial, Similarities
from ranvier.errors import RanvierError
from ranvier.mesh import Mesh, mesh_text


@dataclass(frozen=True, kw_only=True)
class DecisionFacts:
    """Facts for a decision, in addition to the state: measured by a run, predicted by a plan."""

    step: int
    """Optimizer steps done."""
    samples: int
    """Samples consumed by these steps."""
    remaining_steps: int
    """Remaining steps of the present global batch."""
    num_ranks: int
    """Present number of ranks of the run, including idle ones."""
    present: PresentMesh
    frozen: FrozenLayers
    blocks: Callable[[], BlockFacts]
    """Times and sizes of the blocks."""
    problem: Callable[[ResolvedRun, FrozenLayers], RanvierError | None]
    """Why the run cannot continue with these settings and frozen layers; None if it can."""
    stage_memory: Callable[[FrozenLayers], StageMemory | None]
    """Memory into which cuts must fit."""
    caches: Callable[[int], bool]
    """Whether the outputs of this many frozen layers would be cached, as far as known."""
    stages: tuple[int, ...] = ()
    """As in `ranvier.elastic.freezing.Facts`, like the next two."""
    stage_seconds: tuple[float, ...] = ()
    activation_change: tuple[float, ...] | None = None
    similarities: Similarities | None = None
    """Similarities of the layers' outputs now, for the next evaluation of the policy."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The result of a decision. change: None if the run continues unchanged. notes: for the run to report."""

    state: ElasticState
    change: Change | None
    notes: tuple[Note, ...] = ()


def tried_microbatch_size(state: ElasticState, mesh: Mesh, share: int, frozen: int, step: int
                          ) -> tuple[ElasticState, int, Note | None]:
    """Samples of a microbatch of `step`, while the run profiles numbers of microbatches: for the number that is being
    tried, or that was the fastest. share: samples of a replica."""
    pipe, data, note = mesh.pipeline_size, mesh.num_replicas, None
    counts, best = microbatch_counts(pipe, share), fastest_count(state, mesh, share, frozen)
    if state.trial is None:
        tries = state.profile.next_count(pipe, data, frozen, counts)
        if tries is not None:
            state = replace(state, trial=MicrobatchTrial(pipe=pipe, data=data, frozen=frozen, count=tries))
        elif (pipe, data) not in state.reported:
            state = replace(state, reported=state.reported | {(pipe, data)})
            tried = {trial.microbatches: trial.seconds for trial in state.profile.trials
                     if (trial.pipe, trial.data) == (pipe, data)}
            times = ", ".join(f"{count}: {1e3 * seconds:.0f} ms" for count, seconds in sorted(tried.items()))
            note = Note(event="microbatches", text=f"{best} microbatches of {-(-share // best)} are the fastest on "
                        f"{mesh_text(mesh)} ({times})",
                        fields={"microbatches": best,
                                "seconds": {str(count): tried[count] for count in sorted(tried)}})
    if state.trial is None:
        return state, size_of(share, best, mesh.microbatch_parts), note
    state = replace(state, trial=replace(state.trial, steps=(*state.trial.steps, step)))
    assert state.trial is not None
    return state, size_of(share, state.trial.count, mesh.microbatch_parts), note


def fastest_count(state: ElasticState, mesh: Mesh, share: int, frozen: int) -> int:
    """The fastest number of microbatches that has been tried. share: samples of a replica."""
    counts = microbatch_counts(mesh.pipeline_size, share)
    return state.profile.best(mesh.pipeline_size, mesh.num_replicas, frozen, counts)


class Controller:
    """The settings of one run, with its freeze policy. Methods change nothing except a policy that `StatefulPolicy`.

    Args:
        run: as it was started.
        policy: decides which layers freeze. is_own: whether it replaces the policy that `run.elastic.freeze` names.
        epoch_samples: samples of an epoch.
        eval_samples: number of held-out samples, if the policy compares layers' outputs for them.
        untrained: number of layers, from the first on, without trainable parameters; they are frozen from the start.
        still_frozen: returns how many of this many frozen layers cannot train again, whatever the policy answers.
    """

    def __init__(self, run: ResolvedRun, policy: FreezePolicy, *, epoch_samples: int, is_own: bool = False,
                 eval_samples: int | None = None, untrained: int = 0,
                 still_frozen: Callable[[int], int] = lambda frozen: 0) -> None:
        self.run, self.rules, self.policy, self.epoch_samples = run, ElasticRules(run), policy, epoch_samples
        self._is_own, self._eval_samples, self._untrained = is_own, eval_samples, untrained
        self._still_frozen = still_frozen
        self._by_hand = isinstance(policy, Manual) and not is_own
        self._schedule = EvaluationSchedule(
            every=run.elastic.every, epoch_samples=epoch_samples, dry_run=run.elastic.dry_run,
            depths=policy.depths if isinstance(policy, Manual) and not is_own else None)

    @property
    def freezes(self) -> bool:
        """Whether there is a policy that may freeze layers."""
        return self._is_own or self.run.elastic.freeze != "none"

    @property
    def policy_text(self) -> str:
        """The policy in words."""
        elastic = self.run.elastic
        if self._is_own:
            return type(self.policy).__name__
        return f"{elastic.freeze}, alpha {elastic.alpha:.3g}" if elastic.freeze in ("gradient-norm", "cap") else \
            elastic.freeze

    def profile(self, state: ElasticState) -> MicrobatchProfile | None:
        """Measured times by number of microbatches, if the run uses them."""
        return state.profile if self.run.elastic.profile_microbatches else None

    def lowest(self, state: ElasticState, frozen: int) -> int:
        """How many of the first `frozen` layers stay frozen whatever the policy answers."""
        return max(min(self._untrained, frozen), self._still_frozen(frozen), min(state.kept, frozen))

    # ------------------------------------------------------------------ steps

    def initial(self) -> ElasticState:
        """The state before the first step."""
        return ElasticState(policy=_policy_state(self.policy))

    def begin(self, state: ElasticState, step: int, frozen: FrozenLayers, num_layers: int) -> ElasticState:
        """The state when the run starts or resumes after `step`: manual depths for earlier steps apply immediately, and
        layers in which nothing trains are frozen."""
        state = replace(state, compares=self._untrained > frozen.prefix)
        if self._by_hand:
            state = self.evaluates_policy_after(state, step, 0, 0, frozen)
            state = replace(state, norms=(0.0,) * num_layers if state.due else state.norms)
        return state

    def evaluates_policy_after(self, state: ElasticState, step: int, before: int, after: int,
                               frozen: FrozenLayers) -> ElasticState:
        """`state.due`: whether the policy is evaluated after `step`, which takes the data from sample `before` to
        `after`. Once due, it stays due after each step until a step has gradients to evaluate."""
        due = self.freezes and (state.due or self._schedule.is_due(
            step, before, after, frozen.prefix, self.lowest(state, frozen.prefix)))
        return replace(state, due=due)

    def steps_until_evaluation(self, state: ElasticState, step: int, samples: int, size: int,
                               frozen: int) -> int | None:
        """Steps of `size` samples after `step` and `samples` until there is something to decide; None: never again. A
        step's numbers are known during the next step."""
        found = [] if not state.unmeasured else [RECENT_STEPS + 1 - len(state.recent)]
        due = self._schedule.steps_until_due(step, samples, size, frozen, self.lowest(state, frozen))
        return min(found if due is None else [*found, due], default=None)

    # ------------------------------------------------------------------ decisions

    def decide(self, state: ElasticState, facts: DecisionFacts, request: MeshRequest | None = None) -> Decision:
        """The change to make now. request: a user's request for another mesh."""
        norms, compares_all = state.norms, state.unmeasured and bool(state.recent)
        state = replace(state, norms=None, compares=False, due=state.due and norms is None,
                        unmeasured=not state.recent and self.run.elastic.auto_pipe, ledger=state.with_measured().ledger)
        wanted, notes = facts.frozen, tuple[Note, ...]()
        if norms is not None:  # 1. the policy
            state, wanted = self._evaluate(state, facts, norms)
            if self.run.elastic.dry_run and wanted != facts.frozen:
                more = layers_text(wanted.layers - facts.frozen.layers)
                notes = (Note(event="would-freeze", text=f"would freeze {more} (a dry run: nothing changes)",
                              fields={"layers": len(wanted), "gradient_norms": list(norms)}),)
                wanted = facts.frozen
        wanted = frozen_layers(wanted.layers | frozenset(range(self._untrained)))
        moves, chosen = wanted != facts.frozen, None
        if request is not None:  # 2. the mesh: the requested one, or the best of those that pay
            found = self._requested_change(facts, request, wanted)
            if isinstance(found, Change):
                return Decision(state=state, change=found, notes=notes)
            notes = (*notes, found)
        reason = "nothing trains in them" if not state.evaluations else \
            f"{self.policy_text}, evaluation {state.evaluations}"
        again = {(replicas, length) for replicas, length, frozen in state.refused if frozen == wanted.prefix}
        if self.run.elastic.auto_pipe and (moves or again or compares_all):
            state, chosen, more_notes = self._select(
                state, facts, wanted, among=None if moves or compares_all else again)
            notes += more_notes
        if chosen is not None:
            return Decision(state=state, notes=notes, change=self._change_to_mesh(chosen, facts, wanted, reason)[0])
        if not moves:
            return Decision(state=state, change=None, notes=notes)
        change, problem = self._change_on_same_mesh(state, facts, wanted,
                                                    reason)  # 3. other frozen layers on the present mesh
        thawed = facts.frozen.layers - wanted.layers
        if problem is None or not thawed:
            return Decision(state=state, change=change, notes=notes)
        refused = Note(event="unfreeze-refused", fields={"layers": len(wanted)},
                       text=f"{layers_text(thawed)} {'stays' if len(thawed) == 1 else 'stay'} frozen: {problem}")
        return Decision(state=replace(state, kept=facts.frozen.prefix), change=None, notes=(*notes, refused))

    def after_change(self, state: ElasticState, change: Change, *, step: int, old: Mesh, new: Mesh, moved_bytes: int,
                     seconds: float, remaining_steps: int) -> ElasticState:
        """The state after a change that took `seconds`. remaining_steps: with the global batch before the change."""
        ledger = state.ledger
        if not ledger.entries or ledger.entries[-1].measured_cost is not None:  # the change was not judged
            ledger = ledger.with_entry(Entry(
                step=step, old=mesh_text(old), new=mesh_text(new), moved_bytes=moved_bytes,
                seconds_before=state.seconds, remaining_steps=remaining_steps))
        state = replace(state, ledger=ledger.with_measured(cost=seconds, moved_bytes=moved_bytes),
                        recent=(), trial=None, kept=0, schedule=change.schedule)
        if change.request_id is not None:  # the user has chosen, and that holds until more layers freeze
            state = replace(state, refused=frozenset())
        if {*old.changed_axes(new)} & {*old.stage_axes}:  # its times were measured with other shares of a layer
            state = replace(state, profile=MicrobatchProfile(), reported=frozenset())
        return state

    def restore(self, saved: Mapping[str, Any], *, num_ranks: int, num_layers: int, step_samples: int,
                boundaries: tuple[int, ...] | None, problem: Callable[[ResolvedRun, FrozenLayers], str | None]
                ) -> Decision:
        """The state from the `saved` part of a checkpoint, and the change with which the resumed run returns to its
        frozen layers and, if it is started on the same mesh as before, to its last mesh. A run that has more ranks now,
        since some had been lost, or settings that do not allow the last mesh, stays on its first mesh.

        step_samples: of the global batch with which it continues. boundaries: its present cut. problem: returns why a
        run with these frozen layers is impossible.
        """
        mesh, frozen = self.run.mesh, FrozenLayers(int(saved["frozen"]), tuple(saved.get("frozen_above", ())))
        if max(frozen.layers, default=-1) >= num_layers:
            raise RanvierError(f"has {len(frozen)} frozen layers, but the model has {num_layers}",
                               code="checkpoint-frozen-layers", where="checkpoint",
                               remedy="Resume with the model that it was written with.")
        # times are measured again: the machine may be another one
        state = replace(ElasticState.read(saved), recent=(), trial=None, reported=frozenset())
        _load_policy(self.policy, state)
        # checkpoints from before rows and columns could change have only replicas and stages
        same = all(saved.get(f"first_{axis}", size) == size for axis, size in mesh.sizes.items())
        size = int(saved["global_size"])
        if saved["first_size"] != self.run.batch.global_size:  # the run now has another global batch
            size = self.rules.step_samples(prod(int(saved[axis]) for axis in mesh.replica_axes) if same else
                                           mesh.num_replicas)
        was = resized(mesh, **{axis: int(saved.get(axis, size)) for axis, size in mesh.sizes.items()}) if same else mesh
        had = int(saved.get("num_ranks", num_ranks))  # older checkpoints lack it
        if was.size > num_ranks or had < num_ranks:  # ranks that had joined are gone, or lost ones are back
            same, was, size = False, mesh, self.rules.step_samples(mesh.num_replicas)
        notes: tuple[Note, ...] = ()
        if was != mesh and (why := problem(self.change_to(
                was, NONE_FROZEN, frozen, None, "", size=size, schedule=state.schedule).apply_to(self.run), frozen)):
            notes = (Note(event="dropped", text=f"{mesh_text(was)}, the mesh before the run was interrupted: {why}"),)
            same, was, size = False, mesh, self.rules.step_samples(mesh.num_replicas)
        if not same or was == mesh:  # the start has already checked its memory
            state = replace(state, schedule=None)
        if not frozen and was == mesh and size == self.run.batch.global_size == step_samples:
            return Decision(state=state, change=None, notes=notes)
        reason = "frozen layers as before the run was interrupted"
        if same:
            reason, boundaries = "as before the run was interrupted", saved["boundaries"] and tuple(saved["boundaries"])
            if len(boundaries or ()) != replace(self.run, mesh=was).placement.num_stages - 1:
                boundaries = None  # the number of stages has changed
        return Decision(state=state, notes=notes, change=self.change_to(
            was, NONE_FROZEN, frozen, boundaries, reason, size=size, schedule=state.schedule))

    def change_to(self, mesh: Mesh, old_frozen: FrozenLayers, frozen: FrozenLayers,
                  boundaries: tuple[int, ...] | None, reason: str, *, size: int | None = None,
                  schedule: Mapping[str, Any] | None = None) -> Change:
        """The change from `old_frozen` to `frozen` layers, on `mesh`. boundaries: None cuts by cost. size: samples of a
        step; None takes the number for its replicas."""
        size = self.rules.step_samples(mesh.num_replicas) if size is None else size
        return Change(mesh=mesh.sizes, frozen=frozen, old_frozen=old_frozen, boundaries=boundaries, global_size=size,
                      microbatch_size=microbatch_size(self.run.batch.microbatch_size, global_size=size, mesh=mesh),
                      reason=reason, schedule=schedule)

    def _change_to_mesh(self, candidate: MeshCandidate, facts: DecisionFacts, wanted: FrozenLayers, reason: str = ""
                        ) -> tuple[Change, RanvierError | None]:
        """The change to a mesh and cut, with a schedule that fits; or with the error if none fits."""
        return self.change_to(candidate.mesh, facts.frozen, wanted, candidate.boundaries or None,
                              reason).first_fitting(self.run, lambda run: facts.problem(run, wanted))

    def _change_on_same_mesh(self, state: ElasticState, facts: DecisionFacts, wanted: FrozenLayers, reason: str
                             ) -> tuple[Change, RanvierError | None]:
        """The change to other frozen layers on the present mesh and cut; and the error if it may not fit."""
        here = self.change_to(facts.present.mesh, facts.frozen, wanted, facts.present.boundaries or None, reason,
                              schedule=state.schedule)
        fitted, problem = here.first_fitting(self.run, lambda run: facts.problem(run, wanted))
        return (fitted if problem is None else here), problem

    def _evaluate(self, state: ElasticState, facts: DecisionFacts, norms: tuple[float, ...]
                  ) -> tuple[ElasticState, FrozenLayers]:
        """Evaluate the freeze policy."""
        policy, inputs, frozen = self.policy, state.inputs, facts.frozen
        _load_policy(self.policy, state)
        wanted = decide(policy, Facts(
            step=facts.step, evaluation=state.evaluations + 1, frozen=frozen.prefix, num_layers=len(norms),
            gradient_norms=norms, lowest=self.lowest(state, frozen.prefix), frozen_above=frozen.above,
            stages=facts.stages, stage_seconds=facts.stage_seconds, activation_change=facts.activation_change,
            loss=inputs.loss / inputs.targets if inputs.targets else nan,
            learning_rate=inputs.learning_rate, metrics=inputs.metrics))
        inputs = replace(inputs, loss=0.0, targets=0.0, similarities=facts.similarities)
        return replace(state, evaluations=state.evaluations + 1, inputs=inputs, policy=_policy_state(policy)), wanted

    def _select(self, state: ElasticState, facts: DecisionFacts, wanted: FrozenLayers, *,
                among: set[tuple[int, int]] | None) -> tuple[ElasticState, MeshCandidate | None, tuple[Note, ...]]:
        """The mesh and cut that pay with these frozen layers. among: see `mesh_candidates`."""
        present, depth, step = facts.present, wanted.prefix, facts.step
        blocks, cached = facts.blocks(), 0
        if facts.caches(depth):
            left = facts.remaining_steps
            due = self._schedule.steps_until_due(step, facts.samples, present.global_size, depth,
                                                 self.lowest(state, depth))
            cached = self.rules.cached_blocks(present, depth, epoch_samples=self.epoch_samples,
                                              asked_after=left if due is None else min(due, left))

        def problem_of(candidate: MeshCandidate) -> str | None:
            problem = self._change_to_mesh(candidate, facts, wanted)[1]
            return None if problem is None else f"{problem.where} {problem.what}"

        candidates = mesh_candidates(
            self.rules, present, depth, blocks, num_ranks=facts.num_ranks, cached=cached,
            profile=self.profile(state), memory=facts.stage_memory(wanted), among=among)
        return select(self.rules, state, present, candidates, blocks, depth=depth, step=step,
                      remaining_steps=facts.remaining_steps, problem_of=problem_of)

    # ------------------------------------------------------------------ requests

    def _requested_change(self, facts: DecisionFacts, request: MeshRequest, wanted: FrozenLayers) -> Change | Note:
        """The change to the mesh that a user requests, on the run's ranks; or a note about why it is refused."""
        mesh = facts.present.mesh
        asked: dict[str, Any] = {axis: request.sizes.get(axis, size if axis in mesh.stage_axes else None)
                                 for axis, size in mesh.sizes.items()}
        problem = request.problem or self._refusal(facts, asked)
        if problem is None:
            change, found = self.change_to(
                resized(self.run.mesh, **asked), facts.frozen, wanted, None, request.reason).first_fitting(
                    self.run, lambda run: facts.problem(run, wanted))
            if found is None:
                return replace(change, request_id=request.request_id)
            problem = str(found)
        return Note(event="resize-refused", text=f"resize request for {request} refused: {problem}",
                    fields=request.fields())

    def _refusal(self, facts: DecisionFacts, asked: Mapping[str, Any]) -> str | None:
        """Why a run cannot change to a mesh of the sizes `asked` (axis -> size), judging by these numbers alone."""
        sizes = [size for size in asked.values() if isinstance(size, int) and not isinstance(size, bool) and size >= 1]
        if len(sizes) < len(asked):
            return ("is not a mesh: give --data and --pipe, and --row and --col if they change, as whole numbers of at "
                    "least 1")
        if prod(sizes) > facts.num_ranks:
            started = facts.num_ranks == self.run.mesh.size
            return f"needs {prod(sizes)} ranks, and the run {'was started with' if started else 'has'} " \
                   f"{facts.num_ranks}"
        if self._eval_samples is not None and self._eval_samples < 2 * resized(
                self.run.mesh, **asked).microbatch_parts:
            return (f"leaves rows with fewer than two of the {self._eval_samples} held-out samples, which "
                    f"{self.policy_text} compares")
        return "is the mesh that the run has" if asked == facts.present.mesh.sizes else None


def _policy_state(policy: FreezePolicy) -> Mapping[str, Any] | None:
    return policy.state_dict() if isinstance(policy, StatefulPolicy) else None


def _load_policy(policy: FreezePolicy, state: ElasticState) -> None:
    if isinstance(policy, StatefulPolicy) and state.policy is not None:
        policy.load_state_dict(dict(state.policy))
