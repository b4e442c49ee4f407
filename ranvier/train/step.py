"""A training step, from its learning rate to the decisions that follow from its numbers."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial

from ranvier.pipeline.result import BatchResult
from ranvier.train.best import LOSS
from ranvier.train.changes import change_if_needed
from ranvier.train.evaluation import evaluate
from ranvier.train.events import NoteEvent
from ranvier.train.metrics import PendingStep
from ranvier.train.saving import read_metadata
from ranvier.train.session import Session


def take_step(session: Session, step: int) -> None:
    """Take optimizer step number `step`. Afterwards the run is at this step, or at that of the checkpoint to which the
    guard has rolled back, and perhaps on another mesh. Nothing waits for the numbers of this step: those of the
    previous step are reported."""
    active, progress, elastic, survival = session.active, session.progress, session.elastic, session.survival
    runtime, engine, data = active.runtime, active.engine, active.runtime.train_data

    # 1. The step's learning rate and samples, and whether the freeze policy will need the layers' gradients.
    after, epoch = session.samples + session.run.samples_of(1), session.facts.data.epoch_samples
    if after // epoch > session.samples // epoch:
        elastic.caching.check_weights()
    rate = engine.learning_rate = progress.learning_rate(step)
    asked = elastic.evaluates_policy_after(step, session.samples, after, runtime.frozen)
    engine.watch_layers(asked)

    # 2. Forward, backward, update. The samples of the next step are prepared while the device may still be computing.
    with runtime.measured.step():
        data.microbatch_size = elastic.microbatch_size(runtime, step)
        with session.span("data", "samples"):
            batch = data.microbatches(step - 1)
            elastic.caching.prefetch(data, step - 1, more=progress.steps_left(step) > 0)
        result = active.result = engine.train_batch(batch)
        if progress.steps_left(step) > 0:
            with session.span("data", "samples of the next step"):
                data.prefetch(step)

    # 3. All ranks know of a bad step by now: the run ends, or rolls back, and the data continues after this batch.
    reached = active.guards.after_step(step, result, batch, publish=partial(_publish_all, session, step, result, rate),
                                       rollback=partial(_roll_back, session))
    if reached != step:
        data.offset += session.run.samples_of(step - reached)
        active.saving.offset = data.offset
        session.done = active.saving.published_step = reached
        active.meter.resume()
        session.keep_state()
        return
    if asked and result.stepped:
        elastic.record_gradients(engine)
    session.done = step

    # 4. The numbers of the previous step have arrived. After a few steps their times may change the limits.
    session.publish()
    if (note := active.limits.after_step(runtime, step, active.meter.busy, active.meter.kept_steps)) is not None:
        session.keep_limits(note)

    # 5. The checkpoint is begun before the sum of this step's numbers, so that writing overlaps with the sum; but not
    #    before an evaluation or a decision that the checkpoint must contain.
    evaluates, saves = progress.evaluates(step), progress.is_save_due(step)
    considers = bool(progress.steps_left(step)) and (elastic.state.needs_decision or session.resizes)
    is_late = evaluates and (session.best is not None or elastic.controller.freezes)
    stall = session.save() if saves and not considers and not is_late else None
    if survival is not None:
        survival.steps.keep(step, runtime)
    pending = _await(session, step, result, rate)
    pending.checkpoint_stall_seconds = stall

    # 6. The held-out loss, after which training may end, or a checkpoint of the best model so far may be due.
    if evaluates:
        saves |= _evaluate(session, step, pending)
        considers &= session.steps_left > 0
        if saves and is_late and not considers:
            session.save()
        session.publish()
        active.meter.resume()  # an evaluation is not a part of a step
    elif stall is not None or survival is not None:
        session.publish()  # the checkpoint and the survival of lost ranks wait for it: a reported step is finished
    if survival is not None:
        survival.after_step(runtime, session.state, saves=saves and considers)

    # 7. Freezing and a change of mesh, which start from the state after this step.
    if considers:
        change_if_needed(session, save=saves)


def _await(session: Session, step: int, result: BatchResult, rate: float) -> PendingStep:
    """Start the sum of the numbers of `step`; returns the pending step."""
    active = session.active
    active.pending = pending = active.meter.step(step, result, rate)
    pending.loss_scale = active.engine.loss_scale and replace(active.engine.loss_scale)
    frozen, mesh = active.runtime.frozen, session.run.mesh
    if session.elastic.controller.freezes or frozen or mesh != session.facts.run.mesh:
        pending.frozen_layers, pending.mesh = len(frozen), mesh
    return pending


def _publish_all(session: Session, step: int, result: BatchResult, rate: float) -> None:
    """Report the numbers of `step` now, and those of the previous step if they are still pending."""
    session.publish()
    _await(session, step, result, rate)
    session.publish()


def _roll_back(session: Session) -> int | None:
    """Load the last checkpoint; returns its step, or None if there is no checkpoint."""
    active = session.active
    active.saving.finish()
    session.report_checkpoints()
    loaded = active.saving.checkpoints.load()
    if loaded is None:
        return None
    for name, parameter in active.engine.named_parameters().items():  # some may have been frozen then
        parameter.requires_grad_(active.engine.layout[name].trainable)
    metadata = read_metadata(loaded)
    session.progress = session.progress.rolled_back(loaded.step, metadata.elastic)
    if session.best is not None and metadata.best is not None:
        session.best.load(asdict(metadata.best))
    active.saving.saved_step = None  # a checkpoint saved now would have another position in the data
    for text in loaded.skipped:
        session.outputs.event(NoteEvent(step=loaded.step, event="checkpoint-skipped", text=text))
    return loaded.step


def _evaluate(session: Session, step: int, pending: PendingStep) -> bool:
    """Evaluate the model after `step`, whose numbers are still pending; returns whether a checkpoint is due: of the
    best model so far, or of the last one if training stops early."""
    runtime, best, metrics = session.active.runtime, session.best, dict[str, float]()
    for event in evaluate(runtime, session.facts.data, step):
        session.outputs.event(event)
        metrics |= event.metrics()
    pending.eval_loss = metrics.pop("eval_loss")
    pending.eval_scores = metrics
    if best is None:
        return False
    is_best = best.add(step, runtime.ranks.gather_objects(metrics | {LOSS: pending.eval_loss})[0])
    if best.should_stop and session.progress.steps_left(step):
        session.outputs.event(NoteEvent(step=step, event="early-stopping", text=best.reason, fields=best.state()))
    return best.should_stop or (is_best and session.run.checkpoint.best is not None)
