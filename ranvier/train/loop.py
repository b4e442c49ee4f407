"""A training run from its configuration to its folder of results: read this first.

    prepare the data -> form the mesh -> (learning rate -> train_batch -> metrics -> another mesh?) x steps -> report

Every rank runs all of it; only rank 0 has trackers, so only rank 0 prints and writes. Nothing here waits for the step
that was started last: its numbers are read while the next one is under way. Ranks that the mesh of the moment does not
take are idle, and do what rank 0 orders.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TextIO

import torch

from ranvier import resolve
from ranvier.check import laid_out
from ranvier.checkpoint.from_pretrained import load_pretrained
from ranvier.comm.protocol import Group
from ranvier.elastic.freezing import FreezePolicy
from ranvier.elastic.transition import hand_over, take
from ranvier.errors import RanvierError
from ranvier.failure import tell_mesh
from ranvier.lease import hold
from ranvier.models import families
from ranvier.pipeline.engine import Engine
from ranvier.pipeline.result import BatchResult
from ranvier.pipeline.timeline import Category
from ranvier.plain_file import write_whole
from ranvier.precision import DTYPES
from ranvier.run import Run
from ranvier.stop import StopRequest
from ranvier.tensor.activations import layout_of
from ranvier.train.beginning import agreed, held_out_line, prepared
from ranvier.train.change import Change
from ranvier.train.console import console
from ranvier.train.elasticity import Elasticity
from ranvier.train.evaluation import evaluate
from ranvier.train.events import EndEvent, NoteEvent, StartEvent, Tracker, Trackers, TransitionEvent
from ranvier.train.files import EventsFile, MetricsFile, open_folder, plain, writing
from ranvier.train.formation import Formation, formed
from ranvier.train.guards import Guards
from ranvier.train.headings import UNITS, resolved, settings_text
from ranvier.train.logs import Log, read_events, read_metrics
from ranvier.train.memory import check_fits, explained, report_text
from ranvier.train.metrics import Meter, PendingStep
from ranvier.train.orders import Orders
from ranvier.train.peak import matrix_product_rate
from ranvier.train.report import History, rank_facts, summarise, write_report
from ranvier.train.resize import ResizeRequests
from ranvier.train.sample import continue_tokens
from ranvier.train.saving import Saving, Start, checkpoint_folder, told_by
from ranvier.train.tensorboard import TensorBoard
from ranvier.train.timeline import gather_timelines
from ranvier.world import World


def train(run: Run, recipe: str, world: World, *, trackers: Sequence[Tracker] = (), stream: TextIO | None = None,
          freezing: FreezePolicy | None = None) -> dict[str, object]:
    """Train as `run` says and leave the results in its folder. Returns what summary.json says, on every rank.

    Args:
        recipe: the run's name in headings and in the default folder's name.
        trackers: more takers of the run's events, beside files, TensorBoard and console; used on rank 0 only.
        stream: where rank 0 prints; standard output by default.
        freezing: says how many layers are frozen, instead of the policy that elastic.freeze names; asked as often as
            elastic.every says.

    A run that is told to stop (ranvier.stop) saves a checkpoint, leaves no summary.json, and returns {"stopped_after":
    its last step}. Raises RanvierError where data, settings or folder do not allow the run, and when the loss stops
    being a number.
    """
    try:
        with StopRequest() as stop:
            training = Training(run, recipe, world, trackers, stream or sys.stdout, stop, freezing)
            try:
                training.start()
                while training.summary is None:
                    training.go_on()
            finally:
                training.close()
        training.part()
        return training.summary
    except Exception as error:
        told = explained(error, run, where=f"rank {world.rank}")
        if told is None:
            raise
        raise told from error


class Training:
    """One run on one rank. Every method is collective over the ranks of the mesh, but for `close`."""

    def __init__(self, run: Run, recipe: str, world: World, trackers: Sequence[Tracker], stream: TextIO,
                 stop: StopRequest, freezing: FreezePolicy | None) -> None:
        self.recipe, self.world, self._stop = recipe, world, stop
        self.stops = self.resizes = False
        """Whether a rank was told to stop, the run to take another mesh; all ranks know it after the same step."""
        self.summary: dict[str, object] | None = None
        """What the run has come to, once it has ended."""
        self.began = time.monotonic()
        self.outputs = Trackers()
        self.everyone = world.backend.group("everyone", [tuple(range(world.size))])
        run, self.data, self.pretrained = prepared(run, world, stream)
        self.run = agreed(run, recipe, self.data, self.everyone, world)
        world.mesh = self.run.mesh
        self.run, _ = check_fits(self.run, world)
        self.everyone.barrier()  # not before every rank has looked at what is free
        self.lease = hold([self.run.run_dir, checkpoint_folder(self.run)], self.everyone,
                          tell=lambda line: print(line, file=stream, flush=True))
        self.orders = Orders(world)
        self.now: Formation | None = formed(self.run, world, self.data)
        self.elastic = Elasticity(self.run, self.data, tell=lambda event: self.outputs.event(event), policy=freezing)
        self.saving = Saving(self.run, recipe, self.engine, self.data, self.lease)
        self.begins = self.saving.start()
        self.result: BatchResult | None = None
        """Of the last step on this mesh."""
        self.done = self.begins.step
        """Steps that are taken, those before this run went on among them."""
        self.now.train_data.offset = self.begins.offset
        self.guards = Guards(self.run.guard, self.engine, tell=lambda event: self.outputs.event(event),
                             barrier=lambda: self.ranks.barrier(), go_back=self._go_back)
        self.history = History()
        self._asked = self.run
        """The run before `auto` was resolved, from which each change begins."""
        self.resize_requests = ResizeRequests(self.run.run_dir) if world.rank == 0 else None
        if world.rank == 0:
            self.outputs, damaged = _outputs(self.run.run_dir, self.history, trackers, stream,
                                             begins=self.begins if self.begins.continues else None)
            self.begins.notes.extend([*damaged, *self._refused_requests(self.done, "it was made before the run began")])

    @property
    def engine(self) -> Engine:
        return self.now.engine

    @property
    def ranks(self) -> Group:
        """The ranks of the mesh."""
        return self.now.ranks

    @property
    def samples(self) -> int:
        """The place in the data: samples of all steps so far, and those that were left out."""
        return self.done * self.run.batch.global_size + self.now.train_data.offset

    def start(self) -> None:
        """Write what the run has come to, and start the clock."""
        notes = []
        if self.pretrained is not None and self.begins.loaded is None:
            notes = [NoteEvent(step=0, event="pretrained", text=text)
                     for text in load_pretrained(self.engine, self.pretrained)]
        self.run = resolved(self.run, self.engine, self.world, self.saving.origin)
        if self.world.rank == 0:
            path = self.run.run_dir / "run.toml"
            with writing(path):
                resolve.write(self.run, path)
            if self.data.tokenizer is not None:
                path = self.run.run_dir / "tokenizer.json"
                with writing(path):
                    write_whole(path, self.data.tokenizer.text())
        self.outputs.event(StartEvent(
            recipe=self.recipe, run_dir=self.run.run_dir, mesh=self.run.mesh, steps=self.run.train.steps,
            settings=settings_text(self.run, self.engine, self.world, self.data, self.elastic.text()),
            stages=str(self.engine.stages), unit=UNITS[self.run.data.task]))
        for note in (*self.begins.notes, *notes):
            self.outputs.event(note)
        self._rank_flops_per_second = self._peak() / self.world.size
        self.pending: PendingStep | None = None
        asked = None if self.resize_requests is None else self.resize_requests.asked
        self.meter = Meter(self.engine.timeline, self.ranks, self._stop, resize_asked=asked)
        if self.begins.elastic:
            change = self.elastic.take_up(self.begins.elastic, self.run, self.engine)
            if change is not None:
                self._change(change)
        if self.now is not None:
            self.elastic.begins(self.done, self.engine, self.now.frozen)
            if self.elastic.asked and self.elastic.left(self.done):
                self._consider()

    def go_on(self) -> None:
        """One step, or on an idle rank whatever is ordered. The run may have ended then."""
        if self.now is None:
            self._obey(self.orders.wait(self.run.comm.timeout_seconds))
        elif self.elastic.left(self.done):
            self.step(self.done + 1)
        if self.now is None:  # a rank that has just come back goes on here: the others may stop after the transition
            return
        left = self.elastic.left(self.done)
        if self.stops and left:
            self._end(self.leave(self.done))
        elif not left:
            self._end(self.finish())

    def step(self, step: int) -> None:
        """One optimizer step; publishes the numbers of the step before. The run is then at this step, or at that of the
        checkpoint that the guard has gone back to, or on another mesh."""
        after = self.samples + self.run.batch.global_size
        if after // len(self.data.train) > self.samples // len(self.data.train):
            self.elastic.caching.look_again()
        rate = self.engine.learning_rate = self.elastic.learning_rate(step)
        asked = self.elastic.asks_after(step, self.samples, after, self.now.frozen)
        self.engine.watch_layers(asked)
        with self.now.measured.step():
            self.now.train_data.microbatch_size = self.elastic.microbatch_size(self.now, step)
            with self._span("data", "samples"):
                batch = self.now.train_data.microbatches(step - 1)
                self.elastic.caching.prefetch(self.now.train_data, step - 1, more=self.elastic.left(step) > 0)
            result = self.result = self.engine.train_batch(batch)
        reached = self.guards.after_step(step, result, batch, partial(self._publish_all, step, result, rate))
        if reached != step:
            self._leave_out(step, reached)
            return
        if asked and result.stepped:
            self.elastic.saw_gradients(self.engine)
        self.done, last = step, not self.elastic.left(step)
        self._publish()
        due, considers = last or self.saving.due(step), not last and (self.elastic.asked or self.resizes)
        stall = self._save(step) if due and not considers else None
        self._await(step, result, rate)
        self.pending.checkpoint_stall_seconds = stall
        every = self.run.train.eval_every
        if last or (every and step % every == 0):
            event = evaluate(self.now, self.data, step)
            self.outputs.event(event)
            self.pending.eval_loss, self.pending.eval_scores = event.loss, event.scores
            self._publish()
            self.meter.resume()
        elif stall is not None:
            self._publish()  # the checkpoint waits for it
        if considers:
            self._consider(save=due)

    def leave(self, step: int) -> dict[str, object]:
        """Save what there is after `step`, and write no report: the run is to go on elsewhere."""
        self._publish()
        self.saving.finish()
        if self.saving.saved_step != step:
            self._save(step)
        self._require_checkpoint(step)
        told = next(reason for reason in self.ranks.gather_objects(self._stop.reason) if reason)
        for note in self._refused_requests(step, "the run stops"):
            self.outputs.event(note)
        self.outputs.event(NoteEvent(step=step, event="stopped", fields={"reason": told},
                                     text=f"stopped by {told}; go on with --resume auto --run-dir {self.run.run_dir}"))
        return {"stopped_after": step}

    def finish(self) -> dict[str, object]:
        """Write a sample of text and the report, once the last checkpoint is on the disk; returns the summary."""
        run, world = self.run, self.world
        self._require_checkpoint(self.done)
        timelines = gather_timelines(self.ranks, self.meter.kept)
        text = self._sample() if run.train.sample_tokens and run.data.task == "lm" else None
        facts = self.ranks.gather_objects(rank_facts(self.engine, world.device) | self.elastic.facts() | (
            {"memory": self.now.measured.facts(self.saving.checkpoints)} if run.memory_report else {}))
        summary: dict[str, object] = {}
        if world.rank == 0:
            summary = summarise(recipe=self.recipe, mesh=run.mesh, history=self.history, ranks=facts,
                                boundaries=self.engine.boundaries, launcher=world.launcher,
                                transport=world.backend.name, device=world.device,
                                seconds=time.monotonic() - self.began, frozen=self.now.frozen)
            pictures = write_report(run.run_dir, summary, self.history, timelines, run.mesh, run.pipeline.policy)
            for note in self._refused_requests(self.done, "the run ends"):
                self.outputs.event(note)
            report = report_text(laid_out(run, self.now.frozen)[1], summary["memory"],
                                 lambda rank: run.mesh.coordinates(rank).pipe) if run.memory_report else None
            self.outputs.event(EndEvent(step=self.done, summary=summary, sample=text, pictures=pictures,
                                        report=report))
        return self.ranks.gather_objects(summary)[0]

    def _require_checkpoint(self, step: int) -> None:
        """The run ends after `step`: UnsavedError unless its checkpoint is there, OwnershipError unless its folders
        are still its own."""
        try:
            self.saving.require(step)
        finally:
            self._tell_of_checkpoints()
        if self.lease is not None:
            self.lease.verify()

    def close(self) -> None:
        """Let go of files and threads, however the run went."""
        written = self.now is None or self.saving.checkpoints.close()
        self.elastic.close()
        self.outputs.close()
        if self.lease is not None and written:  # else a thread is still at work there, and ends with this process
            self.lease.release()

    def part(self) -> None:
        """The run has ended well: give back what its ranks have in common."""
        if self.now is not None:
            self.now.close()

    def _end(self, summary: dict[str, object]) -> None:
        """The run has ended on the ranks of the mesh; the idle ones are told."""
        self.summary = summary
        if self.world.rank == 0:
            self.orders.send({"do": "end", "summary": plain(summary)}, first=self.run.mesh.size)

    # ------------------------------------------------------------------ from mesh to mesh

    def _refused_requests(self, step: int, why: str) -> list[NoteEvent]:
        """One answer to each request for another mesh that this run cannot look at any more."""
        requests = [] if self.resize_requests is None else self.resize_requests.take_all()
        return [NoteEvent(step=step, event="resize-refused",
                          text=f"the wish for data {one['data']} x pipe {one['pipe']} cannot be: {why}",
                          fields={name: one[name] for name in ("data", "pipe", "wish")}) for one in requests]

    def _consider(self, save: bool = False) -> None:
        """Freeze layers and go to another mesh, where the policy, the planner or a user's request says so. save: a
        checkpoint of this step is due; it has what was decided, since a run that goes on from it asks nobody again."""
        self._publish()
        wanted = None
        if self.resizes:
            self.resizes = False
            wanted = self.ranks.gather_objects(self.resize_requests and self.resize_requests.take())[0]
        change = self.elastic.decide(self.now, self.done, resize=wanted, busy=self.meter.busy,
                                     busy_steps=self.meter.busy_steps)
        if change is not None:
            self._change(change, save=save)
        elif save:
            self._save(self.done)
        if self.now is not None:
            self.meter.resume()

    def _change(self, change: Change, save: bool = False) -> None:
        """Have all ranks, the idle ones too, make the change, and save what has come of it."""
        self._publish()
        self.saving.finish()
        self._tell_of_checkpoints()
        order = {"do": "change", "change": change.document(), "step": self.done, "samples": self.samples,
                 "elastic": self.elastic.state(self.run, self.now.frozen), "guards": self.guards.state(),
                 "saved_step": self.saving.saved_step, "save": save, "stops": self.stops,
                 "bad_steps": self.engine.bad_steps and self.engine.bad_steps.state()}
        if self.world.rank == 0:
            self.orders.send(order, first=self.run.mesh.size)
        self._obey(order)

    def _obey(self, order: dict[str, object]) -> None:
        """Do what rank 0 has ordered; the ranks of the mesh have come to it by themselves."""
        if order["do"] == "end":
            self.summary = order["summary"]
            return
        began, old, before = time.monotonic_ns(), self.now, self.run.mesh
        held = None
        if old is not None:
            self.saving.checkpoints.close()
            held = take(old.engine)
            old.close()
        change = Change.read(order["change"])
        self.run, self.done, self.stops = change.applied(self._asked), order["step"], order["stops"]
        self.result = self.now = None
        if self.world.rank == 0:
            tell_mesh(self.world.store, self.run.mesh)
        self.now = formed(self.run, self.world, self.data, frozen=change.frozen, fresh=False)
        moved = hand_over(held, self.now and self.engine, self.world.backend,
                          timeout_seconds=self.run.comm.timeout_seconds)
        if self.now is None:
            self.elastic.rest()
            return
        self.now.train_data.offset = order["samples"] - self.done * self.run.batch.global_size
        self.saving.move(self.run, self.engine, offset=self.now.train_data.offset, saved_step=order["saved_step"])
        self.guards.move(self.engine, order["guards"])
        if order["bad_steps"]:
            self.engine.bad_steps.load(order["bad_steps"])
        self.meter.move(self.engine.timeline, self.ranks)
        seconds = (time.monotonic_ns() - began) * 1e-9
        self.elastic.load(order["elastic"])
        cache = self.elastic.enter(self.now, change, before, moved, seconds, self.done)
        self.outputs.event(TransitionEvent(step=self.done, old_mesh=before, mesh=self.run.mesh, reason=change.reason,
                                           old_frozen=change.old_frozen, frozen_layers=change.frozen, cache=cache,
                                           bytes_moved=moved, seconds=seconds, began_ns=began,
                                           global_size=self.run.batch.global_size,
                                           microbatch_size=self.run.batch.microbatch_size,
                                           stages=str(self.engine.stages), wish=change.wish))
        if order["save"]:
            self._save(self.done)

    # ------------------------------------------------------------------ parts of a step

    @contextmanager
    def _span(self, category: Category, label: str) -> Iterator[None]:
        """What this rank does inside is a span of its timeline."""
        started, timeline = time.monotonic_ns(), self.engine.timeline
        yield
        timeline.add(category, label, self.engine.steps, started)

    def _save(self, step: int) -> float | None:
        with self._span("checkpoint", "copy"):
            return self.saving.save(step, self.result, self.elastic.state(self.run, self.now.frozen))

    def _go_back(self) -> int | None:
        """Load the last checkpoint; its step, or None where there is none."""
        self.saving.finish()
        self._tell_of_checkpoints()
        loaded = self.saving.checkpoints.load()
        if loaded is None:
            return None
        self.elastic.went_back(loaded.step, told_by(loaded).elastic)
        self.saving.saved_step = None  # what a run that stops now saves has another place in the data
        for text in loaded.skipped:
            self.outputs.event(NoteEvent(step=loaded.step, event="checkpoint-skipped", text=text))
        return loaded.step

    def _leave_out(self, step: int, reached: int) -> None:
        """The run has gone back from `step` to an earlier one, and the data goes on where it is."""
        self.now.train_data.offset += (step - reached) * self.run.batch.global_size
        self.saving.offset = self.now.train_data.offset
        self.done = self.saving.told_step = reached
        self.meter.resume()

    def _publish_all(self, step: int, result: BatchResult, rate: float) -> None:
        """Tell the numbers of `step` now, and of the one before where that is still to be done."""
        self._publish()
        self._await(step, result, rate)
        self._publish()

    def _await(self, step: int, result: BatchResult, rate: float) -> None:
        """The numbers of `step` are on their way."""
        self.pending = self.meter.step(step, result, rate)
        self.pending.loss_scale = self.engine.loss_scale and replace(self.engine.loss_scale)
        if self.elastic.freezes or self.now.frozen or self.run.mesh != self._asked.mesh:
            self.pending.frozen_layers, self.pending.mesh = self.now.frozen, self.run.mesh

    def _publish(self) -> None:
        """Wait for the pending step's numbers and tell them. RanvierError when the loss is not a number any more."""
        if self.lease is not None:
            self.lease.check()
        with self._span("report", "numbers of the step before"):
            self._tell_of_checkpoints()
            if self.pending is not None:
                self._publish_pending()

    def _publish_pending(self) -> None:
        event = self.pending.event(self.now.work_share() * families.flops_per_sample(self.run) / self.data.weight,
                                   self._rank_flops_per_second * self.run.mesh.size)
        self.stops |= self.pending.stop_requested
        self.resizes |= self.pending.resize_requested
        self.elastic.saw(event)
        bad, self.pending = self.pending.result.bad, None
        if not event.stepped and bad is None:
            text = (f"a gradient overflowed: nothing was updated, and the loss scale is now {event.loss_scale:g}"
                    if event.tokens else "no valid target in the global batch: nothing was updated")
            self.outputs.event(NoteEvent(step=event.step, event="skipped", text=text))
        self.outputs.event(event)
        self.saving.told_step = event.step
        if event.stepped and not math.isfinite(event.loss):
            self.ranks.barrier()  # a rank that fails ends the others: not before rank 0 has written the step
            raise RanvierError("is not a finite number", where=f"loss of step {event.step}", value=event.loss,
                               remedy=f"Lower --train.learning-rate (it is {self.run.train.learning_rate:g}) or raise "
                                      "--train.warmup-steps; metrics.jsonl shows how it came about.")

    def _tell_of_checkpoints(self) -> None:
        for note in self.saving.tell():
            self.outputs.event(note)

    def _sample(self) -> str:
        """The prompt, and what the model makes of it."""
        run, tokenizer = self.run, self.data.tokenizer
        prompt = tokenizer.encode(run.train.prompt) if run.train.prompt else held_out_line(self.data)
        tokens = continue_tokens(self.engine, self.ranks, run.mesh, self.world.device, prompt, seed=run.seed,
                                 count=run.train.sample_tokens, longest=run.model.sequence, vocab=tokenizer.vocab,
                                 multiple=run.mesh.col if layout_of(
                                     run.tensor.scheme, run.tensor.sequence_sharding) == "sequence" else 1)
        return tokenizer.decode(tokens)

    # ------------------------------------------------------------------ parts of the start

    def _peak(self) -> float:
        """FLOPs a second that all ranks reach together when they do nothing but matrix products."""
        self.ranks.barrier()
        total = torch.tensor([matrix_product_rate(self.world.device, DTYPES[self.run.precision])], dtype=torch.float64)
        self.ranks.all_reduce(total).wait()
        return float(total)


def _outputs(run_dir: Path, history: History, trackers: Sequence[Tracker], stream: TextIO, begins: Start | None
             ) -> tuple[Trackers, list[NoteEvent]]:
    """Everybody who takes the run's events, and what was left out of its logs. begins: where a run goes on that has
    begun in this folder."""
    open_folder(run_dir)
    steps, events, after = Log(name="metrics.jsonl"), Log(name="events.jsonl"), 0
    if begins is not None:
        after, steps, events = begins.step, read_metrics(run_dir, begins.step), read_events(run_dir)
        with writing(run_dir / "summary.json"), suppress(FileNotFoundError):
            (run_dir / "summary.json").unlink()  # it is of a run that has ended, and this one goes on
        history.remember(steps.lines, [line for line in events.lines if line["step"] <= after])
    outputs = Trackers([history, MetricsFile(run_dir, steps.lines), EventsFile(run_dir, events.lines),
                        TensorBoard(run_dir, after), console(stream), *trackers])
    return outputs, [NoteEvent(step=after, event="log-damaged", text=log.text()) for log in (steps, events)
                     if log.problems]
