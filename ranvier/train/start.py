"""Entry of a rank into a run: with all others at its start, or later into a running run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TextIO

from ranvier.checkpoint.files import acquire_folders
from ranvier.config import rules
from ranvier.config.resolve import ResolvedRun
from ranvier.config.task_form import form_of
from ranvier.elastic.freezing import FreezePolicy, FrozenLayers
from ranvier.errors import ConfigError
from ranvier.launch.contact import NAME as CONTACT
from ranvier.launch.stop import StopRequest
from ranvier.pipeline.engine import Engine
from ranvier.plan.limits import schedule_note
from ranvier.system.atomic_file import clear_unfinished
from ranvier.train import setup
from ranvier.train.attention_kernel import choose_kernel, preferred_kernel
from ranvier.train.best import best_of
from ranvier.train.changes import change_if_needed, change_mesh
from ranvier.train.elasticity import Elasticity
from ranvier.train.events import Event, NoteEvent, StartEvent, Tracker, Trackers
from ranvier.train.experiment_trackers import experiment_trackers
from ranvier.train.guards import Guards
from ranvier.train.history import History
from ranvier.train.joining import Membership, RunFacts, invite
from ranvier.train.logs import writing
from ranvier.train.measured_limits import MeasuredLimits
from ranvier.train.memory import check_fits
from ranvier.train.metrics import Meter, peak_rate
from ranvier.train.progress import Progress
from ranvier.train.reference_log_probs import fill_reference
from ranvier.train.report_page import ReportPage
from ranvier.train.resize import Requests
from ranvier.train.runtime import build_runtime, with_frozen
from ranvier.train.saving import Saving, checkpoint_folder
from ranvier.train.session import Active, Idle, Session
from ranvier.train.trackers import console, open_outputs
from ranvier.world import World


def join(facts: RunFacts, world: World, stop: StopRequest) -> Session:
    """The session of a rank that has joined the run of `facts`: it is idle until a mesh uses it."""
    members, outputs = Membership(world), Trackers()
    members.share_cores(facts.run.launch.threads)
    world.mesh = facts.run.mesh
    elastic = Elasticity(facts.run, facts.data, tell=outputs.event)
    elastic.num_ranks = world.size
    session = Session(facts=facts, members=members, stop=stop, elastic=elastic, best=best_of(facts.run, facts.data),
                      run=facts.run, progress=Progress.begin(facts.run), place=Idle(), outputs=outputs,
                      requests=Requests(world, None))
    session.kernel.enter_context(preferred_kernel(facts.run.model.attention_kernel))
    return session


def start(run: ResolvedRun, recipe: str, world: World, trackers: Sequence[Tracker], stream: TextIO, stop: StopRequest,
          freezing: FreezePolicy | None, origins: Mapping[str, str]) -> Session:
    """The session of a run that begins, or resumes from a checkpoint. Collective over all ranks. Arguments and errors
    are those of `ranvier.train.loop.train`."""
    if world.joins is not None and freezing is not None:
        raise ConfigError("does not work with a freeze policy that is an object: ranks that join would not have it",
                          code="join-with-policy-object", where="launch.join-address", value=world.joins.address,
                          remedy="Name the policy with `--elastic.freeze module:name`.")
    members, is_first = Membership(world), world.rank == 0

    # 1. The data completes the settings; then all ranks have the same run, whose memory is compared with what is free.
    run, data, pretrained = setup.prepare_run(run, world, stream)
    named_cluster = run.launch.cluster
    given = setup.agree_on_run(run, recipe, data, members.everyone, world)
    for problem in rules.problems(given, world.size, num_blocks=None):  # which the command has found before the start
        raise problem
    for problem in () if freezing is None else rules.freezing_problems(given):
        raise problem
    world.mesh = given.mesh
    run = check_fits(given, world, members.everyone)
    members.everyone.barrier()  # every rank must have read its free memory first
    kernel, attention = choose_kernel(run, members.everyone, world.device)
    run = replace(run, model=replace(run.model, attention_kernel=kernel))
    assert run.run_dir is not None  # all ranks have agreed on it
    lease = acquire_folders([run.run_dir, checkpoint_folder(run)], members.everyone,
                            tell=lambda line: print(line, file=stream, flush=True))
    if lease is not None:  # on rank 0
        clear_unfinished(run.run_dir)

    # 2. The engine, with the state of a checkpoint if the run resumes: other layers may have been frozen there.
    runtime, outputs = build_runtime(run, world, data), Trackers()
    assert runtime is not None  # the first mesh uses all ranks

    def tell(event: Event) -> None:
        outputs.event(event)

    def engine_for(frozen: int) -> Engine:
        nonlocal runtime
        assert runtime is not None
        if 0 < frozen <= len(runtime.engine.layers):
            runtime = with_frozen(runtime, data, FrozenLayers(frozen))
        return runtime.engine

    elastic = Elasticity(run, data, tell=tell, policy=freezing)
    saving = Saving(run, recipe, runtime.engine, data, lease)
    resumed = saving.start(engine_for)
    best = best_of(run, data)
    if best is not None:
        best.load(resumed.best, is_own=resumed.continues)
        if best.step is not None and is_first and run.checkpoint.best is not None:
            saving.checkpoints.mark_best(best.step)  # the run may have been killed before it marked the best
    runtime.train_data.offset = resumed.offset
    engine, done, notes = runtime.engine, resumed.step, resumed.notes
    if best is not None and best.should_stop:
        notes.append(NoteEvent(step=done, event="early-stopping", fields=best.state(), text=(
            f"{best.reason}; no step is left. To continue, set a greater --train.early-stopping, or 0 for none")))

    # 3. Rank 0 opens the files of the run, or continues them.
    requests, history, page = Requests(world, run.run_dir if is_first else None), History(), None
    if lease is not None:
        more = experiment_trackers(run.log, run.run_dir, continues=resumed.continues)
        page = ReportPage(run, recipe, run.run_dir, history, origins, verify=lease.verify)
        opened, damaged = open_outputs(run.run_dir, history, [console(stream, run), page, *more, *trackers],
                                       after=done if resumed.continues else None)
        outputs = Trackers(opened)
        notes += [*damaged, *requests.refuse_all(done, "it was made before the run began")]
        if note := schedule_note(given, run):
            notes.append(NoteEvent(step=done, event="schedule", text=note))
    session = Session(
        facts=RunFacts(run=run, recipe=recipe, data=data, origin=saving.origin,
                       peak=peak_rate(runtime.ranks, world.device, run.precision)),
        members=members, stop=stop, elastic=elastic, best=best, run=run, progress=Progress.begin(run),
        requests=requests, done=done, outputs=outputs, history=history, page=page, lease=lease,
        place=Active(runtime=runtime, saving=saving, limits=MeasuredLimits(run),
                     guards=Guards(run.guard, engine, tell=tell, barrier=runtime.ranks.barrier),
                     meter=Meter(engine.timeline, runtime.ranks, world.device, stop, requests.are_waiting, run.mesh)))
    try:
        # 4. Initial weights, if not random: the reference is computed while adapters change nothing.
        session.kernel.enter_context(preferred_kernel(kernel))
        notes += [NoteEvent(step=0, event="pretrained", text=text) for text in setup.initial_weights(
            engine, run, pretrained, from_step=None if resumed.loaded is None else resumed.loaded.step,
            before_adapters=partial(fill_reference, runtime, data, members.everyone, resumed))]
        notes += [NoteEvent(step=done, event="data", text=f"warning: {warning}") for warning in data.warnings]
        if run.train.epochs is not None:  # the number of steps is known only now
            notes += [NoteEvent(step=done, event="settings", text=str(warning))
                      for warning in rules.length_warnings(run.train)]

        # 5. The final value of every setting is written and reported.
        run = session.run = setup.resolve_remaining(run, engine, world, saving.origin)
        if page is not None:
            page.run = run
            # Without the cluster that was found by the GPUs here: a run from this file may use others.
            session.write_settings(replace(run, launch=replace(run.launch, cluster=named_cluster)))
            if data.tokenizer is not None:
                setup.write_tokenizer(data.tokenizer, session.run_dir)
        outputs.event(StartEvent(
            recipe=recipe, run_dir=session.run_dir, mesh=run.mesh, steps=run.train.steps,
            settings=setup.settings_text(run, engine, world, data, elastic.text())
            | ({"attention": attention} if attention else {}),
            stages=str(engine.stages), unit=form_of(run.data).targets))
        for event in notes:
            outputs.event(event)

        # 6. The clock starts. A run that resumes returns to its layers and its mesh, where some ranks are idle.
        session.active.meter.resume()
        if resumed.elastic:
            session.progress = session.progress.restore(resumed.elastic)
            change = elastic.restore(resumed.elastic, done, session.progress, runtime)
            if change is not None:
                change_mesh(session, change)
        if isinstance(place := session.place, Active):
            elastic.begin(done, place.engine, place.runtime.frozen)
            if elastic.state.needs_decision and session.steps_left:
                change_if_needed(session)
        if is_first and world.joins is not None:
            with writing(session.run_dir / CONTACT):
                invite(world, session.facts)
        return session
    except BaseException:
        session.close()
        raise
