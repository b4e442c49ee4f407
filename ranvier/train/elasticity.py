"""A run's elastic side: when layers freeze, which mesh follows, whether outputs of frozen layers are cached.

Rank 0 decides, from numbers of all ranks, and tells the others; what it knows goes into checkpoints and, at each
transition, to ranks that come back. The decisions themselves are pure (ranvier.elastic); this is where they meet the
run's clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite, isnan, nan, prod
from statistics import median
from typing import Any

from ranvier.block import still_frozen, untrained_layers
from ranvier.config.other_mesh import on_mesh, resized
from ranvier.config.resolve import ResolvedRun
from ranvier.data.task import Prepared
from ranvier.elastic.freezing import (
    Facts,
    FreezePolicy,
    FrozenLayers,
    Manual,
    Remembers,
    decide,
    frozen_layers,
    layers_text,
)
from ranvier.elastic.ledger import Entry, Ledger
from ranvier.elastic.mesh_candidates import MeshCandidate, mesh_candidates
from ranvier.elastic.microbatch_profile import TRIAL_STEPS, MicrobatchProfile, microbatch_counts, size_of
from ranvier.elastic.named_policy import policy_of
from ranvier.elastic.rules import ElasticRules, EvaluationSchedule, PresentMesh
from ranvier.elastic.similarity import Similarity, similarity_loss
from ranvier.elastic.transition_selector import TransitionSelector, mesh_text
from ranvier.errors import RanvierError
from ranvier.layout.layout import Layout
from ranvier.mesh import Mesh
from ranvier.models import families
from ranvier.optim.learning_rate import learning_rate
from ranvier.pipeline.engine import Engine
from ranvier.system.machine import affinity
from ranvier.train.best import LOSS
from ranvier.train.caching import Caching
from ranvier.train.commands import Change
from ranvier.train.events import Event, NoteEvent, StepEvent
from ranvier.train.layer_outputs import check_samples, layer_similarities
from ranvier.train.measured_blocks import RankMeasurement, measured_blocks, present_mesh, stage_seconds
from ranvier.train.memory import MemoryBudget, device_bytes
from ranvier.train.resize import request_text
from ranvier.train.runtime import RankRuntime

_RECENT_STEPS = 8
"""Steps whose median says how long one takes now."""


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """What a freeze policy is told of a step."""

    loss: float
    targets: float
    """Their number in the global batch, by weight."""
    learning_rate: float
    metrics: Mapping[str, float]
    """Of the evaluation after it; empty without one."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What the run has come to since the freeze policy was last evaluated, for its next evaluation."""

    loss: float = 0.0
    """Sum over the valid targets of these steps."""
    targets: float = 0.0
    """Their weight."""
    learning_rate: float = nan
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of the newest evaluation on held-out data."""
    similarities: list[list[Similarity]] | None = None
    """Of each layer's outputs, as they were at the last evaluation of the policy (`layer_similarities`)."""

    def with_step(self, step: StepFigures) -> Progress:
        """After one more step."""
        counts = bool(step.targets) and isfinite(step.loss)
        return replace(self, loss=self.loss + (step.loss * step.targets if counts else 0.0),
                       targets=self.targets + (step.targets if counts else 0.0),
                       learning_rate=step.learning_rate, metrics=step.metrics or self.metrics)

    def state(self) -> dict[str, object]:
        """What a checkpoint keeps; JSON-serialisable."""
        return {"loss": self.loss, "targets": self.targets,
                "learning_rate": None if isnan(self.learning_rate) else self.learning_rate,
                "metrics": {name: value for name, value in self.metrics.items() if isfinite(value)},
                "similarities": self.similarities}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Progress:
        """The inverse of `state`."""
        rate = state["learning_rate"]
        return cls(**{**state, "learning_rate": nan if rate is None else rate})


@dataclass(kw_only=True)
class MicrobatchTrial:
    """A number of microbatches that is being tried, for a few steps, of which the first warms up."""

    pipe: int
    data: int
    frozen: int
    count: int
    steps: set[int] = field(default_factory=set)
    taken: list[float] = field(default_factory=list)

    def took(self, step: int, seconds: float) -> bool:
        """One more step was measured. Whether that was the last."""
        if step in self.steps:
            self.taken.append(seconds)
        return len(self.taken) == TRIAL_STEPS

    @property
    def seconds(self) -> float:
        """The fastest step, without the first."""
        return min(self.taken[1:])


class Elasticity:
    """What one run knows of itself as it changes. Only `decide` is collective.

    tell: takes events. policy: decides instead of what `run.elastic.freeze` names.
    """

    def __init__(self, run: ResolvedRun, data: Prepared, *, tell: Callable[[Event], None],
                 policy: FreezePolicy | None = None) -> None:
        self._first, self._data, self._num_samples, self._tell = run, data, data.epoch_samples, tell
        self.policy, self._own = policy or policy_of(run.elastic), policy is not None
        self._needs_activations = bool(getattr(self.policy, "needs_activations", False))
        if self._needs_activations:
            check_samples(data.eval, run.mesh.row, self._policy_text)
        self._progress = Progress()
        self._by_hand = run.elastic.freeze == "manual" and not self._own
        self._evaluations = EvaluationSchedule(
            every=run.elastic.every, epoch_samples=self._num_samples, dry_run=run.elastic.dry_run,
            depths=self.policy.depths if self._by_hand and isinstance(self.policy, Manual) else None)
        self.caching = Caching(run, data, tell)
        self.evaluations = 0
        """Of the freeze policy, so far."""
        self.num_ranks = run.mesh.size
        """Those of the run now, idle ones too."""
        self._rules = ElasticRules(run)
        self.ledger, self.profile = Ledger(), MicrobatchProfile()
        self.selector = TransitionSelector(self._rules, self._note)
        self._size = run.batch.global_size  # the current global batch
        self._since = (0, 0)  # the step of its last change, and the samples consumed by then
        self._due = False  # the policy is still to be evaluated: the step after which it was due may have been left out
        # of the layers' gradients in the last step, where the policy is evaluated after it
        self._norms: tuple[float, ...] | None = None
        self._recent: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._floor = 0 if run.elastic.dry_run or not self.freezes else untrained_layers(families.model_of(run))
        self._lowest: dict[int, int] = {}  # frozen layers -> those of them that cannot train again
        self._schedule: Mapping[str, Any] | None = None  # of the mesh, where the run's own did not fit its memory
        self._kept = 0  # layers that stay frozen on this mesh, for want of memory
        self._begins = False  # meshes are to be compared, without asking the policy
        self._unmeasured = False  # the last mesh was chosen before a step was measured
        self._trial: MicrobatchTrial | None = None
        self._told: set[tuple[int, int]] = set()  # (pipe, data) whose best number of microbatches has been reported

    # ------------------------------------------------------------------ progress of the run

    def _taken(self, step: int) -> int:
        """Samples that `step` steps come to."""
        since, taken = self._since
        return taken + (step - since) * self._size

    def left(self, step: int) -> int:
        """Steps of the present size that are still to come after `step`."""
        return self._rules.remaining_steps(self._first.train.steps, self._taken(step), self._size)

    def learning_rate(self, step: int) -> float:
        """That of `step`: the schedule's, at the same place in the data; with "scale" in proportion to the batch."""
        first = self._first.batch.global_size
        rate = learning_rate(self._first.train, min(self._taken(step) / first, self._first.train.steps))
        return rate * self._size / first if self._first.elastic.global_batch == "scale" else rate

    def asks_after(self, step: int, before: int, after: int, frozen: FrozenLayers) -> bool:
        """Whether the freeze policy is asked after `step`, which takes the data from sample `before` to `after`. Once
        it is to be asked, it is after each step until one has gradients to be judged by (`saw_gradients`)."""
        if not self.freezes:
            return False
        self._due |= self._evaluations.is_due(step, before, after, frozen.prefix, self._still_frozen(frozen.prefix))
        return self._due

    def _still_frozen(self, frozen: int) -> int:
        """How many of the first `frozen` layers, which are frozen, cannot train again."""
        if frozen not in self._lowest:
            self._lowest[frozen] = max(min(self._floor, frozen), still_frozen(families.model_of(self._first), frozen))
        return max(self._lowest[frozen], min(self._kept, frozen))

    def saw_gradients(self, engine: Engine) -> None:
        """The last step was one after which the policy is asked. Collective."""
        self._norms = engine.layer_gradient_norms()

    def start(self, step: int, engine: Engine, frozen: FrozenLayers) -> None:
        """The run starts or resumes after `step`: depths given by hand for earlier steps hold at once, and layers in
        which nothing trains are frozen."""
        self._begins = self._floor > frozen.prefix
        if self._by_hand and self.asks_after(step, 0, 0, frozen):
            self._norms = (0.0,) * len(engine.layers)

    @property
    def asked(self) -> bool:
        """Whether the policy has something to decide on."""
        return self._norms is not None or self._begins

    def saw(self, event: StepEvent) -> None:
        """One more step has been told."""
        evaluated = {} if event.eval_loss is None else {LOSS: event.eval_loss, **event.eval_scores}
        self._progress = self._progress.with_step(StepFigures(
            loss=event.loss, targets=event.tokens, learning_rate=event.learning_rate, metrics=evaluated))
        self._recent.append(event.step_seconds)
        self._begins |= self._unmeasured and len(self._recent) == _RECENT_STEPS
        if self._trial is not None and self._trial.took(event.step, event.step_seconds):
            trial, self._trial = self._trial, None
            self.profile = self.profile.measured(trial.pipe, trial.data, trial.frozen, trial.count, trial.seconds)

    def microbatch_size(self, now: RankRuntime, step: int) -> int:
        """Samples in a microbatch of `step`: the run's or, where numbers of them are profiled, of the one that is being
        tried, or was the fastest. The same on every rank, since all know the same times."""
        run = now.run
        if not self._first.elastic.profile_microbatches:
            return run.batch.microbatch_size
        pipe, data = run.mesh.pipe, run.mesh.data
        share = run.replica_batch_size
        counts = microbatch_counts(pipe, share)
        if self._trial is None and (count := self.profile.next_count(pipe, data, len(now.frozen), counts)) is not None:
            self._trial = MicrobatchTrial(pipe=pipe, data=data, frozen=len(now.frozen), count=count)
        elif self._trial is None and (pipe, data) not in self._told:
            self._told.add((pipe, data))
            tried = {trial.microbatches: trial.seconds for trial in self.profile.trials
                     if (trial.pipe, trial.data) == (pipe, data)}
            best = self.profile.best(pipe, data, len(now.frozen), counts)
            self._note(step - 1, "microbatches", f"{best} microbatches of {-(-share // best)} are the fastest on "
                       f"{mesh_text(run.mesh)} (" + ", ".join(f"{count}: {1e3 * seconds:.0f} ms" for count, seconds in
                                                             sorted(tried.items())) + ")",
                       {"microbatches": best, "seconds": {str(count): tried[count] for count in sorted(tried)}})
        count = (self._trial.count if self._trial is not None else
                 self.profile.best(pipe, data, len(now.frozen), counts))
        if self._trial is not None:
            self._trial.steps.add(step)
        return size_of(share, count, run.mesh.row)

    # ------------------------------------------------------------------ what goes along

    def state(self, run: ResolvedRun, frozen: FrozenLayers, unseen: StepFigures | None = None) -> dict[str, object]:
        """What a checkpoint keeps, and a rank that comes back needs; JSON-serialisable. unseen: the last step, where it
        has not been told yet (`saw`)."""
        changed = frozen or self.ledger.entries or run.mesh != self._first.mesh or self._since != (0, 0)
        return self.whole_state(run, frozen, unseen) if self.freezes or changed else {}

    def whole_state(self, run: ResolvedRun, frozen: FrozenLayers, unseen: StepFigures | None = None
                    ) -> dict[str, object]:
        """The same, also where a run that goes on needs none: for a rank that has just joined."""
        progress = self._progress if unseen is None else self._progress.with_step(unseen)
        return {"frozen": frozen.prefix, "frozen_above": list(frozen.above),
                **{str(axis): size for axis, size in run.mesh.sizes.items()}, "evaluations": self.evaluations,
                "boundaries": run.pipeline.boundaries, "global_size": run.batch.global_size,
                **{f"first_{axis}": size for axis, size in self._first.mesh.sizes.items()},
                "first_size": self._first.batch.global_size, "num_ranks": self.num_ranks,
                "since": list(self._since), "size": self._size,
                "due": self._due, "unmeasured": self._unmeasured,
                "norms": self._norms and [norm if isfinite(norm) else None for norm in self._norms],
                "ledger": self.ledger.to_dict(), "profile": self.profile.to_dict(),
                "progress": progress.state(), "kept": self._kept,
                "policy": self.policy.state_dict() if isinstance(self.policy, Remembers) else None,
                "schedule": self._schedule, "refused": [list(mesh) for mesh in sorted(self.selector.refused)]}

    @property
    def freezes(self) -> bool:
        """Whether there is a policy that may freeze layers."""
        return self._own or self._first.elastic.freeze != "none"

    def load(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`, but for what `Change` has."""
        if state:
            self.evaluations, self._size = int(state["evaluations"]), int(state["size"])
            self._since = (int(state["since"][0]), int(state["since"][1]))
            self._due, norms = bool(state["due"]), state["norms"]
            self._unmeasured = bool(state.get("unmeasured"))  # older checkpoints have none
            self._norms = None if norms is None else tuple(inf if norm is None else float(norm) for norm in norms)
            self.ledger = Ledger.from_dict(state["ledger"])
            self.profile = MicrobatchProfile.from_dict(state["profile"])
            if state.get("progress") is not None:  # older checkpoints have none
                self._progress, self._kept = Progress.from_state(state["progress"]), int(state["kept"])
            if isinstance(self.policy, Remembers) and state.get("policy") is not None:
                self.policy.load_state_dict(state["policy"])
            self.selector.refused = {tuple(mesh) for mesh in state.get("refused", ())}  # older checkpoints have none
            self._schedule = state.get("schedule")  # likewise

    def rolled_back(self, step: int, state: Mapping[str, Any]) -> None:
        """The run is at `step` again, with the weights of a checkpoint that has `state`. Frozen layers, mesh and global
        batch stay as they are; of the steps of another size, those that were taken back count no more."""
        if step < self._since[0]:
            (since, taken), size = state.get("since", (0, 0)), state.get("global_size", self._first.batch.global_size)
            self._since = (step, taken + (step - since) * size)

    def restore(self, state: Mapping[str, Any], run: ResolvedRun, engine: Engine) -> Change | None:
        """The transition with which a resumed run returns to its state: its frozen layers and, if it is started on the
        mesh on which it was started before, its last mesh. A run that has more ranks now, since some had been lost,
        takes its first mesh instead. None if nothing changes."""
        self.load(state)
        mesh, frozen = run.mesh, FrozenLayers(int(state["frozen"]), tuple(state.get("frozen_above", ())))
        if max(frozen.layers, default=-1) >= len(engine.layers):
            raise RanvierError(f"has {len(frozen)} frozen layers, and the model {len(engine.layers)}",
                               code="checkpoint-frozen-layers", where="checkpoint",
                               remedy="Resume with the model that it was written with.")
        # checkpoints from before rows and columns could change have only replicas and stages
        same = all(state.get(f"first_{axis}", size) == size for axis, size in mesh.sizes.items())
        size, boundaries = int(state["global_size"]), engine.boundaries or None
        if state["first_size"] != self._first.batch.global_size:  # another one is asked for now
            self._since, self._size = (0, 0), self._first.batch.global_size
            size = self._rules.step_samples(int(state["data"]) if same else mesh.data)
        was = resized(mesh, **{axis: int(state.get(axis, size)) for axis, size in mesh.sizes.items()}) if same else mesh
        had = int(state.get("num_ranks", self.num_ranks))  # older checkpoints have none
        if was.size > self.num_ranks or had < self.num_ranks:  # ranks that had joined are gone, or lost ones are back
            same, was = False, mesh
            size = self._rules.step_samples(mesh.data)
        if not same or was == mesh:  # whose memory the start has looked at
            self._schedule = None
        if not frozen and was == mesh and size == run.batch.global_size == self._size:
            return None
        reason = "frozen layers as before the run was interrupted"
        if same:
            reason, boundaries = "as before the run was interrupted", state["boundaries"] and tuple(state["boundaries"])
            if len(boundaries or ()) != replace(run, mesh=was).placement.num_stages - 1:
                boundaries = None  # ranks have other numbers of stages now
        there = on_mesh(replace(run, batch=replace(run.batch, global_size=size)), was)
        return Change(data=was.data, pipe=was.pipe, row=was.row, col=was.col, frozen=frozen, old_frozen=FrozenLayers(0),
                      boundaries=boundaries, global_size=size, microbatch_size=there.batch.microbatch_size,
                      reason=reason, schedule=self._schedule)

    def enter(self, now: RankRuntime, change: Change, old: Mesh, moved: int, seconds: float, step: int) -> bool:
        """The change from mesh `old` has been made. Returns whether this rank caches from now on."""
        if not self.ledger.entries or self.ledger.entries[-1].measured_cost is not None:  # nobody has judged it
            self.ledger = self.ledger.with_entry(Entry(
                step=step, old=mesh_text(old), new=mesh_text(now.run.mesh), moved_bytes=moved,
                seconds_before=median(self._recent) if self._recent else None, remaining_steps=self.left(step)))
        self.ledger = self.ledger.with_measured(cost=seconds, moved_bytes=moved)
        if change.wish is not None:
            self.selector.refused.clear()  # the user has chosen, and that holds until more layers freeze
        size = now.run.batch.global_size
        if size != self._size:
            self._since, self._size = (step, self._taken(step)), size
        self._recent.clear()
        self._trial, self._kept, self._schedule = None, 0, change.schedule
        if old.stage_size != now.run.mesh.stage_size or old.row != now.run.mesh.row:
            self.profile, self._told = MicrobatchProfile(), set()  # its times are those of other shares of a layer
        return self.caching.enter(now, reads=self.left(step) * now.run.batch.global_size)

    def facts(self) -> dict[str, object]:
        """What this rank adds to the summary."""
        self._measure_last()
        return self.caching.facts() | ({"ledger": self.ledger.to_dict()["entries"]} if self.ledger.entries else {})

    def text(self) -> str:
        """The settings in words; empty where nothing is elastic."""
        elastic = self._first.elastic
        if not self.freezes:
            return ""
        often = f"every {elastic.every} steps" if elastic.every else "after each epoch"
        words = [f"freezes by {self._policy_text}, {often}"]
        if self._by_hand:
            words = [f"freezes by hand: {', '.join(elastic.manual)}"]
        elif self._first.elastic.freeze == "untrained" and not self._own:
            words = ["freezes the layers in which nothing trains"]
        words += [text for said, text in ((elastic.dry_run, "dry run"), (elastic.auto_pipe, "packs the pipeline"),
                                          (elastic.auto_dp, "adds replicas"), (elastic.cache, "caches")) if said]
        return ", ".join(words)

    @property
    def _policy_text(self) -> str:
        elastic = self._first.elastic
        if self._own:
            return type(self.policy).__name__
        has_alpha = elastic.freeze in ("gradient-norm", "cap")
        return f"{elastic.freeze}, alpha {elastic.alpha:.3g}" if has_alpha else elastic.freeze

    # ------------------------------------------------------------------ deciding

    def decide(self, now: RankRuntime, step: int, *, resize: Mapping[str, Any] | None, busy: Mapping[str, float],
               busy_steps: int) -> Change | None:
        """What is to change after `step`; the same on every rank. resize: a user's request for another mesh.

        busy: seconds in each category of span on this rank, in `busy_steps` steps. Collective.
        """
        norms, self._norms, self._begins = self._norms, None, False
        self._due &= norms is None
        measured = now.ranks.gather_objects({"busy": dict(busy), "steps": busy_steps, "cores": affinity(),
                                             "device_bytes": device_bytes(now.world.device)})
        similarities = layer_similarities(now, self._data.eval) if norms and self._needs_activations else None
        found = None
        self._measure_last()
        if now.world.rank == 0:
            again, self._unmeasured = self._unmeasured, not self._recent and self._first.elastic.auto_pipe
            wanted = now.frozen if norms is None else self._wanted(now, step, norms, similarities, measured)
            wanted = frozen_layers(wanted.layers | frozenset(range(self._floor)))
            sizes = [row["device_bytes"] for row in measured if row["device_bytes"] is not None]
            budget = MemoryBudget(first=self._first, frozen=wanted, device_bytes=min(sizes, default=None))
            change = (self._resized(now, resize, budget, step) if resize is not None else
                      self._packed(now, budget, step, measured, all_meshes=again and not self._unmeasured))
            found = {"change": change and change.document(), "state": self.state(now.run, now.frozen)}
        found = now.ranks.gather_objects(found)[0]
        self.load(found["state"])
        return found["change"] and Change.read(found["change"])

    def _measure_last(self) -> None:
        """What the last transition has come to, in seconds of a step."""
        if self._recent and self.ledger.entries and self.ledger.entries[-1].measured_after is None:
            self.ledger = self.ledger.with_measured(after=median(self._recent))

    def _wanted(self, now: RankRuntime, step: int, norms: tuple[float, ...],
                similarities: list[list[Similarity]] | None, measured: Sequence[RankMeasurement]) -> FrozenLayers:
        """Frozen layers from now on."""
        self.evaluations += 1
        wanted = decide(self.policy, self._facts(now, step, norms, similarities, measured))
        self._progress = replace(self._progress, loss=0.0, targets=0.0, similarities=similarities)
        if self._first.elastic.dry_run and wanted != now.frozen:
            more = layers_text(wanted.layers - now.frozen.layers)
            self._note(step, "would-freeze", f"would freeze {more} (a dry run: nothing changes)",
                       {"layers": len(wanted), "gradient_norms": list(norms)})
            return now.frozen
        return wanted

    def _facts(self, now: RankRuntime, step: int, norms: tuple[float, ...],
               similarities: list[list[Similarity]] | None, measured: Sequence[RankMeasurement]) -> Facts:
        progress, changes = self._progress, None
        if similarities is not None:
            before = progress.similarities
            if before and len(before[0]) != now.run.mesh.row:
                before = None  # they were of other samples: each row has its own
            changes = tuple(nan if before is None else similarity_loss(layer, before[number])
                            for number, layer in enumerate(similarities))
        engine = now.engine
        return Facts(step=step, evaluation=self.evaluations, frozen=now.frozen.prefix, num_layers=len(engine.layers),
                     gradient_norms=norms, lowest=self._still_frozen(now.frozen.prefix),
                     frozen_above=now.frozen.above, stages=engine.stage_of_layers(),
                     stage_seconds=stage_seconds(now, measured),
                     loss=progress.loss / progress.targets if progress.targets else nan,
                     learning_rate=progress.learning_rate, metrics=progress.metrics, activation_change=changes)

    def _packed(self, now: RankRuntime, budget: MemoryBudget, step: int, measured: Sequence[RankMeasurement], *,
                all_meshes: bool) -> Change | None:
        """The change that follows from as many frozen layers as `budget` is for. all_meshes: where as many layers as
        before are frozen, compare all meshes, and not only those that were refused."""
        run, elastic, wanted = now.run, self._first.elastic, budget.frozen
        depth, moves, again = wanted.prefix, wanted != now.frozen, self.selector.refused_at(wanted.prefix)
        reason = f"{self._policy_text}, evaluation {self.evaluations}" if self.evaluations else "nothing trains in them"

        def change(candidate: MeshCandidate) -> Change:
            return self._change(now, candidate.mesh(run.mesh), wanted, candidate.boundaries or None, reason)

        def problem_of(candidate: MeshCandidate) -> str | None:
            problem = budget.fitted(change(candidate))[1]
            return None if problem is None else f"{problem.where} {problem.what}"

        chosen = None
        if elastic.auto_pipe and (moves or again or all_meshes):
            profile = self.profile if elastic.profile_microbatches else None
            facts, present = measured_blocks(now, measured, profile), present_mesh(now)
            candidates = mesh_candidates(self._rules, present, depth, facts, num_ranks=self.num_ranks,
                                         cached=self._cached_blocks(present, depth, step),
                                         profile=profile, memory=budget.stage_memory(),
                                         among=None if moves or all_meshes else again)
            chosen, entry = self.selector.select(
                present, candidates, facts, depth=depth, step=step, ledger=self.ledger,
                remaining_steps=self.left(step), seconds=median(self._recent) if self._recent else None,
                problem_of=problem_of)
            if entry is not None:
                self.ledger = self.ledger.with_entry(entry)
        if chosen is not None:
            return budget.fitted(change(chosen))[0]
        if not moves:
            return None
        here, problem = self._here(now, budget, reason)
        thawed = now.frozen.layers - wanted.layers
        if thawed and problem is not None:
            stays = "stays" if len(thawed) == 1 else "stay"
            self._note(step, "unfreeze-refused", f"{layers_text(thawed)} {stays} frozen: {problem}",
                       {"layers": len(wanted)})
            self._kept = now.frozen.prefix
            return None
        return here

    def _here(self, now: RankRuntime, budget: MemoryBudget, reason: str) -> tuple[Change, RanvierError | None]:
        """The change to as many frozen layers as `budget` is for, on the same mesh, and why that may not fit."""
        here = self._change(now, now.run.mesh, budget.frozen, now.engine.boundaries or None, reason)
        there, problem = budget.fitted(here)
        return (there if problem is None else here), problem

    def _cached_blocks(self, present: PresentMesh, depth: int, step: int) -> int:
        """Frozen blocks that the next steps will read."""
        if not self.caching.wanted(depth):
            return 0
        left = self.left(step)
        due = self._evaluations.steps_until_due(step, self._taken(step), self._size, depth, self._still_frozen(depth))
        return self._rules.cached_blocks(present, depth, epoch_samples=self._num_samples,
                                         asked_after=left if due is None else min(due, left))

    def _resized(self, now: RankRuntime, request: Mapping[str, Any], budget: MemoryBudget, step: int) -> Change | None:
        """The change that a user requests, unless it is refused: another mesh of the ranks that the run has."""
        run, wanted = now.run, budget.frozen
        asked: dict[str, Any] = {axis: request.get(axis, size if axis in ("row", "col") else None)
                                 for axis, size in run.mesh.sizes.items()}
        problem = request.get("problem") or self._unfit(run.mesh, asked)
        if problem is None:
            mesh = resized(self._first.mesh, **asked)
            reason = request.get("reason", "as asked with ranvier resize")
            change, found = budget.fitted(replace(self._change(now, mesh, wanted, None, reason), wish=request["wish"]))
            if found is None:
                return change
            problem = str(found)
        self._note(step, "resize-refused", f"resize request for {request_text(request)} refused: {problem}",
                   {name: value for name, value in request.items() if name not in ("problem", "reason")})
        return self._here(now, budget, "freezing")[0] if wanted != now.frozen else None

    def _unfit(self, mesh: Mesh, asked: Mapping[str, Any]) -> str | None:
        """Why a run on `mesh` cannot go to one of the sizes `asked` (axis -> size), by these numbers alone."""
        sizes = [size for size in asked.values() if isinstance(size, int) and not isinstance(size, bool) and size >= 1]
        if len(sizes) < len(asked):
            return "is no mesh: give --data and --pipe, and --row and --col if they change, whole numbers of at least 1"
        if prod(sizes) > self.num_ranks:
            started = self.num_ranks == self._first.mesh.size
            return f"needs {prod(sizes)} ranks, and the run {'was started with' if started else 'has'} {self.num_ranks}"
        if self._needs_activations and len(self._data.eval) < 2 * asked["row"]:
            return (f"leaves rows with fewer than two of the {len(self._data.eval)} held-out samples, which "
                    f"{self._policy_text} compares")
        return "is the mesh that the run has" if asked == mesh.sizes else None

    def _change(self, now: RankRuntime, mesh: Mesh, frozen: FrozenLayers, boundaries: tuple[int, ...] | None,
                reason: str) -> Change:
        return self.change_to(mesh, now.frozen, frozen, boundaries, reason)

    def change_to(self, mesh: Mesh, old_frozen: FrozenLayers, frozen: FrozenLayers,
                  boundaries: tuple[int, ...] | None, reason: str) -> Change:
        """The change from `old_frozen` to `frozen` layers, on `mesh`, with the schedule of now. boundaries: None cuts
        by cost."""
        size = self._rules.step_samples(mesh.data)
        batch = replace(self._first.batch, global_size=size)
        there = on_mesh(replace(self._first, batch=batch), mesh)
        return Change(data=mesh.data, pipe=mesh.pipe, row=mesh.row, col=mesh.col, frozen=frozen, old_frozen=old_frozen,
                      boundaries=boundaries, global_size=size, microbatch_size=there.batch.microbatch_size,
                      reason=reason, schedule=self._schedule)

    def _note(self, step: int, event: str, text: str, fields: Mapping[str, object]) -> None:
        self._tell(NoteEvent(step=step, event=event, text=text, fields=fields))


def ended_ties(before: Layout | None, now: Layout, step: int) -> list[NoteEvent]:
    """What is told of ties that have ended because layers froze. before: the layout of the mesh before, on its ranks;
    None on others."""
    known = set() if before is None else {parameter.name for parameter in before.parameters
                                          if parameter.origin is not None}
    notes = []
    for parameter in now.parameters:
        if parameter.origin is not None and parameter.name not in known:
            text = f"{parameter.name} is no longer tied to {parameter.origin}"
            if not now[parameter.origin].trainable:
                text += ", which is frozen, and trains on with weights of its own"
            notes.append(NoteEvent(step=step, event="untied", text=text, fields={
                "parameter": parameter.name, "was": parameter.origin}))
    return notes
