"""A training run from its configuration to its folder of results: read this first.

    prepare the text -> build the engine -> (learning rate -> train_batch -> metrics) x steps -> report

Every rank runs all of it; only rank 0 has trackers, so only rank 0 prints and writes. Nothing here waits for the step
that was started last: its numbers are read while the next one is under way.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TextIO

import torch

from ranvier import resolve
from ranvier.check import tensor_mesh_facts
from ranvier.data.loader import Loader
from ranvier.data.prepare import prepare
from ranvier.data.sampler import Sampler
from ranvier.data.task import Prepared
from ranvier.errors import DataError, RanvierError
from ranvier.models import families
from ranvier.optim.learning_rate import learning_rate
from ranvier.optim.optimizer import resolve_bucket_size
from ranvier.pipeline.engine import Engine
from ranvier.pipeline.microbatch import Microbatch
from ranvier.pipeline.result import BatchResult
from ranvier.precision import DTYPES, is_half
from ranvier.run import Run
from ranvier.stop import StopRequest
from ranvier.tensor.activations import layout_of
from ranvier.train.console import console
from ranvier.train.events import EndEvent, EvalEvent, NoteEvent, StartEvent, Tracker, Trackers
from ranvier.train.files import EventsFile, MetricsFile, open_folder, steps_until, writing
from ranvier.train.guards import Guards
from ranvier.train.memory import Measured, check_fits, explained, report_text
from ranvier.train.metrics import Meter, PendingStep
from ranvier.train.peak import matrix_product_rate
from ranvier.train.report import History, rank_facts, summarise, write_report
from ranvier.train.sample import continue_tokens
from ranvier.train.saving import Saving, Start
from ranvier.train.tensorboard import TensorBoard
from ranvier.train.timeline import gather_timelines
from ranvier.world import World

PROMPT_TOKENS = 24
"""Tokens of held-out text that the sample continues, at most, where the run has no prompt."""


def train(run: Run, recipe: str, world: World, *, trackers: Sequence[Tracker] = (),
          stream: TextIO | None = None) -> dict[str, object]:
    """Train as `run` says and leave the results in its folder. Returns what summary.json says, on every rank.

    Args:
        recipe: the run's name in headings and in the default folder's name.
        trackers: more takers of the run's events, beside files, TensorBoard and console; used on rank 0 only.
        stream: where rank 0 prints; standard output by default.

    A run that is told to stop (ranvier.stop) saves a checkpoint, leaves no summary.json, and returns {"stopped_after":
    its last step}. Raises RanvierError where text, settings or folder do not allow the run, and when the loss stops
    being a number.
    """
    try:
        with StopRequest() as stop:
            training = Training(run, recipe, world, trackers, stream or sys.stdout, stop)
            try:
                training.start()
                step = training.done
                while step < run.train.steps:
                    step = training.step(step + 1)
                    if training.stops and step < run.train.steps:
                        summary = training.leave(step)
                        break
                else:
                    summary = training.finish()
            finally:
                training.saving.checkpoints.close()
                training.outputs.close()
        training.engine.close()
        return summary
    except Exception as error:
        told = explained(error, run, where=f"rank {world.rank}")
        if told is None:
            raise
        raise told from error


class Training:
    """One run on one rank. Every method is collective."""

    def __init__(self, run: Run, recipe: str, world: World, trackers: Sequence[Tracker], stream: TextIO,
                 stop: StopRequest) -> None:
        self.recipe, self.world, self._stop = recipe, world, stop
        self.stops = False
        """Whether a rank was told to stop; all ranks know it after the same step."""
        self.began = time.monotonic()
        self.outputs = Trackers()
        self.ranks = world.backend.group("train", [tuple(range(world.size))])
        self.data = _prepare(run, world, stream)
        self.run = self._agree(run)
        world.mesh = self.run.mesh
        self.run, self.predicted = check_fits(self.run, world)
        self.ranks.barrier()  # not before every rank has looked at what is free
        self.engine = _build(self.run, world, self.data.weight)
        self.measured = Measured(self.engine, world.device, wanted=run.memory_report)
        self.train_data, self.eval_data = self._loaders()
        self.saving = Saving(self.run, recipe, self.engine, self.data.fingerprint)
        self.begins = self.saving.start()
        self.done = self.begins.step
        """Steps that were taken before this run went on."""
        self.train_data.offset = self.begins.offset
        self.guards = Guards(self.run.guard, self.engine, tell=lambda event: self.outputs.event(event),
                             barrier=self.ranks.barrier, go_back=self._go_back)
        self.history = History()
        if world.rank == 0:
            self.outputs = _outputs(self.run.run_dir, self.history, trackers, stream,
                                    begins=self.begins if self.begins.continues else None)

    def start(self) -> None:
        """Write what the run has come to, and start the clock."""
        self.run = resolved(self.run, self.engine, self.world, self.saving.origin)
        if self.world.rank == 0:
            path = self.run.run_dir / "run.toml"
            with writing(path):
                resolve.write(self.run, path)
            path = self.run.run_dir / "tokenizer.json"
            with writing(path):
                path.write_text(self.data.tokenizer.text(), encoding="utf-8")
        self.outputs.event(StartEvent(recipe=self.recipe, run_dir=self.run.run_dir, mesh=self.run.mesh,
                                      steps=self.run.train.steps, settings=self._settings(),
                                      stages=str(self.engine.stages)))
        for note in self.begins.notes:
            self.outputs.event(note)
        self.peak_flops_per_second = self._peak()
        self.pending: PendingStep | None = None
        self.meter = Meter(self.engine.timeline, self.ranks, self._stop)

    def step(self, step: int) -> int:
        """One optimizer step; publishes the numbers of the step before. Returns the step that the run is at now: this
        one, or that of the checkpoint that the guard has gone back to."""
        config = self.run.train
        rate = learning_rate(config, step)
        self.engine.learning_rate = rate
        with self.measured.step():
            batch = self.train_data.microbatches(step - 1)
            result = self.result = self.engine.train_batch(batch)
        reached = self.guards.after_step(step, result, batch, partial(self._publish_all, step, result, rate))
        if reached != step:
            self._leave_out(step - reached)
            self.saving.told_step = reached
            return reached
        stall = self.saving.save(step, result) if self.saving.due(step) else None
        self._publish()
        self.pending = self.meter.step(step, result, rate)
        self.pending.checkpoint_stall_seconds = stall
        self.pending.loss_scale = self.engine.loss_scale and replace(self.engine.loss_scale)
        if step == config.steps or (config.eval_every and step % config.eval_every == 0):
            self.pending.eval_loss = self._evaluate(step)
            self._publish()
            self.meter.resume()
        elif stall is not None:
            self._publish()  # the checkpoint waits for it
        return step

    def leave(self, step: int) -> dict[str, object]:
        """Save what there is after `step`, and write no report: the run is to go on elsewhere."""
        if self.saving.saved_step != step:
            self.saving.save(step, self.result)
        self._publish()
        missing = self.saving.finish()
        self._tell_of_checkpoints()
        if missing is not None:
            raise missing
        told = next(reason for reason in self.ranks.gather_objects(self._stop.reason) if reason)
        self.outputs.event(NoteEvent(step=step, event="stopped", fields={"reason": told},
                                     text=f"stopped by {told}; go on with --resume auto --run-dir {self.run.run_dir}"))
        return {"stopped_after": step}

    def finish(self) -> dict[str, object]:
        """Write a sample of text and the report; returns the summary."""
        run, world = self.run, self.world
        missing = self.saving.finish()
        self._tell_of_checkpoints()
        timelines = gather_timelines(self.ranks, self.meter.kept)
        text = self._sample() if run.train.sample_tokens else None
        facts = self.ranks.gather_objects(rank_facts(self.engine, world.device) | (
            {"memory": self.measured.facts(self.saving.checkpoints)} if run.memory_report else {}))
        summary: dict[str, object] = {}
        if world.rank == 0:
            summary = summarise(recipe=self.recipe, mesh=run.mesh, history=self.history, ranks=facts,
                                boundaries=self.engine.boundaries, launcher=world.launcher,
                                transport=world.backend.name, device=world.device,
                                seconds=time.monotonic() - self.began)
            pictures = write_report(run.run_dir, summary, self.history, timelines, run.mesh, run.pipeline.policy)
            report = report_text(self.predicted, summary["memory"],
                                 lambda rank: run.mesh.coordinates(rank).pipe) if run.memory_report else None
            self.outputs.event(EndEvent(step=run.train.steps, summary=summary, sample=text, pictures=pictures,
                                        report=report))
        summary = self.ranks.gather_objects(summary)[0]
        if missing is not None:
            raise missing
        return summary

    # ------------------------------------------------------------------ parts of a step

    def _go_back(self) -> int | None:
        """Load the last checkpoint; its step, or None where there is none."""
        self.saving.finish()
        self._tell_of_checkpoints()
        loaded = self.saving.checkpoints.load()
        if loaded is None:
            return None
        self.saving.saved_step = None  # what a run that stops now saves has another place in the data
        for text in loaded.skipped:
            self.outputs.event(NoteEvent(step=loaded.step, event="checkpoint-skipped", text=text))
        return loaded.step

    def _leave_out(self, steps: int) -> None:
        """The run has gone back by so many steps, and the data goes on where it is."""
        self.train_data.offset += steps * self.run.batch.global_size
        self.saving.offset = self.train_data.offset
        self.meter.resume()

    def _publish_all(self, step: int, result: BatchResult, rate: float) -> None:
        """Tell the numbers of `step` now, and of the one before where that is still to be done."""
        self._publish()
        self.pending = self.meter.step(step, result, rate)
        self.pending.loss_scale = self.engine.loss_scale and replace(self.engine.loss_scale)
        self._publish()

    def _publish(self) -> None:
        """Wait for the pending step's numbers and tell them. RanvierError when the loss is not a number any more."""
        self._tell_of_checkpoints()
        if self.pending is None:
            return
        flops_per_token = families.flops_per_sample(self.run) / self.data.weight
        event = self.pending.event(flops_per_token, self.peak_flops_per_second)
        self.stops |= self.pending.stop_requested
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

    def _evaluate(self, step: int) -> float:
        """Held-out loss, the same samples each time."""
        began = time.monotonic()
        result = self.engine.evaluate(self.eval_data.microbatches(0))
        loss = result.loss
        self.outputs.event(EvalEvent(step=step, loss=loss, tokens=result.weight, seconds=time.monotonic() - began))
        return loss

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

    def _agree(self, run: Run) -> Run:
        """The run with its folder, as rank 0 names it, and the tensor mesh as it lies best on the nodes. DataError when
        the ranks have different text."""
        folder = run.run_dir or resolve.default_folder(self.recipe)
        everyone = self.ranks.gather_objects({"folder": str(folder), "text": self.data.fingerprint,
                                              "local_size": self.world.local_size})
        for rank, other in enumerate(everyone):
            if other["text"] != everyone[0]["text"]:
                raise DataError(f"differs from that of rank 0 ({everyone[0]['text']})", where=f"text of rank {rank}",
                                value=other["text"], remedy="Give all machines the same files and versions, or one "
                                                            "shared --data.cache-dir.")
        nodes = {other["local_size"] for other in everyone}
        facts = tensor_mesh_facts(run, nodes.pop() if len(nodes) == 1 else None)
        return replace(run, run_dir=Path(everyone[0]["folder"]),
                       mesh=replace(run.mesh, tile=run.mesh.tile or (facts and facts.tile)))

    def _loaders(self) -> tuple[Loader, Loader]:
        """Training samples in the seed's order, and held-out ones in their own."""
        run, engine = self.run, self.engine
        num_train, num_eval = len(self.data.train), len(self.data.eval)
        share = {"microbatch_size": run.batch.microbatch_size,
                 "replica": engine.coordinates.data, "num_replicas": run.mesh.data, "row": engine.coordinates.row,
                 "num_rows": run.mesh.row, "device": self.world.device,
                 "needs_inputs": engine.is_first_stage, "needs_targets": engine.is_last_stage}
        return (Loader(self.data.train, Sampler(num_train, run.seed), global_size=run.batch.global_size, **share),
                Loader(self.data.eval, Sampler(num_eval, None), global_size=min(run.train.eval_sequences, num_eval),
                       **share))

    def _peak(self) -> float:
        """FLOPs a second that all ranks reach together when they do nothing but matrix products."""
        self.ranks.barrier()
        total = torch.tensor([matrix_product_rate(self.world.device, DTYPES[self.run.precision])], dtype=torch.float64)
        self.ranks.all_reduce(total).wait()
        return float(total)

    def _settings(self) -> dict[str, str]:
        run, model, world = self.run, self.run.model, self.world
        num_parameters = sum(parameter.numel for parameter in self.engine.layout.parameters
                             if parameter.owner == parameter.name)
        return {
            "model": f"{model.num_layers} layers, hidden {model.hidden}, {model.heads} heads, "
                     f"vocabulary {model.vocab}, sequence {model.sequence}: {num_parameters:,} parameters in "
                     f"{run.precision}",
            "data": self.data.about,
            "batch": f"{run.batch.global_size} sequences in microbatches of {run.batch.microbatch_size}",
            "pipeline": f"{run.pipeline.policy}, at most {self.engine.in_flight} microbatches in flight"
                        + ("" if run.memory.checkpoint == "none" else f", checkpoints: {run.memory.checkpoint}"),
            **({"tensor mesh": tensor_text(run)} if run.mesh.stage_size > 1 else {}),
            "optimizer": optimizer_text(run),
            "ranks": f"{world.size} over {world.backend.name} on {world.device.type}, threads for each: "
                     f"{torch.get_num_threads()}",
            "folder": str(run.run_dir)}


def _prepare(run: Run, world: World, stream: TextIO) -> Prepared:
    """Tokenizer and token files; whoever comes first on a machine makes them. Rank 0 tells what takes so long."""
    return prepare(run, (lambda line: print(line, file=stream, flush=True)) if world.rank == 0 else (lambda line: None))


def _build(run: Run, world: World, weight: float) -> Engine:
    """weight: of one sample in the loss."""
    size = run.batch.microbatch_size // run.mesh.row
    inputs, targets = families.sample_of(run, size)
    sample = Microbatch(inputs=inputs, targets=targets, samples=torch.arange(size))
    return Engine(families.model_of(run), world, mesh=run.mesh, optim=run.optim, checkpoint=run.memory.checkpoint,
                  policy=run.pipeline.policy,
                  in_flight=run.pipeline.in_flight, boundaries=run.pipeline.boundaries,
                  partition=run.pipeline.partition, defer_bytes=run.pipeline.defer_bytes, seed=run.seed,
                  dtype=DTYPES[run.precision], nominal_weight=run.batch.global_size * weight,
                  timeout_seconds=run.comm.timeout_seconds, sample=sample, tensor=run.tensor, guard=run.guard)


def _outputs(run_dir: Path, history: History, trackers: Sequence[Tracker], stream: TextIO,
             begins: Start | None) -> Trackers:
    """Everybody who takes the run's events. begins: where a run goes on that has begun in this folder."""
    open_folder(run_dir)
    before, after = [], 0
    if begins is not None:
        after, before = begins.step, steps_until(run_dir, begins.step)
        (run_dir / "summary.json").unlink(missing_ok=True)  # it is of a run that has ended, and this one goes on
    history.remember(before)
    return Trackers([history, MetricsFile(run_dir, before), EventsFile(run_dir, continues=begins is not None),
                     TensorBoard(run_dir, after), console(stream), *trackers])


def resolved(run: Run, engine: Engine, world: World, origin: str = "none") -> Run:
    """`run` with every `auto` replaced by what it has come to on these ranks. origin: with which checkpoint the run of
    this folder began, or none."""
    transport = {} if world.backend.name == "in-process" else {"transport": world.backend.name}
    optim = replace(run.optim, offload=engine.flat_optimizer.offload,
                    bucket_size=resolve_bucket_size(run.optim, world.device.type))
    if is_half(DTYPES[run.precision]) and run.mesh.data > 1:
        optim = replace(optim, reduce_dtype="half" if optim.reduce_dtype == "auto" else optim.reduce_dtype)
    resume = origin if run.resume == "auto" else run.resume  # who repeats the run from its file begins as it did
    return replace(run, resume=resume, pipeline=replace(run.pipeline, boundaries=engine.boundaries or None,
                                         in_flight=engine.in_flight), optim=optim,
                   comm=replace(run.comm, **transport),
                   launch=replace(run.launch, threads=torch.get_num_threads(), device=world.device.type))


def tensor_text(run: Run) -> str:
    """The split of blocks in words."""
    tensor = run.tensor
    more = [text for said, text in ((tensor.sequence_sharding, "sequence sharded"),
                                    (tensor.keep_weights, "gathered weights kept")) if said]
    return ", ".join([f"{run.mesh.row} x {run.mesh.col}", tensor.scheme, *more])


def optimizer_text(run: Run) -> str:
    """The optimizer in words, its settings resolved."""
    optim = run.optim
    where = {"none": "states on the device", "host": "states and updates on the host",
             "stream": f"states streamed from the host, {optim.buckets_in_flight} buckets at once"}[optim.offload]
    shared = f", sharded over {run.mesh.data} replicas" if optim.shard and run.mesh.data > 1 else ""
    return f"{optim.algorithm} in buckets of {optim.bucket_size:,}, {where}{shared}"


def held_out_line(data: Prepared) -> list[int]:
    """The start of the first held-out line of some length, as tokens."""
    text = data.tokenizer.decode(data.eval.tokens.head(50 * PROMPT_TOKENS))
    line = next((line for line in text.splitlines() if len(line.split()) >= 4), text)
    return data.tokenizer.encode(line)[:PROMPT_TOKENS] or data.eval.tokens.head(1)
