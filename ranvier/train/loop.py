"""A training run from its configuration to its folder of results: read this first.

    start -> (take_step, or on an idle rank the next command) x steps -> finish

Every rank runs this code; only rank 0 has trackers, so only rank 0 prints and writes. Nothing here waits for the latest
step: its numbers are read during the next one. A rank's state is its `Session`; ranks that the current mesh does not
use are idle, and execute commands of rank 0.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TextIO

from ranvier.arguments import check_arguments
from ranvier.config import read
from ranvier.config.resolve import ResolvedRun, resolve
from ranvier.config.run import Run
from ranvier.elastic.freezing import FreezePolicy
from ranvier.errors import TransportError
from ranvier.launch.stop import FINISHED_RUN, StopRequest
from ranvier.train.changes import begin_survival, execute, survive
from ranvier.train.determinism import deterministic_algorithms
from ranvier.train.ending import end_run, finish_run, suspend_run
from ranvier.train.events import NoteEvent, Tracker
from ranvier.train.joining import RunFacts
from ranvier.train.memory import explain_out_of_memory
from ranvier.train.session import Active, Idle, Session
from ranvier.train.start import join, start
from ranvier.train.step import take_step
from ranvier.world import World


def train(run: Run, recipe: str, world: World, *, trackers: Sequence[Tracker] = (), stream: TextIO | None = None,
          freezing: FreezePolicy | None = None, origins: Mapping[str, str] | None = None) -> dict[str, object]:
    """Train as `run` says and leave the results in its folder. Returns the contents of summary.json, on every rank.

    Args:
        recipe: the run's name in headings and in the default folder's name.
        trackers: receivers of the run's events in addition to files, TensorBoard and console; used only on rank 0.
        stream: where rank 0 prints; standard output by default.
        freezing: a freeze policy that replaces the one named by elastic.freeze; it is evaluated as often as
            elastic.every says.
        origins: the origin of each setting, for the report; by default this call.

    A run that is asked to stop (ranvier.launch.stop) saves a checkpoint, writes no summary.json, and returns
    {"stopped_after": its last step}; after Ctrl-C a process that is the whole run raises KeyboardInterrupt instead.
    Raises RanvierError if data, settings or folder do not allow the run, and if the loss becomes NaN.
    """
    check_arguments(train, locals(), but=("stream",))
    closed = resolve(run)
    if origins is None:
        origins = {name: "call" for name, value in read.flatten(run).items() if value != read.settings()[name].default}
    if world.rank == 0:
        world.store.delete_key(FINISHED_RUN)  # an earlier run of this program may have set it
    with _part_of(closed, world) as stop:
        stop.announces = world.rank == 0 and (world.is_whole_run or world.launcher != "local")
        summary = _run_to_end(start(closed, recipe, world, trackers, stream or sys.stdout, stop, freezing, origins))
        if world.rank == 0 and "stopped_after" not in summary:
            world.store.set(FINISHED_RUN, "")
    if world.is_whole_run and stop.interrupted and "stopped_after" in summary:
        raise KeyboardInterrupt(f"stopped after step {summary['stopped_after']}, which is saved")
    return summary


def train_as_newcomer(facts: RunFacts, world: World) -> dict[str, object]:
    """Take part in a run in progress, which `world` has joined, until it ends. Returns what `train` returns."""
    with _part_of(facts.run, world) as stop:
        return _run_to_end(join(facts, world, stop))


@contextmanager
def _part_of(run: ResolvedRun, world: World) -> Iterator[StopRequest]:
    """Context of one rank's part in `run`: it can be asked to stop, and explains an out-of-memory error."""
    try:
        with StopRequest(signals=()) as stop, deterministic_algorithms(run.deterministic):
            yield stop
    except Exception as error:
        explanation = explain_out_of_memory(error, run, where=f"rank {world.rank}")
        if explanation is None:
            raise
        raise explanation from error


def _run_to_end(session: Session) -> dict[str, object]:
    try:
        session.stop.install()  # before this, there is nothing to save, and signals end the process immediately
        begin_survival(session)
        while session.summary is None:
            try:
                _advance(session)
            except TransportError as error:
                survive(session, error)
    except Exception as error:  # for the event files; the console gets it from the failure report
        session.outputs.event(NoteEvent(step=session.done, event="failed", text=str(error), verbose=True,
                                        fields={"code": getattr(error, "code", type(error).__name__)}))
        raise
    finally:
        session.close()
    if isinstance(session.place, Active):  # shared communicators are freed once all ranks have ended without errors
        session.place.runtime.close()
    return session.summary


def _advance(session: Session) -> None:
    """Take one step, or on an idle rank execute the next command. May end the run."""
    if isinstance(session.place, Idle):
        execute(session, session.members.commands.wait(session.run.comm.timeout_seconds))
    elif session.steps_left:
        take_step(session, session.done + 1)
    if isinstance(session.place, Idle):  # a rank that is no longer idle continues: the others may stop after the change
        return
    if session.stops and session.steps_left:
        end_run(session, suspend_run(session))
    elif not session.steps_left:
        end_run(session, finish_run(session))
