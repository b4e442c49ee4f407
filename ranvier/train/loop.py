"""A training run from its configuration to its folder of results: read this first.

    prepare the data -> form the mesh -> (learning rate -> train_batch -> metrics -> another mesh?) x steps -> report

Every rank runs all of it; only rank 0 has trackers, so only rank 0 prints and writes. Nothing here waits for the step
that was started last: its numbers are read while the next one is under way. Ranks that the mesh of the moment does not
take are idle, and execute commands of rank 0.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from ranvier.checkpoint.ownership import acquire_folders
from ranvier.comm.protocol import Group
from ranvier.config import read
from ranvier.config.resolve import ResolvedRun, resolve
from ranvier.config.rules import length_warnings
from ranvier.config.run import Run
from ranvier.config.task_form import form_of
from ranvier.cost.count import laid_out
from ranvier.cost.device_overhead import with_overhead
from ranvier.elastic.change import Change, MeshRequest
from ranvier.elastic.freezing import FreezePolicy, FrozenLayers
from ranvier.elastic.state import StepFigures
from ranvier.elastic.transition import Held, hand_over, take
from ranvier.errors import ConfigError, RanvierError, TransportError
from ranvier.launch.contact import NAME as CONTACT
from ranvier.launch.contact import remove_contact
from ranvier.launch.failures import publish_mesh
from ranvier.launch.joining import Call
from ranvier.launch.losses import Agreement
from ranvier.launch.stop import StopRequest
from ranvier.models import families
from ranvier.pictures.timelines import gather_timelines
from ranvier.pipeline.engine import Engine
from ranvier.pipeline.result import BatchResult
from ranvier.plan.fitting import schedule_note
from ranvier.schedule.spans import Category
from ranvier.system.lease import Lease
from ranvier.system.memory_tracker import peak_memory_bytes
from ranvier.train.attention import choose_kernel, preferred_kernel
from ranvier.train.best import LOSS, best_of
from ranvier.train.commands import ChangeMesh, Command, EndRun, RunState, TakeRanks
from ranvier.train.determinism import deterministic_algorithms
from ranvier.train.elasticity import Elasticity, ended_ties
from ranvier.train.evaluation import evaluate, sample_text
from ranvier.train.events import EndEvent, NoteEvent, StartEvent, Tracker, Trackers, TransitionEvent
from ranvier.train.experiment_trackers import experiment_trackers
from ranvier.train.guards import Guards
from ranvier.train.history import History
from ranvier.train.joining import JoinedRun, invite, wanted_mesh
from ranvier.train.logs import plain, writing
from ranvier.train.losses import Survival, lost_note
from ranvier.train.measured_limits import MeasuredLimits, with_limits
from ranvier.train.membership import Membership
from ranvier.train.memory import check_fits, explain_out_of_memory, report_text
from ranvier.train.metrics import Meter, PendingStep
from ranvier.train.peak import peak_rate
from ranvier.train.progress import Progress
from ranvier.train.reference import fill_reference
from ranvier.train.report import summarise, write_report
from ranvier.train.report_page import ReportPage
from ranvier.train.resize import Requests, join_note
from ranvier.train.runtime import RankRuntime, build_runtime, with_frozen
from ranvier.train.sample_quality import expectation, frequency_entropy
from ranvier.train.saving import Saving, checkpoint_folder, read_metadata
from ranvier.train.setup import (
    agree_on_run,
    initial_weights,
    prepare_run,
    resolve_remaining,
    settings_text,
    write_tokenizer,
)
from ranvier.train.trackers import console, open_outputs
from ranvier.world import World

_LAST_WRITE_SECONDS = 1.0
"""For a checkpoint under way when a rank is lost, of which that rank may have written its part."""


def train(run: Run, recipe: str, world: World, *, trackers: Sequence[Tracker] = (), stream: TextIO | None = None,
          freezing: FreezePolicy | None = None) -> dict[str, object]:
    """Train as `run` says and leave the results in its folder. Returns what summary.json says, on every rank.

    Args:
        recipe: the run's name in headings and in the default folder's name.
        trackers: more takers of the run's events, beside files, TensorBoard and console; used on rank 0 only.
        stream: where rank 0 prints; standard output by default.
        freezing: says how many layers are frozen, instead of the policy that elastic.freeze names; asked as often as
            elastic.every says.

    A run that is told to stop (ranvier.launch.stop) saves a checkpoint, leaves no summary.json, and returns
    {"stopped_after": its last step}. Raises RanvierError where data, settings or folder do not allow the run, and
    when the loss stops being a number.
    """
    closed = resolve(run)
    with _part_of(closed, world) as stop:
        training = Training(closed, recipe, world, trackers, stream or sys.stdout, stop, freezing)
        return training.run_to_its_end(training.start)


def train_as_newcomer(joined: JoinedRun, world: World) -> dict[str, object]:
    """Take part in a run under way, of which `world` has become a rank, until it ends. Returns what `train` returns."""
    with _part_of(joined.run, world) as stop:
        return Training(joined.run, joined.recipe, world, (), sys.stdout, stop, None, joined=joined).run_to_its_end()


@contextmanager
def _part_of(run: ResolvedRun, world: World) -> Iterator[StopRequest]:
    """One rank's part in `run`: it may be asked to stop, and explains a lack of memory."""
    try:
        with StopRequest(signals=()) as stop, deterministic_algorithms(run.deterministic):
            yield stop
    except Exception as error:
        explanation = explain_out_of_memory(error, run, where=f"rank {world.rank}")
        if explanation is None:
            raise
        raise explanation from error


class Training:
    """One run on one rank. Every method is collective over the ranks of the mesh, but for `close`."""

    def __init__(self, run: ResolvedRun, recipe: str, world: World, trackers: Sequence[Tracker], stream: TextIO,
                 stop: StopRequest, freezing: FreezePolicy | None, *, joined: JoinedRun | None = None) -> None:
        self.recipe, self.world, self._stop = recipe, world, stop
        self.stops = self.resizes = False
        """Whether a rank was told to stop, the run to take another mesh; all ranks know it after the same step."""
        self.summary: dict[str, object] | None = None
        """What the run has come to, once it has ended."""
        self.began = time.monotonic()
        self.outputs, self.history = Trackers(), History()
        self.now: RankRuntime | None = None
        self.lease: Lease | None = None
        self.requests = Requests(world, None)
        self._kernel = ExitStack()
        self._has_begun = False
        """Whether this rank has had a place in a mesh."""
        self.pending: PendingStep | None = None
        self.result: BatchResult | None = None
        """Of the last step on this mesh."""
        self.done = 0
        """Steps that are taken, those before this run went on among them."""
        self.survival: Survival | None = None
        """Where the run survives the loss of ranks."""
        self.members = Membership(world)
        if joined is None:
            self._begin(run, trackers, stream, freezing)
        else:
            self._join(joined)

    def _join(self, joined: JoinedRun) -> None:
        """A rank that has joined the run is idle until a mesh takes it."""
        self.run = self._asked = joined.run
        self.members.share_cores(self.run.launch.threads)
        self.data = joined.data
        self._joined, self._peak = joined, joined.peak
        self.world.mesh = self.run.mesh
        self._kernel.enter_context(preferred_kernel(self.run.model.attention_kernel))
        self.progress = Progress.begin(self.run)
        self.elastic = Elasticity(self.run, self.data, tell=lambda event: self.outputs.event(event))
        self.elastic.num_ranks = self.world.size
        self.best = best_of(self.run, self.data)

    def _begin(self, run: ResolvedRun, trackers: Sequence[Tracker], stream: TextIO, freezing: FreezePolicy | None
               ) -> None:
        """A run begins, or goes on from a checkpoint."""
        world, recipe = self.world, self.recipe
        if world.joins is not None and freezing is not None:
            raise ConfigError("cannot be with a freeze policy that is an object: ranks that join would not have it",
                              code="join-with-policy-object", where="launch.join-address", value=world.joins.address,
                              remedy="Name the policy with `--elastic.freeze module:name`.")
        run, self.data, self.pretrained = prepare_run(run, world, stream)
        self.run = agree_on_run(run, recipe, self.data, self.members.everyone, world)
        world.mesh = self.run.mesh
        asked = self.run
        self.run = check_fits(self.run, world, self.members.everyone)
        self.members.everyone.barrier()  # not before every rank has looked at what is free
        kernel, self._attention = choose_kernel(self.run, self.members.everyone, world.device)
        self.run = replace(self.run, model=replace(self.run.model, attention_kernel=kernel))
        self.lease = acquire_folders([self.run_dir, checkpoint_folder(self.run)], self.members.everyone,
                                     tell=lambda line: print(line, file=stream, flush=True))
        self.now, self._has_begun = build_runtime(self.run, world, self.data), True
        self.progress = Progress.begin(self.run)
        self.elastic = Elasticity(self.run, self.data, tell=lambda event: self.outputs.event(event), policy=freezing)
        self.saving = Saving(self.run, recipe, self.engine, self.data, self.lease)
        self.resumed = self.saving.start(self._engine_for)
        self.best = best_of(self.run, self.data)
        if self.best is not None:
            self.best.load(self.resumed.best, is_own=self.resumed.continues)
        self.done = self.resumed.step
        self.runtime.train_data.offset = self.resumed.offset
        self.guards = self._new_guards()
        self._asked = self.run
        """The run before `auto` was resolved, from which each change begins."""
        self._limits = MeasuredLimits(self.run)
        if world.rank == 0:
            self.requests = Requests(world, self.run_dir)
            more = experiment_trackers(self.run.log, self.run_dir, continues=self.resumed.continues)
            self._page = ReportPage(self._asked, recipe, self.run_dir, self.history)
            self.outputs, damaged = open_outputs(
                self.run_dir, self.history, [console(stream, self.run), self._page, *more, *trackers],
                after=self.done if self.resumed.continues else None)
            self.resumed.notes.extend(
                [*damaged, *self.requests.refuse_all(self.done, "it was made before the run began")])
            if note := schedule_note(asked, self.run):
                self.resumed.notes.append(NoteEvent(step=self.done, event="schedule", text=note))

    def _new_guards(self) -> Guards:
        return Guards(self.run.guard, self.engine, tell=lambda event: self.outputs.event(event),
                      barrier=lambda: self.ranks.barrier(), rollback=self._rollback)

    def run_to_its_end(self, start: Callable[[], None] = lambda: None) -> dict[str, object]:
        """`start`, and then all that the run does; returns its summary."""
        try:
            start()
            self._stop.install()  # before, there is nothing to save, and signals end the process at once
            self._begin_survival()
            while self.summary is None:
                try:
                    self.advance()
                except TransportError as error:
                    self._survive(error)
        finally:
            self.close()
        self.shutdown()
        return self.summary

    @property
    def runtime(self) -> RankRuntime:
        """Only a rank of the mesh has one."""
        assert self.now is not None
        return self.now

    @property
    def run_dir(self) -> Path:
        """The run's folder, on which all ranks have agreed."""
        assert self.run.run_dir is not None
        return self.run.run_dir

    @property
    def engine(self) -> Engine:
        """That of the current mesh; a transition replaces it."""
        return self.runtime.engine

    def _engine_for(self, frozen: int) -> Engine:
        """The engine that reads a checkpoint of a run with so many frozen layers."""
        if 0 < frozen <= len(self.engine.layers):
            self.now = with_frozen(self.runtime, self.data, FrozenLayers(frozen))
        return self.engine

    @property
    def ranks(self) -> Group:
        """The ranks of the mesh."""
        return self.runtime.ranks

    @property
    def samples(self) -> int:
        """The place in the data: samples of all steps so far, and those that were left out."""
        return self.run.samples_of(self.done) + self.runtime.train_data.offset

    def start(self) -> None:
        """Write what the run has come to, and start the clock."""
        self._kernel.enter_context(preferred_kernel(self.run.model.attention_kernel))
        loaded = self.resumed.loaded
        notes = [NoteEvent(step=0, event="pretrained", text=text) for text in initial_weights(
            self.engine, self.run, self.pretrained, from_step=None if loaded is None else loaded.step,
            before_adapters=partial(fill_reference, self.runtime, self.data, self.members.everyone, self.resumed))]
        notes += [NoteEvent(step=self.done, event="data", text=f"warning: {warning}") for warning in self.data.warnings]
        if self.run.train.epochs is not None:  # how many steps these are is known only now
            notes += [NoteEvent(step=self.done, event="settings", text=str(warning))
                      for warning in length_warnings(self.run.train)]
        self.run = resolve_remaining(self.run, self.engine, self.world, self.saving.origin)
        if self.world.rank == 0:
            self._page.run = self.run
            self._write_settings(self.run)
            if self.data.tokenizer is not None:
                write_tokenizer(self.data.tokenizer, self.run_dir)
        self.outputs.event(StartEvent(
            recipe=self.recipe, run_dir=self.run_dir, mesh=self.run.mesh, steps=self.run.train.steps,
            settings=settings_text(self.run, self.engine, self.world, self.data, self.elastic.text())
            | ({"attention": self._attention} if self._attention else {}),
            stages=str(self.engine.stages), unit=form_of(self.run.data).targets))
        for note in (*self.resumed.notes, *notes):
            self.outputs.event(note)
        self._peak = peak_rate(self.ranks, self.world.device, self.run.precision)
        self.meter = Meter(self.engine.timeline, self.ranks, self.world.device, self._stop,
                           resize_asked=self.requests.are_waiting)
        if self.resumed.elastic:
            self.progress = self.progress.restored(self.resumed.elastic)
            change = self.elastic.restore(self.resumed.elastic, self.progress, self.engine)
            if change is not None:
                self._change(change)
        if self.now is not None:
            self.elastic.begin(self.done, self.engine, self.runtime.frozen)
            if self.elastic.state.asked and self._left(self.done):
                self._consider()
        if self.world.rank == 0 and self.world.joins is not None:
            with writing(self.run_dir / CONTACT):
                invite(self.world, JoinedRun(
                    run=self._asked, recipe=self.recipe, data=self.data, origin=self.saving.origin,
                    peak=self._peak))

    def advance(self) -> None:
        """One step, or on an idle rank the next command. The run may have ended then."""
        if self.now is None:
            self._execute(self.members.commands.wait(self.run.comm.timeout_seconds))
        elif self._left(self.done):
            self.step(self.done + 1)
        if self.now is None:  # a rank that is no longer idle continues here: the others may stop after the transition
            return
        left = self._left(self.done)
        if self.stops and left:
            self._end(self.leave(self.done))
        elif not left:
            self._end(self.finish())

    def step(self, step: int) -> None:
        """One optimizer step; publishes the numbers of the step before. The run is then at this step, or at that of the
        checkpoint to which the guard has rolled back, or on another mesh."""
        after = self.samples + self.run.samples_of(1)
        if after // self.data.epoch_samples > self.samples // self.data.epoch_samples:
            self.elastic.caching.look_again()
        rate = self.engine.learning_rate = self.progress.learning_rate(step)
        asked = self.elastic.asks_after(step, self.samples, after, self.runtime.frozen)
        self.engine.watch_layers(asked)
        with self.runtime.measured.step():
            self.runtime.train_data.microbatch_size = self.elastic.microbatch_size(self.runtime, step)
            with self._span("data", "samples"):
                batch = self.runtime.train_data.microbatches(step - 1)
                self.elastic.caching.prefetch(self.runtime.train_data, step - 1, more=self.progress.left(step) > 0)
            result = self.result = self.engine.train_batch(batch)
            if self.progress.left(step) > 0:
                with self._span("data", "samples of the next step"):
                    self.runtime.train_data.prefetch(step)
        reached = self.guards.after_step(step, result, batch, partial(self._publish_all, step, result, rate))
        if reached != step:
            self._leave_out(step, reached)
            self._keep_state()
            return
        if asked and result.stepped:
            self.elastic.saw_gradients(self.engine)
        self.done, last = step, not self.progress.left(step)
        self._publish()
        if (note := self._limits.after_step(
                self.runtime, step, self.meter.busy, self.meter.kept)) is not None:
            self._keep_limits(note)
        evaluates, due = self.progress.evaluates(step), self.progress.saves(step)
        considers = not last and (self.elastic.state.asked or self.resizes)
        # the checkpoint has what the evaluation says
        is_late = evaluates and (self.best is not None or self.elastic.controller.freezes)
        stall = self._save(step) if due and not considers and not is_late else None
        if self.survival is not None:
            self.survival.keep(step, self.runtime)
        pending = self._await(step, result, rate)
        pending.checkpoint_stall_seconds = stall
        if evaluates:
            due |= self._evaluate(step, pending)
            considers &= self._left(step) > 0
            if due and is_late and not considers:
                self._save(step)
            self._publish()
            self.meter.resume()
        elif stall is not None or self.survival is not None:
            self._publish()  # the checkpoint waits for it, and so do lost ranks: what is told is finished
        if self.survival is not None:
            self.survival.finished(self.runtime, self._state)
        if considers:
            self._consider(save=due)

    def _keep_limits(self, note: NoteEvent) -> None:
        """Tell of other limits, and keep them in the run's file while the run is as it began, which this is about."""
        self.outputs.event(note)
        self.run = with_limits(self.run, self.engine.limits)
        if self.run.mesh == self._asked.mesh and not self.runtime.frozen and self.world.rank == 0:
            self._write_settings(with_limits(self._kept, self.engine.limits))

    def _write_settings(self, run: ResolvedRun) -> None:
        """Every setting, with every `auto` resolved: also after transitions, which begin from unresolved ones."""
        self._kept, path = run, self.run_dir / "run.toml"
        with writing(path):
            read.write(run, path)

    def _left(self, step: int) -> int:
        """Steps after `step`; none once training has stopped early."""
        return 0 if self.best is not None and self.best.stops else self.progress.left(step)

    def _evaluate(self, step: int, pending: PendingStep) -> bool:
        """Evaluate the model after `step`, whose numbers are still on their way; whether a checkpoint is due for it:
        of the best model so far, or of the last one, where training stops early."""
        events = evaluate(self.runtime, self.data, step)
        metrics: dict[str, float] = {}
        for event in events:
            self.outputs.event(event)
            metrics |= event.metrics()
        pending.eval_loss = metrics.pop("eval_loss")
        pending.eval_scores = metrics
        if self.best is None:
            return False
        is_best = self.best.saw(step, self.ranks.gather_objects(metrics | {LOSS: pending.eval_loss})[0])
        if self.best.stops and self.progress.left(step):
            self.outputs.event(NoteEvent(step=step, event="early-stopping", text=self.best.reason,
                                         fields=self.best.state()))
        return self.best.stops or (is_best and self.run.checkpoint.best is not None)

    def leave(self, step: int) -> dict[str, object]:
        """Save the state after `step`, and write no report: the run is to be resumed."""
        self._publish()
        self.saving.finish()
        if self.saving.saved_step != step:
            self._save(step)
        self._require_checkpoint(step)
        reason = next(reason for reason in self.ranks.gather_objects(self._stop.reason) if reason)
        for note in self.requests.refuse_all(step, "the run stops"):
            self.outputs.event(note)
        self.outputs.event(NoteEvent(step=step, event="stopped", fields={"reason": reason},
                                     text=f"stopped by {reason}; resume with --resume auto --run-dir {self.run_dir}"))
        return {"stopped_after": step}

    def finish(self) -> dict[str, object]:
        """Write a sample of text and the report, once the last checkpoint is on the disk; returns the summary."""
        run, world = self.run, self.world
        self._require_checkpoint(self.done)
        timelines = gather_timelines(self.ranks, self.meter.kept)
        text = (sample_text(self.engine, self.ranks, run, self.data, world.device)
                if run.train.sample_tokens and form_of(run.data).writes_text else None)
        copies = None if self.survival is None else self.survival.host_bytes
        facts = self.ranks.gather_objects(
            {"peak_memory_bytes": peak_memory_bytes(world.device), **self.engine.counters()} | self.elastic.facts() | (
            {"memory": self.runtime.measured.facts(self.saving.checkpoints, copies)} if run.memory_report else {}))
        summary: dict[str, Any] = {}
        if world.rank == 0:
            summary = summarise(recipe=self.recipe, mesh=run.mesh, history=self.history, ranks=facts,
                                boundaries=self.engine.boundaries, launcher=world.launcher,
                                transport=world.backend.name, device=world.device,
                                seconds=time.monotonic() - self.began, frozen=len(self.runtime.frozen))
            summary |= self._limits.summary(self.history.column("bubble_fraction"))
            summary |= {} if self.best is None else self.best.summary()
            summary |= self._peak.facts()
            pictures = write_report(self.run_dir, summary, self.history, timelines, run.mesh, run.pipeline.policy)
            for refused in self.requests.refuse_all(self.done, "the run ends"):
                self.outputs.event(refused)
            predicted = laid_out(run, self.runtime.frozen.prefix, self.runtime.frozen.above)[1]
            if world.device.type == "cuda":
                predicted = tuple(with_overhead(entry, context=True) for entry in predicted)
            self._page.finish(summary, timelines, run.mesh, predicted, on_cpu=world.device.type == "cpu")
            pictures = [self._page.path, *pictures]
            report = report_text(predicted, summary["memory"],
                                 lambda rank: run.mesh.coordinates(rank).pipeline_rank) if run.memory_report else None
            note = None if text is None else expectation(summary["eval_loss"], frequency_entropy(self.data.train))
            self.outputs.event(EndEvent(step=self.done, summary=summary, sample=text, pictures=pictures,
                                        sample_note=note, report=report))
        gathered: list[dict[str, object]] = self.ranks.gather_objects(summary)
        return gathered[0]

    def _require_checkpoint(self, step: int) -> None:
        """The run ends after `step`: UnsavedError unless its checkpoint is there, OwnershipError unless its folders
        are still its own."""
        try:
            self.saving.require(step)
        finally:
            self._tell_of_checkpoints()
        if self.lease is not None:
            self.lease.verify()
        if self.survival is not None:
            self.survival.end()

    def close(self) -> None:
        """Let go of files and threads, however the run went."""
        self._kernel.close()
        if self.survival is not None:
            self.survival.close()
        if self.world.rank == 0 and self.world.joins is not None:
            remove_contact(self.run_dir)
        written = self.now is None or self.saving.checkpoints.close()
        self.elastic.caching.close()
        self.outputs.close()
        if self.lease is not None and written:  # else a thread is still at work there, and ends with this process
            self.lease.release()

    # ------------------------------------------------------------------ ranks that are lost

    def _begin_survival(self) -> None:
        """From now on the run survives losses, if it is to. Collective over the world."""
        if not self.run.launch.survive_losses or self.world.torch_store is None or self.summary is not None:
            return
        self.survival = Survival(self._asked, self.world, on_loss=self._give_up_waiting)
        self._keep_state()
        if self.now is not None:
            self.ranks.barrier()
        self.survival.begin()

    def _keep_state(self) -> None:
        """Copy the state as it is, which is that after the last finished step."""
        if self.survival is not None and self.now is not None:
            self.survival.keep(self.done, self.runtime)
            self.survival.finished(self.runtime, self._state)

    def _give_up_waiting(self) -> None:
        """A rank is lost. Called on any thread."""
        if self._has_begun:
            self.saving.checkpoints.give_up()

    def _survive(self, error: TransportError) -> None:
        """Go on without lost ranks from the last finished step. Raises `error` where none is lost, or the run cannot go
        on. Collective over the survivors."""
        if self.survival is None:
            raise error
        while True:
            if (old := self.now) is not None:
                self.now = self.pending = self.result = None
                if self._has_begun:
                    self.saving.checkpoints.close(_LAST_WRITE_SECONDS)
                old.engine.abandon()
            agreement = self.survival.agree(error, partial(
                self.elastic.controller.change_to, schedule=self.elastic.state.schedule))
            try:
                self.survival.connect(agreement)
                self._go_back(agreement)
                return
            except TransportError as another:  # of another loss, or the end
                error = another

    def _go_back(self, agreement: Agreement) -> None:
        """Go on from the last finished step with the ranks that the world has now. Collective over it."""
        assert self.survival is not None
        self.members.connect()
        self.members.share_cores(self._asked.launch.threads)
        self.elastic.num_ranks, self.resizes = self.world.size, False
        command = ChangeMesh.read(agreement.decision)
        self.done = command.state.step
        self.outputs.event(lost_note(agreement, command))
        if self.world.rank == 0 and (note := self.requests.after_loss(self.done)) is not None:
            self.outputs.event(note)
        self.requests.current = None
        if self.world.rank == 0 and self.saving.lacks_last():  # it was being written
            command = replace(command, state=replace(command.state, saved_step=None), save=True)
        command = ChangeMesh.read(self.members.everyone.gather_objects(asdict(command))[0])
        self._enter(command, back_to=self.survival.held(self.done))
        if self.now is not None and self.elastic.state.asked and self._left(self.done):
            self._consider()

    def shutdown(self) -> None:
        """After a run that has ended well: free what its ranks have in common."""
        if self.now is not None:
            self.now.close()

    def _end(self, summary: dict[str, object]) -> None:
        """The run has ended on the ranks of the mesh; the idle ones are told."""
        self.summary = summary
        self.members.commands.send(EndRun(summary=plain(summary)), first=self.run.mesh.size)

    # ------------------------------------------------------------------ from mesh to mesh

    def _consider(self, save: bool = False) -> None:
        """Freeze layers and go to another mesh, where the policy, the planner or a user's request says so. save: a
        checkpoint of this step is due; it contains the decision, since a run that resumes from it does not decide
        again."""
        self._publish()
        wanted = None
        if self.resizes:
            self.resizes = False
            wanted = self.requests.take(self.ranks)
            if wanted is not None and wanted.ranks is not None:
                wanted = self._admit(wanted)
        change = self.elastic.decide(self.runtime, self.done, self.progress, resize=wanted, busy=self.meter.busy,
                                     busy_steps=self.meter.busy_steps)
        if change is not None:
            self._change(change, save=save)
        elif save:
            self._save(self.done)
        self.requests.current = None
        if self.now is not None:
            self.meter.resume()

    def _admit(self, request: MeshRequest) -> MeshRequest | None:
        """Let the ranks in that a request brings, if a loss has not interrupted the run after that; they are idle then.
        The request for a mesh that has a place for them; None where they are refused."""
        if not request.has_joined:
            call, problem = self.ranks.gather_objects(
                self.members.call(request, self.run.comm.timeout_seconds) if self.world.rank == 0 else None)[0]
            if problem is None:
                command = TakeRanks(call=Call(**call))
                self.members.commands.send(command, first=self.run.mesh.size)
                problem = self._grow(command.call)
            self.outputs.event(join_note(request, self.done, self.world.size, problem))
            self.requests.current = replace(request, has_joined=True) if problem is None else None
            if problem is not None:
                return None
        return wanted_mesh(request, self.run.mesh, self.world.size)

    def _grow(self, call: Call) -> str | None:
        """Take the ranks of `call` into the world, or say why not. Collective over the ranks of the world."""
        problem = self.members.grow(call, self._asked.launch.threads)
        self.elastic.num_ranks = self.world.size
        return problem

    def _change(self, change: Change, save: bool = False) -> None:
        """Have all ranks, the idle ones too, make the change, and save what has come of it."""
        self._publish()
        self.saving.finish()
        self._tell_of_checkpoints()
        command = ChangeMesh(change=change, state=self._state(), save=save,
                             block_times=self._limits.block_times(self.runtime, self.meter.busy))
        self.members.commands.send(command, first=self.run.mesh.size)
        self._enter(command)

    def _state(self) -> RunState:
        """After the last step."""
        return RunState(step=self.done, samples=self.samples, guards=self.guards.state(), stops=self.stops,
                        elastic=self.elastic.document(self.run, self.runtime.frozen, self.progress),
                        saved_step=self.saving.saved_step, best=None if self.best is None else self.best.state(),
                        bad_steps=None if self.engine.bad_steps is None else self.engine.bad_steps.state())

    def _execute(self, command: Command) -> None:
        """Execute a command of rank 0 on an idle rank."""
        match command:
            case EndRun(summary=summary):
                self.summary = dict(summary)
            case TakeRanks(call=call):
                self._grow(call)
            case ChangeMesh():
                self._enter(command)

    def _enter(self, command: ChangeMesh, back_to: Held | None = None) -> None:
        """Continue as `command` says. back_to: the state with which this rank goes on, where it has no engine any
        more."""
        change, state = command.change, command.state
        began, old, before = time.monotonic_ns(), self.now, self.run.mesh
        held = back_to
        if old is not None:
            self.saving.checkpoints.close()
            held = take(old.engine)
            old.close()
        self.run, self.done, self.stops = change.applied(self._asked), state.step, state.stops
        self.result = self.now = None
        if self.world.rank == 0:
            publish_mesh(self.world.store, self.run.mesh)
        self.now = build_runtime(self.run, self.world, self.data, frozen=change.frozen, fresh=False)
        moved = hand_over(held, None if self.now is None else self.engine, self.world.backend,
                          timeout_seconds=self.run.comm.timeout_seconds)
        if self.now is None:
            self.elastic.caching.leave()
            return
        self.runtime.train_data.offset = state.samples - self.run.samples_of(self.done)
        if not self._has_begun:
            self._begin_here()
        else:
            self.saving.move(self.run, self.engine)
        self.saving.offset, self.saving.saved_step = self.runtime.train_data.offset, state.saved_step
        self.guards.move(self.engine, state.guards)
        if state.bad_steps:
            bad_steps = self.engine.bad_steps
            assert bad_steps is not None  # the engine before had one, by the same settings
            bad_steps.load(state.bad_steps)
        if self.best is not None:
            self.best.load(state.best or {})
        self.meter.move(self.engine.timeline, self.ranks)
        self._limits = MeasuredLimits(self.run, command.block_times)
        seconds = (time.monotonic_ns() - began) * 1e-9
        self.progress = self.progress.restored(state.elastic)
        cache = self.elastic.enter(self.now, state.elastic, change, before, moved, seconds, self.done,
                                   self.progress)
        self.progress = self.progress.with_size(self.done, self.run.batch.global_size)
        self.outputs.event(TransitionEvent(step=self.done, old_mesh=before, mesh=self.run.mesh, reason=change.reason,
                                           old_frozen=change.old_frozen, frozen=change.frozen, cache=cache,
                                           bytes_moved=moved, seconds=seconds, began_ns=began,
                                           global_size=self.run.samples_of(1),
                                           microbatch_size=self.run.batch.microbatch_size,
                                           stages=str(self.engine.stages), wish=change.wish))
        own = replace(change, schedule=None).applied(self._asked)
        if text := schedule_note(own, self.run):
            self.outputs.event(NoteEvent(step=self.done, event="schedule", text=text))
        self.requests.current = None
        if back_to is None:
            for ended in ended_ties(None if old is None else old.engine.layout, self.engine.layout, self.done):
                self.outputs.event(ended)
        if (note := self._limits.before_steps(self.runtime, self.done)) is not None:
            self._keep_limits(note)
        self._keep_state()
        if command.save:
            self._save(self.done)

    def _begin_here(self) -> None:
        """What a rank that has joined lacks before its first place in a mesh. The others' `Saving.move` is as
        collective."""
        self.saving = Saving(self.run, self.recipe, self.engine, self.data, None, origin=self._joined.origin)
        self.guards = self._new_guards()
        self.meter = Meter(self.engine.timeline, self.ranks, self.world.device, self._stop)
        self._has_begun = True

    # ------------------------------------------------------------------ parts of a step

    @contextmanager
    def _span(self, category: Category, label: str) -> Iterator[None]:
        """What this rank does inside is a span of its timeline."""
        started, timeline = time.monotonic_ns(), self.engine.timeline
        yield
        timeline.add(category, label, self.engine.steps, started)

    def _save(self, step: int) -> float | None:
        with self._span("checkpoint", "copy"):
            return self.saving.save(step, self.result, self.elastic.checkpoint_document(
                self.run, self.runtime.frozen, self.progress, unseen=self._unseen(step)), self.best)

    def _unseen(self, step: int) -> StepFigures | None:
        """What an elastic run will have to know of `step`, whose numbers have not been told yet."""
        if not self.elastic.controller.freezes or self.result is None or self.saving.published_step >= step:
            return None
        scores: dict[str, float] = {}
        if self.pending is not None and self.pending.eval_loss is not None:
            scores = {LOSS: self.pending.eval_loss, **self.pending.eval_scores}
        return StepFigures(loss=self.result.loss, targets=self.result.weight, learning_rate=self.engine.learning_rate,
                           metrics=scores)

    def _rollback(self) -> int | None:
        """Load the last checkpoint; its step, or None where there is none."""
        self.saving.finish()
        self._tell_of_checkpoints()
        loaded = self.saving.checkpoints.load()
        if loaded is None:
            return None
        for name, parameter in self.engine.named_parameters().items():  # some may have been frozen then
            parameter.requires_grad_(self.engine.layout[name].trainable)
        metadata = read_metadata(loaded)
        self.progress = self.progress.rolled_back(loaded.step, metadata.elastic)
        if self.best is not None and metadata.best is not None:
            self.best.load(asdict(metadata.best))
        self.saving.saved_step = None  # what a run that stops now saves has another place in the data
        for text in loaded.skipped:
            self.outputs.event(NoteEvent(step=loaded.step, event="checkpoint-skipped", text=text))
        return loaded.step

    def _leave_out(self, step: int, reached: int) -> None:
        """After a rollback from `step` to `reached`: the data continues where it is."""
        self.runtime.train_data.offset += self.run.samples_of(step - reached)
        self.saving.offset = self.runtime.train_data.offset
        self.done = self.saving.published_step = reached
        self.meter.resume()

    def _publish_all(self, step: int, result: BatchResult, rate: float) -> None:
        """Tell the numbers of `step` now, and of the one before where that is still to be done."""
        self._publish()
        self._await(step, result, rate)
        self._publish()

    def _await(self, step: int, result: BatchResult, rate: float) -> PendingStep:
        """The numbers of `step` are on their way."""
        self.pending = pending = self.meter.step(step, result, rate)
        pending.loss_scale = self.engine.loss_scale and replace(self.engine.loss_scale)
        if self.elastic.controller.freezes or self.runtime.frozen or self.run.mesh != self._asked.mesh:
            pending.frozen_layers, pending.mesh = len(self.runtime.frozen), self.run.mesh
        return pending

    def _publish(self) -> None:
        """Wait for the pending step's numbers and tell them. RanvierError when the loss is not a number any more."""
        if self.lease is not None:
            self.lease.check()
        with self._span("report", "numbers of the step before"):
            self._tell_of_checkpoints()
            if self.pending is not None:
                self._publish_pending(self.pending)

    def _publish_pending(self, pending: PendingStep) -> None:
        event = pending.event(self.runtime.work_share() * families.flops_per_sample(self.run) / self.data.weight,
                              self._peak)
        self.stops |= pending.stop_requested
        self.resizes |= pending.resize_requested
        self.elastic.saw(event)
        bad, self.pending = pending.result.bad, None
        if not event.stepped and bad is None:
            text = (f"a gradient overflowed: nothing was updated, and the loss scale is now {event.loss_scale:g}"
                    if event.tokens else "no valid target in the global batch: nothing was updated")
            self.outputs.event(NoteEvent(step=event.step, event="skipped", text=text))
        self.outputs.event(event)
        self.saving.published_step = event.step
        if event.stepped and not math.isfinite(event.loss):
            self.ranks.barrier()  # a rank that fails ends the others: not before rank 0 has written the step
            raise RanvierError("is not a finite number", code="loss-not-finite", where=f"loss of step {event.step}",
                               value=event.loss,
                               remedy=f"Lower `--train.learning-rate` (it is {self.run.train.learning_rate:g}) or "
                                      "raise `--train.warmup-steps`; metrics.jsonl shows how it came about.")

    def _tell_of_checkpoints(self) -> None:
        for note in self.saving.tell():
            self.outputs.event(note)
