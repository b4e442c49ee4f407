"""Causes that take a run from one mesh to another: its policy and planner, requests, joining ranks and lost ranks.

Each change ends in `Session.advance` on every rank of the world, with the same `ChangeMesh`: ranks of the mesh decide
it together, idle ranks receive it from rank 0, and survivors of a loss agree on it.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from typing import assert_never

from ranvier.elastic.change import Change, MeshRequest
from ranvier.errors import TransportError
from ranvier.launch.joining import Call
from ranvier.train.commands import ChangeMesh, Command, EndRun
from ranvier.train.joining import wanted_mesh
from ranvier.train.resize import join_note
from ranvier.train.session import Active, Idle, Session
from ranvier.train.survival import Survival, lost_note

_LAST_WRITE_SECONDS = 1.0
"""Longest wait for a checkpoint that is being written when a rank is lost: that rank may have written its part."""


def change_if_needed(session: Session, save: bool = False) -> None:
    """Freeze layers or move to another mesh if the policy, the planner or a request says so. save: a checkpoint of this
    step is due; it contains the decision, since a run that resumes from it does not decide again."""
    session.publish()
    active, wanted = session.active, None
    if session.resizes:
        session.resizes = False
        wanted = session.requests.take(active.runtime.ranks)
        if wanted is not None and wanted.ranks is not None:
            wanted = _admit(session, wanted)
    change = session.elastic.decide(active.runtime, session.done, session.progress, resize=wanted,
                                    busy=active.meter.busy, busy_steps=active.meter.busy_steps)
    if change is not None:
        change_mesh(session, change, save)
    elif save:
        session.save()
    session.requests.current = None
    if isinstance(session.place, Active):
        session.place.meter.resume()


def change_mesh(session: Session, change: Change, save: bool = False) -> None:
    """Make the change on all ranks, including idle ones, and save the resulting state."""
    session.publish()
    active = session.active
    active.saving.finish()
    session.report_checkpoints()
    command = ChangeMesh(change=change, state=session.state(), save=save,
                         block_times=active.limits.block_times(active.runtime, active.meter.busy))
    session.members.commands.send(command, first=session.run.mesh.size)
    session.advance(command)


def execute(session: Session, command: Command) -> None:
    """Execute a command of rank 0 on an idle rank."""
    match command:
        case ChangeMesh():
            session.advance(command)
        case Call():
            session.take_ranks(command)
        case EndRun(summary=summary):
            session.summary = dict(summary)
        case _:
            assert_never(command)


def _admit(session: Session, request: MeshRequest) -> MeshRequest | None:
    """Admit the ranks of a request as idle ranks, unless they joined before a loss interrupted the run. Returns the
    request for a mesh that uses them; None if they are refused."""
    members, ranks = session.members, session.active.runtime.ranks
    if not request.has_joined:
        call, problem = ranks.gather_objects(
            members.call(request, session.run.comm.timeout_seconds) if session.world.rank == 0 else None)[0]
        if problem is None:
            members.commands.send(command := Call(**call), first=session.run.mesh.size)
            problem = session.take_ranks(command)
        session.outputs.event(join_note(request, session.done, session.world.size, problem))
        session.requests.current = replace(request, has_joined=True) if problem is None else None
        if problem is not None:
            return None
    return wanted_mesh(request, session.run.mesh, session.world.size)


# ---------------------------------------------------------------------- ranks that are lost


def begin_survival(session: Session) -> None:
    """Make the run survive lost ranks from now on, if it is set to. Collective over the world."""
    run, world = session.facts.run, session.world
    if not run.launch.survive_losses or world.torch_store is None or session.summary is not None:
        return

    def give_up_waiting() -> None:  # called on any thread
        if session.place.saving is not None:
            session.place.saving.checkpoints.give_up()

    session.survival = Survival(run, world, on_lost_rank=give_up_waiting)
    session.keep_state()
    if isinstance(session.place, Active):
        session.place.runtime.ranks.barrier()
    session.survival.lost_ranks.begin()


def survive(session: Session, error: TransportError) -> None:
    """Continue from the last finished step without the lost ranks. Raises `error` if no rank is lost or the run cannot
    continue. Collective over the survivors."""
    survival, elastic = session.survival, session.elastic
    if survival is None:
        raise error
    while True:
        # 1. An engine that has lost a rank cannot be used any more.
        if isinstance(old := session.place, Active):
            session.place = Idle(saving=old.saving)
            old.saving.checkpoints.close(_LAST_WRITE_SECONDS)
            old.engine.abandon()
        # 2. Survivors agree on a mesh, and on the step whose state they all have.
        agreement = survival.agree(error, partial(
            elastic.controller.change_to, schedule=elastic.state.schedule))
        try:
            survival.lost_ranks.connect(agreement)
            session.members.connect()
            session.members.share_cores(session.facts.run.launch.threads)
            elastic.num_ranks, session.resizes = session.world.size, False
            # 3. A request and a checkpoint that were in progress are concluded.
            command = ChangeMesh.read(agreement.decision)
            session.done = command.state.step
            session.outputs.event(lost_note(agreement, command))
            if session.world.rank == 0:
                if (note := session.requests.after_loss(session.done)) is not None:
                    session.outputs.event(note)
                saving = session.place.saving
                assert saving is not None  # rank 0 is always in the mesh
                if saving.lacks_last():
                    command = replace(command, state=replace(command.state, saved_step=None), save=True)
            session.requests.current = None
            command = ChangeMesh.read(session.members.everyone.gather_objects(asdict(command))[0])
            # 4. Each survivor continues with its own copy of that state.
            session.advance(command, back_to=survival.steps.state_after(session.done))
            if isinstance(session.place, Active) and elastic.state.needs_decision and session.steps_left:
                change_if_needed(session)
            return
        except TransportError as another:  # from another loss, or from the end of the run
            error = another
