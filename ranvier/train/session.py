"""The state of a run on one rank, and the only way in which it changes its mesh.

    Idle -- advance --> Active -- advance --> Active on another mesh, or Idle

A rank is part of the mesh, or is idle and waits for commands of rank 0. All ranks of a run that starts or resumes
begin as Active (`ranvier.train.start`), a rank that joins later as Idle. `Session.advance` makes every later change,
whatever its cause (`ranvier.train.changes`): a decision, a request, ranks that join, or ranks that are lost.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from ranvier.config import read
from ranvier.config.resolve import ResolvedRun
from ranvier.elastic.freezing import FrozenLayers
from ranvier.elastic.state import StepFigures
from ranvier.elastic.transition import Held, hand_over, take
from ranvier.errors import RanvierError
from ranvier.launch.contact import remove_contact
from ranvier.launch.failures import publish_mesh
from ranvier.launch.joining import Call
from ranvier.launch.stop import StopRequest
from ranvier.models import families
from ranvier.pipeline.engine import Engine
from ranvier.pipeline.result import BatchResult
from ranvier.plan.limits import schedule_note
from ranvier.schedule.spans import Category
from ranvier.system.lease import Lease
from ranvier.train.best import LOSS, BestEvaluation
from ranvier.train.commands import ChangeMesh, RunState
from ranvier.train.elasticity import Elasticity, ended_ties
from ranvier.train.events import NoteEvent, Trackers, TransitionEvent
from ranvier.train.guards import Guards
from ranvier.train.history import History
from ranvier.train.joining import Membership, RunFacts
from ranvier.train.logs import writing
from ranvier.train.measured_limits import MeasuredLimits, with_limits
from ranvier.train.metrics import Meter, PendingStep
from ranvier.train.progress import Progress
from ranvier.train.report_page import ReportPage
from ranvier.train.resize import Requests
from ranvier.train.runtime import RankRuntime, build_runtime
from ranvier.train.saving import Saving
from ranvier.train.survival import Survival
from ranvier.world import World


@dataclass(kw_only=True, eq=False)
class Active:
    """A rank's part in one mesh. Only `saving` outlives the mesh."""

    runtime: RankRuntime
    saving: Saving
    guards: Guards
    meter: Meter
    limits: MeasuredLimits
    result: BatchResult | None = None
    """Result of the last step."""
    pending: PendingStep | None = None
    """The last step, until its numbers are reported."""

    @property
    def engine(self) -> Engine:
        """The engine on this mesh."""
        return self.runtime.engine


@dataclass(frozen=True, kw_only=True, eq=False)
class Idle:
    """A rank that the mesh does not use, or that is between two meshes."""

    saving: Saving | None = None
    """`Saving` of the mesh that it leaves, between two meshes."""


@dataclass(kw_only=True, eq=False)
class Session:
    """One run on one rank. Methods are collective over the ranks of the mesh, except `close`.

    facts: what stays the same on every mesh. run: settings on this mesh. done: steps taken, including those before the
    run resumed. lease: of the run's folders, on rank 0, like `history` and `page`. requests: for other meshes.
    """

    facts: RunFacts
    members: Membership
    stop: StopRequest
    elastic: Elasticity
    best: BestEvaluation | None
    run: ResolvedRun
    progress: Progress
    place: Active | Idle
    requests: Requests
    done: int = 0
    outputs: Trackers = field(default_factory=Trackers)
    history: History = field(default_factory=History)
    page: ReportPage | None = None
    lease: Lease | None = None
    kernel: ExitStack = field(default_factory=ExitStack)
    """The context of the preferred attention kernel, until it is closed."""
    settings: ResolvedRun | None = None
    """Settings as written to the run's file, on rank 0."""
    stops: bool = False
    """Whether a rank was asked to stop; the same on all ranks after each step. So `resizes`, for another mesh."""
    resizes: bool = False
    survival: Survival | None = None
    """Survival of lost ranks, if the run's settings ask for it."""
    summary: dict[str, object] | None = None
    """Summary of the run, once it has ended."""
    past: list[tuple[ResolvedRun, FrozenLayers]] = field(default_factory=list)
    """Earlier meshes in which this rank took part: settings, and the layers that were frozen."""
    began: float = field(default_factory=time.monotonic)

    @property
    def active(self) -> Active:
        """This rank's part in the mesh; it must have one."""
        assert isinstance(self.place, Active)
        return self.place

    @property
    def world(self) -> World:
        """All ranks of the run."""
        return self.members.world

    @property
    def run_dir(self) -> Path:
        """The run's folder, on which all ranks have agreed."""
        assert self.run.run_dir is not None
        return self.run.run_dir

    @property
    def samples(self) -> int:
        """The position in the data: samples of all steps so far, including those that were skipped."""
        return self.run.samples_of(self.done) + self.active.runtime.train_data.offset

    @property
    def steps_left(self) -> int:
        """Steps that are left; none once training has stopped early."""
        return 0 if self.best is not None and self.best.should_stop else self.progress.steps_left(self.done)

    # ------------------------------------------------------------------ from mesh to mesh

    def state(self) -> RunState:
        """The run's state after the last step."""
        active, best = self.active, self.best
        bad_steps = active.engine.bad_steps
        return RunState(step=self.done, samples=self.samples, guards=active.guards.state(), stops=self.stops,
                        elastic=self.elastic.document(self.run, active.runtime.frozen, self.progress),
                        saved_step=active.saving.saved_step, best=None if best is None else best.state(),
                        bad_steps=None if bad_steps is None else bad_steps.state())

    def advance(self, command: ChangeMesh, back_to: Held | None = None) -> None:
        """Replace this rank's part in the mesh by the one that it has after `command`, if any. Collective over the
        world. back_to: the state from which this rank continues, if a lost rank has cost it its engine."""
        change, state, old, before = command.change, command.state, self.place, self.run.mesh
        began, held, world, facts = time.monotonic_ns(), back_to, self.world, self.facts

        # 1. No engine serves two meshes: its state is taken out, and its memory except for weights is freed before
        # there is a new one.
        if isinstance(old, Active):
            self.past.append((self.run, old.runtime.frozen))
            old.saving.checkpoints.close()
            held = take(old.engine, ends=True)
            old.runtime.close()
        self.place = Idle(saving=old.saving)

        # 2. Each change begins from the user's settings: the values chosen for `auto` are valid on one mesh only.
        self.run, self.done, self.stops = change.apply_to(facts.run), state.step, state.stops
        if world.rank == 0:
            publish_mesh(world.store, self.run.mesh)
        runtime = build_runtime(self.run, world, facts.data, frozen=change.frozen, fresh=False)
        moved = hand_over(held, None if runtime is None else runtime.engine, world.backend,
                          timeout_seconds=self.run.comm.timeout_seconds)
        del held  # steps need the memory
        if runtime is None:
            self.place = Idle()  # an idle rank keeps nothing of its last mesh
            self.elastic.caching.leave()
            return

        # 3. The rest of the state is that of rank 0, since a rank that was idle has none.
        engine = runtime.engine
        runtime.train_data.offset = state.samples - self.run.samples_of(self.done)
        if old.saving is None:
            saving = Saving(self.run, facts.recipe, engine, facts.data, None, origin=facts.origin)
        else:
            saving = old.saving
            saving.move(self.run, engine)
        saving.offset, saving.saved_step = runtime.train_data.offset, state.saved_step
        if state.bad_steps:
            assert engine.bad_steps is not None  # the previous engine had one, with the same settings
            engine.bad_steps.load(state.bad_steps)
        if self.best is not None:
            self.best.load(state.best or {})
        self.place = active = Active(
            runtime=runtime, saving=saving, limits=MeasuredLimits(self.run, command.block_times),
            guards=Guards(self.run.guard, engine, tell=self.outputs.event, barrier=runtime.ranks.barrier,
                          counts=state.guards),
            meter=Meter(engine.timeline, runtime.ranks, world.device, self.stop, self.requests.are_waiting,
                        self.run.mesh))
        seconds = (time.monotonic_ns() - began) * 1e-9
        self.progress = self.progress.restore(state.elastic)
        cache = self.elastic.enter(runtime, state.elastic, change, before, moved, seconds, self.done, self.progress)
        self.progress = self.progress.with_size(self.done, self.run.batch.global_size)

        # 4. The change is reported, and the state is copied in case a rank is lost before the next step has ended.
        self.outputs.event(TransitionEvent(
            step=self.done, old_mesh=before, mesh=self.run.mesh, reason=change.reason, old_frozen=change.old_frozen,
            frozen=change.frozen, cache=cache, bytes_moved=moved, seconds=seconds, began_ns=began,
            global_size=self.run.samples_of(1), microbatch_size=self.run.batch.microbatch_size,
            stages=str(engine.stages), request_id=change.request_id))
        if text := schedule_note(replace(change, schedule=None).apply_to(facts.run), self.run):
            self.outputs.event(NoteEvent(step=self.done, event="schedule", text=text))
        self.requests.current = None
        if back_to is None:
            for ended in ended_ties(old.engine.layout if isinstance(old, Active) else None, engine.layout, self.done):
                self.outputs.event(ended)
        if (note := active.limits.before_steps(runtime, self.done)) is not None:
            self.keep_limits(note)
        self.keep_state(saves=command.save)
        if command.save:
            self.save()

    def take_ranks(self, call: Call) -> str | None:
        """Admit the ranks of `call` to the world, or return why not. Collective over the ranks of the world."""
        problem = self.members.grow(call, self.facts.run.launch.threads)
        self.elastic.num_ranks = self.world.size
        return problem

    def keep_state(self, *, saves: bool = False) -> None:
        """Copy the present state, which is that after the last finished step, if the run survives lost ranks. saves:
        see `Survival.after_step`."""
        if self.survival is not None and isinstance(self.place, Active):
            self.survival.steps.keep(self.done, self.place.runtime)
            self.survival.after_step(self.place.runtime, self.state, saves=saves)

    # ------------------------------------------------------------------ reports and files

    @contextmanager
    def span(self, category: Category, label: str) -> Iterator[None]:
        """Record the time inside as a span of this rank's timeline."""
        started, engine = time.monotonic_ns(), self.active.engine
        yield
        engine.timeline.add(category, label, engine.steps, started)

    def publish(self) -> None:
        """Wait for the pending step's numbers and report them. RanvierError if the loss is not finite."""
        active = self.active
        if self.lease is not None:
            self.lease.check()
        with self.span("report", "numbers of the step before"):
            self.report_checkpoints()
            pending, active.pending = active.pending, None
            if pending is not None:
                self._publish_pending(pending)

    def _publish_pending(self, pending: PendingStep) -> None:
        active, facts = self.active, self.facts
        event = pending.event(active.runtime.work_share() * families.flops_per_sample(self.run) / facts.data.weight,
                              facts.peak)
        self.stops |= pending.stop_requested
        self.resizes |= pending.resize_requested
        self.elastic.add_step(event)
        if not event.stepped and pending.result.bad is None:
            text = (f"a gradient overflowed: nothing was updated, and the loss scale is now {event.loss_scale:g}"
                    if event.tokens else "no valid target in the global batch: nothing was updated")
            self.outputs.event(NoteEvent(step=event.step, event="skipped", text=text))
        self.outputs.event(event)
        active.saving.published_step = event.step
        if event.stepped and not math.isfinite(event.loss):
            active.runtime.ranks.barrier()  # a failing rank ends the others: rank 0 must have written the step
            raise RanvierError("is not a finite number", code="loss-not-finite", where=f"loss of step {event.step}",
                               value=event.loss,
                               remedy=f"Lower `--train.learning-rate` (it is {self.run.train.learning_rate:g}) or "
                                      "raise `--train.warmup-steps`; metrics.jsonl shows the steps before.")

    def report_checkpoints(self) -> None:
        """Report checkpoints written since the last call. CheckpointError if the run should stop."""
        for note in self.active.saving.take_notes():
            self.outputs.event(note)

    def save(self) -> float | None:
        """Begin a checkpoint; returns the result of `Saving.save`."""
        active, unseen = self.active, None
        if self.elastic.controller.freezes and active.result is not None and active.saving.published_step < self.done:
            scores: dict[str, float] = {}  # a resumed run needs the numbers of a step that are not reported yet
            if active.pending is not None and active.pending.eval_loss is not None:
                scores = {LOSS: active.pending.eval_loss, **active.pending.eval_scores}
            unseen = StepFigures(loss=active.result.loss, targets=active.result.weight,
                                 learning_rate=active.engine.learning_rate, metrics=scores)
        with self.span("checkpoint", "copy"):
            return active.saving.save(self.done, active.result, self.elastic.checkpoint_document(
                self.run, active.runtime.frozen, self.progress, unseen=unseen), self.best)

    def keep_limits(self, note: NoteEvent) -> None:
        """Report changed limits, and keep them in the run's file while the run has its initial mesh and layers, which
        the file describes."""
        self.outputs.event(note)
        limits = self.active.engine.limits
        self.run = with_limits(self.run, limits)
        if self.settings is not None and self.run.mesh == self.facts.run.mesh and not self.active.runtime.frozen:
            self.write_settings(with_limits(self.settings, limits))

    def write_settings(self, run: ResolvedRun) -> None:
        """Write the run's file: every setting, with every `auto` resolved."""
        self.settings, path = run, self.run_dir / "run.toml"
        with writing(path):
            read.write(run, path)

    def close(self) -> None:
        """Release files and threads, whether or not the run succeeded."""
        self.kernel.close()
        if self.survival is not None:
            self.survival.lost_ranks.close()
        if self.world.rank == 0 and self.world.joins is not None:
            remove_contact(self.run_dir)
        saving = self.place.saving  # of the last mesh, on a rank that is between two
        written = saving is None or saving.checkpoints.close()
        self.elastic.caching.close()
        self.outputs.close()
        if self.lease is not None and written:  # else a thread is still writing there, and ends with this process
            self.lease.release()
