"""The end of a run on the ranks of its mesh: at its last step, or earlier if a rank was asked to stop."""

from __future__ import annotations

import shlex
import time
from typing import Any

from ranvier.config.task_form import form_of
from ranvier.cost.device_overhead import with_overhead
from ranvier.pictures.timelines import gather_timelines
from ranvier.planner.count import laid_out
from ranvier.system.memory_tracker import peak_memory_bytes
from ranvier.train.commands import EndRun
from ranvier.train.evaluation import expectation, frequency_entropy, sample_text
from ranvier.train.events import EndEvent, NoteEvent
from ranvier.train.logs import to_json_values
from ranvier.train.memory import predicted_peaks, report_text
from ranvier.train.report import summarise, write_report
from ranvier.train.session import Session


def end_run(session: Session, summary: dict[str, object]) -> None:
    """End the run with `summary`, and send it to the idle ranks."""
    session.summary = summary
    session.members.commands.send(EndRun(summary=to_json_values(summary)), first=session.run.mesh.size)


def suspend_run(session: Session) -> dict[str, object]:
    """Save the state after the last step, and write no report: the run is to be resumed. Returns its summary."""
    session.publish()
    saving, step = session.active.saving, session.done
    saving.finish()
    if saving.saved_step != step:
        session.save()
    _require_checkpoint(session)
    reasons = session.active.runtime.ranks.gather_objects(session.stop.reason)
    reason = next(reason for reason in reasons if reason)
    for note in session.requests.refuse_all(step, "the run stops"):
        session.outputs.event(note)
    session.outputs.event(NoteEvent(
        step=step, event="stopped", fields={"reason": reason},
        text=f"stopped by {reason}; resume with: ranvier train {shlex.quote(str(session.run_dir / 'run.toml'))} "
             f"--resume auto --run-dir {shlex.quote(str(session.run_dir))}"
             + ("" if session.world.launcher == "local" else f" (under {session.world.launcher}, as before)")))
    return {"stopped_after": step}


def finish_run(session: Session) -> dict[str, object]:
    """Write a sample of text and the report, once the last checkpoint is on the disk; returns the summary."""
    run, world, active, facts, best = session.run, session.world, session.active, session.facts, session.best
    engine, runtime, ranks = active.engine, active.runtime, active.runtime.ranks
    _require_checkpoint(session)

    # 1. What every rank contributes: spans, a sample of text, memory.
    timelines = gather_timelines(ranks, active.meter.kept_steps)
    text = (sample_text(engine, ranks, run, facts.data)
            if run.train.sample_tokens and form_of(run.data).writes_text else None)
    copies = None if session.survival is None else session.survival.steps.host_bytes
    of_ranks = ranks.gather_objects(
        {"peak_memory_bytes": peak_memory_bytes(world.device), **engine.counters()} | session.elastic.facts() | (
            {"memory": runtime.measured.facts(active.saving.checkpoints, copies)} if run.memory_report else {}))

    # 2. Rank 0 writes the summary, pictures and page, refuses requests that came too late, and reports the end.
    summary: dict[str, Any] = {}
    if session.page is not None:
        history, page = session.history, session.page
        summary = summarise(recipe=facts.recipe, mesh=run.mesh, history=history, ranks=of_ranks,
                            boundaries=engine.boundaries, launcher=world.launcher, transport=world.backend.name,
                            device=world.device, seconds=time.monotonic() - session.began,
                            frozen=len(runtime.frozen))
        summary |= active.limits.summary(history.column("bubble_fraction"))
        summary |= {} if best is None else best.summary()
        if run.checkpoint.best is not None:
            summary["best_checkpoint"] = active.saving.marked_best()
        summary |= facts.peak.facts()
        pictures = write_report(session.run_dir, summary, history, timelines, run.mesh, run.pipeline.policy)
        for refused in session.requests.refuse_all(session.done, "the run ends"):
            session.outputs.event(refused)
        predicted = laid_out(run, runtime.frozen.prefix, runtime.frozen.above)[1]
        if world.device.type == "cuda":
            predicted = tuple(with_overhead(entry, context=True) for entry in predicted)
        on_cpu = world.device.type == "cpu"
        page.finish(summary, timelines, run.mesh, predicted, predicted_peaks(
            [*session.past, (run, runtime.frozen)], run.mesh.size, on_cpu=on_cpu), on_cpu=on_cpu)
        report = report_text(predicted, summary["memory"],
                             lambda rank: run.mesh.coordinates(rank).pipeline_rank) if run.memory_report else None
        note = None if text is None else expectation(summary["eval_loss"], frequency_entropy(facts.data.train))
        session.outputs.event(EndEvent(step=session.done, summary=summary, sample=text,
                                       pictures=[page.path, *pictures], sample_note=note, report=report))
    gathered: list[dict[str, object]] = ranks.gather_objects(summary)
    return gathered[0]


def _require_checkpoint(session: Session) -> None:
    """Check the run's files at its end: UnsavedError unless the checkpoint after the last step exists, OwnershipError
    unless the folders still belong to this run."""
    try:
        session.active.saving.require(session.done)
    finally:
        session.report_checkpoints()
    if session.lease is not None:
        session.lease.verify()
    if session.survival is not None and session.world.rank == 0:
        session.survival.lost_ranks.end()
